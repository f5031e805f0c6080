"""How far off is a step predicted for this machine, by what `scalejax calibrate` measured of it?

Calibrates, then trains mlp, cnn and gpt with the package's own loop at several batches on one
device, on two virtual devices and in two processes, and compares the median time of a step with
what its program is predicted to take. Nothing of these runs goes into their predictions. With
--fit, the constants are first fitted to three other runs, as `scalejax calibrate --from` does.

    python experiments/local_prediction/measure.py [--folder DIR] [--fit]
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from statistics import median

from scalejax.hardware import Cluster, Site, load_cluster_and_site
from scalejax.measure.fit import fit_runs, read_run
from scalejax.simulator.predict import predict

HERE = Path(__file__).parent
STEPS = 80
"""Steps of each run."""
LINE_STEPS = 4
"""Steps behind each line of the record."""
Clusters = dict[str, tuple[Cluster, Site]]
"""Clusters and their sites by the name of their file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    model: str
    """Whose run.toml."""
    batch: int
    """Samples per step over all devices."""
    devices: int = 1
    """Virtual devices of one process."""
    processes: int = 1
    """Processes of one device each, if more than one."""

    @property
    def name(self) -> str:
        """For people and folders."""
        place = f"{self.processes}-processes" if self.processes > 1 else f"{self.devices}-devices"
        return f"{self.model}-{self.batch}-{place}"


FITTED = tuple(
    Case(model=model, batch=batch) for model, batch in (("mlp", 256), ("cnn", 64), ("gpt", 16))
)
"""What --fit fits to: one device, and batches that are predicted nowhere below."""
PLACES = ({"devices": 1}, {"devices": 2}, {"processes": 2})
PREDICTED = tuple(
    Case(model=model, batch=batch, **place)
    for model, batches in (("mlp", (128, 1024)), ("cnn", (32, 128)), ("gpt", (8, 32)))
    for batch in batches
    for place in PLACES
)


def train(case: Case, folder: Path) -> None:
    """Train `case` into `folder`, as a user would, for `STEPS` steps."""
    values = {
        "batch.global_batch": case.batch,
        "data.train_examples": STEPS * case.batch,
        "train.log_every_steps": LINE_STEPS,
    }
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(case.devices)}
    script = str(HERE / f"{case.model}.toml")
    if case.processes == 1:
        command = [sys.executable, "-m", "scalejax", "train", script, "--folder", str(folder)]
        command += ["--cpu-devices", str(case.devices)]
        command += [part for name, value in values.items() for part in (f"--{name}", str(value))]
        commands = [command]
    else:
        pairs = [f"{name}={value}" for name, value in values.items()]
        start = [sys.executable, str(HERE / "process.py"), str(free_port()), str(case.processes)]
        commands = [
            [*start, str(rank), str(folder), script, *pairs] for rank in range(case.processes)
        ]
    started = [
        subprocess.Popen(each, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for each in commands
    ]
    said = [process.communicate()[1].decode() for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{case.name}: {said[0]}")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def compare(case: Case, folder: Path, clusters: Clusters, load: float) -> dict:
    """The run in `folder`, predicted and measured."""
    run = read_run(folder)
    cluster, site = clusters["processes" if case.processes > 1 else "cluster"]
    predicted = predict(run.program, cluster, site=site)
    return {
        **asdict(case),
        "measured_seconds": run.step_seconds,
        "predicted_seconds": predicted.step_seconds,
        "error": predicted.step_seconds / run.step_seconds - 1,
        "step_cv": run.step_cv,
        "load_average": load,
        "waterfall": dict(predicted.waterfall),
    }


def run_all(cases: Sequence[Case], folder: Path) -> dict[Case, float]:
    """Train each case that `folder` does not hold yet; the load of the machine after each."""
    loads = {}
    for case in cases:
        if not (folder / case.name / "weights").exists():
            train(case, folder / case.name)
        loads[case] = os.getloadavg()[0]
        print(f"trained {case.name} (load {loads[case]:.1f})", file=sys.stderr, flush=True)
    return loads


def calibrated(folder: Path) -> Clusters:
    """The clusters of this machine and their sites, measured now unless `folder` holds them."""
    if not (folder / "processes.toml").exists():
        command = [sys.executable, "-m", "scalejax", "calibrate", "--output", str(folder)]
        subprocess.run(command, check=True)
    names = ("cluster", "processes")
    return {name: load_cluster_and_site(str(folder / f"{name}.toml")) for name in names}


def show(rows: Sequence[dict]) -> float:
    """Print the rows; returns their median absolute error."""
    print(f"{'run':<24}{'measured':>12}{'predicted':>12}{'error':>9}{'load':>7}")
    for row in rows:
        name = Case(**{field.name: row[field.name] for field in fields(Case)}).name
        print(
            f"{name:<24}{row['measured_seconds'] * 1e3:>9.2f} ms"
            f"{row['predicted_seconds'] * 1e3:>9.2f} ms{row['error']:>+9.1%}"
            f"{row['load_average']:>7.1f}"
        )
    return median(abs(row["error"]) for row in rows)


def main() -> None:
    """Calibrate, train, predict; print the table and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where calibration and runs are kept")
    parser.add_argument("--fit", action="store_true", help="fit to a few other runs first")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        clusters = calibrated(folder / "calibration")
        factors = None
        if arguments.fit:
            run_all(FITTED, folder)
            runs = [read_run(folder / case.name) for case in FITTED]
            fits = {name: fit_runs(at, runs, site) for name, (at, site) in clusters.items()}
            clusters = {name: (fit.cluster, fit.site) for name, fit in fits.items()}
            factors = asdict(fits["cluster"].factors)
            fitted = {name: value for name, value in factors.items() if value is not None}
            print("factors", {name: round(value, 3) for name, value in fitted.items()})
        loads = run_all(PREDICTED, folder)
        rows = [compare(case, folder / case.name, clusters, loads[case]) for case in PREDICTED]
    middle = show(rows)
    print(f"median absolute error {middle:.1%} of {len(rows)} runs")
    result = {
        "median_absolute_error": middle,
        "factors": factors,
        "rows": rows,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "grain")},
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
