"""A batch that grows: which update has which samples and rate, and that nothing is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ramp_cases import TABLES

from scalejax.config.run import RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.hardware import NO_SITE, load_cluster
from scalejax.measure import own_prediction
from scalejax.training.compile import compile_run
from scalejax.training.evaluation import trained_weights
from scalejax.training.mesh import build_mesh
from scalejax.training.record import RunFolder, RunRecord
from scalejax.training.reporter import Silent
from scalejax.training.setup import schedule_of
from scalejax.training.step import build_step, init_state
from scalejax.training.train import train
from scalejax.xla import profile

CONFIG = build(
    RunConfig,
    {
        **TABLES,
        "seed": 3,
        "train": {"epochs": 5, "log_every_steps": 1, "checkpoint_every_steps": 2},
    },
)
BATCHES = [8] * 5 + [16] * 4 + [32] * 2
"""Of every update: five in the first epoch, two in each of the next two, then one."""


def test_phases_by_hand():
    """40 examples: 5 updates of 8 an epoch, from epoch 1 on 2 of 16, from epoch 3 on 1 of 32."""
    run = resolve(CONFIG, 1)

    assert [phase.first_step for phase in run.phases] == [0, 5, 9]
    assert [phase.steps_per_epoch for phase in run.phases] == [5, 2, 1]
    assert run.total_steps == len(BATCHES)
    assert [run.phase_of(step).split.global_batch for step in range(11)] == BATCHES
    assert [run.epoch_of(step) for step in (0, 4, 5, 6, 7, 9, 10, 11)] == [
        0,
        0.8,
        1,
        1.5,
        2,
        3,
        4,
        5,
    ]


def test_rates_count_samples():
    """Half way through the samples, a cosine is half way down, however few updates that took."""
    fields = {"schedule.decay": "cosine", "train.epochs": 6}
    run = resolve(with_fields(CONFIG, fields), 1)
    epochs = np.asarray([run.epoch_of(step) for step in range(run.total_steps)])

    found = schedule_of(run)(np.arange(run.total_steps))

    np.testing.assert_allclose(found, 0.05 * (1 + np.cos(np.pi * epochs / 6)), rtol=1e-4)


@pytest.mark.parametrize(("scaling", "grown"), [("linear", [2, 4]), ("root", [2**0.5, 2])])
def test_rates_grow_with_the_batch(scaling, grown):
    """From 8 to 16 and 32 samples at updates 5 and 9, where the schedule keeps its rate."""
    run = resolve(with_fields(CONFIG, {"batch.ramp_scaling": scaling}), 1)

    found = schedule_of(run)(np.arange(11))

    expected = [0.1] * 5 + [0.1 * grown[0]] * 4 + [0.1 * grown[1]] * 2
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_rates_change_at_the_update_that_begins_an_epoch():
    """A step decay at epochs 2 and 4 falls on updates 7 and 10, to the update."""
    fields = {"schedule.decay": "step", "schedule.decay_epochs": [2.0, 4.0]}
    run = resolve(with_fields(CONFIG, fields), 1)

    found = schedule_of(run)(np.arange(11))

    np.testing.assert_allclose(found, [0.1] * 7 + [0.01] * 3 + [0.001], rtol=1e-5)


def final_weights(folder) -> list[np.ndarray]:
    """The arrays that a run ended with."""
    tree = trained_weights(resolve(CONFIG, 2), folder)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree["params"])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(CONFIG, folder, device_count=2, reporter=Silent())
    return folder


def test_a_ramp_trains_what_runs_of_each_batch_would(whole):
    """The steps of three runs that do not grow, one after another, over the shuffled epochs."""
    source = open_source(CONFIG.data, "train", seed=3)
    order = [np.random.default_rng([3, epoch]).permutation(40) for epoch in range(5)]
    state, losses = None, []
    for batch, epochs in ((8, (0,)), (16, (1, 2)), (32, (3, 4))):
        level = with_fields(CONFIG, {"batch.global_batch": batch, "batch.ramp_epochs": []})
        run = resolve(level, 1)
        mesh = build_mesh(run.layout)
        step = build_step(run, mesh)
        state = init_state(run, mesh) if state is None else state
        for epoch in epochs:
            for at in range(0, 40 // batch * batch, batch):
                rows = source.take(order[epoch][at : at + batch])
                placed = {name: jnp.asarray(values) for name, values in rows.items()}
                state, metrics = step.function(state, placed)
                losses.append(float(metrics["loss"]))
    assert state is not None

    lines = RunRecord.load(whole).training
    assert [line.global_batch for line in lines] == BATCHES
    assert [line.loss for line in lines] == pytest.approx(losses, rel=1e-4)
    expected = jax.tree.leaves(state.params)
    for found, array in zip(final_weights(whole), expected, strict=True):
        np.testing.assert_allclose(found, np.asarray(array), rtol=1e-3, atol=1e-5)


class Told(Silent):
    """Keeps what is said."""

    def __init__(self):
        self.lines: list[str] = []

    def say(self, text):
        """Keep it."""
        self.lines.append(text)


def test_each_batch_of_a_ramp_is_predicted(tmp_path, monkeypatch):
    """From the step that is compiled for it; nothing is written that would stand beside a measured
    step of another batch."""
    run, told, files = resolve(CONFIG, 2), Told(), RunFolder(path=tmp_path / "run")
    files.path.mkdir()
    mesh = build_mesh(run.layout)
    here = load_cluster("dgx-h100"), NO_SITE
    monkeypatch.setattr(own_prediction, "calibrated_cluster", lambda _: here)

    own_prediction.predict_run(files, run, mesh, compile_run(run, mesh), told)

    of_phases = [line.split(":")[0] for line in told.lines[:3]]
    assert of_phases == [
        f"predicted from epoch {epoch}, {batch} samples"
        for epoch, batch in ((1, 8), (2, 16), (4, 32))
    ]
    assert "for the training steps alone" in told.lines[3]
    assert not files.prediction.exists()

    told.lines.clear()
    begin = run.phases[1].first_step
    own_prediction.predict_run(files, run, mesh, compile_run(run, mesh), told, begin)
    assert [line.split(":")[0] for line in told.lines[:2]] == of_phases[1:]
    assert f"for the {run.total_steps - begin} training steps left" in told.lines[2]


class Killed(Exception):
    """What happened to the run."""


class KillsAt(Silent):
    """Ends the run when an update is reported."""

    def __init__(self, step):
        self.step = step

    def measured(self, measurement):
        """Raise at the update."""
        if measurement.kind == "train" and measurement.step == self.step:
            raise Killed


@pytest.mark.slow_except("5")
@pytest.mark.parametrize("step", [3, 5, 8])
def test_a_run_that_is_killed_within_a_ramp_ends_with_the_same_bits(step, whole, tmp_path):
    """Before, at and after the growth of the batch; checkpoints are of every second update."""
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        train(CONFIG, folder, device_count=2, reporter=KillsAt(step))
    train(CONFIG, folder, device_count=2, reporter=Silent(), resume=True)

    ours, theirs = (
        [(line.step, line.loss, line.global_batch) for line in RunRecord.load(each).training]
        for each in (folder, whole)
    )
    assert ours == theirs
    for found, expected in zip(final_weights(folder), final_weights(whole), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_program_of_a_growing_batch_is_refused():
    """It would be of one batch, and the time of the run wrong."""
    with pytest.raises(ConfigError, match=r"batch\.ramp_epochs=\(1, 3\) is refused: this is"):
        profile(resolve(CONFIG, 8), load_cluster("dgx-h100"), cache=None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch.ramp_epochs": [3, 1]}, "epochs must be at least 1 and rise"),
        ({"batch.ramp_epochs": [0]}, "epochs must be at least 1 and rise"),
        ({"batch.ramp_epochs": [5]}, r"must be below train\.epochs=5"),
        (
            {"batch.ramp_epochs": [], "batch.ramp_scaling": "root"},
            r"batch\.ramp_scaling='root' is refused: the batch does not grow",
        ),
        ({"batch.ramp_factor": 1}, r"batch\.ramp_factor=1 is refused: it must be at least 2"),
        ({"batch.ramp_factor": 3}, r"batch\.global_batch=72 is refused: .* 40 training examples"),
        ({"averaging": {"name": "swa", "start_epoch": 1}}, "its steps are those of one batch"),
    ],
)
def test_impossible_ramps_are_refused(fields, said):
    """One sentence, which names the field."""
    with pytest.raises(ConfigError, match=said):
        resolve(with_fields(CONFIG, fields), 1)
