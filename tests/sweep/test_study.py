"""Studies of warmup: what is typed, trained and chosen, and that it comes out again."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scalejax.cli.main import main
from scalejax.config.grid import fields_of
from scalejax.core.errors import ConfigError
from scalejax.report.figures import sharpness_panels, study_panels
from scalejax.report.study import commands, latex, markdown, protocol, write_study
from scalejax.report.terminal import sweep as sweep_tables
from scalejax.report.terminal import tables
from scalejax.sweep.results import RunRow
from scalejax.sweep.study import (
    StudyFolder,
    Warmup,
    cell_results,
    cell_rows,
    found_rates,
    lines_of,
    plan_study,
    rate_rows,
)
from scalejax.training.record import (
    EvaluationMeasurement,
    SharpnessMeasurement,
    ValidationMeasurement,
    figures,
)

ROOT = Path(__file__).parents[2]
RUN = """
[model]
name = "mlp"
hidden = [8]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 320
test_examples = 40
[batch]
global_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.01
reference_batch = 8
scaling = "linear"
[train]
epochs = 2
log_every_steps = 5
"""


@pytest.fixture
def run_file(tmp_path):
    """A small run."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def row(planned, accuracy):
    """A finished run, or with None a diverged one: the same accuracy on validation and on test
    data, but for a hundredth that tells them apart."""
    common = {"step": 80, "epoch": 2.0, "examples": 32, "seconds": 0.0, "elapsed_seconds": 0.0}
    if accuracy is None:
        return RunRow(
            planned=planned, status="diverged", evaluations=(), steps=9, seconds=0.0, reached=None
        )
    validation = ValidationMeasurement(
        validation_loss=1 - accuracy, validation_accuracy=accuracy, **common
    )
    test = EvaluationMeasurement(
        test_loss=1 - accuracy,
        test_accuracy=accuracy - 0.01,
        chosen_step=80,
        chosen_by="last",
        **common,
    )
    return RunRow(
        planned=planned,
        status="completed",
        evaluations=(validation,),
        tested=test,
        steps=80,
        seconds=0.0,
        reached=None,
    )


@pytest.mark.parametrize(
    ("text", "warmup", "epochs"),
    [
        ("none", Warmup(), 0),
        ("gradual:5%", Warmup(form="gradual", length=5, is_share=True), 0.5),
        ("gradual:0.33333333%", Warmup(form="gradual", length=0.33333333, is_share=True), None),
        ("gradual:2", Warmup(form="gradual", length=2), 2),
        ("gradual:2:base", Warmup(form="gradual", length=2, start="base"), 2),
        ("constant:10%", Warmup(form="constant", length=10, is_share=True, start="base"), 1),
    ],
)
def test_a_warmup_is_typed_in_epochs_or_per_cent_of_the_run(run_file, text, warmup, epochs):
    """And written as it was typed, so that the commands of a study give the same one."""
    (found,) = plan_study(run_file, {"train.epochs": 10}, warmups=text).warmups

    assert (found, found.text) == (warmup, text)
    assert epochs in (None, found.epochs(10))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--warmup linear:5%", "linear warmup is called gradual"),
        ("--warmup gradual", "needs a length above 0"),
        ("--warmup gradual:100%", "below 100%"),
        ("--warmup gradual-2", "FORM:LENGTH"),
        ("--warmup constant:2:zero", "a constant one at base"),
        ("--warmup none,none", "twice"),
        ("--warmup gradual:5%,gradual:5.0%", "twice"),
        ("--batches 16,016", "twice"),
        ("--batch.ramp_epochs [1]", "fixed batches"),
        ("--scaling sde", "nothing is left to train: sde with sgd"),
        ("--warmup gradual:2", "must end before train.epochs=2 do"),
        ("--warmup gradul:2", "'gradual'"),
        ("--warmup foo", "'foo' is refused: it must be none, gradual:LENGTH or constant:LENGTH"),
        ("--scaling linera", "'linear'"),
        ("--batches 8,1.5", "whole numbers above 0"),
        ("--batches 8,,16", "nothing empty"),
        ("--batches 1000", "1000"),
        ("--optimizers lamp", "'lamb'"),
        ("--optimizers lamb:fast", "must be a number"),
        ("--optimizers sgd,sgd:0.1", "twice"),
        ("--rates 0,1", "above 0"),
        ("--rates 0.1,1e-1", "twice"),
        ("--seeds 0", "seeds"),
        ("--limit soon", "units s, min, h and d"),
        ("--cores 0", "cores"),
        ("--partition long", "--through slurm"),
        ("--resume", "no study to resume"),
        ("--schedule.warmup gradual", "give --warmup"),
        ("--batch.global_batch 16", "give --batches"),
    ],
)
def test_what_cannot_be_studied_is_refused(run_file, tmp_path, capsys, flags, said):
    """In one line, with exit code 2, before anything is trained or written."""
    arguments = ["study", "warmup", str(run_file), "--folder", str(tmp_path / "out")]

    assert main([*arguments, *flags.split()]) == 2

    refused = " ".join(capsys.readouterr().err.split())
    assert said in refused
    assert "Traceback" not in refused
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_as_it_is(run_file, tmp_path, capsys):
    """Whether it is to be resumed or begun; of a study begun with another run.toml too."""
    other = tmp_path / "other" / "run.toml"
    other.parent.mkdir()
    other.write_text("seed = 1")
    arguments = ["study", "warmup", str(run_file), "--folder", str(other.parent)]

    assert main([*arguments, "--resume"]) == 2
    assert "holds another run.toml" in " ".join(capsys.readouterr().err.split())
    assert main(arguments) == 2
    assert "is not empty" in " ".join(capsys.readouterr().err.split())
    assert other.read_text() == "seed = 1"


