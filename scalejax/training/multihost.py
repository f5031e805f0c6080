"""What the processes of a run must have alike before the first update: config, data, state.

Each reads its own files and draws its own numbers, so each could have others; what differs is
refused in all of them, with its name and the process's. Knows runs and states; neither who
started the processes nor what they do next.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from scalejax.config.run import ResolvedRun
from scalejax.core.errors import CheckpointMismatch, ConfigError, refusal
from scalejax.core.serialization import JsonValue, plain
from scalejax.core.units import counted
from scalejax.models import parameter_path
from scalejax.training.checkpoint import checksum
from scalejax.training.mesh import replicated
from scalejax.training.state import PyTree, TrainState

# What the processes of a run must agree on: who writes, and what is there.


def is_first() -> bool:
    """Whether this process is the one that writes and talks."""
    return jax.process_index() == 0


def first_says(value: bool) -> bool:
    """The value of the first process, in all of them; every process must ask."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def all_say(text: str) -> tuple[str, ...]:
    """What each process says, the same in all of them; every process must say something."""
    if jax.process_count() == 1:
        return (text,)
    content = np.frombuffer(text.encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.int32(len(content))).max())
    padded = np.pad(content, (0, longest - len(content)))
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return tuple(row.tobytes().rstrip(b"\0").decode() for row in gathered)


_OF_HOST = {
    "data.train",
    "data.test",
    "data.reading.memory_bytes",
    "data.reading.cache_folder",
    "data.reading.cache_bytes",
    "input.memory_bytes",
    "input.read_ahead_batches",
    "input.workers",
}
"""Fields that say where a host has its copy of the data, and how it reads it: not what it is."""
_SHOWN = 3
"""Of what differs, named."""


def require_same_run(run: ResolvedRun, *, resume: bool) -> None:
    """Refuse a run that the processes were not all given alike; every process must ask.

    Of the data, what is compared is what the run knows of it: examples, shapes, classes.

    Args:
        run: as this process was given it.
        resume: whether this process was told to go on with a run.

    Raises:
        ConfigError: naming the process that differs from the first, and up to three fields.
    """
    fields = {name: value for name, value in _flat(run.config).items() if name not in _OF_HOST}
    of_data = {f"examples: {name}": value for name, value in _flat(run.dataset).items()}
    versions = {f"version of {name}": version(name) for name in ("scalejax", "jax")}
    _require_same(
        {**fields, **of_data, **versions, "--resume": resume},
        "Give all processes the same run.toml, flags and data.",
    )


def require_same_checkpoint(step: int) -> None:
    """Refuse to go on at checkpoints of different steps; every process must ask.

    Args:
        step: of the latest checkpoint that this process sees; 0 if it sees none.

    Raises:
        ConfigError: naming the process that sees another than the first.
    """
    _require_same(
        {"latest checkpoint": step},
        "All processes must see the same folder, such as one on a shared disk.",
    )


def require_same_state(run: ResolvedRun, mesh: Mesh, state: TrainState, *, step: int) -> None:
    """Refuse a state of which two processes hold different copies; every process must ask.

    Horovod has the first process's variables replace those of all others
    (BroadcastGlobalVariablesCallback), which a network that draws other numbers in every process
    then needs. Here they are refused: an array in parts over the processes has no copy in the
    first that could replace the others, and a run whose numbers do not follow from its seed is
    another run each time. Every part of which two devices hold a copy is compared; a part that
    one device alone holds can differ from nothing.

    Cheap: a sum of bits is taken where the arrays lie, and four bytes of each array and device
    are sent. A single difference always shows; of several, one in 2**32 may cancel out.

    Args:
        run: what is trained.
        mesh: where the state lies.
        state: its arrays, as they were drawn or restored.
        step: updates made; 0 if the state was drawn.

    Raises:
        ConfigError: naming the array and the process, if the state was drawn.
        CheckpointMismatch: likewise, if it was restored.
    """
    if jax.process_count() == 1:
        return
    different = _different_copies(mesh, state)
    if not different:
        return
    (name, process, other), *more = different
    others = f", and {counted(len(more), 'other array')}" if more else ""
    what = f"{name} of process {process} is not that of process {other}{others}"
    if step:
        raise CheckpointMismatch(
            f"the checkpoint of step {step} is refused: {what}, as they read it. "
            "All processes must see the same files, such as on a shared disk."
        )
    accepted = (
        f"{what}, before the first update; a network may draw numbers by its rngs alone, which "
        "follow from the seed, and not by the process, the clock or NumPy"
    )
    model = run.config.model
    field, value = ("path", model.path) if model.name == "custom" else ("name", model.name)
    raise ConfigError(refusal(f"model.{field}", value, accepted))


def _flat(value: object) -> dict[str, JsonValue]:
    """The numbers and words of a description by dotted name; absent ones left out."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(plain(value))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _require_same(what: Mapping[str, JsonValue], remedy: str) -> None:
    first, *others = (json.loads(said) for said in all_say(json.dumps(what)))
    for process, other in enumerate(others, start=1):
        names = [name for name in sorted(first | other) if first.get(name) != other.get(name)]
        if names:
            words = ", ".join(
                f"{name}={other.get(name)!r} (process 0: {first.get(name)!r})"
                for name in names[:_SHOWN]
            )
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise ConfigError(f"process {process} differs from process 0: {words}{more}. {remedy}")


def _different_copies(mesh: Mesh, state: PyTree) -> list[tuple[str, int, int]]:
    """Path of each array of which copies differ, the first process whose copy does, and the
    process from whose it does; the same in all processes."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    fingerprints = _fingerprints(mesh, [leaf for _, leaf in paths_and_leaves])
    devices = list(mesh.devices.flat)
    order = sorted(range(len(devices)), key=lambda row: devices[row].process_index)
    found = []
    for (path, leaf), column in zip(paths_and_leaves, fingerprints.T, strict=True):
        if np.all(column == column[0]):
            continue  # as of all that is whole on every device, of which there may be thousands
        parts = leaf.sharding.devices_indices_map(leaf.shape)
        firsts: dict[str, int] = {}
        for row in order:
            first = firsts.setdefault(str(parts[devices[row]]), row)
            if column[row] != column[first]:
                processes = (devices[row].process_index, devices[first].process_index)
                found.append((parameter_path(path), *processes))
                break
    return found


def _fingerprints(mesh: Mesh, leaves: list[jax.Array]) -> np.ndarray:
    """A number for what each device of `mesh`, in its order, holds of each array: uint32
    [devices, arrays]."""

    def of_device(*parts: jax.Array) -> jax.Array:
        return jnp.stack([checksum(part) for part in parts])[None]

    mapped = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=tuple(leaf.sharding.spec for leaf in leaves),  # type: ignore[attr-defined]  named
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,  # what should be alike on several devices is what is asked
    )
    return np.asarray(jax.jit(mapped, out_shardings=replicated(mesh))(*leaves))
