"""What the doctor found, on a terminal: a table of all, and the fixes below.

Knows how to word and align, and judges nothing.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scalejax.doctor import Finding
from scalejax.units import UNKNOWN, counted

_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def findings(found: Sequence[Finding]) -> Iterator[RenderableType]:
    """A table by topic; then what is not as it should be, the worst first, each with its fix."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading, least in (("", 4), ("", 14), ("found", 14), ("expected", 12)):
        table.add_column(heading, overflow="fold", min_width=least)
    for topic, alike in groupby(found, lambda each: each.topic):
        table.add_row("", Text(topic, style="bold"), "", "")
        for each in alike:
            verdict = Text(each.verdict, style=_STYLES[each.verdict])
            table.add_row(verdict, f" {_name(each)}", each.value, each.expected or UNKNOWN)
    yield table
    troubled = [each for each in found if each.verdict != "ok"]
    troubled.sort(key=lambda each: each.verdict != "bad")
    if troubled:
        yield Group(*(part for each in troubled for part in _fix(each)))
    counts = Counter(each.verdict for each in found)
    yield Text(
        f"{counted(len(found), 'finding')}: {counts['bad']} bad, "
        f"{counted(counts['warn'], 'warning')}, {counts['ok']} ok."
    )


def _fix(finding: Finding) -> Iterator[RenderableType]:
    yield Text.assemble(
        (finding.verdict, _STYLES[finding.verdict]), f" {_name(finding)}: {finding.value}"
    )
    yield Padding(Text(finding.fix or ""), (0, 0, 0, 5))


def _name(finding: Finding) -> str:
    if not finding.processes:
        return finding.name
    which = ", ".join(map(str, finding.processes))
    return f"{finding.name}, process{'es' if len(finding.processes) > 1 else ''} {which}"
