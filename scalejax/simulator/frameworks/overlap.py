"""Overlap of communication with products that frameworks have and XLA does not.

Over tensor: the product that reads gathered tokens starts with those that have arrived, and the
sum of a product starts with the rows that are done, one part for each device (--tp-comm-overlap of
Megatron-LM, by the user buffers of Transformer Engine; asynchronous tensor parallelism of
PyTorch). The first part to be gathered, or the last to be summed, is exposed
(Wang et al. 2023, ASPLOS, doi 10.1145/3567955.3567959, section 3).

Over data: the distributed optimizer of Megatron-LM gathers the parameters of a layer while earlier
layers compute, and sums its gradients while the backward pass of earlier layers still runs
(--overlap-param-gather, --overlap-grad-reduce).

Over fsdp: while a layer computes, XLA for TPUs gathers the matrices of the next layer, and sums the
gradients of the previous one (its latency-hiding layer scheduler, and async collectives on the
sparse cores).

Conversely, DeepSpeed's ZeRO-3 of 2021 gathers each parameter separately, while nothing computes: it
waits for the device, makes a view of the result for each device, and calls all_gather with that
list (microsoft/DeepSpeed, runtime/zero/partition_parameters.py: _allgather_param). PyTorch turns
the list into one buffer, and copies from there for each device (ProcessGroupNCCL::allgather,
flattenForScatterGatherOutputs). Gradients go the same way back. The number of views and copies
grows with the devices, however small the parts. If activations are recomputed, parameters are
gathered three times: forward, for the recompute, and backward (Rajbhandari et al. 2021, arXiv
2104.07857, section 4.1). Left out: small parameters, which all devices keep. Independent of
hardware.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from scalejax.config.parallelism import CONTEXT, DATA, EXPERT, FSDP, PIPELINE, TENSOR
from scalejax.simulator.program import Collective, Loop, Operation, Program
from scalejax.simulator.transformer.operations import UPDATE
from scalejax.simulator.transforms.pipeline import renamed

_Items = tuple[Operation | Loop, ...]
_OF_STATE = frozenset((DATA, EXPERT, CONTEXT))
"""Axes over which gradients are summed and ZeRO shards the state."""


def with_overlapped_tensor(program: Program) -> Program:
    """`program` with all but one device's part of each tensor-axis collective overlapped with the
    adjacent product."""
    return replace(program, operations=_beside_products(program.operations))


def with_overlapped_state(program: Program) -> Program:
    """`program` with parameter gathers and gradient sums overlapped with its passes.

    The pass over a layer sums the gradients of the previous layer. Parameters that are gathered at
    the end of a step are gathered at the start of the next one instead, during the forward pass of
    its first microbatch. With several microbatches other gathers, and sums, overlap with all of
    them, where Megatron-LM uses the first and the last: equal as long as one pass takes longer than
    the collective.
    """
    items = [_sums_first(item) for item in program.operations]
    passes = [index for index, item in enumerate(items) if isinstance(item, Loop)]
    if not passes:
        return program
    first, last = passes[0], passes[-1]
    begins, ends = items[first], items[last]
    opening, closing = _gathers(items[:first]), _gathers(items[last:])
    sums = [each for each in items[last:] if isinstance(each, Operation) and _sums_state(each)]
    opened, closed = _waits_for(opening, items), _waits_for(closing, items)
    moved = {id(each) for each in (*closing, *opened, *closed, *sums)}
    rest = [item for item in items if id(item) not in moved]
    begin, end = rest.index(begins), rest.index(ends)
    # Sums begin with the last pass, and their waits stay after it.
    rest[end:end] = sums
    after = (begin if begin != end else end + len(sums)) + 1
    rest[after:after] = opened
    if closing:
        rest = [*closing, *_waiting_in_first(rest, closed)]
    return replace(program, operations=tuple(rest))


def _gathers(items: Sequence[Operation | Loop]) -> list[Operation]:
    """Gathers of parameters among `items`."""
    return [
        item for item in items if isinstance(item, Operation) and _is_of_state(item, "all_gather")
    ]


def _waits_for(started: Sequence[Operation], items: Sequence[Operation | Loop]) -> list[Operation]:
    names = {item.name for item in started}
    return [item for item in items if isinstance(item, Operation) and item.waits_for in names]


def _sums_state(item: Operation) -> bool:
    """Whether `item` sums gradients after the last microbatch: over the devices that share the
    optimizer's state, or, before that, over the expert axis, whose devices hold other samples."""
    if _is_of_state(item, "reduce_scatter"):
        return True
    collective = item.collective
    over_experts = collective is not None and EXPERT in collective.group.axes
    return over_experts and _is_of_state(item, "all_reduce")


