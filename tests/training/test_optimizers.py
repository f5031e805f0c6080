"""Updates: published vectors by hand, equality with Optax, masks, and layers one by one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.typing import ArrayLike
from optimizer_distances import distance_after, noted

from scalejax.config.optimizer import (
    AdagradConfig,
    AdamWConfig,
    ClippingConfig,
    LambConfig,
    LarsConfig,
    OptimizerConfig,
    ScheduleFreeConfig,
    SgdConfig,
)
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.training.optimizers import build_optimizer, evaluated_params
from scalejax.training.optimizers.matrices import HiddenMatrices
from scalejax.training.optimizers.transformations import with_clipping

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
    optimizer = build_optimizer(
        config, lambda step: jnp.asarray(rates)[step], hidden=HiddenMatrices(())
    )
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


@pytest.mark.parametrize("kind", [SgdConfig, LarsConfig], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("rate_outside", [-0.1, -2.0, -4.71]),
        ("rate_inside", [-0.1, -1.19, -3.171]),
        ("rate_inside_corrected", [-0.1, -2.0, -4.71]),
    ],
)
def test_momentum_correction_vectors(kind, form, expected):
    """Goyal et al. 2017, remark 2: with its correction equation 10 gives what equation 9 gives.

    By hand, corrected: the buffer is .1, then .9 x 10 x .1 + 1 = 1.9, then .9 x 1.9 + 1 = 2.71.
    """
    config = kind(momentum=0.9, momentum_form=form)

    assert positions(config, [0.1, 1.0, 1.0]) == pytest.approx(expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_corrected_momentum_is_that_of_equation_9_at_any_rates(nesterov):
    """Up and down, with Nesterov's step or without."""
    rates = [0.1, 0.7, 0.7, 0.2, 1.3, 0.05]
    outside, corrected = (
        positions(SgdConfig(nesterov=nesterov, momentum_form=form), rates)
        for form in ("rate_outside", "rate_inside_corrected")
    )

    assert corrected == pytest.approx(outside, rel=1e-5)


def test_corrected_momentum_survives_a_rate_of_zero():
    """The first step of a warmup from zero leaves an empty buffer, and no NaN."""
    assert positions(SgdConfig(momentum_form="rate_inside_corrected"), [0.0, 0.5, 0.5]) == (
        pytest.approx([0.0, -0.5, -1.45])
    )


def in_numpy(kind: str, update: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
    """Where the parameters go that end in `kind` when `update` makes steps of them, by path.

    `update(w, g, state, t, rate)` with a `state` of its own for each parameter and t from 1.
    """
    found = {}
    for layer, leaves in PARAMS.items():
        for name in leaves:
            if name != kind:
                continue
            w, state = np.asarray(PARAMS[layer][name], np.float64), {}
            for index, gradient in enumerate(GRADIENTS):
                g = np.asarray(gradient[layer][name], np.float64)
                w = w - update(w, g, state, index + 1, 0.1 * (index + 1))
            found[f"{layer}/{name}"] = w
    return found


def assert_follows(
    config: OptimizerConfig, kind: str, update: Callable[..., np.ndarray], atol: float = 1e-6
) -> None:
    """The parameters that end in `kind` go where the algorithm in NumPy leads them."""
    after = trained(build_optimizer(config, rate, hidden=HiddenMatrices(())))
    for path, expected in in_numpy(kind, update).items():
        layer, name = path.split("/")
        np.testing.assert_allclose(after[layer][name], expected, rtol=1e-5, atol=atol)
        far = [{path: each} for each in (after[layer][name], expected, PARAMS[layer][name])]
        noted(config, "NumPy", distance_after(*far))


def adam(g: np.ndarray, state: dict[str, Any], t: int, epsilon: float) -> np.ndarray:
    """Adam's direction, with its corrections (Kingma & Ba 2015, algorithm 1)."""
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    return state["m"] / (1 - 0.9**t) / (np.sqrt(state["v"] / (1 - 0.999**t)) + epsilon)


@pytest.mark.parametrize(("field", "name"), [("mu_dtype", "mu"), ("nu_dtype", "nu")])
def test_a_moment_in_bfloat16_is_rounded_where_it_is_kept(field, name):
    """The update reads it before it is rounded: the first one is the same, bit by bit."""
    config, updates, moments = replace(AdamWConfig(), **{field: "bfloat16"}), [], []
    for each in (AdamWConfig(), config):
        optimizer = build_optimizer(each, rate, hidden=HiddenMatrices(()))
        update, state = optimizer.update(GRADIENTS[0], optimizer.init(PARAMS), PARAMS)
        updates.append(update)
        moments.append(optax.tree.get(state, name))

    jax.tree.map(np.testing.assert_array_equal, *updates)
    kept, rounded = moments[1], jax.tree.map(lambda leaf: leaf.astype("bfloat16"), moments[0])
    jax.tree.map(np.testing.assert_array_equal, kept, rounded)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype("bfloat16")}


