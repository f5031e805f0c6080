"""Every layout, mode and optimizer trains what one device trains: the trainer's backbone.

Tolerances. Both runs are float32 and differ in the order of sums only, so losses and parameters
differ by rounding: a few units in the last place (6e-8) per operation, carried through all updates.
`RTOL` allows about a hundred of them for three updates, relative to the largest entry of each
array, and is two hundred times smaller than what one of three updates changes (a test below shows
that). All but the published networks, and processes, are trained for 20 updates, of which each adds
its rounding to that of those before: `LONG_RTOL` is `RTOL` for each three of them, 20 / 3 of it,
thirty times smaller than that change; a third of it was seen.
Adam divides gradients by their own size, so where the true gradient is zero (the bias of keys
in attention) rounding would be blown up to a full step; a larger epsilon than usual, 1e-3,
keeps what is rounding small.
"""

import functools
import itertools
import math
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from scalejax.config.model import Remat
from scalejax.config.optimizer import ClippingConfig, OptimizerConfig, SgdConfig
from scalejax.config.run import ResolvedRun, RunConfig, resolve, with_fields
from scalejax.config.schedule import ScheduleConfig
from scalejax.config.training import DropoutConfig
from scalejax.core import environment
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.models import attention, is_cast, parameter_path
from scalejax.models.normalization import BatchNorm, BatchNormScope
from scalejax.training.mesh import build_mesh
from scalejax.training.setup import network_of, train_setup
from scalejax.training.state import TrainState, initial_network
from scalejax.training.step import build_step, forward, init_state
from scalejax.xla.compiled import read_step

UPDATES = 5
"""Of a run; its warmup takes two of them."""
TRAINED = 3
"""Of those, of published networks and over processes: where both schedules and all buffers have
been at work."""
LONG = 20
"""Updates of the others."""
RTOL = 1e-5
LONG_RTOL = RTOL * LONG / TRAINED
GLOBAL_BATCH = 32

