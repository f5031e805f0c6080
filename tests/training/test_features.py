"""Features of a frozen network, kept: what is trained on them is what is trained without."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from parquet_cases import encoded, random_images

from scalejax.config.checks import require_cacheable_features
from scalejax.config.input import AugmentationConfig, InputConfig
from scalejax.config.run import RunConfig
from scalejax.config.training import FineTuningConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.facts import resolve
from scalejax.models import BatchNorm, Network
from scalejax.training import features
from scalejax.training.evaluation import trained_weights
from scalejax.training.features import open_examples
from scalejax.training.mesh import build_mesh
from scalejax.training.reporter import Silent
from scalejax.training.step import build_step
from scalejax.training.train import train


class TwoLayers(Network):
    """A hidden layer with BatchNorm, and a head."""

    def __init__(self, dataset, *, compute_dtype, bn, rngs, width=12):
        inputs = int(np.prod(dataset.input_shape))
        self.hidden = nnx.Linear(inputs, width, dtype=compute_dtype, rngs=rngs)
        self.norm = BatchNorm(width, scope=bn, dtype=compute_dtype, rngs=rngs)
        self.head = nnx.Linear(width, dataset.classes, dtype=compute_dtype, rngs=rngs)

    def features(self, inputs, *, is_training):
        """The hidden layer, normalised."""
        hidden = self.hidden(inputs.reshape(len(inputs), -1))
        return jax.nn.relu(self.norm(hidden, is_training=is_training))

    def classified(self, features):
        """Logits."""
        return self.head(features).astype(np.float32)

    def __call__(self, inputs, *, is_training):
        """Logits of images."""
        return self.classified(self.features(inputs, is_training=is_training))


class Whole(Network):
    """A network of one piece."""

    def __init__(self, dataset, *, compute_dtype, bn, rngs):
        self.head = nnx.Linear(784, dataset.classes, dtype=compute_dtype, rngs=rngs)

    def __call__(self, inputs, *, is_training):
        """Logits of images."""
        return self.head(inputs.reshape(len(inputs), -1))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(features, "KEPT_TOGETHER", 400)  # 1000 examples in three files


def run_of(*, cached=True, name="TwoLayers", trainable=("head",), dtype="float32", **tables):
    """Two epochs on images of random pixels."""
    model = {"name": "custom", "path": f"{__name__}:{name}", "compute_dtype": dtype}
    data = {"name": "synthetic_images", "image_size": 28, "channels": 1, "classes": 10}
    given: dict[str, Any] = {
        "model": model,
        "data": data | {"train_examples": 1000, "test_examples": 130},
        "batch": {"global_batch": 64},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "schedule": {"base_learning_rate": 0.1, "warmup": "none", "decay": "constant"}
        | {"scaling": "none"},
        "fine_tuning": {"trainable": list(trainable), "cache_features": cached},
        "train": {"epochs": 2, "log_every_steps": 1},
        **tables,
    }
    return build(RunConfig, given)


def losses_of(record) -> tuple[np.ndarray, np.ndarray]:
    """Of every update, and of every evaluation."""
    evaluations = [(each.test_loss, each.test_accuracy) for each in record.evaluations]
    return np.array([each.loss for each in record.training]), np.array(evaluations)


@pytest.mark.slow_except("layout1-bfloat16")
@pytest.mark.parametrize(("layout", "dtype"), [({"data": 1}, "float32"), ({"data": 4}, "bfloat16")])
def test_losses_are_those_without_the_cache(layout, dtype, tmp_path):
    """Of every update and evaluation; the weights that are left are of the whole network."""
    ours = train(run_of(layout=layout, dtype=dtype), tmp_path / "a")
    theirs = train(run_of(layout=layout, dtype=dtype, cached=False), tmp_path / "b")

    for one, other in zip(losses_of(ours), losses_of(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5 if dtype == "float32" else 2e-2)
    run = resolve(run_of(layout=layout, dtype=dtype))
    trees = [trained_weights(run, tmp_path / name) for name in "ab"]
    for one, other in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.slow
def test_features_are_computed_once(tmp_path, monkeypatch):
    """A second run reads no image; other weights are other features."""
    first = train(run_of(), tmp_path / "a")

    def refuse(*arguments):
        raise AssertionError("an image was read")

    with monkeypatch.context() as changed:
        changed.setattr(features, "_computed", refuse)
        again = train(run_of(), tmp_path / "b")
        with pytest.raises(AssertionError, match="an image was read"):
            train(run_of(seed=1), tmp_path / "c")  # draws other weights

    for one, other in zip(losses_of(first), losses_of(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_step_takes_features_and_costs_the_head_alone():
    """What is costed is what is trained: 12 numbers an example in place of 784."""
    run = resolve(run_of(), 1)

    batch = build_step(run, build_mesh(run.layout)).batch

    assert batch["inputs"].shape == (64, 12)
    assert batch["inputs"].dtype == np.float32


def test_examples_are_those_of_the_source_in_its_order():
    """Feature and class of an index, across the files in which features are kept."""
    run = resolve(run_of(), 1)
    cached = open_examples(run, "train", Silent())
    plain = replace(run, config=replace(run.config, fine_tuning=None))
    source = open_examples(plain, "train", Silent())
    indices = np.array([999, 0, 400, 399, 799, 5])

    taken = cached.take(indices)

    np.testing.assert_array_equal(taken["targets"], source.take(indices)["targets"])
    alone = [cached.take(indices[row : row + 1])["inputs"][0] for row in range(6)]
    np.testing.assert_array_equal(taken["inputs"], alone)
    assert len(np.unique(taken["inputs"], axis=0)) == 6


def test_features_of_images_written_anew_are_computed_again(tmp_path):
    """Files with the same names but other pixels get other features. Storage without modification
    times is refused."""
    fsspec = pytest.importorskip("fsspec")
    images = random_images(6, side=28)
    store = fsspec.filesystem("memory")

    def write(chosen):
        for part in ("train", "test"):
            for number, image in enumerate(chosen):
                name = f"{part}/{'ab'[number % 2]}/{number}.bmp"
                path = tmp_path / "images" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encoded(image, "BMP"))
                store.pipe(f"/frozen/{name}", path.read_bytes())

    def opened(location):
        data = {"name": "image_folder", "image_size": 28, "channels": 1}
        data |= {part: f"{location}/{part}" for part in ("train", "test")}
        run = resolve(run_of(data=data, batch={"global_batch": 2}), 1)
        return open_examples(run, "train", Silent())

    write(images)
    before = opened(tmp_path / "images").take(np.arange(6))["inputs"]
    write(images[::-1])
    after = opened(tmp_path / "images").take(np.arange(6))["inputs"]

    # images 0, 2, 4 of one class and 1, 3, 5 of the other have changed places
    np.testing.assert_allclose(after, before[::-1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(after, before)
    with pytest.raises(ConfigError, match=r"cache_features=True is refused: the storage of"):
        opened("memory://frozen")


def test_what_would_change_features_is_refused():
    """Other parts that learn, or a network that cannot be taken apart."""
    for trainable in (("head", "hidden"), ()):
        with pytest.raises(ConfigError, match=r"cache_features=True is refused.*head"):
            run_of(trainable=trainable)
    run = resolve(run_of(name="Whole"), 1)
    with pytest.raises(ConfigError, match=r"cache_features=True is refused.*Whole has no"):
        build_step(run, build_mesh(run.layout))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (InputConfig(augmentation=AugmentationConfig(flip=True)), "augmentation"),
        (InputConfig(unreadable="skip"), "unreadable"),
        (InputConfig(workers=1), "workers"),
        (InputConfig(workers="auto"), "workers"),
    ],
)
def test_input_that_features_would_not_follow_is_refused(given, field):
    """Examples that change, or count for nothing, or are made by processes beside this one."""
    fine_tuning = FineTuningConfig(trainable=("head",), cache_features=True)

    with pytest.raises(ConfigError, match=rf"leave input\.{field} out"):
        require_cacheable_features(fine_tuning, given)
    require_cacheable_features(replace(fine_tuning, cache_features=False), given)


def test_features_that_cannot_be_kept_are_refused_by_their_own_field(tmp_path):
    """Which is none of Parquet files."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "features").write_text("no folder")

    with pytest.raises(ConfigError, match=r"fine_tuning\.cache_features: .*features cannot be wr"):
        open_examples(resolve(run_of(), 1), "train", Silent())
