"""The activations of decoders before and after a few updates, measured for a coordinate check.

Knows the step and the layers of a decoder; `coordinates` draws conclusions from the numbers.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.config.model import DecoderConfig
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.data.datasets import open_source
from scalejax.data.facts import resolve
from scalejax.data.loader.loader import training_batches
from scalejax.models import BatchNormScope
from scalejax.models.blocks import through_blocks
from scalejax.models.decoder import CausalNetwork
from scalejax.sweep.coordinates import (
    LOGITS,
    Along,
    Coordinate,
    CoordinateCheck,
    Kept,
    arms,
    resized,
    slopes_of,
)
from scalejax.training.mesh import build_mesh
from scalejax.training.setup import TrainSetup, network_with, train_setup
from scalejax.training.state import PyTree
from scalejax.training.step import build_step, init_state


def check_coordinates(
    config: RunConfig,
    along: Along,
    sizes: Sequence[int],
    *,
    steps: int,
    kept: Kept = "head_size",
    say: Callable[[str], None] = lambda _: None,
) -> CoordinateCheck:
    """The activations of the decoder of `config` at these sizes, and how they grow, with and
    without its parametrization.

    It is trained on its own batches at a constant rate, the peak of its schedule.

    Args:
        config: the run; its size is replaced.
        along: what the sizes are: widths or depths.
        sizes: widths or depths, two or more.
        steps: updates of each network.
        kept: what stays fixed as networks grow wider.
        say: called with the name of each network that is trained.

    Raises:
        ConfigError: if the network is not a dense decoder, or cannot have these sizes.
    """
    require_at_least("steps", steps, 1)
    name = "widths" if along == "hidden" else "depths"
    if len(set(sizes)) < 2 or len(set(sizes)) < len(sizes):
        accepted = "an exponent needs two different ones or more, such as 64,128,256"
        raise ConfigError(refusal(name, ",".join(map(str, sizes)), accepted))
    if config.local_sgd is not None:
        accepted = "its workers would have activations of their own; leave it out"
        raise ConfigError(refusal("gradient_sync.name", config.local_sgd.name, accepted))
    planned = [
        (arm, size, resized(each, along, size, kept))
        for arm, each in arms(config)
        for size in sizes  # invalid ones are refused before any is trained
    ]
    found: list[Coordinate] = []
    rate = 0.0
    of_standard: dict[int, dict[str, list[float | None]]] = {}
    for arm, size, each in planned:
        if cast(DecoderConfig, each.model).is_base and size in of_standard:
            layers = of_standard[size]  # same network, same updates
        else:
            say(f"{arm}, {along}={size}")
            rate, layers = _measured(each, steps, is_by_layer=along == "hidden")
            of_standard.setdefault(size, layers)  # the standard arm comes first
        found += [
            Coordinate(
                parametrization=arm, size=size, layer=layer, start=start, end=end, change=change
            )
            for layer, (start, end, change) in layers.items()
        ]
    slopes = slopes_of(found)
    return CoordinateCheck(
        along=along,
        sizes=tuple(sizes),
        steps=steps,
        learning_rate=rate,
        coordinates=tuple(found),
        slopes=slopes,
        are_flat={
            arm: all(each.is_flat for each in slopes if each.parametrization == arm)
            for arm, _ in arms(config)
        },
    )


def _measured(
    config: RunConfig, steps: int, *, is_by_layer: bool
) -> tuple[float, dict[str, list[float | None]]]:
    """The rate, and for each layer the mean absolute entries on the first batch: before and after
    `steps` updates, and of their difference."""
    run = resolve(config, None if config.layout.data is not None else jax.device_count())
    mesh = build_mesh(run.layout)
    rate, _ = config.schedule.scaled(run.split.global_batch)
    step = build_step(run, mesh, schedule=lambda _: jnp.asarray(rate, jnp.float32))
    state = init_state(run, mesh)
    before = jax.tree.map(jnp.copy, state.params)  # the step overwrites those of the state
    source = open_source(config.data, "train", seed=config.seed)
    batches = training_batches(
        source, step.batch, seed=config.seed, start_step=0, stop_step=steps, how=config.input
    )
    inputs = None
    with closing(batches):
        for batch in batches:
            inputs = batch["inputs"] if inputs is None else inputs
            state, _ = step.function(state, batch)
    setup = train_setup(run)

    @jax.jit
    def sizes(before: PyTree, after: PyTree, model_state: PyTree, inputs: jax.Array) -> Any:
        first, last = (
            _activations(setup, params, model_state, inputs, is_by_layer=is_by_layer)
            for params in (before, after)
        )
        return [
            [jnp.abs(each).mean() for each in (one, other, other - one)]
            for one, other in zip(first, last, strict=True)
        ]

    found = jax.device_get(sizes(before, state.params, state.model_state, inputs))
    named = zip(_layers(cast(DecoderConfig, config.model), is_by_layer), found, strict=True)
    return rate, {
        layer: [float(value) if math.isfinite(value) else None for value in each]
        for layer, each in named
    }


def _layers(model: DecoderConfig, is_by_layer: bool) -> list[str]:
    """The layers whose activations are measured: the embedding, each block or only the last, and
    the logits; if layers alternate, the last block of each period."""
    ends = [min(first + model.period, model.layers) for first in _firsts(model)]
    blocks = [f"block {end}" for end in ends] if is_by_layer else ["last block"]
    return ["embedding", *blocks, LOGITS]


def _firsts(model: DecoderConfig) -> range:
    return range(0, model.layers, model.period)


def _activations(
    setup: TrainSetup, params: PyTree, model_state: PyTree, inputs: jax.Array, *, is_by_layer: bool
) -> list[jax.Array]:
    """The residual stream after each of `_layers`, and the logits, in float32."""
    network = cast(CausalNetwork, network_with(setup, BatchNormScope(), params, model_state))
    model = cast(DecoderConfig, setup.run.config.model)
    x_BSD = network.embedded(inputs)
    embedding, blocks = x_BSD, []
    structure, stacked = nnx.split(network.blocks)
    for first in _firsts(model):
        some = jax.tree.map(lambda leaf, at=first: leaf[at : at + model.period], stacked)
        x_BSD = through_blocks(
            nnx.merge(structure, some),
            x_BSD,
            dtype=network.dtype,
            remat="none",
            period=network.period,
        )
        blocks.append(x_BSD)
    found = [embedding, *(blocks if is_by_layer else blocks[-1:]), network.logits(x_BSD)]
    return [each.astype(jnp.float32) for each in found]
