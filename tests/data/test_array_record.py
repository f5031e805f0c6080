"""ArrayRecord files as data: records by index, read without TensorFlow; what is refused."""

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from parquet_cases import encoded, random_images

from scalejax.config.data import ArrayRecordConfig
from scalejax.core.errors import ConfigError
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts
from scalejax.data.source import UnreadableExample
from scalejax.training.data_fingerprints import used_files

IMAGES = random_images(30)
CLASSES = np.arange(30) % 4


def varint(value):
    """An unsigned integer by seven bits a byte, the lowest first, as protocol buffers have it."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number, content):
    """A field of bytes: its number and wire type 2, its length, itself."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**features):
    """A `tf.train.Example` written byte by byte: bytes as a bytes_list, integers as an
    int64_list, floats as a float_list."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = field(1, field(1, value))
        elif isinstance(value, float):
            feature = field(2, field(1, np.float32(value).tobytes()))
        else:
            feature = field(3, field(1, varint(value % 2**64)))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def write(path, records):
    """A record a chunk, as Grain wants it."""
    path.parent.mkdir(exist_ok=True)
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in records:
        writer.write(record)
    writer.close()


RECORDS = [
    example(image=encoded(image), label=int(label), file_name=b"x", size=1.5)
    for image, label in zip(IMAGES, CLASSES, strict=True)
]
NAMES = ("images-train.array_record-00000-of-00003", "b.arrayrecord", "images-z.array_record")


@pytest.fixture
def folder(tmp_path):
    """30 records to train on in three files, 5 of them to test on."""
    write(tmp_path / "train" / NAMES[1], RECORDS[:4])
    write(tmp_path / "train" / NAMES[0], RECORDS[4:25])
    write(tmp_path / "train" / NAMES[2], RECORDS[25:])
    (tmp_path / "train" / "features.json").write_text("{}")
    write(tmp_path / "test.array_record", RECORDS[:5])
    return tmp_path


def config_of(folder, **changed):
    """Images of 8 x 8 in four classes."""
    parts = {"train": f"{folder}/train", "test": f"{folder}/test.array_record"}
    return ArrayRecordConfig(**{**parts, "classes": 4, "image_size": 8, **changed})


INDICES = np.array([29, 0, 4, 4, 3, 24, 25])


def test_records_are_found_by_index(folder):
    """In the order of the names of the files, whatever else a record holds."""
    about, source = read_facts(config_of(folder)), open_source(config_of(folder), "train", seed=0)

    rows = source.take(INDICES, 0)

    assert (about.train_examples, about.test_examples, about.classes) == (30, 5, 4)
    np.testing.assert_array_equal(rows["inputs"], IMAGES[INDICES])
    np.testing.assert_array_equal(rows["targets"], CLASSES[INDICES])
    assert (rows["inputs"].dtype, rows["targets"].dtype) == (np.uint8, np.int32)
    used = used_files(config_of(folder))
    assert used is not None
    assert [each.rows for each in used.train] == [4, 21, 5]


def test_files_at_a_url_are_copied_once_and_anew_when_they_change(folder, monkeypatch):
    """To the folder for it; without which, or a store that says when they change, never."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    info = type(store).info
    for path in ("test.array_record", *(f"train/{name}" for name in NAMES)):
        store.pipe(f"/records/{path}", (folder / path).read_bytes())
    where = "memory://records"

    config = config_of(where, cache_folder=str(folder / "copies"))
    with pytest.raises(ConfigError, match=r"data\.cache_folder=.* is refused: the store of memory"):
        read_facts(config)
    tag = "a"
    monkeypatch.setattr(type(store), "info", lambda *a, **k: info(*a, **k) | {"ETag": tag})
    rows = open_source(config, "train", seed=0).take(INDICES)

    np.testing.assert_array_equal(rows["inputs"], IMAGES[INDICES])
    assert read_facts(config).test_examples == 5
    assert len(list((folder / "copies").iterdir())) == 4
    write(folder / "test.array_record", RECORDS[5:10])
    store.pipe("/records/test.array_record", (folder / "test.array_record").read_bytes())
    tag = "b"
    rows = open_source(config, "test", seed=0).take(np.arange(5))
    np.testing.assert_array_equal(rows["inputs"], IMAGES[5:10])
    with pytest.raises(ConfigError, match=r"data\.cache_folder=None .*data\.train is a URL"):
        read_facts(config_of(where))


