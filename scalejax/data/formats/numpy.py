"""Data sets in NumPy's files: which arrays are images or numbers, and which are their classes."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scalejax.config.data import NumpyConfig, Split
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.errors import ConfigError, refusal, unknown_name
from scalejax.data.formats.npy_headers import ArrayHeader, headers_at, loaded_array

PAIRS = (
    ("x_{part}", "y_{part}"),  # keras.datasets
    ("{part}_images", "{part}_labels"),  # MedMNIST
    ("inputs", "targets"),
    ("images", "labels"),
    ("x", "y"),
)
"""Default names of inputs and targets, in order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeaders:
    """The two arrays of one part of a data set."""

    inputs: ArrayHeader
    """Examples."""
    targets: ArrayHeader
    """Their classes."""

    @property
    def is_table(self) -> bool:
        """Whether examples are rows of numbers."""
        return len(self.inputs.shape) == 2

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example, with the channels of an image."""
        shape = self.inputs.shape[1:]
        return (*shape, 1) if len(shape) == 2 else shape


def numpy_facts(config: NumpyConfig) -> DatasetFacts:
    """Counts, shapes and classes.

    Raises:
        ConfigError: as for `part_headers` and `targets_of`; if the parts differ in shape, or
            arrays of .npz files take more than `config.memory_bytes`.
    """
    headers = {part: part_headers(config, part) for part in config.parts}
    train = headers["train"]
    for part, other in headers.items():
        if train.input_shape != other.input_shape:
            raise ConfigError(
                f"data.{part}: {other.inputs.where} holds examples of {other.input_shape}, and "
                f"{train.inputs.where} of {train.input_shape}; they must be of one shape."
            )
    require_room(config)
    classes = [int(targets_of(config, part).max()) + 1 for part in config.parts]
    return DatasetFacts(
        train_examples=train.inputs.shape[0],
        test_examples=headers["test"].inputs.shape[0],
        validation_examples=headers["validation"].inputs.shape[0] if len(headers) > 2 else 0,
        input_shape=train.input_shape,
        target_shape=(),
        classes=config.classes or max(classes),
        is_table=train.is_table,
    )


def require_room(config: NumpyConfig, processes: int = 1) -> None:
    """Refuse arrays of .npz files that `processes` of a host cannot hold: one process holds all of
    them, and each of the others the training inputs.

    Raises:
        ConfigError: if they take more than `config.memory_bytes`.
    """
    headers = [part_headers(config, part) for part in config.parts]
    held = [*{array for each in headers for array in (each.inputs, each.targets)}]
    held += [headers[0].inputs] * (processes - 1)
    loaded = sum(array.size_bytes for array in held if array.member is not None)
    if loaded > config.memory_bytes:
        of = f" in {processes} processes (input.workers)" if processes > 1 else ""
        accepted = (
            f"the arrays take {loaded}{of}; unzip the .npz into a folder, whose .npy files are not "
            "loaded but mapped"
        )
        raise ConfigError(refusal("data.memory_bytes", config.memory_bytes, accepted))


def part_headers(config: NumpyConfig, part: Split) -> PartHeaders:
    """The arrays of one part.

    Raises:
        ConfigError: if files cannot be read or are incomplete, or arrays are missing, hold Python
            objects, or have types or shapes that do not fit examples and classes.
    """
    field, location = f"data.{part}", getattr(config, part)
    found = headers_at(field, location)
    given = (config.inputs, config.targets)
    pairs = PAIRS if config.inputs is None else (given,)
    words = (part, "val") if part == "validation" else (part,)
    pairs = [
        tuple((name or "").replace("{part}", word) for name in pair)
        for pair in pairs
        for word in words
    ]
    pair = next((pair for pair in pairs if set(pair) <= set(found)), None)
    if pair is None and config.inputs is None:
        tried = ", ".join(f"{x} with {y}" for x, y in pairs)
        accepted = (
            f"it holds {', '.join(sorted(found))}, and none of {tried}; name its arrays in "
            "data.inputs and data.targets"
        )
        raise ConfigError(refusal(field, location, accepted))
    if pair is None:
        field, name = next(
            (name, value)
            for name, value in zip(("inputs", "targets"), pairs[0], strict=True)
            if value not in found
        )
        unknown = unknown_name(f"data.{field}", name, found)
        raise ConfigError(f"{location} has no such array: {unknown}")
    headers = PartHeaders(inputs=found[pair[0]], targets=found[pair[1]])
    for header in (headers.inputs, headers.targets):
        if header.dtype.hasobject:
            raise ConfigError(
                f"{field}: {header.where} holds Python objects, and unpickling them could run any "
                "program; write it as an array of numbers."
            )
    _require_examples(headers.inputs)
    _require_classes(headers)
    return headers


def _require_examples(inputs: ArrayHeader) -> None:
    accepted = "inputs are uint8 images [n, height, width(, 1 or 3)], or numbers [n, features]"
    shape, kind = inputs.shape, inputs.dtype.kind
    if len(shape) == 4 and shape[3] not in (1, 3):
        accepted += "; channels come last"
    is_image = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))
    fits = inputs.dtype == np.uint8 if is_image else len(shape) == 2 and kind in "fiub"
    if not fits or 0 in shape:
        raise ConfigError(f"{inputs.where} holds {inputs.dtype} {list(shape)}: {accepted}.")


def _require_classes(headers: PartHeaders) -> None:
    targets, count = headers.targets, headers.inputs.shape[0]
    if targets.shape not in ((count,), (count, 1)) or targets.dtype.kind not in "iub":
        raise ConfigError(
            f"{targets.where} holds {targets.dtype} {list(targets.shape)}: targets are integers "
            f"[{count}], one for each of {headers.inputs.where}."
        )


def targets_of(config: NumpyConfig, part: Split) -> np.ndarray:
    """The classes of a part, int32 [n].

    Raises:
        ConfigError: if one is below 0, or not below `config.classes`, naming file and row.
    """
    return _targets(f"data.{part}", part_headers(config, part).targets, config.classes)


@lru_cache(maxsize=4)
def _targets(field: str, header: ArrayHeader, classes: int | None) -> np.ndarray:
    values = loaded_array(field, header).reshape(-1)
    most = 2**31 - 1 if classes is None else classes
    wrong = np.flatnonzero((values < 0) | (values >= most))
    if wrong.size:
        count = "from 0" if classes is None else f"0 to {classes - 1} (data.classes)"
        raise ConfigError(
            f"{header.where}, row {wrong[0]}: {values[wrong[0]]} is not a class; they are {count}."
        )
    return values.astype(np.int32)
