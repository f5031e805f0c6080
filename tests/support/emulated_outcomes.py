"""Small runs that tests emulate, and all their results."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from emulate_cases import durations

from scalejax.config.emulation import EmulationConfig
from scalejax.config.run import ResolvedRun, RunConfig, resolve, with_fields
from scalejax.core import serialization
from scalejax.emulation.executor import JaxExecutor
from scalejax.emulation.instructions import Instruction
from scalejax.emulation.record import Emulation
from scalejax.emulation.run import emulate_run, executor_of
from scalejax.emulation.virtual_cluster import Durations

CONFIG = serialization.build(
    RunConfig,
    {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {
            "name": "synthetic_images",
            "image_size": 4,
            "channels": 1,
            "classes": 4,
            "train_examples": 96,
            "test_examples": 21,
        },
        "batch": {"global_batch": 8},
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "schedule": {"base_learning_rate": 0.05},
        "train": {"epochs": 2, "log_every_steps": 1},
    },
)
"""24 steps, 12 an epoch."""

AT_ONCE = durations()
"""A gradient takes a second, all else nothing."""

VARIED = durations(
    gradient_deviation_seconds=0.5,
    collective_seconds=0.1,
    update_seconds=0.02,
    latency_seconds=0.01,
    worker_bytes_per_second=1e5,
    server_bytes_per_second=2e5,
    workers_per_host=2,
)
"""Everything takes its time, and gradients take each its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All results of an emulated run."""

    emulation: Emulation
    """Its record."""
    figures: list[tuple[Any, ...]]
    """What its lines say but of time: (step, loss, accuracy) of training or test data."""
    seconds: list[float]
    """Virtual times of the lines."""
    params: Any
    """The parameters that were evaluated last."""
    log: list[Instruction]
    """What was computed."""


def run_of(fields: Mapping[str, Any] | None = None) -> ResolvedRun:
    """The small run with `fields` replaced, on one device."""
    return resolve(with_fields(CONFIG, fields or {}), 1)


def emulated(
    emulation: EmulationConfig,
    times: Durations = AT_ONCE,
    fields: Mapping[str, Any] | None = None,
) -> Outcome:
    """Results of emulating the small run with `fields` replaced."""
    lines, log = [], []
    run = run_of(fields)
    with LastEvaluated() as last:
        found = emulate_run(run, emulation, times, write=lines.append, log=log.append)
    return Outcome(
        emulation=found,
        figures=figures_of(lines),
        seconds=[line.elapsed_seconds for line in lines],
        params=whole(run, emulation, last.parts),
        log=log,
    )


def figures_of(lines: list[Any]) -> list[tuple[Any, ...]]:
    """What lines say but of time."""
    names = {"evaluation": "test"}
    return [
        (names.get(line.kind, line.kind), line.step, line.loss, line.accuracy) for line in lines
    ]


class LastEvaluated:
    """Within it, what the last evaluation was of."""

    def __enter__(self) -> "LastEvaluated":
        self.parts: Any = ()
        self._patch = pytest.MonkeyPatch()
        evaluate = JaxExecutor._evaluate

        def kept(executor: JaxExecutor, parts: Any, split: Any) -> Any:
            self.parts = parts
            return evaluate(executor, parts, split)

        self._patch.setattr(JaxExecutor, "_evaluate", kept)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def whole(run: ResolvedRun, emulation: EmulationConfig, parts: Any) -> Any:
    """Parameters, put together of the parts that servers hold."""
    return jax.device_get(executor_of(run, emulation)._join(parts))


def same_bits(first: Any, second: Any) -> bool:
    """Whether two trees of arrays are alike in every bit."""
    leaves, others = jax.tree.leaves(first), jax.tree.leaves(second)
    return len(leaves) == len(others) and all(
        np.asarray(a).dtype == np.asarray(b).dtype and np.array_equal(a, b, equal_nan=True)
        for a, b in zip(leaves, others, strict=True)
    )
