"""Causal attention of tokens that are sharded over the context axis.

`layout.context_strategy` is one of three. "ring": each device attends to its own keys, and then to
those of every other device, which travel from neighbour to neighbour while the previous ones are
used (Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv 2310.01889, algorithm 1).
"all_gather": the same blocks, with keys that are all-gathered first (Grattafiori et al. 2024, "The
Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2). "all_to_all": heads are sharded over
context instead of tokens, so that attention itself sees whole samples (Jacobs et al. 2023,
"DeepSpeed Ulysses", arXiv 2309.14509, section 3).

The first two proceed block by block (`attention_blocks`), and the backward pass repeats the blocks,
so that memory is linear in the tokens of a device. Under a causal mask every device has the same
work because of the order of tokens, `sharding.zigzag_chunks`: of 2C chunks, device i holds chunks i
and 2C - 1 - i. Among its own tokens the causal mask is the usual one. With keys of another device
j, if j < i, both chunks of device i see the first chunk of j and neither sees the second; otherwise
its second chunk sees both and its first neither. Either way these are two blocks of whole chunks
without a mask, so that no block needs a mask with an offset, which cuDNN does not have, and no
product is computed and discarded.

Shapes: B batch, S tokens of a device, H heads of queries, G heads of keys and values, K size of a
head, C devices along context.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from scalejax.config.model import AttentionKind
from scalejax.config.parallelism import BATCH_AXES, CONTEXT, TENSOR
from scalejax.models.attention_blocks import (
    BlockResult,
    Segments,
    block_gradients,
    block_result,
)
from scalejax.models.remat import kept, named
from scalejax.models.sharding import axis_size, without

KeySource = Literal["ring", "all_gather"]
"""Where the keys and values of other devices come from."""

_Pair = tuple[jax.Array, jax.Array]
"""Gradients of keys and values, or the two chunks of a device."""


class _Keys(NamedTuple):
    """Keys and values of some tokens, and their documents if examples hold several."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None


def blockwise_attention(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    kind: AttentionKind,
    source: KeySource,
    segments_BS: jax.Array | None = None,
) -> jax.Array:
    """Causal attention [B, S, H, K] of tokens in the order of `sharding.zigzag_chunks`, in blocks.

    For the backward pass it saves queries, keys, values, the result and its log-sum-exp.

    Args:
        q_BSHK: queries of all tokens.
        k_BSGK: keys, each shared by H / G heads of queries.
        v_BSGK: values.
        kind: kernel of a block, fused or unfused.
        source: where keys of other devices come from.
        segments_BS: documents of the tokens, if examples hold several; sent with the keys.
    """
    attend = partial(_blockwise, kind, source, axis_size(CONTEXT))
    return over_shards(attend)(q_BSHK, k_BSGK, v_BSGK, segments_BS)


def attention_over_heads(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    attend: Callable[..., jax.Array],
    segments_BS: jax.Array | None = None,
) -> jax.Array:
    """Causal attention [B, S, H, K], with heads sharded over context during it by all-to-alls.

    Where C exceeds the number of heads of keys of a device, each head is sent to all the devices
    whose queries read it: C / G times.

    Args:
        q_BSHK: queries of all tokens; C divides the heads of a device.
        k_BSGK: keys; C divides the heads of a device or is a multiple of them.
        v_BSGK: values.
        attend: causal attention of whole samples for some heads; takes queries, keys, values and
            the documents of all tokens.
        segments_BS: documents of the tokens, if examples hold several.
    """
    shards = axis_size(CONTEXT)

    def per_device(*given: Any) -> jax.Array:
        *heads, segments = given
        q, k, v = (_by_head(_repeated(each, shards)) for each in heads)
        if segments is not None:
            segments = lax.all_gather(segments, CONTEXT, axis=1, tiled=True)
        made = attend(q, k, v, segments)
        return lax.all_to_all(made, CONTEXT, split_axis=1, concat_axis=2, tiled=True)

    return over_shards(per_device)(q_BSHK, k_BSGK, v_BSGK, segments_BS)


def _by_head(heads_BSHK: jax.Array) -> jax.Array:
    """Some of the heads for all tokens, from all heads for some tokens."""
    return lax.all_to_all(heads_BSHK, CONTEXT, split_axis=2, concat_axis=1, tiled=True)


