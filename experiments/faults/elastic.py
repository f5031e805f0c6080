"""Does a run go on when one to three of its eight processes are lost, as if none had been?

Runs of eight processes under `scalejax launch --elastic 2:8` lose one to three at once, the first
among them half of the time, by SIGKILL or SIGSTOP: while they compile, train, copy their state or
save a checkpoint. Those that are left go on, and the lost come back; each run must end completed,
with each step in the record once, and with the losses of the run that was left alone, but for
rounding. Nonzero exit if anything deviates.

    python experiments/faults/elastic.py --losses 20 --seed 0      # on Linux

Finished losses are in elastic.json, and a part that is begun again goes on behind them.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax
from launched import Launched

from scalejax.config.run import load_config
from scalejax.core.elastic import MEMORY
from scalejax.training.record import ProcessesChange, RunRecord
from scalejax.training.reporter import Silent
from scalejax.training.train import train

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RUN_FILE = HERE / "elastic.toml"
PROCESSES, LEAST = 8, 2
PHASES = ("training", "copying", "compiling", "saving")
COPY_SECONDS, REJOIN_SECONDS = 2, 3
TOLERANCE = 0.01 / 840
"""Largest relative difference of a loss from that of the run left alone: a hundredth of what one of
the 840 samples weighs, so that one lost or taken twice would show. Rounding is below it."""
STATED_SECONDS = 120.0
"""From a loss until the first update after it, stated: 20 s until a stopped process is noticed, and
a start of the processes on two cores that others use."""
_PATIENCE_SECONDS = 300.0
_SECONDS_TO_VANISH = 10.0
_FOLDERS = f"scalejax-{os.getuid()}-*"


@dataclass(slots=True, kw_only=True)
class Loss:
    """One loss of processes, and what came of it."""

    index: int
    phase: str
    victims: list[int]
    signals: list[str]
    step: int = 0
    """Updates begun."""
    went_on: list[int] = field(default_factory=list)
    """Number of processes before and after, as the record has it."""
    seconds: float | None = None
    """Until the first update after it was in the record."""
    noticed_seconds: float | None = None
    """The same from when the launcher noticed, as the record has it."""
    repeated_steps: int = 0
    deviations: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Run:
    """A run that lost some, at its end."""

    losses: list[int]
    """Their indices."""
    changes: int
    """Changes of processes in its record: losses and returns."""
    difference: float
    """Largest relative difference of a loss from that of the run left alone."""
    seconds: float
    """From its start to its end."""


def draw(index: int, seed: int) -> Loss:
    """The loss of that number: phases in turn, the rest at random."""
    rng = random.Random(f"{seed}/{index}")
    victims = rng.sample(range(1, PROCESSES), rng.randint(1, 3))
    if rng.random() < 0.5:
        victims[0] = 0
    names = [rng.choice(("SIGKILL", "SIGSTOP")) for _ in victims]
    return Loss(
        index=index,
        phase=PHASES[index % len(PHASES)],
        victims=sorted(victims),
        signals=names,
    )


def undisturbed(place: Path, devices: int) -> list[float]:
    """Losses of the run in one process, to which nothing happens."""
    folder = place / f"undisturbed-{devices}"
    train(load_config(RUN_FILE), folder, device_count=devices, reporter=Silent())
    return [line.loss or 0.0 for line in RunRecord.load(folder).training]


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two loss curves."""
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


def changes_in(folder: Path) -> list[ProcessesChange]:
    """The changes of processes that the record has so far."""
    with contextlib.suppress(Exception):  # it is being written, or cut
        return list(RunRecord.load(folder).processes)
    return []


def wait_for_phase(loss: Loss, launched: Launched, rng: random.Random) -> list[int]:
    """Ids of all eight processes when they are in the phase; none if the run ends before."""
    begin, target = time.monotonic(), None
    later = rng.uniform(0.0, 3.0)
    while launched.process.poll() is None and time.monotonic() < begin + _PATIENCE_SECONDS:
        beats = [launched.beat(number) for number in range(PROCESSES)]
        if all(beats):
            phases = [beat.phase for beat in beats if beat]
            if target is None and loss.phase == "compiling" and phases[0] == "compiling":
                target = time.monotonic() + later
            if target is None and "training" in phases:
                target = time.monotonic() + 2 * COPY_SECONDS + later
            is_there = target is not None and time.monotonic() >= target
            if is_there and loss.phase in phases and len(ids := launched.workers()) == PROCESSES:
                return ids
            if is_there and loss.phase == "compiling":
                target = None  # they trained already: the next start
        else:
            target = None
        time.sleep(0.001)
    return []


