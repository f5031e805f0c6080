"""Mixtures of experts train over every axis what one device trains, and route as published.

Tolerances as in `test_conformance`, of which 20 updates at a rate of 0.002 need a fifteenth; at a
rate of 0.01 parameters differ by a hundred times more with every second seed.

Scores of two experts of a token that are equal to rounding could be chosen differently by two
layouts, and all that follows would differ. So batches are of a seed with which the closest of all
choices is by `MARGIN` at least, eight roundings (6e-8) of a score of 1; the run on one device
checks it.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from scalejax.config.model import LlamaConfig
from scalejax.config.moe import MoeConfig, RouterConfig, block_rows
from scalejax.config.optimizer import SgdConfig
from scalejax.config.run import ResolvedRun, RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.models.moe import MoeFeedForward, _Blocks, routed, with_counted_loads
from scalejax.simulator.program import Loop, Operation
from scalejax.training.mesh import build_mesh
from scalejax.training.optimizers import _weights
from scalejax.training.setup import train_setup
from scalejax.training.step import build_step, init_state
from scalejax.xla.compiled import read_step

UPDATES, GLOBAL_BATCH, TOKENS = 20, 16, 8
RTOL, MARGIN = 1e-5, 5e-7
SEEDS = {"dropless": 4, "capacity": 3, "capacity, 4 layers": 8, "bias": 8}
"""Of batches."""
SIGMOID = {"scores": "sigmoid", "scaling": 1.5, "groups": 4, "groups_per_token": 2}
KINDS: dict[str, dict[str, Any]] = {
    "dropless": {
        "shared_experts": 1,
        "dense_layers": 1,
        "router": {"z_loss_weight": 0.01, "auxiliary_loss_weight": 0.1},
    },
    "capacity": {"capacity_factor": 1.0, "router": {"auxiliary_loss_weight": 0.1}},
    "bias": {
        "shared_experts": 1,
        "router": {**SIGMOID, "balance": "bias", "bias_update_rate": 0.05},
    },
}
KINDS["capacity, 4 layers"] = KINDS["capacity"]
"""Fields of `model.moe`: drop nothing, drop beyond the mean load, and DeepSeek-V3's router, with
its prediction of the token after the next. Of 3 layers, but for one that chunks divide."""
LAYOUTS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "dropless, expert=4 x data=2": ("dropless", {"expert": 4, "data": 2}, 1, "none"),
    "capacity, expert=4 x tensor=2": ("capacity", {"expert": 4, "tensor": 2}, 1, "full"),
    "bias, expert=2 x data=2 x fsdp=2, ZeRO 1": (
        "bias",
        {"expert": 2, "data": 2, "fsdp": 2, "zero_stage": 1},
        2,
        "selective_op",
    ),
    "dropless, expert=2 x fsdp=2 x tensor=2": (
        "dropless",
        {"expert": 2, "fsdp": 2, "tensor": 2},
        1,
        "selective",
    ),
    "capacity, expert=2 x context=2 x data=2": (
        "capacity",
        {"expert": 2, "context": 2, "data": 2, "context_strategy": "ring"},
        1,
        "none",
    ),
    "dropless, expert=2 x heads over context=2 x data=2": (
        "dropless",
        {"expert": 2, "context": 2, "data": 2, "context_strategy": "all_to_all"},
        1,
        "none",
    ),
    "dropless, tensor=2 x context=2 x data=2": (
        "dropless",
        {"tensor": 2, "context": 2, "data": 2, "sequence_parallel": True},
        2,
        "selective_op",
    ),
    "bias, expert=2 x tensor=2 x context=2": (
        "bias",
        {"expert": 2, "tensor": 2, "context": 2, "sequence_parallel": True},
        1,
        "full",
    ),
    "capacity, data=2 x expert=2 x tensor=2, ZeRO 2": (
        "capacity",
        {"data": 2, "expert": 2, "tensor": 2, "zero_stage": 2},
        2,
        "none",
    ),
    "capacity, pipeline=2 x expert=2, 1F1B": (
        "capacity",
        {"pipeline": 2, "expert": 2, "pipeline_schedule": "1f1b"},
        2,
        "full",
    ),
    "dropless, expert=2 x pipeline=2 x data=2": (
        "dropless",
        {"expert": 2, "pipeline": 2, "data": 2},
        4,
        "none",
    ),
    "bias, expert=2 x pipeline=2 x data=2, ZeRO 1": (
        "bias",
        {"expert": 2, "pipeline": 2, "data": 2, "zero_stage": 1},
        2,
        "selective_op",
    ),
    "capacity, fsdp=2 x tensor=2 x pipeline=2": (
        "capacity",
        {"fsdp": 2, "tensor": 2, "pipeline": 2},
        4,
        "full",
    ),
    "dropless, expert=2 x pipeline=2 x data=2, 1F1B": (
        "dropless",
        {"expert": 2, "pipeline": 2, "data": 2, "pipeline_schedule": "1f1b"},
        4,
        "none",
    ),
    "bias, expert=2 x pipeline=2 x data=2, 1F1B, ZeRO 1": (
        "bias",
        {"expert": 2, "pipeline": 2, "data": 2, "zero_stage": 1, "pipeline_schedule": "1f1b"},
        4,
        "selective_op",
    ),
    "capacity, expert=2 x fsdp=2 x pipeline=2, 1F1B": (
        "capacity",
        {"expert": 2, "fsdp": 2, "pipeline": 2, "pipeline_schedule": "1f1b"},
        4,
        "full",
    ),
    "capacity, expert=2 x context=2 x pipeline=2, 1F1B": (
        "capacity",
        {"expert": 2, "context": 2, "pipeline": 2, "pipeline_schedule": "1f1b"},
        4,
        "full",
    ),
    "bias, expert=2 x context=2 x pipeline=2, 1F1B, ZeRO 1": (
        "bias",
        {"expert": 2, "context": 2, "pipeline": 2, "pipeline_schedule": "1f1b", "zero_stage": 1},
        2,
        "none",
    ),
    "capacity, fsdp=2 x tensor=2 x pipeline=2, 1F1B": (
        "capacity",
        {"fsdp": 2, "tensor": 2, "pipeline": 2, "pipeline_schedule": "1f1b"},
        4,
        "selective_op",
    ),
    "capacity, expert=2 x pipeline=2 in 2 chunks": (
        "capacity, 4 layers",
        {"expert": 2, "pipeline": 2, "pipeline_chunks": 2},
        4,
        "none",
    ),
    "capacity, expert=2 x pipeline=2 in 2 chunks, 1F1B": (
        "capacity, 4 layers",
        {"expert": 2, "pipeline": 2, "pipeline_chunks": 2, "pipeline_schedule": "1f1b"},
        4,
        "full",
    ),
    "dropless, expert=2 x pipeline=2 x data=2, ZB-H1": (
        "dropless",
        {"expert": 2, "pipeline": 2, "data": 2, "pipeline_schedule": "zb_h1"},
        4,
        "none",
    ),
    "bias, expert=2 x pipeline=2 x heads over context=2, ZB-H1, ZeRO 1": (
        "bias",
        {
            "expert": 2,
            "pipeline": 2,
            "context": 2,
            "context_strategy": "all_to_all",
            "zero_stage": 1,
            "pipeline_schedule": "zb_h1",
        },
        4,
        "selective_op",
    ),
    "capacity, expert=2 x fsdp=2 x pipeline=2, ZB-H1": (
        "capacity",
        {"expert": 2, "fsdp": 2, "pipeline": 2, "pipeline_schedule": "zb_h1"},
        4,
        "full",
    ),
    "dropless, fsdp=2 x tensor=2 x pipeline=2, ZB-H1": (
        "dropless",
        {"fsdp": 2, "tensor": 2, "pipeline": 2, "pipeline_schedule": "zb_h1"},
        4,
        "selective",
    ),
}
"""Fields of `model.moe`, axes, microbatches and recompute. In a pipeline stages have unlike numbers
of layers with experts, or dense layers before them."""


def run_of(kind: str, layout: dict[str, Any], microbatches: int = 1, remat: str = "none"):
    """A small run of a decoder with experts."""
    tables = {
        "model": {
            "name": "llama", "layers": 4 if kind.endswith("4 layers") else 3, "hidden": 32,
            "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "remat": remat,
            "moe": {"experts": 8, "experts_per_token": 2, "expert_hidden": 16, **KINDS[kind]},
            "mtp": {} if kind == "bias" else None,
        },
        "data": {
            "name": "synthetic_tokens", "tokens": TOKENS, "vocabulary": 32,
            "train_examples": GLOBAL_BATCH * 5, "test_examples": 10,
        },
        "batch": {"global_batch": GLOBAL_BATCH, "microbatches": microbatches},
        "optimizer": {"name": "adamw", "epsilon": 1e-3},
        "schedule": {"base_learning_rate": 0.002},
        "layout": {"data": 1, **layout},
    }  # fmt: skip
    return resolve(build(RunConfig, tables))


@cache
def initial_state(kind: str) -> Any:
    """The state before the first update, as one device draws it."""
    run = run_of(kind, {})
    return jax.tree.map(np.asarray, init_state(run, build_mesh(run.layout, jax.local_devices())))


def train(
    run: ResolvedRun, initial: Any, updates: int, seed: int = 0, counted: int | None = None
) -> tuple[list[Any], Any]:
    """Metrics of the updates, and the state after them, of batches whose first rows count."""
    step = build_step(run, build_mesh(run.layout))
    state = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding), initial, step.state
    )
    generator, metrics = np.random.default_rng(seed), []
    count = run.split.global_batch
    counts = (np.arange(count) < (counted or count)).astype(np.float32)
    for _ in range(updates):
        rows = generator.integers(0, 32, (2, count, *run.dataset.input_shape)).astype(np.int32)
        batch = {"inputs": rows[0], "targets": rows[1], "weights": counts}
        placed = {
            name: jax.device_put(batch[name], step.batch[name].sharding) for name in step.batch
        }
        state, found = step.function(state, placed)
        metrics.append({name: float(value) for name, value in found.items()})
    return metrics, state


@cache
def on_one_device(kind: str, microbatches: int) -> Any:
    """The reference, whose closest choice of groups and experts is by more than `MARGIN`."""
    plain, margins = lax.top_k, []

    def top_k(scores: jax.Array, count: int) -> Any:
        if count < scores.shape[-1]:
            ordered = jnp.sort(scores)
            closest = (ordered[..., -count] - ordered[..., -count - 1]).min()
            jax.debug.callback(margins.append, closest)
        return plain(scores, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lax, "top_k", top_k)
        found = train(run_of(kind, {}, microbatches), initial_state(kind), UPDATES, SEEDS[kind])
    jax.effects_barrier()
    assert min(margins) > MARGIN
    return found


@pytest.mark.slow_except(*list(LAYOUTS)[:2], "capacity, pipeline=2 x expert=2, 1F1B")
@pytest.mark.parametrize("title", LAYOUTS)
def test_experts_train_over_every_axis_what_one_device_trains(title):
    """Losses, losses of routers, loads, drops, parameters and biases. It compiles two steps."""
    kind, axes, microbatches, remat = LAYOUTS[title]
    run = run_of(kind, axes, microbatches, remat)
    metrics, state = train(run, initial_state(kind), UPDATES, SEEDS[kind])
    expected, reference = on_one_device(kind, microbatches)

    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=RTOL, abs=1e-6)
    found = ((each.params, each.model_state) for each in (state, reference))
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=RTOL * max(scale, 1e-2))


def test_losses_of_routers_are_of_all_tokens_whatever_rows_count():
    """On two devices, of which one has no row that counts, as on one. It compiles two steps."""
    fields = {
        "model.layers": 1, "model.hidden": 8, "model.heads": 2, "model.moe.dense_layers": 0,
        "model.moe.shared_experts": 0, "input.remainder": "pad",
        "data.train_examples": GLOBAL_BATCH * 5 - 7,
    }  # fmt: skip
    runs = []
    for layout in ({}, {"data": 2, "zero_stage": 1}):
        config = replace(run_of("dropless", layout, 2).config, optimizer=SgdConfig())
        runs.append(resolve(with_fields(config, fields)))
    initial = jax.tree.map(np.asarray, init_state(runs[0], build_mesh(runs[0].layout)))
    found = []
    for run in runs:
        metrics, state = train(run, initial, 1, counted=6)
        before, after = (
            each.params["blocks"]["feed_forward"]["router"] for each in (initial, state)
        )
        found.append((metrics[0], after - before))
    (expected, of_one), (metrics, of_two) = found

    assert metrics == pytest.approx(expected, rel=RTOL)
    np.testing.assert_allclose(of_two, of_one, rtol=0, atol=1e-4 * np.abs(of_one).max())


def layer(**fields: Any) -> MoeConfig:
    """A layer of 4 experts of which a token chooses 2."""
    return MoeConfig(**{"experts": 4, "experts_per_token": 2, "expert_hidden": 8, **fields})


def test_a_router_chooses_the_best_experts_by_hand():
    """Softmax over the chosen, the bias in the choice alone, and groups by their best or best two.

    With the unit matrix as router, logits are the token itself.
    """
    logits = np.log([8.0, 4.0, 2.0, 1.0])
    x_BSD, router_DE = jnp.asarray(logits, jnp.float32)[None, None], jnp.eye(4)

    def chosen(bias: Any = None, **fields: Any) -> tuple[list[int], list[float]]:
        found = routed(x_BSD, router_DE, bias, layer(router=RouterConfig(**fields)))
        return found.experts_BSK[0, 0].tolist(), found.weights_BSK[0, 0].tolist()

    assert chosen() == ([0, 1], pytest.approx([2 / 3, 1 / 3]))
    assert chosen(normalise_weights=False) == ([0, 1], pytest.approx([8 / 15, 4 / 15]))
    # Sigmoids are 8/9, 4/5, 2/3 and 1/2; the bias lifts the last over all.
    biased = chosen(jnp.asarray([0.0, 0, 0, 1]), scores="sigmoid", scaling=2.5, balance="bias")
    assert biased == ([3, 0], pytest.approx([2.5 * 9 / 25, 2.5 * 16 / 25]))
    # Of the groups {0, 1} and {2, 3} the second, by its best one.
    bias = jnp.asarray([0.0, 0, 0.5, 0])
    assert chosen(bias, groups=2)[0] == [2, 3]


def test_tokens_beyond_the_capacity_are_dropped_by_hand():
    """One sample of 4 equal tokens: both their experts have 4, and room for 4 x 2 / 4 = 2."""
    network = build_layer(layer(capacity_factor=1.0), hidden=4)
    made_BSD, report = jax.jit(network)(jnp.ones((1, 4, 4)))

    assert report.dropped_share == 0.5
    assert sorted(report.load_E.tolist()) == [0, 0, 4, 4]
    assert jnp.abs(made_BSD[0, :2]).min() > 0
    np.testing.assert_array_equal(made_BSD[0, 2:], 0)
    # Both experts have half of the assignments: 4 x (1/2 p + 1/2 q), p and q their scores.
    scores_E = np.sort(routed(jnp.ones((1, 1, 4)), network.router[...], None, layer()).scores_BSE)
    assert report.auxiliary_loss == pytest.approx(2 * scores_E[0, 0, 2:].sum(), rel=1e-6)


def build_layer(moe: MoeConfig, hidden: int) -> MoeFeedForward:
    """A layer of larger weights than those of training, so that all matters."""
    config = LlamaConfig(hidden=hidden, heads=2, kv_heads=2, moe=moe)
    network = MoeFeedForward(config, moe, rngs=nnx.Rngs(0))
    structure, params = nnx.split(network)
    return nnx.merge(structure, jax.tree.map(lambda leaf: 40 * leaf, params))


@pytest.mark.slow_except("dropless", "sigmoid")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"router": RouterConfig(scores="sigmoid", scaling=2.5)},
        {"capacity_factor": 1.0},
        {"shared_experts": 2},
    ],
    ids=["dropless", "sigmoid", "capacity", "shared experts"],
)
def test_gradients_of_the_router_are_those_of_finite_differences(fields):
    """Of the results, and of each loss of the router, while no choice changes. It compiles both.

    Of a central difference of width h a float32 function of size f is off by its rounding, 6e-8 f /
    h, here 6e-5 for f of 10, and by h^2 / 6 of the third derivative, 2e-5 of it.
    """
    network = build_layer(layer(**fields), hidden=4)
    structure, state = nnx.split(network)
    params: Any = nnx.to_pure_dict(state)
    x_BSD = jax.random.normal(jax.random.key(1), (2, 8, 4))
    direction = jax.random.normal(jax.random.key(2), (4, 4))

    @jax.jit
    def parts(change: float) -> jax.Array:
        moved = {**params, "router": params["router"] + change * direction}
        made_BSD, report = nnx.merge(structure, nnx.State(moved))(x_BSD)
        return jnp.stack([jnp.sum(jnp.sin(made_BSD)), report.auxiliary_loss, report.z_loss])

    width = 3e-3
    differences = (parts(width) - parts(-width)) / (2 * width)
    _, of_parts = jax.vjp(parts, 0.0)
    gradients = [float(of_parts(one)[0]) for one in jnp.eye(3)]

    assert gradients == pytest.approx(differences.tolist(), rel=1e-3, abs=1e-3)
    assert min(map(abs, gradients)) > 0.01


@pytest.mark.parametrize("mean", [1, 9, 1000.5, 2048, 2049, 8193])
def test_blocks_at_even_load_hold_few_rows_more_than_there_are(mean):
    """Fewer than 32, whatever the load."""
    blocks = _Blocks(rows=block_rows(mean), mean=mean, most=8 * 2**14, per_token=2, is_kept=False)

    assert 0 <= blocks.at_even_load(1) * blocks.rows - mean < 32


def test_experts_in_8_bits_are_costed_and_not_trained():
    """Nor are they where capacities make their products others than the cast knows."""
    run = resolve(with_fields(run_of("bias", {}).config, {"model.compute_dtype": "mxfp8"}))
    with pytest.raises(ConfigError, match=r"'mxfp8' is refused: with model\.moe .* costing only"):
        train_setup(run)
    without = resolve(with_fields(run.config, {"model.moe": None}))
    with pytest.raises(ConfigError, match=r"'mxfp8' is refused: with model\.mtp .* costing only"):
        train_setup(without)
    with pytest.raises(ConfigError, match=r"capacity_factor=1\.25 is refused: in mxfp8"):
        with_fields(run.config, {"model.moe.capacity_factor": 1.25})


def test_routers_decay_as_other_matrices_do():
    """All that a layer with experts learns are matrices."""
    params = nnx.state(build_layer(layer(shared_experts=1), hidden=4), nnx.Param)

    assert all(jax.tree.leaves(_weights(nnx.to_pure_dict(params))))
    assert set(params) == {"router", "experts", "shared"}


def test_a_bias_evens_the_loads():
    """Of fixed routers: without it the fullest expert of 8 has two thirds more than the mean. It
    compiles a step."""
    changed = {
        "model.moe.router.bias_update_rate": 2e-3, "schedule.base_learning_rate": 1e-9,
        "batch.global_batch": 32, "data.tokens": 16, "model.moe.load_window": 5 * 32 * 16 * 2,
    }  # fmt: skip
    run = resolve(with_fields(run_of("bias", {}).config, changed))
    initial = jax.tree.map(np.asarray, init_state(run, build_mesh(run.layout)))
    metrics, state = train(run, initial, 25)
    loads = [each["expert_load"] for each in metrics]
    steps = np.asarray(state.model_state["blocks"]["feed_forward"]["bias"]) / 2e-3

    assert loads[0] > 1.6
    of_windows = [each["expert_load_of_window"] for each in metrics]
    assert of_windows[3] == 0
    for end in (4, 9, 24):  # the largest of any update is no less than that of all
        assert 1 < of_windows[end] < np.mean(loads[end - 4 : end + 1])
    assert of_windows[5:9] == [of_windows[4]] * 4
    assert np.mean(loads[15:]) < 1.35
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
    assert 2 < np.abs(steps).max() <= 25


@pytest.mark.parametrize(
    ("rule", "moves"),
    [("sign", [-1, 1, 1, 0]), ("error", [-1, 1 / 3, 2 / 3, 0])],
)
def test_a_bias_moves_by_the_sign_or_by_the_size_of_what_a_load_is_off(rule, moves):
    """Loads of 6, 2, 1 and 3 are 3 in the mean; counting begins anew."""
    router = RouterConfig(scores="sigmoid", balance="bias", bias_update_rate=0.5, bias_update=rule)
    model = LlamaConfig(layers=1, moe=layer(experts=4, router=router))
    load, bias = jnp.asarray([[6.0, 2, 1, 3]]), jnp.asarray([[1.0, 1, 1, 1]])
    state = {"blocks": {"feed_forward": {"load": load, "bias": bias}}}

    after = with_counted_loads(model, state)[0]["blocks"]["feed_forward"]

    assert after["bias"][0].tolist() == pytest.approx([1 + 0.5 * move for move in moves])
    assert not after["load"].any()


def test_matrices_of_experts_are_gathered_again_and_no_loop_over_them_is_run_again():
    """In bfloat16 without recompute: a loop over blocks and a gather of each matrix in the forward
    pass, and the same in the backward pass. It compiles a step."""
    changed = {
        "model.compute_dtype": "bfloat16", "model.layers": 2, "model.moe.dense_layers": 0,
        "model.moe.shared_experts": 0, "model.moe.router.z_loss_weight": 0.0,
    }  # fmt: skip
    run = resolve(with_fields(run_of("dropless", {"fsdp": 2}).config, changed))
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    compiled = step.function.lower(step.state, step.batch).compile()

    # XLA gathers in float32 on CPU: [8, 32, 2, 16] and [8, 16, 32] elements of 4 bytes.
    def found(items: Any, layer: str = "") -> list[tuple[str, str]]:
        each: list[tuple[str, str]] = []
        for item in items:
            if isinstance(item, Loop) and item.expert_blocks is not None:
                operations = [one for one in item.body if isinstance(one, Operation)]
                products = sum(one.kind == "matmul" for one in operations)
                each.append((layer, f"blocks, products {products}"))
            elif isinstance(item, Loop):
                each += found(item.body, item.name)
            elif item.collective is not None and (size := item.collective.payload_bytes) > 16_000:
                each.append((layer, f"{item.collective.name} of {size}"))
        return each

    of_layers = found(read_step(compiled, mesh, run).operations)
    with_experts = [layer for layer, what in of_layers if what.startswith("blocks")]
    forward, backward = (
        sorted(what for where, what in of_layers if where == layer) for layer in with_experts
    )
    assert forward == ["all_gather of 16384", "all_gather of 32768", "blocks, products 2"]
    sums = ["reduce_scatter of 16384", "reduce_scatter of 32768"]
    assert backward == [*forward[:2], "blocks, products 4", *sums]

    metrics, _ = train(run, init_state(run, mesh), 2)
    assert metrics[1]["loss"] == pytest.approx(np.log(32), rel=0.01)


def test_state_of_dense_parameters_is_in_parts_over_data_and_expert():
    """Those of experts lie over the expert axis already: ZeRO 1 divides them by data alone."""
    layout = {"expert": 2, "data": 2, "zero_stage": 1}
    run = run_of("dropless", layout)
    step = build_step(run, build_mesh(run.layout))

    def share(leaf: jax.ShapeDtypeStruct) -> float:
        assert leaf.sharding is not None
        return np.prod(leaf.sharding.shard_shape(leaf.shape)) / leaf.size

    moments = step.state.opt_state[0].mu["blocks"]
    assert share(moments["attention"]["qkv"]["kernel"]) == 1 / 4
    assert share(moments["feed_forward"]["experts"]["gated"]["kernel"]) == 1 / 4
    assert share(moments["feed_forward"]["router"]) == 1 / 4
