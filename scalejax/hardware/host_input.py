"""The input side of a run: what an example of its data asks of a host, and what the host has.

Facts of data and run rather than of hardware; a cluster has it where it is known.
"""

from dataclasses import dataclass

from scalejax.errors import ConfigError, refusal, require_at_least
from scalejax.hardware.input_rates import InputRates


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork:
    """What one example of a data set asks of the host, in the mean."""

    data: str
    """Name of the data set."""
    batch_bytes: float
    """Bytes of it in a batch."""
    encoded_bytes: float = 0.0
    """Bytes of the encoded image."""
    full_pixels: float = 0.0
    """Pixels decoded, of images that are decoded as large as they are."""
    reduced_pixels: float = 0.0
    """Pixels decoded, of JPEG that are decoded smaller."""
    resized_pixels: float = 0.0
    """Pixels of the example, of images that are brought to its size."""
    files: "FileWork | None" = None
    """How its row groups are read; None where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWork:
    """Row groups of a data set, and how a run reads them."""

    rows: int
    """Examples of the data set."""
    row_groups: int
    """Row groups that they lie in."""
    stored_bytes: float
    """Bytes of all that is read of its files."""
    read_bytes: float
    """The same, decompressed."""
    memory_bytes: float
    """Memory for row groups and batches, of all processes of a host together."""
    rows_together: int = 0
    """Rows of any row groups that are taken at once with all of that memory, where row groups do
    not stay; 0 where rows of few of them are mixed, each read once an epoch."""
    is_cached: bool = False
    """Whether row groups are kept on a local disk."""

    def __post_init__(self) -> None:
        for name in ("rows", "row_groups"):
            require_at_least(f"files.{name}", getattr(self, name), 1)

    def reads(self, workers: int, *, is_first_epoch: bool) -> float:
        """How often a row group is decoded in an epoch, by all processes of a host together.

        Each process, the one that trains and evaluates among them, keeps what it decodes in its
        part of the memory, half of which is for that; what does not stay is decoded again for all
        rows that are taken at once.
        """
        processes, parts = max(1, workers), workers + 1
        held = self.memory_bytes / parts / 2 / max(1.0, self.read_bytes)
        if held >= 1 or self.is_cached:
            return (1 if self.is_cached else processes) if is_first_epoch else 0.0
        if not self.rows_together:
            return processes
        together = max(1.0, self.rows_together / parts)
        touched = 1 - (1 - 1 / self.row_groups) ** together
        return max(1.0, touched * self.rows / together * (1 - held))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInput:
    """The input side of every host of a run."""

    rates: InputRates
    """How fast a host is."""
    work: SampleWork
    """What it has to do for one example."""
    workers: int
    """Processes that make batches; 0: threads of the process that trains."""
    is_first_epoch: bool = False
    """Whether nothing has been read before."""

    def __post_init__(self) -> None:
        require_at_least("input.workers", self.workers, 0)
        if not self.rates.is_of_images and self.rates.data != self.work.data:
            accepted = f"the run reads {self.work.data!r}; measure that with scalejax data bench"
            raise ConfigError(refusal("input.data", self.rates.data, accepted))
