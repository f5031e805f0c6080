"""What a run meets beside its own arithmetic: slow devices, slow input, checkpoints, failures.

Facts of a site rather than of its hardware, so that no catalogue entry has them, but for one
that is named after a run: a user who knows them writes them into the cluster file, and what is
None stays unknown in every figure.
"""

from dataclasses import dataclass, field, fields

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConditions:
    """What delays a run; None where it is not known."""

    step_cv: float | None = None
    """Standard deviation of one device's step time over its mean, from step to step."""
    launches_block: bool = False
    """Whether the host waits for each operation before it sets off the next, as with
    CUDA_LAUNCH_BLOCKING=1, instead of running ahead."""
    launches_in_graph: bool = False
    """Whether the host sets off many operations at once, as a CUDA graph, instead of one by one:
    XLA's command buffers, torch.cuda.graph, MXNET_ENABLE_CUDA_GRAPHS=1."""
    input_samples_per_second: float | None = None
    """Samples that one node can read, decode and hand to its devices."""
    checkpoint_bytes: float | None = None
    """Bytes of one checkpoint, all devices together; if None, the state of the program."""
    checkpoint_interval_seconds: float | None = None
    """Time of training between checkpoints; if None, the best for the failures there are."""
    storage_bytes_per_second: float | None = None
    """Rate at which the whole run writes to storage."""
    device_to_host_bytes_per_second: float | None = None
    """Rate of each device to its host, for checkpoints that are written while training goes on:
    the devices wait for this copy alone. If None, they wait for the storage."""
    node_mtbf_seconds: float | None = None
    """Mean time between failures of one node that end the run."""
    restart_seconds: float | None = None
    """Time from a failure until training goes on from the last checkpoint."""

    def __post_init__(self) -> None:
        for name in ("step_cv", "restart_seconds"):
            if (value := getattr(self, name)) is not None:
                require_at_least(f"conditions.{name}", value, 0)
        others = {field.name for field in fields(self)} - {
            "step_cv",
            "restart_seconds",
            "launches_block",
            "launches_in_graph",
        }
        for name in sorted(others):
            if getattr(self, name) is not None:
                require_above(f"conditions.{name}", getattr(self, name), 0)
        if self.launches_block and self.launches_in_graph:
            accepted = "with conditions.launches_block, nothing is set off before its turn"
            raise ConfigError(refusal("conditions.launches_in_graph", True, accepted))
        if self.step_cv is not None and self.step_cv >= 1:
            accepted = "it must be below 1: it is a share of the step, 0.02 for 2 %"
            raise ConfigError(refusal("conditions.step_cv", self.step_cv, accepted))


NO_CONDITIONS = RunConditions()
"""Nothing is known."""


# Which measured runs the constants of a cluster were fitted to, and how far they carry.

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
