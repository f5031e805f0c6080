"""Optimizers of 2018 to 2025 against their papers' algorithms, written in NumPy in float64."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_distances import distance_after, noted

from scalejax.config.optimizer import (
    AdafactorConfig,
    AdamWConfig,
    CustomOptimizerConfig,
    LionConfig,
    MarsConfig,
    MuonConfig,
    OptimizerConfig,
    ShampooConfig,
    SoapConfig,
)
from scalejax.config.run import RunConfig, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.models import parameter_path
from scalejax.training.gradients import (
    LABEL_NUMBERS,
    normalised,
    sampled_labels,
    with_sampled_labels,
)
from scalejax.training.mesh import build_mesh
from scalejax.training.optimizers import build_optimizer
from scalejax.training.optimizers.eight_bits import dynamic_codes
from scalejax.training.optimizers.matrices import HiddenMatrices
from scalejax.training.setup import train_setup
from scalejax.training.state import abstract_state
from scalejax.training.step import build_step, init_state
from scalejax.xla.compiled import read_step

RNG = np.random.default_rng(0)
UPDATES = 6
RATE = 0.1
KERNEL = "blocks/up/kernel"
SQUARE = "blocks/down/kernel"
"""Whose G G^T and G^T G have full rank after one gradient: else QR may choose what is left."""
EMBEDDING = "tokens/embedding"


def tree() -> Any:
    """Parameters, or gradients, of two stacked layers and an embedding."""
    shapes = {KERNEL: (2, 6, 4), SQUARE: (2, 5, 5), "blocks/up/bias": (2, 4), EMBEDDING: (5, 4)}
    return {
        name: jnp.asarray(RNG.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


def nested(flat: Any) -> Any:
    """A tree by path as a tree of trees."""
    found: Any = {}
    for path, leaf in flat.items():
        *parts, last = path.split("/")
        inner = found
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = leaf
    return found


PARAMS, GRADIENTS = tree(), [tree() for _ in range(UPDATES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """What an optimizer made of the gradients."""

    config: OptimizerConfig
    """The optimizer."""
    steps: list[Any]
    """Its updates, by path."""


def updates_of(config: OptimizerConfig) -> Updates:
    """The updates of the embedding and of the first layer's kernels, before the rate and its sign,
    for gradients that do not depend on the parameters."""
    optimizer = build_optimizer(
        config, lambda _: jnp.asarray(RATE), hidden=HiddenMatrices(("blocks",))
    )
    params, found = nested(PARAMS), []
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in GRADIENTS:
        updates, state = update(nested(gradient), state, params)
        params = optax.apply_updates(params, updates)
        found.append(
            {
                KERNEL: -np.asarray(updates["blocks"]["up"]["kernel"][0]) / RATE,
                SQUARE: -np.asarray(updates["blocks"]["down"]["kernel"][0]) / RATE,
                EMBEDDING: -np.asarray(updates["tokens"]["embedding"]) / RATE,
            }
        )
    return Updates(config=config, steps=found)


def gradients_of(path: str) -> list[np.ndarray]:
    """Those of a kernel of the first layer, or of the embedding."""
    return [
        np.asarray(each[path] if path == EMBEDDING else each[path][0], np.float64)
        for each in GRADIENTS
    ]


def far(
    found: Updates, path: str, expected: Callable[..., np.ndarray], *, is_noted: bool = True
) -> float:
    """The largest distance of an update from the expected one, over that one's largest entry; noted
    unless something else is expected than the optimizer is to do.

    `expected(g, state, t)` with a `state` of its own, and t from 1.
    """
    state: dict[str, Any] = {}
    worst = 0.0
    for t, (update, g) in enumerate(zip(found.steps, gradients_of(path), strict=True), start=1):
        step = expected(g, state, t)
        worst = max(worst, float(np.abs(update[path] - step).max() / np.abs(step).max()))
    return noted(found.config, "NumPy", worst) if is_noted else worst


def adam(
    g: np.ndarray, state: dict[str, Any], t: int, b1: float, b2: float, epsilon: float = 1e-8
) -> np.ndarray:
    """Adam's direction (Kingma & Ba 2015, algorithm 1)."""
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    return state["m"] / (1 - b1**t) / (np.sqrt(state["v"] / (1 - b2**t)) + epsilon)


def ridged(mean: np.ndarray) -> np.ndarray:
    """With a millionth of the largest row sum on the diagonal."""
    return mean + 1e-6 * np.abs(mean).sum(axis=-1).max() * np.eye(len(mean))


