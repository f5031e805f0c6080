"""The HTML report: one self-contained page of tables and charts."""
