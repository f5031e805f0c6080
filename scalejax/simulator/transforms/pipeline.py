"""The step of a pipeline, from the step of one of its stages.

Stages work on microbatches in turn, forward and backward, one of each at a time (1F1B), or in
several rounds over chunks of their layers (interleaved). While the first microbatch is on its way
to the last stage and the last one on its way back, a stage stands still for as long as all other
stages take for one microbatch: the bubble, (p - 1) (t forward + t backward) / v for p stages of v
chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Where stages are unlike, the longest
sets the pace, and the bubble is what all others take. It is made part of the schedule, as loops
over the blocks of other stages, or of a chunk.

The stage is the last, which computes logits besides its blocks, or another one that takes longer
because the last holds fewer. Left out: that
tied embeddings of the first stage and the last are summed with each other; that sending may
overlap with compute. What a stage holds of the microbatches under way is one input for each block:
everything else is computed again. With chunks a first stage holds more than is counted.
"""

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from scalejax.config.parallelism import PIPELINE, TENSOR
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.simulator.program import (
    BUBBLE,
    Collective,
    CollectiveName,
    DeviceGroup,
    Loop,
    Operation,
    Program,
    repeated,
)

_NOTE = "a pipeline, from its last stage: the bubble is in compute, memory and launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a network is divided over stages."""

    stages: int
    """Groups of devices, each of which holds some of the layers."""
    chunks: int = 1
    """Parts of the layers of one stage, each with layers of other stages between them."""
    layers: tuple[int, ...] | None = None
    """Blocks of each stage, of one chunk each; None where all stages hold as many."""
    microbatches: int
    """Parts of the samples of a device group, one after the other."""
    boundary_bytes: int
    """What one microbatch hands from stage to stage."""
    is_boundary_divided: bool = False
    """Whether devices along the tensor axis hold parts of it (sequence parallelism)."""

    def __post_init__(self) -> None:
        require_at_least("pipeline.stages", self.stages, 2)
        require_at_least("pipeline.chunks", self.chunks, 1)
        require_at_least("pipeline.microbatches", self.microbatches, 1)
        if self.layers is not None and len(self.layers) != self.stages:
            accepted = f"it must have an entry for each of {self.stages} stages"
            raise ConfigError(refusal("pipeline.layers", self.layers, accepted))


def pipelined(stage: Program, pipeline: Pipeline, *, last: tuple[Operation, ...] = ()) -> Program:
    """The step of a device of the stage that sets the pace, bubble included.

    A microbatch goes through all stages, and the others follow it through the slowest: t of the
    step = sum over stages of t + (microbatches - 1) x largest t. Equal stages take that, and those
    of which the last is the slowest; where first ones are, they begin more microbatches while they
    wait, and the step is shorter by up to what others lack of their blocks.

    Args:
        stage: the step of the network with the layers of one stage, on the devices of one stage,
            in a loop over as many microbatches.
        pipeline: of which it is a stage.
        last: what the last stage does for a microbatch besides its blocks, where that is not the
            stage given.

    Raises:
        ConfigError: if `stage` has no such loop, or none of the stages holds as many blocks.
    """
    loops = [item for item in stage.operations if isinstance(item, Loop)]
    fitting = [loop for loop in loops if loop.trip_count == pipeline.microbatches]
    work = max(fitting, key=_flop, default=None)
    if work is None:
        accepted = f"it must loop over microbatches, {pipeline.microbatches} of them"
        raise ConfigError(refusal("stage", stage.name, accepted))
    tensor = dict(stage.mesh_axes).get(TENSOR, 1)
    sent = sent_between_stages(pipeline, tensor, stage.device_count)
    several = tuple(_numbered(sent, index) for index in range(pipeline.chunks))
    body = (*work.body, *(each for one in several for each in one))
    schedule = (replace(work, body=body), *_bubble(work, pipeline, sent, last))
    operations = tuple(
        each for item in stage.operations for each in (schedule if item is work else (item,))
    )
    in_flight = min(pipeline.stages, pipeline.microbatches) - 1
    held = in_flight * _layers(work) * pipeline.boundary_bytes
    memory = replace(stage.memory, temporary_bytes=stage.memory.temporary_bytes + held)
    return replace(
        stage,
        mesh_axes=(
            (PIPELINE, pipeline.stages),
            *(axis for axis in stage.mesh_axes if axis[0] != PIPELINE),
        ),
        operations=operations,
        memory=memory,
        model_flop=None,
        notes=(*stage.notes, _NOTE),
    )


