"""What the experiments on large batches ask for, and what they make of what they find."""

import json
import math
import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest

from scalejax.config.schedule import ScheduleConfig
from scalejax.sweep import SweepPlan, parse_grammar, plan_sweep
from scalejax.training.record import MeasurementLog, RunFolder, RunRecord, TrainMeasurement

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def script(name: str) -> dict:
    """The names of an experiment's script."""
    return runpy.run_path(str(EXPERIMENTS / name / "measure.py"))


def plan_of(name: str, *parameters: str) -> SweepPlan:
    """The runs that an experiment trains."""
    words = script(name)["SWEEP"]
    typed = list(zip(words[::2], words[1::2], strict=True))
    variables, extensions = ([text for f, text in typed if f == flag] for flag in ("-V", "-E"))
    grammar = parse_grammar(parameters, variables, extensions)
    return plan_sweep(EXPERIMENTS / name / "run.toml", grammar)


def schedules(plan: SweepPlan) -> set[tuple[int, str, str, float]]:
    """Batch, rule, warmup and peak of every run."""
    found = set()
    for planned in plan.runs:
        schedule, batch = planned.run.config.schedule, planned.run.split.global_batch
        assert isinstance(schedule, ScheduleConfig)
        peak, _ = schedule.scaled(batch)
        found.add((batch, schedule.scaling, schedule.warmup, round(peak, 6)))
    return found


def recorded(folder: Path, losses: Sequence[float | None], steps_per_epoch: int) -> RunRecord:
    """A record with a line for each update."""
    log = MeasurementLog(RunFolder(path=folder).measurements)
    for step, loss in enumerate(losses, start=1):
        log.append(
            TrainMeasurement(
                step=step,
                epoch=step / steps_per_epoch,
                loss=loss,
                accuracy=0.5,
                learning_rate=0.1,
                step_seconds=1.0,
                samples_per_second=1.0,
                elapsed_seconds=step,
            )
        )
    log.close()
    return RunRecord.load(folder)


def test_overlay_keeps_the_samples_of_batch_norm_and_scales_the_rate():
    """n = 32 whatever k is; 0.1 kn / 256 is 0.0125 with k = 1 and 0.2 with k = 16."""
    plan = plan_of("loss_curve_overlay")

    assert len(plan.runs) == 12
    assert all(
        planned.run.split.global_batch == 32 * planned.run.bn_groups for planned in plan.runs
    )
    assert schedules(plan) == {
        (32, "linear", "none", 0.0125),
        (512, "linear", "none", 0.2),
        (512, "linear", "constant", 0.2),
        (512, "linear", "gradual", 0.2),
    }


def test_overlay_measures_each_seed_against_small_batch_of_the_same_seed(tmp_path):
    """By hand: curves that lie 0.25 apart from the sixth epoch on, and 1 before it."""
    overlay = script("loss_curve_overlay")
    small = {seed: recorded(tmp_path / f"small{seed}", [0.5 + seed] * 40, 4) for seed in (0, 1)}
    # The gap begins with the first loss after 5 epochs.
    losses = {seed: [1.5 + seed] * 10 + [0.75 + seed] * 10 for seed in (0, 1)}
    large = {seed: recorded(tmp_path / f"large{seed}", losses[seed], 2) for seed in (0, 1)}

    gaps = overlay["gaps"]({"k = 1": small, "k = 16, gradual warmup": large})

    assert [each.mean_gap for each in gaps["k = 1"]] == [1.0]
    found = gaps["k = 16, gradual warmup"]
    assert [each.mean_gap for each in found] == pytest.approx([0.25, 0.25])
    assert [each.max_gap for each in found] == pytest.approx([0.25, 0.25])


def test_overlay_draws_the_mean_of_an_epoch_its_last_update_included(tmp_path):
    """Three epochs of three updates; in the last one a loss is not finite."""
    record = recorded(tmp_path, [1.0, 2.0, 3.0, 4.0, 4.0, 7.0, 1.0, None, 1.0], 3)

    assert script("loss_curve_overlay")["epoch_losses"](record.training) == [2.0, 5.0, None]


def test_rules_differ_in_their_peak_alone():
    """0.02 k, 0.02 root k and 0.02; at batch 32 they are one."""
    plan = plan_of("scaling_rules", 'data.edition="embedded"')

    expected = {(32, "linear", "gradual", 0.02)}
    for k in (4, 8, 16, 32, 64, 128):
        expected |= {
            (32 * k, "linear", "gradual", round(0.02 * k, 6)),
            (32 * k, "sqrt", "gradual", round(0.02 * math.sqrt(k), 6)),
            (32 * k, "none", "none", 0.02),
        }
    assert schedules(plan) == expected
    assert len(plan.runs) == 3 * len(expected)
    assert plan.repeated == 0