def _waiting_in_first(
    items: Sequence[Operation | Loop], waits: Sequence[Operation]
) -> list[Operation | Loop]:
    """`items` that wait after the forward pass of the first microbatch, which is split off from the
    loop over microbatches."""
    made = list(items)
    first = next(index for index, item in enumerate(made) if isinstance(item, Loop))
    loop = made[first]
    assert isinstance(loop, Loop)  # noqa: S101  it is the first
    if any(isinstance(each, Loop) for each in loop.body):
        others = [replace(loop, trip_count=loop.trip_count - 1)] if loop.trip_count > 1 else []
        made[first : first + 1] = [*(renamed(each, ".first") for each in loop.body), *others]
    loops = [index for index, item in enumerate(made) if isinstance(item, Loop)]
    backward = next((index for index in loops if "backward" in made[index].name), loops[-1] + 1)
    place = max((index for index in loops if index < backward), default=loops[0]) + 1
    made[place:place] = waits
    return made


def with_overlapped_layers(program: Program) -> Program:
    """`program`, in closed form, with gathers of matrices over fsdp one layer ahead of their use,
    and sums of their gradients one layer behind.

    A pass over layers takes the longer of its compute and its collectives. Collectives of the first
    and the last layer, which nothing hides, are left out: one layer's out of all layers'.
    """
    if program.backend != "closed_form":
        return program
    return replace(program, operations=tuple(map(_one_layer_ahead, program.operations)))


def _one_layer_ahead(item: Operation | Loop) -> Operation | Loop:
    """A loop whose collectives over fsdp last from the start to the end of each iteration."""
    if not isinstance(item, Loop):
        return item
    body = tuple(map(_one_layer_ahead, item.body))
    starts = [each for each in body if isinstance(each, Operation) and _is_over_fsdp(each)]
    names = {each.name for each in starts}
    waits = [each for each in body if isinstance(each, Operation) and each.waits_for in names]
    moved = {id(each) for each in (*starts, *waits)}
    rest = [each for each in body if id(each) not in moved]
    return replace(item, body=(*starts, *rest, *waits))


def _is_over_fsdp(item: Operation) -> bool:
    collective = item.collective
    return (
        collective is not None
        and collective.is_async
        and collective.name in ("all_gather", "reduce_scatter")
        and FSDP in collective.group.axes
    )


def with_sums_in_last_pass(program: Program) -> Program:
    """`program`, in closed form, with all-reduces of gradients over data during the backward pass
    of the last microbatch, as in PyTorch's DistributedDataParallel; for runs without stages.

    Buckets are all-reduced as they fill; here all start with the pass, which takes as long unless
    they take longer than it.
    """
    items = list(program.operations)
    loops = [index for index, item in enumerate(items) if isinstance(item, Loop)]
    has_stages = dict(program.mesh_axes).get(PIPELINE, 1) > 1
    if not loops or has_stages or program.backend != "closed_form":
        return program
    sums = [item for item in items[loops[-1] :] if _sums_gradients(item)]
    rest = [item for item in items if item not in sums]
    last = rest[loops[-1]]
    if isinstance(last, Loop) and any(isinstance(each, Loop) for each in last.body):
        before = [replace(last, trip_count=last.trip_count - 1)] if last.trip_count > 1 else []
        rest[loops[-1] : loops[-1] + 1] = [*before, *(renamed(each, ".last") for each in last.body)]
    backward = (
        index
        for index, item in enumerate(rest)
        if isinstance(item, Loop) and item.name.removesuffix(".last").endswith("backward")
    )
    place = next(backward, loops[-1])
    rest[place:place] = sums
    return replace(program, operations=tuple(rest))


def _sums_gradients(item: Operation | Loop) -> bool:
    return isinstance(item, Operation) and _is_of_state(item, "all_reduce")


def _sums_first(item: Operation | Loop) -> Operation | Loop:
    """A loop with its sums over data at the start of each iteration; other items unchanged."""
    if not isinstance(item, Loop):
        return item
    body = [_sums_first(each) for each in item.body]
    sums = [
        each
        for each in body
        if isinstance(each, Operation)
        and (_is_of_state(each, "reduce_scatter") or _is_of_state(each, "all_reduce"))
    ]
    rest = [each for each in body if not any(each is one for one in sums)]
    return replace(item, body=(*sums, *rest))


def _is_of_state(item: Operation, name: str) -> bool:
    collective = item.collective
    if collective is None or not collective.is_async or collective.name != name:
        return False
    axes = collective.group.axes
    is_of_update = DATA in axes or item.name.startswith(f"{UPDATE}.")
    return is_of_update and _OF_STATE.issuperset(axes)


