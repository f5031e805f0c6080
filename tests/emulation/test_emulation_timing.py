"""The clock of an emulation is the cost model's."""

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from emulate_cases import config, durations, simulated

from scalejax.config.emulation import (
    DownpourConfig,
    EmulationConfig,
    StragglersConfig,
    SynchronousConfig,
    TimingConfig,
)
from scalejax.config.run import with_fields
from scalejax.core.errors import ConfigError, DoesNotFit
from scalejax.emulation.checks import emulated_run
from scalejax.emulation.durations import durations_of
from scalejax.emulation.virtual_cluster import gradient_times
from scalejax.hardware import RunConditions, Site, load_cluster
from scalejax.planning.scaling_study import study
from scalejax.simulator.reliability import expected_maximum

WORKERS = 8
SYNCHRONOUS = EmulationConfig(algorithm=SynchronousConfig(), workers=WORKERS)


@pytest.mark.slow  # compiles in a worker
def test_synchronous_step_takes_what_predict_says():
    """The same step, compiled for the same devices, on a cluster whose steps do not vary: the
    compiler is 4 s of it."""
    cluster, site = load_cluster("dgx-a100"), Site(conditions=RunConditions(step_cv=0.0))
    run, emulation = emulated_run(config(SYNCHRONOUS))
    (predicted,) = study(config(), cluster, [WORKERS], "strong", site=site).predictions

    virtual_cluster, _ = simulated(
        emulation, durations_of(run, emulation, cluster, site=site), steps=run.total_steps
    )

    assert predicted.step_seconds > 0
    assert virtual_cluster.now / run.total_steps == pytest.approx(predicted.step_seconds, rel=0.01)


@pytest.mark.slow
def test_time_of_a_gradient_by_hand_varies_as_a_step_of_that_length():
    """Of four times the seconds, by twice as much, where disturbances come at random."""
    calm = load_cluster("dgx-a100")
    attainable = replace(calm.chip.attainable, step_cv=0.0, step_dispersion_seconds=1e-3)
    cluster = replace(calm, chip=replace(calm.chip, attainable=attainable))
    timed = (
        replace(SYNCHRONOUS, timing=TimingConfig(gradient_seconds=seconds, collective_seconds=0.0))
        for seconds in (1e3, 4e3)
    )

    short, long = (durations_of(*emulated_run(config(emulation)), cluster) for emulation in timed)

    assert short.gradient_deviation_seconds == pytest.approx(1.0, rel=1e-3)
    assert long.gradient_deviation_seconds == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("distribution", "median"), [("normal", 2.0), ("lognormal", 2 / math.sqrt(1 + 0.25**2))]
)
def test_times_of_gradients_have_the_mean_and_deviation_given(distribution, median):
    """Mean and median within 5 standard errors of 20,000, the deviation within 5 %."""
    stragglers = StragglersConfig(distribution=distribution)

    times = gradient_times(stragglers, 2.0, 0.5, np.random.default_rng(0))
    drawn = np.fromiter(islice(times, 20_000), float)

    error = 0.5 / math.sqrt(20_000)
    assert drawn.mean() == pytest.approx(2.0, abs=5 * error)
    assert np.median(drawn) == pytest.approx(median, abs=5 * 1.2533 * error)
    assert drawn.std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("workers", "cv", "steps"), [(2, 0.25, 12_000), (8, 0.1, 1000), (64, 0.02, 200)]
)
def test_stragglers_cost_what_the_slowest_of_n_does(workers: int, cv: float, steps: int):
    """Over so many steps that their mean has a standard error below 1.5 % of the effect: the
    slowest of 2, 8 and 64 normal times is 0.564, 1.424 and 2.371 deviations above the mean, and
    varies by 0.826, 0.611 and 0.443 from step to step. It is in proportion to the deviation, of
    which each number of workers has another."""
    emulation = EmulationConfig(algorithm=SynchronousConfig(), workers=workers)

    virtual_cluster, _ = simulated(
        emulation, durations(gradient_deviation_seconds=cv, collective_seconds=0.5), steps=steps
    )

    later = virtual_cluster.now / steps - 1.5
    assert later == pytest.approx(cv * expected_maximum(workers), rel=0.05)


def test_all_exponential_workers_take_a_harmonic_number():
    """The mean of the largest of n exponential times is 1 + 1/2 + ... + 1/n."""
    emulation = _with_backup(0, workers=8)

    virtual_cluster, _ = simulated(emulation, durations(), steps=4000)

    assert virtual_cluster.now / 4000 == pytest.approx(sum(1 / k for k in range(1, 9)), rel=0.05)


def test_a_backup_worker_halves_the_time_of_two():
    """One of two counts. At the start of a round one is fresh and the other at a gradient that
    will be too late: after 1/2 s in the mean one of them is done, in half of the cases the late
    one, after which both are fresh and the first of them takes 1/2 s more. So 3/4 s, not 3/2."""
    virtual_cluster, servers = simulated(_with_backup(1, workers=2), durations(), steps=8000)

    assert virtual_cluster.now / 8000 == pytest.approx(0.75, rel=0.03)
    assert servers.versions == [8000]


