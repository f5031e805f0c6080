"""Constants fitted to runs whose constants are known."""

from dataclasses import replace

import pytest
from hardware_cases import CHIP, RING, cluster_of
from test_tables import printed

from scalejax.core.errors import ConfigError
from scalejax.hardware import NO_SITE, Link, Network, RunConditions, Site, load_chip
from scalejax.hardware.cluster import Algorithm
from scalejax.measure.fit import Factors, MeasuredRun, adjusted, fit_runs
from scalejax.report.terminal import tables
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Collective, DeviceGroup, MemoryUse, Operation, Program

CHIP_WITH_LAUNCH = replace(CHIP, attainable=replace(CHIP.attainable, matmul_fraction=0.5,
    convolution_fraction=0.5, memory_fraction=0.5, launch_seconds=1e-4))  # fmt: skip
CLUSTER = cluster_of(chip=CHIP_WITH_LAUNCH)
NO_MEMORY = MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=0)


def program_of(*, flop: int, moved: int, launches: int, payload: int = 0, devices: int = 1):
    """A step of one product, one fusion, empty operations and an all-reduce."""
    empty = Operation(name="e", kind="fusion", dtype="f32")
    operations = [
        Operation(name="dot", kind="matmul", dtype="f32", flop=flop),
        Operation(name="add", kind="fusion", dtype="f32", read_bytes=moved),
        *(replace(empty, name=f"e{index}") for index in range(launches)),
    ]
    if devices > 1:
        group = DeviceGroup(extents=((devices, 1),), axes=("data",))
        collective = Collective(
            name="all_reduce", payload_bytes=payload, group=group, is_async=False
        )
        operations.append(
            Operation(name="sum", kind="collective", dtype="f32", collective=collective)
        )
    return Program(
        name="a step",
        backend="cpu",
        target="cpu",
        compiler="none",
        mesh_axes=(("data", devices),),
        operations=tuple(operations),
        memory=NO_MEMORY,
    )


PROGRAMS = (
    program_of(flop=10**11, moved=10**6, launches=1),
    program_of(flop=10**6, moved=10**10, launches=1),
    program_of(flop=10**6, moved=10**6, launches=300),
    program_of(flop=10**8, moved=10**6, launches=1, payload=10**9, devices=8),
    program_of(flop=10**11, moved=10**10, launches=100, payload=10**8, devices=8),
)
"""Each of the first four is nearly all of one class; the last has something of each."""


def runs_on(cluster, cv: float | None = None, programs=PROGRAMS, site=NO_SITE) -> list[MeasuredRun]:
    """The programs, as long as `cluster` takes them."""
    return [
        MeasuredRun(
            name=f"run {index}",
            program=program,
            step_seconds=predict(program, cluster, site=site).step_seconds,
            step_cv=cv,
        )
        for index, program in enumerate(programs)
    ]


def test_known_factors_are_found_again():
    """Compute 1.5 times slower, memory 0.7, launch 2, collectives 1.25: each within a few per cent.

    The rest is the pull towards 1 of a factor that is seen with 5 % noise in one run.
    """
    truth = Factors(compute=1.5, memory=0.7, launch=2.0, communication=1.25)

    fit = fit_runs(CLUSTER, runs_on(adjusted(CLUSTER, truth)))

    assert fit.factors.compute == pytest.approx(1.5, rel=0.03)
    assert fit.factors.memory == pytest.approx(0.7, rel=0.03)
    assert fit.factors.launch == pytest.approx(2.0, rel=0.03)
    assert fit.factors.communication == pytest.approx(1.25, rel=0.03)
    assert abs(fit.held_out.error) < 0.03


CONVOLUTION = Operation(
    name="conv", kind="convolution", dtype="bf16", flop=10**12, shape=(64, 196, 256, 256, 9)
)
PRODUCTS = {
    "matmul": Operation(name="m", kind="matmul", dtype="bf16", flop=10**12, shape=(1, 64, 64, 64)),
    "fused": Operation(name="f", kind="fusion", dtype="bf16", flop=10**12),
    "attention": Operation(name="a", kind="attention", dtype="bf16", flop=10**12),
    "convolution": CONVOLUTION,
    "f32": replace(CONVOLUTION, dtype="f32"),
    "gradient": replace(CONVOLUTION, convolution_pass="filter_gradient"),
    "depthwise": replace(CONVOLUTION, shape=(64, 196, 1, 256, 9), convolution_groups=256),
}
"""One operation of each kind that arithmetic limits."""


