"""Progress displays on standard error: a bar on a terminal, plain lines elsewhere.

Knows counts and names, and nothing of the work itself.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from scalejax.core.units import UNKNOWN, counted, format_count, format_seconds

Stage = Literal["begun", "compiled", "remembered"]
"""Status of a case that is compiled; a remembered one was found in the program cache."""


OnCase = Callable[[Stage, str], None]
"""Callback with the new status of a case, and its name."""


def nothing_said(stage: Stage, case: str) -> None:
    """An `OnCase` that shows nothing."""


_LINES = {
    "begun": "compiling for {} ...",
    "compiled": "compiled for {}",
    "remembered": "compiled for {} (cached)",
}


@contextmanager
def compiling(case_count: int) -> Iterator[OnCase]:
    """A display of which cases are being compiled, on standard error.

    Yields:
        Callback with the new status of a case, and its name.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda stage, case: console.print(_LINES[stage].format(case))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=case_count)
        open_cases: list[str] = []

        def show(stage: Stage, case: str) -> None:
            if stage == "begun":
                open_cases.append(case)
            elif stage == "compiled":
                open_cases.remove(case)
            done = 0 if stage == "begun" else 1
            progress.update(task, advance=done, description=_open(open_cases))

        yield show


def _open(cases: Sequence[str]) -> str:
    """The cases that are being compiled, on one line."""
    if not cases:
        return "compiling"
    more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
    return f"compiling for {cases[0]}{more} (10 to 30 s each)"


@contextmanager
def compiling_programs() -> Iterator[Callable[[int, int], None]]:
    """A display of how many programs are compiled, on standard error; none without programs.

    Yields:
        Callback with the number of programs compiled, and the number known so far.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda done, total: console.print(f"compiled {done} of {total} programs")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling (10 to 30 s each)", total=None, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


@contextmanager
def searching() -> Iterator[Callable[[int, int], None]]:
    """A display of the progress of a search, on standard error.

    Yields:
        Callback with the number of parts done, and of all parts.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("searching", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=done < total)

        yield show


@contextmanager
def measuring(stages: int) -> Iterator[Callable[[str], None]]:
    """A display of the current stage of a measurement, on standard error.

    Yields:
        Callback with the name of each of the `stages` as it begins.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        names: set[str] = set()

        def say(name: str) -> None:
            if name not in names:
                names.add(name)
                console.print(f"measuring {name}")

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=stages)
        yield lambda name: progress.update(task, advance=1, description=name)


@contextmanager
def training(jobs: int, runs: int) -> Iterator[Callable[[int, float], None]]:
    """A display of the progress of a sweep, on standard error.

    Args:
        jobs: programs that are trained, some in parallel.
        runs: runs in all of them.

    Yields:
        Callback with the index of a job, and the share of it that is done, 0..1.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    parts = [0.0] * jobs
    if not console.is_terminal:

        def say(job: int, part: float) -> None:
            if part >= 1 > parts[job]:
                parts[job] = part
                console.print(f"trained {sum(each >= 1 for each in parts)} of {jobs} programs")

        yield say
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"training {counted(runs, 'run')}", total=float(jobs))

        def show(job: int, part: float) -> None:
            parts[job] = part
            progress.update(task, completed=sum(parts))

        yield show


@contextmanager
def rows(verb: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A display of processed rows, their rate and the time left, on standard error; none without
    rows.

    Args:
        verb: shown before the counts, such as "converting".
        total: number of rows.
        done: rows processed before.

    Yields:
        Callback with the number of rows processed since the last call.
    """
    console = Console(stderr=True, highlight=False)
    if not total:
        yield lambda count: None
        return
    if not console.is_terminal:
        with _row_lines(console, verb, total, done) as say:
            yield say
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TextColumn("{task.fields[rate]} rows/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(verb, total=total, completed=done, rate=UNKNOWN)

        def show(count: int) -> None:
            progress.update(task, advance=count, rate=format_count(progress.tasks[0].speed))

        yield show


@contextmanager
def _row_lines(
    console: Console, verb: str, total: int, done: int
) -> Iterator[Callable[[int], None]]:
    """The display of `rows` as a line every five seconds."""
    begin = last = time.monotonic()
    first = done

    def say(count: int) -> None:
        nonlocal done, last
        done, now = done + count, time.monotonic()
        if now >= last + 5:
            last, rate = now, (done - first) / (now - begin)
            left = format_seconds((total - done) / rate) if rate else UNKNOWN
            console.print(
                f"{verb}: {done:,} of {total:,} rows, {format_count(rate)} rows/s, {left} left"
            )

    yield say
