"""How many rows of a batch count on a device, and its weight in a mean over all devices.

A device's gradient is the mean over its own rows that count. Padding and unreadable rows can leave
a device fewer of them than others, or none; where a method is a mean, devices are weighted by
their rows, so that it is the mean over all rows that count. Knows weights of rows; nothing of what
is averaged.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scalejax.config.parallelism import DATA

PyTree = Any
"""Nested dicts and dataclasses of arrays, in the sense of JAX."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows that count on this device and on all, inside `shard_map`."""

    own: jax.Array | None
    """Rows of this device that count, float32; None if all rows of all devices do."""
    mean: jax.Array | int
    """Mean over the devices of the rows that count; above 0 even if none does."""

    def weighted(self, tree: PyTree) -> PyTree:
        """`tree`, a mean over this device's rows, times the device's weight, which averages 1 over
        the devices and is 0 without a row that counts. The mean of the result over the devices is
        the mean over all rows that count."""
        if self.own is None:
            return tree
        weight = self.own / self.mean
        return jax.tree.map(lambda leaf: leaf * weight, tree)


def device_rows(batch: dict[str, jax.Array]) -> DeviceRows:
    """The rows that count in a device's part of a global batch; all if it has no "weights"."""
    if "weights" not in batch:
        return DeviceRows(own=None, mean=len(batch["targets"]))
    own = batch["weights"].sum()
    total = jnp.maximum(lax.psum(own, DATA), 1)
    return DeviceRows(own=own, mean=total / lax.axis_size(DATA))
