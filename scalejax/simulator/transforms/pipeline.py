"""Programs of pipeline-parallel steps: derived from one stage, with their bubble separated.

Under 1F1B stages alternate forward and backward passes of microbatches, or interleave chunks of
their layers. While the first microbatch travels to the last stage and the last one back, a stage
idles for as long as all other stages take for one microbatch: the bubble,
(p - 1) (t forward + t backward) / v for p stages of v chunks (`PipelineTicks`). If stages are
unequal, the slowest is the bottleneck, and the bubble is the time of all others. It is part of the
schedule, as loops over the blocks of other stages, or of a chunk.

The stage is the last, which computes logits in addition to its blocks, or another one that is
slower because the last holds fewer blocks. Left out: the sum of the gradients of tied embeddings
between the first stage and the last; that sends may overlap with compute. A stage holds one input
per block of each microbatch in flight: everything else is recomputed. With chunks, a first stage
holds more than is counted. Independent of hardware.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TypeGuard

from scalejax.config.parallelism import PIPELINE, TENSOR
from scalejax.config.pipeline_schedule import GATES, PipelineTicks, timetable
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.simulator.program import (
    Collective,
    CollectiveName,
    DeviceGroup,
    Loop,
    Operation,
    Program,
    with_share,
)

BUBBLE = ".bubble"
"""Suffix of the names of loops in which a pipeline stage has no microbatch to work on."""
PAIRED = ".paired"
"""Suffix of the names of loops over a forward and a backward pass that run together."""
_PASSES_OF_ZB = 3
"""Passes of a microbatch if the weights pass is separate."""
_FLOP_OF_MOVED_BYTE, FLOP_OF_SENT_BYTE = 989 / 3.35, 989 / 0.45
"""FLOP of bfloat16 in the time of one byte of memory, and of one byte over NVLink each way (data
sheet of NVIDIA's H100 SXM: 989 TFLOP/s, 3.35 TB/s, 900 GB/s both ways)."""
_NOTE = "a pipeline, from its last stage: the bubble is in compute, memory and launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Division of a network into pipeline stages."""

    stages: int
    """Pipeline stages, groups of devices that each hold some of the layers."""
    chunks: int = 1
    """Interleaved chunks of layers per stage (virtual pipeline stages)."""
    layers: tuple[int, ...] | None = None
    """Blocks of each stage, with one chunk each; None if all stages hold equally many."""
    microbatches: int
    """Microbatches per step."""
    boundary_bytes: int
    """Activation bytes that one microbatch sends from stage to stage."""
    is_boundary_divided: bool = False
    """Whether these activations are sharded over the tensor axis (sequence parallelism)."""
    is_sent_in_parts: bool = True
    """Whether devices along the tensor axis each send a part of what they all hold, as in
    Megatron-LM; otherwise each sends all of it, in slots of a timetable, as scalejax trains."""

    def __post_init__(self) -> None:
        require_at_least("pipeline.stages", self.stages, 2)
        require_at_least("pipeline.chunks", self.chunks, 1)
        require_at_least("pipeline.microbatches", self.microbatches, 1)
        if self.layers is not None and len(self.layers) != self.stages:
            accepted = f"it must have an entry for each of {self.stages} stages"
            raise ConfigError(refusal("pipeline.layers", self.layers, accepted))


def pipelined(
    stage: Program, pipeline: Pipeline, *, last: tuple[Operation | Loop, ...] = ()
) -> Program:
    """Program of a device of the slowest stage, including the bubble.

    One microbatch passes through all stages, and the others follow through the slowest: t of the
    step = sum over stages of t + (microbatches - 1) x largest t. Exact if stages are equal or the
    last is the slowest; if earlier ones are, they start more microbatches while they wait, and the
    step is shorter by up to the time of the blocks that other stages lack.

    Args:
        stage: program of the network with the layers of one stage, on the devices of one stage,
            in a loop over the microbatches.
        pipeline: the division of the network.
        last: operations of the first and the last stage for a microbatch outside their blocks,
            if these are not the given stage.

    Raises:
        ConfigError: if `stage` has no loop over microbatches, or no stage has its number of blocks.
    """
    loops = [item for item in stage.operations if isinstance(item, Loop)]
    fitting = [loop for loop in loops if loop.trip_count == pipeline.microbatches]
    work = max(fitting, key=_flop, default=None)
    if work is None:
        accepted = f"it must loop over microbatches, {pipeline.microbatches} of them"
        raise ConfigError(refusal("stage", stage.name, accepted))
    tensor = dict(stage.mesh_axes).get(TENSOR, 1)
    sent = sent_between_stages(
        pipeline.stages,
        pipeline.boundary_bytes,
        is_divided=pipeline.is_boundary_divided,
        in_parts=pipeline.is_sent_in_parts,
        tensor=tensor,
        stage_devices=stage.device_count,
    )
    several = tuple(_numbered(sent, index) for index in range(pipeline.chunks))
    body = (*work.body, *(each for one in several for each in one))
    schedule = (replace(work, body=body), *_bubble(work, pipeline, sent, last))
    operations = tuple(
        each for item in stage.operations for each in (schedule if item is work else (item,))
    )
    ticks = PipelineTicks("1f1b", pipeline.stages, pipeline.microbatches)
    kept_bytes = pipeline.boundary_bytes // (tensor if pipeline.is_boundary_divided else 1)
    held = (int(ticks.in_flight) - 1) * _layers(work) * kept_bytes
    memory = replace(stage.memory, temporary_bytes=stage.memory.temporary_bytes + held)
    own = _layers(work)
    return replace(
        stage,
        most_blocks=max(pipeline.layers or (own,)) / own,
        mesh_axes=(
            (PIPELINE, pipeline.stages),
            *(axis for axis in stage.mesh_axes if axis[0] != PIPELINE),
        ),
        operations=operations,
        memory=memory,
        model_flop=None,
        state_bytes=None,
        notes=(*stage.notes, _NOTE),
    )


def with_bubble(
    program: Program, ticks: PipelineTicks, layers: tuple[int, ...] | None = None
) -> Program:
    """`program` of a whole pipeline, with the idle iterations of its loops split into bubble loops.

    Under GPipe stages compute in all ticks of the compiled loops, even results that nobody uses.
    Under other schedules the program is that of all stages, slot by slot of a timetable
    (`training.pipeline`). The result is the program of the last stage, which runs forward and
    backward with each microbatch, and waits for as long as each other stage takes for a chunk of
    one; the first of those also embeds the tokens. If stages compute different numbers of `layers`,
    the result is that of the stage with most to compute, to move and to send. With "zb_h1", weights
    passes fill part of that time: the stage is idle in the remaining slots of the timetable, which
    have the mean length of its passes (Qi et al. 2023, arXiv 2401.10241, table 2, for passes of
    equal length).

    With "dualpipe" the program is that of 1F1B, and the result is that of the device whose two
    stages, equally far from either end, have most to do: loops over pairs of passes, over separate
    passes, and over the bubble. What is sent in a pair overlaps with what is computed after
    `transforms.dualpipe.with_paired_passes`.
    """
    if ticks.schedule != "gpipe":
        devices = _stage_devices(program)
        in_slots = partial(_slowest_stage, ticks=ticks, layers=layers, stage_devices=devices)
        operations = tuple(each for item in program.operations for each in in_slots(item))
        return replace(program, operations=operations)

    def split(item: Operation | Loop) -> tuple[Operation | Loop, ...]:
        if not isinstance(item, Loop) or item.trip_count != ticks.work + ticks.idle:
            return (item,)
        body = tuple(renamed(each, BUBBLE) for each in item.body)
        idle = Loop(name=item.name + BUBBLE, trip_count=ticks.idle, body=body)
        return replace(item, trip_count=ticks.work), idle

    operations = tuple(each for item in program.operations for each in split(item))
    return replace(program, operations=operations)


def _stage_devices(program: Program) -> int:
    """Devices of a stage: the pipeline is the outermost axis."""
    return program.device_count // dict(program.mesh_axes).get(PIPELINE, 1)


def _slowest_stage(
    item: Operation | Loop,
    ticks: PipelineTicks,
    layers: tuple[int, ...] | None,
    stage_devices: int,
) -> tuple[Operation | Loop, ...]:
    """`item`, if it is the loop over the slots of a timetable, as loops over the microbatches and
    over the bubble of the last stage, or of the slowest one for unequal `layers`."""
    is_dual = ticks.schedule == "dualpipe"
    slots = len(timetable(ticks._replace(schedule="1f1b") if is_dual else ticks).slots)
    if not isinstance(item, Loop) or item.trip_count != slots:
        return (item,)
    passes = [each for each in item.body if _is_gate(each)]
    if not passes:
        return (item,)
    between = tuple(_along_pipeline(each, ticks.stages, stage_devices) for each in item.body)
    between = tuple(each for each in between if not _is_gate(each))
    counts = layers or (1,) * ticks.stages
    own = [
        {
            "first_part": float(stage == 0),
            # Only those passes of the last stage that have its last layers.
            "last_part": (stage == ticks.stages - 1) / ticks.chunks,
            "layer_of_stage": count / max(counts),
        }
        for stage, count in enumerate(counts)
    ]
    slowest = own[-1]
    if is_dual:
        both = zip(own, own[::-1], strict=True)
        own = [{gate: (one[gate] + other[gate]) / 2 for gate in one} for one, other in both]
    if is_dual or layers is not None:
        slowest = max(own, key=lambda shares: sum(map(_work, _passes(passes, shares))))
    if is_dual:
        exchanges = Loop(name=f"{item.name}.exchange", trip_count=len(passes), body=between)
        return _dualpipe_loops(item.name, _passes(passes, slowest), exchanges, ticks)
    others = {
        gate: (sum(shares[gate] for shares in own) - share) / ticks.idle
        for gate, share in slowest.items()
    }
    work, idle = _passes(passes, slowest), _passes(passes, others)
    slots_at_work = len(passes)
    if slots_at_work == _PASSES_OF_ZB:
        idle = tuple(each for each in idle if not each.name.startswith("weights_pass"))
        left = (slots - slots_at_work * ticks.work) / slots_at_work / ticks.idle
        kept = [each for each in passes if not each.name.startswith("weights_pass")]
        idle = with_share(idle, left * sum(map(_flop, passes)) / sum(map(_flop, kept)))
    # Every pass is followed by an exchange, and so is a slot without a pass.
    exchanges = Loop(name=f"{item.name}.exchange", trip_count=slots_at_work, body=between)
    rest = max(1, round((slots - slots_at_work * ticks.work) / max(1, ticks.idle)))
    waiting = Loop(name=f"{item.name}.exchange", trip_count=rest, body=between)
    bubble = tuple(renamed(each, BUBBLE) for each in (*idle, waiting))
    return (
        Loop(name=item.name, trip_count=ticks.work, body=(*work, exchanges)),
        Loop(name=item.name + BUBBLE, trip_count=ticks.idle, body=bubble),
    )


def _dualpipe_loops(
    name: str, passes: tuple[Operation | Loop, ...], exchanges: Loop, ticks: PipelineTicks
) -> tuple[Loop, ...]:
    """Loops of DualPipe that replace the loop of that name over slots of 1F1B.

    The bubble of (p/2 - 1) (F&B + B - 3W), for p stages, consists of pairs and backward passes,
    scaled by the share of their FLOP that remains after three weights passes: a W has as many FLOP
    as the products with matrices in a forward pass.

    Args:
        name: name of the loop.
        passes: a forward and a backward pass of a microbatch, the mean of a device's two stages.
        exchanges: what is sent to neighbours in the passes.
        ticks: the pipeline.

    Source: DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, table 2.
    """

    def weights(item: Operation | Loop) -> float:
        if isinstance(item, Loop):
            return item.trip_count * sum(map(weights, item.body))
        is_batched = len(item.shape) == 4 and item.shape[0] > 1 and item.grouped_pass is None
        return item.flop * item.share if item.kind == "matmul" and not is_batched else 0.0

    forward = [each for each in passes if each.name.startswith("forward_pass")]
    more = [each for each in passes if each.name.startswith("backward_pass")]
    idle = (*passes, *(renamed(each, "#more") for each in more))
    left = 1 - 3 * sum(map(weights, forward)) / max(1.0, sum(map(_flop, idle)))
    bubble = with_share((*idle, exchanges), max(0.0, left))
    apart = (*passes, exchanges)
    loops = (
        Loop(name=name + PAIRED, trip_count=ticks.paired, body=apart),
        Loop(
            name=name,
            trip_count=ticks.work - ticks.paired,
            body=tuple(renamed(each, "#apart") for each in apart),
        ),
        Loop(
            name=name + PAIRED + BUBBLE,
            trip_count=ticks.idle,
            body=tuple(renamed(each, BUBBLE) for each in bubble),
        ),
    )
    return tuple(loop for loop in loops if loop.trip_count)  # two stages have no bubble


def _is_gate(item: Operation | Loop) -> TypeGuard[Loop]:
    return isinstance(item, Loop) and gate_of(item) is not None


def gate_of(loop: Loop) -> str | None:
    """The gate of `GATES` that a loop of a compiled step is, even in a bubble; None for others."""
    name = loop.name.removesuffix(BUBBLE).partition("#")[0]
    return name if name in GATES else None


def _passes(
    items: Iterable[Operation | Loop], shares: Mapping[str, float]
) -> tuple[Operation | Loop, ...]:
    """`items` in which what only some stages compute has these shares, by the name of its gate."""
    made: list[Operation | Loop] = []
    for item in items:
        if not isinstance(item, Loop):
            made.append(item)
            continue
        share = shares.get(gate_of(item) or "", 1.0)
        if share:
            body = _passes(item.body, shares)
            made.append(replace(item, body=with_share(body, share) if share < 1 else body))
    return tuple(made)


def _along_pipeline(item: Operation | Loop, stages: int, stage_devices: int) -> Operation | Loop:
    """A message to a neighbour, whose pairs differ from slot to slot, as one along all stages."""
    if isinstance(item, Loop) or (sent := item.collective) is None:
        return item
    if sent.name != "collective_permute":
        return item
    group = DeviceGroup(extents=((stages, stage_devices),), axes=(PIPELINE,))
    return replace(item, collective=replace(sent, group=group))


def without_bubble(program: Program) -> Program:
    """`program` without its pipeline bubble; `program` itself if it has none."""
    kept = tuple(
        item
        for item in program.operations
        if not (isinstance(item, Loop) and item.name.endswith(BUBBLE))
    )
    return program if len(kept) == len(program.operations) else replace(program, operations=kept)


def renamed(item: Operation | Loop, suffix: str) -> Operation | Loop:
    """Copy of `item` with `suffix` after every name, as names are unique in a program."""
    name = item.name + suffix
    if isinstance(item, Loop):
        body = tuple(renamed(each, suffix) for each in item.body)
        return replace(item, name=name, body=body)
    return replace(item, name=name, waits_for=item.waits_for and item.waits_for + suffix)


def _flop(item: Operation | Loop) -> float:
    if isinstance(item, Loop):
        return item.trip_count * sum(map(_flop, item.body))
    return item.flop * item.share


def _work(item: Operation | Loop) -> float:
    """Work of a stage in FLOP, by which stages are ranked: bytes moved and sent count as what an
    H100 would compute meanwhile, as if nothing overlapped."""
    if isinstance(item, Loop):
        return item.trip_count * sum(map(_work, item.body))
    if item.collective is not None:
        return item.collective.payload_bytes * item.share * FLOP_OF_SENT_BYTE
    moved = item.read_bytes + item.write_bytes
    return max(item.flop, moved * _FLOP_OF_MOVED_BYTE) * item.share


def _layers(work: Loop) -> int:
    """Blocks of the stage in the microbatch loop `work`; 1 if `work` does not loop over them."""
    return max((item.trip_count for item in work.body if isinstance(item, Loop)), default=1)


def _bubble(
    work: Loop, pipeline: Pipeline, sent: tuple[Operation, ...], last: tuple[Operation | Loop, ...]
) -> list[Loop]:
    """Bubble loops: one microbatch in the other stages, a loop per distinct number of blocks."""
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
        held = blocks if layers else ()  # a first stage may have only what is in `last`
        bubble_body = tuple(renamed(_shortened(item, part), suffix) for item in held)
        sends = _numbered(sent, pipeline.chunks + index)
        loops.append(Loop(name=work.name + suffix, trip_count=stages, body=(*bubble_body, *sends)))
    if last:
        ends = tuple(renamed(item, BUBBLE) for item in last)
        loops.append(Loop(name=f"{work.name}.last{BUBBLE}", trip_count=1, body=ends))
    return loops


def _shortened(item: Operation | Loop, part: Fraction) -> Operation | Loop:
    """A loop over the given fraction of a stage's blocks; other items unchanged."""
    if isinstance(item, Loop):
        return replace(item, trip_count=max(1, round(item.trip_count * part)))
    return item


def sent_between_stages(
    stages: int,
    boundary_bytes: int,
    is_divided: bool,
    tensor: int,
    stage_devices: int,
    in_parts: bool = True,
) -> tuple[Operation, ...]:
    """Collectives of a stage for one microbatch: activations forward, gradients backward.

    Devices along the tensor axis each send 1/tensor of the replicated activations, and all-gather
    them (Narayanan et al. 2021, section 4.1), or each sends them whole; with sequence parallelism
    there is nothing to gather. As scalejax trains, in slots (`training.pipeline`), two stages send
    both at once, and what arrives is copied and put into its buffer, one for each direction.

    Args:
        stages: pipeline stages.
        boundary_bytes: activation bytes that one microbatch sends from stage to stage.
        is_divided: whether these activations are sharded over the tensor axis.
        tensor: devices along the tensor axis.
        stage_devices: devices of one stage.
        in_parts: whether each device along the tensor axis sends a part of replicated activations;
            otherwise they are sent in slots.
    """
    part = -(-boundary_bytes // tensor) if in_parts or is_divided else boundary_bytes
    operations: list[Operation] = []
    for way in ("forward", "backward"):
        along = DeviceGroup(extents=((stages, stage_devices),), axes=(PIPELINE,))
        if in_parts or stages > 2 or way == "forward":
            operations.append(_collective(f"send.{way}", "collective_permute", part, along))
        if not in_parts:
            operations += _received(way, part)
        elif tensor > 1 and not is_divided:
            group = DeviceGroup(extents=((tensor, 1),), axes=(TENSOR,))
            operations.append(_collective(f"gather.{way}", "all_gather", boundary_bytes, group))
    return tuple(operations)


_SCALARS_OF_SLOT = 8
"""Small operations between two slots of a timetable, one launch each, as compiled: places and
conditions (jax 0.10.2 and 0.12.0.1)."""


def _received(way: str, size: int) -> list[Operation]:
    """Operations after each exchange of a slot: a copy of what arrived, and a selection for each of
    the two buffers, one of which may be the stage's own result."""
    sizes = ("copy", size, size), ("select", 5 * size, 2 * size)
    scalars = ((f"scalar.{index}", 4, 4) for index in range(_SCALARS_OF_SLOT))
    return [
        Operation(
            name=f"{PIPELINE}.{way}.{name}",
            kind="fusion",
            dtype="f32",
            read_bytes=read,
            write_bytes=write,
        )
        for name, read, write in (*sizes, *scalars)
    ]


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
