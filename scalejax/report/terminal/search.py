"""Terminal tables of a search: the ranked strategies and why the others lose, in 80 columns.

There are two parts: the closed-form ranking, and the compiled predictions of its first strategies.
"""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from scalejax.config.parallelism import AXES, EXPERT
from scalejax.core.units import counted, format_bytes, format_count, format_fraction, format_seconds
from scalejax.planning.search.run import PublishedPlace, Ranked, SearchReport
from scalejax.report.terminal.tables import figures
from scalejax.simulator.transformer import Strategy

_CHANGES_SHOWN = 3
_SHORT = {"none": "-", "selective": "part", "selective_op": "op", "full": "full"}


def searched(report: SearchReport) -> Iterator[RenderableType]:
    """Table of the strategies ranked by the closed-form cost model."""
    yield Text.assemble(
        (report.title, "bold"),
        f"\n{counted(report.devices, 'device')}, {report.global_batch:,} samples{_tokens(report)} "
        f"per step; least {report.objective}. "
        f"{report.considered:,} strategies, of which {report.fitting:,} fit.",
    )
    if not report.ranked:
        return
    yield _ranking(report)
    yield (
        "pp x v: stages and chunks; b: samples of a microbatch; re: recompute; Z: ZeRO stage, "
        f"with s the tokens are split over tensor{_PRICE_LEGEND if _has_price(report) else ''}."
    )
    if any(each.strategy.context_strategy != "all_gather" for each in report.ranked):
        yield "ctx: with r attention goes round a ring, with h it is sharded over heads."
    if report.notes:
        yield Text("\n".join(f"Note: {note}." for note in report.notes))
    if report.published is not None:
        yield Text(_of_published(report, report.published))


def _tokens(report: SearchReport) -> str:
    return "" if report.tokens_per_sample is None else f" of {report.tokens_per_sample:,} tokens"


def _of_published(report: SearchReport, published: PublishedPlace) -> str:
    """Rank of the published layout, and why the first is faster."""
    if published.place is None or published.step_seconds is None:
        return f"Published: {published.strategy} ({published.source}): none of it fits."
    place = (
        f"Published: {published.strategy} ({published.source}) is number {published.place:,} of "
        f"{report.fitting:,}, at {format_seconds(published.step_seconds)}"
    )
    if not published.losses:
        return f"{place}, and none of its terms differs from the first's by a thousandth."
    return f"{place}. Against it, the first has {_terms(published.losses, -1)}."


def _terms(losses: Sequence[tuple[str, float]], sign: int) -> str:
    """The largest losses, then the largest gains, with that sign."""
    slower = [change for change in losses if change[1] > 0]
    faster = [change for change in reversed(losses) if change[1] < 0]
    shown = (*slower[:_CHANGES_SHOWN], *faster[:_CHANGES_SHOWN])
    return ", ".join(f"{_signed(sign * seconds)} {name}" for name, seconds in shown)


def winner(report: SearchReport) -> Ranked | None:
    """The first strategy; None if there is none or it does not fit once compiled."""
    first = report.ranked[0] if report.ranked else None
    compiled = [each.confirmed for each in report.ranked if each.confirmed is not None]
    return None if compiled and not any(each.fits for each in compiled) else first


def confirmed(report: SearchReport, *, has_run_file: bool = True) -> Iterator[RenderableType]:
    """Compiled predictions of the first strategies, flags for the best, and why the others lose.

    Args:
        report: a search.
        has_run_file: whether there is a run file; with it, flags say how to train the best one.
    """
    if not report.ranked:
        return
    yield _confirmation(report)
    best = winner(report)
    if best is None:
        compiled = sum(each.confirmed is not None for each in report.ranked)
        yield (
            f"None of the {compiled} that were compiled fits as it trains here; "
            f"--confirm {2 * compiled} compiles more."
        )
        return
    if has_run_file:
        yield (
            f"Train {best.place} with {' '.join(_flags(best.strategy))}; predict it with "
            f"--devices {best.strategy.layout.device_count} as well."
        )
    yield _why(report)


def _ranking(report: SearchReport) -> RenderableType:
    has_price, has_counts = _has_price(report), "," in report.devices
    headings = ["", *(["dev"] if has_counts else [])]
    axes = _axes(report)
    headings += [*(_AXIS_HEADINGS[axis] for axis in axes), "b", "re", "Z"]
    headings += ["step", "samples/s", "MFU", "memory"]
    table = figures(*headings, *(["price"] if has_price else []))
    for each in report.ranked:
        one = each.prediction
        row = [f"{each.place}", *([f"{one.device_count}"] if has_counts else [])]
        row += [*_strategy(each.strategy, axes), format_seconds(one.step_seconds)]
        row += [format_count(one.samples_per_second), format_fraction(one.mfu)]
        row.append(format_bytes(one.peak_memory_bytes))
        if has_price:
            row.append("n/a" if each.price is None else f"{each.price:.4g}")
        table.add_row(*row)
    return table


