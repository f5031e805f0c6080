"""The quickstart: predicts ResNet-50 on two clusters, trains with and without warmup, reports.

Lists its runs and predictions; each step does what one command does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import mean

from rich.console import Console, RenderableType
from rich.text import Text

from scalejax.config.run import load_config, with_fields
from scalejax.core import progress, serialization
from scalejax.core.environment import choose_platform
from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.core.units import format_fraction, format_seconds
from scalejax.hardware import load_cluster_and_site
from scalejax.planning.scaling_study import study
from scalejax.report.terminal import scaling as scaling_tables
from scalejax.report.terminal import tables
from scalejax.simulator.frameworks import XLA, Framework, framework_named
from scalejax.simulator.predict import ScalingPrediction
from scalejax.training.record import RunRecord

DEVICE_COUNT = 8
"""Virtual devices on which the quickstart trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the runs that are compared."""

    name: str
    """Name of its folder, and its name in the report."""
    file: str
    """Its run.toml among the examples."""
    description: str
    """How it differs from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One of the predictions."""

    name: str
    """Name of the file of the prediction."""
    title: str
    """Title of the table and the plot."""
    file: str
    """Its run.toml among the examples."""
    cluster: str
    """Name of the cluster in the catalogue."""
    device_counts: tuple[int, ...]
    """Numbers of devices; only a few, because each one whose program does not come with scalejax
    (`xla/kept.py`) takes 10 to 20 s to compile."""
    framework: Framework = XLA
    """The framework that trains it."""


ARMS = (
    Arm(
        name="small-batch",
        file="fashion_small_batch.toml",
        description="32 images per update, and the learning rate that suits them",
    ),
    Arm(
        name="no-warmup",
        file="fashion_no_warmup.toml",
        description="512 images per update, 16 times the learning rate at once",
    ),
    Arm(
        name="gradual-warmup",
        file="fashion_gradual_warmup.toml",
        description="512 images per update, 16 times the learning rate after 3 epochs",
    ),
)
GOYAL = Forecast(
    name="resnet50-p100",
    title="ResNet-50, ImageNet, P100 as in Goyal et al. 2017",
    file="resnet50_goyal2017.toml",
    cluster="big-basin-goyal2017",
    device_counts=(8, 64, 256),
    framework=framework_named("tensorflow-2017"),  # what that year's software got out of a P100
)
MODERN = Forecast(
    name="resnet50-h100",
    title="ResNet-50, ImageNet, H100",
    file="resnet50_modern.toml",
    cluster="dgx-h100",
    device_counts=(8, 256, 4096),
)
FILES = frozenset(
    [
        "report.html",
        *(arm.file for arm in ARMS),
        *(name for each in (GOYAL, MODERN) for name in (each.file, f"{each.name}.json")),
    ]
)
"""Names of the files in its folder; the runs have folders of their own."""


def quickstart(folder: Path, *, seeds: int = 1) -> list[Path]:
    """Predict two clusters, train three runs, write a report, and print the results.

    The predictions come first, and immediately: their compiled programs come with scalejax, for the
    version of JAX that compiled them.

    Writes into `folder`: the run files, a folder for each run, the predictions, and `report.html`.

    Args:
        folder: created if missing.
        seeds: number of seeds with which each run is trained.

    Returns: folders of the runs, and files of the predictions, that the report shows.

    Raises:
        ConfigError: if `folder` is not empty, or JAX already runs with other devices.
    """
    require_at_least("seeds", seeds, 1)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        accepted = "it must be new or empty; name another with --folder"
        raise ConfigError(refusal("folder", str(folder), accepted))
    serialization.require_writable_folder("folder", folder)
    choose_platform(DEVICE_COUNT)
    _heading("1 of 3", "Predict ResNet-50 on ImageNet for GPUs that you do not have")
    predictions = [_predict(forecast, folder) for forecast in (MODERN, GOYAL)]
    _heading("2 of 3", f"Train Fashion-MNIST three ways on {DEVICE_COUNT} virtual devices")
    records = {arm.name: _train(arm, folder, seeds) for arm in ARMS}
    print()
    tables.show(comparison(records))
    from scalejax.report.html.report import write_report  # a second, so after an answer

    _heading("3 of 3", "Write the report")
    runs = [record.folder.path for group in records.values() for record in group]
    shown = [*runs, *predictions]
    write_report(shown, folder / "report.html", title="scalejax quickstart")
    print(f"Open {folder / 'report.html'} in a browser.")
    return shown


def comparison(records: dict[str, list[RunRecord]]) -> Iterator[RenderableType]:
    """A table of the test accuracy of each arm, and a remark.

    Args:
        records: run records by name of the arm, one for each seed.
    """
    table = tables.figures("", "batch", "peak rate", "warmup", "test accuracy")
    for name, group in records.items():
        config = load_config(group[0].folder.config)
        _, warmup = config.schedule.scaled(None)
        peak = max(m.learning_rate for m in group[0].training)
        table.add_row(
            name,
            str(config.batch.global_batch),
            f"{peak:.3g}",
            f"{warmup:g} epochs" if warmup else "none",
            _accuracy(group),
        )
    yield table
    yield Text(
        "Sixteen times the batch takes a sixteenth of the updates. The learning rate is scaled by "
        "the same factor, which fails without gradual warmup (Goyal et al. 2017, "
        "arXiv 1706.02677)."
    )


def _accuracy(group: Sequence[RunRecord]) -> str:
    """Mean accuracy on the test data at the end, its range if there are several seeds, and the
    number of diverged runs, which the mean does not include."""
    tested = [record.tested for record in group if record.status != "diverged"]
    reached = [each.accuracy for each in tested if each is not None]
    lost = len(group) - len(reached)
    if not reached:
        return "diverged"
    said = format_fraction(mean(reached))
    if len(reached) > 1:
        said += f" ({format_fraction(min(reached))} to {format_fraction(max(reached))})"
    return f"{said}, {lost} diverged" if lost else said


def _train(arm: Arm, folder: Path, seeds: int) -> list[RunRecord]:
    from scalejax.api import train

    print(f"\n{arm.name}: {arm.description}", flush=True)  # progress goes to standard error
    config = load_config(_copy_example(arm.file, folder))
    place = folder / arm.name
    if seeds == 1:
        return [train(config, place)]
    return [
        train(with_fields(config, {"seed": seed}), place / f"seed-{seed}") for seed in range(seeds)
    ]


def _predict(forecast: Forecast, folder: Path) -> Path:
    """Predict and print a scaling study; returns the file of the prediction."""
    config = load_config(_copy_example(forecast.file, folder))
    cluster, site = load_cluster_and_site(forecast.cluster)
    with progress.compiling(len(forecast.device_counts)) as on_progress:
        found = study(
            config,
            cluster,
            forecast.device_counts,
            "weak",
            site=site,
            framework=forecast.framework,
            title=forecast.title,
            on_progress=on_progress,
        )
    print()
    tables.show([*scaling_tables.scaling(found), _remark(forecast, found)])
    path = folder / f"{forecast.name}.json"
    serialization.save(found, path)
    return path


def _remark(forecast: Forecast, found: ScalingPrediction) -> Text:
    """A remark below the table: the published figures, or a caveat."""
    last = found.predictions[-1]
    if forecast is GOYAL:
        return Text(
            "Published (Goyal et al. 2017, abstract): about 90 % efficiency from 8 to 256 GPUs, "
            "and 90 epochs in one hour. "
            f"Predicted: {format_fraction(found.efficiencies[-1])}, and "
            f"{format_seconds(last.run_seconds)}."
        )
    return Text(
        f"These are times, not accuracies. A batch of {last.global_batch:,} would not reach the "
        "same accuracy: Goyal et al. found the error to rise from a batch of 16,384 on."
    )


def _copy_example(name: str, folder: Path) -> Path:
    path = folder / name
    serialization.save_text(
        files("scalejax").joinpath("config", "examples", name).read_text("utf-8"), path
    )
    return path


def _heading(number: str, text: str) -> None:
    console = Console(highlight=False, markup=False)
    console.print()
    console.rule(Text.assemble((f"{number}  ", "dim"), (text, "bold")), align="left")
