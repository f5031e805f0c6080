"""The errors that scalejax raises, and the wording of refusals.

    ScalejaxError                  anything a user can fix; the command line prints it and exits 2
    ├── ConfigError (ValueError)   a field, flag or argument has an invalid value
    ├── UnknownHardware            no chip or cluster of that name in the catalogue
    ├── DoesNotFit                 the program needs more memory or devices than there are
    ├── CheckpointMismatch         a checkpoint is of another run
    ├── Damaged                    stored data or a checkpoint is damaged; it exits 4
    ├── Unavailable                the network or a store does not answer; it exits 75
    └── ProfileError               the compiler refused the step for the target

Knows nothing of what is being refused: callers give the field, the value and what is accepted.
"""

import dataclasses
import difflib
import enum
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

_HTTP_USER = re.compile(r"""(\bhttps?://)[^\s/?#"'@]+@""", re.IGNORECASE)
_HTTP_QUERY = re.compile(r"""(\bhttps?://[^\s?"']*)\?[^\s"')]+""", re.IGNORECASE)
_PASSWORD = re.compile(  # of a scheme of some length, else the time grows with the square
    r"""(\b[a-z][a-z0-9+.-]{0,60}://[^\s/?#"'@:…]*:)[^\s/?#"'@]+@""", re.IGNORECASE
)
_QUOTED_CHARACTERS = 400
"""Longest quotation of a refused value."""


class ExitCode(enum.IntEnum):
    """How a process or a group of processes ends, which tells launchers whether to restart it.

    Other codes: 1 after an unforeseen error, 128 + n after signal n.
    """

    COMPLETED = 0
    REFUSED = 2
    """Input was refused, and would be refused again."""
    DIVERGED = 3
    """All processes of a run whose loss is no longer finite; a restart would change nothing."""
    DAMAGED = 4
    """Stored data are damaged; restart from what was stored before."""
    LOST = 5
    """A process or node is lost; restart with the remaining ones."""
    TRANSIENT = 75
    """The network, a store or the scheduler failed; restart. EX_TEMPFAIL of <sysexits.h>."""


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""Beginning of XLA's errors when a device lacks the requested memory."""
FINAL_CODES = (ExitCode.COMPLETED, ExitCode.REFUSED, ExitCode.DIVERGED)
"""Codes after which nothing is restarted: the end would be the same."""


class ScalejaxError(Exception):
    """A problem that the user can fix; its message says how, without secrets in URLs.

    Example:
        >>> from scalejax import ScalejaxError, load_cluster
        >>> try:
        ...     load_cluster("dgx-h1000")
        ... except ScalejaxError as error:
        ...     print(type(error).__name__)
        UnknownHardware
    """

    exit_code: ClassVar[ExitCode] = ExitCode.REFUSED
    """Exit code of a command that raises it."""

    def __str__(self) -> str:
        return without_secrets(super().__str__())


class ConfigError(ScalejaxError, ValueError):
    """A field, flag or argument has an invalid value.

    Example:
        >>> from scalejax import ConfigError, Layout
        >>> try:
        ...     Layout(data=0)
        ... except ConfigError as error:
        ...     print(error)
        layout.data=0 is refused: it must be at least 1, and finite.
    """


class UnknownHardware(ScalejaxError):
    """No chip or cluster of that name is in the catalogue or a file."""


class DoesNotFit(ScalejaxError):
    """A program needs more memory, or a mesh more devices, than there are.

    Example:
        >>> from scalejax import DoesNotFit, load_cluster
        >>> try:
        ...     load_cluster("tpu-v5e").require_devices(512)
        ... except DoesNotFit as error:
        ...     print(error)
        devices=512 is refused: tpu-v5e has at most 256.
    """


class CheckpointMismatch(ScalejaxError):
    """A checkpoint was written by a run of another shape."""


class Damaged(ScalejaxError):
    """Stored data, a record or a checkpoint is not what was written."""

    exit_code = ExitCode.DAMAGED


class Unavailable(ScalejaxError):
    """The network or a store does not answer in time; try again later."""

    exit_code = ExitCode.TRANSIENT


