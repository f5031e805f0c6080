"""Progress of an emulated run: gradients applied, and when parameters are evaluated.

Knows counts and virtual times; nothing of how gradients are computed.
"""

from collections.abc import Callable, Sequence

from scalejax.emulation.instructions import InstructionLog, LineKind, Shards, Value
from scalejax.emulation.virtual_cluster import VirtualCluster

Listener = Callable[[LineKind, float, int, tuple[Value, ...]], object]
"""Called with the virtual time, the number of gradients applied to the shared or to a worker's own
parameters, and metrics: for trained, [loss, accuracy] of each minibatch since the last time; for
evaluated and tested, those of the data evaluated during the run, and of test data at its end."""


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
        has_validation: bool = False,
    ) -> None:
        """Start at step 0.

        Args:
            cluster: has the clock and the `done` event.
            instructions: log through which evaluations are computed.
            listener: called with the metrics.
            total_steps: number of gradients of the run.
            log_every_steps: steps between two lines on the training loss.
            is_evaluated: whether the parameters are evaluated after a step.
            steps_per_epoch: gradients per epoch, for algorithms that work by epochs.
            has_validation: whether validation data are evaluated during the run, and test data only
                at its end.
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
        self._has_validation = has_validation
        self._since: list[Value] = []

    def made(self, gradients: int, metrics: Sequence[Value], params: Callable[[], Shards]) -> None:
        """Count applied gradients, and log, evaluate or end the run when due.

        Args:
            gradients: number of gradients, each of `batch.global_batch` samples.
            metrics: [loss, accuracy] of each minibatch.
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
            self._tested(params)
            self._cluster.done.succeed()

    def end(self, params: Shards) -> None:
        """End a converged run early with an evaluation of these parameters."""
        if self._cluster.done.triggered:
            return
        if self._since:
            self._trained()
        if not self._is_evaluated(self.step):
            self._evaluated(params)
        self._tested(lambda: params)
        self._cluster.done.succeed()

    def _trained(self) -> None:
        self._tell("trained", tuple(self._since))
        self._since = []

    def _evaluated(self, params: Shards) -> None:
        self._tell("evaluated", (self._instructions.evaluate(params),))

    def _tested(self, params: Callable[[], Shards]) -> None:
        if self._has_validation:
            self._tell("tested", (self._instructions.test(params()),))

    def _tell(self, kind: LineKind, metrics: tuple[Value, ...]) -> None:
        self._instructions.line(kind, self.step, metrics)
        self._listener(kind, self._cluster.now, self.step, metrics)
