"""This machine measured and written down: what the files hold, and what they are good for."""

import re
import resource
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hardware_cases import CHIP, cluster_of
from jax.sharding import Mesh

from scalejax.cli.main import main
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.core.progress import Progress
from scalejax.core.workers import Worker
from scalejax.hardware import (
    MeasuredRates,
    RunConditions,
    SharedChip,
    Site,
    load_chip,
    load_cluster_and_site,
    save_cluster,
)
from scalejax.measure.devices import TINY_GRID, calibrate, probes, stage_count, timing
from scalejax.measure.devices.collectives import MeasuredCollective, fit_ring
from scalejax.measure.devices.machine import architecture, mesh_of, probe_count
from scalejax.measure.devices.processes import Between, between_processes
from scalejax.measure.fit import fit_runs, read_runs
from scalejax.simulator.device_state import under_load
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.predict import predict
from scalejax.simulator.program import MemoryUse, Operation, Program
from scalejax.training.record import MeasurementLog, TrainMeasurement

MEASURED = MeasuredRates(
    matmul={"f32": ((1, 64, 64, 64, 1e9), (1, 1024, 1024, 1024, 4e9))},
    convolution={"forward": ((1, 16, 8, 8, 9, 2e9),), "filter_gradient": ((1, 16, 8, 8, 9, 1e9),)},
    stream=((1000, 10e9), (1_000_000, 1e9)),
    first_touch=((1000, 1e-6), (2000, 3e-6)),
)


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Storage and copies are timed on a megabyte."""
    monkeypatch.setattr("scalejax.measure.devices._STORED_BYTES", 2**20)
    monkeypatch.setattr("scalejax.measure.devices._COPIED_BYTES", 2**20)


def product_of(size: int, flop: int) -> Operation:
    """A square matrix product."""
    return Operation(name="dot", kind="matmul", dtype="f32", flop=flop, shape=(1, size, size, size))


def program_of(*operations: Operation, devices: int = 1, temporary: int = 0) -> Program:
    """A step of `operations`."""
    memory = MemoryUse(argument_bytes=0, output_bytes=0, alias_bytes=0, temporary_bytes=temporary)
    return Program(
        name="a step",
        backend="cpu",
        target="cpu",
        compiler="none",
        mesh_axes=(("data", devices),),
        operations=operations,
        memory=memory,
    )


@pytest.mark.parametrize(("size", "rate"), [(64, 1e9), (1024, 4e9), (256, 2e9), (4096, 2e9)])
def test_products_take_the_measured_rate_of_their_shape(size, rate):
    """Exact where it was measured; half way between in logarithms, the geometric mean."""
    chip = replace(CHIP, measured=MEASURED)

    time = operation_time(product_of(size, flop=10**9), chip)

    # far outside, weights 1/4 and 1/36 of the two neighbours: between them, whatever the weight
    if size == 4096:
        assert 1e9 / 4e9 < time.seconds < 1
    else:
        assert time.seconds == pytest.approx(1e9 / rate)


def test_each_pass_of_a_convolution_has_its_own_rate():
    """The gradient of the filter is measured at half the rate of the forward pass."""
    chip = replace(CHIP, measured=MEASURED)
    forward = Operation(
        name="conv",
        kind="convolution",
        dtype="f32",
        flop=10**9,
        shape=(1, 16, 8, 8, 9),
        convolution_pass="forward",
    )
    gradient = replace(forward, convolution_pass="filter_gradient")

    assert operation_time(forward, chip).seconds == pytest.approx(0.5)
    assert operation_time(gradient, chip).seconds == pytest.approx(1.0)


@pytest.mark.parametrize(("dtype", "seconds"), [("bf16", 0.125), ("f32", 0.5), ("f16", 0.5)])
def test_each_type_of_a_convolution_has_its_own_rate(dtype, seconds):
    """A GPU convolves bf16 faster than f32, whose rate stands in for a type not measured."""
    rates = {**MEASURED.convolution, "forward_bf16": ((1, 16, 8, 8, 9, 8e9),)}
    chip = replace(
        CHIP,
        peak_flop_per_second={"f32": 1e10, "bf16": 2e10, "f16": 2e10},
        measured=replace(MEASURED, convolution=rates),
    )
    operation = Operation(
        name="conv", kind="convolution", dtype=dtype, flop=10**9, shape=(1, 16, 8, 8, 9)
    )

    assert operation_time(operation, chip).seconds == pytest.approx(seconds)


def test_attention_in_one_kernel_has_its_own_rate():
    """A quarter of the peak, as measured, and not the rate of some product."""
    chip = replace(
        CHIP,
        peak_flop_per_second={"f32": 1e10, "bf16": 2e10},
        attainable=replace(CHIP.attainable, attention_fraction=0.25),
        measured=MEASURED,
    )
    operation = Operation(
        name="fmha", kind="attention", dtype="bf16", flop=10**9, shape=(32, 4096, 4096, 128)
    )

    assert operation_time(operation, chip).seconds == pytest.approx(10**9 / (0.25 * 2e10))


def gpu(capability: str = "9.0", multiprocessors: int = 132) -> SimpleNamespace:
    """What JAX says of a GPU, by default of an H100."""
    return SimpleNamespace(
        platform="gpu", compute_capability=capability, core_count=multiprocessors
    )


def test_short_operations_of_a_gpu_are_repeated_within_a_program(monkeypatch):
    """32 products take 30 us of call, 31 launches of 1 us, 3 us for each of three arrays of a
    product, and 32 times 2 us: the rate is that of one in 2 us, where a single one would be lost in
    its call. On H200 a call took 2.5 us for each array, more than a small product."""
    found = []

    def timed(
        function: object, mesh: object, shapes: Any, *, repeats: int, **options: object
    ) -> float:
        call = 30e-6 + (repeats - 1) * 1e-6 + repeats * (len(shapes) + 1) * 3e-6
        if shapes[0] == (4,):
            return call
        found.append(repeats)
        return call + repeats * 2e-6

    monkeypatch.setattr("scalejax.measure.devices.probes.seconds_of_function", timed)
    mesh: Any = SimpleNamespace(devices=np.array([gpu()], object))

    small = probes.matmul_row(mesh, (1, 64, 64, 64), "bfloat16", 30e-6, 3, 1e-6)
    large = probes.matmul_row(mesh, (1, 8192, 8192, 8192), "bfloat16", 30e-6, 3, 1e-6)

    assert found == [32, 2**31 // (3 * 2 * 8192**2)]  # of two gigabytes of operands and results
    assert small[-1] == pytest.approx(2 * 64**3 / 2e-6)
    assert large[-1] == pytest.approx(2 * 8192**3 / 2e-6)


def test_repeated_operations_are_all_in_the_program(monkeypatch):
    """None is merged with another: each has arrays of its own, paired as they were given."""
    texts, shapes = [], []

    def text_of(compiled: Any, arguments: Any, **unused: object) -> float:
        texts.append(compiled.as_text())
        shapes.extend(each.shape for each in arguments)
        return 1.0

    monkeypatch.setattr(timing, "seconds_of_call", text_of)
    mesh = mesh_of(jax.local_devices()[:1])

    timing.seconds_of_function(lambda x, y: x @ y, mesh, [(8, 16), (16, 4)], calls=1, repeats=3)

    assert shapes == [(1, 8, 16)] * 3 + [(1, 16, 4)] * 3
    assert len(re.findall(r"= f32\[8,4\]\S* dot\(", texts[0])) == 3


def test_a_gpu_is_compiled_for_as_the_chip_of_the_catalogue():
    """By compute capability and multiprocessors; a CPU and an unknown GPU have no target."""
    assert architecture(gpu()) == load_chip("h100").cuda
    assert architecture(gpu("8.0", 108)) == load_chip("a100-80gb").cuda
    assert architecture(gpu("9.0", 131)) is None
    assert architecture(jax.local_devices()[0]) is None


def test_small_operations_stay_in_the_caches():
    """1000 bytes at 10 GB/s, a million at 1 GB/s, 31,623 half way in logarithms."""
    chip = replace(CHIP, measured=MEASURED)
    times = [
        operation_time(Operation(name="f", kind="fusion", dtype="f32", read_bytes=size), chip)
        for size in (1000, 1_000_000, 31_623)
    ]

    expected = [1e-7, 1e-3, 31_623 / 10**9.5]
    # 31,623 is the root of 1000 times a million to 1e-5
    assert [time.seconds for time in times] == pytest.approx(expected, rel=1e-5)


def test_devices_of_one_machine_slow_each_other_down():
    """Measured with two busy, and beyond that in proportion: the cores are all in use."""
    half = replace(
        MEASURED, matmul={"f32": tuple((*row[:-1], row[-1] / 2) for row in MEASURED.matmul["f32"])}
    )
    cluster = cluster_of(
        chip=replace(CHIP, measured=MEASURED),
        shared=(SharedChip(device_count=2, chip=replace(CHIP, measured=half)),),
    )
    seconds = [
        predict(program_of(product_of(64, flop=10**9), devices=n), cluster).step_seconds
        for n in (1, 2, 4)
    ]

    assert seconds == pytest.approx([1, 2, 4])


def test_temporary_memory_is_paid_for_at_every_step():
    """1500 bytes lie half way between 1 and 3 microseconds; 4000 are twice 2000."""
    cluster = cluster_of(chip=replace(CHIP, measured=MEASURED))
    overheads = [
        under_load(cluster, program_of(temporary=size)).chip.attainable.step_overhead_seconds
        for size in (0, 1500, 4000)
    ]

    assert overheads == pytest.approx([0, 2e-6, 6e-6])


def test_ring_is_found_again_in_its_own_times():
    """base 100 us, message 10 us, 2 GB/s: times made of them give them back."""
    collectives = [
        MeasuredCollective(
            device_count=n,
            size_bytes=size,
            seconds=100e-6 + 2 * (n - 1) * 10e-6 + 2 * (n - 1) / n * size / 2e9,
        )
        for n in (2, 4)
        for size in (64, 2**20, 2**24)
    ]

    ring = fit_ring(collectives)

    assert ring.base_seconds == pytest.approx(100e-6)
    assert ring.hop_seconds == pytest.approx(10e-6)
    assert ring.bytes_per_second == pytest.approx(2e9)
    assert ring.residual == pytest.approx(0, abs=1e-9)


def ring_seconds(count: int, size: int) -> float:
    """Base 100 us, message 10 us, 2 GB/s."""
    return 100e-6 + 2 * (count - 1) * 10e-6 + 2 * (count - 1) / count * size / 2e9


def all_reduces(
    monkeypatch: pytest.MonkeyPatch, disturbed: Callable[[int, int, int], float]
) -> list[tuple[int, int]]:
    """Calibration times nothing but all-reduces, which take what a ring does and `disturbed` of
    devices, bytes and round besides; returns those that were timed, as they are timed."""
    timed = []

    def all_reduce_round(mesh: Mesh, size: int, calls: int) -> Callable[[], tuple[float, ...]]:
        del calls

        def seconds() -> tuple[float, ...]:
            done = timed.count((mesh.size, size))
            timed.append((mesh.size, size))
            alone = probes.BUFFERS * ring_seconds(mesh.size, size)
            return alone + 1 + disturbed(mesh.size, size, done), 1.0, alone / 2, 0.0

        return seconds

    monkeypatch.setattr("scalejax.measure.devices.probes.all_reduce_round", all_reduce_round)
    monkeypatch.setattr("scalejax.measure.devices._process_counts", list)
    monkeypatch.setattr("scalejax.measure.devices._device_counts", lambda: [2, 4])
    monkeypatch.setattr("scalejax.measure.devices.collectives.SIZES", (64, 2**20))
    monkeypatch.setattr("scalejax.measure.devices.machine.measure_chip", lambda *_: CHIP)
    return timed


def test_a_disturbance_of_a_round_is_not_measured(tmp_path, monkeypatch):
    """Other programs run for the first round and a half: the third is quiet, and the least of each
    counts, of sizes and device counts in turn."""
    timed = all_reduces(
        monkeypatch, lambda count, size, done: 9.0 * (done == 0 or (done == 1 and count == 2))
    )

    found = calibrate(tmp_path, TINY_GRID)

    assert timed[:4] == [(2, 64), (2, 2**20), (4, 64), (4, 2**20)]
    assert len(timed) == 3 * 4
    assert found.cluster.library.residual == pytest.approx(0, abs=1e-6)
    assert found.cluster.library.methods[0].base_seconds == pytest.approx(100e-6)
    assert found.notes == ()


def test_what_is_far_off_a_ring_is_measured_again(tmp_path, monkeypatch):
    """A sum of 64 bytes between four takes 9 s in five rounds: the sixth mends it."""
    timed = all_reduces(
        monkeypatch, lambda count, size, done: 9.0 * ((count, size) == (4, 64) and done < 5)
    )

    found = calibrate(tmp_path, TINY_GRID)

    assert len(timed) == 6 * 4
    assert found.cluster.library.residual == pytest.approx(0, abs=1e-6)


def test_no_all_reduce_is_timed_again_after_20_s(tmp_path, monkeypatch):
    """A round of four takes 28 s; of the next three begin within 20 s, and no other round does."""
    now = [0.0]

    def late(count: int, size: int, done: int) -> float:
        now[0] += 7.0
        return 0.0

    timed = all_reduces(monkeypatch, late)
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("scalejax.measure.devices.collectives.time", clock)

    found = calibrate(tmp_path, TINY_GRID)

    assert len(timed) == 4 + 3
    assert found.cluster.library.residual == pytest.approx(0, abs=1e-6)


def test_buffers_of_all_reduces_are_there_only_while_they_are_timed():
    """Of all sizes and device counts they take gigabytes together."""
    arrays = len(jax.live_arrays())
    timed = probes.all_reduce_round(mesh_of(jax.local_devices()[:2]), 2**22, calls=1)
    assert len(jax.live_arrays()) == arrays

    before = resident_bytes()
    timed()

    assert len(jax.live_arrays()) == arrays
    assert resident_bytes() - before < 2 * probes.BUFFERS * 2**22  # of the arguments, of 3 times


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_busy_machine_is_calibrated_with_a_note(tmp_path, monkeypatch):
    """A sum that is disturbed in every round is farther off than the files hold, which are written
    all the same."""
    all_reduces(monkeypatch, lambda count, size, done: 9.0 * ((count, size) == (4, 64)))

    found = calibrate(tmp_path, TINY_GRID)
    found.save(tmp_path)

    cluster, _ = load_cluster_and_site(str(tmp_path / "cluster.toml"))
    assert cluster.library.residual == 2.0
    assert (
        "between devices of one process: the times of all-reduces do not measure"
        in (found.notes[0])
    )


@pytest.mark.slow  # two processes import JAX, and measure this machine
def test_processes_communicate_over_loopback():
    """Two real processes; a megabyte takes longer than nothing and less than a second."""

    stages: list[Progress] = []
    between = between_processes(2, TINY_GRID, "a test", stages.append, sizes=(64, 2**20))

    small, large = between.collectives
    assert between.chip.measured is not None
    assert (small.device_count, small.size_bytes) == (2, 64)
    assert 0 < small.seconds < 1
    assert 0 < large.seconds < 1
    assert [each.part for each in stages[:2]] == ["collectives in 2 processes"] * 2
    assert len(stages) == 2 + probe_count(TINY_GRID, jax.devices()[0])
    assert Progress(part="matrix products in 2 processes") in stages


@pytest.mark.slow  # measures matrix products for seconds; the next test has what is around them
def test_this_machine_is_measured_and_read_back(tmp_path, monkeypatch):
    """A tiny grid: the files describe what was measured, and a step can be predicted with them."""
    monkeypatch.setattr("scalejax.measure.devices._process_counts", list)
    monkeypatch.setattr("scalejax.measure.devices._device_counts", lambda: [2, 4])
    monkeypatch.setattr("scalejax.measure.devices.collectives.SIZES", (64, 2**20))

    stages: list[Progress] = []
    found = calibrate(tmp_path, TINY_GRID, stages.append)
    paths = found.save(tmp_path)

    cluster, site = load_cluster_and_site(str(tmp_path / "cluster.toml"))
    assert len(stages) == stage_count(TINY_GRID)
    assert (cluster, site) == (found.cluster, found.site)
    assert site.conditions.storage_bytes_per_second
    assert paths[0] == tmp_path / "cluster.toml"
    assert {path.name for path in paths} >= {"cluster.toml", "chip.toml"}
    program = program_of(product_of(64, flop=2 * 64**3))
    assert predict(program, cluster).step_seconds > 0
    assert "scalejax calibrate" in cluster.sources["*"]


LEAVES = """
import sys, time
from multiprocessing.connection import Connection

