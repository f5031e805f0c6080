"""Tables in Parquet files: their numbers, their order, and what reading them takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from parquet_cases import encoded, random_images, write_images
from test_datasets import order_of

from scalejax.config.data import ParquetConfig, ReadingConfig
from scalejax.config.parallelism import Layout
from scalejax.config.run import load_config
from scalejax.core.bounded_memory import BoundedMemory
from scalejax.core.errors import ConfigError
from scalejax.data.datasets import open_source
from scalejax.data.facts import read_facts, resolve
from scalejax.data.loader.loader import training_batches
from scalejax.training.mesh import batch_sharding, build_mesh
from scalejax.training.train import train

FLIGHTS = Path(os.environ.get("VEGA_DATASETS", "node_modules/vega-datasets")) / "data"
"""Where `npm install vega-datasets@3.2.1` puts flights-3m.parquet."""
ROWS = 1000
POOL = pa.proxy_memory_pool(pa.system_memory_pool())
"""Knows how much was held at most; what is still held of it must not outlive it."""


@pytest.fixture
def table(tmp_path):
    """1000 rows in eleven groups: an integer, a float and a time, of which the class follows."""
    generator = np.random.default_rng(0)
    distance = generator.integers(0, 5000, ROWS)
    hours = generator.uniform(0, 24, ROWS)
    columns = {
        "distance": distance,
        "hours": hours,
        "date": pa.array((hours * 3600e6).astype(np.int64), pa.timestamp("us")),
        "delay": distance - 2500.0,
        "number": np.arange(ROWS),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=97)
    return tmp_path / "rows.parquet", columns


def config_of(path, **changed):
    """The table, to tell from distance and date whether the delay is above 15."""
    return ParquetConfig(
        **{
            "train": str(path),
            "test": str(path),
            "feature_columns": ("distance", "date"),
            "label_column": "delay",
            "label_above": 15.0,
            **changed,
        }
    )


def test_numbers_have_mean_0_and_deviation_1_and_classes_a_bound(table):
    """As NumPy makes them of the columns that were written."""
    path, columns = table
    indices = np.random.default_rng(1).permutation(ROWS)
    about = read_facts(config_of(path))

    rows = open_source(config_of(path), "train", seed=0).take(indices)

    expected = np.stack([columns["distance"], columns["hours"]], axis=1)
    expected = ((expected - expected.mean(axis=0)) / expected.std(axis=0))[indices]
    np.testing.assert_allclose(rows["inputs"], expected, atol=1e-5)
    np.testing.assert_array_equal(rows["targets"], columns["delay"][indices] > 15)
    assert rows["inputs"].dtype == np.float32
    assert (about.input_shape, about.classes, about.is_table) == ((2,), 2, True)


def test_what_is_no_number_is_named_by_file_and_row(table):
    """A null in row 150 of the file, the second row group."""
    path, columns = table
    distance = pa.array(columns["distance"], mask=np.arange(ROWS) == 150)
    pq.write_table(pa.table({**columns, "distance": distance}), path, row_group_size=97)
    source = open_source(config_of(path), "train", seed=0)

    with pytest.raises(ConfigError, match=r"rows\.parquet, row 150, column 'distance': nan is no"):
        source.take(np.arange(ROWS))
    kept = config_of(path, filters=(("distance", ">=", 0),))
    assert len(open_source(kept, "train", seed=0).take(np.arange(ROWS - 1))["targets"]) == ROWS - 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"feature_columns": ("distanc",)}, "did you mean 'distance'"),
        ({"label_above": None}, r"data\.label_column='delay' is refused: it is double"),
        ({"classes": 3}, r"data\.classes=3 is refused: data\.label_above makes two"),
        (
            {"reading": ReadingConfig(memory_bytes=1000)},
            r"data\.reading\.memory_bytes=1000 is refused: the largest row group .* takes 2328",
        ),
    ],
)
def test_what_cannot_work_is_refused(table, changed, message):
    """At the door, with what is accepted."""
    with pytest.raises(ConfigError, match=message):
        read_facts(config_of(table[0], **changed))


def seen(path, *, stop, start=0, **reading):
    """The numbers of the rows of each step of 64, from features that name them."""
    config = config_of(path, feature_columns=("number",), reading=ReadingConfig(**reading))
    sharding = batch_sharding(build_mesh(Layout(data=4)))
    shapes = {
        "inputs": _shape((64, 1), np.float32, sharding),
        "targets": _shape((64,), np.int32, sharding),
    }
    source = open_source(config, "train", seed=0)
    batches = training_batches(source, shapes, seed=3, start_step=start, stop_step=stop)
    deviation = np.arange(ROWS).std()
    rows = [np.asarray(batch["inputs"])[:, 0] * deviation + (ROWS - 1) / 2 for batch in batches]
    return np.round(rows).astype(int)


def _shape(shape, dtype, sharding):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


SMALL = 2 * 97 * 16
"""Bytes at which row groups of two columns are read again and again: one fits."""


@pytest.mark.parametrize(
    "reading",
    [{}, {"memory_bytes": SMALL}, {"shuffle": "row_groups", "window": 3}],
    ids=["kept", "read again", "row groups"],
)
def test_every_order_sees_each_row_once_an_epoch_and_resumes_anywhere(table, reading):
    """15 steps of 64 of 1000 rows: 960 different ones, in a new order in the next epoch."""
    whole = seen(table[0], stop=30, **reading)

    for epoch in (whole[:15], whole[15:]):
        assert len(np.unique(epoch)) == 960
    assert whole[:15].tolist() != whole[15:].tolist()
    for start in (1, 14, 17):
        np.testing.assert_array_equal(
            seen(table[0], start=start, stop=30, **reading), whole[start:]
        )


def test_how_much_memory_there_is_changes_no_order(table):
    """Rows taken together for many steps are those of each step; and of the plain shuffle."""
    plain = seen(table[0], stop=20)

    np.testing.assert_array_equal(seen(table[0], stop=20, memory_bytes=SMALL), plain)
    np.testing.assert_array_equal(order_of(ROWS, 64, seed=3, stop=20), plain)


def test_row_groups_are_mixed_a_window_at_a_time(table):
    """Steps within the first 3 groups of 97 rows see rows of no more than 3 groups, mixed."""
    groups = seen(table[0], stop=15, shuffle="row_groups", window=3) // 97

    first = groups.reshape(-1)[: 2 * 97]
    assert len(np.unique(first)) == 3
    assert (np.diff(first) != 0).sum() > 100


def test_a_run_learns_from_numbers(table, tmp_path):
    """An mlp tells the rows apart; a network for images refuses them."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "mlp"\nhidden = [16]\n[data]\nname = "parquet"\n'
        f'train = "{table[0]}"\ntest = "{table[0]}"\nfeature_columns = ["distance", "date"]\n'
        'label_column = "delay"\nlabel_above = 15.0\n[batch]\nglobal_batch = 40\n'
        '[optimizer]\nname = "sgd"\n[schedule]\nbase_learning_rate = 0.1\n[train]\nepochs = 4\n'
    )

    record = train(load_config(path), tmp_path / "run", device_count=2)

    assert record.evaluations[-1].test_accuracy is not None
    assert record.evaluations[-1].test_accuracy > 0.95
    with pytest.raises(ConfigError, match=r"but data\.name='parquet' holds rows of 2 numbers"):
        resolve(load_config(path, {"model": {"name": "cnn"}}), 2)


