"""This machine as a cluster: measured, and good to predict with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalejax.config.parallelism import Layout
from scalejax.measure import own_prediction
from scalejax.measure.devices.quick import local_cluster
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


@pytest.mark.parametrize("calibrated", [None, ("a cluster", "its site")])
def test_all_measure_if_one_has_no_calibration(monkeypatch, tmp_path, calibrated):
    """Each looks into a cache of its own: one that measured by itself would wait for the others."""

    class MeasuredError(Exception):
        pass

    def measure(mesh):
        raise MeasuredError

    others = ("yes", "no")
    monkeypatch.setattr(own_prediction, "calibrated_cluster", lambda mesh: calibrated)
    monkeypatch.setattr(own_prediction, "all_gather_text", lambda said: (*others, said))
    monkeypatch.setattr(own_prediction, "local_cluster", measure)
    predict_run: Any = own_prediction.predict_run  # what it is not asked for is not given
    files = SimpleNamespace(prediction=tmp_path / "prediction.json")

    with pytest.raises(MeasuredError):
        predict_run(files, None, None, SimpleNamespace(later=()), None)
