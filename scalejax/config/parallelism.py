"""Mesh axes, layouts of devices along them, and the division of a batch among devices.

Arithmetic only, with no devices and no arrays; `training.mesh` turns a `Layout` into a JAX mesh.
"""

import math
from dataclasses import dataclass
from typing import Literal

from scalejax.core.errors import (
    ConfigError,
    nearest_multiples,
    refusal,
    require_at_least,
    require_multiple,
)

PIPELINE = "pipeline"
"""Mesh axis over which the layers are split into pipeline stages."""
DATA = "data"
"""Mesh axis over which the batch is sharded and parameters are replicated."""
FSDP = "fsdp"
"""Mesh axis over which both the batch and the parameters are sharded (ZeRO 3)."""
EXPERT = "expert"
"""Mesh axis over which the batch and the parameters of experts are sharded, but no others."""
CONTEXT = "context"
"""Mesh axis over which the tokens of a sample are sharded."""
TENSOR = "tensor"
"""Mesh axis over which the parameters of one layer are sharded (Megatron)."""

AXES = (PIPELINE, DATA, FSDP, EXPERT, CONTEXT, TENSOR)
"""All axes, major to minor: neighbours on the last one are neighbours in a node."""

BATCH_AXES = (DATA, FSDP, EXPERT)
"""The axes that shard the batch."""

MODEL_AXES = (PIPELINE, FSDP, EXPERT, CONTEXT, TENSOR)
"""The axes whose sizes a run gives; the data axis takes the remaining devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Number of devices along each mesh axis.

    Example:
        >>> from scalejax import Layout
        >>> layout = Layout(data=4, tensor=2)
        >>> print(layout, layout.device_count, layout.batch_shards)
        data=4 x tensor=2 8 4
    """

    data: int = 1
    """Devices along the data axis."""
    fsdp: int = 1
    """Devices along the fsdp axis."""
    tensor: int = 1
    """Devices along the tensor axis."""
    context: int = 1
    """Devices along the context axis."""
    pipeline: int = 1
    """Devices along the pipeline axis: pipeline stages."""
    expert: int = 1
    """Devices along the expert axis."""

    def __post_init__(self) -> None:
        for axis, size in self.axis_sizes.items():
            require_at_least(f"layout.{axis}", size, 1)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Devices along each axis, in the order of `AXES`."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def device_count(self) -> int:
        """Devices in the run."""
        return math.prod(self.axis_sizes.values())

    @property
    def batch_shards(self) -> int:
        """Shards of the global batch: data x fsdp x expert."""
        return self.data * self.fsdp * self.expert

    @property
    def batch_axes(self) -> str:
        """The axes that shard the batch, written as a product for refusals: "data*fsdp", with
        "*expert" if that axis is used."""
        return "data*fsdp" if self.expert == 1 else "data*fsdp*expert"

    def __str__(self) -> str:
        """The axes of more than one device: "data=4 x tensor=2"."""
        used = [f"{axis}={size}" for axis, size in self.axis_sizes.items() if size > 1]
        return " x ".join(used) or "one device"


