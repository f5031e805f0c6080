"""Gradients of a pipeline in which every stage follows its own timetable.

All stages run one program, in a `shard_map` over the pipeline, expert and context axes that leaves
the other axes to the compiler: a scan over the slots of the timetable (`config.pipeline_schedule`).
In each slot a stage computes a forward pass of one microbatch, a backward pass of another, or
nothing, and then exchanges results with its neighbours. Collectives inside a pass are among the
devices of one stage, which all compute the same. Devices along the expert and context axes
accumulate gradients of their own rows and tokens, and sum them once, after all slots.

A forward pass saves what its backward pass needs, given any recomputation, in one place of a buffer
that holds as many microbatches as the schedule says. The first stage embeds the tokens; the last
computes logits, loss and their gradients at once, in its forward pass. Knows schedules as tables;
nothing of what a block consists of.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from scalejax.config.dataset_facts import POSITIONS, SEGMENT_IDS
from scalejax.config.parallelism import CONTEXT, EXPERT, PIPELINE
from scalejax.config.pipeline_schedule import EXCHANGE, PassKind, Timetable
from scalejax.models.float8 import is_scales
from scalejax.models.moe import is_of_experts
from scalejax.models.packing import documents_of
from scalejax.models.sharding import axis_size
from scalejax.training.gradient_sync.device_rows import PyTree
from scalejax.training.passes import BackwardParts, Parameters, Split

_KINDS: tuple[PassKind | None, ...] = (None, "forward", "backward", "weights")


class Network(NamedTuple):
    """The parts of a network that stages compute. `ends` are the parameters of the first and the
    last part, `blocks` those of the layers of one chunk of a stage."""

    first: Callable[[PyTree, PyTree], jax.Array]
    """Maps (ends, rows of a microbatch) to the residual stream before the first block."""
    blocks: Callable[[PyTree, jax.Array], tuple[tuple[jax.Array, jax.Array | None], PyTree]]
    """Maps (some blocks, stacked; residual stream) to the residual stream after them, with what
    they add to the loss of a microbatch or None; and to what they report."""
    last: Callable[[PyTree, jax.Array, PyTree], tuple[jax.Array, PyTree]]
    """Maps (ends, residual stream, rows) to the loss that is differentiated, and metrics."""
    weight: Callable[[PyTree], jax.Array]
    """Maps the rows of a microbatch to the weight of the blocks' contribution to that loss."""
    layers: tuple[int, ...] | None
    """Periods of layers of each stage if some have fewer than others and skip their padding; None
    if all compute equally many."""


def scheduled_gradients(
    network: Network, table: Timetable, ends: Parameters, blocks: Parameters, rows: PyTree
) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """Gradients of the trainable `ends` and `blocks`, summed over the microbatches in float32; the
    sum of their metrics; and what blocks report, [microbatches, chunks, stages, periods of layers
    of a chunk, ...], with zeros for layers that a stage does not have.

    Args:
        network: its parts.
        table: what stages compute when.
        ends: parameters of the first and the last part, replicated over the stages.
        blocks: parameters of the blocks, [chunks, stages, periods of layers of a chunk, layers of
            a period, ...], sharded over the stages.
        rows: the batch, [microbatches, rows, tokens], in the order in which context shards hold
            tokens, and weights of rows.
    """
    # Left to the compiler, gradients of all but experts would be summed over these axes for every
    # microbatch and layer; where it moves sums out of a loop (WhileLoopAllReduceCodeMotion of jax
    # 0.10.2), it creates their zeros in host memory: 3.7 GB for DeepSeek-V3's embedding.
    expert, context = (axis if axis_size(axis) > 1 else None for axis in (EXPERT, CONTEXT))
    apart = tuple(axis for axis in (expert, context) if axis is not None)

    def stage(ends: Parameters, blocks: Parameters, rows: PyTree) -> tuple[PyTree, ...]:
        own = jax.tree.map(lambda leaf: leaf[:, 0], blocks)
        held = _Stage(network, table, ends, own, rows).run()
        of_blocks = jax.tree.map(lambda leaf: leaf[:, None], held.of_blocks)
        reports = jax.tree.map(lambda leaf: leaf[:, :, None], held.reports)
        # Each part was computed by one stage; on the others these are 0.
        of_ends, metrics = lax.psum((held.of_ends, held.metrics), PIPELINE)
        if apart:
            of_ends, of_blocks = (_mean_over(apart, each) for each in (of_ends, of_blocks))
            metrics, reports = lax.pmean((metrics, reports), apart)
        return of_ends, of_blocks, metrics, reports

    def specs(parameters: PyTree, lead: int, whole: P) -> PyTree:
        """`whole`; for experts, whose dimension follows `lead` others, with their axis too."""
        none = (None,) * (lead - len(whole))
        return jax.tree_util.tree_map_with_path(
            lambda path, _: P(*whole, *none, expert) if is_of_experts(path) else whole, parameters
        )

    of_ends, of_blocks = specs(ends, 1, P()), specs(blocks, 4, P(None, PIPELINE))
    of_rows = jax.tree.map(lambda leaf: P(*(None, expert, context)[: leaf.ndim]), rows)
    return jax.shard_map(
        stage,
        in_specs=(of_ends, of_blocks, of_rows),
        out_specs=(of_ends.learning, of_blocks.learning, P(), P(None, None, PIPELINE)),
        axis_names={PIPELINE, *apart},
        check_vma=False,
    )(ends, blocks, rows)


