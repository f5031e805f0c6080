"""How much of a run its devices had nothing to do for want of batches, and what to do about it.

Arithmetic on measurements; measures nothing.
"""

from collections.abc import Sequence

from scalejax.config.input import InputConfig
from scalejax.core.units import format_fraction
from scalejax.training.record import TrainMeasurement

WORTH_SAYING = 0.03
"""Part of the time from which on it is worth a word."""


def wait_share(updates: Sequence[TrainMeasurement]) -> float | None:
    """Part of the time of updates for which devices waited for a batch, 0..1; None if it was not
    measured.

    Of several measurements the first is left out: in it, what makes batches was started.
    """
    known = [(m.data_wait_seconds, m.step_seconds) for m in updates if m.step_seconds > 0]
    known = [(wait, step) for wait, step in known if wait is not None]
    lasting = known[1:] or known
    return sum(wait for wait, _ in lasting) / sum(step for _, step in lasting) if known else None


def wait_in_words(updates: Sequence[TrainMeasurement]) -> str:
    """The same, to be put behind other figures; nothing where it is not worth a word."""
    share = wait_share(updates)
    if share is None or share < WORTH_SAYING:
        return ""
    return f", waited {format_fraction(share)} of the time for input"


def wait_with_advice(
    updates: Sequence[TrainMeasurement], how: InputConfig, cores: int, *, is_tuned: bool = False
) -> str:
    """The same with what to do about it.

    Args:
        updates: what was measured of them.
        how: their batches were made.
        cores: of this host.
        is_tuned: whether the number of workers is the best of those that were tried.
    """
    words = wait_in_words(updates)
    return words and f"{words} ({_advice(how.workers, cores, is_tuned=is_tuned)})"


def _advice(workers: int | str, cores: int, *, is_tuned: bool) -> str:
    """What to try where devices wait for input."""
    if not is_tuned and workers == 0 and cores > 1:
        return f'input.workers = "auto" has processes make batches on the {cores} cores'
    if not is_tuned and isinstance(workers, int) and workers < cores:
        return f"input.workers may be up to the {cores} cores of this host"
    return (
        f"its {cores} cores are at work: smaller examples, as scalejax data convert makes of "
        "images, or more cores for each device would help"
    )
