"""The report holds what was measured and predicted, and needs nothing from outside."""

import json
import math
import re
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_sample_life import MEASURED

from scalejax.cli.main import main
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.hardware import Price
from scalejax.report import sources as report_sources
from scalejax.report.html import charts as report_charts
from scalejax.report.html.page import Page as ReportPage
from scalejax.report.html.report import render, write_report
from scalejax.report.sources import gap_between, read_sources
from scalejax.simulator.predict import Prediction, ScalingPrediction, scaling_prediction
from scalejax.sweep import SweepFolder, parse_grammar, plan_sweep
from scalejax.sweep.plan import begin_sweep
from scalejax.training.record import (
    EvaluationMeasurement,
    MeasurementLog,
    SharpnessMeasurement,
    Status,
    StatusChange,
    TrainMeasurement,
)

EXAMPLE = Path(__file__).parents[2] / "scalejax/config/examples/fashion_gradual_warmup.toml"


def prediction(device_count: int, step_seconds: float, *, used_gib: float = 10.0) -> Prediction:
    """A prediction of 32 samples per device on GPUs with 16 GiB."""
    communication = step_seconds / 10
    return Prediction(
        per_device_batch=32,
        cluster="dgx1-p100",
        chip="p100",
        device_count=device_count,
        mesh_axes=(("data", device_count), ("fsdp", 1), ("tensor", 1)),
        global_batch=32 * device_count,
        step_seconds=step_seconds,
        p10_step_seconds=step_seconds * 0.8,
        p90_step_seconds=step_seconds * 1.25,
        steps_per_epoch=100,
        epoch_seconds=100 * step_seconds,
        run_seconds=9000 * step_seconds,
        samples_per_second=32 * device_count / step_seconds,
        tokens_per_second=None,
        mfu=0.4,
        matmul_type="f32",
        peak_memory_bytes=int(used_gib * 2**30),
        memory_bytes=16 * 2**30,
        fits=used_gib <= 16,
        waterfall=(
            ("compute", step_seconds - communication),
            ("communication data", communication),
            ("input", None),
        ),
        communication_seconds=2 * communication,
        backend="cuda",
        notes=("p100: attainable rates are uncalibrated",),
    )


def study(title: str = "resnet50 on P100") -> ScalingPrediction:
    """Weak scaling from 8 to 256 devices, the step growing from 0.2 s to 0.25 s."""
    return scaling_prediction([prediction(8, 0.2), prediction(256, 0.25)], "weak", title)


