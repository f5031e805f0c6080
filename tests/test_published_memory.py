"""Peak memory of steps that were published with theirs."""

import runpy
from pathlib import Path

import pytest

COMPARE = Path(__file__).parents[1] / "experiments" / "published_memory" / "compare.py"
LEDGER = Path(__file__).parents[2] / "shared" / "ledger" / "step_times.csv"


@pytest.mark.skipif(
    not LEDGER.is_file(), reason="../shared/ledger, beside the repository, is not here"
)
def test_llama_8b_on_one_node_takes_the_memory_that_was_published():
    """Within 10 %: 82.4 GiB eager, 77.0 compiled, 76.8 in float8; the same step is predicted for
    all three. The other published rows, farther off, are in the README of the experiment."""
    rows = list(runpy.run_path(str(COMPARE))["compared"]())

    on_one_node = {
        row.run.case_id: row.error
        for row in rows
        if row.run.device_count == 8 and row.run.work.recompute == "selective"
    }
    assert len(rows) == 11
    assert len(on_one_node) == 3
    assert all(abs(error) < 0.1 for error in on_one_node.values()), on_one_node
