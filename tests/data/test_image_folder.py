"""Images in a folder for each class: which there are, their order, and what is refused."""

import errno
import os
import pathlib

import numpy as np
import pytest
from parquet_cases import encoded, random_images

from scalejax.config.data import ImageFolderConfig
from scalejax.config.run import load_config, with_fields
from scalejax.core.errors import ConfigError, Unavailable
from scalejax.core.remote import STORE_SECONDS
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts
from scalejax.data.formats.image_folder import image_files
from scalejax.data.loader.skip_unreadable import ReadableExamples
from scalejax.data.source import UnreadableExample
from scalejax.training.data_fingerprints import used_files
from scalejax.training.train import train

IMAGES = random_images(8)
TREE = {
    "train/cat/1.png": 0,
    "train/cat/10.PNG": 1,
    "train/cat/2.png": 2,
    "train/cat/more-of/z.png": 4,
    "train/cat/more/a.png": 3,
    "train/dog/a.png": 5,
    "train/Zebra/sub/deep/b.png": 6,
    "test/dog/x.png": 7,
    "test/cat/y.png": 0,
}
"""Files, and which of the images is in each."""
BESIDE = ("train/notes.txt", "train/cat/._1.png", "train/.cache/a.png", "train/cat/list.csv")
"""Files that are no examples."""
ORDER = (
    "Zebra/sub/deep/b.png",
    "cat/1.png",
    "cat/10.PNG",
    "cat/2.png",
    "cat/more/a.png",
    "cat/more-of/z.png",
    "dog/a.png",
)
"""The training part as torchvision's ImageFolder has it: classes by name, capitals first; in one
the folders, and in a folder the files, by name."""


@pytest.fixture
def root(tmp_path):
    """The tree, in a folder."""
    for path, number in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(encoded(IMAGES[number]))
    for path in BESIDE:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"no image")
    return tmp_path


def config_of(root, **changed):
    """The folders train and test of `root`, images of 8 x 8."""
    folders = {"train": f"{root}/train", "test": f"{root}/test"}
    return ImageFolderConfig(**{**folders, "image_size": 8, **changed})


def require_tree(config):
    """The images of TREE in ORDER, and their classes."""
    about, source = read_facts(config), open_source(config, "train", seed=0)
    indices = np.array([6, 0, 3, 3, 1, 2, 4, 5])

    rows = source.take(indices, 0)

    numbers = [TREE[f"train/{ORDER[index]}"] for index in indices]
    assert (about.train_examples, about.test_examples, about.classes) == (7, 2, 3)
    np.testing.assert_array_equal(rows["inputs"], IMAGES[numbers])
    np.testing.assert_array_equal(rows["targets"], [2, 0, 1, 1, 1, 1, 1, 1])
    of_test = open_source(config, "test", seed=0).take(np.arange(2))
    np.testing.assert_array_equal(of_test["targets"], [1, 2])
    np.testing.assert_array_equal(of_test["inputs"], IMAGES[[0, 7]])


def test_a_folder_is_a_class(root):
    """Classes of the training part, sorted; a test part without one of them counts the same."""
    require_tree(config_of(root))
    assert image_files(config_of(root), "train").classes == ("Zebra", "cat", "dog")


def test_a_url_gives_the_same_examples(root):
    """Of a store in memory."""
    fsspec = pytest.importorskip("fsspec")
    for path in (*TREE, *BESIDE):
        fsspec.filesystem("memory").pipe(f"/tree/{path}", (root / path).read_bytes())

    require_tree(config_of("memory://tree"))
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        read_facts(config_of("memory://elsewhere"))


def test_what_changes_in_a_folder_is_seen(root):
    """A new image counts though the folder was listed before."""
    config = config_of(root)
    assert read_facts(config).train_examples == 7

    (root / "train/Zebra/sub/deep/c.jpg").write_bytes(encoded(IMAGES[0], "JPEG"))

    assert read_facts(config).train_examples == 8


