"""Data at URLs: faults of a store give the same samples, or end in one line with its exit code."""

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_cases import encoded, random_images, write_images
from store_server import LASTING, PASSING, served

from scalejax.cli.main import main
from scalejax.config.data import ImageFolderConfig, ParquetConfig, ReadingConfig, TokensConfig
from scalejax.core import remote
from scalejax.core.bounded_memory import BoundedMemory
from scalejax.core.errors import (
    ConfigError,
    Damaged,
    ExitCode,
    ScalejaxError,
    Unavailable,
    refusal,
)
from scalejax.core.filesystem import DataFile, local_copy, require_unchanged
from scalejax.core.remote import Deadlines
from scalejax.core.serialization import save
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts
from scalejax.data.formats import parquet_bytes
from scalejax.data.formats.parquet import find_files
from scalejax.data.formats.parquet_bytes import coalesced
from scalejax.data.readers.row_group_cache import RowGroups
from scalejax.training import multihost
from scalejax.training.data_fingerprints import (
    UsedFiles,
    fingerprints_to_keep,
    refuse_other_files,
    used_files,
)
from scalejax.training.record import RunFolder

IMAGES = random_images(40)
LABELS = np.arange(40) % 5
NO_MEMORY = ReadingConfig(memory_bytes=2)


@pytest.fixture
def quick(monkeypatch):
    """Deadlines of a test: a store is silent for longer, and tries follow at once."""
    pytest.importorskip("aiohttp")
    patient(monkeypatch, 3.0)


def patient(monkeypatch, seconds):
    """Have a read tried again for some seconds."""
    limits = Deadlines(
        connect_seconds=seconds,
        stall_seconds=0.1,
        total_seconds=seconds,
        first_seconds=seconds,
        gone_seconds=0.02,
        first_wait_seconds=0.01,
        longest_wait_seconds=0.02,
    )
    monkeypatch.setattr(remote, "deadlines", lambda: limits)


@pytest.fixture
def folder(tmp_path):
    """Images in row groups of 7, with checksums of pages."""
    for name, count in (("train", 40), ("test", 10)):
        path = tmp_path / f"{name}.parquet"
        write_images(path, IMAGES[:count], LABELS[:count])
        pq.write_table(pq.read_table(path), path, row_group_size=7, write_page_checksum=True)
    return tmp_path


def config_of(where, **changes):
    """The images at a location."""
    return ParquetConfig(
        train=f"{where}/train.parquet",
        test=f"{where}/test.parquet",
        image_size=8,
        classes=5,
        **changes,
    )


def forget(source: Any):
    """Have nothing in memory, which is as it was when it was read."""
    source._groups = RowGroups(NO_MEMORY)


def failing(kind, *, first=0, count=None):
    """A fault of reads of ranges from the `first` on, of `count` of them or for ever."""
    seen = []

    def fault(number, method, name, is_range):
        if method == "HEAD" or not is_range:
            return None
        seen.append(number)
        is_in = len(seen) > first and (count is None or len(seen) <= first + count)
        return kind if is_in else None

    return fault


@pytest.mark.parametrize("kind", [*PASSING, "404", "403", "whole", "wrong bytes"])
def test_a_fault_that_passes_gives_the_same_samples(folder, quick, kind):
    """One read each of the footer and of rows fails, and is done again."""
    with served(folder) as store:
        config = config_of(store.url)
        store.fault = failing(kind, count=1)
        source = open_source(config, "train", seed=0)
        store.fault = failing(kind, first=2, count=1)

        rows = source.take(np.arange(40))

        np.testing.assert_array_equal(rows["inputs"], IMAGES)
        assert rows["targets"].tolist() == LABELS.tolist()
        assert store.asked


