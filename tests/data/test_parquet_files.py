"""Parquet files as data: every row found by its index, whatever the files look like."""

import io
import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_cases import encoded, random_images, write_images
from PIL import Image

from scalejax.cli.main import main
from scalejax.config.data import ParquetConfig
from scalejax.config.run import load_config, with_fields
from scalejax.core.errors import ConfigError
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts
from scalejax.training.train import train

IMAGES = random_images(40)
LABELS = np.arange(40) % 5


def config_of(folder, **changed):
    """The files train.parquet and test.parquet of a folder, images of 8 x 8."""
    return ParquetConfig(
        **{
            "train": str(folder / "train.parquet"),
            "test": str(folder / "test.parquet"),
            "image_size": 8,
            **changed,
        }
    )


@pytest.fixture
def folder(tmp_path):
    """40 images to train on in six row groups, 10 of them to test on."""
    write_images(tmp_path / "train.parquet", IMAGES, LABELS)
    write_images(tmp_path / "test.parquet", IMAGES[:10], LABELS[:10], rows=10)
    return tmp_path


@pytest.mark.parametrize("style", ["hugging face", "binary"])
def test_rows_are_found_by_index_in_any_order(folder, style):
    """Row groups of 7, rows of all of them, one twice: the pixels that were written."""
    write_images(folder / "train.parquet", IMAGES, LABELS, style=style)
    indices = np.array([39, 0, 6, 7, 7, 21, 13])

    source = open_source(config_of(folder), "train", seed=0)
    rows = source.take(indices)

    assert len(source) == 40
    np.testing.assert_array_equal(rows["inputs"], IMAGES[indices])
    np.testing.assert_array_equal(rows["targets"], LABELS[indices])
    assert (rows["inputs"].dtype, rows["targets"].dtype) == (np.uint8, np.int32)


def test_several_files_count_in_the_order_of_their_names(tmp_path):
    """A folder with one below it, and a glob: the same rows."""
    (tmp_path / "b").mkdir()
    write_images(tmp_path / "b" / "2.parquet", IMAGES[20:], LABELS[20:])
    write_images(tmp_path / "a.parquet", IMAGES[:20], LABELS[:20], rows=3)
    (tmp_path / "notes.txt").write_text("no Parquet")

    for location in (tmp_path, f"{tmp_path}/", tmp_path / "**" / "*.parquet"):
        config = config_of(tmp_path, train=str(location), test=str(location))
        rows = open_source(config, "train", seed=0).take(np.arange(40))
        np.testing.assert_array_equal(rows["inputs"], IMAGES)
        np.testing.assert_array_equal(rows["targets"], LABELS)


@pytest.mark.parametrize("unfinished", ["_temporary/0/b.parquet", ".b.parquet", "_b.parquet"])
def test_what_a_writer_left_unfinished_is_no_data(tmp_path, monkeypatch, unfinished):
    """In a folder whose own name begins so, by a relative path too."""
    folder = tmp_path / "_data"
    (folder / unfinished).parent.mkdir(parents=True)
    write_images(folder / "a.parquet", IMAGES, LABELS)
    (folder / unfinished).write_text("half a file")
    monkeypatch.chdir(tmp_path)

    for location in (str(folder), "_data", "./_data/", "../" + tmp_path.name + "/_data"):
        assert read_facts(config_of(folder, train=location, test=location)).train_examples == 40


def test_files_are_read_where_fsspec_finds_them(folder):
    """A URL of a store in memory gives the rows of the files copied there."""
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe(
        {f"/images/{p.name}": p.read_bytes() for p in folder.glob("*.parquet")}
    )
    fsspec.filesystem("memory").pipe(
        {
            "/folder/a.parquet": (folder / "train.parquet").read_bytes(),
            "/folder/_temporary/b.parquet": b"half a file",
        }
    )
    for location in ("images/train.parquet", "images/tr*.parquet", "folder"):
        config = config_of(
            folder, train=f"memory://{location}", test="memory://images/test.parquet"
        )

        rows = open_source(config, "train", seed=0).take(np.arange(40))

        np.testing.assert_array_equal(rows["inputs"], IMAGES)
        assert read_facts(config).test_examples == 10


