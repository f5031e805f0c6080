"""Data sets as examples by index: files, tables, arrays and generated ones."""
