"""vit: its patches, published form, FLOP, recompute, and what it refuses."""

import dataclasses
from functools import cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.config.data import SyntheticImagesConfig
from scalejax.config.model import VitConfig
from scalejax.config.presets import published_model
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build as build_config
from scalejax.data.facts import read_facts
from scalejax.models import BatchNormScope, build_network
from scalejax.models.vit import Vit
from scalejax.xla.model_flop import forward_flop

DATASET = read_facts(SyntheticImagesConfig(image_size=12, channels=3, classes=5))
SMALL = VitConfig(patch=4, layers=2, hidden=32, heads=4)
IMAGES = jax.random.normal(jax.random.key(3), (2, 12, 12, 3))


@cache
def build(remat: Literal["none", "selective", "selective_op", "full"] = "none") -> Vit:
    """A small network whose head is not zero."""

    @nnx.jit  # op by op it would take seconds
    def built():
        config = dataclasses.replace(SMALL, remat=remat)
        network = build_network(config, DATASET, bn=BatchNormScope(), rngs=nnx.Rngs(0))
        assert isinstance(network, Vit)
        network.head.kernel.set_value(jax.random.normal(jax.random.key(5), (32, 5)))
        return network

    return built()


def params_of(network: Vit) -> dict:
    """Parameters by path, in NumPy."""
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(network, nnx.Param)))


def layer_norm(x: np.ndarray, norm: dict) -> np.ndarray:
    """Mean zero, deviation one, scaled and moved."""
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return centred / deviation * norm["scale"] + norm["bias"]


def reference(params: dict, image: np.ndarray) -> np.ndarray:
    """The logits of one image, patch by patch and head by head, in NumPy."""
    patches = [
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].ravel()
        for row in range(3)
        for column in range(3)
    ]
    embedded = np.stack(patches) @ params["patches"]["kernel"] + params["patches"]["bias"]
    x = np.concatenate([params["class_token"]["embedding"], embedded])
    x = x + params["places"]["embedding"]
    for index in range(2):
        block = jax.tree.map(lambda leaf, i=index: leaf[i], params["blocks"])
        normal, qkv = layer_norm(x, block["attention_norm"]), block["attention"]["qkv"]
        mixed = []
        for head in range(4):
            q, k, v = (normal @ qkv["kernel"][:, n, head] + qkv["bias"][n, head] for n in range(3))
            scores = np.exp(q @ k.T / np.sqrt(8))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ v)
        projection = block["attention"]["projection"]
        x = x + np.concatenate(mixed, axis=1) @ projection["kernel"] + projection["bias"]
        up, down = (block["feed_forward"][name] for name in ("up", "down"))
        inner = layer_norm(x, block["feed_forward_norm"]) @ up["kernel"] + up["bias"]
        inner = inner * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + inner @ down["kernel"] + down["bias"]
    return layer_norm(x[0], params["norm"]) @ params["head"]["kernel"] + params["head"]["bias"]


def test_logits_are_those_of_a_plain_reference():
    """Patches row by row, the class token first, and seen from everywhere."""
    network = build()
    found = nnx.jit(lambda n, x: n(x, is_training=True))(network, IMAGES)

    expected = [reference(params_of(network), np.asarray(image)) for image in IMAGES]
    # float32 and another order of sums
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_recompute_changes_no_gradient():
    """Selective, by operation or full."""
    gradients = []
    for remat in ("none", "selective", "selective_op", "full"):
        structure, params = nnx.split(build(remat), nnx.Param)

        def loss(params: nnx.State, structure: nnx.GraphDef = structure) -> jax.Array:
            logits = nnx.merge(structure, params)(IMAGES, is_training=True)
            return jnp.square(logits).mean()

        gradients.append(jax.jit(jax.grad(loss))(params))

    for others in gradients[1:]:
        # the same sums in another order of fusions
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), gradients[0], others
        )


def test_flop_of_vit_b_16_are_those_published():
    """17.6 GMAC of an image of 224 x 224: per place and block 12 h^2 and 2 s h, 197 places."""
    dataset = read_facts(SyntheticImagesConfig())
    model = published_model("vit-b/16")
    graph, state = nnx.split(
        nnx.eval_shape(lambda: build_network(model, dataset, bn=BatchNormScope(), rngs=nnx.Rngs(0)))
    )
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)

    flop = forward_flop(lambda s, x: nnx.merge(graph, s)(x, is_training=True), state, image)

    blocks = 12 * 197 * (12 * 768**2 + 2 * 197 * 768)
    assert flop == 2 * (blocks + 196 * 768 * 768 + 768 * 1000)
    # torchvision: 17.56 GFLOP, by which it means products with their sums
    assert flop / 2 == pytest.approx(17.56e9, rel=0.005)


def test_an_image_must_be_cut_evenly():
    """With the nearest sizes that are."""
    tables = {
        "model": {"name": "vit", "patch": 16},
        "data": {"name": "synthetic_images", "image_size": 100},
        "batch": {"global_batch": 8},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
    }
    with pytest.raises(ConfigError, match=r"image_size=100 .*model.patch=16 \(nearest: 96 or 112"):
        build_config(RunConfig, tables)
    text = {**tables, "data": {"name": "synthetic_tokens"}}
    with pytest.raises(ConfigError, match=r"model\.name='vit' .*reads images"):
        build_config(RunConfig, text)