@pytest.mark.parametrize("factor", [0.8, 1.5])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_factor_on_compute_holds_for_all_that_multiplies(name: str, factor: float):
    """Whichever share of the peak an operation reaches, and whichever of those is unset."""
    for f32_fraction in (None, 0.3):
        attainable = replace(
            CHIP_WITH_LAUNCH.attainable,
            convolution_f32_fraction=f32_fraction,
            filter_gradient_share=0.5,
            sustained_fraction=0.9,
            winograd_share=0.5,
        )
        cluster = cluster_of(chip=replace(CHIP_WITH_LAUNCH, attainable=attainable))

        before, after = (
            operation_time(PRODUCTS[name], each.chip)
            for each in (cluster, adjusted(cluster, Factors(compute=factor)))
        )

        assert before.bound == after.bound == "compute"
        assert after.busy_seconds == pytest.approx(factor * before.busy_seconds)


def test_the_factor_on_compute_holds_for_measured_attention():
    """Whose rates are in a table, in place of fractions."""
    attention = replace(PRODUCTS["attention"], shape=(8, 4096, 4096, 128))
    attainable = replace(CHIP_WITH_LAUNCH.attainable, attention_rates="h100")
    cluster = cluster_of(chip=replace(CHIP_WITH_LAUNCH, attainable=attainable))

    before, after = (
        operation_time(attention, each.chip)
        for each in (cluster, adjusted(cluster, Factors(compute=1.5)))
    )

    assert after.busy_seconds == pytest.approx(1.5 * before.busy_seconds)


def test_a_share_of_a_peak_stays_within_it():
    """Twice as fast as 0.8 of the peak is no rate that a chip has."""
    attainable = replace(CHIP.attainable, matmul_fraction=0.8, attention_fraction=0.8)
    attainable = replace(attainable, attention_by_shape=((4096, 128, 0.8), (4096, 64, 0.25)))
    cluster = cluster_of(chip=replace(CHIP, attainable=attainable))

    faster = adjusted(cluster, Factors(compute=0.5)).chip.attainable

    assert faster.matmul_fraction == faster.attention_fraction == 1.0
    assert faster.attention_by_shape == ((4096, 128, 1.0), (4096, 64, 0.5))
    assert faster.attention_scale == 1.0  # of rates in a table alone


@pytest.mark.parametrize("devices", [8, 32])
@pytest.mark.parametrize("payload", [0, 10**6, 10**9])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "nvls", "parameter_server"])
def test_the_factor_on_communication_holds_for_all_collectives(
    algorithm: Algorithm, payload: int, devices: int
):
    """Through links, hosts and networks, with and without pipelines to fill, large and small."""
    never = replace(RING, base_seconds=10.0)  # a library must have a way besides nvls
    cluster = cluster_of(
        replace(RING, algorithm=algorithm, base_seconds=1e-5),
        never,
        link=Link(
            kind="nvswitch",
            bytes_per_second=100e9,
            host_bytes_per_second=20e9,
            in_switch_fraction=0.9,
            own_share=0.1,
            ramp_seconds=1e-5,
            in_switch_ramp_seconds=2e-5,
        ),
        network=Network(bytes_per_second=10e9, message_seconds=1e-5, ramp_seconds=1e-5),
    )
    group = DeviceGroup(extents=((devices, 1),), axes=("data",))
    for name in ("all_reduce", "all_gather", "all_to_all", "collective_permute"):
        collective = Collective(name=name, payload_bytes=payload, group=group, is_async=False)

        before, after = (
            collective_seconds(collective, each)
            for each in (cluster, adjusted(cluster, Factors(communication=1.7)))
        )

        assert after == pytest.approx(1.7 * before)


def test_the_largest_run_is_held_out_of_its_own_prediction():
    """Most devices, then the longest steps; a run gone wrong there shows in its error."""
    runs = runs_on(CLUSTER)
    wrong = replace(runs[-1], step_seconds=2 * runs[-1].step_seconds)

    fit = fit_runs(CLUSTER, [*runs[:-1], wrong])

    assert fit.held_out.name == fit.errors[-1].name == "run 4"
    assert fit.held_out.error == pytest.approx(-0.5, abs=0.02)
    assert fit.cluster.calibrated is not None
    assert fit.cluster.calibrated.held_out_error == fit.held_out.error
    text = " ".join(printed(*tables.fit(fit)).split())
    assert "Held out: fitted to the other runs alone, run 4" in text
    assert "Warning: the held-out error is above 25%" in text


def test_the_errors_are_those_of_the_cluster_that_is_written():
    """Of every run, the largest too: fitted to all of them it is missed by less than held out."""
    *others, largest = runs_on(CLUSTER)
    wrong = [*others, replace(largest, step_seconds=2 * largest.step_seconds)]

    fit = fit_runs(CLUSTER, wrong)

    assert len(fit.errors) == 5
    for each in fit.errors:
        (run,) = (run for run in wrong if run.name == each.name)
        assert each.predicted_seconds == predict(run.program, fit.cluster).step_seconds
    assert abs(fit.errors[-1].error) < abs(fit.held_out.error)
    assert "Warning" not in printed(*tables.fit(fit_runs(CLUSTER, runs_on(CLUSTER))))


