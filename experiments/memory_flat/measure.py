"""Does a long run hold on to memory or to files?

Starts `scalejax launch --np -2` on `run.toml` beside this file and reads from /proc, every few
seconds and for each of the two processes that train with all that they have started, what is
resident (RSS), how much of that it holds alone (private, or USS), its share of the rest besides
(PSS), and how many files it holds open; and from its heartbeat, how many steps it has begun. After
the warm-up, a line through each is fitted by the median of the slopes between all pairs of points
(Theil 1950, Sen 1968), which a few outliers do not move, with an interval of 95 %.

    nice python experiments/memory_flat/measure.py [--steps 100000] [--folder DIR]

Ends with an error if the slopes of RSS or of private memory are together above their bound, or the
files of a process may grow (a slope above 0 at the upper end, or a median above the first one).
PSS is shown and not judged: it moves with the other programs on the machine that use the same
libraries.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from scipy.stats import theilslopes

from scalejax.core.heartbeat import read_beat
from scalejax.training.record import RunRecord

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS_PER_EPOCH = 312  # 10,000 images by 32
WARM_UP = 0.2
"""Part of the steps that is left out: pools fill, and the first of everything is made."""
PROCESSES = 2
BOUND_BYTES_PER_1000_STEPS = 24 * 2**30 // 100 // 1000
"""What counts as flat: all processes together take at most 1 % of a machine of 24 GiB in a million
steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one process, with all that it has started, held at one time."""

    step: int
    """Steps that it has begun."""
    rss_bytes: int
    """Resident."""
    private_bytes: int
    """Resident, and of no other process."""
    pss_bytes: int
    """Resident, what several processes share being divided among them."""
    files: int
    """Open file descriptors."""


def main() -> None:
    """Train, sample, fit, say, and fail if it is not flat."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds-between", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="of the run; by default a temporary one")
    parser.add_argument("--results", type=Path, default=HERE)
    parser.add_argument("--samples", type=Path, help="where to put all samples, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "run"
        begin = time.monotonic()
        samples = sampled_run(folder, given.steps, given.seconds_between)
        seconds = time.monotonic() - begin
        record = RunRecord.load(folder)
    if given.samples:
        rows = [[list(asdict(sample).values()) for sample in each] for each in samples]
        given.samples.write_text(json.dumps(rows))
    reached = record.training[-1].step
    if record.status != "completed" or reached < given.steps:
        sys.exit(f"the run is {record.status} after {reached} steps of {given.steps}")
    results = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "steps": reached,
        "seconds": round(seconds),
        "evaluations": len(record.evaluations),
        "test_accuracy": record.evaluations[-1].test_accuracy,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("scalejax", "jax", "orbax-checkpoint")},
        "processes": [fitted(each, reached) for each in samples],
    }
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(samples, given.results / "memory.png")
    print(json.dumps(results, indent=1))
    if wrong := list(findings(results)):
        sys.exit("\n".join(wrong))


