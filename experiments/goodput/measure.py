"""Is the goodput of a run that fails and restarts what the failure model says?

Trains `run.toml` beside this file in two processes by `scalejax launch --max-restarts`, and kills
one of the two with SIGKILL at random: the times between failures are drawn from an exponential
distribution, by a seed, of every four one from each quarter of it, and pass while both processes
are there. At three mean times between failures:

* no restart loses more steps than those since the last checkpoint that was whole at the kill,
* the time ledger of the run adds up to the wall time from the start of its first process to the
  last change of the ledger's file, by the clock of the system,
* its goodput is within 5 points of what the failure model says of the failures, restarts and
  checkpoints that the run has met (`scalejax.planning.observed_failures`).

    python experiments/goodput/measure.py [--mtbf 60 40 25]

About 10 minutes where nothing else runs. Writes `results.json` and `goodput.png`, whole or for the
rates that were asked for; ends with an error where one of the three does not hold.
"""

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import fmean

from scalejax.core.heartbeat import read_beat
from scalejax.planning.observed_failures import FailuresMet, failures_met
from scalejax.simulator.reliability import goodput
from scalejax.training.record import RunFolder, RunRecord
from scalejax.training.time_accounting import (
    Interval,
    load_intervals,
    time_account,
    time_account_in_words,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROCESSES = 2
STEPS_PER_EPOCH = 40  # 10,000 images by 250
STEPS_PER_INTERVAL = 100  # `train.checkpoint_every_steps`
INTERVALS = {60: 80, 40: 72, 25: 52}
"""Length of the run by mean time between failures in seconds: three minutes each where
nothing else runs."""
TOLERANCE = 0.05
_SECONDS_BETWEEN_LOOKS = 0.05
_SLACK_SECONDS = 0.2  # the system counts starts of processes in hundredths


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One failure, and what was there when it struck."""

    at_unix_seconds: float
    """When."""
    victim: int
    """Which process."""
    up_seconds: float
    """How long failures could have struck since the one before."""
    step: int
    """Updates that the processes had begun, as they said themselves."""
    checkpoint: int
    """The last checkpoint that was whole; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run from its start to its end."""

    kills: tuple[Kill, ...]
    """In order."""
    up_seconds: float
    """How long failures could have struck, in all."""
    starts_unix_seconds: tuple[float, ...]
    """When the processes were started, each time."""


def main() -> None:
    """Run all rates, say what came out, and fail if a claim does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mtbf", type=int, nargs="+", choices=INTERVALS, default=list(INTERVALS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE)
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    path, wrong = given.results / "results.json", []
    rates = json.loads(path.read_text())["rates"] if path.exists() else {}
    for mtbf in given.mtbf:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run"
            course = failing_run(folder, mtbf, INTERVALS[mtbf], random.Random(given.seed + mtbf))
            rates[str(mtbf)] = outcome(folder, course, mtbf)
            wrong += findings(folder, course, rates[str(mtbf)])
        print(f"mean time between failures {mtbf} s: {json.dumps(rates[str(mtbf)], indent=1)}")
    results = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("scalejax", "jax", "orbax-checkpoint")},
        "rates": dict(sorted(rates.items(), key=lambda each: -int(each[0]))),
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    draw(results["rates"], given.results / "goodput.png")
    if wrong:
        sys.exit("\n".join(wrong))