@pytest.mark.parametrize(
    ("backend", "target", "chip"),
    [("cpu", "cpu", "h100"), ("cuda", "sm_80", "h100"), ("cpu", "cpu", "tpu-v4")],
)
def test_runs_on_another_kind_of_chip_are_refused(backend, target, chip):
    """A CPU's times say nothing of a GPU, nor those of an A100 of an H100."""
    cluster = replace(CLUSTER, chip=load_chip(chip))
    runs = [
        replace(run, program=replace(run.program, backend=backend, target=target))
        for run in runs_on(CLUSTER)
    ]

    with pytest.raises(ConfigError, match=r"its step ran on .*, and paper-cluster has "):
        fit_runs(cluster, runs)


def test_runs_on_the_own_kind_of_chip_are_taken():
    """Also where the cluster is measured, and its chip has JAX's name for the platform."""
    measured = replace(CLUSTER, chip=replace(CLUSTER.chip, name="cpu"))

    assert fit_runs(measured, runs_on(measured)).errors


def with_contention(cluster, fraction: float):
    """`cluster` with a chip whose compute loses so much of its speed beside a collective."""
    attainable = replace(cluster.chip.attainable, contention_fraction=fraction)
    return replace(cluster, chip=replace(cluster.chip, attainable=attainable))


def test_contention_that_no_run_tells_of_stays_that_of_the_chip():
    """No collective of these programs overlaps with compute."""
    cluster = with_contention(CLUSTER, 0.3)

    fit = fit_runs(cluster, runs_on(cluster))

    assert fit.factors.contention == pytest.approx(0.3)
    assert fit.cluster.chip.attainable.contention_fraction == pytest.approx(0.3)


def test_contention_that_runs_show_is_found_again():
    """A collective of 140 ms beside a product of 200 ms, which it slows by 0.1 and not by 0.3."""
    *kept, last = PROGRAMS
    *_, collective = program_of(
        flop=1, moved=1, launches=0, payload=8 * 10**9, devices=8
    ).operations
    assert isinstance(collective, Operation)
    assert collective.collective is not None
    begins = replace(collective, collective=replace(collective.collective, is_async=True))
    waits = Operation(name="done", kind="wait", dtype="f32", waits_for="sum")
    product = Operation(name="dot", kind="matmul", dtype="f32", flop=10**12)
    beside = replace(last, operations=(begins, product, waits))
    runs = runs_on(with_contention(CLUSTER, 0.1), programs=(*kept, beside))

    fit = fit_runs(with_contention(CLUSTER, 0.3), runs)

    assert fit.factors.contention == pytest.approx(0.1, abs=0.03)


def test_runs_without_collectives_leave_contention_alone():
    """The fit says so, and the chip keeps its own."""
    cluster = with_contention(CLUSTER, 0.3)

    fit = fit_runs(cluster, runs_on(cluster)[:3])

    assert fit.factors.contention is None
    assert fit.cluster.chip.attainable.contention_fraction == 0.3
    assert "as it was" in printed(*tables.fit(fit))


def test_predictions_beyond_eight_times_the_runs_say_so():
    """Fitted to 8 devices: 64 are within reach, 72 are extrapolated."""
    cluster = fit_runs(CLUSTER, runs_on(CLUSTER)).cluster
    notes = {
        count: predict(program_of(flop=1, moved=1, launches=1, devices=count), cluster).notes
        for count in (64, 72)
    }

    assert not any("extrapolated" in note for note in notes[64])
    assert any("extrapolated: 72 devices" in note for note in notes[72])


def test_the_spread_of_steps_becomes_the_stragglers():
    """What the steps of single devices vary by is what the slowest of many is later."""
    site = Site(conditions=RunConditions(step_cv=0.04))

    fit = fit_runs(CLUSTER, runs_on(CLUSTER, cv=0.04, site=site))

    assert fit.site.conditions.step_cv == pytest.approx(0.04)
    assert fit.factors.compute == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("count", [1, 6])
def test_one_run_or_six_are_refused(count):
    """A single run cannot be held out."""
    folders = "1 folder'" if count == 1 else "6 folders'"
    with pytest.raises(ConfigError, match=f"{folders} is refused: it must be 2 to 5 run folders"):
        fit_runs(CLUSTER, (runs_on(CLUSTER) * 2)[:count])
