"""Operations of a layer of experts, the other half of a block, as XLA compiles it for GPUs.

Read off compiled programs of `models.moe` without a capacity (jax 0.10.2, for H100): devices along
the expert axis gather each other's tokens, a loop multiplies blocks of rows of one expert, and the
sums are reduce-scattered. Everything is derived from shapes; loads are even. Independent of
hardware.
"""

from dataclasses import dataclass
from functools import lru_cache

from scalejax.config.moe import MoeConfig, block_rows
from scalejax.config.parallelism import EXPERT, FSDP, TENSOR
from scalejax.simulator.program import ExpertBlocks
from scalejax.simulator.transformer.operations import Writer
from scalejax.simulator.transformer.shape import BlockShard, is_of_experts, sum_axes

_CACHE_SIZE = 65536
_F32_BYTES = 4
_ROUTING = 6
"""Fusions for the scores, choice and weights of a token's experts, each over all its scores."""


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Rows and blocks of the experts of one device, for one microbatch."""

    tokens: int
    """Tokens that the device has after they are gathered."""
    experts: int
    """Number of experts on the device."""
    inner: int
    """Width of an expert on the device."""
    rows: int
    """Rows of a block."""
    blocks: int
    """Blocks at even loads."""
    most_blocks: int
    """Largest possible number of blocks."""
    most: int
    """Largest possible number of assignments."""
    is_kept: bool
    """Whether products before the activation function are kept for the backward pass."""


@lru_cache(maxsize=_CACHE_SIZE)
def expert_shard(shard: BlockShard) -> ExpertShard:
    """Rows and blocks of a device, as `models.moe` cuts them."""
    moe, layout = _moe(shard), shard.layout
    tokens, here = shard.rows * layout.expert, moe.experts // layout.expert
    mean = shard.rows * moe.experts_per_token / here
    rows = block_rows(mean)
    most = tokens * min(moe.experts_per_token, here)
    return ExpertShard(
        tokens=tokens,
        experts=here,
        inner=moe.expert_hidden // layout.tensor,
        rows=rows,
        blocks=here * -int(-mean // rows),
        most_blocks=(most + here * (rows - 1)) // rows,
        most=most,
        is_kept=layout.expert == 1 and shard.recompute in ("none", "selective"),
    )


def _moe(shard: BlockShard) -> MoeConfig:
    moe = shard.shape.experts
    assert moe is not None  # noqa: S101  of a block with experts
    return moe


def gathered_bytes(shard: BlockShard) -> int:
    """Bytes of the tokens that a device has after they are gathered."""
    return shard.stream_bytes * shard.layout.expert


def kept(shard: BlockShard) -> list[tuple[str, int]]:
    """(name, bytes) of what the layer keeps for its backward pass."""
    own, moe = expert_shard(shard), _moe(shard)
    wide = shard.rows * shard.shape.hidden * _F32_BYTES
    scores = shard.rows * moe.experts * _F32_BYTES
    found = [("kept.gathered", gathered_bytes(shard)), ("kept.wide", wide)]
    found += [(f"kept.scores.{index}", scores) for index in range(2)]
    found += [(f"kept.assignments.{index}", own.most * _F32_BYTES) for index in range(2)]
    if own.is_kept:
        found.append(("kept.hidden", _hidden_bytes(shard) * own.most_blocks))
    if moe.shared_experts:
        inner = shard.rows * moe.shared_experts * own.inner * shard.shape.element_bytes
        found.append(("kept.shared", 2 * inner))
    return found


def _hidden_bytes(shard: BlockShard) -> int:
    """Bytes of the result of the up projections of a block of rows."""
    own = expert_shard(shard)
    return own.rows * 2 * own.inner * shard.shape.element_bytes


def held_bytes(shard: BlockShard) -> int:
    """Peak bytes of the layer's backward pass: gathered tokens and gradients of results, and the
    float32 sums of the gradients of tokens and of the matrices."""
    own, hidden = expert_shard(shard), shard.shape.hidden
    sums = _F32_BYTES * (own.tokens * hidden + 3 * own.experts * own.inner * hidden)
    return sums + 2 * gathered_bytes(shard) + own.is_kept * _hidden_bytes(shard) * own.most_blocks


class ExpertLayer:
    """Builder of the operations of the layer in a pass over its block."""

    def __init__(self, write: Writer, shard: BlockShard) -> None:
        self.write, self.shard = write, shard
        self.own, self.moe, self.layout = expert_shard(shard), _moe(shard), shard.layout
        self.hidden, self.used = shard.shape.hidden, shard.shape.element_bytes
        self.scores = shard.rows * self.moe.experts * _F32_BYTES
        self.matrices = {name: size for name, size in shard.matrices.items() if is_of_experts(name)}
        self.is_again = shard.recompute in ("selective_op", "full")

    # The forward pass, and what of it is recomputed.

    def start_tokens(self, name: str) -> None:
        """Start to gather tokens, or the gradients of their results, over the expert axis."""
        self.write.start(name, "all_gather", gathered_bytes(self.shard), (EXPERT,))

    def route(self) -> None:
        """Choose each token's experts and their weights, which are gathered with the tokens."""
        write, rows, scores = self.write, self.shard.rows, self.scores
        write.copy("router.slice", self.hidden * self.moe.experts * _F32_BYTES)
        write.exact_matmul("router", (1, rows, self.moe.experts, self.hidden))
        for index in range(_ROUTING):
            write.fusion(f"router.scores.{index}", scores, scores)
        assignments = 2 * _F32_BYTES * rows * self.moe.experts_per_token
        size = assignments * self.layout.expert
        write.start("assignments", "all_gather", size, (EXPERT,), buffers=2)
        write.wait("assignments")
        for index in range(4):
            write.fusion(f"sort.{index}", size, size)
        write.scalars("loads", 5)

    def gather_matrices(self) -> None:
        """Slice a layer of each matrix, and gather it over fsdp if fsdp shards it."""
        for name, size in self.matrices.items():
            self.write.copy(f"{name}.slice", size // self.layout.fsdp)
        for name, size in self.matrices.items():
            self.write.start(f"{name}.gather", "all_gather", size, (FSDP,))
        for name in self.matrices:
            self.write.wait(f"{name}.gather")

    def forward(self) -> None:
        """Pass every token through its experts; with an expert axis, sums are in flight at the
        end."""
        write, own, wide = self.write, self.own, self.own.tokens * self.hidden * _F32_BYTES
        if self.layout.device_count == 1:
            write.fusion("sums.zero", 0, wide)
        else:
            write.copy("sums.zero", wide)
        if own.is_kept:
            write.fusion("kept.hidden.zero", 0, _hidden_bytes(self.shard) * own.most_blocks)
        write.wait("tokens")
        with write.repeated("blocks", own.blocks, self._blocks):
            self._blocks_forward()
        if self.layout.expert > 1:
            narrow = gathered_bytes(self.shard)
            write.narrowing("sums.cast", wide, narrow)
            write.start("sums", "reduce_scatter", narrow, (EXPERT,))
        self._start_report("loads")

    def _start_report(self, name: str) -> None:
        """Start to sum the loads of experts over all devices, or two losses."""
        size = _F32_BYTES * (self.moe.experts if name == "loads" else 2)
        axes = sum_axes(self.layout) if name == "loads" else self.shard.sum_axes
        self.write.start(f"router.{name}", "all_reduce", size, (*axes, FSDP))

    def report(self) -> None:
        """Losses of the router, from the loads of experts on all devices."""
        write = self.write
        write.wait("router.loads")
        write.scalars("router.report", 8)
        self._start_report("losses")
        write.wait("router.losses")
        write.scalars("router.kept", 4 if self.is_again else 20)

    @property
    def _blocks(self) -> ExpertBlocks:
        own = self.own
        return ExpertBlocks(
            experts=own.experts, rows=own.rows, experts_per_token=self.moe.experts_per_token
        )

    def _blocks_forward(self) -> None:
        write, own, hidden = self.write, self.own, self.hidden
        narrow = own.rows * hidden * self.used
        made = _hidden_bytes(self.shard)
        write.scalars("block", 3 if own.is_kept else 2)
        write.copy("block.tokens", narrow)
        self._slice("up")
        write.matmul("block.up", (1, own.rows, 2 * own.inner, hidden))
        if own.is_kept:
            write.fusion("block.kept", 2 * made, made)
        write.fusion("block.gate", made, made // 2)
        self._slice("down")
        write.matmul("block.down", (1, own.rows, hidden, own.inner))
        write.fusion("block.add", narrow, narrow * _F32_BYTES // self.used)
        write.scalars("block.counter", 1)

    def _slice(self, name: str) -> None:
        """The matrix of the expert of a block."""
        self.write.copy(f"block.{name}.slice", self._of_one(name) * self.used)

    def _of_one(self, name: str) -> int:
        """Elements of a matrix of an expert on the device."""
        return self.own.inner * self.hidden * (2 if name == "up" else 1)

    def add(self) -> None:
        """Add the result to the stream."""
        shard, write, layout = self.shard, self.write, self.layout
        stream = shard.kept_stream_bytes
        write.wait("sums")
        kind = "reduce_scatter" if shard.sequence_parallel else "all_reduce"
        write.collective("experts.sum", kind, shard.stream_bytes, (TENSOR,))
        wide = 1 if layout.expert > 1 else _F32_BYTES // self.used
        write.fusion("experts.residual", (1 + wide) * stream, stream)

    # The backward pass.

    def backward(self) -> None:
        """Gradients of the tokens, in flight at the end if there is an expert axis, and of the
        experts' matrices."""
        write, own, wide = self.write, self.own, self.own.tokens * self.hidden * _F32_BYTES
        write.scalars("experts.counter", 4)
        one = {name: own.experts * self._of_one(name) for name in ("up", "down")}
        for name, size in one.items():
            write.fusion(f"{name}.gradient.zero", 0, size * _F32_BYTES)
        write.fusion("tokens.gradient.zero", 0, wide)
        write.wait("results.gradient")
        with write.repeated("blocks.gradient", own.blocks, self._blocks):
            self._blocks_backward()
        narrow = gathered_bytes(self.shard)
        if self.layout.expert > 1:
            write.narrowing("tokens.gradient.cast", wide, narrow)
            write.start("tokens.gradient", "reduce_scatter", narrow, (EXPERT,))
        self._start_report("losses.gradient")
        write.scalars("weights.gradient", 2)
        weights = own.tokens * self.moe.experts_per_token * _F32_BYTES
        write.start("weights.gradient", "reduce_scatter", weights, (EXPERT,))
        self._start_sums(one)

    def _start_sums(self, elements: dict[str, int]) -> None:
        """Start the sums of the gradients of the experts' matrices over fsdp, then over devices
        that have the same experts."""
        write, layout = self.write, self.layout
        along = self.shard.expert_sum_axes
        for name, size in elements.items():
            if along or layout.fsdp > 1:
                write.fusion(f"{name}.gradient.cast", size * _F32_BYTES, size * self.used)
            if layout.fsdp > 1:
                write.start(f"{name}.scatter", "reduce_scatter", size * self.used, (FSDP,))
            kind = "reduce_scatter" if self.shard.is_scattered else "all_reduce"
            if layout.fsdp > 1:
                write.wait(f"{name}.scatter")
            write.start(f"{name}.sum", kind, size * self.used // layout.fsdp, along)

    def finish_sums(self) -> None:
        """Wait for the sums of the gradients of experts' matrices; copy them to their stacks."""
        write, layout = self.write, self.layout
        is_cast = bool(self.shard.expert_sum_axes) or layout.fsdp > 1
        for name in ("up", "down"):
            size = self.matrices[f"experts.{name}"] // layout.fsdp
            write.wait(f"{name}.sum")
            wide = 1 if is_cast else _F32_BYTES // self.used
            write.fusion(f"{name}.stack", wide * size, size)

    def _blocks_backward(self) -> None:
        write, own, hidden = self.write, self.own, self.hidden
        narrow = own.rows * hidden * self.used
        made = _hidden_bytes(self.shard)
        write.scalars("block", 2)
        write.copy("block.tokens", 2 * narrow)
        if not own.is_kept:
            self._slice("up")
            write.matmul("block.up", (1, own.rows, 2 * own.inner, hidden))
        self._slice("down")
        write.matmul("block.down.input_gradient", (1, own.rows, own.inner, hidden))
        write.fusion("block.gate.gradient", 3 * made // 2, made)
        if own.is_kept:
            self._slice("up")
        write.matmul("block.up.input_gradient", (1, own.rows, hidden, 2 * own.inner))
        write.fusion("block.add", narrow, narrow * _F32_BYTES // self.used)
        write.fusion("block.inner", 3 * made // 2, made // 2)
        for name, width in (("down", own.inner), ("up", 2 * own.inner)):
            size = self._of_one(name) * _F32_BYTES
            write.copy(f"block.{name}.sum", size)
            shape = (1, hidden, width, own.rows)
            write.matmul(f"block.{name}.gradient", shape, is_accumulated=True)
            write.fusion(f"block.{name}.sum.stack", 2 * size, size)
        write.scalars("block.counter", 4)

    def router_gradient(self) -> None:
        """Gradient of the tokens from the router."""
        write = self.write
        write.wait("router.losses.gradient")
        write.wait("weights.gradient")
        for index in range(4):
            write.fusion(f"router.gradient.{index}", 2 * self.scores, self.scores)
        shape = (1, self.shard.rows, self.hidden, self.moe.experts)
        write.exact_matmul("router.input_gradient", shape)
        write.wait("tokens.gradient")

    def router_matrix_gradient(self) -> None:
        """Gradient of the router's matrix."""
        write, moe = self.write, self.moe
        write.copy("kept.wide", self.shard.rows * self.hidden * _F32_BYTES)
        write.exact_matmul("router.gradient", (1, self.hidden, moe.experts, self.shard.rows))
        write.scalars("router.gradient.stack", 1)