def orthogonal(matrix: np.ndarray, steps: int) -> np.ndarray:
    """The iteration of Jordan et al. 2024: a X + (b A + c A^2) X, A = X X^T, of the transpose where
    there are more rows than columns."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize(
    ("scale", "factor"), [("rms", 0.2 * np.sqrt(6)), ("width", 1.0)], ids=["rms", "width"]
)
def test_muon_makes_momentum_orthogonal(scale, factor):
    """Jordan et al. 2024 with Nesterov's momentum, of 6 rows and 4 columns; both moments that are
    mixed are corrected for their first updates, as Optax does and their code does not: it is 7 to
    20 % of an entry off that code in the second to sixth update of these random gradients."""

    def expected(g, state, t, *, is_corrected=True):
        state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
        ahead, own = (1 - 0.95 ** (t + 1), 1 - 0.95**t) if is_corrected else (1, 1)
        return factor * orthogonal(0.95 * state["m"] / ahead + 0.05 * g / own, 5)

    found = updates_of(MuonConfig(weight_decay=0, scale=scale))

    assert far(found, KERNEL, expected) < 2e-5
    other = partial(expected, is_corrected=False)
    theirs = far(found, KERNEL, other, is_noted=False)
    assert 1e-3 < theirs < 0.5


def test_optimizers_of_matrices_leave_all_else_to_adamw():
    """Embeddings, at a rate of their own, with decay at that rate too."""
    for kind in (MuonConfig, SoapConfig, ShampooConfig):
        found = updates_of(kind(adamw_rate_factor=0.5, weight_decay=0))
        assert far(found, EMBEDDING, lambda g, s, t: 0.5 * adam(g, s, t, 0.9, 0.95)) < 1e-5


def test_soap_is_adam_in_a_basis_that_follows_the_preconditioners():
    """Vyas et al. 2024, algorithms 3 and 4, with epsilon beside the root and Adam's corrections as
    in their code; from the identity. Signs of QR's columns do not matter, nor which QR it is."""

    def expected(g, state, t):
        rows, columns = state.setdefault("basis", (np.eye(5), np.eye(5)))
        state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
        turned = rows.T @ g @ columns
        state["v"] = 0.95 * state.get("v", 0) + 0.05 * turned**2
        moment = rows.T @ state["m"] @ columns / (1 - 0.95**t)
        step = moment / (np.sqrt(state["v"] / (1 - 0.95**t)) + 1e-8)
        state["L"] = 0.95 * state.get("L", 0) + 0.05 * g @ g.T
        state["R"] = 0.95 * state.get("R", 0) + 0.05 * g.T @ g
        if t in (1, 4):
            state["basis"] = (
                np.linalg.qr(ridged(state["L"]) @ rows)[0],
                np.linalg.qr(ridged(state["R"]) @ columns)[0],
            )
        return rows @ step @ columns.T

    found = updates_of(SoapConfig(weight_decay=0, refresh_every_steps=3))

    assert far(found, SQUARE, expected) < 1e-4


def test_bases_are_not_decomposed_in_batches_on_cpus():
    """Batches wait for threads that wait for batches: training hung on two devices of two cores."""
    optimizer = build_optimizer(
        SoapConfig(), lambda _: jnp.asarray(RATE), hidden=HiddenMatrices(("blocks",))
    )
    params = nested(PARAMS)
    lowered = jax.jit(optimizer.update).lower(params, optimizer.init(params), params)

    calls = [line for line in lowered.as_text().splitlines() if "@lapack_sgeqrf" in line]

    assert len(calls) == 3  # a function for each size of a side: 4, 5 and 6
    assert all(re.search(r": \(tensor<(\d)x\1xf32>\) ->", line) for line in calls)


def test_soap_without_refreshed_bases_is_adam():
    """A basis of the identity turns nothing: sides that are too long have none."""
    found = updates_of(SoapConfig(weight_decay=0, largest_side=3))

    assert far(found, KERNEL, lambda g, s, t: adam(g, s, t, 0.95, 0.95)) < 1e-5


