"""What tests compare of two runs."""

from pathlib import Path
from typing import Any

from scalejax.training.record import EvaluationMeasurement, RunRecord, TrainMeasurement


def figures(folder: Path) -> list[tuple[Any, ...]]:
    """Everything measured in a run but the time it took: (step, loss, accuracy, rate) of updates,
    and of evaluations with 0 for the rate."""
    rows = []
    for line in RunRecord.load(folder).measurements:
        if isinstance(line, TrainMeasurement):
            rows.append((line.step, line.loss, line.accuracy, line.learning_rate))
        elif isinstance(line, EvaluationMeasurement):
            rows.append((line.step, line.test_loss, line.test_accuracy, 0.0))
    return rows
