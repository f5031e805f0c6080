"""Files of PyTorch are read number by number, and what they would have called is not called."""

import pickle
import struct
import sys
import types
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from scalejax.core.errors import ConfigError
from scalejax.models.torch_checkpoint import MAGIC_NUMBER, PROTOCOL_VERSION, read_torch_file


class Tensor:
    """Pickled as PyTorch pickles one: a call, with a storage by its key."""

    def __init__(self, key, shape, strides, offset=0):
        self.arguments = (key, offset, shape, strides, False, OrderedDict())

    def __reduce__(self):
        key, *rest = self.arguments
        rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (Storage(key), *rest)


class Storage:
    """Named by its key in a pickle; its numbers come later."""

    def __init__(self, key):
        self.key = key


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Writes a file as `torch.save` of 1.5 does, with stand-ins for the names of PyTorch."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for module, name in ((torch, "FloatStorage"), (torch, "LongStorage")):
        setattr(module, name, type(name, (), {"__module__": module.__name__}))

    def _rebuild_tensor_v2(*_):
        raise AssertionError("the reader has its own")

    _rebuild_tensor_v2.__module__ = utils.__name__
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    monkeypatch.setattr(utils, "_rebuild_tensor_v2", _rebuild_tensor_v2, raising=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    kinds = {np.dtype("<f4"): torch.FloatStorage, np.dtype("<i8"): torch.LongStorage}

    def written(content, storages, magic_number=MAGIC_NUMBER, announced=None) -> Path:
        path = tmp_path / "weights.pth"

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj):
                if isinstance(obj, Storage):
                    values = storages[obj.key]
                    return (
                        "storage",
                        kinds[values.dtype],
                        obj.key,
                        "cpu",
                        announced or len(values),
                        None,
                    )
                return None

        with path.open("wb") as file:
            for each in (magic_number, PROTOCOL_VERSION, {"little_endian": True}):
                pickle.dump(each, file, protocol=2)
            Pickler(file, protocol=2).dump(content)
            pickle.dump(sorted(storages), file, protocol=2)
            for key in sorted(storages):
                length = min(announced or len(storages[key]), 2**63 - 1)
                file.write(struct.pack("<q", length) + storages[key].tobytes())
        return path

    return written


def test_tensors_come_back_with_their_offsets_and_strides(write):
    """Two views of one storage, one of them transposed, and a number of another type."""
    storages = {"a": np.arange(12, dtype="<f4"), "b": np.array([7], "<i8")}
    tensors = OrderedDict(
        whole=Tensor("a", (3, 4), (4, 1)),
        turned=Tensor("a", (4, 2), (1, 4), offset=4),
        count=Tensor("b", (), ()),
    )

    found = read_torch_file(write(tensors, storages))

    whole = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(found["whole"], whole)
    np.testing.assert_array_equal(found["turned"], whole[1:].T)
    assert found["whole"].dtype == np.float32
    assert found["count"] == 7


class Attack:
    """Would leave a file behind if it were unpickled as pickles are."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_calls_something_is_refused_and_nothing_is_called(write, tmp_path):
    """The unpickler knows a few names, and looks up no other."""
    path = write(OrderedDict(a=Attack(tmp_path / "called")), {})

    with pytest.raises(ConfigError, match=r"weights=.*pathlib|weights=.*getattr"):
        read_torch_file(path)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Tensor("a", (3, 5), (5, 1)), "beyond its storage"),
        (Tensor("a", (2,), (-1,), offset=3), "beyond its storage"),
        (Tensor("a", (10**15,), (0,)), "more numbers than its storage"),
        (Tensor("a", (1,), (2**70,)), "weights="),
        ("no tensor", "weights="),
    ],
)
def test_tensors_that_are_none_are_refused(write, tensor, message):
    """No memory is read that is not the file's."""
    path = write(OrderedDict(a=tensor), {"a": np.arange(12, dtype="<f4")})

    with pytest.raises(ConfigError, match=message):
        read_torch_file(path)


@pytest.mark.parametrize("announced", [2**70, 10**15, -1])
def test_lengths_that_the_file_has_not_are_refused(write, announced):
    """Before memory is asked for."""
    tensors, storages = OrderedDict(a=Tensor("a", (1,), (1,))), {"a": np.arange(12, dtype="<f4")}

    with pytest.raises(ConfigError, match="numbers are announced"):
        read_torch_file(write(tensors, storages, announced=announced))


def test_damaged_and_other_files_are_refused(write, tmp_path):
    """Truncated anywhere, of another format, or missing."""
    path = write(OrderedDict(a=Tensor("a", (3, 4), (4, 1))), {"a": np.arange(12, dtype="<f4")})
    content = path.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 60, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match="must hold tensors"):
            read_torch_file(path)

    with pytest.raises(ConfigError, match="begins otherwise"):
        read_torch_file(write(OrderedDict(), {}, magic_number=1))
    with pytest.raises(ConfigError, match="No such file"):
        read_torch_file(tmp_path / "none.pth")