@pytest.mark.parametrize(
    ("path", "largest_side"), [(SQUARE, 8192), (KERNEL, 5)], ids=["both sides", "columns alone"]
)
def test_shampoo_divides_by_roots_of_its_sides(path, largest_side):
    """Gupta et al. 2018, algorithm 1, with means, the ridge relative to the largest row sum, and
    each matrix's step of the length of Adam's; roots by eigenvalues: -1 / (2 sides), fourth roots
    of two and square roots of one (Anil et al. 2020)."""
    exponent = -0.25 if path == SQUARE else -0.5

    def root(mean):
        if len(mean) > largest_side:
            return np.eye(len(mean))
        values, vectors = np.linalg.eigh(ridged(mean))
        return vectors @ np.diag(values**exponent) @ vectors.T

    def expected(g, state, t):
        rows, columns = state.setdefault("roots", [np.eye(size) for size in g.shape])
        wanted = np.linalg.norm(adam(g, state, t, 0.95, 0.95))
        step = rows @ state["m"] @ columns
        state["L"] = 0.95 * state.get("L", 0) + 0.05 * g @ g.T
        state["R"] = 0.95 * state.get("R", 0) + 0.05 * g.T @ g
        if t in (1, 4):
            state["roots"] = (root(state["L"]), root(state["R"]))
        return step * wanted / np.linalg.norm(step)

    found = updates_of(
        ShampooConfig(weight_decay=0, refresh_every_steps=3, largest_side=largest_side)
    )

    assert far(found, path, expected) < 1e-3


@pytest.mark.parametrize("kind", [SoapConfig, ShampooConfig], ids=lambda kind: kind.__name__)
def test_products_of_preconditioners_are_in_full_float32(kind):
    """Where accelerators round to tf32 or bfloat16 by default: roots of nearly singular matrices
    are NaN then."""
    optimizer = build_optimizer(
        kind(), lambda _: jnp.asarray(RATE), hidden=HiddenMatrices(("blocks",))
    )
    params = nested(PARAMS)

    text = jax.jit(optimizer.update).lower(params, optimizer.init(params), params).as_text()

    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 8
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_lion_steps_along_signs():
    """Chen et al. 2023, algorithm 2."""

    def expected(g, state, t):
        m = state.get("m", np.zeros_like(g))
        state["m"] = 0.99 * m + 0.01 * g
        return np.sign(0.9 * m + 0.1 * g)

    assert far(updates_of(LionConfig(weight_decay=0)), KERNEL, expected) < 1e-5


def test_mars_corrects_a_gradient_by_the_one_before():
    """Yuan et al. 2024, algorithm 2 with the gradient of the batch before; the clip is of all
    parameters together."""
    every = [[np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(each)] for each in GRADIENTS]
    share = 0.025 * 0.95 / 0.05

    def expected(g, state, t):
        before = state.get("before", g)
        state["before"] = g
        whole = [
            own + share * (own - (every[t - 2][at] if t > 1 else own))
            for at, own in enumerate(every[t - 1])
        ]
        norm = np.sqrt(sum((leaf**2).sum() for leaf in whole))
        return adam((g + share * (g - before)) / max(norm, 1), state, t, 0.95, 0.99)

    assert far(updates_of(MarsConfig(weight_decay=0)), KERNEL, expected) < 1e-5


def test_adafactor_keeps_rows_and_columns():
    """Shazeer & Stern 2018, algorithm 4, with a factored second moment, of the embedding, whose
    largest root mean square is 1; relative to that of the parameter."""
    size = np.sqrt((np.asarray(PARAMS[EMBEDDING], np.float64) ** 2).mean())

    def expected(g, state, t):
        decay = 1 - t**-0.8
        for name, axis in (("rows", 1), ("columns", 0)):
            mean = (g * g + 1e-30).mean(axis=axis)
            state[name] = decay * state.get(name, 0) + (1 - decay) * mean
        second = np.outer(state["rows"], state["columns"]) / state["rows"].mean()
        step = g / np.sqrt(second)
        step = step / max(1, np.sqrt((step**2).mean()))
        w = state.get("w", np.asarray(PARAMS[EMBEDDING], np.float64))
        step = step * max(np.sqrt((w**2).mean()), 1e-3)
        state["w"] = w - RATE * step
        return step

    assert size > 1e-3
    assert far(updates_of(AdafactorConfig(smallest_factored=2)), EMBEDDING, expected) < 1e-4


def sophia_run(**fields: Any) -> Any:
    """A network of one hidden layer for images of 2 x 2 pixels of four classes."""
    tables = {
        "model": {"name": "mlp", "hidden": [6]},
        "data": {"name": "synthetic_images", "image_size": 2, "channels": 1, "classes": 4},
        "batch": {"global_batch": 32},
        "optimizer": {"name": "sophia", "refresh_every_steps": 3, **fields},
        "schedule": {"base_learning_rate": RATE},
    }
    return resolve(build(RunConfig, tables), 1)


