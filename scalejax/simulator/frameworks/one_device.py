"""Steps in which one device sends weights out to the others and receives their gradients.

PyTorch's DataParallel and Keras' multi_gpu_model keep weights and optimizer state on one device.
Every step that device sends the others their part of the batch and all weights, and sums the
gradients that they send back. Nothing computes meanwhile: copies of the weights are one operation
of autograd, which has its gradient only when the last of them has arrived. Weights and gradients
are float32, whatever type products are computed in.

Left out: outputs that are joined on the one device, threads that share an interpreter, and the
additional memory of that device. Independent of hardware.
"""

import math
from dataclasses import replace

from scalejax.config.parallelism import DATA
from scalejax.simulator.program import Collective, DeviceGroup, Loop, Operation, Program

_Items = tuple[Operation | Loop, ...]
_F32_BYTES = 4
_ELEMENT_BYTES = {"bf16": 2, "f16": 2}


def through_one_device(
    program: Program, *, is_relayed: bool, input_bytes: int = 0, weight_bytes: int | None = None
) -> Program:
    """`program` with its sums of gradients over data replaced by what goes through one device.

    Args:
        program: the compiled step; one that sums no gradients over data is returned unchanged.
        is_relayed: whether devices pass on what they receive, as NCCL's broadcast and reduction
            do, so that the one device sends and receives everything once; otherwise once per other
            device.
        input_bytes: the part of the batch of one device.
        weight_bytes: bytes of weights sent out, for a network that is partly frozen; None if equal
            to those of the gradients.
    """
    sums = [(each, runs) for each, runs in program.walk() if _sums_gradients(each)]
    if not sums or (group := _group(sums[0][0])) is None:
        return program
    gradients = round(math.fsum(runs * _f32_bytes(each) for each, runs in sums))
    others = group.size - 1
    copies = 1 if is_relayed else others
    out = copies * (gradients if weight_bytes is None else weight_bytes)
    sent = _send("weights.out", out + others * input_bytes, group)
    back = _send("gradients.back", copies * gradients, group)
    names = {each.name for each, _ in sums}
    items = program.operations
    last = max(index for index, item in enumerate(items) if _holds(item, names))
    before, after = _without(items[: last + 1], names), _without(items[last + 1 :], names)
    return replace(program, operations=(sent, *before, back, *after))


def _send(name: str, payload_bytes: int, group: DeviceGroup) -> Operation:
    collective = Collective(
        name="collective_permute", payload_bytes=payload_bytes, group=group, is_async=False
    )
    return Operation(name=name, kind="collective", dtype="f32", collective=collective)


def _sums_gradients(item: Operation) -> bool:
    group = _group(item)
    return group is not None and DATA in group.axes


def _group(item: Operation) -> DeviceGroup | None:
    collective = item.collective
    is_sum = collective is not None and collective.name == "all_reduce"
    return collective.group if collective is not None and is_sum else None


def _f32_bytes(item: Operation) -> float:
    """Bytes of the operand of a sum in float32."""
    assert item.collective is not None  # noqa: S101
    payload = item.collective.payload_bytes * item.collective.share
    return payload * _F32_BYTES / _ELEMENT_BYTES.get(item.dtype, _F32_BYTES)


def _holds(item: Operation | Loop, names: set[str]) -> bool:
    if isinstance(item, Loop):
        return any(_holds(each, names) for each in item.body)
    return item.name in names


def _without(items: _Items, names: set[str]) -> _Items:
    """`items` without the operations of those names, and without waits for them."""
    return tuple(
        replace(item, body=_without(item.body, names)) if isinstance(item, Loop) else item
        for item in items
        if isinstance(item, Loop) or (item.name not in names and item.waits_for not in names)
    )
