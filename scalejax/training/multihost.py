"""Consistency of a run: config, data and state must be equal in all processes, at its start and, if
requested, throughout.

Each process reads its own files and initialises its own copy of the state, so they could differ; a
difference is refused in all processes, naming the field and the process. Knows runs and states;
neither how the processes were started nor what they do next.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from scalejax.config.grid import fields_of
from scalejax.config.run import ResolvedRun
from scalejax.core import errors
from scalejax.core.errors import (
    CheckpointMismatch,
    ConfigError,
    Damaged,
    ScalejaxError,
    refusal,
)
from scalejax.core.serialization import JsonValue
from scalejax.core.units import counted
from scalejax.models import parameter_path
from scalejax.training.checksums import checksum
from scalejax.training.mesh import replicated
from scalejax.training.state import PyTree, TrainState

# Broadcast and all-gather of small values between processes.


def is_first() -> bool:
    """Whether this is process 0, which writes files and reports progress."""
    return jax.process_index() == 0


def broadcast_from_first(value: bool) -> bool:
    """Broadcast `value` of process 0 to all processes; every process must call it."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def all_gather_text(text: str) -> tuple[str, ...]:
    """All-gather `text` of each process, in order of processes; every process must call it."""
    if jax.process_count() == 1:
        return (text,)
    content = np.frombuffer(text.encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.int32(len(content))).max())
    padded = np.pad(content, (0, longest - len(content)))
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return tuple(row.tobytes().rstrip(b"\0").decode() for row in gathered)


def decided_by_first(decide: Callable[[], JsonValue]) -> JsonValue:
    """What `decide` returns in process 0, in all processes; every process must call it.

    Raises:
        ScalejaxError: what `decide` raises in process 0, in all processes.
    """
    said: dict[str, JsonValue] = {}
    if is_first():
        try:
            said = {"decided": decide()}
        except ScalejaxError as error:
            if jax.process_count() == 1:
                raise
            said = {"error": type(error).__name__, "text": str(error)}
    said = json.loads(all_gather_text(json.dumps(said))[0])
    if "error" in said:
        raise getattr(errors, str(said["error"]), errors.ConfigError)(said["text"])
    return said["decided"]


# The consistency checks.

HOW_IT_IS_READ = {
    "data.reading.memory_bytes",
    "data.reading.cache_folder",
    "data.reading.cache_bytes",
    "input.memory_bytes",
    "input.read_ahead_batches",
    "input.workers",
}
"""Fields of how the data is read, which the rows do not depend on."""
_PER_HOST = HOW_IT_IS_READ | {"data.train", "data.test"}
"""Fields that may differ between hosts: where the data is, and how it is read."""
_SHOWN = 3
"""Most differing fields named in a message."""


def require_same_run(run: ResolvedRun, *, resume: bool) -> None:
    """Refuse a run whose config, data or versions differ between processes; all must call it.

    Data are compared by the number of examples, shapes and classes.

    Args:
        run: the run as this process resolved it.
        resume: whether this process was told to resume.

    Raises:
        ConfigError: naming the process that differs from the first, and up to three fields.
    """
    fields = {name: value for name, value in fields_of(run.config).items() if name not in _PER_HOST}
    of_data = {f"examples: {name}": value for name, value in fields_of(run.dataset).items()}
    versions = {f"version of {name}": version(name) for name in ("scalejax", "jax")}
    _require_same(
        {**fields, **of_data, **versions, "--resume": resume},
        "Give all processes the same run.toml, flags and data.",
    )


def require_same_checkpoint(step: int, digest: str = "") -> None:
    """Refuse to resume if processes see different checkpoints; all must call it.

    Args:
        step: step of the checkpoint that this process is to read; 0 if none.
        digest: of the manifest that it sees there.

    Raises:
        ConfigError: naming the process that sees another checkpoint than process 0.
    """
    _require_same(
        {"latest checkpoint": step, "its manifest": digest},
        "All processes must see the same folder, such as one on a shared disk.",
    )


def require_same_state(run: ResolvedRun, mesh: Mesh, state: TrainState, *, step: int) -> None:
    """Refuse a state whose replicas differ between processes; every process must call it.

    Horovod broadcasts the first process's variables to all others
    (BroadcastGlobalVariablesCallback), which a network that is initialised differently in every
    process needs. Here such states are refused: the first process has no full copy of an array that
    is sharded over processes, and a run whose values do not follow from its seed is a different run
    each time. Every shard with replicas on two devices is compared; a shard that is on one device
    only has nothing to differ from.

    The cost is small: one checksum per array and device, computed where the array is, and four
    bytes sent for each. A single difference is always found; several cancel out with probability
    2**-32.

    Args:
        run: the run to be trained.
        mesh: mesh that the state is sharded over.
        state: its arrays, initialised or restored.
        step: updates made; 0 if the state was initialised.

    Raises:
        ConfigError: naming the array and the process, if the state was initialised.
        CheckpointMismatch: naming the array and the process, if it was restored.
    """
    if jax.process_count() == 1:
        return
    different = _different_copies(mesh, state)
    if not different:
        return
    first, *more = different
    others = f", and {counted(len(more), 'other array')}" if more else ""
    what = (
        f"{first.name} of process {first.process} differs from that of process {first.other}"
        f"{others}"
    )
    if step:
        raise CheckpointMismatch(
            f"the checkpoint of step {step} is refused: {what}, as they read it. "
            "All processes must see the same files, such as on a shared disk."
        )
    accepted = (
        f"{what}, before the first update; a network may draw random numbers only from its rngs, "
        "which follow from the seed, not from the process, the clock or NumPy"
    )
    model = run.config.model
    field = "path" if model.name == "custom" else "name"
    raise ConfigError(refusal(f"model.{field}", getattr(model, field), accepted))


