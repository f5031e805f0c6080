"""Stragglers, input, checkpoints and failures: by hand, and by property."""

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from hardware_cases import cluster_of
from hypothesis import given
from hypothesis import strategies as st
from test_predict import data_parallel

import scalejax
from scalejax import hardware
from scalejax.core.errors import ConfigError
from scalejax.hardware import (
    Cluster,
    RunConditions,
    Site,
    load_cluster_and_site,
    with_conditions,
)
from scalejax.hardware.site import NO_CONDITIONS
from scalejax.simulator.input import input_wait_seconds
from scalejax.simulator.predict import Prediction, predict
from scalejax.simulator.reliability import (
    best_interval_seconds,
    checkpoint_goodput,
    expected_maximum,
    goodput,
    step_deviation_seconds,
    straggler_seconds,
)
from scalejax.simulator.site_effects import (
    checkpoint_bytes,
    samples_per_node,
    stall_seconds,
    state_shards,
)

HOUR = 3600.0
CALM = 3.764e-3  # seconds of the step by hand on 8 devices, see test_predict


def under(devices: int = 8, **conditions: float | int) -> Prediction:
    """The step by hand on paper under these conditions, 100 epochs of 100 steps."""
    site = Site(conditions=RunConditions(**conditions))  # type: ignore[arg-type]
    program, examples = data_parallel(devices), 100 * 100 * devices
    return predict(program, cluster_of(), site=site, train_examples=examples, epochs=100)


def deviation(
    cluster: Cluster, seconds: float, conditions: RunConditions = NO_CONDITIONS
) -> float | None:
    """Standard deviation of a step of so many seconds."""
    return step_deviation_seconds(cluster.chip, conditions, seconds)


# --- stragglers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, 0.0),
        (2, 1 / math.sqrt(math.pi)),
        (3, 1.5 / math.sqrt(math.pi)),
        (10, 1.53875),  # tables of order statistics: Teichroew 1956
        (100, 2.50759),
    ],
)
def test_the_slowest_of_n_is_known_exactly(count: int, expected: float):
    """Closed forms for two and three, published tables for ten and a hundred."""
    assert expected_maximum(count) == pytest.approx(expected, abs=1e-5)


@given(st.integers(1, 10**6))
def test_more_devices_wait_longer_but_less_than_the_bound(count: int):
    """sqrt(2 ln n) bounds the mean of the largest of n normals from above."""
    assert expected_maximum(count) < expected_maximum(count + 1)
    assert expected_maximum(count) <= math.sqrt(2 * math.log(count))


def test_a_synchronous_step_is_the_slowest_of_its_devices():
    """Half a per cent of noise on 100 ms, 64 devices: as 4,000 steps drawn at random."""
    draw = random.Random(0).gauss
    drawn = mean(max(draw(0.1, 0.0005) for _ in range(64)) for _ in range(4000))

    # the mean of 4,000 largest of 64 is known to 0.5 % of the delay: 0.4 / 2.36 / sqrt(4000)
    assert straggler_seconds(0.1 * 0.005, 64) == pytest.approx(drawn - 0.1, rel=0.01)


def test_stragglers_are_part_of_the_step():
    """2 % of noise on 8 devices: the step is 2 % x 1.4236 longer, and the waterfall says so."""
    predicted = under(step_cv=0.02)

    assert predicted.step_seconds == pytest.approx(CALM * (1 + 0.02 * 1.42360))
    assert dict(predicted.waterfall)["stragglers"] == pytest.approx(CALM * 0.02 * 1.42360)


def test_variances_of_a_step_add_up():
    """Of 100 ms: 3 % of it, 3 ms, and disturbances whose variance is 0.16 ms x 100 ms, 4 ms."""
    late = varying(step_cv=0.03, step_dispersion_seconds=0.16e-3)

    assert deviation(late, 0.1) == pytest.approx(5e-3)
    assert deviation(late, 0.1, RunConditions(step_cv=0.01)) == pytest.approx(1e-3)
    assert deviation(cluster_of(), 0.1) is None


def test_steps_shorter_than_any_seen_vary_by_as_large_a_share():
    """4 ms of 100 ms, the shortest seen: 0.4 ms of 10 ms, not the 1.3 ms that a root would give."""
    seen = varying(step_cv=0.0, step_dispersion_seconds=0.16e-3, dispersed_from_seconds=0.1)

    assert deviation(seen, 0.1) == pytest.approx(4e-3)
    assert deviation(seen, 0.01) == pytest.approx(0.4e-3)
    assert deviation(seen, 0.4) == pytest.approx(8e-3)


