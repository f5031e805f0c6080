"""Rows that count for nothing: an update is that of the others alone, however they are spread.

Tolerances are those of `test_conformance`: both sides differ in the order of sums only.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from test_conformance import GLOBAL_BATCH, LEARNING_RATES, OPTIMIZERS, UPDATES, assert_same, run_of

from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.serialization import build, plain
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step, init_state

COUNTED = 27
"""Rows of each batch that count; with 7 devices of 4 all would sit on whole devices."""


def weighted_run(
    model: str,
    layout: dict[str, Any],
    microbatches: int = 1,
    *,
    batch: int = GLOBAL_BATCH,
    **changed: Any,
) -> ResolvedRun:
    """A run of five updates of `batch` rows with a level rate; its epoch fills no last batch."""
    config = run_of(model, "sgd", layout, microbatches).config
    data = replace(config.data, train_examples=GLOBAL_BATCH * UPDATES - 1)
    optimizer = "adamw" if model == "gpt" else "sgd"
    tables = {
        "model": plain(config.model),
        "data": plain(data),
        "layout": layout,
        "batch": {"global_batch": batch, "microbatches": microbatches},
        "optimizer": OPTIMIZERS[optimizer],
        "schedule": {"base_learning_rate": LEARNING_RATES[optimizer]},
        "input": {"remainder": "pad"},
        **changed,
    }
    return resolve(build(RunConfig, tables))


def batches_of(run: ResolvedRun) -> list[dict[str, np.ndarray]]:
    """Random batches of 32 rows, 5 of them of weight 0: anywhere, or all that one of 8 devices has
    and one more."""
    generator = np.random.default_rng(0)
    dataset = run.dataset
    top, dtype = (dataset.classes, np.int32) if dataset.is_text else (256, np.uint8)
    batches = []
    for update in range(UPDATES):
        shape = (GLOBAL_BATCH, *dataset.input_shape)
        weights = np.ones(GLOBAL_BATCH, np.float32)
        lost = generator.permutation(GLOBAL_BATCH) if update % 2 else np.arange(8, GLOBAL_BATCH)
        weights[lost[: GLOBAL_BATCH - COUNTED]] = 0
        batches.append(
            {
                "inputs": generator.integers(0, top, shape).astype(dtype),
                "targets": generator.integers(
                    0, dataset.classes, (GLOBAL_BATCH, *dataset.target_shape), dtype=np.int32
                ),
                "weights": weights,
            }
        )
    return batches


def counted(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of weight 1 alone, and no weights."""
    kept = batch["weights"] > 0
    return {name: values[kept] for name, values in batch.items() if name != "weights"}


def trained(run: ResolvedRun, batches: list[dict[str, np.ndarray]]) -> Any:
    """Losses and accuracies of the updates, and all parameters and statistics after them."""
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    assert set(step.batch) == set(batches[0])
    figures = []
    for batch in batches:
        placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
        state, metrics = step.function(state, placed)
        figures.append([float(metrics["loss"]), float(metrics["accuracy"])])
    leaves = jax.tree.leaves((state.params, state.model_state))
    return np.asarray(figures), [np.asarray(leaf) for leaf in leaves]


LAYOUTS = {
    "one device": ({"data": 1}, 1),
    "data=8": ({"data": 8}, 1),
    "data=8, 4 microbatches": ({"data": 8}, 4),
    "fsdp=4 x data=2": ({"data": 2, "fsdp": 4}, 1),
    "tensor=4, 2 microbatches": ({"data": 2, "tensor": 4}, 2),
    "ZeRO 2": ({"data": 8, "zero_stage": 2}, 2),
    "shard_map": ({"data": 8, "mode": "shard_map"}, 2),
    "pmap": ({"data": 8, "mode": "pmap"}, 1),
}
OF_STAGES = {
    "pipeline": ({"data": 2, "tensor": 2, "pipeline": 2}, 4),
    "context": ({"data": 2, "context": 4}, 1),
}


@functools.cache
def of_the_counted(model: str) -> Any:
    """What one device trains on the rows that count."""
    alone = weighted_run(model, {"data": 1}, batch=COUNTED, input={"remainder": "drop"})
    return trained(alone, [counted(batch) for batch in batches_of(alone)])


@pytest.mark.slow_except(
    "mlp-one device",
    "mlp-data=8",
    "mlp-data=8, 4 microbatches",
    "mlp-fsdp=4 x data=2",
    "mlp-tensor=4, 2 microbatches",
    "mlp-ZeRO 2",
    "mlp-shard_map",
    "mlp-pmap",
)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *[("mlp", layout) for layout in LAYOUTS],
        *[("gpt", layout) for layout in OF_STAGES],
        pytest.param("gpt", "data=8, 4 microbatches", marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_the_rows_that_count(model, layout):
    """Five updates of 32 rows of which 27 count, over any layout: those of 27 on one device."""
    axes, microbatches = {**LAYOUTS, **OF_STAGES}[layout]
    run = weighted_run(model, axes, microbatches)

    assert_same(trained(run, batches_of(run)), of_the_counted(model))


@pytest.mark.slow_except("data=8", "pmap")
@pytest.mark.parametrize("layout", ["data=8", "shard_map", "pmap"])
def test_statistics_are_of_the_rows_that_count(layout):
    """BatchNorm over all devices: what one device trains on the rows that count, statistics
    included."""
    run = weighted_run("cnn", {**LAYOUTS[layout][0], "bn_scope": "global"})

    assert_same(trained(run, batches_of(run)), of_the_counted("cnn"))


@pytest.mark.slow_except("jit")
@pytest.mark.parametrize("mode", ["jit", "shard_map", "pmap"])
def test_statistics_of_a_device_are_of_its_own_rows(mode):
    """Local BatchNorm over 8 devices, some with no row that counts: what one device has of the same
    groups and weights."""
    local = {"bn_scope": "local", "bn_group_size": GLOBAL_BATCH // 8}
    run = weighted_run("cnn", {"data": 8, "mode": mode, **local})
    alone = weighted_run("cnn", {"data": 1, **local})
    batches = batches_of(run)

    assert_same(trained(run, batches), trained(alone, batches))


def test_rows_that_count_for_nothing_are_seen_to_matter_otherwise():
    """Counted in, they would change what is trained by far more than the tolerance."""
    run = weighted_run("mlp", {"data": 1})
    batches = batches_of(run)
    all_counted = [{**b, "weights": np.ones_like(b["weights"])} for b in batches]

    with pytest.raises(AssertionError):
        assert_same(trained(run, batches), trained(run, all_counted))


def test_a_batch_of_which_no_row_counts_changes_nothing():
    """Its gradient is 0, and no number is lost: plain SGD leaves the parameters as they are."""
    run = weighted_run("mlp", {"data": 8}, optimizer={"name": "sgd"})
    batches = [{**b, "weights": np.zeros_like(b["weights"])} for b in batches_of(run)]
    mesh = build_mesh(run.layout)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(init_state(run, mesh).params)]

    figures, after = trained(run, batches)

    assert not figures.any()
    for ours, theirs in zip(after, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
