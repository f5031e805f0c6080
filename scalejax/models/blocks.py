"""Sequences of equal blocks, their parameters stacked on a first dimension and scanned.

Knows how activations pass through a block and to the next; nothing of what its layers compute.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.config.model import DecoderRemat
from scalejax.config.parallelism import PIPELINE, TENSOR
from scalejax.models.dropout import dropped, in_layer, numbered
from scalejax.models.lora import ADAPTERS
from scalejax.models.network import parameter_path
from scalejax.models.normalization import normalised
from scalejax.models.pipeline import shared_by_stages, through_stages
from scalejax.models.remat import kept, recomputed
from scalejax.models.sharding import axis_size, constrained_for_layer, constrained_residual

_Block = TypeVar("_Block", bound=nnx.Module)


class PreNormBlock(nnx.Module):
    """Attention, then the feed-forward layer, each on a normalised copy of the residual."""

    attention_norm: nnx.LayerNorm | nnx.RMSNorm
    """Norm of the input of attention."""
    attention: nnx.Module
    """Maps [B, S, D] to [B, S, D]."""
    feed_forward_norm: nnx.LayerNorm | nnx.RMSNorm
    """Norm of the input of the feed-forward layer."""
    feed_forward: nnx.Module
    """Maps [B, S, D] to [B, S, D]."""
    attention_post_norm: nnx.Module | None = None
    """Norm of what attention adds; None if there is none."""
    feed_forward_post_norm: nnx.Module | None = None
    """Norm of what the feed-forward layer adds; None if there is none."""
    added_scale: float = 1.0
    """Factor on what attention and the feed-forward layer add."""

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after this block, [B, S, D]."""
        for norm, layer, post_norm in (
            (self.attention_norm, self.attention, self.attention_post_norm),
            (self.feed_forward_norm, self.feed_forward, self.feed_forward_post_norm),
        ):
            normalised_BSD = constrained_for_layer(normalised(norm, x_BSD))
            added_BSD = layer(normalised_BSD)  # type: ignore[operator]
            x_BSD = with_added(x_BSD, added_BSD, post_norm, self.added_scale)
        return x_BSD


def with_added(
    x_BSD: jax.Array, added_BSD: jax.Array, post_norm: nnx.Module | None, scale: float = 1.0
) -> jax.Array:
    """The residual stream with `scale` times what a layer adds to it, normalised first if
    `post_norm` is given, [B, S, D]."""
    if post_norm is not None:
        added_BSD = normalised(post_norm, constrained_residual(added_BSD))  # type: ignore[arg-type]
    added_BSD = dropped(added_BSD if scale == 1 else added_BSD * scale)
    x_BSD = constrained_residual(x_BSD + added_BSD)
    # Otherwise the all-reduce over tensor would be repeated in the backward pass.
    return kept(x_BSD) if axis_size(TENSOR) > 1 else x_BSD


def stacked_blocks(build: Callable[[nnx.Rngs], _Block], count: int, rngs: nnx.Rngs) -> _Block:
    """`count` blocks as one, each parameter of shape (count, ...); each block has its own key."""
    return nnx.vmap(lambda key: build(nnx.Rngs(key)))(jax.random.split(rngs.params(), count))


def through_blocks(
    blocks: nnx.Module,
    x_BSD: jax.Array,
    *,
    dtype: jnp.dtype,
    remat: DecoderRemat,
    period: int = 1,
    is_staged: bool = True,
    first: int = 0,
    total: int | None = None,
) -> jax.Array:
    """The residual stream after all of the stacked `blocks`, [B, S, D].

    One compiled block is scanned: program and compile time do not grow with depth. Where layers
    alternate, one period of them is scanned, and the layers of an incomplete period follow.

    Args:
        blocks: made by `stacked_blocks`; a block maps [B, S, D] to [B, S, D], and with a period
            has `at_place`, which returns it as the layer at a place in the period.
        x_BSD: the residual stream before the first.
        dtype: type in which matrices are multiplied.
        remat: what the backward pass recomputes; "selective" is implemented by the block.
        period: layers after which the kinds of layers repeat.
        is_staged: whether each stage of a pipeline holds some of them; otherwise each computes all
            of them, for its share of the microbatches.
        first: number of the first one among the layers of the network.
        total: layers of the network; None if these are all.
    """
    scanned, stacked = _scanned(blocks, dtype, remat, period, first, total)
    return _through(scanned, stacked, x_BSD, remat, is_staged, is_reporting=False)[0]