def test_dispersion_beside_an_unknown_cv_is_refused():
    """Nothing would come of it."""
    with pytest.raises(ConfigError, match=r"step_dispersion_seconds=0\.001 is refused"):
        varying(step_dispersion_seconds=1e-3)


def test_disturbances_at_random_have_the_variance_that_is_said():
    """Five a second of 10 ms each in steps of 2 s: r m^2 is 0.5 ms, and 2 s of it 31.6 ms squared.

    10,000 steps drawn: their deviation is known to 0.7 %; and r m^2 is that over the time without
    disturbances, of which 5 % make the root 2.5 % larger.
    """
    draw = random.Random(0)
    steps = []
    for _ in range(10_000):
        late, at = 0.0, draw.expovariate(5.0)
        while at < 2.0:
            late, at = late + 0.010, at + draw.expovariate(5.0)
        steps.append(2.0 + late)

    said = deviation(varying(step_cv=0.0, step_dispersion_seconds=0.5e-3), 2.0)

    assert said == pytest.approx(stdev(steps), rel=0.03)


def varying(**spread: float) -> Cluster:
    """The cluster by hand, its devices' steps varying so."""
    chip = cluster_of().chip
    return cluster_of(chip=replace(chip, attainable=replace(chip.attainable, **spread)))


# --- input ---------------------------------------------------------------------------------


def test_input_is_waited_for_only_where_it_is_slower():
    """100 samples at 1,000 per second take 100 ms: 40 more than a step of 60, none of 120."""
    assert input_wait_seconds(0.06, 100, 1000) == pytest.approx(0.04)
    assert input_wait_seconds(0.12, 100, 1000) == 0


def test_a_step_takes_the_larger_of_device_and_input():
    """800 samples on one node of 8; 1,600 on two nodes are 800 for each."""
    for devices in (8, 16):
        starved = under(devices, input_samples_per_second=8000)
        fed = under(devices, input_samples_per_second=10**6)

        assert starved.step_seconds == pytest.approx(0.1)
        assert dict(fed.waterfall)["input"] == 0
        known = [s for name, s in starved.waterfall if s is not None]
        assert math.fsum(known) == pytest.approx(starved.step_seconds)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"data": 16}, 800),
        ({"tensor": 16}, 1600),  # both nodes hold the whole batch
        ({"pipeline": 16}, 1600),
        ({"pipeline": 2, "data": 8}, 1600),  # a stage on each node
        ({"data": 2, "context": 8}, 800),
        ({"fsdp": 4, "tensor": 4}, 800),
        ({"data": 1, "tensor": 12}, 1600),  # the second node is not full
        ({"data": 4, "tensor": 3}, 1200),  # devices 0 to 7 are of samples 0, 1 and 2 of 4
        ({"batch": 16}, 800),
    ],
)
def test_a_node_delivers_what_its_devices_take(axes: dict[str, int], expected: float):
    """1,600 samples on nodes of 8: those of the different parts of the batch on a node."""
    program = replace(data_parallel(16), mesh_axes=tuple(axes.items()))

    assert samples_per_node(program, cluster_of()) == pytest.approx(expected)


# --- checkpoints and failures --------------------------------------------------------------


def test_best_interval_by_hand():
    """100 s of checkpoint and 5.5 h between failures: sqrt(2 x 100 x 19,800) s."""
    assert best_interval_seconds(100, 5.5 * HOUR) == pytest.approx(1990, abs=0.5)


@given(st.floats(0.1, 100), st.floats(0, 100), st.floats(1e6, 1e8))
def test_goodput_of_rare_failures_is_the_well_known_first_order(
    checkpoint: float, restart: float, mtbf: float
):
    """1 - C/interval - (interval/2 + R)/M, to the squares of what is left out."""
    interval = best_interval_seconds(checkpoint, mtbf)
    first_order = 1 - checkpoint / interval - (interval / 2 + restart) / mtbf
    small = (interval + checkpoint + restart) / mtbf

    exact = goodput(interval, checkpoint, restart, mtbf)

    assert exact == pytest.approx(first_order, abs=small**2 + (checkpoint / interval) ** 2)


