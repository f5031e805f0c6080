"""Processes that make batches: the same bits as without them, and no trace of them afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from child_processes import children_of, is_running, wait_until
from parquet_cases import encoded, random_images, write_images
from test_datasets import CONFIGS, EMBEDDED, SMALL_IMAGES, Numbers, shapes_of

from scalejax.config.data import ParquetConfig, ReadingConfig
from scalejax.config.input import InputConfig
from scalejax.core.errors import ConfigError, ScalejaxError
from scalejax.data.datasets import for_process, open_source
from scalejax.data.loader.loader import training_batches
from scalejax.data.source import UnreadableExample

HERE = Path(__file__).parents[1]
IMAGES = 180


@pytest.fixture
def photos(tmp_path):
    """Images in nine row groups, the class of each its number."""
    path = tmp_path / "photos.parquet"
    write_images(path, random_images(IMAGES), list(range(IMAGES)), rows=20)
    return path


def photos_config(path, **reading):
    """The images as they are, 8 x 8."""
    return ParquetConfig(
        train=str(path), test=str(path), image_size=8, reading=ReadingConfig(**reading)
    )


def batches_of(config, workers, *, batch=8, start=0, stop=20, shapes=None):
    """Every array of the steps, from so many processes."""
    source = open_source(config, "train", seed=1)
    how = InputConfig(workers=workers)
    batches = training_batches(
        source,
        shapes or shapes_of(config, batch),
        seed=1,
        start_step=start,
        stop_step=stop,
        how=how,
    )
    made = [{name: np.asarray(values) for name, values in batch.items()} for batch in batches]
    assert len(made) == stop - start
    return made


def assert_same(some, others):
    """Bit by bit."""
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.slow_except("synthetic_images", "python_docs")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_batches_do_not_depend_on_the_number_of_processes(config):
    """For every data set, over an epoch's end, from the beginning and from a later step; one and
    three of them for one data set."""
    alone = batches_of(config, 0, stop=6)

    if config is CONFIGS[0]:
        assert_same(batches_of(config, 1, stop=6), alone)
        assert_same(batches_of(config, 3, stop=6), alone)
    assert_same(batches_of(config, 2, start=1, stop=6), alone[1:])


@pytest.mark.slow
def test_row_groups_shared_by_processes_give_the_same_batches(photos):
    """Where memory holds all of them, and where each process takes rows of several steps at once:
    images come out as they were written, whichever process read them."""
    whole = photos_config(photos)
    largest = max(group.bytes_of(whole.columns) for group in _groups(whole))
    # half of a third of it holds three row groups, and not all nine
    small = photos_config(photos, memory_bytes=3 * 6 * largest)
    assert for_process(open_source(small, "train", seed=1), 3).rows_together >= 2 * 4  # type: ignore[union-attr]
    alone = batches_of(whole, 0, batch=4, stop=50)

    assert_same(batches_of(whole, 2, batch=4, stop=50), alone)
    assert_same(batches_of(small, 2, batch=4, stop=50), alone)
    assert_same(batches_of(small, 2, batch=4, start=11, stop=50), alone[11:])
    images = random_images(IMAGES)
    for batch in alone:
        np.testing.assert_array_equal(batch["inputs"], images[batch["targets"]])


def _groups(config):
    return open_source(config, "train", seed=0)._files.groups  # type: ignore[attr-defined]


def test_memory_that_is_too_small_for_so_many_processes_is_refused(photos):
    """A row group does not fit into a fifth of what one process can do with; nor do batches."""
    config = photos_config(photos)
    largest = max(group.bytes_of(config.columns) for group in _groups(config))
    with pytest.raises(
        ConfigError, match=r"input\.workers=4 is refused: .* each of 5 processes .* at most 0"
    ):
        batches_of(photos_config(photos, memory_bytes=2 * largest), 4)

    batch_bytes = 16 * (4 * 4 + 4)
    how = InputConfig(workers=4, memory_bytes=5 * batch_bytes - 1)
    with pytest.raises(ConfigError, match=r"input\.workers=4 is refused: .* holds 4; at most 2"):
        training_batches(
            open_source(SMALL_IMAGES, "train", seed=0),
            shapes_of(SMALL_IMAGES, 16),
            seed=0,
            start_step=0,
            stop_step=4,
            how=how,
        )


def test_an_unreadable_example_is_the_same_refusal_from_a_process(photos):
    """Its kind, file and row, as without processes; no other text, no process left."""
    images = [encoded(image) for image in random_images(IMAGES)]
    images[33] = images[33][:100]
    write_images(photos, images, list(range(IMAGES)))
    said = []
    for workers in (0, 2):
        with pytest.raises(UnreadableExample, match=r"photos\.parquet, row 33, column") as caught:
            batches_of(photos_config(photos), workers)
        said.append(str(caught.value))

    assert said[0] == said[1]
    assert wait_until(lambda: not children_of())


def test_a_process_that_is_killed_ends_the_run_with_a_reason():
    """As when memory runs out: one sentence, at once, and the other processes end too."""
    source = open_source(EMBEDDED, "train", seed=0)
    batches = training_batches(
        source,
        shapes_of(EMBEDDED, 64),
        seed=0,
        start_step=0,
        stop_step=10**6,
        how=InputConfig(workers=2),
    )
    next(batches)
    victim, survivor = children_of()

    os.kill(victim, signal.SIGKILL)

    with pytest.raises(ScalejaxError, match=r"of input\.workers was killed, .* memory ran out"):
        for _ in batches:
            pass
    assert wait_until(lambda: not is_running(survivor))


class _NotThere(Numbers):
    """A source that only this process can make."""

    def __reduce__(self):
        return int, ("no number",)


def test_a_process_that_cannot_begin_is_not_a_matter_of_memory(capfd):
    """It says itself why; the run's error points there."""
    batches = training_batches(
        _NotThere(64),
        shapes_of(SMALL_IMAGES, 8),
        seed=0,
        start_step=0,
        stop_step=8,
        how=InputConfig(workers=1),
    )

    with pytest.raises(ScalejaxError, match=r"ended with code 1; its output is above\.$"):
        next(batches)
    assert "no number" in capfd.readouterr().err


