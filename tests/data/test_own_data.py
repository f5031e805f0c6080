"""Data of a function by import path: read, costed and trained as any other, or refused."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from scalejax.config.data import CustomDataConfig
from scalejax.config.input import AugmentationConfig
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import for_process, open_source
from scalejax.data.facts import read_facts
from scalejax.data.source import UnreadableExample
from scalejax.training.reporter import Silent
from scalejax.training.train import train

IMAGES = CustomDataConfig(name="custom", path="toy_own_data:images", options={"side": 6})
TEXTS = CustomDataConfig(name="custom", path="toy_own_data:texts")


def test_facts_are_those_of_what_the_function_gives():
    """From which the step is compiled and costed: counts, shapes, classes and means."""
    images, texts = read_facts(IMAGES), read_facts(TEXTS)

    assert (images.train_examples, images.test_examples) == (60, 12)
    assert (images.input_shape, images.target_shape, images.classes) == ((6, 6, 1), (), 3)
    assert (images.pixel_mean, images.pixel_std, images.kind) == (0.1, 0.25, "images")
    assert (texts.input_shape, texts.target_shape, texts.kind) == ((8,), (8,), "text")
    with_own = replace(IMAGES, gives_validation=True)
    assert read_facts(with_own).validation_examples == 9
    assert len(open_source(with_own, "validation", seed=0)) == 9


def test_samples_are_read_by_index_in_any_process():
    """One by one, or by its own `take`, which is told the epoch; images are augmented."""
    source = open_source(IMAGES, "train", seed=0)
    there = pickle.loads(pickle.dumps(for_process(source, 2)))()
    order = np.array([7, 3, 59])
    rows, others = source.take(order, 0), there.take(order, 0)
    assert rows["inputs"][:, 0, 1, 0].tolist() == [7, 3, 59]
    assert rows["targets"].tolist() == [1, 0, 2]
    assert rows["targets"].dtype == np.int32
    assert all(np.array_equal(rows[name], others[name]) for name in rows)
    assert source.take(order[:0])["inputs"].shape == (0, 6, 6, 1)

    flip = AugmentationConfig(flip=True)
    changed = open_source(IMAGES, "train", seed=0, augmentation=flip).take(np.arange(60), 1)
    assert 15 < (changed["inputs"][:, 0, 4, 0] > 0).sum() < 45  # of 60, half

    texts = open_source(TEXTS, "train", seed=0)
    assert texts.take(np.array([5]), 2)["inputs"][0, 0] == 7
    assert texts.take(np.array([5]))["targets"].tolist() == [list(range(6, 14))]


def test_a_run_trains_on_it(tmp_path):
    """With part of it held out."""
    config = build(
        RunConfig,
        {
            "model": {"name": "mlp", "hidden": [4]},
            "data": {
                "name": "custom",
                "path": "toy_own_data:images",
                "validation_fraction": 0.2,
            },
            "batch": {"global_batch": 8},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.01},
        },
    )
    record = train(config, tmp_path / "run", device_count=1, reporter=Silent())
    assert record.status == "completed"
    assert record.training[-1].step == 48 // 8


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("toy_own_data:image", {}, "did you mean 'toy_own_data:images'"),
        ("toy_own_data:number", {}, "must be a function of the part"),
        ("no_such_module:images", {}, "must import, but ModuleNotFoundError"),
        ("toy_own_data:images", {"size": 3}, "data.options=.* unexpected keyword argument 'size'"),
        ("toy_own_data:wrong", {"how": "raises"}, "but KeyError: 'no such table'"),
        ("toy_own_data:wrong", {"how": "no samples"}, "it gives int, which has no length"),
        ("toy_own_data:wrong", {"how": "empty"}, "its part 'train' is empty"),
        ("toy_own_data:wrong", {"how": "no classes"}, "must have `classes`"),
        ("toy_own_data:wrong", {"how": "shape"}, r"the first is: inputs float32 \(2, 2\)"),
        ("toy_own_data:wrong", {"how": "no pair"}, "a pair of them, but the first: TypeError"),
    ],
)
def test_what_cannot_be_read_is_refused(path, options, words):
    """Before anything is compiled, in one sentence."""
    with pytest.raises(ConfigError, match=words):
        read_facts(CustomDataConfig(name="custom", path=path, options=options))


def test_words_that_contradict_each_other_are_refused():
    """Before anything is imported."""
    with pytest.raises(ConfigError, match=r'must be "module:function"'):
        CustomDataConfig(name="custom", path="toy_own_data")
    with pytest.raises(ConfigError, match=r"data\.validation_fraction=0\.1 is refused"):
        replace(IMAGES, gives_validation=True, validation_fraction=0.1)


@pytest.mark.parametrize(
    ("index", "words"), [(1, r"sample 1: ValueError: inputs of shape \(3,\)"), (2, "a target out")]
)
def test_a_sample_that_is_not_as_the_first_is_named(index, words):
    """As an unreadable one, which `input.unreadable` may skip."""
    config = CustomDataConfig(name="custom", path="toy_own_data:wrong", options={"how": "later"})
    with pytest.raises(UnreadableExample, match=words):
        open_source(config, "train", seed=0).take(np.array([0, index]))
