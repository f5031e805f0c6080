"""Samples to target against batch: closed forms recovered, honest ranges, files read or refused."""

import json
import math
import runpy
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.core.errors import ConfigError
from scalejax.planning.convergence import (
    ConvergenceData,
    Hyperbola,
    Point,
    fit,
    parse_target,
    published_data,
    published_names,
    read_data,
    read_run,
)
from scalejax.planning.convergence.points import merged
from scalejax.training.record import EvaluationMeasurement, MeasurementLog, TrainMeasurement

BATCHES = (100, 300, 1000, 4000)
LIMITS = Path(__file__).parents[2] / "experiments" / "convergence_fit" / "limits.py"
Trial, batch_limit = itemgetter("Trial", "batch_limit")(runpy.run_path(str(LIMITS)))


def exact(
    batches: Sequence[int] = BATCHES,
    *,
    least_samples: float = 1e6,
    critical: float = 1000.0,
    recipe: str = "",
) -> list[Point]:
    """Points on a hyperbola."""
    return [
        Point(global_batch=batch, samples=least_samples * (1 + batch / critical), recipe=recipe)
        for batch in batches
    ]


def test_exact_hyperbola_is_recovered():
    """Four points of E = 1e6 (1 + B / 1000): at batch 2000, 3e6 samples, 1500 steps."""
    found = fit(exact())

    assert found.critical_batch.p50 == pytest.approx(1000, rel=1e-3)
    assert found.samples(2000).p50 == pytest.approx(3e6, rel=1e-3)
    assert found.steps(2000).p50 == pytest.approx(1500, rel=1e-3)
    assert found.samples(2000).p90 / found.samples(2000).p10 < 1.01


@settings(max_examples=30, deadline=None)
@given(critical=st.floats(30, 30_000), least=st.floats(1e3, 1e9), batch=st.integers(100, 4000))
def test_mccandlish_relation_holds(critical: float, least: float, batch: int):
    """(S / S_min - 1) (E / E_min - 1) = 1 with E_min and S_min of the hyperbola that was drawn."""
    found = fit(exact(least_samples=least, critical=critical))

    samples = found.samples(batch).p50
    product = (samples / batch / (least / critical) - 1) * (samples / least - 1)
    assert product == pytest.approx(1, rel=0.05)


def test_samples_that_do_not_depend_on_the_batch_have_no_critical_batch():
    """Far below the critical batch: as many samples at every batch."""
    found = fit([Point(global_batch=batch, samples=1e6) for batch in BATCHES])

    assert found.critical_batch.p10 > 1e6
    assert found.samples(8000).p50 == pytest.approx(1e6, rel=1e-2)


def test_steps_that_do_not_depend_on_the_batch_have_no_more_parallelism():
    """Far above it: as many steps at every batch."""
    found = fit([Point(global_batch=batch, samples=1e3 * batch) for batch in BATCHES])

    assert found.critical_batch.p90 < 1
    assert found.steps(8000).p50 == pytest.approx(1e3, rel=1e-2)


def test_curve_never_falls_though_points_do():
    """Fewer samples at the larger batch are scatter: the hyperbola is flat through both."""
    found = fit([Point(global_batch=100, samples=1.1e6), Point(global_batch=1000, samples=1e6)])

    assert found.samples(1000).p50 >= found.samples(100).p50
    assert 1e6 < found.samples(300).p50 < 1.15e6


def test_one_point_says_between_as_many_samples_and_as_many_steps():
    """At four times its batch: between one and four times the samples, and it says so."""
    found = fit([Point(global_batch=1000, samples=1e6)])

    there, beyond = found.samples(1000), found.samples(4000)
    assert there.p50 == pytest.approx(1e6)
    assert 1e6 < beyond.p10 < 1.5e6
    assert 3e6 < beyond.p90 < 4.2e6


def test_noise_scale_takes_the_place_of_other_batches():
    """One point at B = 100 and B_crit about 1000: E(1000) = 2 / 1.1 of it, to a factor of 2."""
    found = fit([Point(global_batch=100, samples=1.1e6)], noise_scale=1000)

    assert found.critical_batch.p50 == pytest.approx(1000, rel=0.05)
    assert found.critical_batch.p90 / found.critical_batch.p50 == pytest.approx(2.43, rel=0.1)
    assert found.samples(1000).p50 == pytest.approx(2e6, rel=0.05)


