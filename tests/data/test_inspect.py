"""What `scalejax data inspect` says of files whose content is known."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_cases import encoded, random_images, write_images

from scalejax.cli.main import main
from scalejax.config.data import NumpyConfig
from scalejax.core.errors import ConfigError
from scalejax.data.convert import RowsOptions, open_rows
from scalejax.data.formats.numpy import numpy_facts
from scalejax.data.held_out import held_out_indices
from scalejax.data.inspect import inspect


def test_rows_columns_classes_and_images_are_those_of_the_file(tmp_path):
    """Twenty images of two sizes in row groups of seven, three classes."""
    images = [*random_images(12, 8), *random_images(8, 16)]
    write_images(tmp_path / "a.parquet", images, [0, 0, 1, 2] * 5, rows=7)

    found = inspect(open_rows(str(tmp_path)), verify=True)

    assert found.groups is not None
    assert found.images is not None
    assert found.classes is not None
    assert (found.rows, found.files, found.unreadable_rows) == (20, 1, 0)
    assert (found.groups.count, found.groups.fewest_rows, found.groups.most_rows) == (3, 6, 7)
    assert found.classes == (("0", 10), ("1", 5), ("2", 5))
    assert found.images.sampled == 20
    assert (found.images.smallest, found.images.largest) == ((8, 8), (16, 16))
    assert found.images.formats == ("PNG",)
    assert [column.name for column in found.columns] == ["image", "label"]
    assert found.columns[1].decompressed_bytes == 20 * 8


def test_names_of_columns_may_have_dots(tmp_path):
    """What is below a column was told by the first dot of its path: a traceback, or another's."""
    table = {
        "petal.length": pa.array([1.5, 2.5]),
        "petal": pa.array([{"width": [1, 2]}, {"width": []}]),
        "kind.of": pa.array(["a", "b" * 100]),
        "shape": pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((2, 3, 4), np.float32)),
        "parts": pa.array([[("x", 1)], []], pa.map_(pa.string(), pa.int32())),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet", compression="zstd")

    columns = {each.name: each for each in inspect(open_rows(str(tmp_path))).columns}

    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    stored = [metadata.column(place).total_compressed_size for place in range(6)]
    assert [columns[name].stored_bytes for name in table] == [*stored[:4], stored[4] + stored[5]]
    assert columns["petal.length"].decompressed_bytes == 2 * 8
    assert (columns["kind.of"].decompressed_bytes or 0) > 100


