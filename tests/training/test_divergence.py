"""A run that cannot learn any more is given up, with its cause; one that still learns is not."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.config.run import RunConfig, with_fields
from scalejax.config.training import DivergenceConfig
from scalejax.core.serialization import build
from scalejax.models import Network
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.record import EvaluationMeasurement, RunRecord, TrainMeasurement
from scalejax.training.reporter import Silent
from scalejax.training.stopping import Divergence, divergence_at_end
from scalejax.training.train import train

STEPS_PER_EPOCH = 8


class Dead(Network):
    """A layer whose units are below zero for every image, and one above it."""

    def __init__(self, dataset, *, compute_dtype, bn, rngs, bias=-100.0):
        numbers = int(np.prod(dataset.input_shape))
        fill = nnx.initializers.constant(bias)
        self.below = nnx.Linear(numbers, 8, rngs=rngs, bias_init=fill)
        self.above = nnx.Linear(8, dataset.classes, rngs=rngs)

    def __call__(self, inputs, *, is_training):
        """Logits."""
        return self.above(nnx.relu(self.below(inputs.reshape(len(inputs), -1))))


class Undecided(Network):
    """A layer that begins with all logits equal, as the last layer of many networks does."""

    def __init__(self, dataset, *, compute_dtype, bn, rngs):
        numbers = int(np.prod(dataset.input_shape))
        self.layer = nnx.Linear(
            numbers, dataset.classes, rngs=rngs, kernel_init=nnx.initializers.zeros_init()
        )

    def __call__(self, inputs, *, is_training):
        """Logits."""
        return self.layer(inputs.reshape(len(inputs), -1)).astype(jnp.float32)


CONFIG = build(
    RunConfig,
    {
        "model": {"name": "custom", "path": "test_divergence:Dead"},
        "data": {
            "name": "synthetic_images",
            "image_size": 4,
            "channels": 1,
            "classes": 4,
            "train_examples": 64,
            "test_examples": 21,
        },
        "batch": {"global_batch": 8},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.01},
        "train": {"epochs": 4, "log_every_steps": 4},
    },
)


def run(folder, fields: dict[str, Any], *, resume=False) -> RunRecord:
    """Train the small run with `fields` replaced, on two devices (test examples are padded)."""
    config = with_fields(CONFIG, fields)
    return train(config, folder, device_count=2, resume=resume, reporter=Silent())


def test_a_dead_network_ends_the_run_at_its_first_evaluation(tmp_path):
    """The record names the cause; the checkpoint is there, and its run goes on if it is told to."""
    record = run(tmp_path / "run", {})

    last = record.statuses[-1]
    assert (last.status, last.cause, last.step) == ("diverged", "dead", STEPS_PER_EPOCH)
    assert "all 21 test examples get the same output, test loss 1.3" in last.message
    assert record.evaluations[-1].is_constant

    again = run(tmp_path / "run", {}, resume=True)
    assert (again.status, again.statuses[-1].step) == ("diverged", STEPS_PER_EPOCH)

    on = run(tmp_path / "run", {"train.divergence.stops_dead": False}, resume=True)
    assert (on.status, on.statuses[-1].step) == ("completed", 4 * STEPS_PER_EPOCH)
    assert on.statuses[-1].cause is None


@pytest.mark.slow_except("fields0", "fields3")
@pytest.mark.parametrize(
    "fields",
    [
        {"model.path": "test_divergence:Undecided", "schedule.base_learning_rate": 1e-6},
        {"model.path": "test_divergence:Undecided", "schedule.base_learning_rate": 1e-6,
         "model.compute_dtype": "bfloat16", "train.epochs": 1},
        {"model": {"name": "mlp", "hidden": [8]}, "schedule.base_learning_rate": 1e-9},
        {"model.options": {"bias": 0.0}, "schedule.base_learning_rate": 1e-9},
    ],
)  # fmt: skip
def test_a_network_that_hardly_learns_is_no_dead_one(tmp_path, fields):
    """Random classes, a tiny rate: the loss is near that of guessing, and the run goes on."""
    record = run(tmp_path / "run", fields)

    assert record.status == "completed"
    assert not any(evaluation.is_constant for evaluation in record.evaluations)


def test_a_loss_that_is_not_finite_ends_the_run_and_no_checkpoint_holds_it(tmp_path):
    """What can be resumed from is from before."""
    fields: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [8]},
        "train.checkpoint_every_steps": 2,
        "schedule": {
            "base_learning_rate": 1e-3,
            "decay": "step",
            "decay_epochs": [1.5],
            "decay_factor": 9e8,
        },
    }

    record = run(tmp_path / "run", fields)

    last = record.statuses[-1]
    assert (last.status, last.cause) == ("diverged", "not_finite")
    assert "the training loss is not finite at step 18" in last.message  # before it is saved
    assert last.step <= 21
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=2) as checkpoints:
        assert max(checkpoints.steps) < 18


def test_a_run_that_is_told_not_to_stop_ends_at_its_end(tmp_path):
    """And is a diverged one all the same."""
    fields = {"model": {"name": "mlp", "hidden": [8]}, "schedule.base_learning_rate": 1e6}

    record = run(tmp_path / "run", {**fields, "train.divergence.stops_not_finite": False})

    last = record.statuses[-1]
    assert (last.status, last.cause, last.step) == ("diverged", "not_finite", 4 * STEPS_PER_EPOCH)


def test_a_gradient_that_explodes_ends_the_run(tmp_path):
    """Its norm is measured for that, and is in the record."""
    fields = {
        "model": {"name": "mlp", "hidden": [8]},
        "train.log_every_steps": 1,
        "train.divergence.max_gradient_growth": 100.0,
        "train.divergence.patience": 2,
        "schedule": {
            "base_learning_rate": 1e-3,
            "decay": "step",
            "decay_epochs": [1.5],
            "decay_factor": 1e5,
        },
    }

    record = run(tmp_path / "run", fields)

    last = record.statuses[-1]
    norms = [line.gradient_norm or 0.0 for line in record.training]
    assert (last.status, last.cause) == ("diverged", "exploding_gradient")
    assert last.step < 4 * STEPS_PER_EPOCH
    assert min(norms[-2:]) > 100 * np.median(norms[:-2])
    assert max(norms[:12]) < 10 * np.median(norms[:12])


# --- the rules ---


def line(step: int, loss: float | None = 1.0, *, scale=None, norm=None) -> TrainMeasurement:
    """A line of the record of training."""
    return TrainMeasurement(
        step=step,
        epoch=step / STEPS_PER_EPOCH,
        loss=loss,
        accuracy=0.5,
        learning_rate=0.1,
        step_seconds=0.1,
        samples_per_second=10.0,
        elapsed_seconds=0.1 * step,
        loss_scale=scale,
        gradient_norm=norm,
    )


def cause_of(lines, **fields):
    """What ends a run with these lines."""
    divergence = Divergence(DivergenceConfig(**fields))
    for each in lines:
        divergence.update(each)
    return divergence.cause


@pytest.mark.parametrize(
    ("scale", "cause"), [(None, "not_finite"), (2.0**16, None), (1.0, None), (0.5, "not_finite")]
)
def test_a_skipped_update_of_float16_ends_nothing_until_its_scale_is_small(scale, cause):
    """The first updates in float16 overflow by design."""
    assert cause_of([line(1, None, scale=scale)]) == cause


def test_one_large_gradient_is_not_enough():
    """It takes `patience` in a row, and some before to compare with."""
    level = [line(step, norm=1.0) for step in range(1, 6)]
    spike, level_again = line(6, norm=50.0), line(7, norm=1.0)
    rising = [line(8 + n, norm=50.0) for n in range(3)]

    assert cause_of([*level, spike, level_again], max_gradient_growth=20.0) is None
    assert cause_of([*level, *rising[:2]], max_gradient_growth=20.0) is None
    assert cause_of([*level, *rising], max_gradient_growth=20.0) == "exploding_gradient"
    assert cause_of([*level, *rising]) is None
    assert cause_of(rising, max_gradient_growth=20.0) is None


def test_a_norm_that_is_not_finite_is_a_large_one():
    """The loss of such an update still is a number; in float16 the update may not be made."""
    level = [line(step, norm=1.0) for step in range(1, 6)]
    beyond = [line(6 + n, norm=None) for n in range(3)]
    skipped = [line(6 + n, norm=None, scale=2.0**16) for n in range(3)]

    assert cause_of([*level, *beyond[:2]], max_gradient_growth=20.0) is None
    assert cause_of([*level, *beyond], max_gradient_growth=20.0) == "exploding_gradient"
    assert cause_of([*level, *skipped], max_gradient_growth=20.0) is None
    assert cause_of([*level, *beyond]) is None


def test_a_test_loss_that_is_not_finite_ends_nothing():
    """Running statistics may lag behind a network that trains well."""
    evaluation = EvaluationMeasurement(
        step=8,
        epoch=1.0,
        test_loss=None,
        test_accuracy=0.25,
        examples=21,
        seconds=0.1,
        elapsed_seconds=1.0,
    )

    assert cause_of([line(8), evaluation]) is None


@pytest.mark.parametrize(
    ("losses", "evaluation", "cause"),
    [
        ([2.3, 1.0, 0.5], 30.0, None),  # it has learned its training data by heart
        ([2.3, 2.4, 2.35], 2.3, None),  # it has learned nothing
        ([2.3, 1e35, 2.0], 30.0, None),  # it came back
        ([2.3, 1e3, 1e35], 1e30, "worse_than_guessing"),
        ([2.3, 4.61, 4.61], 4.61, "worse_than_guessing"),  # 2 ln(10) = 4.605
        ([2.3, 4.60, 4.60], 4.61, None),
        ([2.3, 4.61, 4.61], 4.60, None),  # batches, and what is added to their loss
        ([*[2.3] * 46, *[9.0] * 3, 0.3, 0.3], 5.0, "worse_than_guessing"),  # the last tenth
        ([*[2.3] * 18, 9.0, 0.3], 5.0, None),  # one of three
        ([30.0, 20.0, 15.0, 12.0], 11.0, None),  # it learns
        ([9.0], 9.0, None),  # too few batches to say
        ([2.3, 2.0], None, "not_finite"),
        ([2.3, None], 2.0, "not_finite"),
        ([], 2.0, None),
    ],
)
def test_one_rule_says_at_the_end_of_a_run_that_it_diverged(losses, evaluation, cause):
    """A loss that is a number can be as far from learning as one that is none; of ten classes a
    guess has ln(10) = 2.303."""
    last = {"train": losses[-1] if losses else 2.3, "evaluation": evaluation}

    found = divergence_at_end(last, losses, classes=10)

    assert (found and found[0]) == cause


def test_a_run_whose_loss_stays_far_above_a_guess_is_no_result(tmp_path):
    """It came to its end, with losses that are numbers; it keeps no weights, and says why."""
    config = with_fields(
        CONFIG,
        {
            "model": {"name": "mlp", "hidden": [8]},
            "schedule.base_learning_rate": 3.0,
            "train.divergence.stops_dead": False,
        },
    )

    record = train(config, tmp_path / "run", device_count=1, reporter=Silent())

    last = record.statuses[-1]
    assert (last.status, last.cause) == ("diverged", "worse_than_guessing")
    assert "its final training loss is" in last.message
    assert not record.folder.weights.exists()