def test_noise_scale_is_no_bound_above_for_other_optimizers():
    """Of two half-normal distributions of ln(B_crit / noise scale), with ln 2 below and ln 5.6
    above: sampled, for what `fit` sums. 4 to 8, as measured, is within p10 to p90."""
    drawn = np.random.default_rng(0).standard_normal((2, 1_000_000))
    below, above = math.log(2), math.log(5.6)
    is_above = np.random.default_rng(1).random(1_000_000) < above / (above + below)
    sampled = np.where(is_above, above * abs(drawn[0]), -below * abs(drawn[1]))
    p10, p50, p90 = 1000 * np.exp(np.quantile(sampled, (0.1, 0.5, 0.9)))

    found = fit([Point(global_batch=1000, samples=1.1e6)], noise_scale=1000, is_plain_sgd=False)

    critical = found.critical_batch
    assert (critical.p10, critical.p50) == pytest.approx((p10, p50), rel=0.05)
    assert critical.p90 == pytest.approx(p90, rel=0.1)
    assert p10 < 4000 < 8000 < p90


def test_points_outvote_a_wrong_noise_scale():
    """Four exact points against a noise scale that is 30 times too large."""
    found = fit(exact(), noise_scale=30_000)

    assert found.critical_batch.p50 == pytest.approx(1000, rel=0.05)


def test_recipes_share_a_critical_batch_and_differ_in_samples():
    """One recipe needs half the samples of the other; each has points at other batches."""
    good = exact((100, 1000), least_samples=1e6, recipe="good")
    poor = exact((300, 4000), least_samples=2e6, recipe="poor")

    found = fit([*good, *poor])

    assert found.critical_batch.p50 == pytest.approx(1000, rel=0.05)
    assert found.samples(2000, recipe="good").p50 == pytest.approx(3e6, rel=0.02)
    assert found.samples(2000, recipe="poor").p50 == pytest.approx(6e6, rel=0.02)
    # Without a name, that of the nearest point: 4000 is nearer to 3000 than 1000 is.
    assert found.samples(3000).p50 == pytest.approx(8e6, rel=0.02)


def test_point_of_many_runs_weighs_more_than_one_of_few():
    """Of two points at one batch, of 100 runs and of 2, all of which spread by 20 %."""
    sure = Point(global_batch=100, samples=1e6, run_deviation=0.2, run_count=100)
    unsure = Point(global_batch=100, samples=1.2e6, run_deviation=0.2, run_count=2)

    assert fit([sure, unsure]).samples(100).p50 < 1.05e6


def test_deviation_of_zero_is_that_of_the_others():
    """Runs that ended at one evaluation are not exact: the curve passes them by as it passes a
    point that states the deviation of the rest, and not as if it went through them."""

    def predicted(deviation: float | None) -> float:
        points = [
            Point(global_batch=batch, samples=1e6 * off, run_deviation=0.2, run_count=4)
            for batch, off in ((100, 1.0), (200, 1.1), (400, 0.9))
        ]
        last = Point(global_batch=300, samples=1.3e6, run_deviation=deviation, run_count=4)
        return fit([*points, last]).samples(300).p50

    assert predicted(0.0) == pytest.approx(predicted(0.2), rel=1e-6)
    assert predicted(1e-6) > 1.02 * predicted(0.0)


def test_the_mean_of_runs_varies_less_than_one_run():
    """A single hyperbola, 10 % between runs: the mean of four is off by half as much as one."""
    found = Hyperbola(
        points=tuple(exact()),
        reference_batch=1000,
        weights=np.ones(1),
        shares=np.array([0.5]),
        scatters=np.zeros(1),
        levels=np.log([[2e6]]),
        level_variances=np.zeros((1, 1)),
        recipes=("",),
        run_deviation=0.1,
    )

    one, four = (found.samples(1000, run_count=count) for count in (1, 4))

    assert one.p50 == four.p50 == pytest.approx(2e6)
    assert math.log(one.p90 / one.p50) == pytest.approx(0.12816, rel=1e-4)
    assert math.log(four.p90 / four.p50) == pytest.approx(0.06408, rel=1e-4)


