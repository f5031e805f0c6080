"""Operations of one transformer block, forward and backward, as XLA compiles it for GPUs.

The fusions, the bytes that each reads and writes, and their order were read off compiled programs
of `models.gpt` and `models.llama` (jax 0.10.2, for A100 and H100; the differences of 0.12.0.1, for
H100) and are derived here from shapes. Operations that overlap with a collective stand between its
start and its wait. A layer of a stacked matrix is copied out of its stack before a product, and
gradients into theirs. Fusions of single vectors and counters take a launch and no time. Independent
of hardware.
"""

from collections.abc import Callable
from functools import lru_cache
from math import isqrt

from scalejax.config.model import narrow_type
from scalejax.config.parallelism import CONTEXT, FSDP, TENSOR
from scalejax.simulator.program import Loop, Operation
from scalejax.simulator.transformer import context_attention, latent_attention
from scalejax.simulator.transformer.adapters import AdaptedLayer
from scalejax.simulator.transformer.experts import ExpertLayer
from scalejax.simulator.transformer.experts import kept as kept_by_experts
from scalejax.simulator.transformer.operations import Writer, combined
from scalejax.simulator.transformer.shape import ROWS_DIVIDED, BlockShard, is_of_experts
from scalejax.simulator.transforms.float8 import with_float8_products

_CACHE_SIZE = 65536  # entries of the caches: searches cost equal blocks again
_F32_BYTES = 4
_STATISTICS_BYTES = 8  # per row: its mean and its variance, float32
_SPLIT_ROWS = 4096
"""Sums over more rows than this take two operations, the first of which leaves about their root
(XLA, service/gpu/transforms/tree_reduction_rewriter.cc: 32 threads of 128 rows)."""


def block_forward(shard: BlockShard, kind: str = "") -> tuple[Operation | Loop, ...]:
    """Operations of the forward pass of one block for one microbatch.

    Args:
        shard: the device's shard of the block.
        kind: prefix of the names, if there are blocks of other kinds.
    """
    block = _Block(f"{kind}forward", shard)
    block.write.scalars("counter", 2)
    _normalised_for_attention(block)
    _attention_half(block, is_first=True)
    block.norm("feed_forward.norm")
    if block.experts is None:
        _feed_forward_half(block)
    else:
        _expert_half(block, block.experts)
    return block.done()


