"""Examples from a user's own function, by import path, and their facts.

Knows what the function returns, not how: samples by index, and the number of their classes.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from scalejax.config.data import CustomDataConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.environment import own_module
from scalejax.core.errors import ConfigError, in_one_line, refusal, unknown_name
from scalejax.data.source import Reader, Split, UnreadableExample
from scalejax.data.transforms.augmentation import Augmentation

_ARRAYS = ("inputs", "targets")


class Custom(Reader, names=("custom",)):
    """Samples from the function that `data.path` names."""

    def __init__(self, config: CustomDataConfig, split: Split, augmentation: Augmentation) -> None:
        self._samples, self._path = _opened(config, split), config.path
        first = _first(self._samples, config)
        self._classes = _classes(self._samples, config)
        self._types = {name: first[name].dtype for name in _ARRAYS}
        self._shapes = {name: first[name].shape for name in _ARRAYS}
        self._augmentation = augmentation if first["inputs"].ndim == 3 else None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._samples)

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The samples at `indices`: from their own `take`, if they have one, else one by one."""
        if callable(getattr(self._samples, "take", None)):
            try:
                given = self._samples.take(indices, epoch)
                taken = {name: np.asarray(given[name]) for name in _ARRAYS}
            except Exception as error:
                raise self._unreadable("take", error) from error
        else:
            found = [self._sample(int(index)) for index in indices]
            # An empty batch needs a shape too.
            taken = {
                name: np.stack([each[name] for each in found])
                if found
                else np.empty((0, *self._shapes[name]), self._types[name])
                for name in _ARRAYS
            }
        for name, values in taken.items():
            if values.shape != (len(indices), *self._shapes[name]):
                said = f"{name} of shape {values.shape} for {len(indices)} samples"
                raise self._unreadable("take", ValueError(said))
        taken = {name: _in_type(name, values) for name, values in taken.items()}
        targets = taken["targets"]
        if targets.size and not 0 <= targets.min() <= targets.max() < self._classes:
            said = f"a target outside of 0 ... {self._classes - 1}"
            raise self._unreadable("take", ValueError(said))
        if self._augmentation is None:
            return taken
        return self._augmentation.of(indices, epoch).applied(taken)

    def _sample(self, index: int) -> dict[str, np.ndarray]:
        try:
            sample = _arrays(self._samples[index])
        except Exception as error:
            raise self._unreadable(f"sample {index}", error) from error
        for name, values in sample.items():
            if values.shape != self._shapes[name]:
                said = f"{name} of shape {values.shape}, where the first has {self._shapes[name]}"
                raise self._unreadable(f"sample {index}", ValueError(said))
        return sample

    def _unreadable(self, what: str, error: Exception) -> UnreadableExample:
        return UnreadableExample(f"{self._path}, {what}: {in_one_line(error)}.")

    @staticmethod
    def facts(config: CustomDataConfig) -> DatasetFacts:
        """Counts of the parts, and shapes of the first sample of the training part.

        Raises:
            ConfigError: if the function, or what it returns, is not as required.
        """
        parts = {part: _opened(config, part) for part in config.parts}
        train = parts["train"]
        first = _first(train, config)
        inputs, targets = first["inputs"], first["targets"]
        facts = DatasetFacts(
            train_examples=len(train),
            test_examples=len(parts["test"]),
            validation_examples=len(parts.get("validation", ())),
            input_shape=inputs.shape,
            target_shape=targets.shape,
            classes=_classes(train, config),
            is_table=inputs.dtype == np.float32,
        )
        mean = getattr(train, "pixel_mean", facts.pixel_mean)
        return replace(
            facts, pixel_mean=mean, pixel_std=getattr(train, "pixel_std", facts.pixel_std)
        )