MODELS = {
    "mlp": {"model": {"name": "mlp", "hidden": [32, 16]}, "data": "images"},
    "cnn": {"model": {"name": "cnn", "channels": [8, 16]}, "data": "images"},
    "gpt": {
        "model": {"name": "gpt", "layers": 4, "hidden": 32, "heads": 4, "remat": "full"},
        "data": "tokens",
    },
}
ZOO = {
    "alexnet": {"model": {"name": "alexnet", "width": 1 / 32}, "data": "67 px"},
    "vgg16": {"model": {"name": "vgg16", "width": 1 / 32}, "data": "32 px"},
    "inception_v3": {"model": {"name": "inception_v3", "width": 1 / 32}, "data": "75 px"},
    "xception": {"model": {"name": "xception", "width": 1 / 32}, "data": "16 px"},
    "efficientnet_lite0": {
        "model": {"name": "efficientnet_lite0", "width": 1 / 8},
        "data": "32 px",
    },
    "bert_base": {
        "model": {"name": "bert_base", "layers": 2, "hidden": 32, "heads": 4},
        "data": "masked",
    },
    "bert_large": {
        "model": {
            "name": "bert_large",
            "layers": 2,
            "hidden": 64,
            "heads": 8,
            "remat": "full",
        },
        "data": "masked",
    },
    "llama": {
        "model": {"name": "llama", "layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4},
        "data": "tokens",
    },
    "vit": {
        "model": {"name": "vit", "patch": 4, "layers": 2, "hidden": 32, "heads": 4},
        "data": "16 px",
    },
}
"""The networks that take long to compile: one optimizer each, and most rows slow."""
DEEPER = {
    "gpt of 6 blocks": {**MODELS["gpt"], "model": {**MODELS["gpt"]["model"], "layers": 6}},
    "llama of 3 blocks": {**ZOO["llama"], "model": {**ZOO["llama"]["model"], "layers": 3}},
}
TODAY = {
    "local and global layers": {
        "model": {
            **ZOO["llama"]["model"],
            "scaled_embeddings": True,
            "norm_epsilon": 0.01,
            "block": {
                "head_size": 16,
                "qkv_bias": True,
                "qk_norm": "all_heads",
                "sliding_window": 4,
                "global_every": 2,
                "local_rope_theta": 10.0,
                "attention_sinks": True,
                "activation": "gelu",
                "post_norms": True,
            },
        },
        "data": "tokens",
    },
    "experts": {
        "model": {
            **ZOO["llama"]["model"],
            "layers": 2,
            "moe": {
                "experts": 4,
                "experts_per_token": 2,
                "expert_hidden": 32,
                "shared_experts": 1,
            },
        },
        "data": "tokens",
    },
    "the token after the next": {
        "model": {**ZOO["llama"]["model"], "layers": 2, "mtp": {"loss_weight": 0.5}},
        "data": "tokens",
    },
    "latent attention": {
        "model": {
            **ZOO["llama"]["model"],
            "block": {"activation": "squared_relu", "is_gated": False, "norm": "layer"},
            "mla": {
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "nope_head_size": 8,
                "rope_head_size": 4,
                "value_head_size": 6,
            },
        },
        "data": "tokens",
    },
}
"""Decoders whose blocks are not Llama's."""
"""Networks whose blocks the stages of `UNEVEN` do not divide."""
DATA = {
    "images": {"name": "synthetic_images", "image_size": 8, "channels": 1, "classes": 8},
    "tokens": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32},
    "masked": {"name": "masked_tokens", "tokens": 16, "masked": 3, "vocabulary": 32},
    **{
        f"{size} px": {
            "name": "synthetic_images",
            "image_size": size,
            "channels": 1,
            "classes": 8,
        }
        for size in (16, 32, 67, 75)
    },
}
LAYOUTS = {
    "data=8": {"data": 8},
    "fsdp=8": {"data": 1, "fsdp": 8},
    "tensor=4": {"data": 1, "tensor": 4},
    "data=2 x tensor=4": {"data": 2, "tensor": 4},
    "data=2 x fsdp=4": {"data": 2, "fsdp": 4},
}
THREE_AXES = {"data=2 x fsdp=2 x tensor=2": {"data": 2, "fsdp": 2, "tensor": 2}}
OPTIMIZERS = {
    "sgd": {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
    "adamw": {"name": "adamw", "epsilon": 1e-3},
    "lars": {"name": "lars", "trust_coefficient": 0.01},
    "lamb": {"name": "lamb", "epsilon": 1e-3},
}
SGD = SgdConfig(momentum=0.9, weight_decay=1e-4)
VARIANTS: dict[str, dict[str, Any]] = {
    "lars of the paper": {"name": "lars", "variant": "paper", "trust_coefficient": 0.01},
    "lamb of the paper": {"name": "lamb", "variant": "paper", "weight_norm_bound": 1.0}
    | {"epsilon": 1e-3},
    "nvlamb, clipped": {"name": "lamb", "variant": "nvlamb", "trust_clip": 1.0, "epsilon": 1e-3},
    "momentum correction": {"name": "sgd", "momentum_form": "rate_inside_corrected"},
    "adagrad": {"name": "adagrad", "initial_accumulator": 0.1},
    "schedule-free": {"name": "schedule_free", "epsilon": 1e-3},
}
"""Optimizers of which two layouts are trained, and not all."""
OF_MATRICES: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon", "epsilon": 1e-3},
    "soap": {"name": "soap", "epsilon": 1e-3, "refresh_every_steps": 5, "ridge": 0.1},
    "shampoo": {"name": "shampoo", "epsilon": 1e-3, "refresh_every_steps": 5, "ridge": 0.1},
}
"""With a larger ridge than usual, which as epsilon keeps what is rounding small: a basis is as far
off as the means are, over the share of the smallest eigenvalue."""
CLIPPED: dict[str, dict[str, Any]] = {
    **OF_MATRICES,
    "mars": {"name": "mars", "epsilon": 1e-3},
    "adafactor": {"name": "adafactor", "smallest_factored": 8},
    "sophia": {"name": "sophia", "epsilon": 1e-3, "refresh_every_steps": 3},
    "cautious": {"name": "adamw", "epsilon": 1e-3, "cautious": True},
}
"""Optimizers whose gradients are clipped to a norm that all of theirs are above."""
HYBRIDS = {
    "data=2 x tensor=2 x pipeline=2": ({"data": 2, "tensor": 2, "pipeline": 2}, 4),
    "context=4": ({"data": 1, "context": 4}, 1),
    "fsdp=4 x tensor=2": ({"data": 1, "fsdp": 4, "tensor": 2}, 1),
    "pipeline=4, 8 microbatches": ({"data": 1, "pipeline": 4}, 8),
    "pipeline=2, interleaved": ({"data": 1, "pipeline": 2, "pipeline_chunks": 2}, 4),
    "tensor=4, tokens split": ({"data": 1, "tensor": 4, "sequence_parallel": True}, 1),
    "ZeRO 1, data=8": ({"data": 8, "zero_stage": 1}, 2),
    "ZeRO 2, data=4 x tensor=2": ({"data": 4, "tensor": 2, "zero_stage": 2}, 2),
    "data=2 x fsdp=2 x tensor=2": ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
    "data=2 x context=2 x tensor=2": (
        {"data": 2, "context": 2, "tensor": 2, "sequence_parallel": True},
        2,
    ),
    "fsdp=2 x tensor=2 x pipeline=2": ({"data": 1, "fsdp": 2, "tensor": 2, "pipeline": 2}, 4),
    "data=2 x context=2 x pipeline=2": ({"data": 2, "context": 2, "pipeline": 2}, 4),
    "all but context, ZeRO 1": (
        {"data": 2, "tensor": 2, "pipeline": 2, "sequence_parallel": True, "zero_stage": 1},
        4,
    ),
}
"""Layouts of transformers alone, with their microbatches; the first few are run by default."""
QUICK_HYBRIDS = 7
UNEVEN = {
    "2, 2, 1 and 1": ("gpt of 6 blocks", {"data": 1, "pipeline": 4}, 4),
    "2, 2, 1 and 1, ZeRO 1": (
        "gpt of 6 blocks",
        {"data": 2, "pipeline": 4, "zero_stage": 1},
        2,
    ),
    "2 and 1, fsdp=2 x tensor=2": (
        "llama of 3 blocks",
        {"data": 1, "fsdp": 2, "tensor": 2, "pipeline": 2},
        4,
    ),
    "2 and 1, context=2 x tensor=2": (
        "llama of 3 blocks",
        {"data": 1, "tensor": 2, "context": 2, "pipeline": 2, "sequence_parallel": True},
        2,
    ),
}
"""Blocks of the stages of a pipeline, unlike: network, layout and microbatches; the first is run
by default, and every axis is met once."""
OF_1F1B = {
    "data=2 x tensor=2 x pipeline=2, sequence parallel, ZeRO 1": (
        "gpt",
        "full",
        {"data": 2, "tensor": 2, "pipeline": 2, "sequence_parallel": True, "zero_stage": 1},
        4,
    ),
    "data=2 x fsdp=2 x pipeline=2": ("llama", "none", {"data": 2, "fsdp": 2, "pipeline": 2}, 4),
    "pipeline=4, 8 microbatches": ("gpt", "selective", {"data": 1, "pipeline": 4}, 8),
    "pipeline=4, 2 microbatches": ("llama", "selective_op", {"data": 1, "pipeline": 4}, 2),
    "pipeline=2, interleaved": (
        "llama",
        "full",
        {"data": 1, "tensor": 2, "pipeline": 2, "pipeline_chunks": 2},
        4,
    ),
    "fsdp=4 x pipeline=2, interleaved": (
        "gpt",
        "selective",
        {"data": 1, "fsdp": 4, "pipeline": 2, "pipeline_chunks": 2},
        4,
    ),
    "2, 2, 1 and 1": ("gpt of 6 blocks", "none", {"data": 2, "pipeline": 4, "zero_stage": 2}, 4),
    "2 and 1, context=2 x tensor=2": (
        "llama of 3 blocks",
        "full",
        {"data": 1, "tensor": 2, "context": 2, "pipeline": 2, "sequence_parallel": True},
        2,
    ),
    "local and global layers": (
        "local and global layers",
        "selective_op",
        {"data": 1, "fsdp": 2, "tensor": 2, "pipeline": 2},
        4,
    ),
    "latent attention": ("latent attention", "full", {"data": 2, "pipeline": 2}, 4),
    "token after the next": ("the token after the next", "none", {"data": 1, "pipeline": 2}, 4),
    "token after the next, context=2": (
        "the token after the next",
        "full",
        {"data": 1, "context": 2, "pipeline": 2},
        2,
    ),
    "local and global layers, context=2": (
        "local and global layers",
        "none",
        {"data": 1, "context": 2, "pipeline": 2},
        2,
    ),
}
"""Pipelines whose stages go forward and backward in turn: network, recompute, layout and
microbatches; the first two are run by default, and every axis is met."""
LEARNING_RATES = {"sgd": 0.1, "adamw": 0.01, "lars": 1.0, "lamb": 0.01}
LEARNING_RATES |= {"adagrad": 0.01, "schedule_free": 0.01, "mars": 0.01, "adafactor": 0.01}
LEARNING_RATES |= {"sophia": 0.01}
LEARNING_RATES |= dict.fromkeys(OF_MATRICES, 0.01)


