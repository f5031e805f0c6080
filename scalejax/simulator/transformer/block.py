"""One block of a transformer, forward and backward, as XLA compiles it for GPUs.

Which fusions there are, and what each reads and writes, was read off compiled programs of
`models.gpt` (jax 0.10.2, for an A100) and is derived here from shapes: u is the residual stream of
a microbatch, q its queries, F the inside of the feed-forward layer, S the scores. A layer of a
stacked matrix is copied out of its stack before a product, and gradients into theirs. Left out:
fusions of single vectors (biases, gradients of norms) but for their number.
"""

from functools import lru_cache

from scalejax.config.parallelism import CONTEXT, FSDP, TENSOR
from scalejax.simulator.program import Operation
from scalejax.simulator.transformer.operations import Writer
from scalejax.simulator.transformer.shape import Part, sum_axes
from scalejax.simulator.transforms.float8 import with_float8_products

_KEPT = 65536  # blocks that a search meets again
_STATISTICS_BYTES = 8  # of a row: its mean and its variance, float32
_MATRICES = ("qkv", "projection", "up", "down")


@lru_cache(maxsize=_KEPT)
def block_forward(part: Part) -> tuple[Operation, ...]:
    """The operations of the forward pass of one block for one microbatch."""
    block = _Block("forward", part)
    write, keeps = block.write, part.recompute != "full"
    block.vectors("biases", 3)
    _matrices(block)
    _attention_half(block, is_first=True)
    _feed_forward_half(block)
    if keeps:
        _keep_activations(block)
    write.copy("kept", part.kept_stream_bytes)
    if part.layout.tensor > 1:
        size = part.kept_stream_bytes
        write.fusion("feed_forward.residual", 3 * size, size)
    return block.done()


@lru_cache(maxsize=_KEPT)
def block_backward(part: Part) -> tuple[Operation, ...]:
    """Those of its backward pass, with what is computed again and how gradients are summed."""
    block = _Block("backward", part)
    if part.recompute == "full":
        block.vectors("biases", 2)
        _matrices(block)
        _attention_half(block, is_first=False)
        block.norm("feed_forward.norm", has_sum=part.layout.tensor > 1)
        block.gather_tokens("feed_forward")
        _up(block)
    elif part.recompute == "selective_op":
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
    """The operations of a pass over a block, and the sizes that they share."""

    def __init__(self, prefix: str, part: Part) -> None:
        shape = part.shape
        self.part = part
        self.write = Writer(prefix, shape.operand_type, part.layout)
        self.tensor = part.layout.tensor
        self.rows = part.rows
        self.hidden = shape.hidden
        self.qkv_width = shape.qkv_width // self.tensor
        self.up_width = shape.up_width // self.tensor
        self.inner_width = shape.ffn_hidden // self.tensor
        self.head_width = self.hidden // self.tensor

    def done(self) -> tuple[Operation, ...]:
        """All that was written, products in fp8 where they are asked for."""
        operations = self.write.done()
        is_float8 = self.part.shape.compute_dtype == "float8"
        return with_float8_products(operations) if is_float8 else operations

    def vectors(self, name: str, count: int) -> None:
        """So many fusions of single vectors."""
        for index in range(count):
            self.write.copy(f"{name}.{index}", self.hidden * 4)

    def norm_statistics(self, name: str, *, has_sum: bool = False) -> None:
        """Mean and variance of each row, where `has_sum` of two summands."""
        size = self.part.kept_stream_bytes
        rows = size // (self.hidden * self.part.shape.element_bytes)
        self.write.fusion(f"{name}.statistics", size * (1 + has_sum), rows * _STATISTICS_BYTES)

    def norm(self, name: str, *, has_sum: bool = False) -> None:
        """A norm of the residual stream."""
        size = self.part.kept_stream_bytes
        self.norm_statistics(name, has_sum=has_sum)
        self.write.fusion(f"{name}.apply", size * (1 + has_sum), size)

    def gather_tokens(self, name: str) -> None:
        """All tokens of the tensor group before a product that it divides by columns."""
        if self.part.sequence_parallel:
            payload = self.part.stream_bytes
            self.write.collective(f"{name}.gather_tokens", "all_gather", payload, (TENSOR,))
            self._transpose_tokens(name)

    def start_sum_over_tensor(self, name: str) -> None:
        """The sum after a product that it divides by rows, begun."""
        kind = "reduce_scatter" if self.part.sequence_parallel else "all_reduce"
        if self.part.sequence_parallel:
            self._transpose_tokens(name)
        self.write.start(f"{name}.sum", kind, self.part.stream_bytes, (TENSOR,))

    def _transpose_tokens(self, name: str) -> None:
        """Parts are exchanged along the first dimension, which is the samples', if there are
        several."""
        if self.part.samples > 1:
            self.write.copy(f"{name}.transpose_tokens", self.part.stream_bytes)

    def sum_over_tensor(self, name: str) -> None:
        """The same, waited for at once."""
        self.start_sum_over_tensor(name)
        self.write.wait(f"{name}.sum")


