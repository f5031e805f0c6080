"""Arrays in NumPy's files as data: rows by index, and nothing that is unpickled or half there."""

import pickle
import zipfile
from functools import partial

import numpy as np
import pytest

from scalejax.config.data import NumpyConfig
from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError
from scalejax.data.datasets import for_process, open_source
from scalejax.data.facts import read_facts
from scalejax.data.formats.npy_headers import headers_at
from scalejax.data.source import UnreadableExample
from scalejax.training.train import train

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
CLASSES = np.arange(40) % 7
NUMBERS = GENERATOR.normal(3, 2, (40, 4)).astype(np.float32)
INDICES = np.array([39, 0, 7, 7, 21])


def as_archive(folder, arrays, save=np.savez):
    """All arrays in one file."""
    save(folder / "data.npz", **arrays)
    return {"train": f"{folder}/data.npz", "test": f"{folder}/data.npz"}


def as_compressed(folder, arrays):
    """All arrays in one file, compressed."""
    return as_archive(folder, arrays, np.savez_compressed)


def as_files(folder, arrays):
    """A file for each array."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {"train": str(folder), "test": str(folder)}


def as_url(folder, arrays):
    """Those files in a store in memory."""
    fsspec = pytest.importorskip("fsspec")
    as_files(folder, arrays)
    store = f"/{folder.name}-{id(arrays)}"
    fsspec.filesystem("memory").pipe(
        {f"{store}/{p.name}": p.read_bytes() for p in folder.glob("*.npy")}
    )
    return {"train": f"memory:/{store}", "test": f"memory:/{store}"}


def config_of(stored, **changed):
    """The files of the two parts, and what else is given."""
    return NumpyConfig(**{**stored, **changed})


def keras(inputs, targets):
    """Arrays named as those of keras.datasets: ten of the forty to test on."""
    return {
        "x_train": inputs,
        "y_train": targets,
        "x_test": inputs[10:20],
        "y_test": targets[10:20],
    }


@pytest.mark.parametrize("stored", [as_archive, as_compressed, as_files, as_url])
@pytest.mark.parametrize("targets", [CLASSES, CLASSES[:, None].astype(np.uint8)])
def test_rows_are_found_by_index(tmp_path, stored, targets):
    """Images as they were saved, whatever the files are; columns of classes are classes."""
    config = config_of(stored(tmp_path, keras(IMAGES, targets)))

    about, source = read_facts(config), open_source(config, "train", seed=0)
    rows = source.take(INDICES, 0)

    assert (about.train_examples, about.test_examples, about.classes) == (40, 10, 7)
    assert (about.input_shape, about.is_table) == ((6, 5, 3), False)
    np.testing.assert_array_equal(rows["inputs"], IMAGES[INDICES])
    np.testing.assert_array_equal(rows["targets"], CLASSES[INDICES])
    assert (rows["inputs"].dtype, rows["targets"].dtype) == (np.uint8, np.int32)
    of_test = open_source(config, "test", seed=0).take(np.arange(10))
    np.testing.assert_array_equal(of_test["inputs"], IMAGES[10:20])


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("x_train", "y_train"), ("x_test", "y_test")),
        (("train_images", "train_labels"), ("test_images", "test_labels")),
        (("inputs", "targets"),) * 2,
        (("images", "labels"),) * 2,
        (("x", "y"),) * 2,
    ],
)
def test_arrays_go_by_usual_names(tmp_path, train, test):
    """Of Keras, MedMNIST, and files of one part; other arrays in the file are no matter."""
    grey = IMAGES[..., 0]
    of_train = {train[0]: grey, train[1]: CLASSES, "about": np.array([{"by": "me"}], object)}
    save = partial(np.savez, allow_pickle=True)
    save(tmp_path / "train.npz", **of_train)
    save(tmp_path / "test.npz", **{test[0]: grey[:9], test[1]: CLASSES[:9]})
    config = NumpyConfig(train=f"{tmp_path}/train.npz", test=f"{tmp_path}/test.npz")

    assert read_facts(config).input_shape == (6, 5, 1)
    assert read_facts(config).test_examples == 9
    rows = open_source(config, "train", seed=0).take(INDICES)
    np.testing.assert_array_equal(rows["inputs"], grey[INDICES, :, :, None])


def test_arrays_go_by_the_names_given(tmp_path):
    """With the part in their names."""
    arrays = {"my_train": IMAGES, "is_train": CLASSES, "my_test": IMAGES, "is_test": CLASSES}
    config = config_of(as_files(tmp_path, arrays), inputs="my_{part}", targets="is_{part}")

    assert read_facts(config).train_examples == 40


@pytest.mark.parametrize("stored", [as_archive, as_files, as_url])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2", "<i4", "|u1"])
def test_numbers_have_mean_0_and_deviation_1(tmp_path, stored, dtype):
    """Of the training part, in the test part too; a feature that is the same everywhere is 0."""
    numbers = np.abs(NUMBERS).astype(dtype)
    numbers[:, 2] = 5
    config = config_of(stored(tmp_path, keras(numbers, CLASSES)))

    rows = open_source(config, "test", seed=0).take(np.arange(10))["inputs"]

    exact = numbers.astype(np.float64)
    deviation = np.where(np.arange(4) == 2, 1, exact.std(axis=0))
    expected = (exact - exact.mean(axis=0)) / deviation
    np.testing.assert_allclose(rows, expected[10:20], atol=1e-6)
    assert (read_facts(config).input_shape, read_facts(config).is_table) == ((4,), True)
    assert rows.dtype == np.float32


def test_moments_of_many_rows_are_those_of_some(tmp_path):
    """Of 200,000 rows with a trend, within the error of 65,536 evenly spread ones."""
    numbers = np.arange(200_000, dtype=np.float64)[:, None]
    config = config_of(as_files(tmp_path, keras(numbers, np.arange(200_000) % 2)))

    rows = open_source(config, "train", seed=0).take(np.arange(200_000))["inputs"]

    assert abs(rows.mean()) < 0.02
    assert abs(rows.std() - 1) < 0.02


def _float_images(arrays):
    arrays["x_train"] = IMAGES / 255


def _channels_first(arrays):
    arrays["x_train"] = IMAGES.transpose(0, 3, 1, 2)


def _other_shape(arrays):
    arrays["x_test"] = arrays["x_test"][:, 1:]


def _too_few(arrays):
    arrays["y_train"] = CLASSES[:39]


def _one_hot(arrays):
    arrays["y_train"] = np.eye(7)[CLASSES]


def _below_zero(arrays):
    arrays["y_train"] = CLASSES - 1


def _pickled(arrays):
    arrays["x_train"] = np.array([{"any": "program"}] * 40, object)


def _unnamed(arrays):
    arrays["pixels"] = arrays.pop("x_train")


@pytest.mark.parametrize("stored", [as_archive, as_files])
@pytest.mark.parametrize(
    ("spoil", "changed", "message"),
    [
        (_float_images, {}, r"x_train.* holds float64 \[40, 6, 5, 3\]: inputs are uint8 images"),
        (_channels_first, {}, r"x_train.* holds uint8 \[40, 3, 6, 5\]: .*; channels come last"),
        (_other_shape, {}, r"data\.test: .*x_test.* holds examples of \(5, 5, 3\), and .*x_train"),
        (_too_few, {}, r"y_train.* holds int64 \[39\]: targets are integers \[40\], one for each"),
        (_one_hot, {}, r"y_train.* holds float64 \[40, 7\]: targets are integers"),
        (_below_zero, {}, r"y_train.*, row 0: -1 is not a class; they are from 0"),
        (None, {"classes": 6}, r"y_train.*, row 6: 6 is not a class; they are 0 to 5"),
        (_pickled, {}, r"data\.train: .*x_train.* holds Python objects, and unpickling"),
        (_unnamed, {}, r"data\.train=.* is refused: it holds pixels, x_test, .*data\.inputs and"),
        (_unnamed, {"inputs": "pixel", "targets": "y_{part}"}, r"no such array: .*'pixels'"),
        (None, {"train": "nowhere.npz"}, r"data\.train=.* there is no such file or folder"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, stored, spoil, changed, message):
    """At the door, with the array that it is in."""
    arrays = keras(IMAGES, CLASSES)
    if spoil:
        spoil(arrays)

    with pytest.raises(ConfigError, match=message):
        read_facts(config_of(stored(tmp_path, arrays), **changed))


def test_a_folder_without_arrays_and_a_single_array_are_refused(tmp_path):
    """With what is accepted."""
    with pytest.raises(ConfigError, match=r"no array \(\*\.npy\) is there"):
        read_facts(NumpyConfig(train=str(tmp_path), test=str(tmp_path)))
    np.savetxt(tmp_path / "x.csv", NUMBERS)
    with pytest.raises(ConfigError, match=r"it must be an \.npz, or a folder of \.npy files"):
        read_facts(NumpyConfig(train=f"{tmp_path}/x.csv", test=f"{tmp_path}/x.csv"))


def test_one_name_alone_is_refused():
    """Inputs without targets."""
    with pytest.raises(ConfigError, match=r"data\.inputs='x' is refused: .* both or neither"):
        NumpyConfig(train="a", test="a", inputs="x")


def test_arrays_of_archives_are_loaded_within_a_limit(tmp_path):
    """3600 + 900 bytes of pixels, 320 + 80 of classes; files of their own need none."""
    stored = as_archive(tmp_path, keras(IMAGES, CLASSES))

    read_facts(config_of(stored, memory_bytes=4900))
    with pytest.raises(ConfigError, match=r"data\.memory_bytes=4899 .*: the arrays take 4900; unz"):
        read_facts(config_of(stored, memory_bytes=4899))
    with zipfile.ZipFile(tmp_path / "data.npz") as archive:
        archive.extractall(tmp_path / "unzipped")
    unzipped = f"{tmp_path}/unzipped"
    config = NumpyConfig(train=unzipped, test=unzipped, memory_bytes=1)
    np.testing.assert_array_equal(
        open_source(config, "train", seed=0).take(INDICES)["inputs"], IMAGES[INDICES]
    )


def test_arrays_of_archives_are_loaded_in_every_process(tmp_path):
    """4900 bytes in one that trains, and 3600 in each of two that make batches."""
    stored = as_archive(tmp_path, keras(IMAGES, CLASSES))
    enough = open_source(config_of(stored, memory_bytes=12100), "train", seed=0)
    short = config_of(stored, memory_bytes=12099)

    taken = pickle.loads(pickle.dumps(for_process(enough, 3)))
    np.testing.assert_array_equal(taken.take(INDICES)["inputs"], IMAGES[INDICES])
    for part in ("train", "test"):
        with pytest.raises(ConfigError, match=r"=12099 .* take 12100 in 3 processes .*; unzip"):
            for_process(open_source(short, part, seed=0), 3)
    with zipfile.ZipFile(tmp_path / "data.npz") as archive:
        archive.extractall(tmp_path / "unzipped")
    unzipped = f"{tmp_path}/unzipped"
    mapped = NumpyConfig(train=unzipped, test=unzipped, memory_bytes=1)
    for_process(open_source(mapped, "train", seed=0), 3)


@pytest.mark.parametrize(
    ("stored", "file", "message"),
    [
        (as_files, "x_train.npy", r"x_train\.npy is incomplete: it has \d+ of \d+ bytes"),
        (as_compressed, "data.npz", r"data\.npz cannot be read as \.npz"),
    ],
)
def test_half_a_file_is_refused(tmp_path, stored, file, message):
    """Before anything runs."""
    config = config_of(stored(tmp_path, keras(IMAGES, CLASSES)))
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])

    with pytest.raises(ConfigError, match=message):
        read_facts(config)


def test_a_file_of_another_kind_and_one_in_columns_are_refused(tmp_path):
    """No header of NumPy's; rows that lie in pieces."""
    config = config_of(as_files(tmp_path, keras(NUMBERS, CLASSES)))
    np.save(tmp_path / "x_train.npy", np.asfortranarray(NUMBERS))
    with pytest.raises(ConfigError, match=r"x_train\.npy is stored column by column"):
        read_facts(config)

    (tmp_path / "x_train.npy").write_bytes(b"no header" * 100)
    with pytest.raises(ConfigError, match=r"x_train\.npy cannot be read as \.npy"):
        read_facts(config)