def through_reporting_blocks(
    blocks: nnx.Module,
    x_BSD: jax.Array,
    *,
    dtype: jnp.dtype,
    remat: DecoderRemat,
    period: int = 1,
    is_staged: bool = True,
    first: int = 0,
    total: int | None = None,
) -> tuple[jax.Array, Any]:
    """The residual stream after all of the stacked `blocks`, [B, S, D], and what each reports,
    [layers, ...], in a pipeline for each microbatch, [microbatches, layers, ...]. A block maps
    [B, S, D] to (the same, its report); arguments as for `through_blocks`."""
    scanned, stacked = _scanned(blocks, dtype, remat, period, first, total)
    return _through(scanned, stacked, x_BSD, remat, is_staged, is_reporting=True)


def _through(
    scanned: Callable[[nnx.State, jax.Array], tuple[jax.Array, Any]],
    stacked: nnx.State,
    x_BSD: jax.Array,
    remat: DecoderRemat,
    is_staged: bool,
    *,
    is_reporting: bool,
) -> tuple[jax.Array, Any]:
    if (stages := axis_size(PIPELINE)) == 1:
        return scanned(stacked, x_BSD)
    if is_staged:
        return through_stages(scanned, stacked, x_BSD, stages, remat, is_reporting=is_reporting)
    return shared_by_stages(scanned, stacked, x_BSD)


def _scanned(
    blocks: nnx.Module,
    dtype: jnp.dtype,
    remat: DecoderRemat,
    period: int,
    first: int,
    total: int | None,
) -> tuple[Callable[[nnx.State, jax.Array], tuple[jax.Array, Any]], nnx.State]:
    """The scan over stacked `blocks`, and the parameters to scan over."""
    structure, stacked = nnx.split(blocks)
    # Cast before the scan: once, not in every pass over a block; gradients of all blocks
    # are then stacked in the compute type too, half the memory of float32.
    stacked = jax.tree_util.tree_map_with_path(partial(cast_kernel, dtype), stacked)

    def block(x_BSD: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        with in_layer(layer) as params:
            made = nnx.merge(structure, params)(x_BSD)
        return made if isinstance(made, tuple) else (made, None)

    block = recomputed(block, remat)

    def scanned(layers: nnx.State, x_BSD: jax.Array) -> tuple[jax.Array, Any]:
        return jax.lax.scan(block, x_BSD, layers)

    stacked = numbered(stacked, first, total)
    return scanned if period == 1 else _in_periods(structure, remat, period), stacked


def _in_periods(
    structure: nnx.GraphDef, remat: DecoderRemat, period: int
) -> Callable[[nnx.State, jax.Array], tuple[jax.Array, Any]]:
    """A function of stacked layers and the residual stream that scans whole periods of layers, each
    layer at its place in the period, and then passes through the remaining layers."""

    def at(place: int) -> Callable[..., tuple[jax.Array, Any]]:
        def block(x_BSD: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
            with in_layer(layer) as params:
                made = nnx.merge(structure, params).at_place(place)(x_BSD)
            return made if isinstance(made, tuple) else (made, None)

        return recomputed(block, remat)

    places = [at(place) for place in range(period)]

    def passed(x_BSD: jax.Array, layers: nnx.State) -> tuple[jax.Array, Any]:
        count, reports = jax.tree.leaves(layers)[0].shape[0], []
        for place in range(count):
            layer = jax.tree.map(lambda leaf, place=place: leaf[place], layers)
            x_BSD, report = places[place](x_BSD, layer)
            reports.append(report)
        return x_BSD, jax.tree.map(lambda *each: jnp.stack(each), *reports)

    def scanned(layers: nnx.State, x_BSD: jax.Array) -> tuple[jax.Array, Any]:
        count = jax.tree.leaves(layers)[0].shape[0]
        whole, reports = count // period * period, []
        if whole:
            split = jax.tree.map(
                lambda leaf: leaf[:whole].reshape(-1, period, *leaf.shape[1:]), layers
            )
            x_BSD, report = jax.lax.scan(passed, x_BSD, split)
            reports.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), report))
        if whole < count:
            x_BSD, report = passed(x_BSD, jax.tree.map(lambda leaf: leaf[whole:], layers))
            reports.append(report)
        return x_BSD, jax.tree.map(lambda *each: jnp.concatenate(each), *reports)

    return scanned


def cast_kernel(dtype: jnp.dtype, path: tuple, leaf: jax.Array) -> jax.Array:
    """A matrix cast to the type of its products; biases and norms unchanged."""
    is_matrix = not {"kernel", *ADAPTERS}.isdisjoint(parameter_path(path).split("/"))
    return leaf.astype(dtype) if is_matrix else leaf
