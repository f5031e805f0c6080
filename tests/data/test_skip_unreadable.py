"""Filled batches, and examples that cannot be read: none is lost silently, none counts twice."""

import io
import json
import re
import signal
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_cases import encoded, random_images, write_images
from test_datasets import SMALL_IMAGES, Numbers, shapes_of

from scalejax.api import train
from scalejax.cli.main import main
from scalejax.config.input import InputConfig
from scalejax.config.parallelism import Layout
from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import load
from scalejax.data.datasets import open_source
from scalejax.data.facts import resolve
from scalejax.data.loader.batching import take_batches
from scalejax.data.loader.loader import _are_counted_here, evaluation_batches, training_batches
from scalejax.data.loader.sampler import Rows
from scalejax.data.loader.skip_unreadable import ReadableExamples, Skipped
from scalejax.data.source import UnreadableExample
from scalejax.launch import Runner
from scalejax.simulator.predict import Prediction
from scalejax.sweep.vmapped import train_together
from scalejax.training.evaluation import trained_weights
from scalejax.training.record import RunFolder, RunRecord, figures
from scalejax.training.reporter import Silent
from scalejax.training.signals import Interrupted

SKIP = InputConfig(unreadable="skip")
PAD = InputConfig(remainder="pad")


class Damaged(Numbers):
    """Numbers, some of which cannot be read."""

    def __init__(self, length, damaged):
        super().__init__(length)
        self.damaged = set(damaged)
        self.taken = 0

    def take(self, indices, epoch=None):
        """The indices as pixels and targets; the first that is damaged is named."""
        self.taken += len(indices)
        for index in indices.tolist():
            if index in self.damaged:
                raise UnreadableExample(f"numbers.txt, row {index}: not a number.")
        rows = super().take(indices)
        return {**rows, "inputs": rows["inputs"] + indices.astype(np.uint8)[:, None, None, None]}


def weighted_shapes(layout=None, global_batch=8):
    """Shapes of a batch whose rows have weights."""
    shapes = shapes_of(SMALL_IMAGES, global_batch, layout)
    weights = jax.ShapeDtypeStruct((global_batch,), np.float32, sharding=shapes["inputs"].sharding)
    return {**shapes, "weights": weights}


def batches_of(source, how, *, start=0, stop, layout=None, skipped=None):
    """The batches of steps of 8, in NumPy."""
    batches = training_batches(
        source,
        weighted_shapes(layout),
        seed=0,
        start_step=start,
        stop_step=stop,
        how=how,
        skipped=skipped,
    )
    return [{name: np.asarray(values) for name, values in batch.items()} for batch in batches]


def seen(batches):
    """The examples that count, in order."""
    return [int(k) for b in batches for k in b["targets"][b["weights"] > 0]]


