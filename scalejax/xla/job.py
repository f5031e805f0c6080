"""Jobs and results of the compile workers: plain data."""

from dataclasses import dataclass, field

from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.units import counted
from scalejax.simulator.program import Program
from scalejax.xla.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """Job to compile the step of a run."""

    target: Target
    """Devices to compile for."""
    run: ResolvedRun
    """The run."""

    def __post_init__(self) -> None:
        if epochs := self.run.config.batch.ramp_epochs:
            accepted = (
                "this is for one batch, and only predict takes several in turn; leave it out, and "
                "give the batch of the epochs you mean as batch.global_batch"
            )
            raise ConfigError(refusal("batch.ramp_epochs", epochs, accepted))

    @property
    def title(self) -> str:
        """Title of the job."""
        model = self.run.config.model.name
        return f"the training step of {model!r} for {counted(self.target.device_count, 'device')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionJob:
    """Job to compile a user's function."""

    target: Target
    """Devices to compile for."""
    builder: str
    """Function that builds it: "module:name" or "/path/to/file.py:name"; or the name of `pickled`.
    """
    mesh_axes: tuple[tuple[str, int], ...]
    """(name, size) of each mesh axis, major to minor."""
    pickled: str = ""
    """The function itself, by `scalejax.xla.functions.pickled`; empty if it is imported."""
    path: tuple[str, ...] = ()
    """Folders from which to import what `pickled` refers to."""

    @property
    def title(self) -> str:
        """Title of the job."""
        return (
            f"{self.builder.rpartition('/')[2]!r} for {counted(self.target.device_count, 'device')}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Result of a compiled job."""

    program: Program
    """The compiled program."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digests by path of the user's files that were imported: the program is valid while they are
    unchanged."""