def run_of(
    model: str,
    optimizer: str,
    layout: dict[str, Any],
    microbatches: int = 1,
    updates: int = UPDATES,
) -> ResolvedRun:
    """A small run."""
    about = {**MODELS, **ZOO, **DEEPER, **TODAY}[model]
    data, about_optimizer = DATA[about["data"]], {**OPTIMIZERS, **VARIANTS, **CLIPPED}[optimizer]
    tables = {
        "model": about["model"],
        "data": {**data, "train_examples": GLOBAL_BATCH * updates, "test_examples": 10},
        "batch": {"global_batch": GLOBAL_BATCH, "microbatches": microbatches},
        "optimizer": about_optimizer,
        "schedule": {
            "base_learning_rate": LEARNING_RATES[about_optimizer["name"]] / 2,
            "scaling": "linear",
            "reference_batch": GLOBAL_BATCH // 2,
            "warmup": "gradual",
            "warmup_epochs": 0.4,
            "decay": "constant" if optimizer == "schedule-free" else "cosine",
        },
        "layout": layout,
        "clipping": {"max_norm": 0.01} if optimizer in CLIPPED else None,
    }
    return resolve(build(RunConfig, tables))


def batches_of(run: ResolvedRun) -> list[dict[str, np.ndarray]]:
    """The same random batches for every layout."""
    generator = np.random.default_rng(0)
    rows, dataset = run.split.global_batch, run.dataset
    top = dataset.classes if dataset.is_text else 256
    dtype = np.int32 if dataset.is_text else np.uint8
    batches = [
        {
            "inputs": generator.integers(0, top, (rows, *dataset.input_shape)).astype(dtype),
            "targets": generator.integers(0, dataset.classes, (rows, *dataset.target_shape)).astype(
                np.int32
            ),
        }
        for _ in range(run.total_steps)
    ]
    if dataset.is_masked:
        shape = (rows, *dataset.target_shape)
        for batch in batches:
            tokens = dataset.input_shape[0]
            batch["places"] = generator.integers(0, tokens, shape, dtype=np.int32)
    return batches


@functools.cache
def initial_state(model: str, optimizer: OptimizerConfig = SGD) -> TrainState:
    """The state before the first update, as one device draws it, in NumPy."""
    config = run_of(model, "sgd", {"data": 1}).config
    level = ScheduleConfig(base_learning_rate=0.1)  # no state depends on it
    run = resolve(replace(config, optimizer=optimizer, schedule=level))
    return jax.tree.map(np.asarray, init_state(run, build_mesh(run.layout, jax.local_devices())))


def train(
    run: ResolvedRun, updates: int = TRAINED, model: str | None = None
) -> tuple[np.ndarray, TrainState]:
    """Losses of the updates, and the state after them; `model` where its name is not its key."""
    step = build_step(run, build_mesh(run.layout))
    initial = initial_state(model or run.config.model.name, run.config.optimizer)
    state = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding), initial, step.state
    )
    losses = []
    for batch in batches_of(run)[:updates]:
        placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
        state, metrics = step.function(state, placed)
        losses.append(float(metrics["loss"]))
    return np.asarray(losses), state


