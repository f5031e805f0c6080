"""Where Megatron-Core's experts are, and what computes while tokens travel to them.

Experts over the tensor axis (--expert-tensor-parallel-size 1): a device holds whole experts instead
of a part of each, and sends the tokens that it holds under sequence parallelism, so that each token
is sent once rather than once per device of the axis; tokens are neither gathered before the layer
nor summed after it, except for shared experts. Exchange overlapped with compute
(--overlap-moe-expert-parallel-comm): the blocks of one microbatch run while tokens of another
travel. Operations are recognised by the names of `scalejax.simulator.transformer`. Independent of
hardware.
"""

import re
from dataclasses import replace
from math import ceil

from scalejax.config.parallelism import TENSOR
from scalejax.simulator.frameworks.overlap import sent_beside
from scalejax.simulator.program import (
    Collective,
    DeviceGroup,
    Loop,
    Operation,
    Program,
    RoutedTokens,
)
from scalejax.simulator.transforms.pipeline import BUBBLE

_Items = tuple[Operation | Loop, ...]

_NUMBER = re.compile(r"[.#]\w*\d+\w*|#\w+")
_OF_TOKENS = re.compile(
    r"(forward|backward)\."
    r"(router(\.(scores|input_gradient|gradient))?|assignments|sort|loads|tokens(\.gradient)?|sums"
    r"|results\.gradient|weights\.gradient|block\.(tokens|add)"
    r"|block\.(up|down\.input_gradient|up\.input_gradient\.again)\.(cast|amax)"
    r"|(sums|tokens\.gradient)\.cast)"
)
"""Names of what a layer of experts does with each token, or each of its copies, as a whole."""
_OVER_TENSOR = re.compile(
    r"(forward\.(feed_forward\.gather_tokens|experts\.sum)"
    r"|backward\.(results\.gradient\.own\.gather_tokens|experts\.input_gradient\.sum))"
)
"""Names of the gathers and sums over tensor around a layer of experts."""
_SHARED = re.compile(r"forward\.shared\.")


def with_experts_over_tensor(
    program: Program, tensor: int, tokens: RoutedTokens, token_bytes: int
) -> Program:
    """`program` with the experts of a device spread over the `tensor` devices that shard each.

    Args:
        program: a step in closed form with grouped experts, and sequence parallelism.
        tensor: devices along the tensor axis, with the smallest stride.
        tokens: the tokens of a microbatch on a device, and their routing.
        token_bytes: bytes of one token between layers.
    """
    own = replace(tokens, tokens=ceil(tokens.tokens / tensor))
    alone = Collective(
        name="all_to_all",
        payload_bytes=own.tokens * own.experts_per_token * token_bytes,
        group=DeviceGroup(extents=((tensor, 1),), axes=(TENSOR,)),
        is_async=False,
        tokens=own,
    )
    return replace(program, operations=_spread(program.operations, tensor, alone))


def with_exchange_of_shards(program: Program, tensor: int) -> Program:
    """`program` whose tokens are sent to experts by the device that holds them under sequence
    parallelism, once instead of once for each of the `tensor` devices that shard an expert; these
    devices gather the rows that arrive and sum the results, rather than gather all tokens first."""
    return replace(program, operations=_of_shards(program.operations, tensor))