def _opened(config: CustomDataConfig, split: Split) -> Any:
    """What the function returns for a part.

    Raises:
        ConfigError: if there is no such function, it does not take the options, its code fails, or
            it returns no samples by index.
    """
    module_name, function_name = config.path.split(":")
    module = own_module("data.path", config.path)
    function = getattr(module, function_name, None)
    if function is None:
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        there = [f"{module_name}:{name}" for name in functions]
        raise ConfigError(unknown_name("data.path", config.path, there))
    if not callable(function):
        accepted = f"{function_name} must be a function of the part of the data"
        raise ConfigError(refusal("data.path", config.path, accepted))
    called = f"{config.path} is called as function({split!r}, **options), but"
    try:
        inspect.signature(function).bind(split, **config.options)
    except TypeError as error:
        raise ConfigError(refusal("data.options", config.options, f"{called}: {error}")) from error
    except ValueError:
        pass  # a built-in function has no signature: the call will tell
    try:
        samples: Any = function(split, **config.options)
    except Exception as error:
        accepted = f"{called} {in_one_line(error)}"
        raise ConfigError(refusal("data.path", config.path, accepted)) from error
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        accepted = f"it gives {type(samples).__name__}, which has no length and no samples by index"
        raise ConfigError(refusal("data.path", config.path, accepted))
    if len(samples) == 0:
        raise ConfigError(refusal("data.path", config.path, f"its part {split!r} is empty"))
    return samples


def _classes(samples: Any, config: CustomDataConfig) -> int:
    """Number of classes, or size of the vocabulary."""
    classes = getattr(samples, "classes", None)
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1:
        accepted = (
            "what it gives must have `classes`, the number of classes or the size of the "
            f"vocabulary, but that is {classes!r}"
        )
        raise ConfigError(refusal("data.path", config.path, accepted))
    return int(classes)


def _first(samples: Any, config: CustomDataConfig) -> dict[str, np.ndarray]:
    """The first sample, in the types that networks read.

    Raises:
        ConfigError: if it is not an image, a text or a row of numbers.
    """
    try:
        first = _arrays(samples[0])
    except Exception as error:
        accepted = (
            'a sample must be {"inputs": ..., "targets": ...} or a pair of them, but the first: '
            f"{in_one_line(error)}"
        )
        raise ConfigError(refusal("data.path", config.path, accepted)) from error
    inputs, targets = first["inputs"], first["targets"]
    is_class = targets.ndim == 0 and targets.dtype == np.int32
    is_image = inputs.dtype == np.uint8 and inputs.ndim == 3 and is_class
    is_row = inputs.dtype == np.float32 and inputs.ndim == 1 and is_class
    is_text = inputs.dtype == targets.dtype == np.int32 and inputs.ndim == 1
    if not (is_image or is_row or (is_text and targets.shape == inputs.shape)):
        found = ", ".join(f"{name} {each.dtype} {each.shape}" for name, each in first.items())
        accepted = (
            "a sample is an image (uint8 [height, width, channels]) or a row of numbers (float32 "
            "[features]) with its class, or a text (int32 [tokens]) with the token after each; "
            f"the first is: {found}"
        )
        raise ConfigError(refusal("data.path", config.path, accepted))
    return first


def _arrays(sample: Any) -> dict[str, np.ndarray]:
    """Inputs and targets of one sample."""
    pair = [sample[name] for name in _ARRAYS] if isinstance(sample, Mapping) else list(sample)
    inputs, targets = pair
    given = {"inputs": np.asarray(inputs), "targets": np.asarray(targets)}
    return {name: _in_type(name, values) for name, values in given.items()}


def _in_type(name: str, values: np.ndarray) -> np.ndarray:
    """Whole numbers as int32 and others as float32; pixels stay uint8."""
    if np.issubdtype(values.dtype, np.floating):
        return values.astype(np.float32, copy=False)
    is_pixels = name == "inputs" and values.dtype == np.uint8
    if np.issubdtype(values.dtype, np.integer) and not is_pixels:
        return values.astype(np.int32, copy=False)
    return values
