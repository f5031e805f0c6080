"""What the devices of torchtitan's pipeline hold in turn, by the order in which each runs.

As PyTorch and torchtitan of December 2024 have it, each read in its source:

- Layers (torchtitan, generate_split_points): as many for every stage; the stages after the first
  take one more each of those that are left.
- Order (torch/distributed/pipelining/schedules.py): 1F1B, or interleaved 1F1B in rounds of as many
  microbatches as there are stages, the last chunk of a round back first.
- Parameters: FSDP keeps float32 parts with two moments, and a stage gathered until its last
  microbatch is back (reshard_after_forward is off with a pipeline).
- Gradients: added up whole in float32 as each block gives them (FSDPParamGroup.post_backward, while
  no reduction is wanted), and scattered after the last microbatch of their stage
  (_PipelineStageBase.backward_maybe_with_nosync).
- Activations: each microbatch under way holds what its blocks keep and what its stage gave; each
  stage has a buffer to receive into for every microbatch, forward and back
  (_prepare_forward_infra, _prepare_backward_infra). The last stage holds the logits of all
  microbatches (output_chunks), and a loss that is not compiled (`scalejax.validation`).

A block while it goes back takes what ours takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from scalejax.transformer_program.memory import block_bytes
from scalejax.transformer_program.shape import Part

_F32_BYTES = 4
_STATE_BYTES = 3 * _F32_BYTES
"""Of a parameter: itself and two moments."""
_LOSS_ARRAYS = 4
"""Of tokens x vocabulary in float32, where tensor divides them (`validation.eager_memory`)."""

Pass = tuple[Literal["forward", "backward"], int]
"""Direction and chunk of what a device runs next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A transformer over a pipeline of FSDP groups."""

    part: Part
    """One microbatch of one block on one device."""
    devices: int
    """Along the pipeline."""
    chunks: int
    """Stages that each device has."""
    microbatches: int
    """Of an update."""
    shards: int
    """Devices along FSDP."""
    gathered_bytes: int = 2
    """Of a gathered parameter: bfloat16, or float8."""

    @property
    def stages(self) -> int:
        """Of the whole pipeline."""
        return self.devices * self.chunks

    def layers(self, stage: int) -> int:
        """Blocks of a stage, counted from 0."""
        least, more = divmod(self.part.shape.layers, self.stages)
        return least + (0 < stage <= more)

    def parameters(self, stage: int) -> int:
        """Of a stage, on each device along tensor."""
        part, shape = self.part, self.part.shape
        tables = (stage == 0) + (stage == self.stages - 1)
        block = part.matrix_bytes // shape.element_bytes
        return self.layers(stage) * block + tables * self.logit_width * shape.hidden

    @property
    def logit_width(self) -> int:
        """Words that a device has."""
        return self.part.shape.vocabulary // self.part.layout.tensor

    def passes(self, device: int) -> Iterator[Pass]:
        """What `device` runs, in order."""
        a_round = self.microbatches // max(1, self.microbatches // self.devices)
        every = self.microbatches * self.chunks
        apart = 1 if self.chunks == 1 else 2
        ahead = (self.chunks - 1) * a_round + apart * (self.devices - 1 - device)
        ahead = min(ahead, every)
        for index in range(every + ahead):
            if index < every:
                yield "forward", index // a_round % self.chunks
            if index >= ahead:
                yield "backward", self.chunks - 1 - (index - ahead) // a_round % self.chunks

    def peak_bytes(self) -> int:
        """Most that any device holds."""
        return max(self._peak_of(device) for device in range(self.devices))

    def _peak_of(self, device: int) -> int:
        part, last = self.part, self.stages - 1
        stages = [device + chunk * self.devices for chunk in range(self.chunks)]
        own = [self.parameters(stage) for stage in stages]
        stream = part.kept_stream_bytes
        logits = part.rows * self.logit_width
        received = sum((stage > 0) + (stage < last) for stage in stages)
        held = sum(own) * _STATE_BYTES // self.shards + self.microbatches * received * stream
        held += sum(own) * self.gathered_bytes
        kept = [(self.layers(stage) - (stage > 0)) * stream for stage in stages]
        given = [logits * part.shape.element_bytes if s == last else stream for s in stages]
        left, peak = [self.microbatches] * self.chunks, 0
        for direction, chunk in self.passes(device):
            if direction == "forward":
                held += kept[chunk] + given[chunk]
                continue
            is_last = stages[chunk] == last
            loss = _LOSS_ARRAYS * logits * _F32_BYTES if is_last else 0
            peak = max(peak, held + max(block_bytes(part), loss))
            if left[chunk] == self.microbatches:
                held += own[chunk] * _F32_BYTES
            held -= kept[chunk] + (0 if is_last else given[chunk])
            peak = max(peak, held + block_bytes(part))
            left[chunk] -= 1
            if not left[chunk]:  # gathered parameters and whole sums go, a part of the sums stays
                held -= own[chunk] * (self.gathered_bytes + _F32_BYTES)
                held += own[chunk] * _F32_BYTES // self.shards
        return peak
