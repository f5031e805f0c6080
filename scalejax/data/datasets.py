"""Opens the data set that a config names as examples by index, in this or another process.

Knows which reader reads which data set. Knows no batches, no sampler and no devices.
"""

from functools import partial
from importlib import import_module
from pkgutil import iter_modules

from scalejax.config.data import DataConfig
from scalejax.config.input import AugmentationConfig
from scalejax.core.errors import ConfigError
from scalejax.data import readers
from scalejax.data.held_out import divided
from scalejax.data.source import READERS, Reader, Shared, Source, Split

Opening = partial[Source]
"""Opens a source again in another process, for synthetic or installed data sets, whose pickles are
large. Files that a user names are listed once for all processes."""


def for_process(source: Source, processes: int) -> Source | Opening:
    """`source` for one of `processes` that share its memory; can be pickled.

    Raises:
        ConfigError: if the memory is too small for that many processes.
    """
    if isinstance(source, Shared):
        return source.share_of(processes)
    return getattr(source, "opening", source)


def open_source(
    config: DataConfig,
    split: Split,
    *,
    seed: int,
    augmentation: AugmentationConfig | None = None,
) -> Source:
    """Return the examples of one part of the data set named in `config`.

    Args:
        config: the data set.
        split: which part of it.
        seed: seed of synthetic examples and of augmentation.
        augmentation: augmentation of training images; None for no augmentation.

    Raises:
        ConfigError: if a file of the data set is missing or damaged, or it has no such part.
    """
    # Imported here, like the readers, so that reading a config waits for neither Arrow nor Pillow.
    from scalejax.data.transforms.augmentation import Augmentation

    changes = Augmentation(config=augmentation or AugmentationConfig(), seed=seed)
    is_own, is_divided = split in config.parts, config.validation_fraction is not None
    if not is_own and not is_divided:
        raise ConfigError(f"data.name={config.name!r} has no examples for validation.")
    is_whole = is_own or config.divides_itself
    source = reader_of(config)(config, split if is_whole else "train", changes)
    if is_divided and split != "test" and not config.divides_itself:
        source = divided(source, config, split)
    if config.is_of_files:  # if opened again, another process might find other files
        return source
    opening = partial(open_source, config, split, seed=seed, augmentation=augmentation)
    vars(source)["opening"] = opening
    return source


def reader_of(config: DataConfig) -> type[Reader]:
    """The class that reads the data set that `config` names."""
    modules = (module.name for module in iter_modules(readers.__path__))
    # A module registers its readers on import. Most import Arrow and Pillow, which is slow, so the
    # module whose name begins `config.name` comes first, and the rest only until a reader is found.
    for module in sorted(modules, key=lambda name: not config.name.startswith(name)):
        if config.name in READERS:
            break
        import_module(f"{readers.__name__}.{module}")
    if config.name not in READERS:
        raise NotImplementedError(f"a reader is not registered for {type(config).__name__}")
    return READERS[config.name]