def test_a_rule_breaks_where_a_seed_fails_or_the_mean_falls_below_the_tolerance():
    """By hand: errors of 0.10 + 0.015 are the target, 0.11 and 0.12 lie on either side of it."""
    found = {
        "linear": {32: [0.9, 0.9], 128: [0.9, 0.9], 256: [0.9, None], 512: [0.9, 0.9]},
        "sqrt": {32: [0.9, 0.9], 128: [0.9, 0.9], 256: [0.89, 0.89], 512: [0.88, 0.88]},
        "none": {32: [0.9, 0.9], 128: [0.9, 0.9], 256: [0.1, 0.9], 512: [0.1, 0.1]},
    }

    limits = script("scaling_rules")["limits"](found)

    for rule in ("linear", "none"):
        assert (limits[rule].reached, limits[rule].failed) == (128, 256)
        assert limits[rule].breaking_batch is None
    assert (limits["sqrt"].reached, limits["sqrt"].failed) == (256, 512)
    assert limits["sqrt"].breaking_batch == pytest.approx(256 * math.sqrt(2))


def test_kept_results_of_the_rules_are_of_the_runs_that_are_trained():
    """Every rule, batch and seed has a figure, or has diverged."""
    names, kept = script("scaling_rules"), EXPERIMENTS / "scaling_rules" / "results.json"
    found = json.loads(kept.read_text())["accuracies"]

    assert set(found) == set(map(str, names["BASE_RATES"]))
    for of_rate in found.values():
        assert set(of_rate) == set(names["RULES"])
        for of_rule in of_rate.values():
            assert set(of_rule) == set(map(str, names["BATCHES"]))
            assert all(len(reached) == 3 for reached in of_rule.values())


@pytest.mark.parametrize(
    ("is_at_edge", "found", "said"),
    [
        (True, {"test_accuracy_difference_low": 0.1}, "cannot be said: the rate is at an edge"),
        (False, {"test_accuracy_difference_low": 0.1}, "better"),
        (False, {"test_accuracy_difference_high": -0.1}, "worse"),
        (False, {}, "no difference shown"),
        (False, {"trained_only": 3, "test_accuracy_difference_low": None}, "only with warmup 3"),
        (False, {"diverged_only": 1}, "only with warmup 0 of 3 seeds train, only without 1"),
        (False, {"test_accuracy_difference_low": None}, "cannot be said: less than two pairs"),
    ],
)
def test_a_verdict_on_warmup_counts_what_diverged_and_needs_rates_on_both_sides(
    is_at_edge, found, said
):
    """A paired difference says nothing of seeds that only one of the two trains with."""
    usual = {"runs": 3, "trained_only": 0, "diverged_only": 0}
    usual |= {"test_accuracy_difference_low": -0.2, "test_accuracy_difference_high": 0.2}

    assert script("warmup_today")["verdict"](usual | found, is_at_edge).startswith(said)


@pytest.mark.parametrize(
    ("study", "measure", "optimizers"),
    [
        ("images", "accuracy", {"muon", "schedule_free", "lamb", "sgd"}),
        ("decoder", "loss", {"adamw", "muon"}),
    ],
)
def test_verdicts_on_warmup_follow_from_the_committed_figures(study, measure, optimizers):
    """Of each warmup of each optimizer, at a rate that is at no edge unless the verdict says so."""
    found = json.loads((EXPERIMENTS / "warmup_today" / "results.json").read_text())[study]
    at_edge = {line["optimizer"] for line in found["rates"] if line["at_edge"]}
    judged = [cell for cell in found["cells"] if cell["warmup"] != "none"]

    assert {cell["optimizer"] for cell in judged} == optimizers
    verdict = script("warmup_today")["verdict"]
    for cell in judged:
        assert cell["verdict"] == verdict(cell, cell["optimizer"] in at_edge, measure)


def test_of_losses_the_lower_is_better():
    """Where the interval of differences leaves zero out."""
    verdict = script("warmup_today")["verdict"]
    cell = {"runs": 3, "trained_only": 0, "diverged_only": 0}
    ends = [f"test_loss_difference_{end}" for end in ("low", "high")]

    said = [
        verdict(cell | dict(zip(ends, each, strict=True)), False, "loss")
        for each in ((-0.2, -0.1), (0.1, 0.2), (-0.1, 0.2))
    ]

    assert said == ["better", "worse", "no difference shown"]
