"""What the tests of validation share."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_cases import row_of

from scalejax.validation import LedgerRow


@pytest.fixture
def row(tmp_path: Path) -> Callable[[dict[str, str]], LedgerRow]:
    """Reads one row from its cells."""
    return lambda cells: row_of(tmp_path, cells)
