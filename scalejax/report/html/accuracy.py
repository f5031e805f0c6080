"""The accuracy page: how far off predictions are, by family, framework and chip.

One self-contained page; a click on a cell lists its rows. Lays out what `validation` computed.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from scalejax.core.serialization import JsonValue, save_text
from scalejax.core.units import UNKNOWN, counted, format_bytes, format_seconds
from scalejax.report.figures import scatter
from scalejax.report.html.page import Page
from scalejax.validation import Validation
from scalejax.validation.accuracy import (
    Accuracy,
    AccuracyCell,
    Comparison,
    Key,
    accuracy_of,
    by_cell,
    common,
    comparisons,
    quantity_summaries,
)
from scalejax.validation.summary import MEMORY, STEP_TIMES

_SHADES = ((0.08, "good"), (0.15, "fair"), (0.3, "poor"))
"""(largest mean error, class) of each colour of cells; larger errors are "far"."""
_STYLE = """<style>
main { max-width: 80rem; }
.cells > table { width: 100%; }
.cells > table > tbody > tr > td { text-align: left; vertical-align: top; border-bottom: 0;
  padding: .25rem .8rem .25rem 0; }
.cells > table > tbody > tr.family > td { border-top: 1px solid var(--line); }
.cells > table > tbody > tr > td:first-child { font-weight: 600; }
.cells > table > tbody > tr > td:last-child { width: 99%; white-space: normal; }
.cells > table > tbody > tr > td:nth-child(2) { white-space: normal; overflow-wrap: anywhere;
  min-width: 9rem; }
.cells > table > tbody > tr > th { text-align: left; padding-left: 0; }
.cells button { all: unset; display: inline-block; cursor: pointer; text-align: left;
  padding: .2rem .55rem .25rem; margin: 0 .3rem .3rem 0; border-radius: 4px; line-height: 1.3; }
.cells button:focus-visible, .cells button[aria-expanded="true"] { outline: 2px solid var(--text); }
.cells small, .legend { color: var(--soft); font-size: .78rem; white-space: nowrap; }
.cells button small { display: block; }
.cells .good, .legend .good { background: rgba(42, 157, 120, .22); }
.cells .fair, .legend .fair { background: rgba(196, 176, 42, .24); }
.cells .poor, .legend .poor { background: rgba(224, 138, 30, .28); }
.cells .far, .legend .far { background: rgba(209, 73, 91, .26); }
.legend span { padding: .1rem .5rem; border-radius: 3px; margin-right: .4rem; }
.opened { max-height: 30rem; overflow: auto; margin: .2rem 0 .8rem; padding: .4rem .8rem;
  background: var(--card); border-radius: 4px; font-weight: 400; }
.opened td:first-child, .opened td:last-child { white-space: normal; overflow-wrap: anywhere;
  text-align: left; min-width: 14rem; }
