"""How fast a host makes batches: by hand, and by property."""

import io
import math
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hardware_cases import cluster_of
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from test_predict import data_parallel

from scalejax.config.data import ParquetConfig, PythonDocsConfig
from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError, ScalejaxError
from scalejax.core.progress import Progress
from scalejax.core.serialization import build, load_toml, save_toml
from scalejax.core.units import format_seconds
from scalejax.hardware import (
    CopyRates,
    FileWork,
    HostInput,
    InputRates,
    Link,
    ReadRates,
    RunConditions,
    SampleWork,
    Site,
    TakeRates,
)
from scalejax.measure.input import bench as input_bench
from scalejax.measure.input import probes
from scalejax.measure.input.bench import sized, write_sized
from scalejax.measure.input.work import host_input, sample_work
from scalejax.simulator.explain.what_if import improvements
from scalejax.simulator.input import input_pace, stage_seconds, with_workers, workers_needed
from scalejax.simulator.input_notes import input_notes
from scalejax.simulator.predict import predict
from scalejax.simulator.site_effects import batch_parts, step_terms

GIB = 2**30
FREE = CopyRates(seconds_per_batch=0.0, seconds_per_byte=0.0)
TAKE = TakeRates(
    seconds_per_sample=100e-6,
    seconds_per_encoded_byte=10e-9,
    seconds_per_full_pixel=5e-9,
    seconds_per_reduced_pixel=4e-9,
    seconds_per_resized_pixel=2e-9,
)
RATES = InputRates(
    data="parquet",
    is_of_images=True,
    cores=4,
    memory_bytes=8 * GIB,
    read=ReadRates(
        seconds_per_row_group=1e-3, seconds_per_byte=1e-9, storage_bytes_per_second=100e6
    ),
    take=TAKE,
    threads=replace(TAKE, seconds_per_sample=0.0, seconds_per_full_pixel=0.0),
    hand_over=CopyRates(seconds_per_batch=1e-3, seconds_per_byte=1e-9),
    worker_speedups=((1, 1.0), (2, 2.0), (4, 3.6)),
)
FILES = FileWork(
    rows=1000,
    row_groups=10,
    stored_bytes=20_000_000.0,
    read_bytes=40_000_000.0,
    memory_bytes=64 * GIB,
    rows_together=100,
)
WORK = SampleWork(
    data="parquet",
    batch_bytes=50_000.0,
    is_of_images=True,
    input_shape=(128, 128, 3),
    encoded_bytes=20_000.0,
    full_pixels=60_000.0,
    resized_pixels=50_000.0,
    files=FILES,
)
DECODE = 100e-6 + 20_000 * 10e-9 + 60_000 * 5e-9 + 50_000 * 2e-9
"""700 us: what one of those images takes."""
HOST = HostInput(rates=RATES, work=WORK, workers=2)


def with_rates(**fields: object) -> HostInput:
    """The host with some of its rates replaced."""
    return replace(HOST, rates=replace(RATES, **fields))  # type: ignore[arg-type]


# --- the pace, by hand -----------------------------------------------------------------------


def test_two_workers_take_twice_as_many_images_as_one():
    """Decoding takes 700 us; the process that trains, meanwhile, 60 us on another core."""
    pace = input_pace(HOST, 100)

    assert pytest.approx(700e-6) == DECODE
    assert pace.samples_per_second == pytest.approx(2 / 700e-6)
    assert pace.limit == "workers"
    assert dict(pace.stages) == pytest.approx({"take": 700e-6, "hand over": 60e-6})


def test_a_batch_takes_in_each_stage_what_its_samples_do():
    """Of 100 samples in 1,000 of the first epoch: both workers read 10 groups at 1 ms and 40 MB at
    1 ns a byte, and 20 MB come from storage at 100 MB/s, 300 ms; the others are as above."""
    first = replace(HOST, is_first_epoch=True)

    assert dict(stage_seconds(first, 100)) == pytest.approx(
        {"storage": 0.030, "decode": 0.070, "hand over": 0.006}
    )
    assert dict(stage_seconds(with_workers(HOST, 0), 100)) == pytest.approx({"decode": 0.030})