def test_sophia_steps_over_squared_gradients_of_sampled_labels():
    """Liu et al. 2023, algorithms 2 and 3, in a network whose passes are written out; the noise of
    labels alone is of JAX, their choice is not. All entries of a first update with an estimate are
    clipped at this gamma unless it is as large."""
    run = sophia_run(gamma=2.0, epsilon=1e-4)
    setup, mesh = train_setup(run), build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    layers = [
        {name: np.asarray(layer[name], np.float64) for name in ("kernel", "bias")}
        for _, layer in sorted(state.params["layers"].items())
    ]
    initial = [dict(layer) for layer in layers]
    means = [{name: np.zeros_like(leaf) for name, leaf in layer.items()} for layer in layers]
    curvatures = [dict(layer) for layer in means]
    clipped = []
    for t, rng in enumerate(map(np.random.default_rng, range(UPDATES))):
        images = rng.integers(0, 256, size=(32, 2, 2, 1)).astype(np.uint8)
        batch = {
            "inputs": jnp.asarray(images),
            "targets": jnp.asarray(rng.integers(0, 4, size=32), jnp.int32),
        }
        sampled, labels = with_sampled_labels(setup, batch, jnp.asarray(t))
        noise = [jax.random.gumbel(jax.random.key(n), (4,)) for n in sampled[LABEL_NUMBERS]]
        state, _ = step.function(state, batch)

        x = np.asarray(normalised(batch["inputs"], run.dataset), np.float64).reshape(32, 4)
        hidden = np.maximum(x @ layers[0]["kernel"] + layers[0]["bias"], 0)
        logits = hidden @ layers[1]["kernel"] + layers[1]["bias"]
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

        def gradient(targets, shares=shares, hidden=hidden, x=x):
            of_logits = (shares - np.eye(4)[targets]) / 32
            of_hidden = of_logits @ layers[1]["kernel"].T * (hidden > 0)
            return [
                {"kernel": x.T @ of_hidden, "bias": of_hidden.sum(axis=0)},
                {"kernel": hidden.T @ of_logits, "bias": of_logits.sum(axis=0)},
            ]

        of_targets = gradient(np.asarray(batch["targets"]))
        if t % 3 == 0:
            of_labels = gradient((logits + np.asarray(noise)).argmax(axis=1))
            for h, g in zip(curvatures, of_labels, strict=True):
                h |= {name: 0.99 * h[name] + 0.01 * labels * g[name] ** 2 for name in h}
        for w, m, h, g in zip(layers, means, curvatures, of_targets, strict=True):
            m |= {name: 0.96 * m[name] + 0.04 * g[name] for name in m}
            for name in w:
                ratio = m[name] / np.maximum(2.0 * h[name], 1e-4)
                clipped.append(np.abs(ratio) > 1)
                decay = 0.2 * w[name] if name == "kernel" else 0
                w[name] = w[name] - RATE * (np.clip(ratio, -1, 1) + decay)

    found = [layer for _, layer in sorted(state.params["layers"].items())]
    far = max(
        distance_after({name: a[name] for name in b}, b, c)
        for a, b, c in zip(found, layers, initial, strict=True)
    )
    share = np.concatenate([each.ravel() for each in clipped]).mean()
    assert 0.1 < share < 0.9
    assert noted(run.config.optimizer, "NumPy", far) < 1e-5


def test_labels_are_sampled_by_softmax_and_counted_where_they_count():
    """Of 4,000 rows, each share within five of its deviations; the labels of an estimate are the
    rows, tokens or targets of documents that the mean loss is of."""
    logits = jnp.asarray([0.0, 1.0, -1.0, 2.0])
    numbers = jax.random.bits(jax.random.key(0), (4000,), jnp.uint32)
    labels = np.asarray(sampled_labels(jnp.broadcast_to(logits, (4000, 4)), numbers))
    shares = np.asarray(jax.nn.softmax(logits))
    found = np.bincount(labels, minlength=4) / 4000
    assert np.all(np.abs(found - shares) < 5 * np.sqrt(shares * (1 - shares) / 4000))

    setup, weights = train_setup(sophia_run()), jnp.asarray([1.0, 0.0, 1.0])
    rows, tokens = jnp.zeros(3, jnp.int32), jnp.zeros((3, 5), jnp.int32)
    documents = {"segment_ids": tokens, "weights": jnp.asarray([4.0, 0.0, 3.0])}
    for batch, count in (
        ({"targets": rows}, 3),
        ({"targets": tokens}, 15),
        ({"targets": tokens, "weights": weights}, 10),
        ({"targets": tokens, **documents}, 7),
    ):
        assert with_sampled_labels(setup, batch, jnp.asarray(0))[1] == count


