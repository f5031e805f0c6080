"""Cached features: the examples of a run as the inputs of its network's last layer.

A frozen backbone computes the same features of an image in every epoch. Here they are computed
once on the devices of this process and cached on disk, keyed by everything they depend on: the
program, the weights, the data files. Knows no update and no loop.
"""

import hashlib
import json
import time
from functools import partial
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalejax.config.parallelism import DATA
from scalejax.config.run import ResolvedRun
from scalejax.core.cache import package_digest, user_folder
from scalejax.core.errors import ConfigError, refusal
from scalejax.core.serialization import plain
from scalejax.core.units import format_seconds
from scalejax.data.datasets import open_source
from scalejax.data.readers.row_group_cache import DiskCache
from scalejax.data.source import Grouped, Source, Split
from scalejax.training.data_fingerprints import used_files
from scalejax.training.evaluation import build_features
from scalejax.training.multihost import is_first
from scalejax.training.reporter import Reporter
from scalejax.training.setup import reads_features, train_setup
from scalejax.training.state import abstract_state
from scalejax.training.step import initial_weights, input_dtype

KEPT_TOGETHER = 4096
"""Examples whose features are in one file: the most that a killed process loses."""
BATCH = 32
"""Examples per device in one batch of feature computation."""
CACHE_BYTES = 100 * 10**9
"""Size limit of the features of all runs; the least recently used are evicted first."""
HEAD = "head"
"""The last layer of a network, which reads the features; they do not depend on it."""
SECONDS_BETWEEN_LINES = 5.0


class Features:
    """Features, float32 of [width], and targets, of every example of a source."""

    def __init__(self, source: Source, tables: list[pa.Table]) -> None:
        self._source = source
        self._inputs = [_matrix(table["inputs"]) for table in tables]
        self._targets = np.concatenate([table["targets"].to_numpy() for table in tables])

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._targets)

    @property
    def rows_together(self) -> int:
        """0: the order of examples makes no difference, as all are in memory-mapped files."""
        return 0

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        """The indices of all examples, shuffled as the source shuffles them."""
        if isinstance(self._source, Grouped):
            return self._source.shuffled(generator)
        return generator.permutation(len(self))

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The features and classes at `indices`, the same in every epoch."""
        inputs = np.empty((len(indices), self._inputs[0].shape[1]), np.float32)
        for number, matrix in enumerate(self._inputs):
            is_here = indices // KEPT_TOGETHER == number
            inputs[is_here] = matrix[indices[is_here] % KEPT_TOGETHER]
        return {"inputs": inputs, "targets": self._targets[indices]}


def open_examples(run: ResolvedRun, split: Split, reporter: Reporter) -> Source:
    """One part of the data of `run`: its examples, or their features if the run caches them.

    Raises:
        ConfigError: if files are missing or damaged, have changed since `run` was resolved, or
            could change unnoticed.
    """
    config = run.config
    changes = config.input.augmentation
    source = open_source(config.data, split, seed=config.seed, augmentation=changes)
    expected = getattr(run.dataset, f"{split}_examples")
    if len(source) != expected:
        raise ConfigError(
            f"The files of data.{split} changed while the run started: they held {expected} "
            f"examples, and now hold {len(source)}; start it again."
        )
    if not reads_features(config):
        return source
    program = _Program(run)
    key = json.dumps([program.key, _data_key(run, split)])
    cache = DiskCache(
        user_folder() / "features",
        CACHE_BYTES,
        field="fine_tuning.cache_features",
        remedy="make room, or name another folder in the environment variable SCALEJAX_CACHE",
    )
    say = _Progress(reporter, split, len(source))
    tables = []
    for first in range(0, len(source), KEPT_TOGETHER):
        indices = np.arange(first, min(first + KEPT_TOGETHER, len(source)))
        load = partial(_computed, program, source, indices, say)
        tables.append(cache.of(f"{key} {first}", load))
        say.upto(int(indices[-1]) + 1)
    return Features(source, tables)


class _Program:
    """The program over the devices of this process that computes features, and its weights."""

    def __init__(self, run: ResolvedRun) -> None:
        devices = jax.local_devices()
        if jax.default_backend() == "cpu":
            devices = devices[:1]  # the others are virtual devices
        mesh = Mesh(np.array(devices), (DATA,))
        whole = NamedSharding(mesh, PartitionSpec())
        split = NamedSharding(mesh, PartitionSpec(DATA))
        setup = train_setup(run)
        state = abstract_state(setup)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            (state.params, state.model_state),
        )
        self.batch = BATCH * len(devices)
        self._weights = initial_weights(setup, shapes)
        shape = (self.batch, *run.dataset.input_shape)
        images = jax.ShapeDtypeStruct(shape, input_dtype(run.dataset), sharding=split)
        lowered = build_features(setup).lower(*shapes, images)
        digest = hashlib.sha256(lowered.as_text().encode())
        params, model_state = self._weights
        backbone = {name: part for name, part in params.items() if name != HEAD}
        for leaf in jax.tree.leaves((backbone, model_state)):
            digest.update(np.asarray(leaf).tobytes())
        versions = (jax.__version__, jax.default_backend(), package_digest())
        self.key = [digest.hexdigest(), *versions]
        self._lowered, self._split, self._compiled = lowered, split, None

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Features of `images`, at most one batch."""
        if self._compiled is None:
            self._compiled = self._lowered.compile()
        filled = np.zeros((self.batch, *images.shape[1:]), images.dtype)
        filled[: len(images)] = images
        features = self._compiled(*self._weights, jax.device_put(filled, self._split))
        return np.asarray(features)[: len(images)]


