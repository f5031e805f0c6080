"""Counts and shapes of data sets, read from their files, and runs resolved with them.

Reads only as much of the files as is needed to count the examples; returns no arrays, and does not
start JAX.
"""

from scalejax.config.data import DataConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import ResolvedRun, RunConfig, require_fitting_data
from scalejax.config.run import resolve as resolve_known
from scalejax.data.datasets import reader_of


def read_facts(config: DataConfig) -> DatasetFacts:
    """Return the counts and shapes of the data set named in `config`.

    Raises:
        ConfigError: if a text is too short for one example of the requested length, or files
            cannot be read or hold something else.
    """
    known = None if config.may_be_missing else config.known_facts
    return config.divided(known or reader_of(config).facts(config))


def fitting_facts(config: RunConfig, facts: DatasetFacts | None = None) -> DatasetFacts:
    """Return the counts and shapes of the data of `config`, read from its files if not given.

    Raises:
        ConfigError: as for `read_facts`; if they contradict the config.
    """
    facts = facts or read_facts(config.data)
    require_fitting_data(config, facts)
    return facts


def resolve(
    config: RunConfig, device_count: int | None = None, facts: DatasetFacts | None = None
) -> ResolvedRun:
    """Resolve the run of `config` on `device_count` devices: layout, batch, data set, steps.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import load_config, resolve
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> run = resolve(load_config(path), 8)
        >>> run.dataset.train_examples, run.split.global_batch
        (10000, 32)

    Args:
        config: the run.
        device_count: devices to use; if None, the product of the config's axes.
        facts: counts and shapes of its data, such as a run folder keeps; if None, they are read.

    Raises:
        ConfigError: as for `read_facts`; if axes, batch or data do not divide, naming the nearest
            that do.
    """
    return resolve_known(config, device_count, facts or read_facts(config.data))
