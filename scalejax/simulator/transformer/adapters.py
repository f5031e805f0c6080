"""Products of matrices with low-rank adapters (LoRA), as XLA compiles them for GPUs.

x W + s (x A) B for a frozen W, and the gradients of x, A and B (`models.lora`). Where tensor
divides the rows of W, x A is summed over tensor, as x W is. Read off compiled programs (jax 0.10.2,
for H100); sizes follow from shapes. Independent of hardware.
"""

from collections.abc import Callable

from scalejax.config.parallelism import TENSOR
from scalejax.simulator.transformer.operations import COMBINED_BYTES, Writer
from scalejax.simulator.transformer.shape import ROWS_DIVIDED, BlockShard

_MERGED_BYTES = 64 * 1024**2
"""Two products with one operand in common are merged if the smaller moves no more than this,
operands and result (XLA's DotMerger; read off programs: 51e6 bytes are merged, 67.6e6 are not)."""


class AdaptedLayer:
    """Builder of the operations of adapted matrices in a pass over a block."""

    def __init__(self, write: Writer, shard: BlockShard, use: Callable[[str], None]) -> None:
        """Start with no operations.

        Args:
            write: builder of the block's operations.
            shard: the device's shard of the block.
            use: waits until a matrix is gathered, or slices its layer.
        """
        adapters = shard.shape.adapters
        assert adapters is not None  # noqa: S101  of a block with adapters
        self._write, self._shard, self._use = write, shard, use
        self._rank, self._names = adapters.rank, adapters.matrices
        self._used, self._rows = shard.shape.element_bytes, shard.rows

    def adapts(self, name: str) -> bool:
        """Whether a matrix has adapters."""
        return name in self._names

    def _sides(self, name: str) -> tuple[int, int]:
        """(rows, columns) of a matrix on this device."""
        inputs, outputs = self._shard.shape.sides[name]
        tensor = self._shard.layout.tensor
        if name in ROWS_DIVIDED:
            return inputs // tensor, outputs
        return inputs, outputs // tensor

    @property
    def _narrow_bytes(self) -> int:
        return self._rows * self._rank * self._used

    def kept_bytes(self, name: str) -> int:
        """Bytes of x A that the backward pass reads: only for this device's tokens if it is
        scattered over them."""
        is_divided = name in ROWS_DIVIDED and self._shard.sequence_parallel
        return self._narrow_bytes // (self._shard.layout.tensor if is_divided else 1)

    def _is_summed(self, name: str, *, is_backward: bool) -> bool:
        """Whether a product of a matrix and its adapters is summed over tensor in this pass."""
        return self._shard.layout.tensor > 1 and (name in ROWS_DIVIDED) != is_backward

    def _both(self, name: str, inner: int, width: int, *, suffix: str, is_summed: bool) -> bool:
        """Add the products with W and with A (backward: with B), as one or as two, and return
        whether that with W is included; if there are two and it is not summed, it is left to the
        caller."""
        write, rows, rank = self._write, self._rows, self._rank
        if self._used * (rows * (inner + rank) + inner * rank) <= _MERGED_BYTES:
            write.copy(f"{name}{suffix}.concatenate", self._used * inner * (width + rank))
            if self._shard.layout.fsdp > 1:
                self._use(name)
            write.matmul(f"{name}{suffix}", (1, rows, width + rank, inner))
            return True
        write.scalars(f"{name}.adapter{suffix}.slice", 1)
        if is_summed:
            self._use(name)
            write.matmul(f"{name}{suffix}", (1, rows, width, inner))
        write.matmul(f"{name}.adapter{suffix}", (1, rows, rank, inner))
        return is_summed

    def multiply(self, name: str, beside: Callable[[], None] = lambda: None) -> None:
        """x W + s (x A) B; `beside` adds what overlaps with its sum over tensor."""
        write, shard, rows = self._write, self._shard, self._rows
        inner, width = self._sides(name)
        wide, narrow = rows * width * self._used, self._narrow_bytes
        is_summed = self._is_summed(name, is_backward=False)
        is_there = self._both(name, inner, width, suffix="", is_summed=is_summed)
        if is_summed:
            if self._is_one(inner):
                write.copy(f"{name}.slice.wide", wide)
            self._start_sums(name, wide, narrow, scatters=shard.sequence_parallel)
            beside()
            write.wait(f"{name}.adapter.sum")
        elif is_there:
            write.copy(f"{name}.slice.wide", wide)
        own = self.kept_bytes(name)
        write.copy(f"{name}.adapter.scale", own)
        if is_summed and shard.sequence_parallel:
            write.wait(f"{name}.sum")
            own_rows = rows // shard.layout.tensor
            write.matmul(f"{name}.adapter.b", (1, own_rows, width, self._rank))
            return
        write.wait(f"{name}.sum")
        write.scalars(f"{name}.adapter.b.slice", 1)
        write.matmul(f"{name}.adapter.b", (1, rows, width, self._rank), wide if is_there else 0)
        if not is_there:
            self._use(name)
            write.matmul(name, (1, rows, width, inner), wide)
        if not is_summed:
            beside()

    def narrow_again(self, name: str) -> None:
        """x A once more, for the gradient of B, for a product that is not recomputed."""
        inner, _ = self._sides(name)
        self._write.matmul(f"{name}.adapter.again", (1, self._rows, self._rank, inner))
        self._write.copy(f"{name}.adapter.again.scale", self.kept_bytes(name))

    def _is_one(self, inner: int) -> bool:
        """Whether the products with W and A are merged."""
        return self._used * (self._rows * (inner + self._rank) + inner * self._rank) <= (
            _MERGED_BYTES
        )

    def _start_sums(self, name: str, wide: int, narrow: int, *, scatters: bool) -> None:
        """Start the sums over tensor of both products, together if XLA combines them."""
        write = self._write
        if scatters and self._shard.samples > 1:
            write.copy(f"{name}.transpose_tokens", wide)
            write.copy(f"{name}.adapter.transpose_tokens", narrow)
        if scatters:
            payload = wide + narrow
            write.start(f"{name}.sum", "reduce_scatter", payload, (TENSOR,), buffers=2)
            return
        if wide + narrow <= COMBINED_BYTES:
            write.copy(f"{name}.concatenate", wide + narrow)
            write.start(f"{name}.sum", "all_reduce", wide + narrow, (TENSOR,))
            return
        write.start(f"{name}.sum", "all_reduce", wide, (TENSOR,))
        write.start(f"{name}.adapter.sum", "all_reduce", narrow, (TENSOR,))

    def start_gradient(self, name: str) -> None:
        """With divided tokens, compute the gradient of x A for this device's tokens, and start the
        gather over tensor of it and of the product's gradient, for a matrix with divided rows."""
        write, shard, (_, outputs) = self._write, self._shard, self._sides(name)
        if not shard.sequence_parallel:
            return
        own_rows, narrow = self._rows // shard.layout.tensor, self._narrow_bytes
        wide, gather = shard.stream_bytes, f"{name}.gradient.gather"
        is_one = wide + narrow <= COMBINED_BYTES
        if not is_one:
            write.start(f"{gather}.wide", "all_gather", wide, (TENSOR,))
        write.matmul(f"{name}.adapter.gradient", (1, own_rows, self._rank, outputs))
        payload = wide + narrow if is_one else narrow
        write.start(gather, "all_gather", payload, (TENSOR,), buffers=1 + is_one)

    def wait_for_gradient(self, name: str) -> None:
        """Wait for what `start_gradient` started."""
        if not self._shard.sequence_parallel:
            return
        for part, size in (".wide", self._shard.stream_bytes), ("", self._narrow_bytes):
            self._write.wait(f"{name}.gradient.gather{part}")
            if self._shard.samples > 1:
                self._write.copy(f"{name}.gradient.transpose{part}", size)

    def input_gradient(self, name: str) -> None:
        """The gradient of x: g W^T + s (g B^T) A^T, not summed over tensor."""
        write, shard, rows = self._write, self._shard, self._rows
        width, inner = self._sides(name)  # of W^T
        narrow = self._narrow_bytes
        if name in ROWS_DIVIDED and shard.sequence_parallel:
            is_there = False  # `start_gradient` made the adapters' part
        else:
            is_there = self._both(name, inner, width, suffix=".gradient", is_summed=False)
        wide = rows * width * self._used
        if is_there:
            write.copy(f"{name}.gradient.slice.wide", wide)
        else:
            self._use(name)
            write.matmul(f"{name}.gradient", (1, rows, width, inner))
        write.copy(f"{name}.adapter.gradient.scale", narrow)
        write.scalars(f"{name}.adapter.a.slice", 1)
        write.matmul(f"{name}.adapter.a.back", (1, rows, width, self._rank), wide)

    def start_input_gradient(self, name: str) -> None:
        """Start `input_gradient` if it is summed over tensor: all tokens on every device."""
        width, inner = self._sides(name)
        wide = self._rows * width * self._used
        self._both(name, inner, width, suffix=".gradient", is_summed=True)
        if self._is_one(inner):
            self._write.copy(f"{name}.gradient.slice.wide", wide)
        self._start_sums(name, wide, self._narrow_bytes, scatters=False)

    def finish_input_gradient(self, name: str) -> None:
        """Wait for the sums of `start_input_gradient`, and add the adapters' part."""
        write, (width, _) = self._write, self._sides(name)
        wide = self._rows * width * self._used
        write.wait(f"{name}.adapter.sum")
        write.copy(f"{name}.adapter.gradient.scale", self._narrow_bytes)
        write.wait(f"{name}.sum")
        if wide + self._narrow_bytes <= COMBINED_BYTES:
            write.copy(f"{name}.gradient.slice.sum", wide)
        write.matmul(f"{name}.adapter.a.back", (1, self._rows, width, self._rank), wide)

    def matrix_gradients(self, name: str) -> None:
        """Gradients of A and B."""
        write, rows, rank = self._write, self._rows, self._rank
        inputs, outputs = self._sides(name)
        write.matmul(f"{name}.a.gradient", (1, inputs, rank, rows))
        is_divided = name in ROWS_DIVIDED and self._shard.sequence_parallel
        own_rows = rows // self._shard.layout.tensor if is_divided else rows
        write.matmul(f"{name}.b.gradient", (1, outputs, rank, own_rows))
        if is_divided:  # each device has summed over its own tokens
            payload = rank * outputs * self._used
            axes = (*self._shard.sum_axes, TENSOR)
            write.start(f"{name}.b.sum", "all_reduce", payload, axes)

    def is_summed_apart(self, name: str) -> bool:
        """Whether the gradient of an array of adapters is summed over tensor as well."""
        matrix, _, array = name.rpartition(".")
        return array == "b" and matrix in ROWS_DIVIDED and self._shard.sequence_parallel

    def wait_for_sums(self) -> None:
        """Wait for the sums over tensor of gradients of B."""
        for name in ROWS_DIVIDED:
            self._write.wait(f"{name}.b.sum")
