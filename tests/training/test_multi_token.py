"""Multi-token prediction is trained beside the loss that a record shows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.models import BatchNormScope
from scalejax.models.decoder import CausalNetwork
from scalejax.training.gradients import mean_loss
from scalejax.training.logger import train_measurement
from scalejax.training.setup import network_with, train_setup
from scalejax.training.state import initial_network

TABLES: dict[str, Any] = {
    "model": {
        "name": "llama", "layers": 1, "hidden": 16, "heads": 2, "ffn_hidden": 24,
        "mtp": {"loss_weight": 0.5},
    },
    "data": {"name": "synthetic_tokens", "tokens": 6, "vocabulary": 8},
    "batch": {"global_batch": 4},
    "optimizer": {"name": "sgd"},
    "schedule": {"base_learning_rate": 0.1},
    "loss": {"label_smoothing": 0.2},
    "layout": {"data": 1},
}  # fmt: skip
RUN = resolve(build(RunConfig, TABLES))


def test_the_loss_of_a_record_is_that_of_the_next_token():
    """As the test loss is; that of the token after it stands beside it, of rows that count, and
    both have label smoothing."""
    setup = train_setup(RUN)
    params, model_state = jax.jit(lambda: initial_network(setup))()
    params = jax.tree.map(lambda leaf: leaf * 4, params)
    tokens = np.random.default_rng(0).integers(0, 8, (4, 7), dtype=np.int32)
    weights = np.array([2, 2, 0, 0], np.float32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}

    @jax.jit
    def computed(params, batch):
        made = mean_loss(setup, BatchNormScope(), params, model_state, batch, jnp.float32(8))
        network = network_with(setup, BatchNormScope(), params, model_state)
        assert isinstance(network, CausalNetwork)
        return made, network.logits_of_two(batch["inputs"], batch["targets"])

    (loss, (metrics, _)), both = computed(params, batch)

    smooth = optax.smooth_labels(jax.nn.one_hot(batch["targets"], 8), 0.2)
    after = both[0][:2], both[1][:2, :-1]
    wanted = smooth[:2], smooth[:2, 1:]
    first, second = (
        float(optax.softmax_cross_entropy(logits, targets).mean())
        for logits, targets in zip(after, wanted, strict=True)
    )
    assert float(metrics["loss"]) == pytest.approx(8 * first, rel=1e-5)
    assert float(metrics["mtp_loss"]) == pytest.approx(second, rel=1e-5)
    assert float(loss) == pytest.approx(8 * (first + 0.5 * second), rel=1e-5)
    assert abs(first - second) > 0.01

    line = train_measurement(
        RUN,
        {**metrics, "learning_rate": 0.1},
        step=1,
        step_seconds=1.0,
        data_wait_seconds=None,
        elapsed_seconds=1.0,
    )
    assert line.mtp_loss == pytest.approx(second, rel=1e-5)
