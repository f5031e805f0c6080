"""Measures the time that this host needs for each stage of preparing batches of a run's data.

Images are rescaled to several sizes, and decoded to several sizes, so that the fitted rates hold
for sizes that were not measured. Knows no program and no step.
"""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image, JpegImagePlugin

from scalejax.config.data import DataConfig, ParquetConfig
from scalejax.config.run import RunConfig
from scalejax.core.environment import machine_cores
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.data.datasets import open_source
from scalejax.hardware import CopyRates, HostInput, InputRates, ReadRates, Speedups, TakeRates
from scalejax.measure.devices.host import source_of
from scalejax.measure.input import probes
from scalejax.measure.input.probes import TAKEN, ReadyBatches
from scalejax.measure.input.work import encoded_images, sample_work, stored_share
from scalejax.simulator.input import InputPace, input_pace, stage_seconds
from scalejax.training.logger import input_measurement
from scalejax.training.record import InputMeasurement
from scalejax.training.sample_life import LifeStage, life_of

_LIBRARIES = ("scalejax", "jax", "grain", "pillow", "pyarrow")

# Rates are measured on rescaled images with the encoding of the originals.


def write_sized(images: Sequence[bytes], factor: float, path: Path) -> None:
    """Write a Parquet file of `images`, rescaled by `factor`, in one row group.

    Args:
        images: encoded images.
        factor: scale of width and height; 1 leaves them unchanged.
        path: output file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    encoded = [each if factor == 1 else sized(each, factor) for each in images]
    table = pa.table({"image": encoded, "label": pa.array([0] * len(encoded), pa.int64())})
    pq.write_table(table, path)


def sized(encoded: bytes, factor: float) -> bytes:
    """The image rescaled by `factor`; a JPEG keeps its quality (its quantisation tables)."""
    with Image.open(io.BytesIO(encoded)) as image:
        form = image.format or "PNG"
        how: dict[str, Any] = {}
        if isinstance(image, JpegImagePlugin.JpegImageFile):
            how = {"qtables": image.quantization}
            if (sampling := JpegImagePlugin.get_sampling(image)) >= 0:
                how["subsampling"] = sampling
        width, height = (max(1, round(edge * factor)) for edge in image.size)
        mode = image.mode if image.mode in ("L", "RGB", "CMYK") else "RGB"
        resized = image.convert(mode).resize((width, height), Image.Resampling.BICUBIC)
    written = io.BytesIO()
    resized.save(written, form, **how)
    return written.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes to measure, and for how long."""

    images: int = 64
    """Number of images, read repeatedly."""
    source_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Scale factors of the stored images."""
    size_factors: tuple[float, ...] = (0.5, 1.0, 1.75)
    """Scale factors of the example size of the run."""
    repeats: int = 3
    """Number of measurements of each, interleaved so that a disturbance affects all."""
    seconds: float = 0.4
    """Duration of each measurement."""


GRID = Grid()


def bench(data: DataConfig, grid: Grid = GRID, on_progress: OnProgress = no_display) -> InputRates:
    """Input rates of this host for `data`.

    Args:
        data: the data set.
        grid: sizes and durations.
        on_progress: called as each stage begins.

    Raises:
        ConfigError: if files of the data set cannot be read.
    """
    read, cores = None, machine_cores()
    if isinstance(data, ParquetConfig):
        on_progress(Progress(part="row groups"))
        read = _read_rates(data, grid)
    take, threads = _take_rates(data, grid, on_progress)
    on_progress(Progress(part="processes side by side"))
    workers, work = _worker_speedups(data, cores, grid), sample_work(data)
    on_progress(Progress(part="batches handed over"))
    return InputRates(
        data=data.name,
        is_of_images=work.is_of_images,
        cores=cores,
        memory_bytes=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        read=read,
        take=take,
        threads=threads,
        hand_over=_hand_over(work.batch_bytes, grid),
        worker_speedups=workers,
        input_shape=work.input_shape,
        columns=work.columns,
        sources={"*": source_of("scalejax data bench", _LIBRARIES)},
    )


def stage_count(data: DataConfig, grid: Grid = GRID) -> int:
    """Number of calls of `on_progress`."""
    return grid.repeats + 2 + isinstance(data, ParquetConfig)


def paces(rates: InputRates, config: RunConfig) -> list[tuple[int, InputPace]]:
    """(workers, input pace) of this host for the data of a run, after its first read."""
    samples = config.batch.global_batch or config.batch.per_device_batch or TAKEN
    work = sample_work(config.data)
    counts = [0, *_counts(rates.cores), 2 * rates.cores]
    return [
        (count, input_pace(HostInput(rates=rates, work=work, workers=count), samples))
        for count in counts
    ]


def batch_life(
    rates: InputRates, config: RunConfig, grid: Grid = GRID
) -> tuple[InputMeasurement, tuple[LifeStage, ...]]:
    """Input stages of a batch of a run on the first device, measured with the run's number of
    workers (threads for "auto") and its augmentation, and as `rates` predict them.

    Raises:
        UnreadableExample: if an example cannot be read or decoded.
        ConfigError: if a file cannot be read.
    """
    workers = 0 if config.input.workers == "auto" else config.input.workers
    source = open_source(
        config.data, "train", seed=config.seed, augmentation=config.input.augmentation
    )
    samples = min(len(source), config.batch.global_batch or config.batch.per_device_batch or TAKEN)
    how = replace(config.input, workers=workers)
    seconds, shares_cores = probes.batch_seconds(source, how, samples, grid.seconds)
    measured = input_measurement(seconds, workers=workers, shares_cores=shares_cores)
    given = HostInput(rates=rates, work=sample_work(config.data), workers=workers)
    return measured, life_of(measured, input_stages=dict(stage_seconds(given, samples)))


def _read_rates(data: ParquetConfig, grid: Grid) -> ReadRates:
    """CPU time per row group and per byte, and the storage rate if reads wait for storage."""
    from scalejax.data.formats.parquet_columns import parquet_part

    files = parquet_part(data, "train")
    groups = list(files.groups[:: -(-len(files.groups) // 4)])
    cold, warm, least = probes.read_times(files, groups, data.columns, grid.repeats)
    cold_seconds, warm_seconds, processor_seconds = cold[0], *warm
    # CPU time of parallel Arrow threads exceeds the wall time, which then counts as no wait.
    waited = max(0.0, cold_seconds - min(warm_seconds, processor_seconds))
    read = median(group.bytes_of(data.columns) for group in groups)
    least_read = median(group.bytes_of(data.columns[-1:]) for group in groups)
    per_byte = max(0.0, processor_seconds - least[1]) / max(1.0, read - least_read)
    stored = read * stored_share(files)
    shows = waited > 0.1 * processor_seconds
    return ReadRates(
        seconds_per_row_group=max(0.0, processor_seconds - per_byte * read),
        seconds_per_byte=per_byte,
        storage_bytes_per_second=stored / waited if shows else None,
    )


def _take_rates(
    data: DataConfig, grid: Grid, on_progress: OnProgress
) -> tuple[TakeRates, TakeRates]:
    """Rates of one worker process, and of threads: per byte and pixel for images, else constant."""
    with TemporaryDirectory(prefix="scalejax-") as folder:
        cases: Sequence[DataConfig] = [data]
        if isinstance(data, ParquetConfig) and not data.feature_columns:
            cases = _cases(data, Path(folder), grid)
        sources = [open_source(case, "train", seed=0) for case in cases]
        times = []
        for _ in range(grid.repeats):
            on_progress(Progress(part="images of several sizes" if len(cases) > 1 else "examples"))
            times.append(
                [
                    [probes.sample_seconds(each, count, TAKEN, grid.seconds) for each in sources]
                    for count in (1, 0)
                ]
            )
        by_worker, by_threads = np.median(times, axis=0)
        if len(cases) == 1:
            worker, threads = (float(each[0]) for each in (by_worker, by_threads))
            return TakeRates(seconds_per_sample=worker), TakeRates(seconds_per_sample=threads)
        works = [sample_work(case) for case in cases]
        return fit_take(works, by_worker), fit_take(works, by_threads)


def _cases(data: ParquetConfig, folder: Path, grid: Grid) -> list[ParquetConfig]:
    """The data set with images stored in other sizes and decoded to other sizes."""
    images = encoded_images(data, grid.images)
    cases = []
    for factor in grid.source_factors:
        path = str(folder / f"{factor}.parquet")
        write_sized(images, factor, Path(path))
        for size in grid.size_factors:
            cases.append(
                ParquetConfig(
                    train=path,
                    test=path,
                    image_size=max(1, round(size * data.image_size)),
                    channels=data.channels,
                    classes=1,
                )
            )
    return cases


def fit_take(works: list, seconds: np.ndarray) -> TakeRates:
    """Times per sample, byte and pixel fitted to `seconds` of `works` by non-negative least squares
    of relative errors."""
    from scipy.optimize import nnls

    amounts = np.array(
        [(1.0, w.encoded_bytes, w.full_pixels, w.reduced_pixels, w.resized_pixels) for w in works]
    )
    fitted, _ = nnls(amounts / seconds[:, None], np.ones(len(works)))
    names = ("seconds_per_sample", "seconds_per_encoded_byte", "seconds_per_full_pixel")
    more = ("seconds_per_reduced_pixel", "seconds_per_resized_pixel")
    return TakeRates(**dict(zip((*names, *more), fitted.tolist(), strict=True)))


def _counts(cores: int) -> list[int]:
    """Powers of two up to the number of cores, and that number."""
    return sorted({*(2**power for power in range(cores.bit_length()) if 2**power <= cores), cores})


def _worker_speedups(data: DataConfig, cores: int, grid: Grid) -> Speedups:
    rates: dict[int, list[float]] = {count: [] for count in _counts(cores)}
    for _ in range(grid.repeats):
        for count, found in rates.items():
            found.append(probes.side_by_side(count, data, 4 * grid.seconds))
    return _over_first({count: median(found) for count, found in rates.items()})


def _over_first(rates: dict[int, float]) -> Speedups:
    alone = rates[1]
    return tuple((count, min(rate / alone, float(count))) for count, rate in rates.items())


def _hand_over(example_bytes: float, grid: Grid) -> CopyRates:
    """Rates of passing batches from worker processes to a device, from small and large batches that
    cost nothing to prepare."""
    (small, large), found = (1, max(2, round(example_bytes))), []
    for size in (small, large):
        times = [
            TAKEN * probes.sample_seconds(ReadyBatches(size), 1, TAKEN, grid.seconds)
            for _ in range(grid.repeats)
        ]
        found.append(median(times))
    per_byte = max(0.0, found[1] - found[0]) / (TAKEN * (large - small))
    return CopyRates(seconds_per_batch=min(found), seconds_per_byte=per_byte)
