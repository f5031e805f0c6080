"""`scalejax data convert`: rows are those of the source, whatever it is, however interrupted."""

import fcntl
import gzip
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_cases import encoded, random_images, write_images
from PIL import Image

from scalejax.cli.main import main
from scalejax.config.data import ParquetConfig
from scalejax.core.errors import ConfigError
from scalejax.data.convert import ConvertOptions, RowsOptions, convert
from scalejax.data.datasets import open_source


@pytest.fixture
def folder(tmp_path):
    """Ten PNG of each of three classes, one of them a folder deeper, and what is no image."""
    images = random_images(30, 12)
    for index, image in enumerate(images):
        name = ("ant", "bee", "cat")[index % 3]
        path = tmp_path / "images" / name / ("deep" if index == 4 else "") / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(image))
    (tmp_path / "images" / "ant" / "notes.txt").write_text("no image")
    return tmp_path / "images", images


def table_of(path: Path) -> pa.Table:
    """All rows, in the order of the names of their files."""
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    return pa.concat_tables([pq.read_table(file) for file in files])


def pixels_of(table: pa.Table) -> list[np.ndarray]:
    """The images of a table, decoded."""
    contents = [each["bytes"] for each in table["image"].to_pylist()]
    return [np.asarray(Image.open(io.BytesIO(content))) for content in contents]


def test_a_folder_of_images_becomes_what_training_reads(folder, tmp_path):
    """Files of equally many rows; bytes as they were; classes by the names of their folders."""
    source, images = folder

    done = convert(str(source), tmp_path / "out", wanted=ConvertOptions(files=4, row_group_rows=3))

    table = table_of(tmp_path / "out")
    assert (done.rows, done.files, done.skipped_rows) == (30, 4, 0)
    assert table["label"].to_pylist() == [0] * 10 + [1] * 10 + [2] * 10
    order = [int(Path(each["path"]).stem) for each in table["image"].to_pylist()]
    assert order == sorted(range(30), key=lambda i: (i % 3, i == 4, i))
    for index, image in zip(order, pixels_of(table), strict=True):
        np.testing.assert_array_equal(image, images[index])
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert [pq.read_metadata(file).num_rows for file in files] == [7, 8, 7, 8]
    config = ParquetConfig(train=str(tmp_path / "out"), test=str(tmp_path / "out"), image_size=12)
    taken = open_source(config, "train", seed=0).take(np.array([29, 0]))
    np.testing.assert_array_equal(taken["inputs"], images[[order[29], order[0]]])
    features = json.loads(pq.read_schema(files[0]).metadata[b"huggingface"])["info"]["features"]
    assert features["label"]["names"] == ["ant", "bee", "cat"]


