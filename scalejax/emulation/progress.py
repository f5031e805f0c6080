"""How far an emulated run is: gradients that have gone into its parameters, and its evaluations.

Knows counts and virtual times; nothing of how gradients come about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scalejax.emulation.instructions import InstructionLog, Shards, Value
from scalejax.emulation.virtual_cluster import VirtualCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The run after some gradients."""

    at_seconds: float
    """Virtual time."""
    step: int
    """Gradients that were applied, to the parameters or a worker's own."""
    metrics: tuple[Value, ...]
    """Of an evaluation, those of the test data; else of the minibatches since the moment before,
    [loss, accuracy] each."""


class Listener(Protocol):
    """Is told how a run goes."""

    def trained(self, moment: Moment) -> None:
        """It is time for a line on the training loss."""
        ...

    def evaluated(self, moment: Moment) -> None:
        """The parameters were evaluated."""
        ...


class Progress:
    """Counts gradients, each of `batch.global_batch` samples; has parameters evaluated when it is
    time, and ends the run."""

    def __init__(
        self,
        cluster: VirtualCluster,
        instructions: InstructionLog,
        listener: Listener,
        *,
        total_steps: int,
        log_every_steps: int,
        is_evaluated: Callable[[int], bool],
        steps_per_epoch: int = 1,
    ) -> None:
        """At step 0.

        Args:
            world: has the clock, and is done when the run is.
            tape: evaluates.
            listener: is told.
            total_steps: gradients of the run.
            log_every_steps: from one line on the training loss to the next.
            is_evaluated: whether the parameters are evaluated after so many.
            steps_per_epoch: gradients of one pass over the examples, for who goes by passes.
        """
        self.step = 0
        """Gradients that were applied so far, to the parameters or a worker's own."""
        self.steps_per_epoch = steps_per_epoch
        """Gradients of one pass over the examples."""
        self._cluster, self._instructions, self._listener = cluster, instructions, listener
        self.total_steps = total_steps
        """Of the run."""
        self._log_every = log_every_steps
        self._is_evaluated = is_evaluated
        self._since: list[Value] = []

    def made(self, gradients: int, metrics: Sequence[Value], params: Callable[[], Shards]) -> None:
        """So many more gradients were applied, to the parameters or a worker's own.

        Args:
            gradients: how many, each of `batch.global_batch` samples.
            metrics: [loss, accuracy] of each of their minibatches.
            params: the parameters as they are now.
        """
        if self._cluster.done.triggered:
            return
        steps = range(self.step + 1, min(self.step + gradients, self.total_steps) + 1)
        self.step = steps[-1]
        self._since += metrics
        is_last = self.step == self.total_steps
        if is_last or any(step % self._log_every == 0 for step in steps):
            self._trained()
        if any(map(self._is_evaluated, steps)):
            self._evaluated(params())
        if is_last:
            self._cluster.done.succeed()

    def end(self, params: Shards) -> None:
        """The run has nothing left to gain: it ends with these parameters, evaluated."""
        if self._cluster.done.triggered:
            return
        if self._since:
            self._trained()
        if not self._is_evaluated(self.step):
            self._evaluated(params)
        self._cluster.done.succeed()

    def _trained(self) -> None:
        self._instructions.line("trained", self.step, self._since)
        self._listener.trained(self._moment(tuple(self._since)))
        self._since = []

    def _evaluated(self, params: Shards) -> None:
        metrics = self._instructions.evaluate(params)
        self._instructions.line("evaluated", self.step, [metrics])
        self._listener.evaluated(self._moment((metrics,)))

    def _moment(self, metrics: tuple[Value, ...]) -> Moment:
        return Moment(at_seconds=self._cluster.now, step=self.step, metrics=metrics)
