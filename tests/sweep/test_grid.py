"""The grammar and the plan of a sweep, and what is made of its records."""

import dataclasses
import io
import json
import math
import re
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from scalejax.cli.main import main
from scalejax.config.model import ImageNetworkConfig
from scalejax.config.optimizer import OptimizerConfig, SgdConfig
from scalejax.config.run import load_config, resolve
from scalejax.core import serialization
from scalejax.core.errors import ConfigError, ScalejaxError
from scalejax.core.units import UNKNOWN
from scalejax.planning.convergence.sources import read_data
from scalejax.report import figures
from scalejax.report.html.charts import save_print
from scalejax.report.terminal import sweep as sweep_tables
from scalejax.sweep import (
    SweepFolder,
    parse_grammar,
    plan_sweep,
    read_rows,
    run_sweep,
    write_results,
)
from scalejax.sweep.intervals import Interval, paired_difference, t_interval
from scalejax.sweep.optuna import best_of, search
from scalejax.sweep.plan import begin_sweep, parse_target, written
from scalejax.sweep.results import ArmTable, arm_lines, arms, best_arm, result_table
from scalejax.sweep.worker import JobTrainer
from scalejax.training.record import (
    Evaluated,
    EvaluationMeasurement,
    MeasurementLog,
    RunFolder,
    Status,
    StatusChange,
    ValidationMeasurement,
)
from scalejax.training.run_folder import describe_run

RUN = """
[model]
name = "mlp"
hidden = [8]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 64
test_examples = 16
[batch]
global_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.01
[train]
epochs = 2
"""
HELD_OUT = RUN.replace("[batch]", "validation_fraction = 0.25\n[batch]")
"""The run with data to choose by."""


@pytest.fixture
def run_file(tmp_path):
    """A small run."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def expanded(variables=(), parameters=(), extensions=(), file=None):
    """What the grammar makes of these texts."""
    texts = [json.dumps(extension) for extension in extensions]
    return parse_grammar(parameters, variables, texts).expanded(file or {})


def test_variables_are_combined_over_parameters_the_last_changing_fastest():
    """By hand, as DLBS builds its plans."""
    runs = expanded(["a=[1,2]", 'b=["x","y"]'], ["c=3", "a=9"])

    assert runs == [
        {"c": 3, "a": 1, "b": "x"},
        {"c": 3, "a": 1, "b": "y"},
        {"c": 3, "a": 2, "b": "x"},
        {"c": 3, "a": 2, "b": "y"},
    ]


def test_extensions_override_and_fork_what_they_match_in_order():
    """The second one sees what the first one made; a run that does not match stays as it is."""
    runs = expanded(
        ["a=[1,2,3]"],
        extensions=[
            {"condition": {"a": [1, 2]}, "parameters": {"t": {"b": 5}}, "cases": [{}, {"c": 7}]},
            {"condition": {"c": 7, "a": 2}, "parameters": {"a": 20}},
        ],
    )

    assert runs == [
        {"a": 1, "t.b": 5},
        {"a": 1, "t.b": 5, "c": 7},
        {"a": 2, "t.b": 5},
        {"a": 20, "t.b": 5, "c": 7},
        {"a": 3},
    ]


@pytest.mark.parametrize(
    ("condition", "is_met"),
    [
        ({}, True),
        ({"name": "resnet50"}, True),
        ({"name": "resnet.*"}, True),
        ({"name": "res"}, False),  # the whole value
        ({"name": ["vgg16", "resnet50"]}, True),
        ({"n": 1}, True),
        ({"n": 1.0}, True),
        ({"n": True}, False),  # JSON's 1 is not its true
        ({"flag": True}, True),
        ({"absent": None}, False),
        ({"n": 1, "name": "vgg16"}, False),
    ],
)
def test_conditions(condition, is_met):
    """Fields of the file are seen too."""
    file = {"name": "resnet50", "n": 1, "flag": True}

    (run,) = expanded(extensions=[{"condition": condition, "parameters": {"x": 1}}], file=file)

    assert run == ({"x": 1} if is_met else {})


def test_templates_take_values_of_fields_and_of_the_environment(monkeypatch):
    """A template that is all of a text keeps its type; names may be made of other templates."""
    monkeypatch.setenv("SWEEP_WORD", "blue")
    parameters = [
        'whole="${n}"',
        'part="b${n}-${SWEEP_WORD}"',
        'nested="${${which}}"',
        'which="n"',
        'list=["${n}"]',
    ]

    (run,) = expanded(parameters=parameters, file={"n": 64})

    assert run["whole"] == 64
    assert run["part"] == "b64-blue"
    assert run["nested"] == 64
    assert run["list"] == [64]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"parameters": ['a="${b}"', 'b="${a}"']}, "a -> b -> a"),
        ({"parameters": ['a="${nowhere}"']}, "must name a field of the run"),
        ({"parameters": ["a=mlp"]}, "a text is written '\"mlp\"'"),
        ({"variables": ["a=[none,gradual]"]}, r"try '\[\"none\",\"gradual\"\]'"),
        ({"variables": ["a=0,1"]}, r"try '\[0,1\]'"),
        ({"parameters": ["a=NaN"]}, "NaN is not a JSON number"),
        ({"parameters": ["a"]}, "must be field=value"),
        ({"variables": ["a=3"]}, r"such as 'a=\[3\]'"),
        ({"variables": ["a=[]"]}, "must be a list of values"),
        ({"extensions": [{"conditions": {}}]}, "did you mean 'condition'"),
        ({"extensions": [{"condition": {}}]}, "parameters or cases"),
        ({"extensions": [{"cases": [1]}]}, "list of objects"),
        ({"extensions": [{"condition": {"a": "("}, "cases": [{}]}]}, "regular expression"),
    ],
)
def test_what_is_not_of_the_grammar_is_refused(texts, words):
    """By what is accepted."""
    with pytest.raises(ConfigError, match=words):
        expanded(**texts)


def test_runs_of_a_plan_are_checked_and_the_bad_one_is_named(run_file):
    """Before anything is trained or written."""
    grammar = parse_grammar([], ["seed=[0,1]", "batch.global_batch=[8,0]"], [])

    with pytest.raises(ConfigError, match=r"run 2 of 4 \(seed=0 global_batch=0\): batch.global"):
        plan_sweep(run_file, grammar)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-P", "train.epoch=3"], "train.epoch is not a field"),
        (["-E", '{"condition": {"sed": 1}, "cases": [{}]}'], "did you mean 'seed'"),
        (["-E", '{"condition": {"batch.global_batch": 7}, "cases": [{}]}'], "of the runs."),
        (
            ["-E", '{"condition": {"batch.microbatches": 2}, "cases": [{}]}'],
            "-P 'batch.microbatches=2' adds it",
        ),
        (["--target", "accuracy=1"], "did you mean 'test_accuracy'"),
        (["--processes", "0"], "at least 1"),
        (["--resume"], "holds no sweep to resume"),
    ],
)
def test_command_refuses_at_the_door(run_file, tmp_path, capsys, flags, words):
    """With the exit code of a refusal, and nothing left behind."""
    folder = tmp_path / "sweep"

    code = main(["sweep", str(run_file), "--folder", str(folder), *flags])

    assert code == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not folder.exists()


def test_runs_that_differ_in_seed_and_rates_share_a_program(run_file):
    """Another momentum is another program; a run that is there already is left out."""
    grammar = parse_grammar(
        [],
        ["optimizer.momentum=[0.5,0.9]", "schedule.base_learning_rate=[0.01,0.02]", "seed=[0,0]"],
        [],
    )

    plan = plan_sweep(run_file, grammar)

    assert len(plan.runs) == 4
    assert plan.repeated == 4
    assert sorted(plan.jobs) == [(0, 1), (2, 3)]
    assert plan.runs[3].varied == {
        "optimizer.momentum": 0.9,
        "schedule.base_learning_rate": 0.02,
    }
    assert len(plan_sweep(run_file, grammar, one_by_one=True).jobs) == 4


@pytest.mark.parametrize(
    ("model", "tables", "together"),
    [
        ("efficientnet_lite0", '[averaging]\nname = "swa"\nstart_epoch = 1', False),
        ("efficientnet_lite0", '[averaging]\nname = "ema"', True),
        ("mlp", '[averaging]\nname = "swa"\nstart_epoch = 1', True),
    ],
)
def test_statistics_that_are_taken_anew_are_of_one_run(run_file, model, tables, together):
    """Those of BatchNorm for an average, over the batches of a run's own data."""
    model = RUN.replace('"mlp"\nhidden = [8]', f'"{model}"')
    run_file.write_text(f"{model}\n{tables}\n", encoding="utf-8")

    plan = plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], []))

    assert len(plan.jobs) == (1 if together else 2)


