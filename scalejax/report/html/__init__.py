"""The report as one page that needs nothing from outside."""
