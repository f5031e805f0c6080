"""What tests of exchanges between devices share: small runs, and what their devices compute one by
one, with no mesh anywhere.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from test_conformance import RTOL, batches_of, run_of

from scalejax.config.run import ResolvedRun, resolve, with_fields
from scalejax.models import BatchNormScope, network_class, parameter_path
from scalejax.simulator.program import Program
from scalejax.training.gradients import gradients
from scalejax.training.mesh import build_mesh
from scalejax.training.setup import train_setup
from scalejax.training.state import TrainState
from scalejax.training.step import Step, build_step, init_state
from scalejax.xla.compiled import read_step

LOCAL: dict[str, dict[str, Any]] = {
    "every 2": {"every_steps": 2},
    "post-local": {"every_steps": 2, "begin_epoch": 0.2},
    "DiLoCo": {"every_steps": 2, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    "DiLoCo, post-local": {
        "every_steps": 2,
        "begin_epoch": 0.2,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
    },
}
Tree = dict[str, np.ndarray]
"""Arrays by the paths of parameters."""


def run_with(
    gradient_sync: dict[str, Any] | None,
    devices: int,
    *,
    model: str = "mlp",
    optimizer: str = "sgd",
    microbatches: int = 1,
    fields: dict[str, Any] | None = None,
) -> ResolvedRun:
    """A small run of five updates, whose devices exchange so."""
    run = run_of(model, optimizer, {"data": devices, "mode": "shard_map"}, microbatches)
    return resolve(with_fields(run.config, {"gradient_sync": gradient_sync, **(fields or {})}))


def trained(run: ResolvedRun) -> tuple[list[float], TrainState]:
    """Losses of the updates, and the state after them."""
    mesh = build_mesh(run.layout)
    step, state, losses = build_step(run, mesh), init_state(run, mesh), []
    for batch in batches_of(run):
        state, metrics = step.function(state, placed(step, batch))
        losses.append(float(metrics["loss"]))
    return losses, state


def placed(step: Step, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """A batch where the step takes it."""
    return {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}


def flat(tree: Any) -> Tree:
    """A tree of parameters by path, in NumPy."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {parameter_path(path): np.asarray(leaf) for path, leaf in leaves}


def like(tree: Any, arrays: Tree) -> Any:
    """The tree of the shape of `tree` with these arrays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(arrays[parameter_path(path)], jnp.float32), tree
    )


class Reference:
    """A run one device at a time: what each computes from its rows, no mesh anywhere."""

    def __init__(self, run: ResolvedRun) -> None:
        self.run = run
        alone = {"layout.data": 1, "layout.mode": "jit", "gradient_sync": None}
        one = resolve(with_fields(run.config, alone))
        self.setup = train_setup(one)
        self.begin = init_state(one, build_mesh(one.layout, jax.local_devices()[:1]))
        self.stacked = network_class(run.config.model).stacked
        bn = BatchNormScope()
        self._gradients = jax.jit(
            lambda params, rows: gradients(self.setup, bn, params, {}, rows, None)
        )
        self._update = jax.jit(self.setup.optimizer.update)

    def of_devices(self, params: Any, batch: dict[str, np.ndarray]) -> tuple[list[Any], float]:
        """The gradient of each device's rows, and the mean loss; one set of parameters for all, or
        a list of one for each."""
        devices = self.run.layout.data
        parts = [
            {name: np.split(rows, devices)[i] for name, rows in batch.items()}
            for i in range(devices)
        ]
        each = params if isinstance(params, list) else [params] * devices
        found = [self._gradients(own, rows) for own, rows in zip(each, parts, strict=True)]
        losses = [float(metrics["loss"]) for _, _, metrics in found]
        return [gradient for gradient, _, _ in found], float(np.mean(losses))

    def applied(self, gradient: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """Parameters and optimizer state after an update."""
        updates, opt_state = self._update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def trained(self, combine: Callable[[list[Tree]], Tree]) -> tuple[list[float], Any]:
        """Losses and parameters, if `combine` makes one gradient of those of the devices."""
        params, opt_state, losses = self.begin.params, self.begin.opt_state, []
        for batch in batches_of(self.run):
            found, loss = self.of_devices(params, batch)
            gradient = like(params, combine([flat(each) for each in found]))
            params, opt_state = self.applied(gradient, opt_state, params)
            losses.append(loss)
        return losses, params


def mean(gradients: list[Tree]) -> Tree:
    """Of each array."""
    return {name: np.mean([each[name] for each in gradients], axis=0) for name in gradients[0]}


def program_of(run: ResolvedRun) -> Program:
    """What the compiler makes of the step."""
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    return read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)


def collective_bytes(run: ResolvedRun) -> dict[str, int]:
    """Bytes of the collectives of a step by kind, without those of metrics."""
    names = ("all_reduce", "all_gather", "collective_permute")
    program = program_of(run)
    found = {name: program.collective_bytes(name) for name in names}
    return {name: size for name, size in found.items() if size}


def assert_same(ours: Any, theirs: Any, *, atol: float = RTOL) -> None:
    """Arrays agree, relative to the largest entry of each."""
    for name, array in flat(theirs).items():
        np.testing.assert_allclose(
            flat(ours)[name],
            array,
            rtol=0,
            atol=atol * max(np.abs(array).max(), 1e-2),
            err_msg=name,
        )
