"""Fuzzes every command that reads files: no traceback, no hang, exit code 2, the field by name.

    python experiments/fuzzing/fuzz.py --json /tmp/outcomes.jsonl

runs 10,000 configs and 1,000 files, some of them as processes of their own, and prints how many
were refused, by what name, and every deviation. Stopped, the same command goes on. `--only
KIND:NUMBER` runs one case again.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import sys
import tempfile
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
import launches  # noqa: E402
import material  # noqa: E402
import written  # noqa: E402

import scalejax  # noqa: E402

KINDS = {**damage.KINDS, **written.KINDS, **launches.KINDS}
SHARES = {
    "record": 30, "sweep": 30, "prediction": 50, "hardware": 150, "ledger": 150, "data": 60,
    "convergence": 30, "rates": 25, "cache": 10, "checkpoint": 10, "manifest": 10, "trace": 30,
    "program": 70, "facts": 25, "bench": 12, "events": 3, "accuracy": 15, "grammar": 80,
    "launch": 80,
}  # fmt: skip
"""Parts of all files; those that train, checkpoints, manifests and events, are slow."""


def main() -> int:
    """Run what is asked for; 1 if there was a deviation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--configs", type=int, default=10_000)
    parser.add_argument("--apart", type=int, default=300, help="configs in processes of their own")
    parser.add_argument("--files", type=int, default=1_000)
    parser.add_argument("--kinds", help="of files, such as trace,program; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", metavar="KIND:NUMBER")
    parser.add_argument("--results", type=Path, help="file of the counts by kind")
    parser.add_argument("--material", type=Path, help="folder of what is damaged, kept; else made")
    parser.add_argument("--json", type=Path, help="file of outcomes, with which it goes on")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzzing-") as name:
        os.environ["SCALEJAX_CACHE"] = name + "/cache"
        os.environ["XDG_CACHE_HOME"] = name + "/xdg"
        # Cases that train compile the same step each.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = name + "/compiled"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        compiler.install()
        material_folder = asked.material or Path(name) / "material"
        make = maker(asked.seed, material_folder.absolute())
        if asked.only:
            if not asked.only.startswith("config:"):
                prepare(material_folder, [asked.only.split(":")[0]])
            kind, number = asked.only.split(":")
            outcome = campaign.run_case(make, kind, int(number))
            print(outcome.verdict, f"{outcome.seconds:.1f} s", outcome.argv, outcome.said, sep="\n")
            return 0
        if asked.files:
            prepare(material_folder, asked.kinds.split(",") if asked.kinds else list(SHARES))
        first = asked.start
        here = [("config", k) for k in range(first, first + asked.configs - asked.apart)]
        apart = [("config", first + asked.configs - 1 - k) for k in range(asked.apart)]
        parts = shares(asked.files, asked.kinds)
        mixed = sorted(((k + 0.5) / n, kind, k) for kind, n in parts for k in range(n))
        files = [(kind, asked.start + k) for _, kind, k in mixed]
        kept = Kept(asked.json, asked.seed)
        outcomes = [*run(make, files, kept), *run(make, here, kept)]
        outcomes += run(make, apart, kept, apart=True)
        return report(outcomes, asked.seed, asked.results)


def maker(seed: int, folder: Path) -> campaign.Make:
    """What makes each case, from material that is kept in `folder`."""

    def make(kind: str, number: int, into: Path) -> campaign.Case:
        if kind == "config":
            return configs.config_case(number, into, seed)
        draw = random.Random(f"{seed} {kind} {number}")
        return KINDS[kind](draw, into, folder)

    return make


