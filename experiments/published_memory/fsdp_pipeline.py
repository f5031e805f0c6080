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
- Activations: each microbatch under way holds what its blocks keep. What a stage gave and the
  gradient of what it received stay until the next update, of every microbatch (output_chunks and
  the receive buffers, clear_runtime_states); and there is a buffer to receive every microbatch,
  forward and back (_prepare_forward_infra, _prepare_backward_infra). Of the last stage, what it
  gave are logits, and its loss is not compiled (`scalejax.simulator.frameworks.eager`).

A block while it goes back takes what ours takes, 8.7 of some 70 GiB in 405B. Norms are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from scalejax.simulator.frameworks.eager import DIVIDED_ARRAYS
from scalejax.simulator.transformer.memory import block_bytes
from scalejax.simulator.transformer.shape import BlockShard

_F32_BYTES = 4
_STATE_BYTES = 3 * _F32_BYTES
"""Of a parameter: itself and two moments."""
Pass = tuple[Literal["forward", "backward"], int]
"""Direction and chunk of what a device runs next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A transformer over a pipeline of FSDP groups, its blocks computed again in full.

    Raises:
        ValueError: if blocks keep more than their input, or if PyTorch refuses the microbatches.
    """

    part: BlockShard
    """One microbatch of one block on one device."""
    devices: int
    """Devices along the pipeline."""
    chunks: int
    """Stages that each device has."""
    microbatches: int
    """Microbatches of an update."""
    shards: int
    """Devices along FSDP."""
    gathered_bytes: int = 2
    """Bytes of a gathered parameter: of bfloat16, or of float8."""

    def __post_init__(self) -> None:
        if self.part.recompute != "full":
            raise ValueError(f"recompute={self.part.recompute!r} is not counted: full is")
        if self.microbatches % self.rounds:
            raise ValueError(f"{self.microbatches} microbatches in {self.rounds} rounds")

    @property
    def rounds(self) -> int:
        """Rounds of about as many microbatches as there are devices, in which chunks take turns."""
        return max(1, self.microbatches // self.devices)

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.devices * self.chunks

    def layers(self, stage: int) -> int:
        """Blocks of a stage, counted from 0."""
        least, more = divmod(self.part.shape.layers, self.stages)
        return least + (0 < stage <= more)

    def parameters(self, stage: int) -> int:
        """Parameters of a stage, on each device along tensor."""
        part, shape = self.part, self.part.shape
        tables = (stage == 0) + (stage == self.stages - 1)
        block = part.matrix_bytes // shape.element_bytes
        return self.layers(stage) * block + tables * self.logit_width * shape.hidden

    @property
    def logit_width(self) -> int:
        """Columns of the output matrix on each device along tensor."""
        return self.part.shape.vocabulary // self.part.layout.tensor

    def passes(self, device: int) -> Iterator[Pass]:
        """What `device` runs, in order."""
        in_a_round = self.microbatches // self.rounds
        every = self.microbatches * self.chunks
        # Forward passes before the first one back: those of the chunks before the last, and until
        # the device after has its first one back, which takes it one pass, or two with chunks.
        per_device = 1 if self.chunks == 1 else 2
        ahead = (self.chunks - 1) * in_a_round + per_device * (self.devices - 1 - device)
        ahead = min(ahead, every)
        for index in range(every + ahead):
            if index < every:
                yield "forward", index // in_a_round % self.chunks
            if index >= ahead:
                yield "backward", self.chunks - 1 - (index - ahead) // in_a_round % self.chunks

    def peak_bytes(self) -> int:
        """Most that any device holds."""
        return max(self._peak_of(device) for device in range(self.devices))

    def _peak_of(self, device: int) -> int:
        """Most that `device` holds in an update, in bytes."""
        part, last = self.part, self.stages - 1
        stages = [device + chunk * self.devices for chunk in range(self.chunks)]
        parameters = [self.parameters(stage) for stage in stages]
        stream = part.kept_stream_bytes
        logits = part.rows * self.logit_width
        buffers = sum((stage > 0) + (stage < last) for stage in stages)
        # From the start: state in parts, receive buffers, and parameters as they are gathered.
        held = sum(parameters) * _STATE_BYTES // self.shards
        held += self.microbatches * buffers * stream + sum(parameters) * self.gathered_bytes
        # Of a microbatch: the input of each block, the first of which is a receive buffer.
        kept = [(self.layers(stage) - (stage > 0)) * stream for stage in stages]
        given = [logits * part.shape.element_bytes if s == last else stream for s in stages]
        waiting, peak = [self.microbatches] * self.chunks, 0
        for direction, chunk in self.passes(device):
            if direction == "forward":
                held += kept[chunk] + given[chunk]
                continue
            loss = DIVIDED_ARRAYS * logits * _F32_BYTES if stages[chunk] == last else 0
            peak = max(peak, held + max(block_bytes(part), loss))
            if waiting[chunk] == self.microbatches:  # the first one back: whole sums of gradients
                held += parameters[chunk] * _F32_BYTES
            held -= kept[chunk]
            held += stream if stages[chunk] > 0 else 0  # the gradient of what it received
            peak = max(peak, held + block_bytes(part))
            waiting[chunk] -= 1
            if not waiting[
                chunk
            ]:  # gathered parameters and whole sums go, a part of the sums stays
                held -= parameters[chunk] * (self.gathered_bytes + _F32_BYTES)
                held += parameters[chunk] * _F32_BYTES // self.shards
        return peak
