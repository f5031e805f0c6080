"""The schema of a `run.toml`: pure dataclasses, and the checks of their values."""
