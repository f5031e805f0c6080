"""Documents packed into examples train as the same documents alone, in every layout.

Tolerances are those of `test_conformance`: float32, and another order of sums.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalejax.config.dataset_facts import IGNORED_TARGET, POSITIONS, SEGMENT_IDS
from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.models import BatchNormScope
from scalejax.training.mesh import build_mesh
from scalejax.training.setup import network_with, train_setup
from scalejax.training.step import build_step, init_state

TOKENS, ROWS, RATE = 16, 8, 0.5
MODELS: dict[str, Any] = {
    "gpt": {"name": "gpt", "layers": 4, "hidden": 16, "heads": 2},
    "llama": {"name": "llama", "layers": 4, "hidden": 16, "heads": 4, "kv_heads": 2},
}
MODELS["windows and sinks"] = {
    **MODELS["llama"],
    "block": {"sliding_window": 4, "global_every": 2, "attention_sinks": True},
}
MODELS["experts"] = {
    **MODELS["llama"],
    "layers": 2,
    "moe": {
        "experts": 4,
        "experts_per_token": 2,
        "expert_hidden": 16,
        "router": {"balance": "none"},
    },
}


def run_of(
    model: str, layout: dict[str, Any], microbatches: int = 1, /, **changed: Any
) -> ResolvedRun:
    """A run of plain SGD on documents of 5 tokens in the mean."""
    data = {"name": "synthetic_tokens", "tokens": TOKENS, "vocabulary": 32, "document_tokens": 5}
    tables = {
        "model": MODELS[model],
        "data": {**data, "train_examples": 64, "test_examples": 8},
        "batch": {"global_batch": ROWS, "microbatches": microbatches},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": RATE},
        "layout": layout,
        **changed,
    }
    return resolve(build(RunConfig, tables))


@functools.cache
def rows() -> dict[str, np.ndarray]:
    """One batch."""
    return open_source(run_of("gpt", {"data": 1}).config.data, "train", seed=0).take(
        np.arange(ROWS), 0
    )


def updated(run: ResolvedRun) -> tuple[float, list[np.ndarray]]:
    """Loss of one batch, and parameters after it."""
    mesh = build_mesh(run.layout)
    step = build_step(run, mesh)
    placed = jax.tree.map(
        lambda each, like: jax.device_put(each, like.sharding), rows(), step.batch
    )
    state, metrics = step.function(init_state(run, mesh), placed)
    return float(metrics["loss"]), [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]


@functools.cache
def alone(model: str) -> tuple[float, list[np.ndarray]]:
    """The same of the documents, each in an example of its own, filled up behind it; the loss of a
    target is divided by the number of all targets."""
    inputs, targets = [], []
    of_rows = (rows()[name] for name in ("inputs", "targets", SEGMENT_IDS))
    for tokens, wanted, ids in zip(*of_rows, strict=True):
        for each in np.unique(ids):
            own = ids == each
            fill = (0, TOKENS - own.sum())
            inputs.append(np.pad(tokens[own], fill))
            targets.append(np.pad(wanted[own], fill, constant_values=IGNORED_TARGET))
    run = run_of(
        model, {"data": 1}, data={"name": "synthetic_tokens", "tokens": TOKENS} | {"vocabulary": 32}
    )
    setup, before = train_setup(run), init_state(run, build_mesh(run.layout))
    given, wanted = np.stack(inputs), np.stack(targets)

    def loss(params: Any) -> jax.Array:
        network = network_with(setup, BatchNormScope(), params, before.model_state)
        logits = network(jnp.asarray(given), is_training=True)  # type: ignore[operator]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(wanted, 0))
        return jnp.where(wanted >= 0, losses, 0).sum() / (wanted >= 0).sum()

    found, gradient = jax.jit(jax.value_and_grad(loss))(before.params)
    params = jax.tree.map(lambda leaf, by: np.asarray(leaf - RATE * by), before.params, gradient)
    return float(found), jax.tree.leaves(params)


BY_DEFAULT = [
    ("gpt", {"data": 1}, 1),
    ("llama", {"data": 2, "context": 2, "context_strategy": "ring"}, 2),
    ("llama", {"data": 1, "pipeline": 2, "pipeline_schedule": "1f1b"}, 4),
]
SLOW = [
    ("llama", {"data": 1, "tensor": 2, "context": 2, "context_strategy": "all_to_all"}, 1),
    ("llama", {"data": 2, "context": 2, "tensor": 2, "sequence_parallel": True}, 1),
    ("llama", {"data": 8, "mode": "shard_map"}, 1),
    ("llama", {"data": 2, "pipeline": 2, "context": 2, "context_strategy": "ring"}, 2),
    ("gpt", {"data": 1, "pipeline": 2, "pipeline_chunks": 2}, 4),
    ("gpt", {"data": 2, "pipeline": 2, "pipeline_schedule": "zb_h1", "zero_stage": 1}, 4),
    ("windows and sinks", {"data": 2, "fsdp": 2, "zero_stage": 2}, 2),
    ("experts", {"data": 1, "expert": 2, "pipeline": 2}, 4),
    ("experts", {"data": 2, "pipeline": 2, "pipeline_schedule": "1f1b"}, 2),
    ("gpt", {"data": 1, "pipeline": 2, "context": 2, "pipeline_schedule": "1f1b"}, 2),
]


@pytest.mark.parametrize(
    ("model", "layout", "microbatches"),
    [*BY_DEFAULT, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_packed_documents_train_as_the_same_documents_alone(model, layout, microbatches):
    """Compiles a step of four blocks: loss and gradient, by one update."""
    found, expected = updated(run_of(model, layout, microbatches)), alone(model)

    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=1e-5 * max(np.abs(theirs).max(), 0.01)
        )


def test_a_batch_holds_several_documents_of_different_lengths():
    """And rows of different numbers of targets, without which the test above shows little."""
    ids, targets = rows()[SEGMENT_IDS], rows()["targets"]

    assert ids.max() > 3
    assert len(set((targets != IGNORED_TARGET).sum(axis=1))) > 2
    starts = np.diff(ids, axis=1) > 0
    np.testing.assert_array_equal(rows()[POSITIONS][:, 1:] == 0, starts)
    np.testing.assert_array_equal(targets[:, :-1] == IGNORED_TARGET, starts)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"name": "custom", "path": "a:B"}}, r"model\.name='custom' .*llama alone"),
        ({"model": {**MODELS["llama"], "mtp": {}}}, r"model\.mtp is refused: .*of another"),
        ({"train": {"noise_scale": {}}}, r"train\.noise_scale is refused: "),
    ],
)
def test_what_cannot_tell_documents_apart_is_refused(changed, message):
    """Other networks, the token after the next, and the noise scale."""
    with pytest.raises(ConfigError, match=message):
        run_of("llama", {"data": 2}, **changed)
