"""What a global batch of a run consists of: shapes, types and shardings."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from scalejax.config import ResolvedRun
from scalejax.data_config import DatasetFacts
from scalejax.gradients import Batch
from scalejax.mesh import batch_sharding
from scalejax.recipe import feature_width, reads_features, recipe_of


def batch_shapes(run: ResolvedRun, mesh: Mesh) -> Batch:
    """Shapes of one global batch of `run`: uint8 images or float32 numbers and int32 classes, or
    int32 tokens; float32 weights of the rows, where not all of them count; float32 "mix" of pairs
    of rows, if they are mixed."""
    return batch_shapes_on(run, batch_sharding(mesh))


def batch_shapes_on(run: ResolvedRun, sharding: NamedSharding | None) -> Batch:
    """Likewise, on whatever `sharding` names; on nothing if it is None."""
    dataset = run.dataset
    parts: dict[str, tuple[tuple[int, ...], Any]]
    parts = {"inputs": (dataset.input_shape, input_dtype(dataset))}
    if reads_features(run.config):
        parts = {"inputs": ((feature_width(recipe_of(run)),), jnp.float32)}
    for name in ("targets", "places") if dataset.is_masked else ("targets",):
        parts[name] = (dataset.target_shape, jnp.int32)
    if run.is_weighted:
        parts["weights"] = ((), jnp.float32)
    if run.is_mixed:
        parts["mix"] = ((), jnp.float32)
    return {
        name: jax.ShapeDtypeStruct((run.split.global_batch, *shape), dtype, sharding=sharding)
        for name, (shape, dtype) in parts.items()
    }


def input_dtype(dataset: DatasetFacts) -> Any:
    """Of the examples of a data set, before any network."""
    image_dtype = jnp.float32 if dataset.is_table else jnp.uint8
    return jnp.int32 if dataset.is_text else image_dtype