def test_threads_of_the_process_hand_nothing_over():
    """By threads, bytes take 200 us and the pixels of the example 100."""
    pace = input_pace(with_workers(HOST, 0), 100)

    assert pace.samples_per_second == pytest.approx(1 / 300e-6)
    assert pace.limit == "threads"
    assert dict(pace.stages) == pytest.approx({"take": 300e-6})


def test_all_cores_are_the_limit_of_many_workers():
    """Four cores are worth 3.6; they decode and hand over: 760 us a sample."""
    for workers in (4, 8, 64):
        pace = input_pace(with_workers(HOST, workers), 100)

        assert pace.samples_per_second == pytest.approx(3.6 / 760e-6)
        assert pace.limit == "cores"


def test_workers_are_worth_no_more_than_they_are():
    """A disturbed measurement of one made two look like 2.6: they count as 2, and 64 as 64."""
    lucky = with_rates(cores=64, worker_speedups=((1, 1.0), (2, 2.6), (4, 3.2)), hand_over=FREE)

    for workers, worth in ((2, 2), (3, 2.9), (4, 3.2), (8, 6.4)):
        pace = input_pace(with_workers(lucky, workers), 100)
        assert pace.samples_per_second == pytest.approx(worth / DECODE)
    beyond = with_rates(cores=64, worker_speedups=((1, 1.0), (2, 2.6)), hand_over=FREE)
    pace = input_pace(with_workers(beyond, 64), 100)
    assert pace.samples_per_second == pytest.approx(64 / DECODE)


def test_measured_speedups_are_no_larger_than_their_counts(monkeypatch: pytest.MonkeyPatch):
    """100, 260 and 380 samples a second by 1, 2 and 4 processes."""
    rates = {1: 100.0, 2: 260.0, 4: 380.0}
    monkeypatch.setattr(
        input_bench.probes, "side_by_side", lambda count, job, seconds: rates[count]
    )
    found = input_bench._worker_speedups(PythonDocsConfig(), 4, input_bench.GRID)

    assert found == ((1, 1.0), (2, 2.0), (4, 3.8))


def test_a_process_that_reads_examples_and_dies_says_why(monkeypatch: pytest.MonkeyPatch):
    """In a sentence: here with what it was asked as its last words."""
    monkeypatch.setattr(probes, "_Throughput", lambda data: sys.exit)

    with pytest.raises(ScalejaxError, match=r"^A process that reads examples ended: 0\.0\.$"):
        probes.side_by_side(1, PythonDocsConfig(), 1.0)


def test_the_process_that_trains_takes_batches_one_at_a_time():
    """At 1 us a byte it needs 50 ms for a sample, however many workers there are."""
    slow = CopyRates(seconds_per_batch=0.0, seconds_per_byte=1e-6)
    pace = input_pace(replace(with_rates(hand_over=slow), workers=4), 100)

    assert pace.limit == "process"
    assert pace.samples_per_second == pytest.approx(1 / 50e-3)


def test_storage_gives_bytes_that_memory_does_not_hold():
    """Files of 16 GiB, of which 4 stay in memory: 0.75 of 2 MB a sample at 100 MB/s."""
    files = replace(
        FILES,
        rows=8 * 1024,
        stored_bytes=16.0 * GIB,
        read_bytes=16.0 * GIB,
        memory_bytes=4 * GIB,
        rows_together=0,
    )
    starved = replace(with_workers(HOST, 4), work=replace(WORK, files=files))
    pace = input_pace(starved, 100)

    assert pace.limit == "storage"
    assert pace.storage_bytes_per_sample == pytest.approx(0.75 * 2 * 2**20)
    assert pace.samples_per_second == pytest.approx(100e6 / (0.75 * 2 * 2**20))


def test_hosts_share_a_store():
    """400 MB/s for all of 8 hosts are 50 for each, less than its own link gives."""
    shared = replace(with_rates(shared_storage_bytes_per_second=400e6), is_first_epoch=True)

    one, eight = (input_pace(shared, 100, nodes=nodes) for nodes in (1, 8))
    assert one.limit == "workers"
    assert eight.samples_per_second <= 50e6 / 20_000
    assert eight.samples_per_second < one.samples_per_second


