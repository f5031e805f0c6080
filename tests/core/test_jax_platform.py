"""Promises of where JAX runs."""

import logging
import os
import sys

import pytest

from scalejax.core import environment
from scalejax.core.environment import (
    GPU_FLAGS,
    choose_platform,
    compiler_settings,
    has_required_flags,
    set_required_flags,
)
from scalejax.core.errors import ConfigError


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """The driver's device file, not there yet; and an environment to spoil."""
    path = tmp_path / "nvidiactl"
    monkeypatch.setattr(environment, "_NVIDIA_DRIVER", str(path))
    monkeypatch.setattr(environment, "_ACCELERATOR_FILES", (str(path),))
    # set and then deleted, so that what the test leaves there is taken back
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return path


def test_without_a_driver_jax_looks_for_the_cpu_alone(driver):
    """A GPU compiler plug-in without a driver would log an error at every start."""
    choose_platform()

    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert "XLA_FLAGS" not in os.environ


def logged(caplog: pytest.LogCaptureFixture, plugin: str) -> str:
    """What JAX's log says of a plug-in that fails, as `discover_pjrt_plugins` logs it."""
    try:
        raise RuntimeError("Unable to load cuDNN.")
    except RuntimeError:
        logging.getLogger("jax._src.xla_bridge").exception(
            "Jax plugin configuration error: Exception when calling %s.initialize()", plugin
        )
    (record,) = caplog.records
    return logging.Formatter("%(message)s").format(record)


def test_a_gpu_plugin_without_a_driver_is_told_in_one_line(driver, caplog):
    """Whose driver is broken has no other explanation; twenty lines of cuDNN explain less."""
    assert logged(caplog, "jax_plugins.xla_cuda13") == (
        "JAX's plug-in jax_plugins.xla_cuda13 could not be initialized: no NVIDIA driver (there is "
        f"no {driver}); JAX goes on without NVIDIA GPUs (RuntimeError: Unable to load cuDNN.)"
    )


@pytest.mark.parametrize(
    ("plugin", "has_driver"), [("jax_plugins.xla_cuda13", True), ("jax_plugins.own", False)]
)
def test_other_failures_of_plugins_are_told_in_full(plugin, has_driver, driver, caplog):
    """With a driver the traceback is what to look at; other plug-ins are none of ours."""
    if has_driver:
        driver.touch()

    said = logged(caplog, plugin)

    assert said.startswith(f"Jax plugin configuration error: Exception when calling {plugin}")
    assert "Traceback" in said


def test_what_the_user_chose_stays(driver, monkeypatch):
    """JAX_PLATFORMS is the user's."""
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    choose_platform()

    assert os.environ["JAX_PLATFORMS"] == "tpu"


def test_a_gpu_trains_under_the_flags_it_is_costed_under(driver, monkeypatch):
    """The compiler reads flags in order: the user's come last and win."""
    driver.touch()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/dump")
    choose_platform()

    assert os.environ["XLA_FLAGS"].split() == [*GPU_FLAGS, "--xla_dump_to=/tmp/dump"]
    assert "JAX_PLATFORMS" not in os.environ


def test_more_virtual_devices_than_a_machine_bears_are_refused(driver):
    """100,000 took 14,000 threads and 19 GB before anything else refused them."""
    with pytest.raises(ConfigError, match=r"cpu_devices=100000 .*at most 512"):
        choose_platform(100_000)


@pytest.mark.parametrize(("installed", "count"), [("0.10.2", 0), ("0.12.0.1", 1)])
def test_the_compiler_gets_the_flag_that_it_needs(driver, monkeypatch, installed, count):
    """Before JAX starts, once, and in front of the user's; it is not counted among the user's."""
    monkeypatch.setattr(environment, "version", lambda package: installed)
    monkeypatch.delitem(sys.modules, "jax._src.xla_bridge", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/dump")
    assert has_required_flags() is (count == 0)
    set_required_flags()
    set_required_flags()

    assert has_required_flags()
    assert os.environ["XLA_FLAGS"].split()[count:] == ["--xla_dump_to=/tmp/dump"]
    assert compiler_settings() == {"XLA_FLAGS": "--xla_dump_to=/tmp/dump"}
