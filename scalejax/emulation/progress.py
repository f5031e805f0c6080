"""Progress of an emulated run: gradients applied, and when parameters are evaluated.

Knows counts and virtual times; nothing of how gradients are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scalejax.emulation.instructions import InstructionLog, Shards, Value
from scalejax.emulation.virtual_cluster import VirtualCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """State of the run after some gradients."""

    at_seconds: float
    """Virtual time."""
    step: int
    """Gradients applied, to the shared or to a worker's own parameters."""
    metrics: tuple[Value, ...]
    """Metrics of the test data for an evaluation; otherwise [loss, accuracy] of each minibatch
    since the previous one."""


class Listener(Protocol):
    """Receives the metrics of a run."""

    def trained(self, moment: Moment) -> None:
        """Receive the training metrics since the last call."""
        ...

    def evaluated(self, moment: Moment) -> None:
        """Receive the metrics of an evaluation."""
        ...


class Progress:
    """Counts gradients, each of `batch.global_batch` samples; triggers evaluations, and ends the
    run."""

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
            cluster: has the clock, and its `done` event.
            instructions: has evaluations computed.
            listener: receives the metrics.
            total_steps: number of gradients of the run.
            log_every_steps: steps between two lines on the training loss.
            is_evaluated: whether the parameters are evaluated after a step.
            steps_per_epoch: gradients per epoch, for algorithms that work by epochs.
        """
        self.step = 0
        """Gradients applied so far, to the shared or to a worker's own parameters."""
        self.steps_per_epoch = steps_per_epoch
        """Gradients per epoch."""
        self._cluster, self._instructions, self._listener = cluster, instructions, listener
        self.total_steps = total_steps
        """Gradients of the run."""
        self._log_every = log_every_steps
        self._is_evaluated = is_evaluated
        self._since: list[Value] = []

    def made(self, gradients: int, metrics: Sequence[Value], params: Callable[[], Shards]) -> None:
        """Count applied gradients, and log, evaluate or end the run when due.

        Args:
            gradients: number of gradients, each of `batch.global_batch` samples.
            metrics: [loss, accuracy] of each of their minibatches.
            params: returns the current parameters.
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
        """End a converged run early with an evaluation of these parameters."""
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
