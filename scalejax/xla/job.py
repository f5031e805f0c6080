"""What a worker is asked to compile, and what it answers: plain data, passed as JSON."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.units import counted
from scalejax.simulator.program import Program
from scalejax.xla.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """The step of a run."""

    target: Target
    """Devices to compile for."""
    run: ResolvedRun
    """The run."""
    name: Literal["run"] = "run"
    """Selects this kind."""

    def __post_init__(self) -> None:
        if epochs := self.run.config.batch.ramp_epochs:
            accepted = (
                "this is of one batch, and predict alone takes one after another; leave it out, "
                "and give the batch of the epochs that are meant as batch.global_batch"
            )
            raise ConfigError(refusal("batch.ramp_epochs", epochs, accepted))

    @property
    def title(self) -> str:
        """What is compiled, for people."""
        model = self.run.config.model.name
        return f"the training step of {model!r} for {counted(self.target.device_count, 'device')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionJob:
    """A function of the user's own."""

    target: Target
    """Devices to compile for."""
    builder: str
    """Where the function that builds it is: "module:name" or "/path/to/file.py:name"."""
    mesh_axes: tuple[tuple[str, int], ...]
    """(name, size) of each mesh axis, major to minor."""
    name: Literal["function"] = "function"
    """Selects this kind."""

    @property
    def title(self) -> str:
        """What is compiled, for people."""
        return (
            f"{self.builder.rpartition('/')[2]!r} for {counted(self.target.device_count, 'device')}"
        )


Job = Annotated[RunJob | FunctionJob, Field(discriminator="name")]
"""Either kind, told apart by `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A job done."""

    program: Program
    """What was asked for."""
    sources: dict[str, str] = field(default_factory=dict)
    """Digests by path of the user's own files that were imported on the way: while they stay
    the same, so does the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A job that the worker refused in words of its own."""

    error: str
    """Name of the class of the error, in `errors`."""
    message: str
    """Its text."""