def trained(
    run: ResolvedRun, updates: int = TRAINED, model: str | None = None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Losses of the updates, and all parameters and statistics after them."""
    losses, state = train(run, updates, model)
    leaves = jax.tree.leaves((state.params, state.model_state))
    return losses, [np.asarray(leaf) for leaf in leaves]


@functools.cache
def on_one_device(
    model: str, optimizer: str, bn_group_size: int | None, microbatches: int, updates: int = TRAINED
) -> Any:
    """The reference; local BatchNorm keeps its groups when the devices become one."""
    layout: dict[str, Any] = {"data": 1}
    if bn_group_size is not None:
        layout |= {"bn_scope": "local", "bn_group_size": bn_group_size}
    run = run_of(model, optimizer, layout, microbatches, max(updates, UPDATES))
    return trained(run, updates, model)


def assert_same(run: Any, reference: Any, rtol: float = RTOL) -> None:
    """Losses and every array agree, relative to the largest entry of each."""
    np.testing.assert_allclose(run[0], reference[0], rtol=RTOL)
    for ours, theirs in zip(run[1], reference[1], strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * max(scale, 1e-2))


def assert_decoder_trains_as_on_one_device(
    model: str, layout: dict[str, Any], microbatches: int, remat: Remat | None = None
) -> None:
    """Its losses and parameters over 20 updates with AdamW, with that recompute if one is given."""
    run = run_of(model, "adamw", layout, microbatches, LONG)
    if remat is not None:
        run = resolve(replace(run.config, model=replace(run.config.model, remat=remat)))

    assert_same(trained(run, LONG, model), on_one_device(model, "adamw", None, 1, LONG), LONG_RTOL)


def assert_trains_as_on_one_device(
    model: str,
    optimizer: str,
    layout: dict[str, Any],
    microbatches: int = 1,
    bn_group_size: int | None = None,
) -> None:
    """Losses and parameters over 20 updates are those of one device, with the same groups of local
    BatchNorm if there are any."""
    run = run_of(model, optimizer, layout, microbatches, LONG)
    reference = on_one_device(model, optimizer, bn_group_size, 1, LONG)

    assert_same(trained(run, LONG), reference, LONG_RTOL)


@pytest.mark.slow_except("cnn-data=2 x fsdp=4", "mlp-tensor=4", "mlp-data=8")
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("mlp", "data=8"),
        ("cnn", "fsdp=8"),
        ("mlp", "tensor=4"),
        ("gpt", "data=2 x tensor=4"),
        ("cnn", "data=2 x fsdp=4"),
        ("gpt", "data=2 x fsdp=4"),
    ],
)
def test_every_layout_starts_from_the_same_state(model, layout):
    """The seed decides the initial parameters, and nothing else does, to the last bit."""
    run = run_of(model, "sgd", LAYOUTS[layout])
    state = init_state(run, build_mesh(run.layout))

    for ours, theirs in zip(
        jax.tree.leaves(state), jax.tree.leaves(initial_state(model)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(ours), theirs)


def pairs(by_default: Iterable[Any], slow: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Rows by default, and rows that are slow only in that they are many."""
    return [*by_default, *(pytest.param(*row, marks=pytest.mark.slow) for row in slow)]


@pytest.mark.slow_except(
    "mlp-lamb-fsdp=8",
    "mlp-adamw-data=2 x tensor=4",
    "cnn-lars-data=8",
    "cnn-sgd-data=2 x tensor=4",
    "cnn-sgd-data=2 x fsdp=4",
    "gpt-lamb-data=2 x fsdp=4",
)
@pytest.mark.parametrize(
    ("model", "optimizer", "layout"),
    pairs(
        [
            ("mlp", "lamb", "data=8"),
            ("mlp", "lamb", "fsdp=8"),
            ("mlp", "sgd", "tensor=4"),
            ("mlp", "adamw", "data=2 x tensor=4"),
            ("mlp", "adamw", "data=2 x fsdp=4"),
            ("cnn", "lars", "data=8"),
            ("cnn", "lars", "fsdp=8"),
            ("cnn", "lars", "tensor=4"),
            ("cnn", "sgd", "data=2 x tensor=4"),
            ("cnn", "sgd", "data=2 x fsdp=4"),
            ("gpt", "lamb", "data=2 x tensor=4"),
            ("gpt", "lamb", "data=2 x fsdp=4"),
            ("gpt", "adamw", "data=8"),
            ("gpt", "adamw", "fsdp=8"),
            ("gpt", "adamw", "tensor=4"),
        ],
        [
            ("mlp", "lars", "data=2 x fsdp=4"),
            ("cnn", "adamw", "fsdp=8"),
            ("cnn", "lamb", "tensor=4"),
            ("gpt", "lars", "data=2 x tensor=4"),
            ("gpt", "sgd", "data=8"),
            ("gpt", "sgd", "fsdp=8"),
        ],
    ),
)
def test_a_layout_trains_what_one_device_trains(model, optimizer, layout):
    """Losses and parameters over 20 updates, BatchNorm over all devices.

    Every two of a network, an optimizer and a layout meet in a row.
    """
    assert_trains_as_on_one_device(model, optimizer, LAYOUTS[layout])


def variant_table() -> list[Any]:
    """Every variant with both networks and with both layouts; those of the transformer slow."""
    ends = [("mlp", "data=2 x fsdp=4"), ("gpt", "data=2 x tensor=4")]
    others = [("mlp", "data=2 x tensor=4"), ("gpt", "data=2 x fsdp=4")]
    rows = [
        [(variant, *row) for row in (others if index % 2 else ends)]
        for index, variant in enumerate(VARIANTS)
    ]
    return pairs([row for row, _ in rows], [row for _, row in rows])


@pytest.mark.slow_except(
    "lars of the paper-mlp-data=2 x fsdp=4", "schedule-free-mlp-data=2 x tensor=4"
)
@pytest.mark.parametrize(("optimizer", "model", "layout"), variant_table())
def test_a_variant_of_an_optimizer_trains_what_one_device_trains(optimizer, model, layout):
    """Trust ratios, clips and averages are of whole layers, however they are split."""
    assert_trains_as_on_one_device(model, optimizer, LAYOUTS[layout])


@pytest.mark.slow_except("muon-mlp-data=2 x fsdp=4", "soap-mlp-data=2 x tensor=4")
@pytest.mark.parametrize(
    ("optimizer", "model", "layout"),
    [
        *itertools.product(["muon", "soap"], ["mlp"], LAYOUTS),
        ("muon", "gpt", "data=2 x fsdp=4"),
        ("shampoo", "mlp", "data=2 x fsdp=4"),
        ("mars", "mlp", "data=2 x tensor=4"),
        ("adafactor", "mlp", "data=2 x fsdp=4"),
        ("cautious", "mlp", "data=2 x tensor=4"),
        ("sophia", "mlp", "data=2 x tensor=4"),
        ("sophia", "gpt", "data=2 x fsdp=4"),
    ],
)
def test_clipping_and_matrices_are_of_whole_arrays(optimizer, model, layout):
    """Norms, products and preconditioners are those of one device, however matrices are split; as
    are labels that are sampled for an estimate of curvature."""
    microbatches = 2 if optimizer == "sophia" else 1  # of which labels do not depend
    assert_trains_as_on_one_device(model, optimizer, LAYOUTS[layout], microbatches)


DROPPING: dict[str, tuple[dict[str, Any], int]] = {
    "data=8": ({"data": 8}, 1),
    "fsdp=8": ({"data": 1, "fsdp": 8}, 1),
    "tokens split over tensor": ({"data": 1, "tensor": 4, "sequence_parallel": True}, 1),
    "ring": ({"data": 1, "context": 2, "context_strategy": "ring", "tensor": 2}, 1),
    "data=2 x tensor=4": ({"data": 2, "tensor": 4}, 4),
}
"""Layouts of dropout, with their microbatches."""


@pytest.mark.slow  # compiles a transformer for each layout
@pytest.mark.parametrize("layout", DROPPING)
def test_masks_of_dropout_are_those_of_one_device(layout):
    """They follow from seed, update, row and layer; with clipping, whose norm they change. That
    they are masks is tested with the networks."""
    reference = _with_dropout_on_one_device()

    assert_same(trained(_dropping(*DROPPING[layout]), LONG), reference, LONG_RTOL)


def _dropping(layout: dict[str, Any], microbatches: int) -> ResolvedRun:
    config = run_of("gpt", "adamw", layout, microbatches, LONG).config
    dropout, clipping = DropoutConfig(rate=0.25, depth_rate=0.25), ClippingConfig(max_norm=0.1)
    return resolve(replace(config, dropout=dropout, clipping=clipping))


@functools.cache
def _with_dropout_on_one_device() -> Any:
    return trained(_dropping({"data": 1}, 1), LONG)


@pytest.mark.slow_except("gpt-data=2 x tensor=2 x pipeline=2", "gpt-context=4")
@pytest.mark.parametrize(
    ("model", "layout"),
    pairs(
        [("gpt", layout) for layout in list(HYBRIDS)[:QUICK_HYBRIDS]],
        [
            ("gpt", "all but context, ZeRO 1"),
            ("llama", "pipeline=2, interleaved"),
            *(("llama", layout) for layout in list(HYBRIDS)[QUICK_HYBRIDS:]),
        ],
    ),
)
def test_stages_and_parts_of_tokens_train_what_one_device_trains(model, layout):
    """Pipelines, context, sequence parallelism and ZeRO, and products of them."""
    assert_decoder_trains_as_on_one_device(model, *HYBRIDS[layout])


CONTEXTS: dict[str, tuple[str, dict[str, Any], int, Remat]] = {
    "ring, context=4 x fsdp=2": ("gpt", {"context": 4, "fsdp": 2}, 1, "full"),
    "heads, context=2 x data=2": ("gpt", {"context": 2, "data": 2}, 2, "full"),
    "ring, context=4 x tensor=2": ("llama", {"context": 4, "tensor": 2}, 1, "none"),
    "heads, context=4 x tensor=2": ("llama", {"context": 4, "tensor": 2}, 1, "selective"),
    "ring, context=2 x tensor=2 x data=2": (
        "llama",
        {"context": 2, "tensor": 2, "data": 2, "sequence_parallel": True},
        2,
        "selective_op",
    ),
    "ring, context=2 x pipeline=2 x data=2": (
        "gpt",
        {"context": 2, "pipeline": 2, "data": 2},
        4,
        "selective",
    ),
    "gathered, context=2 x data=2 x tensor=2": (
        "llama",
        {"context": 2, "data": 2, "tensor": 2, "sequence_parallel": True},
        2,
        "selective_op",
    ),
    "heads, context=2 x fsdp=2 x tensor=2": (
        "llama",
        {"context": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True},
        1,
        "selective_op",
    ),
    "gathered, context=2 x pipeline=2, 1F1B": (
        "gpt",
        {"context": 2, "pipeline": 2, "pipeline_schedule": "1f1b"},
        2,
        "full",
    ),
    "gathered, context=2 x pipeline=2 x data=2, 1F1B, ZeRO 1": (
        "gpt",
        {"context": 2, "pipeline": 2, "data": 2, "pipeline_schedule": "1f1b", "zero_stage": 1},
        4,
        "selective",
    ),
    "gathered, context=2 x pipeline=2 x tensor=2, interleaved": (
        "llama",
        {
            "context": 2,
            "pipeline": 2,
            "pipeline_chunks": 2,
            "tensor": 2,
            "sequence_parallel": True,
            "pipeline_schedule": "1f1b",
        },
        2,
        "selective_op",
    ),
    "gathered, context=2 x pipeline=2 x tensor=2, ZB-H1": (
        "llama",
        {"context": 2, "pipeline": 2, "tensor": 2, "pipeline_schedule": "zb_h1"},
        4,
        "none",
    ),
    "heads, context=2 x pipeline=2 x fsdp=2, 1F1B": (
        "llama",
        {"context": 2, "pipeline": 2, "fsdp": 2, "pipeline_schedule": "1f1b"},
        4,
        "none",
    ),
}
"""Attention by a ring, by blocks of gathered keys, or over heads: network, other axes, microbatches
and recompute."""


@pytest.mark.slow_except(
    "ring, context=4 x fsdp=2",
    "heads, context=2 x data=2",
    "gathered, context=2 x pipeline=2, 1F1B",
)
@pytest.mark.parametrize("title", CONTEXTS)
def test_attention_over_context_trains_what_one_device_trains(title, monkeypatch):
    """Whose tokens lie in their own order: positions and targets go with those of a ring. Gathered
    keys go by blocks where attention is fused, and here as if it were."""
    model, axes, microbatches, remat = CONTEXTS[title]
    strategies = {"ring": "ring", "gathered": "all_gather", "heads": "all_to_all"}
    strategy = strategies[title.partition(",")[0]]
    monkeypatch.setattr(attention, "goes_by_blocks", lambda strategy, _: strategy != "all_to_all")
    layout = {"data": 1, **axes, "context_strategy": strategy}

    assert_decoder_trains_as_on_one_device(model, layout, microbatches, remat)


@pytest.mark.slow_except("gpt-fsdp=4 x tensor=2")
@pytest.mark.parametrize(
    ("model", "layout"),
    pairs(
        [("llama", "tensor=4, tokens split"), ("gpt", "fsdp=4 x tensor=2")],
        [("llama", "data=2 x tensor=2 x pipeline=2"), ("gpt", "pipeline=2, interleaved")],
    ),
)
def test_keeping_every_second_product_trains_what_one_device_trains(model, layout):
    """Of which llama keeps everything, and gpt nothing but the input of a block."""
    axes, microbatches = HYBRIDS[layout]

    assert_decoder_trains_as_on_one_device(model, axes, microbatches, "selective_op")


@pytest.mark.parametrize(
    ("model", "axes", "microbatches", "remat"),
    [
        ("gpt", {"data": 1, "fsdp": 2}, 1, {"save": ["qkv_proj"], "offload": ["context", "mlpwi"]}),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                (
                    "experts",
                    {"data": 1, "fsdp": 2, "expert": 2},
                    1,
                    {"save": ["mlpwi"], "offload": ["decoder_layer_input", "mlpwo", "context"]},
                ),
                (
                    "gpt",
                    {"data": 1, "pipeline": 2, "pipeline_chunks": 2},
                    4,
                    {"save": ["context", "out_proj"]},
                ),
                (
                    "gpt",
                    {"data": 1, "pipeline": 2, "pipeline_schedule": "1f1b"},
                    4,
                    {"save": ["qkv_proj", "context", "mlpwi"]},
                ),
            ]
        ),
    ],
)
def test_what_is_kept_by_name_trains_what_one_device_trains(model, axes, microbatches, remat):
    """On the device or copied to the host, of dense and expert blocks, in stages or not. Two
    gradients compile."""
    config = run_of(model, "adamw", axes, microbatches, LONG).config
    run = resolve(with_fields(config, {"model.remat": remat}))

    assert_same(trained(run, LONG, model), on_one_device(model, "adamw", None, 1, LONG), LONG_RTOL)


