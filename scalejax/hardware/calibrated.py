"""Which measured runs the constants of a cluster were fitted to, and how far they carry.

Written by `scalejax calibrate --from`; read by whoever predicts.
"""

from dataclasses import dataclass, field

from scalejax.errors import require_at_least

FARTHEST = 8.0
"""Times the largest measured number of devices up to which a prediction is no extrapolation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedRange:
    """The runs that constants were fitted to."""

    device_counts: tuple[int, ...]
    """Devices of each run."""
    held_out_error: float | None = None
    """(predicted - measured) / measured of the largest run, by constants fitted to the others;
    None if there was none to hold out."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where the runs are."""

    def __post_init__(self) -> None:
        require_at_least("calibrated.device_counts", len(self.device_counts), 1)
        for count in self.device_counts:
            require_at_least("calibrated.device_counts", count, 1)

    def is_extrapolated(self, device_count: int) -> bool:
        """Whether a run of so many devices is beyond what the fit was held against."""
        return device_count > FARTHEST * max(self.device_counts)
