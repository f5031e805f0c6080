"""Counts and shapes of data sets, read from their files, and runs resolved with them.

Reads only as much of the files as it takes to count the examples; returns no arrays, and starts no
JAX.
"""

from scalejax.config.data import (
    FASHION_MNIST_FOLDER,
    ArrayRecordConfig,
    DataConfig,
    FashionMnistConfig,
    ImageFolderConfig,
    NumpyConfig,
    PythonDocsConfig,
    TokensConfig,
    known_facts,
)
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.parquet import ParquetConfig
from scalejax.config.run import ResolvedRun, RunConfig, require_fitting_data
from scalejax.config.run import resolve as resolve_known
from scalejax.core.errors import ConfigError, refusal
from scalejax.data.formats.array_record import array_record_facts
from scalejax.data.formats.image_folder import image_folder_facts
from scalejax.data.formats.numpy import numpy_facts
from scalejax.data.formats.tokens import tokens_facts
from scalejax.data.readers.python_docs import python_docs_facts


def read_facts(config: DataConfig) -> DatasetFacts:
    """The counts and shapes of the data set named in `config`.

    Raises:
        ConfigError: if a text is too short for one example of the length asked for, or files
            cannot be read or hold something else.
    """
    match config:
        case PythonDocsConfig():
            return python_docs_facts(config)
        case ParquetConfig():
            # Imported here: other data sets need no Arrow, and commands start sooner without.
            from scalejax.data.formats.parquet_columns import parquet_facts

            return parquet_facts(config)
        case ImageFolderConfig():
            return image_folder_facts(config)
        case NumpyConfig():
            return numpy_facts(config)
        case TokensConfig():
            return tokens_facts(config)
        case ArrayRecordConfig():
            return array_record_facts(config)
        case FashionMnistConfig(edition="full") if not FASHION_MNIST_FOLDER.is_dir():
            accepted = (
                f"{FASHION_MNIST_FOLDER} is not there; install it with "
                '"apt-get install dataset-fashion-mnist", or use "embedded"'
            )
            raise ConfigError(refusal("data.edition", config.edition, accepted))
        case _:
            facts = known_facts(config)
            assert facts is not None  # noqa: S101  every other data set has files
            return facts


def fitting_facts(config: RunConfig, facts: DatasetFacts | None = None) -> DatasetFacts:
    """The counts and shapes of the data of `config`, read from its files if not given.

    Raises:
        ConfigError: as of `read_facts`; if they contradict the config.
    """
    facts = facts or read_facts(config.data)
    require_fitting_data(config, facts)
    return facts


def resolve(
    config: RunConfig, device_count: int | None = None, facts: DatasetFacts | None = None
) -> ResolvedRun:
    """The run of `config` on `device_count` devices: layout, batch, data set, steps.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import load_config, resolve
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> run = resolve(load_config(path), 8)
        >>> run.dataset.train_examples, run.split.global_batch
        (10000, 32)

    Args:
        config: the run.
        device_count: devices to use; if None, those that the config's axes multiply to.
        facts: counts and shapes of its data, such as a run folder keeps; if None, they are read.

    Raises:
        ConfigError: as of `read_facts`; if axes, batch or data do not divide, naming the nearest
            that do.
    """
    return resolve_known(config, device_count, facts or read_facts(config.data))