@pytest.mark.slow  # draws many samples
def test_ranges_hold_as_often_as_they_say():
    """Points drawn with 5 % of scatter about known hyperbolas: a point left out lies within p10
    and p90 in about 80 % of 300 cases (binomial: 2.3 % standard deviation)."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        critical = math.exp(random.uniform(math.log(200), math.log(20_000)))
        points = [
            Point(global_batch=batch, samples=1e6 * (1 + batch / critical) * noise)
            for batch, noise in zip(
                (256, 512, 1024, 2048, 4096, 8192),
                np.exp(random.normal(0, 0.05, 6)),
                strict=True,
            )
        ]
        left_out = points.pop(int(random.integers(6)))
        estimate = fit(points).samples(left_out.global_batch)
        held += estimate.p10 <= left_out.samples <= estimate.p90

    assert 0.73 < held / 300 < 0.90


def test_ranges_grow_away_from_the_points():
    """The further a batch is from those measured, the less is known."""
    noisy = [
        Point(global_batch=point.global_batch, samples=point.samples * factor)
        for point, factor in zip(exact(), (1.05, 0.97, 1.04, 0.98), strict=True)
    ]

    def width(found: Hyperbola, batch: int) -> float:
        estimate = found.samples(batch)
        return math.log(estimate.p90 / estimate.p10)

    found = fit(noisy)
    assert width(found, 1000) < width(found, 16_000) < width(found, 256_000)


# --- published points ---


def test_published_points_of_resnet50():
    """MLPerf's 35 epochs at 3264 and 42 at 8192 are within the range of their own fit."""
    data = published_data("resnet50")

    assert data is not None
    assert (data.target, data.train_examples, data.largest_reached) == (0.759, 1_281_167, 8192)
    found = fit(data.points)
    for batch, epochs in ((3264, 35.2), (8192, 42.0)):
        estimate = found.samples(batch).divided_by(1_281_167)
        assert estimate.p10 < epochs < estimate.p90


def test_each_published_point_is_predicted_by_the_others():
    """Leave one out: half of all points of ResNet-50, BERT and SSD within 6 %."""
    errors = []
    for name in ("resnet50", "bert_large", "ssd_resnet34", "retinanet"):
        data = published_data(name)
        assert data is not None
        for point in data.points:
            others = [each for each in data.points if each is not point]
            estimate = fit(others).samples(point.global_batch, recipe=point.recipe)
            errors.append(abs(estimate.p50 / point.samples - 1))

    assert len(errors) == 28
    assert float(np.median(errors)) <= 0.06


def test_no_points_are_published_of_a_network_of_ones_own():
    """None, not an error: others take the run's epochs."""
    assert published_data("mine") is None
    assert "resnet50" in published_names()


def test_other_targets_than_the_published_are_refused():
    """Nobody measured how long 80 % takes."""
    with pytest.raises(ConfigError, match=r"target=0\.8 is refused: .* reach 0\.759"):
        published_data("resnet50", target=0.8)


# --- files ---


def write(path: Path, text: str) -> Path:
    """A file with that text."""
    path.write_text(text)
    return path


def test_runs_of_a_sweep_become_points(tmp_path: Path):
    """Seeds of one batch are averaged; a batch that no seed got there with has failed."""
    sweep = write(
        tmp_path / "sweep.csv",
        "seed,global_batch,steps_to_target\n"
        "0,100,900\n1,100,1100\n0,400,500\n0,800,\n1,800,\n0,1600,300\n1,1600,\n",
    )

    data = read_data(sweep)

    assert [point.global_batch for point in data.points] == [100, 400, 1600]
    first = data.points[0]
    assert (first.samples, first.run_count) == (100_000, 2)
    assert first.run_deviation == pytest.approx(math.sqrt(2) * 100 / 1000)
    assert data.failed_batches == (800,)
    assert data.smallest_failed is None  # 1600 got there