@pytest.mark.parametrize(
    ("schedule", "layout"),
    pairs(
        [("1f1b", layout) for layout in list(OF_1F1B)[:2]],
        [
            *(("1f1b", layout) for layout in list(OF_1F1B)[2:]),
            ("zb_h1", "data=2 x fsdp=2 x pipeline=2"),
            ("zb_h1", "pipeline=4, 8 microbatches"),
            ("zb_h1", "local and global layers"),
            ("zb_h1", "local and global layers, context=2"),
        ],
    ),
)
def test_stages_that_alternate_train_what_one_device_trains(schedule, layout):
    """1F1B, interleaved or not, and ZB-H1, with any recompute. Two programs of three axes to
    compile: 6 s."""
    model, remat, axes, microbatches = OF_1F1B[layout]
    layout = {"pipeline_schedule": schedule, **axes}

    assert_decoder_trains_as_on_one_device(model, layout, microbatches, remat)


@pytest.mark.parametrize(("model", "schedule"), [("gpt", "1f1b"), ("experts", "gpipe")])
def test_stages_are_refused_where_the_compiler_would_end_the_process(model, schedule, monkeypatch):
    """That of jax 0.12 without its flag; one sentence says which."""
    monkeypatch.setattr(environment, "version", lambda package: "0.12.0.1")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    layout = {"data": 2, "pipeline": 2, "pipeline_schedule": schedule}
    run = run_of(model, "sgd", layout, microbatches=4)

    with pytest.raises(ConfigError, match=r"layout.data=2 .*XLA_FLAGS=.*hlo_sharding_v3=false"):
        build_step(run, build_mesh(run.layout))


