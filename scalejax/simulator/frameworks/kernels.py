"""The closed form of a decoder's step, run by a framework with its own kernels.

XLA's loops over blocks slice each layer's matrices and kept activations out of stacks, write them
into stacks, zero buffers, and cast float32 matrices for every microbatch; its pipelines send chunks
of layers to their stages; its Ulysses attention transposes. PyTorch holds a tensor for each layer,
in 16 bits, and does none of this. `Kernels` says where it overlaps what XLA does not.

Operations are recognised by the names that `scalejax.simulator.transformer` gives them, so only
programs in closed form are changed. Independent of hardware.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scalejax.config.parallelism import CONTEXT, DATA, PIPELINE, TENSOR
from scalejax.config.run import ResolvedRun
from scalejax.simulator.frameworks.overlap import sent_beside
from scalejax.simulator.program import DeviceGroup, Loop, Operation, Program, each_changed
from scalejax.simulator.transforms.pipeline import BUBBLE

_Items = tuple[Operation | Loop, ...]

_OF_STACKS = frozenset(
    ("counter", "slice", "zero", "kept", "stack", "halves", "copy", "deal", "places")
)
"""Parts of the names of XLA's operations on stacks of layers."""
_OF_LAYOUTS = frozenset(("transpose", "transpose_tokens", "concatenate"))
"""Parts of the names of XLA's operations for the layouts that its collectives and products need."""
_ADDED_TO_SUMS = ("gradient.accumulate", ".sums.add")
"""Ends of the names of operations that add gradients to float32 sums: those of all microbatches,
and of every layer of a stage."""
_OF_LOADS = re.compile(r"router\.(loads|losses)")
"""Sums of the loads of experts, and of the losses computed from them."""
_CHUNKS = "chunks"
_WEIGHT_CASTS = re.compile(r"(embedding|stage)\.[\w.]*cast|logits\.output\.cast")
_NUMBER = re.compile(r"[.#]\w*\d+\w*|#\w+")
_HALF = re.compile(r"(?<=\.(step|last))\.[01]")
_RANK = 4  # of the shape of attention: samples and heads, queries, keys, head size
_NARROW = ("f8", "f4")
_WIDE_BYTES = 2  # of an element of bf16
_AFTER_NORMS = ("forward.qkv", "forward.up", "forward.q_down", "forward.kv_down")
_SENDS = re.compile(rf"{PIPELINE}\.send\.(forward|backward)")
_HEADS = ("queries", "result", "result.again", "home.queries")
_KEYS = ("keys", "values", "home.keys", "home.values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What the kernels of a framework do, as far as a step's closed form shows."""

    keeps_stacks: bool = False
    """Whether it is XLA with its own kernels: stacks of layers, casts and sums are XLA's."""
    has_fused_attention: bool = False
    """Whether attention is one kernel even where XLA has none (MaxText's splash attention on
    TPUs)."""
    window_block: int | None = None
    """Queries and keys per block of its attention kernel, which supports sinks, and skips blocks
    that a window hides; None if it does neither."""
    routes_on_matrix_units: bool = False
    """Whether the router's product reads 16 bits and the products of its gradient may be rounded to
    tf32 (Megatron-LM, core/transformer/moe/moe_utils.py: RouterGatingLinearFunction by Transformer
    Engine's general_gemm); otherwise they are float32 without rounding."""
    balances_own_tokens: bool = False
    """Whether loads of experts are summed over tensor and context only, for a loss per sample
    (Megatron-LM, core/transformer/moe/router.py: its loss sums over the group of both only, and
    losses are reported once a step); otherwise over all devices, as are their losses."""
    accumulates_in_products: bool = False
    """Whether the product that makes a matrix's gradient adds it to the float32 sum
    (Megatron-LM's gradient_accumulation_fusion); else a kernel reads both and writes the sum."""
    overlaps_sends: bool = False
    """Whether interleaved stages send activations while they compute the next chunk (Megatron-LM's
    overlap_p2p_communication)."""
    casts_once: bool = False
    """Whether matrices are cast to 8 or 4 bits once a step, and an activation once for both the
    forward product and the gradient's, in the two layouts they need (Transformer Engine)."""


def with_kernels(program: Program, run: ResolvedRun, kernels: Kernels) -> Program:
    """`program` without what only XLA does, and with what `kernels` do.

    Gradients are summed over context together with data. Keys and values travel around a ring over
    context while attention computes (Transformer Engine's `cp_comm_type` "p2p"), also in stages of
    a pipeline, with one kernel per step of the ring.

    Args:
        program: the step in closed form; others are returned unchanged.
        run: its run.
        kernels: the framework's kernels.
    """
    if program.backend != "closed_form" or kernels.keeps_stacks:
        return program
    items = _without_stacks(program.operations, kernels)
    items = _summed_once(items)
    if kernels.routes_on_matrix_units:
        items = each_changed(items, _on_matrix_units)
    if kernels.balances_own_tokens:
        items = _balanced_apart(items, run.layout.context, run.layout.tensor)
    if run.layout.context > 1:
        items = _in_ring(_with_whole_steps(items), run.layout.context)
    if kernels.overlaps_sends and run.config.layout.pipeline_chunks > 1:
        items = tuple(_sending_beside(item) for item in items)
    return replace(program, operations=items)


def _on_matrix_units(item: Operation) -> Operation:
    if item.dtype != "f32_highest" or ".router" not in item.name:
        return item
    if not item.name.startswith("forward"):
        return replace(item, dtype="f32")
    batch, m, n, k = item.shape
    return replace(item, dtype="bf16", read_bytes=_WIDE_BYTES * batch * (m + n) * k)


def _balanced_apart(items: _Items, context: int, tensor: int) -> _Items:
    """`items` with expert loads summed over context and tensor only, and no losses summed."""
    found: list[Operation | Loop] = []
    dropped: set[str] = set()
    axes = [(CONTEXT, context, tensor), (TENSOR, tensor, 1)]
    axes = [axis for axis in axes if axis[1] > 1]
    for item in items:
        if isinstance(item, Loop):
            found.append(replace(item, body=_balanced_apart(item.body, context, tensor)))
            continue
        collective = item.collective
        if collective is None or not _OF_LOADS.search(_plain(item.name)):
            if item.waits_for not in dropped:
                found.append(item)
            continue
        if not axes or not _plain(item.name).endswith("loads"):
            dropped.add(item.name)
            continue
        group = DeviceGroup(
            extents=tuple((size, stride) for _, size, stride in axes),
            axes=tuple(name for name, _, _ in axes),
        )
        found.append(replace(item, collective=replace(collective, group=group)))
    return tuple(found)


def _plain(name: str) -> str:
    """`name` without numbers and without the marks of bubbles and parts."""
    return _NUMBER.sub("", name.replace(BUBBLE, "")).removeprefix("dense.")


def _without_stacks(items: _Items, kernels: Kernels) -> _Items:
    """`items` without the operations of stacks, layouts and casts of matrices."""
    found: list[Operation | Loop] = []
    dropped: set[str] = set()
    products = {item.name: item for item in items if isinstance(item, Operation)}
    for item in items:
        if isinstance(item, Loop):
            body = _without_stacks(item.body, kernels)
            found.append(replace(item, body=body))
            continue
        name = _plain(item.name)
        is_chunk = name.split(".")[0] == _CHUNKS or "deal" in name.split(".")
        if item.collective is not None and is_chunk:
            dropped.add(item.name)
        elif item.waits_for in dropped or is_chunk:
            continue
        elif item.kind != "fusion":
            found.append(item)
        elif _is_of_xla(name, kernels):
            continue
        elif item.dtype.startswith(_NARROW) and kernels.casts_once:
            found.extend(_cast_once(item, products))
        else:
            found.append(item)
    return tuple(found)


def _is_of_xla(name: str, kernels: Kernels) -> bool:
    """Whether a fusion of that name is found in XLA's program only."""
    if set(name.split(".")) & (_OF_STACKS | _OF_LAYOUTS) or _WEIGHT_CASTS.fullmatch(name):
        return True
    return name.endswith(_ADDED_TO_SUMS) and kernels.accumulates_in_products


def _cast_once(item: Operation, products: Mapping[str, Operation]) -> Iterable[Operation]:
    """The cast of a product's operands, or the search for their largest value, for activations only
    and into two layouts; none for a matrix gradient, whose operands are already cast, nor for the
    output of a norm, whose kernel casts it if the scale is known."""
    product_name, _, part = item.name.replace(BUBBLE, "").rpartition(".")
    suffix = BUBBLE if item.name.endswith(BUBBLE) else ""
    product = products.get(product_name + suffix)
    if product is None or part not in ("cast", "amax"):
        return (item,)
    plain = _plain(product.name)
    is_of_matrix = plain.endswith(".gradient") or product.grouped_pass == "weight_gradient"
    is_known = f"{product_name}.amax{suffix}" not in products
    if is_of_matrix or (is_known and plain in _AFTER_NORMS):
        return ()
    batch, m, n, k = product.shape
    activations = batch * m * (n if product.grouped_pass == "input_gradient" else k)
    operands = activations + batch * n * k
    if part == "amax":
        return (replace(item, read_bytes=_WIDE_BYTES * activations),)
    share = activations / operands
    return (
        replace(
            item,
            read_bytes=_WIDE_BYTES * activations,
            write_bytes=round(2 * item.write_bytes * share),
        ),
    )


def _summed_once(items: _Items) -> _Items:
    """`items` with gradients summed over data and context at once, if they are summed over both.

    If they are not summed over data, their sums over context are kept: once a step in a pipeline,
    for each microbatch elsewhere.
    """
    over_context = [each.collective for each in _gradient_sums(items, CONTEXT) if each.collective]
    if not over_context or not any(_gradient_sums(items, DATA)):
        return items
    return _over_both(items, over_context[0].group.extents, set())


def _gradient_sums(items: _Items, axis: str) -> Iterator[Operation]:
    """Sums of gradients over that axis only."""
    for item in items:
        if isinstance(item, Loop):
            yield from _gradient_sums(item.body, axis)
        elif _sums_gradients(item, axis):
            yield item


def _sums_gradients(item: Operation, axis: str) -> bool:
    collective = item.collective
    return (
        collective is not None
        and collective.group.axes == (axis,)
        and collective.name in ("all_reduce", "reduce_scatter")
        and ".attention." not in item.name  # gradients of keys, which are sent home
    )


def _over_both(items: _Items, extents: tuple[tuple[int, int], ...], dropped: set[str]) -> _Items:
    found: list[Operation | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            found.append(replace(item, body=_over_both(item.body, extents, dropped)))
        elif _sums_gradients(item, CONTEXT):
            dropped.add(item.name)
        elif item.waits_for not in dropped:
            found.append(_also_over(item, extents))
    return tuple(found)


def _also_over(item: Operation, extents: tuple[tuple[int, int], ...]) -> Operation:
    collective = item.collective
    if collective is None or collective.group.axes != (DATA,):
        return item
    group = replace(
        collective.group, axes=(DATA, CONTEXT), extents=(*collective.group.extents, *extents)
    )
    return replace(item, collective=replace(collective, group=group))


def _with_whole_steps(items: _Items) -> _Items:
    """`items` with the two halves of each step of a ring in one kernel: Transformer Engine computes
    the later half of its queries over all keys that arrive, or all queries over the earlier half of
    them (transformer_engine/pytorch/attention: AttnFuncWithCPAndKVP2P), where XLA computes halves
    over halves."""
    found: list[Operation | Loop] = []
    for item in items:
        if isinstance(item, Loop):
            found.append(replace(item, body=_with_whole_steps(item.body)))
        elif item.kind == "attention" and _HALF.search(item.name):
            first = next((each for each in found if each.name == _HALF.sub(".0", item.name)), None)
            if not isinstance(first, Operation) or first is item or len(item.shape) != _RANK:
                found.append(item)
                continue
            samples, queries, keys, width = item.shape
            found[found.index(first)] = replace(
                first,
                name=_HALF.sub("", item.name),
                flop=first.flop + item.flop,
                read_bytes=first.read_bytes + item.read_bytes,
                write_bytes=first.write_bytes + item.write_bytes,
                shape=(samples, queries, 2 * keys, width),
            )
        else:
            found.append(item)
    return tuple(found)


def _in_ring(items: _Items, devices: int) -> _Items:
    """`items` in which exchanges of heads over context are replaced by keys and values that are
    passed on while attention computes."""
    found: list[Operation | Loop] = []
    open_sends: list[Operation] = []
    dropped: set[str] = set()
    for item in items:
        if isinstance(item, Loop):
            found.append(replace(item, body=_in_ring(item.body, devices)))
            continue
        collective = item.collective
        if (
            collective is not None
            and collective.name == "all_to_all"
            and collective.group.axes == (CONTEXT,)
        ):
            dropped.add(item.name)
            name = _plain(item.name)
            if name.endswith(_KEYS) and not name.endswith(_HEADS):
                sent = replace(
                    collective,
                    name="collective_permute",
                    payload_bytes=collective.payload_bytes * (devices - 1),
                    is_async=True,
                )
                open_sends.append(replace(item, collective=sent))
        elif item.waits_for in dropped:
            continue
        elif item.kind == "attention":
            # Gradients of keys and values are sent home during the same kernel.
            sends, open_sends = open_sends, []
            found.extend((*sends, item, *map(_wait_for, sends)))
        else:
            found.append(item)
    last = _last_attention(found)
    if open_sends and last is not None:
        found[last:last] = open_sends
        place = last + len(open_sends) + 1
        found[place:place] = map(_wait_for, open_sends)
    return tuple(found)


def _last_attention(items: Sequence[Operation | Loop]) -> int | None:
    places = [
        index
        for index, item in enumerate(items)
        if isinstance(item, Operation) and item.kind == "attention"
    ]
    return places[-1] if places else None


def _wait_for(item: Operation) -> Operation:
    return Operation(name=f"{item.name}.done", kind="wait", dtype=item.dtype, waits_for=item.name)


def _sending_beside(item: Operation | Loop) -> Operation | Loop:
    """A loop over microbatches in which stages send while they compute; bubbles are unchanged."""
    if not isinstance(item, Loop) or item.name.endswith(BUBBLE):
        return item
    return sent_beside(item, lambda each: _SENDS.match(each.name) is not None)