def test_a_plan_keeps_numbers_that_are_not_finite(run_file, tmp_path):
    """It is what `--resume` compares with."""
    plan = plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], []))
    fields = plan.runs[0].fields | {"optimizer.clip": math.inf}
    first = dataclasses.replace(plan.runs[0], fields=fields)
    plan = dataclasses.replace(plan, runs=(first, *plan.runs[1:]))
    folder = SweepFolder(path=tmp_path / "sweep")

    begin_sweep(plan, folder, resume=False)

    assert written(folder) == (plan.text, plan.written)
    begin_sweep(plan, folder, resume=True)


@pytest.mark.parametrize(
    ("name", "shares"),
    [("vgg16", False), ("alexnet", False), ("xception", False), ("efficientnet_lite0", True)],
)
def test_image_networks_are_grouped_as_in_sweeps_that_are_kept(name, shares):
    """Otherwise they could not be resumed."""
    assert ImageNetworkConfig(name=name).shares_programs == shares


@pytest.mark.parametrize(
    "parameter",
    [
        'model={"name":"cnn"}',
        'optimizer={"name":"sophia"}',
        'train.early_stopping={"patience":3}',
        "layout.data=2",
    ],
)
def test_runs_with_turns_of_their_own_train_alone(run_file, parameter):
    """Convolutions, early stopping and several devices are not put in one program."""
    run_file.write_text(HELD_OUT)
    if parameter.startswith("model"):
        run_file.write_text(RUN.replace('name = "mlp"\nhidden = [8]', 'name = "cnn"'))
        parameter = "train.epochs=2"

    plan = plan_sweep(run_file, parse_grammar([parameter], ["seed=[0,1]"], []))

    assert plan.jobs == ((0,), (1,))


TOLD_APART = [
    (
        ['optimizer=[{"name":"sgd"},{"name":"lamb"}]'],
        [{"optimizer.name": "sgd"}, {"optimizer.name": "lamb"}],
    ),
    (
        ['averaging=[null,{"name":"ema"},{"name":"ema","decay":0.9}]'],
        [
            {"averaging.name": None, "averaging.decay": None},
            {"averaging.name": "ema", "averaging.decay": 0.999},
            {"averaging.name": "ema", "averaging.decay": 0.9},
        ],
    ),
    (
        ['model=[{"name":"mlp","hidden":[8]},{"name":"mlp","hidden":[16]}]'],
        [{"model.hidden": [8]}, {"model.hidden": [16]}],
    ),
    (  # a field of a table and the table
        ['optimizer=[{"name":"sgd"},{"name":"lamb"}]', "optimizer.weight_decay=[0.1,0.2]"],
        [
            {"optimizer.name": name, "optimizer.weight_decay": decay}
            for name in ("sgd", "lamb")
            for decay in (0.1, 0.2)
        ],
    ),
]


@pytest.mark.parametrize(("variables", "varied"), TOLD_APART)
def test_runs_that_differ_in_a_table_are_told_apart(run_file, tmp_path, variables, varied):
    """They are arms of their own, with columns of their own, and no seeds of one."""
    import pyarrow.parquet

    run_file.write_text(RUN.replace('[optimizer]\nname = "sgd"\n', ""))
    parameters = [] if "optimizer" in variables[0] else ['optimizer.name="sgd"']
    plan = plan_sweep(run_file, parse_grammar(parameters, [*variables, "seed=[0,1]"], []))
    folder = SweepFolder(path=tmp_path / "sweep")
    for index in range(len(plan.runs)):
        record(folder.run(index), [0.5])

    rows = read_rows(plan, folder)
    write_results(plan, folder, rows)

    assert [arm.varied for arm in arms(rows)] == varied
    assert [len(arm.rows) for arm in arms(rows)] == [2] * len(varied)
    table = pyarrow.parquet.read_table(folder.results).to_pylist()
    assert len({tuple(str(line[name]) for name in plan.varied_names) for line in table}) == len(
        table
    )


