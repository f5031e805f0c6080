"""Which traces can be held against a prediction."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hardware_cases import CHIP, cluster_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_fit import program_of

from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.hardware import load_cluster
from scalejax.measure.trace import recorded_trace

HERE = cluster_of(chip=replace(CHIP, name="cpu"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """Two devices that multiply, recorded outside of any run's folder."""
    folder = tmp_path_factory.mktemp("trace")
    mesh = Mesh(jax.devices()[:2], ("data",))
    rows = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("data")))
    compiled = jax.jit(lambda x: jnp.tanh(x @ x.T)).lower(rows).compile()
    jax.block_until_ready(compiled(rows))
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(compiled(rows))
    return folder


def test_a_trace_of_as_many_devices_is_taken(trace):
    """It says that a CPU was recorded."""
    found = recorded_trace(trace, HERE, 2)

    assert (found.device_count, found.platform) == (2, "cpu")


@pytest.mark.parametrize("devices", [1, 3])
def test_a_trace_of_more_devices_or_of_none_that_add_up_is_refused(trace, devices):
    """Two devices are no part of one or three; of four they may be those of one process."""
    with pytest.raises(ConfigError, match="is of 2 devices; compare it with --devices 2"):
        recorded_trace(trace, HERE, devices)

    assert recorded_trace(trace, HERE, 4).device_count == 2


def test_a_trace_of_another_kind_of_chip_is_refused(trace):
    """Recorded on CPUs, compared with a GPU."""
    with pytest.raises(ConfigError, match="its step ran on CPUs, and dgx-h100 has NVIDIA GPUs"):
        recorded_trace(trace, load_cluster("dgx-h100"), 2)


def test_the_folder_of_a_run_says_on_how_many_devices_it_ran(trace, tmp_path):
    """Two devices of a run on eight are those of one process: eight it is, and not four."""
    program = program_of(flop=1, moved=1, launches=0, payload=1, devices=8)
    serialization.save(program, tmp_path / "program.json")
    (tmp_path / "measurements.jsonl").touch()
    copy = tmp_path / "traces" / "host.xplane.pb"
    copy.parent.mkdir()
    copy.write_bytes(next(trace.rglob("*.xplane.pb")).read_bytes())

    assert recorded_trace(copy, HERE, 8).device_count == 2
    with pytest.raises(ConfigError, match="is of 8 devices; compare it with --devices 8"):
        recorded_trace(tmp_path / "traces", HERE, 4)
