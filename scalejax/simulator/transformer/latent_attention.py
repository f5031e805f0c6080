"""Operations of latent attention other than its scores, as XLA compiles it for GPUs.

Queries, keys and values are made from latents of each token, and each latent from the stream by one
product (`models.llama.LatentAttention`). Read off compiled programs (jax 0.10.2, for H100);
sizes follow from the ranks. Independent of hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from scalejax.config.parallelism import TENSOR
from scalejax.simulator.transformer.operations import Writer
from scalejax.simulator.transformer.shape import BlockShard

_CACHE_SIZE = 65536
_STATISTICS_BYTES = 4  # per row: the root of its mean square


@dataclass(frozen=True, slots=True)
class LatentShard:
    """Widths of the products of one device."""

    queries: int | None
    """Latent of queries; None if they are made from the stream."""
    keys: int
    """Latent of keys and values."""
    rotated: int
    """Rotated part of the keys, shared by all heads."""
    query_width: int
    """Queries of the device's heads."""
    kv_width: int
    """Keys without their rotated part, and values, of the device's heads."""
    head_size: int
    """Rotated part of the keys of the device's heads, one for each head."""


@lru_cache(maxsize=_CACHE_SIZE)
def latent_shard(shard: BlockShard) -> LatentShard:
    """Widths of the products of one device."""
    mla, shape = shard.shape.latent, shard.shape
    assert mla is not None  # noqa: S101  of a block with latents
    heads = shape.heads // shard.layout.tensor
    return LatentShard(
        queries=mla.q_lora_rank,
        keys=mla.kv_lora_rank,
        rotated=mla.rope_head_size,
        query_width=heads * shape.head_size,
        kv_width=heads * (mla.nope_head_size + mla.value_head_size),
        head_size=mla.rope_head_size * heads,
    )


def kept(shard: BlockShard) -> list[tuple[str, int]]:
    """(name, bytes) of the latents that a block keeps: as they were made, and normalised, unless
    every second product is recomputed."""
    own, size = latent_shard(shard), shard.rows * shard.shape.element_bytes
    widths = [own.keys + own.rotated, *([own.queries] if own.queries else [])]
    times = range(1 if shard.recompute == "selective_op" else 2)
    return [
        (f"kept.latent.{place}.{time}", width * size)
        for time in times
        for place, width in enumerate(widths)
    ]


def make_heads(
    write: Writer, shard: BlockShard, use: Callable[[str], None], *, is_between: bool = False
) -> None:
    """Queries, keys and values of the device's heads, made from the stream; or, if `is_between`
    products that are kept, only from kept latents."""
    own, rows, used = latent_shard(shard), shard.rows, shard.shape.element_bytes
    hidden = shard.shape.hidden
    if not is_between:
        use("kv_down")
        write.matmul("kv_down", (1, rows, own.keys + own.rotated, hidden))
    _normalise(write, shard, "kv_norm", own.keys)
    use("kv_up")
    write.matmul("kv_up", (1, rows, own.kv_width, own.keys))
    write.copy("keys.rotate", rows * own.rotated * used)
    write.copy("keys.concatenate", shard.head_bytes)
    write.copy("values.slice", shard.mixed_bytes)
    if own.queries is None:
        if not is_between:
            use("q")
            write.matmul("q", (1, rows, own.query_width, hidden))
    else:
        if not is_between:
            use("q_down")
            write.matmul("q_down", (1, rows, own.queries, hidden))
        _normalise(write, shard, "q_norm", own.queries)
        use("q_up")
        write.matmul("q_up", (1, rows, own.query_width, own.queries))
    write.copy("queries.rotate", shard.head_bytes)


def _normalise(write: Writer, shard: BlockShard, name: str, width: int) -> None:
    """The norm of a latent."""
    size, statistics = _norm_bytes(shard, width)
    write.fusion(f"{name}.statistics", size, statistics)
    write.copy(f"{name}.root", statistics)
    write.fusion(f"{name}.apply", size, size)
    write.scalars(f"{name}.vector", 1)


def _norm_bytes(shard: BlockShard, width: int) -> tuple[int, int]:
    return shard.rows * width * shard.shape.element_bytes, shard.rows * _STATISTICS_BYTES


def _norm_gradient(write: Writer, shard: BlockShard, name: str, width: int) -> None:
    size, statistics = _norm_bytes(shard, width)
    write.fusion(f"{name}.gradient.statistics", 2 * size, statistics)
    write.copy(f"{name}.gradient.mean", statistics)
    write.fusion(f"{name}.gradient", 2 * size, size)
    write.scalars(f"{name}.scale.gradient", 3)


def gradients(
    write: Writer,
    shard: BlockShard,
    use: Callable[[str], None],
    start_sums: Callable[[str], None],
    others: Callable[[], None],
) -> None:
    """Gradients of the matrices, and of the stream, from those of queries, keys and values.

    Args:
        write: builder of the block.
        shard: the device's shard of the block.
        use: waits for a matrix.
        start_sums: starts the sum of the gradient of a matrix.
        others: gradients of other matrices, while latents are summed over tensor.
    """
    own, rows, used = latent_shard(shard), shard.rows, shard.shape.element_bytes
    hidden = shard.shape.hidden
    write.copy("queries.rotate.gradient", shard.head_bytes)
    write.copy("kv.concatenate", rows * own.kv_width * used)
    latents = own.keys + (own.queries or 0)
    if own.queries is not None:
        use("q_up")
        write.matmul("q_up.input_gradient", (1, rows, own.queries, own.query_width))
    use("kv_up")
    write.matmul("kv_up.input_gradient", (1, rows, own.keys, own.kv_width))
    write.start("latents.sum", "all_reduce", (latents + own.rotated) * rows * used, (TENSOR,))
    others()
    if own.queries is not None:
        write.matmul("q_up.gradient", (1, own.query_width, own.queries, rows))
        start_sums("q_up")
    write.matmul("kv_up.gradient", (1, own.kv_width, own.keys, rows))
    start_sums("kv_up")
    write.wait("latents.sum")
    if own.queries is not None:
        _norm_gradient(write, shard, "q_norm", own.queries)
    _norm_gradient(write, shard, "kv_norm", own.keys)
    rotated = rows * own.rotated * used
    write.fusion("keys.rotate.gradient", rows * own.head_size * used, rotated)
    size = rows * own.keys * used
    write.fusion("kv_down.concatenate", 2 * size + rotated, size + rotated)
    name, width = ("q", own.query_width) if own.queries is None else ("q_down", own.queries)
    write.matmul(f"{name}.gradient", (1, hidden, width, rows))
    start_sums(name)
    write.matmul("kv_down.gradient", (1, hidden, own.keys + own.rotated, rows))
    start_sums("kv_down")
    use(name)
    write.matmul(f"{name}.input_gradient", (1, rows, hidden, width))
    use("kv_down")
    shape = (1, rows, hidden, own.keys + own.rotated)
    write.matmul("kv_down.input_gradient", shape, shard.stream_bytes)