def test_a_table_among_values_replaces_that_of_the_file_and_others_merge_into_it(run_file):
    """As the help of the command says: momentum is the file's, which lamb has not."""
    run_file.write_text(RUN.replace('name = "sgd"\n', 'name = "sgd"\nmomentum = 0.5\n'))

    whole = plan_sweep(run_file, parse_grammar([], ['optimizer=[{"name":"lamb"}]'], []))
    assert [run.run.config.optimizer.name for run in whole.runs] == ["lamb"]

    merged = parse_grammar(['optimizer={"nesterov":true}'], [], [])
    (run,) = plan_sweep(run_file, merged).runs
    assert run.run.config.optimizer == SgdConfig(momentum=0.5, nesterov=True)
    with pytest.raises(ConfigError, match=r"optimizer\.momentum is not a field"):
        plan_sweep(run_file, parse_grammar(['optimizer={"name":"lamb"}'], [], []))


def test_plan_is_printed_in_80_columns_and_nothing_is_trained(run_file, tmp_path, capsys):
    """Flags with a dot are parameters."""
    flags = ["-V", "seed=[0,1]", "-V", "batch.global_batch=[8,16]", "--train.epochs", "3"]

    code = main(["sweep", str(run_file), "--folder", str(tmp_path / "sweep"), "--plan", *flags])

    printed = capsys.readouterr().out
    assert code == 0
    assert "4 runs in 2 programs" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert [line.split() for line in printed.splitlines()[2:]] == [
        ["run", "seed", "batch", "steps"],
        ["0000", "0", "8", "24"],
        ["0001", "0", "16", "12"],
        ["0002", "1", "8", "24"],
        ["0003", "1", "16", "12"],
    ]
    assert not (tmp_path / "sweep").exists()


def test_another_sweep_is_not_resumed(run_file, tmp_path):
    """Nor is one begun where there is one."""
    folder = SweepFolder(path=tmp_path / "sweep")
    plan = plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], []))
    other = plan_sweep(run_file, parse_grammar([], ["seed=[0,2]"], []))
    begin_sweep(plan, folder, resume=False)

    begin_sweep(plan, folder, resume=True)

    with pytest.raises(ConfigError, match="holds a sweep already"):
        begin_sweep(plan, folder, resume=False)
    with pytest.raises(ConfigError, match=r"runs differ \(run 1: seed is 2, was 1\)"):
        begin_sweep(other, folder, resume=True)


def test_a_sweep_that_was_killed_as_it_began_is_begun_again(run_file, tmp_path):
    """Between its two files; one of another run.toml is not."""
    folder = SweepFolder(path=tmp_path / "sweep")
    plan = plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], []))
    begin_sweep(plan, folder, resume=False)
    written = folder.plan.read_text()
    folder.plan.unlink()

    begin_sweep(plan, folder, resume=True)

    assert folder.plan.read_text() == written
    folder.plan.unlink()
    with pytest.raises(ConfigError, match="holds no sweep to resume"):
        begin_sweep(dataclasses.replace(plan, text=f"{plan.text}\n"), folder, resume=True)


def test_a_sweep_does_not_begin_where_a_run_is(run_file, tmp_path, capsys):
    """What `train` has left stays as it is, also before its first measurement; so does any other
    run.toml, and that of the sweep itself is no other."""
    folder = tmp_path / "run"
    record(RunFolder(path=folder), [0.5])
    described = tmp_path / "described"
    describe_run(RunFolder(path=described), resolve(load_config(run_file), 1), "scalejax train")
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.toml").write_text("seed = 3\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    for path in (folder, described, other):
        assert main(["sweep", str(run_file), "--folder", str(path), "-V", "seed=[0,1]"]) == 2
        assert "holds a run, or another run.toml" in " ".join(capsys.readouterr().err.split())

    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    plan = plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], []))
    begin_sweep(plan, SweepFolder(path=run_file.parent), resume=False)


def test_states_that_a_killed_job_left_are_removed(run_file, tmp_path):
    """The kill fell after the last end of a run, and before that of their states."""
    plan = plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], []))
    folder = SweepFolder(path=tmp_path / "sweep")
    for index in (0, 1):
        record(folder.run(index), [0.5])
    left = folder.shared_checkpoints(0)
    (left / "24").mkdir(parents=True)

    assert run_sweep(plan, folder) == []

    assert not left.exists()


def test_a_worker_imports_the_members_of_families_that_are_not_of_scalejax(
    run_file, tmp_path, monkeypatch
):
    """As a process that has imported scalejax alone."""
    known = [*OptimizerConfig._members]
    monkeypatch.setattr(OptimizerConfig, "_members", [*known])
    monkeypatch.delitem(sys.modules, "toy_optimizer", raising=False)
    import_module("toy_optimizer")
    run_file.write_text(RUN.replace('"sgd"', '"sign_sgd"'))
    plan = plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], []))
    folder = SweepFolder(path=tmp_path / "sweep")
    begin_sweep(plan, folder, resume=False)
    trained = []
    monkeypatch.setattr(JobTrainer, "_train", lambda self, indices: trained.extend(self._runs))
    monkeypatch.setattr(OptimizerConfig, "_members", known)
    monkeypatch.delitem(sys.modules, "toy_optimizer")
    serialization._adapter.cache_clear()

    JobTrainer(folder, 0, plan.modules)([0])

    serialization._adapter.cache_clear()
    assert plan.modules == ("toy_optimizer",)
    assert [run.config.optimizer.name for run in trained] == ["sign_sgd"] * 2


