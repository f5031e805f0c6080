"""Layouts whose axes cross processes, and what a process makes of them.

Imports no pytest: the processes that train these import it too.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalejax.api import train
from scalejax.config.model import CustomConfig
from scalejax.config.run import ResolvedRun, RunConfig, resolve, with_fields
from scalejax.core.errors import ScalejaxError
from scalejax.core.serialization import JsonValue, build
from scalejax.data.loader.loader import evaluation_batches, training_batches
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.models import Network, parameter_path
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.evaluation import build_evaluation
from scalejax.training.features import open_examples
from scalejax.training.logger import evaluation_measurement
from scalejax.training.mesh import build_mesh, replicated
from scalejax.training.multihost import all_gather_text, require_same_checkpoint, require_same_state
from scalejax.training.reporter import Silent
from scalejax.training.state import TrainState, shardings_of
from scalejax.training.step import build_step, init_state

UPDATES = 3
GLOBAL_BATCH = 32
TEST_EXAMPLES = 44
"""A batch, and twelve more: of four devices the second then has four real rows, others none."""

MODELS: dict[str, Any] = {
    "cnn": {"name": "cnn", "channels": [8, 16]},
    "mlp": {"name": "mlp", "hidden": [32, 16]},
    "gpt": {"name": "gpt", "layers": 1, "hidden": 16, "heads": 4},
    "gpt of four blocks": {"name": "gpt", "layers": 4, "hidden": 16, "heads": 4},
}
IMAGES = {"name": "synthetic_images", "image_size": 8, "channels": 1, "classes": 8}
TOKENS = {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32}
OPTIMIZERS = {
    "sgd": ({"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4}, 0.1),
    # Where the true gradient is zero, Adam blows rounding up; this epsilon keeps it small.
    "adamw": ({"name": "adamw", "epsilon": 1e-3}, 0.01),
    "lamb": ({"name": "lamb", "epsilon": 1e-3}, 0.01),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run, and how it is spread over processes."""

    model: str
    """Of `MODELS`."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Of its config."""
    crossing: tuple[str, ...] = ()
    """Axes each group of which has devices of several processes."""
    is_dealt: bool = False
    """Whether neighbours on the mesh are of different processes; else of the same."""
    microbatches: int = 1
    """Of its config."""
    optimizer: str = "adamw"
    """Of `OPTIMIZERS`."""
    train_examples: int = GLOBAL_BATCH * UPDATES
    """Of its data; the last batch of an epoch is filled up."""
    metric_average: str = "examples"
    """Of its config."""

    @property
    def alone(self) -> "Case":
        """The same on one device, BatchNorm in the same groups."""
        keeps = ("bn_scope", "bn_group_size")
        layout = {name: self.layout[name] for name in keeps if name in self.layout}
        has_batch_norm = self.model == "cnn"  # whose statistics are of a microbatch
        return Case(
            model=self.model,
            layout={"data": 1, **layout},
            microbatches=self.microbatches if has_batch_norm else 1,
            optimizer=self.optimizer,
            train_examples=self.train_examples,
        )

    @property
    def run(self) -> ResolvedRun:
        """What is trained."""
        optimizer, learning_rate = OPTIMIZERS[self.optimizer]
        tables = {
            "model": MODELS[self.model],
            "data": {
                **(TOKENS if self.model.startswith("gpt") else IMAGES),
                "train_examples": self.train_examples,
                "test_examples": TEST_EXAMPLES,
            },
            "batch": {"global_batch": GLOBAL_BATCH, "microbatches": self.microbatches},
            "optimizer": optimizer,
            "schedule": {"base_learning_rate": learning_rate, "warmup": "none"},
            "layout": self.layout,
            "input": {"remainder": "pad"},
            "train": {"metric_average": self.metric_average},
        }
        return resolve(build(RunConfig, tables))


