"""Operations of one transformer block, forward and backward, as XLA compiles it for GPUs.

The fusions, and the bytes that each reads and writes, were read off compiled programs of
`models.gpt` (jax 0.10.2, for an A100) and are derived here from shapes. A layer of a stacked
matrix is copied out of its stack before a product, and gradients into theirs. Left out: the bytes
of fusions of single vectors (biases, gradients of norms), which are counted only. Knows no
hardware.
"""

from functools import lru_cache

from scalejax.config.parallelism import CONTEXT, FSDP, TENSOR
from scalejax.simulator.program import Operation
from scalejax.simulator.transformer.operations import Writer
from scalejax.simulator.transformer.shape import BlockShard, sum_axes
from scalejax.simulator.transforms.float8 import with_float8_products

_CACHE_SIZE = 65536  # entries of the cache: searches ask for equal blocks again
_STATISTICS_BYTES = 8  # of a row: its mean and its variance, float32
_MATRICES = ("qkv", "projection", "up", "down")


def block_forward(shard: BlockShard) -> tuple[Operation, ...]:
    """Operations of the forward pass of one block for one microbatch."""
    block = _Block("forward", shard)
    write, keeps = block.write, shard.recompute != "full"
    block.vectors("biases", 3)
    _matrices(block)
    _attention_half(block, is_first=True)
    _feed_forward_half(block)
    if keeps:
        _keep_activations(block)
    write.copy("kept", shard.kept_stream_bytes)
    if shard.layout.tensor > 1:
        size = shard.kept_stream_bytes
        write.fusion("feed_forward.residual", 3 * size, size)
    return block.done()


def block_backward(shard: BlockShard) -> tuple[Operation, ...]:
    """Operations of the backward pass of one block, with recompute and gradient sums."""
    block = _Block("backward", shard)
    if shard.recompute == "full":
        block.vectors("biases", 2)
        _matrices(block)
        _attention_half(block, is_first=False)
        block.norm("feed_forward.norm", has_sum=shard.layout.tensor > 1)
        block.gather_tokens("feed_forward")
        _up(block)
    elif shard.recompute == "selective_op":
        _matrices(block)
        _kept_activations(block)
        _between_kept(block)
    else:
        _matrices(block)
        block.norm_statistics("feed_forward.norm")
        block.norm_statistics("attention.norm")
        _kept_activations(block)
    _feed_forward_gradients(block)
    _attention_gradients(block)
    _sum_gradients(block)
    return block.done()


class _Block:
    """Builder of the operations of a pass over a block, with the sizes that they share."""

    def __init__(self, prefix: str, shard: BlockShard) -> None:
        shape = shard.shape
        self.shard = shard
        self.write = Writer(prefix, shape.operand_type, shard.layout)
        self.tensor = shard.layout.tensor
        self.rows = shard.rows
        self.hidden = shape.hidden
        self.qkv_width = shape.qkv_width // self.tensor
        self.up_width = shape.up_width // self.tensor
        self.inner_width = shape.ffn_hidden // self.tensor
        self.head_width = self.hidden // self.tensor

    def done(self) -> tuple[Operation, ...]:
        """All operations so far, with products in fp8 if that is the compute type."""
        operations = self.write.done()
        is_float8 = self.shard.shape.compute_dtype == "float8"
        return with_float8_products(operations) if is_float8 else operations

    def vectors(self, name: str, count: int) -> None:
        """Add `count` fusions of single vectors."""
        for index in range(count):
            self.write.copy(f"{name}.{index}", self.hidden * 4)

    def norm_statistics(self, name: str, *, has_sum: bool = False) -> None:
        """Add the mean and variance of each row; with `has_sum`, of the sum of two inputs."""
        size = self.shard.kept_stream_bytes
        rows = size // (self.hidden * self.shard.shape.element_bytes)
        self.write.fusion(f"{name}.statistics", size * (1 + has_sum), rows * _STATISTICS_BYTES)

    def norm(self, name: str, *, has_sum: bool = False) -> None:
        """Add a norm of the residual stream."""
        size = self.shard.kept_stream_bytes
        self.norm_statistics(name, has_sum=has_sum)
        self.write.fusion(f"{name}.apply", size * (1 + has_sum), size)

    def gather_tokens(self, name: str) -> None:
        """Add the all-gather of tokens over tensor before a column-parallel product."""
        if self.shard.sequence_parallel:
            payload = self.shard.stream_bytes
            self.write.collective(f"{name}.gather_tokens", "all_gather", payload, (TENSOR,))
            self._transpose_tokens(name)

    def start_sum_over_tensor(self, name: str) -> None:
        """Start the sum over tensor after a row-parallel product."""
        kind = "reduce_scatter" if self.shard.sequence_parallel else "all_reduce"
        if self.shard.sequence_parallel:
            self._transpose_tokens(name)
        self.write.start(f"{name}.sum", kind, self.shard.stream_bytes, (TENSOR,))

    def _transpose_tokens(self, name: str) -> None:
        """Add the transpose that moves tokens to the first dimension, if there are several
        samples."""
        if self.shard.samples > 1:
            self.write.copy(f"{name}.transpose_tokens", self.shard.stream_bytes)

    def sum_over_tensor(self, name: str) -> None:
        """Add the sum over tensor after a row-parallel product, and wait for it."""
        self.start_sum_over_tensor(name)
        self.write.wait(f"{name}.sum")


