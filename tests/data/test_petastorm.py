"""The order of Petastorm's readers: that of its own code, and what a run makes of it."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_parquet_reading import seen

from scalejax.config.data import ParquetConfig, PetastormConfig, ReadingConfig
from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError
from scalejax.data.facts import read_facts, resolve
from scalejax.data.formats.petastorm import epoch_rows, shard_groups

ORDERS = [
    (7, None, 42, True, [[3, 2, 6, 4, 1, 5, 0]]),
    (7, None, 42, False, [[0, 1, 2, 3, 4, 5, 6]]),
    (7, 1, 42, True, [[2, 4, 5, 6, 3, 0, 1]]),
    (7, 1, 42, False, [[1, 3, 4, 2, 6, 0, 5]]),
    (7, 3, 42, True, [[0, 6, 3], [4, 1], [5, 2]]),
    (7, 3, 42, False, [[3, 6, 0], [1, 4], [2, 5]]),
    (7, 3, None, False, [[0, 3, 6], [1, 4], [2, 5]]),
    (11, 2, 1, True, [[4, 6, 10, 8, 2, 0], [9, 7, 5, 3, 1]]),
    (7, 2, 0, False, [[4, 2, 0, 6], [1, 5, 3]]),
]
"""Row groups, shards, seed, shuffle_row_groups, and the row groups that each reader of petastorm
0.13.1 gave in each of two epochs (`Reader._partition_row_groups` and `ConcurrentVentilator` of its
wheel, run with NumPy 2.4 and Python 3.11)."""


def order_of(shard_count=None, seed=None, shuffle=False):
    """As a run.toml names it."""
    return PetastormConfig(shard_count=shard_count, seed=seed, shuffle_row_groups=shuffle)


@pytest.mark.parametrize(("groups", "shards", "seed", "shuffle", "expected"), ORDERS)
def test_readers_get_the_row_groups_that_petastorm_gives_them(
    groups, shards, seed, shuffle, expected
):
    """Each its own, in the same order."""
    assert shard_groups(groups, order_of(shards, seed, shuffle)) == expected


def test_the_seed_changes_no_owner():
    """Row groups of 20 by their number, whatever the seed: 20 modulo 6."""
    for seed in range(1, 30):
        shards = shard_groups(20, order_of(6, seed, True))
        assert [sorted(shard) for shard in shards] == [list(range(n, 20, 6)) for n in range(6)]


def test_batches_are_what_endless_readers_give():
    """Shards of 8 and 4 rows, three of each a step: the second has come round when the first has
    not. A reader that repeats its rows for ever, written down as one, gives the same."""
    counts = np.array([5, 4, 3])  # rows 0-4, 5-8, 9-11
    order = order_of(2, 42, True)
    first, second = ([*range(0, 5), *range(9, 12)], [*range(5, 9)])
    if shard_groups(3, order)[0] == [2, 0]:
        first = [*range(9, 12), *range(0, 5)]
    readers = [itertools.cycle(first), itertools.cycle(second)]

    for epoch in range(5):
        rows = epoch_rows(counts, order, epoch=epoch, steps=2, global_batch=6)
        expected = [
            row for _ in range(2) for reader in readers for row in itertools.islice(reader, 3)
        ]
        assert rows.tolist() == expected


@pytest.fixture
def path(tmp_path):
    """1000 numbered rows in eleven row groups of at most 97."""
    table = pa.table(
        {"number": np.arange(1000), "distance": np.arange(1000), "delay": np.arange(1000.0)}
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=97)
    return tmp_path / "rows.parquet"


def test_steps_take_that_order_and_resume_in_it(path):
    """Of four readers, 64 rows a step: a row of the smallest part comes twice in an epoch."""
    order = order_of(4, 7, True)
    counts = np.diff([*range(0, 1000, 97), 1000])
    shards = [
        np.concatenate([np.arange(97 * n, 97 * n + counts[n]) for n in shard])
        for shard in shard_groups(11, order)
    ]
    places = np.arange(30 * 16).reshape(30, 16)
    expected = np.concatenate([rows[places % len(rows)] for rows in shards], axis=1)

    rows = seen(path, stop=30, petastorm=order)

    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(seen(path, start=17, stop=30, petastorm=order), expected[17:])
    assert len(shards[3]) == 2 * 97 < 15 * 16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shard_count": 12}, r"petastorm\.shard_count=12 .*data\.train has 11 row groups"),
        ({"shard_count": 0}, r"petastorm\.shard_count=0 is refused"),
        ({"seed": None}, r"petastorm\.seed=None is refused: without one, or with 0, Petastorm"),
        ({"seed": 0}, r"petastorm\.seed=0 is refused: without one, or with 0, Petastorm"),
        ({"seed": -1}, r"petastorm\.seed=-1 is refused: it must be from 0"),
    ],
)
def test_what_petastorm_does_not_repeat_is_refused(path, changed, message):
    """And readers without a row group of their own, as it does."""
    with pytest.raises(ConfigError, match=message):
        read_facts(config_of(path, lambda: PetastormConfig(**{"seed": 3, **changed})))


def config_of(path, petastorm, **changed):
    """The rows, half of them late."""
    columns = {"feature_columns": ("number",), "label_column": "delay", "label_above": 500.0}
    reading = ReadingConfig(petastorm=petastorm())
    parts = {"train": str(path), "test": str(path)}
    return ParquetConfig(**{**parts, **columns, "reading": reading, **changed})


def test_a_reader_whose_rows_are_all_filtered_out_is_refused(path):
    """Only the first two row groups are kept, and eight processes would wait for ever."""
    config = config_of(path, lambda: order_of(10), filters=(("number", "<", 150),))

    with pytest.raises(ConfigError, match=r"data\.filters=.* keep no row .* of process 2"):
        read_facts(config)


def test_batches_that_readers_do_not_share_are_refused(path, tmp_path):
    """Six readers of 64 rows; batches that grow; two orders at once."""
    run = (
        '[model]\nname = "mlp"\nhidden = [4]\n[optimizer]\nname = "sgd"\n'
        "[schedule]\nbase_learning_rate = 0.1\n[train]\nepochs = 3\n[batch]\nglobal_batch = 64\n"
        f'[data]\nname = "parquet"\ntrain = "{path}"\ntest = "{path}"\nlabel_column = "delay"\n'
        'feature_columns = ["number"]\nlabel_above = 500.0\n'
        "[data.reading.petastorm]\nshard_count = 6\nseed = 1\n"
    )
    (tmp_path / "run.toml").write_text(run)

    with pytest.raises(ConfigError, match=r"batch\.global_batch=64 .*nearest: 60 or 66"):
        resolve(load_config(tmp_path / "run.toml"), 2)
    ramp = {"data.reading.petastorm.shard_count": 4, "batch.ramp_epochs": [1]}
    with pytest.raises(ConfigError, match=r"batch\.ramp_epochs=.* an order for one batch"):
        resolve(load_config(tmp_path / "run.toml", ramp), 2)
    with pytest.raises(ConfigError, match=r"data\.reading\.shuffle='row_groups' is refused"):
        load_config(tmp_path / "run.toml", {"data.reading.shuffle": "row_groups"})
