"""What is shown on standard error while a person waits: a bar on a terminal, plain lines elsewhere.

Knows how far something is, and nothing of what it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def compiling(case_count: int) -> Iterator[Callable[[int], None]]:
    """A display of how many cases have been compiled, on standard error.

    Yields:
        What to call with the number of devices of each case that is done.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda device_count: console.print(f"compiled for {device_count} devices")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling (10 to 30 s each)", total=case_count)
        yield lambda _: progress.advance(task)


@contextmanager
def compiling_programs() -> Iterator[Callable[[int, int], None]]:
    """A display of how many programs have been compiled, on standard error; none if none is.

    Yields:
        What to call with the number of programs that are done, and of all there are so far.
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
def measuring(stages: int) -> Iterator[Callable[[str], None]]:
    """A display of what is being measured, on standard error.

    Yields:
        What to call with the name of each of so many stages as it begins.
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
