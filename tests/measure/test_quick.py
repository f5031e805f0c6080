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
from scalejax.measure.devices import timing
from scalejax.measure.devices.quick import local_cluster, work_of
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import Operation
from scalejax.training.mesh import build_mesh


@pytest.fixture(scope="module")
def mesh():
    """Two devices."""
    return build_mesh(Layout(data=2))


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
    # probes in order: nothing, a pair of products, 17 of them, a step, and then the shapes
    launch = (3e-3 - 2e-3) / (2 * 16)
    product, convolution = (operation_time(each, cluster.chip) for each in (PRODUCT, CONVOLUTION))
    assert product.seconds == pytest.approx(4e-3 + launch)  # of the fifth, without the first
    assert convolution.busy_seconds == pytest.approx(5e-3)
    assert cluster.chip.attainable.step_overhead_seconds == pytest.approx(4e-3)


def test_a_mean_holds_what_other_programs_take():
    """The time of a step is the sum of its parts' means, not of their fastest calls."""
    calls, now = iter(range(100)), [0.0]

    def call():
        now[0] += 0.021 if next(calls) % 4 == 3 else 0.001

    (mean,) = timing.seconds_in_turn(
        [call], rounds=16, seconds=math.inf, turn_seconds=0.0, clock=lambda: now[0]
    )

    assert mean == pytest.approx(0.006)  # 1 ms, and 20 more in a quarter of the calls


@pytest.mark.parametrize(("steps", "is_worth"), [(10, False), (10_000, True)])
def test_short_runs_are_not_measured_for_longer_than_they_take(monkeypatch, steps, is_worth):
    """Ten seconds are spent on the shapes of a run that takes longer."""
    asked = []
    monkeypatch.setattr(own_prediction, "local_cluster", lambda *given: asked.append(given))
    monkeypatch.setattr(own_prediction, "read_step", lambda *_: "program")
    monkeypatch.setattr(own_prediction, "predict", lambda *_: SimpleNamespace(step_seconds=0.01))
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cpu")]))
    run: Any = SimpleNamespace(total_steps=steps, phases=(None,))
    programs: Any = SimpleNamespace(update=None)

    own_prediction._measured_cluster(run, mesh, programs, 0)

    assert asked == ([(mesh,), (mesh, "program")] if is_worth else [(mesh,)])


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
