"""The examples, their order, and that each counts once."""

import gzip
import time

import jax
import numpy as np
import pytest

from scalejax.config.data import (
    FIRST_TOKEN,
    MASK_TOKEN,
    SEPARATOR_TOKEN,
    FashionMnistConfig,
    MaskedTokensConfig,
    PythonDocsConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
)
from scalejax.config.input import InputConfig
from scalejax.config.parallelism import Layout
from scalejax.core.errors import ConfigError
from scalejax.data import datasets
from scalejax.data.datasets import open_source, reader_of
from scalejax.data.facts import read_facts
from scalejax.data.loader.loader import (
    evaluation_batches,
    training_batches,
    training_batches_of_seeds,
)
from scalejax.data.readers import fashion_mnist
from scalejax.data.readers.python_docs import python_docs
from scalejax.training.mesh import batch_sharding, build_mesh

EMBEDDED = FashionMnistConfig(edition="embedded")
SMALL_IMAGES = SyntheticImagesConfig(
    image_size=4, channels=1, classes=10, train_examples=50, test_examples=21
)
CONFIGS = (
    EMBEDDED,
    SMALL_IMAGES,
    SyntheticTokensConfig(tokens=8, vocabulary=100, train_examples=30, test_examples=9),
    PythonDocsConfig(tokens=64),
    MaskedTokensConfig(tokens=32, masked=5, vocabulary=100, train_examples=30, test_examples=9),
)


def shapes_of(config, global_batch, layout=None, *, has_mask=False):
    """Shapes of a global batch of `config` over `layout`, as a `Step` states them."""
    about = read_facts(config)
    sharding = batch_sharding(build_mesh(layout or Layout(data=4)))
    image_type = np.int32 if about.is_text else np.uint8
    parts = {"inputs": (about.input_shape, image_type), "targets": (about.target_shape, np.int32)}
    if about.is_masked:
        parts["places"] = parts["targets"]
    if has_mask:
        parts["mask"] = ((), np.float32)
    return {
        name: jax.ShapeDtypeStruct((global_batch, *shape), dtype, sharding=sharding)
        for name, (shape, dtype) in parts.items()
    }


class Numbers:
    """Examples that are their own index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def take(self, indices, epoch=None):
        """The indices, as 1 x 1 x 1 images without content and as targets."""
        return {
            "inputs": np.zeros((len(indices), 4, 4, 1), np.uint8),
            "targets": indices.astype(np.int32),
        }


def order_of(length, global_batch, *, seed=0, start=0, stop, layout=None):
    """The indices of each step's examples, (steps, global_batch)."""
    shapes = shapes_of(SMALL_IMAGES, global_batch, layout)
    batches = training_batches(Numbers(length), shapes, seed=seed, start_step=start, stop_step=stop)
    return np.stack([np.asarray(batch["targets"]) for batch in batches])


