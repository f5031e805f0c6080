"""A run outlives power cuts, by the code of the campaign in experiments/power_cuts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "experiments" / "power_cuts" / "run.py"
CAN_MOUNT = sys.platform.startswith("linux") and os.geteuid() == 0 and shutil.which("mkfs.xfs")

pytestmark = [
    pytest.mark.slow,  # a run is trained and resumed four times, in a process of its own
    pytest.mark.skipif(not CAN_MOUNT, reason="mounts images: needs root and xfsprogs"),
]


def test_a_run_goes_on_after_power_cuts_and_ends_with_the_same_bits(tmp_path):
    """By --resume alone, whatever of it had not reached the disk; the campaign has made 340."""
    results = tmp_path / "results.json"
    flags = ["--cuts", "3", "--epochs", "4", "--filesystems", "ext4", "--results", str(results)]
    done = subprocess.run(
        [sys.executable, CAMPAIGN, *flags],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in this process
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )

    assert done.returncode == 0, done.stdout
    cuts = json.loads(results.read_text())["cuts"]
    assert len(cuts) == 3
    assert all(cut["deviation"] is None for cut in cuts), done.stdout
