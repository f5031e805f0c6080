"""Faults that `test_launch` has not, by the code of the campaign in experiments/faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "experiments" / "faults" / "campaign.py"

pytestmark = [
    pytest.mark.slow,  # every fault is followed by a start of two processes
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the campaign reads /proc"),
]


def test_runs_outlive_a_full_disk_and_a_launcher_that_hangs(tmp_path):
    """By the second nothing comes to pass. Each is noticed in the stated time, leaves nothing
    behind, and changes no bit.

    `test_launch` kills a process and the launcher, stops one, and asks all to stop;
    `test_checkpoint` has torn checkpoints, `test_power_cuts` real ones, `test_watchdog` what
    follows them; the campaign (`experiments/faults`) has all kinds at all moments.
    """
    kinds = ("hang launcher", "full disk")
    results = tmp_path / "results.json"
    flags = ("--faults", "2", "--epochs", "4", "--together", "1", "--results", results)
    done = subprocess.run(
        [sys.executable, CAMPAIGN, *flags, "--kinds", *kinds],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in this process
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )

    assert done.returncode == 0, done.stdout
    found = {fault["kind"] for fault in json.loads(results.read_text())["faults"]}
    assert "hang launcher" in found, done.stdout  # a disk may lack