def test_dualpipe_is_refused_in_training():
    """It is costed alone; the sentence says so, and what trains."""
    layout = {"data": 1, "pipeline": 2, "pipeline_schedule": "dualpipe"}
    run = run_of("gpt", "sgd", layout, microbatches=4)

    with pytest.raises(ConfigError, match=r"'dualpipe' is refused: .*costing only.* use \"1f1b\""):
        build_step(run, build_mesh(run.layout))


@pytest.mark.slow_except("latent attention-tensor=4, tokens split")
@pytest.mark.parametrize(
    ("model", "layout"),
    pairs(
        [
            ("latent attention", "tensor=4, tokens split"),
            ("local and global layers", "data=2 x tensor=2 x pipeline=2"),
        ],
        [
            ("local and global layers", "data=2 x context=2 x tensor=2"),
            ("latent attention", "fsdp=2 x tensor=2 x pipeline=2"),
            ("the token after the next", "fsdp=2 x tensor=2 x pipeline=2"),
            ("the token after the next", "data=2 x context=2 x tensor=2"),
        ],
    ),
)
def test_a_decoder_of_today_trains_what_one_device_trains(model, layout):
    """Norms of all heads, biases, sinks, windows and latents, split over every axis. Two gradients
    compile."""
    assert_decoder_trains_as_on_one_device(model, *HYBRIDS[layout])


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocks",
    pairs(
        ["2, 2, 1 and 1"],
        [
            ("2, 2, 1 and 1, ZeRO 1",),
            ("2 and 1, fsdp=2 x tensor=2",),
            ("2 and 1, context=2 x tensor=2",),
        ],
    ),
)
def test_uneven_stages_train_what_one_device_trains(blocks):
    """Though some stages have a block less than others, and compute it all the same."""
    model, axes, microbatches = UNEVEN[blocks]

    assert_decoder_trains_as_on_one_device(model, axes, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer", "layout"),
    pairs(
        [
            ("alexnet", "sgd", "data=2 x fsdp=4"),
            ("bert_base", "adamw", "data=2 x tensor=4"),
            ("vit", "sgd", "data=2 x fsdp=2 x tensor=2"),
            ("llama", "adamw", "data=2 x tensor=4"),
        ],
        [
            ("llama", "adamw", "fsdp=8"),
            ("bert_large", "sgd", "data=2 x fsdp=2 x tensor=2"),
            ("alexnet", "sgd", "data=2 x tensor=4"),
            ("vgg16", "sgd", "data=2 x fsdp=4"),
            ("vgg16", "sgd", "data=2 x tensor=4"),
            ("xception", "sgd", "data=2 x tensor=4"),
        ],
    ),
)
def test_a_layout_trains_a_published_network_as_one_device_does(model, optimizer, layout):
    """As above, with the networks of the zoo, narrow and on small examples: each over data,
    fsdp and tensor.

    The 40 BatchNorms of Xception, one after the other, carry rounding further: its parameters
    may differ by ten times as much, which is still twenty times less than one update changes.
    """
    run = run_of(model, optimizer, {**LAYOUTS, **THREE_AXES}[layout])

    rtol = 10 * RTOL if model == "xception" else RTOL
    assert_same(trained(run), on_one_device(model, optimizer, None, 1), rtol)


@functools.cache
def first_on_one_device(model: str, bn_group_size: int | None) -> Any:
    """`first_changes` of the reference, of which several layouts are held against one."""
    grouped = {"bn_scope": "local", "bn_group_size": bn_group_size} if bn_group_size else {}
    return first_changes(model, {"data": 1, **grouped})


def first_changes(
    model: str, layout: dict[str, Any]
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """The first loss, and every array before and after the first update."""
    losses, leaves = trained(run_of(model, "sgd", layout), 1)
    state = initial_state(model)
    before = map(np.asarray, jax.tree.leaves((state.params, state.model_state)))
    return losses, list(zip(before, leaves, strict=True))


def disagreements(
    model: str, layout: dict[str, Any], bn_group_size: int | None = None
) -> list[float]:
    """How far the first update's change of each array is from that of one device, relative to the
    largest change in the array; the first losses agree to rounding."""
    losses, ours = first_changes(model, layout)
    expected, theirs = first_on_one_device(model, bn_group_size)
    np.testing.assert_allclose(losses, expected, rtol=RTOL)
    found = []
    for (before, after), (_, other) in zip(ours, theirs, strict=True):
        largest = np.abs(other - before).max()
        found.append(float(np.abs(after - other).max() / largest) if largest else 0.0)
    return found


@pytest.mark.slow  # compiles 94 convolutions forward and backward, twice
def test_inception_starts_as_one_device_does():
    """One update, for later ones are no longer comparable.

    Its 94 BatchNorms see 32 places each at the end, and magnify: on one device, parameters that
    are off by half a unit in the last place (6e-8) come to differ by 8e-5 after one update, 1e-2
    after two and all of themselves after five. So each array's first change must agree to 1 %,
    five times what was seen.
    """
    assert max(disagreements("inception_v3", LAYOUTS["data=2 x fsdp=4"])) < 0.01


@pytest.mark.parametrize("model", ["inception_v3", "xception", "efficientnet_lite0"])
def test_every_batch_norm_of_a_published_network_hears_of_its_groups(model):
    """Nothing is compiled: that groups train what they should is shown below."""
    setup, groups = train_setup(run_of(model, "sgd", {"data": 1})), BatchNormScope(groups=8)
    network = nnx.eval_shape(lambda: network_of(setup, groups))
    norms = [module for _, module in nnx.iter_modules(network) if isinstance(module, BatchNorm)]

    assert len(norms) >= 40
    assert all(norm.scope == groups for norm in norms)


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(["jit"], [("shard_map",)]))
def test_microbatches_of_hidden_words_keep_their_places(mode):
    """The places of hidden words are dealt out with their rows."""
    if mode == "shard_map" and jax.__version_info__ >= (0, 11):
        pytest.skip("erf of JAX 0.12 takes no varying axes; BERT trains with mode=jit there")
    run = run_of("bert_base", "adamw", {"data": 8, "mode": mode}, microbatches=4)

    assert_same(trained(run), on_one_device("bert_base", "adamw", None, 1))


