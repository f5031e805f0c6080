"""Terminal tables of fits, calibrations, validations, runs and hardware, in 80 columns.

Formats numbers and computes none. Each function yields the parts to print, in order.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scalejax.config.presets import Preset
from scalejax.config.reference import TableReference
from scalejax.config.run import ResolvedRun
from scalejax.core.serialization import JsonValue, plain
from scalejax.core.units import (
    GB,
    TFLOP,
    UNKNOWN,
    counted,
    format_bytes,
    format_count,
    format_seconds,
)
from scalejax.hardware import NO_SITE, Chip, Cluster, Site
from scalejax.measure.fit import WIDE_ERROR, Fit
from scalejax.simulator.frameworks import Framework, Software
from scalejax.simulator.frameworks.software import Rates
from scalejax.validation import NOT_COMPILED, Summary, Validation
from scalejax.validation.accuracy import Accuracy, changes, common, quantity_summaries
from scalejax.validation.summary import STEP_TIMES

SUDDEN = 0.9
"""Ratio of consecutive learning rates below which the schedule has a step."""


def show(parts: Iterable[RenderableType]) -> None:
    """Print the parts on standard output, a blank line between them."""
    console = Console(highlight=False, markup=False)  # brackets in cells are literal
    for index, part in enumerate(parts):
        if index:
            console.print()
        console.print(part)


def fit(fitted: Fit) -> Iterator[RenderableType]:
    """Fitted factors, the error of each run on the fitted cluster, and the held-out error."""
    yield Text.assemble((fitted.cluster.title, "bold"))
    table = figures("factor on", "fitted")
    for name, value in asdict(fitted.factors).items():
        if value is None:
            table.add_row(name, "as it was")
        else:
            table.add_row(name, f"{value:.3f}" if name == "contention" else f"x {value:.3f}")
    yield table
    table = figures("devices", "measured", "predicted", "error", "run")
    for each in fitted.errors:
        table.add_row(
            str(each.device_count),
            format_seconds(each.measured_seconds),
            format_seconds(each.predicted_seconds),
            f"{each.error:+.1%}",
            each.name,
        )
    yield table
    held_out = fitted.held_out
    yield Text(
        f"Held out: fitted to the other runs alone, {held_out.name} is predicted to take "
        f"{format_seconds(held_out.predicted_seconds)} ({held_out.error:+.1%})."
    )
    if abs(held_out.error) > WIDE_ERROR:
        yield Text(
            f"Warning: the held-out error is above {WIDE_ERROR:.0%}; expect as much for other runs."
        )


def calibration(
    cluster: Cluster, processes: Cluster | None, notes: Iterable[str] = ()
) -> Iterator[RenderableType]:
    """Measured rates of a device by how many are busy, all-reduce times, and notes."""
    yield Text.assemble((cluster.title, "bold"))
    table = figures("busy", "products", "convolutions", "memory", "launch", "step overhead")
    for count, chip in ((1, cluster.chip), *((s.device_count, s.chip) for s in cluster.shared)):
        peak = chip.peak_flop_per_second["f32"]
        table.add_row(
            str(count),
            f"{peak * chip.attainable.matmul_fraction / 1e9:.3g} GFLOP/s",
            f"{peak * chip.attainable.convolution_fraction / 1e9:.3g} GFLOP/s",
            f"{chip.memory_bytes_per_second * chip.attainable.memory_fraction / GB:.3g} GB/s",
            format_seconds(chip.attainable.launch_seconds),
            format_seconds(chip.attainable.step_overhead_seconds),
        )
    yield table
    table = figures("all-reduce between", "start", "each message", "rate")
    for name, each in (("devices of one process", cluster), ("processes", processes)):
        if each is not None:
            method = each.library.methods[0]
            link = each.network or each.link
            table.add_row(
                name,
                format_seconds(method.base_seconds),
                format_seconds(method.network_hop_seconds),
                f"{link.bytes_per_second / GB:.3g} GB/s",
            )
    yield table
    yield from map(Text, notes)


def validation(found: Validation) -> Iterator[RenderableType]:
    """Prediction error of each family of published rows, then why rows were skipped."""
    if any(row.status == NOT_COMPILED for row in found.rows):
        yield Text.assemble((found.ledger, "bold"), "\nNothing is compiled and predicted.")
        yield from _coverage(found)
        yield from _skipped(found)
        return
    yield Text.assemble(
        (found.ledger, "bold"), "\nErrors are (predicted - measured) / measured; most are absolute."
    )
    steps = [row for row in found.rows if row.quantity == STEP_TIMES]
    if steps and all(row.measured_seconds is None for row in steps):
        yield Text(
            "NOTHING TO COMPARE WITH: no row states step_seconds. Every error is unknown; --json "
            "writes what is predicted.",
            style="bold",
        )
    if steps:
        yield from _step_times(found)
    if found.memory:
        yield from _memory(found)
    if found.operations:
        yield from _operations(found)
    yield from _coverage(found)
    yield from _skipped(found)


def _step_times(found: Validation) -> Iterator[RenderableType]:
    table = figures(
        "family", "rows", "used", "median", "mean", "bias", "ratio", "p90", "fastest", "in band"
    )
    for each in found.families:
        table.add_row(*_summary_cells(each))
    yield table
    yield (
        "median, mean, bias: of the step time; the bias is signed. ratio, p90: median and "
        "90th percentile for the step time over that on fewest devices of the series. "
        "fastest: median against the fastest row of each setting (network, device, "
        "precision, batch, devices). in band: share of rows measured between p10 and p90."
    )


def _memory(found: Validation) -> Iterator[RenderableType]:
    """Errors of the peak memory, and of whether runs fit."""
    table = figures(
        "peak memory", "stated", "median", "mean", "bias", "ran", "no fit", "died", "fit"
    )
    for each in found.memory:
        table.add_row(
            each.name,
            str(each.stated),
            _percent(each.median_error),
            _percent(each.mean_error),
            _percent(each.bias, sign="+"),
            str(each.ran),
            str(each.ran_without_fitting),
            str(each.died),
            str(each.died_fitting),
        )
    yield table
    yield (
        "no fit: of the predicted rows that ran, those said not to fit. fit: of those that "
        "died for any reason, those said to fit."
    )


def _operations(found: Validation) -> Iterator[RenderableType]:
    """Errors of everything but step times."""
    table = figures("family", "rows", "used", "median", "mean", "bias", "in band")
    for each in found.operations:
        table.add_row(
            each.name,
            str(each.rows),
            str(each.predicted),
            _percent(each.median_error),
            _percent(each.mean_error),
            _percent(each.bias, sign="+"),
            _percent(each.coverage),
        )
    yield table


_LEAST_POINTS = 0.0005
"""Smallest change of a mean error that is listed, as a share; smaller ones are counted."""
_MOST_CHANGES = 20
"""Most cells listed of those that got worse, and of those that got better."""


def accuracy_changes(before: Accuracy, after: Accuracy) -> Iterator[RenderableType]:
    """How errors changed since an earlier release: in total, then cell by cell."""
    yield Text.assemble(
        (f"Since {before.release}", "bold"),
        "\nOver the cells that both have. A family counts once in each line.",
    )
    totals = figures("measured", "families", "rows", "mean error before", "now", "in band", "now")
    for was, now in zip(*map(quantity_summaries, common(before, after)), strict=True):
        totals.add_row(
            now.quantity,
            str(now.families),
            str(now.rows),
            _percent(was.mean_error),
            _percent(now.mean_error),
            _percent(was.coverage),
            _percent(now.coverage),
        )
    yield totals
    found = changes(before, after)
    moved = [each for each in found if each.points and abs(each.points) >= _LEAST_POINTS]
    listed = moved if len(moved) <= 2 * _MOST_CHANGES else moved[:_MOST_CHANGES]
    if len(moved) > len(listed):
        listed = [*listed, *moved[-_MOST_CHANGES:]]
    if moved:
        table = figures("family, framework, chip", "rows", "before", "now", "bias", "now")
        for each in listed:
            cell, was = each.cell, each.before
            name = " ".join(filter(None, (cell.family, cell.framework, cell.chip)))
            table.add_row(
                name if cell.quantity == STEP_TIMES else f"{name} ({cell.quantity})",
                str(cell.rows),
                _percent(was and was.mean_error),
                _percent(cell.mean_error),
                _percent(was and was.bias, sign="+"),
                _percent(cell.bias, sign="+"),
            )
        some = f"; of {len(moved)} the first and last {_MOST_CHANGES}"
        few = "" if listed == moved else some
        yield f"Cells whose mean error changed, those that got worse first{few}."
        yield table
    new = sum(each.before is None for each in found)
    gone = sum(each.after is None for each in found)
    same = len(after.cells) - len(moved) - new
    yield f"{counted(same, 'cell')} as before, {new} new, {gone} gone."


def _percent(share: float | None, *, sign: str = "") -> str:
    return UNKNOWN if share is None else f"{share:{sign}.1%}"


def _coverage(found: Validation) -> Iterator[RenderableType]:
    """How many step times of each kind are predicted, and why the rest are not."""
    if not found.kinds:
        return
    is_dry = any(row.status == NOT_COMPILED for row in found.rows)
    used = "are runs" if is_dry else "predicted"
    counts = figures("kind", "rows", f"= {used}", "+ skipped", "nearest")
    for each in found.kinds:
        of_all = [row for row in found.rows if row.kind == each.kind]
        for name, rows in (
            (each.kind, of_all),
            ("  stating", [row for row in of_all if row.states_layout]),
        ):
            skipped = sum(row.skip_reason is not None for row in rows)
            count = len(rows) - skipped
            share = f"{count} ({count / len(rows):.1%})" if rows else UNKNOWN
            near = sum(row.skip_reason is None and bool(row.nearest) for row in rows)
            counts.add_row(name, str(len(rows)), share, str(skipped), str(near))
    yield counts
    yield (
        "stating: of the rows of that kind, those that state their layout (layers, hidden, "
        "devices, batch, precision, step time and an axis, and did not stall). "
        f"nearest: of those that {used if is_dry else 'are predicted'}, the ones of which a part "
        "is expressed by what is nearest to it, as --json says row by row."
    )
    if closed := sum(row.is_closed_form for row in found.rows):
        yield f"{counted(closed, 'row')} by the closed form of the step, which compiles nothing."


_MOST_REASONS = 30


def _skipped(found: Validation) -> Iterator[RenderableType]:
    """Why rows are skipped, the most common reasons of each kind first."""
    skipped = [(each.kind, *reason) for each in found.kinds for reason in each.skipped]
    others = Counter(
        (row.quantity, row.skip_reason)
        for row in found.rows
        if row.quantity != STEP_TIMES and row.skip_reason is not None
    )
    skipped += [(quantity, reason, rows, 0) for (quantity, reason), rows in others.most_common()]
    if not skipped:
        return
    told = {each[1:] for each in sorted(skipped, key=lambda each: -each[2])[:_MOST_REASONS]}
    table, left = facts(), [each for each in skipped if each[1:] not in told]
    for kind, reason, rows, stating in skipped:
        if (reason, rows, stating) in told:
            table.add_row(f"{rows:5d}", f"{stating:5d}", kind, reason)
    yield "Skipped, by reason: rows, how many of them state their layout, and their kind."
    yield table
    if left:
        rows = counted(sum(each[2] for each in left), "row")
        yield f"{rows} for {counted(len(left), 'other reason')}: --json says row by row."


def _summary_cells(summary: Summary) -> list[str]:
    bias = _percent(summary.bias, sign="+")
    shares = [
        summary.median_error,
        summary.mean_error,
        summary.median_ratio_error,
        summary.p90_ratio_error,
        summary.median_fastest_error,
        summary.coverage,
    ]
    # Without the space of other tables, as there are ten columns next to a long name.
    cells = [_percent(share) for share in shares]
    counts = [str(summary.rows), str(summary.predicted)]
    return [summary.name, *counts, *cells[:2], bias, *cells[2:]]


def run(resolved: ResolvedRun, learning_rates: Sequence[float]) -> Iterator[RenderableType]:
    """Batches, steps, and the learning rate at its turning points.

    Args:
        resolved: the run on its devices.
        learning_rates: the rate of every update.
    """
    config, split = resolved.config, resolved.split
    table = facts()
    count = resolved.layout.device_count
    table.add_row("devices", str(count), str(resolved.layout) if count > 1 else "")
    table.add_row("global batch", f"{split.global_batch:,}", "samples per update, all devices")
    parts = resolved.layout.batch_shards
    shared = f", on {count // parts} devices each; {parts} parts" if parts < count else ""
    of_part = "per-part batch" if shared else "per-device batch"
    table.add_row(of_part, f"{split.per_device_batch:,}", f"samples per update{shared}")
    passes = "1 forward pass" if split.microbatches == 1 else f"{split.microbatches} forward passes"
    table.add_row("microbatch", f"{split.microbatch:,}", f"samples; {passes} per update")
    table.add_row("training examples", f"{resolved.dataset.train_examples:,}", config.data.name)
    table.add_row("steps per epoch", f"{resolved.steps_per_epoch:,}", _dropped(resolved))
    for phase in resolved.phases[1:]:
        batch, epoch = phase.split.global_batch, phase.first_epoch
        table.add_row(f"from epoch {epoch}", f"{batch:,}", f"{phase.steps_per_epoch:,} steps each")
    table.add_row("total steps", f"{resolved.total_steps:,}", counted(config.train.epochs, "epoch"))
    yield table
    rates = facts()
    for step, what in turning_points(learning_rates):
        epoch = resolved.epoch_of(step)
        rates.add_row(f"{learning_rates[step]:.4g}", f"step {step:,}, epoch {epoch:.4g}", what)
    yield Text("learning rate", style="bold")
    yield rates
    if resolved.changes:
        scaled = facts()
        for each in resolved.changes:
            scaled.add_row(each.name, f"{each.after:.6g}", f"{each.before:.6g} before scaling")
        yield Text("scaled with the batch", style="bold")
        yield scaled


def turning_points(learning_rates: Sequence[float]) -> list[tuple[int, str]]:
    """(step, description) of the first update, the peak, each sudden change, and the last."""
    last = len(learning_rates) - 1
    peak = max(range(last + 1), key=learning_rates.__getitem__)
    points = {0: "start", peak: "peak" if peak else "start and peak"}
    for step in range(peak + 1, last):
        before = learning_rates[step - 1]
        # A smooth decay over few updates falls as fast, but not in a single update.
        was_level = step < 2 or before > 0.99 * learning_rates[step - 2]
        if was_level and learning_rates[step] < SUDDEN * before:
            points[step] = "step of the decay"
    points[last] = f"{points[last]}, end" if last in points else "end"
    return sorted(points.items())


def _dropped(resolved: ResolvedRun) -> str:
    left = resolved.dataset.train_examples - resolved.samples_per_epoch
    if left < 0:
        return f"the last one with {-left:,} rows that count for nothing"
    return f"{left:,} examples are left over each epoch" if left else ""


def reference(
    sections: Sequence[TableReference], presets: Mapping[str, Preset]
) -> Iterator[RenderableType]:
    """Every table of a run.toml: its fields, with their accepted values and meanings.

    Args:
        sections: the tables, in order.
        presets: published networks by name, shown after the model tables.
    """
    # "[model.block]" is part of "[model]".
    for name, kinds in groupby(sections, key=lambda each: re.split(r"[ .\]]", each.title)[0]):
        for section in kinds:
            yield from _section(section)
        if name == "[model":
            yield from _published(presets)


def _section(section: TableReference) -> Iterator[RenderableType]:
    fields = Table(box=None, show_header=False, pad_edge=False)
    fields.add_column(no_wrap=True)
    fields.add_column()
    for each in section.fields:
        if each.accepted and not each.name.endswith(".name"):
            default = "required" if each.default == "required" else f"default {each.default}"
            fields.add_row(each.name, f"{each.accepted}; {default}. {each.meaning}")
    meaning = section.meaning.partition("\n\n")[0].replace("\n", " ")
    yield Text.assemble((section.title, "bold"), f"\n{meaning}")
    yield fields


def _published(presets: Mapping[str, Preset]) -> Iterator[RenderableType]:
    """Table of the published networks accepted as `model.name`."""
    yield Text.assemble(
        ("[model] name of a published network", "bold"),
        "\nThe name stands for the network and its sizes, which fields set beside it override; "
        "vocabulary and tokens, as published, are for data.vocabulary and data.tokens, which the "
        "name does not set.",
    )
    table = figures("model.name", "network", *_SIZES, "vocabulary", "tokens", "params")
    for name, preset in presets.items():
        sizes = [preset.sizes.get(size) for size in _SIZES]
        data = [preset.vocabulary, preset.tokens]
        cells = ["" if each is None else f"{each}" for each in (*sizes, *data)]
        table.add_row(name, preset.network, *cells, format_count(preset.parameters))
    yield table


_SIZES = ("layers", "hidden", "heads")


def catalogue(
    clusters: Sequence[Cluster], chips: Sequence[Chip], frameworks: Sequence[Framework]
) -> Iterator[RenderableType]:
    """Tables of all clusters, all chips and all frameworks."""
    table = figures("cluster", "chip", "per node", "in the node", "between nodes")
    for each in clusters:
        between = f"{each.network.bytes_per_second / GB:g} GB/s" if each.network else "one node"
        table.add_row(
            each.name,
            each.chip.name,
            str(each.devices_per_node),
            f"{each.link.bytes_per_second / GB:g} GB/s",
            between,
        )
    yield table
    table = figures("chip", "bf16", "f16", "tf32", "f32", "memory", "bandwidth")
    for each in chips:
        rates = each.peak_flop_per_second
        table.add_row(
            each.name,
            *(_rate(rates.get(dtype)) for dtype in ("bf16", "f16", "tf32", "f32")),
            format_bytes(each.memory_bytes),
            f"{each.memory_bytes_per_second / GB:,.0f} GB/s",
        )
    yield table
    yield from framework_list(frameworks)
    yield (
        "Links are per device, networks per node, both one way and nominal; rates are peaks, "
        "dense TFLOP/s. scalejax hardware NAME shows every number with its source."
    )


def framework_list(every: Sequence[Framework]) -> Iterator[RenderableType]:
    """Table of frameworks by name."""
    table = figures("framework", "year")
    table.add_column("")
    for each in every:
        table.add_row(each.name, str(each.year), each.title)
    yield table


def models(presets: Mapping[str, Preset]) -> Iterator[RenderableType]:
    """Table of published networks by name, and what they were pretrained with."""
    table = figures("model", "network", "params", "active", "tokens", "batch", "trained on")
    for name, preset in presets.items():
        total = preset.pretraining and preset.pretraining.total_tokens
        batch = preset.published_batch
        table.add_row(
            name,
            preset.network,
            format_count(preset.parameters),
            "" if preset.active_parameters is None else format_count(preset.active_parameters),
            "" if preset.pretraining_tokens is None else f"{preset.pretraining_tokens:,}",
            "" if batch is None else f"{batch:,}",
            "" if not total else f"{format_count(total)} tokens",
        )
    yield table
    yield (
        "active: parameters that a token goes through; tokens: of a sample; batch: samples per "
        "update. Empty: not published, or not recorded here."
    )


def entry(hardware: Chip | Cluster, site: Site = NO_SITE) -> Iterator[RenderableType]:
    """Every number of a chip, or of a cluster and its site, with its source."""
    yield Text.assemble((hardware.name, "bold"), f": {hardware.title}")
    lines = []
    for name, value in (*_leaves(plain(hardware)), *_leaves(plain(site))):
        if name.split(".")[0] not in ("name", "title", "sources", "chip", "library"):
            lines.append(Text.assemble(f"{name} = ", (value, "bold")))
            if source := hardware.sources.get(name):
                lines.append(Padding(Text(source, style="dim"), (0, 0, 0, 4)))
    yield Group(*lines)
    if isinstance(hardware, Cluster):
        chip, library = hardware.chip, hardware.library
        yield Text(
            f"Chip: {chip.title} (scalejax hardware {chip.name}).\n"
            f"Communication library: {library.title}."
        )


def framework(one: Framework) -> Iterator[RenderableType]:
    """How a framework's step differs from XLA's, and its software's rates, with sources."""
    yield Text.assemble((one.name, "bold"), f": {one.title}, {one.year}")
    schedule = {
        "gpipe": "GPipe, or as layout.pipeline_schedule says",
        "1f1b": "1F1B, interleaved with chunks",
        "zb_h1": "ZB-H1",
    }
    lines: list[RenderableType] = []
    lines.append(Text.assemble("pipelines run ", (schedule[one.schedule], "bold")))
    for each in one.properties:
        lines.append(Text(each.title, style="bold"))
        lines.append(Padding(Text(each.source, style="dim"), (0, 0, 0, 4)))
    yield Group(*lines)
    yield Group(*_software(one.software))