@pytest.mark.parametrize(
    ("config", "module"),
    [(EMBEDDED, "fashion_mnist"), (SMALL_IMAGES, "synthetic")],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_reader_imports_no_other(config, module, monkeypatch):
    """Those of files would wait for Arrow."""
    reader, imported = reader_of(config), []

    def import_module(name):
        imported.append(name.rpartition(".")[2])
        datasets.READERS[config.name] = reader

    monkeypatch.setattr(datasets, "READERS", {})
    monkeypatch.setattr(datasets, "import_module", import_module)
    assert (reader_of(config), reader_of(config)) == (reader, reader)
    assert imported == [module]


def test_a_data_set_without_a_reader_is_named(monkeypatch):
    """As members of other families are that nothing builds."""
    monkeypatch.setattr(datasets, "READERS", {})
    monkeypatch.setattr(datasets, "import_module", lambda name: None)

    with pytest.raises(NotImplementedError, match="reader is not registered for FashionMnist"):
        reader_of(EMBEDDED)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_source_holds_what_the_facts_say(config, split):
    """Counts, shapes, types and ranges of a source are those that shape the step."""
    about = read_facts(config)
    source = open_source(config, split, seed=0)
    length = about.train_examples if split == "train" else about.test_examples

    rows = source.take(np.array([0, 1, length - 1]))

    assert len(source) == length
    assert rows["inputs"].shape == (3, *about.input_shape)
    assert rows["inputs"].dtype == (np.int32 if about.is_text else np.uint8)
    assert rows["targets"].shape == (3, *about.target_shape)
    assert rows["targets"].dtype == np.int32
    assert rows["targets"].min() >= 0
    assert rows["targets"].max() < about.classes


def test_hidden_words_are_hidden_as_in_bert():
    """Targets stand at their places: 80 % masked, 10 % replaced, 10 % left; no special token."""
    config = MaskedTokensConfig(vocabulary=1000)
    rows = open_source(config, "train", seed=0).take(np.arange(500))
    shown = np.take_along_axis(rows["inputs"], rows["places"], axis=1)

    assert (np.diff(rows["places"], axis=1) > 0).all()  # 20 different ones
    assert rows["targets"].min() > MASK_TOKEN
    assert (
        rows["inputs"][:, [0, 64, 127]] == [FIRST_TOKEN, SEPARATOR_TOKEN, SEPARATOR_TOKEN]
    ).all()
    # 10,000 draws: a standard error of 0.4 % and 0.3 %
    assert (shown == MASK_TOKEN).mean() == pytest.approx(0.8, abs=0.016)
    assert (shown == rows["targets"]).mean() == pytest.approx(0.1, abs=0.012)


def test_embedded_fashion_mnist_is_balanced_and_has_the_stated_mean():
    """The vendored file is the subset it says it is."""
    source = open_source(EMBEDDED, "train", seed=0)
    rows = source.take(np.arange(len(source)))

    assert np.bincount(rows["targets"]).tolist() == [1000] * 10
    # the mean in `facts` is of the 60,000; one of 10,000 differs by its sampling error
    assert rows["inputs"].mean() / 255 == pytest.approx(read_facts(EMBEDDED).pixel_mean, abs=0.005)


def test_full_fashion_mnist_is_read_from_idx_files(tmp_path, monkeypatch):
    """The Debian package's files are read past their headers; damage is named."""
    monkeypatch.setattr(fashion_mnist, "FOLDER", tmp_path)
    images = np.arange(2 * 28 * 28, dtype=np.uint8)
    for name, header, values in (
        ("train-images-idx3-ubyte.gz", 16, images),
        ("train-labels-idx1-ubyte.gz", 8, np.array([7, 3], np.uint8)),
    ):
        (tmp_path / name).write_bytes(gzip.compress(bytes(header) + values.tobytes()))

    source = open_source(FashionMnistConfig(edition="full"), "train", seed=0)

    rows = source.take(np.array([1]))
    assert len(source) == 2
    assert rows["targets"].tolist() == [3]
    assert rows["inputs"].tobytes() == images[784:].tobytes()
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"train-labels-idx1-ubyte\.gz cannot be read"):
        open_source(FashionMnistConfig(edition="full"), "train", seed=0)


def test_a_damaged_embedded_file_is_refused(tmp_path, monkeypatch):
    """A broken installation says what to do."""
    damaged = tmp_path / "fashion.npz"
    damaged.write_bytes(fashion_mnist.EMBEDDED.read_bytes()[:1000])
    monkeypatch.setattr(fashion_mnist, "EMBEDDED", damaged)
    fashion_mnist._embedded.cache_clear()

    with pytest.raises(ConfigError, match="is damaged; install scalejax again"):
        open_source(EMBEDDED, "train", seed=0)


@pytest.mark.parametrize("config", CONFIGS[1:3], ids=lambda config: config.name)
def test_synthetic_examples_follow_from_seed_part_and_index(config):
    """The same (seed, part, index) gives the same example however it is asked for."""
    indices = np.array([3, 0, 7])
    rows = open_source(config, "train", seed=1).take(indices)
    again = open_source(config, "train", seed=1)
    one_by_one = [again.take(np.array([index]))["inputs"][0] for index in indices]

    np.testing.assert_array_equal(rows["inputs"], np.stack(one_by_one))
    for other in (open_source(config, "train", seed=2), open_source(config, "test", seed=1)):
        assert (other.take(indices)["inputs"] != rows["inputs"]).any()


@pytest.mark.parametrize("config", CONFIGS[2:4], ids=lambda config: config.name)
def test_the_target_of_a_token_is_the_next_token(config):
    """Inputs and targets are one sequence, one place apart."""
    rows = open_source(config, "train", seed=0).take(np.array([0, 5]))

    np.testing.assert_array_equal(rows["inputs"][:, 1:], rows["targets"][:, :-1])


