"""Archive of compiled programs in one small file, keyed by the compiled run.

The programs of one network on similar device counts are nearly equal text, so that they compress
together to a few kilobytes each. Unlike the user's cache, an archive is independent of the version
of scalejax, and it has no source lines of operations. `scalejax.validation` has one for the rows of
the open ledger, `scalejax.xla.kept` one for the quickstart; tests compare some programs of both
with newly compiled ones.
"""

import json
import lzma
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from scalejax.core.errors import ConfigError
from scalejax.core.serialization import save_bytes
from scalejax.simulator.program import Program, each_changed

_ADAPTER = TypeAdapter(Program)


class Archive:
    """Programs by key, parsed on demand."""

    def __init__(self, lines: Mapping[str, str]):
        self.lines = lines
        """The text of each program, by key."""
        self._programs: dict[str, Program] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.lines

    def __len__(self) -> int:
        return len(self.lines)

    def program(self, key: str) -> Program | None:
        """The program with that key; None if it is missing, or in an older format."""
        if key not in self._programs:
            try:
                self._programs[key] = _ADAPTER.validate_json(self.lines[key])
            except (KeyError, ValidationError):
                return None
        return self._programs[key]


@cache
def read_archive(path: Path) -> Archive:
    """Archive in a file; an empty one if the file does not exist.

    Raises:
        ConfigError: if the file is damaged.
    """
    try:
        text = lzma.decompress(path.read_bytes()).decode()
    except FileNotFoundError:
        return Archive({})
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from error
    parts = (line.partition(" ") for line in text.splitlines())
    return Archive({key: program for key, _, program in parts})


def write_archive(programs: Mapping[str, Program], path: Path) -> int:
    """Write programs atomically, similar ones next to each other; returns the file's bytes.

    Raises:
        ConfigError: if the file cannot be written.
    """
    lines = []
    for key, program in sorted(programs.items(), key=_place):
        # Without source lines, which change with every edit.
        bare = each_changed(program.operations, lambda each: replace(each, source=None))
        fields = _ADAPTER.dump_python(
            replace(program, operations=bare), mode="json", exclude_defaults=True
        )
        lines.append(f"{key} {json.dumps(fields, separators=(',', ':'))}\n")
    # 64 MiB: larger than any one program, so that each is compressed against its neighbour.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 64 * 2**20}]
    data = lzma.compress("".join(lines).encode(), check=lzma.CHECK_CRC32, filters=filters)
    save_bytes(data, path)
    return len(data)


def _place(item: tuple[str, Program]) -> tuple[str, int, str, str]:
    """Sort key that puts similar programs together: by network, length, chip."""
    key, program = item
    return program.name, len(program.operations), program.target, key
