"""Emulations of a problem small enough to be done by hand: least squares in NumPy, no JAX.

The algorithms are those of scalejax; their instructions are executed here, so that a test can
compare the results with a plain loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from emulate_cases import durations

from scalejax.config.emulation import EmulationConfig
from scalejax.emulation.algorithms import algorithm_of
from scalejax.emulation.instructions import InstructionLog, Rows, Value
from scalejax.emulation.parameter_servers import Servers
from scalejax.emulation.progress import Progress
from scalejax.emulation.virtual_cluster import Durations, VirtualCluster

FEATURES, BATCH = 12, 6


@dataclass(kw_only=True)
class LeastSquares:
    """Rows of random numbers, whose targets are a sum of them and noise; SGD."""

    shards: int = 1
    """Parts of the parameters."""
    learning_rate: float = 0.05
    """Of every update."""
    momentum: float = 0.0
    """Part of the buffer that is kept."""

    @property
    def initial(self) -> np.ndarray:
        """The parameters before the first update."""
        return np.linspace(-1, 1, FEATURES)

    def samples(self, seed: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets that depend on `seed` alone."""
        generator = np.random.default_rng(seed)
        inputs = generator.normal(size=(BATCH, FEATURES))
        return inputs, inputs @ np.arange(FEATURES) + generator.normal(size=BATCH)

    def gradient(self, params: np.ndarray, worker: int, index: int, part: slice | None = None):
        """The mean gradient of a minibatch of `worker`, or of a `part` of a global batch."""
        inputs, targets = self.samples([worker, index] if part is None else [index])
        if part is not None:
            inputs, targets = inputs[part], targets[part]
        return inputs.T @ (inputs @ params - targets) / len(targets)

    def cut(self, whole: np.ndarray) -> list[np.ndarray]:
        """The parts of all parameters."""
        return np.array_split(whole, self.shards)

    def value(self, content: Any) -> Any:
        """What there is of a value."""
        return content

    def execute(
        self, operation: str, inputs: Sequence[Any], factors: Sequence[float], rows: Rows | None
    ) -> Sequence[Any]:
        """Execute one instruction of the log."""
        match operation:
            case "initial":
                return self.cut(self.initial)
            case "optimizer":
                return [np.zeros_like(inputs[0])]
            case "gradient":
                assert rows is not None
                size = BATCH // rows.workers
                part = slice(rows.worker * size, (rows.worker + 1) * size)
                params = np.concatenate(inputs)
                own = rows.way == "own"
                whole = self.gradient(params, rows.worker, rows.index, None if own else part)
                return [*self.cut(whole), 0.0]
            case "update":
                params, buffer, gradient = inputs
                buffer = self.momentum * buffer + gradient
                return [params - self.learning_rate * buffer, buffer]
            case "combine":
                return [sum(f * value for f, value in zip(factors, inputs, strict=True))]
            case "evaluate":
                return [np.concatenate(inputs)]
            case "compress":
                whole = sum(inputs)
                sent = np.trunc(np.clip(whole / 3, -1, 1)) * 3.0  # two bits, with that threshold
                return [sent, whole - sent]
            case "adasum":
                return [adasum_by_hand(*inputs)]
        raise AssertionError(operation)


def adasum_by_hand(*several: np.ndarray) -> np.ndarray:
    """The formula of Maleki et al. 2020 on halves of `several`, each combined before."""
    if len(several) == 1:
        return several[0]
    half = len(several) // 2
    left, right = adasum_by_hand(*several[:half]), adasum_by_hand(*several[half:])
    product = left @ right
    return left * (1 - product / (2 * left @ left)) + right * (1 - product / (2 * right @ right))


@dataclass(kw_only=True)
class Emulated:
    """What came of an emulation."""

    cluster: VirtualCluster
    """Its clock, and its workers."""
    servers: Servers
    """What they hold at the end."""
    training: Any
    """The algorithm."""
    evaluations: list[tuple[Value, ...]] = field(default_factory=list)
    """What was evaluated."""

    @property
    def params(self) -> np.ndarray:
        """All parameters after the last step of the run."""
        (params,) = self.evaluations[-1]
        return params.content

    @property
    def mean_staleness(self) -> float:
        """Of all gradients."""
        ages = self.servers.staleness
        return sum(age * count for age, count in ages.items()) / sum(ages.values())

    def told(self, kind: str, at_seconds: float, step: int, metrics: tuple[Value, ...]) -> None:
        """Keep what was evaluated; nobody asks for training losses."""
        if kind == "evaluated":
            self.evaluations.append(metrics)


def emulated(
    config: EmulationConfig,
    steps: int,
    problem: LeastSquares | None = None,
    *,
    takes: Durations | None = None,
    is_evaluated: Callable[[int], bool] | None = None,
    seed: int = 0,
) -> Emulated:
    """`steps` gradients of `problem`, as `config` says; evaluated are at least the last."""
    problem = problem or LeastSquares(shards=config.server_shards)
    cluster = VirtualCluster(config, takes or durations(), seed=seed)
    instructions = InstructionLog(problem, lambda: cluster.now, config.server_shards)
    sizes = [part.nbytes for part in problem.cut(problem.initial)]
    servers = Servers(cluster, instructions, sizes, config.failures)
    if config.compression is not None:
        servers.compress(config.compression, sizes)
    result = Emulated(cluster=cluster, servers=servers, training=None)
    progress = Progress(
        cluster,
        instructions,
        result.told,
        total_steps=steps,
        log_every_steps=steps,
        is_evaluated=is_evaluated or (lambda step: step == steps),
    )
    result.training = algorithm_of(config.core, cluster, instructions, servers, progress)
    result.training.start()
    cluster.run()
    return result
