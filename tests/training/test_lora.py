"""Adapters of linear layers: what they compute, what stays, and what they cost."""

import functools
from functools import partial

import jax
import numpy as np
import pytest

from scalejax.config.checks import require_adaptable_model
from scalejax.config.model import DecoderConfig, MlpConfig
from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.config.training import FineTuningConfig, LoraConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.models import BatchNormScope, parameter_path
from scalejax.training.gradients import gradients
from scalejax.training.mesh import build_mesh
from scalejax.training.setup import train_setup
from scalejax.training.state import TrainState, abstract_state, initial_network
from scalejax.training.step import build_step, forward, init_state
from scalejax.xla.compiled import read_step

ROWS, TOKENS, WORDS = 16, 8, 32
RANK, ALPHA = 4, 8.0
MODELS = {
    "gpt": {"name": "gpt", "layers": 4, "hidden": 32, "heads": 4},
    "llama": {"name": "llama", "layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4},
    "latent": {"name": "llama", "layers": 1, "hidden": 16, "heads": 2}
    | {"mla": {"kv_lora_rank": 8, "nope_head_size": 4, "rope_head_size": 4, "value_head_size": 4}},
}
LORA = {"rank": RANK, "alpha": ALPHA}


def run_of(model, fine_tuning=None, layout=None, microbatches=1, **fields) -> ResolvedRun:
    """A small run on random tokens; `fields` are of its network."""
    tables = {
        "model": {**MODELS[model], **fields},
        "data": {"name": "synthetic_tokens", "tokens": TOKENS, "vocabulary": WORDS}
        | {"train_examples": 4 * ROWS, "test_examples": ROWS},
        "batch": {"global_batch": ROWS, "microbatches": microbatches},
        "optimizer": {"name": "adamw", "epsilon": 1e-3, "weight_decay": 0.1},
        "schedule": {"base_learning_rate": 0.01, "scaling": "none", "warmup": "none"}
        | {"decay": "constant"},
        "layout": layout or {"data": 1},
    }
    if fine_tuning is not None:
        tables["fine_tuning"] = fine_tuning
    return resolve(build(RunConfig, tables))


def batch_of(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tokens, and others to follow them."""
    shape = (ROWS, TOKENS)
    return {
        name: generator.integers(0, WORDS, shape, dtype=np.int32) for name in ("inputs", "targets")
    }


def trained(run: ResolvedRun) -> tuple[TrainState, TrainState, list[float]]:
    """The state before and after three updates, in NumPy, and the losses."""
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    before, generator, losses = jax.tree.map(np.array, state), np.random.default_rng(0), []
    for _ in range(3):
        batch = batch_of(generator)
        placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
        state, metrics = step.function(state, placed)
        losses.append(float(metrics["loss"]))
    return before, jax.tree.map(np.array, state), losses


@functools.cache
def on_one_device(model: str) -> tuple[TrainState, TrainState, list[float]]:
    """`trained` of all adapters of `model`, of which several layouts are held against one."""
    return trained(run_of(model, {"lora": LORA}))


def by_path(tree) -> dict[str, np.ndarray]:
    """The leaves of a tree, by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {parameter_path(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize(
    ("model", "scale"), [("gpt", ALPHA / RANK), pytest.param("llama", 4, marks=pytest.mark.slow)]
)
def test_at_the_start_adapters_add_nothing_and_learn_what_the_matrix_would(model, scale):
    """From y = x W + s (x A) B: dB = s A^T dW for every matrix, and dA = 0 while B = 0."""
    tuning = {"lora": {**LORA, "rank_stabilized": scale == ALPHA / RANK**0.5}}
    batch = batch_of(np.random.default_rng(0))

    def of(run: ResolvedRun):
        setup = train_setup(run)
        params, statistics = initial_network(setup)
        differentiate = jax.jit(partial(gradients, setup, BatchNormScope(), scale=None))
        found, _, metrics = differentiate(params, statistics, batch)
        return by_path(params), by_path(found), float(metrics["loss"])

    base, whole, expected = of(run_of(model))
    params, narrow, loss = of(run_of(model, tuning))

    assert loss == expected
    assert all((params[path] == base[path]).all() for path in base)
    kernels = [path for path in base if path.endswith("/kernel")]
    assert len(narrow) == 2 * len(kernels) == 8
    for path in kernels:
        layer = path.removesuffix("/kernel")
        count, inputs = base[path].shape[:2]
        of_kernel = whole[path].reshape(count, inputs, -1)
        by_hand = scale * np.einsum("lir,lio->lro", params[f"{layer}/lora_a"], of_kernel)
        found = narrow[f"{layer}/lora_b"].reshape(by_hand.shape)
        np.testing.assert_allclose(found, by_hand, rtol=0, atol=1e-5 * np.abs(by_hand).max())
        assert not narrow[f"{layer}/lora_a"].any()


def test_adapters_alone_are_trained_and_kept():
    """Every adapter moves, no other parameter does, and Adam keeps moments of adapters alone."""
    before, after, _ = on_one_device("gpt")
    old, new = by_path(before.params), by_path(after.params)

    moved = {path for path in new if (new[path] != old[path]).any()}
    assert moved == {path for path in new if path.endswith(("lora_a", "lora_b"))}
    moments = [leaf.shape for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
    assert sorted(moments) == sorted(2 * [new[path].shape for path in moved])


@pytest.mark.slow_except(
    "gpt-layout0-4-selective", "gpt-layout1-1-none"
)  # two programs of three axes to compile: 7 s
@pytest.mark.parametrize(
    ("model", "layout", "microbatches", "remat"),
    [
        ("gpt", {"data": 2, "tensor": 2, "pipeline": 2}, 4, "selective"),
        ("gpt", {"data": 1, "fsdp": 4, "tensor": 2, "sequence_parallel": True}, 1, "none"),
        ("llama", {"data": 2, "fsdp": 2, "context": 2}, 2, "selective_op"),
        ("llama", {"data": 2, "tensor": 2, "pipeline": 2}, 4, "full"),
        ("llama", {"data": 2, "pipeline": 2, "pipeline_schedule": "1f1b"}, 4, "none"),
        ("gpt", {"data": 4, "tensor": 2, "zero_stage": 2}, 2, "none"),
        ("gpt", {"data": 8, "mode": "shard_map"}, 2, "none"),
    ],
)
def test_a_layout_trains_the_adapters_that_one_device_trains(model, layout, microbatches, remat):
    """A and B are split as their matrix is."""
    _, ours, losses = trained(run_of(model, {"lora": LORA}, layout, microbatches, remat=remat))
    _, theirs, expected = on_one_device(model)

    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (ours.params, theirs.params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(np.abs(other).max(), 1e-2))


def test_a_base_in_bfloat16_is_the_same_base_in_half_the_memory():
    """Matrices and embeddings are used in bfloat16 alone; norms and adapters stay in float32."""
    runs = [
        run_of("llama", {"lora": LORA, "base_dtype": each}, compute_dtype="bfloat16")
        for each in ("float32", "bfloat16")
    ]
    batch = batch_of(np.random.default_rng(0))

    def of(run: ResolvedRun):
        loss, _ = forward(run)
        loss = jax.jit(loss, compiler_options={"xla_allow_excess_precision": False})
        params, statistics = initial_network(train_setup(run))
        return params, float(loss(params, statistics, batch)[0])

    (_, expected), (params, found) = map(of, runs)

    types = {path: leaf.dtype for path, leaf in by_path(params).items()}
    half = {path for path, dtype in types.items() if dtype == "bfloat16"}
    assert half == {path for path in types if path.endswith(("kernel", "embedding"))}
    assert found == expected


def test_frozen_matrices_have_no_gradient():
    """Of the three products of a frozen matrix the step computes two, in the text of the compiler
    as in the FLOP that MFU counts: by hand."""
    run = run_of("gpt", {"lora": {**LORA, "targets": ["linear_qkv", "up_proj"]}})
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    program = read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)

    width, layers = 32, 4
    matrices = layers * (4 + 8) * width**2 + WORDS * width
    adapters = layers * RANK * ((width + 3 * width) + (width + 4 * width))
    attention = layers * 2 * TOKENS * width  # scores and their use, of activations alone
    flop = 2 * ROWS * TOKENS * (2 * matrices + 3 * adapters + 3 * attention)
    assert program.model_flop == flop
    assert program.flop == pytest.approx(flop, rel=1e-6)


@pytest.mark.parametrize(
    ("tuning", "model", "says"),
    [
        ({"lora": {"targets": ["gated"]}}, "gpt", "targets='gated'.*(down|up)"),
        ({"lora": {"targets": ["q_proj", "v_proj"]}}, "llama", "one matrix here: name all of"),
        ({"lora": {"targets": ["up_proj"]}}, "llama", "name both gate_proj and up_proj"),
        ({"lora": {"targets": []}}, "gpt", "name at least one layer"),
        ({"lora": {"rank": 0}}, "gpt", r"fine_tuning\.lora\.rank=0"),
        ({"base_dtype": "bfloat16", "rate_factors": {"norm": 0.1}}, "gpt", "nothing is frozen"),
    ],
)
def test_what_cannot_be_adapted_is_refused(tuning, model, says):
    """With what would be accepted."""
    with pytest.raises(ConfigError, match=says):
        abstract_state(train_setup(run_of(model, tuning)))


@pytest.mark.parametrize("model", MODELS)
def test_a_config_knows_the_linear_layers_of_its_blocks(model):
    """Targets that its network lacks are refused before it is built."""
    run = run_of(model)
    params = abstract_state(train_setup(run)).params
    parts = [parameter_path(path).split("/") for path, _ in jax.tree.leaves_with_path(params)]
    names = {each[-2] for each in parts if each[0] == "blocks" and each[-1] == "kernel"}

    assert isinstance(run.config.model, DecoderConfig)
    assert names == set(run.config.model.linear_layers)
    if model == "latent":
        for target in ("linear_qkv", "q_down"):
            with pytest.raises(ConfigError, match=f"targets='{target}'.*kv_down, kv_up.*q"):
                run_of(model, {"lora": {"targets": [target]}})


def test_a_network_without_adapters_is_refused():
    """The layers of others do not know them."""
    with pytest.raises(ConfigError, match="adapters are for decoders"):
        require_adaptable_model(FineTuningConfig(lora=LoraConfig()), MlpConfig())
