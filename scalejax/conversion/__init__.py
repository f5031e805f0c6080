"""Data sets as rows, one file per kind, and the Parquet files that are made of them."""

from scalejax.conversion.convert import Converted, Wanted, convert
from scalejax.conversion.rows import Rows, RowsOptions, open_rows

__all__ = ["Converted", "Rows", "RowsOptions", "Wanted", "convert", "open_rows"]