@pytest.mark.parametrize("length", [20, 24, 9, 8])
def test_a_filled_epoch_sees_every_example_once(length):
    """Of two epochs; the filling rows are examples too, other than those of their batch."""
    steps = -(-length // 8)
    batches = batches_of(Numbers(length), PAD, stop=2 * steps)

    for epoch in (batches[:steps], batches[steps:]):
        assert sorted(seen(epoch)) == list(range(length))
        assert len(set(epoch[-1]["targets"].tolist())) == 8
    dropping = batches_of(Numbers(length), InputConfig(), stop=length // 8)
    for ours, theirs in zip(batches, dropping, strict=False):
        np.testing.assert_array_equal(ours["targets"], theirs["targets"])


def test_a_filled_order_goes_on_anywhere():
    """From any step, over any layout."""
    whole = batches_of(Numbers(20), PAD, stop=6)
    for first in (1, 2, 3, 5):
        rest = batches_of(Numbers(20), PAD, start=first, stop=6, layout=Layout(data=2, fsdp=4))
        for ours, theirs in zip(rest, whole[first:], strict=True):
            for name, values in theirs.items():
                np.testing.assert_array_equal(ours[name], values)


@pytest.mark.parametrize("damaged", [[], [3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [19, 4, 11]])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_what_cannot_be_read_counts_for_nothing_and_is_counted(damaged, remainder):
    """Of 20 in two epochs: all others as without, the damaged ones named; in place of each its
    neighbour, or zeros."""
    how = InputConfig(unreadable="skip", remainder=remainder)
    skipped, steps = Skipped(), 6 if remainder == "pad" else 4
    batches = batches_of(Damaged(20, damaged), how, stop=steps, skipped=skipped)
    whole = batches_of(Numbers(20), InputConfig(remainder=remainder), stop=steps)

    expected = seen(whole)
    assert seen(batches) == [k for k in expected if k not in damaged]
    count, reasons = skipped.taken()
    assert count == sum(k in damaged for k in expected)
    named = [f"numbers.txt, row {k}: not a number." for k in expected if k in damaged]
    assert reasons == named[:5]
    assert skipped.taken() == (0, [])
    for batch, full in zip(batches, whole, strict=True):
        targets, lost = full["targets"], np.isin(full["targets"], damaged)
        beside = targets.reshape(-1, 2)[:, ::-1].ravel()
        filled = np.where(np.isin(beside, damaged), 0, beside)
        np.testing.assert_array_equal(batch["targets"], np.where(lost, filled, targets))
        np.testing.assert_array_equal(batch["inputs"][:, 0, 0, 0], batch["targets"])


def test_a_batch_of_which_nothing_can_be_read_is_blank():
    """It has its shape, and counts for nothing."""
    batches = batches_of(Damaged(16, range(16)), SKIP, stop=2)

    for batch in batches:
        assert not any(values.any() for values in batch.values())
        assert batch["inputs"].shape == (8, 4, 4, 1)


def test_what_is_known_to_be_damaged_is_searched_for_once():
    """The second epoch takes each example that can be read once, and no other."""
    source = Damaged(64, [5, 40])
    batches = training_batches(
        source, weighted_shapes(), seed=0, start_step=0, stop_step=16, how=SKIP
    )
    for _ in range(16):
        next(batches)

    first, second = 64 * 3, 62
    assert source.taken <= first + second


def test_test_examples_that_cannot_be_read_are_masked():
    """21 in batches of 8: 3 filling rows, 2 damaged ones; the filling rows repeat the first, which
    is damaged, and are not counted again."""
    skipped, shapes = Skipped(), shapes_of(SMALL_IMAGES, 8, has_mask=True)
    batches = list(evaluation_batches(Damaged(21, [0, 13]), shapes, SKIP, skipped))

    seen = [int(k) for b in batches for k in np.asarray(b["targets"])[np.asarray(b["mask"]) > 0]]
    assert seen == [k for k in range(21) if k not in (0, 13)]
    assert skipped.taken()[0] == 2


def test_by_default_it_ends_the_run():
    """The error of the source, from the thread that reads."""
    with pytest.raises(UnreadableExample, match=r"numbers\.txt, row 3"):
        batches_of(Damaged(16, [3]), PAD, stop=2)


def test_a_file_that_cannot_be_read_ends_the_run_all_the_same():
    """Only examples are skipped: what is wrong with a file is wrong with the run."""

    class Gone(Numbers):
        def take(self, indices, epoch=None):
            raise ConfigError("numbers.txt cannot be read: it is gone.")

    with pytest.raises(ConfigError, match="it is gone"):
        batches_of(Gone(16), SKIP, stop=2)


class _Device(NamedTuple):
    process_index: int
    place: int


def test_rows_that_several_processes_hold_are_counted_by_the_first(monkeypatch):
    """Along a tensor axis, say: process 1 has all 8, of which process 0 has the first four."""
    held = {0: [slice(0, 4)], 1: [slice(0, 4), slice(4, 8)], 2: [slice(4, 8)]}
    indices = {
        _Device(process, place): (rows,)
        for process, parts in held.items()
        for place, rows in enumerate(parts)
    }
    sharding = SimpleNamespace(devices_indices_map=lambda shape: indices)
    shape = SimpleNamespace(shape=(8, 2), sharding=sharding)

    counted = []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        rows = np.concatenate([np.arange(8)[part] for part in held[process]])
        counted.append(rows[_are_counted_here(cast(Any, shape), rows)].tolist())

    assert counted == [[0, 1, 2, 3], [4, 5, 6, 7], []]


# --- real files, real runs ---

IMAGES = random_images(20, seed=1)
LABELS = np.arange(20) % 5
BAD = {4: encoded(IMAGES[4], "JPEG")[:100], 9: b"no image"}
RUN = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "parquet"
train = "{folder}/train.parquet"
test = "{folder}/test.parquet"
image_size = 8
classes = 5
[batch]
global_batch = {batch}
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1
[train]
epochs = 3
log_every_steps = 1
[input]
{input}
"""


@pytest.fixture
def folder(tmp_path):
    """20 rows to train on, of which two hold no image and one a class that there is not; 10 to test
    on, of which one holds no image."""
    labels = LABELS.copy()
    labels[15] = 7
    content = [BAD.get(k, image) for k, image in enumerate(IMAGES)]
    write_images(tmp_path / "train.parquet", content, labels)
    write_images(tmp_path / "test.parquet", content[:9], LABELS[:9])
    return tmp_path


def trained(folder, name, *, batch=8, given='unreadable = "skip"', **options):
    """The record of a run, and its config."""
    path = folder / f"{name}.toml"
    path.write_text(RUN.format(folder=folder, batch=batch, input=given))
    config = load_config(path)
    options = {"device_count": 1, "predicts": False, "reporter": Silent(), **options}
    return train(config, folder / name, **options), config


def weights_of(record, config):
    """The parameters that a run ended with."""
    tree = trained_weights(resolve(config, 1), record.folder.path)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_run_on_damaged_files_is_the_run_on_what_can_be_read(folder):
    """All rows in one batch: 17 of 20 readable train what a file of those 17 trains; and 8 of 9
    are evaluated."""
    kept = [k for k in range(20) if k not in (4, 9, 15)]
    whole = folder / "whole"
    whole.mkdir()
    write_images(whole / "train.parquet", IMAGES[kept], LABELS[kept])
    write_images(
        whole / "test.parquet",
        IMAGES[[k for k in range(9) if k != 4]],
        LABELS[[0, 1, 2, 3, 0, 1, 2, 3]],
    )
    expected, of_whole = trained(whole, "run", batch=17, given="")

    record, config = trained(folder, "run", batch=20)

    for ours, theirs in zip(
        weights_of(record, config), weights_of(expected, of_whole), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for ours, theirs in zip(record.evaluations, expected.evaluations, strict=True):
        assert (ours.examples, ours.test_accuracy) == (8, pytest.approx(theirs.test_accuracy))
    np.testing.assert_allclose(
        np.array([m.loss for m in record.training]),
        np.array([m.loss for m in expected.training]),
        rtol=1e-5,
    )


def test_the_record_says_what_was_left_out(folder):
    """Three rows of each filled epoch of training and one of each evaluation, by file and row; in
    the summary and in the report too."""
    given = 'unreadable = "skip"\nremainder = "pad"'
    record, _ = trained(folder, "run", given=given, predicts=True)

    assert [(m.part, m.rows) for m in record.unreadable] == [("train", 3), ("test", 1)] * 3
    reasons = sorted(record.unreadable[0].reasons)
    for reason, row in zip(reasons, (15, 4, 9), strict=True):
        assert re.search(rf"train\.parquet, row {row}, column '(image|label)': ", reason)
    assert "test.parquet, row 4," in record.unreadable[1].reasons[0]
    assert "9 unreadable training examples skipped" in record.statuses[-1].message
    assert record.training[-1].step == 9
    assert load(Prediction, record.folder.prediction).steps_per_epoch == 3
    assert main(["report", str(folder / "run"), "--output", str(folder / "report.html")]) == 0
    page = (folder / "report.html").read_text()
    assert "train.parquet, row " in page
    assert "test.parquet, row 4" in page


def test_numbers_that_are_none_are_skipped(folder):
    """A row of a table whose feature is missing counts for nothing."""
    values = pa.array([1.0, None, 3.0, 4.0, 2.0, float("inf"), 0.0, 5.0])
    table = pa.table({"x": values, "label": [0, 1, 0, 1, 0, 1, 0, 1]})
    pq.write_table(table, folder / "table.parquet")
    path = folder / "run.toml"
    text = RUN.format(folder=folder, batch=8, input='unreadable = "skip"')
    text = re.sub(r'"\S+/(train|test)\.parquet"', json.dumps(str(folder / "table.parquet")), text)
    path.write_text(text.replace("image_size = 8", 'feature_columns = ["x"]').replace("= 5", "= 2"))

    record = train(load_config(path), folder / "run", device_count=1, predicts=False)

    assert [m.rows for m in record.unreadable] == [2] * 6
    assert (
        "table.parquet, row 1, column 'x': nan is not a finite" in record.unreadable[1].reasons[0]
    )


def test_by_default_a_run_ends_at_the_first_row_that_cannot_be_read(folder):
    """And goes on where it stopped, when it is told to skip such rows."""
    with pytest.raises(
        ConfigError, match=r"(train|test)\.parquet, row \d+, column '(image|label)'"
    ):
        trained(folder, "run", given="")

    record, _ = trained(folder, "run", resume=True)

    assert record.status == "completed"
    assert record.unreadable


def test_a_file_of_which_no_row_can_be_read_is_refused(folder):
    """There is nothing to evaluate."""
    write_images(folder / "test.parquet", [b"", b"no image"], LABELS[:2])

    with pytest.raises(ConfigError, match=r"no example of the test part can be read"):
        trained(folder, "run")


@pytest.mark.parametrize("hosts", [2, 5])
def test_rows_do_not_depend_on_the_number_of_hosts(folder, hosts):
    """What each of several hosts takes of a batch is that part of what one takes: the rows that
    are lost too, which BatchNorm and mixup see."""
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder, batch=20, input='unreadable = "skip"'))
    source = open_source(load_config(path).data, "train", seed=0)
    blank = {"inputs": np.zeros((8, 8, 3), np.uint8), "targets": np.zeros((), np.int32)}
    reader = ReadableExamples(source, blank)
    batch = Rows(indices=np.arange(20), epoch=0, beside={"weights": np.ones(20, np.float32)})

    (whole,) = take_batches(reader, [batch])
    parts = [take_batches(reader, [batch.of(rows)])[0] for rows in np.split(np.arange(20), hosts)]

    assert whole["lost"][[4, 9, 15]].tolist() == [4, 9, 15]
    np.testing.assert_array_equal(whole["inputs"][[4, 9, 15]], whole["inputs"][[5, 8, 14]])
    for name, values in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)


class _StopsAt(Silent):
    """Asks the run to stop once a step is measured, as Ctrl-C does."""

    def __init__(self, step):
        self.step = step

    def measured(self, measurement):
        """Raise the signal."""
        if measurement.kind == "train" and measurement.step == self.step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow  # trains three times
def test_an_interrupted_run_counts_what_an_uninterrupted_one_does(folder):
    """Stopped within an epoch, the first or a later one: the same losses and weights to the last
    bit, the same rows."""
    given = 'unreadable = "skip"\nremainder = "pad"'
    whole, config = trained(folder, "whole", given=given)

    for step in (1, 5):
        name = f"run{step}"
        with pytest.raises(Interrupted):
            trained(folder, name, given=given, reporter=_StopsAt(step))
        assert RunRecord.load(folder / name).status == "interrupted"
        record, _ = trained(folder, name, given=given, resume=True)

        assert figures(folder / name) == figures(folder / "whole")
        for ours, theirs in zip(weights_of(record, config), weights_of(whole, config), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for part in ("train", "test"):
            counts = [sum(m.rows for m in r.unreadable if m.part == part) for r in (record, whole)]
            assert counts[0] == counts[1]
        assert "9 unreadable training examples skipped" in record.statuses[-1].message


@pytest.mark.slow  # two processes import JAX, and compile
def test_two_processes_say_together_what_one_says(folder):
    """Each finds what is wrong with its own rows, and every row is counted once."""
    given = 'unreadable = "skip"\nremainder = "pad"'
    alone, config = trained(folder, "alone", given=given, device_count=4)

    def together(config, folder):
        from scalejax.api import train

        train(config, folder, predicts=False)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as in this process
        Runner(-2, cpu_devices=2, out=said).run(together, config=config, folder=folder / "run")

    record = RunRecord.load(folder / "run")
    for ours, theirs in zip(record.unreadable, alone.unreadable, strict=True):
        assert (ours.step, ours.part, ours.rows) == (theirs.step, theirs.part, theirs.rows)
        assert sorted(ours.reasons) == sorted(theirs.reasons)
    np.testing.assert_allclose(
        figures(folder / "run"), figures(folder / "alone"), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_runs_in_one_program_skip_and_fill_as_alone(folder):
    """Two seeds, each with its own order: the records that they leave one by one."""
    path = folder / "run.toml"
    given = 'unreadable = "skip"\nremainder = "pad"'
    path.write_text(RUN.format(folder=folder, batch=8, input=given))
    runs = [resolve(load_config(path, {"seed": seed}), 1) for seed in (0, 1)]
    alone = [
        train(run.config, folder / f"alone{k}", device_count=1, reporter=Silent(), predicts=False)
        for k, run in enumerate(runs)
    ]
    folders = [RunFolder(path=folder / f"together{k}") for k in range(2)]

    train_together(runs, folders, folder / "states", Silent())

    for files, expected in zip(folders, alone, strict=True):
        record = RunRecord.load(files.path)
        np.testing.assert_allclose(figures(files.path), figures(expected.folder.path), rtol=1e-5)
        assert [(m.step, m.part, m.rows) for m in record.unreadable] == [
            (m.step, m.part, m.rows) for m in expected.unreadable
        ]


@pytest.mark.parametrize(
    "given", ['remainder = "pad"', 'unreadable = "skip"', 'unreadable = "ignore"']
)
def test_what_does_not_go_together_is_refused(folder, given):
    """The noise scale compares parts whose samples all count; and only two words are known."""
    path = folder / "run.toml"
    text = RUN.format(folder=folder, batch=8, input=given)
    path.write_text(text + "[train.noise_scale]\n")

    with pytest.raises(ConfigError, match=r"input\.(remainder|unreadable)"):
        load_config(path)


def test_steps_follow_what_becomes_of_the_last_rows(folder):
    """20 examples in batches of 8: 2 steps, or 3; 24 rows an epoch; a batch that grows likewise."""
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder, batch=8, input='remainder = "pad"'))
    fields = {"batch.ramp_epochs": [1], "batch.ramp_factor": 2}
    run, ramped = (resolve(load_config(path, changed), 1) for changed in ({}, fields))

    assert (run.steps_per_epoch, run.total_steps, run.samples_per_epoch) == (3, 9, 24)
    assert [phase.steps_per_epoch for phase in ramped.phases] == [3, 2]
    assert ramped.total_steps == 3 + 2 * 2
    assert run.is_weighted
    whole = resolve(load_config(path, {"batch.global_batch": 10}), 1)
    assert not whole.is_weighted  # no row is left over, and the step is that of "drop"
