"""Errors, units, files and processes, on which everything else stands."""
