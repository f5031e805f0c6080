"""How far off is the predicted rate of a host that makes batches, by what `data bench` measured?

Measures the stages of the input on the textile images (250 pixels, brought to 128), as `scalejax
data bench` does: at three sizes of images and three of examples, by one worker process and by
threads; two processes that decode side by side; batches handed over. Then makes batches with the
package's own `training_batches`, by 0 to 4 worker processes, of images and to sizes that were not
measured, and compares samples per second; and trains with them. Stages and batches are measured
in turn, so that what disturbs the machine is in both.

    python experiments/input_model/measure.py [--folder DIR] [--rounds N]
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from scalejax.config.data import ParquetConfig
from scalejax.core.serialization import load, save_toml
from scalejax.data.datasets import open_source
from scalejax.hardware import HostInput, InputRates
from scalejax.measure.input.bench import GRID, bench, write_sized
from scalejax.measure.input.probes import sample_seconds
from scalejax.measure.input.work import sample_work
from scalejax.simulator.input import input_pace
from scalejax.simulator.predict import Prediction
from scalejax.training.record import RunFolder, RunRecord, TrainMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Batches of one kind."""

    edge: int
    """Of the images."""
    size: int
    """Of the examples."""
    workers: int
    """Processes that make them."""


PACKAGE = "conformal-clip-data"
"""On PyPI; MIT; 2,000 JPEG of 250 x 250, of simulated defects."""
FOLDER = "conformal_clip_data/data/textile_images/simulated"
OWN_EDGE, OWN_SIZE = 250, 128
"""Of the images, and of the examples that a run would make of them."""
EDGES = (96, 160, 384)
"""Of the images that batches are made of; measured are 125, 250 and 500."""
SIZES = (96, 192)
"""Of the examples; measured are 64, 128 and 224."""
WORKERS = (0, 1, 2, 3, 4)
BATCH = 96
"""Samples; measured are 64."""
IMAGES = 384
"""Different ones."""
TRAINED = Case(edge=384, size=160, workers=0)
"""What is trained on."""
SECONDS = 0.8
"""How long batches are counted."""


def data_of(folder: Path, edge: int, size: int) -> ParquetConfig:
    """The data set of images with this edge, brought to this size."""
    path = str(folder / f"{edge}.parquet")
    return ParquetConfig(train=path, test=path, image_size=size, classes=1)


def write_images(folder: Path) -> None:
    """Write the images in every size.

    Raises:
        SystemExit: if the package is not installed.
    """
    try:
        found = Path(str(metadata.distribution(PACKAGE).locate_file(FOLDER)))
    except metadata.PackageNotFoundError as error:
        raise SystemExit(f'the images are not installed; "pip install {PACKAGE}"') from error
    paths = sorted(found.glob("*/*.jpg"))
    chosen = np.random.default_rng(0).permutation(len(paths))[:IMAGES]
    images = [paths[index].read_bytes() for index in chosen]
    folder.mkdir(parents=True, exist_ok=True)
    for edge in (OWN_EDGE, *EDGES):
        write_sized(images, edge / OWN_EDGE, folder / f"{edge}.parquet")


def predicted(rates: InputRates, folder: Path, case: Case) -> tuple[float, str]:
    """Samples per second of `case` by `rates`, and what limits them."""
    work = sample_work(data_of(folder, case.edge, case.size))
    pace = input_pace(HostInput(rates=rates, work=work, workers=case.workers), BATCH)
    return pace.samples_per_second, pace.limit


def measured(folder: Path, case: Case) -> float:
    """Samples per second that come, by the package's own pipeline, on to a device."""
    source = open_source(data_of(folder, case.edge, case.size), "train", seed=0)
    return 1 / sample_seconds(source, case.workers, BATCH, SECONDS)