def _repeated(heads_BSHK: jax.Array, shards: int) -> jax.Array:
    """Heads, each repeated so that there is one for every device, if there are fewer."""
    copies = max(1, shards // heads_BSHK.shape[2])
    return heads_BSHK if copies == 1 else jnp.repeat(heads_BSHK, copies, axis=2)


def over_shards(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`attend` in a `shard_map` over all axes that are not manual yet: rows over the batch axes,
    tokens over context, heads over tensor. Its arguments are heads [B, S, H, K], and documents of
    tokens [B, S] or None."""
    mesh = jax.sharding.get_abstract_mesh()
    others = set(mesh.axis_names) - set(mesh.manual_axes)
    split = without(mesh.manual_axes, PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None))

    def over(*given: jax.Array | None) -> jax.Array:
        specs = tuple(
            None if each is None else PartitionSpec(*split[: each.ndim]) for each in given
        )
        return jax.shard_map(
            attend, in_specs=specs, out_specs=split, axis_names=others, check_vma=False
        )(*given)

    return over


# Block by block: forward.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _blockwise(
    kind: AttentionKind,
    source: KeySource,
    shards: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    return _forward(kind, source, shards, q, k, v, segments)[0]


def _forward(
    kind: AttentionKind,
    source: KeySource,
    shards: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """The result of a device's queries, and what the backward pass needs."""
    attend = partial(block_result, kind)
    here = lax.axis_index(CONTEXT)
    (q_first, own_first), (q_second, own_second) = _chunks((q, segments))
    own = attend(q, k, v, is_causal=True, segments=_of_both(segments, segments))
    values, log_sums = _halves(own.values), _halves(own.log_sums, axis=2)
    start = tuple(map(BlockResult, values, log_sums))

    def of_others(
        time: Any, keys: _Keys, results: tuple[BlockResult, ...]
    ) -> tuple[BlockResult, ...]:
        """Results of both chunks, the keys of the device `time` places before merged in."""
        first, second = results
        keys_first, keys_second = _chunks(keys)
        block = attend(
            q_second,
            keys_first.k,
            keys_first.v,
            is_causal=False,
            segments=_of_both(own_second, keys_first.segments),
        )
        second = second.merged(block)
        is_before = here >= time
        picked = _either(is_before, keys_first, keys_second)
        block = attend(
            jnp.where(is_before, q_first, q_second),
            picked.k,
            picked.v,
            is_causal=False,
            segments=_of_both(_either(is_before, own_first, own_second), picked.segments),
        )
        merged = _either(is_before, first, second).merged(block)
        return _either(is_before, merged, first), _either(is_before, second, merged)

    if source == "ring":

        def step(carry: Any, time: jax.Array) -> tuple[Any, None]:
            results, keys = carry
            following = _sent_on(keys)  # while these are used
            return (of_others(time, keys, results), following), None

        carry = (start, _sent_on(_Keys(k, v, segments)))
        (results, keys), _ = _scanned(step, carry, 1, shards - 1)
        first, second = of_others(shards - 1, keys, results)  # these keys are not sent on
    else:
        gathered = _gathered(_Keys(k, v, segments))

        def use(results: Any, time: jax.Array) -> tuple[Any, None]:
            return of_others(time, _picked(gathered, (here - time) % shards), results), None

        (first, second), _ = _scanned(use, start, 1, shards)
    out = kept(named(_joined(first.values, second.values).astype(q.dtype), "context"))
    log_sums = kept(named(_joined(first.log_sums, second.log_sums, axis=2), "context"))
    return out, (q, _Keys(k, v, segments), out, log_sums)


# Block by block: backward.


def _backward(
    kind: AttentionKind,
    source: KeySource,
    shards: int,
    saved: tuple[Any, ...],
    gradient: jax.Array,
) -> tuple[jax.Array | None, ...]:
    """Gradients of queries, keys and values, and None for documents.

    Gradients of queries are summed in float32; those of keys and values in their own type, in which
    they travel: round the ring one step behind their keys, or in a reduce-scatter.
    """
    q, own, out, log_sums = saved
    differentiate = partial(block_gradients, kind)
    here = lax.axis_index(CONTEXT)
    first, second = _chunks((q, out, gradient, own.segments))
    (q_first, out_first, d_first, own_first), (q_second, out_second, d_second, own_second) = (
        first,
        second,
    )
    log_first, log_second = _halves(log_sums, axis=2)
    of_own = _of_both(own.segments, own.segments)
    dq, dk, dv = differentiate(
        q, own.k, own.v, out, log_sums, gradient, is_causal=True, segments=of_own
    )
    start = (_halves(dq.astype(jnp.float32)), (dk, dv))

    def of_others(time: Any, keys: _Keys, dq: _Pair) -> tuple[_Pair, _Pair]:
        """`dq` with the keys of the device `time` places before added, and their gradients."""
        keys_first, keys_second = _chunks(keys)
        dq_second, *dkv_first = differentiate(
            q_second,
            keys_first.k,
            keys_first.v,
            out_second,
            log_second,
            d_second,
            is_causal=False,
            segments=_of_both(own_second, keys_first.segments),
        )
        is_before = here >= time
        picked = _either(is_before, keys_first, keys_second)
        dq_block, *dkv_block = differentiate(
            jnp.where(is_before, q_first, q_second),
            picked.k,
            picked.v,
            jnp.where(is_before, out_first, out_second),
            jnp.where(is_before, log_first, log_second),
            jnp.where(is_before, d_first, d_second),
            is_causal=False,
            segments=_of_both(_either(is_before, own_first, own_second), picked.segments),
        )
        first = dq[0] + jnp.where(is_before, dq_block, 0)
        second = dq[1] + dq_second + jnp.where(is_before, 0, dq_block)
        made = [
            _joined(one + jnp.where(is_before, block, 0), jnp.where(is_before, 0, block))
            for one, block in zip(dkv_first, dkv_block, strict=True)
        ]
        return (first, second), (made[0], made[1])

    if source == "ring":

        def added(time: Any, keys: _Keys, dq: _Pair, dkv: _Pair) -> tuple[_Pair, _Pair]:
            arrived = _sent_on(dkv)  # while the gradients of the next block are computed
            dq, made = of_others(time, keys, dq)
            return dq, (arrived[0] + made[0], arrived[1] + made[1])

        def step(carry: Any, time: jax.Array) -> tuple[Any, None]:
            dq, dkv, keys = carry
            following = _sent_on(keys)
            return (*added(time, keys, dq, dkv), following), None

        carry = (*start, _sent_on(own))
        (dq, dkv, keys), _ = _scanned(step, carry, 1, shards - 1)
        dq, dkv = added(shards - 1, keys, dq, dkv)
        dkv = _sent_on(dkv)  # home
    else:
        gathered = _gathered(own)

        def use(carry: Any, time: jax.Array) -> tuple[Any, None]:
            dq, sums = carry
            place = (here - time) % shards
            dq, made = of_others(time, _picked(gathered, place), dq)
            return (dq, _placed(sums, made, place)), None

        zeros = (jnp.zeros_like(gathered.k), jnp.zeros_like(gathered.v))
        sums = _placed(zeros, start[1], here)
        (dq, sums), _ = _scanned(use, (start[0], sums), 1, shards)
        dkv = [lax.psum_scatter(each, CONTEXT) for each in sums]
    return _joined(dq[0], dq[1]).astype(q.dtype), *dkv, None


_blockwise.defvjp(_forward, _backward)


# Keys and values between devices, and chunks of them.


def _sent_on(keys: Any) -> Any:
    """Keys and values, or their gradients, received from the device before."""
    shards = lax.axis_size(CONTEXT)
    ring = [(place, (place + 1) % shards) for place in range(shards)]
    return lax.ppermute(keys, CONTEXT, ring)


def _gathered(keys: _Keys) -> _Keys:
    """Keys and values of all devices, each [C, B, S, G, K]."""
    return lax.all_gather(keys, CONTEXT)


def _picked(gathered: _Keys, place: jax.Array) -> _Keys:
    """The keys and values of one device."""
    return jax.tree.map(
        lambda each: lax.dynamic_index_in_dim(each, place, keepdims=False), gathered
    )


def _placed(sums: _Pair, made: _Pair, place: jax.Array) -> _Pair:
    """`sums` with the gradients of the keys and values of one device put in their place."""
    return jax.tree.map(
        lambda every, each: lax.dynamic_update_index_in_dim(every, each, place, 0), sums, made
    )


def _scanned(step: Any, carry: Any, first: int, end: int) -> Any:
    """`lax.scan` of `step` over the times from `first` to before `end`, if there are any."""
    return lax.scan(step, carry, jnp.arange(first, end)) if end > first else (carry, None)


def _either(flag: jax.Array, one: Any, other: Any) -> Any:
    return jax.tree.map(partial(jnp.where, flag), one, other)


def _of_both(of_queries: jax.Array | None, of_keys: jax.Array | None) -> Segments | None:
    """Documents of the queries and the keys of a block, if examples hold several."""
    return None if of_queries is None or of_keys is None else (of_queries, of_keys)


def _chunks(arrays: Any) -> tuple[Any, Any]:
    """A tree of arrays of a device's tokens as two trees, one for each of its chunks."""
    leaves, structure = jax.tree.flatten(arrays)
    first, second = zip(*map(_halves, leaves), strict=True)
    return jax.tree.unflatten(structure, first), jax.tree.unflatten(structure, second)


def _halves(array: jax.Array, axis: int = 1) -> _Pair:
    """The two chunks of a device's tokens."""
    first, second = jnp.split(array, 2, axis=axis)
    return first, second


def _joined(first: jax.Array, second: jax.Array, axis: int = 1) -> jax.Array:
    return jnp.concatenate([first, second], axis=axis)
