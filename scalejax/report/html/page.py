"""A page of charts and tables as one HTML file that needs no network.

Lays out headings, tables and charts; knows nothing of their content.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.metadata import version
from importlib.resources import files
from string import Template

import vl_convert
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from scalejax.report.html.charts import Spec

_LONG_CELL = 24
"""Number of characters above which a cell may wrap."""
_EMBED = "window.vegaEmbed = vegaEmbed;"
"""JavaScript that exports vegaEmbed from the libraries bundled by vl-convert."""
_ELEMENTS = {"bold": "h3", "bold red": 'p class="bad"', "dim": 'p class="soft"'}
"""HTML element of a text by its style on a terminal; others are paragraphs."""


class Page:
    """The body of the page, and the charts that its script draws into it."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.charts: dict[str, Spec] = {}

    def add(self, html: str) -> None:
        """Append a piece of HTML."""
        self.parts.append(html)

    def add_chart(self, heading: str, explanation: str, spec: Spec) -> None:
        """Append a chart under its heading, with a sentence on how to read it."""
        name = f"chart{len(self.charts)}"
        self.charts[name] = spec
        self.add(f"<h3>{escape(heading)}</h3>\n<p>{escape(explanation)}</p>")
        self.add(f'<div class="chart" id="{name}" role="img" aria-label="{escape(heading)}"></div>')

    def add_table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Append a table; cells are text, and long ones wrap."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
        body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>\n" for row in rows)
        self.add(f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>')

    def add_parts(self, parts: Iterable[RenderableType]) -> None:
        """Append what a function of `report.terminal` yields: tables and texts."""
        for part in parts:
            if isinstance(part, Table):
                cells = [[str(cell) for cell in column.cells] for column in part.columns]
                headings = [str(column.header) for column in part.columns]
                self.add_table(headings, list(zip(*cells, strict=True)))
                continue
            text = part if isinstance(part, Text) else Text(str(part))
            element = _ELEMENTS.get(str(text.style), "p")
            words = escape(text.plain).replace("\n", "<br>")
            self.add(f"<{element}>{words}</{element.split()[0]}>")

    def add_notes(self, notes: Iterable[str]) -> None:
        """Append a list of remarks in small print."""
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        self.add(f'<p class="soft">Notes</p><ul class="soft">{items}</ul>' if items else "")

    def render(self, title: str) -> str:
        """The page, as HTML with everything inside it."""
        template = (
            files("scalejax")
            .joinpath("report", "html", "template.html")
            .read_text(encoding="utf-8")
        )
        return Template(template).substitute(
            title=escape(title),
            version=version("scalejax"),
            scripts=_scripts(),
            body="\n".join(self.parts),
            # "</" would end the element that holds the data, and "<!--" would hide its end
            charts=json.dumps(self.charts).replace("<", "\\u003c"),
        )


@cache
def _scripts() -> str:
    """The JavaScript of the chart libraries, bundled once: bundling takes more than a second."""
    return vl_convert.javascript_bundle(_EMBED).replace("</script", "<\\/script")


def _cell(text: str) -> str:
    long = ' class="long"' if len(text) > _LONG_CELL else ""
    return f"<td{long}>{escape(text)}</td>"