LOCAL = {"bn_scope": "local"}
OF_TWO = {
    "data, BatchNorm of a device": Case(
        model="cnn",
        optimizer="sgd",
        layout={"data": 4, **LOCAL, "bn_group_size": 8, "mode": "shard_map"},
        crossing=("data",),
    ),
    "data, BatchNorm in groups": Case(
        model="cnn",
        optimizer="sgd",
        layout={"data": 4, **LOCAL, "bn_group_size": 16},  # of two devices
        crossing=("data",),
        is_dealt=True,
    ),
    "data, rows that do not count": Case(
        model="mlp",
        optimizer="sgd",
        layout={"data": 4},
        crossing=("data",),
        train_examples=GLOBAL_BATCH + 5,  # the second batch has five, on the first device
    ),
    "fsdp": Case(model="mlp", optimizer="lamb", layout={"data": 1, "fsdp": 4}, crossing=("fsdp",)),
    "ZeRO 2, microbatches": Case(
        model="mlp", layout={"data": 4, "zero_stage": 2}, crossing=("data",), microbatches=2
    ),
    "tensor across, data inside, tokens split": Case(
        model="gpt",
        layout={"data": 2, "tensor": 2, "sequence_parallel": True},
        crossing=("tensor",),
        is_dealt=True,
    ),
    "pipeline, interleaved, x data": Case(
        model="gpt of four blocks",
        layout={"data": 2, "pipeline": 2, "pipeline_chunks": 2},
        crossing=("pipeline",),
        microbatches=4,
    ),
}
"""On two processes of two devices."""
OF_FOUR = {
    "fsdp x data": Case(
        model="mlp",
        optimizer="lamb",
        layout={"data": 2, "fsdp": 4},
        crossing=("fsdp",),
        is_dealt=True,
    ),
    "data x context x tensor": Case(
        model="gpt",
        layout={"data": 2, "context": 2, "tensor": 2},
        crossing=("context", "tensor"),
        is_dealt=True,
    ),
}
"""On four processes of two devices."""


def devices_of_all(*, is_dealt: bool) -> list[Any]:
    """The devices of all processes, those of one side by side, or dealt out in turn."""
    if not is_dealt:
        return jax.devices()
    seen: dict[int, int] = {}
    turns = []
    for device in jax.devices():
        turns.append((seen.setdefault(device.process_index, 0), device.process_index))
        seen[device.process_index] += 1
    order = sorted(range(len(turns)), key=turns.__getitem__)
    return [jax.devices()[index] for index in order]


def crossing_axes(mesh: Mesh) -> tuple[str, ...]:
    """Axes each group of which has devices of several processes."""
    found = []
    for position, axis in enumerate(mesh.axis_names):
        groups = np.moveaxis(mesh.devices, position, -1).reshape(-1, mesh.devices.shape[position])
        if all(len({device.process_index for device in group}) > 1 for group in groups):
            found.append(axis)
    return tuple(found)


def outcome(case: Case, devices: Sequence[Any]) -> dict[str, np.ndarray]:
    """Arrays that say what `case` comes to on `devices`, the same in every process.

    Losses of the updates; metrics of the test data after them; every array of the state.
    """
    run = case.run
    mesh = build_mesh(run.layout, devices)
    step, evaluation = build_step(run, mesh), build_evaluation(run, mesh)
    state, losses = init_state(run, mesh), []
    batches = training_batches(
        open_examples(run, "train", Silent()),
        step.batch,
        seed=run.config.seed,
        start_step=0,
        stop_step=UPDATES,
        how=run.config.input,
    )
    for batch in batches:
        state, metrics = step.function(state, batch)
        losses.append(float(metrics["loss"]))
    source = open_examples(run, "test", Silent())
    sums = [
        evaluation.function(*evaluation.weights(state), batch)
        for batch in evaluation_batches(source, evaluation.batch, run.config.input, Skipped())
    ]
    measured = evaluation_measurement(
        run, jax.device_get(sums), split="test", step=3, seconds=1, elapsed_seconds=1
    )
    found = {"losses": np.asarray(losses), "crossing": np.asarray(crossing_axes(mesh))}
    for name in ("test_loss", "test_accuracy", "examples"):
        found[f"metrics/{name}"] = np.asarray(getattr(measured, name))
    return found | arrays_of(mesh, state)