def test_files_are_read_from_a_server(folder):
    """Of HTTP, whose paths are whole URLs; this one knows no ranges and sends files whole."""
    pytest.importorskip("aiohttp")
    serves = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), serves) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{server.server_port}"
        config = config_of(folder, train=f"{where}/train.parquet", test=f"{where}/test.parquet")

        rows = open_source(config, "train", seed=0).take(np.arange(39, -1, -1))

        np.testing.assert_array_equal(rows["inputs"], IMAGES[::-1])
        assert read_facts(config).test_examples == 10
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    """Writes no log."""

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_filters_keep_the_rows_for_which_they_hold(folder):
    """The kept rows are those that NumPy keeps, counted from 0 again."""
    kept = np.flatnonzero((LABELS > 1) & np.isin(LABELS, (0, 2, 4)))
    config = config_of(folder, filters=(("label", ">", 1), ("label", "in", (0, 2, 4))))

    source = open_source(config, "train", seed=0)

    assert read_facts(config).train_examples == len(source) == len(kept)
    np.testing.assert_array_equal(source.take(np.arange(len(kept)))["inputs"], IMAGES[kept])


@pytest.mark.parametrize(("comparison", "kept"), [(">", 32), ("<=", 8), ("==", 0), ("!=", 40)])
def test_integers_compare_with_fractions(folder, comparison, kept):
    """Of labels 0 ... 4, eight of each, those on the side of 0.5 that is asked for."""
    config = config_of(folder, filters=(("label", comparison, 0.5), ("label", "<", 9.0)))

    if kept:
        assert read_facts(config).train_examples == kept
    else:
        with pytest.raises(ConfigError, match="they keep no row"):
            read_facts(config)


def test_facts_are_what_the_files_hold(folder):
    """Counts of rows and classes, from the footers; a count that is given is taken."""
    about = read_facts(config_of(folder))

    assert (about.train_examples, about.test_examples, about.classes) == (40, 10, 5)
    assert about.input_shape == (8, 8, 3)
    assert read_facts(config_of(folder, classes=12)).classes == 12


def test_pixels_enter_less_a_half_and_over_a_quarter(folder):
    """As the data set says in its description, whatever the images hold."""
    about = read_facts(config_of(folder))

    assert (about.pixel_mean, about.pixel_std) == (0.5, 0.25)
    assert "mean 0.5 and deviation 0.25" in " ".join((ParquetConfig.__doc__ or "").split())


def test_a_file_is_opened_once_for_its_classes(folder, monkeypatch):
    """The footer that says which row groups there are says their bounds too."""
    write_images(folder / "train.parquet", IMAGES, LABELS, rows=2)
    paths, init = [], pq.ParquetFile.__init__

    def counted(self, source, **options):
        paths.append(source)
        init(self, source, **options)

    monkeypatch.setattr(pq.ParquetFile, "__init__", counted)

    assert read_facts(config_of(folder)).classes == 5
    assert len(paths) == 2  # one file to train on, one to test on


def test_classes_are_those_of_the_rows_that_are_kept(folder):
    """Rows without a class, marked -1, are left out, and so are two classes."""
    write_images(folder / "train.parquet", IMAGES, np.where(LABELS == 2, -1, LABELS))
    kept = (("label", ">=", 0), ("label", "<", 3))

    assert read_facts(config_of(folder, filters=kept)).classes == 3  # 2 in the test part
    assert read_facts(config_of(folder, filters=(("label", "==", 1),))).classes == 2


def test_classes_are_counted_as_hugging_face_names_them(folder):
    """Ten names in the metadata are ten classes, though the rows show five."""
    about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": list("abcdefghij")}}}}
    table = pq.read_table(folder / "train.parquet")
    table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pq.write_table(table, folder / "train.parquet")

    assert read_facts(config_of(folder)).classes == 10