def test_momentum_of_the_paper():
    """Goyal et al. 2017, equation 9, with decay in the gradient."""

    def update(w, g, state, t, rate):
        state["u"] = 0.9 * state.get("u", 0) + g + 0.1 * w
        return rate * state["u"]

    assert_follows(SgdConfig(momentum=0.9, weight_decay=0.1), "kernel", update)


def test_adamw_of_the_paper():
    """Loshchilov & Hutter 2019, algorithm 2: decay beside Adam's step, at the same rate. In float32
    1 - 0.999 is 1.3e-5 off, of which the root has half, over rates of 1 in all."""

    def update(w, g, state, t, rate):
        return rate * (adam(g, state, t, 1e-8) + 0.1 * w)

    assert_follows(AdamWConfig(weight_decay=0.1), "kernel", update, atol=7e-6)


def test_lars_of_the_paper():
    """You et al. 2017, algorithm 1: the local rate is c |w| / (|g| + d |w|), times g + d w."""

    def update(w, g, state, t, rate):
        norm = np.linalg.norm(w)
        local = 0.02 * norm / (np.linalg.norm(g) + 0.3 * norm)
        state["v"] = 0.9 * state.get("v", 0) + rate * local * (g + 0.3 * w)
        return state["v"]

    config = LarsConfig(variant="paper", weight_decay=0.3, trust_coefficient=0.02)
    assert_follows(config, "kernel", update)


def test_lars_of_the_paper_leaves_biases_to_sgd():
    """Neither ratio nor decay: MLPerf's skip list."""

    def update(w, g, state, t, rate):
        state["v"] = 0.9 * state.get("v", 0) + rate * g
        return state["v"]

    assert_follows(LarsConfig(variant="paper", weight_decay=0.3), "bias", update)


def test_lamb_of_the_paper_bounds_the_norm_of_weights():
    """You et al. 2019, algorithm 2, with phi(z) = min(z, bound)."""

    def update(w, g, state, t, rate):
        direction = adam(g, state, t, 1e-6) + 0.1 * w
        return rate * min(np.linalg.norm(w), 2.0) / np.linalg.norm(direction) * direction

    config = LambConfig(variant="paper", weight_decay=0.1, weight_norm_bound=2.0)
    assert np.linalg.norm(PARAMS["dense"]["kernel"]) > 2.0  # or it would bound nothing
    assert_follows(config, "kernel", update)


@pytest.mark.parametrize("kind", ["kernel", "bias"])
def test_nvlamb_normalises_all_gradients_first(kind):
    """By their common norm where it is above 1; biases have a ratio, and no decay."""
    norms = [
        np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
        for gradient in GRADIENTS
    ]

    def update(w, g, state, t, rate):
        decay = 0.1 if kind == "kernel" else 0.0
        direction = adam(g / max(norms[t - 1], 1), state, t, 1e-6) + decay * w
        return rate * np.linalg.norm(w) / np.linalg.norm(direction) * direction

    assert_follows(LambConfig(variant="nvlamb", weight_decay=0.1), kind, update)


def test_a_trust_ratio_can_be_clipped():
    """At 0.3: what optax's ratio would be above that is not."""

    def update(w, g, state, t, rate):
        direction = adam(g, state, t, 1e-6) + 0.1 * w
        return rate * min(np.linalg.norm(w) / np.linalg.norm(direction), 0.3) * direction

    assert_follows(LambConfig(weight_decay=0.1, trust_clip=0.3), "kernel", update)