def shares(count: int, kinds: str | None = None) -> list[tuple[str, int]]:
    """How many cases of each kind make up `count` files."""
    if not count:
        return []
    asked = {kind: SHARES[kind] for kind in (kinds.split(",") if kinds else SHARES)}
    whole = sum(asked.values())
    parts = {kind: max(1, count * share // whole) for kind, share in asked.items()}
    largest = max(parts, key=parts.__getitem__)
    parts[largest] = max(1, parts[largest] + count - sum(parts.values()))  # what rounding left
    return list(parts.items())


def prepare(folder: Path, kinds: list[str]) -> None:
    """Make what is damaged, in a process of its own: this one must not start JAX."""
    needed = [
        "went_on.json",
        *(material.FOLDERS[kind] for kind in kinds if kind in material.FOLDERS),
    ]
    if all((folder / name).exists() for name in needed):  # the first is made last
        return
    material.write_all(folder, kinds)
    process = os.fork()
    if process == 0:
        written.make_in_this_process(folder)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        raise RuntimeError("what is damaged was not made")


class Kept:
    """Outcomes in a file, a line of JSON each: those of the same seed and code are not had anew."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path = path
        digest = hashlib.sha256()
        for folder in (Path(scalejax.__file__).parent, Path(__file__).parent):
            for file in sorted(folder.rglob("*.py")):
                digest.update(file.read_bytes())
        self._of = {"seed": seed, "code": digest.hexdigest()[:16]}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        read = [json.loads(line) for line in lines]
        self.outcomes = {
            (line["outcome"]["kind"], line["outcome"]["number"]): campaign.Outcome(
                **line["outcome"]
            )
            for line in read
            if line["of"] == self._of
        }

    def add(self, outcome: campaign.Outcome) -> None:
        """Keep one more."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"of": self._of, "outcome": asdict(outcome)}) + "\n")


def run(
    make: campaign.Make, cases: list[tuple[str, int]], kept: Kept, *, apart: bool = False
) -> list[campaign.Outcome]:
    """The outcomes of `cases`, each kept as soon as it is there."""
    import jax  # noqa: F401  once, and not in every process
    from rich.console import Console
    from rich.progress import track

    before = [kept.outcomes[case] for case in cases if case in kept.outcomes]
    cases = [case for case in cases if case not in kept.outcomes]
    what = "processes of their own" if apart else "cases"
    shown = track(range(len(cases) + 1), description=what, console=Console(stderr=True))
    done = iter(shown)

    def tell(outcome: campaign.Outcome) -> None:
        next(done, None)
        kept.add(outcome)

    return before + campaign.run_cases(make, cases, apart=apart, on_done=tell)


def report(outcomes: list[campaign.Outcome], seed: int, path: Path | None) -> int:
    """Print the figures, and write them to `path`; 1 if there was a deviation."""
    names = ("accepted", "refused by field", "refused by file")
    kinds = {}
    for kind in sorted({each.kind for each in outcomes}):
        of_kind = [each for each in outcomes if each.kind == kind]
        verdicts = Counter(each.verdict for each in of_kind)
        counts = {name: verdicts[name] for name in names}
        kinds[kind] = {"cases": len(of_kind), **counts}
        kinds[kind]["deviations"] = len(of_kind) - sum(counts.values())
    print(
        f"{'kind':12}{'cases':>7}{'accepted':>10}{'by field':>10}{'by file':>9}{'deviations':>12}"
    )
    for kind, counts in kinds.items():
        known = [counts[name] for name in names]
        print(
            f"{kind:12}{counts['cases']:7,}{known[0]:10,}{known[1]:10,}{known[2]:9,}"
            f"{counts['deviations']:12,}"
        )
    slow = max(outcomes, key=lambda each: each.seconds)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(
        f"{len(outcomes):,} cases, {sum(each.seconds for each in outcomes):,.0f} s together; "
        f"slowest {slow.kind}:{slow.number}, {slow.seconds:.1f} s; largest process {peak:.2f} GiB"
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
    if path is not None:
        whole = {"seed": seed, "cases": len(outcomes), "deviations": len(wrong), "kinds": kinds}
        path.write_text(json.dumps(whole, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
