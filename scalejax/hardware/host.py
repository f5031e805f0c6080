"""The input pipeline of a host: its rates per stage, and the work per example of a data set.

Properties of host, data and run rather than of hardware; a cluster has them if they are known.
"""

from dataclasses import dataclass, field, fields

from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
)

# Rates of the stages of the input pipeline.

_MOST_SECONDS = 1e5
"""Longest time for any work on a sample, a batch or a row group: a day or so."""


def _require_seconds(field: str, seconds: float) -> None:
    require_at_least(field, seconds, 0)
    require_at_most(field, seconds, _MOST_SECONDS)


Speedups = tuple[tuple[int, float], ...]
"""(count, samples per second over those of one) by rising count, starting with (1, 1.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRates:
    """Rates of reading row groups from files into tables in memory."""

    seconds_per_row_group: float
    """CPU time per row group, regardless of its size: opening the file, parsing the footer."""
    seconds_per_byte: float
    """CPU time per decompressed byte."""
    storage_bytes_per_second: float | None = None
    """Storage bandwidth for files that are not in the page cache; None if not observed."""

    def __post_init__(self) -> None:
        for name in ("seconds_per_row_group", "seconds_per_byte"):
            _require_seconds(f"input.read.{name}", getattr(self, name))
        require_above("input.read.storage_bytes_per_second", self.storage_bytes_per_second, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRates:
    """Rates of decoding rows in memory into a batch of examples."""

    seconds_per_sample: float
    """Time per example, regardless of its size; the whole time of examples that are not images."""
    seconds_per_encoded_byte: float = 0.0
    """Time per byte of an encoded image."""
    seconds_per_full_pixel: float = 0.0
    """Time per pixel of an image decoded at full size."""
    seconds_per_reduced_pixel: float = 0.0
    """Time per decoded pixel of a JPEG decoded at 1/2, 1/4 or 1/8 size."""
    seconds_per_resized_pixel: float = 0.0
    """Time per pixel of the example, if the decoded image is resized."""

    def __post_init__(self) -> None:
        for each in fields(self):
            _require_seconds(f"input.take.{each.name}", getattr(self, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Rates of copying batches to devices."""

    seconds_per_batch: float
    """Time per batch, regardless of its size."""
    seconds_per_byte: float
    """Time per byte."""

    def __post_init__(self) -> None:
        for each in fields(self):
            _require_seconds(f"input.hand_over.{each.name}", getattr(self, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRates:
    """Measured rates of the input pipeline of one host."""

    data: str
    """Name of the measured data set. Rates of images hold for any images, by bytes and pixels;
    those of other examples hold only for this data set."""
    is_of_images: bool
    """Whether its examples are encoded images, costed by bytes and pixels."""
    cores: int
    """Cores of the host: more workers than that do not help."""
    memory_bytes: float
    """Memory of the host, half of which is assumed to be page cache of files read before."""
    take: TakeRates
    """Decoding of rows into batches by one worker process: time of one core."""
    threads: TakeRates
    """Decoding of rows into batches on a device by as many threads of the training process as there
    are cores: time from one sample to the next."""
    hand_over: CopyRates
    """Copies of the workers' batches to devices by the training process."""
    worker_speedups: Speedups
    """Throughput of several worker processes over that of one."""
    input_shape: tuple[int, ...] = ()
    """Shape of one measured example."""
    columns: tuple[str, ...] = ()
    """Columns of the measured examples, if the data set is a table."""
    read: ReadRates | None = None
    """Reading of row groups; None if the data set has none."""
    shared_storage_bytes_per_second: float | None = None
    """Bandwidth of the storage to all hosts together, if they share it; entered by hand."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each number."""

    def __post_init__(self) -> None:
        require_at_least("input.cores", self.cores, 1)
        require_above("input.memory_bytes", self.memory_bytes, 0)
        counts = [count for count, _ in self.worker_speedups]
        if counts != sorted(set(counts)) or self.worker_speedups[:1] != ((1, 1.0),):
            accepted = "it must be pairs of a count and a speedup by rising count, from (1, 1)"
            raise ConfigError(refusal("input.worker_speedups", self.worker_speedups, accepted))
        require_above(
            "input.shared_storage_bytes_per_second", self.shared_storage_bytes_per_second, 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork:
    """Mean work of the input pipeline per example of a data set."""

    data: str
    """Name of the data set."""
    batch_bytes: float
    """Bytes of one example in a batch."""
    is_of_images: bool = False
    """Whether examples are encoded images, with the bytes and pixels below."""
    input_shape: tuple[int, ...] = ()
    """Shape of the input of one example."""
    columns: tuple[str, ...] = ()
    """Columns of an example, if the data set is a table."""
    encoded_bytes: float = 0.0
    """Bytes of the encoded image."""
    full_pixels: float = 0.0
    """Pixels decoded at full size."""
    reduced_pixels: float = 0.0
    """Pixels decoded at reduced size (JPEG)."""
    resized_pixels: float = 0.0
    """Pixels of the example, for images that are resized."""
    files: "FileWork | None" = None
    """Reading of its row groups; None if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWork:
    """Row groups of a data set, and how a run reads them."""

    rows: int
    """Examples of the data set."""
    row_groups: int
    """Number of row groups."""
    stored_bytes: float
    """Compressed bytes of the columns that are read."""
    read_bytes: float
    """Decompressed bytes of the columns that are read."""
    memory_bytes: float
    """Memory for row groups and batches, in all processes of a host together."""
    rows_together: int = 0
    """Rows, from any row groups, that are decoded together within that memory, if row groups do not
    stay in memory; 0 if rows of a few row groups are mixed, each read once per epoch."""
    is_cached: bool = False
    """Whether decoded row groups are cached on a local disk."""
    shards: int = 1
    """Shards of equal size into which row groups are divided, each for its own part of every
    batch."""

    def __post_init__(self) -> None:
        for name in ("rows", "row_groups", "shards"):
            require_at_least(f"files.{name}", getattr(self, name), 1)

    def reads(self, workers: int, *, is_first_epoch: bool, hosts: float = 1.0) -> float:
        """Mean number of times that a row group is decoded per epoch by all processes of a host.

        Each of `hosts` takes its own part of every batch. Each process, including the training
        process, caches decoded row groups in half of its share of the memory; a group that was
        evicted is decoded again for all rows that are decoded together. Without shards, the rows of
        a host are in all row groups.
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
        """Number of parts of the row groups; each of `hosts` reads one."""
        return min(float(self.shards), hosts)

    def _touched(self, rows: float, shards: float) -> float:
        """Expected share of all row groups that hold any of `rows` drawn from one of `shards`: a
        group of m rows holds none with probability (1 - share drawn)^m."""
        drawn = min(1.0, rows * shards / self.rows)
        return (1 - (1 - drawn) ** (self.rows / self.row_groups)) / shards


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInput:
    """Input pipeline of every host of a run."""

    rates: InputRates
    """Rates of a host."""
    work: SampleWork
    """Work per example."""
    workers: int
    """Worker processes that make batches; 0: threads of the training process."""
    is_first_epoch: bool = False
    """Whether files are read for the first time, with nothing in the page cache."""
    is_augmented: bool = False
    """Whether the run augments its images at random, whose time the rates do not include."""

    def __post_init__(self) -> None:
        require_at_least("input.workers", self.workers, 0)
        if self.rates.is_of_images and self.work.is_of_images:
            return
        if self.rates.is_of_images != self.work.is_of_images:
            reads = "encoded images" if self.work.is_of_images else "no encoded images"
            accepted = f"the run reads {reads}: give what scalejax data bench measures of it"
            raise ConfigError(refusal("input.is_of_images", self.rates.is_of_images, accepted))
        measured, asked = _kind(self.rates), _kind(self.work)
        if measured != asked:
            accepted = f"it must be what the run reads, {asked}; scalejax data bench measures that"
            raise ConfigError(refusal("input.data", measured, accepted))


def _kind(of: InputRates | SampleWork) -> str:
    """A phrase for the kind of example, on which its time depends: data set, shape, columns."""
    shape = " x ".join(map(str, of.input_shape)) or "a shape not recorded"
    named = f"{of.data} of encoded images" if of.is_of_images else f"{of.data} of {shape}"
    return f"{named} ({', '.join(of.columns)})" if of.columns else named