def test_what_is_no_number_is_named_by_file_and_row(tmp_path):
    """When its row is taken, and not before."""
    numbers = NUMBERS.copy()
    numbers[21, 3] = np.nan
    config = config_of(as_files(tmp_path, keras(numbers, CLASSES)))
    source = open_source(config, "train", seed=0)

    source.take(np.array([20, 22]))
    with pytest.raises(UnreadableExample, match=r"x_train\.npy, row 21, column 3: nan is not a"):
        source.take(np.array([20, 21]))


@pytest.mark.parametrize("stored", [as_files, as_url])
def test_a_file_cut_short_while_it_is_read_ends_in_words(tmp_path, stored):
    """And not in a signal, as reading what was mapped of it would."""
    where = stored(tmp_path, keras(np.repeat(IMAGES, 100, axis=0), np.repeat(CLASSES, 100)))
    config = config_of(where)
    source = open_source(config, "train", seed=0)
    source.take(np.array([3999]))
    if stored is as_files:
        with open(tmp_path / "x_train.npy", "r+b") as file:
            file.truncate(1000)
    else:
        fsspec = pytest.importorskip("fsspec")
        path = f"{where['train'].removeprefix('memory:/')}/x_train.npy"
        fsspec.filesystem("memory").pipe(path, b"short")

    with pytest.raises(ConfigError, match=r"data\.train: .*x_train\.npy (was rewritten|cannot be)"):
        source.take(np.array([3999]))


