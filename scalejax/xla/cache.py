"""Cache of compiled programs on disk, keyed by everything that they depend on.

A program depends on the run (model, batch, layout, optimizer; not on seed or epochs), the
target, the versions of the compiler and of the libraries that trace the step, on scalejax
itself and, for a user's own network, on its source files.
"""

import contextlib
import gzip
import hashlib
import json
import os
import sys
from dataclasses import replace
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from scalejax.config.run import condition_shares
from scalejax.config.training import LossConfig
from scalejax.core.cache import package_digest
from scalejax.core.environment import compiler_settings
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue, plain, save_bytes
from scalejax.simulator.program import Program
from scalejax.xla.job import Compiled, RunJob

_LIBRARIES = (
    "jax", "jaxlib", "flax", "optax",
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt",
    "libtpu",
)  # fmt: skip

_IN_ARCHIVES = {"gradient_sync": "exchange", "selective_op": "per_op", "scaled": "ScheduleConfig"}
"""Former names of fields and values, which archive keys keep."""


def cached_program(folder: Path, job: RunJob) -> Program | None:
    """The cached program of `job` in `folder`; None if missing or if its sources have changed."""
    try:
        text = gzip.decompress(_path(folder, job).read_bytes())
        compiled = TypeAdapter(Compiled).validate_json(text)
        changed = any(digest_of(Path(path)) != known for path, known in compiled.sources.items())
    # Missing, unreadable or damaged: it can always be compiled again.
    except (OSError, EOFError, gzip.zlib.error, ValidationError):  # type: ignore[attr-defined]
        return None
    return None if changed else compiled.program


def keep(folder: Path, job: RunJob, compiled: Compiled) -> None:
    """Write the result of `job` into `folder`, atomically."""
    # A disk that is full or not writable costs a later run its time, nothing else.
    with contextlib.suppress(ConfigError):
        data = gzip.compress(TypeAdapter(Compiled).dump_json(compiled), 6)
        save_bytes(data, _path(folder, job))


def case_key(job: RunJob) -> str:
    """Key of the program of `job` in archives, independent of versions.

    Fields that hold their default are left out, so that a program keeps its name when a config
    gains a field; so is the chip's title.
    """
    config, split = job.run.config, job.run.split
    parts = (config.model, config.optimizer, config.schedule, split.layout, job.run.dataset)
    material = {
        "parts": [_named(part) for part in parts],
        "mode": config.layout.mode,
        "bn_groups": job.run.bn_groups,
        "batch": [split.global_batch, split.microbatches],
        "target": [job.target.backend, job.target.name, job.target.device_count],
        "topology": job.target.topology,
        "chip": job.target.description.rpartition("device_description_str")[0],
    }
    for name, usual in (
        ("zero_stage", 0),
        ("sequence_parallel", False),
        ("pipeline_chunks", 1),
        ("pipeline_schedule", "gpipe"),
        ("context_strategy", "all_gather"),
        ("bn_running", "mean"),
        ("optimizer_memory_host_offload", False),
    ):
        if (value := getattr(config.layout, name)) != usual:
            material[name] = value
    for name in ("loss", "dropout", "clipping", "averaging", "fine_tuning", "gradient_sync"):
        if (part := getattr(config, name)) not in (None, LossConfig()):
            material[_IN_ARCHIVES.get(name, name)] = _named(part)
    beside = (("mix", job.run.is_mixed), ("cut", job.run.is_cut), ("weights", job.run.is_weighted))
    for name, is_beside in beside:
        if is_beside:
            material[name] = True
    if shares := condition_shares(job.run):
        material["shares"] = shares
    if any(measured := _measured(job)):
        material["measured"] = measured
    return _key(material)


def _key(material: JsonValue) -> str:
    return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()[:32]


def _measured(job: RunJob) -> list[JsonValue]:
    """Gradient statistics that a step computes besides the update."""
    config = job.run.config
    of_layers: list[JsonValue] = [True] if config.train.layer_gradient_norms else []
    return [config.measures_gradient_norm, plain(config.train.noise_scale), *of_layers]


def _named(part: object) -> list[JsonValue]:
    """[name, non-default fields] of a config part, without sizes of the data set."""
    fields = _adapter(type(part)).dump_python(part, mode="json", exclude_defaults=True)
    kept = {
        name: _IN_ARCHIVES.get(value, value) if isinstance(value, str) else value
        for name, value in fields.items()
        if not name.endswith("_examples")
    }
    name = getattr(part, "name", type(part).__name__)
    return [_IN_ARCHIVES.get(name, name), kept]


@cache
def _adapter(type_: type) -> TypeAdapter[object]:
    return TypeAdapter(type_)


def _path(folder: Path, job: RunJob) -> Path:
    material = {
        "run": _shaping(job),
        "target": plain(job.target),
        "versions": _versions(),
        "scalejax": package_digest(),
        "settings": compiler_settings(),
        "own": {**_own_modules(job), **_own_members(job)},
    }
    return folder / f"{_key(material)}.json.gz"


_PARTS = (
    *("model", "optimizer", "schedule", "loss"),
    *("dropout", "clipping", "averaging", "fine_tuning", "gradient_sync"),
)
"""Parts of a config that shape its compiled step, and may be members of families."""


def _shaping(job: RunJob) -> JsonValue:
    """Fields of a run on which its compiled step depends; epochs and seeds do not matter."""
    run, config = job.run, job.run.config
    # A data axis that is left open is the same as one of the size that the split resolves it to.
    layout = replace(config.layout, data=None)
    return {
        **{name: plain(getattr(config, name)) for name in _PARTS},
        "layout": plain(layout),
        "mix": run.is_mixed,
        **({"cut": True} if run.is_cut else {}),
        "weights": run.is_weighted,
        "shares": dict(condition_shares(run)),
        "measured": _measured(job),
        "split": plain(run.split),
        "bn_groups": run.bn_groups,
        "dataset": _named(run.dataset),
    }


def has_own_source(job: RunJob) -> bool:
    """Whether the program of `job` depends on the user's files."""
    return bool(_own_modules(job) or _own_members(job))


def _own_members(job: RunJob) -> dict[str, str]:
    """The files of the parts of a config whose classes are a user's own, and their digests."""
    modules = {type(getattr(job.run.config, name)).__module__ for name in _PARTS}
    own = [name for name in modules if name.partition(".")[0] not in ("builtins", "scalejax")]
    files = [getattr(sys.modules[name], "__file__", None) for name in own]
    # A notebook's class may change at any time: its programs are never found again.
    return {file or uuid4().hex: digest_of(Path(file)) if file else "" for file in files}


def _own_modules(job: RunJob) -> dict[str, str]:
    """The files of a user's own network, optimizer and loss, and their digests; the same import
    path may mean another file in another folder. Empty for those that come with scalejax."""
    config = job.run.config
    modules = (each.own_module for each in (config.model, config.optimizer, config.loss))
    return {key: value for each in modules if each for key, value in _own_file(each).items()}


def _own_file(module: str) -> dict[str, str]:
    """The file of a module that is yet to be imported, and its digest."""
    name, places, origin = "", [*sys.path, os.getcwd()], None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return {}  # the worker will say what is wrong
        origin, places = spec.origin, list(spec.submodule_search_locations or ())
    return {origin: digest_of(Path(origin))} if origin else {}


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def digest_of(path: Path) -> str:
    """Digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
