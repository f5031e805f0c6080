"""What the tests of framework transforms share with those of validation."""

from ledger_cases import row

__all__ = ["row"]
