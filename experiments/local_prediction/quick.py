"""How far off is the step that `train` predicts of itself, after measuring for ten seconds?

Trains each case with the package's own step and input in a process of its own, in turn with the
quick calibration (`scalejax.measure.devices.quick`), so that the machine's other work is beside
both, and prints the predicted over the measured time of a step, of each the median of all turns.
Nothing of a run's times goes into its predictions.

    python experiments/local_prediction/quick.py [--turns N] [--only NAME,...]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
CASES = (
    *(("mlp", 128, 1), ("mlp", 1024, 1), ("mlp", 1024, 2), ("mlp", 256, 8)),
    *(("cnn", 32, 1), ("cnn", 128, 1), ("cnn", 128, 2), ("cnn", 128, 8)),
    *(("gpt", 8, 1), ("gpt", 32, 1), ("gpt", 32, 2), ("gpt", 32, 8)),
    *(("resnet", 16, 1), ("resnet", 64, 2), ("resnet", 64, 8)),
)
"""(model, samples per step over all devices, virtual devices)."""
SECONDS = 5.0
"""Of training in one turn."""


def turns(model: str, batch: int, devices: int, count: int) -> dict:
    """Times of the steps of one case, and what was predicted, in `count` turns of both."""
    from scalejax.core.environment import choose_platform

    choose_platform(devices)
    import jax

    from scalejax.config.run import load_config
    from scalejax.data.facts import resolve
    from scalejax.data.loader.skip_unreadable import Skipped
    from scalejax.measure.devices import quick
    from scalejax.simulator.predict import predict
    from scalejax.training.compile import compile_run
    from scalejax.training.features import open_examples
    from scalejax.training.mesh import build_mesh
    from scalejax.training.reporter import Silent
    from scalejax.training.step import init_state
    from scalejax.xla import read_step

    values = {"batch.global_batch": batch, "data.train_examples": 100 * batch, "train.epochs": 1000}
    run = resolve(load_config(HERE / f"{model}.toml", values), devices)
    mesh = build_mesh(run.layout)
    programs, state = compile_run(run, mesh), init_state(run, mesh)
    program = read_step(programs.update, mesh, run)
    batches = programs.training_batches(
        run,
        [open_examples(run, "train", Silent())],
        [Skipped()],
        step=programs.step,
        phase=run.phases[0],
        start_step=0,
        stop_step=run.total_steps,
    )
    of_turns, predicted, calibrations = [], [], []

    def train() -> None:
        nonlocal state
        count, begin = 0, time.perf_counter()
        while count < 8 or time.perf_counter() - begin < SECONDS:
            state, metrics = programs.update(state, next(batches))
            jax.block_until_ready(metrics["loss"])
            count += 1
        of_turns.append((time.perf_counter() - begin) / count)  # the mean, as of a record's line

    train()
    of_turns.clear()
    for _ in range(count):
        train()
        quick._measured_cpu.cache_clear()  # measured anew in each turn
        start = time.perf_counter()
        cluster = quick.local_cluster(mesh, program)
        calibrations.append(time.perf_counter() - start)
        predicted.append(predict(program, cluster).step_seconds)
    train()
    batches.close()
    return {
        "model": model,
        "batch": batch,
        "devices": devices,
        "measured_seconds": median(of_turns),
        "measured_range": [min(of_turns), max(of_turns)],
        "predicted_seconds": median(predicted),
        "predicted_range": [min(predicted), max(predicted)],
        "ratio": median(predicted) / median(of_turns),
        "calibration_seconds": median(calibrations),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Run every case in a process of its own; print the table and write quick.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="", help="names of models")
    parser.add_argument("--case", help="one case, in this process: MODEL,BATCH,DEVICES")
    given = parser.parse_args()
    if given.case:
        model, batch, devices = given.case.split(",")
        print(json.dumps(turns(model, int(batch), int(devices), given.turns)))
        return
    rows = []
    print(f"{'run':<16}{'measured':>12}{'predicted':>12}{'ratio':>8}{'calibrated':>12}{'load':>7}")
    for case in CASES:
        if given.only and case[0] not in given.only.split(","):
            continue
        command = [sys.executable, __file__, "--turns", str(given.turns)]
        found = subprocess.run(
            [*command, "--case", ",".join(map(str, case))], check=True, stdout=subprocess.PIPE
        )
        row = json.loads(found.stdout)
        rows.append(row)
        name = "{}-{}-{}".format(*case)
        print(
            f"{name:<16}{row['measured_seconds'] * 1e3:>9.2f} ms"
            f"{row['predicted_seconds'] * 1e3:>9.2f} ms{row['ratio']:>8.2f}"
            f"{row['calibration_seconds']:>10.1f} s{row['load_average']:>7.1f}",
            flush=True,
        )
    errors = [abs(row["ratio"] - 1) for row in rows]
    within = sum(error <= 0.15 for error in errors)
    print(f"median absolute error {median(errors):.1%}; {within} of {len(rows)} within 15 %")
    result = {
        "median_absolute_error": median(errors),
        "within_15_percent": within,
        "turns": given.turns,
        "rows": rows,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "grain")},
    }
    if not given.only:
        (HERE / "quick.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