def test_epochs_need_the_size_of_the_data_set(tmp_path: Path):
    """With it, they are samples; without it, they are refused."""
    table = write(tmp_path / "t.csv", "global_batch,epochs_to_target\n64,3\n")

    assert read_data(table, train_examples=1000).points[0].samples == 3000
    with pytest.raises(ConfigError, match="epochs_to_target=3"):
        read_data(table)


def test_one_of_several_targets_must_be_named(tmp_path: Path):
    """A table with two targets holds two curves."""
    table = write(
        tmp_path / "t.csv",
        "target,global_batch,steps_to_target\n0.8,64,10\n0.9,64,30\n0.9,128,20\n",
    )

    assert len(read_data(table, target=0.9).points) == 2
    with pytest.raises(ConfigError, match=r"target=None is refused: .* 0\.8, 0\.9: say which"):
        read_data(table)
    with pytest.raises(ConfigError, match=r"target=0\.7 is refused"):
        read_data(table, target=0.7)


def test_noise_scales_of_several_recipes_are_not_averaged(tmp_path: Path):
    """That of the recipe that is asked for, or none, which is said; not above 0 is refused."""
    head = "recipe,global_batch,steps_to_target,noise_scale\n"
    table = write(tmp_path / "t.csv", head + "a,64,90,100\na,64,90,400\nb,64,80,10000\nb,128,50,\n")

    assert read_data(table, recipe="a").noise_scale == pytest.approx(200)
    assert read_data(table, recipe="b").noise_scale == pytest.approx(10_000)
    both = read_data(table)
    assert both.noise_scale is None
    assert any("2 recipes, 200 to 10000 samples, are not averaged" in note for note in both.notes)
    for scale in ("-5", "0"):
        with pytest.raises(ConfigError, match=rf"noise_scale={scale}\.0 is refused"):
            read_data(write(tmp_path / "bad.csv", f"{head}a,64,90,{scale}\n"))


def recorded(
    folder: Path, noise_scales: Sequence[float | None], batch: int = 64, every: int = 10
) -> Path:
    """A run that was evaluated and measured every so many steps, better by 0.1 each time."""
    log = MeasurementLog(folder / "measurements.jsonl")
    for number, scale in enumerate(noise_scales, start=1):
        log.append(
            TrainMeasurement(
                step=every * number,
                epoch=float(number),
                loss=1.0,
                accuracy=0.5,
                learning_rate=0.1,
                global_batch=batch,
                step_seconds=1.0,
                samples_per_second=float(batch),
                elapsed_seconds=float(number),
                noise_scale=scale,
            )
        )
        log.append(
            EvaluationMeasurement(
                step=every * number,
                epoch=float(number),
                test_loss=1.0,
                test_accuracy=0.4 + 0.1 * number,
                examples=10,
                seconds=1.0,
                elapsed_seconds=float(number),
            )
        )
    log.close()
    return folder


def test_run_is_a_point_with_its_noise_scale(tmp_path: Path):
    """Until the target alone: 64 and 192 at batch 64 make 1/2 and 1/4 of a noiseless step's
    progress, so 64 * 2/3 + 192 * 1/3."""
    data = read_run(recorded(tmp_path, [None, 64, 192, 5000]), target=0.7)

    assert data.noise_scale == pytest.approx((64 / 2 + 192 / 4) / (1 / 2 + 1 / 4))
    assert [(point.global_batch, point.samples) for point in data.points] == [(64, 30 * 64)]
    assert (data.target, data.metric) == (0.7, "test accuracy")
    assert any("what train prints is that of the last updates" in note for note in data.notes)


def test_evaluations_far_apart_are_said(tmp_path: Path):
    """An accuracy of 0.7 was seen at step 30 and not at 20, so it may have taken 21: 9 of 30 too
    many, at most a third. Of evaluations after every one of 30 steps, nothing is to be said."""
    data = read_run(recorded(tmp_path, [None] * 4), target=0.7)

    assert any("after 20 and 30 steps" in n and "up to 33% too many" in n for n in data.notes)
    fine = read_run(recorded(tmp_path / "fine", [None] * 30, every=1), target=0.4 + 0.1 * 30)
    assert not any("too many" in note for note in fine.notes)


