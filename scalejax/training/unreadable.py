"""Unreadable examples of a run, counted over its processes and logged.

Knows counts and reasons; nothing of readers and of how a row is damaged.
"""

import json
from collections.abc import Sequence
from typing import Literal

from scalejax.config.run import ResolvedRun
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.data.source import Split
from scalejax.training.logger import MetricsLogger
from scalejax.training.multihost import all_gather_text
from scalejax.training.record import Measurement, UnreadableExamples
from scalejax.training.reporter import unreadable_in_words


class SkippedExamples:
    """Counts the unreadable examples of a run, in both parts of its data, over all sessions."""

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self._trained_rows = 0
        self.of: dict[Split, Skipped] = {"train": Skipped(), "test": Skipped()}
        """Unreadable examples that this process found since the last logged line, by part."""

    def tell(self, part: Split, logger: MetricsLogger, *, step: int) -> None:
        """Log the unreadable examples of all processes since the last line, if there are any;
        every process must call it."""
        if self._run.config.input.unreadable == "refuse":
            return
        found = [json.loads(said) for said in all_gather_text(json.dumps(self.of[part].taken()))]
        line = unreadable_examples(
            self._run, part, found, step=step, elapsed_seconds=logger.elapsed_seconds
        )
        if line is not None:
            logger.write(line)
            self.note(line)

    def note(self, measurement: Measurement) -> None:
        """Add the examples of a line of the record."""
        if isinstance(measurement, UnreadableExamples) and measurement.part == "train":
            self._trained_rows += measurement.rows

    @property
    def in_words(self) -> str:
        """Number of unreadable training examples as text to append; empty if there are none."""
        rows = self._trained_rows
        return f", {unreadable_in_words(rows, 'training')} in all epochs together" if rows else ""


def unreadable_examples(
    run: ResolvedRun,
    part: Literal["train", "test"],
    found: Sequence[tuple[int, Sequence[str]]],
    *,
    step: int,
    elapsed_seconds: float,
) -> UnreadableExamples | None:
    """The line of the record for unreadable examples; None if there are none.

    Args:
        run: the run that trains.
        part: part of the data.
        found: for each process, rows skipped and the errors of the first few.
        step: updates made.
        elapsed_seconds: time since training began.
    """
    rows = sum(count for count, _ in found)
    if not rows:
        return None
    return UnreadableExamples(
        step=step,
        epoch=run.epoch_of(step),
        part=part,
        rows=rows,
        reasons=tuple(reason for _, reasons in found for reason in reasons),
        elapsed_seconds=elapsed_seconds,
    )
