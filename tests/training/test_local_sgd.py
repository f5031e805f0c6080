"""Local SGD: every device trains what its definition says, worked out one device at a time; and
sends its parameters as seldom as it promises.

Tolerances as in `test_conformance`: both sides are float32 and differ in the order of sums.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from exchange_cases import (
    LOCAL,
    Reference,
    assert_same,
    collective_bytes,
    flat,
    like,
    mean,
    placed,
    program_of,
    run_with,
    trained,
)
from test_conformance import RTOL, batches_of

from scalejax.config.run import ResolvedRun, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.hardware import load_cluster
from scalejax.simulator.timeline.timeline import timeline
from scalejax.training.evaluation import build_evaluation
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step, init_state

QUICK_LOCAL = {
    ("every 2", 4, "adamw"),
    ("DiLoCo, post-local", 4, "sgd"),
}


class LocalReference:
    """Local SGD one device at a time; the outer optimizer in NumPy."""

    def __init__(self, reference: Reference, gradient_sync: dict[str, Any]) -> None:
        self.reference, self.gradient_sync = reference, gradient_sync
        self.begin = round(gradient_sync.get("begin_epoch", 0.0) * reference.run.steps_per_epoch)
        self.last = flat(reference.begin.params)
        self.momentum = {name: 0 * array for name, array in self.last.items()}

    def averaged(self, params: list[Any]) -> Any:
        """What all devices go on with after an average."""
        new = mean([flat(each) for each in params])
        rate = self.gradient_sync.get("outer_learning_rate", 1.0)
        kept = self.gradient_sync.get("outer_momentum", 0.0)
        for name, last in self.last.items():
            way = last - new[name]
            self.momentum[name] = kept * self.momentum[name] + way
            self.last[name] = last - rate * (way + kept * self.momentum[name])
        return like(params[0], self.last)

    def trained(self) -> tuple[list[float], list[Any]]:
        """Losses, and the parameters of each device."""
        of, losses = self.reference, []
        devices = of.run.layout.data
        params, states = [of.begin.params] * devices, [of.begin.opt_state] * devices
        for step, batch in enumerate(batches_of(of.run)):
            found, loss = of.of_devices(params, batch)
            losses.append(loss)
            if step < self.begin:
                found = [like(found[0], mean([flat(each) for each in found]))] * devices
            moved = [of.applied(*each) for each in zip(found, states, params, strict=True)]
            params, states = [each[0] for each in moved], [each[1] for each in moved]
            if step < self.begin:
                self.last = flat(params[0])
            elif (step + 1 - self.begin) % self.gradient_sync["every_steps"] == 0:
                params = [self.averaged(params)] * devices
        return losses, params


@pytest.mark.parametrize(
    ("name", "devices", "optimizer"),
    [
        pytest.param(*row, marks=[] if row in QUICK_LOCAL else [pytest.mark.slow])
        for row in (
            (name, devices, optimizer)
            for index, name in enumerate(LOCAL)
            for devices, optimizer in zip(
                (2, 4), ("adamw", "sgd") if index % 2 else ("sgd", "adamw"), strict=True
            )
        )
    ],
)
def test_local_sgd_trains_what_its_definition_says(name, devices, optimizer):
    """Parameters of every device after five updates; what is evaluated is their mean."""
    run = run_with({"name": "local_sgd", **LOCAL[name]}, devices, optimizer=optimizer)
    expected_losses, expected = LocalReference(Reference(run), LOCAL[name]).trained()

    losses, state = trained(run)

    np.testing.assert_allclose(losses, expected_losses, rtol=RTOL)
    for device, params in enumerate(expected):
        assert_same(jax.tree.map(partial(take, device), state.params), params)
    evaluated, _ = build_evaluation(run, build_mesh(run.layout)).weights(state)
    assert_same(evaluated, like(expected[0], mean([flat(each) for each in expected])))


def take(device: int, leaf: jax.Array) -> jax.Array:
    """The part of a device of [devices, ...]."""
    return leaf[device]


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_an_average_in_every_step_is_synchronous_sgd(momentum):
    """To rounding: an update is linear in the gradient. So is momentum, if each device keeps its
    own. Averages every 2 steps are something else."""
    fields = {"optimizer.momentum": momentum}
    _, usual = trained(run_with(None, 4, fields=fields))
    every, seldom = (
        trained(run_with({"name": "local_sgd", "every_steps": steps}, 4, fields=fields))[1]
        for steps in (1, 2)
    )

    for device in range(4):
        assert_same(jax.tree.map(partial(take, device), every.params), usual.params)
    with pytest.raises(AssertionError):
        assert_same(jax.tree.map(partial(take, 0), seldom.params), usual.params, atol=100 * RTOL)


def test_local_sgd_sends_parameters_once_in_so_many_steps():
    """4 P bytes an average, in one of `every_steps` steps; before it begins, the gradient in each.
    What a step is predicted to take follows."""
    devices = 4
    state = build_step(run := run_with(None, devices), build_mesh(run.layout)).state
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    metrics = 8

    def local(steps: int, **fields: Any) -> ResolvedRun:
        return run_with({"name": "local_sgd", "every_steps": steps, **fields}, devices)

    for steps in (1, 2, 8):
        assert collective_bytes(local(steps)) == {"all_reduce": round(size / steps) + metrics}
    late = collective_bytes(local(8, begin_epoch=0.4))["all_reduce"]
    assert late == round(0.4 * size + 0.6 * size / 8) + metrics
    cluster = load_cluster("dgx-h100")
    seconds = {n: timeline(program_of(local(n)), cluster).communication_seconds for n in (1, 8)}
    of_metrics = seconds[8] - (seconds[1] - seconds[8]) / 7
    assert 0 < of_metrics < seconds[8] < seconds[1]


def test_batch_norm_statistics_are_averaged_with_the_parameters():
    """Each device has its own in between."""
    fields = {"layout.bn_scope": "local"}
    run = run_with({"name": "local_sgd", "every_steps": 5}, 4, model="cnn", fields=fields)
    mesh = build_mesh(run.layout)
    step, state, spreads = build_step(run, mesh), init_state(run, mesh), []
    for batch in batches_of(run):
        state, _ = step.function(state, placed(step, batch))
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.model_state))]
        spreads.append(max(np.abs(array - array[:1]).max() for array in arrays))

    assert min(spreads[:4]) > 0
    assert spreads[4] == 0


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"gradient_sync.every_steps": 0}, r"gradient_sync\.every_steps=0 is refused"),
        ({"gradient_sync.begin_epoch": 1}, r"gradient_sync\.begin_epoch=1.* below train\.epochs=1"),
        ({"gradient_sync.outer_momentum": 1}, r"gradient_sync\.outer_momentum=1.* is refused"),
        ({"model.compute_dtype": "float16"}, r'compute_dtype=.float16. .* use "bfloat16"'),
        ({"averaging": {"name": "ema"}}, r"averaging\.name='ema' is refused"),
        (
            {"optimizer": {"name": "schedule_free"}, "schedule.decay": "constant"},
            r"optimizer\.name='schedule_free' is refused",
        ),
        ({"model": {"name": "cnn", "channels": [8]}}, r"bn_scope='global' is refused"),
        (
            {"gradient_sync.begin_epoch": 1, "train.epochs": 4, "batch.ramp_epochs": [2]},
            r"gradient_sync\.begin_epoch=1.* leave batch\.ramp_epochs out",
        ),
    ],
)
def test_what_does_not_go_with_local_sgd_is_refused(fields, refused):
    """Before a device is touched, with what to do."""
    config = run_with({"name": "local_sgd", "every_steps": 2}, 4).config
    with pytest.raises(ConfigError, match=refused):
        resolve(with_fields(config, fields))