class ProfileError(ScalejaxError):
    """The compiler refused the step for the target cluster."""


def without_secrets(text: str) -> str:
    """`text` with "…" for users, passwords and queries (which may be signed) of HTTP URLs, and for
    passwords of other URLs, whose users are containers and projects."""
    text = _HTTP_USER.sub(r"\1…@", text)
    return _PASSWORD.sub(r"\1…@", _HTTP_QUERY.sub(r"\1?…", text))


def refusal(field: str, value: object, accepted: str) -> str:
    """The sentence that refuses an input: field, value, what is accepted."""
    return f"{field}={_quoted(value)} is refused: {accepted}."


def _quoted(value: object) -> str:
    """The repr of `value`, `shortened`."""
    if isinstance(value, int) and abs(value) >= 10**_QUOTED_CHARACTERS:
        return f"a whole number of {value.bit_length()} bits"  # Python refuses to print longer ones
    return shortened(repr(value))


def shortened(text: str) -> str:
    """`text` without secrets, and with its middle elided if it is too long for a message."""
    text = without_secrets(text)
    half = _QUOTED_CHARACTERS // 2
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


@contextmanager
def prefixed(where: str) -> Iterator[None]:
    """Begin each line of a refusal inside the block with `where`."""
    try:
        yield
    except ConfigError as error:
        lines = (f"{where}{line}" for line in str(error).splitlines())
        raise ConfigError("\n".join(lines)) from error


def require_one_line(field: str, text: object) -> None:
    """Refuse control characters in text that a shell, a batch script or a terminal will read: a
    newline in a path ends a SLURM directive, and what follows is run. None is accepted.

    Raises:
        ConfigError: naming the field and the first such character.
    """
    for character in "" if text is None else str(text):
        if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            accepted = f"it must be of one line, without {character!r} or other control characters"
            raise ConfigError(refusal(field, str(text), accepted))


def require_import_path(field: str, path: str, example: str) -> None:
    """Refuse a path that is not "module:name" with Python identifiers as its parts.

    Raises:
        ConfigError: with the `example`.
    """
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        kind = "Class" if example.rpartition(":")[2][0].isupper() else "function"
        accepted = f'it must be "module:{kind}", such as "{example}"'
        raise ConfigError(refusal(field, path, accepted))


def in_one_line(error: Exception) -> str:
    """Type and message of an error from foreign code, on one line."""
    return shortened(f"{type(error).__name__}: {' '.join(str(error).split())}")


def nearest_name(name: str, accepted: Iterable[str], *, alike: float = 0.5) -> str | None:
    """The accepted name closest to `name`; None if no similarity is at least `alike`, 0..1."""
    matches = difflib.get_close_matches(name, list(accepted), n=1, cutoff=alike)
    return matches[0] if matches else None


