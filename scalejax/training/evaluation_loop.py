"""Evaluates a run on all of its test data, batch by batch.

Knows the compiled evaluation and its data; not when an evaluation is due.
"""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax

from scalejax.config.run import ResolvedRun
from scalejax.data.loader.loader import evaluation_batches
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.training.evaluation import Evaluation
from scalejax.training.features import open_examples
from scalejax.training.input_tuning import share_memory_with_workers
from scalejax.training.logger import MetricsLogger, evaluation_measurement
from scalejax.training.record import EvaluationMeasurement
from scalejax.training.reporter import Reporter
from scalejax.training.state import TrainState


class RunEvaluation:
    """The evaluation of `run`, and its test data."""

    def __init__(
        self,
        run: ResolvedRun,
        evaluation: Evaluation,
        compiled: Any,
        skipped: Skipped,
        reporter: Reporter,
    ) -> None:
        self._run = run
        self._evaluation = evaluation
        self._compiled = compiled
        self._skipped = skipped
        source = open_examples(run, "test", reporter)
        self._source = share_memory_with_workers(source, run.config.input)

    def measure(
        self,
        state: TrainState,
        logger: MetricsLogger,
        *,
        step: int,
        is_stopped: Callable[[], int],
    ) -> EvaluationMeasurement | None:
        """Test metrics of `state`, which is after `step` updates; None if `is_stopped`, called
        after every batch, returns a signal."""
        begin, sums = time.perf_counter(), []
        weights = self._evaluation.weights(state)
        batches = evaluation_batches(
            self._source, self._evaluation.batch, self._run.config.input, self._skipped
        )
        with closing(batches):
            for batch in batches:
                logger.heartbeat.at("evaluating", step)
                if len(sums) > 1:
                    jax.block_until_ready(sums[-2])  # else a fast host queues unlimited batches
                sums.append(self._compiled(*weights, batch))
                if is_stopped():
                    return None
        parts = jax.device_get(sums)
        return evaluation_measurement(
            self._run,
            parts,
            step=step,
            seconds=time.perf_counter() - begin,
            elapsed_seconds=logger.elapsed_seconds,
        )
