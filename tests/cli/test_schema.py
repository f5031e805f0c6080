"""Every file that says its kind has a schema, generated from its class, which real output meets."""

import csv
import json
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from program_cases import PAPER, gather, matmul, program_of
from test_report import write_run

import scalejax
from scalejax.cli.commands import COMMANDS
from scalejax.cli.main import main
from scalejax.cli.schema import schemas
from scalejax.core import serialization
from scalejax.core.tabular import Tabular, to_csv
from scalejax.hardware import (
    NO_SITE,
    RunConditions,
    Site,
    load_cluster,
    load_cluster_and_site,
    save_cluster,
)
from scalejax.measure.bench.results import BenchResults, BenchRow
from scalejax.measure.doctor import Finding, Findings
from scalejax.measure.input import bench as input_bench
from scalejax.measure.input.bench import Grid
from scalejax.planning.time_to_target.plan import Plan, PlanPoint
from scalejax.report.listings import Calibrated, RunList, report_contents, run_summary
from scalejax.report.sources import Sources
from scalejax.simulator.comparison import compare
from scalejax.simulator.explain import explain
from scalejax.simulator.predict import ScalingPrediction, predict
from scalejax.simulator.ramp import PhasePrediction, RampPrediction
from scalejax.sweep.results import ArmTable, ResultTable
from scalejax.sweep.study import CellRow, MetricSummary, RateRow, SharpnessSummary, StudyTable
from scalejax.training.record import RunRecord, StatusChange, TrainMeasurement

PACKAGE = Path(scalejax.__file__).parent
WARMUP = PACKAGE / "config/examples/fashion_gradual_warmup.toml"
RUN = """\
[model]
name = "gpt"
layers = 1
hidden = 64
heads = 2
[data]
name = "synthetic_tokens"
tokens = 32
vocabulary = 101
train_examples = 64
[batch]
global_batch = 8
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
[train]
epochs = 1
"""
GPT = "FOLDER/run.toml --cluster dgx-h100 --devices 2,4 --confirm 0"
LOSS = "--target loss=3 --model llama-like:N=100m --cluster dgx-h100 --devices 8"
PREDICTED = f"{WARMUP} --cluster dgx-h100 --devices 8"

ONE_SETTING = "--batches 8 --networks 1 --precisions float32 --frameworks xla --layouts 1"

_WITHOUT_RESULT = {"config migrate", "schema", "completion"}
"""Commands whose results are files of another format."""


@pytest.fixture(scope="module")
def known() -> dict[str, dict]:
    """All schemas."""
    return schemas()


def refused(schema: dict, document: Any) -> list[str]:
    """What a document has that its schema refuses."""
    return [error.message for error in Draft202012Validator(schema).iter_errors(document)]


def require_strict(known: dict[str, dict], text: str) -> dict:
    """Hold a JSON file against the schema of its kind; one more field, or one less, is refused."""
    document = json.loads(text)
    schema = known[document["kind"]]
    Draft202012Validator.check_schema(schema)
    assert refused(schema, document) == []
    assert refused(schema, document | {"unknown": 1})
    for name in document:
        assert refused(schema, {key: value for key, value in document.items() if key != name})
    return document


def test_every_kind_of_document_has_a_schema(known):
    """Of each class that says what its files are; none leaves a table open whose fields are
    known."""
    kinds = set()
    for path in PACKAGE.rglob("*.py"):
        kinds |= set(re.findall(r'^@(?:serialization\.)?document\("(\w+)"', path.read_text(), re.M))

    assert kinds <= known.keys()
    assert len(kinds) > 25
    for schema in known.values():
        for each in (schema, *schema.get("$defs", {}).values()):
            if "properties" in each:
                assert each["additionalProperties"] is False


def test_every_command_with_a_result_writes_json_and_csv():
    """By flags of the same names."""
    for name, command in COMMANDS.items():
        flags = {each.name for each in fields(command)}
        assert {"json", "csv"} <= flags or name in _WITHOUT_RESULT, name