RUN = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "numpy"
train = "data.npz"
test = "data.npz"
[batch]
global_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1
"""


def test_a_run_learns_from_arrays(tmp_path, monkeypatch):
    """Classes that follow from a number; a resumed run asks for the same file."""
    numbers = GENERATOR.normal(size=(400, 2))
    as_archive(tmp_path, keras(numbers, (numbers[:, 0] > 0).astype(np.int64)))
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)

    record = train(
        load_config(tmp_path / "run.toml", {"train.epochs": 4}),
        tmp_path / "run",
        device_count=2,
    )

    assert record.evaluations[-1].test_accuracy == 1
    as_archive(tmp_path, keras(numbers, (numbers[:, 1] > 0).astype(np.int64)))
    monkeypatch.chdir("/")
    longer = load_config(tmp_path / "run" / "run.toml", {"train.epochs": 5})
    with pytest.raises(ConfigError, match=r"data\.npz of data\.train has changed since it began"):
        train(longer, tmp_path / "run", device_count=2, resume=True)


def test_a_damaged_directory_of_an_archive_is_refused_in_few_words(tmp_path):
    """The error of `zipfile` quotes the name in the file, whose damaged length is up to 64 KiB."""
    path = tmp_path / "a.npz"
    np.savez(path, x_train=np.zeros((40, 64, 64), np.uint8))
    content = bytearray(path.read_bytes())
    content[27] = 0x10  # the length of the first name, 4,096 and more
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"a\.npz cannot be read") as refused:
        headers_at("data.train", str(path))
    assert len(str(refused.value)) < len(str(path)) + 500
