"""Gradient of a pipeline of which every stage follows a timetable of its own.

All stages are one program, in a `shard_map` over the pipeline axis that leaves the other axes to
the compiler: a scan over the slots of the timetable (`config.pipeline_schedule`), in each of which
a stage computes a forward pass of one microbatch, a backward pass of another, or nothing, and then
exchanges results with its neighbours. Collectives inside a pass are among the devices of one
stage, which all compute the same.

A forward pass saves what its backward pass needs, with any recomputation, in a place of a buffer
that holds as many microbatches as the schedule says. The first stage embeds the tokens, the last
computes loss and logits and their gradients at once, in its forward pass. Knows schedules as
tables; nothing of what a block consists of.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from scalejax.config.parallelism import PIPELINE
from scalejax.config.pipeline_schedule import PassKind, Timetable

PyTree = Any
"""Nested dicts and dataclasses of arrays, as JAX means it."""

_KINDS: tuple[PassKind | None, ...] = (None, "forward", "backward", "weights")


class Parameters(NamedTuple):
    """Parameters, of which some learn: two trees of one structure, each with None in place of what
    is in the other."""

    learning: PyTree
    """Those by which the loss is differentiated."""
    frozen: PyTree
    """The others."""

    @property
    def whole(self) -> PyTree:
        """All of them, in one tree."""
        return jax.tree.map(
            lambda learning, frozen: frozen if learning is None else learning,
            *self,
            is_leaf=lambda leaf: leaf is None,
        )


class Network(NamedTuple):
    """The parts of a network that stages compute. `ends` are the parameters of the first and the
    last part, `blocks` those of the layers of one chunk of a stage."""

    first: Callable[[PyTree, PyTree], jax.Array]
    """Maps (ends, rows of a microbatch) to the residual stream before the first block."""
    blocks: Callable[[PyTree, jax.Array], jax.Array]
    """Maps (blocks, residual stream) to the residual stream after them."""
    last: Callable[[PyTree, jax.Array, PyTree], tuple[jax.Array, PyTree]]
    """Maps (ends, residual stream, rows) to the loss that is differentiated, and metrics."""


def scheduled_gradients(
    network: Network, table: Timetable, ends: Parameters, blocks: Parameters, rows: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """Gradients of what learns of `ends` and of `blocks`, summed over the microbatches in float32,
    and the sum of their metrics.

    Args:
        network: its parts.
        table: what stages compute when.
        ends: parameters of the first and the last part, replicated over the stages.
        blocks: parameters of the blocks, [chunks, stages, layers of a chunk, ...], sharded over
            the stages.
        rows: the batch, [microbatches, rows, ...].
    """
    by_stage = P(None, PIPELINE)

    def stage(ends: Parameters, blocks: Parameters, rows: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        own = jax.tree.map(lambda leaf: leaf[:, 0], blocks)
        of_ends, of_blocks, metrics = _Stage(network, table, ends, own, rows).run()
        of_blocks = jax.tree.map(lambda leaf: leaf[:, None], of_blocks)
        # Every part has been computed by one stage; of the others these are 0.
        return lax.psum(of_ends, PIPELINE), of_blocks, lax.psum(metrics, PIPELINE)

    return jax.shard_map(
        stage,
        in_specs=(P(), by_stage, P()),
        out_specs=(P(), by_stage, P()),
        axis_names={PIPELINE},
        check_vma=False,
    )(ends, blocks, rows)


class _Held(NamedTuple):
    """What a stage holds between two slots."""

    message: jax.Array
    """The result of its last pass, [rows, S, D]."""
    received: dict[PassKind, jax.Array]
    """Results of neighbours that await their pass, [places, rows, S, D]."""
    saved: list[jax.Array]
    """What forward passes saved for their backward passes, [places, ...]."""
    of_ends: PyTree
    """Gradient of the ends so far."""
    of_blocks: PyTree
    """Gradient of the blocks so far."""
    metrics: PyTree
    """Metrics so far."""


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
        self._split = _Split.of(network.blocks, _at(blocks, 0), self._x)

    def run(self) -> tuple[PyTree, PyTree, PyTree]:
        """Gradients of ends and blocks, and metrics, after all slots."""

        def buffer(places: int, like: Any) -> jax.Array:
            return jnp.zeros((places, *like.shape), like.dtype)

        columns = self._columns
        places = {name: int(column.max()) + 1 for name, column in columns.items()}
        rows, ends = _at(self._rows, 0), self._ends.whole
        metrics = jax.eval_shape(self._network.last, ends, self._x, rows)[1]
        held = _Held(
            message=jnp.zeros(self._x.shape, self._x.dtype),
            received={
                "forward": buffer(max(1, places["to_forward"]), self._x),
                "backward": buffer(max(1, places["to_backward"]), self._x),
            },
            saved=[buffer(places["place"], leaf) for leaf in self._split.saved],
            of_ends=_zeros(self._ends.learning),
            of_blocks=_zeros(self._blocks.learning),
            metrics=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics),
        )
        held, _ = lax.scan(self._slot, held, jax.tree.map(jnp.asarray, columns))
        return held.of_ends, held.of_blocks, held.metrics

    def _slot(self, held: _Held, row: dict[str, jax.Array]) -> tuple[_Held, None]:
        own = {name: entry[self._here] if entry.ndim else entry for name, entry in row.items()}
        # One after another, of which at most one is computed: results of the branches of a
        # conditional would be copied, and these are most of the memory.
        for kind, computed in (("forward", self._forward), ("backward", self._backward)):
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
        y_BSD, saved = self._split.forward(_at(self._blocks, own["chunk"]), x_BSD)
        buffers = [
            lax.dynamic_update_index_in_dim(buffer, leaf, own["place"], 0)
            for buffer, leaf in zip(held.saved, saved, strict=True)
        ]

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
        return held._replace(message=message, saved=buffers, of_ends=of_ends, metrics=metrics)

    def _backward(self, own: dict[str, jax.Array], held: _Held) -> _Held:
        blocks = _at(self._blocks, own["chunk"])
        gradient_BSD = _at(held.received["backward"], own["from"])
        saved = [_at(buffer, own["place"]) for buffer in held.saved]
        of_blocks, gradient_BSD = self._split.backward(blocks, saved, gradient_BSD)
        of_blocks = jax.tree.map(partial(_added_at, own["chunk"]), held.of_blocks, of_blocks)

        def embedded(of_ends: PyTree) -> PyTree:
            rows = _at(self._rows, own["microbatch"])
            _, back = jax.vjp(
                lambda learning: self._network.first(
                    self._ends._replace(learning=learning).whole, rows
                ),
                self._ends.learning,
            )
            return _added(of_ends, *back(gradient_BSD))

        is_first = (self._here == 0) & (own["chunk"] == 0)
        of_ends = _if(is_first, embedded, held.of_ends, "first_part")
        return held._replace(message=gradient_BSD, of_ends=of_ends, of_blocks=of_blocks)


def _if(
    condition: jax.Array, computed: Callable[[PyTree], PyTree], before: PyTree, name: str
) -> PyTree:
    """`computed(before)` if `condition` holds, else `before`: a loop of one round or none, in which
    arrays are updated in place. `name` is its scope, by which it is found in a compiled program."""
    with jax.named_scope(name):
        _, after = lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.zeros((), bool), computed(carry[1])),
            (condition, before),
        )
    return after


@dataclass(frozen=True)
class _Split:
    """The forward and the backward pass of a function as two functions, with what the first saves
    for the second between them. Parameters are not saved, nor what follows from them alone."""

    traced: ClosedJaxpr
    """(parameters, x) to (result, what the backward pass needs)."""
    back: Any
    """Structure of the backward function."""
    is_saved: tuple[bool, ...]
    """Of what the backward pass needs, what depends on x."""

    @classmethod
    def of(
        cls, function: Callable[[PyTree, jax.Array], jax.Array], params: Parameters, x: Any
    ) -> "_Split":
        """The passes of `function` for arguments of these shapes."""
        structure = []

        def forward(params: Parameters, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            result, back = jax.vjp(
                lambda learning, x: function(params._replace(learning=learning).whole, x),
                params.learning,
                x,
            )
            leaves, back = jax.tree.flatten(back)
            structure.append(back)
            return result, leaves

        traced = jax.make_jaxpr(forward)(params, x)
        jaxpr = traced.jaxpr
        moving = {jaxpr.invars[-1]}
        for each in jaxpr.eqns:
            if any(not isinstance(var, Literal) and var in moving for var in each.invars):
                moving.update(each.outvars)
        is_saved = tuple(
            not isinstance(var, Literal) and var in moving for var in jaxpr.outvars[1:]
        )
        return cls(traced, structure[0], is_saved)

    @property
    def saved(self) -> list[Any]:
        """Shapes of what is saved."""
        return [
            jax.ShapeDtypeStruct(shape.shape, shape.dtype)
            for shape, is_saved in zip(self.traced.out_avals[1:], self.is_saved, strict=True)
            if is_saved
        ]

    def forward(self, params: Parameters, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """The result, and what is saved."""
        result, *needed = jaxpr_as_fun(self.traced)(*jax.tree.leaves(params), x)
        return result, list(itertools.compress(needed, self.is_saved))

    def backward(
        self, params: Parameters, saved: list[jax.Array], gradient: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Gradients of the parameters that learn and of x."""
        x = self.traced.in_avals[-1]
        # Nothing that depends on x is used of this: the compiler leaves it out.
        _, *needed = jaxpr_as_fun(self.traced)(
            *jax.tree.leaves(params), jnp.zeros(x.shape, x.dtype)
        )
        own = iter(saved)
        needed = [
            next(own) if is_saved else leaf
            for leaf, is_saved in zip(needed, self.is_saved, strict=True)
        ]
        return jax.tree.unflatten(self.back, needed)(gradient)


