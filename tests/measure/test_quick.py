"""This machine as a cluster: measured, and good to predict with."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalejax.config.parallelism import Layout
from scalejax.measure import own_prediction
from scalejax.measure.devices import probes, quick, timing
from scalejax.measure.devices.machine import mesh_of
from scalejax.measure.devices.quick import local_cluster, work_of
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Operation
from scalejax.training.mesh import build_mesh
from scalejax.training.reporter import Silent
from scalejax.xla.calls import calls_of
from scalejax.xla.compiled import read_compiled


@pytest.fixture(scope="module")
def mesh():
    """Two devices."""
    return build_mesh(Layout(data=2))


@pytest.fixture(autouse=True)
def _idle_cores(monkeypatch):
    """More cores than devices: a call does one operation."""
    monkeypatch.setattr(quick, "machine_cores", lambda: 64)


def test_every_rate_is_measured_and_says_so(mesh):
    """No figure is made up: all are above zero and name this measurement as their source."""
    cluster = local_cluster(mesh)

    chip = cluster.chip
    assert cluster.name == "this-machine"
    assert cluster.devices_per_node == cluster.max_device_count == 2
    # a core of this century: 0.1 GFLOP/s to 100 TFLOP/s, 10 MB/s to 10 TB/s
    assert 1e8 < chip.peak_flop_per_second["f32"] < 1e14
    assert 1e7 < chip.memory_bytes_per_second < 1e13
    assert 0 < chip.attainable.convolution_fraction <= 1
    assert 0 <= chip.attainable.launch_seconds < 1e-2
    assert 0 < cluster.library.methods[0].base_seconds < 1
    assert cluster.link.bytes_per_second > 0
    assert "measured by scalejax.measure.devices.quick" in chip.sources["*"]


def test_virtual_devices_share_the_memory_of_the_machine(mesh):
    """Two devices of one CPU have half its memory each."""
    first_line = Path("/proc/meminfo").read_text().splitlines()[0]  # "MemTotal: 24000000 kB"

    machine_bytes = int(first_line.split()[1]) * 1024

    assert local_cluster(mesh).chip.memory_bytes == pytest.approx(machine_bytes / 2, rel=0.01)


def test_a_process_measures_its_devices_once(mesh):
    """The runs of one process are costed by the same figures."""
    assert local_cluster(mesh) is local_cluster(build_mesh(Layout(fsdp=2)))


PRODUCT = Operation(
    name="dot", kind="matmul", dtype="f32", flop=2 * 48**3, read_bytes=10**4, shape=(1, 48, 48, 48)
)
CONVOLUTION = Operation(
    name="conv",
    kind="convolution",
    dtype="f32",
    flop=2 * 2 * 36 * 8 * 8 * 9,
    read_bytes=10**4,
    shape=(2, 36, 8, 8, 9),
    convolution_pass="filter_gradient",
)


def program_of(*runs, temporary_bytes=0) -> Any:
    """What the measurement reads of a program: operations, how often they run, and memory."""
    memory = SimpleNamespace(temporary_bytes=temporary_bytes)
    return SimpleNamespace(walk=lambda: iter(runs), memory=memory)


def test_the_shapes_with_most_flop_are_timed():
    """Those that are left out are of at most 3 % of the FLOP of a step, in order of their FLOP."""
    rare = replace(PRODUCT, shape=(1, 8, 8, 8), flop=1024)
    moved = replace(PRODUCT, kind="fusion", flop=0, shape=(), write_bytes=5 * 2**20)

    work = work_of(
        program_of((rare, 1), (CONVOLUTION, 1), (PRODUCT, 4), (moved, 1), temporary_bytes=2**23)
    )

    assert work.shapes == ((None, PRODUCT.shape), ("filter_gradient", CONVOLUTION.shape))
    assert work.temporary_bytes == 2**23
    assert work.streamed == (2**16, 2**20, 2**22)  # the power of two below what most moves


def test_a_run_is_costed_by_its_own_shapes(mesh, monkeypatch):
    """A product of a program takes the time that it took alone, with that of a launch."""
    called = []

    def seconds_in_turn(calls, **_):
        called.append(len(calls))
        return [1e-3 * (index + 1) for index in range(len(calls))]

    monkeypatch.setattr("scalejax.measure.devices.quick.seconds_in_turn", seconds_in_turn)
    cluster = local_cluster(mesh, program_of((PRODUCT, 9), (CONVOLUTION, 1)))

    assert local_cluster(mesh, program_of((PRODUCT, 9), (CONVOLUTION, 1))) is cluster
    assert len(called) == 1
    # probes in order: one that is left out, nothing, a pair of products, 17 of them, a step, and
    # then the shapes
    launch = (3e-3 - 2e-3) / (2 * 16)
    product, convolution = (operation_time(each, cluster.chip) for each in (PRODUCT, CONVOLUTION))
    assert product.seconds == pytest.approx(4e-3 + launch)  # of the sixth, without the second
    assert convolution.busy_seconds == pytest.approx(5e-3)
    moved = 24 * 8192 / 2**24 * (6e-3 * 7e-3 * 8e-3) ** (1 / 3)  # of its additions, and 16 MiB's
    overhead = cluster.chip.attainable.step_overhead_seconds
    assert overhead == pytest.approx(5e-3 - 24 * launch - moved)


TEXT = """HloModule a_step

