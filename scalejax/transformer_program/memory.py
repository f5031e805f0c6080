"""Memory of a step in closed form, as XLA assigns it: state, stacks, activations, the peak.

Left out: that buffers do not fill the gaps between each other, a few per cent.
"""

from functools import lru_cache

from scalejax.program import MemoryUse
from scalejax.transformer_program.block import kept_bytes
from scalejax.transformer_program.ends import accumulator_elements
from scalejax.transformer_program.shape import (
    Part,
    Strategy,
    TransformerShape,
    parameters_of_device,
    part_of,
)

AMPERE_WORKSPACE_BYTES = 4 * 1024**2
"""What cuBLAS is given for a product by XLA before Hopper (xla/service/gpu, GetCublasWorkspaceSize:
32 MiB from Hopper on)."""
_F32_BYTES = 4


def memory_use(
    shape: TransformerShape, strategy: Strategy, *, workspace_bytes: int = AMPERE_WORKSPACE_BYTES
) -> MemoryUse:
    """Bytes of one device: of a pipeline, of the stage that holds most.

    Arguments are parameters, moments and tokens. All else is temporary: in the compute type
    matrices and their gradients, in float32 gradients of several microbatches, what blocks keep
    of the microbatches under way, and the larger of what one block and the logits need.
    """
    part, layout = part_of(shape, strategy), strategy.layout
    own = parameters_of_device(shape, strategy)
    kept_whole = 1 if strategy.zero_stage == 0 else layout.data
    state = own * _F32_BYTES + strategy.moments * own * _F32_BYTES // kept_whole
    batch = 2 * strategy.split.per_device_batch * shape.tokens // layout.context * 4
    layers = shape.layers // layout.pipeline
    accumulated = accumulator_elements(shape, strategy) * _F32_BYTES
    if strategy.zero_stage == 2:
        accumulated //= layout.data
    casts = shape.element_bytes != _F32_BYTES
    stacks = part.matrix_bytes // layout.fsdp * layers * (2 if casts else 1)
    tables = _table_bytes(part)
    kept = kept_bytes(part) * layers * in_flight(strategy)
    peak = max(_block_bytes(part), _logits_bytes(part))
    temporary = accumulated + stacks + tables + int(kept) + peak + workspace_bytes
    return MemoryUse(
        argument_bytes=state + batch,
        output_bytes=state,
        alias_bytes=state,
        temporary_bytes=temporary,
    )


def in_flight(strategy: Strategy) -> float:
    """Microbatches whose activations the first stage holds at once, of all of its blocks.

    As many as there are stages, or microbatches (1F1B); interleaved stages hold
    1 + (stages - 1) / (stages chunks) times as many (Narayanan et al. 2021, arXiv 2104.04473;
    Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3).
    """
    stages, chunks = strategy.layout.pipeline, strategy.pipeline_chunks
    held = min(stages, strategy.split.microbatches)
    more = 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0
    return held * more


def _table_bytes(part: Part) -> int:
    """The token embedding in the compute type, gathered, and its gradient."""
    shape = part.shape
    return shape.vocabulary * shape.hidden * shape.element_bytes // part.layout.tensor


@lru_cache(maxsize=4096)
def _block_bytes(part: Part) -> int:
    """Most that the backward pass of one block needs besides the stacks.

    A layer of each matrix, with fsdp whole and the gradients before they are scattered; the
    input, its norms and the gradient; queries, keys, values and their gradients; the inside of
    the feed-forward layer before and after the GELU and its gradient; two arrays of scores.
    """
    matrices = part.matrix_bytes * (2 if part.layout.fsdp > 1 else 1)
    streams = 6 * part.stream_bytes
    scores = 0 if part.shape.is_fused else 2 * part.score_bytes
    inner = part.up_bytes + 2 * part.inner_bytes
    if part.recompute == "full":
        return matrices + streams + 2 * part.qkv_bytes + scores + inner
    return part.matrix_bytes + streams + part.qkv_bytes + scores + inner


@lru_cache(maxsize=4096)
def _logits_bytes(part: Part) -> int:
    """Most that the loss needs: logits and their gradient in float32, and in the compute type."""
    shape = part.shape
    logits = part.rows * shape.vocabulary // part.layout.tensor
    return logits * (_F32_BYTES + shape.element_bytes) + 3 * part.stream_bytes