def arrays_of(mesh: Mesh, state: Any) -> dict[str, np.ndarray]:
    """Every array of `state`, whole, by path."""
    whole = jax.jit(lambda tree: tree, out_shardings=replicated(mesh))(state)
    leaves, _ = jax.tree_util.tree_flatten_with_path(whole)
    return {f"state/{parameter_path(path)}": np.asarray(leaf) for path, leaf in leaves}


def outcomes(cases: dict[str, Case]) -> dict[str, dict[str, np.ndarray]]:
    """`outcome` of each over the devices of all processes."""
    return {
        name: outcome(case, devices_of_all(is_dealt=case.is_dealt)) for name, case in cases.items()
    }


SAVED = {
    1: Case(model="cnn", optimizer="lamb", layout={"data": 1}),
    2: Case(model="cnn", optimizer="lamb", layout={"data": 1, "fsdp": 2, "tensor": 2}),
    4: Case(model="cnn", optimizer="lamb", layout={"data": 1, "fsdp": 4, "tensor": 2}),
}
"""Runs of one state, by the processes that save and restore it."""


def save_by(processes: int, folder: Path) -> dict[str, np.ndarray]:
    """Arrays of a state, no two numbers alike, that these processes save in `folder`."""
    run = SAVED[processes].run
    mesh = build_mesh(run.layout, jax.devices()[: run.layout.device_count])
    initial = init_state(run, mesh)

    def marked(leaf: jax.Array, number: int) -> jax.Array:
        places = jnp.arange(leaf.size, dtype=jnp.int32).reshape(leaf.shape)
        return leaf + (1000 * number + places).astype(leaf.dtype) / 3

    def changed(state: TrainState) -> TrainState:
        leaves, tree = jax.tree.flatten(state)
        numbered = [marked(leaf, number).astype(leaf.dtype) for number, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, numbered)

    state = jax.jit(changed, out_shardings=shardings_of(initial))(initial)
    with Checkpoints(folder / f"by {processes}", keep=1) as checkpoints:
        checkpoints.save(1, state)
    return arrays_of(mesh, state)


def restore_by(processes: int, saved_by: int, folder: Path) -> dict[str, np.ndarray]:
    """Arrays of the state that `saved_by` processes saved in `folder`, as these restore it."""
    run = SAVED[processes].run
    mesh = build_mesh(run.layout, jax.devices()[: run.layout.device_count])
    with Checkpoints(folder / f"by {saved_by}", keep=1) as checkpoints:
        return arrays_of(mesh, checkpoints.restore(1, build_step(run, mesh).state))