def test_an_estimate_of_curvature_is_costed_in_its_share_of_updates():
    """One in k of a second gradient: half as much is saved from four to eight as from two to four;
    that is about as much work as the first gradient."""
    flop = {}
    for every in (2, 4, 8):
        run = sophia_run(refresh_every_steps=every)
        mesh = build_mesh(run.layout)
        step = build_step(run, mesh)
        program = read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)
        flop[every] = sum(each.flop * each.share * times for each, times in program.walk())
    assert flop[2] - flop[4] == pytest.approx(2 * (flop[4] - flop[8]), rel=1e-6)
    assert 4 * (flop[2] - flop[4]) == pytest.approx(flop[8], rel=0.5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layout.pipeline": 2}, r"layout\.pipeline=2 is refused: .*data, fsdp and tensor"),
        ({"layout.context": 2}, r"layout\.context=2 is refused"),
        ({"loss.kind": "optax:sigmoid_focal_loss"}, r"loss\.kind=.* softmax cross-entropy"),
        ({"model.compute_dtype": "float16"}, r'compute_dtype=.* "float32" or "bfloat16"'),
        ({"gradient_sync.name": "fp16"}, r"gradient_sync\.name='fp16' is refused"),
        (
            {"model.name": "llama", "model.moe": {"experts": 4, "expert_hidden": 32}},
            r"model\.moe is refused: .* labels",
        ),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_sophia_is_refused_where_it_has_no_labels(fields, said):
    """Before anything is compiled."""
    tables = {
        "model": {"name": "gpt", "layers": 2, "hidden": 32, "heads": 4},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32},
        "batch": {"global_batch": 8},
        "optimizer": {"name": "sophia"},
        "schedule": {"base_learning_rate": 0.1},
    }
    for name, value in fields.items():
        *parts, last = name.split(".")
        table: Any = tables
        for part in parts:
            table = table.setdefault(part, {})
        table[last] = value
    with pytest.raises(ConfigError, match=said):
        build(RunConfig, tables)


@pytest.mark.parametrize("kind", [AdamWConfig, LionConfig], ids=lambda kind: kind.__name__)
def test_cautious_steps_leave_out_what_points_against_the_gradient(kind):
    """Liang et al. 2024, algorithm 1, layer by layer."""

    def expected(g, state, t):
        if kind is AdamWConfig:
            step = adam(g, state, t, 0.9, 0.999)
        else:
            m = state.get("m", np.zeros_like(g))
            state["m"], step = 0.99 * m + 0.01 * g, np.sign(0.9 * m + 0.1 * g)
        is_kept = step * g >= 0
        return np.where(is_kept, step, 0) * step.size / (is_kept.sum() + 1)

    found = updates_of(kind(weight_decay=0, cautious=True))

    assert far(found, KERNEL, expected) < 2e-5  # 1 - 0.999 in float32 is 1e-5 off
    assert any((each[KERNEL] == 0).any() for each in found.steps)


def test_matrices_of_networks_are_told_by_their_paths():
    """Layers and experts count matrices, as do gates beside others; a convolution is one matrix;
    what reads the input or makes the logits is none, nor is one filter for each channel."""
    hidden = HiddenMatrices(("blocks",), (("gated", 1), ("qkv", 1)), ("layers/2",))

    def axes(path: str, *shape: int) -> Any:
        (found,) = jax.tree.leaves(
            jax.tree_util.tree_map_with_path(
                lambda *leaf: [hidden.axes(*leaf)],
                nested({path: jax.ShapeDtypeStruct(shape, jnp.float32)}),
            ),
            is_leaf=lambda each: not isinstance(each, dict | list),
        ) or [None]
        return found and (found.batch, found.rows, found.columns)

    assert axes("blocks/attention/qkv/kernel", 2, 8, 3, 2, 4) == ((0, 2), (1,), (3, 4))
    assert axes("blocks/attention/projection/kernel", 2, 2, 4, 8) == ((0,), (1, 2), (3,))
    assert axes("blocks/feed_forward/experts/gated/kernel", 2, 3, 8, 2, 16) == (
        (0, 1, 3),
        (2,),
        (4,),
    )
    assert axes("stages/0/kernel", 3, 3, 8, 16) == ((), (0, 1, 2), (3,))
    assert axes("stem/kernel", 3, 3, 1, 16) == ((), (0, 1, 2), (3,))  # whatever its channels
    assert axes("units/0/depthwise/kernel", 3, 3, 1, 16) is None
    assert axes("units/0/depthwise/layer/kernel", 3, 3, 16) is None
    assert axes("layers/1/kernel", 2, 8) == ((), (0,), (1,))
    ends = ("head/kernel", "linear/head/kernel", "layers/2/kernel", "output/embedding")
    for end in (*ends, "tokens/embedding", "blocks/router"):
        assert axes(end, 2, 8) is None