def test_adagrad_of_distbelief():
    """Dean et al. 2012: rate g / root of the sum of squares, no epsilon, nothing to start from."""

    def update(w, g, state, t, rate):
        state["sum"] = state.get("sum", 0) + g * g
        return rate * g / np.sqrt(state["sum"])

    assert_follows(AdagradConfig(initial_accumulator=0, epsilon=0), "kernel", update)


@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_schedule_free_evaluates_the_average(base):
    """Defazio et al. 2024, equations 3 to 5, at a level rate: y = .1 z + .9 x; z steps; x is the
    mean of all z."""
    config = ScheduleFreeConfig(base=base, weight_decay=0.1)
    optimizer = build_optimizer(config, lambda _: jnp.asarray(0.1), hidden=HiddenMatrices(()))
    params: Any = PARAMS
    state = optimizer.init(PARAMS)
    for gradient in GRADIENTS:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    found = evaluated_params(config, state, params)

    for layer, name, decay in (("dense", "kernel", 0.1), ("norm", "bias", 0.0)):
        z = x = y = np.asarray(PARAMS[layer][name], np.float64)
        square = np.zeros_like(z)
        for t, gradient in enumerate(GRADIENTS, start=1):
            g = np.asarray(gradient[layer][name], np.float64)
            square = 0.999 * square + 0.001 * g * g
            if base == "adamw":
                g = g / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
            z = z - 0.1 * (g + decay * y)
            x = x + (z - x) / t
            y = 0.1 * z + 0.9 * x
        for of, expected in ((params, y), (found, x)):
            np.testing.assert_allclose(of[layer][name], expected, rtol=1e-5, atol=1e-6)
            far = [{name: each} for each in (of[layer][name], expected, PARAMS[layer][name])]
            noted(config, "NumPy", distance_after(*far))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "sgd", "momentum": 0.0, "momentum_form": "rate_inside"}, "momentum above 0"),
        ({"name": "lars", "variant": "nvlamb"}, "must be one of optax, paper"),
        ({"name": "lamb", "trust_clip": 0.0}, r"trust_clip=0\.0 is refused: it must be above 0"),
        ({"name": "lamb", "weight_norm_bound": -1.0}, "weight_norm_bound=-1.0 is refused"),
        ({"name": "adagrad", "epsilon": -1.0}, "epsilon=-1.0 is refused"),
        ({"name": "schedule_free", "interpolation": 0.0}, "it must be above 0"),
    ],
)
def test_impossible_optimizers_are_refused(fields, said):
    """One sentence, which names the field."""
    with pytest.raises(ConfigError, match=said):
        build(OptimizerConfig, fields, where="optimizer")


