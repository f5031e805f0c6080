"""Operations of fused attention over a context axis, by blocks or over heads, as compiled.

The three strategies of `models.context_attention`, read off compiled programs of `models.llama`
(jax 0.10.2, for H100) like the rest of a block; sizes in terms of a device's queries q, keys kv
(and as many values) and row statistics s. Independent of hardware.
"""

from collections.abc import Iterator

from scalejax.config.parallelism import CONTEXT
from scalejax.simulator.transformer.operations import Writer, combined
from scalejax.simulator.transformer.shape import BlockShard

_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_FORWARD, _BACKWARD = "attention", "attention.gradient"


def attend(write: Writer, shard: BlockShard, *, is_first: bool) -> None:
    """Attention of a device's queries over all keys that they see.

    Over heads, the all-to-all of the result is in flight at the end (`wait_for_result`).

    Args:
        write: builder of the block.
        shard: the device's shard of the block.
        is_first: whether this is the forward pass rather than its recompute.
    """
    if shard.strategy == "all_to_all":
        _exchange(write, f"{_FORWARD}.queries", shard.head_bytes)
        for name in ("keys", "values"):
            _exchange(write, f"{_FORWARD}.{name}", shard.sent_key_bytes)
        for name, size in _heads(shard):
            write.wait(f"{_FORWARD}.{name}")
            write.copy(f"{_FORWARD}.{name}.transpose", size)
        write.attention(_FORWARD, _whole(shard), _FORWARD_PRODUCTS, _read(shard), _written(shard))
        _exchange(write, f"{_FORWARD}.result", shard.head_bytes)
        return
    q, kv, s = shard.head_bytes, shard.key_bytes, shard.statistics_bytes
    start_keys(write, shard, _FORWARD)
    write.attention(
        f"{_FORWARD}.own", _own(shard), _FORWARD_PRODUCTS, _read(shard), _written(shard)
    )
    if _is_unrolled(shard):
        _attend_once(write, shard, is_first=is_first)
        return
    write.fusion(f"{_FORWARD}.halves", q, 2 * q)  # of the result, as float32
    _two_copies(write, f"{_FORWARD}.statistics", s // 2)
    if shard.strategy == "ring":
        write.fusion(f"{_FORWARD}.queries.halves", q, 3 * q // 2)
    else:
        _two_copies(write, f"{_FORWARD}.gathered", shard.layout.context * kv // 2)
    _wait_for_keys(write, shard, _FORWARD)
    for time in _times(write, shard, _FORWARD):
        is_last = time == "last"
        _pick_keys(write, f"{_FORWARD}.{time}", shard)
        for index in range(2):
            if index and not is_last:  # with the queries' halves, if nothing is sent on
                write.fusion(f"{_FORWARD}.{time}.queries", q, q // 2)
            write.attention(
                f"{_FORWARD}.{time}.{index}",
                _block(shard),
                _FORWARD_PRODUCTS,
                q // 2 + kv,
                q // 2 + s // 2,
                is_causal=False,
            )
        write.fusion(f"{_FORWARD}.{time}.statistics", s, s // 2)
        write.fusion(f"{_FORWARD}.{time}.log_sums", 5 * s // 2, 3 * s)
        if is_last:
            write.fusion(f"{_FORWARD}.{time}.merge", 3 * q + 2 * s, q if is_first else 3 * q // 2)
        else:
            write.fusion(f"{_FORWARD}.{time}.merge", 3 * q + 2 * s, 2 * q)
            _two_copies(write, f"{_FORWARD}.{time}.log_sums", s // 2)
        _wait_for_keys(write, shard, f"{_FORWARD}.{time}")
    if shard.strategy == "all_gather":
        write.fusion(f"{_FORWARD}.join", 2 * q, q)
    if not is_first or shard.recompute != "full":
        write.copy(f"{_FORWARD}.copy", q)


def _attend_once(write: Writer, shard: BlockShard, *, is_first: bool) -> None:
    """`attend` after a device's own tokens, if keys of only one other device are gathered: without
    a loop everything is fused, and nothing is copied from round to round."""
    q, kv, s = shard.head_bytes, shard.key_bytes, shard.statistics_bytes
    _wait_for_keys(write, shard, _FORWARD)
    write.copy(f"{_FORWARD}.queries.picked", q)
    _two_copies(write, f"{_FORWARD}.picked", kv)
    for index in range(2):
        write.attention(
            f"{_FORWARD}.step.{index}",
            _block(shard),
            _FORWARD_PRODUCTS,
            q // 2 + kv,
            q // 2 + s // 2,
            is_causal=False,
        )
    write.fusion(f"{_FORWARD}.statistics", s, s // 2)
    write.fusion(f"{_FORWARD}.log_sums", 5 * s // 2, 2 * s)
    keeps = not is_first and shard.recompute == "full"  # halves, for the backward pass
    write.fusion(f"{_FORWARD}.merge", 2 * q + 2 * s, 3 * q // 2 if keeps else q)
    if keeps:
        write.copy(f"{_FORWARD}.join", q)


def _is_unrolled(shard: BlockShard) -> bool:
    """Whether the loop over other devices' keys has a single round."""
    return shard.strategy == "all_gather" and shard.layout.context == 2


def wait_for_result(write: Writer, shard: BlockShard) -> None:
    """Wait for the result of attention over heads, and transpose it."""
    if shard.strategy == "all_to_all":
        write.wait(f"{_FORWARD}.result")
        write.copy(f"{_FORWARD}.result.transpose", shard.head_bytes)


def start_keys(write: Writer, shard: BlockShard, name: str = _BACKWARD) -> None:
    """Start to send on, or to gather, keys and values; recompute leaves those of the forward pass
    for the backward pass."""
    if shard.strategy == "all_to_all" or (name == _BACKWARD and shard.recompute == "full"):
        return
    if shard.strategy == "ring":
        _send(write, f"{name}.keys", 2 * shard.key_bytes)
        return
    size = shard.layout.context * shard.key_bytes
    for group in combined((each, size) for each in ("keys", "values")):
        count = len(group)
        write.start(f"{name}.{group[0]}", "all_gather", count * size, (CONTEXT,), buffers=count)


def start_result_gradient(write: Writer, shard: BlockShard) -> None:
    """Start the all-to-all of the gradient of the result of attention over heads."""
    if shard.strategy == "all_to_all":
        write.copy(f"{_BACKWARD}.result.transpose", shard.head_bytes)
        _exchange(write, f"{_BACKWARD}.result", shard.head_bytes)


def attend_back(write: Writer, shard: BlockShard) -> None:
    """Gradients of queries, keys and values; those that belong to other devices are in flight at
    the end (`wait_for_gradients`)."""
    q, kv, s, times = (
        shard.head_bytes,
        shard.key_bytes,
        shard.statistics_bytes,
        shard.layout.context,
    )
    read = _read(shard) + 2 * q + s
    if shard.strategy == "all_to_all":
        write.wait(f"{_BACKWARD}.result")
        write.copy(f"{_BACKWARD}.result.again", q)
        write.attention(_BACKWARD, _whole(shard), _BACKWARD_PRODUCTS, read, _read(shard))
        for name, size in _heads(shard):
            _exchange(write, f"{_BACKWARD}.home.{name}", size)
        return
    is_newer = shard.shape.compiler == "0.12"  # sends most sums home last, without overlap
    write.attention(f"{_BACKWARD}.own", _own(shard), _BACKWARD_PRODUCTS, read, _read(shard))
    is_unrolled = _is_unrolled(shard)
    if not is_unrolled:
        write.fusion(f"{_BACKWARD}.halves", q, 2 * q)  # of the queries' gradient, as float32
    # Recompute left the halves of queries and result.
    shared = ("gradient",) if shard.recompute == "full" else ("queries", "result", "gradient")
    halved = 3 * q // 2 if shard.strategy == "ring" else q
    for name in shared:
        write.fusion(f"{_BACKWARD}.{name}.halves", q, halved)
    if not (is_unrolled and shard.recompute == "full"):
        write.copy(f"{_BACKWARD}.statistics.halves", s)
    if shard.strategy == "all_gather":
        write.fusion(f"{_BACKWARD}.sums", kv, 2 * times * kv)
        write.copy(f"{_BACKWARD}.sums.own", kv)
    _wait_for_keys(write, shard, _BACKWARD)
    for time in ("once",) if is_unrolled else _times(write, shard, _BACKWARD):
        is_last = time in ("last", "once")
        if shard.strategy == "ring":
            _send(write, f"{_BACKWARD}.{time}.sums", kv if is_last and is_newer else 2 * kv)
        if not is_unrolled:
            _pick_keys(write, f"{_BACKWARD}.{time}", shard)
        elif shard.recompute != "full":
            _two_copies(write, f"{_BACKWARD}.{time}.picked", kv)
        for name in () if is_last else ("queries", "result", "gradient"):
            write.fusion(f"{_BACKWARD}.{time}.{name}", q, q // 2)
        if not is_last:
            write.fusion(f"{_BACKWARD}.{time}.statistics", s, s // 2)
        for index in range(2):
            write.attention(
                f"{_BACKWARD}.{time}.{index}",
                _block(shard),
                _BACKWARD_PRODUCTS,
                3 * q // 2 + kv + s // 2,
                q // 2 + kv,
                is_causal=False,
            )
        if not is_last:
            write.fusion(f"{_BACKWARD}.{time}.add", 3 * q, 2 * q)
        write.wait(f"{_BACKWARD}.{time}.sums")
        for name in ("keys", "values"):
            read_bytes = 2 * kv if shard.strategy == "ring" else kv
            write.fusion(f"{_BACKWARD}.{time}.{name}.add", read_bytes, kv)
        _wait_for_keys(write, shard, f"{_BACKWARD}.{time}")
    if shard.strategy == "ring":
        _send(write, f"{_BACKWARD}.home.keys", 2 * kv if is_newer else kv)
        if is_newer:
            write.wait(f"{_BACKWARD}.home.keys")
        _send(write, f"{_BACKWARD}.home.values", kv)
        return
    for group in combined((each, kv) for each in ("keys", "values")):
        count, name = len(group), f"{_BACKWARD}.home.{group[0]}"
        write.start(name, "reduce_scatter", count * times * kv, (CONTEXT,), buffers=count)


def wait_for_gradients(write: Writer, shard: BlockShard) -> None:
    """Wait for gradients of keys and values from other devices, and concatenate all."""
    for name in ("home", "home.keys", "home.values", "home.queries"):
        write.wait(f"{_BACKWARD}.{name}")
    # Gradients of queries are summed in float32, that of the last block separately.
    wide = {"ring": 2, "all_gather": 1, "all_to_all": 0}[shard.strategy] * shard.head_bytes
    write.fusion("qkv.concatenate", shard.qkv_bytes + wide, shard.qkv_bytes)


def _times(write: Writer, shard: BlockShard, name: str) -> Iterator[str]:
    """Yield a name for each distinct step over another device's keys, repeated as often as it runs;
    in a ring the next keys are sent meanwhile, except in the last step."""
    others = shard.layout.context - 1
    if shard.strategy == "all_gather":
        with write.repeated(f"{name}.loop", others):
            yield "step"
        return
    with write.repeated(f"{name}.loop", others - 1):
        _two_copies(write, f"{name}.step.keys", shard.key_bytes)
        _send(write, f"{name}.step.keys", 2 * shard.key_bytes)
        yield "step"
    yield "last"


def _pick_keys(write: Writer, name: str, shard: BlockShard) -> None:
    """The chunks of keys and values for the second of two blocks."""
    if shard.strategy == "ring":
        _two_copies(write, f"{name}.picked", shard.key_bytes)
    else:
        write.copy(f"{name}.picked", 2 * shard.key_bytes)


def _wait_for_keys(write: Writer, shard: BlockShard, name: str) -> None:
    write.wait(f"{name}.keys")
    write.wait(f"{name}.values")


def _send(write: Writer, name: str, size: int) -> None:
    write.start(name, "collective_permute", size, (CONTEXT,), buffers=2)


def _exchange(write: Writer, name: str, size: int) -> None:
    write.start(name, "all_to_all", size, (CONTEXT,))


def _two_copies(write: Writer, name: str, size: int) -> None:
    for index in range(2):
        write.copy(f"{name}.copy.{index}", size)


def _heads(shard: BlockShard) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of what attention over heads reads."""
    sent = shard.sent_key_bytes
    return ("keys", sent), ("values", sent), ("queries", shard.head_bytes)


def _read(shard: BlockShard) -> int:
    """Bytes of queries, keys and values of one call for all of a device's queries."""
    return shard.head_bytes + 2 * shard.sent_key_bytes


def _written(shard: BlockShard) -> int:
    return shard.head_bytes + shard.statistics_bytes


def _own(shard: BlockShard) -> tuple[int, int, int, int]:
    """(samples x heads, queries, keys, size) of the device's own tokens."""
    tokens = shard.shape.tokens // shard.layout.context
    return shard.score_batch, tokens, tokens, shard.shape.head_size


def _block(shard: BlockShard) -> tuple[int, int, int, int]:
    """The same for one chunk of queries and one of keys."""
    tokens = shard.shape.tokens // shard.layout.context // 2
    return shard.score_batch, tokens, tokens, shard.shape.head_size


def _whole(shard: BlockShard) -> tuple[int, int, int, int]:
    """The same for some heads of whole samples."""
    tokens = shard.shape.tokens
    return shard.score_batch // shard.layout.context, tokens, tokens, shard.shape.head_size