@pytest.mark.slow_except("data=2 x tensor=4", "data=2 x fsdp=4")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_batch_norm_keeps_its_groups(layout):
    """One device with the same groups computes the same, whatever the layout."""
    local = {"bn_scope": "local", "bn_group_size": 4}

    assert_trains_as_on_one_device("cnn", "sgd", {**LAYOUTS[layout], **local}, bn_group_size=4)


@pytest.mark.parametrize(
    ("mode", "model", "bn_scope", "optimizer"),
    [
        ("shard_map", "mlp", "global", "lamb"),
        ("shard_map", "cnn", "global", "lars"),
        ("shard_map", "cnn", "local", "sgd"),
        ("shard_map", "gpt", "global", "adamw"),
        ("pmap", "mlp", "global", "adamw"),
        ("pmap", "cnn", "global", "sgd"),
        ("pmap", "cnn", "local", "lars"),
        ("pmap", "gpt", "global", "lamb"),
    ],
)
def test_a_per_device_mode_trains_what_one_device_trains(mode, model, bn_scope, optimizer):
    """The hand-written reduction is a mean: not N times too large, not local."""
    layout = {"data": 8, "mode": mode, "bn_scope": bn_scope}
    group_size = GLOBAL_BATCH // 8 if bn_scope == "local" else None

    assert_trains_as_on_one_device(model, optimizer, layout, bn_group_size=group_size)


@pytest.mark.slow_except("mlp-shard_map", "mlp-pmap", "mlp-jit")
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *itertools.product(["mlp", "gpt"], ["jit", "shard_map"]),
        ("mlp", "pmap"),  # another spelling of shard_map
    ],
)
def test_microbatches_change_nothing_but_rounding(model, mode):
    """Two or four forward passes per update are one update of the same batch."""
    assert_trains_as_on_one_device(model, "adamw", {"data": 8, "mode": mode}, microbatches=4)


@pytest.mark.parametrize("model", ["cnn", "vgg16"])
def test_convolutions_over_three_axes_are_refused(model):
    """The compiler's gradients of them are wrong there; each pair of axes is right."""
    with pytest.raises(ConfigError, match=r"layout\.tensor=2 is refused: over data=2 and fsdp=2"):
        run_of(model, "sgd", next(iter(THREE_AXES.values())))


@pytest.mark.slow_except("layout0")
@pytest.mark.parametrize("layout", [{"data": 4, "tensor": 2}, *THREE_AXES.values()])
def test_microbatches_of_sharded_transformers_change_nothing_but_rounding(layout):
    """Gradients are summed over data once, of parts that other axes split further."""
    assert_trains_as_on_one_device("gpt", "adamw", layout, microbatches=4)


def test_gradients_of_microbatches_cross_the_data_axis_once():
    """In no loop of the compiled step; over tensor, whose sums a block needs, in all of them."""
    run = run_of("gpt", "sgd", {"data": 4, "tensor": 2}, microbatches=4)
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    program = read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)

    runs: dict[tuple[str, ...], set[int]] = {}
    for operation, times in program.walk():
        if operation.collective is not None:
            runs.setdefault(operation.collective.group.axes, set()).add(times)

    assert runs[("data",)] == {1}
    assert min(runs[("tensor",)]) >= 4


def test_gradients_of_a_stage_cross_the_context_axis_once():
    """Each device adds up those of its own tokens; keys are gathered in every pass over a block.
    A step of a pipeline compiles."""
    layout = {"data": 1, "context": 2, "pipeline": 2, "pipeline_schedule": "1f1b"}
    run = run_of("llama", "sgd", layout, microbatches=4)
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    program = read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)
    over = [
        (each.collective, times)
        for each, times in program.walk()
        if each.collective is not None and "context" in each.collective.group.axes
    ]

    assert {times for each, times in over if each.name == "all_reduce"} == {1}
    assert max(times for each, times in over if each.name == "all_gather") >= 4


def test_stages_exchange_chunks_and_gather_none():
    """A stage of several chunks stores neighbouring layers and computes others: of eight layers on
    four stages it sends one of each matrix at a time, and gets its gradient. A step of a pipeline
    compiles."""
    layout = {"data": 1, "pipeline": 4, "pipeline_chunks": 2, "pipeline_schedule": "1f1b"}
    config = run_of("llama", "sgd", {"data": 1}, microbatches=4).config
    fields = {f"layout.{name}": value for name, value in layout.items()}
    run = resolve(with_fields(config, {"model.layers": 8, **fields}))
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    program = read_step(step.function.lower(step.state, step.batch).compile(), mesh, run)
    of_layer = step.state.params["blocks"]["feed_forward"]["gated"]["kernel"].size // 2
    found = [each.collective for each, _ in program.walk() if each.collective is not None]
    gathered = [each.payload_bytes for each in found if each.name == "all_gather"]
    sent = [each.payload_bytes for each in found if each.name == "collective_permute"]

    assert max(gathered, default=0) < of_layer  # bytes
    assert sent.count(of_layer) >= 2


@pytest.mark.slow_except("mlp-layout0-1", "mlp-layout2-1")
@pytest.mark.parametrize(
    ("model", "layout", "microbatches"),
    [
        ("mlp", {"data": 8}, 1),
        ("gpt", {"data": 4, "tensor": 2}, 2),
        ("mlp", {"data": 2, "fsdp": 2, "tensor": 2, "optimizer_memory_host_offload": True}, 1),
        ("gpt", {"data": 2, "context": 4}, 2),
        ("gpt", {"data": 1, "context": 2, "context_strategy": "ring", "tensor": 2}, 1),
        ("gpt", {"data": 2, "context": 2, "pipeline": 2, "pipeline_schedule": "1f1b"}, 2),
    ],
)
def test_an_optimizer_in_parts_trains_what_one_device_trains(model, layout, microbatches):
    """ZeRO 1: every device of data and context keeps and updates its part, and gathers parameters
    to use them; it may keep it in the memory of the host."""
    assert_trains_as_on_one_device(model, "adamw", {**layout, "zero_stage": 1}, microbatches)


