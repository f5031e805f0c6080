"""What the fuzzer damages: a run, a sweep, predictions and data files of every format, all right.

Made once, in a process of its own; cases copy what they need.
"""

import gzip
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

RUN = """
model = { name = "mlp", hidden = [8] }
data = { name = "synthetic_images", image_size = 8, channels = 1, classes = 4, train_examples = 64, test_examples = 16 }
batch.global_batch = 16
optimizer.name = "sgd"
schedule.base_learning_rate = 0.01
train = { epochs = 2, log_every_steps = 1 }
"""  # noqa: E501  a line of TOML
EMULATION = """
[emulation]
workers = 2
algorithm.name = "downpour"
timing = { gradient_seconds = 0.1, update_seconds = 0.01 }
"""
"""What follows `RUN` in the file of an emulation."""
FOLDERS = {"sweep": "sweep", "bench": "bench", "events": "emulated"}
"""What some kinds of cases need besides a run, and takes as long to make."""
BENCH = ("--devices", "1,2", "--steps", "4", "--warmup-steps", "1", "--repeats", "1")
"""Flags of a bench."""
PARQUET = """
model = { name = "mlp", hidden = [8] }
batch.global_batch = 8
optimizer.name = "sgd"
schedule.base_learning_rate = 0.01
[data]
"""
DATA = {
    "parquet": 'name = "parquet"\ntrain = "images.parquet"\ntest = "images.parquet"\n'
    "image_size = 8\nclasses = 4\n",
    "image_folder": 'name = "image_folder"\ntrain = "folder"\ntest = "folder"\nimage_size = 8\n',
    "numpy": 'name = "numpy"\ntrain = "arrays.npz"\ntest = "arrays.npz"\nclasses = 4\n',
    "array_record": 'name = "array_record"\ntrain = "images.array_record"\n'
    'test = "images.array_record"\nclasses = 4\nimage_size = 8\nchannels = 1\n',
    "tokens": 'name = "tokens"\ntrain = "tokens.bin"\ntokens = 8\nvocabulary = 1000\n',
}
"""The [data] table of each format, its files as `write_data` names them."""


def write_all(folder: Path, kinds: Collection[str]) -> None:
    """Make in `folder` what cases of these kinds damage."""
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    (folder / "run.toml").write_text(RUN)
    (folder / "emulated.toml").write_text(RUN + EMULATION)
    commands = {
        "run": ("train", "run.toml", "--cpu-devices", "8", "--train.checkpoint_every_steps=3",
                "--profile", "--profile-schedule", "1,1,2,1"),
        "sweep": ("sweep", "run.toml", "--cpu-devices", "2", "-V", "seed=[0,1]",
                  "--target", "test_accuracy=0.1"),
        "bench": ("bench", "run.toml", *BENCH),
        "emulated": ("emulate", "emulated.toml", "--events"),
    }  # fmt: skip
    needed = {"run", *(FOLDERS[kind] for kind in kinds if kind in FOLDERS)}
    for name in (name for name in commands if name in needed):
        _scalejax(folder, *commands[name], "--folder", name)


def write_data(folder: Path) -> None:
    """The files of data."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (16, 8, 8), dtype=np.uint8)
    labels = np.arange(16) % 4
    encoded = [_encoded(image) for image in images]
    column = pa.array([{"bytes": each, "path": None} for each in encoded])
    table = pa.table({"image": column, "label": labels, "x": draw.normal(size=16)})
    pq.write_table(table, folder / "images.parquet", row_group_size=4)
    np.savez(folder / "arrays.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    np.savez_compressed(folder / "packed.npz", images=images, labels=labels)
    arrays = folder / "arrays"
    arrays.mkdir(exist_ok=True)
    np.save(arrays / "x_train.npy", images)
    np.save(arrays / "y_train.npy", labels)
    for index, image in enumerate(encoded):
        place = folder / "folder" / f"class-{labels[index]}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{index}.png").write_bytes(image)
    draw.integers(1, 1000, 500).astype("<u2").tofile(folder / "tokens.bin")
    header = b"\x00\x00\x08\x03" + np.array([16, 8, 8], ">u4").tobytes()
    (folder / "train-images-idx3-ubyte").write_bytes(header + images.tobytes())
    packed = b"\x00\x00\x08\x01" + np.array([16], ">u4").tobytes() + labels.astype("u1").tobytes()
    (folder / "train-labels-idx1-ubyte").write_bytes(packed)
    (folder / "labels.idx.gz").write_bytes(gzip.compress(packed))
    rows = "".join(
        f"{value:.3f},{label}\n" for value, label in zip(labels / 7, labels, strict=True)
    )
    (folder / "numbers.csv").write_text("x,label\n" + rows)
    _write_records(folder / "images.array_record", encoded, labels)


def _encoded(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _write_records(path: Path, encoded: list[bytes], labels: np.ndarray) -> None:
    """`tf.train.Example`s of an image and a class, byte by byte."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for image, label in zip(encoded, labels, strict=True):
        features = b""
        for name, value in ((b"image", _field(1, image)), (b"label", bytes([8, int(label)]))):
            number = 1 if name == b"image" else 3
            features += _field(1, _field(1, name) + _field(2, _field(number, value)))
        writer.write(_field(1, features))
    writer.close()


def _field(number: int, content: bytes) -> bytes:
    length, count = b"", len(content)
    while count >= 128:
        length, count = length + bytes([count & 127 | 128]), count >> 7
    return bytes([number << 3 | 2]) + length + bytes([count]) + content


def _scalejax(folder: Path, *words: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "scalejax", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"scalejax {' '.join(words)} failed: {done.stderr[-2000:]}")


def copied(source: Path, into: Path) -> Path:
    """A copy of a file or folder in the folder `into`, or as the file `into`; its path."""
    target = into / source.name if into.is_dir() else into
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    return target
