"""Which rows of the ledger of 2026 are runs, and a sample of them predicted.

    python experiments/ledger_2026/coverage.py ../shared/ledger/2026 --sample 12

Prints the rows of each file by kind, and what of them is expressed; with --closed-form also what
the closed form predicts. Then it compiles and predicts a seeded sample of rows with experts, taken
from the files in turn, and writes what each took to sample.json here.
Programs are kept in the user's cache: a command that was stopped goes on where it was.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path

from scalejax.core.errors import ConfigError
from scalejax.validation import (
    Case,
    LedgerRow,
    RowResult,
    case_of,
    compile_cases,
    evaluate,
    read_ledger,
    validation,
)
from scalejax.validation.archive import Archive

SAMPLE = Path(__file__).parent / "sample.json"


def ledgers(folder: Path) -> dict[str, list[LedgerRow]]:
    """The rows of each file in the format of step_times.csv, by name."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        try:
            found[path.stem] = read_ledger(path)
        except ConfigError:
            continue  # another kind of table
    return found


def sampled(rows: dict[str, list[LedgerRow]], count: int, seed: int) -> list[tuple[str, int]]:
    """File and place of `count` rows with experts that are runs, from the files in turn."""
    shuffle = random.Random(seed).shuffle
    parts = []
    for name, members in rows.items():
        wanted = [
            (name, index)
            for index, row in enumerate(members)
            if row.kind == "expert" and row.states_layout and isinstance(case_of(row), Case)
        ]
        shuffle(wanted)
        parts.append(wanted)
    return [each for each in chain(*zip_longest(*parts)) if each is not None][:count]


def coverage(rows: dict[str, list[LedgerRow]], *, closed_form: bool) -> None:
    """Print the rows of each file by kind, and the reasons of those that are no runs; with the
    closed form, how many it predicts, and the median of their errors."""
    print("| file | kind | rows | stating | runs | nearest | in closed form | error |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    reasons = []
    for name, members in rows.items():
        if not any(row.states_layout for row in members):
            continue
        cases = [case_of(row) for row in members]
        results = in_closed_form(members) if closed_form else []
        for each in validation(name, cases).kinds:
            if not each.stating:
                continue
            errors = [
                result.error
                for result in results
                if result.kind == each.kind and result.states_layout and result.error is not None
            ]
            found = f"{len(errors)} | {statistics.median(errors):+.0%}" if errors else "0 |"
            share = f"{each.mapped} ({each.mapped / each.stating:.1%})"
            counts = f"{each.rows} | {each.stating} | {share} | {each.nearest}"
            print(f"| `{name}` | {each.kind} | {counts} | {found} |")
            reasons += [(name, each.kind, n, why) for why, _, n in each.skipped if n]
    print("\nRows that state their layout and are no runs:\n")
    for name, kind, count, why in reasons:
        print(f"- `{name}`, {count} {kind}: {why}")


def in_closed_form(rows: list[LedgerRow]) -> list[RowResult]:
    """The results of rows that the closed form predicts; of others none."""
    cases = compile_cases(rows, archive=Archive({}), compiles=False, closed_form=True)
    return [result for result in evaluate(cases) if result.is_closed_form]


def predicted(path: Path, index: int) -> dict[str, object]:
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
    row = read_ledger(path)[index]
    (result,) = evaluate(compile_cases([row]))
    closed = [each.predicted_seconds for each in in_closed_form([row])]
    own = {"error": result.error, "closed_form_seconds": closed[0] if closed else None}
    return {**asdict(result), **own}


def main() -> None:
    """Print the coverage, and predict the sample."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="the ledger of 2026")
    parser.add_argument("--sample", type=int, default=0, help="rows with experts to predict")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--closed-form", action="store_true", help="predict what it knows")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.row is not None:
        print(json.dumps(row_result(flags.folder, flags.row)))
        return
    rows = ledgers(flags.folder)
    coverage(rows, closed_form=flags.closed_form)
    kept = json.loads(SAMPLE.read_text()) if SAMPLE.is_file() else []
    known = {(each["file"], each["row"]): each for each in kept}
    for name, index in sampled(rows, flags.sample, flags.seed):
        if (name, index) not in known:
            known[name, index] = predicted(flags.folder / f"{name}.csv", index)
            SAMPLE.write_text(json.dumps(list(known.values()), indent=1) + "\n")
        found = known[name, index]
        error = "" if found["error"] is None else f"{found['error']:+.0%}, "
        times = f"{found['processor_seconds']} s of processor, {found['wall_seconds']} s"
        print(f"{name} {found['case_id']}: {found['status']}, {error}{times}", flush=True)


if __name__ == "__main__":
    main()
