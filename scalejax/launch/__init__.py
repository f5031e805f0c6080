"""Processes of one run, started, watched, and started again when some are lost."""

from scalejax.launch.local import LOST, Launch, launch
from scalejax.launch.runner import ProcessesFailed, Runner

__all__ = ["LOST", "Launch", "ProcessesFailed", "Runner", "launch"]