def test_first_epoch_reads_and_later_ones_remember():
    """Each of two workers decodes every row group once: 10 of 1 ms, and 40 MB at 1 ns."""
    first = input_pace(replace(HOST, is_first_epoch=True), 100)
    later = input_pace(HOST, 100)

    assert dict(first.stages)["read"] == pytest.approx(2 * (10 * 1e-3 + 0.04) / 1000)
    assert "read" not in dict(later.stages)
    assert first.storage_bytes_per_sample == 20_000
    assert later.storage_bytes_per_sample == 0


def test_rows_of_any_group_read_most_groups_again():
    """10 groups, 100 rows at once, nothing kept: all of them for each 100 of 1,000 rows."""
    tiny = replace(FILES, memory_bytes=1.0)

    assert tiny.reads(0, is_first_epoch=False) == pytest.approx(10, rel=1e-3)
    assert replace(tiny, is_cached=True).reads(0, is_first_epoch=False) == 0
    assert replace(tiny, rows_together=0).reads(0, is_first_epoch=False) == 1


def test_workers_share_the_memory_for_row_groups():
    """40 MB stay in the half of 160 MB for it and the one that trains, and not of three and one."""
    shared = replace(FILES, memory_bytes=160e6)

    assert shared.reads(1, is_first_epoch=False) == 0
    assert shared.reads(3, is_first_epoch=False) > 1


def test_each_host_decodes_all_row_groups_for_its_part_of_the_batches():
    """10 groups of 100 rows: each of 4 hosts takes 25 rows of each, and decodes each once: 10 of
    1 ms, and 40 MB at 1 ns, and 20 MB of storage, for 250 samples. With 1,000 hosts, a group for
    the one sample of each (0.95, as rows are counted as if drawn one by one)."""
    mixed = replace(FILES, memory_bytes=1.0, rows_together=0)
    first = replace(HOST, workers=0, is_first_epoch=True, work=replace(WORK, files=mixed))
    four, many = (input_pace(first, 64, nodes=nodes) for nodes in (4, 1000))

    assert dict(four.stages)["read"] == pytest.approx((10 * 1e-3 + 0.04) / 250)
    assert four.storage_bytes_per_sample == pytest.approx(20_000_000 / 250)
    assert dict(many.stages)["read"] == pytest.approx(1e-3 + 0.004, rel=0.06)
    kept = replace(first, work=WORK)
    assert dict(input_pace(kept, 64, nodes=4).stages)["read"] == pytest.approx(0.05 / 250)


def test_hosts_that_take_the_same_samples_read_as_one():
    """Of 4 nodes over which a tensor axis goes, each takes every sample, and reads for it once."""
    first = replace(HOST, workers=0, is_first_epoch=True)
    pace = input_pace(first, 64, nodes=4, batch_parts=1)

    assert dict(pace.stages)["read"] == pytest.approx(0.05 / 1000)
    programs = [replace(data_parallel(16), mesh_axes=((axis, 16),)) for axis in ("tensor", "data")]
    assert [batch_parts(each, cluster_of()) for each in programs] == [1, 2]


def test_hosts_with_shards_of_their_own_decode_no_group_twice():
    """2 hosts, one or two of 4 shards each: 5 of the 10 groups for 500 samples; 8 hosts share."""
    sharded = replace(FILES, memory_bytes=1.0, rows_together=0, shards=4)

    assert sharded.reads(0, is_first_epoch=False) == pytest.approx(1)
    assert sharded.reads(0, is_first_epoch=False, hosts=2) == pytest.approx(1 / 2)
    assert sharded.reads(0, is_first_epoch=False, hosts=8) == pytest.approx(1 / 4)


def test_rows_taken_at_once_are_decoded_as_often_on_every_host():
    """All 10 groups for each 100 own rows; so for the 250 rows of one of 4 hosts 2.5 times."""
    tiny = replace(FILES, memory_bytes=1.0)

    assert tiny.reads(0, is_first_epoch=False, hosts=4) == pytest.approx(2.5, rel=1e-3)


# --- properties ------------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64), st.floats(1, 4096))
def test_more_workers_are_never_slower(workers: int, more: int, samples: float):
    """Of a data set that stays in memory, up to the cores and beyond."""
    few = input_pace(with_workers(HOST, workers), samples)
    many = input_pace(with_workers(HOST, workers + more), samples)

    assert many.samples_per_second >= few.samples_per_second * (1 - 1e-9)
    if workers >= RATES.cores:
        assert many.samples_per_second == pytest.approx(few.samples_per_second)


