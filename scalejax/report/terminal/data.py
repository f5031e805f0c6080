"""Terminal tables of the update of a run (optimizer, averaging, input) and of data inspections.

Formats configs and inspections in 80 columns; batches, steps and rates are in `tables`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from rich.console import RenderableType
from rich.text import Text

from scalejax.config.input import AugmentationConfig, InputConfig
from scalejax.config.run import ResolvedRun
from scalejax.core.serialization import plain
from scalejax.core.units import UNKNOWN, counted, format_bytes, format_count, format_seconds
from scalejax.data.inspect import Inspection
from scalejax.report.terminal.tables import facts, figures
from scalejax.training.record import InputMeasurement
from scalejax.training.sample_life import EXCHANGE, LifeStage, other_settings


def update(
    run: ResolvedRun, learning: tuple[int, int] | None = None, notes: Sequence[str] = ()
) -> Iterator[RenderableType]:
    """Optimizer, averaging, BatchNorm, initial weights and trainable parameters; notes.

    Args:
        run: the run on its devices.
        learning: the trainable and the total number of parameters of a fine-tuned run.
        notes: sentences without full stops.
    """
    config, split = run.config, run.split
    table = facts()
    table.add_row("optimizer", config.optimizer.name, _fields(config.optimizer))
    if config.dropout is not None:
        table.add_row("dropout", "", _fields(config.dropout))
    if config.clipping is not None:
        table.add_row("clipping", config.clipping.scope, _fields(config.clipping))
    if config.averaging is not None:
        table.add_row("averaging", config.averaging.name, _fields(config.averaging))
    if config.gradient_sync is not None:
        table.add_row("gradient sync", config.gradient_sync.name, _fields(config.gradient_sync))
    if config.model.has_batch_norm or config.layout.bn_scope != "global":
        samples = split.microbatch * run.layout.batch_shards // run.bn_groups
        table.add_row("BatchNorm", config.layout.bn_scope, f"statistics of {samples:,} samples")
    if (weights := getattr(config.model, "pretrained", None)) is not None:
        table.add_row("weights", weights, "initial weights of the network")
    tuning = config.fine_tuning
    if tuning is not None and learning is not None:
        adapters = () if tuning.lora is None else (f"adapters of rank {tuning.lora.rank}",)
        parts = ", ".join((*tuning.trainable, *adapters)) or "all"
        table.add_row(
            "learns", format_count(learning[0]), f"of {learning[1]:,} parameters: {parts}"
        )
        for part, factor in tuning.rate_factors.items():
            table.add_row("rate factor", f"{factor:g}", part)
    if given := _input(config.input):
        table.add_row("input", "", given)
    yield Text("update", style="bold")
    yield table
    if notes:
        yield Text("\n".join(f"Note: {note}." for note in notes))


def _input(given: InputConfig) -> str:
    """Input and augmentation fields that differ from their defaults, in words."""
    changed = _changed(given, InputConfig(), but="augmentation")
    if given.augmentation is not None:
        changed += _changed(given.augmentation, AugmentationConfig(), but="rand_augment")
        if (policy := given.augmentation.rand_augment) is not None:
            changed.append(f"rand_augment {policy.operations} of magnitude {policy.magnitude}")
    return ", ".join(changed)


def _changed(given: object, usual: object, *, but: str = "") -> list[str]:
    """The fields of `given` that differ from those of `usual`, in words."""
    names = [field.name for field in fields(given) if field.name != but]  # type: ignore[arg-type]
    return [
        f"{name} {getattr(given, name)}"
        for name in names
        if getattr(given, name) != getattr(usual, name)
    ]


def _fields(description: object) -> str:
    """The fields of a config in words, without its name and unset fields."""
    tables = plain(description)
    assert isinstance(tables, dict)  # noqa: S101  a dataclass is a table
    given = {name: value for name, value in tables.items() if name != "name" and value is not None}
    words = {True: "yes", False: "no"}
    return ", ".join(
        f"{name} {words[value] if isinstance(value, bool) else value}"
        for name, value in given.items()
    )


# Output of `scalejax data inspect`.

SHOWN_CLASSES, SHOWN_COLUMNS = 10, 40
"""Most classes and columns listed; the rest are counted."""


def inspection(found: Inspection) -> Iterator[RenderableType]:
    """Rows, columns, classes, images, unreadable examples, advice, and the table to paste."""
    files, rows = counted(f"{found.files:,}", "file"), counted(f"{found.rows:,}", "row")
    about = f"{found.kind}, {files}, {format_bytes(found.size_bytes)}, {rows}"
    if groups := found.groups:
        rows = counted(f"{groups.most_rows:,}", "row")
        if groups.fewest_rows != groups.most_rows:
            rows = f"{groups.fewest_rows:,} to {rows}"
        about += (
            f"\n{counted(f'{groups.count:,}', 'row group')} of {rows}, the largest "
            f"{format_bytes(groups.largest_bytes)} in memory"
        )
    yield Text.assemble((found.location, "bold"), "\n", about)
    yield _columns(found)
    if found.classes is not None:
        yield Text(_classes(found))
    if images := found.images:
        sizes = ", ".join(
            f"{name} {width} x {height}"
            for name, (width, height) in (
                ("smallest", images.smallest),
                ("middle", images.median),
                ("largest", images.largest),
            )
        )
        yield Text(
            f"Images: {'/'.join(images.formats)}, {format_bytes(images.mean_bytes)} each on "
            f"average; {sizes} (of {images.sampled} sampled)."
        )
    if found.verified_rows is not None:
        yield _verified(found)
    for each in found.advice:
        yield Text(f"Advice: {each}")
    if found.table is not None:
        yield Text(found.table)


def _columns(found: Inspection) -> RenderableType:
    table = figures("column", "type", "in memory", "in files", "compression")
    for each in found.columns[:SHOWN_COLUMNS]:
        table.add_row(
            each.name,
            each.type if len(each.type) <= 30 else f"{each.type[:27]}...",
            format_bytes(each.decompressed_bytes),
            format_bytes(each.stored_bytes),
            each.compression or ("none" if each.stored_bytes is not None else UNKNOWN),
        )
    if (more := len(found.columns) - SHOWN_COLUMNS) > 0:
        table.add_row(f"and {more} more")
    return table


def _classes(found: Inspection) -> str:
    classes = found.classes or ()
    shown = ", ".join(f"{name} {count:,}" for name, count in classes[:SHOWN_CLASSES])
    more = len(classes) - SHOWN_CLASSES
    rest = f" and {more:,} more" if more > 0 else ""
    count = f"{len(classes):,} class{'es' if len(classes) != 1 else ''}"
    return f"{count} in {found.label_column!r}: {shown}{rest}."


def _verified(found: Inspection) -> Text:
    if not found.unreadable_rows:
        return Text(f"Verified: all {found.verified_rows:,} rows can be read.")
    lines = [
        f"Unreadable: {found.unreadable_rows:,} of {counted(found.verified_rows or 0, 'row')}."
    ]
    lines += [f"  {each.where}: {each.why}" for each in found.unreadable]
    if (more := found.unreadable_rows - len(found.unreadable)) > 0:
        lines.append(f"  and {more:,} more")
    return Text("\n".join(lines))


def life(measured: InputMeasurement, stages: Sequence[LifeStage]) -> Iterator[RenderableType]:
    """Life of a batch: seconds of each stage, measured and predicted, where it runs and whether the
    step hides it; then what other settings would change.

    Args:
        measured: what was measured.
        stages: its stages (`training.sample_life.life_of`).
    """
    yield Text.assemble(("Life of a batch", "bold"), f" (mean of {measured.batches:,})")
    table = figures("stage", "measured", "predicted", "runs in", "hidden")
    for each in stages:
        name, measured_as = each.stage, format_seconds(each.measured_seconds)
        if each.stage == EXCHANGE:
            name, measured_as = f"  of it {each.stage}", "with compute"
        predicted_as = format_seconds(each.predicted_seconds)
        table.add_row(name, measured_as, predicted_as, each.place, each.hidden or "")
    yield table
    if measured.step_seconds is None:
        return
    if measured.shares_cores:
        busy = format_seconds(measured.processor_seconds)
        yield Text(
            f"The devices are the CPU: each batch takes {busy} of processor time from the "
            f"{measured.cores} cores of the step."
        )
    table = figures("from one update to the next, with", "now", "then", "")
    for setting, then, now in other_settings(measured):
        change = "no change" if abs(then / now - 1) < 0.01 else f"{then / now - 1:+.0%}"
        table.add_row(setting, format_seconds(now), format_seconds(then), change)
    yield table