def sampled_run(folder: Path, steps: int, seconds_between: float) -> list[list[Sample]]:
    """Samples of each process over a run of at least `steps` steps."""
    command = [sys.executable, "-m", "scalejax", "launch", "--np", str(-PROCESSES)]
    command += [str(HERE / "run.toml"), "--folder", str(folder)]
    command += [f"--train.epochs={-(-steps // STEPS_PER_EPOCH)}"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    launcher = subprocess.Popen(command, env=environment)
    samples: list[list[Sample]] = [[] for _ in range(PROCESSES)]
    try:
        while launcher.poll() is None:
            workers = children_of(launcher.pid)
            for number, worker in enumerate(workers[:PROCESSES]):
                beat = read_beat(folder / "processes" / f"heartbeat-{number}")
                if beat is not None and beat.step and (sample := sampled(worker, beat.step)):
                    samples[number].append(sample)
            time.sleep(seconds_between)
    finally:
        launcher.terminate()
        launcher.wait()
    if launcher.returncode:
        sys.exit(f"the run ended with {launcher.returncode}")
    return samples


def sampled(process: int, step: int) -> Sample | None:
    """What `process` and all that it has started hold now; None if it is gone."""
    rss = private = pss = files = 0
    try:
        for each in (process, *descendants(process)):
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]
            fields = {line.split()[0]: int(line.split()[1]) * 1024 for line in rollup}
            rss, pss = rss + fields["Rss:"], pss + fields["Pss:"]
            private += fields["Private_Clean:"] + fields["Private_Dirty:"]
            files += len(os.listdir(f"/proc/{each}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return Sample(step=step, rss_bytes=rss, private_bytes=private, pss_bytes=pss, files=files)


def children_of(process: int) -> list[int]:
    """Processes that `process` has started, in order."""
    try:
        tasks = os.listdir(f"/proc/{process}/task")
        found = [Path(f"/proc/{process}/task/{each}/children").read_text() for each in tasks]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return sorted(int(child) for line in found for child in line.split())


def descendants(process: int) -> Iterator[int]:
    """Those, and what they have started in turn."""
    for child in children_of(process):
        yield child
        yield from descendants(child)


def fitted(samples: Sequence[Sample], steps: int) -> dict[str, object]:
    """Slopes of one process between its warm-up and its end, in bytes for 1,000 steps."""
    lasting = [sample for sample in samples if WARM_UP * steps < sample.step < steps]
    at = [sample.step / 1000 for sample in lasting]
    found: dict[str, object] = {"samples": len(lasting), "first_step": lasting[0].step}
    for name in ("rss_bytes", "private_bytes", "pss_bytes", "files"):
        values = [getattr(sample, name) for sample in lasting]
        fit = theilslopes(values, at, 0.95)
        slope, low, high = (float(fit[place]) for place in (0, 2, 3))  # type: ignore[arg-type]  untyped
        digits = 3 if name == "files" else None
        found[name] = {
            "at_first": values[0],
            "at_last": values[-1],
            "per_1000_steps": round(slope, digits),
            "interval": [round(low, digits), round(high, digits)],
        }
    middle = len(lasting) // 2
    found["private_bytes_per_1000_steps_of_halves"] = {
        name: round(
            float(theilslopes([each.private_bytes for each in part], when)[0])  # type: ignore[arg-type]  untyped
        )
        for name, part, when in (
            ("first", lasting[:middle], at[:middle]),
            ("last", lasting[middle:], at[middle:]),
        )
        if len(part) > 1
    }
    third = max(1, len(lasting) // 3)
    found["files_of_thirds"] = {
        name: {"least": min(files), "median": median(files), "most": max(files)}
        for name, part in (("first", lasting[:third]), ("last", lasting[-third:]))
        if (files := [sample.files for sample in part])
    }
    return found


def findings(results: dict) -> Iterator[str]:
    """What is not flat."""
    processes = results["processes"]
    for name in ("rss_bytes", "private_bytes"):
        high = sum(process[name]["interval"][1] for process in processes)
        if high > BOUND_BYTES_PER_1000_STEPS:
            yield (
                f"{name} of all processes grows by up to {high} bytes in 1,000 steps (95 %), "
                f"above {BOUND_BYTES_PER_1000_STEPS}"
            )
    for number, process in enumerate(processes):
        thirds = process["files_of_thirds"]
        has_more = thirds["last"]["median"] > thirds["first"]["median"]
        if has_more or process["files"]["interval"][1] > 0:
            yield f"process {number}: open files have grown: {process['files']}, {thirds}"


def draw(samples: Sequence[Sequence[Sample]], path: Path) -> None:
    """Memory and files of each process over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    memory, files = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, each in enumerate(samples):
        steps = [sample.step for sample in each]
        color = f"C{number}"
        for name, style in (("rss_bytes", "-"), ("private_bytes", "--")):
            values = [getattr(sample, name) / 2**20 for sample in each]
            label = f"process {number}, {'RSS' if name == 'rss_bytes' else 'private'}"
            memory.plot(steps, values, style, color=color, label=label)
        files.plot(steps, [sample.files for sample in each], color=color)
    memory.axvline(WARM_UP * samples[0][-1].step, color="grey", linestyle=":", label="warm-up")
    memory.set_ylabel("MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize=8)
    files.set_ylabel("open files")
    files.set_xlabel("step")
    files.set_ylim(bottom=0)
    for axes in (memory, files):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