def test_text_to_evaluate_on_is_never_trained_on():
    """The parts of the text do not overlap, and leave out less than an example each."""
    config, text = PythonDocsConfig(tokens=64), python_docs()
    train = open_source(config, "train", seed=0)
    test = open_source(config, "test", seed=0)

    last = train.take(np.array([len(train) - 1]))["targets"][0].astype(np.uint8).tobytes()
    end_of_train = (len(train) - 1) * 64 + 1 + 64
    begin_of_test = len(text) - len(test) * 64 - 1
    first = test.take(np.array([0]))["inputs"][0].astype(np.uint8).tobytes()

    assert text[end_of_train - 64 : end_of_train] == last
    assert text[begin_of_test : begin_of_test + 64] == first
    assert 0 <= begin_of_test - end_of_train < 3 * 64


def test_an_epoch_holds_every_example_at_most_once_and_epochs_differ():
    """20 examples in batches of 8: 16 different ones an epoch, in a new order each time."""
    order = order_of(20, 8, stop=4).reshape(2, 16)

    assert all(len(set(epoch)) == 16 for epoch in order)
    assert order.tolist()[0] != order.tolist()[1]
    assert order_of(20, 8, seed=1, stop=4).tolist() != order.reshape(4, 8).tolist()


def test_a_resumed_order_continues_at_the_exact_step():
    """Starting at step k gives what the uninterrupted order gives from step k on."""
    whole = order_of(20, 8, stop=7)

    for start in (1, 2, 5, 6):
        np.testing.assert_array_equal(order_of(20, 8, start=start, stop=7), whole[start:])


def test_the_order_does_not_depend_on_the_layout():
    """Resuming on another number of devices sees the same examples."""
    layouts = (Layout(), Layout(data=8), Layout(data=2, fsdp=2), Layout(data=2, tensor=4))
    orders = [order_of(20, 8, stop=3, layout=layout) for layout in layouts]

    for order in orders[1:]:
        np.testing.assert_array_equal(order, orders[0])


def test_runs_side_by_side_share_the_memory_for_batches():
    """Of three runs' batches of 200 bytes 1300 bytes hold two of each, and no third is made."""
    taken = []

    class Counted(Numbers):
        def take(self, indices, epoch=None):
            taken.append(len(indices))
            return super().take(indices, epoch)

    shapes = shapes_of(SMALL_IMAGES, 10, Layout(data=1))
    how = InputConfig(memory_bytes=1300, read_ahead_batches=4)
    sources = [Counted(1000)] * 3

    trained = training_batches_of_seeds(
        sources, shapes, seeds=[0, 1, 2], start_step=0, stop_step=100, how=how
    )
    while len(taken) < 6:
        time.sleep(0.01)
    time.sleep(0.2)
    trained.close()
    assert taken == [10] * 3 * 2


def test_rows_of_inputs_and_targets_belong_together():
    """A global batch on the mesh holds the source's own pairs."""
    source = open_source(EMBEDDED, "train", seed=0)
    shapes = shapes_of(EMBEDDED, 16)

    batch = next(training_batches(source, shapes, seed=3, start_step=2, stop_step=3))

    index = np.random.default_rng([3, 0]).permutation(10_000)[32:48]
    expected = source.take(index)
    np.testing.assert_array_equal(batch["inputs"], expected["inputs"])
    np.testing.assert_array_equal(batch["targets"], expected["targets"])
    assert batch["inputs"].sharding == shapes["inputs"].sharding


@pytest.mark.parametrize(("length", "batches"), [(21, 3), (24, 3), (5, 1)])
def test_evaluation_counts_every_example_once(length, batches):
    """The last batch is filled up with rows that the mask leaves out."""
    shapes = shapes_of(SMALL_IMAGES, 8, has_mask=True)

    seen = list(evaluation_batches(Numbers(length), shapes))

    masks = np.concatenate([np.asarray(batch["mask"]) for batch in seen])
    targets = np.concatenate([np.asarray(batch["targets"]) for batch in seen])
    assert len(seen) == batches
    assert targets[masks == 1].tolist() == list(range(length))
    assert masks.sum() == length


@pytest.mark.skipif(not fashion_mnist.FOLDER.is_dir(), reason="the Debian package is not installed")
def test_the_debian_package_holds_the_full_set():
    """60,000 + 10,000 images, of the mean that the facts state."""
    config = FashionMnistConfig(edition="full")
    source = open_source(config, "train", seed=0)

    images = source.take(np.arange(len(source)))["inputs"]

    assert len(source) == read_facts(config).train_examples
    assert images.mean() / 255 == pytest.approx(read_facts(config).pixel_mean, abs=1e-5)


def test_the_licence_notice_is_beside_the_embedded_file():
    """The MIT licence asks for its notice to go where the data goes."""
    notice = fashion_mnist.EMBEDDED.with_name("FASHION_MNIST_LICENSE.txt")

    assert "Zalando" in notice.read_text()