@pytest.mark.parametrize("kind", ["503", "stall", "reset", "short"])
def test_a_fault_that_lasts_ends_in_one_line(folder, quick, monkeypatch, kind):
    """With the address, what happened, tries and seconds, and a code that says: try again."""
    with served(folder) as store:
        source = open_source(config_of(store.url), "train", seed=0)
        store.fault = failing(kind)
        patient(monkeypatch, 0.15)

        with pytest.raises(Unavailable) as caught:
            source.take(np.arange(40))

    words = str(caught.value)
    assert words.startswith(f"data.train: {store.url}/train.parquet is not available (")
    assert " in 0." in words
    assert "\n" not in words
    assert caught.value.exit_code is ExitCode.TRANSIENT


@pytest.mark.parametrize("kind", LASTING)
def test_a_file_that_is_gone_or_another_is_refused_by_name(folder, quick, kind):
    """Which no other try would change: refused, not tried again for ever."""
    with served(folder) as store:
        source = open_source(config_of(store.url), "train", seed=0)
        store.fault = failing(kind)

        with pytest.raises(ConfigError) as caught:
            source.take(np.arange(40))

        was = "was rewritten" if kind == "another version" else "was there when it was listed"
        assert str(caught.value).startswith(f"data.train: {store.url}/train.parquet {was}")
        assert caught.value.exit_code is ExitCode.REFUSED
        asked = len(store.asked)
    with served(folder, lambda *_: kind) as store:
        if kind == "another version":
            return
        with pytest.raises(ConfigError, match=rf"data\.train='{store.url}.* HTTP {kind}"):
            read_facts(config_of(store.url))
        assert len(store.asked) <= 2  # HEAD, and where that is refused a byte
    assert asked < 60


def test_a_file_that_is_gone_is_refused_by_every_process(monkeypatch):
    """By the words of the first, whose error is one of reads of stores alone."""
    monkeypatch.setattr(multihost.jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost, "all_gather_text", lambda text: (text, text))

    def decide():
        raise remote.Vanished("it is gone")

    with pytest.raises(ConfigError, match="it is gone"):
        multihost.decided_by_first(decide)


def test_bytes_that_are_wrong_in_each_read_are_damaged(folder, quick):
    """Their checksums say so; once they are read again, which the test before shows."""
    with served(folder) as store:
        source = open_source(config_of(store.url), "train", seed=0)
        store.fault = failing("wrong bytes")

        with pytest.raises(Damaged, match=r"train\.parquet is damaged .*in each of 3 reads"):
            source.take(np.arange(40))


def test_a_server_without_ranges_is_refused_for_a_large_file(folder, quick, monkeypatch):
    """A small one is taken whole, and cut."""
    monkeypatch.setattr(remote, "MOST_IGNORED_BYTES", 100)
    with served(folder) as store:
        store.fault = failing("whole")
        with pytest.raises(
            ConfigError, match=r"train\.parquet.*its server ignores ranges"
        ) as caught:
            read_facts(config_of(store.url))
        assert caught.value.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize("fault", ["cut", "stall midway", "reset", "short", "another version"])
def test_a_large_file_of_a_server_without_ranges_is_copied_whole(
    folder, quick, monkeypatch, fault, tmp_path
):
    """By one request, and once more where that fails midway; another version is refused."""
    monkeypatch.setattr(remote, "MOST_IGNORED_BYTES", 100)
    content = (folder / "train.parquet").read_bytes()
    asked = []

    def ignores(number, method, name, is_range):
        asked.append(is_range)
        return "whole" if is_range else fault if asked.count(False) == 1 else None

    with served(folder) as store:
        file = DataFile(
            path=f"{store.url}/train.parquet",
            size_bytes=len(content),
            version=store.etag(folder / "train.parquet"),
        )
        store.fault = ignores
        if fault == "another version":
            with pytest.raises(ConfigError, match=r"train\.parquet was rewritten"):
                local_copy("data.train", file, str(tmp_path / "copies"))
            assert not list((tmp_path / "copies").iterdir())
            return
        copy = local_copy("data.train", file, str(tmp_path / "copies"))

    assert Path(copy).read_bytes() == content
    assert asked.count(False) == 2


