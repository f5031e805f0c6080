"""The life of a batch: each stage's time is in its row, and settings change what the table says."""

import pkgutil
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from parquet_cases import random_images, write_images
from test_datasets import shapes_of
from toy_data import Pausing

from scalejax.config.data import ParquetConfig
from scalejax.config.input import AugmentationConfig, InputConfig
from scalejax.data.datasets import open_source
from scalejax.data.loader.loader import training_batches
from scalejax.data.stage_clock import STAGES, reading, timed
from scalejax.measure.input.probes import on_first_device
from scalejax.training.logger import input_measurement
from scalejax.training.record import InputMeasurement
from scalejax.training.sample_life import life_of, other_settings, period_seconds

PAUSE = 0.1
MEASURED = InputMeasurement(
    step=20,
    epoch=1.0,
    batches=20,
    workers=0,
    cores=4,
    shares_cores=False,
    storage_seconds=0.050,
    decode_seconds=0.020,
    augment_seconds=0.010,
    hand_over_seconds=0.0,
    processor_seconds=0.032,
    copy_seconds=0.001,
    step_seconds=0.030,
    wait_seconds=0.050,
    elapsed_seconds=2.0,
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Images in nine row groups."""
    path = tmp_path_factory.mktemp("photos") / "photos.parquet"
    write_images(path, random_images(180), [0] * 180, rows=20)
    return ParquetConfig(train=str(path), test=str(path), image_size=8)


def slowed(function):
    """`function` after a pause."""

    def slowly(*args: Any, **kwargs: Any):
        time.sleep(PAUSE)
        return function(*args, **kwargs)

    return slowly


def lived(source, shapes, *, workers=0, step_seconds=0.0, count=4):
    """Life of the batches of `source`, beside steps in which nothing happens."""
    begin = 0.0
    how, warm = InputConfig(workers=workers, read_ahead_batches=2), 4 + 4 * workers
    batches = training_batches(source, shapes, seed=0, start_step=0, stop_step=10**6, how=how)
    with closing(batches):
        for made in range(warm + count):
            if made == warm:
                batches.taken_seconds()
                begin = time.perf_counter()
            next(batches)
            time.sleep(step_seconds)
        seconds = time.perf_counter() - begin
        return input_measurement(
            batches.taken_seconds(), workers=workers, shares_cores=False, of_updates_seconds=seconds
        )


def paused_first(tables):
    """`RowGroups.tables` with a pause before its first."""

    def slowly(*args: Any):
        for index, table in enumerate(tables(*args)):
            if not index:
                time.sleep(PAUSE)
            yield table

    return slowly


@pytest.mark.slow_except("storage", "decode", "augment", "copy")
@pytest.mark.parametrize(
    ("where", "stage", "workers"),
    [
        ("scalejax.data.readers.row_group_cache.RowGroups.tables", "storage", 0),
        ("scalejax.data.readers.parquet.decoded_all", "decode", 0),
        ("scalejax.data.transforms.augmentation.Changes.finished", "augment", 0),
        ("jax.make_array_from_process_local_data", "copy to device", 0),
        ("scalejax.data.loader.worker_pool.array_at", "hand over", 1),
    ],
    ids=("storage", "decode", "augment", "copy", "handed"),
)
def test_a_slowed_stage_grows_in_its_own_row(where, stage, workers, photos, monkeypatch):
    """By what it was slowed, and the others by less than half of that; slow with a worker, which
    starts a process."""
    source = open_source(photos, "train", seed=0, augmentation=AugmentationConfig(flip=True))
    shapes = shapes_of(photos, 4)

    before = life_of(lived(source, shapes, workers=workers))
    slowly = paused_first if stage == "storage" else slowed
    monkeypatch.setattr(where, slowly(pkgutil.resolve_name(where)))
    after = life_of(lived(source, shapes, workers=workers))

    grown = {
        now.stage: (now.measured_seconds or 0.0) - (earlier.measured_seconds or 0.0)
        for earlier, now in zip(before, after, strict=True)
        if now.place != "devices"
    }
    assert grown.pop(stage) > 0.9 * PAUSE
    assert all(each < PAUSE / 2 for each in grown.values())


@pytest.mark.slow
def test_workers_change_what_the_table_said_they_would():
    """Slow, for it starts two workers. From a thread, which reads for 80 ms a batch, to them: half
    the time from one update to the next, within 15 %."""
    source = Pausing(0.080)
    shapes = on_first_device(source.take(np.arange(1)), 4)

    alone = lived(source, shapes, step_seconds=0.010, count=6)
    said = period_seconds(alone, workers=2)
    there = lived(source, shapes, workers=2, step_seconds=0.010, count=8)

    now = period_seconds(there)
    assert now < 0.6 * period_seconds(alone)
    assert said == pytest.approx(now, rel=0.15)


def test_settings_by_hand():
    """80 ms to make a batch for a step of 30 ms: of workers, who have one thread for 32 ms of work,
    two make one each 41 ms, and with data in memory threads do in 30. On a CPU, five eighths of
    the 32 ms move beside the step, on four cores."""
    assert period_seconds(MEASURED) == pytest.approx(0.080)
    assert period_seconds(MEASURED, workers=2) == pytest.approx(0.041)
    assert period_seconds(MEASURED, is_cached=True) == pytest.approx(0.030)
    on_cpu = replace(MEASURED, shares_cores=True)
    assert period_seconds(on_cpu, workers=8) == pytest.approx(0.030 + 0.032 * 5 / 8 / 4)

    slow = replace(MEASURED, processor_seconds=0.200)
    assert period_seconds(slow, workers=8) == pytest.approx(0.050)

    settings = other_settings(replace(MEASURED, workers=1))
    assert [round(then / now, 3) for _, then, now in settings] == [0.5, 1.0, 0.375]


@pytest.mark.parametrize(
    ("changed", "hidden"),
    [
        ({}, "in part"),
        ({"wait_seconds": 0.0}, "yes"),
        ({"wait_seconds": 0.0, "shares_cores": True}, "takes the step's cores"),
        ({"shares_cores": True}, "takes the step's cores"),
    ],
)
def test_input_on_the_cores_of_the_step_is_not_said_to_be_hidden(changed, hidden):
    """Only devices of their own hide it."""
    stages = life_of(replace(MEASURED, **changed))

    assert {each.hidden for each in stages if each.place == "training process"} == {hidden}


def test_reading_several_batches_is_shared_among_them():
    """What is not storage or augmentation is decoding; nothing is left from before."""
    with timed("storage"):
        time.sleep(0.01)
    begin = time.perf_counter()
    with reading(2) as seconds:
        with timed("augment"):
            time.sleep(0.02)
        time.sleep(0.01)

    *stages, processor = seconds.tolist()
    found = dict(zip(STAGES, stages, strict=True))
    assert 0 < processor < 0.005  # it slept
    assert found["storage"] == found["hand over"] == 0
    assert found["augment"] >= 0.010
    assert found["decode"] >= 0.005
    assert 2 * sum(stages) <= time.perf_counter() - begin