@pytest.mark.parametrize(
    ("typed", "kind"),
    [
        ("models --grep llama", "models"),
        ("frameworks", "frameworks"),
        ("hardware", "hardware"),
        ("hardware dgx-h100", "hardware"),
        ("config fields batch", "config_fields"),
        (f"config show {WARMUP} --devices 8", "resolved_run"),
        (f"schedule plot {WARMUP} --devices 8 --output FOLDER/schedule.svg", "schedule"),
        (f"search {GPT}", "search"),
        (f"plan {LOSS}", "plan"),
        (f"cost {GPT}", "cost"),
        (
            "page FOLDER/run.toml --cluster dgx-h100 --devices 2 --output FOLDER/page.html "
            f"--confirm 0 {ONE_SETTING}",
            "page",
        ),
        ("data convert FOLDER/images.npz FOLDER/images.parquet", "conversion"),
        ("report FOLDER/run --output FOLDER/report.html", "report"),
        pytest.param(
            "data bench FOLDER/run.toml --output FOLDER/input.toml",
            "input_bench",
            marks=pytest.mark.slow,
        ),
        pytest.param(f"predict {PREDICTED}", "scaling_prediction", marks=pytest.mark.slow),
        pytest.param("validate hf_cluster_collectives_256MB", "validation", marks=pytest.mark.slow),
    ],
)
def test_what_a_command_writes_meets_its_schema(
    typed: str,
    kind: str,
    known,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Slow are those that compile, measure, or predict hundreds of rows. What is printed fits 80
    columns, but for lines with paths.

    With the whole result as JSON, and its rows as CSV of equally many columns.
    """
    (tmp_path / "run.toml").write_text(RUN)
    images = np.zeros((3, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(3))
    write_run(tmp_path / "run", [0.5])
    out, table = tmp_path / "out.json", tmp_path / "out.csv"
    command = typed.replace("FOLDER", str(tmp_path)).split()
    monkeypatch.setenv("COLUMNS", "80")
    quick = Grid(repeats=1, seconds=0.01)
    monkeypatch.setattr(input_bench, "bench", partial(input_bench.bench, grid=quick))

    assert main([*command, "--json", str(out), "--csv", str(table)]) == 0

    printed = "".join(capsys.readouterr()).splitlines()
    assert [each for each in printed if len(each.rstrip()) > 80 and str(tmp_path) not in each] == []
    assert require_strict(known, out.read_text())["kind"] == kind
    with table.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert rows
    assert {len(row) for row in rows} == {len(head)}


def _results() -> list[Tabular | ArmTable]:
    """A result of each command that compiles, measures or trains, made without these."""
    program = program_of(matmul("dot", 10), gather("gather", 5))
    one = predict(program, PAPER)
    scaling = ScalingPrediction(
        title="it", scaling="weak", baseline_devices=8, predictions=(one,), efficiencies=(1.0,)
    )
    finding = Finding(topic="host", name="cores", value="2", processes=(0, 1))
    timed = BenchRow(
        name="a", varied={"devices": 2}, global_batch=8, per_device_batch=4, rounds=1,
        median_step_seconds=0.1,
    )  # fmt: skip
    metric = MetricSummary(
        mean=0.5, low=None, high=None, count=1, difference=None, difference_low=None,
        difference_high=None, difference_count=0,
    )  # fmt: skip
    cell = CellRow(
        optimizer="sgd", scaling="sqrt", warmup="none", batch=8, base_learning_rate=0.1,
        peak_learning_rate=0.1, warmup_steps=0.0, runs=1, diverged=0, chosen=False, trained_only=0,
        diverged_only=0, validation_accuracy=metric, validation_loss=metric, test_accuracy=metric,
        test_loss=metric, sharpness=SharpnessSummary(largest=8.0, last=2.0, count=1),
    )  # fmt: skip
    point = PlanPoint(
        cluster="it", device_count=8, global_batch=64, per_device_batch=8, steps=10.0,
        step_seconds=0.1, goodput=None, run_seconds=1.0, p10_run_seconds=None,
        p90_run_seconds=None, device_hours=1.0, cost=1.0,
    )  # fmt: skip
    plan = Plan(
        title="it", target="loss 3", steps_source="its run", has_convergence=True, is_priced=False,
        points=(point,),
    )  # fmt: skip
    rate = RateRow(optimizer="sgd", learning_rate=0.1, validation=None, chosen=True, at_edge=False)
    return [
        one,
        scaling,
        explain(program, PAPER),
        compare(program, program, PAPER),
        RampPrediction(
            title="it", phases=(PhasePrediction(first_epoch=0, epochs=1, study=scaling),)
        ),
        Findings(findings=(finding,)),
        BenchResults(rows=(timed,)),
        Calibrated(cluster=load_cluster("tpu-v5p"), processes=None, notes=("a note",)),
        ArmTable(arms=({"optimizer.momentum": 0.9, "runs": 2},)),
        ResultTable(rows=({"run": 0, "optimizer.nesterov": True},)),
        StudyTable(rates=(rate,), cells=(cell,)),
        report_contents(Sources(runs=(), studies=(scaling,)), "report.html"),
        report_contents(Sources(runs=(), studies=(), plans=(plan,)), "report.html"),
    ]


@pytest.mark.parametrize("found", _results(), ids=lambda found: type(found).__name__)
def test_results_meet_their_schemas(found: Tabular, known, tmp_path: Path):
    """Saved as commands save them, and as a table."""
    serialization.save(found, tmp_path / "out.json")

    require_strict(known, (tmp_path / "out.json").read_text())
    if isinstance(found, Tabular):
        head, *rows = csv.reader(to_csv(found.to_rows()).splitlines())
        assert rows
        assert {len(row) for row in rows} == {len(head)}


def test_a_run_that_diverged_has_no_result(known, tmp_path: Path):
    """In what train, launch, quickstart and report write: its times, how it ended, and no loss."""
    ended, lost = (
        run_summary(RunRecord.load(write_run(tmp_path / name, [0.25, 0.5], **how)), None, name)
        for name, how in {"a": {}, "b": {"status": "diverged"}}.items()
    )

    assert (ended.steps, ended.epochs, ended.step_seconds) == (20, 2, 0.005)
    assert (ended.loss, ended.test_accuracy) == (1.0, 0.5)
    assert (lost.status, lost.steps, lost.step_seconds) == ("diverged", 20, 0.005)
    assert lost.loss is lost.test_loss is lost.test_accuracy is None
    serialization.save(RunList(runs=(ended, lost)), tmp_path / "out.json")
    require_strict(known, (tmp_path / "out.json").read_text())


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("bench_results", "rows"),
        ("sweep_results", "rows"),
        ("sweep_arms", "arms"),
        ("warmup_study", "rates"),
        ("warmup_study", "cells"),
    ],
)
def test_rows_hold_no_nonsense(kind: str, rows: str, known, tmp_path: Path):
    """Nor do what sweeps vary, whose columns no class knows: their values are single."""
    (result,) = (e for e in _results() if serialization.document_of(type(e))[0] == kind)
    serialization.save(result, tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())

    has_own_columns = kind.startswith("sweep")
    for value, is_accepted in ((0.1, has_own_columns), ([1], False), ({"a": [{}]}, False)):
        more = document | {rows: [document[rows][0] | {"optimizer.own": value}]}
        assert (refused(known[kind], more) == []) is is_accepted


def test_lines_of_measurements_have_a_schema(known):
    """Each kind of line, and no other."""
    update = TrainMeasurement(
        step=1, epoch=0.1, loss=None, accuracy=0.1, learning_rate=0.1, samples_per_second=9.0,
        step_seconds=0.1, elapsed_seconds=1.0,
    )  # fmt: skip
    status = StatusChange(step=1, status="completed", message="", elapsed_seconds=1.0)
    schema = known["measurements.jsonl"]

    for each in (update, status):
        line = serialization.plain(each)
        assert isinstance(line, dict)
        assert refused(schema, line) == []
        assert refused(schema, line | {"unknown": 1})
        assert refused(schema, line | {"kind": "other"})


def test_run_files_have_a_schema(known):
    """The examples meet it; a field that there is not is refused, as train does."""
    for path in (PACKAGE / "config/examples").glob("*.toml"):
        assert refused(known["run.toml"], serialization.load_toml(path)) == []
    assert refused(known["run.toml"], serialization.load_toml(WARMUP) | {"optimzer": {}})


@pytest.mark.parametrize(
    ("model", "is_accepted"),
    [
        ({"name": "gpt2-124m"}, True),
        ({"name": "gpt2-124m", "hidden": 512}, True),
        ({"name": "deepseek-v3", "moe": {"experts": 64}}, True),
        ({"name": "gpt2-124m", "hiden": 3}, False),
        ({"name": "gpt2-124m", "hidden": "x"}, False),
        ({"name": "deepseek-v3", "moe": {"expert": 64}}, False),
        ({"name": "gpt2-124m", "kv_heads": 4}, False),
        ({"name": "gpt2-125m"}, False),
    ],
)
def test_a_published_network_has_the_fields_of_its_architecture(model, is_accepted: bool, known):
    """All of which may be left out, those of tables within too."""
    run = serialization.load_toml(WARMUP) | {"model": model}

    assert (refused(known["run.toml"], run) == []) is is_accepted


def test_cluster_files_have_a_schema(known, tmp_path: Path):
    """Those of the catalogue, where chips and libraries are names, and those that calibrate writes,
    whole or with chips in files of their own."""
    schema = known["cluster.toml"]
    files = [*(PACKAGE / "hardware/clusters").glob("*.toml")]
    site = Site(conditions=RunConditions(step_cv=0.02))
    parts = {"chip": "chip.toml", "shared": [{"device_count": 2, "chip": "chip-2.toml"}]}
    for number, (where, replaced) in enumerate([(NO_SITE, None), (site, None), (site, parts)]):
        files.append(tmp_path / f"{number}.toml")
        save_cluster(load_cluster("dgx-h100"), where, files[-1], replaced)

    Draft202012Validator.check_schema(schema)
    assert {path.name: refused(schema, serialization.load_toml(path)) for path in files} == {
        path.name: [] for path in files
    }


OWN_CLUSTER = """
based_on = "dgx-h100"
network.bytes_per_second = 2e11
chip.attainable.matmul_fraction = 0.5
[conditions]
step_cv = 0.02
launches_block = true
dispatch = "deepep"
"""


def test_a_cluster_based_on_another_says_what_differs(known, tmp_path: Path):
    """In any table; without what it is based on it must be whole, and nothing may be misspelt."""
    (tmp_path / "own.toml").write_text(OWN_CLUSTER)
    load_cluster_and_site(str(tmp_path / "own.toml"))
    own = serialization.load_toml(tmp_path / "own.toml")
    schema = known["cluster.toml"]

    assert refused(schema, own) == []
    assert refused(schema, {name: own[name] for name in own if name != "based_on"})
    for wrong in (
        {"chip": "h1000"},
        {"library": "ncll"},
        {"based_on": "dgx-h1000"},
        {"network": {"bytes_per_secnd": 1e9}},
        {"price": 3.0},
        {"conditions": {"step_cvv": 0.1}},
        {"conditions": {"dispatch": "deep"}},
        {"netwrk": {}},
    ):
        assert refused(schema, own | wrong), wrong


def test_tables_within_rows_are_columns():
    """As dotted names; lists are JSON, what is unknown is empty, and quotes are doubled."""
    rows: list[Any] = [{"a": {"b": 1, "c": {"d": 'say "x"'}}, "e": [1, 2]}, {"e": (), "f": 0.5}]

    assert to_csv(rows) == 'a.b,a.c.d,e,f\n1,"say ""x""","[1, 2]",\n,,[],0.5\n'


def test_schemas_are_listed_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By kind; an unknown one is told the nearest."""
    assert main(["schema"]) == 0
    listed = capsys.readouterr().out
    assert max(map(len, listed.splitlines())) <= 80
    assert main(["schema", "cost"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["properties"]["kind"] == {"const": "cost"}
    assert "step_seconds" in printed["$defs"]["CostRow"]["properties"]
    assert main(["schema", "--output", str(tmp_path)]) == 0
    written = {path.name.removesuffix(".schema.json") for path in tmp_path.iterdir()}
    assert written == schemas().keys() == {line.split()[0] for line in listed.splitlines()}
    assert main(["schema", "costs"]) == 2
    assert "did you mean 'cost'" in capsys.readouterr().err
