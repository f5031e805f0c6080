"""Validation examples are held out of training: seeded, and disjoint, in every kind of data set."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from parquet_cases import encoded

from scalejax.config.data import (
    ArrayRecordConfig,
    CustomDataConfig,
    DataConfig,
    FashionMnistConfig,
    ImageFolderConfig,
    MaskedTokensConfig,
    MixtureConfig,
    NumpyConfig,
    ParquetConfig,
    PythonDocsConfig,
    ReadingConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
    TokensConfig,
)
from scalejax.core.errors import ConfigError
from scalejax.data.datasets import for_process, open_source
from scalejax.data.facts import read_facts
from scalejax.data.held_out import held_out_indices
from scalejax.data.source import Grouped, Ordered

EXAMPLES, TESTED = 60, 12


def images_of(count, first=0):
    """Images of 4 x 4, no two alike: the first two pixels are a number."""
    images = np.zeros((count, 4, 4), np.uint8)
    numbers = np.arange(first, first + count)
    images[:, 0, 0], images[:, 0, 1] = divmod(numbers, 256)
    return images


def numpy_arrays(folder):
    """The images in NumPy's files."""
    for part, count, first in (("train", EXAMPLES, 0), ("test", TESTED, 1000)):
        np.save(folder / f"x_{part}.npy", images_of(count, first))
        np.save(folder / f"y_{part}.npy", np.arange(count) % 3)
    return NumpyConfig(train=str(folder), test=str(folder))


def numpy_at_a_url(folder):
    """The same in a store."""
    fsspec = pytest.importorskip("fsspec")
    numpy_arrays(folder)
    store = f"/held-out-{folder.name}"
    fsspec.filesystem("memory").pipe(
        {f"{store}/{path.name}": path.read_bytes() for path in folder.glob("*.npy")}
    )
    return NumpyConfig(train=f"memory:/{store}", test=f"memory:/{store}")