def test_a_store_is_left_alone_for_as_long_as_it_asks(folder, quick, monkeypatch):
    """Retry-After in seconds; a wait beyond the deadline is not begun."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(remote, "_sleep", sleep)
    long = Deadlines(total_seconds=100, stall_seconds=1)
    monkeypatch.setattr(remote, "deadlines", lambda: long)
    with served(folder, retry_after="7") as store:
        source = open_source(config_of(store.url), "train", seed=0)
        store.fault = failing("429", count=1)
        np.testing.assert_array_equal(source.take(np.arange(7))["inputs"], IMAGES[:7])
        assert max(waits) == 7
        store.retry_after = "200"
        store.fault = failing("503")
        with pytest.raises(Unavailable, match=r"HTTP 503; 1 try in 0\.\d s"):
            source.take(np.arange(7, 14))


def test_waits_grow_and_differ(folder, quick, monkeypatch):
    """Twice as long at most for each try, by chance below, so that processes part."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(remote, "_sleep", sleep)
    limits = Deadlines(total_seconds=1000, stall_seconds=1, longest_wait_seconds=4)
    monkeypatch.setattr(remote, "deadlines", lambda: limits)
    with served(folder) as store:
        source = open_source(config_of(store.url), "train", seed=0)
        store.fault = failing("503", count=8)
        source.take(np.arange(7))

    assert all(wait <= most for wait, most in zip(waits, [0.5, 1, 2, 4, 4, 4, 4, 4], strict=True))
    assert len(set(waits)) == 8
    assert max(waits) > 1


def test_deadlines_are_those_of_the_environment(monkeypatch):
    """Which a run on a slow store may raise, and nonsense is refused."""
    monkeypatch.setenv(remote.STORE_SECONDS, "7")
    monkeypatch.setenv(remote.STALL_SECONDS, "2")
    found = remote.deadlines()
    assert (found.total_seconds, found.first_seconds, found.stall_seconds) == (7, 7, 2)
    monkeypatch.setenv(remote.STORE_SECONDS, "700")
    assert remote.deadlines().first_seconds == 700
    for wrong in ("soon", "nan", "-1", "0"):
        monkeypatch.setenv(remote.STORE_SECONDS, wrong)
        with pytest.raises(ConfigError, match=r"SCALEJAX_STORE_SECONDS='.*' is refused"):
            remote.deadlines()


def test_a_listing_may_take_longer_than_a_file_that_nobody_has_seen(folder, quick, monkeypatch):
    """As of a large bucket, whose pages come one after the other."""
    limits = Deadlines(first_seconds=0.1, total_seconds=5)
    monkeypatch.setattr(remote, "deadlines", lambda: limits)
    with served(folder, delay_seconds=0.3) as store:
        _, found = remote.listing("data.train", f"{store.url}/")

    assert len(found) == 2


def test_a_file_that_is_gone_for_a_moment_is_waited_for(folder, quick, monkeypatch):
    """As behind a cache or a token that is renewed; for a least time, however many the tries."""
    limits = replace(remote.deadlines(), gone_seconds=2.0)
    monkeypatch.setattr(remote, "deadlines", lambda: limits)
    with served(folder) as store:
        source = open_source(config_of(store.url), "train", seed=0)
        store.fault = failing("404", count=8)
        np.testing.assert_array_equal(source.take(np.arange(7))["inputs"], IMAGES[:7])


def test_a_request_that_s3_took_for_too_slow_is_tried_again():
    """It answers 400, which is final otherwise."""
    error = OSError("it was wrapped")
    error.__cause__ = Answered("RequestTimeout")
    assert isinstance(remote._problem(error), remote._Passing)
    error.__cause__ = Answered("InvalidRequest")
    assert not isinstance(remote._problem(error), remote._Passing)


class Answered(Exception):
    """An exception of botocore."""

    def __init__(self, code):
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}


