"""An optimizer and a gradient synchronisation that scalejax does not know, each one new module:
importing it is all that it takes to read it from a run file, list its fields and train with it."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest

from scalejax.config.gradient_sync import GradientSyncConfig
from scalejax.config.optimizer import OptimizerConfig, SgdConfig
from scalejax.config.reference import run_reference
from scalejax.config.run import RunConfig, resolve
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build, plain
from scalejax.emulation.checks import emulated_run
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step, init_state
from scalejax.xla.cache import _path as program_path
from scalejax.xla.job import RunJob
from scalejax.xla.target import Target

TABLES: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [16]},
    "data": {
        "name": "synthetic_images",
        "image_size": 8,
        "channels": 1,
        "classes": 4,
        "train_examples": 16,
        "test_examples": 8,
    },
    "batch": {"global_batch": 8},
    "layout": {"mode": "shard_map"},
    "optimizer": {"name": "sgd", "momentum": 0.0},
    "schedule": {"base_learning_rate": 0.125},
    "train": {"epochs": 1},
}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of both, imported for one test."""
    for family in (OptimizerConfig, GradientSyncConfig):
        monkeypatch.setattr(family, "_members", list(family._members))
    for name in ("toy_optimizer", "toy_gradient_sync"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        import_module(name)
    yield
    serialization._adapter.cache_clear()


def steps_of(config: RunConfig) -> list[list[np.ndarray]]:
    """How far each parameter moves in each of two updates on two devices."""
    run = resolve(config, 2)
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    rows = np.random.default_rng(0)
    moves, before = [], jax.device_get(state.params)
    for _ in range(2):
        batch = {
            "inputs": rows.integers(0, 256, (8, 8, 8, 1), np.uint8),
            "targets": rows.integers(0, 4, 8, np.int32),
        }
        placed = {name: jax.device_put(batch[name], step.batch[name].sharding) for name in batch}
        state, _ = step.function(state, placed)
        after = jax.device_get(state.params)
        moved = jax.tree.map(lambda new, old: np.abs(new - old), after, before)
        moves.append(jax.tree.leaves(moved))
        before = after
    return moves


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("table", "member"),
    [
        ("optimizer", {"name": "sign_sgd", "stretch": 0.5}),
        ("gradient_sync", {"name": "majority", "magnitude": 0.5}),
    ],
    ids=["optimizer", "gradient_sync"],
)
def test_a_member_of_a_module_of_its_own_is_listed_read_and_trained(
    table: str, member: dict[str, Any]
):
    """Each of its steps is half of the learning rate in every direction, or none."""
    config = build(RunConfig, TABLES | {table: member})
    fields = {each.name: each for one in run_reference() for each in one.fields}
    (own,) = set(member) - {"name"}

    assert plain(config)[table] == member  # type: ignore[index,call-overload]
    assert f"[{table}] name = {member['name']}" in [one.title for one in run_reference()]
    assert fields[f"{table}.{own}"].default == "1.0"
    for leaves in steps_of(config):
        moved = np.concatenate([leaf.ravel() for leaf in leaves])
        assert np.all(np.isclose(moved, 0.0625, rtol=1e-4) | (moved == 0))
        assert np.mean(moved > 0) > 0.3


@pytest.mark.usefixtures("toys")
def test_checks_ask_what_a_member_says_of_itself():
    """Layer-wise optimizers, and lossy compression with loss scaling, are refused by facts of their
    class."""
    layer_wise = TABLES | {
        "optimizer": {"name": "sign_sgd"},
        "emulation": {"algorithm": {"name": "downpour"}, "workers": 2, "server_shards": 2},
    }
    lossy = TABLES | {
        "gradient_sync": {"name": "majority"},
        "model": TABLES["model"] | {"compute_dtype": "float16"},
    }

    with pytest.raises(ConfigError, match="sign_sgd takes norms of whole layers"):
        emulated_run(build(RunConfig, layer_wise))
    with pytest.raises(ConfigError, match="a gradient that overflows is not seen everywhere"):
        build(RunConfig, lossy)


@pytest.mark.usefixtures("toys")
def test_members_are_told_apart_by_name_and_not_by_class():
    """A class called as a built-in one leaves it there; the name of another is refused, and a
    class that is defined anew replaces the one before."""

    def define(tag: Any) -> type:
        @dataclass(frozen=True, slots=True, kw_only=True)
        class SgdConfig(OptimizerConfig):
            """An optimizer."""

            name: Literal[tag] = tag  # type: ignore[valid-type]

        return SgdConfig

    for _ in range(2):
        define("mine")
    assert {"mine", "sgd"} < set(OptimizerConfig.names())
    assert build(RunConfig, TABLES).optimizer == SgdConfig(momentum=0.0)
    define("lars")
    both = r"optimizer\.LarsConfig and .*SgdConfig have the same name 'lars'"
    with pytest.raises(ConfigError, match=both):
        build(RunConfig, TABLES)


def test_a_module_that_was_not_imported_is_refused():
    """Its name is unknown then."""
    with pytest.raises(ConfigError, match=r"optimizer\.name='sign_sgd' is refused"):
        build(RunConfig, dict(TABLES, optimizer={"name": "sign_sgd"}))


def test_another_file_of_an_optimizer_is_another_program(
    toys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two projects may each have an optimizer of that name in a module of that name."""
    tables: dict[str, Any] = {**TABLES, "optimizer": {"name": "sign_sgd"}}
    run = resolve(build(RunConfig, tables), 1)
    job = RunJob(target=Target(backend="cpu", name="cpu", device_count=1), run=run)
    kept = program_path(tmp_path, job)
    toy = sys.modules["toy_optimizer"]
    other = tmp_path / "toy_optimizer.py"
    other.write_text(Path(toy.__file__ or "").read_text() + "# another")

    assert program_path(tmp_path, job) == kept
    monkeypatch.setattr(toy, "__file__", str(other))
    assert program_path(tmp_path, job) != kept