def _matrices(block: _Block) -> None:
    """Slice a layer of each stacked matrix, and gather it over fsdp during the first norm."""
    shard, write, fsdp = block.shard, block.write, block.shard.layout.fsdp
    for name, size in zip(_MATRICES, shard.matrices, strict=True):
        write.copy(f"{name}.slice", size // fsdp)
    write.start("gather_matrices", "all_gather", shard.matrix_bytes, (FSDP,), buffers=4)
    if fsdp > 1:
        write.copy("stream.copy", shard.kept_stream_bytes)
    if write.operations[0].name.startswith("forward") or shard.recompute in (
        "selective_op",
        "full",
    ):
        block.norm("attention.norm")
    write.wait("gather_matrices")


def _attention_half(block: _Block, *, is_first: bool) -> None:
    """Attention up to its projection; the mask is read in the forward pass only."""
    shard, write, tensor = block.shard, block.write, block.tensor
    block.gather_tokens("attention")
    write.matmul("qkv", (1, block.rows, block.qkv_width, block.hidden), shard.qkv_bytes)
    # Either biases are broadcast, added in the product, and its result is sliced, or the result
    # is transposed twice: the same traffic.
    write.fusion("qkv.bias", shard.qkv_bytes, shard.qkv_bytes)
    write.copy("qkv.slice", shard.qkv_bytes)
    _gather_keys(block)
    _scores(block, has_mask=is_first, name="attention")
    if tensor > 1:
        write.matmul("projection", (1, block.rows, block.hidden, block.head_width))
    else:
        write.matmul(
            "projection", (1, block.rows, block.hidden, block.head_width), shard.stream_bytes
        )
    block.sum_over_tensor("projection")


def _gather_keys(block: _Block) -> None:
    """All-gather of keys and values of the whole sample over context."""
    shard, context = block.shard, block.shard.layout.context
    if context > 1:
        keys = 2 * shard.rows * shard.shape.kv_heads * shard.shape.head_size
        payload = keys * context * shard.shape.element_bytes // block.tensor
        block.write.collective("attention.gather_keys", "all_gather", payload, (CONTEXT,))


def _score_shape(shard: BlockShard) -> tuple[int, int, int]:
    queries = shard.shape.tokens // shard.layout.context
    return shard.score_batch, queries, shard.shape.tokens


def _scores(block: _Block, *, has_mask: bool, name: str) -> None:
    """Scores, softmax and weighted values of attention, fused or not."""
    shard, write = block.shard, block.write
    (batch, queries, keys), size = _score_shape(shard), shard.shape.head_size
    if shard.shape.is_fused:
        statistics = batch * queries * 4
        shape = (batch, queries, keys, size)
        write.attention(name, shape, 2, shard.qkv_bytes, shard.head_bytes + statistics)
        return
    mask = queries * keys * 4 if has_mask else 0
    write.matmul(f"{name}.scores", (batch, queries, keys, size))
    write.fusion(f"{name}.softmax", shard.score_bytes + mask, shard.score_bytes)
    write.matmul(f"{name}.mix", (batch, size, queries, keys))
    write.copy(f"{name}.transpose", shard.head_bytes)


def _feed_forward_half(block: _Block) -> None:
    """The feed-forward layer with its norm."""
    shard, write = block.shard, block.write
    block.norm("feed_forward.norm", has_sum=block.tensor > 1)
    block.gather_tokens("feed_forward")
    _up(block)
    residual = shard.stream_bytes if block.tensor == 1 else 0
    write.matmul("down", (1, block.rows, block.hidden, block.inner_width), residual)
    block.sum_over_tensor("down")


def _up(block: _Block) -> None:
    """The up projection; a GELU is fused into it, a SwiGLU is not."""
    shard, write = block.shard, block.write
    for name, width in _columns(block):
        write.matmul(name, (1, block.rows, width, block.hidden))
    if shard.shape.is_gated:
        write.fusion("up.gate", shard.up_bytes, shard.inner_bytes)


def _columns(block: _Block) -> tuple[tuple[str, int], ...]:
    """(name, width) of the up projections: one, unless the layer is gated and one of its two
    halves is recomputed."""
    if block.shard.recompute == "selective_op" and block.shard.shape.is_gated:
        return ("gate", block.inner_width), ("up", block.inner_width)
    return (("up", block.up_width),)


def _between_kept(block: _Block) -> None:
    """Recompute where every second product is kept: the projection, unless its sum over tensor
    was kept; norms, and tokens gathered for them; the gated half of the up projection."""
    shard, write = block.shard, block.write
    block.gather_tokens("attention")
    if block.tensor == 1:
        shape = (1, block.rows, block.hidden, block.head_width)
        write.matmul("projection", shape, shard.stream_bytes)
    block.norm("feed_forward.norm")
    block.gather_tokens("feed_forward")
    if shard.shape.is_gated:
        write.matmul("up", (1, block.rows, block.inner_width, block.hidden))


def _kept(shard: BlockShard) -> list[tuple[str, int]]:
    """(name, bytes) of the activations that a block keeps besides its input."""
    if shard.recompute == "selective_op":
        summed = [("kept.stream", shard.kept_stream_bytes)] if shard.layout.tensor > 1 else []
        products = [("kept.queries", shard.qkv_bytes), ("kept.gate", shard.inner_bytes)]
        return [*summed, *products, ("kept.mixed", shard.head_bytes)]
    kept = [("kept.stream", shard.kept_stream_bytes)]
    # Inputs of column-parallel products: all tokens, as they are not gathered again.
    kept += [(f"kept.normalised.{index}", shard.stream_bytes) for index in range(2)]
    kept += [("kept.queries", shard.qkv_bytes), ("kept.mixed", shard.head_bytes)]
    kept.append(("kept.up", shard.up_bytes))
    if shard.recompute == "none":
        kept.append(("kept.inner", shard.inner_bytes))
    if not shard.shape.is_fused and shard.recompute == "none":
        kept.append(("kept.scores", shard.score_bytes))
    return kept


@lru_cache(maxsize=_CACHE_SIZE)
def kept_bytes(shard: BlockShard) -> int:
    """Bytes that one block keeps of one microbatch for its backward pass."""
    kept = shard.kept_stream_bytes
    if shard.recompute == "full":
        return kept
    return kept + sum(size for _, size in _kept(shard))


def _keep_activations(block: _Block) -> None:
    """Copies of kept activations into their stacks, and of buffers that products overwrite."""
    for name, size in _kept(block.shard):
        block.write.copy(name, size)
    for index in range(3):
        block.write.copy(f"stream.copy.{index}", block.shard.kept_stream_bytes)


def _kept_activations(block: _Block) -> None:
    """Copies of kept activations out of their stacks, except those that are used once."""
    shard, write = block.shard, block.write
    if shard.recompute == "none":
        write.copy("kept.inner", shard.inner_bytes)
    write.copy("kept.queries", shard.qkv_bytes)
    for index in range(2 if shard.recompute != "selective_op" else 0):
        write.copy(f"kept.normalised.{index}", shard.stream_bytes)
    write.copy("kept.mixed", shard.head_bytes)
    if shard.recompute != "none" and not shard.shape.is_fused:
        (batch, queries, keys), size = _score_shape(shard), shard.shape.head_size
        write.matmul("attention.scores", (batch, queries, keys, size))
        write.fusion("attention.softmax", shard.score_bytes, shard.score_bytes)


def _feed_forward_gradients(block: _Block) -> None:
    """Backward pass from the gradient after the block to that before its feed-forward norm."""
    shard, write, rows = block.shard, block.write, block.rows
    size, inner = shard.kept_stream_bytes, shard.inner_bytes
    block.gather_tokens("down.gradient")
    write.matmul("down.input_gradient", (1, rows, block.inner_width, block.hidden))
    # If not kept, the hidden activation is written once more, for the gradient of the matrix.
    again = inner if shard.recompute != "none" else 0
    write.fusion("up.gelu_gradient", inner + shard.up_bytes, shard.up_bytes + again)
    for name, width in _columns(block):
        write.matmul(f"{name}.input_gradient", (1, rows, block.hidden, width))
    block.sum_over_tensor("up.input_gradient")
    summands = 2 if block.tensor > 1 else 1
    write.fusion("feed_forward.norm.gradient.statistics", (1 + summands) * size, size // 64)
    write.fusion("feed_forward.norm.gradient", (2 + summands) * size, size)
    for name, width in _columns(block):
        write.matmul(f"{name}.gradient", (1, width, block.hidden, rows))
    write.matmul("down.gradient", (1, block.hidden, block.inner_width, rows))
    write.fusion("up.bias.gradient", shard.up_bytes, block.hidden * 4)
    write.fusion("down.bias.gradient", size, block.hidden * 4)


def _attention_gradients(block: _Block) -> None:
    """Backward pass from the gradient before the feed-forward norm to that before the block."""
    shard, write, rows = block.shard, block.write, block.rows
    size = shard.kept_stream_bytes
    block.gather_tokens("projection.gradient")
    write.matmul("projection.input_gradient", (1, rows, block.head_width, block.hidden))
    _score_gradients(block)
    write.copy("qkv.concatenate", shard.qkv_bytes)
    if not shard.shape.is_fused:
        write.copy("qkv.transpose.0", shard.qkv_bytes)
        write.copy("qkv.transpose.1", shard.qkv_bytes)
    _projection_gradients(block)
    # Products of float32 for the gradient of the norm's scale, of both norms.
    wide = 4 // shard.shape.element_bytes * size
    write.fusion("attention.norm.gradient.statistics", 2 * size, wide)
    write.fusion("attention.norm.gradient", 3 * size + wide, size + wide)
    for index in range(2):
        write.fusion(f"attention.norm.scale.gradient.{index}", wide, block.hidden * 4)


def _projection_gradients(block: _Block) -> None:
    """Gradients of the attention's matrices, overlapped with the sum of the input gradient over
    tensor; or, where tensor is 1, with the sum of the matrices' gradients."""
    shard, write, rows = block.shard, block.write, block.rows
    if block.tensor > 1:
        write.matmul("qkv.input_gradient", (1, rows, block.hidden, block.qkv_width))
        block.start_sum_over_tensor("qkv.input_gradient")
    write.matmul("projection.gradient", (1, block.head_width, block.hidden, rows))
    write.matmul("qkv.gradient", (1, block.qkv_width, block.hidden, rows))
    write.fusion("qkv.bias.gradient", shard.qkv_bytes, block.hidden * 4)
    _start_sum(block)
    if block.tensor > 1:
        write.wait("qkv.input_gradient.sum")
    else:
        write.matmul("qkv.input_gradient", (1, rows, block.hidden, block.qkv_width))


def _score_gradients(block: _Block) -> None:
    """Gradients of queries, keys and values, from the gradient of the attention output."""
    shard, write = block.shard, block.write
    (batch, queries, keys), size = _score_shape(shard), shard.shape.head_size
    if shard.shape.is_fused:
        read = shard.qkv_bytes + 2 * shard.head_bytes + batch * queries * 4
        write.attention(
            "attention.gradient", (batch, queries, keys, size), 5, read, shard.qkv_bytes
        )
    else:
        write.copy("projection.gradient.transpose", shard.head_bytes)
        write.copy("mixed.gradient.transpose", shard.head_bytes)
        write.matmul("scores.gradient", (batch, queries, keys, size))
        write.fusion("softmax.gradient", 2 * shard.score_bytes, shard.score_bytes)
        for name in ("values", "keys", "queries"):
            write.matmul(f"{name}.gradient", (batch, queries, size, keys))
    context = shard.layout.context
    if context > 1:
        gathered = 2 * shard.rows * shard.shape.kv_heads * size * context
        payload = gathered * shard.shape.element_bytes // block.tensor
        write.collective("keys.gradient.sum", "reduce_scatter", payload, (CONTEXT,))


def _start_sum(block: _Block) -> None:
    """Start the sum of gradients over the batch, where fsdp does not scatter them first."""
    shard, along = block.shard, sum_axes(block.shard.layout)
    if along and shard.layout.fsdp == 1:
        kind = "reduce_scatter" if shard.is_scattered else "all_reduce"
        block.write.copy("sum.concatenate", shard.matrix_bytes)
        block.write.start("sum", kind, shard.matrix_bytes, along)


def _sum_gradients(block: _Block) -> None:
    """Sums of the matrices' gradients over fsdp and the batch, and copies into their stacks."""
    shard, write, layout = block.shard, block.write, block.shard.layout
    qkv, projection, up, down = shard.matrices
    fsdp, along = layout.fsdp, sum_axes(layout)
    block.vectors("stack", 8)
    if fsdp > 1 and layout.tensor > 1 and along:
        # Matrices whose rows are sharded over both axes: XLA all-reduces them over all of the
        # batch's axes and slices the result, where it reduce-scatters the others.
        write.start("scatter", "reduce_scatter", qkv + up, (FSDP,), buffers=2)
        write.start("sum_all", "all_reduce", projection + down, (*along, FSDP))
        write.wait("scatter")
        write.start("sum", "all_reduce", (qkv + up) // fsdp, along)
        write.wait("sum_all")
    elif fsdp > 1:
        write.collective("scatter", "reduce_scatter", shard.matrix_bytes, (FSDP,))
        write.start("sum", "all_reduce", shard.matrix_bytes // fsdp, along)
    write.wait("sum")
    parts = fsdp * shard.gradient_parts
    if along:
        write.copy("sum.slice", shard.matrix_bytes // parts)
    for name, size in zip(_MATRICES, shard.matrices, strict=True):
        write.copy(f"{name}.stack", size // parts)
