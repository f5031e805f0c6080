"""Facts of data are read when a run is resolved, and never when its config is built."""

import builtins
import io
import os

import numpy as np
import pytest

from scalejax.config import run as config_run
from scalejax.config.data import FashionMnistConfig
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data import facts as facts_module
from scalejax.data.facts import fitting_facts, read_facts, resolve

NOWHERE = {"train": "/nowhere/train", "test": "/nowhere/test"}
URLS = {"train": "memory://nowhere/train", "test": "memory://nowhere/test"}
GPT = {"name": "gpt", "layers": 1, "heads": 1, "hidden": 16}


def run_on(data, model=None, **tables):
    """A run on `data`."""
    return build(
        RunConfig,
        {
            "model": model or {"name": "mlp", "hidden": [8]},
            "data": data,
            "batch": {"global_batch": 4},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.1},
            **tables,
        },
    )


@pytest.mark.parametrize(
    ("data", "model", "refused"),
    [
        ({"name": "parquet", **NOWHERE}, None, "data.train='/nowhere/train' .*no such file"),
        ({"name": "image_folder", **NOWHERE}, None, "data.train='/nowhere/train' .*no such folder"),
        ({"name": "numpy", **NOWHERE}, None, "data.train='/nowhere/train'"),
        ({"name": "tokens", **NOWHERE}, GPT, "data.train='/nowhere/train' .*no such file"),
        ({"name": "array_record", "classes": 2, **NOWHERE}, None, "data.train='/nowhere/train'"),
        ({"name": "numpy", **URLS}, None, "data.train='memory://nowhere/train'"),
        ({"name": "parquet", **URLS}, None, "data.train='memory://nowhere/train'"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_a_config_opens_nothing(data, model, refused, monkeypatch):
    """Files that are not there are refused when the run is resolved, and with facts not at all."""

    def opening(*arguments, **options):
        raise AssertionError(f"opened {arguments}")

    run_on({"name": "synthetic_images", "image_size": 8})  # what is imported once, is
    with monkeypatch.context() as patch:
        for module, names in (
            (builtins, ("open",)),
            (io, ("open",)),
            (os, ("open", "stat", "lstat", "scandir", "listdir")),
        ):
            for name in names:
                patch.setattr(module, name, opening)
        config = run_on(data, model)

    with pytest.raises(ConfigError, match=refused):
        resolve(config, 1)
    with pytest.raises(ConfigError, match=r"data\.name=.* its counts and shapes are in files"):
        config_run.resolve(config, 1)


def test_a_run_is_resolved_with_facts_in_place_of_data(tmp_path):
    """As it is with the data; and what they contradict is refused as it is by the data."""
    images, classes = np.zeros((12, 8, 8), np.uint8), np.arange(12) % 3
    path = tmp_path / "a.npz"
    np.savez(path, x_train=images, y_train=classes, x_test=images[:5], y_test=classes[:5])
    data = {"name": "numpy", "train": str(path), "test": str(path)}
    config = run_on(data)
    run, facts = resolve(config, 2), read_facts(config.data)
    texts = run_on(data, GPT)
    shifted = run_on(data, input={"augmentation": {"shift_pixels": 8}})
    refused = []
    for wrong in (texts, shifted):
        with pytest.raises(ConfigError) as error:
            resolve(wrong, 2)
        refused.append(str(error.value))
    path.unlink()

    assert run.steps_per_epoch == 3
    assert resolve(config, 2, facts) == config_run.resolve(config, 2, facts) == run
    for wrong, words in zip((texts, shifted), refused, strict=True):
        with pytest.raises(ConfigError) as error:
            resolve(wrong, 2, facts)
        assert str(error.value) == words
        with pytest.raises(ConfigError) as error:
            fitting_facts(wrong, facts)
        assert str(error.value) == words
    assert "holds images of 8 x 8" in refused[0]
    assert "below the 8 pixels" in refused[1]


def test_facts_that_the_words_say_are_those_that_are_read(monkeypatch):
    """No caller has to give them, and no reader is imported for them."""
    config = run_on({"name": "fashion_mnist", "edition": "embedded"})

    monkeypatch.delattr(facts_module, "reader_of")
    assert config.data.known_facts == read_facts(FashionMnistConfig(edition="embedded"))
    assert config_run.resolve(config, 1) == resolve(config, 1)
