"""The published networks learn: a few examples by heart, in bfloat16, through the one step."""

from typing import Any

import jax
import numpy as np
import pytest

from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.training.evaluation import build_evaluation
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step, init_state

EXAMPLES = 8
UPDATES = 30
SMALL_BERT = {"layers": 2, "hidden": 32, "heads": 4}
NETWORKS = {
    "alexnet": ({"width": 1 / 16}, 67),
    "vgg16": ({"width": 1 / 16}, 32),
    "bert_base": (SMALL_BERT, None),
    "bert_large": (SMALL_BERT | {"remat": "selective"}, None),
    "vit": ({"patch": 4, "layers": 2, "hidden": 32, "heads": 4}, 16),
}
"""Options, and pixels of an image. Inception, Xception and EfficientNet, long to compile, train in
tests/training/test_conformance.py."""


def data_of(image_size: int | None) -> dict[str, Any]:
    """Eight examples to train on."""
    counts = {"train_examples": EXAMPLES, "test_examples": 2}
    if image_size is None:
        return {"name": "masked_tokens", "tokens": 16, "masked": 3, "vocabulary": 32, **counts}
    shape = {"image_size": image_size, "channels": 1, "classes": 4}
    return {"name": "synthetic_images", **shape, **counts}


@pytest.mark.slow_except("alexnet")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("alexnet", "bert_base") else [pytest.mark.slow])
        for name in NETWORKS
    ],
)
def test_a_published_network_learns_a_few_examples_by_heart(name):
    """The loss falls to less than half, and evaluation runs."""
    options, image_size = NETWORKS[name]
    tables = {
        "model": {"name": name, "compute_dtype": "bfloat16", **options},
        "data": data_of(image_size),
        "batch": {"global_batch": EXAMPLES},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 3e-3},
        "train": {"epochs": UPDATES},
    }
    run = resolve(build(RunConfig, tables), 1)
    mesh = build_mesh(run.layout, jax.local_devices())
    step, state = build_step(run, mesh), init_state(run, mesh)
    batch = open_source(run.config.data, "train", seed=0).take(np.arange(EXAMPLES))

    losses = []
    for _ in range(UPDATES):
        state, metrics = step.function(state, batch)
        losses.append(float(metrics["loss"]))

    assert losses[-1] < losses[0] / 2
    evaluation = build_evaluation(run, mesh)
    sums = evaluation.function(
        state.params, state.model_state, {**batch, "mask": np.ones(EXAMPLES, np.float32)}
    )
    assert float(sums["count"]) == EXAMPLES
    assert np.isfinite(float(sums["loss_sum"]))
