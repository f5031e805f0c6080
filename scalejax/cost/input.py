"""Waiting for input: a step takes as long as the host needs to deliver the next batch."""

from scalejax.errors import require_above


def input_wait_seconds(
    step_seconds: float, samples_per_node: float, samples_per_second: float
) -> float:
    """Time that devices wait for a batch which is prepared while they compute the one before.

    seconds = max(0, samples / rate - step)

    Left out: the copy from host to device, which overlaps too, and single late batches, which
    prefetching smooths.

    Args:
        step_seconds: time of a step whose input is always there.
        samples_per_node: samples of one step that one node delivers.
        samples_per_second: samples that it can deliver.

    Raises:
        ConfigError: if the node delivers nothing.
    Source: the two stages of a pipeline run at the pace of the slower, as in Murray et al.
        2021, "tf.data: a machine learning data processing framework", arXiv 2101.12127.
    """
    require_above("samples_per_second", samples_per_second, 0)
    return max(0.0, samples_per_node / samples_per_second - step_seconds)