def _no_label(folder):
    write(folder / "test.array_record", [example(image=b"", labels=1)])


def _text_label(folder):
    write(folder / "test.array_record", [example(image=b"", label=b"cat")])


def _no_example(folder):
    write(folder / "test.array_record", [b"\xff\xff\xff"])


def _half(folder):
    path = folder / "train" / NAMES[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _other(folder):
    (folder / "train" / NAMES[0]).write_bytes(b"something else" * 100)


def _empty(folder):
    write(folder / "test.array_record", [])


@pytest.mark.parametrize(
    ("damage", "changed", "message"),
    [
        (_no_label, {}, r"test\.array_record, record 0: it has no such feature: .*'labels'"),
        (_text_label, {}, r"record 0: feature 'label' has 0 values in its int64_list"),
        (_no_example, {}, r"record 0: it is not a tf\.train\.Example"),
        (_half, {}, rf"data\.train: .*{NAMES[0]} cannot be read as ArrayRecord"),
        (_other, {}, rf"data\.train: .*{NAMES[0]} cannot be read as ArrayRecord"),
        (_empty, {}, r"data\.test=.* its files hold no records"),
        (None, {"image_column": "imag"}, "did you mean 'image'"),
        (None, {"train": "nowhere"}, r"data\.train='nowhere' is refused: there is no such"),
    ],
)
def test_what_cannot_work_is_refused(folder, damage, changed, message):
    """At the door, by the first record of a part."""
    if damage:
        damage(folder)

    with pytest.raises(ConfigError, match=message):
        read_facts(config_of(folder, **changed))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (example(image=encoded(IMAGES[0])[:60], label=1), "feature 'image': no image that can"),
        (example(image=encoded(IMAGES[0]), label=4), "feature 'label': 4 is none of the 4 cl"),
        (example(image=encoded(IMAGES[0]), label=-1), "feature 'label': -1 is none of the 4"),
        (example(label=1), "it has no such feature"),
        (b"\xff\xff", r"it is not a tf\.train\.Example"),
    ],
    ids=["image", "class", "below zero", "no image", "no example"],
)
def test_what_is_no_example_is_named_by_file_and_record(folder, record, message):
    """The third of the second file."""
    write(folder / "train" / NAMES[0], [*RECORDS[4:6], record, *RECORDS[7:25]])
    source = open_source(config_of(folder), "train", seed=0)

    source.take(np.array([5, 7]))
    with pytest.raises(UnreadableExample, match=rf"{NAMES[0]}, record 2[:,] .*{message}"):
        source.take(np.arange(30))


def test_a_damaged_record_is_named_and_others_are_read(folder):
    """A thousand bytes of the fourth are gone; the file's list of records is whole."""
    path = folder / "train" / NAMES[0]
    noise = np.random.default_rng(0).bytes(5000)
    spoilt = [example(image=encoded(IMAGES[0]), label=0, noise=noise), *RECORDS[:3]]
    write(path, [*RECORDS[4:7], *spoilt])
    content = bytearray(path.read_bytes())
    place = content.find(noise[1000:1100])
    content[place : place + 1000] = bytes(1000)
    path.write_bytes(content)
    source = open_source(config_of(folder), "train", seed=0)

    np.testing.assert_array_equal(source.take(np.array([6, 8]))["inputs"], IMAGES[[6, 0]])
    with pytest.raises(UnreadableExample, match=rf"{NAMES[0]}, record 3 cannot be read"):
        source.take(np.array([6, 7, 8]))
