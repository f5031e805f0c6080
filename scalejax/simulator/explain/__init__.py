"""Explanation of a step's time: its breakdown, costliest operations and possible improvements.

Arithmetic on a compiled program and a cluster; imports no JAX, and is independent of its display.
"""

from scalejax.simulator.explain.explanation import Explanation, MemoryChoice, Term, explain
from scalejax.simulator.explain.trace_match import TraceMatch, match_trace
from scalejax.simulator.explain.unexpected_collectives import UnexpectedCollective
from scalejax.simulator.explain.what_if import Improvement, improvements

__all__ = [
    "Explanation",
    "Improvement",
    "MemoryChoice",
    "Term",
    "TraceMatch",
    "UnexpectedCollective",
    "explain",
    "improvements",
    "match_trace",
]