def test_goodput_is_that_of_a_run_played_through():
    """Intervals of 1 h with checkpoints of 5 min, restarts of 10 min, a failure every 4 h."""
    rng, mtbf = random.Random(1), 4 * HOUR
    passed = 0.0
    for _ in range(20_000):
        while (failure := rng.expovariate(1 / mtbf)) < HOUR + 300:
            passed += failure
            while (again := rng.expovariate(1 / mtbf)) < 600:
                passed += again
            passed += 600
        passed += HOUR + 300

    # 20,000 intervals of spread 0.5: known to 0.4 %
    assert goodput(HOUR, 300, 600, mtbf) == pytest.approx(20_000 * HOUR / passed, rel=0.012)


def test_goodput_with_checkpoints_in_the_background_is_that_of_a_run_played_through():
    """Intervals of 1 h, a checkpoint that stops training for 2 min and is whole 20 min later, 15
    min down and then 10 min of restart after each failure, one every 4 h of being up."""
    rng, mtbf, latency, wanted = random.Random(1), 4 * HOUR, 1200, 20_000
    block = HOUR + 120
    passed, done, whole = 0.0, 0, 0  # seconds; blocks made, and those whose checkpoint is whole
    position, failure = 0.0, rng.expovariate(1 / mtbf)
    while done < wanted:
        if failure >= block - position:
            failure, passed = failure - (block - position), passed + block - position
            done, position = done + 1, 0.0
            continue
        passed += failure
        position += failure
        whole = max(whole, done if position >= latency else done - 1)
        passed += 900
        while (failure := rng.expovariate(1 / mtbf)) < 600:
            passed += failure + 900
        passed, failure = passed + 600, failure - 600
        done, position = whole, 0.0

    model = goodput(HOUR, 120, 600, mtbf, latency_seconds=latency, down_seconds=900)

    assert model == pytest.approx(wanted * HOUR / passed, rel=0.012)
    assert model < goodput(HOUR, 120, 600, mtbf, down_seconds=900)
    assert model > goodput(HOUR, 120, 600 + 900 + latency, mtbf)  # as if it could fail while down


@given(st.floats(1, 1e5), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1e4, 1e8))
def test_goodput_is_a_share_and_falls_with_everything_that_costs(
    interval: float, checkpoint: float, restart: float, mtbf: float
):
    """Between 0 and 1; worse with longer checkpoints, longer restarts and more failures."""
    here = goodput(interval, checkpoint, restart, mtbf)

    assert 0 < here <= checkpoint_goodput(interval, checkpoint) <= 1
    assert goodput(interval, checkpoint + 1, restart, mtbf) < here
    assert goodput(interval, checkpoint, restart + 1, mtbf) < here
    assert goodput(interval, checkpoint, restart, mtbf * 1.1) > here


def test_the_best_interval_is_the_best():
    """A fifth more or less loses more."""
    best = best_interval_seconds(60, 20 * HOUR)
    costs = {f: goodput(f * best, 60, 300, 20 * HOUR) for f in (0.8, 1.0, 1.2)}

    assert max(costs, key=costs.__getitem__) == 1.0


def test_a_run_that_never_ends_is_refused():
    """A failure a minute, an hour between checkpoints."""
    with pytest.raises(ConfigError, match=r"run_mtbf_seconds=60 is refused.*never ends"):
        goodput(HOUR, 60, 60, 60)


def test_run_counts_checkpoints_and_failures():
    """16 devices are 2 nodes: a failure every 50 h, of which each checkpoint takes 100 s."""
    facts = {
        "checkpoint_bytes": 10**12,
        "storage_bytes_per_second": 10**10,
        "node_mtbf_seconds": 100 * HOUR,
        "restart_seconds": 600.0,
    }
    interval = best_interval_seconds(100, 50 * HOUR)
    expected = goodput(interval, 100, 600, 50 * HOUR)

    calm, predicted = under(16), under(16, **facts)

    assert predicted.step_seconds == calm.step_seconds
    assert predicted.goodput == pytest.approx(expected)
    assert predicted.run_seconds is not None
    assert calm.run_seconds is not None
    assert predicted.run_seconds == pytest.approx(calm.run_seconds / expected)
    terms = dict(predicted.waterfall)
    assert terms["checkpoints"] == pytest.approx(predicted.step_seconds * 100 / interval)
    known = math.fsum(seconds for seconds in terms.values() if seconds is not None)
    assert known == pytest.approx(predicted.step_seconds / expected)


