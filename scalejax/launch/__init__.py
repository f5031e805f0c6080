"""Processes of one run, started, watched, and started again when some are lost."""

from scalejax.launch.local import LOST, Launch, launch

__all__ = ["LOST", "Launch", "launch"]
