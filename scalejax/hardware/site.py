"""What a site adds to a run on its cluster: stragglers, slow input, checkpoints, failures.

A site is not hardware, and no cluster of the catalogue has one; users state what they know in their
cluster file, and None counts as unknown in every result. Also the range of runs to which a
cluster's constants were fitted.
"""

from dataclasses import dataclass, field, fields

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.hardware.host import HostInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConditions:
    """Conditions of a site that delay a run; None where unknown.

    Example:
        >>> from scalejax import RunConditions
        >>> RunConditions(node_mtbf_seconds=1e7, restart_seconds=300.0).step_cv is None
        True
    """

    step_cv: float | None = None
    """Coefficient of variation of one device's step time: standard deviation over mean."""
    input_samples_per_second: float | None = None
    """Samples per second that one node can read, decode and copy to its devices."""
    checkpoint_bytes: float | None = None
    """Bytes of one checkpoint, all devices together; if None, the state of the program."""
    checkpoint_interval_seconds: float | None = None
    """Training time between checkpoints; if None, the optimum for the failure rate."""
    storage_bytes_per_second: float | None = None
    """Rate at which the whole run writes to storage."""
    device_to_host_bytes_per_second: float | None = None
    """Rate of each device to its host, for asynchronous checkpoints: devices wait only for this
    copy. If None, they wait for the storage."""
    node_mtbf_seconds: float | None = None
    """Mean time between run-ending failures of one node."""
    restart_seconds: float | None = None
    """Time from a failure until training resumes from the last checkpoint."""
    expert_load_exponent: float | None = None
    """Exponent of the power law by which tokens choose experts, such as 1.2; None if all experts
    get equally many tokens."""

    def __post_init__(self) -> None:
        for name in sorted(each.name for each in fields(self)):
            require = require_at_least if name in ("step_cv", "restart_seconds") else require_above
            require(f"conditions.{name}", getattr(self, name), 0)
        if self.step_cv is not None and self.step_cv >= 1:
            accepted = "it must be below 1: it is a share of the step, 0.02 for 2 %"
            raise ConfigError(refusal("conditions.step_cv", self.step_cv, accepted))


NO_CONDITIONS = RunConditions()
"""Conditions that are all unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The place of a cluster: the conditions of its runs, and the input pipeline of its hosts.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import RunConditions, Site, predict
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> site = Site(conditions=RunConditions(input_samples_per_second=100))
        >>> slower = predict(path, "dgx-h100", 2, site=site)
        >>> slower.step_seconds > predict(path, "dgx-h100", 2).step_seconds
        True
    """

    conditions: RunConditions = NO_CONDITIONS
    """What delays a run: variation, input, storage, failures."""
    input: HostInput | None = None
    """Input pipeline of every host, from which `conditions.input_samples_per_second` follows; None
    if it is unknown, or that field is given."""


NO_SITE = Site()
"""A site about which nothing is known."""


# The measured runs to which the constants of a cluster were fitted.

FARTHEST = 8.0
"""Multiple of the largest measured number of devices beyond which predictions are extrapolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedRange:
    """The runs to which constants were fitted."""

    device_counts: tuple[int, ...]
    """Devices of each run."""
    held_out_error: float | None = None
    """(predicted - measured) / measured of the largest run, with constants fitted to the others;
    None if there was no run to hold out."""
    sources: dict[str, str] = field(default_factory=dict)
    """Folders of the runs."""

    def __post_init__(self) -> None:
        require_at_least("calibrated.device_counts", len(self.device_counts), 1)
        for count in self.device_counts:
            require_at_least("calibrated.device_counts", count, 1)

    def is_extrapolated(self, device_count: int) -> bool:
        """Whether `device_count` is beyond `FARTHEST` times the largest measured run."""
        return device_count > FARTHEST * max(self.device_counts)