def test_a_failure_loses_the_checkpoint_that_is_being_written():
    """Copied to the host in 10 s, on storage after 100: 90 s more for each failure."""
    facts = {
        "checkpoint_bytes": 10**12,
        "device_to_host_bytes_per_second": 10**11,
        "storage_bytes_per_second": 10**10,
        "checkpoint_interval_seconds": HOUR,
        "node_mtbf_seconds": 100 * HOUR,
        "restart_seconds": 600.0,
    }

    predicted = under(16, **facts)

    expected = goodput(HOUR, 10, 600, 50 * HOUR, latency_seconds=90)
    assert predicted.goodput == pytest.approx(expected)


def test_what_is_not_known_stays_unknown():
    """Checkpoints without failures count alone; failures without checkpoints not at all."""
    saved = under(checkpoint_interval_seconds=HOUR, storage_bytes_per_second=10**9)
    failing = under(node_mtbf_seconds=100 * HOUR, restart_seconds=600.0)

    # the state of the step by hand: 2 GB, 2 s an hour
    assert saved.goodput == pytest.approx(HOUR / (HOUR + 2))
    assert dict(saved.waterfall)["failures"] is None
    assert failing.goodput is None
    assert dict(failing.waterfall)["checkpoints"] is None


def test_background_checkpoints_hold_up_training_for_the_copy_alone():
    """2 GB of state: 20 s to storage at 100 MB/s, 0.2 s to the host at 10 GB/s."""
    slow = RunConditions(storage_bytes_per_second=10**8)
    behind = replace(slow, device_to_host_bytes_per_second=10**10)
    program = data_parallel(8)

    assert stall_seconds(program, slow) == pytest.approx(20)
    assert stall_seconds(program, behind) == pytest.approx(0.2)
    with pytest.raises(ConfigError, match=r"interval_seconds=10 is refused: writing one takes 20"):
        under(
            checkpoint_interval_seconds=10,
            storage_bytes_per_second=10**8,
            device_to_host_bytes_per_second=10**10,
        )


def test_state_is_counted_once_for_each_of_its_parts():
    """2 GB on each of 4 x 2 parts, whatever the data axis."""
    program = replace(data_parallel(64), mesh_axes=(("data", 8), ("fsdp", 4), ("tensor", 2)))

    assert state_shards(program) == 8
    assert checkpoint_bytes(program, RunConditions()) == 16 * 10**9
    assert checkpoint_bytes(program, RunConditions(checkpoint_bytes=5)) == 5


def test_a_cluster_file_holds_the_conditions_of_its_site(tmp_path: Path):
    """A table of its own; flags replace single fields of it. How hosts launch operations was said
    there too, and files that say it are still read. A verb that gets the file takes both."""
    catalogue = Path(hardware.__file__).parent / "clusters" / "dgx-h100.toml"
    own = tmp_path / "ours.toml"
    table = "[conditions]\nstep_cv = 0.02\nnode_mtbf_seconds = 1e7\nlaunches_in_graph = true\n"
    own.write_text(catalogue.read_text(encoding="utf-8") + table)

    ours, site = load_cluster_and_site(str(own))
    one_by_one, changed = with_conditions(ours, site, {"step_cv": 0.01, "launches_in_graph": False})

    named = scalejax.predict(data_parallel(8), own)
    assert named == predict(data_parallel(8), ours, site=site)
    assert dict(named.waterfall)["stragglers"]
    assert (ours.launch_mode, one_by_one.launch_mode) == ("graph", "asynchronous")
    assert site.conditions == RunConditions(step_cv=0.02, node_mtbf_seconds=1e7)
    assert changed.conditions == RunConditions(step_cv=0.01, node_mtbf_seconds=1e7)
    with pytest.raises(ConfigError, match=r"conditions.step_vc is not a field"):
        with_conditions(ours, site, {"step_vc": 0.01})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_cv", -0.1),
        ("step_cv", 2.0),
        ("node_mtbf_seconds", 0.0),
        ("restart_seconds", math.nan),
        ("input_samples_per_second", -1.0),
    ],
)
def test_conditions_that_cannot_be_are_refused(field: str, value: float):
    """Named by their place in the cluster file."""
    with pytest.raises(ConfigError, match=rf"conditions\.{field}="):
        RunConditions(**{field: value})  # type: ignore[arg-type]