def test_a_job_whose_runs_cannot_be_read_says_why(tmp_path):
    """Here since a module of the user's is not there."""
    with pytest.raises(ScalejaxError, match="ModuleNotFoundError: No module named 'no_module'"):
        JobTrainer(SweepFolder(path=tmp_path), 0, ("no_module",))([0])


def evaluated(step: int, accuracy: float | None, *, is_test: bool) -> Evaluated:
    """The line of an evaluation."""
    loss, shown = None if accuracy is None else 1 - accuracy, accuracy or 0.25
    about = {"step": step, "epoch": step / 8, "examples": 16, "seconds": 0.1}
    about |= {"elapsed_seconds": step / 8}
    if is_test:
        return EvaluationMeasurement(test_loss=loss, test_accuracy=shown, **about)
    return ValidationMeasurement(validation_loss=loss, validation_accuracy=shown, **about)


def record(
    folder: RunFolder,
    accuracies: list,
    status: Status | None = "completed",
    *,
    tested: tuple[float, int] | None = None,
):
    """Write the record of a run with these accuracies, one an epoch of 8 steps: of test data, or of
    validation data where it was `tested` at its end, with this accuracy and the weights of this
    step."""
    log = MeasurementLog(folder.measurements)
    for epoch, accuracy in enumerate(accuracies, start=1):
        log.append(evaluated(8 * epoch, accuracy, is_test=tested is None))
    if tested:
        last = evaluated(8 * len(accuracies), tested[0], is_test=True)
        log.append(
            dataclasses.replace(last, chosen_step=tested[1], chosen_by="validation_accuracy")
        )
    if status:
        log.append(StatusChange(step=16, status=status, message="", elapsed_seconds=2.5))
    log.close()


def test_results_have_a_row_for_each_finished_run(run_file, tmp_path):
    """What it ended with, and what it took to the target; a run at work is not in the tables yet.
    Test data choose nothing: no evaluation is the best. One that diverged has no accuracy, though
    it was evaluated."""
    import pyarrow.parquet

    grammar = parse_grammar([], ["seed=[0,1,2,3]"], [])
    plan = plan_sweep(run_file, grammar, target=parse_target("test_accuracy=0.5"))
    folder = SweepFolder(path=tmp_path / "sweep")
    record(folder.run(0), [0.5, 0.75])
    record(folder.run(1), [0.75, 0.25])
    record(folder.run(2), [None, None], status="diverged")
    record(folder.run(3), [0.5], status=None)

    rows = read_rows(plan, folder)
    write_results(plan, folder, rows)

    (arm,) = arms(rows)
    assert arm.accuracies == [0.75, 0.25]
    assert [row.planned.index for row in arm.diverged] == [2]
    table = pyarrow.parquet.read_table(folder.results).to_pylist()
    assert [line["run"] for line in table] == [0, 1, 2]
    assert [line["seed"] for line in table] == [0, 1, 2]
    assert [line["status"] for line in table] == ["completed", "completed", "diverged"]
    assert [line["final_test_accuracy"] for line in table] == [0.75, 0.25, None]
    assert [line["final_test_loss"] for line in table] == [0.25, 0.75, None]
    assert [line["best_validation_accuracy"] for line in table] == [None] * 3
    assert [line["steps_to_target"] for line in table] == [8, 8, None]
    assert [line["samples_to_target"] for line in table] == [64, 64, None]
    lines = pyarrow.parquet.read_table(folder.evaluations).to_pylist()
    assert [(line["run"], line["samples"]) for line in lines] == [
        (run, samples) for run in (0, 1, 2) for samples in (64, 128)
    ]
    times = pyarrow.parquet.read_table(folder.timings).to_pylist()
    assert [line["seconds"] for line in times] == [2.5, 2.5, 2.5]


def test_runs_are_chosen_by_validation_data_and_shown_by_test_data_too(run_file, tmp_path):
    """The first arm is the best on test data, and the second, by validation data, is chosen. What
    is shown of a run is of the weights that it ends with, not of its best epoch."""
    import pyarrow.parquet

    run_file.write_text(HELD_OUT)
    grammar = parse_grammar([], ["batch.global_batch=[8,16]", "seed=[0,1]"], [])
    plan = plan_sweep(run_file, grammar, target=parse_target("validation_accuracy=0.5"))
    folder = SweepFolder(path=tmp_path / "sweep")
    record(folder.run(0), [0.5, 0.25], tested=(0.875, 8))
    record(folder.run(1), [0.5, 0.25], tested=(0.875, 8))
    record(folder.run(2), [0.25, 0.75], tested=(0.625, 16))
    record(folder.run(3), [0.25, 0.75], tested=(0.625, 16))

    rows = read_rows(plan, folder)
    write_results(plan, folder, rows)

    assert [arm.accuracies for arm in arms(rows)] == [[0.5, 0.5], [0.75, 0.75]]
    assert [arm.test_accuracies for arm in arms(rows)] == [[0.875] * 2, [0.625] * 2]
    best = best_arm(arms(rows))
    assert best is not None
    assert best.varied == {"batch.global_batch": 16}
    said = " ".join(str(part) for part in list(sweep_tables.results(plan, rows))[1:])
    assert "Best by validation accuracy: global_batch=16." in said
    first, *_ = pyarrow.parquet.read_table(folder.results).to_pylist()
    assert (first["final_validation_accuracy"], first["final_test_accuracy"]) == (0.5, 0.875)
    assert (first["final_step"], first["best_validation_step"]) == (8, 8)
    assert (first["steps_to_target"], first["target"]) == (8, 0.5)
    lines = pyarrow.parquet.read_table(folder.evaluations).to_pylist()[:3]
    assert [line["validation_accuracy"] for line in lines] == [0.5, 0.25, None]
    assert [line["test_accuracy"] for line in lines] == [None, None, 0.875]