def _flop(loop: Loop) -> int:
    inner = sum(_flop(item) if isinstance(item, Loop) else item.flop for item in loop.body)
    return loop.trip_count * inner


def _layers(work: Loop) -> int:
    """Blocks of the stage whose microbatch `work` is; 1 where it does not loop over them."""
    return max((item.trip_count for item in work.body if isinstance(item, Loop)), default=1)


def _bubble(
    work: Loop, pipeline: Pipeline, sent: tuple[Operation, ...], last: tuple[Operation, ...]
) -> list[Loop]:
    """What one microbatch takes in the other stages: a loop for those of as many blocks."""
    own = _layers(work)
    blocks = tuple(item for item in work.body if isinstance(item, Loop)) or work.body
    others = Counter(pipeline.layers or (own,) * pipeline.stages)
    if own not in others:
        accepted = f"one of them must be the stage given, of {own} blocks"
        raise ConfigError(refusal("pipeline.layers", pipeline.layers, accepted))
    others[own] -= 1
    loops = []
    for index, (layers, stages) in enumerate((+others).items()):
        suffix = (f".{index}" if index else "") + BUBBLE
        part = Fraction(layers, own * pipeline.chunks)
        passed = tuple(repeated(_shortened(item, part), suffix) for item in blocks)
        handed_on = _numbered(sent, pipeline.chunks + index)
        loops.append(Loop(name=work.name + suffix, trip_count=stages, body=(*passed, *handed_on)))
    if last:
        ends = tuple(repeated(item, BUBBLE) for item in last)
        loops.append(Loop(name=f"{work.name}.last{BUBBLE}", trip_count=1, body=ends))
    return loops


def _shortened(item: Operation | Loop, part: Fraction) -> Operation | Loop:
    """A loop over the blocks of a stage, as over a part of them."""
    if isinstance(item, Loop):
        return replace(item, trip_count=max(1, round(item.trip_count * part)))
    return item


@lru_cache(maxsize=4096)
def sent_between_stages(
    pipeline: Pipeline, tensor: int, stage_devices: int
) -> tuple[Operation, ...]:
    """What a stage sends and takes for one microbatch: activations on, gradients back.

    Devices along the tensor axis each send their part of what they all hold, and gather the
    parts again (the same, section 4.1); where they hold parts only, there is nothing to gather.

    Args:
        pipeline: the stages.
        tensor: devices along the tensor axis.
        stage_devices: devices of one stage.
    """
    part = -(-pipeline.boundary_bytes // tensor)
    operations = []
    for way in ("forward", "backward"):
        along = DeviceGroup(extents=((pipeline.stages, stage_devices),), axes=(PIPELINE,))
        operations.append(_collective(f"send.{way}", "collective_permute", part, along))
        if tensor > 1 and not pipeline.is_boundary_divided:
            group = DeviceGroup(extents=((tensor, 1),), axes=(TENSOR,))
            operations.append(
                _collective(f"gather.{way}", "all_gather", pipeline.boundary_bytes, group)
            )
    return tuple(operations)


def _collective(name: str, kind: CollectiveName, payload: int, group: DeviceGroup) -> Operation:
    return Operation(
        name=f"{PIPELINE}.{name}",
        kind="collective",
        dtype="bf16",
        read_bytes=payload,
        write_bytes=payload,
        collective=Collective(name=kind, payload_bytes=payload, group=group, is_async=False),
    )


def _numbered(operations: tuple[Operation, ...], index: int) -> tuple[Operation, ...]:
    return tuple(replace(each, name=f"{each.name}.{index}") for each in operations)