def test_settings_that_are_the_same_are_trained_once(run_file):
    """At the reference batch all rules are, and a warmup from the peak is none; what a rule knows
    nothing of is left out with its reason."""
    study = plan_study(
        run_file,
        {},
        batches="8,32",
        warmups="none,gradual:20%,constant:50%",
        scalings="linear,sqrt,none,legw,sde",
        optimizers="sgd:0.01",
        seeds=2,
    )

    plan = study.grid({"sgd": 0.01})

    settings = {
        (
            planned.run.split.global_batch,
            planned.run.config.schedule.scaled(planned.run.split.global_batch),
            fields_of(planned.run.config)["schedule.warmup"],
        )
        for planned in plan.runs
    }
    assert len(plan.runs) == 2 * len(settings) == 2 * (2 + 3 + 3 + 2 + 1)
    assert (32, (0.04, 1.0), "constant") in settings
    assert (32, (0.02, 1.6), "gradual") in settings  # legw
    assert len(study.cells) == 2 * (3 + 3 + 3 + 2)
    assert [why.split(":")[0] for why in study.left_out] == ["legw with constant", "sde with sgd"]
    assert all(p.run.config.data.validation_fraction == 0.1 for p in plan.runs)


def test_cells_that_no_rule_can_train_are_left_out_and_the_others_trained(run_file):
    """LEGW's warmups at least as long as the run, and betas that sde would leave nothing of."""
    study = plan_study(
        run_file,
        {},
        batches="8,16,32,128",
        warmups="none,gradual:30%",
        scalings="sqrt,sde,legw",
        optimizers="adamw:0.01",
    )

    trained = {(each.scaling, each.batch, each.warmup.text) for each in study.cells}

    assert {(batch, way) for rule, batch, way in trained if rule == "legw"} == {
        *((batch, "none") for batch in (8, 16, 32, 128)),
        (8, "gradual:30%"),
        (16, "gradual:30%"),  # 1.2 of 2 epochs
    }
    assert {batch for rule, batch, _ in trained if rule == "sde"} == {8, 16, 32}
    assert len(study.left_out) == 3
    assert study.left_out[0].startswith("sde at 128: batch.global_batch=128 is refused: k=16")
    said = "legw with gradual:30% at 32: a warmup of 2.4 epochs would not end within the run's 2"
    assert study.left_out[1] == said
    assert study.grid({"adamw": 0.01}).runs


