"""Memory of a step in closed form, as XLA assigns it: state, stacks, activations, the peak.

Left out: that buffers do not fill the gaps between each other, a few per cent.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from scalejax.config.parallelism import Layout
from scalejax.simulator.program import MemoryUse
from scalejax.simulator.transformer.block import kept_bytes
from scalejax.simulator.transformer.embedding_and_loss import accumulator_elements
from scalejax.simulator.transformer.shape import (
    Part,
    Strategy,
    TransformerShape,
    most_layers,
    parameters_of_device,
    part_of,
)

AMPERE_WORKSPACE_BYTES = 4 * 1024**2
"""What cuBLAS is given for a product by XLA before Hopper (xla/service/gpu, GetCublasWorkspaceSize:
32 MiB from Hopper on)."""
_F32_BYTES = 4
_KEPT = 65536  # what a search meets again


def memory_use(
    shape: TransformerShape, strategy: Strategy, *, workspace_bytes: int = AMPERE_WORKSPACE_BYTES
) -> MemoryUse:
    """Bytes of one device: of a pipeline, of the stage that holds most.

    Arguments are parameters, moments and tokens. All else is temporary: in the compute type
    matrices and their gradients, in float32 gradients of several microbatches, what blocks keep
    of the microbatches under way, and the larger of what one block and the logits need.
    """
    held = held_by_stage(shape, [strategy])[strategy.zero_stage]
    state = held.state_bytes(strategy.zero_stage)
    return MemoryUse(
        argument_bytes=state + held.batch_bytes,
        output_bytes=state,
        alias_bytes=state,
        temporary_bytes=workspace_bytes
        + held.temporary_bytes(strategy.zero_stage, strategy.pipeline_chunks),
    )


class Held:
    """What a device holds of one kind of parts, but for what the ZeRO stage and chunks change."""

    def __init__(self, part: Part, layout: Layout, microbatches: int, moments: int) -> None:
        """Add up what neither changes.

        Args:
            part: one microbatch of one block.
            layout: all devices.
            microbatches: of an update.
            moments: arrays like the parameters that the optimizer keeps.
        """
        shape, layers = part.shape, most_layers(part.shape, layout)
        self._data, self._stages, self._moments = layout.data, layout.pipeline, moments
        self._microbatches = microbatches
        self._own = parameters_of_device(shape, layout) * _F32_BYTES
        self._accumulated = accumulator_elements(shape, layout, microbatches) * _F32_BYTES
        self._is_cast = shape.element_bytes != _F32_BYTES
        self._kept = kept_bytes(part) * layers
        self._fixed = _fixed_bytes(part, layers)
        self.batch_bytes = 8 * part.samples * microbatches * (shape.tokens // layout.context)
        """Tokens and targets of an update, int32."""

    def state_bytes(self, zero_stage: int) -> int:
        """Parameters and moments."""
        return (1 + self._moments) * self._own // (self._data if zero_stage else 1)

    def temporary_bytes(self, zero_stage: int, chunks: int) -> int:
        """All else at its peak."""
        accumulated = self._accumulated // (self._data if zero_stage == 2 else 1)
        # Cast parameters are among what is fixed; others are arguments, unless kept in parts.
        gathered = self._own if zero_stage and not self._is_cast else 0
        kept = int(self._kept * under_way(self._stages, self._microbatches, chunks))
        return self._fixed + accumulated + gathered + kept


def held_by_stage(
    shape: TransformerShape, strategies: Iterable[Strategy]
) -> dict[Literal[0, 1, 2], Held]:
    """What a device holds, by ZeRO stage; the first may keep a block's gradients in parts.

    Args:
        shape: the network.
        strategies: alike but for ZeRO stage and chunks.
    """
    found: dict[Literal[0, 1, 2], Held] = {}
    known: dict[Part, Held] = {}
    for each in strategies:
        if each.zero_stage not in found:
            part = part_of(shape, each)
            if part not in known:
                known[part] = Held(part, each.layout, each.split.microbatches, each.moments)
            found[each.zero_stage] = known[part]
    return found


def under_way(stages: int, microbatches: int, chunks: int) -> float:
    """Of how many microbatches the first stage holds what blocks keep, at most all.

    As many as there are stages (1F1B); interleaved 1 + (stages - 1) / (stages chunks) times as
    many (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3).
    """
    times = 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0
    return min(microbatches, stages * times)


@lru_cache(maxsize=_KEPT)
def _fixed_bytes(part: Part, layers: int) -> int:
    """The stacks of matrices and gradients, the embedding, and the peak of block and logits."""
    stack = part.matrix_bytes // part.layout.fsdp * layers
    stacks = stack // part.gradient_parts
    stacks += 0 if part.shape.element_bytes == _F32_BYTES else stack
    return stacks + _table_bytes(part) + max(block_bytes(part), _logits_bytes(part))


def _table_bytes(part: Part) -> int:
    """The token embedding in the compute type, gathered, and its gradient."""
    shape = part.shape
    return shape.vocabulary * shape.hidden * shape.element_bytes // part.layout.tensor


def block_bytes(part: Part) -> int:
    """Most that the backward pass of one block needs besides the stacks.

    A layer of each matrix, with fsdp whole and the gradients before they are scattered; the
    input, its norms and the gradient; queries, keys, values and their gradients; the inside of
    the feed-forward layer before and after the GELU and its gradient; two arrays of scores.
    """
    matrices = part.matrix_bytes * (2 if part.layout.fsdp > 1 else 1)
    streams = 6 * part.stream_bytes
    scores = 0 if part.shape.is_fused else 2 * part.score_bytes
    inner = part.up_bytes + 2 * part.inner_bytes
    if part.recompute in ("selective_op", "full"):
        return matrices + streams + 2 * part.qkv_bytes + scores + inner
    return part.matrix_bytes + streams + part.qkv_bytes + scores + inner


def _logits_bytes(part: Part) -> int:
    """Most that the loss needs: logits and their gradient in float32, and in the compute type."""
    shape = part.shape
    logits = part.rows * shape.vocabulary // part.layout.tensor
    return logits * (_F32_BYTES + shape.element_bytes) + 3 * part.stream_bytes
