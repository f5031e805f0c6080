"""Fuzzes every command that reads files: no traceback, no hang, exit code 2, the field by name.

    python experiments/fuzzing/fuzz.py

runs 10,000 configs and 1,000 files, some of them as processes of their own, and prints how many
were refused, by what name, and every deviation. `--only KIND:NUMBER` runs one case again.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "COLUMNS": "20000"}
os.environ.setdefault("MPLBACKEND", "agg")

import campaign  # noqa: E402  the environment comes before JAX
import compiler  # noqa: E402
import configs  # noqa: E402
import damage  # noqa: E402
import material  # noqa: E402

SHARES = {
    "record": 120, "sweep": 50, "prediction": 60, "hardware": 250, "ledger": 200, "data": 240,
    "convergence": 60, "rates": 40, "cache": 20, "checkpoint": 120,
}  # fmt: skip
"""Of 1,160 files."""


def main() -> int:
    """Run what is asked for; 1 if there was a deviation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--configs", type=int, default=10_000)
    parser.add_argument("--apart", type=int, default=300, help="configs in processes of their own")
    parser.add_argument("--files", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", metavar="KIND:NUMBER")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzzing-") as name:
        os.environ["SCALEJAX_CACHE"] = name + "/cache"
        os.environ["XDG_CACHE_HOME"] = name + "/xdg"
        compiler.install()
        make = maker(asked.seed, Path(name))
        if asked.only:
            if not asked.only.startswith("config:"):
                prepare(Path(name) / "material")
            kind, number = asked.only.split(":")
            outcome = campaign.run_case(make, kind, int(number))
            print(outcome.verdict, f"{outcome.seconds:.1f} s", outcome.argv, outcome.said, sep="\n")
            return 0
        if asked.files:
            prepare(Path(name) / "material")
        first = asked.start
        here = [("config", k) for k in range(first, first + asked.configs - asked.apart)]
        apart = [("config", first + asked.configs - 1 - k) for k in range(asked.apart)]
        files = [(kind, asked.start + k) for kind, n in shares(asked.files) for k in range(n)]
        start = time.monotonic()
        outcomes = [
            *run(make, files, asked.json),
            *run(make, here, asked.json),
            *run(make, apart, asked.json, apart=True),
        ]
        return report(outcomes, time.monotonic() - start)


def maker(seed: int, folder: Path) -> campaign.Make:
    """What makes each case, from material that is kept in `folder`."""

    files = damage.Files(folder / "material", seed)

    def make(kind: str, number: int, into: Path) -> campaign.Case:
        if kind == "config":
            return configs.config_case(number, into, seed)
        return files.case(kind, number, into)

    return make


def shares(count: int) -> list[tuple[str, int]]:
    """How many cases of each kind make up `count` files."""
    if not count:
        return []
    whole = sum(SHARES.values())
    parts = {kind: max(1, count * share // whole) for kind, share in SHARES.items()}
    largest = max(parts, key=parts.__getitem__)
    parts[largest] = max(1, parts[largest] + count - sum(parts.values()))  # what rounding left
    return list(parts.items())


def prepare(folder: Path) -> None:
    """Make what is damaged, in a process of its own: this one must not start JAX."""
    material.write_all(folder)
    process = os.fork()
    if process == 0:
        damage.make_predictions(folder)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        raise RuntimeError("no predictions were made")


def run(
    make: campaign.Make,
    cases: list[tuple[str, int]],
    path: Path | None = None,
    *,
    apart: bool = False,
) -> list[campaign.Outcome]:
    """The outcomes of `cases`, each a line of JSON at `path` as soon as it is there."""
    import jax  # noqa: F401  once, and not in every process
    from rich.console import Console
    from rich.progress import track

    what = "processes of their own" if apart else "cases"
    shown = track(range(len(cases) + 1), description=what, console=Console(stderr=True))
    done = iter(shown)

    def tell(outcome: campaign.Outcome) -> None:
        next(done, None)
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    return campaign.run_cases(make, cases, apart=apart, on_done=tell)


def report(outcomes: list[campaign.Outcome], seconds: float) -> int:
    """Print the figures; 1 if there was a deviation."""
    print(
        f"{'kind':12}{'cases':>7}{'accepted':>10}{'by field':>10}{'by file':>9}{'deviations':>12}"
    )
    for kind in dict.fromkeys(each.kind for each in outcomes):
        of_kind = [each for each in outcomes if each.kind == kind]
        verdicts = Counter(each.verdict for each in of_kind)
        known = [verdicts[v] for v in ("accepted", "refused by field", "refused by file")]
        rest = len(of_kind) - sum(known)
        print(f"{kind:12}{len(of_kind):7,}{known[0]:10,}{known[1]:10,}{known[2]:9,}{rest:12,}")
    slow = max(outcomes, key=lambda each: each.seconds)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(
        f"{len(outcomes):,} cases in {seconds:.0f} s; slowest {slow.kind}:{slow.number}, "
        f"{slow.seconds:.1f} s; largest process {peak:.2f} GiB"
    )
    wrong = [each for each in outcomes if each.is_deviation]
    shown: Counter[tuple[str, str]] = Counter()
    for each in wrong:
        last = (each.said.strip().splitlines() or [""])[-1][:200]
        sort = each.verdict, last[:60]
        shown[sort] += 1
        if shown[sort] <= 2:
            print(f"  {each.kind}:{each.number} {each.verdict}: {' '.join(each.argv)[:160]}")
            print(f"      {last}")
    print(f"{len(wrong)} deviations, {len(shown)} sorts")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
