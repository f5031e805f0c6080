"""Progress of a piece of work, and its displays: a bar on a terminal, one line that changes in a
notebook cell, plain lines on standard error elsewhere.

Knows counts and names, but not the work itself.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from scalejax.core.units import UNKNOWN, counted, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How much of a piece of work is done, or of one part of it."""

    part: str = ""
    """The part, such as "256 devices"; "" for the whole work."""
    done: float = 0
    """Amount done; 0 at the beginning."""
    total: float = 1
    """Amount when all is done, as far as known."""


_SECONDS_BETWEEN_CHANGES = 0.2  # for a line in a notebook
_SECONDS_BETWEEN_LINES = 5  # for a growing count, without a terminal

OnProgress = Callable[[Progress], None]
"""Callback that receives progress."""


def no_display(progress: Progress) -> None:
    """An `OnProgress` that shows nothing."""


def is_in_cell() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class CellLine:
    """A line below a notebook cell that changes in place, and leaves nothing behind."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = -math.inf

    def show(self, words: str, done: float = 0, total: float | None = None) -> None:
        """Show `words` next to a bar, unless the last change was a moment ago; without a `total`
        the bar only shows that work continues."""
        now = time.monotonic()
        if now < self._last + _SECONDS_BETWEEN_CHANGES:
            return
        self._last = now
        length = "" if total is None else f' value="{done:g}" max="{total:g}"'
        self._put(f"<progress{length}></progress> {escape(words)}")

    def clear(self) -> None:
        """Remove the line."""
        if self._handle is not None:
            self._put("")

    def _put(self, text: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(text), display_id=True)
        else:
            self._handle.update(HTML(text))


def in_cell(display: AbstractContextManager[OnProgress]) -> AbstractContextManager[OnProgress]:
    """`display` in a notebook cell; none elsewhere, since a script decides what it prints."""
    return display if is_in_cell() else nullcontext(no_display)


@contextmanager
def _display(
    description: str,
    columns: tuple[ProgressColumn, ...],
    say: Callable[[Progress], str | None],
    show: Callable[[Progress], dict[str, Any]],
    *,
    total: float | None = None,
    done: int = 0,
    visible: bool = True,
) -> Iterator[OnProgress]:
    """A bar with `columns`, updated by what `show` returns; without a terminal, lines from `say`.

    A bar that is not `visible` becomes visible with the first progress.
    """
    if is_in_cell():
        line, at = CellLine(), {"description": description, "completed": done, "total": total}

        def change(progress: Progress) -> None:
            changed = show(progress)
            at["completed"] += changed.pop("advance", 0)
            at.update(changed)
            ended = at["total"]
            counts = "" if not ended or ended <= 1 else f", {at['completed']:,.0f} of {ended:,.0f}"
            line.show(f"{at['description']}{counts}", at["completed"], ended)

        try:
            yield change
        finally:
            line.clear()
        return
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:

        def print_line(progress: Progress) -> None:
            if (line := say(progress)) is not None:
                console.print(line)

        yield print_line
        return
    shown = (TextColumn("{task.description}", markup=False), BarColumn(), *columns)
    with Bar(*shown, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total, completed=done, visible=visible)
        yield lambda progress: bar.update(task, **{"visible": True, **show(progress)})


def compiling(case_count: int) -> AbstractContextManager[OnProgress]:
    """A display of which cases are being compiled.

    A case that ends without having begun was found in the program cache.
    """
    open_cases: list[str] = []

    def say(progress: Progress) -> str:
        case = progress.part
        if not progress.done:
            open_cases.append(case)
            return f"compiling for {case} ..."
        if case not in open_cases:
            return f"compiled for {case} (cached)"
        open_cases.remove(case)
        return f"compiled for {case}"

    def show(progress: Progress) -> dict[str, Any]:
        say(progress)
        if not open_cases:
            return {"advance": progress.done, "description": "compiling"}
        more = f" and {len(open_cases) - 1} more" if len(open_cases) > 1 else ""
        words = f"compiling for {open_cases[0]}{more} (10 to 30 s each)"
        return {"advance": progress.done, "description": words}

    columns = (MofNCompleteColumn(), TimeElapsedColumn())
    return _display("compiling", columns, say, show, total=case_count)


def compiling_programs() -> AbstractContextManager[OnProgress]:
    """A display of how many of the programs known so far are compiled; none without programs."""
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return _display(
        "compiling (10 to 30 s each)",
        columns,
        lambda each: f"compiled {each.done:.0f} of {each.total:.0f} programs",
        lambda each: {"completed": each.done, "total": each.total},
        visible=False,
    )


def _now_and_then(
    begins: Callable[[Progress], str], goes_on: Callable[[Progress], str], *, tells_end: bool
) -> Callable[[Progress], str | None]:
    """Lines for output without a terminal: one when work begins, then one every few seconds, and,
    if wanted, one at its end."""
    last = -math.inf

    def say(progress: Progress) -> str | None:
        nonlocal last
        now = time.monotonic()
        if progress.done:
            is_end = progress.done >= progress.total
            is_told = tells_end if is_end else now >= last + _SECONDS_BETWEEN_LINES
            if not is_told:
                return None
        last = now
        return goes_on(progress) if progress.done else begins(progress)

    return say


def searching() -> AbstractContextManager[OnProgress]:
    """A display of how many strategies a search has costed, and of how many there are."""
    return _display(
        "searching",
        (MofNCompleteColumn(), TimeElapsedColumn()),
        _now_and_then(
            lambda each: f"searching {each.total:,.0f} strategies ...",
            lambda each: f"searched {each.done:,.0f} of {each.total:,.0f} strategies",
            tells_end=True,
        ),
        lambda each: {"completed": each.done, "total": each.total},
    )


def costing() -> AbstractContextManager[OnProgress]:
    """A display of the rows whose layouts are searched, each a part, with its progress."""
    say = _now_and_then(
        lambda each: f"searching {each.total:,.0f} layouts of {each.part} ...",
        lambda each: f"searched {each.done:,.0f} of {each.total:,.0f}",
        tells_end=False,
    )

    def show(progress: Progress) -> dict[str, Any]:
        words = f"searching layouts of {progress.part}"
        return {"completed": progress.done, "total": progress.total, "description": words}

    return _display("searching", (MofNCompleteColumn(), TimeElapsedColumn()), say, show)


def planning() -> AbstractContextManager[OnProgress]:
    """A display of how many device counts of clusters are planned, and of how many there are."""
    return _display(
        "planning",
        (MofNCompleteColumn(), TimeElapsedColumn()),
        lambda each: None if each.done else f"planning {each.total:.0f} numbers of devices ...",
        lambda each: {"completed": each.done, "total": each.total},
    )


def costing_cases(cases: int) -> AbstractContextManager[OnProgress]:
    """A display of the cases (a cluster, a number of devices and a batch) that are costed."""
    last = time.monotonic()

    def say(progress: Progress) -> str | None:
        nonlocal last
        now = time.monotonic()
        if not progress.done:
            return f"costing {cases} cases of clusters, devices and batches ..."
        if progress.done < progress.total and now < last + _SECONDS_BETWEEN_LINES:
            return None
        last = now
        return f"costed {progress.done:.0f} of {progress.total:.0f} cases"

    return _display(
        "costing",
        (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()),
        say,
        lambda each: {"completed": each.done, "total": each.total},
        total=cases,
    )


def measuring(stages: int) -> AbstractContextManager[OnProgress]:
    """A display of the current stage of a measurement with `stages` stages, each a part."""
    names: set[str] = set()

    def say(progress: Progress) -> str | None:
        if progress.part in names:
            return None
        names.add(progress.part)
        return f"measuring {progress.part}"

    def show(progress: Progress) -> dict[str, Any]:
        return {"advance": 1, "description": progress.part}

    return _display("measuring", (TimeElapsedColumn(),), say, show, total=stages)


def training(jobs: int, runs: int) -> AbstractContextManager[OnProgress]:
    """A display of the progress of a sweep.

    Args:
        jobs: programs that are trained, some in parallel; each is a part.
        runs: runs in all programs together.
    """
    done: dict[str, float] = {}

    def say(progress: Progress) -> str | None:
        if not progress.done >= 1 > done.get(progress.part, 0):
            return None
        done[progress.part] = 1
        return f"trained {len(done)} of {jobs} programs"

    def show(progress: Progress) -> dict[str, Any]:
        done[progress.part] = progress.done
        return {"completed": sum(done.values())}

    percent = TextColumn("{task.percentage:.0f} %")
    columns = (percent, TimeElapsedColumn(), TimeRemainingColumn())
    return _display(f"training {counted(runs, 'run')}", columns, say, show, total=jobs)


class _RowRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """The rate of a bar."""
        return Text(f"{format_count(task.speed)} rows/s")


def rows(verb: str, total: int, done: int = 0) -> AbstractContextManager[OnProgress]:
    """A display of processed rows, their rate and the time left; none without rows.

    Args:
        verb: shown before the counts, such as "converting".
        total: number of rows.
        done: rows already processed.
    """
    if not total:
        return nullcontext(no_display)
    begin = last = time.monotonic()

    def say(progress: Progress) -> str | None:
        nonlocal last
        now = time.monotonic()
        if now < last + _SECONDS_BETWEEN_LINES:
            return None
        last, rate = now, (progress.done - done) / (now - begin)
        left = format_seconds((total - progress.done) / rate) if rate else UNKNOWN
        return (
            f"{verb}: {progress.done:,.0f} of {total:,} rows, {format_count(rate)} rows/s, "
            f"{left} left"
        )

    counts = TextColumn("{task.completed:,.0f}/{task.total:,.0f}")
    columns = (counts, _RowRate(), TimeRemainingColumn())
    return _display(
        verb, columns, say, lambda each: {"completed": each.done}, total=total, done=done
    )
