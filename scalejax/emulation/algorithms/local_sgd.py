"""Local SGD: workers that train independently for some steps, and then average parameters.

Sources: Stich 2018, arXiv 1805.09767, algorithm 1; synchronous steps first, Lin et al. 2018,
arXiv 1808.07217, section 3; an outer step with Nesterov momentum towards the average, Douillard et
al. 2023 (DiLoCo), arXiv 2311.08105, algorithm 1; one average at the end, Zinkevich et al. 2010.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from scalejax.config.emulation import EmulatedLocalSgdConfig
from scalejax.emulation.algorithms.algorithm import Algorithm
from scalejax.emulation.barrier import Barrier
from scalejax.emulation.instructions import InstructionLog, Rows, Shards, Value
from scalejax.emulation.virtual_cluster import Body


class LocalSgd(Algorithm[EmulatedLocalSgdConfig], config=EmulatedLocalSgdConfig):
    """Workers that each hold all parameters and the state of an optimizer, in rounds."""

    def __post_init__(self) -> None:
        self._states = [tuple(self.servers.states)] * self.cluster.workers
        self._velocity: list[Value | None] = [None for _ in self.servers.params]
        seconds = self.cluster.durations.collective_seconds
        self._barrier = Barrier[_Local](self.cluster, lambda: seconds, self._synchronised)
        self._step = 0

    @property
    def _is_local(self) -> bool:
        return self._step >= self.config.begin_step

    @property
    def _round_steps(self) -> int:
        """Steps until the next all-reduce."""
        left = self.progress.total_steps - self._step
        every = left if self.config.every_steps is None else self.config.every_steps
        return min(every, left) if self._is_local else 1

    def _worker(self, worker: int) -> Body:
        while True:
            local = yield from self._round(worker)
            yield from self._barrier.wait(worker, local)

    def _round(self, worker: int) -> Generator[Any, Any, "_Local"]:
        """The steps of a round, from the common parameters; a worker that fails repeats them."""
        instructions, cluster = self.instructions, self.cluster
        local = _Local(params=self.servers.whole(), states=self._states[worker])
        for step in range(self._step, self._step + self._round_steps):
            rows = Rows(worker=worker, index=step, workers=cluster.workers, way="part")
            local.gradient, metrics = instructions.gradient(local.params, rows)
            local.metrics.append(metrics)
            yield cluster.computing(worker)
            if self._is_local:
                local.update(instructions, local.gradient)
        return local

    def _synchronised(self, locals_: list["_Local"]) -> None:
        if self._is_local:
            self._average(locals_)
        else:
            self._update_together(locals_)
        steps, self._step = self._round_steps, self._step + self._round_steps
        self._states = [local.states for local in locals_]
        metrics = [each for local in locals_ for each in local.metrics]
        self.progress.made(steps, metrics, self.servers.whole)

    def _update_together(self, locals_: list["_Local"]) -> None:
        """A step of synchronous SGD, after which optimizer states are equal too."""
        together = locals_[0]
        together.update(self.instructions, self._mean([local.gradient for local in locals_]))
        for server, params in enumerate(together.params):
            self.servers.put(server, params)
        for local in locals_:
            local.states = together.states

    def _average(self, locals_: list["_Local"]) -> None:
        """An outer step: with D the common start minus the average,
        v = m v + D, and the parameters change by - r (D + m v)."""
        rate, momentum = self.config.outer_learning_rate, self.config.outer_momentum
        for server, mean in enumerate(self._mean([local.params for local in locals_])):
            begin, velocity = self.servers.params[server], self._velocity[server]
            pull = rate * (1 + momentum)
            factors, values = [1 - pull, pull], [begin, mean]
            moved, parts = [1.0, -1.0], [begin, mean]
            if velocity is not None:
                factors, values = [*factors, -rate * momentum**2], [*values, velocity]
                moved, parts = [*moved, momentum], [*parts, velocity]
            if momentum:
                self._velocity[server] = self.instructions.combine(moved, parts)
            self.servers.put(server, self.instructions.combine(factors, values))

    def _mean(self, several: list[Shards]) -> Shards:
        return self.instructions.combine_shards([1 / len(several)] * len(several), several)


@dataclass(slots=True, kw_only=True)
class _Local:
    """Parameters and optimizer state of a worker since the last all-reduce."""

    params: Shards
    states: tuple[Value, ...]
    metrics: list[Value] = field(default_factory=list)
    gradient: Shards = ()

    def update(self, instructions: InstructionLog, gradient: Shards) -> None:
        """Apply a gradient to the worker's own parameters."""
        made = [
            instructions.update(*parts)
            for parts in zip(self.params, self.states, gradient, strict=True)
        ]
        self.params, self.states = (tuple(each) for each in zip(*made, strict=True))
