"""Data sets as rows, one file per kind, and the Parquet files that are made of them."""

from scalejax.data.convert.convert import Converted, Wanted, convert
from scalejax.data.convert.open import open_rows
from scalejax.data.convert.rows import Rows, RowsOptions

__all__ = ["Converted", "Rows", "RowsOptions", "Wanted", "convert", "open_rows"]