def test_sgd_by_hand():
    """Decay joins the gradient before the buffer: 1 - .1 (2 + .5 x 1) = .75, then .27."""
    optimizer = build_optimizer(
        SgdConfig(momentum=0.9, weight_decay=0.5),
        lambda _: jnp.asarray(0.1),
        hidden=HiddenMatrices(()),
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
    found = trained(build_optimizer(config, rate, hidden=HiddenMatrices(())))
    expected = trained(reference)

    assert_equal(found, expected)
    noted(config, "Optax", distance_after(found, expected, PARAMS))


def test_masked_lars_equals_masked_lars_of_optax():
    """By default biases and normalisation have neither decay nor trust ratio."""
    mask = {
        "dense": {"kernel": True, "bias": False},
        "norm": {"scale": False, "bias": False},
        "tokens": {"embedding": True},
    }
    reference = optax.lars(rate, weight_decay=0.1, weight_decay_mask=mask, trust_ratio_mask=mask)

    found = trained(build_optimizer(LarsConfig(weight_decay=0.1), rate, hidden=HiddenMatrices(())))

    assert_equal(found, trained(reference))


def test_masked_lamb_is_adam_for_biases_and_lamb_for_weights():
    """Each parameter equals what the one or the other of Optax's makes of it."""
    found = trained(build_optimizer(LambConfig(weight_decay=0.1), rate, hidden=HiddenMatrices(())))
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
        after = trained(build_optimizer(config, rate, hidden=HiddenMatrices(())), gradients=[zeros])
        return jax.tree.map(lambda a, b: bool((a != b).any()), after, PARAMS)

    assert changed(False) == {
        "dense": {"kernel": True, "bias": False},
        "norm": {"scale": False, "bias": False},
        "tokens": {"embedding": True},
    }
    assert all(jax.tree.leaves(changed(True)))


@pytest.mark.slow_except("config0")
@pytest.mark.parametrize("config", [LarsConfig(weight_decay=0.1), LambConfig(weight_decay=0.1)])
@settings(deadline=None, max_examples=25)  # each example compiles; the first may wait
@given(scales=st.lists(st.floats(0.01, 100), min_size=3, max_size=3))
def test_each_layer_of_a_stack_has_its_own_trust_ratio(config, scales):
    """A stack of layers is trained as its layers are one by one, however their norms differ."""
    factors = jnp.asarray(scales, jnp.float32).reshape(3, 1, 1)
    layers = {"kernel": PARAMS["tokens"]["embedding"][:3].reshape(3, 2, 2) * factors}
    gradient = {"kernel": GRADIENTS[0]["tokens"]["embedding"][:3].reshape(3, 2, 2)}

    def one_update(params: Any, gradient: Any) -> Any:
        optimizer = build_optimizer(config, rate, hidden=HiddenMatrices(("blocks",)))
        return optimizer.update(gradient, optimizer.init(params), params)[0]

    stacked = one_update({"blocks": layers}, {"blocks": gradient})["blocks"]["kernel"]

    for index in range(3):
        alone = one_update(*jax.tree.map(lambda leaf, i=index: leaf[i], (layers, gradient)))
        np.testing.assert_allclose(stacked[index], alone["kernel"], rtol=1e-5)


def clipped(scope: str, max_norm: float, gradient: Any) -> Any:
    """The gradient that an optimizer sees."""
    config = build(ClippingConfig, {"scope": scope, "max_norm": max_norm}, where="clipping")
    seen = with_clipping(config, optax.identity(), stacked=("blocks",))
    return seen.update(gradient, seen.init(gradient), gradient)[0]


def test_a_gradient_is_clipped_to_a_norm_of_all_parameters():
    """By hand: 3, 4 and 12 have norm 13; clipped to 6.5 each is half. A shorter one stays."""
    gradient = {"blocks": {"kernel": jnp.asarray([[3.0], [4.0]])}, "norm": jnp.asarray([12.0])}

    found = clipped("global", 6.5, gradient)
    np.testing.assert_allclose(found["blocks"]["kernel"], [[1.5], [2.0]], rtol=1e-6)
    np.testing.assert_allclose(found["norm"], [6.0], rtol=1e-6)
    assert_equal(clipped("global", 13.5, gradient), gradient)


def test_a_gradient_is_clipped_by_block():
    """By hand: the first of two stacked layers, (3, 4), has norm 5 and is clipped to 1; the second,
    (0.6, 0), and a norm of 0 stay; the parts of the head count together, (5, 12) of norm 13."""
    gradient = {
        "blocks": {
            "kernel": jnp.asarray([[[3.0]], [[0.6]]]),
            "bias": jnp.asarray([[4.0], [0.0]]),
        },
        "head": {"kernel": jnp.asarray([[5.0]]), "bias": jnp.asarray([12.0])},
        "norm": jnp.zeros(2),
    }

    found = clipped("block", 1.0, gradient)
    np.testing.assert_allclose(found["blocks"]["kernel"], [[[0.6]], [[0.6]]], rtol=1e-6)
    np.testing.assert_allclose(found["blocks"]["bias"], [[0.8], [0.0]], rtol=1e-6)
    np.testing.assert_allclose(found["head"]["kernel"], [[5 / 13]], rtol=1e-6)
    np.testing.assert_allclose(found["head"]["bias"], [12 / 13], rtol=1e-6)
    np.testing.assert_array_equal(found["norm"], np.zeros(2))
