"""Time of an update in `train` over that of a bare jitted loop with its batch on the device.

Both run the same compiled step from the same state on the same devices, in turn, so that what
else the machine does falls on both. `train` is the loop of the package with all it does between
its first update and its last: batches gathered and put on the devices, record, checkpoints.

Other programs can only make either slower, so the fastest repeat of each is what is compared;
the median over pairs stands beside it, and is only good on a quiet machine. Processor time is
what the loop costs the machine, whether or not there was a free core to hide it.

    python experiments/training_overhead/measure.py [--devices 1] [--repeats 5]
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as orbax

from scalejax.api import train
from scalejax.config.run import RunConfig, load_config, resolve
from scalejax.core.serialization import JsonValue
from scalejax.data.datasets import open_source
from scalejax.data.loader.loader import training_batches
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.checksums import checksums
from scalejax.training.mesh import build_mesh
from scalejax.training.multihost import require_equal_replicas
from scalejax.training.record import Measurement, TrainMeasurement
from scalejax.training.reporter import Silent
from scalejax.training.step import build_step, init_state

HERE = Path(__file__).parent


def clocks() -> tuple[float, float]:
    """Wall time and processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def per_update(begin: tuple[float, float], updates: int) -> tuple[float, float]:
    """Wall and processor seconds of an update since `begin`."""
    wall, processor = clocks()
    return (wall - begin[0]) / updates, (processor - begin[1]) / updates


class Stopwatch(Silent):
    """Times a run from the begin of its loop to its last update."""

    def __init__(self) -> None:
        self.seconds = (0.0, 0.0)

    def begin(self, step: int, total_steps: int) -> None:
        """Start."""
        self._begin, self._total_steps = clocks(), total_steps

    def measured(self, measurement: Measurement) -> None:
        """Stop at the last update."""
        if isinstance(measurement, TrainMeasurement) and measurement.step == self._total_steps:
            self.seconds = per_update(self._begin, self._total_steps)


def bare_seconds(config: RunConfig, device_count: int) -> tuple[float, float]:
    """Wall and processor time of an update: the same batch again and again, one update queued."""
    run = resolve(config, device_count)
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    update = step.function.lower(step.state, step.batch).compile()
    source = open_source(config.data, "train", seed=config.seed)
    batches = training_batches(
        source, step.batch, seed=config.seed, start_step=0, stop_step=run.total_steps
    )
    batch, state = next(batches), init_state(run, mesh)
    batches.close()  # type: ignore[attr-defined]  a generator: its reader must not be timed
    begin = clocks()
    state, queued = update(state, batch)
    for _ in range(run.total_steps - 1):
        state, metrics = update(state, batch)
        jax.block_until_ready(queued)
        queued = metrics
    jax.block_until_ready(queued)
    return per_update(begin, run.total_steps)


def trained_seconds(config: RunConfig, device_count: int) -> tuple[float, float]:
    """Wall and processor time of an update in `train`."""
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), device_count=device_count, reporter=stopwatch)
    return stopwatch.seconds


def comparison_seconds(config: RunConfig, device_count: int) -> float:
    """Wall time of a comparison of all replicas of the state, the fastest of ten."""
    run = resolve(config, device_count)
    state = init_state(run, build_mesh(run.layout))
    seconds = []
    for _ in range(11):  # the first compiles
        begin = time.perf_counter()
        require_equal_replicas(state, step=0, way_back=str)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def checkpoint_seconds(state: object) -> dict[str, dict[str, float]]:
    """What a checkpoint of `state` takes, the median of ten: seconds that training is blocked,
    processor seconds in all threads, and seconds until it counts; the same of one with checksums
    of its arrays that Orbax writes, of which nothing is synced, checked or proved."""
    names = ("blocked", "processor", "until_it_counts")
    rows: dict[str, list[tuple[float, ...]]] = {"durable": [], "not_synced": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder) / "checkpoints", keep=2) as checkpoints,
    ):
        for step in range(1, 12):
            begin = clocks()
            checkpoints.save(step, state)
            blocked = time.perf_counter() - begin[0]
            checkpoints.wait()
            until, processor = per_update(begin, 1)
            rows["durable"].append((blocked, processor, until))
            begin = clocks()
            written: JsonValue = {"checksums": dict(checksums(state))}
            saving = orbax.save_async(f"{folder}/{step}", state, custom_metadata=written)
            blocked = time.perf_counter() - begin[0]
            saving.result()
            shutil.rmtree(f"{folder}/{step - 1}", ignore_errors=True)
            until, processor = per_update(begin, 1)
            rows["not_synced"].append((blocked, processor, until))
    return {
        how: {
            name: median(column)
            for name, column in zip(names, zip(*found[1:], strict=True), strict=True)
        }
        for how, found in rows.items()
    }


