"""How far off is the step that `train` predicts of itself, after measuring for ten seconds?

Trains each case with the package's own step and input in a process of its own. A step is one of
the calls that the quick calibration (`scalejax.measure.devices.quick`) makes in turn, so that the
machine's other work is beside both alike; printed is the predicted over the measured time of a
step. The same by processor time, of all threads of the process, which says how well the parts of a
step add up to it, whatever else runs. Nothing of a run's times goes into its predictions.

    python experiments/local_prediction/quick.py [--seconds N] [--only NAME,...]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "quick.json"
CASES = (
    *(("mlp", 128, 1), ("mlp", 1024, 2), ("mlp", 256, 8)),
    *(("cnn", 32, 1), ("cnn", 128, 2), ("cnn", 128, 8)),
    *(("gpt", 8, 1), ("gpt", 32, 2), ("gpt", 32, 8)),
    ("resnet", 16, 1),
)
"""(model, samples per step over all devices, virtual devices)."""


def compare(model: str, batch: int, devices: int, seconds: float) -> dict:
    """The mean time of a step of one case, and what was predicted, both within `seconds`."""
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

    def step() -> None:
        nonlocal state
        state, metrics = programs.update(state, next(batches))
        jax.block_until_ready(metrics["loss"])

    in_turn, to_cluster = quick.seconds_in_turn, quick._cpu_cluster
    walls: list[float] = []
    processors: list[float] = []
    predictions: list[float] = []

    def beside_a_step(calls: Sequence[Callable[[], Any]], **how: Any) -> list[float]:
        how["seconds"] = seconds / 2
        # The last time counts: what takes long is timed before to tell how much of it fits.
        walls[:] = in_turn([*calls, step], **how)
        processors[:] = in_turn([*calls, step], **how, clock=time.process_time)
        return walls[:-1]

    def both(devices: Any, work: Any, times: Any) -> Any:
        by_processor = to_cluster(devices, work, dict(zip(times, processors, strict=False)))
        predictions.append(predict(program, by_processor).step_seconds)
        return to_cluster(devices, work, times)

    quick.seconds_in_turn, quick._cpu_cluster = beside_a_step, both
    for _ in range(3):
        step()
    predicted = predict(program, quick.local_cluster(mesh, program, programs.update.as_text()))
    batches.close()
    step_seconds = walls[-1]
    return {
        "model": model,
        "batch": batch,
        "devices": devices,
        "measured_seconds": step_seconds,
        "predicted_seconds": predicted.step_seconds,
        "ratio": predicted.step_seconds / step_seconds,
        "processor_seconds": processors[-1],
        "predicted_processor_seconds": predictions[0],
        "processor_ratio": predictions[0] / processors[-1],
        "load_average": os.getloadavg()[0],
        "waterfall": dict(predicted.waterfall),
    }


def main() -> None:
    """Run every case in a process of its own; print the table and write quick.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each case")
    parser.add_argument("--only", default="", help="names of models; other rows are kept")
    parser.add_argument("--case", help="one case, in this process: MODEL,BATCH,DEVICES")
    given = parser.parse_args()
    if given.case:
        model, batch, devices = given.case.split(",")
        print(json.dumps(compare(model, int(batch), int(devices), given.seconds)))
        return
    rows = []
    print(f"{'run':<16}{'measured':>12}{'predicted':>12}{'ratio':>8}{'processor':>11}{'load':>7}")
    for case in CASES:
        if given.only and case[0] not in given.only.split(","):
            continue
        command = [sys.executable, __file__, "--seconds", str(given.seconds)]
        found = subprocess.run(
            [*command, "--case", ",".join(map(str, case))], check=True, stdout=subprocess.PIPE
        )
        row = json.loads(found.stdout)
        rows.append(row)
        name = "{}-{}-{}".format(*case)
        print(
            f"{name:<16}{row['measured_seconds'] * 1e3:>9.2f} ms"
            f"{row['predicted_seconds'] * 1e3:>9.2f} ms{row['ratio']:>8.2f}"
            f"{row['processor_ratio']:>11.2f}{row['load_average']:>7.1f}",
            flush=True,
        )
    kept = json.loads(RESULTS.read_text())["rows"] if given.only and RESULTS.exists() else []
    made = {(row["model"], row["batch"], row["devices"]) for row in rows}
    rows += [row for row in kept if (row["model"], row["batch"], row["devices"]) not in made]
    summary = {}
    for name in ("ratio", "processor_ratio"):
        errors = [abs(row[name] - 1) for row in rows]
        within = sum(error <= 0.15 for error in errors)
        summary[name] = {"median_absolute_error": median(errors), "within_15_percent": within}
        print(f"{name}: median error {median(errors):.1%}, {within} of {len(rows)} within 15 %")
    result = {
        **summary,
        "seconds": given.seconds,
        "rows": rows,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "grain")},
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