def test_texts_are_classes_in_their_sorted_order(folder):
    """A class is the place of its name among those of the training part, in both parts."""
    names = np.array(["pear", "apple", "fig"])
    write_images(folder / "train.parquet", IMAGES[:6], names[[0, 1, 2, 0, 1, 2]])
    write_images(folder / "test.parquet", IMAGES[:2], names[[2, 0]])

    config = config_of(folder)

    assert read_facts(config).classes == 3
    train_rows = open_source(config, "train", seed=0).take(np.arange(6))
    test_rows = open_source(config, "test", seed=0).take(np.arange(2))
    assert train_rows["targets"].tolist() == [2, 0, 1, 2, 0, 1]
    assert test_rows["targets"].tolist() == [1, 2]


def test_images_are_scaled_by_their_shorter_side_and_cut_in_the_middle(folder):
    """Of three squares of 16 x 16 side by side the middle one is kept, at half its size."""
    wide = np.repeat(np.array([10, 200, 90], np.uint8), 16)[None].repeat(16, axis=0)
    tall = np.stack([wide.T] * 3, axis=2)
    write_images(folder / "train.parquet", [wide, tall], [0, 1])

    rows = open_source(config_of(folder), "train", seed=0).take(np.arange(2))

    # but for its edges, where a new pixel covers some of the next square
    np.testing.assert_array_equal(rows["inputs"][0, :, 1:-1], np.full((8, 6, 3), 200))
    np.testing.assert_array_equal(rows["inputs"][1, 1:-1], np.full((6, 8, 3), 200))


