"""What a host needs to make batches, stage by stage: plain data, with a unit in each name.

`scalejax data bench` measures it, `cost.input` adds it up.
"""

from dataclasses import dataclass, field, fields

from scalejax.errors import ConfigError, refusal, require_above, require_at_least

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