def write_run(
    folder: Path,
    accuracies: list[float],
    *,
    diverged: bool = False,
    status: Status | None = None,
    loss: float = 2.0,
    noise_scale: float | None = None,
    data_wait_seconds: float | None = None,
    expert_load: float | None = None,
    expert_load_of_window: float | None = None,
) -> Path:
    """A run's folder with an evaluation per epoch, each after ten steps of 5 ms."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(EXAMPLE.read_text())
    serialization.save(prediction(8, 0.004), folder / "prediction.json")
    with closing(MeasurementLog(folder / "measurements.jsonl")) as log:
        for epoch, accuracy in enumerate(accuracies, start=1):
            step, seconds = 10 * epoch, 0.05 * epoch
            log.append(
                TrainMeasurement(
                    step=step,
                    epoch=epoch,
                    loss=None if diverged else loss / epoch,
                    accuracy=accuracy,
                    learning_rate=0.01 * epoch,
                    step_seconds=0.005,
                    samples_per_second=512 / 0.005,
                    elapsed_seconds=seconds,
                    noise_scale=noise_scale,
                    data_wait_seconds=data_wait_seconds,
                    expert_load=expert_load,
                    expert_load_of_window=expert_load_of_window,
                )
            )
            log.append(
                EvaluationMeasurement(
                    step=step,
                    epoch=epoch,
                    test_loss=0.5,
                    test_accuracy=accuracy,
                    examples=2000,
                    seconds=0.1,
                    elapsed_seconds=seconds,
                )
            )
        status = status or ("diverged" if diverged else "completed")
        log.append(
            StatusChange(
                step=0,
                status=status,
                message="",
                elapsed_seconds=1.0,
                cause="not_finite" if diverged else None,
            )
        )
    return folder


class Page(HTMLParser):
    """What a browser would fetch, the text of every cell, and the charts with their places."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.cells: list[str] = []
        self.places: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        data = re.search(r'id="charts">(.*?)</script>', html, re.DOTALL)
        self.charts: dict[str, dict] = json.loads(data.group(1)) if data else {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what is fetched, and where charts go."""
        values = dict(attrs)
        self._open.append(tag)
        self.fetched += [v for name in ("src", "href") if (v := values.get(name)) and v[0] != "#"]
        if values.get("class") == "chart":
            self.places.append(values["id"] or "")

    def handle_data(self, data: str) -> None:
        """Note the text of cells."""
        if self._open and self._open[-1] == "td":
            self.cells.append(data)


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """A report of two runs and one prediction."""
    warm = write_run(tmp_path / "gradual-warmup", [0.6, 0.85])
    cold = write_run(tmp_path / "no-warmup", [0.1, 0.1], diverged=True)
    serialization.save(study(), tmp_path / "p100.json")
    write_report([warm, cold, tmp_path / "p100.json"], tmp_path / "report.html")
    return Page((tmp_path / "report.html").read_text())


def test_report_fetches_nothing(page: Page):
    """The file is read on a plane: no script, style, font or picture from elsewhere."""
    assert page.fetched == []


def test_report_holds_every_figure_of_a_run(page: Page):
    """Status, batch, peak rate and accuracies stand in the table."""
    row = page.cells[page.cells.index("gradual-warmup") :][:8]

    assert row[:5] == ["gradual-warmup", "completed", "512", "0.02", "10"]
    assert row[5:] == ["n/a", "85.0 %", "step 20"]
    assert "diverged (not finite)" in page.cells


def test_report_says_how_far_losses_are_from_those_of_the_first_run(page: Page, tmp_path: Path):
    """Losses 2 / epoch and 2.5 / epoch, warmup 3 epochs: 0.5 / epoch is between them."""
    runs = [
        write_run(tmp_path / name, [0.5] * 10, loss=loss)
        for name, loss in (("reference", 2.0), ("other", 2.5))
    ]
    sources = read_sources(runs)

    other = Page(render(sources, "")).cells
    gap = gap_between(*sources.runs)

    assert page.cells[page.cells.index("no-warmup", 16) :][:4] == ["no-warmup", "n/a", "n/a", "n/a"]
    assert gap is not None
    assert other[other.index("other", 16) :][:4] == [
        *("other", "3", f"{gap.max_gap:.3g}", f"{gap.mean_gap:.3g}")
    ]
    # A line at epoch e is of the parameters of epoch e - 0.1; straight between lines: 1 % too much.
    mean = 0.5 * math.log(10 / 3.1) / (10 - 3.1)
    assert gap.mean_gap == pytest.approx(mean, rel=0.01)
    assert mean < gap.max_gap < 0.5 / 3.1


def test_the_sharpness_is_drawn_with_the_threshold_of_the_rate(page: Page, tmp_path: Path):
    """Where it was measured, and nowhere else."""
    run = write_run(tmp_path / "measured", [0.5, 0.6])
    with closing(MeasurementLog(run / "measurements.jsonl")) as log:
        for step, sharpness in ((0, 12.5), (10, 17.25)):
            line = SharpnessMeasurement(
                step=step,
                epoch=step / 10,
                sharpness=sharpness,
                sharpness_error=0.0,
                learning_rate=0.1,
                stability_threshold=38.0 if step else None,
                seconds=1.0,
                elapsed_seconds=1.0,
            )
            log.append(line)

    charts = json.dumps(Page(render(read_sources([run]), "")).charts)

    assert charts.count('"title": "sharpness"') == 1
    assert "17.25" in charts
    assert charts.count("38.0") == 1
    assert '"title": "sharpness"' not in json.dumps(page.charts)


def test_the_noise_scale_is_drawn_where_it_was_measured(page: Page, tmp_path: Path):
    """And nowhere else."""
    run = write_run(tmp_path / "measured", [0.5, 0.6], noise_scale=870.0)

    charts = Page(render(read_sources([run]), "")).charts

    assert json.dumps(charts).count("noise scale (samples)") == 1
    assert "870" in json.dumps(charts)
    assert "noise scale" not in json.dumps(page.charts)


def test_the_load_of_experts_is_drawn_of_runs_that_have_them(page: Page, tmp_path: Path):
    """By windows where these were measured, else by updates; and not without experts."""
    updates = write_run(tmp_path / "updates", [0.5, 0.6], expert_load=3.125)
    windows = write_run(
        tmp_path / "windows", [0.5, 0.6], expert_load=3.125, expert_load_of_window=1.375
    )

    drawn = [json.dumps(Page(render(read_sources([run]), "")).charts) for run in (updates, windows)]

    assert [each.count("fullest expert over the mean") for each in drawn] == [1, 1]
    assert ["3.125" in each for each in drawn] == [True, False]
    assert "1.375" in drawn[1]
    assert "fullest expert" not in json.dumps(page.charts)


def test_waiting_for_input_is_drawn_where_it_was_worth_a_word(page: Page, tmp_path: Path):
    """2 of 5 ms is; 0.1 of 5 is in the table alone; a record of before it was measured says n/a."""
    waited = write_run(tmp_path / "waited", [0.5, 0.6], data_wait_seconds=0.002)
    fed = write_run(tmp_path / "fed", [0.5, 0.6], data_wait_seconds=0.0001)

    of_waited, of_fed = (Page(render(read_sources([run]), "")) for run in (waited, fed))

    assert json.dumps(of_waited.charts).count("time without a batch") == 1
    assert "time without a batch" not in json.dumps(of_fed.charts)
    shown = [each.cells[each.cells.index("-20%") + 1] for each in (of_waited, of_fed, page)]
    assert shown == ["40.0 %", "2.0 %", "n/a"]


def test_the_life_of_a_batch_is_shown_where_it_was_measured(page: Page, tmp_path: Path):
    """That of the last epoch, beside the prediction."""
    folder = write_run(tmp_path / "lived", [0.5])
    with closing(MeasurementLog(folder / "measurements.jsonl")) as log:
        log.append(replace(MEASURED, decode_seconds=1.0))
        log.append(MEASURED)

    cells = Page(render(read_sources([folder]), "")).cells

    assert cells[cells.index("decode") :][:5] == [
        "decode",
        "20 ms",
        "n/a",
        "training process",
        "in part",
    ]
    assert cells[cells.index("compute + exchange") :][:3] == ["compute + exchange", "30 ms", "4 ms"]
    assert cells.count("augment") == 1
    assert "augment" not in page.cells


def test_report_compares_prediction_and_measurement(page: Page):
    """4 ms predicted for a step that took 5 ms is an error of -20 %."""
    assert page.cells[page.cells.index("5 ms") :][:3] == ["5 ms", "4 ms", "-20%"]


def test_report_holds_every_figure_of_a_prediction(page: Page):
    """Times, rate, utilisation, efficiency and memory, a row for each number of devices."""
    figures, ranges = (place for place, cell in enumerate(page.cells) if cell == "256")

    assert page.cells[figures:][:9] == [
        *("256", "250 ms", "25 s", "37 min 30 s", "32.8 k"),
        *("40.0 %", "80.0 %", "10.0 GiB", "yes"),
    ]
    assert page.cells[ranges:][:5] == ["256", "200 ms", "250 ms", "312 ms", "n/a"]


def test_the_head_says_what_came_of_runs(tmp_path: Path):
    """The best that did not diverge; its step of 5 ms was predicted at 4, from 3.2 to 5."""
    good = write_run(tmp_path / "good", [0.5, 0.85])
    bad = write_run(tmp_path / "bad", [0.9], diverged=True)

    html = render(read_sources([bad, good]), "mine")

    assert "good, the best of 2 runs: 85.0 % of the test examples. 1 run diverged." in html
    assert "20% below the measured, which is in p10 to p90, 3.2 ms to 5 ms" in html
    assert "90% of the predicted step; then communication data, 10%" in html


def test_the_head_says_what_a_predicted_run_costs(tmp_path: Path):
    """9,000 steps of 0.25 s are 37.5 minutes, on 256 devices 160 device-hours, at the price
    of the cluster as it was predicted, own or listed; where the most devices do not fit, it is of
    those that do."""
    price = Price(dollars_per_device_hour=1500, date="2026-05")
    known = [replace(each, price=price) for each in study().predictions]
    larger = replace(prediction(512, 0.3, used_gib=17.0), price=price)
    path = tmp_path / "study.json"
    serialization.save(scaling_prediction([*known, larger], "weak", "mine"), path)

    html = render(read_sources([path]), "mine")

    assert "mine: on 256 devices the run takes 37 min 30 s, and it fits." in html
    assert "<b>$240,000</b>" in html
    assert "160 device-hours at $1500, list price of 2026-05" in html
    assert "p10 to p90: 30 min 00 s to 46 min 52 s" in html
    assert "10.0 GiB of 16.0 GiB" in html


def test_the_wheel_scrolls_the_page_and_zooms_with_ctrl(page: Page):
    """Charts that took every turn of it held readers fast on their way down."""
    zooms = re.findall(r'"zoom": "([^"]*)"', json.dumps(page.charts))

    assert set(zooms) == {"wheel![event.ctrlKey]"}
    assert '"bind": "scales"' in json.dumps(page.charts)


def test_every_chart_has_its_place_and_data(page: Page):
    """Three of runs, two of all predictions, two of each prediction."""
    assert page.places == list(page.charts)
    assert len(page.charts) == 7
    for spec in page.charts.values():
        assert "vega-lite" in spec["$schema"]
        assert '"values": [{' in json.dumps(spec)


def test_every_part_of_a_step_has_a_colour_of_its_own():
    """Host, overhead and stragglers too, and communication over several axes."""
    parts = [
        *("compute", "memory", "launch", "communication data", "communication fsdp"),
        *("communication tensor", "communication data x fsdp", "communication", "contention"),
        *("host", "overhead", "stragglers", "input", "checkpoints", "failures"),
    ]

    assert len(set(report_charts.part_colors(parts))) == len(parts)
    assert report_charts.part_colors(["overhead"]) == report_charts.part_colors(parts)[10:11]


def test_curves_that_lie_on_another_are_dashed(tmp_path: Path):
    """The second of two equal runs; the one that differs is whole."""
    equal, other = [0.6, 0.85], [0.6, 0.87]
    runs = read_sources(
        [
            write_run(tmp_path / name, accuracies)
            for name, accuracies in (("a", equal), ("b", equal), ("c", other))
        ]
    ).runs

    rows = report_charts.accuracy(runs, "test")["data"]["values"]

    assert {row["label"]: row["covers"] for row in rows} == {"a": 0, "b": 1, "c": 0}


def test_a_run_that_diverged_is_a_cross_and_leaves_the_axis_to_the_others(tmp_path: Path):
    """It has no accuracy, though it was evaluated; its losses of 1e35 are beyond the axis, which
    ends at twice the largest of the other."""
    good = write_run(tmp_path / "good", [0.6, 0.8])
    bad = write_run(tmp_path / "bad", [0.3, 0.1], loss=1e35, status="diverged")
    runs = read_sources([bad, good]).runs

    curves, crosses = report_charts.accuracy(runs, "test")["layer"]
    losses, above = report_charts.training_loss(runs)["layer"]
    page = Page(render(read_sources([good, bad]), ""))

    assert {row["run"] for row in curves["data"]["values"]} == {"good"}
    assert [(row["run"], row["epoch"]) for row in crosses["data"]["values"]] == [("bad", 2)]
    assert crosses["mark"]["shape"] == "cross"
    for chart in (curves, losses):  # colours agree between charts
        assert chart["encoding"]["color"]["scale"]["domain"] == ["bad", "good"]
    assert losses["encoding"]["y"]["scale"]["domainMax"] == 4.0
    assert len(losses["data"]["values"]) == 4
    assert above["encoding"]["y"] == {"value": 8}
    assert page.cells[page.cells.index("bad") :][5:8] == ["n/a"] * 3


def test_long_cells_may_break_into_lines():
    """So that a table fits the page."""
    page = ReportPage()
    page.add_table(["what", "why"], [["short", "a reason of more than two dozen letters"]])

    html = page.render("title")

    assert "<td>short</td>" in html
    assert '<td class="long">a reason of' in html


def test_names_of_the_user_are_text_not_markup(tmp_path: Path):
    """A title cannot end the script, or open an element."""
    serialization.save(study("</script><b>x</b>"), tmp_path / "p.json")

    html = render(read_sources([tmp_path / "p.json"]), "<i>t</i>")

    assert "<b>x</b>" not in html
    assert "<i>t</i>" not in html
    assert len(Page(html).charts) == 4


def test_a_framework_other_than_xla_is_named(tmp_path: Path):
    """Of a single prediction too, whose title does not say it."""
    for name in ("megatron-lm", "xla"):
        serialization.save(replace(prediction(8, 0.2), framework=name), tmp_path / f"{name}.json")

    html = render(read_sources([tmp_path / "megatron-lm.json", tmp_path / "xla.json"]), "")

    assert html.count("Weak scaling, by the framework megatron-lm: ") == 1
    assert html.count("Weak scaling: ") == 1


def test_runs_that_differ_in_their_seed_share_a_colour(tmp_path: Path):
    """`no-warmup/seed-0` and `no-warmup/seed-1` are one family of two runs."""
    folders = [write_run(tmp_path / "no-warmup" / f"seed-{n}", [0.1]) for n in (0, 1)]

    runs = read_sources(folders).runs

    assert {run.family for run in runs} == {"no-warmup"}
    assert [run.label for run in runs] == ["no-warmup, seed-0", "no-warmup, seed-1"]


def sweep_of_48(folder: Path) -> Path:
    """16 arms of 3 seeds, whose last accuracies are 0.6, 0.61 and 0.62; the last one diverged."""
    variables = [
        "batch.global_batch=[64,128,256,512]",
        "schedule.base_learning_rate=[0.01,0.02,0.04,0.08]",
        "seed=[0,1,2]",
    ]
    plan = plan_sweep(EXAMPLE, parse_grammar([], variables, []))
    files = SweepFolder(path=folder)
    begin_sweep(plan, files, resume=False)
    for each in plan.runs:
        last = 0.6 + 0.01 * (each.index % 3)
        write_run(files.run(each.index).path, [0.5, last], diverged=each.index == 47)
    return folder


def test_a_sweep_is_reported_as_means_over_seeds_with_the_curves_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A row for each arm, a colour for each, and no rows of 48 runs."""
    folder = sweep_of_48(tmp_path / "sweep")

    write_report([folder], tmp_path / "report.html")

    page = Page((tmp_path / "report.html").read_text())
    first = page.cells[:5]
    assert first == [
        "global_batch=64 base_learning_rate=0.01",
        "3 of 3",
        "61.00 ± 2.48 %",
        "reference",
        "0",
    ]
    cells = [cell for cell in page.cells if cell.strip()]
    assert len(cells) == 16 * 5
    assert cells[-1] == "1"
    curves, crosses = page.charts["chart0"]["layer"]
    values = curves["data"]["values"]
    assert len({row["label"] for row in values}) == 47
    assert len(crosses["data"]["values"]) == 1  # the one that diverged
    assert len({row["run"] for row in values}) == 16

    (sweep,) = read_sources([folder]).sweeps
    assert sweep.kept_every == 1
    monkeypatch.setattr(report_sources, "MOST_LINES", 48)  # of 96
    (thinner,) = read_sources([folder]).sweeps
    assert thinner.kept_every == 2
    assert [len(run.record.training) for run in thinner.runs] == [1] * 48
    assert [len(run.record.evaluations) for run in thinner.runs] == [2] * 48


def test_a_sweep_beside_a_run_is_told_apart_by_its_name(tmp_path: Path):
    """The run has its own table, and labels of the sweep say whose they are."""
    sources = read_sources([write_run(tmp_path / "run", [0.5]), sweep_of_48(tmp_path / "lr")])

    assert [run.label for run in sources.runs] == ["run"]
    assert sources.sweeps[0].runs[0].label == "lr: global_batch=64 base_learning_rate=0.01 seed=0"
    assert len(sources.curves) == 49


@pytest.mark.parametrize(
    ("devices", "backend", "predicted", "said"),
    [
        (8, "cpu", 1e-4, "50 times the predicted step: virtual devices share the cores"),
        (1, "cpu", 1e-4, "50 times the predicted step: other work on this machine"),
        (8, "cuda", 1e-3, "5 times the predicted step: other work on this machine"),
        (8, "cpu", 2e-3, None),
    ],
)
def test_a_step_far_slower_than_predicted_is_not_left_uncommented(
    tmp_path: Path, devices: int, backend: str, predicted: float, said: str | None
):
    """5 ms were measured; to a factor of 3, nothing is to be said."""
    folder = write_run(tmp_path / "run", [0.5])
    made = replace(prediction(devices, predicted), backend=backend)
    serialization.save(made, folder / "prediction.json")

    write_report([folder], tmp_path / "report.html")

    assert ("times the predicted step" in (tmp_path / "report.html").read_text()) == bool(said)
    assert said is None or said in (tmp_path / "report.html").read_text()


def test_single_prediction_is_reported_too(tmp_path: Path):
    """The `prediction.json` of a run can be named by itself."""
    folder = write_run(tmp_path / "run", [0.5])

    (single,) = read_sources([folder / "prediction.json"]).studies

    assert single.efficiencies == (1.0,)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "neither a folder nor a file"),
        ("{3", "not valid JSON"),
        ('{"a": 1}', "neither the folder of a run nor a prediction"),
        ('{"predictions": 3}', "predictions=3 is refused"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path: Path, text: str | None, match: str):
    """Missing, damaged and foreign files are told apart."""
    path = tmp_path / "source.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=match):
        read_sources([path])


def test_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In one sentence, with exit code 2."""
    assert main(["report", str(tmp_path)]) == 2
    answer = " ".join(capsys.readouterr().err.split())
    assert re.fullmatch(r"error: .* holds no run: .*", answer)


def test_report_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]):
    """There is no empty report."""
    assert main(["report"]) == 2
    assert "a report needs" in " ".join(capsys.readouterr().err.split())