@given(st.integers(0, 16), st.floats(0, 1e6), st.floats(0, 1e6), st.booleans())
def test_no_host_is_faster_than_any_of_its_stages(
    workers: int, encoded: float, pixels: float, is_first: bool
):
    """Cores give at most as many seconds as there are cores; threads are timed together."""
    work = replace(WORK, encoded_bytes=encoded, full_pixels=pixels)
    host = HostInput(rates=RATES, work=work, workers=workers, is_first_epoch=is_first)
    pace = input_pace(host, 256)

    total = math.fsum(seconds for _, seconds in pace.stages)
    assert pace.samples_per_second * total <= (RATES.cores if workers else 1) * (1 + 1e-9)
    if pace.storage_bytes_per_sample:
        assert pace.samples_per_second * pace.storage_bytes_per_sample <= 100e6 * (1 + 1e-9)


@given(st.floats(1, 4000))
def test_workers_that_are_needed_keep_up_and_one_fewer_does_not(wanted: float):
    """The fewest."""
    workers = workers_needed(HOST, partial(input_pace, samples_per_node=100), wanted)

    assert workers is not None
    assert input_pace(with_workers(HOST, workers), 100).samples_per_second >= wanted
    if workers > 1:
        fewer = input_pace(with_workers(HOST, workers - 1), 100)
        assert fewer.samples_per_second < wanted


def test_no_number_of_workers_beats_the_cores():
    """3.6 cores' worth at 760 us a sample are 4,737 a second."""
    assert workers_needed(HOST, partial(input_pace, samples_per_node=100), 4800) is None


# --- in predictions --------------------------------------------------------------------------


def test_a_step_waits_for_its_input_and_says_why():
    """800 samples for the 8 devices of a node, by two workers: 0.3 s, whatever the step takes."""
    found = predict(data_parallel(8), cluster_of(), site=Site(input=HOST))
    note = next(note for note in found.notes if note.startswith("input-bound"))

    pace = input_pace(HOST, 800)
    assert found.step_seconds == pytest.approx(800 / pace.samples_per_second)
    assert found.samples_per_second == pytest.approx(pace.samples_per_second)
    assert "its 2 workers do no more, most of all decoding" in note
    assert "no number of workers keeps up: with 4, it makes 4.79 k" in note
    alone = predict(data_parallel(8), cluster_of()).step_seconds
    assert dict(found.waterfall)["input"] == pytest.approx(found.step_seconds - alone)


def test_nothing_is_waited_for_or_said_where_input_is_fast():
    """Images of nothing."""
    fast = TakeRates(seconds_per_sample=1e-9)
    host = with_rates(read=None, take=fast, hand_over=FREE)
    host = replace(host, work=replace(WORK, files=None))
    found = predict(data_parallel(8), cluster_of(), site=Site(input=host))

    assert dict(found.waterfall)["input"] == 0
    assert not any("input" in note for note in found.notes)


@pytest.mark.parametrize(
    ("workers", "is_first_epoch", "taken"),
    [
        (2, False, 8 * 875e-6 / 4),  # of workers: 700 us to decode and 175 to take, on four cores
        (0, False, 8 * 300e-6),  # threads keep all of them busy
        (0, True, 8 * (300e-6 + 50e-6 / 4)),  # and one thread reads 10 groups: 10 ms, 40 MB: 40 ms
    ],
)
def test_input_on_the_cores_of_the_step_makes_it_longer(workers, is_first_epoch, taken):
    """Of devices that are the CPU, whatever it is called: what the input computes is beside the
    step, and said; other devices wait for none of it."""
    site = Site(input=replace(HOST, workers=workers, is_first_epoch=is_first_epoch))
    step, program = 1.0, replace(data_parallel(8), global_batch=8)
    on_cpu = cluster_of(
        link=Link(kind="host", bytes_per_second=100e9),
        library=replace(cluster_of().library, runs_buffers_one_by_one=True),
    )

    assert step_terms(program, on_cpu, site, step).input_seconds == pytest.approx(taken)
    assert step_terms(program, cluster_of(), site, step).input_seconds == 0
    assert input_notes(program, cluster_of(), site, step) == ()
    (note,) = input_notes(program, on_cpu, site, step)
    assert f"whose cores make the input too: it takes {format_seconds(taken)} of a step" in note