def block_backward(shard: BlockShard, kind: str = "") -> tuple[Operation | Loop, ...]:
    """Operations of the backward pass of one block, with recompute and gradient sums; arguments as
    for `block_forward`."""
    block = _Block(f"{kind}backward", shard)
    block.write.scalars("counter", 2)
    if shard.recompute == "full":
        _normalised_for_attention(block)
        _attention_half(block, is_first=False)
        if shard.is_of_stage and block.experts is None and not block.adapts("down"):
            block.start_gather_tokens("down.gradient")
        block.norm("feed_forward.norm")
        if block.experts is None:
            block.gather_tokens("feed_forward", "up")
            _up(block, is_read=shard.shape.trains("down"))
        else:
            _route(block, block.experts)
    elif shard.recompute == "selective_op" and not block.fuses_norms:
        _normalised_for_attention(block)
        _between_kept(block)
    if shard.is_over_context:
        context_attention.start_keys(block.write, shard)
    if block.experts is None:
        _feed_forward_gradients(block)
    else:
        _expert_gradients(block, block.experts)
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
        moe = shape.experts
        self.shared_width = moe.shared_experts * moe.expert_hidden // self.tensor if moe else 0
        """Width of the shared experts on the device; 0 if there are none."""
        self.head_width = shape.heads * shape.value_size // self.tensor
        self.stream = shard.kept_stream_bytes
        self.stream_rows = self.stream // (self.hidden * shape.element_bytes)
        self.has_biases = shape.has_biases
        self.norm_vectors = shape.norm_vectors
        self.experts = None if shape.experts is None else ExpertLayer(self.write, shard)
        """The layer of experts, which has its own matrices; None for a block without experts."""
        self.matrices = {
            name: size for name, size in shard.matrices.items() if not is_of_experts(name)
        }
        self.adapted = None if shape.adapters is None else AdaptedLayer(self.write, shard, self.use)
        """The matrices with adapters, which alone are trained; None for a block that is trained in
        full."""
        self.trained = {
            name: size for name, size in shard.trained.items() if not is_of_experts(name)
        }
        """Bytes of the arrays whose gradients are computed, by name, except vectors."""
        self.summed = {
            name: size
            for name, size in self.trained.items()
            if self.adapted is None or not self.adapted.is_summed_apart(name)
        }
        """Those of `trained` whose gradients are summed over the batch only."""
        self._has_residual = False
        self._gathers: dict[str, str] = {}
        self._used: set[str] = set()
        self._gathering: set[str] = set()
        self._computed: set[str] = set()
        self._done_to_sums: set[str] = set()
        self.has_gradients: set[str] = set()
        """Matrices whose gradients are computed."""
        # If the sum over tensor was kept, the fusion of a norm's gradient applies the norm again.
        is_backward = prefix.endswith("backward")
        is_summed = shard.recompute == "selective_op" and shard.layout.tensor > 1
        self.fuses_norms = is_backward and is_summed and self.has_biases
        self.is_newer = shape.compiler == "0.12"
        """Whether the newer compiler schedules it, not the one that this was first read off."""
        fsdp, is_summed = shard.layout.fsdp, shard.sum_axes != ()
        self.sums_early = self.tensor == fsdp == 1 and is_summed
        self.sums_late = self.is_newer and (fsdp > 1 or (self.tensor > 1 and is_summed))
        """Whether gradients of matrices are summed before the last input gradient is computed,
        without overlap."""
        self.is_beside_tensor = self.tensor > 1 and fsdp == 1 and self.adapted is None
        """Whether what a stage does to its sums fills the time of sums over tensor."""
        self.keeps_statistics = shard.is_of_stage and shard.recompute == "full"
        """Whether the gradient of a norm reads the statistics that recompute left."""
        # A product to which cuBLASLt adds a bias reads a copy of its matrix.
        biased = ("up", *(ROWS_DIVIDED if self.tensor == 1 else ())) if self.has_biases else ()
        is_read = self.is_newer and not shard.is_sliced
        self._copied = self.matrices if not is_read else () if is_backward else biased
        # The last matrix of a pass, if XLA gathers it alone, is gathered during the copies before.
        is_late = self.is_newer and self.experts is None and shard.recompute != "full"
        self._last = ("qkv" if is_backward else "down") if is_late else None
        self._late: str | None = None

    def done(self) -> tuple[Operation | Loop, ...]:
        """All operations so far, with products in fp8 or fp4 if that is the compute type."""
        operations = self.write.done()
        shape = self.shard.shape
        kind = narrow_type(shape.compute_dtype)
        if kind is None:
            return operations
        rank = None if shape.adapters is None else shape.adapters.rank
        return with_float8_products(operations, kind, rank)

    def gather(self, *names: str) -> None:
        """Slice a layer of each stacked matrix and start gathering it over fsdp, if there is fsdp,
        combined as far as XLA combines them."""
        if self.shard.layout.fsdp == 1:
            return
        groups = combined((name, self.matrices[name]) for name in names)
        if groups[-1:] == [[self._last]]:
            self._late = groups.pop()[0]
        self._gather(groups)

    def gather_late(self, name: str) -> bool:
        """Start gathering a matrix if `gather` left it for later, and return whether it did."""
        if name != self._late:
            return False
        self._gather([[name]])
        self._late = None
        return True

    def _gather(self, groups: list[list[str]]) -> None:
        fsdp = self.shard.layout.fsdp
        for group in groups:
            for name in group:
                self.write.copy(f"{name}.slice", self.matrices[name] // fsdp)
                self._gathers[name] = f"gather_{group[0]}"
            payload = sum(self.matrices[name] for name in group)
            buffers = len(group)
            if self.adapted is not None and "qkv" in group:  # all are small enough to be combined
                payload += sum(self.trained.values())
                buffers += len(self.trained)
                self.write.scalars("adapters.slice", len(self.trained))
            self.write.start(f"gather_{group[0]}", "all_gather", payload, (FSDP,), buffers=buffers)

    def use(self, name: str) -> None:
        """Wait until a matrix is gathered, unless that happens late; without fsdp, slice its layer
        here, unless the product reads it in its stack."""
        if name in self._used or name not in self.matrices or name == self._late:
            return
        self._used.add(name)
        if self.shard.layout.fsdp == 1:
            if name in self._copied:
                self.write.copy(f"{name}.slice", self.matrices[name])
        else:
            gather = self._gathers[name]
            self.write.wait(gather)
            self._used |= {each for each, of in self._gathers.items() if of == gather}

    def norm_statistics(self, name: str) -> None:
        """Add the mean of each row, and the root of its variance."""
        statistics = self.stream_rows * _STATISTICS_BYTES
        added = self.stream if self._has_residual else 0
        self._has_residual = False
        self.write.fusion(f"{name}.statistics", self.stream + added, statistics + added)
        self.write.copy(f"{name}.root", statistics)

    def norm(self, name: str) -> None:
        """Add a norm of the residual stream."""
        self.norm_statistics(name)
        # For many rows, each vector is cast to the compute type once.
        if self.stream_rows > _SPLIT_ROWS:
            count = 4 if self.has_biases else self.norm_vectors
            self.write.scalars(f"{name}.vectors", count)
        self.write.fusion(f"{name}.apply", self.stream, self.stream + self._wide(name))

    def _wide(self, name: str) -> int:
        """Bytes of the stream in float32 that the router reads from the norm before it; else 0."""
        if self.experts is None or name != "feed_forward.norm":
            return 0
        return self.stream * _F32_BYTES // self.shard.shape.element_bytes

    def norm_gradient(self, name: str) -> None:
        """Add the gradient of a norm, of its vectors, and of the bias that was added after it."""
        write, size = self.write, self.stream
        statistics = self.stream_rows * _STATISTICS_BYTES
        if self.adapted is not None:  # of its input only
            write.fusion(f"{name}.gradient.statistics", 2 * size, statistics)
            write.copy(f"{name}.gradient.mean", statistics)
            write.fusion(f"{name}.gradient", 3 * size, size)
            return
        vectors = self.norm_vectors
        is_split = self.stream_rows > _SPLIT_ROWS
        wide = 0 if is_split else size * _F32_BYTES // self.shard.shape.element_bytes
        if of_router := self._wide(name):  # and of experts, in float32 if no axis splits them
            wide += size
            of_router += 0 if self.shard.layout.expert > 1 else of_router - size
        # The newer compiler sums an array for each vector.
        arrays = (
            vectors if self.is_newer and not is_split and not self.shard.sequence_parallel else 1
        )
        statistics_read = 2 * size + of_router
        write.fusion(f"{name}.gradient.statistics", statistics_read, statistics + arrays * wide)
        write.copy(f"{name}.gradient.mean", statistics)
        partial = self.partial_bytes(self.stream_rows, vectors * _F32_BYTES * self.hidden)
        again = size if self.fuses_norms else 0
        write.fusion(f"{name}.gradient", (2 + arrays) * size, size + again + partial)
        if is_split:
            count = 3 if self.has_biases else self.norm_vectors
            self.write.scalars(f"{name}.vectors.gradient", count)
        else:
            for vector in ("scale", "offset")[:arrays]:
                write.fusion(f"{name}.{vector}.gradient", wide, self.hidden * _F32_BYTES)

    def start_sums(self, *names: str) -> None:
        """Start the sums of the gradients of matrices over the batch or fsdp, as soon as all that
        XLA combines are computed."""
        layout, along = self.shard.layout, self.shard.sum_axes
        self._computed |= set(names)
        if layout.fsdp > 1:
            if self._computed == set(self.summed):
                self._start_scatter(along)
            return
        if not along:
            return
        kind = "reduce_scatter" if self.shard.is_scattered else "all_reduce"
        for group in self.sum_groups():
            if self._computed.issuperset(group) and not set(names).isdisjoint(group):
                payload = sum(self.trained[name] for name in group)
                if self.is_concatenated(group):
                    self.write.copy(f"sum_{group[0]}.concatenate", payload)
                self.write.start(f"sum_{group[0]}", kind, payload, along)

    def sum_groups(self) -> list[list[str]]:
        """Matrices whose gradients one collective sums; XLA scatters all of a block at once."""
        if self.shard.is_scattered and self.experts is None:
            return [list(self.summed)]
        return combined(self.summed.items())

    def _start_scatter(self, along: tuple[str, ...]) -> None:
        """Start the reduce-scatter of the matrices' gradients over fsdp."""
        both = sum(size for name, size in self.trained.items() if name in ROWS_DIVIDED)
        size = sum(self.trained.values())
        if self.tensor > 1 and along and not self.is_newer and self.adapted is None:
            # Matrices whose rows are sharded over both axes: XLA all-reduces them over all of the
            # batch's axes and slices the result, where it reduce-scatters the others.
            self.write.start("scatter", "reduce_scatter", size - both, (FSDP,), buffers=2)
            self.write.copy("sum_all.concatenate", both)
            self.write.start("sum_all", "all_reduce", both, (*along, FSDP))
        else:
            buffers = 4 if self.adapted is None else len(self.trained)
            self.write.start("scatter", "reduce_scatter", size, (FSDP,), buffers=buffers)

    def is_concatenated(self, group: list[str]) -> bool:
        """Whether the sum of a group has several buffers, copied into one: matrices, or a matrix
        and biases (with both compilers; the closed form of the older one leaves biases out)."""
        if self.shard.is_scattered:
            return False
        has_biases = self.is_newer and self.has_biases
        return len(group) > 1 or (has_biases and group[0] in ("qkv", "projection"))

    def wait_for_sums(self) -> None:
        """Wait for the sums of the gradients of matrices."""
        self.write.wait("scatter")
        for name in self.trained:
            self.write.wait(f"sum_{name}")

    def slice_sums(self) -> None:
        """Copy the layer's float32 gradient sums, to which a stage adds, out of their stacks,
        once."""
        self._in_sums("slice", reads_gradients=False)

    def add_to_sums(self) -> None:
        """Add gradients to what `slice_sums` copied, in the stacks, once."""
        self._in_sums("add", reads_gradients=True)

    def _in_sums(self, name: str, *, reads_gradients: bool) -> None:
        shard = self.shard
        if not shard.is_of_stage or name in self._done_to_sums:
            return
        self._done_to_sums.add(name)
        for matrix, size in self.trained.items():
            own = size // shard.layout.fsdp // shard.gradient_parts(matrix)
            summed = own * _F32_BYTES // shard.shape.element_bytes
            read = summed + own * reads_gradients
            self.write.fusion(f"{matrix}.sums.{name}", read, summed)

    def partial_bytes(self, rows: int, size: int) -> int:
        """Bytes of a sum of `size` bytes over `rows` rows before its second operation."""
        return size * isqrt(rows) if rows > _SPLIT_ROWS else size

    def gather_tokens(self, name: str, matrix: str) -> None:
        """Add the all-gather of tokens over tensor before a column-parallel product; in a stage it
        overlaps with the slice of the layer of the product's matrix."""
        self.start_gather_tokens(name)
        if self.shard.is_of_stage and self.shard.layout.fsdp == 1 and not self.adapts(matrix):
            self.use(matrix)
        self.wait_for_tokens(name)

    def start_gather_tokens(self, name: str) -> None:
        """Start the all-gather of tokens over tensor, once."""
        if self.shard.sequence_parallel and name not in self._gathering:
            self._gathering.add(name)
            payload = self.shard.stream_bytes
            self.write.start(f"{name}.gather_tokens", "all_gather", payload, (TENSOR,))

    def wait_for_tokens(self, name: str) -> None:
        """Wait for the all-gather of tokens over tensor."""
        if self.shard.sequence_parallel:
            self.write.wait(f"{name}.gather_tokens")
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

    def adapts(self, name: str) -> bool:
        """Whether a matrix has adapters."""
        return self.adapted is not None and self.adapted.adapts(name)

    def multiply_rows(self, name: str, width: int, beside: Callable[[], None]) -> None:
        """Add a row-parallel product and start its sum over tensor; with adapters, which need the
        sum, also wait for it. `beside` adds what overlaps with the sum."""
        if self.adapted is not None and self.adapted.adapts(name):
            self.adapted.multiply(name, beside)
            return
        residual = self.shard.stream_bytes if self.tensor == 1 else 0
        self.use(name)
        self.write.matmul(name, (1, self.rows, self.hidden, width), residual)
        self.start_sum_over_tensor(name)
        beside()

    def add_sum(self, name: str, *, is_normalised: bool) -> None:
        """Wait for the sum over tensor after a row-parallel product, and add it to the stream. One
        device adds the product as it is written, except with adapters, where the next norm adds
        it."""
        if self.adapts(name):
            if self.shard.sequence_parallel:
                self.write.fusion(f"{name}.residual", 3 * self.stream, self.stream)
            elif is_normalised:
                self._has_residual = True
            else:
                self.write.fusion(f"{name}.residual", 2 * self.stream, self.stream)
            return
        if self.tensor > 1:
            self.write.wait(f"{name}.sum")
            self.write.fusion(f"{name}.residual", 2 * self.stream, self.stream)


def _normalised_for_attention(block: _Block) -> None:
    """The norm before attention, with gathers of matrices and tokens in flight: tokens first."""
    if not block.shard.sequence_parallel:
        block.gather(*block.matrices)
    block.norm("attention.norm")
    block.start_gather_tokens("attention")
    if block.shard.sequence_parallel:
        block.gather(*block.matrices)


def _attention_half(block: _Block, *, is_first: bool) -> None:
    """Attention up to its projection; the mask is read in the forward pass only."""
    shard, write, tensor = block.shard, block.write, block.tensor
    if shard.shape.latent is not None:
        block.wait_for_tokens("attention")
        latent_attention.make_heads(write, shard, block.use)
    else:
        _heads(block)
    _start_gathering_keys(block)
    _scores(block, has_mask=is_first, name="attention")
    if not block.adapts("projection"):
        block.use("projection")
    if is_first:
        _copy_stream(block)
    if shard.is_over_context:
        context_attention.wait_for_result(write, shard)

    def beside() -> None:
        if tensor > 1 and not shard.sequence_parallel and not block.adapts("up"):
            block.use("up")
        if is_first and _writes_early(block):
            _write_kept(block, *_KEPT_EARLY)

    block.multiply_rows("projection", block.head_width, beside)
    block.add_sum("projection", is_normalised=True)


def _heads(block: _Block) -> None:
    """Queries, keys and values of the device's heads, in one product."""
    shard, write = block.shard, block.write
    if block.has_biases:
        write.fusion("qkv.bias", 0, shard.qkv_bytes)
    if shard.layout.fsdp > 1 or not block.adapts("qkv"):
        block.use("qkv")
    block.wait_for_tokens("attention")
    if block.adapted is not None and block.adapts("qkv"):
        block.adapted.multiply("qkv")
    else:
        extra = shard.qkv_bytes if block.has_biases else 0
        write.matmul("qkv", (1, block.rows, block.qkv_width, block.hidden), extra)
    if block.has_biases:
        write.copy("qkv.bias.slice", shard.qkv_bytes)
    else:
        for name, size in heads(shard):
            write.copy(f"{name}.rotate", size)


def heads(shard: BlockShard, *, parts: int = 1) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of the queries of this device's heads, and of the keys and values of that many
    parts of a sample."""
    keys = shard.key_bytes * parts
    return ("queries", shard.head_bytes), ("keys", keys), ("values", keys)


def _copy_stream(block: _Block) -> None:
    """Copies of the stream in the forward pass, where one device adds products to it in place."""
    if block.tensor > 1:
        return
    count = 2
    if block.experts is not None:
        count = 1
    elif block.shard.recompute != "full":
        is_many = block.has_biases and block.stream_rows > _SPLIT_ROWS
        count = 3 if block.shard.layout.fsdp == 1 else 0 if is_many else 2
    # With adapters, the norm after a product, or a fusion, adds the product to the stream.
    count -= block.adapts("projection") + 2 * block.adapts("down")
    for index in range(count):
        block.write.copy(f"stream.copy.{index}", block.stream)


def _start_gathering_keys(block: _Block) -> None:
    """Start the all-gathers of keys and values of the whole sample over context, overlapping with
    slices of the next matrices."""
    if block.shard.layout.context == 1 or block.shard.is_over_context:
        return
    for name, size in heads(block.shard, parts=block.shard.layout.context)[1:]:
        block.write.start(f"attention.gather_{name}", "all_gather", size, (CONTEXT,))
    block.use("up")
    block.use("down")
    _wait_for(block, "keys")


def _wait_for(block: _Block, name: str) -> None:
    """Wait for gathered keys or values, and transpose them."""
    if block.shard.layout.context > 1:
        size = heads(block.shard, parts=block.shard.layout.context)[1][1]
        block.write.wait(f"attention.gather_{name}")
        block.write.copy(f"attention.transpose_{name}", size)


def _score_shape(shard: BlockShard) -> tuple[int, int, int]:
    """(samples x heads, queries, keys) of the scores."""
    queries = shard.shape.tokens // shard.layout.context
    return shard.score_batch, queries, shard.shape.tokens


def _product_shape(shard: BlockShard) -> tuple[int, int, int]:
    """`_score_shape` for unfused products: queries that share keys are rows of one product."""
    batch, queries, keys = _score_shape(shard)
    shared = shard.shape.heads // shard.shape.kv_heads
    return batch // shared, queries * shared, keys


def _scores(block: _Block, *, has_mask: bool, name: str) -> None:
    """Scores, softmax and weighted values of attention, fused or not."""
    shard, write = block.shard, block.write
    (batch, queries, keys), size = _score_shape(shard), shard.shape.head_size
    if shard.is_over_context:
        context_attention.attend(write, shard, is_first=has_mask)
        return
    if shard.shape.is_fused:
        shape = (batch, queries, keys, size)
        written, values = shard.mixed_bytes + shard.statistics_bytes, shard.shape.value_size
        write.attention(
            name,
            shape,
            2,
            shard.qkv_bytes,
            written,
            value_size=values,
            scores_share=shard.shape.scores_share,
        )
        return
    mask, wide = queries * keys * 4 if has_mask else 0, batch * queries * keys * _F32_BYTES
    batch, queries, keys = _product_shape(shard)
    write.matmul(f"{name}.scores", (batch, queries, keys, size))
    if _is_grouped(shard) and not block.is_newer:  # masked scores pass through memory
        write.fusion(f"{name}.mask", shard.score_bytes + mask, wide)
        write.fusion(f"{name}.softmax", wide, shard.score_bytes)
    else:
        write.fusion(f"{name}.softmax", shard.score_bytes + mask, shard.score_bytes)
    _wait_for(block, "values")
    write.matmul(f"{name}.mix", (batch, size, queries, keys))
    write.copy(f"{name}.transpose", shard.head_bytes)


def _is_grouped(shard: BlockShard) -> bool:
    """Whether several query heads share one key head, which has its own dimension in the scores of
    unfused attention."""
    return shard.shape.kv_heads < shard.shape.heads and not shard.shape.is_fused


def _feed_forward_half(block: _Block) -> None:
    """The feed-forward layer after its norm, and copies of kept activations into their stacks,
    which overlap with the sum over tensor."""
    block.gather_tokens("feed_forward", "up")
    _up(block, is_read=True)
    if is_late := block.gather_late("down"):
        _write_kept(block)

    def beside() -> None:
        if not is_late:
            _write_kept(block)

    block.multiply_rows("down", block.inner_width, beside)
    block.add_sum("down", is_normalised=False)


_KEPT_EARLY = "kept", "kept.normalised.0"
"""Kept activations that exist before attention."""


def _writes_early(block: _Block) -> bool:
    """Whether those are copied during the projection's sum over tensor, for which its adapters
    wait, and not during that of the down projection."""
    is_summed = block.tensor > 1 and block.shard.recompute != "full"
    return is_summed and block.shard.layout.fsdp > 1 and block.adapts("projection")


def _write_kept(block: _Block, *names: str) -> None:
    """Copies of kept activations into their stacks: those of these names, or all remaining ones."""
    kept = _kept(block.shard) if block.shard.recompute != "full" else []
    for name, size in (("kept", block.stream), *kept):
        if name in names or not (names or (_writes_early(block) and name in _KEPT_EARLY)):
            block.write.copy(name, size)


def _expert_half(block: _Block, layer: ExpertLayer) -> None:
    """The layer of experts after its norm, and copies of kept activations into their stacks,
    which overlap with the sums over the expert axis."""
    shard, write = block.shard, block.write
    _route(block, layer)
    layer.forward()
    write.copy("kept", block.stream)
    kept = dict(_kept(shard) if shard.recompute != "full" else ())
    gathered = kept.pop("kept.gathered", 0)
    for name, size in kept.items():
        write.copy(name, size)
    _shared(block)
    layer.report()
    if gathered:
        write.copy("kept.gathered", gathered)
    if block.shared_width:
        block.use("shared.down")
        write.matmul("shared.down", (1, block.rows, block.hidden, block.shared_width))
    layer.add()


def _shared(block: _Block) -> None:
    """The up projection of the shared experts, if there are any."""
    if not block.shared_width:
        return
    write, size = block.write, block.rows * block.shared_width * block.shard.shape.element_bytes
    block.use("shared.up")
    write.matmul("shared.up", (1, block.rows, 2 * block.shared_width, block.hidden))
    write.fusion("shared.gate", 2 * size, size)


def _shared_gradients(block: _Block) -> None:
    """Gradient of the tokens from the shared experts, if there are any."""
    if not block.shared_width:
        return
    write, rows, width = block.write, block.rows, block.shared_width
    size = rows * width * block.shard.shape.element_bytes
    block.use("shared.down")
    write.matmul("shared.down.input_gradient", (1, rows, width, block.hidden))
    write.fusion("shared.gate.gradient", 3 * size, 2 * size)
    block.use("shared.up")
    write.matmul("shared.up.input_gradient", (1, rows, block.hidden, 2 * width), block.stream)


def _shared_matrix_gradients(block: _Block) -> None:
    """Gradients of the matrices of the shared experts, if there are any."""
    if not block.shared_width:
        return
    write, rows, width = block.write, block.rows, block.shared_width
    size = rows * width * block.shard.shape.element_bytes
    write.matmul("shared.up.gradient", (1, 2 * width, block.hidden, rows))
    block.start_sums("shared.up")
    write.fusion("shared.gate.again", 2 * size, size)
    write.matmul("shared.down.gradient", (1, width, block.hidden, rows))
    block.start_sums("shared.down")


def _route(block: _Block, layer: ExpertLayer) -> None:
    """Route the tokens while they are gathered, and gather the experts' matrices."""
    block.gather_tokens("feed_forward", "up")
    layer.start_tokens("tokens")
    layer.route()
    layer.gather_matrices()


def _expert_gradients(block: _Block, layer: ExpertLayer) -> None:
    """Backward pass from the gradient after the block to that before the norm of its experts."""
    shard, write = block.shard, block.write
    block.start_gather_tokens("results.gradient.own")
    block.wait_for_tokens("results.gradient.own")
    layer.start_tokens("results.gradient")
    if not layer.is_again:
        layer.gather_matrices()
        _read_kept(block, "kept.gathered", "kept.hidden", "kept.assignments")
    else:
        write.wait("tokens")
    layer.backward()
    if not layer.is_again:
        block.gather(*reversed(block.matrices))
    if not shard.sequence_parallel:
        _read_kept(block, "kept.queries", "kept.mixed.0", "kept.normalised.0")
    if layer.is_again:
        _shared(block)
        if shard.recompute == "selective_op":  # during the sums over the expert axis
            _heads_between(block)
    else:
        _read_kept(block, "kept.shared")
    _shared_gradients(block)
    layer.router_gradient()
    block.start_sum_over_tensor("experts.input_gradient")
    write.wait("experts.input_gradient.sum")
    block.norm_gradient("feed_forward.norm")


def _up(block: _Block, *, is_read: bool) -> None:
    """The up projection; a GELU is fused into it, SwiGLU and squared ReLU are not.

    Args:
        block: the block.
        is_read: whether a product reads the hidden activation.
    """
    shard, write = block.shard, block.write
    if block.adapted is not None and block.adapts("up"):
        block.adapted.multiply("up")
    else:
        block.use("up")
        for name, width in _columns(block):
            write.matmul(name, (1, block.rows, width, block.hidden))
    if not block.has_biases and is_read:
        write.fusion("up.gate", shard.up_bytes, shard.inner_bytes)


def _columns(block: _Block) -> tuple[tuple[str, int], ...]:
    """(name, width) of the up projections: one, unless the layer is gated and one of its two
    halves is recomputed."""
    if block.shard.recompute == "selective_op" and block.shard.shape.is_gated:
        return ("gate", block.inner_width), ("up", block.inner_width)
    return (("up", block.up_width),)


def _between_kept(block: _Block) -> None:
    """Recompute if every second product is kept: the projection, unless its sum over tensor was
    kept; norms, and tokens gathered for them; the gated half of the up projection."""
    shard, write = block.shard, block.write
    block.wait_for_tokens("attention")
    if block.experts is None:
        _heads_between(block)
    if block.tensor == 1:
        shape = (1, block.rows, block.hidden, block.head_width)
        write.matmul("projection", shape, shard.stream_bytes)
    block.norm("feed_forward.norm")
    if block.experts is not None:
        _route(block, block.experts)
        return
    block.gather_tokens("feed_forward", "up")
    if shard.shape.is_gated:
        write.matmul("up", (1, block.rows, block.inner_width, block.hidden))


def _heads_between(block: _Block) -> None:
    """Heads made from kept latents, if every second product is kept."""
    if block.shard.shape.latent is not None:
        latent_attention.make_heads(block.write, block.shard, block.use, is_between=True)


def _kept(shard: BlockShard) -> list[tuple[str, int]]:
    """(name, bytes) of the activations that a block keeps in addition to its input."""
    of_fused = [("kept.statistics", shard.statistics_bytes)] if shard.shape.is_fused else []
    if shard.recompute == "selective_op":
        summed = [("kept.stream", shard.kept_stream_bytes)] if shard.layout.tensor > 1 else []
        products = [("kept.queries", shard.qkv_bytes)]
        if shard.shape.latent is not None:
            products = latent_attention.kept(shard)
        if shard.shape.experts is None:
            products.append(("kept.gate", shard.inner_bytes))
        return [*summed, *products, ("kept.mixed", shard.mixed_bytes), *of_fused]
    kept = [("kept.stream", shard.kept_stream_bytes)]
    # Inputs of column-parallel products: all tokens, as they are not gathered again.
    names = ("qkv", "up") if shard.shape.experts is None else ("qkv",)
    kept += [
        (f"kept.normalised.{index}", shard.stream_bytes)
        for index, name in enumerate(names)
        if shard.shape.trains(name)
    ]
    keys = shard.sent_key_bytes if shard.shape.is_fused else shard.key_bytes * shard.layout.context
    kept += [("kept.queries", shard.head_bytes), ("kept.keys", keys), ("kept.values", keys)]
    if shard.shape.latent is not None:
        kept += latent_attention.kept(shard)
    # For fused attention: as the kernel wrote it, and as the projection read it.
    times = range(not shard.shape.trains("projection"), 1 + len(of_fused))
    kept += [(f"kept.mixed.{index}", shard.mixed_bytes) for index in times]
    kept += [(f"kept.narrow.{name}", size) for name, size in _kept_narrow(shard)]
    if shard.shape.experts is not None:
        return [*kept, *of_fused, *kept_by_experts(shard)]
    names = ("kept.gate", "kept.up") if shard.shape.is_gated else ("kept.up",)
    kept += [*of_fused, *((name, shard.inner_bytes) for name in names)]
    if shard.recompute == "none" and shard.shape.trains("down"):
        kept.append(("kept.inner", shard.inner_bytes))
    if not shard.shape.is_fused and shard.recompute == "none":
        # For grouped queries: in both layouts that the backward pass reads.
        layouts = range(1 + _is_grouped(shard))
        kept += [(f"kept.scores.{index}", shard.score_bytes) for index in layouts]
    return kept


def _kept_narrow(shard: BlockShard) -> list[tuple[str, int]]:
    """(matrix, bytes) of what is kept between the A and the B of each matrix with adapters."""
    adapters = shard.shape.adapters
    if adapters is None:
        return []
    size = shard.rows * adapters.rank * shard.shape.element_bytes
    parts = shard.layout.tensor if shard.sequence_parallel else 1
    return [(name, size // (parts if name in ROWS_DIVIDED else 1)) for name in adapters.matrices]


@lru_cache(maxsize=_CACHE_SIZE)
def kept_stacks(shard: BlockShard) -> tuple[int, ...]:
    """Bytes of the arrays that one block keeps of one microbatch for its backward pass."""
    kept = [] if shard.recompute == "full" else _kept(shard)
    return (shard.kept_stream_bytes, *(size for _, size in kept))


def _read_by_products(block: _Block) -> tuple[str, ...]:
    """Prefixes of the names of the kept activations that products read in their stacks; none with
    the older compiler."""
    shard = block.shard
    if not block.is_newer:
        return ()
    if not shard.sequence_parallel or shard.samples == 1:
        return "kept.normalised", "kept.mixed.0", "kept.inner"
    # With several samples, tokens are put first in a copy of what was gathered.
    return ("kept.mixed.0", "kept.inner") if shard.layout.fsdp == 1 else ()


def _read_kept(block: _Block, *names: str) -> None:
    """Copies of kept activations out of their stacks: those whose names start with one of `names`.
    The stream, the up projection and scores are read in place, by the one fusion that uses each."""
    if block.shard.recompute == "full":
        return
    in_place = _read_by_products(block)
    for name, size in _kept(block.shard):
        if name.startswith(names) and not name.startswith(in_place):
            block.write.copy(name, size)


_READ_BY_GRADIENTS = "kept.mixed.0", "kept.normalised.0", "kept.normalised.1"
"""Kept activations that gradients of matrices read; with adapters, after the input gradient."""


def _feed_forward_gradients(block: _Block) -> None:
    """Backward pass from the gradient after the block to that before its feed-forward norm."""
    shard, write, rows = block.shard, block.write, block.rows
    inner = shard.inner_bytes
    if block.adapted is not None and block.adapts("down"):
        block.adapted.start_gradient("down")
    else:
        block.start_gather_tokens("down.gradient")
    if shard.recompute in ("none", "selective") or block.fuses_norms:
        block.gather(*reversed(block.matrices))
    if block.adapted is not None and block.adapts("down"):
        block.adapted.wait_for_gradient("down")
        block.adapted.input_gradient("down")
    else:
        block.use("down")
        block.wait_for_tokens("down.gradient")
        write.matmul("down.input_gradient", (1, rows, block.inner_width, block.hidden))
    # If not kept, the hidden activation is written once more, for the gradient of the matrix.
    is_again = shard.recompute != "none" and shard.shape.trains("down")
    is_again = is_again and not (shard.recompute == "full" and not block.has_biases)
    again, read = inner if is_again else 0, inner + shard.up_bytes
    # Stages compute it separately, before its gradient.
    is_apart = shard.is_of_stage and shard.recompute == "selective"
    if is_apart and not block.has_biases:
        write.fusion("up.gate.again", shard.up_bytes, inner)
        again = 0
    is_by_block = shard.recompute in ("selective_op", "full") or is_apart
    if block.has_biases and is_by_block and rows > _SPLIT_ROWS:
        write.copy("up.gelu", inner)  # separate from the sum of the bias's gradient
        read += inner
    write.fusion("up.gelu_gradient", read, shard.up_bytes + again)
    if block.adapted is not None and block.adapts("up"):
        _start_adapted_input_gradient(block, block.adapted, "up")
        _read_kept(block, "kept.queries")
        _finish_adapted_input_gradient(block, block.adapted, "up")
    else:
        block.use("up")
        for name, width in _columns(block):
            write.matmul(f"{name}.input_gradient", (1, rows, block.hidden, width))
        block.start_sum_over_tensor("up.input_gradient")
    if not shard.sequence_parallel and not block.adapts("up"):
        _read_kept(block, "kept.queries", *_READ_BY_GRADIENTS[: 2 * (block.adapted is None)])
    if block.is_beside_tensor:
        block.slice_sums()
    if block.norm_vectors > 1 and not block.keeps_statistics:
        block.norm_statistics("feed_forward.norm.again")
    write.wait("up.input_gradient.sum")
    if block.sums_early and not block.has_biases and not shard.is_over_context:
        _feed_forward_matrix_gradients(block)
    block.norm_gradient("feed_forward.norm")


def _attention_gradients(block: _Block) -> None:
    """Backward pass from the gradient before the feed-forward norm to that before the block."""
    shard, write, rows = block.shard, block.write, block.rows
    is_whole = block.adapted is None
    if block.adapted is not None and block.adapts("projection"):
        block.adapted.start_gradient("projection")
    else:
        block.start_gather_tokens("projection.gradient")
    if not block.adapts("projection"):
        block.use("projection")
    if shard.sequence_parallel:
        _read_kept(block, "kept.queries", *_READ_BY_GRADIENTS[: 2 * is_whole])
    _read_kept(block, "kept.keys", "kept.values", *_READ_BY_GRADIENTS[2 * is_whole : 3 * is_whole])
    if block.adapted is not None and block.adapts("projection"):
        block.adapted.wait_for_gradient("projection")
        block.adapted.input_gradient("projection")
    else:
        block.wait_for_tokens("projection.gradient")
        write.matmul("projection.input_gradient", (1, rows, block.head_width, block.hidden))
    _read_kept(block, "kept.statistics", "kept.mixed.1")
    if shard.is_over_context:
        _context_gradients(block)
    else:
        _score_gradients(block)
        if block.sums_early and block.has_biases:
            _feed_forward_matrix_gradients(block)
        write.wait("values.gradient.sum")
        write.wait("keys.gradient.sum")
        if shard.shape.latent is None:
            write.copy("qkv.concatenate", shard.qkv_bytes)
    if not shard.shape.is_fused:
        write.copy("qkv.transpose.0", shard.qkv_bytes)
        write.copy("qkv.transpose.1", shard.qkv_bytes)
    if block.adapted is not None:
        _adapter_gradients(block, block.adapted)
    elif shard.shape.latent is None:
        block.use("qkv")
        _matrix_gradients(block)
    else:
        _latent_gradients(block)
    block.norm_gradient("attention.norm")
    if block.has_biases and shard.layout.fsdp == 1 and not block.sums_late:
        block.start_sums("projection")


def _context_gradients(block: _Block) -> None:
    """Gradients of queries, keys and values of attention over context, whose transfers overlap
    with gradients of matrices."""
    shard, write = block.shard, block.write
    is_early = block.sums_early and shard.strategy == "all_to_all"
    context_attention.start_result_gradient(write, shard)
    if is_early:
        _feed_forward_matrix_gradients(block)
    context_attention.attend_back(write, shard)
    if is_early:
        _projection_gradient(block)
    elif not block.fuses_norms:
        _feed_forward_matrix_gradients(block)
    context_attention.wait_for_gradients(write, shard)


def _matrix_gradients(block: _Block) -> None:
    """Gradients of the matrices, overlapped with the sum of the input gradient over tensor; or, if
    tensor is 1, the input gradient overlapped with the sums of the matrices' gradients."""
    shard, write, rows = block.shard, block.write, block.rows
    is_last = block.tensor == 1 or block.sums_late
    if not is_last:
        _qkv_input_gradient(block)
    if block.fuses_norms:  # tokens are gathered again during the gradients that need none
        block.start_gather_tokens("feed_forward")
    _feed_forward_matrix_gradients(block)
    if block.fuses_norms:
        block.start_gather_tokens("attention")
    if block.is_newer:  # the other two overlap with nothing
        write.wait("qkv.input_gradient.sum")
    _projection_gradient(block)
    if block.fuses_norms:
        block.wait_for_tokens("attention")
    write.matmul("qkv.gradient", (1, block.qkv_width, block.hidden, rows))
    if block.has_biases:
        sums = block.partial_bytes(rows, block.qkv_width * shard.shape.element_bytes)
        write.fusion("qkv.bias.gradient", shard.qkv_bytes, sums)
        block.write.scalars("biases.gradient", 2 if rows > _SPLIT_ROWS else 1)
    # The projection's sum is combined with those of biases, the last of which is still to come.
    is_late = block.has_biases and shard.layout.fsdp == 1 and not block.sums_late
    block.start_sums("qkv", *(() if is_late else ("projection",)))
    if block.sums_late:
        block.wait_for_sums()
    if is_last:
        _qkv_input_gradient(block)
    if block.is_beside_tensor:
        block.add_to_sums()
    if block.norm_vectors > 1 and not block.keeps_statistics:
        block.norm_statistics("attention.norm.again")
    write.wait("qkv.input_gradient.sum")


def _start_adapted_input_gradient(block: _Block, layer: AdaptedLayer, name: str) -> None:
    """Compute the gradient before a matrix with adapters whose columns are divided over tensor, or
    start it if it is summed over tensor."""
    if block.tensor > 1:
        layer.start_input_gradient(name)
    else:
        layer.input_gradient(name)


def _finish_adapted_input_gradient(block: _Block, layer: AdaptedLayer, name: str) -> None:
    if block.tensor > 1:
        layer.finish_input_gradient(name)


def _adapter_gradients(block: _Block, layer: AdaptedLayer) -> None:
    """`_matrix_gradients` of a frozen block: the gradients of its adapters, overlapped with the sum
    of the input gradient over tensor."""
    is_adapted = layer.adapts("qkv")
    if is_adapted:
        _start_adapted_input_gradient(block, layer, "qkv")
    else:
        _qkv_input_gradient(block)
    _read_kept(block, *_READ_BY_GRADIENTS, "kept.inner", "kept.narrow")
    if block.shard.recompute != "none" and layer.adapts("down"):
        layer.narrow_again("down")
    for name in ("projection", "qkv", "up", "down"):
        if layer.adapts(name):
            layer.matrix_gradients(name)
    block.start_sums(*block.summed)
    if is_adapted:
        _finish_adapted_input_gradient(block, layer, "qkv")
    block.write.wait("qkv.input_gradient.sum")


def _qkv_input_gradient(block: _Block) -> None:
    """The gradient before queries, keys and values, and its sum over tensor."""
    shape = (1, block.rows, block.hidden, block.qkv_width)
    block.gather_late("qkv")
    block.use("qkv")
    block.write.matmul("qkv.input_gradient", shape)
    block.start_sum_over_tensor("qkv.input_gradient")
    if block.is_newer and block.shard.sequence_parallel:  # nothing overlaps with it
        block.write.wait("qkv.input_gradient.sum")


def _latent_gradients(block: _Block) -> None:
    """`_matrix_gradients` of latent attention."""
    _read_kept(block, "kept.latent")

    def others() -> None:
        _feed_forward_matrix_gradients(block)
        _projection_gradient(block)
        block.start_sums("projection")

    latent_attention.gradients(block.write, block.shard, block.use, block.start_sums, others)


def _projection_gradient(block: _Block) -> None:
    """Gradient of the projection, if it was not computed before."""
    if "projection" not in block.has_gradients and block.adapted is None:
        shape = (1, block.head_width, block.hidden, block.rows)
        block.write.matmul("projection.gradient", shape)
        block.has_gradients.add("projection")


def _feed_forward_matrix_gradients(block: _Block) -> None:
    """Gradients of the feed-forward matrices, if they were not computed before; with experts those
    of the router, as the others were computed with the gradients of tokens."""
    if "up" in block.has_gradients or block.adapted is not None:
        return
    if block.experts is not None:
        block.has_gradients |= {"down", "up"}
        block.experts.router_matrix_gradient()
        _shared_matrix_gradients(block)
        return
    block.has_gradients |= {"down", "up"}
    rows = block.rows
    _read_kept(block, "kept.inner")
    block.write.matmul("down.gradient", (1, block.hidden, block.inner_width, rows))
    block.start_sums("down")
    if block.fuses_norms:
        block.wait_for_tokens("feed_forward")
    for name, width in _columns(block):
        block.write.matmul(f"{name}.gradient", (1, width, block.hidden, rows))
    block.start_sums("up")


def _score_gradients(block: _Block) -> None:
    """Gradients of queries, keys and values, from the gradient of the attention output."""
    shard, write = block.shard, block.write
    (batch, queries, keys), size = _score_shape(shard), shard.shape.head_size
    if shard.shape.is_fused:
        read = shard.qkv_bytes + 2 * shard.mixed_bytes + shard.statistics_bytes
        shape, values = (batch, queries, keys, size), shard.shape.value_size
        write.attention(
            "attention.gradient",
            shape,
            5,
            read,
            shard.qkv_bytes,
            value_size=values,
            scores_share=shard.shape.scores_share,
        )
    else:
        batch, queries, keys = _product_shape(shard)
        if shard.recompute in ("selective", "selective_op"):
            write.matmul("attention.scores", (batch, queries, keys, size))
            write.fusion("attention.softmax", shard.score_bytes, shard.score_bytes)
        write.copy("projection.gradient.transpose", shard.head_bytes)
        write.copy("mixed.gradient.transpose", shard.head_bytes)
        write.matmul("scores.gradient", (batch, queries, keys, size))
        if shard.recompute == "none":  # the older compiler slices kept scores for sums of rows
            sliced = 0 if block.is_newer else shard.score_bytes
            write.fusion("softmax.gradient.sum", 2 * shard.score_bytes, sliced)
        if _is_grouped(shard) and not block.is_newer:
            write.fusion("softmax.gradient.slice", shard.score_bytes, 0)
        write.fusion("softmax.gradient", 2 * shard.score_bytes, shard.score_bytes)
        if _is_grouped(shard):
            write.fusion("softmax.transpose", shard.score_bytes, 2 * shard.score_bytes)
        for name in ("values", "keys"):
            write.matmul(f"{name}.gradient", (batch, queries, size, keys))
            if shard.layout.context > 1:
                payload = heads(shard, parts=shard.layout.context)[1][1]
                write.start(f"{name}.gradient.sum", "reduce_scatter", payload, (CONTEXT,))
        write.matmul("queries.gradient", (batch, queries, size, keys))


def _sum_gradients(block: _Block) -> None:
    """Sums of the gradients over fsdp and the batch, and copies into their stacks."""
    shard, write, layout = block.shard, block.write, block.shard.layout
    fsdp, along = layout.fsdp, shard.sum_axes
    block.slice_sums()
    write.wait("scatter")
    if fsdp > 1 and along:
        divided = ROWS_DIVIDED if block.tensor > 1 and not block.is_newer else ()
        scattered = sum(size for name, size in block.trained.items() if name not in divided)
        write.copy("sum.concatenate", scattered // fsdp)
        write.start("sum", "all_reduce", scattered // fsdp, along)
    _sum_vectors(block)
    write.wait("sum_all")
    write.wait("sum")
    if block.adapted is not None:
        block.adapted.wait_for_sums()
    for group in block.sum_groups():
        write.wait(f"sum_{group[0]}")
        if along and (block.is_concatenated(group) or fsdp > 1):
            size = sum(block.trained[name] for name in group)
            write.copy(f"sum_{group[0]}.slice", size // fsdp // shard.gradient_parts(group[0]))
    for name, size in () if shard.is_of_stage else block.trained.items():
        write.copy(f"{name}.stack", size // fsdp // shard.gradient_parts(name))
    block.add_to_sums()
    if block.experts is not None:
        block.experts.finish_sums()


def _sum_vectors(block: _Block) -> None:
    """Sums of the vectors' gradients over the devices that share the tokens, and copies into
    their stacks."""
    shard, write, layout = block.shard, block.write, block.shard.layout
    if block.adapted is not None:
        return
    count = 8 if block.has_biases else 2 * block.norm_vectors
    axes = (*shard.sum_axes, FSDP, *((TENSOR,) if shard.sequence_parallel else ()))
    size = (shard.norm_elements + shard.shape.router_elements) * _F32_BYTES
    write.start("vectors.sum", "all_reduce", size, axes)
    if any(getattr(layout, axis) > 1 for axis in axes):
        block.write.scalars("vectors.slice", count + 1)
    write.wait("vectors.sum")
    write.scalars("vectors.stack", count * (2 if shard.is_of_stage else 1))
