"""Executes instructions with the parts of the real `Step`: its gradient, optimizer, evaluation.

Parameters are sharded over the servers leaf by leaf, so that an element-wise optimizer does the
same to a shard as to the whole. Gradients are lazy: one is computed when its value is needed,
together with other pending ones, in one program. Knows no time and no workers.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from scalejax.config.gradient_sync import GradientSyncConfig
from scalejax.config.parallelism import DATA
from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.loader.loader import evaluation_batches
from scalejax.data.source import Source, Split
from scalejax.emulation.instructions import Operation, Rows
from scalejax.emulation.sampler import Samples
from scalejax.models import network_class
from scalejax.training.data_parallel import combined_gradients
from scalejax.training.evaluation import build_evaluation
from scalejax.training.gradient_sync import build_gradient_sync
from scalejax.training.gradient_sync.adasum import pairwise
from scalejax.training.gradient_sync.device_rows import DeviceRows
from scalejax.training.gradients import with_target_weights
from scalejax.training.setup import schedule_of, train_setup
from scalejax.training.state import PyTree, abstract_state
from scalejax.training.step import init_state


def compressed(
    config: GradientSyncConfig,
    samples: int,
    gradient: PyTree,
    residual: PyTree | None,
    stacked: tuple[str, ...] = (),
) -> tuple[PyTree, PyTree]:
    """What a device of `training.gradient_sync` sends of a gradient, and the residual it keeps.

    Args:
        config: the compression.
        samples: number of samples that the gradient averages over.
        gradient: float32.
        residual: what earlier compressions left out; None for nothing.
        stacked: path prefixes of parameters whose first dimension counts layers.
    """
    sync, rows = build_gradient_sync(config, stacked=stacked), DeviceRows(None, samples)
    alone = jax.shard_map(
        lambda own, kept: sync.combine(own, rows, kept),
        mesh=Mesh(jax.devices()[:1], (DATA,)),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,  # JAX cannot infer that the sum over one device is replicated
    )
    return alone(gradient, sync.init(gradient) if residual is None else residual)


def message_bytes(compressed: Callable[[PyTree, None], object], gradient: PyTree) -> int:
    """Bytes that a device sends of `gradient`: the operands of the collectives of `compressed`."""
    alone = jax.make_jaxpr(compressed)(gradient, None).jaxpr.eqns[-1]
    taken = [
        argument.aval
        for each in alone.params["jaxpr"].eqns
        if each.primitive.name in ("psum", "all_gather")
        for argument in each.invars
    ]
    return sum(each.size * each.dtype.itemsize for each in taken)


TOGETHER = 8
"""Gradients computed in one program: on two cores, 80 us each instead of 210, for a network of
100,000 parameters and 16 samples (jax 0.10.2)."""
_SUMMED = 16
"""Largest number of values in one sum: a longer one takes longer to compile than to run."""
_AHEAD = 256
"""Largest number of queued updates; each holds its arguments in memory."""


class JaxExecutor:
    """Executor of the instructions of one run, on one device."""

    def __init__(
        self,
        run: ResolvedRun,
        mesh: Mesh,
        sources: Mapping[Split, Source],
        *,
        shards: int,
        gradients_per_update: int = 1,
        compression: GradientSyncConfig | None = None,
        samples: int = 1,
    ) -> None:
        """Set up the programs; computes nothing yet.

        Args:
            run: the run, on one device.
            mesh: the mesh of that device.
            sources: training, test and, if there are any, validation examples.
            shards: number of parameter shards.
            gradients_per_update: minibatches per update; the learning rate counts minibatches.
            compression: compression of gradients, if any.
            samples: number of samples of a minibatch.
        """
        setup = train_setup(run, mesh)
        if gradients_per_update > 1:
            by_minibatch = schedule_of(run)
            setup = train_setup(run, mesh, lambda step: by_minibatch(step * gradients_per_update))
        self._run, self._mesh, self._shards = run, mesh, shards
        self._optimizer = setup.optimizer
        state = abstract_state(setup)
        if jax.tree.leaves(state.model_state):  # a user's own network may have BatchNorm too
            accepted = "its BatchNorm has running statistics that no server holds"
            raise ConfigError(refusal("model.name", run.config.model.name, accepted))
        self._like = state.params
        self._samples, self._sources = Samples(run, sources["train"]), sources
        self._model_gradients = combined_gradients(setup, mesh)
        self._gradients = jax.jit(lambda several: [self._gradient(*each) for each in several])
        self._updated = jax.jit(self._applied)
        self._combined = jax.jit(_combine)
        self._dot = jax.jit(optax.tree.vdot)
        self._joined = jax.jit(self._join)
        # Shards are cut across layers, so a piece of a stacked parameter counts as one layer.
        self._stacked = network_class(run.config.model).stacked if shards == 1 else ()
        if compression is not None:
            self._compress = partial(compressed, compression, samples, stacked=self._stacked)
            self._compressed = jax.jit(self._compress)
        self._adasum = jax.jit(pairwise, static_argnums=1)
        self._evaluation = build_evaluation(run, mesh)
        self._waiting: deque[weakref.ref[Gradient]] = deque()
        self._failure: BaseException | None = None
        self._queued = 0

    @property
    def tensor_elements(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(leaf.size for leaf in jax.tree.leaves(self._like))

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """Bytes of each shard."""
        parts = jax.eval_shape(self._cut, self._like)
        return tuple(
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part)) for part in parts
        )

    @property
    def message_bytes(self) -> tuple[int, ...]:
        """Bytes of a compressed gradient for each shard."""
        parts = jax.eval_shape(self._cut, self._like)
        return tuple(message_bytes(self._compress, part) for part in parts)

    def execute(
        self,
        operation: Operation,
        inputs: Sequence[Any],
        factors: Sequence[float],
        rows: Rows | None,
    ) -> Sequence[Any]:
        """Contents of the outputs of an operation, given the contents of its inputs.

        Raises:
            ConfigError: if examples cannot be read, or are too few for so many workers.
        """
        if operation == "gradient":
            assert rows is not None  # noqa: S101  every gradient has samples
            return self._begin_gradient(inputs, rows)
        known = [self._known(content) for content in inputs]
        match operation:
            case "initial":
                return jax.jit(self._cut)(init_state(self._run, self._mesh).params)
            case "optimizer":
                return [self._optimizer.init(*known)]
            case "update":
                return self._updated(*known)
            case "combine":
                return [self._combine_all(factors, known)]
            case "compress" | "fp16" | "two_bit" | "top_k":
                return self._compressed(known[0], known[1] if len(known) > 1 else None)
            case "adasum":
                return [self._adasum(known, self._stacked)]
            case "dot":
                return [self._dot(*known)]
            case "evaluate":
                has_validation = "validation" in self._sources
                return [self._evaluate(tuple(known), "validation" if has_validation else "test")]
            case "test":
                return [self._evaluate(tuple(known), "test")]
            case "trained" | "evaluated" | "tested":
                return []

    def value(self, content: Any) -> Any:
        """Content of a value as NumPy arrays."""
        return jax.device_get(self._known(content))

    def _begin_gradient(self, params: Sequence[Any], rows: Rows) -> Sequence[Any]:
        params = tuple(self._known(part) for part in params)
        gradient = Gradient(params, partial(self._samples.take, rows))
        self._waiting.append(weakref.ref(gradient))
        return [gradient.part(place) for place in (*range(self._shards), None)]

    def _known(self, content: Any) -> Any:
        """`content` as arrays; computes it if it is part of a pending gradient."""
        if not isinstance(content, Part):
            return content
        while content.gradient is not None:
            self._compute_waiting()
        return content.array

    def _compute_waiting(self) -> None:
        """Compute the oldest pending gradients; an error is raised again for later callers.

        Gradients computed with one that failed are no longer pending and would never be available:
        virtual time continues until the worker of the failed one is processed.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._compute(self._taken())
        except BaseException as error:  # Ctrl-C, too
            self._failure = error
            raise

    def _taken(self) -> list["Gradient"]:
        """The oldest pending gradients, without those no longer referenced."""
        several: list[Gradient] = []
        while self._waiting and len(several) < TOGETHER:
            gradient = self._waiting.popleft()()
            if gradient is not None:
                several.append(gradient)
        if not several:
            raise RuntimeError("a gradient is requested that is not pending")
        return several

    def _compute(self, several: list["Gradient"]) -> None:
        """Compute gradients, eight in one program, or each separately."""
        groups = [several] if len(several) == TOGETHER else [[each] for each in several]
        found: Any = None
        for group in groups:  # only these two sizes: each is compiled once
            arguments = [(each.params, each.batch()) for each in group]
            found = self._gradients(arguments)
            for each, (parts, metrics) in zip(group, found, strict=True):
                each.set(parts, metrics)
        self._queued += len(several)
        if self._queued >= _AHEAD:
            jax.block_until_ready(found)
            self._queued = 0

    def _gradient(self, parts: Sequence[PyTree], batch: PyTree) -> tuple[Any, Any]:
        batch = with_target_weights(batch)
        gradient, _, metrics, _ = self._model_gradients(self._join(parts), {}, batch, None, None)
        return self._cut(gradient), jnp.stack([metrics["loss"], metrics["accuracy"]])

    def _applied(self, params: PyTree, state: PyTree, gradient: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = self._optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def _combine_all(self, factors: Sequence[float], values: Sequence[PyTree]) -> PyTree:
        """Linear combination in chunks of a fixed length, each starting with the sum so far."""
        total, factor = values[0], factors[0]
        for begin in range(1, max(2, len(values)), _SUMMED):
            more = values[begin : begin + _SUMMED]
            numbers = [factor, *factors[begin : begin + _SUMMED]]
            total, factor = self._combined(np.asarray(numbers, np.float32), [total, *more]), 1.0
        return total

    def _evaluate(self, parts: Sequence[PyTree], split: Split) -> list[PyTree]:
        params, source = self._joined(parts), self._sources[split]
        batches = evaluation_batches(source, self._evaluation.batch, self._run.config.input)
        with closing(batches):
            return [self._evaluation.function(params, {}, batch) for batch in batches]

    def _cut(self, tree: PyTree) -> tuple[PyTree, ...]:
        """The shards of `tree`, each leaf cut into pieces of nearly the same length."""
        if self._shards == 1:
            return (tree,)

        def piece(leaf: jax.Array, place: int) -> jax.Array:
            begin, end = (leaf.size * which // self._shards for which in (place, place + 1))
            return leaf.reshape(-1)[begin:end]

        return tuple(
            jax.tree.map(partial(piece, place=place), tree) for place in range(self._shards)
        )

    def _join(self, parts: Sequence[PyTree]) -> PyTree:
        """The tree that was cut into `parts`."""
        if self._shards == 1:
            return parts[0]
        return jax.tree.map(
            lambda like, *pieces: jnp.concatenate(pieces).reshape(like.shape), self._like, *parts
        )


class Gradient:
    """A lazy gradient, computed when it is needed."""

    def __init__(self, params: tuple[PyTree, ...], batch: Callable[[], PyTree]) -> None:
        self.params = params
        """The parameters of the gradient."""
        self.batch = batch
        """Function that returns its samples."""
        self._parts: list[weakref.ref[Part]] = []

    def part(self, place: int | None) -> "Part":
        """The part of the server `place`, or, if None, [loss, accuracy] of the samples."""
        part = Part(self, place)
        self._parts.append(weakref.ref(part))
        return part

    def set(self, parts: tuple[PyTree, ...], metrics: jax.Array) -> None:
        """Store the result in those parts that are still referenced."""
        for part in filter(None, (reference() for reference in self._parts)):
            part.array = metrics if part.place is None else parts[part.place]
            part.gradient = None


class Part:
    """The part of a gradient for one server, or its metrics."""

    def __init__(self, gradient: Gradient, place: int | None) -> None:
        self.gradient: Gradient | None = gradient
        """The gradient, until it is computed."""
        self.place = place
        """Index of the part."""
        self.array: Any = None
        """The array, once computed; a loss kept for a log line does not keep its gradient alive."""


def _combine(factors: jax.Array, values: Sequence[PyTree]) -> PyTree:
    def total(*leaves: jax.Array) -> jax.Array:
        return sum(factor * leaf for factor, leaf in zip(factors, leaves, strict=True))  # type: ignore[return-value]

    return jax.tree.map(total, *values)