def test_rates_say_that_they_leave_augmentation_out():
    """A run that changes its images is told so."""
    site = Site(input=replace(HOST, is_augmented=True))

    (note,) = input_notes(replace(data_parallel(8), global_batch=8), cluster_of(), site, 1.0)

    assert "leave out the run's augmentation" in note


def test_what_is_given_by_hand_comes_first():
    """`conditions.input_samples_per_second` says 10**9, and so nothing is waited for."""
    conditions = RunConditions(input_samples_per_second=1e9)
    site = Site(input=HOST, conditions=conditions)
    found = predict(data_parallel(8), cluster_of(), site=site)

    assert dict(found.waterfall)["input"] == 0
    assert not any("input-bound" in note for note in found.notes)


def test_twice_the_workers_are_bought_where_they_are_the_limit():
    """2 workers of 4 cores: 4 give 3.6 / 751 us in place of 2 / 700 us."""
    best, *others = improvements(data_parallel(8), cluster_of(), Site(input=HOST))
    gains = {each.name: each.speedup for each in (best, *others)}

    assert gains["workers"] == pytest.approx((3.6 / 751.25e-6) / (2 / 700e-6))
    assert gains["cores"] >= gains["workers"]
    assert gains["storage"] == pytest.approx(1.0)
    assert gains["links"] == pytest.approx(1.0)


# --- the file --------------------------------------------------------------------------------


def test_rates_survive_their_file(tmp_path: Path):
    """Written as TOML, read again."""
    save_toml(RATES, tmp_path / "input.toml")

    assert build(InputRates, load_toml(tmp_path / "input.toml"), where="input") == RATES


@pytest.mark.parametrize(
    ("measured", "asked", "holds"),
    [
        # (name, shape, columns), None for encoded images
        (None, None, True),
        (("parquet", (3,), ("a", "b", "c")), ("parquet", (3,), ("a", "b", "c")), True),
        (("image_folder", (64, 64, 3), ()), ("image_folder", (64, 64, 3), ()), True),
        (("python_docs", (128,), ()), None, False),
        (("parquet", (3,), ("a", "b", "c")), None, False),  # tables for images
        (None, ("parquet", (3,), ("a", "b", "c")), False),
        (None, ("tokens", (1024,), ()), False),  # images for tokens
        (("tokens", (128,), ()), ("tokens", (1024,), ()), False),
        (("image_folder", (64, 64, 3), ()), ("image_folder", (1024, 1024, 3), ()), False),
        (("parquet", (2,), ("a", "b")), ("parquet", (2,), ("a", "when")), False),
    ],
)
def test_rates_hold_for_images_or_for_the_very_data_that_was_measured(
    measured: tuple | None, asked: tuple | None, *, holds: bool
):
    """What one example of a text takes says nothing of one of a table, nor of a longer one."""
    names = ("data", "input_shape", "columns")
    rates, work = RATES, WORK
    if measured is not None:
        rates = replace(RATES, is_of_images=False, **dict(zip(names, measured, strict=True)))
    if asked is not None:
        work = SampleWork(batch_bytes=8192.0, **dict(zip(names, asked, strict=True)))

    if holds:
        HostInput(rates=rates, work=work, workers=0)
    else:
        with pytest.raises(ConfigError, match="scalejax data bench"):
            HostInput(rates=rates, work=work, workers=0)


def test_rates_of_rows_for_images_are_refused_by_the_field_that_says_so():
    """Not by the data set's name, which is right."""
    rates = replace(RATES, is_of_images=False)
    with pytest.raises(ConfigError, match=r"input\.is_of_images=False is refused: .* images"):
        HostInput(rates=rates, work=WORK, workers=0)


@pytest.fixture(scope="module")
def text_rates() -> InputRates:
    """What is measured of the texts that come with Python, by processes of their own."""
    return input_bench.bench(PythonDocsConfig(tokens=32), input_bench.Grid(repeats=1, seconds=0.02))