def unknown_name(field: str, name: object, accepted: Iterable[str]) -> str:
    """The refusal of a name that is not among `accepted`: suggests the closest, then lists all."""
    names = sorted(accepted)
    closest = nearest_name(str(name), names)
    hint = f"did you mean {closest!r}? It" if closest else "it"
    return refusal(field, name, f"{hint} must be one of {', '.join(names)}")


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` on either side of `value`, as text: "984 or 1008"."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


def require_multiple(field: str, value: int, divisor: int, divisor_name: str) -> None:
    """Refuse `value` unless `divisor` divides it.

    Raises:
        ConfigError: naming the field, the divisor and the nearest multiples.
    """
    if value % divisor:
        accepted = (
            f"it must be a multiple of {divisor_name}={divisor} "
            f"(nearest: {nearest_multiples(value, divisor)})"
        )
        raise ConfigError(refusal(field, value, accepted))


def require_at_least(field: str, value: float | None, minimum: float) -> None:
    """Refuse `value` below `minimum`, infinite or NaN; None is accepted.

    Raises:
        ConfigError: naming the field and the minimum.
    """
    if value is not None and not minimum <= value < math.inf:  # refuses NaN too
        raise ConfigError(refusal(field, value, f"it must be at least {minimum}, and finite"))


LARGEST_SIZE = 10**8
"""A hundred times any network's width, depth or number of parts."""


def require_size(field: str, value: int | None, minimum: int = 1) -> None:
    """Refuse a size of a network or of its samples that no network has; None is accepted.

    Raises:
        ConfigError: naming the field and the bound.
    """
    require_at_least(field, value, minimum)
    if value is not None and value > LARGEST_SIZE:
        raise ConfigError(refusal(field, value, f"it must be from {minimum} to {LARGEST_SIZE:,}"))


def require_at_most(field: str, value: float | None, maximum: float) -> None:
    """Refuse `value` above `maximum`, or NaN; None is accepted.

    Raises:
        ConfigError: naming the field and the maximum.
    """
    if value is not None and not value <= maximum:
        raise ConfigError(refusal(field, value, f"it must be at most {maximum:g}"))


def require_above(field: str, value: float | None, bound: float) -> None:
    """Refuse `value` at or below `bound`, infinite or NaN; None is accepted.

    Raises:
        ConfigError: naming the field and the bound.
    """
    if value is not None and not bound < value < math.inf:
        raise ConfigError(refusal(field, value, f"it must be above {bound}, and finite"))


_LARGEST = {
    "bytes_per_second": 1e18,
    "flop_per_second": 1e20,
    "bytes": 2**60,
    "seconds": 1e5,
    "hz": 1e12,
    "count": 1e6,
    "per_sm": 1e9,
    "per_node": 1e6,
}
"""Values that exceed those of any machine, by the unit at the end of a field's name: an exabyte per
second or of memory, a hundred exaFLOP/s, a day or so, a terahertz, a gigabyte in a multiprocessor,
a million of anything."""


SLOWEST_RATE = 1e6
"""Bytes per second that any link or memory exceeds: a smaller number is in another unit."""


def require_byte_rates(where: str, machine: object) -> None:
    """Refuse rates of a machine below a megabyte per second, which no link or memory has: they are
    in another unit. None is accepted.

    Args:
        where: prefix of the field names in messages: "network."; may be empty.
        machine: dataclass with the fields.

    Raises:
        ConfigError: naming the field, its unit, and what the number may have meant.
    """
    for each in dataclasses.fields(machine):  # type: ignore[arg-type]  any dataclass
        value = getattr(machine, each.name)
        if each.name.endswith("bytes_per_second") and value is not None and value < SLOWEST_RATE:
            meant = ""
            if value > 0:
                meant = f"; {value:g} Gb/s is {value / 8:g}e9, and {value:g} GB/s is {value:g}e9"
            accepted = f"it is in bytes per second, and must be at least 1e6{meant}"
            raise ConfigError(refusal(f"{where}{each.name}", value, accepted))


def require_physical(where: str, machine: object) -> None:
    """Refuse numbers of a machine that are negative, not finite, or larger than those of any
    machine, by the unit at the end of a field's name; None is accepted.

    Args:
        where: prefix of the field names in messages: "cuda."; may be empty.
        machine: dataclass with the fields.

    Raises:
        ConfigError: naming the field and what is accepted.
    """
    for each in dataclasses.fields(machine):  # type: ignore[arg-type]  any dataclass
        value = getattr(machine, each.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        found = [bound for unit, bound in _LARGEST.items() if each.name.endswith(unit)]
        if found and not 0 <= value <= max(found):
            accepted = f"it must be from 0 to {max(found):.3g}"
            raise ConfigError(refusal(f"{where}{each.name}", value, accepted))


def require_fraction(field: str, value: float | None) -> None:
    """Refuse `value` at or below 0, above 1 or NaN; None is accepted.

    Raises:
        ConfigError: naming the field.
    """
    if value is not None and not 0 < value <= 1:
        raise ConfigError(refusal(field, value, "it must be above 0 and at most 1"))


def require_attained(field: str, value: float | None) -> None:
    """Refuse a share of a peak that no device has: outside 1e-6 to 1, or NaN.

    Raises:
        ConfigError: naming the field.
    """
    if value is not None and not 1e-6 <= value <= 1:
        raise ConfigError(refusal(field, value, "it must be at least 1e-06 and at most 1"))
