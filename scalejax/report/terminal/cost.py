"""Terminal tables of what a run costs, in 80 columns.

Formats numbers and computes none.
"""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from scalejax.core.units import format_bytes, format_count, format_fraction, format_seconds
from scalejax.planning.bill import MWH_JOULES
from scalejax.planning.run_cost import CostRow, RunCost
from scalejax.report.terminal.tables import figures

_LONGEST_NAME = 14


def costed(report: RunCost) -> Iterator[RenderableType]:
    """The answer, what each row costs, its layout, and notes."""
    yield Text.assemble((report.title, "bold"), f"\n{report.work}.")
    found = [row for row in report.rows if row.misfit is None]
    if found:
        yield Text("\n".join(_answers(report)))
        yield _bills(found, report.currency)
        if any(row.p10_run_seconds is not None for row in found):
            yield Text("Ranges are from p10 to p90.")
        yield _layouts(found)
        yield Text(_of_steps(found))
    misfits = [row for row in report.rows if row.misfit is not None]
    if misfits:
        yield Text("\n".join(f"{_place(row)}: {row.misfit}." for row in misfits))
    yield Text("\n".join(f"Note: {note}." for note in report.notes), style="dim")


def _place(row: CostRow) -> str:
    return f"{row.device_count} devices of {row.cluster}"


def _answers(report: RunCost) -> Iterator[str]:
    """The soonest and the cheapest row."""
    names: dict[int, list[str]] = {}
    for name in ("soonest", "cheapest"):
        if (place := getattr(report, name)) is not None:
            names.setdefault(place, []).append(name)
    for place, each in names.items():
        row = report.rows[place]
        unit = "dollars" if report.currency == "dollars" else "in the currency of --price"
        price = "" if row.price is None else f", {row.price:,.0f} {unit}"
        if row.p10_price is not None and row.p90_price is not None:
            price += f" ({row.p10_price:,.0f} to {row.p90_price:,.0f})"
        yield (
            f"{' and '.join(each).capitalize()}: {_place(row)}, "
            f"{format_seconds(row.run_seconds)}{price}."
        )
    near = [f"{_place(row)} ({row.price:,.0f})" for row in report.near_cheapest]
    if near:
        yield f"Within the range of the cheapest too: {', '.join(near)}."


def _bills(rows: list[CostRow], currency: str) -> Table:
    """What each row costs, with p10 to p90 of days and price beneath; columns without any known
    value are left out."""
    columns = {
        "cluster": [row.cluster[:_LONGEST_NAME] for row in rows],
        "devices": [str(row.device_count) for row in rows],
        "days": [
            _with_band(
                _days(row.run_seconds), _days(row.p10_run_seconds), _days(row.p90_run_seconds)
            )
            for row in rows
        ],
        "device-h": [_grouped(row.device_hours) for row in rows],
        currency: [
            _with_band(_grouped(row.price), _short(row.p10_price), _short(row.p90_price))
            for row in rows
        ],
        "MWh": [_energy(row) for row in rows],
        "kg CO2": [_grouped(row.co2_kilograms) for row in rows],
    }
    known = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    table = figures(*known)
    for cells in zip(*known.values(), strict=True):
        table.add_row(*cells)
    return table


def _layouts(rows: list[CostRow]) -> Table:
    """Layout, step, MFU and memory of each row."""
    table = figures("cluster", "devices", "step", "MFU", "memory", "limit", "layout")
    table.columns[-1].justify = "left"
    table.columns[-1].no_wrap = False
    for row in rows:
        table.add_row(
            row.cluster[:_LONGEST_NAME],
            str(row.device_count),
            format_seconds(row.step_seconds),
            format_fraction(row.mfu),
            format_bytes(row.peak_memory_bytes),
            format_bytes(row.memory_bytes),
            row.layout or "",
        )
    return table


def _of_steps(rows: list[CostRow]) -> str:
    """Which steps are compiled, and how far off their closed forms are."""
    lines = []
    if not any(row.is_compiled for row in rows):
        return "Steps are closed forms: none was compiled."
    for row in rows:
        step, form = row.step_seconds, row.closed_form_seconds
        if not row.is_compiled:
            lines.append(f"{_place(row)} in closed form, not compiled")
        elif step is not None and form is not None:
            lines.append(f"{_place(row)} {form / step - 1:+.1%}")
    if not any(row.closed_form_seconds for row in rows):
        return "Steps are of the compiled programs."
    errors = ", ".join(lines)
    return f"Steps are of the compiled programs; errors of their closed forms: {errors}."


def _days(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 86400:.3g}"


def _with_band(median: str, low: str, high: str) -> str:
    """A number with its p10 and p90 beneath, if they are known."""
    return median if "-" in (low, high) else f"{median}\n{low} to {high}"


def _short(value: float | None) -> str:
    """An amount with three digits: "1.86M"."""
    return "-" if value is None else format_count(value).replace(" ", "")


def _grouped(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1e8:
        return format_count(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _energy(row: CostRow) -> str:
    return "-" if row.energy_joules is None else _grouped(row.energy_joules / MWH_JOULES)
