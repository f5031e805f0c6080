"""SI base units inside, human units on the way out: the only file that knows prefixes."""

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9
TFLOP = 10**12

UNKNOWN = "n/a"


def format_seconds(seconds: float | None) -> str:
    """A duration in the unit a person would use: "850 us", "12.4 ms", "3.21 s", "1 h 02 min"."""
    if seconds is None:
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
    """The same in one unit, for narrow columns: "850 us", "3.21 s", "42.8 min", "1.03 h"."""
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


def format_count(count: float | None) -> str:
    """A large number with its prefix: "25.6 M", "1.28 k", "312"."""
    if count is None:
        return UNKNOWN
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {prefix}"
    return f"{count:.3g}"


def format_fraction(fraction: float | None) -> str:
    """A ratio as a percentage: "87.5 %"."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.1f} %"