@pytest.mark.parametrize(
    ("model", "channels", "others"),
    [
        ({"name": "mlp", "hidden": [8, 8]}, 1, {"layers/2/kernel"}),
        ({"name": "alexnet"}, 3, {"linear/head/kernel"}),
        ({"name": "cnn"}, 1, {"head/kernel"}),
        (
            {"name": "efficientnet_lite0"},
            3,
            {"head/kernel", *(f"blocks/{at}/depthwise/layer/kernel" for at in range(16))},
        ),
    ],
    ids=lambda each: each.get("name") if isinstance(each, dict) else "",
)
def test_all_kernels_but_heads_and_depthwise_filters_are_hidden_matrices(model, channels, others):
    """Of networks of images as they are built: what Muon leaves to AdamW."""
    data = {"name": "synthetic_images", "image_size": 96, "channels": channels, "classes": 10}
    fields = {"model": model, "data": data, "batch": {"global_batch": 8}}
    fields |= {"optimizer": {"name": "muon"}, "schedule": {"base_learning_rate": 0.1}}
    setup = train_setup(resolve(build(RunConfig, fields), 1))

    state = abstract_state(setup)

    paths = [
        (parameter_path(path), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]
    ]
    of_adamw = {path.rpartition("nu/")[2] for path, _ in paths if "/nu/" in path}
    assert {path for path in of_adamw if path.endswith("kernel")} == others


