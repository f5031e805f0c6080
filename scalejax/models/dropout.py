"""Dropout and stochastic depth: what training leaves out of the residual stream, sample by sample.

A mask is drawn from the number of its sample, its layer and its place, so that it is the same
however samples, tokens and widths are split over devices. Networks are traced in the context of the
numbers of their samples; without these, as in evaluation, nothing is left out.
Shapes: B batch, S tokens, D hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.config.training import DropoutConfig
from scalejax.models.sharding import constrained_residual, in_token_order

_BEFORE_LAYERS = 2**20
"""Number of the embedding among the layers: greater than that of any layer."""


@dataclass(frozen=True, slots=True)
class _Drawing:
    config: DropoutConfig
    numbers_B: jax.Array
    layer: Any = _BEFORE_LAYERS
    layers: int = 0
    places: list[int] | None = None


_DRAWING: ContextVar[_Drawing | None] = ContextVar("dropout", default=None)


@contextmanager
def _set(drawing: _Drawing | None) -> Iterator[None]:
    token = _DRAWING.set(drawing)
    try:
        yield
    finally:
        _DRAWING.reset(token)


def dropping(config: DropoutConfig | None, numbers_B: jax.Array | None) -> Any:
    """Context in which networks are traced for samples with these numbers, uint32, which are drawn
    again for each update; without them nothing is left out."""
    if config is None or numbers_B is None:
        return _set(None)
    return _set(_Drawing(config, numbers_B, places=[]))


def numbered(stacked: Any, first: int = 0, total: int | None = None) -> Any:
    """Parameters of stacked layers, with the number of each layer if the context needs it: from
    `first`, of `total` layers of the network (None if these are all)."""
    if _DRAWING.get() is None:
        return stacked
    count = jax.tree.leaves(stacked)[0].shape[0]
    layers = count if total is None else total
    return first + jnp.arange(count), jnp.full(count, layers), stacked


@contextmanager
def in_layer(layer: Any) -> Iterator[Any]:
    """Context of one of the layers that `numbered` made; yields its parameters."""
    if (drawing := _DRAWING.get()) is None:
        yield layer
        return
    number, count, params = layer
    with _set(replace(drawing, layer=number, layers=count, places=[])):
        yield params


def dropped(x_BSD: jax.Array) -> jax.Array:
    """What a layer adds to the residual stream, or the embedding before all layers, with entries
    dropped at the rate of the context and, in a layer, whole samples at the rate of its depth;
    divided by the share that is kept."""
    drawing = _DRAWING.get()
    if drawing is None or drawing.places is None:
        return x_BSD
    place = len(drawing.places)
    drawing.places.append(place)
    layer, config = drawing.layer, drawing.config

    def keys_B(kind: int) -> jax.Array:
        def key(number: jax.Array) -> jax.Array:
            of_layer = jax.random.fold_in(jax.random.key(number), layer)
            return jax.random.fold_in(of_layer, 2 * place + kind)

        return jax.vmap(key)(drawing.numbers_B)

    if config.rate:
        shape = x_BSD.shape[1:]
        stay_BSD = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - config.rate, shape))(
            keys_B(0)
        )
        stay_BSD = constrained_residual(in_token_order(stay_BSD))
        x_BSD = jnp.where(stay_BSD, x_BSD / (1 - config.rate), 0).astype(x_BSD.dtype)
    if config.depth_rate and drawing.layer is not _BEFORE_LAYERS:
        share = 1 - config.depth_rate * (layer + 1) / drawing.layers
        stay_B = jax.vmap(lambda key: jax.random.bernoulli(key, share))(keys_B(1))
        scaled = jnp.where(stay_B, 1 / jnp.where(share > 0, share, 1), 0)
        x_BSD = x_BSD * scaled.astype(x_BSD.dtype)[:, None, None]
    return x_BSD