def test_memory_keeps_what_was_used_last_within_its_limit():
    """Of values of 4 bytes in 10 bytes two are kept; a larger one is not."""
    memory, loaded = BoundedMemory(10), []

    def value_of(key, size_bytes=4):
        def load():
            loaded.append(key)
            return key.upper(), size_bytes

        return memory.of(key, load)

    assert [value_of(key) for key in "abab"] == ["A", "B", "A", "B"]
    assert loaded == ["a", "b"]
    assert [value_of(key) for key in "cbac"] == ["C", "B", "A", "C"]
    assert loaded == ["a", "b", "c", "a", "c"]
    assert value_of("d", 11) == "D"
    assert memory.held_bytes == 8


def test_images_are_taken_together_too(tmp_path):
    """With memory for one row group in five the pixels are those of all in memory."""
    images = random_images(50)
    write_images(tmp_path / "images.parquet", images, np.arange(50), rows=10)
    config = ParquetConfig(
        train=str(tmp_path / "images.parquet"),
        test=str(tmp_path / "images.parquet"),
        image_size=8,
        classes=50,
        reading=ReadingConfig(memory_bytes=8000),
    )
    sharding = batch_sharding(build_mesh(Layout(data=2)))
    shapes = {
        "inputs": _shape((4, 8, 8, 3), np.uint8, sharding),
        "targets": _shape((4,), np.int32, sharding),
    }
    source = open_source(config, "train", seed=0)

    for batch in training_batches(source, shapes, seed=0, start_step=0, stop_step=20):
        np.testing.assert_array_equal(batch["inputs"], images[np.asarray(batch["targets"])])


