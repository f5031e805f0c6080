"""muP and CompleteP: nothing changes in the base, and beyond it what the papers' tables say."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.config.model import GptConfig, LlamaConfig, MlaConfig, ParametrizationConfig
from scalejax.config.optimizer import AdamWConfig, LionConfig, OptimizerConfig, SgdConfig
from scalejax.config.run import RunConfig, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.models import BatchNormScope
from scalejax.training.optimizers import build_optimizer
from scalejax.training.optimizers.matrices import HiddenMatrices
from scalejax.training.optimizers.parametrization import Parametrization
from scalejax.training.setup import network_with, train_setup
from scalejax.training.state import initial_network

SMALL: Any = {"layers": 2, "hidden": 16, "heads": 2}
COMPLETEP = ParametrizationConfig(name="completep", base_hidden=16, base_layers=2)


def run_of(model: Any, **tables: Any) -> Any:
    """A run of the model on a tiny vocabulary."""
    config = {
        "model": {"name": "gpt", **SMALL},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32, "train_examples": 64},
        "batch": {"global_batch": 4},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        **tables,
    }
    return resolve(replace(build(RunConfig, config, where="run"), model=model), 1)


def weights_of(model: Any) -> Any:
    """The initial parameters of the model, by the seed."""
    return jax.jit(lambda: initial_network(train_setup(run_of(model)))[0])()


@pytest.mark.parametrize("kind", [GptConfig, LlamaConfig], ids=lambda kind: kind.__name__)
def test_in_the_base_nothing_changes(kind):
    """Weights, logits and updates have the same bits; of a network four times as wide they do not,
    by which the comparison is known to see."""
    usual = kind(**SMALL)
    params = weights_of(usual)
    tokens = jnp.arange(8)[None]
    for model, is_base in (
        (replace(usual, parametrization=COMPLETEP), True),
        (replace(usual, parametrization=replace(COMPLETEP, base_hidden=4)), False),
    ):
        found = weights_of(model)
        same = jax.tree.map(lambda a, b: bool((a == b).all()), found, params)
        assert all(jax.tree.leaves(same)) is is_base

        setups = [train_setup(run_of(each)) for each in (usual, model)]
        logits, steps = [], []
        for setup in setups:
            network: Any = network_with(setup, BatchNormScope(), params, {})
            logits.append(network(tokens, is_training=False))
            optimizer = setup.optimizer
            steps.append(optimizer.update(params, optimizer.init(params), params)[0])
        assert bool((logits[0] == logits[1]).all()) is is_base
        same = jax.tree.map(lambda a, b: bool((a == b).all()), *steps)
        assert all(jax.tree.leaves(same)) is is_base


def test_initial_weights_of_a_wide_and_deep_network():
    """Of four times the width, hidden matrices have half the standard deviation; of four times the
    depth those that add to the residual are as in the base, where they are over root 2 x 2 layers.
    Within 3 % of 0.02 / 2 and 0.02 / 4, as 16,000 entries and more have it."""
    model = GptConfig(layers=8, hidden=64, heads=8, parametrization=COMPLETEP)

    found = weights_of(model)

    for path, expected in (
        (("blocks", "feed_forward", "up"), 0.02 / 2),
        (("blocks", "attention", "qkv"), 0.02 / 2),
        (("blocks", "feed_forward", "down"), 0.02 / 2 / 2),
        (("blocks", "attention", "projection"), 0.02 / 2 / 2),
    ):
        leaf = found
        for part in path:
            leaf = leaf[part]
        assert float(jnp.std(leaf["kernel"])) == pytest.approx(expected, rel=0.03)
    assert float(jnp.std(found["tokens"]["embedding"])) == pytest.approx(0.02, rel=0.05)


def test_multipliers_of_a_wide_and_deep_network():
    """Logits are over 4, what blocks add over 4, and queries of heads of 8 in place of 2 over 2:
    1/d in place of 1 / root d. Held against the plain network with weights scaled so, to the
    rounding of float32."""
    wanted = replace(COMPLETEP, base_head_size=2)
    model = GptConfig(layers=8, hidden=64, heads=8, tied_embeddings=False)
    params = weights_of(model)
    # A scale of 20 on queries and keys, so that attention is not uniform.
    params["blocks"]["attention"]["qkv"]["kernel"] *= 20
    scaled = jax.tree.map(jnp.copy, params)
    attention, feed_forward = scaled["blocks"]["attention"], scaled["blocks"]["feed_forward"]
    attention["qkv"]["kernel"] = attention["qkv"]["kernel"].at[:, :, 0].multiply(0.5)
    for layer in (attention["projection"], feed_forward["down"]):
        layer["kernel"] /= 4
        layer["bias"] /= 4
    scaled["output"]["embedding"] /= 4
    tokens = jnp.arange(8)[None]

    def logits(model: GptConfig, params: Any) -> jax.Array:
        setup = train_setup(run_of(model))
        network: Any = network_with(setup, BatchNormScope(), params, {})
        return network(tokens, is_training=False)

    found = logits(replace(model, parametrization=wanted), params)

    np.testing.assert_allclose(found, logits(model, scaled), rtol=1e-4, atol=1e-5)
    far = np.abs(np.asarray(found) - np.asarray(logits(model, params))).max()
    assert far > 0.1 * np.abs(found).max()


@pytest.mark.parametrize("config", [AdamWConfig(epsilon=0.1), LionConfig()], ids=lambda c: c.name)
def test_rates_epsilon_and_decay_are_those_of_the_table(config: OptimizerConfig):
    """Dey et al. 2025, table 1, in NumPy: of width 4 and depth 2 hidden matrices have the rate / 4
    and decay x 4; epsilon is over 8 in blocks, and over 4 outside. An epsilon of a tenth, so that
    it shows; to the rounding of float32."""
    rng = np.random.default_rng(0)
    shapes = {"blocks": (2, 3, 5), "tokens": (3, 5)}
    kernel, embedding, bias = rng.normal(size=(2, 3, 5)), rng.normal(size=(3, 5)), np.ones((2, 5))
    params: Any = {
        "blocks": {"up": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}},
        "tokens": {"embedding": jnp.asarray(embedding)},
    }
    assert {name: shapes[name] for name in params} == shapes
    gradients = [jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), params) for _ in range(3)]
    optimizer = build_optimizer(
        replace(config, weight_decay=0.1),  # type: ignore[call-arg]  both have it
        lambda _: jnp.asarray(0.5),
        hidden=HiddenMatrices(("blocks",)),
        parametrization=Parametrization(width=4.0, depth=2.0),
    )
    state, updates = optimizer.init(params), params
    for gradient in gradients:
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, params)

    def expected(of: Any, param: np.ndarray, epsilon: float, rate: float, decay: float) -> Any:
        m, v, step = 0.0, 0.0, np.zeros(())
        for t, gradient in enumerate(gradients, start=1):
            g = np.asarray(of(gradient))
            if isinstance(config, LionConfig):
                step = np.sign(config.beta1 * m + (1 - config.beta1) * g)
                m = config.beta2 * m + (1 - config.beta2) * g
                continue
            assert isinstance(config, AdamWConfig)
            m = config.beta1 * m + (1 - config.beta1) * g
            v = config.beta2 * v + (1 - config.beta2) * g * g
            corrected = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
            step = corrected[0] / (np.sqrt(corrected[1]) + epsilon)
        return -0.5 * rate * (step + decay * param)

    for of, param, epsilon, rate, decay in (
        (lambda tree: tree["blocks"]["up"]["kernel"], kernel, 0.1 / 8, 0.25, 0.4),
        (lambda tree: tree["blocks"]["up"]["bias"], bias, 0.1 / 8, 1.0, 0.0),
        (lambda tree: tree["tokens"]["embedding"], embedding, 0.1 / 4, 1.0, 0.1),
    ):
        np.testing.assert_allclose(
            of(updates), expected(of, param, epsilon, rate, decay), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"optimizer": {"name": "muon"}}, "its rates are those of adamw and lion, not of"),
        ({"fine_tuning": {"lora": {"rank": 2}}}, "it gives no rates of adapters"),
    ],
    ids=["muon", "adapters"],
)
def test_what_has_no_rules_is_refused_with_the_run(tables, said):
    """Where the papers say nothing of an optimizer, or of adapters."""
    with pytest.raises(ConfigError, match=said):
        run_of(GptConfig(**SMALL, parametrization=COMPLETEP), **tables)


def test_networks_without_rules_are_refused():
    """Named with what they have, and the base with what it needs."""
    mla = MlaConfig(kv_lora_rank=8, nope_head_size=8, rope_head_size=4, value_head_size=8)
    with pytest.raises(ConfigError, match=r"leave it or model\.mla out"):
        LlamaConfig(**SMALL, mla=mla, parametrization=COMPLETEP)
    with pytest.raises(ConfigError, match='"completep" needs the layers of the base'):
        ParametrizationConfig(name="completep", base_hidden=16)
    with pytest.raises(ConfigError, match='"mup" keeps the depth'):
        ParametrizationConfig(name="mup", base_hidden=16, base_layers=2)
    assert SgdConfig.normalises_entries is False