def _matrices(block: _Block) -> None:
    """A layer of each stacked matrix, gathered over fsdp while the first norm is computed."""
    part, write, fsdp = block.part, block.write, block.part.layout.fsdp
    for name, size in zip(_MATRICES, part.matrices, strict=True):
        write.copy(f"{name}.slice", size // fsdp)
    write.start("gather_matrices", "all_gather", part.matrix_bytes, (FSDP,), buffers=4)
    if fsdp > 1:
        write.copy("stream.copy", part.kept_stream_bytes)
    if write.operations[0].name.startswith("forward") or part.recompute in (
        "selective_op",
        "full",
    ):
        block.norm("attention.norm")
    write.wait("gather_matrices")


def _attention_half(block: _Block, *, is_first: bool) -> None:
    """Attention up to its projection; the mask is read unless it is computed again."""
    part, write, tensor = block.part, block.write, block.tensor
    block.gather_tokens("attention")
    write.matmul("qkv", (1, block.rows, block.qkv_width, block.hidden), part.qkv_bytes)
    # Either biases are broadcast, added in the product, and its result is sliced, or the result
    # is transposed twice: the same traffic.
    write.fusion("qkv.bias", part.qkv_bytes, part.qkv_bytes)
    write.copy("qkv.slice", part.qkv_bytes)
    _gather_keys(block)
    _scores(block, has_mask=is_first, name="attention")
    if tensor > 1:
        write.matmul("projection", (1, block.rows, block.hidden, block.head_width))
    else:
        write.matmul(
            "projection", (1, block.rows, block.hidden, block.head_width), part.stream_bytes
        )
    block.sum_over_tensor("projection")


def _gather_keys(block: _Block) -> None:
    """Keys and values of all tokens of the sample, over context."""
    part, context = block.part, block.part.layout.context
    if context > 1:
        keys = 2 * part.rows * part.shape.kv_heads * part.shape.head_size
        payload = keys * context * part.shape.element_bytes // block.tensor
        block.write.collective("attention.gather_keys", "all_gather", payload, (CONTEXT,))


def _score_shape(part: Part) -> tuple[int, int, int]:
    queries = part.shape.tokens // part.layout.context
    return part.score_batch, queries, part.shape.tokens


def _scores(block: _Block, *, has_mask: bool, name: str) -> None:
    """What every token takes from those before it."""
    part, write = block.part, block.write
    (batch, queries, keys), size = _score_shape(part), part.shape.head_size
    if part.shape.is_fused:
        statistics = batch * queries * 4
        shape = (batch, queries, keys, size)
        write.attention(name, shape, 2, part.qkv_bytes, part.head_bytes + statistics)
        return
    mask = queries * keys * 4 if has_mask else 0
    write.matmul(f"{name}.scores", (batch, queries, keys, size))
    write.fusion(f"{name}.softmax", part.score_bytes + mask, part.score_bytes)
    write.matmul(f"{name}.mix", (batch, size, queries, keys))
    write.copy(f"{name}.transpose", part.head_bytes)


def _feed_forward_half(block: _Block) -> None:
    """The feed-forward layer after its norm."""
    part, write = block.part, block.write
    block.norm("feed_forward.norm", has_sum=block.tensor > 1)
    block.gather_tokens("feed_forward")
    _up(block)
    residual = part.stream_bytes if block.tensor == 1 else 0
    write.matmul("down", (1, block.rows, block.hidden, block.inner_width), residual)
    block.sum_over_tensor("down")


def _up(block: _Block) -> None:
    """The product into the feed-forward layer; a GELU is part of it, a SwiGLU is not."""
    part, write = block.part, block.write
    for name, width in _columns(block):
        write.matmul(name, (1, block.rows, width, block.hidden))
    if part.shape.is_gated:
        write.fusion("up.gate", part.up_bytes, part.inner_bytes)


def _columns(block: _Block) -> tuple[tuple[str, int], ...]:
    """The products into the feed-forward layer and their widths: one, unless it is gated and one
    of the two is computed again."""
    if block.part.recompute == "selective_op" and block.part.shape.is_gated:
        return ("gate", block.inner_width), ("up", block.inner_width)
    return (("up", block.up_width),)


def _between_kept(block: _Block) -> None:
    """What is computed again where every second product is kept: the projection, unless its sum
    over tensor was kept; norms, and tokens gathered for them; what is gated."""
    part, write = block.part, block.write
    block.gather_tokens("attention")
    if block.tensor == 1:
        shape = (1, block.rows, block.hidden, block.head_width)
        write.matmul("projection", shape, part.stream_bytes)
    block.norm("feed_forward.norm")
    block.gather_tokens("feed_forward")
    if part.shape.is_gated:
        write.matmul("up", (1, block.rows, block.inner_width, block.hidden))


def _kept(part: Part) -> list[tuple[str, int]]:
    """Activations that a block keeps besides its input, where it does not compute them again."""
    if part.recompute == "selective_op":
        summed = [("kept.stream", part.kept_stream_bytes)] if part.layout.tensor > 1 else []
        products = [("kept.queries", part.qkv_bytes), ("kept.gate", part.inner_bytes)]
        return [*summed, *products, ("kept.mixed", part.head_bytes)]
    kept = [("kept.stream", part.kept_stream_bytes)]
    # What columns are multiplied with: all tokens, for it is not gathered again.
    kept += [(f"kept.normalised.{index}", part.stream_bytes) for index in range(2)]
    kept += [("kept.queries", part.qkv_bytes), ("kept.mixed", part.head_bytes)]
    kept.append(("kept.up", part.up_bytes))
    if part.recompute == "none":
        kept.append(("kept.inner", part.inner_bytes))
    if not part.shape.is_fused and part.recompute == "none":
        kept.append(("kept.scores", part.score_bytes))
    return kept


@lru_cache(maxsize=_KEPT)
def kept_bytes(part: Part) -> int:
    """Bytes that one block keeps of one microbatch for its backward pass."""
    kept = part.kept_stream_bytes
    if part.recompute == "full":
        return kept
    return kept + sum(size for _, size in _kept(part))


def _keep_activations(block: _Block) -> None:
    """Copies into the stacks of what is kept, and of what products would overwrite."""
    for name, size in _kept(block.part):
        block.write.copy(name, size)
    for index in range(3):
        block.write.copy(f"stream.copy.{index}", block.part.kept_stream_bytes)


def _kept_activations(block: _Block) -> None:
    """Copies out of the stacks; what is used once is read where it lies."""
    part, write = block.part, block.write
    if part.recompute == "none":
        write.copy("kept.inner", part.inner_bytes)
    write.copy("kept.queries", part.qkv_bytes)
    for index in range(2 if part.recompute != "selective_op" else 0):
        write.copy(f"kept.normalised.{index}", part.stream_bytes)
    write.copy("kept.mixed", part.head_bytes)
    if part.recompute != "none" and not part.shape.is_fused:
        (batch, queries, keys), size = _score_shape(part), part.shape.head_size
        write.matmul("attention.scores", (batch, queries, keys, size))
        write.fusion("attention.softmax", part.score_bytes, part.score_bytes)


def _feed_forward_gradients(block: _Block) -> None:
    """From the gradient after the block to that before its feed-forward norm."""
    part, write, rows = block.part, block.write, block.rows
    size, inner = part.kept_stream_bytes, part.inner_bytes
    block.gather_tokens("down.gradient")
    write.matmul("down.input_gradient", (1, rows, block.inner_width, block.hidden))
    # Where the inside was not kept it is written once more, for the gradient of the matrix.
    again = inner if part.recompute != "none" else 0
    write.fusion("up.gelu_gradient", inner + part.up_bytes, part.up_bytes + again)
    for name, width in _columns(block):
        write.matmul(f"{name}.input_gradient", (1, rows, block.hidden, width))
    block.sum_over_tensor("up.input_gradient")
    summands = 2 if block.tensor > 1 else 1
    write.fusion("feed_forward.norm.gradient.statistics", (1 + summands) * size, size // 64)
    write.fusion("feed_forward.norm.gradient", (2 + summands) * size, size)
    for name, width in _columns(block):
        write.matmul(f"{name}.gradient", (1, width, block.hidden, rows))
    write.matmul("down.gradient", (1, block.hidden, block.inner_width, rows))
    write.fusion("up.bias.gradient", part.up_bytes, block.hidden * 4)
    write.fusion("down.bias.gradient", size, block.hidden * 4)


def _attention_gradients(block: _Block) -> None:
    """From there to the gradient before the block."""
    part, write, rows = block.part, block.write, block.rows
    size = part.kept_stream_bytes
    block.gather_tokens("projection.gradient")
    write.matmul("projection.input_gradient", (1, rows, block.head_width, block.hidden))
    _score_gradients(block)
    write.copy("qkv.concatenate", part.qkv_bytes)
    if not part.shape.is_fused:
        write.copy("qkv.transpose.0", part.qkv_bytes)
        write.copy("qkv.transpose.1", part.qkv_bytes)
    _projection_gradients(block)
    # Products of float32 for the gradient of the norm's scale, of both norms.
    wide = 4 // part.shape.element_bytes * size
    write.fusion("attention.norm.gradient.statistics", 2 * size, wide)
    write.fusion("attention.norm.gradient", 3 * size + wide, size + wide)
    for index in range(2):
        write.fusion(f"attention.norm.scale.gradient.{index}", wide, block.hidden * 4)


def _projection_gradients(block: _Block) -> None:
    """Gradients of the attention's matrices, beside the sum of that of what they multiplied; or,
    where tensor divides nothing, beside the sum of the matrices' own."""
    part, write, rows = block.part, block.write, block.rows
    if block.tensor > 1:
        write.matmul("qkv.input_gradient", (1, rows, block.hidden, block.qkv_width))
        block.start_sum_over_tensor("qkv.input_gradient")
    write.matmul("projection.gradient", (1, block.head_width, block.hidden, rows))
    write.matmul("qkv.gradient", (1, block.qkv_width, block.hidden, rows))
    write.fusion("qkv.bias.gradient", part.qkv_bytes, block.hidden * 4)
    _start_sum(block)
    if block.tensor > 1:
        write.wait("qkv.input_gradient.sum")
    else:
        write.matmul("qkv.input_gradient", (1, rows, block.hidden, block.qkv_width))


def _score_gradients(block: _Block) -> None:
    """Gradients of queries, keys and values, from that of what is mixed of them."""
    part, write = block.part, block.write
    (batch, queries, keys), size = _score_shape(part), part.shape.head_size
    if part.shape.is_fused:
        read = part.qkv_bytes + 2 * part.head_bytes + batch * queries * 4
        write.attention("attention.gradient", (batch, queries, keys, size), 5, read, part.qkv_bytes)
    else:
        write.copy("projection.gradient.transpose", part.head_bytes)
        write.copy("mixed.gradient.transpose", part.head_bytes)
        write.matmul("scores.gradient", (batch, queries, keys, size))
        write.fusion("softmax.gradient", 2 * part.score_bytes, part.score_bytes)
        for name in ("values", "keys", "queries"):
            write.matmul(f"{name}.gradient", (batch, queries, size, keys))
    context = part.layout.context
    if context > 1:
        gathered = 2 * part.rows * part.shape.kv_heads * size * context
        payload = gathered * part.shape.element_bytes // block.tensor
        write.collective("keys.gradient.sum", "reduce_scatter", payload, (CONTEXT,))


def _start_sum(block: _Block) -> None:
    """Where fsdp does not scatter gradients first, they are summed while the rest is computed."""
    part, along = block.part, sum_axes(block.part.layout)
    if along and part.layout.fsdp == 1:
        kind = "reduce_scatter" if part.is_scattered else "all_reduce"
        block.write.copy("sum.concatenate", part.matrix_bytes)
        block.write.start("sum", kind, part.matrix_bytes, along)


def _sum_gradients(block: _Block) -> None:
    """Gradients of the matrices summed over fsdp and over the batch, and put in their stacks."""
    part, write, layout = block.part, block.write, block.part.layout
    qkv, projection, up, down = part.matrices
    fsdp, along = layout.fsdp, sum_axes(layout)
    block.vectors("stack", 8)
    if fsdp > 1 and layout.tensor > 1 and along:
        # Matrices whose rows both axes divide: XLA sums them over all of the batch's axes and
        # then takes the part, where it scatters the others.
        write.start("scatter", "reduce_scatter", qkv + up, (FSDP,), buffers=2)
        write.start("sum_all", "all_reduce", projection + down, (*along, FSDP))
        write.wait("scatter")
        write.start("sum", "all_reduce", (qkv + up) // fsdp, along)
        write.wait("sum_all")
    elif fsdp > 1:
        write.collective("scatter", "reduce_scatter", part.matrix_bytes, (FSDP,))
        write.start("sum", "all_reduce", part.matrix_bytes // fsdp, along)
    write.wait("sum")
    parts = fsdp * part.gradient_parts
    if along:
        write.copy("sum.slice", part.matrix_bytes // parts)
    for name, size in zip(_MATRICES, part.matrices, strict=True):
        write.copy(f"{name}.stack", size // parts)
