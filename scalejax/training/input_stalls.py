"""Input stalls of a run: the fraction of time that devices waited for batches, with advice.

Arithmetic on measurements; measures nothing.
"""

from collections.abc import Sequence

from scalejax.config.input import InputConfig
from scalejax.core.units import format_fraction
from scalejax.training.record import TrainMeasurement

WORTH_SAYING = 0.03
"""Smallest fraction of the time at which input stalls are reported."""


def wait_share(updates: Sequence[TrainMeasurement]) -> float | None:
    """Fraction of the update time for which devices waited for a batch, 0..1; None if it was not
    measured.

    The first of several measurements is left out, as it includes the start of the input workers.
    """
    known = [(m.data_wait_seconds, m.step_seconds) for m in updates if m.step_seconds > 0]
    known = [(wait, step) for wait, step in known if wait is not None]
    lasting = known[1:] or known
    return sum(wait for wait, _ in lasting) / sum(step for _, step in lasting) if known else None


def wait_in_words(updates: Sequence[TrainMeasurement]) -> str:
    """Wait for input as text to append to other figures; empty below `WORTH_SAYING`."""
    share = wait_share(updates)
    if share is None or share < WORTH_SAYING:
        return ""
    return f", waited {format_fraction(share)} of the time for input"


def wait_with_advice(
    updates: Sequence[TrainMeasurement], how: InputConfig, cores: int, *, is_tuned: bool = False
) -> str:
    """Wait for input with advice on how to reduce it, as text to append; empty below
    `WORTH_SAYING`.

    Args:
        updates: measurements of updates.
        how: input settings of the run.
        cores: CPU cores of this host.
        is_tuned: whether the number of workers was chosen by measurement.
    """
    words = wait_in_words(updates)
    return words and f"{words} ({_advice(how.workers, cores, is_tuned=is_tuned)})"


def _advice(workers: int | str, cores: int, *, is_tuned: bool) -> str:
    """Advice for devices that wait for input."""
    if not is_tuned and workers == 0 and cores > 1:
        return f'input.workers = "auto" has processes make batches on the {cores} cores'
    if not is_tuned and isinstance(workers, int) and workers < cores:
        return f"input.workers can be raised to the {cores} cores of this host"
    return (
        f"its {cores} cores are busy: smaller examples, as scalejax data convert makes from "
        "images, or more cores for each device would help"
    )