def test_a_jpeg_is_what_it_is_at_full_size(folder):
    """Decoding it at a fraction first changes a smooth image by no more than JPEG itself does."""
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    image = np.stack(
        [ramp[None].repeat(64, 0), ramp[:, None].repeat(64, 1), ramp[::-1, None] + 0 * ramp], 2
    )
    write_images(folder / "train.parquet", [image], [0], kind="JPEG")

    rows = open_source(config_of(folder), "train", seed=0).take(np.arange(1))

    blocks = image.reshape(8, 8, 8, 8, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(rows["inputs"][0], blocks, atol=8)


def test_grey_and_coloured_images_become_what_is_asked_for(folder):
    """Three equal channels of a grey image; ITU-R 601-2 luma of a coloured one."""
    grey = random_images(1, channels=1)[0]
    write_images(folder / "train.parquet", [grey, IMAGES[0]], [0, 1])

    coloured = open_source(config_of(folder), "train", seed=0).take(np.arange(2))["inputs"]
    luma = open_source(config_of(folder, channels=1), "train", seed=0).take(np.arange(2))["inputs"]

    np.testing.assert_array_equal(coloured[0], np.stack([grey] * 3, 2))
    np.testing.assert_array_equal(luma[0, :, :, 0], grey)
    np.testing.assert_allclose(luma[1, :, :, 0], IMAGES[0] @ [0.299, 0.587, 0.114], atol=1)


@pytest.mark.parametrize(
    ("pixels", "kind", "mode"),
    [(np.uint16, "PNG", "I;16"), (np.int32, "TIFF", "I"), (np.float32, "TIFF", "F")],
)
def test_an_image_of_more_than_8_bits_is_refused_with_its_mode(folder, pixels, kind, mode):
    """Pillow would make 255 of all values above it."""
    deep = (IMAGES[0, :, :, 0].astype(pixels)) * 200
    write_images(folder / "train.parquet", [encoded(deep, kind)], [0])
    source = open_source(config_of(folder, classes=1), "train", seed=0)

    with pytest.raises(ConfigError, match=rf"row 0, column 'image': .* mode {mode}:"):
        source.take(np.arange(1))


def test_an_image_is_turned_as_its_exif_says(folder):
    """Orientation 6: to be turned clockwise by 90 degrees; damaged EXIF turns nothing."""
    exif = Image.Exif()
    exif[0x0112] = 6
    contents = []
    for about in (exif, b"Exif\0\0damaged"):
        file = io.BytesIO()
        Image.fromarray(IMAGES[0]).save(file, "PNG", exif=about)
        contents.append(file.getvalue())
    write_images(folder / "train.parquet", contents, [0, 1])

    rows = open_source(config_of(folder), "train", seed=0).take(np.arange(2))

    np.testing.assert_array_equal(rows["inputs"][0], np.rot90(IMAGES[0], -1))
    np.testing.assert_array_equal(rows["inputs"][1], IMAGES[0])


def _without_label(folder):
    table = pq.read_table(folder / "train.parquet").drop_columns("label")
    pq.write_table(table, folder / "train.parquet")


def _truncated(folder):
    whole = (folder / "train.parquet").read_bytes()
    (folder / "train.parquet").write_bytes(whole[: len(whole) // 2])


def _other_schema(folder):
    table = pq.read_table(folder / "train.parquet")
    table = table.set_column(1, "label", table["label"].cast(pa.int32()))
    pq.write_table(table, folder / "more.parquet")


def _no_images(folder):
    pq.write_table(pa.table({"image": [1.5], "label": [0]}), folder / "train.parquet")


def _float_labels(folder):
    write_images(folder / "train.parquet", IMAGES[:2], [0.0, 1.0])


def _below_zero(folder):
    write_images(folder / "train.parquet", IMAGES[:2], [0, -1])


def _beyond_int64(folder):
    labels = pa.array([0, 2**63 + 5], pa.uint64())
    write_images(folder / "train.parquet", IMAGES[:2], labels)
    write_images(folder / "test.parquet", IMAGES[:2], labels)


def _text_of_test(folder):
    write_images(folder / "train.parquet", IMAGES[:2], ["fig", "pear"])
    write_images(folder / "test.parquet", IMAGES[:2], ["apple", "fig"])


def _empty(folder):
    write_images(folder / "train.parquet", [], pa.array([], pa.int64()))


@pytest.mark.parametrize(
    ("damage", "changed", "message"),
    [
        (_truncated, {}, r"data\.train: .*train\.parquet cannot be read as Parquet"),
        (_without_label, {}, r"train\.parquet has no such column: column='label' is refused"),
        (
            _other_schema,
            {"train": "*.parquet"},
            r"test\.parquet holds 'label' as int64, and .*more\.parquet as int32",
        ),
        (_no_images, {}, r"data\.image_column='image' is refused: it is double in .*train"),
        (_float_labels, {}, r"data\.label_column='label' is refused: it is double"),
        (_below_zero, {}, r"data\.label_column='label' is refused: it holds -1"),
        (_text_of_test, {}, r"data\.label_column='label' .*test\.parquet holds 'apple' in it, and"),
        (_empty, {}, r"data\.train=.* is refused: its files hold no rows"),
        (None, {"train": "nowhere.parquet"}, "there is no such file or folder"),
        (None, {"train": "nowhere/*.parquet"}, "no Parquet file"),
        (None, {"train": "none://train.parquet"}, "it cannot be read .*none"),
        (None, {"filters": (("label", ">", "many"),)}, r"data\.filters=.* cannot be compared so"),
        (
            None,
            {"filters": (("label", "in", ("a", 1)),)},
            r"data\.filters=.* cannot be compared so",
        ),
        (None, {"filters": (("label", ">", 10**30),)}, r"data\.filters=.* cannot be compared so"),
        (_beyond_int64, {}, r"data\.label_column='label' is refused: it holds 9223372036854775813"),
        (None, {"filters": (("label", ">", 7),)}, r"data\.filters=.* they keep no row of"),
        (None, {"image_column": "imag"}, "did you mean 'image'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(folder, damage, changed, message):
    """Truncated, of another schema, without the column, not there: named at the door."""
    if damage is not None:
        damage(folder)
    if "train" in changed and "://" not in changed["train"]:
        changed = {**changed, "train": str(folder / changed["train"])}

    with pytest.raises(ConfigError, match=message):
        read_facts(config_of(folder, **changed))


def test_an_unreadable_image_is_named_by_file_and_row(folder):
    """The second row group's third row holds half a JPEG: row 9 of the file."""
    content = [encoded(image, "JPEG") for image in IMAGES]
    content[9] = content[9][:100]
    write_images(folder / "train.parquet", content, LABELS)
    source = open_source(config_of(folder), "train", seed=0)

    with pytest.raises(ConfigError, match=r"train\.parquet, row 9, column 'image': no image that"):
        source.take(np.array([3, 9]))


def test_the_first_row_of_a_file_is_named_as_its_own(tmp_path):
    """It follows the last of the file before, whose rows end where its own begin."""
    content = [encoded(image, "JPEG") for image in IMAGES]
    write_images(tmp_path / "a.parquet", content[:20], LABELS[:20])
    write_images(tmp_path / "b.parquet", [content[20][:100], *content[21:]], LABELS[20:])
    config = config_of(tmp_path, train=str(tmp_path), test=str(tmp_path))
    source = open_source(config, "train", seed=0)

    with pytest.raises(ConfigError, match=r"b\.parquet, row 0, column 'image': no image that"):
        source.take(np.array([19, 20]))


@pytest.mark.parametrize("label", [7, None, 2**63 + 5])
def test_a_class_out_of_range_is_named_by_file_and_row(folder, label):
    """Where classes are given, a label beyond them, or none, is found when its row is read."""
    labels = pa.array([0, 1, 2, label], pa.uint64())
    write_images(folder / "train.parquet", IMAGES[:4], labels)
    source = open_source(config_of(folder, classes=5), "train", seed=0)

    with pytest.raises(ConfigError, match=rf"train\.parquet, row 3, column 'label': {label} is"):
        source.take(np.array([0, 3]))


def test_a_file_damaged_in_its_middle_is_named(folder):
    """The footer is whole, the rows are not."""
    path = folder / "train.parquet"
    content = bytearray(path.read_bytes())
    content[100:1100] = bytes(1000)
    source = open_source(config_of(folder), "train", seed=0)
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"train\.parquet"):
        source.take(np.arange(40))


RUN = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "parquet"
train = "{folder}/train.parquet"
test = "{folder}/test.parquet"
image_size = 8
[batch]
global_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1
[train]
epochs = 2
"""


def test_a_run_trains_on_parquet_and_goes_on_from_another_folder(folder, tmp_path, monkeypatch):
    """Its config is whole: paths are absolute in it, and a resumed run finds the same files."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder="."))
    monkeypatch.chdir(folder)

    record = train(load_config(path), tmp_path / "run", device_count=2)

    assert record.status == "completed"
    monkeypatch.chdir("/")
    config = load_config(tmp_path / "run" / "run.toml")
    assert isinstance(config.data, ParquetConfig)
    assert config.data.train == str(folder / "train.parquet")
    longer = train(
        with_fields(config, {"train.epochs": 3}),
        tmp_path / "run",
        device_count=2,
        resume=True,
    )
    assert longer.statuses[-1].step == 15


def test_a_run_on_files_that_changed_is_not_resumed(folder, tmp_path, capfd):
    """Exit 2 and the file's name, of a new one and of one with other rows; on files as they were,
    nothing is refused."""
    part = folder / "train"
    part.mkdir()
    write_images(part / "a.parquet", IMAGES, LABELS)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=folder).replace("/train.parquet", "/train"))
    train(load_config(path), tmp_path / "run", device_count=1)
    resume = ["train", str(path), "--folder", str(tmp_path / "run"), "--resume"]
    assert main(resume) == 0

    write_images(part / "b.parquet", IMAGES[:8], LABELS[:8])
    assert main(resume) == 2
    assert "b.parquet of data.train is new" in " ".join(capfd.readouterr().err.split())

    (part / "b.parquet").unlink()
    write_images(part / "a.parquet", 255 - IMAGES, LABELS)
    assert main(resume) == 2
    assert re.search(r"a\.parquet .* changed", " ".join(capfd.readouterr().err.split()))


def test_a_run_ends_where_an_image_cannot_be_read(folder, tmp_path):
    """The error comes out of the reading thread as it is: one line, and no traceback."""
    write_images(folder / "train.parquet", [*IMAGES[:15], b"no image"], LABELS[:16])
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=folder))

    with pytest.raises(ConfigError, match=r"train\.parquet, row 15, column 'image': no image that"):
        train(load_config(path), tmp_path / "run", device_count=1)