def test_large_images_that_become_small_are_taken_in_the_memory_there_is(tmp_path):
    """Five times the memory encoded, a tenth of it decoded: Arrow holds no more than it may."""
    images = [encoded(image, "BMP") for image in random_images(400, 64)]
    path = str(tmp_path / "images.parquet")
    pq.write_table(
        pa.table({"image": pa.array(images, pa.binary()), "label": np.arange(400)}),
        path,
        row_group_size=10,
        use_dictionary=False,
    )
    limit, of_group = 2**20, 10 * len(images[0])
    config = ParquetConfig(
        train=path,
        test=path,
        image_size=8,
        classes=400,
        reading=ReadingConfig(memory_bytes=limit),
    )
    sharding = batch_sharding(build_mesh(Layout(data=2)))
    shapes = {
        "inputs": _shape((4, 8, 8, 3), np.uint8, sharding),
        "targets": _shape((4,), np.int32, sharding),
    }
    usual = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    try:
        source = open_source(config, "train", seed=0)
        taken = training_batches(source, shapes, seed=0, start_step=0, stop_step=100)
        seen = {int(label) for batch in taken for label in np.asarray(batch["targets"])}
    finally:
        pa.set_memory_pool(usual)

    assert seen == set(range(400))
    assert limit / 4 < POOL.max_memory() < limit + 2 * of_group


@pytest.mark.slow  # it reads five million rows, in an interpreter of its own
@pytest.mark.skipif(
    not (FLIGHTS / "flights-3m.parquet").is_file(),
    reason="the npm package vega-datasets@3.2.1 is not installed (VEGA_DATASETS names its folder)",
)
def test_three_million_rows_are_shuffled_in_bounded_memory(table, tmp_path):
    """One epoch, each row once, in any order, with memory for one row group in eleven; a resumed
    run does not read again what was read."""
    flights, memory_bytes = FLIGHTS / "flights-3m.parquet", 16 * 2**20
    config = {
        "name": "parquet",
        "train": str(flights),
        "test": str(flights),
        "feature_columns": ["distance", "date"],
        "label_column": "delay",
        "label_above": 15.0,
    }
    small = tmp_path / "small.parquet"
    pq.write_table(pq.read_table(flights).slice(0, 20_000), small, row_group_size=5000)
    warm_up = {**config, "train": str(small), "test": str(small)}
    config["reading"] = {"memory_bytes": memory_bytes}
    script = Path(__file__).parents[1] / "support" / "parquet_epoch.py"
    command = [sys.executable, str(script), json.dumps(warm_up), json.dumps(config)]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    found = json.loads(done.stdout)
    delays = pq.read_table(flights, columns=["delay"])["delay"]
    late = pc.call_function("sum", [pc.call_function("greater", [delays, pa.scalar(15)])]).as_py()
    last_rows = 3_000_000 % 8192  # left over until the next epoch: some of them late
    assert found["rows"] == 3_000_000 - last_rows
    assert late - last_rows <= found["ones"] <= late
    # of 72 MB that the columns take; a row group takes twice its size while it is read
    assert found["arrow_bytes"] <= memory_bytes + 2 * 272_730 * 24
    # and beside it the order, and what allocators hold on to, which differs from run to run
    assert found["grown_bytes"] <= memory_bytes + 8 * 3_000_000 + 96 * 2**20
    # it starts after two thirds, and would take as much of the time to read up to there
    assert found["resume_cpu_seconds"] < 0.5 * found["epoch_cpu_seconds"]
