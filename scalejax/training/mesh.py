"""A `Layout` as a JAX mesh over real or described devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from scalejax.config.parallelism import AXES, BATCH_AXES, Layout
from scalejax.core.errors import ConfigError, DoesNotFit, refusal


def build_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the shape of `layout`; neighbours in `devices` are neighbours on its last axis.

    Example:
        >>> from scalejax import Layout, build_mesh
        >>> build_mesh(Layout(data=1)).axis_names
        ('pipeline', 'data', 'fsdp', 'expert', 'context', 'tensor')

    Axes are of type Auto: the compiler propagates shardings from the step's inputs.

    Args:
        layout: devices along each axis.
        devices: in the order of the cluster; if None, those of all processes of this run.

    Raises:
        DoesNotFit: if there are fewer devices than the layout takes.
        ConfigError: if several processes run and the layout leaves some of their devices out.
    """
    available = jax.devices() if devices is None else devices
    if layout.device_count > len(available):
        raise DoesNotFit(
            f"the layout {layout} takes {layout.device_count} devices, but this machine has "
            f"{len(available)} ({available[0].platform}). Use a smaller layout, or on a CPU give "
            f"--cpu-devices {layout.device_count}."
        )
    if devices is None and jax.process_count() > 1 and layout.device_count < len(available):
        accepted = (
            f"the layout {layout} leaves some of the {len(available)} devices of "
            f"{jax.process_count()} processes without work; use all, or fewer processes"
        )
        raise ConfigError(refusal("layout", str(layout), accepted))
    sizes = tuple(layout.axis_sizes.values())
    grid = np.asarray(available[: math.prod(sizes)], dtype=object).reshape(sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding in which every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of the first dimension over the axes that divide the batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))