def hit(loss: Loss, launched: Launched, rng: random.Random) -> bool:
    """Bring about one loss, and wait until the run goes on; whether it was hit."""
    ids = wait_for_phase(loss, launched, rng)
    if not ids:
        return False
    before = len(changes_in(launched.folder))
    loss.step = max((beat.step for n in range(PROCESSES) if (beat := launched.beat(n))), default=0)
    since = time.monotonic()
    for victim, name in zip(loss.victims, loss.signals, strict=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(ids[victim], getattr(signal, name))
    while time.monotonic() < since + _PATIENCE_SECONDS:
        changes = changes_in(launched.folder)
        if len(changes) > before:
            change = changes[before]
            loss.seconds = time.monotonic() - since
            loss.noticed_seconds = change.seconds
            loss.went_on = [change.before, change.after]
            loss.repeated_steps = change.repeated_steps
            break
        if launched.process.poll() is not None:
            break
        time.sleep(0.05)
    if loss.seconds is None:
        loss.deviations.append(f"did not go on: {launched.said[-1500:]}")
    elif loss.seconds > STATED_SECONDS:
        loss.deviations.append(f"went on after {loss.seconds:.1f} s")
    elif not PROCESSES - 3 <= loss.went_on[1] < PROCESSES:
        loss.deviations.append(f"went on in {loss.went_on[1]} processes")
    return True


def judge(folder: Path, alone: list[float]) -> tuple[float, list[str]]:
    """The largest difference from the run left alone, and in what the record is not as it should
    be."""
    record = RunRecord.load(folder)
    deviations = []
    if record.status != "completed":
        deviations.append(f"status {record.status}")
    steps = Counter(line.step for line in record.training)
    if wrong := [step for step in range(1, len(alone) + 1) if steps.pop(step, 0) != 1]:
        deviations.append(f"steps not once in the record: {wrong[:5]}")
    if steps:
        deviations.append(f"other steps in the record: {list(steps)[:5]}")
    if wrong:
        return float("nan"), deviations
    batches = {line.global_batch for line in record.training}
    if len(batches) > 1:
        deviations.append(f"batches of {batches}")
    ours = [line.loss or 0.0 for line in record.training]
    difference = largest_difference(ours, alone)
    return difference, deviations


class Campaign:
    """The runs, in a folder of their own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        curves = {count: undisturbed(place, count) for count in (1, 5, PROCESSES)}
        self._alone = curves[PROCESSES]
        self.spread = max(largest_difference(curve, self._alone) for curve in curves.values())
        """How much the losses of undisturbed runs on 1, 5 and 8 devices differ, relative."""
        steps = zip(self._alone, self._alone[1:], strict=False)
        self.scatter = median(abs(one - other) / one for one, other in steps)
        """How much those of two neighbouring batches differ."""

    def run(self, waiting: list[Loss]) -> tuple[Run, list[Loss]]:
        """One run, and those of the losses that it had."""
        folder = self._place / f"run-{waiting[0].index}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        words = [str(RUN_FILE), f"--np=-{PROCESSES}", "--elastic", f"{LEAST}:{PROCESSES}"]
        words += ["--copy-seconds", str(COPY_SECONDS), "--rejoin-seconds", str(REJOIN_SECONDS)]
        begin, kept = time.monotonic(), set(MEMORY.glob(_FOLDERS))
        launched = Launched([*words, "--folder", str(folder)], environment, folder)
        done: list[Loss] = []
        try:
            while waiting:
                rng = random.Random(f"moment/{waiting[0].index}")
                if not hit(waiting[0], launched, rng):
                    break
                done.append(waiting.pop(0))
                print(in_words(done[-1]), flush=True)
                if done[-1].seconds is None:
                    break
            if not done:
                raise SystemExit(f"the run was not hit: {launched.said[-2000:]}")
            if launched.ends(time.monotonic(), 4 * _PATIENCE_SECONDS) is None:
                done[-1].deviations.append(f"did not end: {launched.said[-1500:]}")
            elif launched.process.returncode:
                said = launched.said[-1500:]
                done[-1].deviations.append(f"exit code {launched.process.returncode}: {said}")
            if left := launched.left_behind(_SECONDS_TO_VANISH):
                done[-1].deviations.append(f"left behind: {left}")
            if left := set(MEMORY.glob(_FOLDERS)) - kept:
                done[-1].deviations.append(f"left in memory: {left}")
        finally:
            launched.kill()
        difference, deviations = judge(folder, self._alone)
        done[-1].deviations += deviations
        changes = RunRecord.load(folder).processes
        ran = Run(
            losses=[each.index for each in done],
            changes=len(changes),
            difference=difference,
            seconds=time.monotonic() - begin,
        )
        print(f"run of {ran.losses}: differs by {difference:.1e}, {len(changes)} changes")
        return ran, done


def in_words(loss: Loss) -> str:
    """One line."""
    hits = ", ".join(f"{n} {name}" for n, name in zip(loss.victims, loss.signals, strict=True))
    bad = "".join(f"\n  DEVIATES: {each}" for each in loss.deviations)
    seconds = "n/a" if loss.seconds is None else f"{loss.seconds:.1f} s"
    return (
        f"{loss.index}: {hits} at {loss.phase}, step {loss.step}: {loss.went_on}, {seconds}, "
        f"{loss.repeated_steps} steps again{bad}"
    )


def table(losses: list[Loss]) -> list[str]:
    """A line for each phase and kind."""
    lines = [
        "| hit while | lost by | losses | of the first process | goes on after, median s | most "
        "| from when it was noticed, median s | most | steps again, median | most | deviate |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for phase in (*PHASES, "all"):
        for kind in ("SIGKILL", "SIGSTOP", "both", "any"):
            own = [
                each
                for each in losses
                if phase in (each.phase, "all") and (kind == "any") == (phase == "all")
                if kind in ("any", each.signals[0] if len({*each.signals}) == 1 else "both")
            ]
            seconds = [each.seconds for each in own if each.seconds is not None]
            if not seconds:
                continue
            noticed = [each.noticed_seconds or 0.0 for each in own]
            again = [each.repeated_steps for each in own]
            lines.append(
                f"| {phase} | {kind} | {len(own)} | {sum(0 in each.victims for each in own)} "
                f"| {median(seconds):.1f} | {max(seconds):.1f} | {median(noticed):.1f} "
                f"| {max(noticed):.1f} | {median(again):.0f} | {max(again)} "
                f"| {sum(bool(each.deviations) for each in own)} |"
            )
    return lines


def make(wanted: list[Loss], kept: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Bring about these losses, and write all that are done after each run."""
    with tempfile.TemporaryDirectory(prefix="scalejax-elastic-") as name:
        campaign = Campaign(Path(name))
        about = f"spread {campaign.spread:.1e}, scatter {campaign.scatter:.1e}"
        print(f"undisturbed runs: {about}", flush=True)
        while wanted:
            ran, done = campaign.run(wanted)
            kept = {
                "seed": arguments.seed,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "versions": {each: version(each) for each in ("jax", "orbax-checkpoint")},
                "spread": campaign.spread,
                "scatter": campaign.scatter,
                "runs": [*kept.get("runs", []), asdict(ran)],
                "losses": [*kept.get("losses", []), *map(asdict, done)],
            }
            text = json.dumps(kept).replace("}, {", "},\n{")
            arguments.results.write_text(text + "\n")
    return kept


def main() -> int:
    """Run it, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "elastic.json")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored
        signal.signal(number, signal.default_int_handler)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", PROCESSES)
    kept = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    kept = kept if kept.get("seed") == arguments.seed else {}
    done = {row["index"] for row in kept.get("losses", [])}
    losses = [draw(index, arguments.seed) for index in range(arguments.losses)]
    wanted = [each for each in losses if each.index not in done]
    if wanted:
        kept = make(wanted, kept, arguments)
    every = [Loss(**row) for row in kept.get("losses", [])]
    print("\n".join(table(every)))
    runs = [Run(**row) for row in kept.get("runs", [])]
    others = [run for run in runs if not run.difference <= TOLERANCE]
    for run in runs:
        print(f"run of {run.losses}: {run.changes} changes, differs by {run.difference:.1e}")
    print(f"undisturbed ones: {kept['spread']:.1e}; neighbouring batches: {kept['scatter']:.1e}")
    deviating = sum(bool(each.deviations) for each in every)
    print(f"{len(every)} losses, {deviating} deviate; {len(runs)} runs, {len(others)} deviate")
    return 1 if deviating or others or len(every) < len(losses) else 0


if __name__ == "__main__":
    sys.exit(main())
