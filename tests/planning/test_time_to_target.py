"""Plans: the right cluster, devices and batch by hand, an honest no, and what is printed."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from program_cases import kept_jobs
from rich.console import Console

from scalejax.cli.main import main
from scalejax.cli.predict import parse_counts
from scalejax.config.run import load_config, published_run, with_fields
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.core.units import parse_seconds
from scalejax.hardware import RunConditions, Site, load_cluster
from scalejax.planning.bill import Rates
from scalejax.planning.convergence import ConvergenceData, Estimate, Point
from scalejax.planning.time_to_target.notes import missed
from scalejax.planning.time_to_target.plan import (
    Plan,
    PlanPoint,
    answered,
    deadline_probability,
    knee_of,
    pareto_front,
    plan_point,
)
from scalejax.planning.time_to_target.run import ClusterOption, find_convergence, plan_run
from scalejax.report.html.plan import EDGE, MARKS, save_plan
from scalejax.report.html.report import write_report
from scalejax.report.terminal.plan import planned
from scalejax.simulator.predict import Prediction
from scalejax.training.record import (
    EvaluationMeasurement,
    MeasurementLog,
    RunFolder,
    TrainMeasurement,
)
from scalejax.xla.closed_form import program_in_closed_form

RUN = """
[model]
name = "mlp"
hidden = [64]
[data]
name = "synthetic_images"
train_examples = 60000
image_size = 28
channels = 1
classes = 10
[batch]
per_device_batch = 32
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.1
[train]
epochs = 10
"""


def prediction_of(devices: int, step_seconds: float, **fields: object) -> Prediction:
    """A step of 100 samples a device."""
    values = {
        "cluster": "paper",
        "chip": "paper",
        "device_count": devices,
        "mesh_axes": (("data", devices),),
        "global_batch": 100 * devices,
        "per_device_batch": 100,
        "step_seconds": step_seconds,
        "steps_per_epoch": None,
        "epoch_seconds": None,
        "run_seconds": None,
        "samples_per_second": None,
        "tokens_per_second": None,
        "mfu": None,
        "matmul_type": None,
        "peak_memory_bytes": 1,
        "memory_bytes": 2,
        "fits": True,
        "waterfall": (("compute", step_seconds),),
        "communication_seconds": 0.0,
        "backend": "closed_form",
        "notes": (),
    }
    return Prediction(**{**values, **fields})  # type: ignore[arg-type]


def point(
    devices: int, hours: float, *, cost: float | None = None, cluster: str = "a"
) -> PlanPoint:
    """A way that takes so many hours."""
    made = plan_point(prediction_of(devices, hours), 3600.0)
    made = replace(made, cluster=cluster, cost=made.device_hours if cost is None else cost)
    return replace(made, p10_run_seconds=made.run_seconds / 2, p90_run_seconds=made.run_seconds * 2)


def plan_of(*points: PlanPoint, deadline: float | None = None, budget: float | None = None) -> Plan:
    """A plan over points, with limits in hours and device-hours."""
    plan = Plan(
        points=points,
        title="by hand",
        target="done",
        steps_source="nowhere",
        has_convergence=True,
        is_priced=False,
        deadline_seconds=None if deadline is None else deadline * 3600,
        budget=budget,
    )
    return answered(plan)


BY_HAND = (point(1, 10), point(2, 6), point(4, 4), point(8, 3.5), point(16, 3.4))
"""Device-hours 10, 12, 16, 28, 54.4; products with time 100, 72, 64, 98, 185."""


# --- arithmetic ---


def test_time_to_target_is_steps_times_step():
    """1000 steps of 3.6 s on 8 devices: an hour, 8 device-hours, 20 at a price of 2.5."""
    found = plan_point(prediction_of(8, 3.6), 1000, rates=Rates(price_per_device_hour=2.5))

    assert found.run_seconds == pytest.approx(3600)
    assert (found.device_hours, found.cost) == (pytest.approx(8), pytest.approx(20))
    assert found.p10_run_seconds is None


def test_failures_make_a_run_longer():
    """With four fifths of the time for steps that count, an hour of steps takes 75 minutes."""
    found = plan_point(prediction_of(8, 3.6, goodput=0.8), 1000)

    assert found.run_seconds == pytest.approx(4500)


def test_ranges_of_steps_and_step_add_in_quadrature():
    """Factors e^0.3 and e^0.4 upwards, e^-0.03 and e^-0.04 downwards."""
    steps = Estimate(p10=1000 * math.exp(-0.03), p50=1000, p90=1000 * math.exp(0.3))
    step = prediction_of(
        8, 3.6, p10_step_seconds=3.6 * math.exp(-0.04), p90_step_seconds=3.6 * math.exp(0.4)
    )

    found = plan_point(step, steps)

    assert found.p90_run_seconds == pytest.approx(3600 * math.exp(0.5))
    assert found.p10_run_seconds == pytest.approx(3600 * math.exp(-0.05))


def test_answers_by_hand():
    """Soonest on 16, cheapest on 1, least product of time and cost on 4."""
    plan = plan_of(*BY_HAND)

    chosen = [plan.points[i or 0].device_count for i in (plan.soonest, plan.cheapest, plan.knee)]
    assert chosen == [16, 1, 4]
    assert len(plan.front) == 5
    assert not plan.pays_to_the_end


def test_deadline_and_budget_leave_out_the_rest():
    """Within 5 h and 20 device-hours there is but one."""
    plan = plan_of(*BY_HAND, deadline=5, budget=20)

    assert {plan.soonest, plan.cheapest, plan.knee} == {2}
    assert plan.nearest is None


def test_nothing_within_the_limits_names_the_nearest():
    """3 h: 16 devices miss it by the least, a factor of 3.4 / 3."""
    plan = plan_of(*BY_HAND, deadline=3)

    assert (plan.soonest, plan.cheapest, plan.knee) == (None, None, None)
    assert plan.points[plan.nearest or 0].device_count == 16
    assert "misses by a factor of 1.13: 16 devices" in missed(plan)


def test_of_two_limits_the_worse_miss_counts():
    """3.6 h and 20 device-hours: 4 devices miss by 4 / 3.6, 8 by 28 / 20."""
    plan = plan_of(*BY_HAND, deadline=3.6, budget=20)

    assert plan.points[plan.nearest or 0].device_count == 4


def test_front_leaves_out_what_is_later_and_dearer():
    """A second cluster, dearer everywhere but sooner with 8."""
    dear = [point(1, 9, cost=20, cluster="b"), point(8, 2, cost=60, cluster="b")]

    plan = plan_of(*BY_HAND, *dear)

    front = [(plan.points[i].cluster, plan.points[i].device_count) for i in plan.front]
    # 16 of a (54.4) is cheaper than 8 of b (60), which is sooner.
    assert front == [("b", 8), ("a", 16), ("a", 8), ("a", 4), ("a", 2), ("a", 1)]


def test_perfect_scaling_has_no_knee_before_its_end():
    """Where cost stays, each device pays."""
    plan = plan_of(*(point(n, 10 / n) for n in (1, 2, 4)))

    assert plan.points[plan.knee or 0].device_count == 4
    assert plan.pays_to_the_end


def test_knee_is_where_amdahl_says():
    """T = 1 + 64 / n with cost n T: n T^2 = (n + 64)^2 / n is least at n = 64."""
    points = [point(n, 1 + 64 / n) for n in (8, 16, 32, 64, 128, 256)]

    assert knee_of(points, range(6)) == 3
    assert pareto_front(points) == (5, 4, 3, 2, 1, 0)


def test_probability_of_a_deadline():
    """One half at the median, 0.9 at p90, 0.1 at p10."""
    way = point(1, 10)

    for hours, chance in ((10, 0.5), (20, 0.9), (5, 0.1)):
        assert deadline_probability(way, hours * 3600) == pytest.approx(chance)
    unsure = replace(way, p10_run_seconds=None, p90_run_seconds=None)
    assert deadline_probability(unsure, 3600) is None


# --- words ---


def printed(plan: Plan) -> str:
    """What the terminal shows, 80 columns wide."""
    console = Console(width=80, highlight=False, file=io.StringIO())
    for part in planned(plan):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_fits_80_columns_and_marks_the_answers():
    """Golden: devices, batch, steps, step, time, p10, p90, device-hours, answers."""
    text = printed(plan_of(*BY_HAND, deadline=12))

    assert text == (Path(__file__).parents[1] / "golden" / "plan.txt").read_text(), (
        "The table of a plan has changed. If that is wanted, and it still fits 80 columns and "
        "reads well, replace tests/golden/plan.txt."
    )
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, "Beyond the knee, one per cent of time saved"),
        ({"deadline": 12, "budget": 20}, "Beyond the knee, one per cent of time saved"),
        # 4 devices cost 16: within 13 a per cent of time saved still costs less than one.
        ({"budget": 13}, "The limits end before the knee: without them it is 4 devices of a"),
        # 4 devices take 4 h: within 3.6 h it costs more, wherever one is.
        ({"deadline": 3.6}, "The limits end before the knee: without them it is 4 devices of a"),
    ],
)
def test_knee_within_limits_is_no_knee_of_the_curve(limits: dict[str, float], said: str):
    """What is true beyond the knee is not said of another point."""
    text = " ".join(printed(plan_of(*BY_HAND, **limits)).split())

    assert said in text
    assert ("Beyond the knee" in said) == ("Beyond the knee" in text)


def test_plan_survives_its_file(tmp_path: Path):
    """JSON there and back."""
    plan = plan_of(*BY_HAND)
    serialization.save(plan, tmp_path / "plan.json")

    assert serialization.load(Plan, tmp_path / "plan.json") == plan


def test_steps_are_whole_in_a_table():
    """42.4 updates are none, and 0.2 not even one; the letters of the answers are explained."""
    ways = [plan_point(prediction_of(n, 1.0), steps) for n, steps in ((1, 42.4), (2, 0.2))]
    text = printed(plan_of(*ways))

    assert [line.split()[2] for line in text.splitlines()[3:5]] == ["42", "1"]
    assert "S soonest, C cheapest, K knee." in text


def test_costs_say_of_what_they_are():
    """Device-hours, or the currency of the prices."""
    plan = plan_of(*BY_HAND, budget=20)
    assert "Within 20 device-hours:" in printed(plan)
    priced = " ".join(printed(replace(plan, is_priced=True)).split())
    assert "Within a cost of 20:" in priced
    assert "(5 h to 20 h), a cost of 10." in priced


def test_report_shows_a_plan(tmp_path: Path):
    """Its answers, its charts, and what it is called in the contents."""
    plan = plan_of(*BY_HAND, deadline=12, budget=20)
    serialization.save(plan, tmp_path / "plan.json")

    write_report([tmp_path / "plan.json"], tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()
    assert "Time to target as devices are added" in page
    assert "4 devices of a, batch 400: 4 h 00 min" in page


def test_plot_is_drawn(tmp_path: Path):
    """With and without limits, ranges and answers."""
    for name, plan in (
        ("limits", plan_of(*BY_HAND, point(1, 9, cluster="b"), deadline=12, budget=20)),
        ("missed", plan_of(replace(BY_HAND[0], p10_run_seconds=None), deadline=1)),
    ):
        save_plan(plan, path=tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_marks_of_one_point_are_all_seen():
    """Outlines that do not touch: the corners of a square of side a are 0.71 a from its middle,
    those of a diamond in such a square 0.5 a, and an edge is half as wide outward."""
    shapes, _, areas = zip(*MARKS.values(), strict=True)
    outer, side, inner = map(math.sqrt, areas)
    edge = EDGE / 2

    assert shapes == ("circle", "square", "diamond")
    assert side / math.sqrt(2) + edge < outer / 2 - edge
    assert inner / 2 + edge < side / 2 - edge


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("8..64", [8, 16, 32, 64]), ("8,64,8", [8, 64]), ("3..10,100", [3, 6, 100]), ("7", [7])],
)
def test_ranges_double(text: str, numbers: list[int]):
    """As far as the end."""
    assert parse_counts(text) == numbers


@pytest.mark.parametrize("text", ["", "8..", "..8", "64..8", "0..8", "8;9", "-1"])
def test_what_is_no_range_is_refused(text: str):
    """With examples of what is."""
    with pytest.raises(ConfigError, match=r"doublings such as 8\.\.4096"):
        parse_counts(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30 min", 1800), ("2.5h", 9000), ("3d", 259_200)]
)
def test_durations(text: str, seconds: float):
    """In the units that people use."""
    assert parse_seconds("deadline", text) == seconds


@pytest.mark.parametrize("text", ["2", "h", "0h", "2 weeks", "-1h", ""])
def test_what_is_no_duration_is_refused(text: str):
    """Without a unit, nobody knows."""
    with pytest.raises(ConfigError, match="deadline="):
        parse_seconds("deadline", text)


# --- runs ---


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small run, whose steps were compiled once and kept."""
    monkeypatch.setenv("SCALEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)
    for module in ("batch", "target"):
        monkeypatch.setattr(f"scalejax.xla.{module}.has_cuda_compiler", lambda: True)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def data_of(*batches: int, failed: tuple[int, ...] = ()) -> ConvergenceData:
    """Points of E = 1e5 (1 + B / 1000)."""
    points = tuple(Point(global_batch=b, samples=1e5 * (1 + b / 1000)) for b in batches)
    return ConvergenceData(name="by hand", points=points, failed_batches=failed, target=0.9)


def test_plan_multiplies_steps_of_the_batch_with_the_time_of_its_step(run_file: Path):
    """Each point: steps from the hyperbola, the step as it is predicted by itself."""
    from scalejax.planning.scaling_study import study

    config, cluster = load_config(run_file), load_cluster("dgx-h100")
    plan = plan_run(
        config, [ClusterOption(cluster=cluster)], [8, 16, 64], convergence=data_of(64, 512, 2048)
    )
    alone = study(config, cluster, [8, 16, 64], "weak").predictions

    assert [each.device_count for each in plan.points] == [8, 16, 64]
    for each, step in zip(plan.points, alone, strict=True):
        batch = 32 * each.device_count
        assert each.global_batch == batch
        assert each.steps == pytest.approx(1e5 * (1 + batch / 1000) / batch, rel=0.01)
        assert each.step_seconds == pytest.approx(step.step_seconds, rel=1e-6)


def test_recipe_can_be_named(run_file: Path):
    """Of two, one needs twice the samples: at a batch of its point and at one of the other's."""
    points = tuple(
        Point(global_batch=batch, samples=samples, recipe=name)
        for batch, samples, name in ((256, 1e5, "good"), (512, 2e5, "poor"))
    )
    data = ConvergenceData(name="two", points=points)
    config, options = load_config(run_file), [ClusterOption(cluster=load_cluster("dgx-h100"))]

    nearest = plan_run(config, options, [8, 16], convergence=data)
    good = plan_run(config, options, [8, 16], convergence=data, recipe="good")

    assert good.points[0].steps == pytest.approx(nearest.points[0].steps)
    assert good.points[1].steps < 0.9 * nearest.points[1].steps
    assert any("--recipe" in note for note in nearest.notes)
    with pytest.raises(ConfigError, match="did you mean 'good'"):
        plan_run(config, options, [8], convergence=data, recipe="goode")
    with pytest.raises(ConfigError, match="the points name none"):
        plan_run(config, options, [8], convergence=data_of(256), recipe="good")


def test_batches_that_failed_or_nobody_tried_are_left_out(run_file: Path):
    """Twice the largest that worked is marked; four times it, or one that failed, is left out."""
    config, options = load_config(run_file), [ClusterOption(cluster=load_cluster("dgx-h100"))]

    beyond = plan_run(config, options, [8, 16, 32], convergence=data_of(128, 256))
    failed = plan_run(config, options, [8, 16], convergence=data_of(128, 256, failed=(512,)))

    assert [each.is_extrapolated for each in beyond.points] == [False, True]
    assert [each.global_batch for each in beyond.points] == [256, 512]
    assert [each.global_batch for each in failed.points] == [256]
    far = plan_run(config, options, [8, 16], convergence=data_of(64, 128, failed=(4096,)))
    assert [each.global_batch for each in far.points] == [256]  # 512 is four times, and below 4096
    assert sum(count for _, count in beyond.left_out) == 1


def test_without_points_the_epochs_are_taken_and_that_is_said_loudly(run_file: Path):
    """As many samples at every batch, and the first note says that nobody measured it."""
    plan = plan_run(
        load_config(run_file), [ClusterOption(cluster=load_cluster("dgx-h100"))], [8, 16]
    )

    assert not plan.has_convergence
    assert [each.steps for each in plan.points] == [10 * (60000 // 256), 10 * (60000 // 512)]
    assert plan.notes[0].startswith("NOBODY MEASURED")
    assert "WARNING: NOBODY MEASURED" in printed(plan)


def test_critical_batch_of_one_batch_is_called_assumed(run_file: Path):
    """Points of one batch say nothing of others, and those of two recipes no more; two batches of
    one recipe, or a noise scale, do."""
    options, config = [ClusterOption(cluster=load_cluster("dgx-h100"))], load_config(run_file)
    one = data_of(256)
    other = replace(one.points[0], global_batch=512, recipe="another")
    apart = replace(one, points=(*one.points, other))

    for data, is_assumed in (
        (one, True),
        (apart, True),
        (replace(one, noise_scale=1000.0), False),
        (data_of(256, 512), False),
    ):
        source = plan_run(config, options, [8], convergence=data).steps_source
        assert ("critical batch ASSUMED to be about" in source) == is_assumed
    source = plan_run(config, options, [8], convergence=one).steps_source
    assert source.startswith(": 1 point, batch 256; critical batch ASSUMED")


def test_points_of_another_optimizer_are_said_loudly_and_behind_each_probability(run_file: Path):
    """Of the same, or of one that nobody knows, nothing is said."""
    options, config = [ClusterOption(cluster=load_cluster("dgx-h100"))], load_config(run_file)

    def shown(optimizer: str | None) -> str:
        data = replace(data_of(128, 256), optimizer=optimizer)
        plan = plan_run(config, options, [8], convergence=data, deadline_seconds=1e9)
        return " ".join(printed(plan).split())

    text = shown("lars")
    assert "WARNING: the points were trained with lars, and this run trains with sgd" in text
    assert "in time with probability above 98% if it learns as lars did." in text
    for quiet in (shown("sgd"), shown(None)):
        assert "WARNING" not in quiet
        assert "probability above 98%." in quiet


def test_optimizer_of_points_is_that_of_their_run_sweep_or_publisher(
    run_file: Path, tmp_path: Path
):
    """What a sweep's runs replaced counts, and of several optimizers none."""
    example = (
        Path(__file__).parents[2] / "scalejax" / "config" / "examples" / "resnet50_modern.toml"
    )
    published = find_convergence(load_config(example))
    assert published is not None
    assert published.optimizer == "lars"

    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"global_batch": [256], "steps_to_target": [100]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "results.parquet")
    for runs, expected in (
        ([{}, {"seed": 1}], "sgd"),
        ([{"optimizer.name": "lamb"}], "lamb"),
        ([{}, {"optimizer": {"name": "lamb"}}], None),
    ):
        (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
        found = find_convergence(load_config(run_file), str(tmp_path))
        assert found is not None
        assert found.optimizer == expected


def test_conditions_of_the_site_are_in_the_time(run_file: Path):
    """Input of 1000 samples/s for a node: 256 samples take at least 0.256 s."""
    site = Site(conditions=RunConditions(input_samples_per_second=1000.0))
    option = ClusterOption(cluster=load_cluster("dgx-h100"), site=site)

    plan = plan_run(load_config(run_file), [option], [8])

    assert plan.points[0].step_seconds == pytest.approx(0.256)
    assert not any("input" in note for note in plan.notes if note.startswith("not known"))


def test_published_points_are_of_their_data_set_only(run_file: Path):
    """ResNet-50 on ImageNet has some, on other data none; BERT's are not counted from scratch."""
    example = (
        Path(__file__).parents[2] / "scalejax" / "config" / "examples" / "resnet50_modern.toml"
    )

    assert find_convergence(load_config(example)) is not None
    assert find_convergence(load_config(example, {"data.train_examples": 1000})) is None
    assert find_convergence(load_config(run_file)) is None
    with pytest.raises(ConfigError, match=r"target=0\.8"):
        find_convergence(load_config(example), target=0.8)
    with pytest.raises(ConfigError, match="published ones: bert_large"):
        find_convergence(load_config(run_file), "resnet5")
    named = find_convergence(load_config(run_file), "bert_large")
    assert named is not None
    assert named.starts_from_checkpoint


def test_recorded_run_or_sweep_is_a_source(run_file: Path, tmp_path: Path):
    """The folder of a run brings its steps and noise scale; that of a sweep, those of its table."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = RunFolder(path=tmp_path / "run")
    log = MeasurementLog(folder.measurements)
    log.append(
        TrainMeasurement(
            step=100,
            epoch=1.0,
            loss=1.0,
            accuracy=0.5,
            learning_rate=0.1,
            global_batch=256,
            step_seconds=1.0,
            samples_per_second=256.0,
            elapsed_seconds=100.0,
            noise_scale=1000.0,
        )
    )
    log.append(
        EvaluationMeasurement(
            step=100,
            epoch=1.0,
            test_loss=1.0,
            test_accuracy=0.9,
            examples=9,
            seconds=1.0,
            elapsed_seconds=101.0,
        )
    )
    log.close()
    columns = {"global_batch": [256], "steps_to_target": [100], "noise_scale": [500.0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "results.parquet")
    options = [ClusterOption(cluster=load_cluster("dgx-h100"))]
    config = load_config(run_file, {"optimizer.momentum": 0.0})

    of_run = find_convergence(config, str(folder.path), target=0.85)
    of_sweep = find_convergence(config, str(tmp_path))

    assert of_run is not None
    assert of_sweep is not None
    assert (of_run.noise_scale, of_run.points[0].samples) == (1000.0, 25_600)
    assert of_sweep.noise_scale == pytest.approx(500)
    plan = plan_run(config, options, [8, 16], convergence=of_run)
    assert "noise scale 1 k samples" in plan.steps_source
    # E(512) / E(256) of a critical batch of 1000: 1.512 / 1.256, within what the two may differ.
    assert 2 * plan.points[1].steps / plan.points[0].steps == pytest.approx(1.512 / 1.256, rel=0.05)
    assert not any("critical_batch" in note for note in plan.notes)
    adam = load_config(run_file, {"optimizer": {"name": "adamw"}})
    other = plan_run(adam, options, [8, 16], convergence=of_run)
    assert any("too small for adamw: " in note for note in other.notes)
    assert other.points[1].steps < plan.points[1].steps  # its critical batch may be larger
    with pytest.raises(ConfigError, match=r"target=0\.95 is refused: .* did not reach it"):
        find_convergence(config, str(folder.path), target=0.95)


def test_command_prints_writes_and_says_no(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A plan with its files; and exit code 2 with the nearest miss, where there is none."""
    (tmp_path / "points.csv").write_text(
        "global_batch,steps_to_target,target\n64,2000,0.9\n256,600,0.9\n1024,300,0.9\n"
    )
    command = ["plan", str(run_file), "--clusters", "dgx-h100", "--devices", "8..32"]
    command += ["--convergence", str(tmp_path / "points.csv"), "--price", "2"]

    assert main([*command, "--target", "90%", "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert ": target 0.9\n" in shown
    assert "Soonest" in shown
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "plan.png"}
    assert serialization.load(Plan, tmp_path / "out" / "plan.json").is_priced

    assert main([*command, "--deadline", "0.001s"]) == 2
    said = capsys.readouterr()
    assert "Nothing is within 1 ms." in said.out
    assert "error: nothing reaches target 0.9 within 1 ms; the nearest misses by" in said.err


def test_clusters_of_one_name_are_refused(run_file: Path):
    """Nobody could tell their rows apart."""
    option = ClusterOption(cluster=load_cluster("dgx-h100"))

    with pytest.raises(ConfigError, match="each needs a name of its own"):
        plan_run(load_config(run_file), [option, option], [8])


def test_list_prices_are_taken_where_none_is_given(run_file: Path):
    """And said; where a cluster has none, costs are device-hours, and that is said."""
    cluster = load_cluster("dgx-h100")
    listed = ClusterOption(cluster=cluster)
    unlisted = ClusterOption(cluster=replace(cluster, name="mine", price=None))
    config = load_config(run_file)

    in_dollars = plan_run(config, [listed], [8], budget=1e9)
    in_hours = plan_run(config, [listed, unlisted], [8])

    (point,) = in_dollars.points
    assert in_dollars.is_priced
    assert point.cost == pytest.approx(2.95 * point.device_hours)
    assert any("dgx-h100 2.95 (list price of 20" in note for note in in_dollars.notes)
    assert "Within 1,000,000,000 dollars:" in printed(in_dollars)
    assert not in_hours.is_priced
    assert all(each.cost == each.device_hours for each in in_hours.points)
    assert any("no list price of mine" in note for note in in_hours.notes)


def test_price_of_some_clusters_is_refused(run_file: Path):
    """Costs could not be compared; and without a cluster there is nothing to plan."""
    priced = ClusterOption(cluster=load_cluster("dgx-h100"), price_per_device_hour=1.0)
    other = ClusterOption(cluster=load_cluster("dgx-a100"))

    with pytest.raises(ConfigError, match="each cluster needs one, or none has one"):
        plan_run(load_config(run_file), [priced, other], [8])
    with pytest.raises(ConfigError, match="cluster="):
        plan_run(load_config(run_file), [], [8])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--price", "1,2"], "price='1,2' is refused: it must be one number, or one for each of 1"),
        (["--price", "dear"], "price='dear' is refused"),
        (["--price", "-1"], "price=-1.0 is refused"),
        (["--deadline", "soon"], "deadline='soon' is refused"),
        (["--budget", "-3"], "budget=-3.0 is refused"),
        (["--target", "good"], "target='good' is refused"),
        (
            ["--global-batch", "7"],
            "nothing can be planned with: 1 the batch does not divide over the devices, or exceeds "
            "the data set (batch.global_batch=7 is refused: it must be a multiple of data*fsdp=8",
        ),
        (
            ["--schedule.decay", "step", "--schedule.decay_epochs", "[1, 1e300]"],
            "1 schedule.decay_epochs=(1.0, 1e+300) is",
        ),
        (["--convergence", "none.csv"], "'none.csv' cannot be read"),
        (["--clusters", "dgx-h10"], "did you mean 'dgx-h100'"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    run_file: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
):
    """In one line, before anything is compiled."""
    command = ["plan", str(run_file), "--clusters", "dgx-h100", "--devices", "8", *flags]

    assert main(command) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", ["--layout.tensor 4", "--layout.data 2", "--batch.microbatches 2"])
def test_layouts_by_flag_are_refused_where_they_are_searched(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """As cost, search and page refuse them; the search would replace them unsaid."""
    path = tmp_path / "gpt.toml"
    serialization.save_toml(published_run("gpt2-124m", {"batch.global_batch": 64}), path)

    command = ["plan", str(path), "--cluster", "dgx-h100", "--devices", "8", *flag.split()]
    assert main(command) == 2
    assert "plan tries several; leave it out" in " ".join(capsys.readouterr().err.split())


def test_a_plan_searches_layouts_where_the_closed_form_knows_them(monkeypatch: pytest.MonkeyPatch):
    """A layout found for 16 devices is none of 4 and 8, which have layouts of their own; that of
    the file is kept when asked for. Programs are closed forms here, so that nothing is compiled."""
    monkeypatch.setattr(
        "scalejax.planning.time_to_target.run.programs_of",
        lambda jobs, _: [program_in_closed_form(job) for job in jobs],
    )
    config = published_run(
        "gpt2-124m", {"batch.global_batch": 64, "layout.fsdp": 8, "layout.tensor": 1}
    )
    wide = with_fields(config, {"layout.pipeline": 2, "batch.microbatches": 4})
    options = [ClusterOption(cluster=load_cluster("dgx-h100"))]

    searched = plan_run(wide, options, [4, 8])
    kept = plan_run(wide, options, [4, 8], layouts="file", global_batches=[64])
    fixed = plan_run(wide, options, [4, 8], global_batches=[64])

    assert [(point.device_count, point.global_batch) for point in searched.points] == [
        (4, 64), (8, 128),
    ]  # fmt: skip
    assert all(point.strategy and "microbatch" in point.strategy for point in searched.points)
    assert any("--layouts file" in note for note in searched.notes)
    assert kept.points == ()
    assert [point.global_batch for point in fixed.points] == [64, 64]
    assert fixed.points[1].step_seconds < fixed.points[0].step_seconds