def _mean_over(axes: tuple[str, ...], gradients: PyTree) -> PyTree:
    """Gradients of the mean loss of the devices along `axes`, from those of each device's loss.
    Over the expert axis, experts already have those of all devices, whose tokens came to them. For
    scales, whose gradients are largest values, the largest."""

    def mean(path: Any, leaf: jax.Array) -> jax.Array:
        if is_scales(path):
            return lax.pmax(leaf, axes)
        if EXPERT not in axes or not is_of_experts(path):
            return lax.pmean(leaf, axes)
        rest = tuple(axis for axis in axes if axis != EXPERT)
        return (lax.pmean(leaf, rest) if rest else leaf) / lax.axis_size(EXPERT)

    return jax.tree_util.tree_map_with_path(mean, gradients)


class _Held(NamedTuple):
    """What a stage holds between two slots."""

    message: jax.Array
    """The result of its last pass, [rows, S, D]."""
    received: dict[PassKind, jax.Array]
    """Results of neighbours that await their pass, [places, rows, S, D]."""
    saved: list[jax.Array]
    """What forward passes saved for their backward passes, [places, layers of a chunk, ...]."""
    unweighed: list[jax.Array]
    """What backward passes saved for passes over weights, [places, layers of a chunk, ...]."""
    of_ends: PyTree
    """Gradient of the ends so far."""
    of_blocks: PyTree
    """Gradient of the blocks so far."""
    metrics: PyTree
    """Metrics so far."""
    reports: PyTree
    """What blocks have reported so far, [microbatches, chunks, layers of a chunk, ...]."""


