"""The modes of tf_cnn_benchmarks and the types of MXNet's kvstore: which train as one device, what
the others do, and what their communication costs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulate_cases import config, durations
from least_squares_cases import BATCH, LeastSquares, emulated

from scalejax.config.all_reduce_spec import parse_all_reduce_spec
from scalejax.config.emulation import (
    AlgorithmConfig,
    EmulationConfig,
    HogwildConfig,
    KvStoreConfig,
    TimingConfig,
    VariableUpdateConfig,
)
from scalejax.config.run import resolve
from scalejax.core.errors import ConfigError
from scalejax.emulation.collective_times import reduction_seconds, with_reduction
from scalejax.emulation.durations import durations_of
from scalejax.emulation.run import emulate_run
from scalejax.hardware import CollectiveMethod, load_cluster
from scalejax.simulator.collectives import Route

WORKERS, STEPS = 3, 12
PROBLEM = LeastSquares(momentum=0.9, learning_rate=0.02)


def variable_update(mode: str, **flags: Any) -> VariableUpdateConfig:
    """A mode of tf_cnn_benchmarks."""
    return VariableUpdateConfig(variable_update=mode, **flags)  # type: ignore[arg-type]


def kvstore(kind: str) -> KvStoreConfig:
    """A type of MXNet's."""
    return KvStoreConfig(type=kind)  # type: ignore[arg-type]


def trained(algorithm: AlgorithmConfig, steps: int = STEPS, **takes: float):
    """Least squares by three workers."""
    settings = EmulationConfig(algorithm=algorithm, workers=WORKERS)
    return emulated(settings, steps, PROBLEM, takes=durations(**takes))


def mean_gradient(params: np.ndarray, step: int) -> np.ndarray:
    """Of a global batch."""
    return PROBLEM.gradient(params, 0, step, slice(None))


@pytest.mark.parametrize(
    "algorithm",
    [
        variable_update("parameter_server"),
        variable_update("replicated"),
        variable_update("replicated", all_reduce_spec="nccl"),
        variable_update("distributed_replicated"),
        variable_update("distributed_all_reduce", all_reduce_spec="pscpu:32k:nccl/xring"),
        variable_update("collective_all_reduce", all_reduce_spec="collective#2"),
        variable_update("collective_all_reduce"),
        variable_update("horovod"),
        *map(kvstore, ("local", "device", "nccl", "dist_sync", "dist_device_sync")),
    ],
    ids=lambda each: (
        getattr(each, "type", None) or f"{each.variable_update}-{each.all_reduce_spec}"
    ),
)
def test_synchronous_modes_train_as_one_device(algorithm: AlgorithmConfig):
    """Whatever passes where: the mean gradient of the global batch, one update a step."""
    result = trained(algorithm, latency_seconds=0.1)

    params, buffer = PROBLEM.initial, 0.0
    for step in range(STEPS):
        buffer = 0.9 * buffer + mean_gradient(params, step)
        params = params - 0.02 * buffer
    np.testing.assert_allclose(result.params, params, rtol=1e-10)


def test_relaxed_consistency_applies_the_gradients_of_the_step_before():
    """The first update is of zeros; the all-reduce overlaps with the gradient."""
    mode = variable_update("replicated", variable_consistency="relaxed")

    result = trained(mode, collective_seconds=0.7)

    params, buffer, before = PROBLEM.initial, 0.0, np.zeros(12)
    for step in range(STEPS):
        gradient = mean_gradient(params, step)
        buffer = 0.9 * buffer + before
        params, before = params - 0.02 * buffer, gradient
    np.testing.assert_allclose(result.params, params, rtol=1e-10)
    assert result.cluster.now == pytest.approx(STEPS)
    assert trained(mode, collective_seconds=1.5).cluster.now == pytest.approx(1.5 * STEPS)