def _computed(program: _Program, source: Source, indices: np.ndarray, say: "_Progress") -> pa.Table:
    inputs, targets = [], []
    for first in range(0, len(indices), program.batch):
        taken = source.take(indices[first : first + program.batch])
        inputs.append(program(taken["inputs"]))
        targets.append(taken["targets"])
        say.upto(int(indices[0]) + first + len(targets[-1]))
    matrix = np.concatenate(inputs)
    values = pa.FixedSizeListArray.from_arrays(pa.array(matrix.ravel()), matrix.shape[1])
    return pa.table({"inputs": values, "targets": np.concatenate(targets)})


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    """The lists of a column as rows of a matrix, without copying."""
    (chunk,) = column.chunks
    return chunk.flatten().to_numpy(zero_copy_only=True).reshape(len(chunk), -1)


def _data_key(run: ResolvedRun, split: Split) -> list[Any]:
    """Cache key of the examples: config of the data, and its file fingerprints or the seed.

    Raises:
        ConfigError: if the storage of a file has no modification time or version.
    """
    config = run.config.data
    about = plain(config)
    used = used_files(config)
    if used is None:  # synthetic, or shipped with scalejax
        return [about, split, run.config.seed]
    for each in getattr(used, split if split in config.parts else "train"):
        if each.file.version is None:
            accepted = (
                f"the storage of {each.file.path} gives neither a modification time nor a "
                "checksum; leave it out, or copy the files to this machine"
            )
            raise ConfigError(refusal("fine_tuning.cache_features", True, accepted))
    return [about, split, plain(used)]


class _Progress:
    """Reports the progress of feature computation every few seconds."""

    def __init__(self, reporter: Reporter, split: Split, total: int) -> None:
        self._reporter, self._split, self._total = reporter, split, total
        self._begin = self._last = time.monotonic()

    def upto(self, done: int) -> None:
        """Note that `done` examples are computed."""
        now = time.monotonic()
        if is_first() and now >= self._last + SECONDS_BETWEEN_LINES:
            self._last = now
            left = (now - self._begin) / done * (self._total - done)
            self._reporter.say(
                f"features of {done:,} of {self._total:,} {self._split} examples, "
                f"{format_seconds(left)} left"
            )