class _Stage:
    """One stage of a pipeline, traced once for all of them."""

    def __init__(
        self,
        network: Network,
        table: Timetable,
        ends: Parameters,
        blocks: Parameters,
        rows: PyTree,
    ) -> None:
        self._network, self._table = network, table
        self._ends, self._blocks, self._rows = ends, blocks, rows
        self._columns = _columns(table)
        self._exchange = _exchange(table)
        self._here = lax.axis_index(PIPELINE)
        self._x = jax.eval_shape(network.first, ends.whole, _at(rows, 0))
        self._layers = jax.tree.leaves(blocks)[0].shape[1]
        first = {name: jnp.int32(0) for name in ("chunk", "microbatch")}
        one = self._layer(first, 0)
        self._split = Split.of(network.blocks, one, self._x)
        self._passes = {"forward": self._forward, "backward": self._backward}
        self._parts = None
        if table.ticks.schedule == "zb_h1":
            self._parts = BackwardParts.of(self._split, one, self._x)
            self._passes = {
                "forward": self._forward,
                "backward": partial(self._backward_of_input, self._parts),
                "weights": partial(self._backward_of_weights, self._parts),
            }

    def run(self) -> _Held:
        """Gradients of ends and blocks, metrics and reports, after all slots."""

        def buffer(places: int, like: Any) -> jax.Array:
            return jnp.zeros((places, *like.shape), like.dtype)

        columns = self._columns
        places = {name: int(column.max()) + 1 for name, column in columns.items()}
        rows, ends = _at(self._rows, 0), self._ends.whole
        metrics = jax.eval_shape(self._network.last, ends, self._x, rows)[1]
        of_layer = (self._table.ticks.microbatches, self._table.ticks.chunks, self._layers)
        held = _Held(
            message=jnp.zeros(self._x.shape, self._x.dtype),
            received={
                "forward": buffer(max(1, places["to_forward"]), self._x),
                "backward": buffer(max(1, places["to_backward"]), self._x),
            },
            saved=[
                jnp.zeros((places["place"], self._layers, *leaf.shape), leaf.dtype)
                for leaf in self._split.saved
            ],
            unweighed=[
                jnp.zeros((places["unweighed"], self._layers, *leaf.shape), leaf.dtype)
                for leaf in ([] if self._parts is None else self._parts.saved)
            ],
            of_ends=_zeros(self._ends.learning),
            of_blocks=_zeros(self._blocks.learning),
            metrics=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics),
            reports=jax.tree.map(
                lambda leaf: jnp.zeros((*of_layer, *leaf.shape), leaf.dtype), self._split.report
            ),
        )
        held, _ = lax.scan(self._slot, held, jax.tree.map(jnp.asarray, columns))
        return held

    def _over_layers(
        self, block: Callable[[Any, PyTree], PyTree], before: PyTree, *, is_reversed: bool = False
    ) -> PyTree:
        """`block(layer, before)` for each layer of a chunk of this stage, one after another."""
        counts = self._network.layers

        def each(index: Any, before: PyTree) -> PyTree:
            layer = self._layers - 1 - index if is_reversed else index
            if counts is None:
                return block(layer, before)
            own = jnp.asarray(counts)[self._here]
            return _if(layer < own, partial(block, layer), before, "layer_of_stage")

        return lax.fori_loop(0, self._layers, each, before)

    def _slot(self, held: _Held, row: dict[str, jax.Array]) -> tuple[_Held, None]:
        own = {name: entry[self._here] if entry.ndim else entry for name, entry in row.items()}
        # One pass after another, at most one of which is computed: a conditional would copy the
        # results of its branches, and these are most of the memory.
        for kind, computed in self._passes.items():
            is_due = own["kind"] == _KINDS.index(kind)
            held = _if(is_due, partial(computed, own), held, f"{kind}_pass")
        arrived = self._exchange(row["pattern"], held.message)
        received = {}
        for kind, buffer in held.received.items():
            place = own[f"to_{kind}"]
            got = arrived[kind]
            if kind == "backward":
                got = jnp.where(own["is_own"], held.message, got)
            before = lax.dynamic_index_in_dim(buffer, jnp.maximum(place, 0), keepdims=False)
            got = jnp.where(place >= 0, got, before)
            received[kind] = lax.dynamic_update_index_in_dim(buffer, got, jnp.maximum(place, 0), 0)
        return held._replace(received=received), None

    def _forward(self, own: dict[str, jax.Array], held: _Held) -> _Held:
        rows = _at(self._rows, own["microbatch"])
        x_BSD = _if(
            (self._here == 0) & (own["chunk"] == 0),
            lambda _: self._network.first(self._ends.whole, rows),
            _at(held.received["forward"], own["from"]),
            "first_part",
        )

        def block(layer: Any, before: tuple[jax.Array, list[jax.Array], PyTree]) -> PyTree:
            x_BSD, buffers, reports = before
            x_BSD, report, saved = self._split.forward(self._layer(own, layer), x_BSD)
            put = partial(_put, (own["place"], layer))
            buffers = [put(*each) for each in zip(buffers, saved, strict=True)]
            at = own["microbatch"], own["chunk"], layer
            return x_BSD, buffers, jax.tree.map(partial(_put, at), reports, report)

        before = x_BSD, held.saved, held.reports
        y_BSD, buffers, reports = self._over_layers(block, before)

        def with_loss(before: tuple[jax.Array, PyTree, PyTree]) -> tuple[jax.Array, PyTree, PyTree]:
            y_BSD, of_ends, metrics = before
            _, back, found = jax.vjp(
                lambda learning, y_BSD: self._network.last(
                    self._ends._replace(learning=learning).whole, y_BSD, rows
                ),
                self._ends.learning,
                y_BSD,
                has_aux=True,
            )
            of_last, gradient_BSD = back(jnp.ones((), jnp.float32))
            return gradient_BSD, _added(of_ends, of_last), _added(metrics, found)

        before = y_BSD, held.of_ends, held.metrics
        message, of_ends, metrics = _if(own["is_own"] == 1, with_loss, before, "last_part")
        held = held._replace(message=message, saved=buffers, of_ends=of_ends, metrics=metrics)
        return held._replace(reports=reports)

    def _backward(self, own: dict[str, jax.Array], held: _Held) -> _Held:
        weight = self._weight(own)

        def block(layer: Any, before: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
            gradient_BSD, of_blocks = before
            at = partial(_taken, own["place"], layer)
            blocks = self._layer(own, layer)
            saved = [at(buffer) for buffer in held.saved]
            more, gradient_BSD = self._split.backward(blocks, saved, (gradient_BSD, weight))
            return gradient_BSD, _added_at(own["chunk"], layer, of_blocks, more)

        received_BSD = _at(held.received["backward"], own["from"])
        before = received_BSD, held.of_blocks
        gradient_BSD, of_blocks = self._over_layers(block, before, is_reversed=True)
        held = held._replace(message=gradient_BSD, of_blocks=of_blocks)
        return self._with_embedding(own, held)

    def _backward_of_input(
        self, parts: "BackwardParts", own: dict[str, jax.Array], held: _Held
    ) -> _Held:
        """The gradient of the input alone, and what the gradients of the weights need besides."""
        weight = self._weight(own)

        def block(
            layer: Any, before: tuple[jax.Array, list[jax.Array]]
        ) -> tuple[jax.Array, list[jax.Array]]:
            gradient_BSD, unweighed = before
            saved = [_taken(own["place"], layer, buffer) for buffer in held.saved]
            blocks = self._layer(own, layer)
            gradient_BSD, needed = parts.of_input(blocks, saved, (gradient_BSD, weight))
            put = partial(_put, (own["unweighed"], layer))
            return gradient_BSD, [put(*each) for each in zip(unweighed, needed, strict=True)]

        received_BSD = _at(held.received["backward"], own["from"])
        before = received_BSD, held.unweighed
        gradient_BSD, unweighed = self._over_layers(block, before, is_reversed=True)
        held = held._replace(message=gradient_BSD, unweighed=unweighed)
        return self._with_embedding(own, held)

    def _backward_of_weights(
        self, parts: "BackwardParts", own: dict[str, jax.Array], held: _Held
    ) -> _Held:
        weight = self._weight(own)

        def block(layer: Any, of_blocks: PyTree) -> PyTree:
            saved = [_taken(own["place"], layer, buffer) for buffer in held.saved]
            needed = [_taken(own["unweighed"], layer, buffer) for buffer in held.unweighed]
            more = parts.of_weights(self._layer(own, layer), saved, needed, weight)
            return _added_at(own["chunk"], layer, of_blocks, more)

        return held._replace(of_blocks=self._over_layers(block, held.of_blocks))

    def _weight(self, own: dict[str, jax.Array]) -> jax.Array | None:
        """The weight of the blocks' contribution to the loss; None if they add nothing."""
        if not self._split.adds_loss:
            return None
        return self._network.weight(_at(self._rows, own["microbatch"]))

    def _layer(self, own: dict[str, jax.Array], layer: Any) -> Parameters:
        """One period of layers of a pass, and the documents of its microbatch."""
        rows = {name: self._rows[name] for name in (SEGMENT_IDS, POSITIONS) if name in self._rows}
        given = documents_of(_at(rows, own["microbatch"]))
        return _layer(self._blocks, own["chunk"], layer)._replace(documents=given)

    def _with_embedding(self, own: dict[str, jax.Array], held: _Held) -> _Held:
        """`held` after a backward pass, with the gradient of the embedding on the first stage."""

        def embedded(of_ends: PyTree) -> PyTree:
            rows = _at(self._rows, own["microbatch"])
            _, back = jax.vjp(
                lambda learning: self._network.first(
                    self._ends._replace(learning=learning).whole, rows
                ),
                self._ends.learning,
            )
            return _added(of_ends, *back(held.message))

        is_first = (self._here == 0) & (own["chunk"] == 0)
        of_ends = _if(is_first, embedded, held.of_ends, "first_part")
        return held._replace(of_ends=of_ends)


def _if(
    condition: jax.Array, computed: Callable[[PyTree], PyTree], before: PyTree, name: str
) -> PyTree:
    """`computed(before)` if `condition` holds, else `before`: a loop of at most one iteration, in
    which arrays are updated in place. `name` is the scope by which it is found in a compiled
    program."""
    with jax.named_scope(name):
        _, after = lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.zeros((), bool), computed(carry[1])),
            (condition, before),
        )
    return after


