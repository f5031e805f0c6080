"""Activations that MaxText's remat policies keep on the device, or offload to the host, by name.

A step in closed form recomputes everything in a block except its input (`recompute` "full"). The
product or the attention that makes an activation kept by name is not recomputed, and each layer's
activation stays in device memory until its backward pass, or in host memory: copied there while
the layer computes forward, and back while the layer after it computes backward
(AI-Hypercomputer/maxtext, MaxText/layers/decoders.py: get_remat_policy, which calls
`jax.checkpoint_policies.save_and_offload_only_these_names`). Left out: the copies of the first
layer and the last, which nothing hides; rotations of queries and keys, which are not kept rotated;
the last product of a layer, recomputed if a norm follows it and "mlpwo" is not kept. Independent of
hardware.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scalejax.config.model import PRODUCT_NAMES, ActivationName, DecoderRemat, SavedActivations
from scalejax.simulator.program import (
    HOST_MEMORY,
    Collective,
    CollectiveName,
    Loop,
    Operation,
    Program,
)

_Items = tuple[Operation | Loop, ...]
_MADE_BY: dict[ActivationName, tuple[str, ...]] = {
    "qkv_proj": ("qkv", "q_up", "kv_up"),
    "query_wa_proj": ("q_down",),
    "kv_wa_proj": ("kv_down",),
    "out_proj": ("projection",),
    "mlpwi": ("up", "shared.up"),
    "mlpwo": ("down",),
}
"""The products that make an activation, by the names of the closed form."""
_PASS = re.compile(r"(?:dense\.)?(forward|backward)\.(.+)")
_INPUT: ActivationName = "decoder_layer_input"
_RESULT: ActivationName = "mlpwo"
_OF_INPUTS = ("forward.kept", "embedding.kept.zero")
"""Ends of the names of the operations that write the inputs of blocks to their stack on the device,
and that clear it."""
_IN_FLIGHT = 2  # layers whose offloaded activations the device holds while they are copied


def named_activations(remat: DecoderRemat) -> SavedActivations | None:
    """The activations that `remat` names; None if it selects activations by other rules."""
    if remat == "minimal_offloaded":
        return SavedActivations(offload=PRODUCT_NAMES)
    return remat if isinstance(remat, SavedActivations) else None


def with_kept_activations(
    program: Program, kept: SavedActivations, element_bytes: int, *, has_post_norms: bool = False
) -> Program:
    """`program` without recompute of what is kept, and with the memory and copies this takes.

    Args:
        program: a step in closed form that recomputes everything in a block except its input.
        kept: activations by name.
        element_bytes: bytes of an element of an activation.
        has_post_norms: whether a norm follows the feed-forward layer. Otherwise no backward pass
            reads the layer's result, and `jax.checkpoint` neither keeps nor copies it, even named.
    """
    if program.backend != "closed_form":
        return program
    if not has_post_norms:
        kept = SavedActivations(
            save=tuple(name for name in kept.save if name != _RESULT),
            offload=tuple(name for name in kept.offload if name != _RESULT),
        )
    names: set[ActivationName] = {*kept.save, *kept.offload, _INPUT}
    on_device = on_host = in_flight = stream = 0
    for loop in _layers(program.operations):
        sizes = {each: _bytes(loop, each, element_bytes) for each in names}
        on_device += loop.trip_count * sum(sizes[each] for each in kept.save if each != _INPUT)
        offloaded = sum(sizes[each] for each in kept.offload)
        on_host += loop.trip_count * offloaded
        in_flight = max(in_flight, _IN_FLIGHT * offloaded)
        if _INPUT in kept.offload:
            stream += loop.trip_count * sizes[_INPUT]
    memory = program.memory
    held = memory.temporary_bytes + on_device + in_flight - stream
    return replace(
        program,
        operations=_changed(program.operations, kept, element_bytes),
        memory=replace(memory, temporary_bytes=held, host_bytes=memory.host_bytes + on_host),
    )


def _layers(items: _Items) -> Iterator[Loop]:
    """Yield the loops of the forward pass over layers."""
    for item in items:
        if isinstance(item, Loop):
            if item.name.removeprefix("dense.") == "forward":
                yield item
            else:
                yield from _layers(item.body)


def _bytes(loop: Loop, name: ActivationName, element_bytes: int) -> int:
    """Bytes of an activation of one layer; 0 if the layer has none of that name."""
    found = {
        match[2]: item
        for item in loop.body
        if isinstance(item, Operation) and (match := _PASS.fullmatch(item.name))
    }
    if name == _INPUT:
        return found["kept"].write_bytes if "kept" in found else 0
    if name == "context":
        product = found.get("projection")
        return 0 if product is None else _rows(product) * product.shape[3] * element_bytes
    made = [found[each] for each in _MADE_BY[name] if each in found]
    return sum(_rows(each) * each.shape[2] * element_bytes for each in made)


def _rows(product: Operation) -> int:
    batch, rows, _, _ = product.shape
    return batch * rows


def _changed(items: _Items, kept: SavedActivations, element_bytes: int) -> _Items:
    made: list[Operation | Loop] = []
    sizes: dict[str, int] = {}
    for item in items:
        if isinstance(item, Operation):
            is_on_host = _INPUT in kept.offload and item.name.endswith(_OF_INPUTS)
            if not (is_on_host or _is_spared(item, kept)):
                made.append(item)
            continue
        loop = replace(item, body=_changed(item.body, kept, element_bytes))
        which, prefix = item.name.removeprefix("dense."), item.name.split("forward")[0]
        if which == "forward":
            sizes[prefix] = sum(_bytes(item, each, element_bytes) for each in kept.offload)
            loop = _with_copy(loop, "copy_to_host", sizes[prefix])
        elif which == "backward":
            size = sizes.get(item.name.split("backward")[0], 0)
            loop = _with_copy(loop, "copy_from_host", size)
        made.append(loop)
    return tuple(made)


def _is_spared(item: Operation, kept: SavedActivations) -> bool:
    """Whether an operation of a backward pass recomputes what is kept."""
    match = _PASS.fullmatch(item.name)
    if match is None or match[1] != "backward":
        return False
    names = (*kept.save, *kept.offload)
    if item.kind == "attention":
        return "context" in names and "gradient" not in match[2].split(".")
    if item.kind != "matmul":
        return False
    return any(match[2] in _MADE_BY.get(name, ()) for name in names)


def _with_copy(loop: Loop, direction: CollectiveName, size: int) -> Loop:
    """`loop` with a copy of `size` bytes that lasts from the start to the end of each iteration."""
    if not size:
        return loop
    name = f"{loop.name}.{direction}"
    copy = Operation(
        name=name, kind="collective", dtype="bf16", read_bytes=size, write_bytes=size,
        collective=Collective(
            name=direction, payload_bytes=size, group=HOST_MEMORY, is_async=True
        ),
    )  # fmt: skip
    done = Operation(name=f"{name}.done", kind="wait", dtype="bf16", waits_for=name)
    body: Sequence[Operation | Loop] = (copy, *loop.body, done)
    return replace(loop, body=tuple(body))
