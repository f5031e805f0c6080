"""One fault of each kind, by the code of the campaign in experiments/faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CAMPAIGN = ROOT / "experiments" / "faults" / "campaign.py"

pytestmark = [
    pytest.mark.slow,  # every fault is followed by a start of two processes
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the campaign reads /proc"),
]


def test_runs_outlive_one_fault_of_each_kind(tmp_path):
    """Each is noticed in the stated time, leaves nothing behind, and changes no bit."""
    results = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, CAMPAIGN, "--faults", "9", "--together", "3", "--results", results],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )

    assert done.returncode == 0, done.stdout
    faults = json.loads(results.read_text())["faults"]
    assert len({fault["kind"] for fault in faults}) >= 7, done.stdout  # a disk and a clock may lack
