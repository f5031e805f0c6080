"""Launchers of the processes of one run: start, watch, restart when some are lost."""

from scalejax.launch.local import LOST, Launch, launch
from scalejax.launch.runner import ProcessesFailed, Runner

__all__ = ["LOST", "Launch", "ProcessesFailed", "Runner", "launch"]