@pytest.mark.parametrize(
    ("text", "variables", "target", "sentence"),
    [
        (HELD_OUT, [], "test_accuracy=0.5", r"target='test_accuracy' .*take validation_accuracy"),
        (RUN, [], "validation_loss=0.5", r"target='validation_loss' .*or take test_loss"),
        (RUN, ["data.validation_fraction=[null,0.25]"], None, r"for all of them, or for none"),
    ],
)
def test_runs_are_compared_by_data_of_one_kind(run_file, text, variables, target, sentence):
    """Of test data that are looked at once there is no course to a target."""
    run_file.write_text(text)
    grammar = parse_grammar([], [*variables, "seed=[0,1]"], [])

    with pytest.raises(ConfigError, match=sentence):
        plan_sweep(run_file, grammar, target=parse_target(target))


def test_results_are_points_of_convergence(run_file, tmp_path):
    """Batches 8 and 16 with two optimizers and two seeds: what `scalejax plan` fits, unaltered."""
    grammar = parse_grammar(
        [],
        ['optimizer=[{"name":"sgd"},{"name":"lamb"}]', "batch.global_batch=[8,16]", "seed=[0,1]"],
        [],
    )
    run_file.write_text(RUN.replace('[optimizer]\nname = "sgd"\n', ""))
    plan = plan_sweep(run_file, grammar, target=parse_target("test_accuracy=50%"))
    folder = SweepFolder(path=tmp_path / "sweep")
    accuracies = [[0.5], [0.25, 0.5], [0.5], [0.5], [0.25, 0.75], [0.75], [0.25], [0.25]]
    for index, each in enumerate(accuracies):
        record(folder.run(index), each)
    write_results(plan, folder, read_rows(plan, folder))

    data = read_data(folder.results, target=0.5)

    # An evaluation is after 8 and 16 updates.
    points = {(p.recipe, p.global_batch): (p.samples, p.run_count) for p in data.points}
    assert points == {
        ("optimizer.name=sgd", 8): ((64 + 128) / 2, 2),
        ("optimizer.name=sgd", 16): (128, 2),
        ("optimizer.name=lamb", 8): ((128 + 64) / 2, 2),
    }
    with pytest.raises(ConfigError, match=r"target=0\.6 is refused"):
        read_data(folder.results, target=0.6)


def test_results_of_one_batch_name_it(run_file, tmp_path):
    """Also where no run differs in its batch, and it is given for each device."""
    grammar = parse_grammar(["batch.per_device_batch=4", "layout.data=2"], ["seed=[0,1]"], [])
    run_file.write_text(RUN.replace("[batch]\nglobal_batch = 8\n", ""))
    plan = plan_sweep(run_file, grammar, target=parse_target("test_loss=0.5"))
    folder = SweepFolder(path=tmp_path / "sweep")
    for index in (0, 1):
        record(folder.run(index), [0.5])
    write_results(plan, folder, read_rows(plan, folder))

    (point,) = read_data(folder.results).points

    assert (point.global_batch, point.samples, point.recipe) == (8, 64, "")


def test_intervals_over_seeds_by_hand():
    """Of 1, 2, 3: s = 1, and t(0.975; 2) is 4.303 in every table of Student's distribution; two
    values, of which it would be 12.7 times half their difference, have none, nor has one."""
    found = t_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.count) == (2.0, 3)
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-4)
    assert (found.low, found.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), rel=1e-4)
    assert found.bar == (found.low, found.high)
    assert found.in_words(100, 1) == "200.0 ± 248.4"
    two = t_interval([0.75, 0.5])
    assert two is not None
    assert two == Interval(mean=0.625, half_width=None, count=2, least=0.5, most=0.75)
    assert (two.low, two.high, two.bar) == (None, None, (0.5, 0.75))
    assert two.in_words(100, 2, "+") == "+62.50 (+50.00, +75.00)"
    one = t_interval([0.5])
    assert one is not None
    assert one == Interval(mean=0.5, half_width=None, count=1, least=0.5, most=0.5)
    assert (one.bar, one.in_words()) == (None, "0.5000")
    assert t_interval([]) is None


def test_differences_are_of_the_same_seeds():
    """0.1, 0.2 and 0.3 above: 0.2 +- 0.1 t / sqrt(3), though the seeds themselves are far apart;
    those that one of the two lacks are left out."""
    baseline = {0: 0.1, 1: 0.5, 2: 0.9, 7: 0.0}
    found = paired_difference({0: 0.2, 1: 0.7, 2: 1.2, 5: 9.0}, baseline)

    assert found is not None
    assert (found.mean, found.count) == (pytest.approx(0.2), 3)
    assert found.half_width == pytest.approx(0.1 * 4.303 / math.sqrt(3), rel=1e-4)
    assert paired_difference({5: 1.0}, baseline) is None


def test_arms_have_intervals_and_differences_in_every_table(run_file, tmp_path):
    """In the terminal, Parquet and JSON. The seed that diverged in one arm is in no mean of it, and
    in no difference."""
    import pyarrow.parquet

    plan = plan_sweep(
        run_file, parse_grammar([], ["batch.global_batch=[8,16]", "seed=[0,1,2]"], [])
    )
    folder = SweepFolder(path=tmp_path / "sweep")
    for index, accuracy in enumerate((0.5, 0.625, 0.75, 0.625, 0.875)):
        record(folder.run(index), [accuracy])
    record(folder.run(5), [0.125], status="diverged")
    rows = read_rows(plan, folder)

    write_results(plan, folder, rows)

    first, second = pyarrow.parquet.read_table(folder.arms).to_pylist()
    assert (first["runs"], first["diverged"], first["test_accuracy_count"]) == (3, 0, 3)
    half = 4.303 * 0.125 / math.sqrt(3)
    assert first["test_accuracy_low"] == pytest.approx(0.625 - half, rel=1e-4)
    assert first["test_accuracy_difference"] is None
    assert (second["diverged"], second["test_accuracy_mean"]) == (1, 0.75)
    assert (second["test_accuracy_low"], second["test_accuracy_difference_high"]) == (None, None)
    assert second["test_accuracy_difference"] == pytest.approx((0.125 + 0.25) / 2)
    assert second["test_accuracy_difference_count"] == 2
    assert second["validation_accuracy_mean"] is None
    kept = serialization.load(ArmTable, folder.arms_json)
    assert [dict(each) for each in kept.arms] == [first, second]
    console = Console(width=100, highlight=False, file=io.StringIO())
    for part in sweep_tables.results(plan, rows):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines[1].startswith("global_batch=8 3 of 3 62.50 ± 31.05 % reference 0")
    # Two seeds are left: an interval would be of ± 158.83 and ± 79.41 points.
    assert "global_batch=16 2 of 3 75.00 (62.50, 87.50) % +18.75 (+12.50, +25.00) 1" in " ".join(
        lines
    )


