"""The step of S. Owen's Caltech-256 example: a pretrained Xception, whose last layer learns.

Every other layer only computes forward, with its running statistics. One function for each
number of images per device, for `scalejax.profile_function` to import.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from scalejax.config.data import SyntheticImagesConfig
from scalejax.config.model import ImageNetworkConfig
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, build_network

CALTECH = read_facts(SyntheticImagesConfig(image_size=299, classes=257))
"""Caltech-256 has 257 classes, clutter being one."""


def build_2(mesh):
    """The step with 2 images per device."""
    return _build(mesh, 2)


def build_16(mesh):
    """The step with 16 images per device."""
    return _build(mesh, 16)


def build_32(mesh):
    """The step with 32 images per device."""
    return _build(mesh, 32)


def _build(mesh, per_device_batch):
    """The jitted step and the shapes of its arguments, the batch split over `mesh`."""

    def network():
        config = ImageNetworkConfig(name="xception")
        return build_network(config, CALTECH, bn=BatchNormScope(), rngs=nnx.Rngs(0))

    structure, params, statistics = nnx.split(nnx.eval_shape(network), nnx.Param, nnx.BatchStat)
    params, statistics = nnx.to_pure_dict(params), nnx.to_pure_dict(statistics)
    head = params.pop("head")
    optimizer = optax.nadam(1e-3)

    def loss(head, frozen, statistics, images, classes):
        merged = nnx.merge(structure, nnx.State({**frozen, "head": head}), nnx.State(statistics))
        logits = merged(images.astype(jnp.float32) / 127.5 - 1, is_training=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()

    def step(head, momenta, *rest):
        gradient = jax.grad(loss)(head, *rest)
        updates, momenta = optimizer.update(gradient, momenta, head)
        return optax.apply_updates(head, updates), momenta

    def placed(tree, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    rows = per_device_batch * mesh.size
    images = jax.ShapeDtypeStruct((rows, *CALTECH.input_shape), jnp.uint8)
    classes = jax.ShapeDtypeStruct((rows,), jnp.int32)
    whole = [placed(tree) for tree in (head, jax.eval_shape(optimizer.init, head))]
    rest = [placed(params), placed(statistics), placed(images, "data"), placed(classes, "data")]
    return jax.jit(step, donate_argnums=(0, 1)), (*whole, *rest)