@pytest.mark.parametrize("of_head", [True, False])
@pytest.mark.parametrize("kind", ["no ETag", "W/"])
def test_versions_are_compared_with_their_like(folder, quick, kind, of_head):
    """Where GET has no ETag and HEAD has one, or HEAD a time alone: another file is still found."""
    with served(folder) as store:
        say = "HEAD" if of_head else "GET"
        store.etags_of = (say,)
        store.is_weak = kind == "W/"
        source = open_source(config_of(store.url), "train", seed=0)
        np.testing.assert_array_equal(source.take(np.arange(7))["inputs"], IMAGES[:7])
        forget(source)
        write_images(folder / "train.parquet", 255 - IMAGES, LABELS)
        os.utime(folder / "train.parquet", (0, 0))
        with pytest.raises(ConfigError, match=r"train\.parquet was rewritten"):
            source.take(np.arange(7))


def test_a_file_replaced_in_mid_run_is_refused_at_a_url(folder, quick):
    """By one of as many rows, whose footer is of the same size."""
    with served(folder) as store:
        source = open_source(config_of(store.url), "train", seed=0)
        source.take(np.arange(7))
        forget(source)
        write_images(folder / "train.parquet", 255 - IMAGES, LABELS)

        with pytest.raises(ConfigError, match=r"/train\.parquet was rewritten while it was"):
            source.take(np.arange(40))


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_file_replaced_in_mid_run_is_refused_here(tmp_path, is_moved, keeps_time):
    """By one of as many rows and bytes, in place or by its name, with its time or a new one."""
    table = pa.table({"x": np.arange(40.0), "label": LABELS})
    plain = {"row_group_size": 7, "compression": "none", "use_dictionary": False}
    path, other = tmp_path / "train.parquet", tmp_path / "other"
    pq.write_table(table, path, **plain)
    config = ParquetConfig(
        train=str(path), test=str(path), feature_columns=("x",), label_column="label", classes=5
    )
    source = open_source(config, "train", seed=0)
    source.take(np.arange(7))
    forget(source)
    before = path.stat()
    pq.write_table(table.set_column(0, "x", pa.array(np.arange(40.0)[::-1])), other, **plain)
    assert other.stat().st_size == before.st_size
    if is_moved:
        other.replace(path)
    else:
        path.write_bytes(other.read_bytes())
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(ConfigError, match=r"train\.parquet was rewritten while it was read"):
        source.take(np.arange(40))


def test_a_change_of_mode_is_no_change_of_a_file(tmp_path):
    """Its footer is read once more, and is the same."""
    write_images(tmp_path / "train.parquet", IMAGES, LABELS)
    shutil.copy(tmp_path / "train.parquet", tmp_path / "test.parquet")
    source = open_source(config_of(tmp_path), "train", seed=0)
    source.take(np.arange(7))
    forget(source)

    (tmp_path / "train.parquet").chmod(0o600)

    np.testing.assert_array_equal(source.take(np.arange(40))["inputs"], IMAGES)


def test_a_page_that_changed_on_the_disk_is_found_by_its_checksum(tmp_path):
    """A bit flipped within numbers, which decode as well: without the checksum it is trained on."""
    table = pa.table({"x": np.arange(1000.0), "label": np.zeros(1000, np.int64)})
    path = tmp_path / "train.parquet"
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, path, **plain)
    content = bytearray(path.read_bytes())
    content[content.index(np.float64(500).tobytes())] ^= 1
    path.write_bytes(content)
    config = ParquetConfig(
        train=str(path), test=str(path), feature_columns=("x",), label_column="label", classes=5
    )

    with pytest.raises(Damaged, match=r"train\.parquet is damaged \(.*CRC checksum") as caught:
        open_source(config, "train", seed=0).take(np.arange(7))
    assert caught.value.exit_code is ExitCode.DAMAGED


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "EMFILE", "ENOMEM"])
@pytest.mark.parametrize("at", ["rows", "footer", "streamed", "stat"])
def test_a_disk_that_fails_is_no_damage_of_a_file(folder, monkeypatch, name, at):
    """To be tried again, and named; what Arrow finds by itself has no number, and is damage."""
    source = open_source(config_of(folder), "train", seed=0)
    path = str(folder / "train.parquet")
    about = os.stat(path)
    file = DataFile(path=path, size_bytes=about.st_size, version=str(about.st_mtime_ns))

    def fail(*_, **__):
        raise OSError(getattr(errno, name), "it fails")

    failing_call = {"rows": "pyarrow.OSFile", "stat": "os.stat"}.get(at, "builtins.open")
    if at == "footer":
        parquet_bytes._footers = BoundedMemory(2**28)  # as in another process
    monkeypatch.setattr(failing_call, fail)

    reads = {
        "rows": lambda: source.take(np.arange(7)),
        "stat": lambda: require_unchanged("data.train", file),
    }
    with pytest.raises(Unavailable, match=rf"train\.parquet cannot be read now \({name}: "):
        reads.get(at, lambda: opened_once(file))()


