"""Why a step takes as long as it does: where its time goes, and what would shorten it.

Arithmetic on a compiled program and a cluster; knows no JAX, and nothing of how it is shown.
"""

from scalejax.explain.explanation import CostlyOperation, Explanation, Term, explain
from scalejax.explain.improvements import Improvement, improvements
from scalejax.explain.trace_match import OperationMatch, TraceMatch, match_trace
from scalejax.explain.unexpected import UnexpectedCollective, unexpected_collectives

__all__ = [
    "CostlyOperation",
    "Explanation",
    "Improvement",
    "OperationMatch",
    "Term",
    "TraceMatch",
    "UnexpectedCollective",
    "explain",
    "improvements",
    "match_trace",
    "unexpected_collectives",
]