def _at(tree: PyTree, index: Any) -> PyTree:
    """Entry `index` of every array."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _taken(first: Any, second: Any, array: jax.Array) -> jax.Array:
    """`array[first, second]`."""
    start = (first, second, *(0,) * (array.ndim - 2))
    return lax.dynamic_slice(array, start, (1, 1, *array.shape[2:]))[0, 0]


def _put(place: tuple[Any, ...], array: jax.Array, entry: jax.Array) -> jax.Array:
    """`array` with `entry` at `place`, its first indices."""
    start = (*place, *(0,) * entry.ndim)
    return lax.dynamic_update_slice(array, jnp.expand_dims(entry, range(len(place))), start)


def _added_at(first: Any, second: Any, total: PyTree, more: PyTree) -> PyTree:
    """`total` with `more` added to its entries [first, second]; for scales, whose gradients are
    largest values, the larger."""

    def added(path: Any, total: jax.Array, more: jax.Array) -> jax.Array:
        old, more = _taken(first, second, total), more.astype(total.dtype)
        new = jnp.maximum(old, more) if is_scales(path) else old + more
        return _put((first, second), total, new)

    return jax.tree_util.tree_map_with_path(added, total, more)


def _layer(tree: PyTree, chunk: Any, layer: Any) -> PyTree:
    """One period of layers of a chunk, [layers, ...]."""
    return jax.tree.map(partial(_taken, chunk, layer), tree)


def _zeros(tree: PyTree) -> PyTree:
    """Float32 zeros, sharded as the arrays of `tree`."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) * 0, tree)


