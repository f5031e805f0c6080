"""Which rows of Parquet files filters keep; no other columns are read than those they compare."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalejax.errors import ConfigError, refusal
from scalejax.parquet_files import Filter, ParquetFiles, RowGroup, read_columns


def filtered(files: ParquetFiles, filters: tuple[Filter, ...]) -> ParquetFiles:
    """`files` with the rows that `filters` keep.

    Raises:
        ConfigError: if a value does not compare with its column, or no row is kept.
    """
    if not filters:
        return files
    kept = kept_rows(files.field, files.groups, filters)
    if not any(rows.size for rows in kept):
        raise ConfigError(refusal("data.filters", filters, f"they keep no row of {files.location}"))
    return replace(files, kept=kept, filters=filters)


@lru_cache(maxsize=8)
def kept_rows(
    field: str, groups: tuple[RowGroup, ...], filters: tuple[Filter, ...]
) -> tuple[np.ndarray, ...]:
    """For each row group the rows that `filters` keep, int32.

    Raises:
        ConfigError: if a value does not compare with its column.
    """
    columns = sorted({column for column, _, _ in filters})
    kept = []
    for group in groups:
        table = read_columns(field, group, columns)
        mask = np.ones(group.rows, bool)
        for each in filters:
            mask &= _matches(table[each[0]], each)
        kept.append(np.flatnonzero(mask).astype(np.int32))
    return tuple(kept)


_COMPARISONS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
"""What Arrow calls each."""


def _matches(values: pa.ChunkedArray, each: Filter) -> np.ndarray:
    """For which `values` the comparison holds; a missing one fits none."""
    _, comparison, wanted = each
    try:
        if isinstance(wanted, tuple):
            options = pc.SetLookupOptions(pa.array(wanted).cast(values.type))
            mask = pc.call_function("is_in", [values], options)
        else:
            is_fraction = isinstance(wanted, float) and not wanted.is_integer()
            if is_fraction and pa.types.is_integer(values.type):
                # integers that are rounded here are further from 0 than any bound with a fraction
                values = values.cast(pa.float64(), safe=False)
            bound = pa.scalar(wanted).cast(values.type)
            mask = pc.call_function(_COMPARISONS[comparison], [values, bound])
    except (pa.ArrowException, OverflowError) as error:
        accepted = f"the column is {values.type}, which does not compare so ({error})"
        raise ConfigError(refusal("data.filters", list(each), accepted)) from error
    return mask.fill_null(False).to_numpy()