caller = Connection(int(sys.argv[1]))
caller.recv()  # what to call
if caller.recv() == 1:  # rank
    sys.exit("segmentation fault")
time.sleep(600)
"""


def test_a_process_that_leaves_a_collective_ends_the_measurement(monkeypatch):
    """The other one would wait for it for minutes: it is ended, and why is said."""

    def worker(call: object, *, environment: dict[str, str]) -> Worker:
        return Worker("nothing", program=LEAVES, environment=environment)

    monkeypatch.setattr("scalejax.measure.devices.processes.Worker", worker)

    start = time.monotonic()
    with pytest.raises(ConfigError, match="process 1 of them failed: segmentation fault"):
        between_processes(2, TINY_GRID, "a test")

    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_processes_that_cannot_communicate_leave_the_rest_measured(tmp_path, monkeypatch):
    """What was measured is kept, and a note says what is missing."""

    def refuse(*unused: object) -> Between:
        raise ConfigError("processes=2 is refused: no loopback.")

    monkeypatch.setattr("scalejax.measure.devices.between_processes", refuse)
    monkeypatch.setattr("scalejax.measure.devices._device_counts", lambda: [2])
    monkeypatch.setattr("scalejax.measure.devices.collectives.SIZES", (64,))
    monkeypatch.setattr("scalejax.measure.devices.machine.measure_chip", lambda *_: CHIP)

    found = calibrate(tmp_path, TINY_GRID)

    assert found.processes is None
    assert "no loopback" in found.notes[0]
    assert [path.name for path in found.save(tmp_path)][:2] == ["cluster.toml", "chip.toml"]


def write_run(folder: Path, devices: int = 1) -> None:
    """A folder of a run whose steps took 10 ms."""
    folder.mkdir()
    program = program_of(product_of(64, flop=10**7), devices=devices)
    serialization.save(program, folder / "program.json")
    with closing(MeasurementLog(folder / "measurements.jsonl")) as log:
        for step in (1, 2, 3):
            log.append(
                TrainMeasurement(
                    step=step,
                    epoch=step,
                    loss=1.0,
                    accuracy=0.5,
                    learning_rate=0.1,
                    step_seconds=0.01,
                    samples_per_second=800.0,
                    elapsed_seconds=0.01 * step,
                )
            )


def test_a_fit_is_written_beside_what_was_measured(tmp_path, monkeypatch, capsys):
    """The measured cluster, which train uses, stays; what is written predicts what is printed."""
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))
    folder = tmp_path / "this-machine"
    measured = cluster_of(chip=replace(CHIP, name="cpu", measured=MEASURED))
    site = Site(conditions=RunConditions(restart_seconds=60.0))
    save_cluster(measured, site, folder / "cluster.toml")
    names = [str(tmp_path / name) for name in ("one", "two")]
    for devices, name in enumerate(names, start=1):
        write_run(Path(name), devices)

    assert main(["calibrate", "--from", *names]) == 0

    assert load_cluster_and_site(str(folder / "cluster.toml")) == (measured, site)
    fitted, kept = load_cluster_and_site(str(folder / "cluster-fitted.toml"))
    out = capsys.readouterr().out
    assert f"wrote {folder / 'cluster-fitted.toml'}" in " ".join(out.split())
    runs = read_runs([Path(name) for name in names])
    fit = fit_runs(measured, runs, site)
    assert (fit.cluster, fit.site) == (fitted, kept)
    assert kept.conditions.restart_seconds == 60.0
    assert [each.predicted_seconds for each in fit.errors] == [
        pytest.approx(predict(run.program, fitted).step_seconds) for run in runs
    ]


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["--from", "run", "empty"], "run scalejax calibrate first"),
        (["--from", "run"], "it must be 2 to 5 run folders"),
        (
            ["--from", "rum", "empty"],
            "it is not a run folder, as scalejax train writes them (did you",
        ),
        (["--from", "run", "./run"], "it is named twice; name each run once"),
        (["--from", "run", "linked"], "it is the same folder as 'run'"),
        (["--from", "run", "empty", "--cluster", "dgx-h100"], "its step ran on CPUs, and dgx-h100"),
        (["--cluster", "dgx-h100"], "it is for --from"),
        (["--form", "one"], "did you mean --from"),
    ],
)
def test_what_cannot_be_fitted_is_refused(arguments, refused, tmp_path, monkeypatch, capsys):
    """In one sentence, with exit code 2."""
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    for name in ("run", "empty"):
        write_run(tmp_path / name)
    (tmp_path / "linked").symlink_to(tmp_path / "run")

    assert main(["calibrate", *arguments]) == 2

    error = capsys.readouterr().err
    assert refused in error
    assert len(error.splitlines()) == 1
