"""What the tests of validation share."""

from ledger_cases import row

__all__ = ["row"]