def test_a_varied_list_is_one_cell_of_every_table(run_file, tmp_path):
    """As JSON: a row of results, or of an arm, is of single values."""
    plan = plan_sweep(run_file, parse_grammar([], ["model.hidden=[[8],[16,16]]"], []))
    folder = SweepFolder(path=tmp_path / "sweep")
    for index in range(2):
        record(folder.run(index), [0.5])
    rows = read_rows(plan, folder)

    for lines in (result_table(plan, rows).rows, arm_lines(rows)):
        assert [line["model.hidden"] for line in lines] == ["[8]", "[16, 16]"]
        assert not any(isinstance(e, list | dict) for line in lines for e in line.values())


def test_target_is_written_as_it_was_given(run_file):
    """So that a resumed sweep is held to the same."""
    target = parse_target("test_loss=0.5")
    assert target is not None

    plan = plan_sweep(run_file, parse_grammar([], [], []), target=target)

    assert plan.written.target == target
    assert target.is_reached(0.5)
    assert not target.is_reached(0.6)
    assert not target.is_reached(None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("test_accuracy=nan", "a finite number, such as test_accuracy=0.8"),
        ("test_accuracy=88", "try test_accuracy=88%"),
        ("test_accuracy=188%", "from 0 to 1"),
        ("test_accuracy=-0.1", "from 0 to 1"),
        ("test_loss=-inf", "a finite number"),
        ("test_loss", "a finite number"),
    ],
)
def test_targets_that_every_run_or_none_reaches_are_refused(text, words):
    """Before hours of training that cannot end there."""
    with pytest.raises(ConfigError, match=words):
        parse_target(text)


def test_target_may_be_a_percentage():
    """As that of a plan."""
    assert parse_target("test_accuracy=88%") == parse_target("test_accuracy=0.88")
    assert parse_target("test_loss=2.5") is not None


def test_ranges_are_for_searches(run_file):
    """A sweep of every combination cannot take every number."""
    grammar = parse_grammar([], ['schedule.base_learning_rate={"low":0.01,"high":1}'], [])

    with pytest.raises(ConfigError, match="for --optuna to choose from"):
        plan_sweep(run_file, grammar)
    with pytest.raises(ConfigError, match="it must be a list, or"):
        parse_grammar([], ['a={"low":1}'], [])


