"""Instruction log of an emulated run: what is computed, in the order of virtual time.

An algorithm never sees array contents: it handles `Value`s, and all computations on them go
through the log, so that they can be recorded, and replayed from the record.
Knows instructions and their order; neither devices nor what an instruction means.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Operation = Literal[
    "initial",
    "optimizer",
    "gradient",
    "update",
    "combine",
    "dot",
    "evaluate",
    "test",
    "trained",
    "evaluated",
    "tested",
    "compress",
    "fp16",
    "two_bit",
    "top_k",
    "adasum",
]
"""initial: -> shards of the parameters. optimizer: shard -> its state. gradient: shards -> shards,
loss, accuracy. update: shard, state, gradient -> shard, state. combine: values -> their linear
combination. dot: two shards -> their inner product. evaluate: shards -> metrics of the
validation data if there are any, else of the test data. test: the same for the test data, at the
end of a run that has validation data. trained, evaluated, tested: metrics, with a step as factor ->
nothing; they become a line of the record. compress (until 0.2 fp16, two_bit, top_k): a part of a
gradient, and its residual -> the compressed sum of both, and the new residual. adasum: gradients
-> one."""


LineKind = Literal["trained", "evaluated", "tested"]
"""Operations that make a line of the record."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Handle of something computed: a shard of parameters or of a gradient, or a loss."""

    number: int
    """Number, in order of creation."""
    content: Any
    """Content, known to the executor only."""


Shards = tuple[Value, ...]
"""All parameters, or their gradient: one value per server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Samples of a gradient."""

    worker: int
    """The worker."""
    index: int
    """Index of the minibatch or global batch."""
    workers: int
    """Number of workers among which the samples are divided."""
    way: Literal["own", "part"]
    """own: the worker has its own part of the examples, in its own minibatches. part: its part of
    the `index`-th global batch."""
    sharing: int = 1
    """With own: number of minibatches that make up `batch.global_batch` samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of the log."""

    at_seconds: float
    """Virtual time."""
    operation: Operation
    """The operation."""
    inputs: tuple[int, ...]
    """Numbers of the input values."""
    outputs: tuple[int, ...]
    """Numbers of the output values."""
    factors: tuple[float, ...] = ()
    """Coefficients of a combination, one for each input; the step of a record line."""
    rows: Rows | None = None
    """Samples of a gradient."""


class Executor(Protocol):
    """Executes instructions."""

    def execute(
        self, operation: Operation, inputs: Sequence[Any], factors: Sequence[float], rows: Any
    ) -> Sequence[Any]:
        """Contents of the outputs of an operation, given the contents of its inputs."""
        ...

    def value(self, content: Any) -> Any:
        """Content of a value as NumPy arrays."""
        ...


@dataclass(slots=True)
class InstructionLog:
    """Sends the instructions of an algorithm to an `Executor`, and records them."""

    executor: Executor
    """The executor."""
    now: Callable[[], float]
    """The virtual time."""
    shards: int
    """Number of servers over which parameters are sharded."""
    write: Callable[[Instruction], None] | None = None
    """Called with each executed instruction; None to record nothing."""
    _count: int = field(default=0, init=False)

    def initial(self) -> Shards:
        """The parameters before the first update."""
        return self._do("initial", (), self.shards)

    def optimizer(self, params: Value) -> Value:
        """The state of the optimizer before the first update of a shard."""
        (state,) = self._do("optimizer", (params,), 1)
        return state

    def gradient(self, params: Shards, rows: Rows) -> tuple[Shards, Value]:
        """The mean gradient of `rows`, and their [loss, accuracy]."""
        *gradient, metrics = self._do("gradient", params, len(params) + 1, rows=rows)
        return tuple(gradient), metrics

    def update(self, params: Value, state: Value, gradient: Value) -> tuple[Value, Value]:
        """A shard and the state of its optimizer after one update."""
        params, state = self._do("update", (params, state, gradient), 2)
        return params, state

    def combine(self, factors: Sequence[float], values: Sequence[Value]) -> Value:
        """Linear combination of `values`; a single value with factor 1 is returned as it is."""
        if tuple(factors) == (1.0,):
            return values[0]
        (total,) = self._do("combine", tuple(values), 1, factors=tuple(factors))
        return total

    def combine_shards(self, factors: Sequence[float], several: Sequence[Shards]) -> Shards:
        """Linear combination of gradients or parameters, shard by shard."""
        return tuple(self.combine(factors, values) for values in zip(*several, strict=True))

    def compress(self, gradient: Value, kept: Value | None) -> tuple[Value, Value]:
        """The compressed sum of a part of a gradient and its residual, and the new residual."""
        inputs = (gradient,) if kept is None else (gradient, kept)
        sent, left = self._do("compress", inputs, 2)
        return sent, left

    def adasum(self, gradients: Sequence[Value]) -> Value:
        """Adasum of gradients, whose number is a power of two."""
        (combined,) = self._do("adasum", tuple(gradients), 1)
        return combined

    def dot(self, first: Shards, second: Shards) -> float:
        """Inner product of two sharded vectors, as a number on which an algorithm may branch: the
        sum over the servers' shards."""
        parts = [self._do("dot", pair, 1)[0] for pair in zip(first, second, strict=True)]
        return sum(float(self.read(part)) for part in parts)

    def read(self, value: Value) -> Any:
        """Content of `value` as NumPy numbers."""
        return self.executor.value(value.content)

    def evaluate(self, params: Shards) -> Value:
        """The metrics of the data that are evaluated during the run."""
        (metrics,) = self._do("evaluate", params, 1)
        return metrics

    def test(self, params: Shards) -> Value:
        """The metrics of the test data, at the end of a run that has validation data."""
        (metrics,) = self._do("test", params, 1)
        return metrics

    def line(self, kind: LineKind, step: int, metrics: Sequence[Value]) -> None:
        """Make a line of the record from `metrics` after `step` gradients."""
        self._written(kind, tuple(metrics), (), (float(step),), None)

    def _do(
        self,
        operation: Operation,
        inputs: tuple[Value, ...],
        outputs: int,
        *,
        factors: tuple[float, ...] = (),
        rows: Rows | None = None,
    ) -> tuple[Value, ...]:
        contents = self.executor.execute(
            operation, [value.content for value in inputs], factors, rows
        )
        first, self._count = self._count, self._count + outputs
        values = tuple(
            Value(first + place, content)
            for place, content in zip(range(outputs), contents, strict=True)
        )
        self._written(operation, inputs, values, factors, rows)
        return values

    def _written(
        self,
        operation: Operation,
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        factors: tuple[float, ...],
        rows: Rows | None,
    ) -> None:
        if self.write is None:
            return
        self.write(
            Instruction(
                at_seconds=self.now(),
                operation=operation,
                inputs=tuple(value.number for value in inputs),
                outputs=tuple(value.number for value in outputs),
                factors=factors,
                rows=rows,
            )
        )