def fill_data_axis(device_count: int, **others: int) -> Layout:
    """The layout of `device_count` devices whose data axis takes those that the other axes leave.

    Args:
        device_count: devices in the run.
        others: devices along each axis of `MODEL_AXES`; 1 along those left out.

    Raises:
        ConfigError: if their product does not divide `device_count`.
    """
    require_at_least("devices", device_count, 1)
    used = [axis for axis in MODEL_AXES if others.get(axis, 1) > 1]
    taken = math.prod(others[axis] for axis in used)
    require_multiple("devices", device_count, taken, "*".join(used) or "1")
    return Layout(data=device_count // taken, **others)


def stage_layers(layers: int, stages: int, before: int = 0) -> tuple[int, ...]:
    """Layers of each pipeline stage: as equal as possible, with one more in the first stages.

    The last ones are shorter, because the last stage also has the output layer wherever stages do
    not share it. If the first stage also computes `before` earlier layers, it has that many fewer.
    """
    least, long_stages = divmod(layers + before, stages)
    first, *others = (least + 1,) * long_stages + (least,) * (stages - long_stages)
    if first < before:
        return (0, *stage_layers(layers, stages - 1))
    return (first - before, *others)


def balanced_layers(
    layers: int, stages: int, layer_weights: int, output_weights: int
) -> tuple[int, ...]:
    """Layers of each pipeline stage as nanotron assigns them (PipelineBlock, and
    get_block_compute_costs of its models): in order and by weights, including those of the output
    layer; a stage takes layers until the sum so far exceeds its share."""
    total = layers * layer_weights + output_weights
    counts, stage = [0] * stages, 0
    for index in range(layers):
        counts[stage] += 1
        is_full = (index + 1) * layer_weights * stages > total * (stage + 1)
        stage += is_full and stage + 1 < stages
    return tuple(counts)


ContextStrategy = Literal["all_gather", "ring", "all_to_all"]
"""How attention sees keys and values of tokens on other devices of the context axis."""


_MOST_DEVICES = 2**20
"""Most devices for which other numbers are suggested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """How the samples of one optimizer update are divided over devices and in time."""

    global_batch: int
    """Samples per optimizer update, all devices."""
    layout: Layout
    """The layout of the devices that share them."""
    microbatches: int = 1
    """Forward passes per update, their gradients accumulated."""

    def __post_init__(self) -> None:
        require_at_least("batch.global_batch", self.global_batch, 1)
        require_at_least("batch.microbatches", self.microbatches, 1)
        axes = self.layout.batch_axes
        divisor_name = axes if self.microbatches == 1 else f"{axes}*microbatches"
        divisor = self.layout.batch_shards * self.microbatches
        if self.global_batch % divisor:
            found = f"nearest: {nearest_multiples(self.global_batch, divisor)}"
            if self.microbatches == 1 and (others := self._fitting_devices()):
                found = f"{found}; or {' or '.join(map(str, others))} devices"
            accepted = f"it must be a multiple of {divisor_name}={divisor} ({found})"
            raise ConfigError(refusal("batch.global_batch", self.global_batch, accepted))

    def _fitting_devices(self) -> list[int]:
        """The nearest smaller and larger numbers of devices (up to twice as many) that divide the
        batch, with the same other axes; none beyond the size of any cluster, which would take
        long."""
        shards, devices = self.layout.batch_shards, self.layout.device_count
        if devices > _MOST_DEVICES:
            return []
        others = devices // shards
        fewer = next((n for n in range(shards - 1, 0, -1) if self.global_batch % n == 0), None)
        most = 2 * shards
        more = next((n for n in range(shards + 1, most + 1) if self.global_batch % n == 0), None)
        return [each * others for each in (fewer, more) if each is not None]

    @property
    def per_device_batch(self) -> int:
        """Samples per device per update; devices along other axes share the same samples."""
        return self.global_batch // self.layout.batch_shards

    @property
    def microbatch(self) -> int:
        """Samples per device per forward pass."""
        return self.per_device_batch // self.microbatches


def bn_group_count(split: BatchSplit, *, is_local: bool, group_size: int | None) -> int:
    """Number of groups into which the samples of one forward pass are divided for BatchNorm.

    Global statistics are one group; local ones are a group per device, or groups of `group_size`
    samples each (the n of Goyal et al. 2017, section 2.3, arXiv 1706.02677): several in a device
    (ghost batches; Hoffer et al. 2017, arXiv 1705.08741), or one of several devices.

    Raises:
        ConfigError: if `group_size` is given for global statistics, or neither divides the
            samples of one device nor is made of whole devices.
    """
    if not is_local:
        if group_size is not None:
            accepted = 'it needs layout.bn_scope="local"'
            raise ConfigError(refusal("layout.bn_group_size", group_size, accepted))
        return 1
    size = split.microbatch if group_size is None else group_size
    require_at_least("layout.bn_group_size", size, 1)
    samples = split.microbatch * split.layout.batch_shards
    if split.microbatch % size and (size % split.microbatch or samples % size):
        accepted = (
            f"it must divide the {split.microbatch} samples a device sees at a time, or be a "
            f"multiple of them that divides the {samples} of all devices"
        )
        raise ConfigError(refusal("layout.bn_group_size", size, accepted))
    return samples // size