def test_every_unreadable_row_is_counted_and_the_first_are_named(tmp_path, capsys):
    """By file and row, as pyarrow numbers them; the command ends as one that refuses."""
    good = [encoded(image) for image in random_images(30)]
    bad = {3: b"no image", 17: good[17][: len(good[17]) // 2], 29: b""}
    images = [bad.get(row, image) for row, image in enumerate(good)]
    write_images(tmp_path / "a.parquet", images[:10], [0] * 10)
    write_images(tmp_path / "b.parquet", images[10:], [0] * 20)
    output = tmp_path / "found.json"

    assert main(["data", "inspect", str(tmp_path), "--verify", "--json", str(output)]) == 2

    (found,) = json.loads(output.read_text())["inspections"]
    assert found["unreadable_rows"] == 3
    expected = [("a", 3), ("b", 7), ("b", 19)]
    assert [each["where"] for each in found["unreadable"]] == [
        f"{tmp_path / name}.parquet, row {row}" for name, row in expected
    ]
    told = capsys.readouterr()
    assert "3 rows cannot be read" in " ".join(told.err.split())
    assert "Unreadable: 3 of 30 rows" in told.out
    lines = [line for line in told.out.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80  # but for paths, which are not broken


def test_the_table_to_paste_is_read_as_this_data(tmp_path):
    """Images in a column of another name, and a table of numbers."""
    images = pa.array([encoded(image) for image in random_images(4)], pa.binary())
    pq.write_table(pa.table({"photo": images, "kind": [0, 1, 0, 1]}), tmp_path / "i.parquet")
    pq.write_table(
        pa.table({"x": np.arange(4.0), "y2": np.arange(4), "label": [0, 1, 0, 1]}),
        tmp_path / "n.parquet",
    )

    of_images, of_numbers = (
        tomllib.loads(inspect(open_rows(str(tmp_path / name))).table or "")["data"]
        for name in ("i.parquet", "n.parquet")
    )

    assert (of_images["image_column"], of_images["label_column"]) == ("photo", "kind")
    assert of_numbers["feature_columns"] == ["x", "y2"]
    assert of_numbers["label_column"] == "label"


def test_row_groups_too_large_to_read_at_random_are_told_of(tmp_path):
    """One group of 600 MiB does not fit in the half of a GiB that is for row groups."""
    numbers = np.zeros((75 * 2**20,), np.float64)
    pq.write_table(
        pa.table({"x": numbers, "label": np.zeros(len(numbers), np.int8)}),
        tmp_path / "n.parquet",
        row_group_size=len(numbers),
    )

    found = inspect(open_rows(str(tmp_path)))

    assert any("too large" in each and "--row-group-rows" in each for each in found.advice)


def test_what_is_not_there_is_refused(tmp_path):
    """By the name that was given."""
    with pytest.raises(ConfigError, match="no such file"):
        open_rows(str(tmp_path / "none"))


def classes_in_files(folder, labels, *, rows=10):
    """A file of rows of one number each, and these classes."""
    table = pa.table({"x": np.arange(float(len(labels))), "label": labels})
    pq.write_table(table, folder, row_group_size=rows)


def test_classes_that_lie_one_after_the_other_are_told_of(tmp_path):
    """Not where they are mixed, nor where nearly all rows are of one class anyway."""
    generator = np.random.default_rng(0)
    cases = {
        "sorted": [0] * 40 + [1] * 35 + [2] * 45,
        "mixed": generator.permutation([0, 1, 2] * 40),
        "rare": generator.permutation([0] * 118 + [1] * 2),
        "single": [1] * 120,
    }

    for name, labels in cases.items():
        classes_in_files(tmp_path / f"{name}.parquet", labels)
        advice = " ".join(inspect(open_rows(str(tmp_path / f"{name}.parquet"))).advice)
        assert ("one after the other" in advice) == (name == "sorted"), name
        if name == "sorted":  # the group of rows 70 to 79 has two
            assert "11 of 12 row groups hold a single class of 3" in advice
            assert 'shuffle = "row_groups" would train badly' in advice


def test_a_run_that_mixes_all_rows_is_not_told_so(tmp_path, capsys):
    """One that mixes row groups is, of what it trains on."""
    classes_in_files(tmp_path / "a.parquet", [0] * 50 + [1] * 50)
    classes_in_files(tmp_path / "b.parquet", [0] * 50 + [1] * 50)
    for shuffle, count in (("rows", 0), ("row_groups", 1)):
        (tmp_path / "run.toml").write_text(
            f"""
            batch = {{ global_batch = 8 }}
            optimizer = {{ name = "sgd" }}
            schedule = {{ base_learning_rate = 0.1 }}
            [model]
            name = "mlp"
            [data]
            name = "parquet"
            train = "{tmp_path}/a.parquet"
            test = "{tmp_path}/b.parquet"
            feature_columns = ["x"]
            reading = {{ shuffle = "{shuffle}", memory_bytes = 1000000 }}
            """
        )
        assert main(["data", "inspect", str(tmp_path / "run.toml")]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert told.count("classes lie one after the other") == count


def test_a_row_without_a_class_is_one_that_cannot_be_read(tmp_path):
    """Training ends on it as on an image that is none."""
    images = random_images(9)
    write_images(tmp_path / "a.parquet", images, [0, 1, None, 1, 0, 1, 0, 1, None], rows=4)
    classes_in_files(tmp_path / "b.parquet", [0, None, 1])

    of_images, of_numbers = (
        inspect(open_rows(str(tmp_path / name)), verify=True).unreadable
        for name in ("a.parquet", "b.parquet")
    )

    assert [each.where.rpartition(" ")[2] for each in of_images] == ["2", "8"]
    assert [each.where.rpartition(" ")[2] for each in of_numbers] == ["1"]
    assert "'label'" in of_images[0].why


def data_of(location):
    """The [data] table for it."""
    return tomllib.loads(inspect(open_rows(str(location))).table or "")["data"]


def test_test_data_are_never_what_to_train_on(tmp_path):
    """Of a folder with both parts, of one of them, and of a file called test."""
    for part in ("train", "test"):
        (tmp_path / "pq" / part).mkdir(parents=True)
        classes_in_files(tmp_path / "pq" / part / "a.parquet", [0, 1] * 5)
        folder = tmp_path / "images" / part / "ant"
        folder.mkdir(parents=True)
        (folder / "0.png").write_bytes(encoded(random_images(1)[0]))
    (tmp_path / "lone").mkdir()
    classes_in_files(tmp_path / "lone" / "test-00000-of-00001.parquet", [0, 1] * 5)

    for name, kind in (("pq", "parquet"), ("images", "image_folder")):
        parts = {part: str(tmp_path / name / part) for part in ("train", "test")}
        for location in (tmp_path / name, *parts.values()):
            table = data_of(location)
            assert {part: table[part] for part in parts} == parts
            assert table["name"] == kind
        advice = inspect(open_rows(str(tmp_path / name))).advice
        assert any("are counted together" in each for each in advice)
    lone = data_of(tmp_path / "lone" / "test-00000-of-00001.parquet")
    assert (lone["train"], Path(lone["test"]).parent.name) == ("...", "lone")


def test_arrays_by_the_names_of_keras_are_found_as_training_does(tmp_path, capsys):
    """Both parts in one file, classes in a column; the table is one that training reads."""
    path, images = tmp_path / "f.npz", random_images(10, 6)
    labels = np.arange(10).reshape(10, 1) % 3
    np.savez(path, x_train=images, y_train=labels, x_test=images[:4], y_test=labels[:4])

    table = data_of(path)
    facts = numpy_facts(NumpyConfig(train=table["train"], test=table["test"]))

    assert set(table) == {"name", "train", "test"}
    assert (facts.train_examples, facts.test_examples, facts.classes) == (10, 4, 3)
    assert len(open_rows(str(path), RowsOptions(images="x_test"))) == 4
    tables = list(open_rows(str(path)).read(0, 10))
    assert pa.concat_tables(tables)["label"].to_pylist() == labels.reshape(-1).tolist()
    np.savez(path, a_train=images, b_train=images, c=labels[:, 0])
    assert main(["data", "inspect", str(path)]) == 2
    assert "--images a_train" in capsys.readouterr().err
    assert main(["data", "inspect", str(path), "--images", "b_train"]) == 0
    assert 'inputs = "b_{part}"' in capsys.readouterr().out


def test_what_is_of_no_known_kind_is_told_which_are(tmp_path, capsys):
    """A file of tokens and an image; a folder of images by its file:// URL."""
    for name in ("tok.bin", "one.jpg"):
        (tmp_path / name).write_bytes(bytes(64))
        with pytest.raises(ConfigError, match=r"rows are read from Parquet .* folder of images"):
            open_rows(str(tmp_path / name))
    (tmp_path / "images" / "ant").mkdir(parents=True)
    (tmp_path / "images" / "ant" / "0.png").write_bytes(encoded(random_images(1)[0]))
    assert main(["data", "inspect", f"file://{tmp_path}/images"]) == 0
    assert "folder of images, 1 file" in capsys.readouterr().out


def test_a_run_on_arrays_is_looked_at_and_one_on_no_files_told_what_is(tmp_path, capsys):
    """Each part by its own arrays."""
    images, labels = random_images(10, 6), np.arange(10) % 3
    np.savez(
        tmp_path / "f.npz", x_train=images, y_train=labels, x_test=images[:4], y_test=labels[:4]
    )
    head = """
        batch = { global_batch = 8 }
        optimizer = { name = "sgd" }
        schedule = { base_learning_rate = 0.1 }
        [model]
        name = "mlp"
        [data]
        """
    data = f'name = "numpy"\ntrain = "{tmp_path}/f.npz"\ntest = "{tmp_path}/f.npz"'
    (tmp_path / "run.toml").write_text(head + data)
    assert main(["data", "inspect", str(tmp_path / "run.toml")]) == 0
    told = capsys.readouterr().out
    assert "NumPy, x_train and y_train, 1 file" in told
    assert "NumPy, x_test and y_test, 1 file" in told
    assert "4 rows" in told
    (tmp_path / "run.toml").write_text(head + 'name = "fashion_mnist"')
    assert main(["data", "inspect", str(tmp_path / "run.toml")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "only parquet, image_folder and numpy" in told


def test_examples_that_are_trained_and_tested_on_are_counted(tmp_path, capsys):
    """Three test images are training images too, and one of those that are held out is twice among
    them: whichever of the two is held out. Without --verify nothing is compared."""
    images = random_images(40, 8)
    images[7] = images[30]
    write_images(tmp_path / "train.parquet", images, [0, 1] * 20)
    write_images(tmp_path / "test.parquet", [*random_images(5, 8, seed=1), *images[:3]], [0] * 8)
    held_out = held_out_indices(40, 8, seed=(seed := seed_that_splits(7, 30)), is_stream=False)
    assert (7 in held_out) != (30 in held_out)
    run = tmp_path / "run.toml"
    run.write_text(
        f"""
        model.name = "cnn"
        data = {{ name = "parquet", train = "{tmp_path}/train.parquet", image_size = 8,
                 test = "{tmp_path}/test.parquet",
                 validation_fraction = 0.2, validation_seed = {seed} }}
        batch.global_batch = 8
        optimizer.name = "sgd"
        schedule.base_learning_rate = 0.1
        """.replace("\n                 ", " ")
    )
    output = tmp_path / "found.json"
    tested = sum(place not in held_out for place in range(3))

    assert main(["data", "inspect", str(run)]) == 0
    assert "training examples too" not in capsys.readouterr().out
    assert main(["data", "inspect", str(run), "--verify", "--json", str(output)]) == 0

    said = " ".join(capsys.readouterr().out.split())
    assert "warning: 1 of 8 validation examples are training examples too" in said
    assert f"warning: {tested} of 8 test examples are training examples too" in said
    assert [each["trained"] for each in json.loads(output.read_text())["shared"]] == [1, tested]


def seed_that_splits(one, other):
    """A seed that holds one of two examples out of 40."""
    for seed in range(100):
        held_out = held_out_indices(40, 8, seed=seed, is_stream=False)
        if (one in held_out) != (other in held_out):
            return seed
    raise AssertionError
