"""Launchers of the processes of one run: start and watch them, restart when some are lost."""

from scalejax.launch.local import Launch, launch
from scalejax.launch.runner import ProcessesFailed, Runner

__all__ = ["Launch", "ProcessesFailed", "Runner", "launch"]
