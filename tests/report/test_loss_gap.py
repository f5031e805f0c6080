"""The gap between two loss curves is what their closed forms say."""

import math
from dataclasses import replace

import pytest

from scalejax.report.sources import loss_gap
from scalejax.training.record import TrainMeasurement

EPOCHS = 10


def lines(loss_at, steps_per_epoch, *, every=1, epochs=EPOCHS):
    """The record of a run whose loss is a function of the epochs trained before it."""
    return [
        TrainMeasurement(
            step=step,
            epoch=step / steps_per_epoch,
            loss=loss_at((step - 1) / steps_per_epoch),
            accuracy=0.5,
            learning_rate=0.1,
            step_seconds=0.1,
            samples_per_second=10.0,
            elapsed_seconds=0.1 * step,
        )
        for step in range(1, epochs * steps_per_epoch + 1, every)
    ]


def straight(epoch):
    """Falls by 0.1 an epoch."""
    return 2 - 0.1 * epoch


def test_a_constant_distance_is_the_gap():
    """However often each run writes a line, and however many steps it makes of an epoch."""
    gap = loss_gap(
        lines(straight, 400, every=7),
        lines(lambda epoch: straight(epoch) + 0.25, 25),
        after_epoch=2.0,
    )

    assert gap is not None
    assert (gap.max_gap, gap.mean_gap) == pytest.approx((0.25, 0.25), rel=1e-9)
    assert gap.from_epoch == 2.0
    assert gap.to_epoch == pytest.approx(EPOCHS - 1 / 25)  # before the last update of the shorter


def test_what_lies_in_the_warmup_does_not_count():
    """Curves that meet after it have no gap."""
    late = lines(lambda epoch: straight(epoch) + max(0.0, 2 - epoch), 50)

    gap = loss_gap(lines(straight, 50), late, after_epoch=2.0)

    assert gap is not None
    assert gap.max_gap == pytest.approx(0, abs=1e-12)


def test_a_gap_that_decays_has_the_means_of_its_windows():
    """exp(-t) over [2, 2 + n w] in n windows: the first mean is the largest, e^-2 (1 - e^-w) / w,
    and the mean of all is that of the whole, e^-2 (1 - e^-nw) / (n w)."""
    one = lines(straight, 1000)
    other = lines(lambda epoch: straight(epoch) + math.exp(-epoch), 1000)

    gap = loss_gap(one, other, after_epoch=2.0, window_epochs=1.0)

    length = EPOCHS - 1 / 1000 - 2
    window = length / 8
    first = math.exp(-2) * (1 - math.exp(-window)) / window
    assert gap is not None
    assert gap.max_gap == pytest.approx(first, rel=1e-5)  # of straight pieces, 1e-3 epochs long
    assert gap.mean_gap == pytest.approx(math.exp(-2) * (1 - math.exp(-length)) / length, rel=1e-5)


def test_a_batch_that_grows_moves_no_loss_in_its_epoch():
    """Where the batch is four times as large, an update makes four times the epochs: of steps as
    many as those of ten such epochs, each loss would stand elsewhere."""
    small, large = 40, 10
    updates = [(n / small, 1 / small, 8) for n in range(5 * small)]
    updates += [(5 + n / large, 1 / large, 32) for n in range(5 * large)]
    grown = [
        replace(line, step=step, epoch=before + made, loss=straight(before), global_batch=batch)
        for step, (line, (before, made, batch)) in enumerate(
            zip(lines(straight, 25), updates, strict=True), start=1
        )
    ]

    gap = loss_gap(lines(straight, 100), grown, after_epoch=1.0)

    assert gap is not None
    assert gap.max_gap == pytest.approx(0, abs=1e-12)
    assert gap.to_epoch == pytest.approx(EPOCHS - 1 / large)


def test_noise_of_single_batches_is_smoothed_away():
    """A loss that goes up and down by 1 from line to line is level."""
    noisy = lines(lambda epoch: straight(epoch) + (-1) ** round(epoch * 100), 100)

    gap = loss_gap(lines(straight, 100), noisy, after_epoch=1.0)

    assert gap is not None
    assert gap.max_gap < 0.02


@pytest.mark.parametrize(
    "other",
    [
        [],
        lines(straight, 10, epochs=1),
        lines(lambda epoch: None if epoch > 5 else straight(epoch), 10),
    ],
    ids=["no line", "too short", "diverged"],
)
def test_without_a_common_stretch_there_is_no_gap(other):
    """A loss that is not finite is at no distance."""
    assert loss_gap(lines(straight, 10), other, after_epoch=2.0) is None
