"""The input side of a run: what an example of its data asks of a host, and what the host has.

Facts of data and run rather than of hardware; a cluster has it where it is known.
"""

from dataclasses import dataclass, field, fields

from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least

# What a host needs to make batches, stage by stage: plain data, with a unit in each name.

Speedups = tuple[tuple[int, float], ...]
"""(count, samples per second over those of one) by rising count, the first (1, 1.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRates:
    """Row groups, from their files to tables in memory."""

    seconds_per_row_group: float
    """Processor time of one, however small: its file opened, its footer parsed."""
    seconds_per_byte: float
    """Processor time of a byte of it, decompressed."""
    storage_bytes_per_second: float | None = None
    """Rate of what no memory holds; None if it did not show."""

    def __post_init__(self) -> None:
        for name in ("seconds_per_row_group", "seconds_per_byte"):
            require_at_least(f"input.read.{name}", getattr(self, name), 0)
        if self.storage_bytes_per_second is not None:
            require_above("input.read.storage_bytes_per_second", self.storage_bytes_per_second, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRates:
    """Time from rows in memory to a batch of examples."""

    seconds_per_sample: float
    """Of an example, however small; of one that is no image, all of it."""
    seconds_per_encoded_byte: float = 0.0
    """Of a byte of an encoded image."""
    seconds_per_full_pixel: float = 0.0
    """Of a pixel of an image that is decoded as large as it is."""
    seconds_per_reduced_pixel: float = 0.0
    """Of a pixel of a JPEG that is decoded at a half, a quarter or an eighth, then."""
    seconds_per_resized_pixel: float = 0.0
    """Of a pixel of the example, where it has another size than what was decoded."""

    def __post_init__(self) -> None:
        for each in fields(self):
            require_at_least(f"input.take.{each.name}", getattr(self, each.name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Batches copied."""

    seconds_per_batch: float
    """Of a batch, however small."""
    seconds_per_byte: float
    """Of a byte of it."""

    def __post_init__(self) -> None:
        for each in fields(self):
            require_at_least(f"input.hand_over.{each.name}", getattr(self, each.name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRates:
    """How fast one host reads, decodes and hands over, as measured."""

    data: str
    """Name of the data set that was measured. Images are costed by their bytes and pixels,
    whichever they are; what one example of another data set takes holds for that one alone."""
    is_of_images: bool
    """Whether its examples are encoded images, costed by bytes and pixels."""
    cores: int
    """Cores of the host: more workers than that do not help."""
    memory_bytes: float
    """Memory of the host, half of which is expected to hold files that were read before."""
    take: TakeRates
    """Rows to batches handed over, by one worker process: a core's time."""
    threads: TakeRates
    """Rows to batches on a device, by threads of the process that trains, as many as cores: from
    one sample to the next."""
    hand_over: CopyRates
    """Batches of workers to devices, by the process that trains."""
    worker_speedups: Speedups
    """Worker processes side by side."""
    input_shape: tuple[int, ...] = ()
    """Of one example that was measured."""
    columns: tuple[str, ...] = ()
    """Numbers that it was made of, where the data set is a table."""
    read: ReadRates | None = None
    """Row groups; None where the data set has none."""
    shared_storage_bytes_per_second: float | None = None
    """Rate of the storage to all hosts together, where they share it; by hand."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        require_at_least("input.cores", self.cores, 1)
        require_above("input.memory_bytes", self.memory_bytes, 0)
        counts = [count for count, _ in self.worker_speedups]
        if counts != sorted(set(counts)) or self.worker_speedups[:1] != ((1, 1.0),):
            accepted = "it must be pairs of a count and a speedup by rising count, from (1, 1)"
            raise ConfigError(refusal("input.worker_speedups", self.worker_speedups, accepted))
        if self.shared_storage_bytes_per_second is not None:
            name = "input.shared_storage_bytes_per_second"
            require_above(name, self.shared_storage_bytes_per_second, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork:
    """What one example of a data set asks of the host, in the mean."""

    data: str
    """Name of the data set."""
    batch_bytes: float
    """Bytes of it in a batch."""
    is_of_images: bool = False
    """Whether it is an encoded image, with bytes and pixels as below."""
    input_shape: tuple[int, ...] = ()
    """Of its input."""
    columns: tuple[str, ...] = ()
    """Numbers that it is made of, where the data set is a table."""
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
    shards: int = 1
    """Parts of equal size into which row groups are divided, each for its own part of every
    batch."""

    def __post_init__(self) -> None:
        for name in ("rows", "row_groups", "shards"):
            require_at_least(f"files.{name}", getattr(self, name), 1)

    def reads(self, workers: int, *, is_first_epoch: bool, hosts: float = 1.0) -> float:
        """How often a row group is decoded in an epoch, in the mean of all of them, by all
        processes together of one of `hosts` that take different parts of every batch.

        Each process, the one that trains and evaluates among them, keeps what it decodes in its
        part of the memory, half of which is for that; what does not stay is decoded again for all
        rows that are taken at once. The rows of a host lie in all row groups, but for shards.
        """
        processes, parts = max(1, workers), workers + 1
        rows, shards = self.rows / hosts, self.shards_among(hosts)
        held = self.memory_bytes / parts / 2 / max(1.0, self.read_bytes / shards)
        if held >= 1 or self.is_cached:
            readers = 1 if self.is_cached else processes
            return readers * self._touched(rows / readers, shards) if is_first_epoch else 0.0
        if not self.rows_together:
            return processes * self._touched(rows / processes, shards)
        together = min(rows, max(1.0, self.rows_together / parts))
        again = self._touched(together, shards) * rows / together * (1 - held)
        return max(self._touched(rows, shards), again)

    def shards_among(self, hosts: float) -> float:
        """Parts of the row groups, of which each of `hosts` reads one."""
        return min(float(self.shards), hosts)

    def _touched(self, rows: float, shards: float) -> float:
        """Share of all row groups that hold any of `rows` drawn from one of `shards`: of a group
        of m rows, none is drawn with a chance of (1 - share drawn)^m."""
        drawn = min(1.0, rows * shards / self.rows)
        return (1 - (1 - drawn) ** (self.rows / self.row_groups)) / shards


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
        if self.rates.is_of_images and self.work.is_of_images:
            return
        measured, asked = _kind(self.rates), _kind(self.work)
        if measured != asked:
            accepted = f"the run reads {asked}; measure that with scalejax data bench"
            raise ConfigError(refusal("input.data", measured, accepted))


def _kind(of: InputRates | SampleWork) -> str:
    """What one example is, as far as its time depends on it, in words."""
    shape = " x ".join(map(str, of.input_shape)) or "a shape not recorded"
    named = f"{of.data} of encoded images" if of.is_of_images else f"{of.data} of {shape}"
    return f"{named} ({', '.join(of.columns)})" if of.columns else named
