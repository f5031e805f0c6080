"""From one small batch to several machines, step by step: time and accuracy of each.

    python experiments/six_steps/measure.py [--folder DIR]

Trains here, predicts for the hardware of the steps' author, writes `results.json` and
`steps.png` beside this file.
"""

import argparse
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from textiles import write_textiles

HERE = Path(__file__).parent
STOPPING = ("--data.validation_fraction", "0.1", "--train.early_stopping.patience", "2")
FULL = ("--data.train", "textiles/full.parquet", *STOPPING, "--train.epochs", "3")
LARGER = ("--batch.global_batch", "16")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One of the steps, what it changes, and whose hardware it is predicted for."""

    name: str
    flags: tuple[str, ...]
    devices: int = 1
    machines: int = 1
    cluster: str = "aws-p2-xlarge"
    predicted_devices: int = 1
    run_file: str = "run.toml"


STEPS = (
    Step(name="0. raw pixels", flags=(), run_file="pixels.toml"),
    Step(name="1. small batch", flags=()),
    Step(name="2. early stopping", flags=STOPPING),
    Step(name="3. larger batch", flags=(*STOPPING, *LARGER)),
    Step(name="4. full data", flags=(*FULL, *LARGER)),
    Step(
        name="5. more devices",
        flags=(*FULL, "--batch.per_device_batch", "16"),
        devices=4,
        cluster="aws-p2",
        predicted_devices=8,
    ),
    Step(
        name="6. more machines",
        flags=(*FULL, "--batch.per_device_batch", "16"),
        devices=4,
        machines=2,
        predicted_devices=8,
    ),
)


def train(step: Step, folder: Path) -> dict[str, object]:
    """What training took and reached, from the record of the run."""
    run = folder / step.name.split(".")[0]
    begin, cpu_begin = time.perf_counter(), cpu_seconds()
    if step.machines == 1:
        command = [sys.executable, "-m", "scalejax", "train", str(HERE / step.run_file)]
        command += [*step.flags, "--folder", str(run), "--cpu-devices", str(step.devices)]
        subprocess.run(command, check=True, cwd=folder)
    else:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        worker = [sys.executable, str(HERE / "machine.py"), str(HERE / step.run_file), str(run)]
        counts = [str(step.machines), str(step.devices // step.machines), str(port)]
        processes = [
            subprocess.Popen([*worker, str(index), *counts, *step.flags], cwd=folder)
            for index in range(step.machines)
        ]
        if any([process.wait() for process in processes]):
            raise SystemExit(f"{step.name}: a process failed")
    took = {
        "command_seconds": time.perf_counter() - begin,
        "command_cpu_seconds": cpu_seconds() - cpu_begin,
    }
    from scalejax.training.record import RunRecord

    record = RunRecord.load(run)
    kept = record.tested
    if kept is None:
        raise SystemExit(f"{step.name}: it was not tested ({record.status})")
    return {
        "epochs": len(record.monitored),
        "updates": kept.step,
        "seconds": record.statuses[-1].elapsed_seconds,
        **took,
        "test_accuracy": kept.test_accuracy,
        "test_loss": kept.test_loss,
    }


def cpu_seconds() -> float:
    """That all processes took which this one has waited for: a busy machine adds nothing."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def predict(step: Step, folder: Path) -> dict[str, object]:
    """Step and epoch on the hardware of the steps' author, of what is trained here."""
    output = folder / f"predicted-{step.name.split('.')[0]}.json"
    command = [sys.executable, "-m", "scalejax", "predict", str(HERE / step.run_file)]
    command += [*step.flags, "--cluster", step.cluster]
    command += ["--devices", str(step.predicted_devices), "--json", str(output)]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    (found,) = json.loads(output.read_text())["predictions"]
    kept = ("step_seconds", "p10_step_seconds", "p90_step_seconds", "epoch_seconds", "global_batch")
    return {"cluster": step.cluster, "devices": step.predicted_devices} | {
        name: found[name] for name in kept
    }