def parquet_rows(folder, **reading):
    """Rows of numbers, 7 in a row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part, count, first in (("train", EXAMPLES, 0), ("test", TESTED, 1000)):
        numbers = np.arange(first, first + count)
        rows = {"number": numbers.astype(np.float64), "label": numbers % 3}
        pq.write_table(pa.table(rows), folder / f"{part}.parquet", row_group_size=7)
    return ParquetConfig(
        train=str(folder / "train.parquet"),
        test=str(folder / "test.parquet"),
        feature_columns=("number",),
        reading=ReadingConfig(**reading),
    )


def parquet_in_groups(folder):
    """The same, shuffled by row groups."""
    return parquet_rows(folder, shuffle="row_groups", window=2)


def tokens(folder, **changed):
    """A stream in which no token comes twice, in documents of 37."""
    stream = np.arange(1, 1 + 8 * EXAMPLES + 5, dtype=np.uint32)
    stream.tofile(folder / "train.bin")
    (stream[: 8 * TESTED + 1] + 100_000).astype(np.uint32).tofile(folder / "test.bin")
    return TokensConfig(
        train=str(folder / "train.bin"),
        test=str(folder / "test.bin"),
        tokens=8,
        vocabulary=200_000,
        dtype="uint32",
        **changed,
    )


def documents(folder):
    """The same in documents that are put in another order every epoch: files of 37 tokens."""
    config = tokens(folder, packing="documents")
    stream = np.fromfile(folder / "train.bin", np.uint32)
    (folder / "documents").mkdir()
    for number, begin in enumerate(range(0, len(stream), 37)):
        stream[begin : begin + 37].tofile(folder / "documents" / f"{number:02d}.bin")
    return replace(config, train=str(folder / "documents"))


def mixture(folder):
    """A third of the tokens and the rest as two sources, drawn from as often as they are large."""
    whole, sources = tokens(folder), []
    for name, begin, count in (("large", 0, 40), ("small", 40, 20)):
        parts = {"train": count, "test": count // 5}
        for part, examples in parts.items():
            stream = np.fromfile(folder / f"{part}.bin", np.uint32)
            first = begin * examples // count
            stream = stream[8 * first : 8 * (first + examples) + 1]
            stream[0] = 0  # the end of what the other source holds
            stream.tofile(folder / f"{name}_{part}.bin")
        sources.append(
            replace(
                whole,
                train=str(folder / f"{name}_train.bin"),
                test=str(folder / f"{name}_test.bin"),
            )
        )
    return MixtureConfig(sources=tuple(sources), weights=(2, 1))


def folder_of_images(folder):
    """The images in a folder for each class."""
    for part, count, first in (("train", EXAMPLES, 0), ("test", TESTED, 1000)):
        for number, image in enumerate(images_of(count, first)):
            path = folder / part / f"class-{number % 3}" / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(image))
    train, test = str(folder / "train"), str(folder / "test")
    return ImageFolderConfig(train=train, test=test, image_size=4, channels=1)


def array_records(folder):
    """The images in ArrayRecord files."""
    pytest.importorskip("array_record")
    from test_array_record import example, write

    for part, count, first in (("train", EXAMPLES, 0), ("test", TESTED, 1000)):
        records = [
            example(image=encoded(image), label=number % 3)
            for number, image in enumerate(images_of(count, first))
        ]
        write(folder / part / "images.array_record", records)
    train, test = str(folder / "train"), str(folder / "test")
    return ArrayRecordConfig(train=train, test=test, classes=3, image_size=4, channels=1)


def own(folder):
    """The images of a function by import path."""
    del folder
    return CustomDataConfig(name="custom", path="toy_own_data:images")


KINDS = (
    own,
    numpy_arrays,
    numpy_at_a_url,
    parquet_rows,
    parquet_in_groups,
    folder_of_images,
    array_records,
    tokens,
    documents,
    mixture,
)


def order_given_by(source, epoch):
    """The examples of an epoch, if the source prescribes them."""
    return source.order_of_epoch(epoch, 1, 1) if isinstance(source, Ordered) else None


def identities(source, epochs=(None,)):
    """What tells examples apart: images and rows as they are, of text the targets."""
    found = set()
    for epoch in epochs:
        order = None if epoch is None else order_given_by(source, epoch)
        rows = source.take(np.arange(len(source)) if order is None else order, epoch)
        is_text = rows["targets"].ndim == 2
        for values in rows["targets"] if is_text else rows["inputs"]:
            found.update(values.tolist() if is_text else [values.tobytes()])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_example_is_in_two_parts(tmp_path, kind):
    """Of six epochs none is also held out or tested; another seed holds out others, the seed of the
    run does not; and facts count what is there."""
    config = replace(kind(tmp_path), validation_fraction=0.2)
    train, held_out, test = (
        open_source(config, part, seed=3) for part in ("train", "validation", "test")
    )

    trained, chosen_by = identities(train, range(6)), identities(held_out)
    whole = identities(open_source(kind_as_written(config), "train", seed=3), range(6))

    assert not trained & chosen_by
    assert not (trained | chosen_by) & identities(test)
    assert chosen_by <= whole
    facts = read_facts(config)
    assert (facts.train_examples, facts.validation_examples) == (EXAMPLES * 4 // 5, EXAMPLES // 5)
    assert (len(train), len(held_out), len(test)) == (facts.train_examples, EXAMPLES // 5, TESTED)
    again, others = (
        identities(open_source(replace(config, validation_seed=seed), "validation", seed=4))
        for seed in (0, 1)
    )
    assert again == chosen_by
    assert others != chosen_by


def kind_as_written(config: DataConfig) -> DataConfig:
    """The data set with nothing held out."""
    return replace(config, validation_fraction=None)


def test_documents_that_change_places_lose_no_token_but_those_held_out(tmp_path):
    """Their pieces differ from epoch to epoch; every token stays a target, but for the first of an
    epoch and those at its end, fewer than an example has."""
    config = replace(documents(tmp_path), validation_fraction=0.2)
    train = open_source(config, "train", seed=3)

    trained, held_out = (
        identities(train, range(20)),
        identities(open_source(config, "validation", seed=3)),
    )

    assert trained | held_out == set(range(1, 1 + 8 * EXAMPLES + 5))
    assert len(held_out) == 8 * EXAMPLES // 5


@pytest.mark.parametrize(
    "config",
    [
        FashionMnistConfig(edition="embedded"),
        SyntheticImagesConfig(image_size=4, classes=3, train_examples=60, test_examples=12),
        SyntheticTokensConfig(tokens=8, vocabulary=50, train_examples=60, test_examples=12),
        MaskedTokensConfig(tokens=16, masked=2, train_examples=60, test_examples=12),
        PythonDocsConfig(tokens=64),
    ],
    ids=lambda config: config.name,
)
def test_data_sets_without_files_hold_examples_out_too(config):
    """Each training example is in one of the two parts."""
    divided = replace(config, validation_fraction=0.1)
    facts, whole = read_facts(divided), open_source(config, "train", seed=0)

    parts = [open_source(divided, part, seed=0) for part in ("train", "validation")]

    assert [len(each) for each in parts] == [facts.train_examples, facts.validation_examples]
    assert facts.train_examples + facts.validation_examples == len(whole)
    inputs = [each.take(np.arange(len(each)))["inputs"] for each in (*parts, whole)]
    there, expected = (
        sorted(row.tobytes() for row in rows) for rows in (np.concatenate(inputs[:2]), inputs[2])
    )
    assert there == expected


def test_held_out_text_is_one_stretch():
    """Else every other piece of a text would be trained on."""
    stretch = held_out_indices(100, 10, seed=1, is_stream=True)
    spread = held_out_indices(100, 10, seed=1, is_stream=False)

    assert np.diff(stretch).tolist() == [1] * 9
    assert np.diff(spread).max() > 1
    assert len(set(spread.tolist())) == 10


def test_a_part_is_shuffled_in_groups_and_shared_as_the_whole(tmp_path):
    """Row groups are read once, in a worker as here."""
    config = replace(parquet_in_groups(tmp_path), validation_fraction=0.2)
    train = open_source(config, "train", seed=3)
    there = pickle.loads(pickle.dumps(for_process(train, 2)))

    assert isinstance(train, Grouped)
    order = train.shuffled(np.random.default_rng(1))
    rows = train.take(order, 0)["inputs"]

    assert sorted(order.tolist()) == list(range(len(train)))
    np.testing.assert_array_equal(there.take(order, 0)["inputs"], rows)


@pytest.mark.parametrize("kind", [numpy_arrays, parquet_rows, tokens])
def test_validation_data_may_be_files_of_their_own(tmp_path, kind):
    """Then all of the training files are trained on."""
    config = kind(tmp_path)
    (tmp_path / "own").mkdir()
    if kind is numpy_arrays:  # as MedMNIST and keras.datasets name them
        np.save(tmp_path / "own" / "x_val.npy", images_of(9, 2000))
        np.save(tmp_path / "own" / "y_val.npy", np.arange(9) % 3)
        own = str(tmp_path / "own")
    else:
        own = config.test
    config = replace(config, validation=own)

    facts, source = read_facts(config), open_source(config, "validation", seed=0)

    assert facts.train_examples == EXAMPLES
    assert len(source) == facts.validation_examples == (9 if kind is numpy_arrays else TESTED)
    assert not identities(source) & identities(open_source(config, "train", seed=0))


def test_what_holds_nothing_out_is_refused():
    """And so is a part that is not there."""
    config = SyntheticImagesConfig(train_examples=4, test_examples=1, validation_fraction=0.1)

    with pytest.raises(ConfigError, match=r"validation_fraction=0\.1 .* it holds out 0"):
        read_facts(config)
    with pytest.raises(ConfigError, match="has no examples for validation"):
        open_source(SyntheticImagesConfig(train_examples=4), "validation", seed=0)
