"""Definitions of throughput, utilisation, efficiency and epoch time.

Predictions and measurements both use them, so that the two can be compared. Seconds, FLOP and
counts in; ratios and rates out.
"""

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least


def steps_per_epoch(train_examples: int, global_batch: int, *, is_filled: bool = False) -> int:
    """Optimizer updates in one pass over the data; an incomplete last batch is dropped, or padded
    and counted if `is_filled`.

    Raises:
        ConfigError: if the batch is larger than the data.
    """
    if global_batch > train_examples:
        accepted = f"it must be at most the {train_examples} training examples of data"
        raise ConfigError(refusal("batch.global_batch", global_batch, accepted))
    return -(-train_examples // global_batch) if is_filled else train_examples // global_batch


def samples_per_second(global_batch: int, step_seconds: float) -> float:
    """Samples trained per second over all devices."""
    require_above("step_seconds", step_seconds, 0)
    return global_batch / step_seconds


def epoch_seconds(train_examples: int, global_batch: int, step_seconds: float) -> float:
    """Time of one pass over the data, not counting input and evaluation."""
    return steps_per_epoch(train_examples, global_batch) * step_seconds


def mfu(
    model_flop: float, step_seconds: float, device_count: int, peak_flop_per_second: float
) -> float:
    """Model FLOP utilisation, 0..1: FLOP the model needs over FLOP the devices could do.

    mfu = model_flop / (step_seconds * device_count * peak_flop_per_second),
    recompute not counted.

    Args:
        model_flop: FLOP of one step over all devices.
        step_seconds: time of one step.
        device_count: devices in the run.
        peak_flop_per_second: dense peak rate of one device at the compute type.

    Source: Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B.
    """
    require_above("step_seconds", step_seconds, 0)
    return model_flop / (step_seconds * device_count * peak_flop_per_second)


def weak_scaling_efficiency(baseline_step_seconds: float, step_seconds: float) -> float:
    """Throughput per device kept when devices and global batch grow alike.

    efficiency = t_baseline / t; above 1 is possible and is not clamped.
    """
    require_above("step_seconds", step_seconds, 0)
    return baseline_step_seconds / step_seconds


def strong_scaling_efficiency(
    baseline_step_seconds: float,
    baseline_devices: int,
    step_seconds: float,
    device_count: int,
) -> float:
    """Throughput per device kept when devices grow and the global batch does not.

    efficiency = (n_baseline t_baseline) / (n t); above 1 is possible and is not clamped.
    """
    require_above("step_seconds", step_seconds, 0)
    require_at_least("device_count", device_count, 1)
    return baseline_devices * baseline_step_seconds / (device_count * step_seconds)
