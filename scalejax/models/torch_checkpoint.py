"""Reads PyTorch checkpoints in the format before 1.6, without PyTorch and without trusting them.

Such a file is five pickles and then the bytes of each storage. A pickle may call any function that
it names: here it may name only the few classes of a dictionary of tensors, each replaced by a
substitute in this module, and everything else is refused. Knows no networks.

Source: torch/serialization.py, `_legacy_save` (tag v1.5.0).
"""

import math
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from scalejax.core.errors import ConfigError, refusal

MAGIC_NUMBER, PROTOCOL_VERSION = 0x1950A86A20F9469CFC6C, 1001
"""The first two pickles of every such file (`MAGIC_NUMBER`, `PROTOCOL_VERSION`)."""
_ELEMENT_TYPES = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}
"""Data types by class of storage, whose bytes are little-endian."""


@dataclass(slots=True)
class _Storage:
    """The values that tensors are views of; stored after the pickles that refer to them."""

    dtype: np.dtype
    length: int
    values: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor before its storage is read."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self) -> np.ndarray:
        """A copy of the values of the view.

        Raises:
            ValueError: if the view exceeds its storage.
        """
        values, counts = self.storage.values, (*self.shape, *self.strides, self.offset)
        furthest = self.offset + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        if values is None or min(counts) < 0 or (0 not in self.shape and furthest >= len(values)):
            raise ValueError("a tensor reaches beyond its storage")
        if math.prod(self.shape) > len(values):  # strides of 0 would make any number of them
            raise ValueError(f"a tensor of shape {self.shape} has more numbers than its storage")
        strides = tuple(stride * values.itemsize for stride in self.strides)
        seen = np.lib.stride_tricks.as_strided(values[self.offset :], self.shape, strides)
        return seen.copy()


def _rebuilt(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _View:
    """Substitute for `torch._utils._rebuild_tensor_v2`, without gradients and hooks."""
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor has no storage")
    return _View(storage, offset, tuple(shape), tuple(strides))


_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    **{("torch", name): name for name in _ELEMENT_TYPES},
}
"""Everything that a pickle may refer to."""


class _Unpickler(pickle.Unpickler):
    """Reads dictionaries of tensors, and refuses to look up anything else."""

    def __init__(self, file: BinaryIO, storages: dict[str, _Storage]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
        return _ALLOWED[module_name, global_name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, type_name, key, _, length, view = pid
        if kind != "storage" or type_name not in _ELEMENT_TYPES or view is not None:
            raise pickle.UnpicklingError(f"it has a storage of the kind {kind} {type_name}")
        return self._storages.setdefault(key, _Storage(_ELEMENT_TYPES[type_name], length))


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a state dictionary by name, float32 or int64, in PyTorch's layout.

    Raises:
        ConfigError: if the file is missing, damaged, of another format, or names what is not
            part of a dictionary of tensors.
    """
    storages: dict[str, _Storage] = {}
    try:
        with path.open("rb") as file:

            def unpickled() -> Any:
                return _Unpickler(file, storages).load()

            _require_format(unpickled)
            found, keys = unpickled(), unpickled()
            for key in keys:
                _read(file, storages[key])
        return {name: view.array() for name, view in found.items()}
    except (
        OSError,
        EOFError,
        ValueError,  # UnicodeDecodeError too
        TypeError,
        AttributeError,
        LookupError,
        OverflowError,  # from a pickle or a stride
        MemoryError,  # from a pickle: this module requests no more than the file has
        struct.error,
        pickle.UnpicklingError,
    ) as error:
        accepted = f"it must hold tensors as PyTorch saved them before 1.6, and no more ({error})"
        raise ConfigError(refusal("weights", str(path), accepted)) from error


def _require_format(unpickled: Callable[[], Any]) -> None:
    """Check the three leading pickles, which identify the format."""
    magic_number, protocol_version, machine = unpickled(), unpickled(), unpickled()
    if (magic_number, protocol_version) != (MAGIC_NUMBER, PROTOCOL_VERSION):
        raise ValueError("it begins otherwise")
    if not machine["little_endian"]:
        raise ValueError("its numbers are big-endian")


def _read(file: BinaryIO, storage: _Storage) -> None:
    """Fill `storage` with the values that follow in the file, prefixed by their count."""
    (length,) = struct.unpack("<q", file.read(8))
    left = (os.fstat(file.fileno()).st_size - file.tell()) // storage.dtype.itemsize
    if length != storage.length or not 0 <= length <= left:
        raise ValueError(f"{storage.length} numbers are announced, {length} stored, {left} there")
    storage.values = np.frombuffer(file.read(length * storage.dtype.itemsize), storage.dtype)