def _with_backup(backup_workers: int, *, workers: int) -> EmulationConfig:
    return EmulationConfig(
        algorithm=SynchronousConfig(
            gradient_sync="parameter_server", backup_workers=backup_workers
        ),
        workers=workers,
        stragglers=StragglersConfig(distribution="exponential"),
    )


def test_servers_pass_every_byte_of_a_synchronous_round():
    """4 workers fetch and push 1,000 bytes each by a server of 1,000 bytes a second, one after
    the other: 8 s, of which only a gradient of 1 s hides nothing, and 2 latencies of 0.1 s."""
    algorithm = SynchronousConfig(gradient_sync="parameter_server")
    emulation = EmulationConfig(algorithm=algorithm, workers=4)
    times = durations(server_bytes_per_second=1000.0, latency_seconds=0.1)

    virtual_cluster, servers = simulated(emulation, times, steps=10, shard_bytes=(1000,))

    # The first copy comes after 1 s and its gradient after 2 s more, while others are fetched:
    # the last fetched at 4 s pushes from 5 s on, behind those before it.
    assert servers.sent_bytes == 10 * 4 * 2 * 1000
    assert virtual_cluster.now / 10 == pytest.approx(0.1 + 4 + 0.1 + 1 + 0.1 + 1, abs=1e-6)


def test_times_by_hand_come_before_those_of_the_cluster():
    """And nothing is compiled where they say everything."""
    run, emulation = emulated_run(config(SYNCHRONOUS))

    with pytest.raises(ConfigError, match=r"give --cluster NAME .*gradient_seconds SECONDS"):
        durations_of(run, emulation, None)
    timing = TimingConfig(gradient_seconds=0.25, collective_seconds=0.5)
    by_hand = EmulationConfig(algorithm=SynchronousConfig(), workers=4, timing=timing)
    found = durations_of(run, by_hand, None)
    assert (found.gradient_seconds, found.collective_seconds) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("emulation", "fields", "message"),
    [
        (SYNCHRONOUS, {"batch.global_batch": 36}, r"batch.global_batch=36 is refused: .* of 8"),
        (SYNCHRONOUS, {"layout.fsdp": 2}, r"layout.fsdp=2 is refused: each worker .* one device"),
        (SYNCHRONOUS, {"model": {"name": "cnn"}}, r"model.name='cnn' is refused: its BatchNorm"),
        (SYNCHRONOUS, {"batch.microbatches": 2}, r"batch.microbatches=2 is refused"),
        (SYNCHRONOUS, {"input.remainder": "pad"}, r"input.remainder='pad' is refused"),
        (
            SYNCHRONOUS,
            {"input.augmentation": {"mixup_alpha": 0.2}},
            r"mixup_alpha=0.2 is refused: it mixes neighbours .* workers divide",
        ),
        (
            SYNCHRONOUS,
            {"train.early_stopping": {}, "data.validation_fraction": 0.1},
            r"\[train.early_stopping\] is refused",
        ),
        (
            SYNCHRONOUS,
            {"train.metric_average": "devices"},
            r"train.metric_average='devices' is refused: .* one device",
        ),
        (
            EmulationConfig(algorithm=DownpourConfig(), workers=4, server_shards=2),
            {"optimizer": {"name": "lars"}},
            r"emulation.server_shards=2 is refused: lars takes norms of whole layers",
        ),
        (
            SYNCHRONOUS,
            {"optimizer": {"name": "sophia"}},
            r"optimizer.name='sophia' is refused: workers send gradients of targets alone",
        ),
        (
            SYNCHRONOUS,
            {"tracking": {"trackers": ["tensorboard"]}},
            r"\[tracking\] is refused",
        ),
        (
            SYNCHRONOUS,
            {"train.layer_gradient_norms": True},
            r"train.layer_gradient_norms=True is refused",
        ),
        (
            EmulationConfig(algorithm=DownpourConfig(), workers=4, server_shards=2),
            {
                "model": {
                    "name": "gpt",
                    "layers": 1,
                    "hidden": 8,
                    "heads": 2,
                    "parametrization": {"name": "mup", "base_hidden": 4},
                },
                "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 16},
                "optimizer": {"name": "adamw"},
            },
            r"emulation.server_shards=2 is refused: mup has a rate for each layer",
        ),
    ],
)
def test_what_cannot_be_emulated_is_refused(emulation, fields, message):
    """Before anything is computed."""
    with pytest.raises(ConfigError, match=message):
        emulated_run(with_fields(config(emulation), fields))


def test_more_workers_than_devices_do_not_fit():
    """One device each."""
    run, _ = emulated_run(config(SYNCHRONOUS))
    emulation = EmulationConfig(algorithm=DownpourConfig(), workers=10**6)

    with pytest.raises(DoesNotFit, match=r"emulation.workers=1000000 is refused: eos has at most"):
        durations_of(run, emulation, load_cluster("eos"))
