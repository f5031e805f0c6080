"""Promises of the figures that predictions and measurements share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalejax.core import metrics
from scalejax.core.errors import ConfigError


def test_an_incomplete_last_batch_is_dropped():
    """1,281,167 images at 8192 a step are 156 steps, not 156.4."""
    assert metrics.steps_per_epoch(1_281_167, 8192) == 156
    assert metrics.epoch_seconds(1_281_167, 8192, 0.5) == 78.0


def test_a_batch_beyond_the_data_is_refused():
    """There is no step in such an epoch."""
    with pytest.raises(ConfigError, match=r"global_batch=11 .*at most the 10 "):
        metrics.steps_per_epoch(10, 11)


def test_mfu_by_hand():
    """10 TFLOP in 0.1 s on 2 devices of 100 TFLOP/s is half of what they could do."""
    assert metrics.mfu(10e12, 0.1, 2, 100e12) == pytest.approx(0.5)


def test_strong_scaling_keeps_all_when_twice_the_devices_halve_the_time():
    """And half of it when the time stays."""
    assert metrics.strong_scaling_efficiency(1.0, 8, 0.5, 16) == 1.0
    assert metrics.strong_scaling_efficiency(1.0, 8, 1.0, 16) == 0.5


@given(seconds=st.floats(1e-6, 1e6), slower=st.floats(1, 100))
def test_weak_scaling_falls_as_the_step_grows(seconds, slower):
    """Throughput per device is what the step leaves of it."""
    efficiency = metrics.weak_scaling_efficiency(seconds, seconds * slower)

    assert efficiency == pytest.approx(1 / slower)


def test_a_step_takes_time():
    """Zero seconds is no measurement."""
    with pytest.raises(ConfigError, match="step_seconds=0"):
        metrics.samples_per_second(32, 0)
