"""The cache on disk: never a wrong table, whoever is killed, and never more than its limit."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cache_writer import table_of
from parquet_cases import encoded, random_images, write_images

from scalejax.config.data import ParquetConfig, ReadingConfig
from scalejax.core.errors import ConfigError
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts
from scalejax.data.formats.parquet import _footer
from scalejax.data.readers.parquet import ParquetExamples
from scalejax.data.readers.row_group_cache import DiskCache, _memories
from scalejax.measure.input.work import sample_work

SMALL = pa.table({"values": np.arange(1000)})
"""8 kB, and 9 in a file."""


def never() -> pa.Table:
    """What must not be loaded again."""
    raise AssertionError("it is in the cache")


def held_bytes(folder):
    """Bytes of the finished files of a cache that another process may be removing from."""
    total = 0
    for path in folder.glob("*.arrow"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def files_in(folder):
    """The finished files, and the drafts, of a cache."""
    drafts = [path for path in folder.iterdir() if path.name.endswith(".draft")]
    return sorted(folder.glob("*.arrow")), drafts


def test_a_table_is_loaded_once_for_all_processes(tmp_path):
    """A second cache of the same folder, as another process has it, reads what the first wrote."""
    first = DiskCache(tmp_path / "cache", 10**6).of("a", lambda: SMALL)

    second = DiskCache(tmp_path / "cache", 10**6).of("a", never)

    assert first.equals(SMALL)
    assert second.equals(SMALL)


def test_the_least_recently_used_leave_first(tmp_path):
    """Of three tables in room for two the one goes that was not asked for again."""
    cache, loaded = DiskCache(tmp_path, 20_000), []

    def ask(key):
        cache.of(key, lambda: loaded.append(key) or SMALL)
        time.sleep(0.02)  # file times have a grain of a clock tick

    for key in ("a", "b", "a", "c", "a", "b"):
        ask(key)

    assert loaded == ["a", "b", "c", "b"]
    assert sum(path.stat().st_size for path in files_in(tmp_path)[0]) <= 20_000


def test_a_table_beyond_the_limit_is_handed_out_and_not_kept(tmp_path, monkeypatch):
    """The files of others stay."""
    cache = DiskCache(tmp_path, 20_000)
    cache.of("small", lambda: SMALL)

    # nor even begun to write, which would end here
    monkeypatch.setattr(pa.ipc, "new_file", never)
    large = cache.of("large", lambda: table_of(0))

    assert large.equals(table_of(0))
    assert len(files_in(tmp_path)[0]) == 1
    cache.of("small", never)


def test_a_file_of_another_user_is_read(tmp_path, monkeypatch):
    """Whose time of use the system lets only its owner set."""
    cache = DiskCache(tmp_path, 20_000)
    cache.of("a", lambda: SMALL)

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refuse)

    assert cache.of("a", never).equals(SMALL)


@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b[:10], lambda b: b""])
def test_a_file_that_is_not_whole_is_made_again(tmp_path, damage):
    """As a power cut on a disk that lies about flushing may leave it."""
    cache = DiskCache(tmp_path, 10**6)
    cache.of("a", lambda: SMALL)
    (path,), _ = files_in(tmp_path)
    path.write_bytes(damage(path.read_bytes()))

    assert cache.of("a", lambda: SMALL).equals(SMALL)
    assert cache.of("a", never).equals(SMALL)


MOST_KILLS = 1000
"""Until one was in the middle of a file, of which a fast disk has few."""


@pytest.mark.slow  # kills fifty processes
def test_killed_fifty_times_while_writing_it_gives_no_wrong_table(tmp_path):
    """Two writers in one folder with room for some of the tables; one of them killed every time.

    Every file left holds what its name says, drafts of the killed are removed, the limit holds.
    """
    limit_bytes = 5 * 400_000
    script = Path(__file__).parents[1] / "support" / "cache_writer.py"
    command = [sys.executable, str(script), str(tmp_path), str(limit_bytes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    victims, other = (subprocess.Popen(command, **pipes) for _ in range(2))

    def begin(writers):
        writers.stdin.write("\n")
        return int(writers.stdout.readline())

    drafts_left = 0
    survivor = begin(other)
    try:
        delays = np.random.default_rng(0).uniform(0.01, 0.1, MOST_KILLS)
        for killed, delay in enumerate(delays):
            if killed >= 50 and drafts_left:
                break
            victim = begin(victims)
            time.sleep(delay)
            os.kill(victim, signal.SIGKILL)
            assert victims.stdout is not None
            assert victims.stdout.readline() == "dead\n"  # and nothing of wrong tables before
            drafts_left += any(f".{victim}." in path.name for path in files_in(tmp_path)[1])
            assert held_bytes(tmp_path) <= limit_bytes
    finally:
        os.kill(survivor, signal.SIGKILL)
        said = [writers.communicate()[0] for writers in (victims, other)]
    assert said == ["", "dead\n"]
    assert drafts_left > 0  # some were killed in the middle of a file
    cache = DiskCache(tmp_path, limit_bytes)
    assert not files_in(tmp_path)[1]
    for number in range(12):
        assert cache.of(str(number), lambda n=number: table_of(n)).equals(table_of(number))


IMAGES = random_images(40)


@pytest.fixture
def config(tmp_path):
    """40 images in four row groups, with a cache and memory for one of them."""
    path = str(tmp_path / "images.parquet")
    write_images(path, IMAGES, np.arange(40), rows=10)
    reading = ReadingConfig(memory_bytes=8000, cache_folder=str(tmp_path / "cache"))
    return ParquetConfig(train=path, test=path, image_size=8, classes=40, reading=reading)


def test_row_groups_come_from_the_cache_and_a_file_written_anew_from_itself(config, tmp_path):
    """The cache serves the rows as they were written, and none of a file that has changed."""
    for _ in range(2):
        rows = open_source(config, "train", seed=0).take(np.arange(39, -1, -1))
        np.testing.assert_array_equal(rows["inputs"], IMAGES[::-1])
        assert len(files_in(tmp_path / "cache")[0]) == 4
        _memories.clear()

    write_images(config.train, 255 - IMAGES, np.arange(40), rows=10)
    rows = open_source(config, "train", seed=0).take(np.arange(40))
    np.testing.assert_array_equal(rows["inputs"], 255 - IMAGES)


def test_a_cache_smaller_than_the_data_is_counted_as_one_that_forgets(config):
    """Rows are taken together then, as without a cache, and row groups decoded every epoch."""
    too_small = replace(config, reading=replace(config.reading, cache_bytes=10_000))
    without = replace(config, reading=replace(config.reading, cache_folder=None))

    together = [ParquetExamples(c, "train").rows_together for c in (config, too_small, without)]
    work = [sample_work(each).files for each in (config, too_small, without)]
    reads = [each.reads(0, is_first_epoch=False) for each in work if each is not None]

    assert together[0] == 0 < together[1] == together[2]
    assert reads[0] == 0 < reads[1] == reads[2]


def test_files_of_one_relative_path_in_two_folders_are_two_files(tmp_path, monkeypatch):
    """Of the same size, written at the same time, and read with one cache."""
    reading = ReadingConfig(cache_folder=str(tmp_path / "cache"))
    config = ParquetConfig(
        train="t.parquet", test="t.parquet", image_size=8, classes=4, reading=reading
    )
    plain = {"compression": "none", "use_dictionary": False}
    for number, folder in enumerate((tmp_path / "one", tmp_path / "other")):
        folder.mkdir()
        images = [encoded(np.full((8, 8, 3), 10 * number + row, np.uint8), "BMP") for row in (0, 1)]
        table = pa.table({"image": pa.array(images, pa.binary()), "label": [0, 1]})
        pq.write_table(table, folder / "t.parquet", **plain)
        os.utime(folder / "t.parquet", ns=(10**18, 10**18))
        monkeypatch.chdir(folder)
        _memories.clear()
        _footer.cache_clear()

        rows = open_source(config, "train", seed=0).take(np.arange(2))

        np.testing.assert_array_equal(rows["inputs"][:, 0, 0, 0], [10 * number, 10 * number + 1])
    one, other = ((tmp_path / name / "t.parquet").stat() for name in ("one", "other"))
    assert (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def test_files_that_may_change_unseen_are_not_kept(config, monkeypatch):
    """A store in memory names no time; with an ETag, the cache tells two contents apart."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    url = "memory://cached/images.parquet"
    content = Path(config.train).read_bytes()
    memory.pipe("/cached/images.parquet", content)
    remote = replace(config, train=url, test=url)
    with pytest.raises(ConfigError, match=r"cache_folder=.* is refused: the store of memory://"):
        read_facts(remote)

    info = type(memory).info
    tag = "a"
    monkeypatch.setattr(type(memory), "info", lambda *a, **k: info(*a, **k) | {"ETag": tag})
    rows = open_source(remote, "train", seed=0).take(np.arange(40))
    np.testing.assert_array_equal(rows["inputs"], IMAGES)

    write_images(config.train, 255 - IMAGES, np.arange(40), rows=10)
    memory.pipe("/cached/images.parquet", Path(config.train).read_bytes())
    tag = "b"
    rows = open_source(remote, "train", seed=0).take(np.arange(40))
    np.testing.assert_array_equal(rows["inputs"], 255 - IMAGES)


def test_a_full_disk_is_named(config, tmp_path):
    """The system refuses to write more than 1000 bytes of a file: cache, file and what to do."""
    source = open_source(config, "train", seed=0)
    _memories.clear()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"cache_folder: .*arrow cannot be written .*make"):
            source.take(np.arange(40))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert files_in(tmp_path / "cache") == ([], [])
    np.testing.assert_array_equal(source.take(np.arange(40))["inputs"], IMAGES)


def test_a_folder_that_cannot_be_is_refused_when_the_source_is_opened(config, tmp_path):
    """A file is where the folder should be."""
    (tmp_path / "cache").write_text("no folder")

    with pytest.raises(ConfigError, match=r"cache_folder: .*cache cannot be written"):
        open_source(config, "train", seed=0)
