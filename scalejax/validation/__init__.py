"""Validation of predictions against a ledger of published step times.

For step times: `read_ledger` reads the rows, `compile_cases` finds the program and the cluster of
each, `evaluate` predicts, and `validation` summarises. No JAX is needed: programs come from an
archive, from the closed form, from the user's cache, or from workers that compile. `read_any`
reads ledgers of any kind, and `validated` does the rest.

To try other constants, call `with_chips` on the result of `compile_cases` and evaluate again.
"""

from scalejax.validation.cases import Case, Skipped, case_of
from scalejax.validation.evaluation import (
    CompiledCase,
    Validation,
    compile_cases,
    evaluate,
    validate,
    validated,
    validation,
    with_chips,
)
from scalejax.validation.kinds import Ledger, find_ledger, read_any, shipped_ledgers
from scalejax.validation.ledger import LedgerRow, read_ledger
from scalejax.validation.summary import (
    NOT_COMPILED,
    KindSummary,
    MemorySummary,
    RowResult,
    Summary,
    summaries,
)

__all__ = [
    "NOT_COMPILED",
    "Case",
    "CompiledCase",
    "KindSummary",
    "Ledger",
    "LedgerRow",
    "MemorySummary",
    "RowResult",
    "Skipped",
    "Summary",
    "Validation",
    "case_of",
    "compile_cases",
    "evaluate",
    "find_ledger",
    "read_any",
    "read_ledger",
    "shipped_ledgers",
    "summaries",
    "validate",
    "validated",
    "validation",
    "with_chips",
]