ENTRY %main (x: f32[48,48], y: f32[48,48]) -> f32[48,48] {
  %x = f32[48,48]{1,0} parameter(0)
  %y = f32[48,48]{1,0} parameter(1)
  %a = f32[48,48]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %b = f32[48,48]{1,0} dot(%a, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %c = f32[48,48]{1,0} dot(%b, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %d = f32[48,48]{1,0} dot(%c, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
"""


def test_operations_are_timed_as_the_compiler_wrote_them(mesh, monkeypatch):
    """Three products of rows by columns and one of columns by columns: the mean of what they took,
    by how often there are any."""
    called = []

    def seconds_in_turn(calls, **_):
        called.append(len(calls))
        return [0.0] * 5 + [2e-3, 6e-3] + [1e-3] * (len(calls) - 7)

    monkeypatch.setattr("scalejax.measure.devices.quick.seconds_in_turn", seconds_in_turn)

    cluster = local_cluster(mesh, program_of((PRODUCT, 4)), TEXT)

    # nothing twice, two of pairs of products, a step; two orders; three kinds of two sizes, as
    # none is in the text; sums of two sizes, with and without
    assert called == [5 + 2 + 3 * 2 + 2 * 2]
    assert operation_time(PRODUCT, cluster.chip).busy_seconds == pytest.approx(3e-3)


def test_a_large_convolution_is_timed_with_fewer_samples():
    """An eighth of them takes an eighth of the time beyond that of an empty call."""
    call = calls_of(
        "HloModule a_step\n\n"
        "ENTRY %main (x: f32[16,8,8,4], y: f32[3,3,4,8]) -> f32[16,8,8,8] {\n"
        "  %x = f32[16,8,8,4]{3,2,1,0} parameter(0)\n"
        "  %y = f32[3,3,4,8]{3,2,1,0} parameter(1)\n"
        "  ROOT %a = f32[16,8,8,8]{3,2,1,0} convolution(%x, %y), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f\n}\n"
    )
    ((shape, calls),) = call.items()
    work = quick.Work(shapes=(shape,), calls=((shape, calls),), halved=((shape, 3),))

    ((key, (_, operands)),) = quick._probes(work, shape)
    times = quick._with_calls(work, {key: 3e-3, quick._SMALL: 1e-3})

    assert operands == [(2, 8, 8, 4), (3, 3, 4, 8)]
    assert times[shape] == pytest.approx(1e-3 + 8 * 2e-3)


def test_element_wise_operations_are_timed_by_kind_as_the_program_has_them(mesh):
    """Of 4 MB, a quarter is transposed in 4 times the time: the mean is 1.75 times as long; of
    reductions, half of the bytes are written by no one."""
    text = (
        "HloModule a_step\n\n"
        "ENTRY %main (x: f32[512,256]) -> f32[256,512] {\n"
        "  %x = f32[512,256]{1,0} parameter(0)\n"
        "  ROOT %turned = f32[256,512]{1,0} transpose(%x), dimensions={1,0}\n}\n"
    )
    turned = Operation(name="turned", kind="fusion", dtype="f32", read_bytes=2**20)
    scaled = replace(turned, name="scaled#2")
    program = program_of((turned, 1), (scaled, 3), (PRODUCT, 1))

    work = work_of(program, text)
    times = dict(TIMES)
    for size in work.streamed:
        for kind, _ in quick._shares(work, size):
            times["stream", size, kind] = 7e-6 + (4e-3 if kind == "transposition" else 1e-3)
    times[None, PRODUCT.shape] = 1e-3
    chip = quick._cpu_cluster(tuple(mesh.devices.flat), work, times).chip

    assert work.kinds == ((2**20, (("simple", 0.75), ("transposition", 0.25))),)
    assert chip.measured is not None
    assert chip.measured.stream_rate(2**20) == pytest.approx(2**24 / 1.75e-3)


def test_short_operations_are_repeated_where_all_cores_are_busy(mesh, monkeypatch):
    """A call that does eight takes the overhead of one; with idle cores they would run at once."""
    monkeypatch.setattr(quick, "machine_cores", lambda: 2)
    function, arguments = quick._repeated(quick._function((None, PRODUCT.shape)), 8)
    devices = tuple(mesh.devices.flat)
    work = quick.Work(shapes=((None, PRODUCT.shape),))
    times = {quick._SMALL: 1e-3, (None, PRODUCT.shape): 9e-3}

    x, y = (np.stack([np.full((1, 48, 48), i + k, "f4") for i in range(8)]) for k in (0, 1))

    np.testing.assert_allclose(function(*x, *y), x @ y)
    assert arguments == [(1, 48, 48)] * 16
    assert quick._of_one(devices, work, times)[None, PRODUCT.shape] == pytest.approx(2e-3)
    assert quick._repeats(devices, (None, (1, 4096, 4096, 4096))) == 1
    monkeypatch.setattr(quick, "machine_cores", lambda: 3)
    assert quick._of_one(devices, work, times)[None, PRODUCT.shape] == pytest.approx(9e-3)


SMALL = (None, (1, 64, 64, 64))
STEP_SECONDS = 45e-6
TIMES = {
    "empty call": 7e-6,
    "one": 20e-6,
    "pairs": 52e-6,  # 32 launches more: 1 us each
    "step": STEP_SECONDS,
    SMALL: 20e-6,
    **{("stream", 2**22, kind): 5e-4 for kind in ("simple", "transcendental", "transposition")},
    **{("sum", size, is_reduced): 1e-4 for size in (4, 2**20) for is_reduced in (False, True)},
}


def cluster_of(mesh, times, *shapes):
    """The cluster of these times of probes; further shapes are timed besides `SMALL`."""
    work = quick.Work(shapes=(SMALL, *shapes))
    return quick._cpu_cluster(tuple(mesh.devices.flat), work, {**TIMES, **times})


def test_the_probe_of_a_step_is_predicted_to_take_what_it_took(mesh):
    """Its additions are launched once, not in the time outside of operations too; where launches
    alone would take longer, no time is left for it, and none below zero."""
    arguments = [quick._AWAY] * probes.STATE
    alone = mesh_of(tuple(mesh.devices.flat))
    compiled = timing.compiled_function(lambda *each: [x + 1 for x in each], alone, arguments)
    program = read_compiled(compiled, alone, name="a step")
    slow_launches = cluster_of(mesh, {"pairs": 20e-6 + 32 * 3e-6})

    found = predict(program, cluster_of(mesh, {})).step_seconds

    moved = 24 * 8192 / (4 * 2**22 / (5e-4 - 7e-6))  # of the additions, at 4 MiB in four passes
    assert found == pytest.approx(STEP_SECONDS, rel=0.01)
    assert slow_launches.chip.attainable.step_overhead_seconds == 0
    assert predict(program, slow_launches).step_seconds == pytest.approx(
        24 * 3e-6 + moved, rel=0.01
    )


def test_what_a_call_hides_is_no_rate(mesh):
    """A product that takes what nothing takes says nothing of its FLOP/s; where none says any, the
    machine is not slower than what was measured of any."""
    hidden = (None, (1, 16, 16, 16))

    def rates(times, *shapes):
        chip = cluster_of(mesh, times, *shapes).chip
        assert chip.measured is not None
        return chip.measured.matmul["f32"], chip.peak_flop_per_second["f32"]

    with_other, _ = rates({hidden: 7.1e-6}, hidden)
    _, alone = rates({SMALL: 7.1e-6})
    _, slow = rates({SMALL: 9.0})

    assert [row[:-1] for row in with_other] == [SMALL[1]]
    assert alone == pytest.approx(2 * 64**3 / 7.1e-7)  # a tenth of it
    assert slow == 1e6  # 58 kFLOP/s: other programs had the cores


def test_products_of_few_flop_are_left_to_their_launch():
    """Of 8 to 16 FLOP the time is that of a call, whatever the machine."""
    few = replace(PRODUCT, shape=(1, 2, 2, 2), flop=16)

    assert work_of(program_of((few, 1))).shapes == quick.Work().shapes
    assert work_of(program_of((few, 10**6), (PRODUCT, 1))).shapes == ((None, PRODUCT.shape),)


def test_the_memory_that_is_touched_is_that_of_a_step(mesh):
    """It is temporary, and no result; what writing it takes is no part of its first touch."""
    compiled = timing.compiled_function(
        probes.touch(2**20), mesh_of(tuple(mesh.devices.flat)), [(4,)]
    )
    memory = compiled.memory_analysis()
    work = quick.Work(shapes=(SMALL,), temporary_bytes=2**24)

    def touched(seconds):
        chip = quick._cpu_cluster(
            tuple(mesh.devices.flat), work, {**TIMES, "touch": 7e-6 + seconds}
        ).chip
        assert chip.measured is not None
        return chip.measured.first_touch_seconds(2**24)

    assert memory.temp_size_in_bytes >= 2**20
    assert memory.output_size_in_bytes < 2**10
    written = 2**24 / (4 * 2**22 / (5e-4 - 7e-6))  # 4 MiB in four passes
    assert touched(20e-3) == pytest.approx(20e-3 - written)
    assert touched(1e-4) == 0


@pytest.mark.parametrize("large_seconds", [1e-4, 0.9e-4, 1e-4 + 1e-9])
def test_no_link_is_faster_than_the_memory_it_goes_through(mesh, large_seconds):
    """A sum of 1 MiB that is no slower than one of 4 bytes resolves no rate."""
    cluster = cluster_of(mesh, {("sum", 4, True): 2e-4, ("sum", 2**20, True): 1e-4 + large_seconds})

    assert cluster.link.bytes_per_second == cluster.chip.memory_bytes_per_second


class Machine:
    """Runs products at 1 GFLOP/s beyond a millisecond, which all other probes take."""

    def __init__(self):
        self.rounds: list[list[float]] = []

    def calls(self, _, functions):
        """The arguments' shapes of each probe, in place of the compiled probe."""
        return [shapes for _, shapes in functions]

    def in_turn(self, calls, **_):
        """The seconds of each."""
        found = []
        for shapes in calls:
            seconds = 1e-3
            if len(shapes) == 2 and len(shapes[0]) == 3:
                n = shapes[1][-1]
                seconds += 2 * n * np.prod(shapes[0]) / 1e9  # the left operand has b m k elements
            found.append(seconds)
        self.rounds.append(found)
        return found


def test_large_shapes_are_costed_by_smaller_ones_within_the_budget(mesh, monkeypatch):
    """Two products of 5000^3, which take minutes at 1 GFLOP/s, are called in seconds, and what is
    touched of a terabyte takes no longer."""
    machine, touched = Machine(), []
    monkeypatch.setattr(probes, "touch", touched.append)
    monkeypatch.setattr(quick, "_calls", machine.calls)
    monkeypatch.setattr(quick, "seconds_in_turn", machine.in_turn)
    shapes = ((1, 5000, 5000, 5000), (1, 500, 500, 50_000))
    products = [replace(PRODUCT, flop=2 * np.prod(shape), shape=shape) for shape in shapes]

    runs = ((each, 1) for each in products)

    cluster = local_cluster(mesh, program_of(*runs, temporary_bytes=2**40))

    first, found = machine.rounds
    assert sum(first) + 8 * sum(found) < 5  # four seconds, and a millisecond for each other probe
    assert touched == [2**26, pytest.approx(2**26 * 4 / (8 * 3) / 1e-3)]  # as many as fit
    for product in products:
        seconds = operation_time(product, cluster.chip).busy_seconds
        assert seconds == pytest.approx(product.flop / 1e9)  # a millisecond is an empty call's


@pytest.mark.parametrize(
    ("shape", "most", "expected"),
    [
        ((None, (64, 512, 512, 64)), 2**26, (None, (2, 512, 512, 64))),
        ((None, (1, 512, 512, 512)), 2**26, (None, (1, 256, 512, 256))),
        ((None, (1, 256, 256, 4096)), 2**26, (None, (1, 256, 256, 512))),
        (("forward", (32, 1024, 64, 64, 9)), 2**26, ("forward", (1, 256, 64, 64, 9))),
        ((None, (1, 8, 8, 8)), 2**26, (None, (1, 8, 8, 8))),
    ],
)
def test_a_smaller_shape_is_of_the_same_kind(shape, most, expected):
    """Operands of a gradient stay transposed, windows whole and images square."""
    assert quick._smaller(shape, most) == expected


@pytest.mark.parametrize(
    ("processes", "call_seconds", "calls"),
    [
        (1, 10.0, 2),  # one to warm up, and one that is timed
        (1, 0.5, 1 + 4),  # two probes: a round a second, four within the budget
        (1, 1e-3, 1 + 100),
        (2, 10.0, 2),
        (2, 0.5, 1 + 4),
        (2, 1e-3, 1 + 100),
    ],
)
def test_rounds_end_within_the_budget(monkeypatch, processes, call_seconds, calls):
    """Chosen by what the first calls took; by several processes alike."""
    now, made = 0.0, []

    def call():
        nonlocal now
        now += call_seconds
        made.append(now)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(timing.jax, "process_count", lambda: processes)
    monkeypatch.setattr(timing, "slowest_process", lambda seconds: seconds)

    found = timing.seconds_in_turn(
        [call, call], rounds=100, seconds=4.0, turn_seconds=0.0, clock=lambda: now
    )

    assert found == pytest.approx([call_seconds] * 2)
    assert len(made) == 2 * calls


class Told(Silent):
    """Keeps what is said."""

    def __init__(self):
        self.lines: list[str] = []

    def say(self, text):
        """Keep it."""
        self.lines.append(text)


@pytest.mark.parametrize("others", [(), ("ConfigError: of another process",)])
def test_a_run_goes_on_where_its_devices_cannot_be_measured(monkeypatch, tmp_path, others):
    """A prediction is no reason to stop training: one line says why there is none, also in the
    processes that have measured."""

    def measure(*_):
        if not others:
            raise RuntimeError("out of memory\nwhile a probe ran")
        return "a cluster"

    monkeypatch.setattr(own_prediction, "calibrated_cluster", lambda mesh: None)
    monkeypatch.setattr(own_prediction, "local_cluster", measure)
    monkeypatch.setattr(own_prediction, "all_gather_text", lambda said: (said, *others))
    predict_run: Any = own_prediction.predict_run  # what it is not asked for is not given
    files, told = SimpleNamespace(prediction=tmp_path / "prediction.json"), Told()

    predict_run(files, None, None, None, told)

    (line,) = told.lines
    why = others[0] if others else "RuntimeError: out of memory"
    assert line == f"no prediction: these devices could not be measured ({why})"


def test_a_mean_holds_what_other_programs_take():
    """The time of a step is the sum of its parts' means, not of their fastest calls."""
    calls, now = iter(range(100)), [0.0]

    def call():
        now[0] += 0.021 if next(calls) % 4 == 3 else 0.001

    (mean,) = timing.seconds_in_turn(
        [call], rounds=16, seconds=math.inf, turn_seconds=0.0, clock=lambda: now[0]
    )

    assert mean == pytest.approx(0.006)  # 1 ms, and 20 more in a quarter of the calls


@pytest.mark.parametrize(("steps", "seconds"), [(10, ()), (300, (1.5,)), (10_000, (4.0,))])
def test_short_runs_are_not_measured_for_longer_than_they_take(monkeypatch, steps, seconds):
    """Four seconds are spent on the shapes of a run of over ten, less on one of over two."""
    asked = []
    monkeypatch.setattr(own_prediction, "local_cluster", lambda *given: asked.append(given))
    monkeypatch.setattr(own_prediction, "read_step", lambda *_: "program")
    monkeypatch.setattr(own_prediction, "predict", lambda *_: SimpleNamespace(step_seconds=0.01))
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cpu")]))
    run: Any = SimpleNamespace(total_steps=steps, phases=(None,))
    programs: Any = SimpleNamespace(update=SimpleNamespace(as_text=lambda: "its text"))

    own_prediction._measured_cluster(run, mesh, programs, 0)

    of_program = [given for given in asked if given[1] is not None]
    assert asked[0][:2] == (mesh, None)
    assert of_program == asked[1:] == [(mesh, "program", "its text", each) for each in seconds]


@pytest.mark.parametrize("calibrated", [None, ("a cluster", "its site")])
def test_all_measure_if_one_has_no_calibration(monkeypatch, tmp_path, calibrated):
    """Each looks into a cache of its own: one that measured by itself would wait for the others."""

    class MeasuredError(Exception):
        pass

    def measure(run, mesh, programs, begin):
        raise MeasuredError

    others = ("yes", "no")
    monkeypatch.setattr(own_prediction, "calibrated_cluster", lambda mesh: calibrated)
    monkeypatch.setattr(own_prediction, "all_gather_text", lambda said: (*others, said))
    monkeypatch.setattr(own_prediction, "_measured_cluster", measure)
    predict_run: Any = own_prediction.predict_run  # what it is not asked for is not given
    files = SimpleNamespace(prediction=tmp_path / "prediction.json")

    with pytest.raises(MeasuredError):
        predict_run(files, None, None, SimpleNamespace(later=()), None)