def trained(folder: Path, workers: int) -> tuple[float, float]:
    """Seconds of a step of `scalejax train`, as it predicts them itself before it begins, by the
    rates in `folder`, and as they are in the median: a tiny network on images not measured."""
    data, out = data_of(folder, TRAINED.edge, TRAINED.size), folder / f"run-{workers}"
    run = folder / "run.toml"
    run.write_text(
        f"""
data = {{ name = "parquet", train = "{data.train}", test = "{data.test}", classes = 3 }}
model = {{ name = "mlp", hidden = [1] }}
batch = {{ global_batch = {BATCH} }}
optimizer = {{ name = "sgd" }}
schedule = {{ base_learning_rate = 1e-6 }}
train = {{ epochs = 12, log_every_steps = 4, evaluate_every_epochs = 12 }}
"""
    )
    shutil.rmtree(out, ignore_errors=True)
    options = [f"--input.workers={workers}", f"--data.image_size={TRAINED.size}"]
    subprocess.run(
        [sys.executable, "-m", "scalejax", "train", run, "--folder", out, *options],
        env={**os.environ, "SCALEJAX_CACHE": str(folder / "cache")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    lines = [
        each for each in RunRecord.load(out).measurements if isinstance(each, TrainMeasurement)
    ]
    prediction = load(Prediction, RunFolder(path=out).prediction)
    return prediction.step_seconds, median(each.step_seconds for each in lines[2:])


def main() -> None:
    """Measure, predict, compare; print a table and write results.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="scalejax-input-"))
    write_images(folder)
    cases = [
        Case(edge=edge, size=size, workers=workers)
        for edge in EDGES
        for size in SIZES
        for workers in WORKERS
    ]
    own = data_of(folder, OWN_EDGE, OWN_SIZE)
    rates, found = [], {case: [] for case in cases}
    for number in range(arguments.rounds):
        for edge in EDGES:
            print(f"round {number + 1} of {arguments.rounds}, {edge} pixels", file=sys.stderr)
            rates.append(bench(own, replace(GRID, repeats=1, seconds=SECONDS / 2)))
            for case in (each for each in cases if each.edge == edge):
                found[case].append(measured(folder, case))
    save_toml(rates[-1], folder / "cache" / "this-machine" / "input.toml")
    steps = {workers: trained(folder, workers) for workers in (0, 1, 2)}
    rows = []
    for case in cases:
        guesses = [predicted(each, folder, case) for each in rates]
        guess, truth = median(rate for rate, _ in guesses), median(found[case])
        rows.append(
            {
                **asdict(case),
                "predicted_samples_per_second": guess,
                "measured_samples_per_second": truth,
                "lowest": min(found[case]),
                "highest": max(found[case]),
                "error": guess / truth - 1,
                "limit": guesses[0][1],
            }
        )
        print(
            f"{case.edge:4d} -> {case.size:3d}, {case.workers} workers: predicted {guess:6.0f}, "
            f"measured {truth:6.0f} ({rows[-1]['error']:+.1%}), limit {rows[-1]['limit']}"
        )
    names = ("scalejax", "jax", "pillow", "pyarrow", "numpy")
    summary = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": {name: metadata.version(name) for name in names},
        "rounds": arguments.rounds,
        "median_error": median(abs(row["error"]) for row in rows),
        "median_error_by_workers": {
            workers: median(abs(row["error"]) for row in rows if row["workers"] == workers)
            for workers in WORKERS
        },
        "steps_of_training": [
            {
                "workers": workers,
                "predicted_step_seconds": guess,
                "measured_step_seconds": truth,
                "error": guess / truth - 1,
            }
            for workers, (guess, truth) in steps.items()
        ],
        "rows": rows,
    }
    print(f"median error {summary['median_error']:.1%} of {len(rows)}")
    for workers, error in summary["median_error_by_workers"].items():
        print(f"  {workers} workers: {error:.1%}")
    for workers, (guess, truth) in steps.items():
        print(
            f"scalejax train, {workers} workers: predicted {guess * 1e3:.1f} ms a step, "
            f"measured {truth * 1e3:.1f} ({guess / truth - 1:+.1%})"
        )
    text = json.dumps(summary, indent=1) + "\n"
    Path(__file__).with_name("results.json").write_text(text)


if __name__ == "__main__":
    main()