def _of_shards(items: _Items, tensor: int) -> _Items:
    of_layer = [item for item in items if isinstance(item, Operation)]
    copies = [
        item.collective.tokens.experts_per_token
        for item in of_layer
        if item.collective is not None and item.collective.tokens is not None
    ]
    # Shared experts need all tokens as well.
    is_shared = any(_SHARED.match(item.name) for item in of_layer)
    times = copies[0] + is_shared if copies else 1
    made: list[Operation | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            made.append(replace(item, body=_of_shards(item.body, tensor)))
            continue
        collective = item.collective
        if collective is None:
            made.append(item)
            continue
        if collective.tokens is not None:
            own = ceil(collective.tokens.tokens / tensor)
            collective = replace(
                collective,
                payload_bytes=collective.payload_bytes // tensor,
                tokens=replace(collective.tokens, tokens=own),
            )
        elif _OVER_TENSOR.match(item.name):
            collective = replace(collective, payload_bytes=collective.payload_bytes * times)
        made.append(replace(item, collective=collective))
    return tuple(made)


def with_exchange_in_turn(program: Program) -> Program:
    """`program` in which tokens are sent once they have been routed, and nothing computes until
    they have arrived: all-to-alls of tokens run at the place of their waits."""
    return replace(program, operations=_in_turn(program.operations))


def _in_turn(items: _Items) -> _Items:
    waited = {item.waits_for for item in items if isinstance(item, Operation)}
    sent = {
        item.name: item
        for item in items
        if isinstance(item, Operation)
        and item.name in waited
        and item.collective is not None
        and _sends_tokens(item.collective)
    }
    made: list[Operation | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            made.append(replace(item, body=_in_turn(item.body)))
        elif item.waits_for in sent:
            item = sent[item.waits_for]
            assert item.collective is not None  # noqa: S101  it is one
            made.append(replace(item, collective=replace(item.collective, is_async=False)))
        elif item.name not in sent:
            made.append(item)
    return tuple(made)


def with_exchange_beside_compute(program: Program) -> Program:
    """`program` whose blocks send all tokens of another microbatch while they compute, and wait for
    them at their end; blocks that fill and drain a pipeline have no other, and are unchanged."""
    return replace(program, operations=tuple(map(_beside, program.operations)))


def _plain(name: str) -> str:
    return _NUMBER.sub("", name.replace(BUBBLE, ""))


def _spread(items: _Items, tensor: int, alone: Collective) -> _Items:
    """`items` with experts spread; `alone` is the all-to-all to use if the expert axis has none."""
    made: list[Operation | Loop] = []
    of_layer = [item for item in items if isinstance(item, Operation)]
    keeps_whole = any(_SHARED.match(item.name) for item in of_layer) or not any(
        item.grouped_pass for item in of_layer
    )
    has_exchange = any(item.collective and item.collective.tokens for item in of_layer)
    dropped: set[str] = set()
    for item in items:
        if isinstance(item, Loop):
            made.append(replace(item, body=_spread(item.body, tensor, alone)))
        elif item.collective is not None and not keeps_whole and _OVER_TENSOR.match(item.name):
            dropped.add(item.name)
        elif item.waits_for not in dropped:
            own = _of_fewer_tokens(item, tensor)
            sent = Operation(
                name=f"{item.name}.sent", kind="collective", dtype="bf16", collective=alone
            )
            ends = "" if has_exchange else _plain(item.name).partition(".")[2]
            before, after = ends == "block.tokens", ends == "block.add"
            made.extend((*([sent] * before), own, *([sent] * after)))
    return tuple(made)


def _of_fewer_tokens(item: Operation, tensor: int) -> Operation:
    """`item` of a layer of experts, with only the tokens of one device of the tensor axis."""
    if item.collective is not None:
        return replace(item, collective=_of_own_tokens(item.collective, tensor))
    if item.grouped_pass is not None:
        return replace(item, shape=_of_whole_experts(item, tensor))
    if not _OF_TOKENS.fullmatch(_plain(item.name)):
        return item
    shape = item.shape
    if item.kind == "matmul":  # the router's: rows are tokens, which its own gradient sums over
        batch, m, n, k = shape
        is_summed = _plain(item.name).endswith("router.gradient")
        m, k = (m, ceil(k / tensor)) if is_summed else (ceil(m / tensor), k)
        shape = (batch, m, n, k)
    return replace(
        item,
        shape=shape,
        flop=item.flop // tensor,
        read_bytes=item.read_bytes // tensor,
        write_bytes=item.write_bytes // tensor,
    )


def _of_own_tokens(collective: Collective, tensor: int) -> Collective:
    tokens = collective.tokens
    if tokens is None:
        return collective
    group = collective.group
    return replace(
        collective,
        payload_bytes=collective.payload_bytes // tensor,
        group=DeviceGroup(extents=(*group.extents, (tensor, 1)), axes=(*group.axes, TENSOR)),
        tokens=replace(tokens, tokens=ceil(tokens.tokens / tensor)),
    )


def _of_whole_experts(item: Operation, tensor: int) -> tuple[int, ...]:
    """(groups, rows of each, outer, inner) of whole experts: the same rows, `tensor` times the
    width."""
    groups, rows, outer, inner = item.shape
    is_outer = item.grouped_pass != "weight_gradient" and ".up" in item.name
    width = (outer * tensor, inner) if is_outer else (outer, inner * tensor)
    return (max(1, groups // tensor), rows, *width)


def _beside(item: Operation | Loop) -> Operation | Loop:
    if not isinstance(item, Loop) or item.name.endswith(BUBBLE):
        return item
    inside = replace(item, body=tuple(map(_beside, item.body)))
    return sent_beside(inside, _sends_each_token)


def _sends_each_token(item: Operation) -> bool:
    return item.collective is not None and _sends_tokens(item.collective)


def _sends_tokens(collective: Collective) -> bool:
    return collective.tokens is not None and collective.name == "all_to_all"