def opened_once(file):
    """Open a file, and read nothing."""
    with parquet_bytes.opened("data.train", file):
        pass


def wide(path, groups, columns, rows=50):
    """A table of random numbers, in row groups."""
    numbers = np.random.default_rng(0).normal(size=(columns, groups * rows)).astype(np.float32)
    table = {f"c{number}": values for number, values in enumerate(numbers)}
    table["label"] = np.arange(groups * rows, dtype=np.int32) % 3
    pq.write_table(pa.table(table), path, row_group_size=rows, compression="none")
    return numbers


def test_only_the_wanted_bytes_are_fetched_and_the_footer_once(tmp_path, quick):
    """Of two columns in three of 60 row groups, at most 1.5 times their bytes; the reader that a
    worker process has brings its footer along."""
    numbers = wide(tmp_path / "train.parquet", 60, 40)
    shutil.copy(tmp_path / "train.parquet", tmp_path / "test.parquet")
    with served(tmp_path) as store:
        config = ParquetConfig(
            train=f"{store.url}/train.parquet",
            test=f"{store.url}/test.parquet",
            feature_columns=("c3", "c17"),
            label_column="label",
            classes=3,
        )
        (file,) = {group.file for group in find_files("data.train", config.train, ()).groups}
        footers = [span for _, _, span in store.asked if span]
        source: Any = open_source(config, "train", seed=0)
        kept = source.__getstate__()["footers"]
        assert list(kept) == [file]
        parquet_bytes._footers = BoundedMemory(2**28)  # as in another process
        parquet_bytes.keep_footers(kept)
        forget(source)
        before = store.sent_bytes

        rows = source.take(np.concatenate([np.arange(50) + 50 * group for group in (7, 8, 40)]))

    metadata = kept[file].metadata
    wanted = sum(
        metadata.row_group(group).column(column).total_compressed_size
        for group in (7, 8, 40)
        for column in (3, 17, 40)
    )
    assert len(footers) <= 2
    assert 0 < store.sent_bytes - before <= 1.5 * wanted
    assert rows["inputs"].shape == (150, 2)
    assert np.corrcoef(rows["inputs"][:, 0], numbers[3, [*range(350, 450), *range(2000, 2050)]])[
        0, 1
    ] == pytest.approx(1)


def test_gaps_are_fetched_as_far_as_they_are_small():
    """A quarter of the wanted bytes, smallest first; chunks that touch are one."""
    assert coalesced([(0, 10), (10, 20)]) == [(0, 20)]
    assert coalesced([(100, 200), (0, 100), (210, 300), (340, 400)]) == [(0, 400)]
    assert coalesced([(0, 100), (180, 300), (310, 400)]) == [(0, 100), (180, 400)]
    assert coalesced([(0, 4), (6, 10)]) == [(0, 10)]
    assert coalesced([(0, 4), (7, 11)]) == [(0, 4), (7, 11)]


