"""Runs the tests that hold optimizers against their papers, and prints how far off each was."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("test_optimizers.py", "test_optimizers_of_today.py")


def main() -> int:
    """Run, print a table, and write results.json beside this file."""
    files = [str(ROOT / "tests/training" / name) for name in FILES]
    if code := pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *files]):
        return int(code)
    from optimizer_distances import NOTED  # on the path of the tests

    rows: dict[str, dict[str, float]] = {}
    for (name, against), distance in sorted(NOTED.items()):
        rows.setdefault(name, {})[against] = float(f"{distance:.1e}")
    found = {"versions": {each: version(each) for each in ("jax", "optax", "numpy")}, "far": rows}
    (HERE / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{'optimizer':24}{'NumPy':>10}{'Optax':>10}")
    for name, row in rows.items():
        cells = [f"{row[each]:.1e}" if each in row else "" for each in ("NumPy", "Optax")]
        print(f"{name:24}{cells[0]:>10}{cells[1]:>10}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