def test_state_in_16_bits_trains_what_one_device_trains():
    """Matrices and both moments of Adam in bfloat16, in parts and on the host. Where sums that
    differ by rounding fall to either side of a middle, an entry is one place of 8 bits off, 2^-7 of
    itself; and training is that in float32 to twice as much for each of three updates."""
    own = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16", "main_params_dtype": "bfloat16"}
    runs = []
    for layout in (
        {"data": 1},
        {"data": 4, "zero_stage": 1, "optimizer_memory_host_offload": True},
    ):
        config = run_of("mlp", "adamw", layout).config
        run = resolve(replace(config, optimizer=replace(config.optimizer, **own)))
        losses, state = train(run, model="mlp")
        runs.append((losses, jax.tree.leaves(state.params)))
        kept = jax.tree.leaves((state.params, optax.tree.get(state.opt_state, "nu")))
        assert {leaf.dtype.name for leaf in kept if leaf.ndim > 1} == {"bfloat16"}

    (losses, params), (reference, expected) = runs
    np.testing.assert_allclose(losses, reference, rtol=2**-7)
    for ours, theirs in zip(params, expected, strict=True):
        ours, theirs = (np.asarray(each, np.float32) for each in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2**-7 * np.abs(theirs).max())
    in_float32 = trained(run_of("mlp", "adamw", {"data": 1}))[0]
    np.testing.assert_allclose(losses, in_float32, rtol=3 * 2**-6)


@pytest.mark.parametrize(
    ("model", "layout"), [("mlp", {"data": 8}), ("gpt", {"data": 2, "context": 4})]
)
def test_state_in_parts_is_kept_in_parts(model, layout):
    """Of 8 devices, each holds an eighth of the parameters and of Adam's moments."""
    run = run_of(model, "adamw", {**layout, "zero_stage": 1})
    state = build_step(run, build_mesh(run.layout)).state

    for kept in (state.params, state.opt_state):
        large = [leaf for leaf in jax.tree.leaves(kept) if leaf.size > 1]
        held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in large)
        assert held == pytest.approx(sum(leaf.size for leaf in large) / 8, rel=0.01)


def test_state_in_parts_is_divided_where_most_devices_divide_it():
    """Along the longest dimension that no other axis divides, else along the longest: of up, whose
    32 x 128 both have rules, the 128; of down the 32, for tensor and fsdp divide the 128."""
    run = run_of("gpt", "adamw", {"data": 8, "zero_stage": 1})
    layers = build_step(run, build_mesh(run.layout)).state.params["blocks"]["feed_forward"]
    kernels = {name: layers[name]["kernel"] for name in ("up", "down")}

    held = {name: leaf.sharding.shard_shape(leaf.shape) for name, leaf in kernels.items()}

    assert held == {"up": (4, 32, 16), "down": (4, 128, 4)}


def test_microbatches_keep_local_groups():
    """Devices deal their own rows: the groups of a microbatch are those of its device."""
    run = run_of(
        "cnn", "sgd", {"data": 4, "mode": "shard_map", "bn_scope": "local"}, microbatches=2
    )
    other = run_of("cnn", "sgd", {"data": 4, "bn_scope": "local"}, microbatches=2)

    assert_same(trained(run), trained(other))


MULTI_PROCESS: dict[str, tuple[str, dict[str, Any]]] = {
    "data across processes": ("cnn", {"data": 8}),
    "fsdp across processes": ("mlp", {"data": 1, "fsdp": 8}),
    "pmap across processes": ("mlp", {"data": 8, "mode": "pmap"}),
}
"""Runs by name: the model, and a layout of which some axis crosses the two processes. Transformers
and `shard_map` are trained so in `test_multi_process`."""


def of_two_processes(output: Path) -> dict[str, np.ndarray]:
    """What two processes of four devices each trained, over loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = Path(__file__).parents[1] / "support" / "conformance_worker.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(index), "2", "4", str(port), str(output)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return dict(np.load(output))


@pytest.mark.slow
def test_two_processes_train_what_one_trains(tmp_path):
    """Two processes of four devices (gloo, loopback) equal one; both start JAX, which costs."""
    found = of_two_processes(tmp_path / "trained.npz")

    for name, (model, _) in MULTI_PROCESS.items():
        arrays = {key: found[key] for key in found if key.startswith(name + "/")}
        losses = arrays.pop(f"{name}/losses")
        leaves = [arrays[key] for key in sorted(arrays)]
        assert_same((losses, leaves), on_one_device(model, "sgd", None, 1))


def test_the_tolerance_sees_one_missing_update():
    """A run one update short is far outside of what rounding explains."""
    run = run_of("mlp", "sgd", LAYOUTS["data=8"])
    _, short = trained(run, TRAINED - 1)
    _, reference = on_one_device("mlp", "sgd", None, 1)

    worst = max(
        np.abs(a - b).max() / np.abs(b).max() for a, b in zip(short, reference, strict=True)
    )
    assert worst > 200 * RTOL


def test_local_statistics_are_not_global_ones():
    """The two scopes differ on the same data, so the tests above tell them apart."""
    local = on_one_device("cnn", "sgd", 4, 1, LONG)
    with_global = on_one_device("cnn", "sgd", None, 1, LONG)

    assert np.abs(local[0] - with_global[0]).max() > 1e-3


def test_the_step_is_traced_once():
    """Five updates, one trace: nothing in the state or batch changes shape or type."""
    run = run_of("mlp", "adamw", {"data": 8})
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    for batch in batches_of(run):
        placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
        state, _ = step.function(state, placed)

    assert step.function._cache_size() == 1


@pytest.mark.slow_except("mlp", "cnn", "gpt")
@pytest.mark.parametrize(
    "model",
    pairs(
        [*MODELS, "alexnet", "vgg16", "bert_base", "llama", "vit"],
        [("xception",)],  # long to compile
    ),
)
def test_what_is_gathered_in_the_compute_type_is_used_in_it_alone(model):
    """A loss in bfloat16 is the same bit by bit of parameters that were rounded before."""
    run = run_of(model, "sgd", {"data": 1})
    network = replace(run.config.model, compute_dtype="bfloat16")
    run = replace(run, config=replace(run.config, model=network))
    loss, _ = forward(run)
    loss = jax.jit(loss, compiler_options={"xla_allow_excess_precision": False})
    params, model_state = initial_network(train_setup(run))

    def rounded(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        is_rounded = is_cast(network, parameter_path(path))
        return leaf.astype("bfloat16").astype(leaf.dtype) if is_rounded else leaf

    rounded_params = jax.tree_util.tree_map_with_path(rounded, params)
    batch = {name: rows[:4] for name, rows in batches_of(run)[0].items()}

    leaves = jax.tree.leaves(params), jax.tree.leaves(rounded_params)
    assert any((one != other).any() for one, other in zip(*leaves, strict=True))
    assert loss(params, model_state, batch)[0] == loss(rounded_params, model_state, batch)[0]