def test_tokens_and_images_come_through_the_same_faults(tmp_path, quick):
    """Ranges of a flat file, and files whole."""
    tokens = np.arange(2000, dtype=np.uint16) % 100
    tokens.tofile(tmp_path / "train.bin")
    with served(tmp_path) as store:
        config = TokensConfig(train=f"{store.url}/train.bin", tokens=16, vocabulary=100)
        source = open_source(config, "train", seed=0)
        for kind in ("cut", "elsewhere"):
            store.fault = failing(kind, count=3)
            rows = source.take(np.arange(1, 20))
            np.testing.assert_array_equal(rows["inputs"].ravel(), tokens[16:320])
        tokens[::-1].tofile(tmp_path / "train.bin")
        with pytest.raises(ConfigError, match=r"train\.bin was rewritten"):
            source.take(np.arange(20))
        store.fault = failing("short", count=1)
        file = DataFile(path=f"{store.url}/train.bin", size_bytes=4000, version=None)
        copy = local_copy("data.train", file, str(tmp_path / "copies"))
        assert Path(copy).read_bytes() == tokens[::-1].tobytes()


@pytest.mark.parametrize("kind", ["page", "short", "stall", "503"])
def test_an_image_is_read_again_before_it_counts_as_unreadable(tmp_path, quick, kind):
    """A page of a proxy, or half an image, whose size a folder over HTTP does not tell."""
    for part in ("train", "test"):
        for number, image in enumerate(IMAGES[:6]):
            path = tmp_path / part / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(image))
    with served(tmp_path) as store:
        config = ImageFolderConfig(
            train=f"{store.url}/train/", test=f"{store.url}/test/", image_size=8
        )
        source = open_source(config, "train", seed=0)
        asked = len(store.asked)
        store.fault = lambda number, *_: kind if number < asked + 2 else None

        rows = source.take(np.arange(6))

    np.testing.assert_array_equal(rows["inputs"], IMAGES[[0, 2, 4, 1, 3, 5]])


def test_every_exception_ends_in_words_of_ours(folder, quick):
    """None of a store's package reaches a user."""
    for kind in (*LASTING, "wrong bytes", "418", "301", "505"):
        with served(folder, failing(kind)) as store, pytest.raises(ScalejaxError) as caught:
            open_source(config_of(store.url), "train", seed=0).take(np.arange(40))
        assert str(caught.value).count("\n") == 0
        assert store.url in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:secret@host/a.bin", "https://…@host/a.bin"),
        ("https://token@host:8080/a.bin", "https://…@host:8080/a.bin"),
        ("https://host/a.bin?X-Sig=ab%2F&e=1", "https://host/a.bin?…"),
        ("sftp://me:secret@host/a.bin", "sftp://me:…@host/a.bin"),
        ("abfs://container@account/a.bin", "abfs://container@account/a.bin"),
        ("s3://bucket/part-?.bin", "s3://bucket/part-?.bin"),
        ("http://host/a@b/c.bin", "http://host/a@b/c.bin"),
    ],
)
def test_a_message_shows_no_secrets_of_a_url(url, shown):
    """Users, passwords and signatures, which logs keep; also where it is quoted, or in brackets."""
    assert str(ConfigError(f"data.train: {url} is gone")) == f"data.train: {shown} is gone"
    assert str(ConfigError(refusal("data.train", url, "no"))).startswith(f"data.train='{shown}' is")
    long = url.replace("ab%2F", "ab%2F" * 200)
    assert str(ConfigError(refusal("data.train", long, "no"))).startswith(
        f"data.train='{shown}' is"
    )
    assert str(Unavailable(f"it fails ({url}); twice")) == f"it fails ({shown}); twice"


def test_a_command_ends_in_the_code_of_the_store(folder, quick, monkeypatch, capsys):
    """75 of one that does not answer, which launchers try again; 2 of a file that is not there."""
    with served(folder) as store:
        monkeypatch.setenv("COLUMNS", "1000")
        for fault, code in ((lambda *_: "503", 75), (lambda *_: "404", 2)):
            store.fault = fault
            patient(monkeypatch, 0.1)
            assert main(["data", "inspect", f"{store.url}/train.parquet"]) == code
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{store.url}/train.parquet" in line


