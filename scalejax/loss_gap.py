"""How far apart the loss curves of two runs lie once both have warmed up: one figure.

Knows records; nothing of batches and rates, nor of how the figure is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalejax.record import TrainMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGap:
    """The distance of two curves of training loss, both smoothed alike."""

    from_epoch: float
    """Where it begins: after the warmup of both."""
    to_epoch: float
    """Where it ends: with the shorter one."""
    max_gap: float
    """Largest distance of their means over a window."""
    mean_gap: float
    """Mean distance of their means over a window."""


def loss_gap(
    one: Sequence[TrainMeasurement],
    other: Sequence[TrainMeasurement],
    *,
    after_epoch: float,
    window_epochs: float = 1.0,
) -> LossGap | None:
    """The distance between two curves of training loss against epochs.

    max and mean over windows w of | mean over w of one - mean over w of other |, each curve taken
    as straight between the lines of its record, so that it does not matter how many there are. A
    loss stands where its parameters had been trained to: before its update.

    Args:
        one: the lines of a run, in order.
        other: those of another run on the same data.
        after_epoch: when both have warmed up.
        window_epochs: length of a window, stretched or shrunk to divide what is compared.

    Returns:
        None where there is nothing to compare: no epoch in common, or a loss in it that is not
        finite.

    Source: Goyal et al. 2017, section 5.2 and figure 3, arXiv 1706.02677, who lay the curves over
        each other.
    """
    curves = [_curve(one), _curve(other)]
    if any(len(epochs) < 2 for epochs, _ in curves):
        return None
    begin = max(after_epoch, *(epochs[0] for epochs, _ in curves))
    end = min(epochs[-1] for epochs, _ in curves)
    if begin >= end:
        return None
    edges = np.linspace(begin, end, max(1, round((end - begin) / window_epochs)) + 1)
    gaps = np.abs(np.subtract(*(_window_means(*curve, edges) for curve in curves)))
    if not np.isfinite(gaps).all():
        return None
    return LossGap(
        from_epoch=float(begin),
        to_epoch=float(end),
        max_gap=float(gaps.max()),
        mean_gap=float(gaps.mean()),
    )


def _curve(lines: Sequence[TrainMeasurement]) -> tuple[np.ndarray, np.ndarray]:
    """Epochs trained before each loss, and the losses."""
    epochs = [line.epoch - _epochs_of_update(line, lines[0]) for line in lines]
    losses = [np.nan if line.loss is None else line.loss for line in lines]
    return np.array(epochs), np.array(losses)


def _epochs_of_update(line: TrainMeasurement, first: TrainMeasurement) -> float:
    """Passes over the data that the update of `line` made: as many more than those of the first
    line as its batch is larger, within the samples that no whole batch takes in."""
    of_first = first.epoch / first.step
    if line.global_batch is None or first.global_batch is None:
        return of_first
    return of_first * line.global_batch / first.global_batch


def _window_means(epochs: np.ndarray, losses: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean of the curve between each two edges, which lie within it."""
    points = np.union1d(epochs, edges)
    values = np.interp(points, epochs, losses)
    areas = np.diff(points) * (values[1:] + values[:-1]) / 2
    sums = np.concatenate([[0.0], np.cumsum(areas)])[np.searchsorted(points, edges)]
    return np.diff(sums) / np.diff(edges)