def require_equal_replicas(state: TrainState, *, step: int, way_back: Callable[[], str]) -> None:
    """Refuse to continue with a state whose replicas differ between devices; every process must
    call it.

    Replicas begin equal and are updated by the same numbers, so a difference is silent corruption:
    a bit that flipped, or a device that computes wrongly. What lies on one device only, like
    parameters sharded over fsdp, has nothing to differ from, and neither does what lies on the
    host.

    Args:
        state: its arrays.
        step: updates made.
        way_back: says what the run may resume from; called in all processes if replicas differ.

    Raises:
        Damaged: naming the array, the device whose numbers differ, and its process.
    """
    on_devices = jax.tree.map(
        lambda leaf: leaf if leaf.sharding.memory_kind in (None, "device") else None, state
    )
    mesh = jax.tree.leaves(on_devices)[0].sharding.mesh
    if not (different := _different_copies(mesh, on_devices)):
        return
    first, *more = different
    others = f" (and {counted(len(more), 'other array')})" if more else ""
    doubt = ", or the other way round" if first.is_even else ""
    raise Damaged(
        f"after step {step:,}, {first.name}{others} of device {first.device}, in process "
        f"{first.process}, differs from that of device {first.other_device}, in process "
        f"{first.other}{doubt}: a bit has flipped, or a device computes wrongly; {way_back()}."
    )


def _require_same(what: Mapping[str, JsonValue], remedy: str) -> None:
    first, *others = (json.loads(said) for said in all_gather_text(json.dumps(what)))
    for process, other in enumerate(others, start=1):
        names = [name for name in sorted(first | other) if first.get(name) != other.get(name)]
        if names:
            words = ", ".join(
                f"{name}={other.get(name)!r} (process 0: {first.get(name)!r})"
                for name in names[:_SHOWN]
            )
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise ConfigError(f"process {process} differs from process 0: {words}{more}. {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """An array whose replica on one device differs from that on most."""

    name: str
    """Path of the array."""
    process: int
    """The process of that device."""
    device: int
    """Its id."""
    other: int
    """The process of the first device that holds what most hold."""
    other_device: int
    """Its id."""
    is_even: bool
    """Whether equally many devices hold either, so that there is no majority."""


def _different_copies(mesh: Mesh, state: PyTree) -> list[_Difference]:
    """Each array whose replicas differ, with the first device that differs from the majority (from
    the first process if there is none); the same in all processes."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    fingerprints = _fingerprints(mesh, [leaf for _, leaf in paths_and_leaves])
    devices = list(mesh.devices.flat)
    order = sorted(range(len(devices)), key=lambda row: devices[row].process_index)
    found = []
    for (path, leaf), column in zip(paths_and_leaves, fingerprints.T, strict=True):
        if np.all(column == column[0]):
            continue  # the usual case for replicated arrays, without a loop over devices
        parts = leaf.sharding.devices_indices_map(leaf.shape)
        rows_of: dict[str, list[int]] = {}
        for row in order:
            rows_of.setdefault(str(parts[devices[row]]), []).append(row)
        for rows in rows_of.values():
            counts = Counter(column[row] for row in rows).most_common()  # ties: in order of rows
            if len(counts) == 1:
                continue
            most = next(row for row in rows if column[row] == counts[0][0])
            odd = next(row for row in rows if column[row] != counts[0][0])
            difference = _Difference(
                name=parameter_path(path),
                process=devices[odd].process_index,
                device=devices[odd].id,
                other=devices[most].process_index,
                other_device=devices[most].id,
                is_even=counts[0][1] == counts[1][1],
            )
            found.append(difference)
            break
    return found


def _fingerprints(mesh: Mesh, leaves: list[jax.Array]) -> np.ndarray:
    """Checksum of the shard of each array on each device of `mesh`: uint32 [devices, arrays]."""
    specs = tuple(leaf.sharding.spec for leaf in leaves)  # type: ignore[attr-defined]  named
    return np.asarray(_checksums_of_shards(mesh, specs)(*leaves))


@lru_cache(maxsize=8)
def _checksums_of_shards(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., jax.Array]:
    """The checksums of arrays with these shardings; cached, as it is called throughout a run."""

    def of_device(*parts: jax.Array) -> jax.Array:
        return jnp.stack([checksum(part) for part in parts])[None]

    mapped = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,  # whether replicas are equal is the question here
    )
    return jax.jit(mapped, out_shardings=replicated(mesh))
