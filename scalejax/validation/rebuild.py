"""Rebuild the archive of programs: python -m scalejax.validation.rebuild LEDGER.csv

Compiles programs that are in neither the archive nor the user's cache, and writes the programs of
the ledger's rows into the archive next to this file. It can be interrupted: compiled programs stay
in the cache, and the next run resumes from there. With --anew nothing is read from the archive.
With --add the archive keeps its contents, and gets the programs of rows that the closed form does
not know.
"""

import argparse
import sys
from pathlib import Path

from scalejax.core.errors import ScalejaxError
from scalejax.core.progress import OnProgress, Progress
from scalejax.validation.cases import Case, case_of
from scalejax.validation.kinds import find_ledger
from scalejax.validation.ledger import LedgerRow, read_ledger
from scalejax.validation.programs import ARCHIVE, archived_programs, find_programs
from scalejax.xla.archive import Archive, read_archive, write_archive


def rebuild(
    rows: list[LedgerRow], archive: Archive, path: Path, on_progress: OnProgress
) -> tuple[int, int]:
    """Write the programs of `rows` into the archive at `path`; returns (programs, bytes).

    Args:
        rows: rows of a ledger.
        archive: programs that need no compiling.
        path: the file to write.
        on_progress: called with the number of programs compiled, and of all that must be.
    """
    programs = archived_programs(archive, on_progress)
    find_programs([case for case in map(case_of, rows) if isinstance(case, Case)], programs)
    found = programs.compiled.known
    return len(found), write_archive(found, path)


def add(
    rows: list[LedgerRow], archive: Archive, path: Path, on_progress: OnProgress
) -> tuple[int, int]:
    """Write `archive`, and the programs of `rows` that the closed form does not know, into the
    archive at `path`; returns (programs, bytes).

    Args:
        rows: rows of a ledger.
        archive: programs to keep.
        path: the file to write.
        on_progress: called with the number of programs compiled, and of all that must be.
    """
    programs = archived_programs(archive, on_progress, closed_form=True)
    find_programs([case for case in map(case_of, rows) if isinstance(case, Case)], programs)
    kept = {key: program for key in archive.lines if (program := archive.program(key)) is not None}
    found = kept | programs.compiled.known
    return len(found), write_archive(found, path)


def main() -> int:
    """Rebuild the archive as the flags say; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scalejax.validation.rebuild")
    parser.add_argument("ledger", type=Path, metavar="LEDGER.csv")
    parser.add_argument("--add", action="store_true", help="keep what is there")
    parser.add_argument("--anew", action="store_true", help="take nothing from the archive")
    parser.add_argument("--output", type=Path, default=ARCHIVE, metavar="FILE")
    flags = parser.parse_args()
    try:
        rows = read_ledger(find_ledger(flags.ledger))
        archive = Archive({}) if flags.anew else read_archive(flags.output)
        written = add if flags.add else rebuild
        count, size = written(rows, archive, flags.output, _print_progress)
    except ScalejaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {count} programs, {size / 1e6:.2f} MB, to {flags.output}")
    return 0


def _print_progress(progress: Progress) -> None:
    print(f"compiled {progress.done} of {progress.total} programs", flush=True)


if __name__ == "__main__":
    sys.exit(main())