def test_run_without_noise_scale_says_so(tmp_path: Path):
    """One point is next to nothing."""
    data = read_run(recorded(tmp_path, [None, None]), target=0.5)

    assert data.noise_scale is None
    assert any("[train.noise_scale]" in note for note in data.notes)


def test_run_that_is_no_point_is_refused(tmp_path: Path):
    """Without a target, with one that it did not reach, or where there is none."""
    folder = recorded(tmp_path, [None, None])

    with pytest.raises(ConfigError, match=r"target=None is refused: .* its best is 0\.6"):
        read_run(folder, target=None)
    with pytest.raises(ConfigError, match=r"did not reach it: its best is 0\.6"):
        read_run(folder, target=0.8)
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path / "nowhere", target=0.8)


def test_noise_scales_of_a_table_are_averaged(tmp_path: Path):
    """Of the runs that got there: 100 and 400 are 200."""
    text = "global_batch,steps_to_target,noise_scale\n64,10,100\n64,12,400\n128,,9999\n256,7,\n"
    assert read_data(write(tmp_path / "t.csv", text)).noise_scale == pytest.approx(200)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_noise_scale_with_one_point_is_a_document(tmp_path: Path, suffix: str):
    """What a person writes by hand after one run."""
    tables = {
        "target": 0.9,
        "noise_scale": 900.0,
        "failed_batches": [8192],
        "points": [{"global_batch": 64, "steps_to_target": 1000.0}],
    }
    toml = (
        "target = 0.9\nnoise_scale = 900.0\nfailed_batches = [8192]\n"
        "[[points]]\nglobal_batch = 64\nsteps_to_target = 1000.0\n"
    )
    path = write(tmp_path / f"p{suffix}", toml if suffix == ".toml" else json.dumps(tables))

    data = read_data(path, target=0.9)

    assert (data.noise_scale, data.smallest_failed) == (900.0, 8192)
    assert data.points[0].samples == 64_000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "batch,steps\n1,2\n", "it needs global_batch and one of"),
        ("t.csv", "global_batch,steps_to_target\n", "'no point'"),
        ("t.csv", "global_batch,steps_to_target\n64,soon\n", "steps_to_target='soon'"),
        ("t.csv", "global_batch,steps_to_target\n64,\n", "at least one batch must have reached"),
        ("t.csv", "global_batch,steps_to_target\n6.5,3\n", "global_batch='6.5'"),
        ("t.csv", "global_batch,steps_to_target\n64,-3\n", "it must be above 0"),
        ("t.txt", "", "its suffix must be one of"),
        ("t.toml", "points = []", "'no point'"),
        ("t.toml", "[[points]]\nglobal_batch = 3\n", "each point needs one of"),
        ("t.toml", "pionts = []", "did you mean 'points'"),
        ("t.toml", "noise_scale = -1.0\n[[points]]\nglobal_batch = 3\nsteps_to_target = 1.0\n",
         "noise_scale=-1"),
    ],
)  # fmt: skip
def test_what_is_no_table_of_points_is_refused(tmp_path: Path, name: str, text: str, message: str):
    """In one line, with what is accepted."""
    with pytest.raises(ConfigError, match=message):
        read_data(write(tmp_path / name, text))


@pytest.mark.parametrize(
    ("samples", "scale", "field"),
    [("NaN", "1.0", "points.0.samples_to_target"), ("1e6", "NaN", "noise_scale")],
)
def test_what_is_no_number_in_a_file_is_refused_by_name(tmp_path: Path, samples, scale, field):
    """NaN, which JSON readers take for a number, of a point or of the whole; not the word in a
    text."""
    text = (
        '{"metric": "NaN", "target": 0.5, "noise_scale": %s, "points": '
        '[{"global_batch": 64, "samples_to_target": %s}]}'
    )
    assert read_data(write(tmp_path / "good.json", text % ("1.0", "1e6"))).metric == "NaN"
    with pytest.raises(ConfigError, match=rf"bad\.json: {field}=nan is refused"):
        read_data(write(tmp_path / "bad.json", text % (scale, samples)))