def test_the_rate_of_a_file_that_scales_none_is_that_of_its_batch(run_file):
    """So it is refused for another reference batch, and where the batch follows from the devices;
    a rate that is found, or typed, is that of the reference batch."""
    file = RUN.replace('scaling = "linear"', "").replace("global_batch = 8", "global_batch = 64")
    run_file.write_text(file)

    with pytest.raises(ConfigError, match=r"give --schedule\.reference_batch 64, or --opt"):
        plan_study(run_file, {})
    (sgd,) = plan_study(run_file, {"schedule.reference_batch": 64}).optimizers
    assert sgd.rate == 0.01
    assert plan_study(run_file, {}, optimizers="sgd").tuned
    run_file.write_text(file.replace("global_batch = 64", "per_device_batch = 8"))
    with pytest.raises(ConfigError, match=r"that of batch\.per_device_batch"):
        plan_study(run_file, {})


def test_early_stopping_has_the_data_that_the_study_holds_out(run_file):
    """The file alone would be refused: it chooses by validation data, and has none."""
    study = plan_study(run_file, {"train.early_stopping.patience": 1})

    assert study.config.data.validation_fraction == 0.1
    assert study.config.train.early_stopping is not None


def test_a_run_file_with_line_ends_of_windows_is_gone_on_with(run_file, tmp_path, monkeypatch):
    """Its copy has the same bytes, which are what --resume compares."""
    run_file.write_bytes(RUN.replace("\n", "\r\n").encode())
    folder = tmp_path / "out"
    arguments = ["study", "warmup", str(run_file), "--folder", str(folder), "--batches", "8"]

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("scalejax.cli.study.predicted_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr("scalejax.cli.study.StudyWarmup._trained", stop)

    assert main(arguments) == 130
    assert (folder / "run.toml").read_bytes() == run_file.read_bytes()
    assert main([*arguments, "--resume"]) == 130


def test_rates_are_chosen_by_validation_data_at_the_reference_batch(run_file):
    """The best that did not diverge, the smallest of equals; at an edge it is said to be."""
    study = plan_study(run_file, {}, optimizers="sgd:0.5,lamb", rates="1,0.1,0.01")
    plan = study.rate_sweep()
    assert plan is not None
    assert [each.fields["schedule.base_learning_rate"] for each in plan.runs] == [0.01, 0.1, 1]
    assert {run.run.split.global_batch for run in plan.runs} == {8}

    rows = [row(p, a) for p, a in zip(plan.runs, (0.5, 0.5, None), strict=True)]
    sgd, lamb = found_rates(study, rows)

    assert (sgd.rate, sgd.is_at_edge) == (0.5, False)
    assert (lamb.rate, lamb.is_at_edge) == (0.01, True)
    edges = [(each.optimizer, each.at_edge) for each in rate_rows((sgd, lamb))]
    assert edges == [("sgd", False), ("lamb", True), ("lamb", False), ("lamb", False)]
    assert lamb.tried == ((0.01, 0.5), (0.1, 0.5), (1, None))
    with pytest.raises(ConfigError, match="no run of lamb finished"):
        found_rates(study, [row(planned, None) for planned in plan.runs])


@pytest.fixture
def studied(run_file):
    """A study of 2 batches, 2 warmups and 2 rules, 3 seeds, with accuracies by hand: without warmup
    0.5, 0.6, 0.7 by seed, with warmup 0.1 more; at batch 32 linear, one of no warmup diverged."""
    study = plan_study(run_file, {}, batches="8,32", warmups="none,gradual:50%")
    rows = []
    for planned in study.grid({"sgd": 0.01}).runs:
        batch, seed = planned.run.split.global_batch, planned.run.config.seed
        is_bare = planned.fields["schedule.warmup"] == "none"
        is_linear = planned.fields["schedule.scaling"] == "linear"
        is_lost = is_bare and is_linear and batch == 32 and seed == 0
        accuracy = 0.5 + 0.1 * seed + (0.0 if is_bare else 0.1)
        rows.append(row(planned, None if is_lost else accuracy))
    return study, cell_results(study, {"sgd": 0.01}, rows)


def test_a_cell_has_intervals_and_a_paired_difference(studied):
    """By hand: of 0.49, 0.59 and 0.69 the interval is 4.3027 x 0.1 / sqrt 3, and the differences
    of pairs are all 0.1; where a run diverged, its pair is left out, and it is in no mean."""
    study, results = studied
    lines = {(c["scaling"], c["batch"], c["warmup"]): c for c in lines_of(cell_rows(results))}

    bare, warm = lines["sqrt", 32, "none"], lines["sqrt", 32, "gradual:50%"]
    assert bare["test_accuracy_mean"] == pytest.approx(0.59)
    assert bare["test_accuracy_high"] == pytest.approx(0.59 + 0.24841, rel=1e-5)
    assert warm["test_accuracy_difference"] == pytest.approx(0.1)
    assert warm["test_accuracy_difference_high"] == pytest.approx(0.1)
    assert bare["test_accuracy_difference"] is None
    assert (bare["chosen"], warm["chosen"]) == (False, True)
    lost = lines["linear", 32, "none"]
    assert (lost["runs"], lost["diverged"], lost["chosen"]) == (3, 1, False)
    assert lost["test_accuracy_mean"] == pytest.approx(0.64)
    assert (lost["test_accuracy_low"], lost["test_accuracy_high"]) == (None, None)
    assert (lost["test_accuracy_count"], lost["trained_only"]) == (2, 0)
    beside = lines["linear", 32, "gradual:50%"]
    assert beside["test_accuracy_difference"] == pytest.approx(0.1)
    assert (beside["test_accuracy_count"], beside["test_accuracy_difference_count"]) == (3, 2)
    assert (beside["trained_only"], beside["diverged_only"]) == (1, 0)
    assert study.baseline.text == "none"
    assert lines["linear", 32, "none"]["peak_learning_rate"] == pytest.approx(0.04)
    assert warm["warmup_steps"] == 9


def test_seeds_that_only_warmup_trains_with_are_counted_where_no_pair_is_left(run_file):
    """All runs without warmup diverge: there is no difference, and the tables say why; or the other
    way round."""
    study = plan_study(run_file, {}, batches="32", warmups="none,gradual:50%", scalings="linear")
    plan = study.grid({"sgd": 0.01})

    for lost, counts, who in (("none", (3, 0), "this"), ("gradual", (0, 3), "the reference")):
        rows = [
            row(planned, None if planned.fields["schedule.warmup"] == lost else 0.5)
            for planned in plan.runs
        ]
        results = cell_results(study, {"sgd": 0.01}, rows)
        warm = lines_of(cell_rows(results))[1]

        assert (warm["trained_only"], warm["diverged_only"]) == counts
        assert warm["test_accuracy_difference"] is None
        assert warm["test_accuracy_difference_count"] == 0
        assert f"| n/a; with 3 seeds only {who} trains |" in markdown(study, results)
        assert f"with 3 seeds only {who} trains" in latex(study, results)


@pytest.mark.parametrize(
    ("lost_seeds", "words"), [((0, 1, 2), "(all diverged)"), ((0,), "(each lost runs)")]
)
def test_the_table_says_why_no_warmup_is_the_best(run_file, capsys, lost_seeds, words):
    """In words that cannot be taken for a warmup, among which is "none"."""
    study = plan_study(run_file, {}, batches="32", warmups="none,gradual:50%", scalings="linear")
    rows = [
        row(planned, None if planned.run.config.seed in lost_seeds else 0.5)
        for planned in study.grid({"sgd": 0.01}).runs
    ]

    tables.show(sweep_tables.study(study, cell_results(study, {"sgd": 0.01}, rows)))

    shown = capsys.readouterr().out
    (line,) = [each for each in shown.splitlines() if each.startswith("sgd ")]
    assert line.split(maxsplit=3)[-1].split("  ")[0].startswith(words)


def test_a_loss_is_better_where_it_is_lower(run_file, tmp_path):
    """Of rates and of warmups, and the table has losses as they are; where a rule is left out
    altogether, the figure has no room for it."""
    study = plan_study(
        run_file,
        {},
        batches="32",
        warmups="none,gradual:50%",
        scalings="linear,sde",
        optimizers="lamb",
        rates="0.01,0.1",
        measure="loss",
        seeds=2,
    )
    plan = study.rate_sweep()
    assert plan is not None
    rates = found_rates(study, [row(p, a) for p, a in zip(plan.runs, (0.2, 0.6), strict=True)])
    rows = [
        row(planned, 0.5 if planned.fields["schedule.warmup"] == "none" else 0.75)
        for planned in study.grid({"lamb": 0.1}).runs
    ]
    results = cell_results(study, {"lamb": 0.1}, rows)

    assert rates[0].rate == 0.1
    assert [each.is_chosen for each in results] == [False, True]
    table = markdown(study, results)
    values, difference = "0.2500 (0.2500, 0.2500)", "-0.2500 (-0.2500, -0.2500)"
    assert f"| {values} | {values} | {difference} |" in table
    assert "2 seeds and both values, as an interval needs three" in table
    assert "both seeds" in str(study_panels(study, results, "page")["title"]["text"])
    figure = study_panels(study, results, "column")
    assert figure["spec"]["width"] > 150
    assert figure["facet"]["column"]["sort"] == ["linear scaling"]


def test_the_sharpness_along_runs_is_in_tables_and_a_figure_of_its_own(studied, tmp_path):
    """8, 40 and 16 along each run, times 1, 2, 3 by seed, where SGD is stable up to 20: the largest
    is 80 in the mean, 4 times that; of two seeds beside a diverged one both. Nothing where it was
    not measured. Of AdamW what counts is the preconditioned one, and its own limit."""
    study, results = studied

    def measured(row):
        values = enumerate((8.0, 40.0, 16.0))
        found = tuple(
            SharpnessMeasurement(
                step=10 * place,
                epoch=float(place),
                sharpness=value * (row.planned.run.config.seed + 1),
                sharpness_error=0.1,
                learning_rate=0.1,
                stability_threshold=20.0,
                seconds=0.5,
                elapsed_seconds=9.0,
            )
            for place, value in values
        )
        return replace(row, sharpness=found)

    sharp = [
        replace(each, arm=replace(each.arm, rows=tuple(map(measured, each.arm.rows))))
        for each in results
    ]
    folder = StudyFolder(path=tmp_path / "out")

    names = write_study(study, found_rates(study, ()), sharp, folder, width="page", cores=2)

    cells = {(c["scaling"], c["batch"], c["warmup"]): c for c in lines_of(cell_rows(sharp))}
    warm = cells["sqrt", 32, "gradual:50%"]
    assert (warm["sharpness_largest"], warm["sharpness_last"]) == (80, 32)
    assert (warm["sharpness_largest_over_threshold"], warm["sharpness_count"]) == (4, 3)
    table = markdown(study, sharp)
    assert "| largest sharpness | last sharpness | largest sharpness over threshold |" in table
    assert "| 80.0 ± 99.4 | 32.0 ± 39.7 | 4.00 ± 4.97 |" in table
    assert "| 100 (80, 120) | 40.0 (32.0, 48.0) | 5.00 (4.00, 6.00) |" in table
    assert r"\begin{tabular}{lrlrcrrrrrr}" in latex(study, sharp)
    lines = list(csv.DictReader((folder.data / "sharpness.csv").read_text().splitlines()))
    assert len(lines) == 3 * sum(len(each.arm.rows) for each in sharp)
    assert {line["sharpness"] for line in lines if line["step"] == "10"} == {
        "40.0",
        "80.0",
        "120.0",
    }
    drawn = sharpness_panels(study, sharp, "page")["data"]["values"]
    highest = max(row["y"] for row in drawn if row["batch"] == "batch 8")
    assert highest == pytest.approx(40 * 6 ** (1 / 3))
    assert {row["kind"] for row in drawn} == {"is", "limit"}
    assert folder.sharpness("pdf").stat().st_size > 1000
    assert sorted(names) == sorted(each.name for each in folder.path.iterdir())
    assert sharpness_panels(study, results, "page") == {}
    assert "sharpness" not in markdown(study, results)

    def preconditioned(row):
        found = [
            replace(
                m,
                stability_threshold=None,
                preconditioned_sharpness=None if m.step == 0 else 10 * (m.sharpness or 0),
                preconditioned_threshold=None if m.step == 0 else 800.0,
            )
            for m in row.sharpness
        ]
        return replace(row, sharpness=tuple(found))

    adam = [
        replace(each, arm=replace(each.arm, rows=tuple(map(preconditioned, each.arm.rows))))
        for each in sharp
    ]
    cells = {(c["scaling"], c["batch"], c["warmup"]): c for c in lines_of(cell_rows(adam))}
    warm = cells["sqrt", 32, "gradual:50%"]
    assert warm["sharpness_largest_preconditioned"] == 800
    assert warm["sharpness_largest_over_threshold"] == 1
    heading = "| largest preconditioned sharpness | largest sharpness over threshold |"
    assert heading in markdown(study, adam)
    assert "largest preconditioned" not in table


def test_the_folder_says_what_was_done(studied, tmp_path):
    """Tables, text and commands, with the figures of the cells; a figure of the width of a column,
    with a panel for each rule and crosses."""
    study, results = studied
    rates = found_rates(study, ())
    folder = StudyFolder(path=tmp_path / "out")

    write_study(study, rates, results, folder, width="column", cores=2)

    names = {path.name for path in folder.path.rglob("*.*")}
    assert names >= {"figure.pdf", "figure.svg", "figure.png", "table.tex", "cells.parquet"}
    table = markdown(study, results)
    assert "| sgd | linear | 32 | none | 0.04 | 1 of 3 | 65.00 (60.00, 70.00) |" in table
    assert (
        "| **gradual:50%** | 0.02 | 0 of 3 | 70.00 ± 24.84 | 69.00 ± 24.84 | +10.00 ± 0.00 |"
        in table
    )
    tex = latex(study, results)
    assert r"\textbf{gradual:50\%} & 0.02 & 0 of 3 & 70.00 $\pm$ 24.84" in tex
    assert tex.count(r"\toprule") == tex.count(r"\bottomrule") == 1
    text = protocol(study, rates, results, 2)
    for said in (
        "288 training, 32 validation and 40 test",
        "learning rate 0.01 at batch 8, given",
        "8 (72 updates), 32 (18 updates)",
        "18 runs in all",
        "far above that of a guess",
        "1 did",
        "trained for 2 epochs whatever the batch",
        "Each process trained with 2 cores",
        "as by default, but: train.log_every_steps = 5.",
    ):
        assert said in text, said
    made = (folder.path / "commands.sh").read_text()
    assert "  --cores 2 \\\n" in made
    assert "--cores" not in commands(study, "column", None)  # an accelerator trains
    assert "--warmup none,gradual:50%" in made
    with (folder.data / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 24
    assert [line["status"] for line in lines].count("diverged") == 1

    drawn = folder.figure("svg").read_text()

    width = float(re.findall(r'width="([0-9.]+)pt"', drawn)[0])
    assert 225 <= width <= 3.25 * 72 + 1
    for said in ("linear scaling", "root scaling", "no warmup", "gradual, 50 % of run"):
        assert said in drawn
    assert "crosses: diverged, in no mean (1 run)" in drawn


def test_the_protocol_names_whatever_is_not_as_by_default(run_file):
    """Of every table; a run that stops early is not said to train to its end."""
    fields = {
        "loss.label_smoothing": 0.1,
        "clipping.max_norm": 2.0,
        "averaging.name": "ema",
        "input.augmentation.flip": True,
        "train.early_stopping.patience": 7,
        "schedule.decay": "polynomial",
        "schedule.decay_power": 3.0,
        "schedule.decay_share": 0.25,
        "schedule.end_learning_rate": 1e-4,
    }
    study = plan_study(run_file, fields, batches="8", warmups="none", scalings="none", seeds=1)
    rows = [row(planned, 0.5) for planned in study.grid({"sgd": 0.01}).runs]

    text = protocol(study, found_rates(study, ()), cell_results(study, {"sgd": 0.01}, rows), 1)

    for said in (
        "trained for at most 2 epochs, until it stops early,",
        "loss.label_smoothing = 0.1",
        "clipping.max_norm = 2",
        "averaging.name = ema",
        "train.early_stopping.monitor = validation_loss",
        "train.early_stopping.patience = 7",
        "input.augmentation.flip = true",
        "decayed by a polynomial of power 3 over the last 0.25 of the run, to 0.0001",
    ):
        assert said in text, said


def test_the_protocol_names_no_decay_beyond_the_end(run_file):
    """The run has 2 epochs: a decay at 1 is in it, those at 30 and 60 are not."""
    fields = {"schedule.decay": "step", "schedule.decay_epochs": [1, 30, 60]}
    study = plan_study(run_file, fields, batches="8", warmups="none", scalings="none", seeds=1)
    rows = [row(planned, 0.5) for planned in study.grid({"sgd": 0.01}).runs]

    text = protocol(study, found_rates(study, ()), cell_results(study, {"sgd": 0.01}, rows), 1)

    assert "multiplied by 0.1 after epochs 1." in text


# Trained.

FLAGS = (
    *("--optimizers", "sgd:0.01", "--batches", "64", "--warmup", "none,gradual:50%"),
    *("--scaling", "linear", "--seeds", "2"),
)


@pytest.fixture(autouse=True, scope="module")
def programs(tmp_path_factory, compiles_quickly):
    """What is started compiles a program once, where another has not compiled it before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


def start(command, *flags):
    """Start a study in a process of its own."""
    return subprocess.Popen(
        [*command, *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Wait for a study that is to succeed."""
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def results_of(folder):
    """The bytes of all that a study writes beside its sweeps, and of their tables."""
    named = {path for path in (*folder.iterdir(), *(folder / "data").iterdir()) if path.is_file()}
    tables = ("results.parquet", "evaluations.parquet", "arms.json", "sweep.json")
    named |= {folder / "grid" / name for name in tables}
    return {str(path.relative_to(folder)): path.read_bytes() for path in named}


@pytest.mark.slow  # four processes import JAX: one that is timed, three that train
def test_a_study_comes_out_the_same_again_also_after_an_interruption(
    run_file, tmp_path, capsys, monkeypatch
):
    """Bit for bit but for clocks: by its own commands, stopped by Ctrl-C, which reaches the first
    process alone, and gone on with."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    files = ("--folder", str(whole), "--json", str(tmp_path / "out.json"))

    assert main(["study", "warmup", str(run_file), *FLAGS, *files]) == 0

    said = capsys.readouterr().out
    assert "4 runs, in 1 program: " in said
    each = "optimizer sgd; scaling linear; batch 64; warmup none, gradual:50%; 2 seeds; "
    assert f"Combined: {each}" in " ".join(said.split())
    assert re.search(r"Predicted: [\d.]+ (m?s|min)", said)
    assert len(json.loads((tmp_path / "out.json").read_text())["cells"]) == 2
    assert not list(whole.glob("*/runs/*/weights"))
    script = (whole / "commands.sh").read_text()
    script = script.replace("scalejax study", f"exec {sys.executable} -m scalejax study")
    (tmp_path / "commands.sh").write_text(script)  # beside the same run.toml

    # A study that was stopped before it trained: with --resume no time is predicted again.
    again.mkdir()
    (again / "run.toml").write_bytes(run_file.read_bytes())
    process = start(["sh", str(tmp_path / "commands.sh"), str(again), "--resume"])
    while process.poll() is None and not list(again.glob("grid/runs/*/measurements.jsonl")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "the same command with --resume continues" in said
    finish(start(["sh", str(tmp_path / "commands.sh"), str(again)], "--resume"))

    assert results_of(again) == results_of(whole)
    assert len(list(whole.glob("*/runs/*"))) == 4
    for path in whole.glob("*/runs/*"):
        assert figures(again / path.relative_to(whole)) == figures(path)
