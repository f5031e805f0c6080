"""Weights that a run begins with: from an earlier run, a safetensors file or a hub's folder.

Only weights and BatchNorm statistics are taken: the optimizer and the schedule start afresh. Each
device reads its own part, whatever the layout. Knows the files and the paths of the network's
parameters; `scalejax.models.hub` knows what a hub's file means.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.tree_util import tree_flatten_with_path, tree_map_with_path

from scalejax.config.run import ResolvedRun, RunConfig
from scalejax.config.training import StartConfig
from scalejax.core.errors import CheckpointMismatch, ConfigError, Damaged, refusal
from scalejax.core.serialization import document
from scalejax.core.units import counted
from scalejax.models import parameter_path
from scalejax.models.hub import Part, files_of, hub_parts, read_safetensors, whole
from scalejax.models.lora import ADAPTERS
from scalejax.training.checkpoint import load_leaves, shapes_of, written_checksums
from scalejax.training.manifest import first_difference, read_manifest
from scalejax.training.record import RunFolder
from scalejax.training.setup import train_setup
from scalejax.training.state import PyTree, abstract_state

_OF_BATCH_NORM = ("mean", "var")
"""Last parts of the paths of running statistics; others, such as loads of experts and scales of
fp8, start afresh if they are absent."""
_NAMED = 4
"""Largest number of arrays of each kind that a message names."""

Shapes = Mapping[str, jax.ShapeDtypeStruct]


@document("start")
@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """What a run began with."""

    weights: str
    """Where they were read from, independent of the working directory."""
    source: str
    """What was there: the final weights of a run, its checkpoint, a safetensors file, or a hub's
    folder."""
    step: int | None
    """Updates made before the checkpoint; None if it was not a checkpoint."""
    sha256: str
    """SHA-256 of the files of tensors, one after the other; for an earlier run, of the checksums of
    its arrays."""
    arrays: int
    """Arrays taken."""
    reinitialized: tuple[str, ...]
    """Arrays of the network that are initialised at random, by their paths."""

    @property
    def words(self) -> str:
        """For the first line of the record."""
        count = len(self.reinitialized)
        anew = f", {counted(count, 'array')} reinitialized" if count else ""
        return f"; from {self.source} in {self.weights} (SHA-256 {self.sha256[:12]}...{anew})"


class _Source(ABC):
    """Weights on disk, by the paths of the network's parameters and statistics."""

    kind: str
    step: int | None = None
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def read(self, wanted: Shapes) -> dict[str, jax.Array]:
        """Arrays in wanted shapes, types and shardings."""

    @abstractmethod
    def sha256(self) -> str:
        """Digest of what it holds."""


class _EarlierRun(_Source):
    """The final weights of a run, or its newest checkpoint that verifies."""

    def __init__(self, folder: RunFolder) -> None:
        checkpoint = None
        if folder.weights.is_dir():
            self.kind, self._path = "the weights", folder.weights
            self._checksums = written_checksums(self._path)
        else:
            checkpoint = _newest_whole(folder)
            self.step, self._path = checkpoint, folder.checkpoints / str(checkpoint)
            self.kind = f"the checkpoint of step {checkpoint:,}"
            self._checksums = read_manifest(self._path).arrays
        stored = shapes_of(self._path)
        # An average, such as EMA's, is what the run would have ended with.
        has_average = any(path.startswith("average/params/") for path in stored)
        self._inner = "average/" if has_average else ""
        self.shapes = {}
        self._stored: dict[str, str] = {}
        for path, shape in stored.items():
            for part in ("params/", "model_state/"):
                if path.startswith(f"{self._inner}{part}"):
                    name = path.removeprefix(f"{self._inner}{part}")
                    self._stored[name], self.shapes[name] = path, shape

    def read(self, wanted: Shapes) -> dict[str, jax.Array]:
        by_path = {self._stored[name]: leaf for name, leaf in wanted.items()}
        loaded = load_leaves(self._path, self._checksums, by_path)
        return {name: loaded[self._stored[name]] for name in wanted}

    def sha256(self) -> str:
        kept = {path: value for path, value in self._checksums.items() if "opt_state" not in path}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


