"""Hogwild: gradients of parameters that change while they are read."""

import numpy as np
import pytest
from emulate_cases import durations
from least_squares_cases import FEATURES, LeastSquares, emulated

from scalejax.config.emulation import (
    DownpourConfig,
    EmulationConfig,
    HogwildConfig,
    StragglersConfig,
)
from scalejax.emulation.virtual_cluster import random_stream

BLOCKS = 3
BLOCK_BYTES = FEATURES // BLOCKS * 8


def config(workers: int, blocks: int = BLOCKS, **stragglers) -> EmulationConfig:
    """So many workers on a memory of so many blocks."""
    return EmulationConfig(
        algorithm=HogwildConfig(),
        workers=workers,
        server_shards=blocks,
        stragglers=StragglersConfig(**stragglers),
    )


def test_one_worker_is_sgd():
    """However slow the memory, nobody else writes."""
    problem = LeastSquares(shards=BLOCKS, momentum=0.9, learning_rate=0.02)

    result = emulated(config(1), 20, problem, takes=durations(worker_bytes_per_second=100.0))

    params, buffer = problem.initial, 0.0
    for step in range(20):
        buffer = 0.9 * buffer + problem.gradient(params, 0, step)
        params = params - 0.02 * buffer
    np.testing.assert_allclose(result.params, params, rtol=1e-12)
    assert result.cluster.now == pytest.approx(20 * (1 + 2 * FEATURES * 8 / 100))


def by_hand(problem: LeastSquares, begins: list[float], steps: int, block_seconds: float):
    """Every access of every worker, sorted by time: read each block, compute 1 s, write each."""
    cycle = 2 * BLOCKS * block_seconds + 1
    accesses = []
    for worker, begin in enumerate(begins):
        draws = random_stream(0, "blocks", worker)
        for step in range(steps):
            for kind, at in ("read", 0), ("write", BLOCKS * block_seconds + 1):
                at += begin + step * cycle
                for place, block in enumerate(draws.permutation(BLOCKS).tolist()):
                    accesses.append((at + place * block_seconds, kind, worker, step, block))
    memory = problem.cut(problem.initial)
    seen = [problem.cut(problem.initial) for _ in begins]
    for _, kind, worker, step, block in sorted(accesses):
        if kind == "read":
            seen[worker][block] = memory[block]
        else:
            gradient = problem.gradient(np.concatenate(seen[worker]), worker, step)
            memory[block] = memory[block] - problem.learning_rate * problem.cut(gradient)[block]
    return np.concatenate(memory)


def test_reads_and_writes_are_those_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch):
    """Two workers half a read apart, so that each reads blocks that the other has half written."""
    from scalejax.emulation.algorithms import hogwild

    life, begins, block_seconds = hogwild.Hogwild._worker, [0.0, 1.31], 0.25

    def later(self: hogwild.Hogwild, worker: int):
        if begins[worker]:
            yield self.cluster.env.timeout(begins[worker])
        yield from life(self, worker)

    monkeypatch.setattr(hogwild.Hogwild, "_worker", later)
    problem = LeastSquares(shards=BLOCKS, learning_rate=0.02)
    takes = durations(worker_bytes_per_second=BLOCK_BYTES / block_seconds)

    result = emulated(config(2), 2 * 15, problem, takes=takes)

    expected = by_hand(problem, begins, 15, block_seconds)
    np.testing.assert_allclose(result.params, expected, rtol=1e-12)
    whole = emulated(config(2, blocks=1), 2 * 15, LeastSquares(learning_rate=0.02), takes=takes)
    assert np.abs(whole.params - expected).max() > 1e-3


@pytest.mark.parametrize("workers", [4, 16])
def test_staleness_is_that_of_equal_workers(workers: int):
    """Each block meets the writes of all others, but for those between its writing and its next
    reading: a pass over the memory, of the two of them and the gradient that a step takes."""
    sweep = 0.25
    takes = durations(worker_bytes_per_second=FEATURES * 8 / sweep, gradient_deviation_seconds=0.3)

    result = emulated(config(workers, distribution="lognormal"), 300 * workers, takes=takes)

    expected = (workers - 1) * (1 - sweep / (2 * sweep + 1))
    assert result.mean_staleness == pytest.approx(expected, rel=0.02)


def test_instant_memory_is_that_of_downpour():
    """Reads and writes that take no time are whole."""
    takes = durations(gradient_deviation_seconds=0.3)
    downpour = EmulationConfig(
        algorithm=DownpourConfig(),
        workers=5,
        server_shards=BLOCKS,
        stragglers=StragglersConfig(distribution="lognormal"),
    )

    memory = emulated(config(5, distribution="lognormal"), 60, takes=takes)

    np.testing.assert_array_equal(memory.params, emulated(downpour, 60, takes=takes).params)


def test_workers_of_one_host_share_its_memory():
    """Eight that read and write 2 s each on one bus: 8 x 4 s a step, however they compute."""
    takes = durations(worker_bytes_per_second=FEATURES * 8 / 2, workers_per_host=8)

    result = emulated(config(8), 160, takes=takes)

    assert 160 / result.cluster.now == pytest.approx(1 / 4, rel=0.02)
