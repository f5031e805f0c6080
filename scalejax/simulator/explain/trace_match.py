"""Comparison of a profiled step with the predicted one, operation by operation.

Operations are matched by the compiler's names, which agree if one compiler version compiled both
programs; operations without a match are listed separately.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scalejax.hardware import Cluster
from scalejax.simulator.explain.labels import in_words
from scalejax.simulator.program import Program
from scalejax.simulator.timeline.attribution import attributions

LEAST_SHARE = 0.5
"""Fraction of the measured time that must be matched for the comparison to be meaningful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationMatch:
    """One operation, predicted and measured, summed over its runs in a step."""

    name: str
    """The compiler's name for the operation."""
    what: str
    """Description of the operation."""
    source: str | None
    """Place in the user's program that it comes from."""
    predicted_seconds: float
    """Predicted time; for a collective, whether or not it is overlapped."""
    measured_seconds: float
    """Time in the trace."""

    @property
    def difference_seconds(self) -> float:
        """Predicted minus measured time."""
        return self.predicted_seconds - self.measured_seconds

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None if no time was measured."""
        if not self.measured_seconds:
            return None
        return self.difference_seconds / self.measured_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMatch:
    """Comparison of a trace and a prediction of one step."""

    matches: tuple[OperationMatch, ...]
    """Operations in both, the largest difference first."""
    only_measured: tuple[tuple[str, float], ...]
    """(name, seconds) of operations that only the trace has, the longest first."""
    only_predicted: tuple[tuple[str, float], ...]
    """(name, seconds) of operations that only the program has, the longest first."""

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
        """Warning that too little of the measured time is matched; None if enough is."""
        if self.matched_share >= LEAST_SHARE:
            return None
        return (
            "the operations that match hold less than half of the measured time; the trace is of "
            "another step or compiler."
        )

    @property
    def matched_share(self) -> float:
        """Fraction of the measured time that is matched, 0..1."""
        total = self.measured_seconds + sum(seconds for _, seconds in self.only_measured)
        return self.measured_seconds / total if total else 0.0


def match_trace(
    program: Program, cluster: Cluster, measured_by_name: Mapping[str, float]
) -> TraceMatch:
    """Comparison of the operations of `program` on `cluster` with measured ones.

    Args:
        program: the compiled step.
        cluster: the hardware that the step was profiled on.
        measured_by_name: seconds in one step by the compiler's name, summed over all runs.
    """
    matches, only_predicted = [], []
    remaining = dict(measured_by_name)
    for attribution in attributions(program, cluster):
        operation = attribution.operation
        measured = remaining.pop(operation.name, None)
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
        only_measured=_longest(list(remaining.items())),
        only_predicted=_longest(only_predicted),
    )


def _longest(entries: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(entries, key=lambda entry: -entry[1]))