def test_links_are_followed(root):
    """A class may lie elsewhere."""
    os.symlink(root / "test" / "dog", root / "train" / "wolf")

    assert image_files(config_of(root), "train").classes == ("Zebra", "cat", "dog", "wolf")


@pytest.mark.parametrize(
    ("made", "changed", "message"),
    [
        ("test/bird/a.png", {}, r"data\.test=.* holds the class 'bird', and data\.train=.* does"),
        ("train/empty/notes.txt", {}, r"data\.train=.* its folder 'empty' is a class without an"),
        (None, {"train": "{root}/none"}, r"data\.train=.* there is no such folder"),
        (None, {"train": "{root}/train/dog"}, r"data\.train=.* it holds no folders; each class"),
        (None, {"image_size": 0}, r"data\.image_size=0 is refused"),
    ],
)
def test_what_cannot_work_is_refused(root, made, changed, message):
    """Classes that are not known or empty, and folders that are none."""
    if made:
        (root / made).parent.mkdir()
        (root / made).write_bytes(encoded(IMAGES[0]))
    if "train" in changed:
        changed = {"train": changed["train"].format(root=root)}

    with pytest.raises(ConfigError, match=message):
        read_facts(config_of(root, **changed))


def test_a_loop_of_links_is_refused(root):
    """Rather than followed for ever, its images counted forty times."""
    os.symlink(root / "train", root / "train" / "cat" / "loop")

    with pytest.raises(ConfigError, match=r"data\.train=.* cannot be read .*symbolic links"):
        read_facts(config_of(root))


@pytest.mark.parametrize("content", [None, b"", encoded(IMAGES[0], "JPEG")[:80]])
def test_an_unreadable_image_is_named(root, content):
    """Gone since it was listed, empty, or half of it."""
    source = open_source(config_of(root), "train", seed=0)
    (root / "train/dog/a.png").unlink()
    if content is not None:
        (root / "train/dog/a.png").write_bytes(content)

    with pytest.raises(UnreadableExample, match=r"train/dog/a\.png: no image that can be read"):
        source.take(np.arange(7), 0)


@pytest.mark.parametrize("is_url", [False, True])
def test_a_failure_of_the_system_is_no_unreadable_image(root, monkeypatch, is_url):
    """Too many open files, or a store that does not answer: the run ends, and leaves no image out
    for ever that could be read a moment later."""
    if is_url:
        fsspec = pytest.importorskip("fsspec")
        store = type(fsspec.filesystem("file"))
        changed, failing = (store, "cat_file"), OSError(errno.EIO, "Input/output error")
        location = f"file://{root}"
    else:
        changed, failing = (pathlib.Path, "read_bytes"), OSError(errno.EMFILE, "Too many open")
        location = root
    source = open_source(config_of(location), "train", seed=0)
    blank = {"inputs": np.zeros((8, 8, 3), np.uint8), "targets": np.zeros((), np.int32)}
    reader, usual = ReadableExamples(source, blank), getattr(*changed)

    def fail(self, *arguments, **options):
        raise failing

    monkeypatch.setattr(*changed, fail)
    monkeypatch.setenv(STORE_SECONDS, "0.1")
    words = r"train/.*(cannot be read|is not available) \(.*(Too many|Input/)"
    with pytest.raises(Unavailable if is_url else ConfigError, match=words) as caught:
        reader.take(np.arange(7), 0)
    monkeypatch.setattr(*changed, usual)
    monkeypatch.setenv(STORE_SECONDS, "0.5")  # in which a read that works surely ends

    assert not isinstance(caught.value, UnreadableExample)
    assert reader.take(np.arange(7), 0)["readable"].all()
    (root / "train/dog/a.png").unlink()
    assert reader.take(np.arange(7), 0)["readable"].tolist() == [True] * 6 + [False]