def test_a_seed_mixes_a_folder_of_images(folder, tmp_path):
    """Every image is there once, classes no longer in blocks; the same seed, the same order."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(str(folder[0]), tmp_path / name, options=RowsOptions(shuffle_seed=seed))

    tables = [table_of(tmp_path / name) for name in "abc"]
    paths = [[each["path"] for each in table["image"].to_pylist()] for table in tables]
    assert paths[0] == paths[1] != paths[2]
    assert sorted(paths[0]) == sorted(paths[2])
    assert len(set(tables[0]["label"].to_pylist()[:10])) == 3
    for path, label in zip(paths[0], tables[0]["label"].to_pylist(), strict=True):
        assert ("ant", "bee", "cat")[label] == Path(path).parts[0]


def test_files_sorted_by_class_are_warned_of(folder, tmp_path, capsys):
    """With the flag that mixes them, after which there is nothing to warn of."""
    command = ["data", "convert", str(folder[0]), "--row-group-rows", "5"]
    assert main([*command, str(tmp_path / "a")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "6 of 6 row groups hold a single class of 3" in told
    assert "--shuffle-seed N" in told
    assert main([*command, str(tmp_path / "b"), "--shuffle-seed", "0"]) == 0
    assert "one after the other" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["npz", "npy", "idx", "idx.gz"])
def test_arrays_become_images_and_classes(kind, tmp_path):
    """Grey and in colours, pixel for pixel, from any place of the array on."""
    is_idx = kind.startswith("idx")
    images = random_images(50, 6, channels=1 if is_idx else 3)
    labels = np.arange(50) % 7
    source, options = tmp_path / f"a.{kind}", RowsOptions()
    if kind == "npz":
        np.savez_compressed(source, x=images, y=labels, other=images)
        options = RowsOptions(images="x", labels="y")
    elif kind == "npy":
        np.save(source, images)
        np.save(tmp_path / "labels.npy", labels)
        options = RowsOptions(labels=str(tmp_path / "labels.npy"))
    else:
        source = tmp_path / f"train-images-idx3-ubyte{'.gz' if kind.endswith('gz') else ''}"
        beside = source.with_name(source.name.replace("images-idx3", "labels-idx1"))
        for path, values in ((source, images), (beside, labels.astype(np.uint8))):
            header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
            content = header + values.tobytes()
            path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)

    convert(str(source), tmp_path / "out", options=options, wanted=ConvertOptions(files=3))

    table = table_of(tmp_path / "out")
    np.testing.assert_array_equal(np.stack(pixels_of(table)), images)
    assert table["label"].to_pylist() == labels.tolist()


@pytest.mark.parametrize("shape", [(5, 0, 6), (5, 0)])
def test_rows_that_hold_nothing_are_refused(shape, tmp_path):
    """A damaged header says so; how many fit a chunk was a division by zero."""
    np.savez(tmp_path / "a.npz", x=np.zeros(shape, np.uint8), y=np.zeros(5, np.int64))

    with pytest.raises(ConfigError, match=r"must not be empty, but this array is of \[5, 0"):
        convert(str(tmp_path / "a.npz"), tmp_path / "out")


def test_numbers_of_an_array_and_of_a_csv_become_columns(tmp_path):
    """A column of whole numbers that meets a fraction in its last row is of fractions."""
    values = np.arange(40.0, dtype=np.float32).reshape(20, 2)
    np.savez(tmp_path / "a.npz", rows=values, classes=np.arange(20) % 2)
    lines = ["size,kind", *(f"{size},k{size % 3}" for size in range(400_000)), "0.5,k1"]
    (tmp_path / "b.csv").write_text("\n".join(lines))

    convert(str(tmp_path / "a.npz"), tmp_path / "a.parquet")
    convert(str(tmp_path / "b.csv"), tmp_path / "b", wanted=ConvertOptions(files=3))

    numbers, table = pq.read_table(tmp_path / "a.parquet"), table_of(tmp_path / "b")
    np.testing.assert_array_equal(numbers["feature_1"], values[:, 1])
    assert numbers["label"].to_pylist() == [0, 1] * 10
    assert table["size"].to_pylist() == [*map(float, range(400_000)), 0.5]
    assert table["kind"].to_pylist()[-2:] == ["k0", "k1"]
    with pytest.raises(ConfigError, match="has no images"):
        convert(str(tmp_path / "b.csv"), tmp_path / "c", wanted=ConvertOptions(image_size=8))


def test_parquet_is_cut_anew_row_for_row(tmp_path):
    """Other files, other row groups, other compression; columns and metadata as they were."""
    generator = np.random.default_rng(0)
    columns = {
        "x": generator.normal(size=1000),
        "text": pa.array([f"t{i % 9}" for i in range(1000)]).dictionary_encode(),
        "list": pa.array([[i] * (i % 3) for i in range(1000)]),
    }
    table = pa.table(columns).replace_schema_metadata({"about": "it"})
    (tmp_path / "in").mkdir()
    pq.write_table(table.slice(0, 300), tmp_path / "in" / "a.parquet", row_group_size=70)
    pq.write_table(table.slice(300), tmp_path / "in" / "b.parquet", row_group_size=700)

    wanted = ConvertOptions(files=7, row_group_rows=50, compression="zstd")
    convert(str(tmp_path / "in"), tmp_path / "out", wanted=wanted)

    assert table_of(tmp_path / "out").equals(table)
    about = pq.ParquetFile(tmp_path / "out" / "part-00002-of-00007.parquet")
    assert about.schema_arrow.metadata[b"about"] == b"it"
    assert about.metadata.row_group(0).column(0).compression == "ZSTD"
    groups = [about.metadata.row_group(i).num_rows for i in range(about.num_row_groups)]
    assert groups == [50, 50, 43]


def test_images_are_made_small_once_as_training_would(tmp_path):
    """By Pillow's bilinear filter, the proportion kept; small ones stay byte for byte; a photograph
    that lies on its side is turned."""
    wide, small = random_images(1, 40)[0][:20], random_images(1, 10)[0]
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[274] = 6  # to be turned by 90 degrees
    Image.fromarray(wide).save(turned, "PNG", exif=exif)
    images = [encoded(wide), encoded(small), turned.getvalue()]
    write_images(tmp_path / "a.parquet", images, [0, 1, 2])

    convert(
        str(tmp_path / "a.parquet"), tmp_path / "b.parquet", wanted=ConvertOptions(image_size=10)
    )

    table = pq.read_table(tmp_path / "b.parquet")
    resized, kept, upright = pixels_of(table)
    by_hand = Image.fromarray(wide).resize((20, 10), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(resized, np.asarray(by_hand))
    assert table["image"][1]["bytes"].as_py() == images[1]
    np.testing.assert_array_equal(kept, small)
    assert upright.shape == (20, 10, 3)
    by_hand = Image.fromarray(np.rot90(wide, -1)).resize((10, 20), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(upright, np.asarray(by_hand))


def test_an_unreadable_image_is_named_or_left_out_and_counted(tmp_path, capsys):
    """Nothing is lost silently: the count outlives a kill, for it is in the files."""
    images = [encoded(image) for image in random_images(20)]
    images[13] = b"no image"
    write_images(tmp_path / "a.parquet", images, list(range(20)))

    command = ["data", "convert", str(tmp_path / "a.parquet"), str(tmp_path / "out")]
    assert main([*command, "--files", "2"]) == 2
    where = f"{tmp_path / 'a.parquet'}, row 13: no image that can be read (Pillow does not know"
    assert where in " ".join(capsys.readouterr().err.split())
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 1  # the first, which is whole
    command += ["--files", "2", "--unreadable", "skip"]  # as the refusal says
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "1 of them written before" in told
    assert "1 unreadable row was left out" in told
    assert f"  {where} its format)" in told
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "1 unreadable row was left out" in told  # as the files say
    assert where not in told

    table = table_of(tmp_path / "out")
    assert table["label"].to_pylist() == [row for row in range(20) if row != 13]


def test_nothing_is_overwritten_unasked(folder, tmp_path):
    """Neither another conversion nor what a user has put there; asked for, only the former."""
    source, out = str(folder[0]), tmp_path / "out"
    convert(source, out, wanted=ConvertOptions(files=2))
    with pytest.raises(ConfigError, match=r"files=2, and now it is 3.*--overwrite"):
        convert(source, out, wanted=ConvertOptions(files=3))
    convert(source, out, wanted=ConvertOptions(files=2, unreadable="skip"))
    with pytest.raises(ConfigError, match=r"unreadable='skip', and now it is 'refuse'"):
        convert(source, out, wanted=ConvertOptions(files=2))
    convert(source, out, wanted=ConvertOptions(files=3, overwrite=True))
    assert len(list(out.glob("*.parquet"))) == 3
    (folder[0] / "bee" / "new.png").write_bytes(encoded(random_images(1)[0]))
    with pytest.raises(ConfigError, match="have changed since"):
        convert(source, out, wanted=ConvertOptions(files=3))

    convert(source, tmp_path / "one.parquet")
    with pytest.raises(ConfigError, match="it already exists; --overwrite"):
        convert(source, tmp_path / "one.parquet")
    (tmp_path / "mine").mkdir()
    write_images(tmp_path / "mine" / "a.parquet", random_images(2), [0, 1])
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"it holds a\.parquet"):
            convert(source, tmp_path / "mine", wanted=ConvertOptions(overwrite=overwrite))


def test_a_file_that_another_process_finishes_meanwhile_is_not_cut_short(tmp_path, monkeypatch):
    """It opens the draft just before the other one renames and leaves it: it writes one anew."""
    columns = pa.table({"x": np.arange(2000)})
    pq.write_table(columns, tmp_path / "a.parquet")
    out = tmp_path / "out.parquet"
    draft = out.with_name(".out.parquet.draft")
    convert(str(tmp_path / "a.parquet"), draft.with_name("whole.parquet"))
    whole = draft.with_name("whole.parquet").read_bytes()
    draft.write_bytes(whole)
    lock, finished = fcntl.flock, []

    def finish_and_lock(file, how):
        if not finished:  # as the other process does, before it leaves the lock
            finished.append(draft.replace(tmp_path / "finished.parquet"))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", finish_and_lock)
    convert(str(tmp_path / "a.parquet"), out)

    assert finished[0].read_bytes() == whole
    assert out.read_bytes() == whole
    assert not draft.exists()


def test_a_full_disk_is_named_and_what_is_written_stays(tmp_path):
    """With room again the same call writes the rest."""
    generator = np.random.default_rng(0)
    pq.write_table(pa.table({"x": generator.normal(size=20_000)}), tmp_path / "a.parquet")
    wanted = ConvertOptions(files=2, row_group_rows=1000)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"part-00000-of-00002\.parquet cannot be written"):
            convert(str(tmp_path / "a.parquet"), tmp_path / "out", wanted=wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "out").glob("*.parquet"))

    convert(str(tmp_path / "a.parquet"), tmp_path / "out", wanted=wanted)

    assert table_of(tmp_path / "out").equals(pq.read_table(tmp_path / "a.parquet"))


@pytest.fixture
def photographs(tmp_path):
    """Three hundred images, of which 40 files are to be made, and the command."""
    images = random_images(300, 96)
    write_images(tmp_path / "in.parquet", images, list(range(300)), kind="JPEG")
    command = [sys.executable, "-m", "scalejax", "data", "convert", str(tmp_path / "in.parquet")]
    return command, ["--files", "40", "--image-size", "64", "--workers", "1"]


@pytest.mark.slow  # kills several processes
def test_killed_at_any_time_it_goes_on_and_ends_byte_for_byte_the_same(
    photographs, tmp_path, capsys
):
    """Three kills, spread at random over the conversion; then one call that is left alone.

    Each begins a new interpreter, and that a worker.
    """
    command, flags = photographs
    assert main([*command[3:], str(tmp_path / "whole"), *flags]) == 0
    whole = sorted((tmp_path / "whole").glob("*.parquet"))
    drawn, counts = random.Random(0), []
    for _ in range(3):
        process = subprocess.Popen([*command, str(tmp_path / "killed"), *flags])
        seen = len(list((tmp_path / "killed").glob("*.parquet")))
        while process.poll() is None and seen == len(list((tmp_path / "killed").glob("*.parquet"))):
            time.sleep(0.001)
        time.sleep(drawn.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        counts.append(len(list((tmp_path / "killed").glob("*.parquet"))))

    capsys.readouterr()
    assert main([*command[3:], str(tmp_path / "killed"), *flags]) == 0

    assert 0 < counts[0] < 40  # or nothing was killed
    assert counts == sorted(counts)
    found = sorted((tmp_path / "killed").glob("*.parquet"))
    assert [each.name for each in found] == [each.name for each in whole]
    for one, other in zip(found, whole, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert table_of(tmp_path / "killed")["label"].to_pylist() == list(range(300))
    assert f"{counts[-1]} of them written before" in capsys.readouterr().out
    assert not list((tmp_path / "killed").glob(".*.draft"))


@pytest.mark.slow  # starts processes
def test_ctrl_c_says_how_to_go_on(photographs, tmp_path):
    """And the same command does."""
    command, (_, _, *flags) = photographs
    flags = ["--files", "300", *flags]  # so many that the signal comes before the last, on any day
    process = subprocess.Popen([*command, str(tmp_path / "out"), *flags], stderr=subprocess.PIPE)
    while not list((tmp_path / "out").glob("*.parquet")):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()

    assert process.returncode == 130
    assert "the same command, without --overwrite," in told.decode()
    assert "Traceback" not in told.decode()
    assert main([*command[3:], str(tmp_path / "out"), *flags]) == 0
    assert len(table_of(tmp_path / "out")) == 300


@pytest.mark.slow  # converts large files
def test_memory_does_not_grow_with_the_row_group(tmp_path):
    """A row group of 200 MB is cut into small ones in a quarter of that."""
    content = [os.urandom(10_000) for _ in range(20_000)]
    table = pa.table({"blob": pa.array(content, pa.binary()), "label": list(range(20_000))})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=20_000, use_dictionary=False)
    script = (
        "import sys, pyarrow as pa\n"
        "from scalejax.data.convert.parquet import ParquetRows\n"
        "rows = ParquetRows(sys.argv[1])\n"
        "print(sum(len(each) for each in rows.read(0, len(rows))))\n"
        "print(pa.default_memory_pool().max_memory())"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "in.parquet")],
        check=True,
        capture_output=True,
    )

    rows, peak_bytes = map(int, done.stdout.split())
    assert rows == 20_000
    assert peak_bytes < 50 * 10**6