def _beside_products(items: _Items) -> _Items:
    """`items` with split collectives: for a gather, the first part alone and the rest during the
    next product; for a sum, all but the last part during the previous product, the last alone."""
    found: list[Operation | Loop] = []
    open_gathers: list[Operation] = []
    hidden: set[str] = set()
    for item in items:
        if isinstance(item, Loop):
            found.append(replace(item, body=_beside_products(item.body)))
        elif (gather := _over_tensor(item, "all_gather")) is not None:
            first, others = _divided(item, gather)
            found.extend((first, _wait_for(first)))
            open_gathers.append(others)
            hidden.add(item.name)
        elif (scatter := _over_tensor(item, "reduce_scatter")) is not None and (
            place := _last_product(found)
        ) is not None:
            last, others = _divided(item, scatter)
            found.insert(place + 1, _wait_for(others))
            found.insert(place, others)
            found.extend((last, _wait_for(last)))
            hidden.add(item.name)
        elif item.kind == "matmul":
            found.extend((*open_gathers, item))
            found.extend(map(_wait_for, open_gathers))
            open_gathers = []
        elif item.waits_for not in hidden:
            found.append(item)
    for each in open_gathers:
        found.extend((each, _wait_for(each)))
    return tuple(found)


def _over_tensor(item: Operation, name: str) -> Collective | None:
    """The collective of `item` if it has that name and is on activations over tensor; else None."""
    collective = item.collective
    if collective is None or collective.name != name or collective.group.axes != (TENSOR,):
        return None
    return collective if item.dtype in ("bf16", "f16") else None  # else values of the loss


def _divided(item: Operation, collective: Collective) -> tuple[Operation, Operation]:
    """A collective split into one device's part and the rest."""
    part = collective.payload_bytes // collective.group.size
    sizes = {"part": part, "others": collective.payload_bytes - part}
    one, others = (
        replace(
            item,
            name=f"{item.name}.{name}",
            collective=replace(collective, payload_bytes=size, is_async=True),
        )
        for name, size in sizes.items()
    )
    return one, others


def _wait_for(item: Operation) -> Operation:
    return Operation(name=f"{item.name}.done", kind="wait", dtype=item.dtype, waits_for=item.name)


def _last_product(found: list[Operation | Loop]) -> int | None:
    """Index of the last product; None if a loop comes after it."""
    for index in range(len(found) - 1, -1, -1):
        item = found[index]
        if isinstance(item, Loop):
            return None
        if item.kind == "matmul":
            return index
    return None


def sent_beside(loop: Loop, is_sent: Callable[[Operation], bool]) -> Loop:
    """`loop` whose collectives that satisfy `is_sent` start with each iteration, and are waited for
    at its end."""
    sent = [
        replace(each, collective=replace(each.collective, is_async=True))
        for each in loop.body
        if isinstance(each, Operation) and each.collective and is_sent(each)
    ]
    if not sent:
        return loop
    names = {each.name for each in sent}
    rest = [
        each
        for each in loop.body
        if isinstance(each, Loop) or (each.name not in names and each.waits_for not in names)
    ]
    waits = [
        Operation(name=f"{each.name}.done", kind="wait", dtype=each.dtype, waits_for=each.name)
        for each in sent
    ]
    return replace(loop, body=(*sent, *rest, *waits))


def with_listed_gathers(program: Program, *, recomputes: bool) -> Program:
    """`program` whose collectives over fsdp block compute, with a copy for each device.

    Args:
        program: the compiled step, fully sharded; others are returned unchanged.
        recomputes: whether blocks are recomputed before their backward pass.
    """
    return replace(program, operations=tuple(_listed(program.operations, recomputes=recomputes)))


def _listed(items: _Items, *, recomputes: bool) -> Iterator[Operation | Loop]:
    names = {item.name for item in items if isinstance(item, Operation) and _is_listed(item)}
    is_backward = any(_scatters(item) for item in items)
    for item in items:
        if isinstance(item, Loop):
            inside = _listed(item.body, recomputes=recomputes)
            yield replace(item, body=tuple(inside))
        elif item.name in names and (collective := item.collective) is not None:
            yield from _alone(item, collective)
            if recomputes and is_backward and collective.name == "all_gather":
                yield from _alone(replace(item, name=f"{item.name}.again"), collective)
        elif item.waits_for not in names:
            yield item


def _alone(item: Operation, collective: Collective) -> Iterator[Operation | Loop]:
    """A collective that blocks compute, and the views and copies that make up its result, or
    operand: for each buffer one per device."""
    count = collective.group.size * collective.buffer_count
    part = collective.payload_bytes // count
    # The device has been waited for, so it also waits while the host makes a view.
    view = Operation(name=f"{item.name}.view", kind="copy", dtype=item.dtype)
    copy = Operation(
        name=f"{item.name}.copy", kind="copy", dtype=item.dtype, read_bytes=part, write_bytes=part
    )
    yield replace(item, collective=replace(collective, is_async=False))
    yield Loop(name=f"{item.name}.copies", trip_count=count, body=(view, copy))


def _is_listed(item: Operation) -> bool:
    collective = item.collective
    return (
        collective is not None
        and collective.group.axes == (FSDP,)
        and collective.name in ("all_gather", "reduce_scatter")
    )


def _scatters(item: Operation | Loop) -> bool:
    return (
        isinstance(item, Operation)
        and item.collective is not None
        and item.collective.name == "reduce_scatter"
        and _is_listed(item)
    )