class OfItsProcess(Network):
    """A network that begins with other numbers in every process."""

    def __init__(self, dataset, *, compute_dtype, bn, rngs):
        self.head = nnx.Linear(
            math.prod(dataset.input_shape),
            dataset.classes,
            bias_init=nnx.initializers.constant(jax.process_index()),
            rngs=rngs,
        )

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits of flattened images."""
        return self.head(inputs.reshape(inputs.shape[0], -1))


def refusal_of(ask: Callable[[], object]) -> str:
    """What `ask` raises, in words; each process must get the same."""
    try:
        ask()
    except ScalejaxError as error:
        return "; ".join(dict.fromkeys(all_gather_text(f"{type(error).__name__}: {error}")))
    return "nothing was refused"


def differing_copies() -> dict[str, str]:
    """What is said of states of which a process holds other numbers, by what lies how."""
    run = Case(model="mlp", layout={"data": 2, "fsdp": 2}).run
    mesh, process = build_mesh(run.layout), jax.process_index()

    def array(spec: PartitionSpec, other: float) -> jax.Array:
        values = np.arange(8, dtype=np.float32)
        values[5] += other * process
        return jax.make_array_from_callback(
            (8,), NamedSharding(mesh, spec), lambda index: values[index]
        )

    def said(step: int = 0, **params: jax.Array) -> str:
        whole = array(PartitionSpec(), 0.0)
        state = TrainState(step=whole, params=params, model_state={}, opt_state=())
        return refusal_of(lambda: require_same_state(run, mesh, state, step=step))

    whole, copied, alone = PartitionSpec(), PartitionSpec("fsdp"), PartitionSpec(("data", "fsdp"))
    return {
        "alike": said(kernel=array(whole, 0.0), bias=array(copied, 0.0)),
        "whole": said(bias=array(whole, 0.0), kernel=array(whole, 1e-6)),
        "in parts with copies": said(kernel=array(copied, 1.0), bias=array(whole, 2.0)),
        "in parts without copies": said(kernel=array(alone, 1.0)),
        "restored": said(step=7, kernel=array(whole, 1.0)),
    }


def refused_beginnings(folder: Path) -> dict[str, str]:
    """What is said where processes begin unlike, by what is unlike."""
    config = Case(model="mlp", layout={"data": 4}).run.config
    is_other = jax.process_index() == 1

    def begun(config: RunConfig, name: str = "refused", *, resume: bool = False) -> str:
        return refusal_of(lambda: train(config, folder / name, resume=resume, predicts=False))

    def unlike(**fields: JsonValue) -> RunConfig:
        dotted = {name.replace("__", "."): value for name, value in fields.items()}
        return with_fields(config, dotted) if is_other else config

    custom = CustomConfig(name="custom", path=f"{__name__}:OfItsProcess")
    return {
        "config": begun(unlike(train__epochs=2, seed=5)),
        "data": begun(unlike(data__train_examples=64)),
        "resume": begun(config, resume=is_other),
        "network": begun(replace(config, model=custom)),
        "checkpoint": refusal_of(lambda: require_same_checkpoint(40 if is_other else 20)),
    }


def watched_run(folder: Path) -> list[list[str]]:
    """Files in `folder` that Python code of each process wrote while a run was trained there, as
    often as it did."""
    written: list[str] = []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and is_for_writing(arguments[1], arguments[2]):
            written.append(str(arguments[0]))
        if event == "os.rename":
            written.append(str(arguments[1]))

    sys.addaudithook(hear)
    config = Case(model="mlp", layout={"data": 4}).run.config
    train(with_fields(config, {"train.epochs": 3, "train.log_every_steps": 1}), folder)
    here = [path.removeprefix(f"{folder}/") for path in written if path.startswith(f"{folder}/")]
    return [json.loads(said) for said in all_gather_text(json.dumps(here))]


def is_for_writing(mode: str | None, flags: int) -> bool:
    """Whether a file that was opened so may be changed."""
    if mode is None:
        return bool(flags & (os.O_WRONLY | os.O_RDWR))
    return any(letter in mode for letter in "wax+")


UNEVEN = Case(model="mlp", optimizer="sgd", layout={"data": 4}, crossing=("data",))
"""Test examples: 16 on the first device, 12 on the second, 8 on each of the others."""


def metrics_of_both_averages() -> dict[str, dict[str, np.ndarray]]:
    """`outcome` of `UNEVEN` by both averages of metrics."""
    cases = {name: replace(UNEVEN, metric_average=name) for name in ("examples", "devices")}
    return outcomes(cases)


def beginnings(folder: Path) -> dict[str, Any]:
    """What two processes make of runs that they begin unlike, and of one that they do not."""
    return {
        "saved": save_by(2, folder),
        "restored from 1": restore_by(2, 1, folder),
        "metrics": metrics_of_both_averages(),
        "copies": differing_copies(),
        "refused": refused_beginnings(folder),
        "written": watched_run(folder / "run"),
    }


def of_four(folder: Path) -> dict[str, Any]:
    """What four processes make of the layouts, and of checkpoints of others."""
    return {
        "restored from 1": restore_by(4, 1, folder),
        "restored from 2": restore_by(4, 2, folder),
        "saved": save_by(4, folder),
        "outcomes": outcomes(OF_FOUR),
    }


def of_two(folder: Path) -> dict[str, Any]:
    """What two processes make of the layouts, and of checkpoints of four."""
    return {"restored from 4": restore_by(2, 4, folder), "outcomes": outcomes(OF_TWO)}
