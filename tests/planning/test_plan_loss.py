"""Plans of language models to a loss: a row by hand, what is refused, and ladders of small runs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scalejax.cli.main import main
from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue
from scalejax.hardware import load_cluster
from scalejax.planning.convergence.loss_surface import (
    FITTED,
    LanguageRun,
    LossModel,
    Surface,
    Valley,
    anchored,
    fit_ladder,
    published_surface,
    relative_loss,
)
from scalejax.planning.time_to_target import notes
from scalejax.planning.time_to_target.language import (
    anchors_of,
    ladder_of,
    like_llama,
    parameters_of,
    parse_anchor,
    plan_loss,
    runs_in,
)
from scalejax.planning.time_to_target.plan import Plan
from scalejax.planning.time_to_target.run import ClusterOption
from scalejax.training.record import (
    EvaluationMeasurement,
    MeasurementLog,
    RunFolder,
    Status,
    StatusChange,
    TrainMeasurement,
)
from scalejax.validation.convergence import LossRow
from scalejax.validation.kinds import find_ledger, read_any
from scalejax.xla.closed_form import shape_of

# Whatever the batch and rate: 1 + 0.2 (D / 2e10)^-0.5, so that 1.1 takes 8e10 tokens.
BY_HAND = LossModel(
    name="by hand",
    surface=Surface(
        base=(1.0, -40.0, 0.0, 0.0),
        terms=(
            (math.log(0.2), 0.0, 0.0, 0.0, -0.5, 0.0),
            (-30.0, 1.0, 1.0, 0.0, 0.0, 0.0),
            (-30.0, -1.0, 0.0, 0.0, 0.0, 0.0),
            (-30.0, 0.0, -1.0, 0.0, 0.0, 0.0),
        ),
    ),
    cells=((1e8, 1.0, 1e9), (1e10, 1.0, 1e12)),
    left_out=(),
    divergence=(),
    deviation=0.01,
    deviation_beyond=0.0,
)


def test_a_row_of_a_plan_is_arithmetic_that_can_be_done_by_hand():
    """Updates, time, device-hours, cost and energy from tokens, batch and step time; the band from
    1 % of the loss: of 1.1, 0.1 is of tokens, so that they move by 22 % for each per cent."""
    plan = plan_loss(
        like_llama("llama-like:N=1b"),
        [
            ClusterOption(
                cluster=load_cluster("dgx-h100"), price_per_device_hour=3.0, watts_per_device=1000.0
            )
        ],
        [64],
        BY_HAND,
        1.1,
    )

    (point,) = plan.points
    assert point.tokens == pytest.approx(8e10, rel=1e-5)
    steps = 8e10 / (point.global_batch * 2048)
    assert point.steps == pytest.approx(steps, rel=1e-5)
    seconds = steps * point.step_seconds
    assert point.goodput is None
    assert point.run_seconds == pytest.approx(seconds, rel=1e-5)
    assert point.device_hours == pytest.approx(64 * seconds / 3600, rel=1e-5)
    assert point.cost == pytest.approx(3 * 64 * seconds / 3600, rel=1e-5)
    assert point.energy_joules == pytest.approx(1000 * 64 * seconds, rel=1e-5)
    # L e^(+-1.2816 * 0.01) is 1.11419 and 1.08599, whose tokens are 2e10 (0.2 / (L - 1))^2.
    late = 2e10 * (0.2 / (1.1 * math.exp(-0.012816) - 1)) ** 2 / 8e10
    assert point.p90_run_seconds is not None
    assert point.p90_run_seconds / point.run_seconds > late  # the step's own band joins it
    alone = plan.steps_source.split("(")[1].split(")")[0]
    assert alone == "61.4 G to 108 G"
    assert late == pytest.approx(108.2 / 80, rel=1e-3)


def test_a_plan_says_where_the_best_is_not_that_of_runs_near_it():
    """A valley at e^32 times the rate at which the loss is least, and a ladder without one."""
    valley = Valley(
        rate=(32.0, 0.0, 0.0, 0.0), batch=(0.0, 0.0, 0.0, 0.0), rate_curvature=(-4.0, 0.0, 0.0),
        batch_curvature=(-4.0, 0.0, 0.0), correlation=0.0,
    )  # fmt: skip
    wrong = replace(BY_HAND, surface=replace(BY_HAND.surface, valley=valley))
    ladder = replace(BY_HAND, shown={"parameters": 2.0, "tokens": 2.0})
    options = [ClusterOption(cluster=load_cluster("dgx-h100"), price_per_device_hour=3.0)]
    run = like_llama("llama-like:N=1b")

    said, other, plain = (
        "; ".join(plan_loss(run, options, [64], model, 1.1).notes)
        for model in (wrong, ladder, BY_HAND)
    )

    assert "times the least loss by all of them" in said
    assert "too few of its runs are near the best" in other
    assert "by all of them" not in plain


def test_the_command_prints_a_plan_of_80_columns_in_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With the answers, the caveats, and the same figures as JSON."""
    file = tmp_path / "plan.json"
    command = [
        "plan", "--target", "loss=2.3", "--model", "llama-like:N=1b", "--clusters", "dgx-h100",
        "--devices", "64,128", "--deadline", "30d", "--watts", "1200", "--json", str(file),
        "--anchor", "loss=2.5,tokens=20b,parameters=1b",
    ]  # fmt: skip
    main(command)

    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert max(len(line) for line in text.splitlines() if not line.startswith("wrote ")) <= 80
    assert ": 128 devices of dgx-h100, batch" in words
    assert "tokens at peak rate" in words
    assert "kWh" in words
    assert "by the anchor" in words
    assert "dollars a device-hour: dgx-h100 2.95 (list price of 20" in words
    points = json.loads(file.read_text())["points"]
    assert [point["device_count"] for point in points] == [64, 128]
    assert points[0]["run_seconds"] > points[1]["run_seconds"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "loss=1.0"], "do not reach it with any number of tokens"),
        (["--target", "loss=two"], "it must be a number"),
        (["--target", "loss=2.3", "--anchor", "loss=2"], "tokens=D"),
        (["--target", "loss=2.3", "--recipe", "a"], "it is for a test metric"),
        (["--target", "loss=2.3", "--watts", "5,6"], "one for each of 1 clusters"),
        (["--target", "los=2.3"], "did you mean loss"),
        (["--target", "2.3"], "--model is for --target loss=L"),
        (["--target", "loss=2.3", "--model", "llama-like:N=big"], "llama-like:N=1b"),
        (["--target", "loss=2.3", "--model", "llama3-9b"], "did you mean"),
        (["--target", "loss=2.3", "--layouts", "file"], "a plan to a loss searches them"),
        (
            ["--target", "loss=2.3", "--layout.tensor", "4"],
            "layout.tensor=4 is refused: plan",
        ),
        (["--target", "loss=2.3", "--model.remat", "full"], "model.remat='full' is refused"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    """In a sentence, with exit code 2."""
    model = [] if "--model" in flags else ["--model", "llama-like:N=1b"]
    assert main(["plan", *flags, *model, "--clusters", "dgx-h100", "--devices", "8"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def plan_of(
    model: LossModel,
    loss: float,
    devices: Sequence[int] = (1024,),
    overrides: Mapping[str, JsonValue] | None = None,
) -> Plan:
    """A plan of a billion parameters on H100s."""
    config = like_llama("llama-like:N=1b", overrides)
    return plan_loss(
        config, [ClusterOption(cluster=load_cluster("dgx-h100"))], devices, model, loss
    )


def test_no_row_of_a_ladder_needs_more_tokens_than_it_was_shown_for():
    """95 billion at the best batch, of 100 that were shown: larger batches need more."""
    model = replace(published_surface(), shown={"parameters": 1.0, "tokens": 1.0})
    plan = plan_of(model, model.best(1e9, 0.95e11).loss)
    assert plan.points
    assert all(point.tokens is not None and point.tokens < 1.0001e11 for point in plan.points)
    assert any("holds to" in reason for reason, _ in plan.left_out)


@pytest.mark.parametrize(
    ("loss", "said"),
    [(50.0, "11.09"), (1e300, "11.09"), (11.0, "so few"), (5.8, "so few")],
)
def test_losses_that_nothing_needs_to_be_trained_for_are_refused(loss: float, said: str):
    """What a network that knows nothing has, ln 65,536, and what fewer than 10 M tokens give."""
    with pytest.raises(ConfigError, match=said):
        plan_of(published_surface(), loss)


def test_batches_and_tokens_beyond_the_runs_are_told_apart():
    """~ is on what is beyond: 9 trillion tokens in one plan, and batches of 16 M tokens in the
    other; batches more than four times beyond the runs are left out."""
    model = published_surface()
    far = plan_of(model, model.best(1e9, 9e12).loss, [64])
    assert all(point.are_steps_extrapolated for point in far.points)
    near = plan_of(BY_HAND, 1.1, [64])
    assert not any(p.are_steps_extrapolated or p.is_extrapolated for p in near.points)
    small = replace(BY_HAND, batches=(1e4, 4e4))
    wide = plan_of(small, 1.1, [64])
    assert not wide.points
    assert any("4 times beyond" in reason for reason, _ in wide.left_out)
    assert "--global-batch" not in notes.nothing(wide)


def test_a_plan_needs_the_optimizer_of_the_runs_and_all_weights():
    """Another optimizer is the first note; adapters are refused."""
    plan = plan_of(published_surface(), 2.4, [64], {"optimizer.name": "lion"})
    assert "lion" in plan.notes[0]
    assert "AdamW" in plan.notes[0]
    with pytest.raises(ConfigError, match="fine_tuning"):
        plan_of(published_surface(), 2.4, [64], {"fine_tuning.trainable": ["blocks/1"]})


@pytest.mark.parametrize(
    ("anchor", "said"),
    [
        ("loss=3,tokens=1e300,parameters=1e9", "tokens"),
        ("loss=3,tokens=2e10,parameters=1e300", "parameters"),
        ("loss=0.001,tokens=2e10,parameters=1e9", "0.3 to 3"),
        ("loss=1e300,tokens=2e10,parameters=1e9", "0.3 to 3"),
        ("loss=3,tokens=2e10,parameters=1e9,learning_rate=100", "learning_rate"),
        ("loss=3,tokens=2e10,parameters=1e9,batch_tokens=1e12", "batch_tokens"),
        ("loss=3,tokens=2e10,parameters=1e9,loss=2", "twice"),
    ],
)
def test_anchors_that_cannot_be_are_refused(anchor: str, said: str):
    """With their bounds."""
    model = published_surface()
    with pytest.raises(ConfigError, match=said) as refused:
        anchored(model, parse_anchor(anchor, model))
    assert len(str(refused.value)) < 400


def test_more_devices_than_can_be_are_refused(capsys: pytest.CaptureFixture[str]):
    """Beyond 64 bits, with exit code 2."""
    command = ["plan", "--target", "loss=2.3", "--model", "llama-like:N=1b", "--clusters"]
    assert main([*command, "dgx-h100", "--devices", "99999999999999999999"]) == 2
    assert "10,000,000" in capsys.readouterr().err


def test_networks_like_llama_have_the_parameters_that_were_asked_for():
    """Within 5 %, without embeddings; 8 billion are about as wide and deep as Llama 7B."""
    for text, wanted in (("100m", 1e8), ("1b", 1e9), ("8B", 8e9), ("70b", 7e10)):
        config = like_llama(f"llama-like:N={text}")
        shape = shape_of(config, load_cluster("dgx-h100").chip, None)
        assert parameters_of(shape) == pytest.approx(wanted, rel=0.06)


def test_anchors_are_runs_with_the_best_batch_and_rate_unless_given():
    """Two of them, sizes as people write them."""
    model = published_surface()
    first, second = parse_anchor(
        "loss=3.1,tokens=20b,parameters=1e9; loss=3,tokens=4e10,parameters=1b,batch_tokens=1m",
        model,
    )
    assert (first.tokens, first.parameters, first.loss) == (2e10, 1e9, 3.1)
    assert first.batch_tokens == pytest.approx(model.best(1e9, 2e10).batch_tokens)
    assert second.batch_tokens == 1e6


def dense_runs() -> list[LanguageRun]:
    """A ninth of the published dense runs that are fitted."""
    rows = read_any(find_ledger("steplaw_dense_lr_batch_loss")).rows
    runs = [row.run for row in rows if isinstance(row, LossRow)]
    return [r for r, off in zip(runs, relative_loss(runs), strict=True) if off < FITTED][::9]


def test_a_ladder_of_small_cells_foretells_the_largest_and_goes_no_farther():
    """Published runs of 0.2 to 0.54 billion parameters foretell those of 1.07 billion within 2 %,
    having seen no other; a hundred times as large is refused, with how far it holds."""
    runs = dense_runs()
    small = [run for run in runs if run.parameters < 1e9]
    large = [run for run in runs if run.parameters > 1e9]

    ladder = fit_ladder(small)

    errors = [abs(ladder.surface.loss(run) / loss - 1) for run in large if (loss := run.loss)]
    assert sum(errors) / len(errors) < 0.02
    assert ladder.shown["parameters"] >= 2
    ladder.require_shown(1.07e9, 5.7e10)
    with pytest.raises(ConfigError, match="train a larger rung"):
        ladder.require_shown(5e10, 5.7e10)


def test_a_ladder_of_few_runs_leans_on_the_exponents_of_another_corpus():
    """24 runs of three sizes, 30 % above the published losses as of another vocabulary: the fourth
    size within 2 %. Two sizes are refused."""
    model = published_surface()
    runs = [
        LanguageRun(
            parameters=n,
            tokens=d,
            batch_tokens=b,
            learning_rate=r,
            loss=1.3
            * model.surface.loss(
                LanguageRun(parameters=n, tokens=d, batch_tokens=b, learning_rate=r)
            ),
        )
        for n in (3e7, 6e7, 1.2e8)
        for d in (1e9, 3e9)
        for b in (1.3e5, 2.6e5)
        for r in (1e-3, 3e-3)
    ]
    ladder = fit_ladder(runs, model.surface)

    goal = LanguageRun(parameters=2.4e8, tokens=6e9, batch_tokens=2.6e5, learning_rate=2e-3)
    assert ladder.surface.loss(goal) == pytest.approx(1.3 * model.surface.loss(goal), rel=0.02)
    with pytest.raises(ConfigError, match="three sizes"):
        fit_ladder(runs[:16], model.surface)


def test_a_ladder_has_the_best_batch_and_rate_of_its_own_valley():
    """Four sizes whose best rate is 1.5 times the published, 0.7 times the batch: batch and rate of
    that within 2 %, beyond them in tokens or size."""
    surface = published_surface().surface
    assert surface.valley is not None
    published = surface.valley
    moved = replace(
        published,
        rate=(published.rate[0] + math.log(1.5), *published.rate[1:]),
        batch=(published.batch[0] + math.log(0.7), *published.batch[1:]),
    )
    surface = replace(surface, valley=moved)
    runs = []
    for n in (1e8, 2e8, 4e8, 8e8):
        best = surface.best(n, 20 * n)
        for r in (0.5, 1, 2):
            for b in (0.5, 1, 2):
                run = LanguageRun(
                    parameters=n,
                    tokens=20 * n,
                    batch_tokens=b * best.batch_tokens,
                    learning_rate=r * best.learning_rate,
                )
                runs.append(replace(run, loss=1.3 * best.loss * math.exp(moved.rise(run))))

    ladder = fit_ladder(runs, published_surface().surface)

    for n, tokens in ((1e9, 1e11), (7e9, 1.4e11)):
        best, found = surface.best(n, tokens), ladder.best(n, tokens)
        assert found.learning_rate == pytest.approx(best.learning_rate, rel=0.02)
        assert found.batch_tokens == pytest.approx(best.batch_tokens, rel=0.02)


RUN = """
[model]
name = "llama"
layers = {layers}
hidden = {hidden}
heads = {heads}
[data]
name = "synthetic_tokens"
tokens = 512
vocabulary = 512
train_examples = 4096
[batch]
global_batch = {batch}
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = {rate}
"""


def sweep_of_decoders(folder: Path) -> list[LanguageRun]:
    """A sweep's folder as `scalejax sweep` leaves it, of twelve decoders of three sizes, whose
    losses are 30 % above the published surface; one that was stopped, and one that diverged."""
    model, runs = published_surface(), []
    sizes = [(2, 128), (3, 256), (4, 384)]
    rows = [(size, batch, rate) for size in sizes for batch in (64, 128) for rate in (1e-3, 4e-3)]
    for index, ((layers, hidden), batch, rate) in enumerate(
        [*rows, (sizes[0], 64, 2e-3), (sizes[1], 64, 0.3)]
    ):
        path = RunFolder(path=folder / "runs" / f"{index:04d}")
        path.path.mkdir(parents=True)
        text = RUN.format(layers=layers, hidden=hidden, heads=hidden // 64, batch=batch, rate=rate)
        (path.path / "run.toml").write_text(text)
        config = load_config(path.path / "run.toml")
        run = LanguageRun(
            parameters=parameters_of(shape_of(config, load_cluster("dgx-h100").chip, None)),
            tokens=5e8 * layers,
            batch_tokens=batch * 512,
            learning_rate=rate,
        )
        loss = 1.3 * model.surface.loss(run)
        log = MeasurementLog(path.measurements)
        steps = round(run.tokens / run.batch_tokens)
        for step in (steps // 2, steps):
            log.append(
                TrainMeasurement(
                    step=step, epoch=1.0, loss=loss + 1, accuracy=0.5, learning_rate=rate,
                    global_batch=batch, step_seconds=1.0, samples_per_second=1.0,
                    elapsed_seconds=float(step),
                )
            )  # fmt: skip
        log.append(
            EvaluationMeasurement(
                step=steps, epoch=1.0, test_loss=loss, test_accuracy=0.5, examples=9, seconds=1.0,
                elapsed_seconds=float(steps),
            )
        )  # fmt: skip
        status: Status = "completed"
        if index >= len(rows):
            status = "interrupted" if index == len(rows) else "diverged"
        log.append(StatusChange(status=status, message="", step=steps, elapsed_seconds=9.0))
        log.close()
        if status == "completed":
            runs.append(replace(run, loss=loss))
    return runs


def test_a_sweep_made_here_says_what_a_larger_decoder_needs_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Sizes, tokens and last evaluations are read from its folder, without the run that did not
    complete; twice the largest is foretold, and a thousand times as large is refused."""
    runs = sweep_of_decoders(tmp_path)

    found = runs_in(tmp_path)
    assert [run.parameters for run in found] == [run.parameters for run in runs]
    assert [run.loss for run in found] == pytest.approx([run.loss for run in runs])
    assert [run.tokens for run in found] == pytest.approx([run.tokens for run in runs], rel=1e-3)
    ladder = ladder_of(tmp_path)
    assert "12 of 14 runs, of 3 sizes" in ladder.name
    assert "1 diverged" in ladder.name
    hot, cool = (
        ladder.divergence_probability(replace(runs[4], learning_rate=rate)) for rate in (0.3, 1e-3)
    )
    assert hot > 0.4
    assert cool < 0.1
    larger = replace(runs[-1], parameters=2 * runs[-1].parameters, loss=None)
    wanted = 1.3 * published_surface().surface.loss(larger)
    assert ladder.surface.loss(larger) == pytest.approx(wanted, rel=0.02)

    command = ["plan", "--target", "loss=3", "--model", "llama-like:N=1b", "--clusters", "dgx-h100"]
    assert main([*command, "--devices", "8", "--from-sweep", str(tmp_path)]) == 2
    assert "train a larger rung" in " ".join(capsys.readouterr().err.split())
    (alone,) = anchors_of(str(tmp_path / "runs" / "0003"), published_surface())
    assert alone.loss == pytest.approx(runs[3].loss)
    with pytest.raises(ConfigError, match="a decoder that was trained to its end"):
        runs_in(tmp_path / "runs" / "0012")