def failing_run(folder: Path, mtbf_seconds: float, intervals: int, rng: random.Random) -> RunStatus:
    """Train, and kill one process after the other until the run is done."""
    command = [sys.executable, "-m", "scalejax", "launch", "--np", str(-PROCESSES)]
    command += [str(HERE / "run.toml"), "--folder", str(folder), "--max-restarts", "1000"]
    command += [f"--train.epochs={intervals * STEPS_PER_INTERVAL // STEPS_PER_EPOCH}"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    launcher = subprocess.Popen(command, env=environment)
    kills: list[Kill] = []
    starts: list[float] = []
    up_seconds, before, times = 0.0, (), times_between(mtbf_seconds, rng)
    try:
        while workers := next_workers(launcher, before):
            starts.append(started_unix_seconds(workers[0]))
            if not kills:  # a run that fails before it has begun leaves nothing
                wait_until(launcher, RunFolder(path=folder).time.exists)
            begin, wanted = time.monotonic(), next(times)
            due = begin + wanted
            wait_until(launcher, lambda due=due: time.monotonic() >= due)
            up = time.monotonic() - begin
            up_seconds += up
            if launcher.poll() is not None:
                break
            victim = rng.randrange(PROCESSES)
            steps = [step_of(folder, number) for number in range(PROCESSES)]
            checkpoint = last_checkpoint(folder)
            before = workers
            try:
                os.kill(workers[victim], signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                continue
            kills.append(
                Kill(
                    at_unix_seconds=time.time(),
                    victim=victim,
                    up_seconds=up,
                    step=max(steps),
                    checkpoint=checkpoint,
                )
            )
        launcher.wait()
    finally:
        launcher.terminate()
        launcher.wait()
    if launcher.returncode:
        sys.exit(f"the launcher ended with {launcher.returncode}")
    if not kills:
        sys.exit(f"the run ended before the first failure: {intervals} intervals are too few here")
    return RunStatus(
        kills=tuple(kills),
        up_seconds=up_seconds,
        starts_unix_seconds=tuple(starts),
    )


def times_between(mtbf_seconds: float, rng: random.Random) -> Iterator[float]:
    """Times between failures, exponentially distributed; of four in turn, one of each quarter."""
    while True:
        quarters = [0, 1, 2, 3]
        rng.shuffle(quarters)
        yield from (-mtbf_seconds * math.log1p(-(q + rng.random()) / 4) for q in quarters)


def next_workers(launcher: subprocess.Popen, before: Sequence[int]) -> tuple[int, ...]:
    """The processes of the next session, once both are there; none if the run has ended."""
    while launcher.poll() is None:
        path = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        try:
            children = tuple(int(child) for child in path.read_text().split())
        except FileNotFoundError:
            break
        if len(children) == PROCESSES and not set(children) & set(before):
            return children
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return ()


def wait_until(launcher: subprocess.Popen, is_time: Callable[[], bool]) -> None:
    """Return when it is time, or the run has ended."""
    while launcher.poll() is None and not is_time():
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def started_unix_seconds(process: int) -> float:
    """When a process was started, by the clock of the system."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def step_of(folder: Path, number: int) -> int:
    """Updates that a process has begun, as it says; 0 before it says so."""
    beat = read_beat(folder / "processes" / f"heartbeat-{number}")
    return beat.step if beat else 0


def last_checkpoint(folder: Path) -> int:
    """Step of the last checkpoint that is whole: Orbax gives it its name when it is."""
    path = RunFolder(path=folder).checkpoints
    names = [each.name for each in path.iterdir()] if path.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def outcome(folder: Path, course: RunStatus, mtbf: int) -> dict:
    """Figures of one run: its ledger, what it has met, and what the model says of that."""
    record = RunRecord.load(folder)
    intervals = load_intervals(record.folder.time)
    ledger, met = time_account(intervals), failures_met(intervals)
    if met is None or ledger.goodput is None:
        sys.exit(f"the ledger of the run is empty: {record.folder.time}")
    met = with_what_was_seen(met, course)
    met = replace(met, latency_seconds=latency_seconds(record.folder, intervals))
    steady = goodput(
        met.interval_seconds,
        met.pause_seconds,
        met.restart_seconds,
        mtbf,
        latency_seconds=met.latency_seconds,
        down_seconds=met.down_seconds,
    )
    wall_seconds = record.folder.time.stat().st_mtime - course.starts_unix_seconds[0]
    return {
        "steps": record.training[-1].step,
        "kills": len(course.kills),
        "sessions_in_ledger": ledger.sessions,
        "wall_seconds": round(wall_seconds, 2),
        "ledger_seconds": round(ledger.seconds, 2),
        "parts_seconds": {name: round(seconds, 2) for name, seconds in ledger.parts},
        "repeated_steps": ledger.repeated_steps,
        "steps_lost": [round(lost) for lost, _ in losses(intervals, course)],
        "met": {name: round(value, 3) for name, value in asdict(met).items()},
        "goodput": round(ledger.goodput, 4),
        "goodput_of_model": round(met.goodput, 4),
        "goodput_of_model_for_ever_at_the_mean_drawn_from": round(steady, 4),
        "in_words": time_account_in_words(ledger),
    }


def latency_seconds(folder: RunFolder, intervals: Sequence[Interval]) -> float:
    """Mean time from the end of a pause until its checkpoint got the name of a whole one."""
    paused: dict[int, float] = {}
    for _, lines in groupby(intervals, key=lambda each: each.session):
        now, of_session = 0.0, dict[int, float]()
        for each in lines:
            now = (now or each.began_unix_seconds) + each.seconds
            if each.is_finished:
                of_session.setdefault(each.step, now)  # the last is also the end of the session
        paused |= of_session
    named = {
        int(path.name): path.stat().st_ctime
        for path in folder.checkpoints.iterdir()
        if path.name.isdecimal()
    }
    return fmean(max(0.0, named[step] - paused[step]) for step in named if step in paused)


def with_what_was_seen(met: FailuresMet, course: RunStatus) -> FailuresMet:
    """`met` with the failures as they were made: the record cannot tell when a process was killed
    that waited for another, and has nothing of sessions that were killed among their imports."""
    downs = [
        start - kill.at_unix_seconds
        for kill, start in zip(course.kills, course.starts_unix_seconds[1:], strict=True)
    ]
    failures = len(course.kills)
    return replace(
        met,
        failures=failures,
        run_mtbf_seconds=course.up_seconds / failures if failures else None,
        down_seconds=fmean(downs) if downs else 0.0,
    )


def losses(intervals: Sequence[Interval], course: RunStatus) -> Iterator[tuple[int, int]]:
    """Of each session in the ledger that went on after kills: steps that the session before had
    begun beyond those it went on with, and beyond the last whole checkpoint."""
    begins = [
        (group[0].began_unix_seconds, group[-1].first_step)
        for group in (list(lines) for _, lines in groupby(intervals, key=lambda s: s.session))
    ]
    reached = checkpoint = 0
    kills = list(course.kills)
    for began, first_step in begins:
        while kills and kills[0].at_unix_seconds < began:
            kill = kills.pop(0)
            reached, checkpoint = max(reached, kill.step), max(checkpoint, kill.checkpoint)
        if first_step is not None and reached:
            yield reached - first_step, reached - checkpoint
            reached = 0


def findings(folder: Path, course: RunStatus, figures: dict) -> Iterator[str]:
    """What does not hold."""
    record = RunRecord.load(folder)
    if record.status != "completed":
        yield f"the run is {record.status}"
    steps = [line.step for line in record.training]
    if steps != list(range(20, steps[-1] + 1, 20)):
        yield f"lines of the record are missing or double: {steps}"
    for lost, since_checkpoint in losses(load_intervals(record.folder.time), course):
        if lost > since_checkpoint:
            yield f"a restart lost {lost} steps, {since_checkpoint} since the last checkpoint"
    gap = figures["wall_seconds"] - figures["ledger_seconds"]
    if abs(gap) > _SLACK_SECONDS:
        yield f"the ledger is {gap:.2f} s short of the wall time"
    error = figures["goodput"] - figures["goodput_of_model"]
    if abs(error) > TOLERANCE:
        yield f"goodput {figures['goodput']:.1%}, {error * 100:+.1f} points from the model"


def draw(rates: dict, path: Path) -> None:
    """The ledger of each run as a bar of its parts, and the model's goodput on it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    names = list(next(iter(rates.values()))["parts_seconds"])
    left = [0.0] * len(rates)
    labels = [f"{mtbf} s, {each['kills']} kills" for mtbf, each in rates.items()]
    for number, name in enumerate(names):
        shares = [each["parts_seconds"][name] / each["ledger_seconds"] for each in rates.values()]
        axes.barh(labels, shares, left=left, label=name, color=f"C{number}")
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for position, each in enumerate(rates.values()):
        label = "failure model" if position == 0 else None
        model = each["goodput_of_model"]
        axes.plot([model] * 2, [position - 0.45, position + 0.45], "k", linewidth=2.5, label=label)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the wall time")
    axes.set_ylabel("mean time between failures")
    figure.legend(loc="outside upper center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