def tell_checkpoints(
    config: RunConfig, device_count: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure checkpoints of the run's state, and of one of 256 MiB, and print what they cost."""
    run = resolve(config, device_count)
    states = {
        "cnn": init_state(run, build_mesh(run.layout)),
        "256 MiB": {f"{index}": jnp.full((16, 2**20), index, jnp.float32) for index in range(4)},
    }
    found = {}
    for name, state in states.items():
        found[name] = each = checkpoint_seconds(state)
        durable, plain = each["durable"], each["not_synced"]
        more = sum(durable[part] - plain[part] for part in ("blocked", "processor")) / 60
        words = [
            f"blocks training for {one['blocked'] * 1e3:.0f} ms, takes "
            f"{one['processor'] * 1e3:.0f} ms of a processor and is there after "
            f"{one['until_it_counts'] * 1e3:.0f}"
            for one in (durable, plain)
        ]
        print(f"a checkpoint of {name} {words[0]}; without syncs and manifest it {words[1]}")
        print(f"durability at one a minute costs {more:.2%}, where no core is free for it")
    return found


_UPDATES_BETWEEN_COMPARISONS = 100


def main() -> None:
    """Measure in turn, print the table, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpoints-only", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    config = load_config(HERE / "cnn.toml")
    checkpoints = tell_checkpoints(config, arguments.devices)
    if arguments.checkpoints_only:
        text = json.loads((HERE / "results.json").read_text())
        text |= {"seconds_of_a_checkpoint": checkpoints}
        (HERE / "results.json").write_text(json.dumps(text, indent=1) + "\n")
        return
    pairs: list[dict[str, tuple[float, float]]] = []
    for repeat in range(1, arguments.repeats + 1):
        bare = bare_seconds(config, arguments.devices)
        trained = trained_seconds(config, arguments.devices)
        pairs.append({"bare": bare, "train": trained})
        print(
            f"{repeat}: an update takes {bare[0] * 1e3:.2f} ms bare, {trained[0] * 1e3:.2f} ms in "
            f"train; processor time {bare[1] * 1e3:.2f} ms and {trained[1] * 1e3:.2f} ms"
        )
    overheads = {}
    for clock, name in enumerate(("wall", "processor")):
        bare, trained = ([pair[loop][clock] for pair in pairs] for loop in ("bare", "train"))
        fastest = min(trained) / min(bare) - 1
        paired = median(after / before for before, after in zip(bare, trained, strict=True)) - 1
        overheads[name] = {"of_fastest": fastest, "median_of_pairs": paired}
        print(
            f"training overhead on cnn, {name} time: {fastest:+.1%} between the fastest, "
            f"{paired:+.1%} in the median of pairs"
        )
    compared = comparison_seconds(config, arguments.devices)
    fastest = min(pair["train"][0] for pair in pairs)
    share = compared / (_UPDATES_BETWEEN_COMPARISONS * fastest)
    print(
        f"replicas on {arguments.devices} devices are compared in {compared * 1e3:.2f} ms: "
        f"{share:.2%} of {_UPDATES_BETWEEN_COMPARISONS} updates"
    )
    result = {
        "seconds_to_compare_replicas": compared,
        "seconds_of_a_checkpoint": checkpoints,
        "overhead": overheads,
        "wall_and_processor_seconds_of_an_update": pairs,
        "updates_per_repeat": resolve(config, arguments.devices).total_steps,
        "devices": arguments.devices,
        "load_average": os.getloadavg()[0],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "grain")},
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