def test_an_optimizer_is_found_by_its_import_path():
    """Another of Optax, with its options; it is given the schedule, and Optax can still tell which
    of its state is of parameters."""
    config = build(
        OptimizerConfig,
        {"name": "custom", "path": "optax:adamax", "options": {"b1": 0.8}},
        where="optimizer",
    )
    found = updates_of(config)

    def expected(g, state, t):
        state["m"] = 0.8 * state.get("m", 0) + 0.2 * g
        state["u"] = np.maximum(0.999 * state.get("u", 0), np.abs(g) + 1e-8)
        return state["m"] / (1 - 0.8**t) / state["u"]

    assert far(found, KERNEL, expected) < 1e-5
    optimizer = build_optimizer(config, lambda _: jnp.asarray(RATE), hidden=HiddenMatrices(()))
    state = optimizer.init(nested(PARAMS))
    doubled = optax.tree.map_params(optimizer, lambda leaf: leaf + 1, state)
    assert sum(leaf.sum() for leaf in jax.tree.leaves(doubled)) == 2 * sum(
        leaf.size for leaf in jax.tree.leaves(PARAMS)
    )


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        (
            "no_such_module:tuned",
            {},
            r"optimizer\.path='no_such_module:tuned' is refused: .* import",
        ),
        ("optax:adamaxx", {}, "did you mean 'optax:adamax'"),
        ("optax:adamax", {"b9": 1}, r"optimizer\.options=.* is refused: .*'b9'"),
        ("optax:cosine_decay_schedule", {"decay_steps": 3}, "it gives function, not an optax"),
        ("optax:__version__", {}, "must be a function of the learning rate"),
        ("builtins:dict", {}, r"function\(learning_rate, \*\*options\), but TypeError: "),
        ("{}no_python:made", {}, "must import, but SyntaxError: "),
        ("{}raises:made", {}, "must import, but RuntimeError: no licence found"),
        ("{}sums:made", {"momentum": 0.9}, "but TypeError: unsupported operand"),
        ("optax:lbfgs", {}, r"parameters alone, but [A-Za-z]+Error: .*required keyword-only"),
        ("optax:polyak_sgd", {}, "parameters alone, but TypeError: .*'value'"),
        ("{}sums:shorter", {}, "parameters alone, but ValueError: .*differ in shape"),
    ],
)
def test_what_is_no_optimizer_is_refused(tmp_path, monkeypatch, path, options, said):
    """Before anything is compiled, in one sentence."""
    own = f"optimizers_of_{tmp_path.name.replace('-', '_')}_"
    (tmp_path / f"{own}no_python.py").write_text("def made(rate) return\n")
    (tmp_path / f"{own}raises.py").write_text("raise RuntimeError('no licence\\nfound')")
    (tmp_path / f"{own}sums.py").write_text(
        "import jax, optax\n"
        "def made(rate, momentum): return optax.sgd(rate, momentum=momentum + 'x')\n"
        "def shorter(rate): return optax.stateless(lambda g, _: jax.tree.map(lambda x: x[0], g))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    config = CustomOptimizerConfig(path=path.format(own), options=options)
    with pytest.raises(ConfigError, match=said) as refused:
        build_optimizer(config, lambda _: jnp.asarray(RATE), hidden=HiddenMatrices(())).init(
            nested(PARAMS)
        )
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "custom", "path": "optax"}, r"optimizer\.path='optax' is refused: it must be"),
        ({"name": "custom", "path": ".own:made"}, r"path='\.own:made' is refused: it must be"),
        ({"name": "custom", "path": "own..x:made"}, "is refused: it must be"),
        ({"name": "custom", "path": "own:1"}, "is refused: it must be"),
        ({"name": "muon", "newton_schulz_steps": 0}, "newton_schulz_steps=0 is refused"),
        ({"name": "soap", "refresh_every_steps": 0}, "refresh_every_steps=0 is refused"),
        ({"name": "shampoo", "ridge": 0.0}, r"ridge=0\.0 is refused"),
        ({"name": "adafactor", "decay_exponent": 1.0}, r"decay_exponent=1\.0 is refused"),
        ({"name": "mars", "gamma": -1.0}, r"gamma=-1\.0 is refused"),
        ({"name": "sophia", "gamma": 0.0}, r"gamma=0\.0 is refused"),
        ({"name": "sophia", "refresh_every_steps": 0}, "refresh_every_steps=0 is refused"),
        ({"name": "muon", "adamw_rate_factor": 0.0}, r"adamw_rate_factor=0\.0 is refused"),
    ],
)
def test_impossible_optimizers_are_refused(fields, said):
    """One sentence, which names the field."""
    with pytest.raises(ConfigError, match=said):
        build(OptimizerConfig, fields, where="optimizer")


@pytest.mark.parametrize("is_signed", [True, False])
def test_dynamic_codes_are_those_of_the_paper(is_signed):
    """256 numbers from -1 or 0 to 1, with as many decades as exponents; the smallest is 5.5e-7, and
    the largest steps are of 0.9 / 64, or 0.9 / 128 without signs (Dettmers et al. 2021, 2.2)."""
    codes = dynamic_codes(is_signed=is_signed)

    assert len(set(codes.tolist())) == 256
    assert np.abs(codes[codes != 0]).min() == pytest.approx(5.5e-7 if is_signed else 3.25e-7)
    assert codes[-1] - codes[-2] == pytest.approx(0.9 / (128 if is_signed else 256), rel=1e-3)
    assert codes[-2] - codes[-3] == pytest.approx(0.9 / (64 if is_signed else 128), rel=1e-3)


