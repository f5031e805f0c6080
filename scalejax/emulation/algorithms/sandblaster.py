"""Sandblaster L-BFGS: a coordinator, servers that hold all vectors, and stateless replicas.

Source: Dean et al. 2012, "Large scale distributed deep networks", NIPS 25, section 4.2 and
appendix, algorithm 7.2. Unlike there, a replica sends the gradient of each work item separately,
and servers sum them in the order of the items, so that the result is bitwise the same regardless of
which replica computed an item, and how often.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from scalejax.config.emulation import SandblasterConfig
from scalejax.emulation.algorithms.algorithm import Algorithm
from scalejax.emulation.algorithms.lbfgs import SUFFICIENT_DECREASE, History
from scalejax.emulation.instructions import InstructionLog, Rows, Shards, Value
from scalejax.emulation.parameter_servers import Copy
from scalejax.emulation.virtual_cluster import Body, after
from scalejax.emulation.work_queue import WorkQueue

_ADDED_AT_ONCE = 16
"""Work items whose gradients the servers sum in one operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Parameters with their loss and gradient."""

    params: Shards
    loss: float
    gradient: Shards
    metrics: Sequence[Value]


class Sandblaster(Algorithm[SandblasterConfig], config=SandblasterConfig):
    """The coordinator, and the replicas that compute work items for it."""

    def __post_init__(self) -> None:
        self._batch: _Batch | None = None
        self._work = self.cluster.env.event()

    def start(self) -> None:
        """Begin."""
        self.cluster.start(self._replica)
        self.cluster.env.process(self._coordinate())

    # --- the coordinator ---

    def _coordinate(self) -> Body:
        history = History(self._dot, self._combine, self.config.memory_size)
        here = yield from self._evaluated(self.servers.whole())
        self.progress.made(len(here.metrics), here.metrics, lambda: here.params)
        while True:
            direction = yield from history.direction(here.gradient)
            there = yield from self._search(here, direction)
            if there is not None:
                step = self._combine([1.0, -1.0], [there.params, here.params])
                change = self._combine([1.0, -1.0], [there.gradient, here.gradient])
                yield from history.add(step, change)
                here = there
            elif len(history):  # the history may be bad
                history.clear()
            else:  # converged to float32 precision
                self.progress.end(here.params)
                return

    def _search(self, here: _Point, direction: Shards) -> Generator[Any, Any, _Point | None]:
        """Backtracking line search: the first point with enough decrease when halving the step;
        None if there is no such point."""
        slope, length = (yield from self._dot(direction, here.gradient)), 1.0
        if not slope < 0:  # only rounding errors remain
            return None
        for _ in range(self.config.line_search_trials):
            tried = self._combine([1.0, length], [here.params, direction])
            there = yield from self._evaluated(tried)
            is_lower = there.loss <= here.loss + SUFFICIENT_DECREASE * length * slope
            kept = there if is_lower else here
            if is_lower:
                self.servers.versions = [version + 1 for version in self.servers.versions]
            self.progress.made(len(kept.metrics), kept.metrics, lambda kept=kept: kept.params)
            if is_lower:
                return there
            length /= 2
        return None

    def _evaluated(self, params: Shards) -> Generator[Any, Any, _Point]:
        """`params` with the loss and gradient, computed by the replicas over all work items."""
        self.servers.params = list(params)
        count, copies = self.progress.steps_per_epoch, self.config.backup_copies
        parts = WorkQueue(count, self.cluster.workers, backup_copies=copies)
        self._batch = batch = _Batch(parts, count, self.cluster.env.event())
        self._call()
        yield batch.done
        metrics = [batch.metrics[part] for part in range(batch.count)]
        losses = [float(self.instructions.read(each)[0]) for each in metrics]
        loss = math.fsum(losses) / batch.count if all(map(math.isfinite, losses)) else math.inf
        return _Point(params=params, loss=loss, gradient=batch.total, metrics=metrics)

    def _dot(self, first: Shards, second: Shards) -> Generator[Any, Any, float]:
        answered = self.cluster.env.event()
        self.servers.operate(answered.succeed)
        yield answered
        return self.instructions.dot(first, second)

    def _combine(self, factors: Sequence[float], vectors: Sequence[Shards]) -> Shards:
        """Linear combination on the servers. Does not wait: servers keep the order of requests."""
        self.servers.operate()
        return self.instructions.combine_shards(factors, vectors)

    def _call(self) -> None:
        """Wake idle replicas because there is work."""
        self._work, called = self.cluster.env.event(), self._work
        called.succeed()

    # --- the replicas ---

    def _replica(self, worker: int) -> Body:
        env, latency_seconds = self.cluster.env, self.cluster.durations.latency_seconds
        of, copy = None, ()
        while True:
            batch = self._batch
            part = batch.parts.take(worker) if batch else None
            if batch is None or part is None:
                yield self._work
                continue
            try:
                yield env.timeout(2 * latency_seconds)  # request and answer
                if of is not batch:
                    whole: Copy = yield self._fetched(worker)
                    of, copy = batch, whole.params
                if batch is not self._batch:  # the parameters may mix both points
                    continue
                made = batch.gradient(self.instructions, part, copy)
                yield self.cluster.computing(worker)
            except simpy.Interrupt:
                if batch.parts.give_back(part, worker) and batch is self._batch:
                    self._call()
                raise
            batch.parts.finish(part)
            self._send(worker, batch, part, *made)
            del made  # free it: there may be thousands of replicas

    def _send(
        self, worker: int, batch: "_Batch", part: int, gradient: Shards, metrics: Value
    ) -> None:
        def applied() -> None:
            after(self.cluster.env, self.cluster.durations.latency_seconds, answered)

        def answered() -> None:
            if part in batch.metrics:
                self.dropped_gradients += 1
            else:
                batch.add(self.instructions, part, gradient, metrics)

        self.servers.push(worker, gradient, lambda server, part: None, applied)


class _Batch:
    """One evaluation of the loss and its gradient."""

    def __init__(self, parts: WorkQueue, count: int, done: simpy.Event) -> None:
        self.parts = parts
        """The work queue."""
        self.count = count
        """Number of work items."""
        self.done = done
        """Event: all gradients have arrived and are summed."""
        self.metrics: dict[int, Value] = {}
        """[loss, accuracy] of each finished work item."""
        self.total: Shards = ()
        """The mean gradient, once done."""
        self._begun: dict[int, tuple[Shards, Value]] = {}
        self._gradients: dict[int, Shards] = {}
        self._added = 0

    def gradient(
        self, instructions: InstructionLog, part: int, params: Shards
    ) -> tuple[Shards, Value]:
        """Gradient and metrics of a work item; backup copies share them, so that nothing is
        computed twice here."""
        if part not in self._begun:
            rows = Rows(worker=0, index=part, workers=1, way="part")
            self._begun[part] = instructions.gradient(params, rows)
        return self._begun[part]

    def add(
        self, instructions: InstructionLog, part: int, gradient: Shards, metrics: Value
    ) -> None:
        """Add the gradient of a work item; consecutive finished items are summed in groups."""
        self._gradients[part], self.metrics[part] = gradient, metrics
        del self._begun[part]
        while self._added < self.count:
            several = range(self._added, min(self._added + _ADDED_AT_ONCE, self.count))
            if not all(each in self._gradients for each in several):
                return
            vectors = [self._gradients.pop(each) for each in several]
            factors = [1 / self.count] * len(vectors)
            if self.total:
                vectors, factors = [self.total, *vectors], [1.0, *factors]
            self.total, self._added = instructions.combine_shards(factors, vectors), several[-1] + 1
        self.done.succeed()