@pytest.mark.slow
def test_what_was_measured_is_kept_with_the_rates(text_rates: InputRates):
    """A run of another length of text is refused, by what `sample_work` says of it."""
    with pytest.raises(ConfigError, match=r"input\.data='python_docs of 32' .* python_docs of 64;"):
        HostInput(rates=text_rates, work=sample_work(PythonDocsConfig(tokens=64)), workers=0)


@pytest.mark.parametrize("speedups", [(), ((2, 1.0),), ((1, 1.0), (1, 1.0)), ((1, 2.0),)])
def test_speedups_begin_with_one_and_rise(speedups: tuple):
    """Anything else is no table of speedups."""
    with pytest.raises(ConfigError, match="rising count"):
        with_rates(worker_speedups=speedups)


def test_fit_finds_what_times_were_made_of():
    """Times of nine kinds of images, by rates that are known."""
    from scalejax.measure.input.bench import fit_take

    generator = np.random.default_rng(0)
    works = [
        replace(
            WORK,
            encoded_bytes=float(generator.uniform(1e3, 1e5)),
            full_pixels=float(full),
            reduced_pixels=float(reduced),
            resized_pixels=float(generator.uniform(1e3, 1e5)),
        )
        for full, reduced in ((1e4, 0), (1e5, 0), (2e5, 0), (3e5, 0), (0, 1e4), (0, 5e4), (0, 2e4))
    ]
    host = [HostInput(rates=RATES, work=each, workers=1) for each in works]
    seconds = np.array([dict(input_pace(each, 100).stages)["take"] for each in host])

    found = fit_take(works, seconds)
    assert found.seconds_per_full_pixel == pytest.approx(5e-9)
    assert found.seconds_per_reduced_pixel == pytest.approx(4e-9)
    assert found.seconds_per_encoded_byte == pytest.approx(10e-9)


