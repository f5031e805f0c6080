"""What an emulated run computes, instruction by instruction, in the order of virtual time.

An algorithm never sees a number: it passes `Value`s on, and whatever is computed of them goes
through here, so that the arithmetic can be written down, and done again from what was written.
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
    "trained",
    "evaluated",
    "fp16",
    "two_bit",
    "top_k",
    "adasum",
]
"""initial: -> shards of the parameters. optimizer: shard -> its state. gradient: shards -> shards,
loss, accuracy. update: shard, state, gradient -> shard, state. combine: values -> the sum of them,
each times its number. dot: two shards -> their inner product. evaluate: shards -> metrics of the
test data. trained, evaluated: metrics, and as the factor a step -> nothing; a line of the record is
of these. fp16, two_bit, top_k: a part of a gradient, and what was left of it before -> what is sent
of both, and what is left. adasum: gradients -> one."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Something computed: a shard of parameters, or of a gradient, a loss."""

    number: int
    """In the order in which they were made."""
    content: Any
    """What does the arithmetic knows what it is."""


Shards = tuple[Value, ...]
"""All parameters, or a gradient of all, a value for each server that holds a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Samples that a gradient is of."""

    worker: int
    """Whose they are."""
    index: int
    """How many such minibatches come before."""
    workers: int
    """Among how many the samples are divided."""
    way: Literal["own", "part"]
    """own: the worker has a part of the examples, and takes it in minibatches of its own. part: its
    part of the `index`-th global batch."""
    sharing: int = 1
    """Of its own: as many minibatches have `batch.global_batch` samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of the tape."""

    at_seconds: float
    """Virtual time."""
    operation: Operation
    """What is computed."""
    inputs: tuple[int, ...]
    """Numbers of the values that it is of."""
    outputs: tuple[int, ...]
    """Numbers of the values that come of it."""
    factors: tuple[float, ...] = ()
    """Of a combination, one for each input; of a line, its step."""
    rows: Rows | None = None
    """Of a gradient."""


class Arithmetic(Protocol):
    """Does what instructions say."""

    def execute(
        self, operation: Operation, inputs: Sequence[Any], factors: Sequence[float], rows: Any
    ) -> Sequence[Any]:
        """The contents of the outputs, of those of the inputs."""
        ...

    def value(self, content: Any) -> Any:
        """What there is of a value, as NumPy arrays."""
        ...


@dataclass(slots=True)
class InstructionLog:
    """Has an `Arithmetic` do the instructions of an algorithm, and keeps them."""

    arithmetic: Arithmetic
    """Does them."""
    now: Callable[[], float]
    """The virtual time."""
    shards: int
    """Servers over which parameters are divided."""
    write: Callable[[Instruction], None] | None = None
    """Takes each instruction when it is done; None where nobody wants them."""
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
        """The sum of `values`, each times its factor; of one whose factor is 1, itself."""
        if tuple(factors) == (1.0,):
            return values[0]
        (total,) = self._do("combine", tuple(values), 1, factors=tuple(factors))
        return total

    def combine_shards(self, factors: Sequence[float], several: Sequence[Shards]) -> Shards:
        """Likewise of all shards."""
        return tuple(self.combine(factors, values) for values in zip(*several, strict=True))

    def compress(
        self, method: Operation, number: float, gradient: Value, kept: Value | None
    ) -> tuple[Value, Value]:
        """What is sent of a part of a gradient and what was kept back of it, and what is left."""
        inputs = (gradient,) if kept is None else (gradient, kept)
        sent, left = self._do(method, inputs, 2, factors=(number,))
        return sent, left

    def adasum(self, gradients: Sequence[Value]) -> Value:
        """One gradient of several, whose number is a power of two."""
        (combined,) = self._do("adasum", tuple(gradients), 1)
        return combined

    def dot(self, first: Shards, second: Shards) -> float:
        """The inner product of two vectors in parts, which whoever asks may act upon: the sum of
        what each server says of its own part."""
        parts = [self._do("dot", pair, 1)[0] for pair in zip(first, second, strict=True)]
        return sum(float(self.read(part)) for part in parts)

    def read(self, value: Value) -> Any:
        """The number or numbers that `value` is, as NumPy has them."""
        return self.arithmetic.value(value.content)

    def evaluate(self, params: Shards) -> Value:
        """The metrics of the test data."""
        (metrics,) = self._do("evaluate", params, 1)
        return metrics

    def line(
        self, kind: Literal["trained", "evaluated"], step: int, metrics: Sequence[Value]
    ) -> None:
        """A line of the record is made of `metrics` after so many gradients."""
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
        contents = self.arithmetic.execute(
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
