"""Runs cases of the fuzzer: a command each, in processes with bounds on time and memory; judges.

A case must end with success, where what it accepted makes sense, or with exit code 2, or 4 for what
is stored damaged, and a line on standard error that names the field or file and says what is
accepted. Knows nothing of what the cases are.
"""

import contextlib
import faulthandler
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import sense

from scalejax.core.errors import ExitCode

SECONDS_OF_CASE, SECONDS_OF_BUSY_MACHINE = 120, 1200
"""Of processors that a case may take, and of a clock: a machine may have a dozen other things to
do."""
BYTES_OF_PROCESS = 6 * 2**30
"""That a process may take: what is asked for beyond them must be refused, and not tried."""
CASES_OF_PROCESS = 1000
"""After which another takes over: what one leaves behind does not add up."""
LONGEST_MESSAGE = 8000
"""Characters of standard error that a person could still read."""
_ACCEPTED = re.compile(
    r"must|may not|ccepted|did you mean|missing|is no |are no |holds? |needs?|give|there is"
    r"|is there|valid "
    r"|cannot|is for|use |does not|takes|leave|at least|at most|no flag|no file|more than|, not "
    r"|only if|Expected|no finite|expects|needed|[Dd]elete|[Bb]ring .*back"
    r"|neither|fits?\b|one of|should be|divide"
    r"|whole|incomplete|alone|see scalejax|is not a |are not |do not "
)
"""What a refusal says of what is accepted, or of what is wrong with what is there."""


_BROKEN = 97


class Case(NamedTuple):
    """A command to run."""

    argv: list[str]
    """What is typed after `scalejax`."""
    exact: tuple[str, ...]
    """Names of what was changed, one of which a refusal has."""
    loose: tuple[str, ...] = ()
    """Names of what it stands in: the tables, the file."""


Make = Callable[[str, int, Path], Case]
"""A case of a kind and number, its files written into a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case."""

    kind: str
    """What was changed."""
    number: int
    """Which case of the kind."""
    verdict: str
    """"refused by field", "refused by file", "accepted", or a deviation."""
    argv: list[str]
    """What was typed."""
    said: str
    """Standard error, or a traceback."""
    seconds: float
    """That it took."""

    @property
    def is_deviation(self) -> bool:
        """Whether something is to be mended."""
        return self.verdict not in ("refused by field", "refused by file", "accepted")


class _Hang(BaseException):
    """Raised by the alarm; no `except Exception` holds it."""


def run_here(case: Case, folder: Path) -> tuple[int | None, str]:
    """Exit code and standard error of a case in this process; None and a traceback if it raised."""
    from scalejax.cli.main import main

    errors, printed = io.StringIO(), io.BytesIO()
    out = io.TextIOWrapper(printed, encoding="utf-8")

    def rung(number: int, frame: object) -> None:
        raise _Hang

    before = {each: signal.signal(each, rung) for each in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(SECONDS_OF_BUSY_MACHINE)
    signal.setitimer(signal.ITIMER_PROF, SECONDS_OF_CASE)
    faulthandler.dump_traceback_later(2 * SECONDS_OF_BUSY_MACHINE, exit=True)
    where = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out):
            code = main(case.argv)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except _Hang:
        return None, "HANG\n" + traceback.format_exc()[-4000:]
    except BaseException:  # noqa: BLE001  whatever it is, it is what is looked for
        return None, traceback.format_exc()[-6000:]
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        for each, handler in before.items():
            signal.signal(each, handler)
        os.chdir(where)
    out.flush()
    (folder / sense.PRINTED).write_bytes(printed.getvalue())
    return code, errors.getvalue()