def _at(tree: PyTree, index: Any) -> PyTree:
    """Entry `index` of every array."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _zeros(tree: PyTree) -> PyTree:
    """Float32 zeros, sharded as the arrays of `tree`."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) * 0, tree)


def _added(total: PyTree, more: PyTree) -> PyTree:
    return jax.tree.map(lambda old, new: old + new.astype(old.dtype), total, more)


def _added_at(index: jax.Array, total: jax.Array, more: jax.Array) -> jax.Array:
    """`total` with `more` added to its entry `index`."""
    return total.at[index].add(more.astype(total.dtype))


def _columns(table: Timetable) -> dict[str, np.ndarray]:
    """The table as arrays of int32, [slots, stages], and "pattern", [slots].

    "kind", "microbatch" and "chunk" of the pass; the "place" where it saves, or finds what was
    saved; "from" which place of what was received it takes its input; "to_forward" and
    "to_backward", where what arrives after the slot is put, or -1; "is_own" where it is the
    gradient of the loss, from the stage itself.
    """
    shape = len(table.slots), table.ticks.stages
    columns: dict[str, np.ndarray]
    names = ("kind", "microbatch", "chunk", "place", "from", "to_forward", "to_backward", "is_own")
    columns = {name: np.zeros(shape, np.int32) for name in names}
    columns["to_forward"] -= 1
    columns["to_backward"] -= 1
    stages = range(table.ticks.stages)
    saved = [table.saved(stage) for stage in stages]
    received = [{kind: table.received(stage, kind) for kind in _KINDS if kind} for stage in stages]
    for (stage, each), slot in table.when.items():
        at = slot, stage
        columns["kind"][at] = _KINDS.index(each.kind)
        columns["microbatch"][at] = each.microbatch
        columns["chunk"][at] = each.chunk
        columns["place"][at] = saved[stage][each._replace(kind="forward")]
        columns["from"][at] = received[stage][each.kind].get(each, 0)
        if (waiting := table.sends(stage, each)) is not None:
            to, done = waiting
            columns[f"to_{done.kind}"][slot, to] = received[to][done.kind][done]
            columns["is_own"][at] = to == stage
    columns["pattern"] = np.arange(len(table.slots), dtype=np.int32) % 2
    return columns


def _exchange(table: Timetable) -> Callable[[jax.Array, jax.Array], dict[PassKind, jax.Array]]:
    """Maps (pattern of a slot, result of the stage) to what arrives for each kind of pass.

    Even and odd slots have each their own pairs of stages, so that only those wait for each other
    that must.
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
        forward, backward = lax.cond(
            pattern == 0, partial(of_pattern, 0), partial(of_pattern, 1), message
        )
        return {"forward": forward, "backward": backward}

    return exchange


def _permuted(message: jax.Array, pairs: set[tuple[int, int]]) -> jax.Array:
    return lax.ppermute(message, PIPELINE, sorted(pairs)) if pairs else message
