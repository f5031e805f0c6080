"""Parsing and formatting of quantities: the only file that knows prefixes; others use SI units."""

import math
import re

from scalejax.core.errors import ConfigError, refusal

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9
TFLOP = 10**12

UNKNOWN = "n/a"

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(field: str, text: str) -> float:
    """Seconds of a duration as typed: "90 s", "30min", "2.5h", "3 d".

    Raises:
        ConfigError: if it is not a duration, or zero.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|min|h|d)\s*", text)
    if not found or not float(found[1]):
        accepted = "it must be a number above 0 with one of the units s, min, h and d, such as 2.5h"
        raise ConfigError(refusal(field, text, accepted))
    return float(found[1]) * _SECONDS[found[2]]


_COUNT = re.compile(
    r"\s*((?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)(?:e[0-9]+)?)\s*([kmbgt]?)\s*"
)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_count(field: str, text: str) -> float:
    """A number as typed: "300B", "15T", "1.5e12", "300_000".

    Raises:
        ConfigError: if it is not a number above 0.
    """
    found = _COUNT.fullmatch(text.lower())
    value = float(found[1]) * _COUNTS[found[2]] if found else 0.0
    if not 0 < value < math.inf:
        accepted = "it must be a number above 0, with K, M, B or T for thousands to trillions: 300B"
        raise ConfigError(refusal(field, text, accepted))
    return value


def unit_of_axis(longest_seconds: float) -> tuple[str, float]:
    """Name and seconds of the unit of a time axis: the largest of days, hours, minutes and seconds
    that fits at least twice into `longest_seconds`."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    return next((pair for pair in units if longest_seconds >= 2 * pair[1]), units[-1])


def format_seconds(seconds: float | None) -> str:
    """A duration in the unit a person would use: "850 us", "12.4 ms", "3.21 s", "1 h 02 min"."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours / 24:.1f} days"


def format_seconds_briefly(seconds: float | None) -> str:
    """A duration in one unit, for narrow columns: "850 us", "3.21 s", "42.8 min", "1.03 h"."""
    if seconds is None or seconds < 60 or seconds >= 48 * 3600:
        return format_seconds(seconds)
    return f"{seconds / 60:.3g} min" if seconds < 3600 else f"{seconds / 3600:.3g} h"


def format_bytes(count: float | None) -> str:
    """A size in binary units: "512 B", "1.5 KiB", "80.0 GiB"."""
    if count is None:
        return UNKNOWN
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_bytes_per_second(rate: float | None) -> str:
    """A rate in decimal units, as links and disks are sold: "512 MB/s", "1.5 GB/s"."""
    if rate is None:
        return UNKNOWN
    number, _, prefix = format_count(rate).partition(" ")
    return f"{number} {prefix}B/s"


def format_count(count: float | None) -> str:
    """A large number with its prefix: "25.6 M", "1.28 k", "312"."""
    if count is None:
        return UNKNOWN
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {prefix}"
    return f"{count:.3g}"


def counted(count: int | str, noun: str) -> str:
    """A count with its noun: "1 device", "4096 devices"; for a list, "8,16 devices"."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"


def format_fraction(fraction: float | None) -> str:
    """A ratio as a percentage: "87.5 %"."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.1f} %"
