"""Does a run end as if nothing had happened, whatever happens to it?

Runs of two processes are hit by seeded random faults, several each, until they are done. Each must
end with the record and the weights of the run that was left alone, bit for bit, or stop with the
message that names the process or the file; be noticed in the stated time; and leave no process and
no open port. Nonzero exit if anything deviates.

    python experiments/faults/campaign.py --faults 200 --seed 0 [--first 0] [--together 2]
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from injection import (
    ACTIONS,
    BOUNDS,
    Fault,
    draw,
    fill_disk,
    jump_clock,
    resume_torn,
    tear,
    wait_for_moment,
)
from launched import Launched
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scalejax.config.run import load_config, resolve
from scalejax.training.checkpoint import load_weights
from scalejax.training.mesh import build_mesh
from scalejax.training.record import (
    EvaluationMeasurement,
    RunFolder,
    RunRecord,
    TrainMeasurement,
    ValidationMeasurement,
)
from scalejax.training.step import build_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
RUN_FILE = HERE / "run.toml"
FAULTS_OF_A_RUN = 10
SECONDS_TO_VANISH = 5.0
SECONDS_OF_A_RUN = 900.0
DISK_BYTES = 64 * 2**20


class Campaign:
    """The runs, in a folder of their own that is gone at the end."""

    def __init__(self, seed: int, place: Path, wanted: list[str], epochs: int) -> None:
        self._seed = seed
        self._epochs = epochs
        self._place = place
        self._stop = threading.Event()
        self._open: set[Launched] = set()
        self._mounts: list[Path] = []
        self._clock = _shifted_clock(place)
        self._can_mount = os.geteuid() == 0 and shutil.which("mount") is not None
        lacking = {"clock": self._clock is None, "full disk": not self._can_mount}
        self.kinds = tuple(kind for kind in wanted if not lacking.get(kind))
        self._undisturbed: tuple[Any, ...] = ()
        self._runs = 0
        self.done: list[Fault] = []
        """Those of runs that have ended."""

    def prepare(self) -> None:
        """Make the run that nothing happens to; it fills the cache of compiled programs."""
        folder = self._place / "undisturbed"
        launched = self._start(folder, self._place / "offset")
        code = self._finished(launched)
        if code:
            raise SystemExit(f"the undisturbed run failed ({code}): {launched.said[-2000:]}")
        self._undisturbed = outcome(folder)

    def run(self, number: int, indices: range, told: "Callable[[Fault], None]") -> None:
        """The faults of `indices`, in one run, or in more where one is over before."""
        rng = random.Random(f"{self._seed}/{number}")
        waiting = [draw(index, rng, self.kinds) for index in indices]
        while waiting and not self._stop.is_set():
            hit = self._run(f"{number}-{self._runs}", waiting, rng, told)
            waiting = waiting[len(hit) :]

    def _run(
        self,
        name: str,
        waiting: list[Fault],
        rng: random.Random,
        told: "Callable[[Fault], None]",
    ) -> list[Fault]:
        """Those of `waiting` that one run was hit by, until it was over."""
        self._runs += 1
        hit, disk = [], self._disk(name)
        folder, offset = disk / "run", self._place / f"offset-{name}"
        launched = self._start(folder, offset)
        for fault in waiting:
            launched, is_hit = self._hit(fault, launched, folder, disk, offset, rng)
            if not is_hit or self._stop.is_set():
                break
            hit.append(fault)
            told(fault)
        code = self._finished(launched)
        if hit and not self._stop.is_set():
            self._looked_after(launched, hit[-1])
            if code:
                hit[-1].deviations.append(f"ended with exit code {code}: {launched.said[-1500:]}")
            elif (differs := difference(outcome(folder), self._undisturbed)) is not None:
                hit[-1].deviations.append(f"the run ended otherwise: {differs}")
            if hit[-1].deviations:
                told(hit[-1])
            self.done += hit
        return hit

    def _hit(
        self,
        fault: Fault,
        launched: Launched,
        folder: Path,
        disk: Path,
        offset: Path,
        rng: random.Random,
    ) -> tuple[Launched, bool]:
        """Bring about one fault; what goes on with the run then, and whether it was hit."""
        checkpoints = folder / "checkpoints"
        if fault.kind == "torn":
            fault.moment = "training"
        if not wait_for_moment(fault, launched, checkpoints, rng):
            return launched, False
        if fault.kind == "torn":
            launched.kill()
            self._looked_after(launched, fault)
            torn = tear(fault, checkpoints, rng)
            launched = self._start(folder, offset)
            if torn is None:
                return launched, False
            if resume_torn(fault, launched, torn):
                self._looked_after(launched, fault)
                launched = self._start(folder, offset, "--start-over")  # as it says
            return launched, True
        if fault.kind == "full disk":
            fill_disk(fault, launched, disk)
        elif fault.kind == "clock":
            jump_clock(fault, launched, offset)
        else:
            ACTIONS[fault.kind](fault, launched)
        if fault.seconds is not None and fault.seconds > BOUNDS[fault.kind]:
            fault.deviations.append(f"noticed after {fault.seconds:.1f} s")
        if launched.process.poll() is None:
            return launched, True
        self._looked_after(launched, fault)
        return self._start(folder, offset), True

    def _start(self, folder: Path, offset: Path, *more: str) -> Launched:
        offset.write_bytes(bytes(8))
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self._place / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *_python_path()]),
        }
        if self._clock is not None:
            environment |= {
                "LD_PRELOAD": str(self._clock),
                "SCALEJAX_CLOCK_OFFSET": str(offset),
            }
        arguments = ["--np=-2", str(RUN_FILE), "--folder", str(folder), "--max-restarts", "1000"]
        arguments.append(f"--train.epochs={self._epochs}")
        if RunFolder(path=folder).holds_run:
            arguments += ["--resume", *more]
        launched = Launched(arguments, environment, folder)
        self._open.add(launched)
        return launched

    def _finished(self, launched: Launched) -> int | None:
        """The exit code of a launch that is left alone from here on."""
        launched.ends(launched.begin, SECONDS_OF_A_RUN)
        if launched.process.poll() is None:
            launched.kill()
        return launched.process.poll()

    def _looked_after(self, launched: Launched, fault: Fault) -> None:
        """Put down what is left of a launch that has ended, and end it."""
        left = launched.left_behind(SECONDS_TO_VANISH)
        if left:
            fault.deviations.append(f"left behind: {', '.join(left)}")
        launched.kill()
        self._open.discard(launched)

    def _disk(self, name: str) -> Path:
        """A small disk, that can be filled; a mere folder where none may be mounted."""
        path = self._place / f"disk-{name}"
        path.mkdir()
        if self._can_mount:
            size = ["-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
            subprocess.run(["mount", "-t", "tmpfs", *size], check=True)
            self._mounts.append(path)
        return path

    def close(self) -> None:
        """Leave nothing: no process, no mount."""
        self._stop.set()
        for launched in tuple(self._open):
            launched.kill()
        while self._mounts:
            path = self._mounts.pop()
            subprocess.run(["umount", "--lazy", str(path)], check=False)


def _python_path() -> list[str]:
    return [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]


def _shifted_clock(place: Path) -> Path | None:
    """The library that gives a process another wall clock; None where none can be compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = place / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "clock.c")]
    return library if subprocess.run([*command, "-ldl"], check=False).returncode == 0 else None