def test_search_is_refused_without_optuna(run_file, tmp_path, capsys, monkeypatch):
    """By how to install it; nothing is left behind."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    flags = ["-V", "batch.global_batch=[8,16]", "--optuna", "2"]

    code = main(["sweep", str(run_file), "--folder", str(tmp_path / "sweep"), *flags])

    assert code == 2
    assert "pip install 'scalejax[optuna]'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "sweep").exists()


def test_search_goes_where_it_is_better_and_resumes(run_file, tmp_path):
    """Of learning rates from 0.001 to 1 the best is 0.1 by decree: trials gather around it; one
    that is resumed asks for the same and trains nothing again."""
    pytest.importorskip("optuna")
    run_file.write_text(HELD_OUT)
    grammar = parse_grammar(
        [],
        ["seed=[0,1]", 'schedule.base_learning_rate={"low":0.001,"high":1,"log":true}'],
        [],
    )
    trained = []

    def train(plan, folder):
        for planned in plan.runs:
            if not folder.run(planned.index).measurements.exists():
                rate = planned.run.config.schedule.base_learning_rate
                trained.append(rate)
                reached = 1 / (1 + math.log10(rate / 0.1) ** 2)
                record(folder.run(planned.index), [reached], tested=(0.5, 8))
        return []

    def searched(trials):
        return search(
            lambda grammar: plan_sweep(run_file, grammar),
            grammar,
            tmp_path / "search",
            trials=trials,
            target=None,
            train=train,
        )[0]

    first = searched(10)
    assert len(trained) == 20
    found = searched(30)

    assert found[:10] == first
    assert len(trained) == 60
    late = [abs(math.log10(rate / 0.1)) for rate in trained[40:]]
    assert sum(late) / len(late) < 0.5  # at random it would be 1.5 / 2 or more
    best = best_of(found, None)
    assert best is not None
    assert abs(math.log10(float(str(best.fields["schedule.base_learning_rate"])) / 0.1)) < 0.2


def test_finals_are_drawn_with_every_run_as_a_point(run_file, tmp_path):
    """The mean of each arm on its line, one run a point, over the field with the most numbers."""
    grammar = parse_grammar(
        [],
        ["batch.global_batch=[8,16,32]", "seed=[0,1,2]"],
        ['{"cases": [{}, {"schedule": {"warmup_epochs": 1, "warmup": "gradual"}}]}'],
    )
    grammar = dataclasses.replace(grammar, parameters={"schedule.warmup_from": "zero"})
    plan = plan_sweep(run_file, grammar)
    folder = SweepFolder(path=tmp_path / "sweep")
    for planned in plan.runs:
        batch = planned.run.split.global_batch
        record(folder.run(planned.index), [0.1, batch / 64 + planned.run.config.seed / 4])
    rows = read_rows(plan, folder)

    bars, finals, points = figures.final_accuracies(rows)["layer"][:3]
    curves = figures.accuracy_curves(rows)["layer"][1]

    assert finals["encoding"]["x"]["title"] == "global batch"
    labels = ["warmup_epochs=0 warmup=none", "warmup_epochs=1 warmup=gradual"]
    assert finals["encoding"]["color"]["scale"]["domain"] == labels
    line = [row for row in finals["data"]["values"] if row["label"] == labels[0]]
    means = [(x / 64) + 1 / 4 for x in (8, 16, 32)]
    assert [row["x"] for row in line] == [8, 16, 32]
    assert [row["y"] for row in line] == pytest.approx(means)
    half = 4.303 / 4 / math.sqrt(3)  # t(0.975; 2), s / sqrt(n)
    assert bars["data"]["values"][0]["high"] == pytest.approx(means[0] + half, rel=1e-4)
    beside = [row for row in finals["data"]["values"] if row["label"] == labels[1]]
    for one, other in zip(line, beside, strict=True):
        assert one["at"] < one["x"] == other["x"] < other["at"] < 1.2 * one["at"]
    assert max(row["high"] for row in bars["data"]["values"]) == 1  # 0.75 + 0.62 is no share
    assert len(points["data"]["values"]) == 18
    assert len(curves["encoding"]["color"]["scale"]["domain"]) == 6
    assert curves["encoding"]["x"]["axis"] == {"tickMinStep": 1}
    assert all("' %'" in each["encoding"]["y"]["axis"]["labelExpr"] for each in (finals, curves))
    assert [row["y"] for row in curves["data"]["values"]][:2] == pytest.approx([0.1, means[0]])


def sweep_with_diverged_runs(run_file, folder):
    """Of 3 seeds with batch 8 two diverge, one before any evaluation, one after the first; of
    batch 16 all do; of batch 32 none."""
    grammar = parse_grammar([], ["batch.global_batch=[8,16,32]", "seed=[0,1,2]"], [])
    plan = plan_sweep(run_file, grammar, target=parse_target("test_accuracy=0.5"))
    record(folder.run(0), [0.5, 0.89])
    record(folder.run(1), [], status="diverged")
    record(folder.run(2), [0.75], status="diverged")  # given up after 16 updates
    for index in (3, 4, 5):
        record(folder.run(index), [], status="diverged")
    for index in (6, 7, 8):
        record(folder.run(index), [0.5, 0.75])
    return plan, read_rows(plan, folder)


def test_runs_that_diverged_are_not_passed_over(run_file, tmp_path):
    """The mean says of how many runs it is, and how many are in none."""
    plan, rows = sweep_with_diverged_runs(run_file, SweepFolder(path=tmp_path / "sweep"))
    console = Console(width=100, highlight=False, file=io.StringIO())

    for part in sweep_tables.results(plan, rows):
        console.print(part)

    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines[1].startswith("global_batch=8 1 of 3 89.00 % reference 2 1 of 3")
    assert lines[2].startswith(f"global_batch=16 0 of 3 {UNKNOWN} {UNKNOWN} 3 0 of 3")
    assert lines[3].startswith("global_batch=32 3 of 3 75.00 ± 0.00 % -14.00 0 3 of 3")
    assert "5 of 9 runs diverged, and are in no mean." in " ".join(lines)
    assert "none is called the best" in " ".join(lines)


def test_names_of_arms_break_between_fields(run_file, tmp_path):
    """Never in a number, in 80 columns; a whole number is as it was typed."""
    variables = ["batch.global_batch=[8,1024]", "schedule.warmup_epochs=[0,2]", "seed=[0,1]"]
    fixed = ['schedule={"warmup": "gradual", "warmup_from": "zero"}', "data.train_examples=2048"]
    plan = plan_sweep(
        run_file, parse_grammar(fixed, variables, []), target=parse_target("test_accuracy=0.5")
    )
    folder = SweepFolder(path=tmp_path / "sweep")
    for planned in plan.runs:
        record(folder.run(planned.index), [0.5, 0.625 + planned.index / 64])
    console = Console(width=80, highlight=False, file=io.StringIO())

    console.print(next(iter(sweep_tables.results(plan, read_rows(plan, folder)))))

    assert isinstance(console.file, io.StringIO)
    words = console.file.getvalue().split()
    named = [word for word in words if "=" in word]
    batches = [f"global_batch={batch}" for batch in (8, 1024)]
    assert {*batches, "warmup_epochs=0", "warmup_epochs=2"} == set(named)
    assert len(named) == 8


def test_runs_that_diverged_are_crosses(run_file, tmp_path):
    """One for each, at the bottom, over its batch or where it ended; explained in the legend."""
    _, rows = sweep_with_diverged_runs(run_file, SweepFolder(path=tmp_path / "sweep"))

    drawn = (figures.final_accuracies(rows), figures.accuracy_curves(rows))

    for chart, places, what in zip(
        drawn, ([8, 8, 16, 16, 16], [2, 2, 4, 4, 4]), ("bars", "bands"), strict=True
    ):
        crosses = chart["layer"][-1]
        assert sorted(row["x"] for row in crosses["data"]["values"]) == places
        assert crosses["encoding"]["y"] == {"value": {"expr": "height - 8"}}
        assert chart["title"]["text"] == [
            f"lines: means; {what}: 95 % t intervals over seeds",
            "crosses: diverged (5 runs, in no mean)",
        ]


@pytest.mark.parametrize(("width", "points"), [("column", 234), ("page", 486)])
def test_a_figure_for_print_has_the_width_of_its_place(run_file, tmp_path, width, points):
    """3.25 or 6.75 inches of 72 points, whatever the format; a PDF holds its fonts; the legend is
    below the axes, and in colours of its own."""
    _, rows = sweep_with_diverged_runs(run_file, SweepFolder(path=tmp_path / "sweep"))
    for drawn in (figures.final_accuracies(rows), figures.accuracy_curves(rows)):
        spec = figures.for_print(drawn, width)
        for suffix in ("pdf", "svg", "png"):
            save_print(spec, tmp_path / f"figure.{suffix}")

        pdf = (tmp_path / "figure.pdf").read_bytes()
        assert re.search(rb"/MediaBox \[0 0 (\d+) ", pdf)[1] == str(points).encode()  # type: ignore[index]
        assert b"/FontFile2" in pdf
        assert f'width="{points}pt"' in (tmp_path / "figure.svg").read_text()[:300]
        with Image.open(tmp_path / "figure.png") as image:
            assert image.width == pytest.approx(points / 72 * 300, abs=2)
            inches = image.width / image.info["dpi"][0]
            assert inches == pytest.approx(points / 72, abs=0.01)
        assert spec["config"]["legend"]["orient"] == "bottom"
        assert '"orient": "top"' not in json.dumps(spec)
        colours = spec["layer"][1]["encoding"]["color"]["scale"]["range"]
        assert colours == list(figures.COLOR_BLIND_SAFE)


SEEN_BY_THE_COLOR_BLIND = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""What linear RGB is seen as (Machado, Oliveira & Fernandes 2009, table 1, severity 1)."""