.opened th { text-align: right; }
.opened th:first-child, .opened th:last-child { text-align: left; }
</style>"""
_SCRIPT = """<script>
(function () {
  const data = JSON.parse(document.getElementById("cells").textContent);
  const made = (tag, text) => {
    const element = document.createElement(tag);
    element.textContent = text || "";
    return element;
  };
  function close(section) {
    for (const row of section.querySelectorAll("tr.rows")) row.remove();
    for (const button of section.querySelectorAll("button")) button.ariaExpanded = "false";
  }
  function open(button) {
    const cell = data.cells[button.dataset.cell], table = made("table"), head = made("tr");
    for (const name of data.headings) head.append(made("th", name));
    table.append(head);
    for (const row of cell.rows) {
      const line = made("tr"), last = row.length - 1;
      row.forEach((value, i) => line.append(made("td", i === last ? data.sources[value] : value)));
      table.append(line);
    }
    const panel = made("div"), place = made("td"), row = made("tr");
    panel.className = "opened";
    panel.append(made("strong", cell.title), table);
    place.colSpan = 3;
    place.append(panel);
    row.className = "rows";
    row.append(place);
    button.closest("tr").after(row);
    button.ariaExpanded = "true";
    panel.scrollIntoView({ block: "nearest" });
  }
  for (const button of document.querySelectorAll("button[data-cell]"))
    button.addEventListener("click", () => {
      const isOpen = button.ariaExpanded === "true";
      close(button.closest("section"));
      if (!isOpen) open(button);
    });
})();
</script>"""
_HEADINGS = ("row", "devices", "measured", "predicted", "p10", "p90", "error", "source")


def write_accuracy(
    found: Validation, path: Path, *, release: str, before: Accuracy | None = None
) -> None:
    """Write the accuracy page of a validation.

    Args:
        found: the validation.
        path: the file.
        release: version of scalejax.
        before: accuracy of an earlier release to compare cells with.

    Raises:
        ConfigError: if the file cannot be written.
    """
    page = Page()
    cells = by_cell(comparisons(found.rows))
    accuracy = accuracy_of(found.rows, release)
    page.add(_STYLE)
    page.add("<h1>How far off predictions are</h1>")
    page.add(
        f"<p>scalejax {escape(release)} against {escape(found.ledger)}: "
        f"{_count(len(found.rows), 'published row')}, of which "
        f"{sum(row.skip_reason is None for row in found.rows):,} are predicted. Errors are "
        "(predicted - measured) / measured.</p>"
    )
    _add_summary(page, accuracy, before)
    page.add(
        "<p>In each cell: the chip and the mean absolute error; beneath them the bias (above 0 "
        "where predictions are too large), the share of rows measured between p10 and p90, which "
        "should be 80 %, and the number of rows. A click opens the rows."
        + (f" In parentheses: the mean error of {escape(before.release)}." if before else "")
        + "</p>"
    )
    page.add(_legend())
    numbers = {key: number for number, key in enumerate(cells)}
    quantities = dict.fromkeys(key[0] for key in cells)
    links = (f'<a href="#{_anchor(each)}">{escape(each)}</a>' for each in quantities)
    page.add(f"<nav>{''.join(links)}</nav>")
    for quantity in quantities:
        members = [cell for cell in accuracy.cells if cell.quantity == quantity]
        _add_section(page, quantity, members, numbers, before)
        if quantity == STEP_TIMES:
            steps = [row for row in found.rows if row.quantity == STEP_TIMES]
            page.add_chart(
                "Predicted against measured step times",
                "One mark for each row. On the line both are equal; between the dotted lines they "
                "differ by less than a quarter.",
                scatter(steps),
            )
    page.add(f'<script type="application/json" id="cells">{_data(cells)}</script>')
    page.add(_SCRIPT)
    save_text(page.render(f"Accuracy of scalejax {release}"), path)


def _count(count: int, noun: str) -> str:
    return counted(f"{count:,}", noun)


def _percent(share: float | None, *, sign: str = "") -> str:
    if share is None:
        return UNKNOWN
    digits = 1 if abs(share) < 1 else 0
    return f"{share * 100:{sign}.{digits}f} %".replace("-", "\N{MINUS SIGN}")


def _add_summary(page: Page, accuracy: Accuracy, before: Accuracy | None) -> None:
    """Append a table with a row for each quantity."""
    rows = [
        [
            each.quantity,
            f"{each.rows:,}",
            str(each.families),
            _percent(each.mean_error),
            _percent(each.coverage),
        ]
        for each in quantity_summaries(accuracy)
    ]
    page.add("<p>Each family counts once here, however many rows it has.</p>")
    page.add_table(["measured", "rows", "families", "mean error", "in band"], rows)
    if before is None:
        return
    both = zip(*map(quantity_summaries, common(before, accuracy)), strict=True)
    rows = [
        [now.quantity, f"{now.rows:,}", _percent(was.mean_error), _percent(now.mean_error)]
        for was, now in both
    ]
    page.add(f"<p>Over the cells that {escape(before.release)} also has:</p>")
    page.add_table(["measured", "rows", f"mean error in {before.release}", "now"], rows)


def _legend() -> str:
    words, least = [], 0.0
    for most, name in _SHADES:
        low = f"{least:.0%} to " if least else "up to "
        words.append(f'<span class="{name}">{low}{most:.0%}</span>')
        least = most
    words.append(f'<span class="far">above {least:.0%}</span>')
    return f'<p class="legend">Mean error: {"".join(words)}</p>'


def _add_section(
    page: Page,
    quantity: str,
    cells: Sequence[AccuracyCell],
    numbers: dict[Key, int],
    before: Accuracy | None,
) -> None:
    """Append the cells of a quantity: a line for each family and framework, with a cell for each
    chip."""
    old = {} if before is None else {cell.key: cell for cell in before.cells}
    lines: dict[tuple[str, str], list[AccuracyCell]] = {}
    for cell in cells:
        lines.setdefault((cell.family, cell.framework), []).append(cell)
    body, last = [], None
    for (family, framework), members in sorted(lines.items()):
        is_same, last = family == last, family
        found = "".join(
            _button(cell, numbers, old) for cell in sorted(members, key=lambda each: each.chip)
        )
        body.append(
            f"<tr{'' if is_same else ' class=family'}><td>{'' if is_same else escape(family)}</td>"
            f"<td>{escape(framework)}</td><td>{found}</td></tr>"
        )
    page.add(
        f'<section class="cells"><h2 id="{_anchor(quantity)}">{escape(quantity.capitalize())}</h2>'
        f"<table><tbody><tr><th>family</th><th>framework</th><th>chips</th></tr>"
        f"{''.join(body)}</tbody></table></section>"
    )


def _anchor(quantity: str) -> str:
    return quantity.replace(" ", "-")


def _button(cell: AccuracyCell, numbers: dict[Key, int], old: dict[Key, AccuracyCell]) -> str:
    shade = next((name for most, name in _SHADES if cell.mean_error <= most), "far")
    parts = [_percent(cell.bias, sign="+")]
    if cell.coverage is not None:
        parts.append(f"{cell.coverage:.0%} in band")
    parts.append(_count(cell.rows, "row"))
    now, was = _percent(cell.mean_error), old.get(cell.key)
    before = now if was is None else _percent(was.mean_error)
    earlier = "" if before == now else f" (was {before})"
    return (
        f'<button class="{shade}" data-cell="{numbers[cell.key]}" aria-expanded="false">'
        f"{escape(cell.chip)} <b>{now}</b>{earlier}"
        f"<small>{' · '.join(parts)}</small></button>"
    )


def _data(cells: dict[Key, list[Comparison]]) -> str:
    """The rows of each cell as JSON; sources are listed once, as they repeat."""
    sources: dict[str, int] = {}
    made: list[JsonValue] = [
        {
            "title": f"{', '.join(filter(None, key))}: {_count(len(members), 'row')}",
            "rows": [
                _row(each, sources.setdefault(each.row.source, len(sources))) for each in members
            ],
        }
        for key, members in cells.items()
    ]
    data = {"headings": list(_HEADINGS), "cells": made, "sources": list(sources)}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _row(each: Comparison, source: int) -> list[JsonValue]:
    """Cells of a row; the last is the number of its source."""

    def words(value: float | None) -> str:
        if each.key[0] == MEMORY:
            return format_bytes(value)
        if each.row.samples_unit is not None:
            return UNKNOWN if value is None else f"{value:,.4g} {each.row.samples_unit}"
        return format_seconds(value)

    name = " ".join((each.row.case_id, *(f"[{near}]" for near in each.row.nearest)))
    low, high = each.band or (None, None)
    return [
        name,
        each.row.device_count,
        words(each.measured),
        words(each.predicted),
        words(low),
        words(high),
        _percent(each.error, sign="+"),
        source,
    ]
