"""Lines of a record are what steps and evaluations returned, averaged as asked."""

import numpy as np
import pytest

from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.training.logger import evaluation_measurement
from scalejax.training.record import EvaluationMeasurement

RUN = resolve(
    build(
        RunConfig,
        {
            "model": {"name": "mlp"},
            "data": {"name": "synthetic_images", "train_examples": 8, "test_examples": 8},
            "batch": {"global_batch": 8},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.1, "warmup": "none"},
            "layout": {"data": 1},
        },
    )
)


def measured(*sums: tuple[object, object, object]) -> EvaluationMeasurement:
    """The line of an evaluation whose batches have these sums of losses, hits and examples."""
    logits = {"lowest_logits": np.zeros(2), "highest_logits": np.ones(2)}
    names = ("loss_sum", "correct_sum", "count")
    parts = [
        {**logits, **dict(zip(names, batch, strict=True)), "examples": np.asarray(batch[2]).sum()}
        for batch in sums
    ]
    line = evaluation_measurement(
        RUN, parts, split="test", step=1, seconds=1.0, elapsed_seconds=1.0
    )
    assert isinstance(line, EvaluationMeasurement)
    return line


def test_an_average_is_of_all_examples():
    """Eight examples and then two: (4 + 6) / 10."""
    line = measured((4.0, 6.0, 8.0), (6.0, 1.0, 2.0))

    assert (line.test_loss, line.test_accuracy, line.examples) == (1.0, 0.7, 10)


def test_an_average_of_devices_is_of_those_that_have_examples():
    """Losses (4 + 6) / 10 and 4 / 2 on two devices, and a third that saw nothing: their mean."""
    first = (np.array([4.0, 4.0, 0.0]), np.array([6.0, 1.0, 0.0]), np.array([8.0, 2.0, 0.0]))
    second = (np.array([6.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0]), np.array([2.0, 0.0, 0.0]))
    line = measured(first, second)

    assert line.test_loss == pytest.approx((1.0 + 2.0) / 2)
    assert line.test_accuracy == pytest.approx((0.7 + 0.5) / 2)
    assert line.examples == 12
