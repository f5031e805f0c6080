"""A run goes on with other devices and processes: the same examples in every step, and losses.

Sessions of several processes are of real ones that meet each other; those of one process are in
this one. Each stops where a signal asks it to.
"""

import io
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from noting_worker import train_and_note

from scalejax.launch import Launch, launch
from scalejax.launch.places import Elastic
from scalejax.training.record import RunRecord, figures
from scalejax.training.signals import Interrupted

WORKER = Path(__file__).parents[1] / "support" / "noting_worker.py"
EXAMPLES, GLOBAL_BATCH, EPOCHS = 200, 24, 3
STEPS = EPOCHS * (EXAMPLES // GLOBAL_BATCH)
RUN = """
seed = 3
[model]
name = "mlp"
hidden = [16]
[data]
name = "numpy"
train = "{data}"
test = "{data}"
[batch]
global_batch = {batch}
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.003
warmup = "gradual"
warmup_from = "zero"
warmup_epochs = 2
decay = "cosine"
[train]
epochs = {epochs}
log_every_steps = 1
checkpoint_every_steps = 5
"""
INTERRUPTED = 128 + 15

pytestmark = pytest.mark.slow  # four processes that each import JAX, and six compilations


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """The file of a run on images whose first two bytes are their index."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (EXAMPLES, 4, 4, 1), np.uint8)
    indices = np.arange(EXAMPLES)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = indices // 256, indices % 256
    classes = rng.integers(0, 5, EXAMPLES)
    arrays = {"train": images, "test": images[:32]}
    for part, array in arrays.items():
        np.save(folder / f"x_{part}.npy", array)
        np.save(folder / f"y_{part}.npy", classes[: len(array)])
    path = folder / "run.toml"
    path.write_text(RUN.format(data=folder, batch=GLOBAL_BATCH, epochs=EPOCHS), encoding="utf-8")
    return path


def environment(devices):
    """Variables of the processes, each of so many devices."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in this process
        "PYTHONPATH": str(WORKER.parents[2]),
    }


def trained(run_file, folder, sessions):
    """Figures and examples by step of a run in `sessions`: processes of each, devices of each of
    these, fsdp, and the step after which to stop, 0 for
    none."""
    notes = folder / "notes"
    notes.mkdir(parents=True)
    for processes, devices, fsdp, stop_step in sessions:
        arguments = (run_file, folder / "run", notes, stop_step, fsdp)
        if processes == 1:
            with pytest.raises(Interrupted) if stop_step else nullcontext():
                train_and_note(*arguments, devices)
            continue
        said = io.StringIO()
        job = Launch(
            command=(sys.executable, str(WORKER), *map(str, arguments)),
            processes=processes,
            folder=folder / "processes",
            environment=environment(devices),
        )
        assert launch(job, said) == (INTERRUPTED if stop_step else 0), said.getvalue()
    return figures(folder / "run"), examples_by_step(notes)


def examples_by_step(notes, steps=STEPS):
    """Of each step the examples of the global batch, in the order of its rows, int [steps, batch];
    devices that hold the same rows must have been given the same."""
    given = np.full((steps, GLOBAL_BATCH), -1)
    for path in sorted(notes.iterdir()):
        for line in path.read_text().splitlines():
            step, rows, examples = json.loads(line)
            seen = given[step - 1, rows]
            assert np.all((seen == -1) | (seen == examples)), f"{path.name}, step {step}"
            given[step - 1, rows] = examples
    return given


@pytest.fixture(scope="module")
def uninterrupted(run_file, tmp_path_factory):
    """One process of one device, to which nothing happens."""
    return trained(run_file, tmp_path_factory.mktemp("whole"), [(1, 1, 1, 0)])


@pytest.mark.parametrize(
    "sessions",
    [
        pytest.param([(1, 4, 2, 11), (1, 8, 4, 0)], id="4 to 8 devices"),
        pytest.param([(2, 1, 1, 5), (1, 2, 2, 13), (2, 2, 1, 0)], id="2 to 1 to 2 processes"),
    ],
)
def test_a_run_goes_on_elsewhere_as_if_nothing_had_happened(
    run_file, uninterrupted, tmp_path, sessions
):
    """It stops within epochs. Only the order of the sums over devices may differ: float32
    rounding, 1e-5 after 24 updates of AdamW, whose rates warm up and decay throughout."""
    expected_figures, expected_examples = uninterrupted

    ours, examples = trained(run_file, tmp_path, sessions)

    np.testing.assert_array_equal(examples, expected_examples)
    for epoch in np.split(examples, EPOCHS):
        assert len(np.unique(epoch)) == epoch.size  # and each is there: none is -1
    assert examples.min() == 0
    assert [row[0] for row in ours] == [row[0] for row in expected_figures]
    values = (np.array([row[1:] for row in rows], float) for rows in (ours, expected_figures))
    np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)


@pytest.mark.alone
def test_an_elastic_run_takes_each_example_once_whoever_is_lost(run_file, tmp_path):
    """Two of four processes are killed, the coordinator first: what those that are left had trained
    is neither lost nor made twice (Horovod's issue 3143). The examples of each step, those made
    again included, are those of one process to which nothing happens, and the losses but for
    rounding: 1e-4 after 400 updates of AdamW. That nobody who is asked to go takes a step along
    (its issue 3399), is above: processes are asked there."""
    epochs = 50
    steps, said = epochs * (EXAMPLES // GLOBAL_BATCH), io.StringIO()
    text = run_file.read_text().replace(f"epochs = {EPOCHS}\n", f"epochs = {epochs}\n")
    file, notes = tmp_path / "run.toml", tmp_path / "notes"
    file.write_text(text.replace("checkpoint_every_steps = 5", "checkpoint_every_steps = 1000"))
    for folder in (notes, tmp_path / "alone"):
        folder.mkdir()
    job = Launch(
        command=(sys.executable, str(WORKER), *map(str, (file, tmp_path / "run", notes, 0, 1))),
        processes=4,
        elastic=Elastic(least=1, most=4, rejoin_seconds=600.0, copy_seconds=0.5),
        can_train=lambda count: count != 3,
        most_restarts=1,
        folder=tmp_path / "processes",
        environment=environment(1) | {"LOSS_STEP": "50"},
    )

    code = launch(job, said)
    train_and_note(file, tmp_path / "whole", tmp_path / "alone", 0, 1, 1)

    assert code == 0, said.getvalue()
    examples = examples_by_step(notes, steps)
    np.testing.assert_array_equal(examples, examples_by_step(tmp_path / "alone", steps))
    ours, alone = figures(tmp_path / "run"), figures(tmp_path / "whole")
    assert [row[0] for row in ours] == [row[0] for row in alone]
    losses, expected = (np.array([row[1] for row in rows], float) for rows in (ours, alone))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    (change,) = RunRecord.load(tmp_path / "run").processes
    assert (change.before, change.after) == (4, 2)
    assert 0 < change.repeated_steps < change.step + change.repeated_steps
