"""What a run left out because it could not be read: counted over its processes, told in lines.

Knows counts and reasons; not what reads, nor what is wrong with a row.
"""

import json
from collections.abc import Sequence
from typing import Literal

from scalejax.config.run import ResolvedRun
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.data.source import Split
from scalejax.training.logger import MetricsLogger
from scalejax.training.multihost import all_say
from scalejax.training.record import Measurement, UnreadableExamples
from scalejax.training.reporter import unreadable_in_words


class SkippedExamples:
    """Of one run, both of its parts, over all of its sessions."""

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run
        self._trained_rows = 0
        self.of: dict[Split, Skipped] = {"train": Skipped(), "test": Skipped()}
        """What this process found, by part, since the last line."""

    def tell(self, part: Split, logger: MetricsLogger, *, step: int) -> None:
        """Put down what all processes found since the last line, if there is something to say;
        every process must ask."""
        if self._run.config.input.unreadable == "refuse":
            return
        found = [json.loads(said) for said in all_say(json.dumps(self.of[part].taken()))]
        line = unreadable_examples(
            self._run, part, found, step=step, elapsed_seconds=logger.elapsed_seconds
        )
        if line is not None:
            logger.write(line)
            self.note(line)

    def note(self, measurement: Measurement) -> None:
        """Count what a line of the record says."""
        if isinstance(measurement, UnreadableExamples) and measurement.part == "train":
            self._trained_rows += measurement.rows

    @property
    def in_words(self) -> str:
        """What was left out of training, to be put behind other figures; nothing if nothing was."""
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
    """The line of what could not be read; None if there is nothing to say.

    Args:
        run: what trains.
        part: of the data.
        found: by each process: rows left out, and what is wrong with the first few.
        step: updates made.
        elapsed_seconds: since training began.
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
