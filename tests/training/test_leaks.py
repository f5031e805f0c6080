"""No example that is held out for validation, or tested on, is ever trained on: on any layout, by
any process, after a resume at any step, with a batch that grows."""

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from scalejax.api import train
from scalejax.config.run import RunConfig, with_fields
from scalejax.core.serialization import build
from scalejax.data.facts import resolve
from scalejax.data.loader.loader import rows_held
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.training.compile import RunPrograms
from scalejax.training.features import open_examples
from scalejax.training.mesh import build_mesh
from scalejax.training.record import RunRecord
from scalejax.training.reporter import Silent
from scalejax.training.step import batch_shapes

loop_module = importlib.import_module("scalejax.training.compile")

TRAIN, TEST = 100, 12


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Rows of numbers that say which they are: 80 to train on, 20 to choose by, 12 to test on."""
    folder = tmp_path_factory.mktemp("data")
    for part, numbers in (("train", np.arange(TRAIN)), ("test", 1000 + np.arange(TEST))):
        np.save(folder / f"x_{part}.npy", np.stack([numbers, numbers], axis=1).astype(np.float64))
        np.save(folder / f"y_{part}.npy", numbers % 3)
    return build(
        RunConfig,
        {
            "model": {"name": "mlp", "hidden": [8]},
            "data": {
                "name": "numpy",
                "train": str(folder),
                "test": str(folder),
                "validation_fraction": 0.2,
            },
            "batch": {"global_batch": 16},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.01},
            "train": {"epochs": 3, "log_every_steps": 1, "checkpoint_every_steps": 3},
        },
    )


def numbers_in(inputs) -> list[int]:
    """Which rows they are, of the file: the mean and deviation are those of all of them."""
    mean, deviation = (TRAIN - 1) / 2, np.arange(TRAIN).std()
    return np.rint(np.asarray(inputs)[:, 0] * deviation + mean).astype(int).tolist()


def part_of(run, part) -> set[int]:
    """Which rows are in a part of the data."""
    source = open_examples(run, part, Silent())
    return set(numbers_in(source.take(np.arange(len(source)))["inputs"]))


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"layout.data": 8},
    "fsdp": {"layout.data": 2, "layout.fsdp": 4},
    "tensor": {"layout.data": 4, "layout.tensor": 2},
    "accumulation": {"layout.data": 2, "batch.microbatches": 4},
    "growing": {"layout.data": 4, "batch.ramp_epochs": [1, 2], "batch.ramp_factor": 2},
    "padded": {"layout.data": 4, "batch.global_batch": 24, "input.remainder": "pad"},
    "workers": {"layout.data": 4, "input.workers": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_trains_on_what_is_held_out_wherever_it_is_resumed(config, layout):
    """The batches of every step, resumed at each (with input workers at two), of which each of
    four processes reads its rows: nothing but training examples, and all of them in an epoch."""
    run = resolve(with_fields(config, LAYOUTS[layout]))
    mesh = build_mesh(run.layout)
    source, held_out = open_examples(run, "train", Silent()), part_of(run, "validation")
    assert len(held_out) == 20
    expected = set(range(TRAIN)) - held_out
    ends = [*(phase.first_step for phase in run.phases[1:]), run.total_steps]
    processes = np.array_split(np.array(jax.devices()[: mesh.size]), min(4, mesh.size))
    begins = (0, 7) if layout == "workers" else range(run.total_steps)

    for begin in begins:
        seen: list[int] = []
        for phase, end in zip(run.phases, ends, strict=True):
            shapes = batch_shapes(replace(run, split=phase.split), mesh)
            batches = RunPrograms.training_batches(
                cast("Any", None),
                run,
                [source],
                [Skipped()],
                step=cast("Any", SimpleNamespace(batch=shapes)),
                phase=phase,
                start_step=max(begin, phase.first_step),
                stop_step=end,
            )
            for batch in batches if begin < end else ():
                seen += numbers_in(batch["inputs"])
            batches.close()
        assert not set(seen) & held_out
        assert set(seen) <= expected
        if begin == 0:
            assert set(seen[: run.samples_per_epoch]) == expected
            held = [rows_held(batch_shapes(run, mesh)["inputs"], set(each)) for each in processes]
            first = [{seen[place] for place in rows} for rows in held]
            assert set().union(*first) == set(seen[: run.split.global_batch])


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


def test_a_run_killed_and_resumed_looks_at_test_data_once_at_its_end(config, tmp_path, monkeypatch):
    """It goes on with another layout. What the programs are fed is told apart by what it is: first
    training and validation examples by turns, and last the test examples, once."""
    fed: list[tuple[str, set[int]]] = []

    def told(name):
        made = getattr(loop_module, name)

        def batches_of(*words, **named):
            batches = made(*words, **named)
            put, seen = batches._put, set()
            fed.append((name, seen))

            def noted(local):
                seen.update(numbers_in(local["inputs"]))
                return put(local)

            batches._put = noted
            return batches

        monkeypatch.setattr(loop_module, name, batches_of)

    told("training_batches")
    told("evaluation_batches")
    stops = with_fields(
        config,
        {
            "layout.data": 4,
            "train.early_stopping": {"monitor": "validation_accuracy", "patience": 50},
        },
    )
    folder = tmp_path / "run"

    with pytest.raises(Killed):
        train(stops, folder, reporter=KillsAt(7), predicts=False)
    there = with_fields(stops, {"layout.data": 2, "layout.fsdp": 2})
    record = train(there, folder, resume=True, reporter=Silent(), predicts=False)

    held_out = part_of(resolve(stops), "validation")
    for name, seen in fed[:-1]:
        if name == "training_batches":
            assert seen <= set(range(TRAIN)) - held_out
        else:  # rows that pad the last batch are those of its first example
            assert seen == held_out
    assert fed[-1] == ("evaluation_batches", set(1000 + np.arange(TEST)))
    assert sum(min(seen, default=0) >= 1000 for _, seen in fed) == 1
    (tested,) = record.evaluations
    accuracies = [each.validation_accuracy for each in record.validations]
    assert [each.step for each in record.validations] == [5, 10, 15]
    chosen = record.validations[accuracies.index(max(accuracies))].step
    assert (tested.step, tested.chosen_step) == (15, chosen)
    assert tested.chosen_by == "validation_accuracy"
    assert record.measurements[-2] == tested
    assert RunRecord.load(folder).tested == tested