def run_apart(case: Case, folder: Path) -> tuple[int | None, str]:
    """As `run_here`, in a process of its own: what a user does."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scalejax", *case.argv],
            cwd=folder,
            capture_output=True,
            timeout=SECONDS_OF_BUSY_MACHINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, "HANG"
    except ValueError:  # an argument with a NUL, or a lone surrogate, which no shell can type
        return run_here(case, folder)
    return done.returncode, done.stderr.decode(errors="replace")


def judge(case: Case, code: int | None, said: str) -> str:
    """The verdict on what a case came to."""
    if code is None:
        return "hang" if said.startswith("HANG") else "traceback"
    if "Traceback (most recent call last)" in said:
        return "traceback on standard error"
    if "Warning: " in said:
        return "warning of a library"
    # With 1 they tell what they found: that every row is skipped, that a bound is exceeded.
    if code == 0 or (code == 1 and case.argv[0] in ("validate", "compare")):
        return "accepted"
    if code not in (ExitCode.REFUSED, ExitCode.DAMAGED):
        return f"exit code {code}"
    if "error: " not in said:
        return "no line that says error"
    if len(said) > LONGEST_MESSAGE:
        return "too long to read"
    if not _ACCEPTED.search(said):
        return "does not say what is accepted"
    if any(_is_named(name, said) for name in case.exact):
        return "refused by field"
    if any(_is_named(name, said) for name in case.loose):
        return "refused by file"
    return "names nothing that was changed"


def _is_named(name: str, said: str) -> bool:
    forms = {name, name[:60], repr(name)[1:-1][:60], json.dumps(name)[1:-1][:60]}
    flat = " ".join(said.split())
    return any(form and (form in said or " ".join(form.split()) in flat) for form in forms)


def run_cases(
    make: Make,
    cases: Sequence[tuple[str, int]],
    *,
    apart: bool = False,
    on_done: Callable[[Outcome], None] | None = None,
    bounded: bool = True,
) -> list[Outcome]:
    """The outcomes of all `cases` (kind and number each), in processes that are forked from this.

    One that dies is a deviation of the case that it was at; the next goes on behind it.
    """
    found: list[Outcome] = []
    at = 0
    while at < len(cases):
        for outcome in _outcomes(make, cases[at : at + CASES_OF_PROCESS], apart, bounded):
            found.append(outcome)
            at += 1
            if on_done is not None:
                on_done(outcome)
    return found


def _outcomes(
    make: Make, cases: Sequence[tuple[str, int]], apart: bool, bounded: bool
) -> Iterator[Outcome]:
    """What a forked process says of the cases, until it ends, and of its own end if that is bad."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX is imported, and has not begun
        process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(reading)
            if bounded:
                resource.setrlimit(resource.RLIMIT_DATA, (BYTES_OF_PROCESS, BYTES_OF_PROCESS))
            with os.fdopen(writing, "w") as told:
                for kind, number in cases:
                    outcome = run_case(make, kind, number, apart=apart)
                    told.write(json.dumps(asdict(outcome)) + "\n")
                    told.flush()
            status = 0
        except BaseException:  # noqa: BLE001  of the fuzzer itself
            traceback.print_exc()
            status = _BROKEN
        finally:
            os._exit(status)
    os.close(writing)
    count = 0
    with os.fdopen(reading) as said:
        for line in said:
            count += 1
            yield Outcome(**json.loads(line))
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == _BROKEN:
        raise RuntimeError(f"the fuzzer itself failed at {cases[count]}")
    if count < len(cases):
        kind, number = cases[count]
        yield Outcome(
            kind=kind, number=number, verdict=f"the process died ({code})", argv=[], said="",
            seconds=0,
        )  # fmt: skip


def run_case(make: Make, kind: str, number: int, *, apart: bool = False) -> Outcome:
    """The outcome of one case, in a folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        case = make(kind, number, folder)
        start = os.times().elapsed
        code, said = (run_apart if apart else run_here)(case, folder)
        verdict = judge(case, code, said)
        if verdict == "accepted" and (wrong := sense.nonsense(case.argv, folder)):
            verdict, said = "nonsense accepted", f"{said}\n{wrong}"
        return Outcome(
            kind=kind,
            number=number,
            verdict=verdict,
            argv=[_printable(word)[:300] for word in case.argv],
            said=_printable(said)[-8000:],
            seconds=os.times().elapsed - start,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
