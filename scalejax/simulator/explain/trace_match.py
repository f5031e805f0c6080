"""A recorded step beside the predicted one, operation by operation.

The two are matched by the compiler's names, which agree where the same compiler made both
programs of the same step; what has no partner is listed apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scalejax.hardware import Cluster
from scalejax.simulator.explain.labels import in_words
from scalejax.simulator.program import Program
from scalejax.simulator.timeline.attribution import attributions

LEAST_SHARE = 0.5
"""Part of the measured time that must have a partner, for what is compared to tell of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationMatch:
    """One operation, predicted and measured, all its runs in a step together."""

    name: str
    """The compiler's name for it."""
    what: str
    """What it does, in words."""
    source: str | None
    """Where the user's program asked for it."""
    predicted_seconds: float
    """Time that the model gives it; of a collective, hidden or not."""
    measured_seconds: float
    """Time in the trace."""

    @property
    def difference_seconds(self) -> float:
        """By how much the prediction is too long; negative where it is too short."""
        return self.predicted_seconds - self.measured_seconds

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None if no time was measured."""
        if not self.measured_seconds:
            return None
        return self.difference_seconds / self.measured_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMatch:
    """A trace and a prediction of the same step."""

    matches: tuple[OperationMatch, ...]
    """Operations in both, the largest difference first."""
    only_measured: tuple[tuple[str, float], ...]
    """(name, seconds) of what only the trace has, the longest first."""
    only_predicted: tuple[tuple[str, float], ...]
    """(name, seconds) of what only the program has, the longest first."""

    @property
    def predicted_seconds(self) -> float:
        """Time of all matched operations, predicted."""
        return sum(match.predicted_seconds for match in self.matches)

    @property
    def measured_seconds(self) -> float:
        """Time of all matched operations, measured."""
        return sum(match.measured_seconds for match in self.matches)

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured of all matched operations; None if nothing matches."""
        if not self.measured_seconds:
            return None
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def warning(self) -> str | None:
        """One sentence where too little matches to compare by; None where enough does."""
        if self.matched_share >= LEAST_SHARE:
            return None
        return (
            "the operations that match hold less than half of the measured time; the trace is of "
            "another step or compiler."
        )

    @property
    def matched_share(self) -> float:
        """Part of the measured time that has a partner, 0..1."""
        total = self.measured_seconds + sum(seconds for _, seconds in self.only_measured)
        return self.measured_seconds / total if total else 0.0


def match_trace(
    program: Program, cluster: Cluster, measured_by_name: Mapping[str, float]
) -> TraceMatch:
    """The operations of `program` on `cluster` beside those that were measured.

    Args:
        program: the compiled step.
        cluster: the hardware that the step was recorded on.
        measured_by_name: seconds in one step by the compiler's name, all runs together.
    """
    matches, only_predicted = [], []
    left = dict(measured_by_name)
    for attribution in attributions(program, cluster):
        operation = attribution.operation
        measured = left.pop(operation.name, None)
        if measured is None:
            only_predicted.append((operation.name, attribution.seconds))
            continue
        matches.append(
            OperationMatch(
                name=operation.name,
                what=in_words(operation),
                source=operation.source,
                predicted_seconds=attribution.seconds,
                measured_seconds=measured,
            )
        )
    return TraceMatch(
        matches=tuple(sorted(matches, key=lambda match: -abs(match.difference_seconds))),
        only_measured=_longest(list(left.items())),
        only_predicted=_longest(only_predicted),
    )


def _longest(entries: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(entries, key=lambda entry: -entry[1]))
