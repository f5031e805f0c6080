"""What a batch changes of a recipe, by the rules as published."""

from dataclasses import replace
from typing import Any

import pytest

from scalejax.config.optimizer import AdamWConfig, SgdConfig
from scalejax.config.run import RunConfig, resolve
from scalejax.config.schedule import Change, ScheduleConfig, changes
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build

SDE = ScheduleConfig(base_learning_rate=1e-3, scaling="sde", reference_batch=64)
LEGW = ScheduleConfig(
    base_learning_rate=0.1,
    scaling="legw",
    reference_batch=64,
    warmup="gradual",
    warmup_from="zero",
    warmup_epochs=0.5,
)


def test_sde_scaling_by_hand():
    """k = 4: rate x 2, 1 - beta x 4, epsilon / 2 (Malladi et al. 2022, definition 5.3)."""
    scaled = SDE.scaled_optimizer(AdamWConfig(weight_decay=0.1), 256)

    assert SDE.scaled(256) == (pytest.approx(2e-3), 0)
    assert isinstance(scaled, AdamWConfig)
    assert (scaled.beta1, scaled.beta2) == (pytest.approx(0.6), pytest.approx(0.996))
    assert scaled.epsilon == pytest.approx(5e-9)
    assert scaled.weight_decay == 0.1


def test_sde_scaling_comes_back():
    """Down by k after up by k is where one began."""
    optimizer = AdamWConfig(beta1=0.95)
    up = SDE.scaled_optimizer(optimizer, 128)
    down = replace(SDE, reference_batch=128).scaled_optimizer(up, 64)

    assert isinstance(down, AdamWConfig)
    assert down.beta1 == pytest.approx(optimizer.beta1)
    assert down.epsilon == pytest.approx(optimizer.epsilon)


def test_legw_warms_up_longer_and_climbs_by_the_root():
    """k = 16: rate x 4, half an epoch of warmup becomes 8 (You et al. 2019, section 3)."""
    assert LEGW.scaled(1024) == (pytest.approx(0.4), pytest.approx(8.0))


def test_every_changed_hyperparameter_is_named():
    """The rate, and the moments where they change; nothing that stays."""
    found = changes(SDE, AdamWConfig(), 256)

    assert [each.name for each in found] == ["learning_rate", "beta1", "beta2", "epsilon"]
    assert str(found[0]) == "learning_rate scaled from 0.001 to 0.002"
    assert changes(SDE, AdamWConfig(), 64) == ()
    linear = ScheduleConfig(base_learning_rate=0.1, scaling="linear")
    assert changes(linear, SgdConfig(), 8192) == (
        Change(name="learning_rate", before=0.1, after=0.1 * 32),
    )


def run(optimizer, global_batch):
    """A run that scales by the SDE rule."""
    tables: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [8]},
        "data": {"name": "synthetic_images", "image_size": 8, "channels": 1},
        "batch": {"global_batch": global_batch},
        "optimizer": {"name": optimizer},
        "schedule": {"base_learning_rate": 1e-3, "scaling": "sde", "reference_batch": 64},
    }
    return resolve(build(RunConfig, tables), 1)


def test_batches_beyond_the_rule_are_refused():
    """beta1 = 0.9 leaves nothing of the past at k = 10; plain SGD has no moments to scale."""
    assert run("adamw", 512).changes
    with pytest.raises(ConfigError, match=r"batch\.global_batch=704 is refused: k=11 .* most 64"):
        run("adamw", 704)
    with pytest.raises(ConfigError, match=r"schedule\.scaling='sde' is refused: .* not of .*'sgd'"):
        run("sgd", 64)