def test_staged_variables_are_one_update_old():
    """Gradients by what there was a step ago; what is read early is not waited for."""
    result = trained(variable_update("parameter_server", staged_vars=True), collective_seconds=0.6)

    params, read, buffer = PROBLEM.initial, PROBLEM.initial, 0.0
    for step in range(STEPS):
        buffer = 0.9 * buffer + mean_gradient(read, step)
        params, read = params - 0.02 * buffer, params
    np.testing.assert_allclose(result.params, params, rtol=1e-10)
    assert result.cluster.now == pytest.approx(1.3 * STEPS)


def test_independent_workers_end_with_the_copy_of_the_first():
    """Its part of every batch, and no communication at any cost."""
    result = trained(variable_update("independent"), collective_seconds=5.0)

    params, buffer = PROBLEM.initial, 0.0
    for step in range(STEPS):
        part = slice(0, BATCH // WORKERS)
        buffer = 0.9 * buffer + PROBLEM.gradient(params, 0, step, part)
        params = params - 0.02 * buffer
    np.testing.assert_allclose(result.params, params, rtol=1e-10)
    assert result.cluster.now == STEPS


@pytest.mark.parametrize(
    "algorithm",
    [kvstore("dist_async"), variable_update("parameter_server", cross_replica_sync=False)],
    ids=["dist_async", "parameter_server"],
)
def test_workers_that_do_not_wait_update_one_after_the_other(algorithm: AlgorithmConfig):
    """At each push, of the parameters that were there when its worker's last update was made."""
    result = trained(algorithm)

    params, buffer, read = PROBLEM.initial, 0.0, [PROBLEM.initial] * WORKERS
    for update in range(STEPS):
        index, worker = divmod(update, WORKERS)
        buffer = 0.9 * buffer + PROBLEM.gradient(read[worker], worker, index)
        params = read[worker] = params - 0.02 * buffer
    np.testing.assert_allclose(result.params, params, rtol=1e-10)


Links = tuple[Route, CollectiveMethod]


def links(workers: int, per_host: int = 1, latency: float = 0.0) -> Links:
    """A million bytes a second between hosts, ten within them; so are messages."""
    hosts = -(-workers // per_host)
    route = Route(
        members=workers,
        members_per_node=min(workers, per_host),
        nodes=hosts,
        link_bytes_per_second=1e7,
        tree_link_bytes_per_second=1e7,
        network_bytes_per_second=1e6 if hosts > 1 else None,
        host_bytes_per_second=1e7,
    )
    method = CollectiveMethod(
        algorithm="ring",
        protocol="simple",
        bandwidth_fraction=1.0,
        base_seconds=0.0,
        link_hop_seconds=latency / 10,
        network_hop_seconds=latency,
    )
    return route, method


@pytest.mark.parametrize(
    ("spec", "joined", "seconds"),
    [
        ("xring", links(8), 2 * 7 / 8 * 4),  # 2 P (N - 1) / N
        ("collective", links(8, latency=0.1), 2 * 7 / 8 * 4 + 14 * 4 * 0.1),
        # Of the messages around a ring of two hosts, one each way leaves either host.
        ("xring", links(16, 8, 0.1), 2 * 15 / 16 * 4 + 2 * 4 * (0.1 + 14 * 0.01)),
        ("pscpu#8", links(8), 2 * 4 * 7 / 8),  # 2 P (N - 1) / S: its own does not travel
        ("psgpu#2", links(8), 2 * 4 * 7 / 8),  # 4 tensors to 4 pairs
        ("pscpu", links(8, latency=0.1), 2 * (0.1 + 7 * 1.0)),  # 4 tensors to 4 servers of 8
        ("pscpu#2", links(16, per_host=8), 2 * 8 * 2),  # half of 4 MB from 8 workers elsewhere
        ("psgpu#16", links(16, per_host=8), 2 * 8 * 2),  # as before, over the same links
        ("psgpu", links(16, per_host=8), 2 * 8 * 4),  # 4 tensors to 4 devices of the first host
        ("pscpu#2", links(12, per_host=8), 2 * 8 * 2),  # the last host has 4: 8 elsewhere
        ("psgpu", links(8, 8, 0.1), 2 * (0.01 + 7 * 0.1)),  # 4 tensors to 4 devices
        ("pscpu", links(8, 8, 0.1), 2 * (4 * 0.01 + 8 * 0.4)),  # all to one memory
        ("nccl", links(8, per_host=8), 2 * 7 / 8 * 0.4),
        ("nccl/xring", links(8, per_host=2), 2 / 2 * 0.4 + 2 * 3 / 4 * 4),
        ("nccl/rechd", links(8, 2, 0.1), 2 / 2 * 0.4 + 2 * 0.01 + 2 * (0.1 * 4 * 2 + 3 / 4 * 4)),
        ("nccl/pscpu#4", links(8, per_host=2), 2 / 2 * 0.4 + 2 * 4 * 3 / 4),
        ("pscpu/pscpu#4", links(8, per_host=2), 2 * 2 * 0.4 + 2 * 4 * 3 / 4),
        ("xring", links(1), 0.0),
    ],
)
def test_reductions_cost_what_the_formulas_say(spec: str, joined: Links, seconds: float):
    """Four tensors of 1,000,000 bytes; by hand."""
    found = reduction_seconds(parse_all_reduce_spec(spec), [250_000] * 4, *joined)

    assert found == pytest.approx(seconds)


def test_ranges_take_the_tensors_of_their_sizes():
    """A tensor of just the limit still belongs to the range below it."""
    sizes = [1024, 1025, 100_000]

    both = reduction_seconds(parse_all_reduce_spec("pscpu#4:1k:xring"), sizes, *links(4))

    small = reduction_seconds(parse_all_reduce_spec("pscpu#4"), sizes[:1], *links(4))
    large = reduction_seconds(parse_all_reduce_spec("xring"), sizes[1:], *links(4))
    assert both == pytest.approx(small + large)


def test_modes_differ_in_time_alone():
    """Real gradients: the same losses line by line, at the cost of each all-reduce."""
    run = resolve(config(train={"epochs": 1, "log_every_steps": 4}), 1)
    times = durations(worker_bytes_per_second=1e4, server_bytes_per_second=1e4)
    together = replace(times, workers_per_host=4, link_bytes_per_second=1e4)
    ways = {variable_update("horovod"): times, kvstore("device"): together}
    ways[kvstore("dist_sync")] = times
    results, losses = [], []
    for way, takes in ways.items():
        lines = []
        settings = EmulationConfig(algorithm=way, workers=4)
        results.append(emulate_run(run, settings, takes, write=lines.append))
        losses.append([line.loss if line.kind == "train" else line.test_loss for line in lines])

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    payload, largest = 4 * (16 * 8 + 8 + 8 * 4 + 4), 4 * 16 * 8
    ring = 2 * 3 / 4 * payload / 1e4
    device = 2 * 3 * largest / 1e4  # four tensors on four devices
    # All ask at once: the last copy is sent fourth, and comes in. The first to push, which had its
    # copy two payloads after the start, is at the server after a third; the last by three more.
    served = (4 + 1 + 1 + 1) * payload / 1e4
    expected = [16 * (1 + each) for each in (ring, device, served)]
    assert [result.virtual_seconds for result in results] == pytest.approx(expected)


@pytest.mark.slow
def test_collectives_in_a_node_use_its_links():
    """8 A100 and 160 tensors of 1 MB: NCCL in one group at the rate of the links, then devices
    that each take 20 tensors one by one, then the memory of the host that takes all of them, at the
    rate of 8 links."""
    cluster = load_cluster("dgx-a100")
    run = resolve(config(), 1)
    seconds = []
    for kind in ("nccl", "device", "local"):
        settings = EmulationConfig(algorithm=kvstore(kind), workers=8)
        found = with_reduction(durations_of(run, settings, cluster), settings, [250_000] * 160)
        seconds.append(found.collective_seconds)

    rate, hop = 0.848 * 300e9, 1.34e-6
    assert seconds == pytest.approx(
        [
            14 * (hop + 160e6 / 8 / rate),
            2 * (20 * hop + 7 * 20e6 / rate),
            2 * (160 * hop + 8 * 160e6 / (8 * rate)),
        ]
    )
    assert seconds == sorted(seconds)


def test_a_collective_in_a_host_needs_its_rate():
    """From somebody."""
    run, timing = resolve(config(), 1), TimingConfig(gradient_seconds=1.0, workers_per_host=4)
    settings = EmulationConfig(algorithm=variable_update("horovod"), workers=4, timing=timing)

    with pytest.raises(ConfigError, match=r"host_bytes_per_second is missing: .* or --cluster"):
        durations_of(run, settings, None)
    given = replace(settings.algorithm, host_bytes_per_second=1e9)  # type: ignore[type-var]
    found = durations_of(run, replace(settings, algorithm=given), None)
    assert with_reduction(found, settings, [10]).gradient_seconds == 1.0


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (kvstore("local"), r"type='local' is refused: .* take \"dist_sync\", or at most 8 workers"),
        (kvstore("device"), r"take \"dist_device_sync\""),
        (kvstore("nccl"), r"take \"dist_device_sync\""),
        (variable_update("replicated"), r"take \"distributed_all_reduce\" or \"horovod\""),
        (HogwildConfig(), r"name='hogwild' is refused: .* take \"downpour\""),
    ],
)
def test_algorithms_of_one_machine_are_refused_on_two(algorithm: AlgorithmConfig, words: str):
    """Before anything is compiled; without a cluster all workers are on one."""
    run = resolve(config(), 1)
    timing = TimingConfig(gradient_seconds=1.0, collective_seconds=0.5)
    alone = EmulationConfig(algorithm=algorithm, workers=16, timing=timing)

    with pytest.raises(ConfigError, match=words):
        durations_of(run, replace(alone, timing=replace(timing, workers_per_host=8)), None)
    with pytest.raises(ConfigError, match=words):
        durations_of(run, alone, load_cluster("dgx-a100"))
    assert durations_of(run, alone, None).workers_per_host == 16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"variable_update": "horovod", "staged_vars": True}, "staged_vars=True is refused"),
        (
            {"variable_update": "horovod", "variable_consistency": "relaxed"},
            "variable_consistency='relaxed' is refused",
        ),
        ({"variable_update": "distributed_all_reduce"}, "all_reduce_spec is missing"),
        ({"all_reduce_spec": "xring"}, "parameter_server reduces in its own way"),
        ({"variable_update": "replicated", "all_reduce_spec": "nccl:1k:xring"}, "one range"),
        (
            {"variable_update": "replicated", "all_reduce_spec": "collective"},
            "collective_all_reduce",
        ),
        ({"variable_update": "replicated", "cross_replica_sync": False}, "cross_replica_sync"),
        ({"staged_vars": True, "cross_replica_sync": False}, "use one of the two"),
    ],
)
def test_flags_that_do_not_belong_together_are_refused(flags: dict, words: str):
    """As there, or where they would mean nothing."""
    with pytest.raises(ConfigError, match=words):
        VariableUpdateConfig(**flags)


@pytest.mark.parametrize(
    ("spec", "joined", "words"),
    [
        ("nccl", links(8, per_host=4), "within one host"),
        ("nccl/rechd", links(12, per_host=4), "a power of two"),
        ("pscpu#3", links(8, per_host=4), "there are 2 devices"),
    ],
)
def test_reductions_that_cannot_be_are_refused(spec: str, joined: Links, words: str):
    """When it is known where the workers are."""
    with pytest.raises(ConfigError, match=words):
        reduction_seconds(parse_all_reduce_spec(spec), [10], *joined)