def test_names_of_any_bytes_are_opened(root):
    """A name that is no UTF-8, and one with a star in it."""
    for name in (b"\xff\xfe.png", "ä*[1].png".encode()):
        path = os.path.join(os.fsencode(root), b"train/dog", name)
        with open(path, "wb") as file:
            file.write(encoded(IMAGES[1]))

    rows = open_source(config_of(root), "train", seed=0).take(np.arange(9))

    assert (rows["inputs"] == IMAGES[1]).all(axis=(1, 2, 3)).sum() == 3


RUN = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "image_folder"
train = "train"
test = "test"
image_size = 8
[batch]
global_batch = 4
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1
"""


def test_a_run_trains_and_is_not_resumed_on_other_files(root, tmp_path, monkeypatch):
    """Paths in its folder are absolute; an image more is another data set."""
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(root)

    record = train(load_config(tmp_path / "run.toml"), tmp_path / "run", device_count=2)

    assert record.status == "completed"
    monkeypatch.chdir("/")
    longer = with_fields(load_config(tmp_path / "run" / "run.toml"), {"train.epochs": 2})
    assert isinstance(longer.data, ImageFolderConfig)
    assert longer.data.train == f"{root}/train"
    (root / "train/dog/b.png").write_bytes(encoded(IMAGES[1]))
    with pytest.raises(ConfigError, match=r"train/dog of data\.train has changed since it began"):
        train(longer, tmp_path / "run", device_count=2, resume=True)


def test_an_image_written_anew_is_another_data_set(root):
    """In its place, of as many bytes: only the time tells; of a URL, what its store says."""
    fsspec = pytest.importorskip("fsspec")
    path = root / "train/dog/a.png"
    at_url = config_of(f"file://{root}")
    before, before_at_url = used_files(config_of(root)), used_files(at_url)
    again = used_files(config_of(root))
    content, written = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(content[:-1] + b"x")
    os.utime(path, ns=(written, written + 10**9))
    after, after_at_url = used_files(config_of(root)), used_files(at_url)

    assert before == again
    assert before is not None
    assert after is not None
    changed = [one != other for one, other in zip(before.train, after.train, strict=True)]
    assert changed == [False, False, True]  # of Zebra, cat, dog
    assert before.test == after.test
    assert before_at_url is not None
    assert after_at_url is not None
    assert before_at_url.train[:2] == after_at_url.train[:2]
    assert before_at_url.train[2] != after_at_url.train[2]

    store = fsspec.filesystem("memory")
    for name in TREE:
        store.pipe(f"/unversioned/{name}", (root / name).read_bytes())
        new_name = name.replace("dog/a", "dog/b")
        store.pipe(f"/renamed/{new_name}", (root / name).read_bytes())
    silent = used_files(config_of("memory://unversioned"))
    assert silent is not None
    assert [each.file.version for each in silent.train] == [None, None, None]
    renamed = used_files(config_of("memory://renamed"))
    assert renamed is not None
    pairs = zip(silent.train, renamed.train, strict=True)
    assert [one.listing != other.listing for one, other in pairs] == [False, False, True]
    store.rm("/renamed/train/dog/b.png")
    with pytest.raises(ConfigError, match=r"data\.train=.*dog/b\.png is gone"):
        used_files(config_of("memory://renamed"))


@pytest.mark.slow
def test_a_hundred_thousand_files_take_no_more_memory_than_their_names(tmp_path):
    """And are counted, not read: they hold no images."""
    for number in range(100):
        folder = tmp_path / "train" / f"class{number:03}"
        folder.mkdir(parents=True)
        for image in range(1000):
            (folder / f"{image:06}.jpg").touch()
    config = config_of(tmp_path, test=f"{tmp_path}/train")

    files = image_files(config, "train")

    assert len(files) == 100_000
    assert len(files.names) + files.ends.nbytes < 100_000 * 32
    assert read_facts(config).test_examples == 100_000