def outcome(folder: Path) -> tuple[Any, ...]:
    """All that a run measured but the time it took, and the bytes of its weights."""
    rows = []
    for line in RunRecord.load(folder).measurements:
        if isinstance(line, TrainMeasurement):
            rows.append((line.step, line.loss, line.accuracy, line.learning_rate))
        elif isinstance(line, EvaluationMeasurement | ValidationMeasurement):
            rows.append((line.step, line.loss, line.accuracy))
    run = resolve(load_config(RUN_FILE), 2)
    state = build_step(run, build_mesh(run.layout)).state
    shapes = {"params": state.params, "model_state": state.model_state}
    weights = load_weights(RunFolder(path=folder).weights, shapes)
    return rows, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights)]


def difference(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> str | None:
    """In what two outcomes differ, in words; None if in nothing."""
    for one, other in zip(ours[0], theirs[0], strict=False):
        if one != other:
            return f"the record has {one}, not {other}"
    if len(ours[0]) != len(theirs[0]):
        return f"the record has {len(ours[0])} lines, not {len(theirs[0])}"
    return None if ours[1] == theirs[1] else "other weights"


@contextmanager
def _display(total: int) -> "Iterator[Callable[[Fault], None]]":
    """A bar on a terminal, a line for each fault elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def in_words(fault: Fault) -> str:
        seconds = "" if fault.seconds is None else f", {fault.seconds:.1f} s"
        bad = "".join(f"\n  DEVIATES: {each}" for each in fault.deviations)
        about = f"{fault.index}: {fault.kind} of {fault.victim} at {fault.moment}"
        return f"{about}: {fault.outcome}{seconds}{bad}"

    if not console.is_terminal:
        yield lambda fault: console.print(in_words(fault), markup=False)
        return
    columns = (TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("faults", total=total)

        def show(fault: Fault) -> None:
            progress.update(task, advance=1)
            if fault.deviations:
                progress.console.print(in_words(fault), markup=False)

        yield show


def table(faults: list[Fault]) -> list[str]:
    """A line for each kind."""
    lines = [
        "| fault | faults | noticed after, median s | most | stated | what came of it | deviate |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, bound in BOUNDS.items():
        of_kind = [fault for fault in faults if fault.kind == kind]
        if not of_kind:
            continue
        seconds = [fault.seconds for fault in of_kind if fault.seconds is not None]
        outcomes = Counter(fault.outcome for fault in of_kind)
        words = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        bad = sum(bool(fault.deviations) for fault in of_kind)
        lines.append(
            f"| {kind} | {len(of_kind)} | {median(seconds):.1f} | {max(seconds):.1f} | {bound:.0f} "
            f"| {words} | {bad} |"
        )
    return lines


def campaign(
    first: int, count: int, seed: int, together: int, wanted: list[str], epochs: int
) -> tuple[list[Fault], tuple]:
    """The faults `first` to `first + count` - 1, and the kinds there are."""
    with tempfile.TemporaryDirectory(prefix="scalejax-faults-") as name:
        work = Campaign(seed, Path(name), wanted, epochs)
        try:
            work.prepare()
            ranges = [
                range(begin, min(begin + FAULTS_OF_A_RUN, first + count))
                for begin in range(first, first + count, FAULTS_OF_A_RUN)
            ]
            with _display(count) as told, ThreadPoolExecutor(together) as pool:
                jobs = [
                    pool.submit(work.run, indices.start // FAULTS_OF_A_RUN, indices, told)
                    for indices in ranges
                ]
                try:
                    for job in jobs:
                        job.result()
                except KeyboardInterrupt:
                    work.close()
                    pool.shutdown(cancel_futures=True)
        finally:
            work.close()
    return work.done, work.kinds


def main() -> int:
    """Run it, print the table, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="go on where a part has ended")
    parser.add_argument("--together", type=int, default=2, help="runs at a time")
    parser.add_argument("--kinds", nargs="+", choices=BOUNDS, default=list(BOUNDS))
    parser.add_argument("--epochs", type=int, default=30, help="of each run")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored
        signal.signal(number, signal.default_int_handler)
    faults, kinds = campaign(
        arguments.first,
        arguments.faults,
        arguments.seed,
        arguments.together,
        arguments.kinds,
        arguments.epochs,
    )
    left_out = [kind for kind in arguments.kinds if kind not in kinds]
    earlier: list[dict[str, Any]] = []
    if arguments.first and arguments.results.exists():
        earlier = json.loads(arguments.results.read_text())["faults"]
    rows = {row["index"]: row for row in earlier} | {each.index: asdict(each) for each in faults}
    every = [Fault(**rows[index]) for index in sorted(rows)]
    print("\n".join(table(every)))
    deviating = [fault for fault in every if fault.deviations]
    print(f"{len(every)} faults, {len(deviating)} deviate; left out: {left_out or 'none'}")
    result = {
        "seed": arguments.seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("jax", "orbax-checkpoint")},
        "faults": [asdict(fault) for fault in every],
    }
    arguments.results.write_text(json.dumps(result, indent=None).replace("}, {", "},\n{") + "\n")
    return 1 if deviating or len(faults) < arguments.faults else 0


if __name__ == "__main__":
    sys.exit(main())
