"""Which rows of the ledger of 2026 are runs, and which are predicted: in closed form or compiled.

    python experiments/ledger_2026/coverage.py ../shared/ledger/2026
    python experiments/ledger_2026/coverage.py ../shared/ledger/2026 --compile 1 --seed 0

Prints, of the rows of each file by kind, how many the closed form predicts, how many of the others
were compiled (compiled.json here), and why others are no runs. With --compile it first compiles
and predicts rows that the closed form does not know, each in a process of its own, and writes what
each took. Programs are kept in the user's cache, and rows in compiled.json: a command that was
stopped goes on where it was.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scalejax.core.errors import ConfigError
from scalejax.validation import (
    LedgerRow,
    RowResult,
    case_of,
    compile_cases,
    evaluate,
    read_ledger,
    validation,
)
from scalejax.xla.archive import Archive

COMPILED = Path(__file__).parent / "compiled.json"


def ledgers(folder: Path) -> dict[str, list[LedgerRow]]:
    """The rows of each file in the format of step_times.csv that has some which state their
    layout, by name."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        try:
            rows = read_ledger(path)
        except ConfigError:
            continue  # another kind of table
        if any(row.states_layout for row in rows):
            found[path.stem] = rows
    return found


def in_closed_form(rows: list[LedgerRow]) -> list[RowResult]:
    """The result of each row, of which none is compiled."""
    return evaluate(compile_cases(rows, archive=Archive({}), compiles=False, closed_form=True))


def to_compile(results: list[RowResult]) -> dict[str, list[int]]:
    """Places of the rows of each kind that state their layout, are runs, and are not known in
    closed form."""
    found: dict[str, list[int]] = defaultdict(list)
    for index, each in enumerate(results):
        if each.kind and each.states_layout and each.is_mapped and not each.is_closed_form:
            found[each.kind].append(index)
    return dict(found)


def sampled(places: list[int], count: int | None, seed: int) -> list[int]:
    """`count` of the places, drawn with a seed; all of them in order if None."""
    if count is None:
        return places
    return random.Random(seed).sample(places, min(count, len(places)))


def coverage(
    rows: dict[str, list[LedgerRow]],
    found: dict[str, list[RowResult]],
    compiled: dict[tuple[str, int], Any],
) -> None:
    """Print the table, and why rows that state their layout are no runs.

    Args:
        rows: the rows of each file.
        found: their results in closed form.
        compiled: results of others, by file and place.
    """
    print(
        "| file | kind | rows | stating | runs | nearest | in closed form | compiled "
        "| not compiled yet | failed | error |"
    )
    print("|---|---|" + "---:|" * 9)
    reasons = []
    for name, results in found.items():
        missing = to_compile(results)
        for each in validation(name, [case_of(row) for row in rows[name]]).kinds:
            if not each.stating:
                continue
            reasons += [(name, each.kind, count, why) for why, _, count in each.skipped if count]
            done = [
                compiled[name, index]
                for index in missing.get(each.kind, [])
                if (name, index) in compiled
            ]
            good = [row for row in done if row["status"] == "ok"]
            left = len(missing.get(each.kind, [])) - len(done)
            errors = [
                result.error
                for result in results
                if result.kind == each.kind and result.states_layout and result.error is not None
            ] + [row["error"] for row in good if row["error"] is not None]
            error = f"{statistics.median(errors):+.0%}" if errors else ""
            share = f"{each.mapped} ({each.mapped / each.stating:.1%})"
            counts = f"{each.rows} | {each.stating} | {share} | {each.nearest}"
            known = sum(
                result.kind == each.kind and result.states_layout and result.is_closed_form
                for result in results
            )
            counts += f" | {known} | {len(good)} | {left} | {len(done) - len(good)}"
            print(f"| `{name}` | {each.kind} | {counts} | {error} |")
    print("\nRows that state their layout and are no runs:\n")
    for name, kind, count, why in reasons:
        print(f"- `{name}`, {count} {kind}: {why}")


def predicted(path: Path, index: int) -> dict[str, Any]:
    """The result of the row at `index`, and the seconds of wall and processor that it took to
    compile and predict it in a process of its own."""
    words = [sys.executable, __file__, str(path), "--row", str(index)]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wall = time.perf_counter() - started
    times = {"wall_seconds": round(wall), "processor_seconds": round(processor)}
    return {"file": path.stem, "row": index, **json.loads(answer), **times}


def row_result(path: Path, index: int) -> dict[str, object]:
    """The result of a row, in this process."""
    (result,) = evaluate(compile_cases([read_ledger(path)[index]]))
    return {**asdict(result), "error": result.error}


def main() -> None:
    """Compile what is asked for, and print the coverage."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="the ledger of 2026")
    parser.add_argument(
        "--compile", nargs="?", type=int, const=-1, metavar="N",
        help="compile N rows of each file and kind that the closed form does not know, or all",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="which, if not all")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.row is not None:
        print(json.dumps(row_result(flags.folder, flags.row)))
        return
    rows = ledgers(flags.folder)
    found = {name: in_closed_form(members) for name, members in rows.items()}
    kept = json.loads(COMPILED.read_text()) if COMPILED.is_file() else []
    compiled = {(each["file"], each["row"]): each for each in kept}
    count = None if flags.compile == -1 else flags.compile
    for name, results in found.items() if flags.compile is not None else ():
        for places in to_compile(results).values():
            for index in sampled(places, count, flags.seed):
                if (name, index) not in compiled:
                    new = compiled[name, index] = predicted(flags.folder / f"{name}.csv", index)
                    COMPILED.write_text(json.dumps(list(compiled.values()), indent=1) + "\n")
                    times = f"{new['processor_seconds']} s of processor, {new['wall_seconds']} s"
                    print(f"{name} {new['case_id']}: {new['status']}, {times}", flush=True)
    coverage(rows, found, compiled)


if __name__ == "__main__":
    main()