@pytest.mark.parametrize(
    "config",
    [AdamWConfig(mu_dtype="blockwise8", nu_dtype="blockwise8"), LionConfig(mu_dtype="blockwise8")],
    ids=lambda config: config.name,
)
def test_moments_in_8_bits_are_rounded_block_by_block(config):
    """In NumPy: each update reads the codes of its block of 256, of rows of 300, and writes them
    anew. Entries whose code rounding decides may differ by a code: fewer than 1 in 1,000. The state
    of a matrix has a byte an entry and 4 for a block; a small bias stays in float32."""
    rng = np.random.default_rng(1)
    gradients = [rng.normal(size=(20, 300)) * 10.0 ** rng.integers(-3, 1, 300) for _ in range(5)]
    config = replace(config, weight_decay=0.0)
    optimizer = build_optimizer(config, lambda _: jnp.asarray(1.0), hidden=HiddenMatrices(()))
    params = {"kernel": jnp.zeros((20, 300)), "bias": jnp.zeros(300)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)

    def rounded(moment, *, is_signed):
        codes, made = dynamic_codes(is_signed=is_signed).astype(np.float64), np.empty_like(moment)
        for part in (slice(0, 256), slice(256, 300)):
            block = moment[:, part]
            scale = np.abs(block).max(axis=-1, keepdims=True)
            nearest = np.abs(block[..., None] / scale[..., None] - codes).argmin(axis=-1)
            made[:, part] = codes[nearest] * scale
        return made

    m = v = np.zeros((20, 300))
    share = 1.0
    for t, g in enumerate(gradients, start=1):
        gradient = {"kernel": jnp.asarray(g, jnp.float32), "bias": jnp.ones(300)}
        found, state = update(gradient, state, params)
        if isinstance(config, LionConfig):
            expected = -np.sign(0.9 * m + 0.1 * g)
            m = rounded(0.99 * m + 0.01 * g, is_signed=True)
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            expected = -(m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            m, least = rounded(m, is_signed=True), dynamic_codes(is_signed=False)[1]
            rest = [v[:, :256].max(axis=1)] * 256 + [v[:, 256:].max(axis=1)] * 44
            v = np.maximum(rounded(v, is_signed=False), least * np.stack(rest, axis=1))
        far = np.abs(np.asarray(found["kernel"]) - expected) / np.maximum(np.abs(expected), 1e-3)
        share = min(share, float((far < 1e-4).mean()))
    assert share > 0.999

    kept = [optax.tree.get(state, name) for name in ("mu", "nu")[: config.moments]]
    for each in kept:
        assert (each.codes["kernel"].dtype, each.codes["bias"].dtype) == (jnp.uint8, jnp.float32)
        assert each.scales["kernel"].shape == (20, 2)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(each)) == 6000 + 4 * 40 + 4 * 300 + 4


def test_steps_of_moments_in_8_bits_are_bounded_where_gradients_differ_in_size():
    """By ten to the 1, one way and the other, within a block: a second moment that was rounded to 0
    beside a first that was not made steps of 676,630 rates."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.normal(size=(64, 64))
    config = AdamWConfig(weight_decay=0.0, mu_dtype="blockwise8", nu_dtype="blockwise8")
    optimizer = build_optimizer(config, lambda _: jnp.asarray(1.0), hidden=HiddenMatrices(()))
    params = {"kernel": jnp.zeros((64, 64))}
    state, update, largest = optimizer.init(params), jax.jit(optimizer.update), 0.0
    for _ in range(100):
        gradient = {"kernel": jnp.asarray(sizes * rng.normal(size=(64, 64)), jnp.float32)}
        found, state = update(gradient, state, params)
        largest = max(largest, float(jnp.abs(found["kernel"]).max()))

    assert largest < 2  # 1 in float32


def test_moments_in_8_bits_lie_where_their_parameters_do():
    """Two programs are compiled: three updates over fsdp and tensor train what one device trains,
    but for the codes that rounding decides, and codes are split as the parameter is."""
    losses, seen, layouts = [], 0, ({"data": 1}, {"data": 1, "fsdp": 2, "tensor": 2})
    for layout in layouts:
        fields: dict[str, Any] = {
            "model": {"name": "mlp", "hidden": [64, 64]},
            "data": {"name": "synthetic_images", "image_size": 8, "channels": 1, "classes": 8},
            "batch": {"global_batch": 8},
            "optimizer": {"name": "adamw", "mu_dtype": "blockwise8", "nu_dtype": "blockwise8"},
            "schedule": {"base_learning_rate": 0.01},
            "layout": layout,
        }
        run = resolve(build(RunConfig, fields))
        mesh = build_mesh(run.layout)
        step, state = build_step(run, mesh), init_state(run, mesh)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]:
            name = parameter_path(path)
            if "codes" in name and name.endswith("layers/1/kernel"):
                seen += 1
                kernel = state.params["layers"][1]["kernel"]
                assert leaf.dtype == jnp.uint8
                assert leaf.sharding.is_equivalent_to(kernel.sharding, leaf.ndim)
        rng = np.random.default_rng(0)
        batch = {
            "inputs": jnp.asarray(rng.integers(0, 255, size=(8, 8, 8, 1)), jnp.uint8),
            "targets": jnp.asarray(rng.integers(0, 8, size=8), jnp.int32),
        }
        batch = {name: jax.device_put(a, step.batch[name].sharding) for name, a in batch.items()}
        for _ in range(3):
            state, metrics = step.function(state, batch)
            losses.append(float(metrics["loss"]))

    assert seen == 2 * 2
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-3)
    assert losses[2] < losses[0]
