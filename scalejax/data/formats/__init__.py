"""Data sets in files, a module for each kind: what a `run.toml` says of one, and what it holds.

They read names, headers and, where these do not say it, numbers; no examples.
"""