class _Safetensors(_Source):
    """A safetensors file in this network's own names, or a hub's folder."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self._parts: dict[str, Part]
        if path.is_dir():
            self.kind, self._files = "the model", files_of(path)
            self._parts = hub_parts(path, config.model)
        else:
            self.kind, self._files = "the arrays", [path]
            arrays = read_safetensors(path)
            self._parts = {
                name if "/" in name else name.replace(".", "/"): whole(array)
                for name, array in arrays.items()
            }
        self.shapes = {name: part.shape for name, part in self._parts.items()}

    def read(self, wanted: Shapes) -> dict[str, jax.Array]:
        return {name: _on_devices(self._parts[name], leaf) for name, leaf in wanted.items()}

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for path in self._files:
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        return digest.hexdigest()


def _on_devices(part: Part, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_callback(
        leaf.shape,
        leaf.sharding,  # type: ignore[arg-type]  the shapes of a state have them
        lambda index: part.read(index or ()).astype(leaf.dtype),
    )


def _newest_whole(folder: RunFolder) -> int:
    """Step of the newest checkpoint that is as it was written.

    Raises:
        ConfigError: if there is none.
    """
    steps = sorted(int(path.name) for path in folder.checkpoints.glob("*") if path.name.isdecimal())
    for step in reversed(steps):
        path = folder.checkpoints / str(step)
        try:
            if first_difference(path, read_manifest(path).files) is None:
                return step
        except Damaged:
            continue
    accepted = "it has no weights (it did not end, or diverged), and no checkpoint that verifies"
    raise ConfigError(refusal("start.weights", str(folder.path), accepted))


def _open(config: RunConfig, start: StartConfig) -> _Source:
    path = Path(start.weights)
    folder = RunFolder(path=path)
    if path.is_dir() and folder.holds_run:
        try:
            return _EarlierRun(folder)
        except CheckpointMismatch as error:
            raise ConfigError(f"start.weights is refused: {error}") from error
    if path.is_file() or (path / "config.json").is_file():
        return _Safetensors(path, config)
    accepted = (
        "there is no run (run.toml), no safetensors file and no folder of a hub (config.json) there"
    )
    raise ConfigError(refusal("start.weights", start.weights, accepted))


def started_weights(config: RunConfig, shapes: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Parameters and statistics that `config` begins with; None in place of those to initialise.

    Args:
        config: a run that has `start`.
        shapes: of both, with shardings.

    Raises:
        ConfigError: if they cannot be read, or do not fit the network.
    """
    assert config.start is not None  # noqa: S101  the caller checks this
    source = _open(config, config.start)
    wanted = _wanted(config, config.start, source, shapes)
    try:
        loaded = source.read(wanted)
    except CheckpointMismatch as error:
        raise ConfigError(f"start.weights is refused: {error}") from error
    params, statistics = (
        tree_map_with_path(lambda path, _: loaded.get(parameter_path(path)), tree)
        for tree in shapes
    )
    return params, statistics


def start_of(run: ResolvedRun) -> StartRecord | None:
    """What `run` begins with, checked against its network; None if it begins at random.

    Raises:
        ConfigError: as in `started_weights`, before any array is read.
    """
    if (start := run.config.start) is None:
        return None
    state = abstract_state(train_setup(run))
    source = _open(run.config, start)
    wanted = _wanted(run.config, start, source, (state.params, state.model_state))
    names = [parameter_path(path) for path, _ in tree_flatten_with_path(state.params)[0]]
    return StartRecord(
        weights=str(Path(start.weights).absolute()),
        source=source.kind,
        step=source.step,
        sha256=source.sha256(),
        arrays=len(wanted),
        reinitialized=tuple(name for name in names if name not in wanted),
    )


def _wanted(
    config: RunConfig, start: StartConfig, source: _Source, shapes: tuple[PyTree, PyTree]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of the network to read.

    Raises:
        ConfigError: naming the arrays that are missing, superfluous or of another shape.
    """
    own = {
        parameter_path(path): leaf
        for tree in shapes
        for path, leaf in tree_flatten_with_path(tree)[0]
    }
    statistics = {parameter_path(path) for path, _ in tree_flatten_with_path(shapes[1])[0]}

    def is_anew(path: str) -> bool:
        return any(path == part or path.startswith(f"{part}/") for part in start.reinitialized)

    def is_optional(path: str) -> bool:
        last = path.rpartition("/")[2]
        return last in ADAPTERS or (path in statistics and last not in _OF_BATCH_NORM)

    for part in start.reinitialized:
        if not any(path == part or path.startswith(f"{part}/") for path in own):
            parts = ", ".join(sorted({path.partition("/")[0] for path in own}))
            raise ConfigError(
                refusal(
                    "start.reinitialized", part, f"the network has no such part; it has {parts}"
                )
            )
    wanted, missing, others = {}, [], []
    for path, leaf in own.items():
        shape = source.shapes.get(path)
        if is_anew(path) or (is_optional(path) and shape != leaf.shape):
            continue
        if shape is None:
            missing.append(path)
        elif shape != leaf.shape:
            others.append(f"{path} ({_dimensions(shape)} there, {_dimensions(leaf.shape)} here)")
        else:
            wanted[path] = leaf
    extra = [
        path
        for path in source.shapes
        if path not in own and not is_anew(path) and path.rpartition("/")[2] not in _BEGUN_ANEW
    ]
    problems = (("it lacks", missing), ("of another shape:", others), ("too much:", extra))
    if said := [f"{words} {_listed(paths)}" for words, paths in problems if paths]:
        accepted = (
            f"{source.kind} there are not those of model.name={config.model.name!r}: "
            f'{"; ".join(said)}. start.reinitialized = ["head"] would leave a part of that name out'
        )
        raise ConfigError(refusal("start.weights", start.weights, accepted))
    if not wanted:
        raise ConfigError(
            refusal("start.reinitialized", list(start.reinitialized), "no weights are left to load")
        )
    return wanted


_BEGUN_ANEW = ("load", "window_load", "window_fullest")
"""Statistics of experts that one run counts and another may not."""


def _dimensions(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more
