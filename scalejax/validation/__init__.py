"""Validation of predictions against a ledger of published step times.

In order: `read_ledger` reads the rows, `compile_cases` finds the program and the cluster of
each, `evaluate` predicts, `validation` summarises. Needs no JAX: programs come from an
archive, from the user's cache, or from workers that compile.

To try other constants: `with_chips` on the result of `compile_cases`, and evaluate again.
"""

from scalejax.validation.cases import Case, Skipped, case_of
from scalejax.validation.evaluation import (
    CompiledCase,
    Validation,
    compile_cases,
    evaluate,
    validate,
    validation,
    with_chips,
)
from scalejax.validation.ledger import LedgerRow, read_ledger
from scalejax.validation.summary import NOT_COMPILED, KindSummary, RowResult, Summary, summaries

__all__ = [
    "NOT_COMPILED",
    "Case",
    "CompiledCase",
    "KindSummary",
    "LedgerRow",
    "RowResult",
    "Skipped",
    "Summary",
    "Validation",
    "case_of",
    "compile_cases",
    "evaluate",
    "read_ledger",
    "summaries",
    "validate",
    "validation",
    "with_chips",
]
