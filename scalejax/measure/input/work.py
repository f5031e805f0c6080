"""Input work per example of a data set: bytes to read, pixels to decode and resize.

Reads Parquet footers and the headers of some images; decodes none.
"""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from scalejax.config.data import DataConfig, ParquetConfig
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build, load_toml
from scalejax.data.facts import read_facts
from scalejax.data.formats.parquet import ParquetFiles, read_columns
from scalejax.data.formats.parquet_columns import parquet_part, rows_within, stays_on_disk
from scalejax.hardware import FileWork, HostInput, InputRates, SampleWork
from scalejax.simulator.input import input_pace, with_workers

MOST_IMAGES = 256
"""Number of images whose headers are read."""
MOST_GROUPS = 8
"""Number of row groups that they come from, evenly spread over the data set."""


def sample_work(config: DataConfig) -> SampleWork:
    """Mean input work of a training example.

    Raises:
        ConfigError: if files cannot be read.
    """
    about = read_facts(config)
    inputs = int(np.prod(about.input_shape)) * about.element_bytes
    targets = 4 * int(np.prod(about.target_shape, initial=1))
    work = SampleWork(
        data=config.name,
        batch_bytes=inputs + targets * (2 if about.is_masked else 1),
        input_shape=about.input_shape,
    )
    return _of_files(config, work) if isinstance(config, ParquetConfig) else work


def host_input(path: Path, config: RunConfig) -> HostInput:
    """Input rates of a host from the file `path`, for the data of a run.

    A run of a single epoch reads everything from storage for the first time.

    Raises:
        ConfigError: if the file cannot be read, or holds no rates, or none for such data.
    """
    try:
        rates = build(InputRates, load_toml(path), where="input")
    except ConfigError as error:
        lines = [f"{path}: {line}" for line in str(error).splitlines()]
        raise ConfigError("\n".join(lines)) from error
    workers = config.input.workers
    given = HostInput(
        rates=rates,
        work=sample_work(config.data),
        workers=0 if workers == "auto" else workers,
        is_first_epoch=config.train.epochs == 1,
        is_augmented=config.input.augmentation is not None,
    )
    if workers == "auto":
        samples = config.batch.global_batch or config.batch.per_device_batch or 1
        choices = [with_workers(given, count) for count in range(rates.cores + 1)]
        given = max(choices, key=lambda each: input_pace(each, samples).samples_per_second)
    return given


def encoded_images(config: ParquetConfig, count: int) -> list[bytes]:
    """Up to `count` encoded training images, from row groups evenly spread over the data set.

    Raises:
        ConfigError: if files cannot be read.
    """
    files = parquet_part(config, "train")
    groups = files.groups[:: -(-len(files.groups) // MOST_GROUPS)]
    images: list[bytes] = []
    for group in groups:
        column = read_columns(files.field, group, (config.image_column,))[config.image_column]
        rows = np.linspace(0, len(column) - 1, min(len(column), -(-count // len(groups))))
        images += [column[int(row)].as_py() or b"" for row in rows]
    return images[:count]


def _of_files(config: ParquetConfig, work: SampleWork) -> SampleWork:
    files, petastorm = parquet_part(config, "train"), config.reading.petastorm
    read = float(sum(group.bytes_of(config.columns) for group in files.groups))
    work = replace(
        work,
        is_of_images=not config.feature_columns,
        columns=config.feature_columns,
        files=FileWork(
            rows=max(1, files.kept_count),
            row_groups=len(files.groups),
            stored_bytes=read * stored_share(files),
            read_bytes=read,
            memory_bytes=config.reading.memory_bytes,
            rows_together=rows_within(config, files),
            is_cached=stays_on_disk(config, files),
            shards=(petastorm and petastorm.shard_count) or 1,
        ),
    )
    if config.feature_columns:
        return work
    images = [_of_image(each, config.image_size) for each in encoded_images(config, MOST_IMAGES)]
    encoded, full, reduced, resized = np.mean(images, axis=0).tolist()
    return replace(
        work,
        encoded_bytes=encoded,
        full_pixels=full,
        reduced_pixels=reduced,
        resized_pixels=resized,
    )


def stored_share(files: ParquetFiles) -> float:
    """Compressed over decompressed bytes of the files, as if all columns were alike."""
    stored = sum({group.file.path: group.file.size_bytes for group in files.groups}.values())
    read = sum(size for group in files.groups for _, size in group.column_bytes)
    return stored / max(1, read)


def _of_image(encoded: bytes, size: int) -> tuple[float, float, float, float]:
    """(encoded bytes, pixels decoded at full size, at reduced size, pixels resized to)."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            before = image.size
            image.draft("RGB", (2 * size, 2 * size))  # as `data.images` decodes
            after = image.size
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError):
        return float(len(encoded)), 0.0, 0.0, 0.0  # training reports the error
    pixels = float(after[0] * after[1])
    resized = 0.0 if after == (size, size) else float(size**2)
    if after == before:
        return float(len(encoded)), pixels, 0.0, resized
    return float(len(encoded)), 0.0, pixels, resized
