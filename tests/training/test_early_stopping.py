"""Early stopping agrees with Keras 3, case by case."""

import math

import pytest

from scalejax.config.training import EarlyStoppingConfig
from scalejax.training.stopping import EarlyStopping

NAN = math.nan

# (fields, metric after each epoch, epoch in which Keras stops, epoch whose weights it restores).
# Worked out by hand from `EarlyStopping.on_epoch_end`, and confirmed by running Keras 3.15.1 on
# its JAX backend; epochs count from 0.
PARITY = {
    "patience 0 stops in the first epoch that is no better": (
        {"patience": 0},
        [1.0, 0.9, 0.95, 0.1],
        2,
        1,
    ),
    "patience 1 is the same": ({"patience": 1}, [1.0, 0.9, 0.95, 0.1], 2, 1),
    "platform_facts finding 10: flax would stop in epoch 4": (
        {"patience": 2},
        [1.0, 0.9, 0.95, 0.96, 0.97, 0.98],
        3,
        1,
    ),
    "an improvement renews patience": (
        {"patience": 2},
        [1.0, 1.1, 0.9, 0.95, 0.8, 0.9, 0.9],
        6,
        4,
    ),
    "an equal value is no improvement": ({"patience": 1}, [1.0, 1.0, 0.5], 1, 0),
    "accuracy must rise": (
        {"monitor": "validation_accuracy", "patience": 1},
        [0.1, 0.2, 0.15],
        2,
        1,
    ),
    "accuracy of 0 in the first epoch is better than nothing": (
        {"monitor": "validation_accuracy", "patience": 1},
        [0.0, 0.0],
        1,
        0,
    ),
    "a change within min_delta is none": (
        {"patience": 1, "min_delta": 0.1},
        [1.0, 0.95, 0.5],
        1,
        0,
    ),
    "a change of min_delta is none, in float32": (
        {"patience": 1, "min_delta": 0.1},
        [1.0, 0.8999999762, 0.5],  # the float32 nearest 0.9: in float64 it would be a change
        1,
        0,
    ),
    "a change just above min_delta is one": (
        {"patience": 1, "min_delta": 0.1},
        [1.0, 0.89, 0.5],
        None,
        2,
    ),
    "the sign of min_delta does not matter": (
        {"patience": 1, "min_delta": -0.1},
        [1.0, 0.95, 0.5],
        1,
        0,
    ),
    "small changes add up against the best, not the last": (
        {"patience": 3, "min_delta": 0.1},
        [1.0, 0.95, 0.89, 0.85],
        None,
        2,
    ),
    "a better value that misses the baseline does not renew patience": (
        {"patience": 2, "baseline": 0.5},
        [1.0, 0.9, 0.8, 0.81],
        3,
        2,
    ),
    "nor does it stop while it is better": (
        {"patience": 2, "baseline": 0.5},
        [1.0, 0.9, 0.8, 0.7],
        None,
        3,
    ),
    "a value that beats the baseline renews patience": (
        {"patience": 2, "baseline": 0.5},
        [1.0, 0.4, 0.45, 0.46],
        3,
        1,
    ),
    "the first epochs are not watched": (
        {"patience": 1, "start_from_epoch": 2},
        [0.1, 0.2, 0.9, 0.8, 0.85],
        4,
        3,
    ),
    "the first epoch is the best so far, even with NaN": (
        {"patience": 2},
        [NAN, NAN, NAN],
        2,
        0,
    ),
    "nothing beats NaN": ({"patience": 2}, [NAN, 0.5, 0.4], 2, 0),
    "a first epoch that misses the baseline counts": (
        {"patience": 2, "baseline": 0.5},
        [1.0, 1.1],
        1,
        0,
    ),
    "NaN after a best one": ({"patience": 2}, [1.0, NAN, NAN], 2, 0),
    "it never stops in epoch 0": ({"patience": 0}, [math.inf], None, 0),
    "after the last epoch the best weights come back, stopped or not": (
        {"patience": 5},
        [1.0, 0.5, 0.6],
        None,
        1,
    ),
}


@pytest.mark.parametrize(("fields", "values", "stops", "best"), PARITY.values(), ids=PARITY)
def test_stops_and_restores_as_keras_does(fields, values, stops, best):
    """One row of the parity table."""
    stopping = EarlyStopping(EarlyStoppingConfig(**fields))
    stopped_in = None

    for epoch, value in enumerate(values):
        stopping.update(epoch, value)
        if stopping.has_stopped:
            stopped_in = epoch
            break

    assert stopped_in == stops
    assert stopping.best_epoch == best


def test_epochs_without_evaluation_are_no_epochs_without_improvement():
    """Where only every second epoch is evaluated, patience counts those."""
    stopping = EarlyStopping(EarlyStoppingConfig(patience=2))

    for epoch, value in ((1, 1.0), (3, 1.1), (5, 1.2)):
        assert not stopping.has_stopped
        stopping.update(epoch, value)

    assert stopping.has_stopped
    assert stopping.best_epoch == 1