@pytest.mark.parametrize("kind", SEEN_BY_THE_COLOR_BLIND)
def test_colours_of_print_are_told_apart_by_the_colour_blind(kind):
    """Any two are 15 apart in CIELAB, six times what can just be told apart; red and green of
    matplotlib's usual colours are 7 to those who have no green."""
    matrix = np.array(SEEN_BY_THE_COLOR_BLIND[kind])

    def nearest(colours):
        seen = [lab(matrix @ linear(each)) for each in colours]
        return min(np.linalg.norm(a - b) for a, b in combinations(seen, 2))

    assert nearest(figures.COLOR_BLIND_SAFE) > 15
    if kind == "deuteranopia":
        assert nearest(["#2ca02c", "#d62728"]) < 10


def linear(colour):
    """Linear RGB of a colour in hexadecimal digits, of sRGB."""
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIELAB of linear RGB, white being D65."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(to_xyz @ np.clip(rgb, 0, 1) / to_xyz.sum(1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_a_figure_that_cannot_be_drawn_is_refused_before_anything_trains(run_file, capsys):
    """By the formats that there are."""
    code = main(["sweep", str(run_file), "-V", "seed=[0,1]", "--figure", "figure.gif"])

    assert code == 2
    assert "its suffix must be one of .png, .svg, .pdf" in " ".join(capsys.readouterr().err.split())


def test_mean_of_the_seeds_that_are_left_is_no_part_of_the_curve(run_file, tmp_path):
    """The worse of two seeds ends after the first epoch: the line does not rise to the other."""
    folder = SweepFolder(path=tmp_path / "sweep")
    plan = plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], []))
    record(folder.run(0), [0.5, 0.75])
    record(folder.run(1), [0.25], status="stopped_early")

    _, whole, rest, words = figures.accuracy_curves(read_rows(plan, folder))["layer"][:4]

    assert [row["y"] for row in whole["data"]["values"]] == [0.375]
    assert [row["y"] for row in rest["data"]["values"]] == [0.75]
    assert [row["words"] for row in words["data"]["values"]] == ["1 of 2 seeds from here"]


def test_report_of_a_sweep_that_has_not_begun_is_refused(run_file, tmp_path, capsys):
    """There is no empty report."""
    folder = SweepFolder(path=tmp_path / "sweep")
    begin_sweep(plan_sweep(run_file, parse_grammar([], ["seed=[0,1]"], [])), folder, resume=False)

    code = main(["report", str(folder.path)])

    assert code == 2
    assert "of which no run has begun" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("metric", "values"),
    [("validation_accuracy", [(0.5 + 0.0) / 2, None]), ("validation_loss", [math.inf, None])],
)
def test_search_is_told_the_worst_of_runs_that_diverged(run_file, tmp_path, metric, values):
    """They shall be shunned, and not passed over; of a run that is not finished it is told
    nothing."""
    pytest.importorskip("optuna")
    run_file.write_text(HELD_OUT)
    grammar = parse_grammar([], ["seed=[0,1]", "batch.global_batch=[8]"], [])
    target = parse_target(f"{metric}=0.9")
    trials: Iterator[Status | None] = iter(("diverged", None))

    def train(plan, folder):
        record(folder.run(0), [0.5], tested=(0.75, 8))
        record(folder.run(1), [], status=next(trials))
        return []

    found, _ = search(
        lambda grammar: plan_sweep(run_file, grammar),
        grammar,
        tmp_path / "search",
        trials=2,
        target=target,
        train=train,
    )

    assert [trial.value for trial in found] == values
    best = best_of(found, target)
    assert best is (found[0] if metric == "validation_accuracy" else None)


def test_experiment_on_warmup_counts_a_run_given_up_as_failed():
    """It has no accuracy; where it should have had one, the claim does not hold."""
    path = Path(__file__).parents[2] / "experiments" / "warmup_by_batch" / "measure.py"
    claims = runpy.run_path(str(path))["claims"]
    found = json.loads((path.parent / "results.json").read_text())["accuracies"]
    assert all(claims(found).values())

    shown = claims(
        found | {"512 linear none": [None] * 3, "512 linear gradual": [0.88, None, 0.89]}
    )

    assert list(shown.values()) == [True, False, True, True]


def test_samples_are_those_of_a_batch_that_grows(run_file, tmp_path):
    """64 examples in batches of 8, and of 16 from the second epoch on: 8 + 4 updates."""
    import pyarrow.parquet

    grammar = parse_grammar(["batch.ramp_epochs=[1]", "batch.ramp_factor=2"], ["seed=[0,1]"], [])
    plan = plan_sweep(run_file, grammar)
    folder = SweepFolder(path=tmp_path / "sweep")
    for index in (0, 1):
        record(folder.run(index), [0.5, 0.75])

    write_results(plan, folder, read_rows(plan, folder))

    assert plan.jobs == ((0,), (1,))
    lines = pyarrow.parquet.read_table(folder.evaluations).to_pylist()
    assert [line["samples"] for line in lines][:2] == [8 * 8, 8 * 8 + 8 * 16]


def test_a_rule_that_changes_the_optimizer_is_another_program(run_file):
    """Malladi's rule scales the moments of Adam too."""
    text = RUN.replace('name = "sgd"', 'name = "adamw"').replace(
        "base_learning_rate = 0.01", "base_learning_rate = 0.01\nreference_batch = 4"
    )
    run_file.write_text(text)

    plan = plan_sweep(run_file, parse_grammar([], ['schedule.scaling=["none","sqrt","sde"]'], []))

    assert sorted(plan.jobs) == [(0, 1), (2,)]