def reading_seconds(folder: Path) -> dict[str, float]:
    """An epoch of the full data in batches of 16, row groups read anew or kept."""
    from scalejax.config.data import ParquetConfig, ReadingConfig
    from scalejax.data.datasets import open_source

    found, little = {}, 6 * 10**6  # bytes: room for one of the 17 row groups
    for name, reading in (
        ("read anew", ReadingConfig(memory_bytes=little)),
        ("on disk", ReadingConfig(memory_bytes=little, cache_folder=str(folder / "cache"))),
        ("in memory", ReadingConfig()),
    ):
        config = ParquetConfig(
            train=str(folder / "textiles/full.parquet"),
            test=str(folder / "textiles/test.parquet"),
            image_size=128,
            reading=reading,
        )
        source = open_source(config, "train", seed=0)
        order = np.random.default_rng(0).permutation(len(source))
        source.take(order)  # footers, threads, and what is kept
        begin = time.process_time()
        for first in range(0, len(order) - 15, 16):
            source.take(order[first : first + 16])
        found[name] = time.process_time() - begin
    return found


def plot(rows: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Accuracy, seconds here and predicted seconds of an epoch there, step under step."""
    names = list(rows)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    columns = (
        ("test accuracy", [rows[name]["here"]["test_accuracy"] for name in names]),
        (
            "CPU seconds of training, here",
            [rows[name]["here"]["command_cpu_seconds"] for name in names],
        ),
        (
            "predicted seconds of an epoch, K80",
            [rows[name]["predicted"]["epoch_seconds"] for name in names],
        ),
    )
    for axis, (title, values) in zip(axes, columns, strict=True):
        bars = axis.barh(names, values, color="0.5")
        axis.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=2, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.18)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    axes[0].axvline(1 / 3, color="k", linewidth=0.8, linestyle=":")
    figure.savefig(path, dpi=120)


def claims(rows: dict[str, dict[str, dict[str, float]]]) -> dict[str, bool]:
    """What the experiment is to show, and whether it does."""
    here = {name.split(".")[0]: row["here"] for name, row in rows.items()}
    predicted = {name.split(".")[0]: row["predicted"] for name, row in rows.items()}
    return {
        "the frozen backbone beats raw pixels by 0.2": here["1"]["test_accuracy"]
        >= here["0"]["test_accuracy"] + 0.2,
        "early stopping makes fewer updates, within 0.05 of the accuracy": here["2"]["updates"]
        < here["1"]["updates"]
        and here["2"]["test_accuracy"] >= here["1"]["test_accuracy"] - 0.05,
        "no later step is 0.05 below the first": all(
            here[each]["test_accuracy"] >= here["1"]["test_accuracy"] - 0.05 for each in "23456"
        ),
        "8 K80 are predicted to take less than a fifth of the epoch of one": all(
            predicted[each]["epoch_seconds"] < predicted["4"]["epoch_seconds"] / 5 for each in "56"
        ),
    }


def main() -> int:
    """Train, predict, print, write; 1 if something is not shown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    folder = (parser.parse_args().folder or Path(tempfile.mkdtemp())).absolute()
    write_textiles(folder / "textiles")
    load_before, begin = os.getloadavg()[0], time.perf_counter()
    rows = {}
    for step in STEPS:
        rows[step.name] = {"here": train(step, folder), "predicted": predict(step, folder)}
        print(step.name, json.dumps(rows[step.name]), flush=True)
    reading = reading_seconds(folder)
    shown = claims(rows)
    for claim, holds in shown.items():
        print(f"{'yes' if holds else 'NO':4}{claim}")
    print(f"CPU seconds of reading an epoch: {reading}; all: {time.perf_counter() - begin:.0f} s")
    result = {
        "steps": rows,
        "reading_cpu_seconds": reading,
        "claims": shown,
        "seconds": time.perf_counter() - begin,
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "versions": {name: version(name) for name in ("scalejax", "jax", "flax", "optax")},
        "python": platform.python_version(),
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, HERE / "steps.png")
    return 0 if all(shown.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