_PRICE_LEGEND = "; price: of a million samples"


def _has_price(report: SearchReport) -> bool:
    return any(each.price is not None for each in report.ranked)


_AXIS_HEADINGS = {
    "pipeline": "pp x v",
    "data": "data",
    "fsdp": "fsdp",
    "expert": "ep",
    "context": "ctx",
    "tensor": "tp",
}


_CONTEXT_MARKS = {"ring": " r", "all_to_all": " h"}


def _axes(report: SearchReport) -> list[str]:
    """The axes of the table; the expert axis only if a strategy uses it."""
    has_experts = any(each.strategy.layout.expert > 1 for each in report.ranked)
    return [axis for axis in AXES if axis != EXPERT or has_experts]


def _strategy(strategy: Strategy, axes: list[str]) -> list[str]:
    sizes = {axis: str(size) for axis, size in strategy.layout.axis_sizes.items()}
    if strategy.pipeline_chunks > 1:
        sizes["pipeline"] += f" x {strategy.pipeline_chunks}"
    if strategy.context_strategy != "all_gather":
        sizes["context"] += _CONTEXT_MARKS[strategy.context_strategy]
    zero = f"{strategy.zero_stage}{'s' if strategy.sequence_parallel else ''}"
    used = [sizes[axis] for axis in axes]
    return [*used, f"{strategy.split.microbatch}", _SHORT[strategy.recompute], zero]


def _confirmation(report: SearchReport) -> RenderableType:
    lines = []
    for each in sorted(report.ranked, key=lambda each: each.place):
        place = each.place
        if each.confirmed is not None:
            own, compiled = each.prediction, each.confirmed
            change = own.step_seconds / compiled.step_seconds - 1
            lines.append(
                f"{place}: compiled, {format_seconds(compiled.step_seconds)} and "
                f"{format_bytes(compiled.peak_memory_bytes)}; the closed form is "
                f"{change:+.1%} off in time{_misfit(each)}"
            )
        elif each.note is not None:
            lines.append(f"{place}: not compiled: {each.note}")
    return "\n".join(lines) or "None was compiled."


def _flags(strategy: Strategy) -> list[str]:
    """Command-line flags of `scalejax train` and `predict` for this strategy."""
    fields = {f"layout.{axis}": size for axis, size in strategy.layout.axis_sizes.items()}
    fields |= {
        "layout.pipeline_chunks": strategy.pipeline_chunks,
        "layout.pipeline_schedule": strategy.pipeline_schedule,
        "layout.zero_stage": strategy.zero_stage,
        "layout.sequence_parallel": str(strategy.sequence_parallel).lower(),
        "batch.global_batch": strategy.split.global_batch,
        "batch.microbatches": strategy.split.microbatches,
        "model.remat": strategy.recompute,
    }
    if strategy.context_strategy != "all_gather":
        fields["layout.context_strategy"] = strategy.context_strategy
    return [f"--{name} {value}" for name, value in fields.items()]


def _misfit(each: Ranked) -> str:
    """Remark on a compiled step that does not fit; empty if it fits."""
    return "" if each.confirmed is None or each.confirmed.fits else "; it does not fit"


def _why(report: SearchReport) -> RenderableType:
    lines = []
    first = report.ranked[0].place
    for each in report.ranked[1:]:
        lines.append(f"{each.place} against {first}: {_changes(each, report)}")
    if not lines:
        return "No other strategy fits." if report.fitting == 1 else ""
    return "\n".join(lines)


def _changes(each: Ranked, report: SearchReport) -> str:
    """Terms in which it is slower and faster than the first, according to the closed form."""
    one, first = each.prediction, report.ranked[0].prediction
    compiled, best = each.confirmed, report.ranked[0].confirmed
    if compiled is not None and not compiled.fits:
        return "it does not fit"
    if report.objective == "memory" and one.peak_memory_bytes != first.peak_memory_bytes:
        more = one.peak_memory_bytes - first.peak_memory_bytes
        return f"{'+' if more > 0 else '-'}{format_bytes(abs(more))}"
    if not each.losses:
        return "each term the same to a thousandth, and more memory"
    changes = _terms(each.losses, 1)
    if compiled is None or best is None or report.objective != "time":
        return changes
    whole = _signed(compiled.step_seconds - best.step_seconds)
    return f"{whole} as compiled; in closed form {changes}"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