def _added(total: PyTree, more: PyTree) -> PyTree:
    return jax.tree.map(lambda old, new: old + new.astype(old.dtype), total, more)


def _columns(table: Timetable) -> dict[str, np.ndarray]:
    """The table as arrays of int32, [slots, stages], and "pattern", [slots].

    "kind", "microbatch" and "chunk" describe the pass; "place" is where it saves, or finds what was
    saved, and "unweighed" the same for a pass over weights; "from" is the place of the received
    result that it takes as input; "to_forward" and "to_backward" are where what arrives after the
    slot is put, or -1; "is_own" is 1 if that is the gradient of the loss, from the stage itself.
    """
    shape = len(table.slots), table.ticks.stages
    columns: dict[str, np.ndarray]
    names = ("kind", "microbatch", "chunk", "place", "unweighed", "from")
    names = (*names, "to_forward", "to_backward", "is_own")
    columns = {name: np.zeros(shape, np.int32) for name in names}
    columns["to_forward"] -= 1
    columns["to_backward"] -= 1
    stages = range(table.ticks.stages)
    saved = [table.saved(stage) for stage in stages]
    unweighed = [table.unweighed(stage) for stage in stages]
    received = [{kind: table.received(stage, kind) for kind in _KINDS if kind} for stage in stages]
    for (stage, each), slot in table.when.items():
        at = slot, stage
        columns["kind"][at] = _KINDS.index(each.kind)
        columns["microbatch"][at] = each.microbatch
        columns["chunk"][at] = each.chunk
        columns["place"][at] = saved[stage][each._replace(kind="forward")]
        columns["unweighed"][at] = unweighed[stage].get(each._replace(kind="backward"), 0)
        columns["from"][at] = received[stage][each.kind].get(each, 0)
        if (waiting := table.sends(stage, each)) is not None:
            to, done = waiting
            columns[f"to_{done.kind}"][slot, to] = received[to][done.kind][done]
            columns["is_own"][at] = to == stage
    columns["pattern"] = np.arange(len(table.slots), dtype=np.int32) % 2
    return columns


def _exchange(table: Timetable) -> Callable[[jax.Array, jax.Array], dict[PassKind, jax.Array]]:
    """Maps (pattern of a slot, result of the stage) to what arrives for each kind of pass.

    Even and odd slots each have their own pairs of stages, so that only stages that must wait for
    each other do.
    """
    pairs: dict[tuple[int, PassKind], set[tuple[int, int]]] = {
        (pattern, kind): set() for pattern in (0, 1) for kind in ("forward", "backward")
    }
    for (stage, each), slot in table.when.items():
        waiting = table.sends(stage, each)
        if waiting is not None and waiting[0] != stage:
            pairs[slot % 2, waiting[1].kind].add((stage, waiting[0]))

    def of_pattern(pattern: int, message: jax.Array) -> tuple[jax.Array, jax.Array]:
        forward, backward = pairs[pattern, "forward"], pairs[pattern, "backward"]
        if {to for _, to in forward}.isdisjoint({to for _, to in backward}) and {
            by for by, _ in forward
        }.isdisjoint({by for by, _ in backward}):
            got = _permuted(message, forward | backward)
            return got, got
        return _permuted(message, forward), _permuted(message, backward)

    def exchange(pattern: jax.Array, message: jax.Array) -> dict[PassKind, jax.Array]:
        with jax.named_scope(EXCHANGE):
            forward, backward = lax.cond(
                pattern == 0, partial(of_pattern, 0), partial(of_pattern, 1), message
            )
        return {"forward": forward, "backward": backward}

    return exchange


def _permuted(message: jax.Array, pairs: set[tuple[int, int]]) -> jax.Array:
    return lax.ppermute(message, PIPELINE, sorted(pairs)) if pairs else message