def test_missing_file_is_refused(tmp_path: Path):
    """Named."""
    with pytest.raises(ConfigError, match=r"none\.csv' cannot be read"):
        read_data(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("text", "value"), [("0.759", 0.759), ("75.9%", 0.759), (" 75.9 % ", 0.759), ("2.69", 2.69)]
)
def test_target_as_typed(text: str, value: float):
    """A number, or a percentage."""
    assert parse_target(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["good", "", "nan", "inf%"])
def test_target_that_is_no_number_is_refused(text: str):
    """With an example."""
    with pytest.raises(ConfigError, match="target="):
        parse_target(text)


def test_no_point_is_refused():
    """There is nothing to fit."""
    with pytest.raises(ConfigError, match="at least one is needed"):
        fit([])
    with pytest.raises(ConfigError, match="at least one batch must have reached"):
        ConvergenceData(name="none")


def test_single_runs_of_one_batch_are_one_point():
    """Those that are means already stay as they are."""
    single = [Point(global_batch=8, samples=value) for value in (90.0, 110.0)]
    mean = Point(global_batch=8, samples=100.0, run_deviation=0.1, run_count=5)

    assert len(merged([*single, mean])) == 2


# --- limits, which two experiments take ---


def test_rule_breaks_between_the_last_that_worked_and_the_next():
    """Error 23.7 at 8192 and 24.7 at 16384: a target of 24.2 is crossed half-way in ln(batch)."""
    found = batch_limit(
        [
            Trial(global_batch=16384, error=24.7, standard_error=0.1),
            Trial(global_batch=256, error=23.6),
            Trial(global_batch=8192, error=23.7, standard_error=0.1),
        ],
        target_error=24.2,
    )

    assert (found.reached, found.failed) == (8192, 16384)
    assert found.breaking_batch == pytest.approx(8192 * math.sqrt(2))
    # Half of each standard error, in quadrature: 0.0707 of a rise of 1 over a doubling.
    assert found.breaking_factor == pytest.approx(2**0.0707, rel=1e-3)


def test_nearer_trial_decides_how_sure_a_limit_is():
    """A quarter of the way from 23.7 +- 0.1 to 24.7 +- 0.2: 3/4 of the first error, 1/4 of the
    other, in quadrature 0.0901 of a rise of 1 over a doubling."""
    found = batch_limit(
        [
            Trial(global_batch=8192, error=23.7, standard_error=0.1),
            Trial(global_batch=16384, error=24.7, standard_error=0.2),
        ],
        target_error=23.95,
    )

    assert found.breaking_batch == pytest.approx(8192 * 2**0.25)
    assert found.breaking_factor == pytest.approx(2**0.0901, rel=1e-3)


def test_rule_that_never_broke_has_no_limit():
    """Nothing is said of batches that were not tried."""
    found = batch_limit([Trial(global_batch=64, error=1.0)], target_error=2.0)

    assert (found.reached, found.failed, found.breaking_batch) == (64, None, None)


def test_rule_that_diverged_has_no_line_to_cross():
    """Between a batch that worked and one that diverged, no more is known than that."""
    trials = [Trial(global_batch=64, error=1.0), Trial(global_batch=128, error=math.inf)]

    found = batch_limit(trials, target_error=2.0)

    assert (found.reached, found.failed, found.breaking_batch) == (64, 128, None)


def test_success_beyond_a_failure_is_luck():
    """The limit is below the first failure."""
    trials = [Trial(global_batch=b, error=e) for b, e in ((64, 1.0), (128, 3.0), (256, 1.0))]

    found = batch_limit(trials, target_error=2.0)

    assert (found.reached, found.failed) == (64, 128)


def test_two_trials_of_one_batch_are_refused():
    """Which of them holds?"""
    with pytest.raises(ConfigError, match="one for each"):
        batch_limit([Trial(global_batch=8, error=1.0)] * 2, target_error=2.0)
    with pytest.raises(ConfigError, match="inf says that it diverged"):
        Trial(global_batch=8, error=math.nan)
