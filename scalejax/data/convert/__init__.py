"""Conversion of data sets in several formats, one module each, to Parquet files."""

from scalejax.data.convert.convert import ConvertOptions, convert
from scalejax.data.convert.open import open_rows
from scalejax.data.convert.rows import Rows, RowsOptions

__all__ = ["ConvertOptions", "Rows", "RowsOptions", "convert", "open_rows"]