def test_processes_end_with_the_batches_that_are_dropped():
    """No one has to close them."""
    source = open_source(SMALL_IMAGES, "train", seed=0)
    batches = training_batches(
        source,
        shapes_of(SMALL_IMAGES, 8),
        seed=0,
        start_step=0,
        stop_step=10**6,
        how=InputConfig(workers=2),
    )
    next(batches)
    assert len(children_of()) == 2

    del batches

    assert wait_until(lambda: not children_of())


def test_a_process_imports_no_jax():
    """It would take a second, and look for devices that are not its own."""
    code = "import sys, scalejax.data.loader.worker as _; print({'jax', 'grain'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


RUN = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 2000
test_examples = 30
[batch]
global_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.001
[train]
epochs = 1000
[input]
workers = 2
"""


@pytest.mark.slow_except("9")
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM],
)
def test_no_process_outlives_the_run(tmp_path, number):
    """Killed: they end by themselves. Ctrl-C and a scheduler's SIGTERM, which reach every process
    of the terminal or the job: the run ends as ever, and none of them says a word."""
    (tmp_path / "run.toml").write_text(RUN)
    process = subprocess.Popen(
        [sys.executable, HERE / "support" / "train_worker.py", "run.toml", "run", "new"],
        cwd=tmp_path,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in this process
            "PYTHONPATH": str(HERE.parent),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    measurements = tmp_path / "run" / "measurements.jsonl"
    assert wait_until(lambda: measurements.exists() and '"train"' in measurements.read_text(), 120)
    workers = children_of(process.pid)
    assert len(workers) == 2

    os.killpg(process.pid, number)
    if number == signal.SIGTERM:
        for worker in workers:
            os.kill(worker, number)

    _, said = process.communicate(timeout=240)
    assert wait_until(lambda: not any(map(is_running, workers)))
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert "interrupted: at step" in said
    assert "Traceback" not in said
    assert "Error" not in said
