"""The report: runs and predictions as one HTML file that needs no network.

Arranges the sections, each plot with a sentence on how to read it; computes no numbers.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from scalejax.core.serialization import save_text
from scalejax.core.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_fraction,
    format_seconds,
    format_seconds_briefly,
)
from scalejax.report.html import charts
from scalejax.report.html.bench import add_benches
from scalejax.report.html.emulation import add_emulations
from scalejax.report.html.head import add_head
from scalejax.report.html.page import Page
from scalejax.report.html.plan import add_plans
from scalejax.report.sources import RunSource, Sources, SweepSource, gap_between, read_sources
from scalejax.report.terminal import data as data_tables
from scalejax.report.terminal import scaling as scaling_tables
from scalejax.report.terminal import sweep as sweep_tables
from scalejax.simulator.frameworks import XLA, known_framework
from scalejax.simulator.predict import ScalingPrediction, merged_notes
from scalejax.training.input_stalls import WORTH_SAYING
from scalejax.training.record import EvaluationMeasurement
from scalejax.training.sample_life import life_of

# Time accounting: where the wall time of runs went.


def add_times(page: Page, runs: Sequence[RunSource]) -> None:
    """Append a table and bars with the time accounting of the runs that have one, if any."""
    timed = [run for run in runs if run.time is not None]
    if not timed:
        return
    page.add("<h3>Where the wall time went</h3>")
    page.add(
        "<p>From the start of the first process of a run to the end of its last session; the parts "
        "add up to it. Goodput is the share of useful steps, their waiting for input "
        "included. Wasted is work done after the checkpoint from which a later session "
        "resumed; down is the time between sessions. The failure model column is its goodput for "
        "the failures, restarts and checkpoints observed in the run (Daly 2006).</p>"
    )
    parts = [name for name, _ in timed[0].time.parts] if timed[0].time else []
    page.add_table(
        ["run", "sessions", "steps again", "wall time", "goodput", "failure model", *parts],
        [_row(run) for run in timed],
    )
    page.add_chart(
        "Shares of the wall time",
        "Each bar is the whole time of a run, from start to end, whatever happened to it.",
        charts.wall_time(timed),
    )


def _row(run: RunSource) -> list[str]:
    account = run.time
    if account is None:
        return []
    return [
        run.label,
        str(account.sessions),
        f"{account.repeated_steps:,}",
        format_seconds_briefly(account.seconds),
        format_fraction(account.goodput),
        format_fraction(run.model_goodput),
        *(format_seconds_briefly(seconds) if seconds else "0" for _, seconds in account.parts),
    ]


# Sweeps: results of each arm over its seeds.


def add_sweeps(page: Page, sweeps: Sequence[SweepSource]) -> None:
    """Append a table for every sweep, with one row for runs that differ only in their seed."""
    page.add('<h2 id="sweeps">Sweeps</h2>')
    for sweep in sweeps:
        page.add(f"<h3>{escape(sweep.name)}: {len(sweep.plan.runs)} runs</h3>")
        page.add_parts(sweep_tables.results(sweep.plan, sweep.rows))
        if sweep.kept_every > 1:
            page.add(
                f'<p class="soft">Training loss and learning rate are drawn from one line of the '
                f"record in {sweep.kept_every}.</p>"
            )


_MOST_LIVES = 4
"""Most runs for which the life of a batch is shown."""
_MOST_REASONS = 5
"""Most causes of unreadable examples that are listed."""


def write_report(paths: Sequence[Path], output: Path, *, title: str = "scalejax report") -> None:
    """Write the runs and predictions at `paths` as one HTML page.

    Example:
        >>> from importlib.resources import files
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from scalejax import load_config, search, write_report
        >>> from scalejax.core.serialization import save
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> tables = {"model": {"name": "gpt2-124m"}, "data": {"name": "synthetic_tokens"}}
        >>> found = search(load_config(path, tables), "dgx-h100", 2, confirm=0)
        >>> folder = Path(mkdtemp())
        >>> save(found.ranked[0].prediction, folder / "prediction.json")
        >>> write_report([folder / "prediction.json"], folder / "report.html", title="2 H100")
        >>> "<h1>2 H100</h1>" in (folder / "report.html").read_text()
        True

    Args:
        paths: folders of runs and sweeps, and JSON files of predictions and plans.
        output: the HTML file.
        title: heading of the page.

    Raises:
        ConfigError: if a path is none of these, or the file cannot be written.
    """
    save_text(render(read_sources(paths), title), output)


def render(sources: Sources, title: str) -> str:
    """The page, as HTML with everything inside it."""
    page = Page()
    page.add(f"<h1>{escape(title)}</h1>")
    add_head(page, sources)
    runs = (("Sweeps", sources.sweeps), ("Runs", sources.runs))
    parts = (
        *runs,
        ("Benches", sources.benches),
        ("Plans", sources.plans),
        ("Predictions", sources.studies),
    )
    links = [f'<a href="#{name.lower()}">{name}</a>' for name, part in parts if part]
    if len(links) > 1:
        page.add(f"<nav>{''.join(links)}</nav>")
    if sources.sweeps:
        add_sweeps(page, sources.sweeps)
    if sources.runs:
        _add_runs(page, sources.runs)
    if sources.curves:
        _add_curves(page, sources.curves)
    if emulated := [run for run in sources.curves if run.emulation is not None]:
        add_emulations(page, emulated)
    if sources.runs:
        _add_comparisons(page, sources.runs)
    if sources.benches:
        add_benches(page, sources.benches)
    if sources.plans:
        add_plans(page, sources.plans)
    if sources.studies:
        _add_studies(page, sources.studies)
    return page.render(title)


# --- runs ---


def _add_runs(page: Page, runs: Sequence[RunSource]) -> None:
    page.add('<h2 id="runs">Runs</h2>')
    page.add(
        "<p>What was trained, and how it ended. Accuracy is of the weights that a run ended with, "
        "over all examples of that part; a run that diverged has none. Where there are validation "
        "data, test data are read once, after the step that the last column names.</p>"
    )
    page.add_table(
        [
            "run",
            "ended",
            "global batch",
            "peak learning rate",
            "epochs",
            "validation accuracy",
            "test accuracy",
            "tested at",
        ],
        [_run_row(run) for run in runs],
    )
    if any(run.record.unreadable for run in runs):
        _add_unreadable(page, runs)
    add_times(page, runs)


def _add_curves(page: Page, runs: Sequence[RunSource]) -> None:
    part = " or ".join(dict.fromkeys(charts.monitored_part(run) for run in runs))
    page.add_chart(
        f"{part.capitalize()} accuracy",
        f"The share of {part} examples classified correctly, after each epoch. Click a name in the "
        "legend to pick a run; drag to move, Ctrl and the wheel to zoom. A dashed curve lies on "
        "top of another. A cross marks where a run diverged; such a run has no accuracy.",
        charts.accuracy(runs, part),
    )
    page.add_chart(
        "Training loss",
        "Mean loss of single minibatches as they were trained, on a logarithmic axis up to twice "
        "the largest of runs that did not diverge. A cross marks the end of a run that did.",
        charts.training_loss(runs),
    )
    page.add_chart(
        "Learning rate",
        "The learning rate of each update: scaled with the batch, warmed up, then decayed.",
        charts.learning_rate(runs),
    )
    if any(run.measures_noise_scale for run in runs):
        page.add_chart(
            "Gradient noise scale",
            "How many samples a gradient needs before noise no longer dominates it: below, twice "
            "the batch needs nearly half the steps; well above, a larger batch hardly trains "
            "faster (McCandlish et al. 2018). Computed from moving averages, so the first values "
            "are rough.",
            charts.noise_scale(runs),
        )
    if any(run.measures_sharpness for run in runs):
        page.add_chart(
            "Sharpness",
            "The largest eigenvalue of the Hessian of the training loss, over the same samples "
            "each time, and the limit above which SGD of that learning rate and momentum leaves "
            "the minimum of a quadratic, 2 / rate without momentum: a rate that is warmed up "
            "drives the sharpness below it (Lewkowycz et al. 2020), or along it (Cohen et al. "
            "2021). With AdamW both refer to the preconditioned Hessian (Cohen et al. 2022).",
            charts.sharpness(runs),
        )
    if any(run.has_experts for run in runs):
        page.add_chart(
            "Load of experts",
            "Tokens of the fullest expert of all layers over the mean of its layer: 1 if all "
            "experts have equally many. Over the last window of assignments "
            "(model.moe.load_window), or single updates if there is none.",
            charts.expert_load(runs),
        )


def _add_comparisons(page: Page, runs: Sequence[RunSource]) -> None:
    if len(runs) > 1:
        _add_gaps(page, runs)
    runs = [run for run in runs if run.emulation is None]  # emulated times are not measured
    if not runs:
        return
    page.add("<h3>Time of a step: predicted and measured</h3>")
    page.add(
        "<p>The prediction was written before training began, from the compiled program and a "
        "short measurement of this machine, at the load that it had then; the measurement is the "
        "median over the run. The error is (predicted - measured) / measured. The time a host "
        "takes to start each step on a GPU is not predicted; it dominates steps of a few "
        "milliseconds.</p>"
    )
    page.add_table(
        [
            "run",
            "devices",
            "samples/s",
            "step measured",
            "step predicted",
            "error",
            "waiting for input",
        ],
        [_time_row(run) for run in runs],
    )
    page.add_notes(f"{run.label}: {run.slow_note}" for run in runs if run.slow_note)
    page.add_notes(f"{run.label} is damaged: {run.damage}" for run in runs if run.damage)
    if any((run.wait_share or 0) >= WORTH_SAYING for run in runs):
        page.add_chart(
            "Waiting for input",
            "The share of the time that devices were idle because no batch was ready, "
            "between one line of the record and the next. More input.workers or smaller "
            "examples reduce it; the first line includes starting the input workers.",
            charts.input_wait(runs),
        )
    if lived := [run for run in runs if run.record.input]:
        _add_lives(page, lived)


def _add_lives(page: Page, runs: Sequence[RunSource]) -> None:
    """Append the life of a batch in the first runs, one for those that differ only in the seed."""
    page.add("<h3>The life of a batch</h3>")
    page.add(
        "<p>Mean seconds of a batch in each stage of the last epoch, measured where it runs, and "
        "as predicted before training. Stages of several batches run concurrently; the devices "
        "wait if the slowest stage delivers less than they consume.</p>"
    )
    first = {run.family: run for run in reversed(runs)}
    for run in [run for run in runs if first[run.family] is run][:_MOST_LIVES]:
        measured = run.record.input[-1]
        page.add(f"<p>{escape(run.label)}</p>")
        page.add_parts(data_tables.life(measured, life_of(measured, run.prediction)))


def _add_unreadable(page: Page, runs: Sequence[RunSource]) -> None:
    """Append a table of the examples that were skipped because they could not be read."""
    page.add("<h3>Examples that could not be read</h3>")
    page.add(
        "<p>They were skipped, as the config says. Rows are counted over all epochs of training, "
        "and in the evaluation that had most. Accuracies and losses cover the others.</p>"
    )
    rows = []
    for run in runs:
        for part, counted in (("train", sum), ("validation", max), ("test", max)):
            lines = [line for line in run.record.unreadable if line.part == part]
            if lines:
                reasons = dict.fromkeys(reason for line in lines for reason in line.reasons)
                named = "; ".join(list(reasons)[:_MOST_REASONS])
                rows.append([run.label, part, f"{counted(line.rows for line in lines):,}", named])
    page.add_table(["run", "part", "rows", "the first of them"], rows)


def _add_gaps(page: Page, runs: Sequence[RunSource]) -> None:
    """Append a table of the loss gap of each run to the first run."""
    first, *others = runs
    page.add("<h3>Loss-curve gap after warmup</h3>")
    page.add(
        f"<p>The distance of the training loss from that of {escape(first.label)}, averaged over "
        "about an epoch, from the end of the longer warmup onwards. It is small where a larger "
        "batch trains like a small one (Goyal et al. 2017, figure 3).</p>"
    )
    rows = []
    for run in others:
        gap = gap_between(first, run)
        shown = (
            [UNKNOWN] * 3
            if gap is None
            else [f"{gap.from_epoch:.3g}", f"{gap.max_gap:.3g}", f"{gap.mean_gap:.3g}"]
        )
        rows.append([run.label, *shown])
    page.add_table(["run", "from epoch", "largest gap", "mean gap"], rows)


def _run_row(run: RunSource) -> list[str]:
    record, training = run.record, run.record.training
    tested = None if run.has_diverged else record.tested
    chosen = None if tested is None else tested.chosen_step
    validated = [m for m in record.validations if tested and m.step == chosen]
    rates = [m.learning_rate for m in training]
    batch = run.config.batch
    return [
        run.label,
        _ending(run),
        f"{batch.global_batch:,}" if batch.global_batch else f"{batch.per_device_batch} per device",
        f"{max(rates):.3g}" if rates else UNKNOWN,
        str(run.config.train.epochs),
        format_fraction(validated[-1].accuracy if validated else None),
        format_fraction(tested and tested.accuracy),
        UNKNOWN if tested is None else f"step {tested.step}{_choice(tested)}",
    ]


def _choice(tested: EvaluationMeasurement) -> str:
    """Which weights were tested, if they were chosen."""
    if tested.chosen_step is None or tested.chosen_by == "last":
        return ""
    by = str(tested.chosen_by).replace("_", " ")
    return f", weights of step {tested.chosen_step} by {by}"


def _ending(run: RunSource) -> str:
    """Status of the run, with the cause if it diverged."""
    if not run.record.statuses:
        return UNKNOWN
    last = run.record.statuses[-1]
    cause = "" if last.cause is None else f" ({last.cause})"
    return f"{last.status}{cause}".replace("_", " ")


def _time_row(run: RunSource) -> list[str]:
    measured = run.step_seconds
    predicted = None if run.prediction is None else run.prediction.step_seconds
    rates = [m.samples_per_second for m in run.record.training if m.samples_per_second]
    error = None if measured is None or predicted is None else (predicted - measured) / measured
    return [
        run.label,
        str(run.prediction.device_count) if run.prediction else UNKNOWN,
        format_count(sorted(rates)[len(rates) // 2] if rates else None),
        format_seconds(measured),
        format_seconds(predicted),
        UNKNOWN if error is None else f"{error:+.0%}",
        format_fraction(run.wait_share),
    ]


# --- predictions ---


def _add_studies(page: Page, studies: Sequence[ScalingPrediction]) -> None:
    page.add('<h2 id="predictions">Predictions</h2>')
    page.add(
        "<p>Computed from the program that the compiler made of the training step for each "
        "number of devices, and from the figures of the hardware. Nothing here was measured. "
        "Terms that are not known (waiting for input, stragglers, checkpoints, failures) are "
        "left out of every time. p10 and p90 are the error band of a prediction, "
        "not a spread of steps: for one prediction in ten, the measured time should be below "
        "p10, and for one in ten above p90.</p>"
    )
    if any(len(study.predictions) > 1 for study in studies):
        page.add_chart(
            "Throughput as devices are added",
            "Samples trained per second. The dashed line is ideal: the smallest number of "
            "devices, multiplied. Both axes are logarithmic.",
            charts.throughput(studies),
        )
        page.add_chart(
            "Scaling efficiency",
            "Throughput per device, relative to the smallest number of devices. The loss "
            "against 100 % is the cost of communication and waiting.",
            charts.efficiency(studies),
        )
    for study in studies:
        _add_study(page, study)


def _add_study(page: Page, study: ScalingPrediction) -> None:
    first = study.predictions[0]
    page.add(f"<h2>{escape(study.title)}</h2>")
    is_ours = known_framework(first.framework) == XLA
    by = "" if is_ours else f", by the framework {escape(first.framework)}"
    kept = scaling_tables.kept_samples(study)
    page.add(f"<p>{study.scaling.capitalize()} scaling{by}: {kept} as devices are added.</p>")
    page.add_parts([scaling_tables.figures_of(study), scaling_tables.ranges(study.predictions)])
    page.add_chart(
        "Where the time of a step goes",
        "Compute: matrix products and convolutions. Memory: operations that wait for the "
        "device's own memory. Launch: the gaps between operations. Communication: what is not "
        "hidden behind compute, by the mesh axis that needs it. Contention: compute slowed by "
        "overlapping collectives. Host and overhead: waiting for the host. Stragglers and input: "
        "waiting for the slowest device, and for data.",
        charts.time_split(study),
    )
    page.add_chart(
        "Memory",
        f"Peak memory of one device, as the compiler assigned it, plus the "
        f"runtime's own share. The dashed line is the capacity of the device: "
        f"{format_bytes(first.memory_bytes)}.",
        charts.memory(study),
    )
    page.add_notes(merged_notes(study.predictions))