# --- what is measured ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photographs() -> list[bytes]:
    """JPEG of 200 x 160, of smooth noise."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(8):
        coarse = Image.fromarray(generator.integers(0, 255, (20, 25, 3), np.uint8).astype(np.uint8))
        written = io.BytesIO()
        coarse.resize((200, 160)).save(written, "JPEG", quality=80)
        found.append(written.getvalue())
    return found


def parquet_of(path: Path, size: int) -> ParquetConfig:
    """The data set in one file."""
    return ParquetConfig(train=str(path), test=str(path), image_size=size, classes=1)


@pytest.mark.parametrize(
    ("size", "full", "reduced", "resized"),
    [
        (100, 200 * 160, 0, 100**2),  # a half would be 100 x 80, less than twice the size
        (40, 0, 100 * 80, 40**2),  # decoded at a half: 80 is twice the size
        (20, 0, 50 * 40, 20**2),  # at a quarter
        (10, 0, 25 * 20, 10**2),  # at an eighth
    ],
)
def test_work_counts_the_pixels_that_are_decoded(
    tmp_path: Path, photographs: list[bytes], size: int, full: int, reduced: int, resized: int
):
    """By hand, of JPEG that are all alike."""
    write_sized(photographs, 1.0, tmp_path / "images.parquet")
    work = sample_work(parquet_of(tmp_path / "images.parquet", size))

    assert (work.full_pixels, work.reduced_pixels, work.resized_pixels) == (full, reduced, resized)
    assert work.encoded_bytes == np.mean([len(each) for each in photographs])
    assert work.batch_bytes == 3 * size**2 + 4
    assert work.files is not None
    assert (work.files.rows, work.files.row_groups) == (8, 1)
    assert work.files.reads(0, is_first_epoch=False) == 0


def test_images_of_another_size_are_encoded_as_finely(photographs: list[bytes]):
    """The tables of a JPEG stay, and so do, about, the bytes of a pixel."""
    half = sized(photographs[0], 0.5)

    with Image.open(io.BytesIO(photographs[0])) as before, Image.open(io.BytesIO(half)) as after:
        assert after.size == (100, 80)
        assert after.format == "JPEG"
        assert isinstance(before, JpegImageFile)
        assert isinstance(after, JpegImageFile)
        assert after.quantization == before.quantization


@pytest.mark.parametrize(
    ("cold", "warm", "waiting"),
    [
        # (seconds, of the processor): a URL, which no page cache holds
        ((0.15, 0.05), (0.15, 0.05), 0.1),
        ((0.25, 0.05), (0.05, 0.05), 0.2),  # a disk
        ((0.1, 0.3), (0.1, 0.3), None),  # three threads side by side
        ((0.2, 0.3), (0.1, 0.3), 0.1),  # and a disk
    ],
)
def test_waiting_for_a_store_is_no_work_of_the_processor(
    tmp_path: Path,
    photographs: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    cold: tuple[float, float],
    warm: tuple[float, float],
    waiting: float | None,
):
    """One row group, by clocks of our own: its bytes over the time that is waited for them; and
    what the processor of a worker needs, which has one thread."""
    path = tmp_path / "images.parquet"
    write_sized(photographs, 1.0, path)
    now, following = [0.0, 0.0], iter([cold, warm, warm])

    def read(*group: object) -> None:
        now[:] = (before + more for before, more in zip(now, next(following), strict=True))

    clocks = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[1])
    monkeypatch.setattr(probes, "read_columns", read)
    monkeypatch.setattr(probes, "time", clocks)
    rates = input_bench._read_rates(parquet_of(path, 64), input_bench.Grid(repeats=1))

    assert rates.seconds_per_row_group == pytest.approx(warm[1])
    assert rates.seconds_per_byte == pytest.approx(0, abs=1e-12)
    gives = rates.storage_bytes_per_second
    assert gives == (waiting and pytest.approx(path.stat().st_size / waiting, rel=0.01))


@pytest.mark.slow
def test_what_is_measured_is_what_predictions_read(tmp_path: Path, photographs: list[bytes]):
    """How far off they are is another matter: `experiments/input_model`."""
    from scalejax.measure.input.bench import Grid, bench, stage_count

    write_sized(photographs, 1.0, tmp_path / "images.parquet")
    data = parquet_of(tmp_path / "images.parquet", 64)
    grid = Grid(images=8, source_factors=(1.0, 0.5), size_factors=(1.0,), repeats=1, seconds=0.05)
    stages: list[Progress] = []
    rates = bench(data, grid, stages.append)
    save_toml(rates, tmp_path / "input.toml")
    run = tmp_path / "run.toml"
    run.write_text(
        f"""
data = {{ name = "parquet", train = "{data.train}", test = "{data.test}", image_size = 64 }}
model = {{ name = "mlp", hidden = [8] }}
batch = {{ global_batch = 4 }}
optimizer = {{ name = "sgd" }}
schedule = {{ base_learning_rate = 0.1 }}
train = {{ epochs = 2 }}
input = {{ workers = 1 }}
"""
    )
    given = host_input(tmp_path / "input.toml", load_config(run))

    assert len(stages) == stage_count(data, grid)
    assert given.rates == rates
    assert (given.workers, given.is_first_epoch) == (1, False)
    assert rates.read is not None
    assert math.fsum(asdict(rates.take).values()) > 0
    assert rates.worker_speedups[0] == (1, 1.0)
    assert 0 < input_pace(given, 64).samples_per_second < math.inf


@pytest.mark.slow
def test_a_text_is_measured_as_a_whole(text_rates: InputRates):
    """Its examples have neither bytes nor pixels of their own."""
    data, rates = PythonDocsConfig(tokens=32), text_rates

    assert rates.read is None
    assert not rates.is_of_images
    assert rates.take.seconds_per_sample > 0
    assert rates.take.seconds_per_encoded_byte == 0
    pace = input_pace(HostInput(rates=rates, work=sample_work(data), workers=1), 64)
    assert pace.samples_per_second > 0


def test_a_missing_or_damaged_file_is_named(tmp_path: Path):
    """With what is wrong in it."""
    config = load_config(Path("scalejax/config/examples/fashion_gradual_warmup.toml"))
    path = tmp_path / "input.toml"
    with pytest.raises(ConfigError, match=r"input\.toml"):
        host_input(path, config)
    path.write_text('data = "parquet"\n')
    with pytest.raises(ConfigError, match=r"input\.toml: input\.cores is missing"):
        host_input(path, config)
