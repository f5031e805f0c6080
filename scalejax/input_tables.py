"""The input side of a host on a terminal: what each stage takes, and how many workers give what.

Knows how to word and align figures, and computes none.
"""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from scalejax.cost import InputPace
from scalejax.hardware import InputRates
from scalejax.tables import figures
from scalejax.units import format_bytes_per_second, format_count, format_seconds


def input_side(
    rates: InputRates, paces: Sequence[tuple[int, InputPace]]
) -> Iterator[RenderableType]:
    """Seconds of a sample by stage, then samples per second by workers.

    Args:
        rates: as measured.
        paces: of the run's data, by number of workers, at least one.
    """
    title = f"Input of {rates.data} on {rates.cores} core{'s' if rates.cores > 1 else ''}"
    yield Text.assemble((title, "bold"))
    seconds: dict[str, float] = {}
    for _, pace in paces:
        for stage, each in pace.stages:
            seconds.setdefault(stage, each)
    table = figures("stage", "of a sample")
    for stage, each in seconds.items():
        table.add_row(stage, format_seconds(each))
    yield table
    table = figures("workers", "samples/s", "limit")
    for workers, pace in paces:
        name = str(workers) if workers else "0 (threads)"
        table.add_row(name, format_count(pace.samples_per_second), pace.limit)
    yield table
    storage = rates.read and rates.read.storage_bytes_per_second
    if storage:
        yield Text(f"Storage gives {format_bytes_per_second(storage)} of what is not in memory.")
