"""What is said of progress where there is no terminal."""

from scalejax.core import progress
from scalejax.core.progress import Progress


def test_cases_are_said_as_they_begin_and_end(capsys):
    """One that ends without having begun was found in the cache."""
    with progress.compiling(2) as on_progress:
        for part, done in (("a", 0), ("b", 1), ("a", 1)):
            on_progress(Progress(part=part, done=done))

    said = capsys.readouterr().err
    assert said == "compiling for a ...\ncompiled for b (cached)\ncompiled for a\n"


def test_every_stage_and_program_is_said_once(capsys):
    """However often progress with it is told."""
    with progress.measuring(3) as on_progress:
        for part in ("memory", "memory", "launches"):
            on_progress(Progress(part=part))
    with progress.training(2, 8) as on_progress:
        for part, done in (("a", 0.5), ("b", 1), ("b", 1), ("a", 1)):
            on_progress(Progress(part=part, done=done))
    with progress.compiling_programs() as on_progress:
        on_progress(Progress(done=1, total=3))

    assert capsys.readouterr().err.splitlines() == [
        "measuring memory",
        "measuring launches",
        "trained 1 of 2 programs",
        "trained 2 of 2 programs",
        "compiled 1 of 3 programs",
    ]


def test_a_search_says_how_many_strategies_it_has_and_when_it_is_done(capsys, monkeypatch):
    """And how far it is every few seconds: a search of half a minute is not silent in a log."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.searching() as on_progress:
        for now, done in ((1.0, 0), (2.0, 100), (7.0, 1_000), (8.0, 1_100), (9.0, 2_000)):  # noqa: B007  is read
            on_progress(Progress(done=done, total=2_000))

    assert capsys.readouterr().err.splitlines() == [
        "searching 2,000 strategies ...",
        "searched 1,000 of 2,000 strategies",
        "searched 2,000 of 2,000 strategies",
    ]


def test_terminal_shows_bars(capsys, monkeypatch):
    """Of every kind, with what is told of each."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    displays = (
        progress.compiling(2),
        progress.measuring(2),
        progress.training(2, 8),
        progress.rows("reading", 2),
        progress.searching(),
        progress.compiling_programs(),
    )
    for display in displays:
        with display as on_progress:
            on_progress(Progress(part="a", done=0, total=2))
            on_progress(Progress(part="a", done=1, total=2))

    said = capsys.readouterr().err
    for words in ("compiling", "a ", "training 8 runs", "reading", "rows/s", "searching", "1/2"):
        assert words in said


def test_bars_are_there_before_any_progress(capsys, monkeypatch):
    """But for programs, of which there may be none."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    for display in (progress.searching(), progress.compiling_programs()):
        with display:
            pass

    said = capsys.readouterr().err
    assert "searching" in said
    assert "compiling" not in said
