"""Updates: published vectors by hand, equality with Optax, masks, and layers one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.typing import ArrayLike

from scalejax.optimizers import build_optimizer
from scalejax.training_config import (
    AdamWConfig,
    LambConfig,
    LarsConfig,
    OptimizerConfig,
    SgdConfig,
)

RNG = np.random.default_rng(0)


def draw(*shape: int) -> jax.Array:
    """Normal numbers."""
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def tree() -> Any:
    """Parameters, or gradients, of a network with two unstacked layers."""
    return {
        "dense": {"kernel": draw(4, 3), "bias": draw(3)},
        "norm": {"scale": draw(3), "bias": draw(3)},
        "tokens": {"embedding": draw(5, 4)},
    }


PARAMS = tree()
GRADIENTS = [tree() for _ in range(4)]


def rate(step: ArrayLike) -> jax.Array:
    """A rate that changes: 0.1, 0.2, 0.3, ..."""
    return 0.1 * (jnp.asarray(step) + 1.0)


def trained(
    optimizer: optax.GradientTransformation, params: Any = PARAMS, gradients: Any = GRADIENTS
) -> Any:
    """Parameters after one update per gradient."""

    @jax.jit
    def update(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for gradient in gradients:
        params, state = update(params, state, gradient)
    return params


def assert_equal(found: Any, expected: Any) -> None:
    """Equal but for the rounding of float32 in another order."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), found, expected
    )


def positions(config: OptimizerConfig, rates: list[float]) -> list[float]:
    """Where a bias at 0 goes under gradients of 1; a bias, for it has no trust ratio."""
    optimizer = build_optimizer(config, lambda step: jnp.asarray(rates)[step], stacked=())
    params: Any = {"bias": jnp.zeros(())}
    found = []
    state = optimizer.init(params)
    for _ in rates:
        updates, state = optimizer.update({"bias": jnp.ones(())}, state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(params["bias"]))
    return found


def test_sgd_needs_no_momentum_correction():
    """Goyal et al. 2017, equation 9: g = 1, m = 0.9, rates .1, 1, 1 lead to -.1, -2, -4.71.

    By hand: the buffer is 1, 1.9, 2.71; steps are .1 x 1, 1 x 1.9, 1 x 2.71.
    """
    assert positions(SgdConfig(momentum=0.9), [0.1, 1.0, 1.0]) == pytest.approx([-0.1, -2.0, -4.71])


def test_lars_keeps_the_rate_inside_its_buffer():
    """Equation 10 without its correction, as published for LARS: -.1, -1.19, -3.171.

    By hand: the buffer is .1, .9 x .1 + 1 = 1.09, .9 x 1.09 + 1 = 1.981.
    """
    assert positions(LarsConfig(momentum=0.9), [0.1, 1.0, 1.0]) == pytest.approx(
        [-0.1, -1.19, -3.171]
    )


def test_sgd_by_hand():
    """Decay joins the gradient before the buffer: 1 - .1 (2 + .5 x 1) = .75, then .27."""
    optimizer = build_optimizer(
        SgdConfig(momentum=0.9, weight_decay=0.5), lambda _: jnp.asarray(0.1), stacked=()
    )

    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    gradient = jax.tree.map(lambda p: 2 * p, params)
    first = trained(optimizer, params, [gradient])
    second = trained(optimizer, params, [gradient, gradient])

    np.testing.assert_allclose(first["kernel"], 0.75)
    # the buffer: .9 x 2.5 + (2 + .5 x .75) = 4.625
    np.testing.assert_allclose(second["kernel"], 0.75 - 0.4625, rtol=1e-6)
    np.testing.assert_allclose(first["bias"], 0.8)  # no decay


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (SgdConfig(momentum=0.0), optax.sgd(rate)),
        (SgdConfig(momentum=0.9), optax.sgd(rate, 0.9)),
        (SgdConfig(momentum=0.9, nesterov=True), optax.sgd(rate, 0.9, nesterov=True)),
        (
            AdamWConfig(weight_decay=0.1, decays_norm_and_bias=True),
            optax.adamw(rate, weight_decay=0.1),
        ),
        (
            LarsConfig(weight_decay=0.1, decays_norm_and_bias=True),
            optax.lars(rate, weight_decay=0.1),
        ),
        (
            LarsConfig(weight_decay=0.1, nesterov=True, decays_norm_and_bias=True),
            optax.lars(rate, weight_decay=0.1, nesterov=True),
        ),
        (
            LambConfig(weight_decay=0.1, decays_norm_and_bias=True),
            optax.lamb(rate, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "momentum", "nesterov", "adamw", "lars", "lars nesterov", "lamb"],
)
def test_without_masks_equals_optax(config, reference):
    """Four updates at a changing rate end where Optax's own optimizer ends."""
    assert_equal(trained(build_optimizer(config, rate, stacked=())), trained(reference))


