"""Data sets in files, one module per kind: what a `run.toml` says of them, and what they hold.

The modules read names, headers and, if these do not suffice, numbers; no examples.
"""