def test_a_run_is_not_resumed_on_a_file_with_another_footer(tmp_path):
    """Of the same size and time; runs of before scalejax wrote the hash of footers resume."""
    path = tmp_path / "train.parquet"
    table = pa.table({"x": np.arange(40.0), "label": LABELS})
    plain = {"row_group_size": 7, "compression": "none", "use_dictionary": False}
    pq.write_table(table, path, **plain)
    about = path.stat()
    config = ParquetConfig(
        train=str(path), test=str(path), feature_columns=("x",), label_column="label", classes=5
    )
    before = used_files(config)
    pq.write_table(table.set_column(0, "x", pa.array(np.arange(40.0)[::-1])), path, **plain)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    parquet_bytes._footers = BoundedMemory(2**28)  # as in another process

    assert before is not None
    run = RunFolder(path=tmp_path)
    save(before, run.data_files)
    with pytest.raises(ConfigError, match=r"train\.parquet of data\.train has changed since"):
        refuse_other_files(run, config)
    old = UsedFiles(
        **{part: (replace(getattr(before, part)[0], listing=None),) for part in ("train", "test")}
    )
    save(old, run.data_files)
    refuse_other_files(run, config)
    assert fingerprints_to_keep(run, config) == old  # which manifests have the hash of


@pytest.fixture
def s3(monkeypatch):
    """A bucket of moto's server, which is in this process."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    s3fs = pytest.importorskip("s3fs")
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-the-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    store.mkdir("bucket")
    yield store, "s3://bucket"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def gcs(monkeypatch):
    """A bucket of an emulator of Google Cloud Storage, which is in this process."""
    create_server = pytest.importorskip("gcp_storage_emulator.server").create_server
    # Without it gcsfs asks over gRPC what kind of bucket it is, for a minute.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    gcsfs = pytest.importorskip("gcsfs")
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv(
        "STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server._api._httpd.server_port}"
    )
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    gcsfs.GCSFileSystem.clear_instance_cache()
    monkeypatch.setitem(fsspec_conf(), "gs", {"token": "anon"})
    yield gcsfs.GCSFileSystem(token="anon"), "gs://bucket"
    server.stop()
    gcsfs.GCSFileSystem.clear_instance_cache()


def fsspec_conf():
    """The options that fsspec gives its file systems."""
    return pytest.importorskip("fsspec.config").conf


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the stores' packages
@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_bucket_gives_the_rows_of_one_version(folder, monkeypatch, request, kind):
    """Slow: the packages of each store take seconds to start. A file, a folder and a glob are
    found, a file written anew or removed is refused, and a store that is away is waited for."""
    store, where = request.getfixturevalue(kind)
    for name in ("train", "test"):
        store.pipe(f"bucket/d/{name}.parquet", (folder / f"{name}.parquet").read_bytes())
    config = replace(config_of(f"{where}/d"), test=f"{where}/d/te*.parquet")
    source = open_source(config, "train", seed=0)

    np.testing.assert_array_equal(source.take(np.arange(40))["inputs"], IMAGES)
    whole = replace(config, train=f"{where}/d")
    assert read_facts(whole).train_examples == 50
    forget(source)
    write_images(folder / "train.parquet", 255 - IMAGES, LABELS)
    store.pipe("bucket/d/train.parquet", (folder / "train.parquet").read_bytes())
    with pytest.raises(ConfigError, match=rf"{where}/d/train\.parquet was rewritten"):
        source.take(np.arange(40))
    monkeypatch.setattr(remote, "deadlines", lambda: Deadlines(gone_seconds=0.1))
    store.rm("bucket/d/train.parquet")
    with pytest.raises(ConfigError, match=rf"{where}/d/train\.parquet was there when it was"):
        source.take(np.arange(40))
    with pytest.raises(
        ConfigError, match=rf"data\.train='{where}/d/train\.parquet' is refused: th"
    ):
        read_facts(config)