def _software(software: Software) -> Iterator[RenderableType]:
    """Rates over those of XLA's programs, on any chip and on chips with rates of their own."""
    if not software.on_chip and not _own_rates(software):
        yield "Its operations run at the rates of a chip's file, which are of XLA's programs."
    else:
        yield "Over the rates of a chip's file, which are of XLA's programs, it has:"
        chips_by_rates: dict[Rates, list[str]] = {}
        for chip, rates in software.on_chip.items():
            chips_by_rates.setdefault(rates, []).append(chip)
        on_chips = ((f"on {', '.join(chips)}", rates) for rates, chips in chips_by_rates.items())
        for place, rates in (("on any chip", software), *on_chips):
            yield Text(place, style="bold")
            told = _own_rates(rates)
            for name in told:
                yield Padding(Text(f"{name} = {getattr(rates, name):g}"), (0, 0, 0, 4))
            if not told:
                yield Padding(Text("nothing else"), (0, 0, 0, 4))
    if software.residual is not None:
        known = ", ".join(f"{count} on {chip}" for chip, count in software.rows.items())
        yield f"held against published steps: {known or 'none'}"
        besides = f", and {software.chip_residual:g} besides on other chips"
        besides = besides if software.chip_residual else ""
        yield f"log standard deviation of measured over predicted: {software.residual:g}{besides}"
    for name, source in software.sources.items():
        yield Text(f"{name}: {source}", style="dim")


def _own_rates(rates: Rates) -> list[str]:
    """Names of the rates that are not XLA's."""
    names = [each.name for each in fields(Rates)]
    return [name for name in names if getattr(rates, name) != getattr(Rates(), name)]


def _leaves(value: JsonValue, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every scalar and list in nested tables."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else name)
    elif value is not None:
        yield prefix, f"{value:g}" if isinstance(value, float) else str(value)


def _rate(flop_per_second: float | None) -> str:
    return UNKNOWN if flop_per_second is None else f"{flop_per_second / TFLOP:g}"


def facts() -> Table:
    """A table of names, values and remarks."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    return table


def figures(*headings: str) -> Table:
    """An empty table without rules; all columns but the first are right-aligned."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
    return table