def test_masked_lars_equals_masked_lars_of_optax():
    """By default biases and normalisation have neither decay nor trust ratio."""
    mask = {
        "dense": {"kernel": True, "bias": False},
        "norm": {"scale": False, "bias": False},
        "tokens": {"embedding": True},
    }
    reference = optax.lars(rate, weight_decay=0.1, weight_decay_mask=mask, trust_ratio_mask=mask)

    found = trained(build_optimizer(LarsConfig(weight_decay=0.1), rate, stacked=()))

    assert_equal(found, trained(reference))


def test_masked_lamb_is_adam_for_biases_and_lamb_for_weights():
    """Each parameter equals what the one or the other of Optax's makes of it."""
    found = trained(build_optimizer(LambConfig(weight_decay=0.1), rate, stacked=()))
    adam = trained(optax.adam(rate, eps=1e-6))
    lamb = trained(optax.lamb(rate, weight_decay=0.1))

    assert_equal(found["norm"], adam["norm"])
    assert_equal(found["dense"]["bias"], adam["dense"]["bias"])
    assert_equal(found["dense"]["kernel"], lamb["dense"]["kernel"])
    assert_equal(found["tokens"], lamb["tokens"])


@pytest.mark.parametrize(
    "kind", [SgdConfig, AdamWConfig, LarsConfig, LambConfig], ids=lambda kind: kind.__name__
)
def test_decay_holds_for_kernels_and_embeddings_only(kind):
    """Without a gradient, weights shrink and the rest stays; unless the config says otherwise."""
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)

    def changed(decays_norm_and_bias: bool) -> Any:
        config = kind(weight_decay=0.1, decays_norm_and_bias=decays_norm_and_bias)
        after = trained(build_optimizer(config, rate, stacked=()), gradients=[zeros])
        return jax.tree.map(lambda a, b: bool((a != b).any()), after, PARAMS)

    assert changed(False) == {
        "dense": {"kernel": True, "bias": False},
        "norm": {"scale": False, "bias": False},
        "tokens": {"embedding": True},
    }
    assert all(jax.tree.leaves(changed(True)))


@pytest.mark.parametrize("config", [LarsConfig(weight_decay=0.1), LambConfig(weight_decay=0.1)])
@settings(deadline=None, max_examples=25)  # each example compiles; the first may wait
@given(scales=st.lists(st.floats(0.01, 100), min_size=3, max_size=3))
def test_each_layer_of_a_stack_has_its_own_trust_ratio(config, scales):
    """A stack of layers is trained as its layers are one by one, however their norms differ."""
    factors = jnp.asarray(scales, jnp.float32).reshape(3, 1, 1)
    layers = {"kernel": PARAMS["tokens"]["embedding"][:3].reshape(3, 2, 2) * factors}
    gradient = {"kernel": GRADIENTS[0]["tokens"]["embedding"][:3].reshape(3, 2, 2)}

    def one_update(params: Any, gradient: Any) -> Any:
        optimizer = build_optimizer(config, rate, stacked=("blocks",))
        return optimizer.update(gradient, optimizer.init(params), params)[0]

    stacked = one_update({"blocks": layers}, {"blocks": gradient})["blocks"]["kernel"]

    for index in range(3):
        alone = one_update(*jax.tree.map(lambda leaf, i=index: leaf[i], (layers, gradient)))
        np.testing.assert_allclose(stacked[index], alone["kernel"], rtol=1e-5)
