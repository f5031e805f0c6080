"""Schedules of a pipeline: which pass of which microbatch a stage computes, and when.

The trainer runs the same table that the simulator costs. Does not know what a pass computes or how
long it takes.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

TrainedSchedule = Literal["gpipe", "1f1b", "zb_h1"]
"""Order of the microbatches of a pipeline: all forward and then all backward (GPipe; Huang et al.
2018, arXiv 1811.06965); alternating (1F1B, PipeDream-Flush; Narayanan et al. 2021, arXiv
2104.04473, section 2.2), interleaved if stages have chunks; or alternating with the gradients of
weights in a separate pass, which fills part of the bubble (ZB-H1; Qi et al. 2023, arXiv 2401.10241,
section 3)."""

PipelineSchedule = Literal[TrainedSchedule, "dualpipe"]
"""`TrainedSchedule`, or one that is costed but not trained: microbatches enter from both ends, and
a device computes a forward pass of one direction together with a backward pass of the other
(DualPipe; DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1)."""

PassKind = Literal["forward", "backward", "weights"]
"""What a stage computes for a microbatch: its output; the gradients of its input and its weights;
with "zb_h1", where "backward" is only the former, the gradient of its weights."""

GATES = (
    "forward_pass",
    "backward_pass",
    "weights_pass",
    "first_part",
    "last_part",
    "layer_of_stage",
)
"""Scopes of what only some stages compute in a slot, which identify it in a compiled step: passes,
and within them what precedes the layers of the first stage, the output layer of the last, and
layers of the stages that have most."""

EXCHANGE = "stage_exchange"
"""Scope of the two exchanges between stages, which alternately follow slots."""


class PipelineTicks(NamedTuple):
    """Ticks of a pipeline stage in one step: in each, one chunk of its layers takes a microbatch.

    After each tick it sends activations, or gradients, to the next stage. All schedules have the
    same number of ticks; they differ in what is held meanwhile.
    """

    schedule: PipelineSchedule
    """Order of the microbatches."""
    stages: int
    """Pipeline stages."""
    microbatches: int
    """Microbatches per step."""
    chunks: int = 1
    """Interleaved chunks of layers per stage (virtual pipeline stages)."""

    @property
    def work(self) -> int:
        """Ticks with a microbatch."""
        return self.microbatches * self.chunks

    @property
    def idle(self) -> int:
        """Ticks without a microbatch, while the first arrives and the last returns: the bubble, of
        (stages - 1) / chunks microbatches (Narayanan et al. 2021, section 2.2). With "zb_h1" each
        idle tick lasts as long as a forward and a backward pass, less the time of a pass over
        weights (Qi et al. 2023, section 3.1 and table 2); with "dualpipe" as long as a pair of
        passes and a backward pass, less three passes over weights (DeepSeek-AI 2024, table 2)."""
        return self.stages // 2 - 1 if self.schedule == "dualpipe" else self.stages - 1

    @property
    def paired(self) -> int:
        """With "dualpipe", the forward passes of one direction that a device in the middle, which
        is idle longest, computes together with a backward pass of the other; else 0."""
        if self.schedule != "dualpipe":
            return 0
        middle = dualpipe(self.stages, self.microbatches, self.stages // 2)
        return sum(len(each) > 1 for each in middle)

    @property
    def in_flight(self) -> float:
        """Microbatches whose activations the first stage holds at once.

        GPipe holds all; 1F1B and ZB-H1 as many as there are stages; interleaved
        1 + (stages - 1) / (stages chunks) times as many (Korthikanti et al. 2022, arXiv 2205.05198,
        section 4.2.3); DualPipe one more than there are stages, both directions together; none
        holds more than all.
        """
        if self.schedule == "gpipe":
            return self.microbatches
        if self.schedule == "dualpipe":
            return min(self.microbatches, self.stages + 1)
        times = 1 + self.idle / (self.stages * self.chunks) if self.chunks > 1 else 1
        return min(self.microbatches, self.stages * times)


class Pass(NamedTuple):
    """One pass of one microbatch through one chunk of a stage."""

    kind: PassKind
    """What is computed."""
    microbatch: int
    """Index of the microbatch."""
    chunk: int
    """Index of the chunk of the stage."""


_Span = tuple[Pass, int, int]
"""A pass, and the first and last slot in which something from it is held."""


@dataclass(frozen=True)
class Timetable:
    """Passes of all stages, in time slots in which a stage computes at most one pass.

    Stages exchange their results between slots. A slot lasts as long as what neighbours wait for.
    """

    ticks: PipelineTicks
    """Its schedule, stages, microbatches and chunks."""
    slots: tuple[tuple[Pass | None, ...], ...]
    """[slot][stage]: the pass that the stage computes; None if it is idle."""

    @cached_property
    def when(self) -> dict[tuple[int, Pass], int]:
        """Slot of each (stage, pass)."""
        return {
            (stage, each): slot
            for slot, passes in enumerate(self.slots)
            for stage, each in enumerate(passes)
            if each is not None
        }

    def sends(self, stage: int, done: Pass) -> tuple[int, Pass] | None:
        """(stage, pass) that waits for the result of the pass `done` of `stage`: after the last
        layers that is the backward pass of the same stage, which waits for the gradient of the
        loss; None after the backward pass of the first layers, and for gradients of weights."""
        last_stage, last_chunk = self.ticks.stages - 1, self.ticks.chunks - 1
        if done.kind == "forward":
            if stage < last_stage:
                return stage + 1, done
            if done.chunk < last_chunk:
                return 0, done._replace(chunk=done.chunk + 1)
            return stage, done._replace(kind="backward")
        if done.kind == "weights":
            return None
        if stage > 0:
            return stage - 1, done
        return None if done.chunk == 0 else (last_stage, done._replace(chunk=done.chunk - 1))

    def _spans(self, stage: int, first: PassKind, last: PassKind) -> list[_Span]:
        """What `stage` holds from its pass of kind `first` until the end of that of kind `last`."""
        return [
            (each, slot, self.when[stage, each._replace(kind=last)])
            for (owner, each), slot in self.when.items()
            if owner == stage and each.kind == first
        ]

    @property
    def _last(self) -> PassKind:
        """The pass after which nothing of a microbatch is held."""
        return "weights" if self.ticks.schedule == "zb_h1" else "backward"

    def saved(self, stage: int) -> dict[Pass, int]:
        """Place in a buffer of what each forward pass of `stage` saves for the backward pass;
        places are reused when free."""
        return _places(self._spans(stage, "forward", self._last))

    def unweighed(self, stage: int) -> dict[Pass, int]:
        """Place of what each backward pass saves for the pass over weights, in "zb_h1"."""
        if self.ticks.schedule != "zb_h1":
            return {}
        return _places(self._spans(stage, "backward", "weights"))

    def received(self, stage: int, kind: PassKind) -> dict[Pass, int]:
        """Place of the result from another stage that each pass of `kind` of `stage` waits for,
        from sending it until the pass begins."""
        spans = []
        for (sender, done), slot in self.when.items():
            waiting = self.sends(sender, done)
            if waiting is not None and waiting[0] == stage and waiting[1].kind == kind:
                spans.append((waiting[1], slot, self.when[waiting] - 1))
        return _places(spans)


def _places(spans: list[_Span]) -> dict[Pass, int]:
    """For each pass, the lowest place that is free in all its slots."""
    places: dict[Pass, int] = {}
    until: list[int] = []
    for each, start, end in sorted(spans, key=lambda span: span[1]):
        place = next((index for index, slot in enumerate(until) if slot < start), len(until))
        until[place : place + 1] = [end]
        places[each] = place
    return places


@cache
def timetable(ticks: PipelineTicks) -> Timetable:
    """The passes of every stage in the schedule of `ticks`.

    Every microbatch passes once forward and once backward through every chunk of every stage, and
    nothing is computed before what it waits for has been sent. Microbatches pass through chunks in
    groups of as many as there are stages, whose number divides them.

    GPipe: each stage is one slot later. 1F1B: neighbours alternate, one forward while the other is
    backward, so that each holds as few as the paper says. Interleaved: all stages run forward in
    one slot and backward in the next. ZB-H1: the most urgent pass that can be computed within
    1F1B's memory.
    """
    if ticks.schedule == "zb_h1":
        return Timetable(ticks, _zero_bubble(ticks))
    stages, chunks = ticks.stages, ticks.chunks
    slots: dict[int, dict[int, Pass]] = {}

    def compute(slot: int, stage: int, each: Pass) -> None:
        slots.setdefault(slot, {})[stage] = each

    for stage in range(stages):
        back = stages - 1 - stage
        for index in range(ticks.work):
            group, place = divmod(index, stages * chunks)
            chunk, place = divmod(place, stages)
            microbatch = group * stages + place
            forward = Pass("forward", microbatch, chunk)
            backward = Pass("backward", microbatch, chunks - 1 - chunk)
            if ticks.schedule == "gpipe":
                compute(stage + index, stage, forward)
                compute(ticks.work + ticks.idle + back + index, stage, backward)
            elif chunks == 1:
                compute(stage + 2 * index, stage, forward)
                compute(stages + back + 2 * index, stage, backward)
            else:
                compute(2 * (stage + index), stage, forward)
                until = (chunks - 1) * stages + stages - 1
                compute(2 * (until + back + index) + 1, stage, backward)
    ordered = (slots.get(slot, {}) for slot in range(max(slots) + 1))
    return Timetable(ticks, tuple(tuple(map(row.get, range(stages))) for row in ordered))


@cache
def dualpipe(stages: int, microbatches: int, device: int) -> tuple[tuple[Pass, ...], ...]:
    """What a device of DualPipe computes, in order: one pass, or two together.

    Device i holds stage i for the microbatches that enter at the first device, and stage
    `stages` - 1 - i for those that enter at the last, half of all each; the `chunk` of a pass is
    its direction, 0 or 1. A "backward" pass computes only the gradient of the input if "weights" of
    the same microbatch follow.

    Args:
        stages: number of stages, and of devices; even.
        microbatches: microbatches of both directions, an even number, at least twice the stages.
        device: index of the device.

    Source: DeepSeek-AI 2024, arXiv 2412.19437, figure 5; the order near the ends is that of
        github.com/deepseek-ai/DualPipe, which also refuses other numbers.
    """
    half, from_end = stages // 2, min(device, stages - 1 - device)
    near, far = (0, 1) if device < half else (1, 0)
    between = half - 1 - from_end
    next_of: dict[tuple[PassKind, int], int] = {}
    made: list[tuple[Pass, ...]] = []
    open_weights: list[Pass] = []

    def of(kind: PassKind, way: int) -> Pass:
        microbatch = next_of.get((kind, way), 0)
        next_of[kind, way] = microbatch + 1
        return Pass(kind, microbatch, way)

    def forward(way: int) -> None:
        made.append((of("forward", way),))

    def backward(way: int, *, of_input: bool = False) -> None:
        made.append((of("backward", way),))
        if of_input:
            open_weights.append(made[-1][0]._replace(kind="weights"))

    def pair(forth: int, back: int) -> None:
        made.append((of("forward", forth), of("backward", back)))

    for _ in range(2 * between):
        forward(near)
    for _ in range(from_end + 1):
        forward(near)
        forward(far)
    for _ in range(between):
        backward(far, of_input=True)
        made.append((open_weights.pop(0),))
        forward(far)
    for index in range(microbatches // 2 - stages + from_end + 1):
        if index == 0 and between == 0:  # separately, for a shorter bubble
            forward(near)
            backward(far)
        else:
            pair(near, far)
        pair(far, near)
    for _ in range(between):
        backward(far)
        pair(far, near)
    # Weights wait in the second half of the last whole passes, to fill the bubble after them.
    for index in range(2 * (from_end + 1)):
        backward(near if index % 2 else far, of_input=index > from_end)
    for _ in range(between):
        made.append((open_weights.pop(0),))
        backward(near, of_input=True)
    made.extend((each,) for each in open_weights)
    return tuple(made)


def _zero_bubble(ticks: PipelineTicks) -> tuple[tuple[Pass | None, ...], ...]:
    """Slots of ZB-H1, by the rule in section 3 of its paper: forward while no more are held than in
    1F1B, else backward, and weights in what would be bubble."""
    stages, count = ticks.stages, ticks.microbatches
    done = [dict.fromkeys(("forward", "backward", "weights"), 0) for _ in range(stages)]
    slots = []
    while any(each["weights"] < count for each in done):
        before = [dict(each) for each in done]
        row: list[Pass | None] = []
        for stage, own in enumerate(done):
            is_last = stage == stages - 1
            following = before[stage]["forward"] if is_last else before[stage + 1]["backward"]
            preceding = before[stage - 1]["forward"] if stage else count
            kind: PassKind | None = None
            if (
                own["forward"] < preceding
                and own["forward"] - own["backward"] < stages - stage
                and own["forward"] - own["weights"] < stages
            ):
                kind = "forward"
            elif own["backward"] < following:
                kind = "backward"
            elif own["weights"] < own["backward"]:
                kind = "weights"
            row.append(None if kind is None else Pass(kind, own[kind], 0))
            if kind is not None:
                own[kind] += 1
        slots.append(tuple(row))
    return tuple(slots)
