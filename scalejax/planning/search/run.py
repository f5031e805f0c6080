"""Strategy search for a run of given network, data and batch, with its best strategies compiled.

Decides which runs the closed form covers, and compares its predictions with those of the compiled
steps.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.parallelism import MODEL_AXES, fill_data_axis
from scalejax.config.presets import PRESETS, PublishedTraining
from scalejax.config.run import ResolvedRun, RunConfig, with_fields
from scalejax.core import drawing
from scalejax.core.errors import ConfigError, ScalejaxError, nearest_multiples, refusal
from scalejax.core.progress import OnProgress, no_display
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.core.units import format_seconds
from scalejax.data.facts import resolve
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.planning.search import (
    Candidate,
    Objective,
    SearchResult,
    breakdown_difference,
    deduplicated,
    left_out,
    pareto,
    search,
    workspace_bytes,
)
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.predict import Prediction, predict
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import (
    Strategy,
    TransformerShape,
    transformer_program,
)
from scalejax.xla import ProfileJob, has_cuda_compiler, profile_each
from scalejax.xla.closed_form import installed_compiler, program_in_closed_form, shape_of

SEARCHED_FIELDS: dict[str, JsonValue] = {
    **{f"layout.{axis}": 1 for axis in MODEL_AXES},
    "layout.data": None,
    "layout.context_strategy": "all_gather",
    "layout.pipeline_chunks": 1,
    "layout.pipeline_schedule": "gpipe",
    "layout.sequence_parallel": False,
    "layout.expert_tensor": None,
    "layout.overlap_expert_exchange": False,
    "layout.pipeline_counts_ends": False,
    "layout.zero_stage": 0,
    "layout.mode": "jit",
    "batch.microbatches": 1,
}
"""Fields that a search varies, and those that it does not (`NOT_VARIED`): these values replace
those in a file before it is checked."""
NOT_VARIED = (
    "layout.expert_tensor",
    "layout.overlap_expert_exchange",
    "layout.pipeline_counts_ends",
)
"""Fields of other frameworks' steps; a search knows only their defaults."""


def require_not_searched(overrides: Mapping[str, JsonValue], accepted: str) -> None:
    """Refuse values for fields that a search of layouts would replace.

    Raises:
        ConfigError: says what is accepted instead.
    """
    for field in sorted((SEARCHED_FIELDS.keys() | {"model.remat"}) & overrides.keys()):
        raise ConfigError(refusal(field, overrides[field], accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One row of the table of strategies."""

    place: int
    """Rank by the closed form, from 1."""
    prediction: Prediction
    """Prediction of the closed-form program."""
    strategy: Strategy
    """Parallelism, microbatches and recompute."""
    price: float | None
    """Price of a million samples; None without a price of a device-hour."""
    losses: tuple[tuple[str, float], ...]
    """(term, seconds) by which its step is longer than the first's; empty for the first."""
    confirmed: Prediction | None
    """Prediction of the compiled step; None if it was not compiled."""
    note: str | None
    """Reason why it was not compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPlace:
    """Rank of the layout with which a network was published."""

    place: int | None
    """Rank of the fastest strategy with that layout, by the closed form, among all strategies that
    fit; None if none with that layout fits."""
    strategy: str
    """That strategy: the layout, with unpublished choices set to the fastest."""
    step_seconds: float | None
    """Its step time; None if none fits."""
    losses: tuple[tuple[str, float], ...]
    """(term, seconds) by which its step is longer than the first's."""
    source: str
    """Publication."""


@document("search")
@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport(Tabular):
    """Result of a search for a run."""

    title: str
    """Title of the search: network and cluster."""
    devices: str
    """Device counts that were searched: "64, 128"."""
    objective: Objective
    """Quantity that was minimised."""
    global_batch: int | None
    """Samples per update; None if nothing fits."""
    considered: int
    """Number of strategies for the devices, fitting or not."""
    fitting: int
    """Number of strategies that fit."""
    ranked: tuple[Ranked, ...]
    """Best strategies, ranked by the closed form, or by the compiled steps once there are any."""
    front: tuple[tuple[str, float, int], ...]
    """(strategy, seconds, bytes) of the Pareto front in time and memory."""
    nearest: tuple[str, float] | None
    """If none fits: the strategy that needs least memory, and its memory over the device's."""
    notes: tuple[str, ...] = ()
    """Caveats, such as strategies that were not searched."""
    published: PublishedPlace | None = None
    """Rank of the layout with which the network was published; None if that layout is not known, or
    is for another number of devices."""
    tokens_per_sample: int | None = None
    """Tokens of a sample; None in files of versions that did not record it."""

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The best strategies, a row for each."""
        return [
            {
                "place": each.place,
                "strategy": in_words(each.strategy),
                "step_seconds": (each.confirmed or each.prediction).step_seconds,
                "peak_memory_bytes": (each.confirmed or each.prediction).peak_memory_bytes,
                "is_compiled": each.confirmed is not None,
            }
            for each in self.ranked
        ]

    def _repr_html_(self) -> str:
        """What a notebook shows: the best strategies, and why the next ones are slower."""
        slower: list[dict[str, JsonValue]] = [
            {
                **row,
                "slower by": ", ".join(f"{name} {format_seconds(s)}" for name, s in each.losses),
            }
            for row, each in zip(self.to_rows(), self.ranked, strict=True)
        ]
        said = (
            f"{self.title}, {self.devices} devices: {self.fitting:,} of {self.considered:,} "
            "strategies fit"
        )
        return drawing.heading(said) + drawing.table(slower) + drawing.notes(self.notes)


def searchable(
    config: RunConfig, cluster: Cluster, facts: DatasetFacts | None = None
) -> tuple[RunConfig | None, str | None]:
    """The run whose layout a search replaces; or None, and why there can be no search.

    Args:
        config: the run.
        cluster: where it would run.
        facts: counts and shapes of its data; if None, they are read.
    """
    try:
        found = with_fields(config, SEARCHED_FIELDS)
        shape_of(found, cluster.chip, facts)
    except ConfigError as error:
        return None, " ".join(str(error).split()).rstrip(".")
    if found.fine_tuning is not None and found.fine_tuning.lora is not None:
        return None, "search ranks training in full, no adapters"
    return found, None


def search_run(
    config: RunConfig,
    cluster: Cluster,
    device_counts: tuple[int, ...],
    *,
    site: Site = NO_SITE,
    global_batch: int | None = None,
    objective: Objective = "time",
    processes: int = 1,
    facts: DatasetFacts | None = None,
    on_progress: OnProgress = no_display,
) -> SearchResult:
    """Search result for `config`; its layout, microbatches and remat are replaced.

    Args:
        config: network, data, batch and optimizer.
        cluster: where it would run.
        device_counts: device counts to choose from.
        site: conditions and input of its hosts.
        global_batch: samples per update; that of `config` unless given.
        objective: quantity to minimise.
        processes: see `search`.
        facts: counts and shapes of its data; if None, they are read.
        on_progress: see `search`.

    Raises:
        ConfigError: if the network is not known in closed form, or the batch is not given.
        DoesNotFit: if the cluster has fewer devices.
        ScalejaxError: if the system ends a process.
    """
    if config.fine_tuning is not None and config.fine_tuning.lora is not None:
        accepted = "search ranks training in full, no adapters; use scalejax predict"
        raise ConfigError(refusal("fine_tuning.lora", "given", accepted))
    shape = shape_of(config, cluster.chip, facts, compiler=installed_compiler())
    batch = config.batch.global_batch if global_batch is None else global_batch
    if batch is None:
        raise ConfigError("batch.global_batch is missing: give --global-batch.")
    return search(
        shape,
        cluster,
        device_counts,
        batch,
        site=site,
        objective=objective,
        moments=config.optimizer.moments,
        processes=processes,
        on_progress=on_progress,
    )


def report_search(
    config: RunConfig,
    cluster: Cluster,
    found: SearchResult,
    *,
    site: Site = NO_SITE,
    objective: Objective = "time",
    framework: Framework = XLA,
    price_per_device_hour: float | None = None,
    top: int = 10,
    notes: Sequence[str] = (),
    facts: DatasetFacts | None = None,
    preset: str | None = None,
) -> SearchReport:
    """Report of the best strategies of a search, none of them compiled.

    Args:
        config: the searched run.
        cluster: where it would run.
        found: result of `search_run`.
        site: conditions and input of its hosts.
        objective: quantity that was minimised.
        framework: the framework that trains it; the best by the closed form are ranked again by its
            steps.
        price_per_device_hour: price of a device-hour, in any currency.
        top: number of strategies in the table; with several device counts, equally many of each,
            and at least one.
        notes: further notes.
        facts: counts and shapes of its data; if None, they are read.
        preset: name of the preset that the network is, whose published layout is ranked; None if it
            is not a preset.
    """
    training = None if preset is None else PRESETS[preset].training
    best = _best_of_each_count(deduplicated(found.ranked), top)
    shape = shape_of(config, cluster.chip, facts, compiler=installed_compiler())
    ranked = list(_ranked(config, facts, cluster, site, best, framework, price_per_device_hour))
    if framework != XLA:
        ranked.sort(key=lambda each: _rank(each.prediction, objective))
        ranked = [replace(each, place=place) for place, each in enumerate(ranked, start=1)]
    front = pareto(found.ranked)
    counts = sorted({each.strategy.layout.device_count for each in found.ranked})
    return SearchReport(
        title=framework.title_of(f"{preset or config.model.name} on {cluster.title}"),
        devices=", ".join(map(str, counts)),
        objective=objective,
        global_batch=best[0].strategy.split.global_batch if best else None,
        considered=found.considered,
        fitting=len(found.ranked),
        ranked=_with_losses(ranked),
        front=tuple(
            (in_words(each.strategy), each.step_seconds, each.peak_memory_bytes) for each in front
        ),
        nearest=found.nearest and (in_words(found.nearest[0]), found.nearest[1]),
        notes=(
            *notes,
            *found_as_xla(framework),
            *left_out_notes(shape, counts),
            *(uneven_notes(best[0].strategy.split.global_batch, counts) if best else ()),
        ),
        published=_published(shape, cluster, site, found, training) if training else None,
        tokens_per_sample=shape.tokens,
    )


def _best_of_each_count(ranked: Sequence[Candidate], top: int) -> list[Candidate]:
    """The first `top` candidates, equally many of each device count, in the order of `ranked`."""
    counts = [each.strategy.layout.device_count for each in ranked]
    places = _in_turns(counts)[: max(top, len(set(counts)))]
    return [ranked[place] for place in sorted(places)]


def _in_turns(device_counts: Sequence[int]) -> list[int]:
    """Positions of the first of each device count, then of the second of each, and so on."""
    before: Counter[int] = Counter()
    turns: list[int] = []
    for count in device_counts:
        turns.append(before[count])
        before[count] += 1
    return sorted(range(len(turns)), key=turns.__getitem__)


def _published(
    shape: TransformerShape,
    cluster: Cluster,
    site: Site,
    found: SearchResult,
    training: PublishedTraining,
) -> PublishedPlace | None:
    """Rank of a published layout among the strategies that fit, if any has its device count."""
    if not any(each.strategy.layout.device_count == training.devices for each in found.ranked):
        return None
    layout, stage = fill_data_axis(training.devices, **training.layout), training.zero_stage
    is_published = [
        each.strategy.layout == layout and each.strategy.zero_stage == stage
        for each in found.ranked
    ]
    if not any(is_published):
        words = f"{layout}, ZeRO {stage}"
        return PublishedPlace(
            place=None, strategy=words, step_seconds=None, losses=(), source=training.source
        )
    index = is_published.index(True)
    each = found.ranked[index]
    workspace = workspace_bytes(cluster.chip)
    own, best = (
        predict(
            transformer_program(shape, one.strategy, workspace_bytes=workspace), cluster, site=site
        )
        for one in (each, found.ranked[0])
    )
    return PublishedPlace(
        place=index + 1,
        strategy=in_words(each.strategy),
        step_seconds=own.step_seconds,
        losses=breakdown_difference(own.waterfall, best.waterfall),
        source=training.source,
    )


def confirm_search(
    report: SearchReport,
    config: RunConfig,
    cluster: Cluster,
    *,
    confirm: int,
    site: Site = NO_SITE,
    framework: Framework = XLA,
    facts: DatasetFacts | None = None,
    on_progress: OnProgress = no_display,
) -> SearchReport:
    """`report` with its first strategies compiled, and ranked by the compiled steps.

    Args:
        report: result of `report_search`.
        config: the searched run.
        cluster: where it would run.
        confirm: number of strategies that are compiled; with several device counts, the first of
            each, then the second, and so on.
        site: conditions and input of its hosts.
        framework: the framework that trains it.
        facts: counts and shapes of its data; if None, they are read.
        on_progress: called for each compilation.
    """
    ranked = list(report.ranked)
    places = _in_turns([each.prediction.device_count for each in ranked])[:confirm]
    first = [ranked[place] for place in places]
    answers = _confirmed(config, facts, cluster, site, framework, first, on_progress)
    for index, answer in zip(places, answers, strict=True):
        each = ranked[index]
        if isinstance(answer, str):
            ranked[index] = replace(each, confirmed=None, note=answer)
            continue
        price = each.price and each.price * answer.step_seconds / each.prediction.step_seconds
        ranked[index] = replace(each, confirmed=answer, price=price, note=None)
    ranked.sort(key=lambda each: _order(each, report.objective))
    return replace(report, ranked=_with_losses(ranked))


def _with_losses(ranked: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """`ranked` with the terms by which the step of each is longer than the first's, both in closed
    form, since few are compiled."""
    terms = [each.prediction.waterfall for each in ranked]
    return tuple(
        replace(each, losses=breakdown_difference(own, terms[0]))
        for each, own in zip(ranked, terms, strict=True)
    )


_FRAMEWORK_NOTE = (
    "strategies are searched for as XLA runs them, and the best of them ranked as {} does"
)


def found_as_xla(framework: Framework) -> list[str]:
    """Note on how the layouts of a framework other than XLA are found."""
    return [] if framework == XLA else [_FRAMEWORK_NOTE.format(framework.title)]


def uneven_notes(global_batch: int, device_counts: Sequence[int]) -> tuple[str, ...]:
    """Notes on why some numbers of devices may be slower than smaller ones: the batch does not
    divide over them, and they have a factor that divides few networks."""
    notes = []
    for count in device_counts:
        shards = math.gcd(count, global_batch)
        rest = count // shards
        if rest & (rest - 1):
            notes.append(
                f"{count} devices: the batch of {global_batch:,} divides over {shards} of them at "
                f"most (data x fsdp), so that {rest} are left to tensor, context and pipeline, "
                "which is often slower; --global-batch "
                f"{nearest_multiples(global_batch, count)} divides over all"
            )
    return tuple(notes)


def left_out_notes(shape: TransformerShape, device_counts: Sequence[int]) -> tuple[str, ...]:
    """Note on tensor axes that are not searched because they do not divide the vocabulary, if any.

    The trainer runs them with the token embedding and the logits replicated on every device;
    Megatron-LM pads the vocabulary instead (arXiv 1909.08053, section 5.1).
    """
    sizes = left_out(shape, device_counts)
    if not sizes:
        return ()
    padded = -(-shape.vocabulary // math.lcm(*sizes)) * math.lcm(*sizes)
    return (
        f"tensor {', '.join(map(str, sizes))} left out: the vocabulary of {shape.vocabulary:,} "
        f"does not divide; pad it, as Megatron does, to have them: --data.vocabulary {padded}",
    )


def _order(each: Ranked, objective: Objective) -> tuple[int, float]:
    """Sort key: compiled steps that fit, by the objective; then those that were not compiled, in
    their order; last those that do not fit once compiled."""
    return (1, 0.0) if each.confirmed is None else _rank(each.confirmed, objective)


def _rank(prediction: Prediction, objective: Objective) -> tuple[int, float]:
    """Sort key by the objective; predictions that do not fit come last."""
    if not prediction.fits:
        return 2, 0.0
    if objective == "memory":
        return 0, float(prediction.peak_memory_bytes)
    return 0, prediction.step_seconds * (prediction.device_count if objective == "cost" else 1)


def _ranked(
    config: RunConfig,
    facts: DatasetFacts | None,
    cluster: Cluster,
    site: Site,
    best: Sequence[Candidate],
    framework: Framework,
    price_per_device_hour: float | None,
) -> Iterator[Ranked]:
    """Yield the table's rows, with predictions of the whole closed-form programs."""
    for place, each in enumerate(best, start=1):
        prediction, note = prediction_of(config, facts, cluster, site, each.strategy, framework)
        price = None
        if price_per_device_hour is not None:
            candidate = replace(each, step_seconds=prediction.step_seconds)
            price = 1e6 * candidate.device_hours_per_sample * price_per_device_hour
        yield Ranked(
            place=place,
            prediction=prediction,
            strategy=each.strategy,
            price=price,
            losses=(),
            confirmed=None,
            note=note,
        )


def program_of(
    config: RunConfig,
    facts: DatasetFacts | None,
    cluster: Cluster,
    strategy: Strategy,
    framework: Framework = XLA,
) -> tuple[Program, str | None]:
    """A strategy's whole program in closed form and, if it is not the framework's own, the
    reason."""
    shape = shape_of(config, cluster.chip, facts, compiler=installed_compiler())
    shapes = (
        replace(shape, vocabulary=shape.vocabulary * times)
        for times in (1, *framework.vocabulary_factors)
    )
    workspace = workspace_bytes(cluster.chip)
    program, *larger = (
        transformer_program(one, strategy, workspace_bytes=workspace) for one in shapes
    )
    note = None
    try:
        if framework.kernels is not None:
            run = run_of(config, strategy, facts)
            program = program_in_closed_form(
                ProfileJob(run=run, cluster=cluster, framework=framework)
            )
        elif framework != XLA:
            program = framework.applied(program, run_of(config, strategy, facts), larger)
    except ConfigError as error:  # scalejax cannot train this run
        note = f"as XLA runs it: {' '.join(str(error).split())}"
    return program, note


def prediction_of(
    config: RunConfig,
    facts: DatasetFacts | None,
    cluster: Cluster,
    site: Site,
    strategy: Strategy,
    framework: Framework = XLA,
) -> tuple[Prediction, str | None]:
    """Prediction of a strategy's whole program in closed form and, if that is not the framework's
    own, the reason."""
    program, note = program_of(config, facts, cluster, strategy, framework)
    return predict(program, cluster, site=site), note


def in_words(strategy: Strategy) -> str:
    """Description of a strategy on one line, without its defaults."""
    parts = [str(strategy.layout), f"microbatch {strategy.split.microbatch}"]
    if strategy.pipeline_chunks > 1:
        parts.append(f"{strategy.pipeline_chunks} chunks")
    if strategy.recompute != "none":
        parts.append(f"{strategy.recompute} recompute")
    if strategy.zero_stage:
        parts.append(f"ZeRO {strategy.zero_stage}")
    if strategy.sequence_parallel:
        parts.append("sequence parallel")
    if strategy.context_strategy != "all_gather":
        parts.append(
            {"ring": "ring", "all_to_all": "heads over context"}[strategy.context_strategy]
        )
    return ", ".join(parts)


def run_of(config: RunConfig, strategy: Strategy, facts: DatasetFacts | None = None) -> ResolvedRun:
    """`config` with the layout, batch and remat of `strategy`.

    Raises:
        ConfigError: if the two are incompatible.
    """
    layout = strategy.layout
    fields = {f"layout.{axis}": size for axis, size in layout.axis_sizes.items()}
    config = replace(
        config,
        batch=replace(
            config.batch,
            global_batch=strategy.split.global_batch,
            per_device_batch=None,
            microbatches=strategy.split.microbatches,
        ),
    )
    return resolve(
        with_fields(
            config,
            {
                **fields,
                "layout.zero_stage": strategy.zero_stage,
                "layout.sequence_parallel": strategy.sequence_parallel,
                "layout.context_strategy": strategy.context_strategy,
                "layout.pipeline_chunks": strategy.pipeline_chunks,
                "layout.pipeline_schedule": strategy.pipeline_schedule,
                "model.remat": strategy.recompute,
            },
        ),
        layout.device_count,
        facts,
    )


def _confirmed(
    config: RunConfig,
    facts: DatasetFacts | None,
    cluster: Cluster,
    site: Site,
    framework: Framework,
    ranked: Sequence[Ranked],
    on_progress: OnProgress,
) -> list[Prediction | str]:
    """Predictions of strategies from their steps, compiled in parallel, or for each that was not
    compiled, the reason."""
    if cluster.chip.cuda is not None and not has_cuda_compiler():
        return ["no compiler for GPUs is installed (scalejax[gpu-target])"] * len(ranked)
    jobs: dict[int, ProfileJob] = {}
    answers: dict[int, Program | ScalejaxError] = {}
    for index, each in enumerate(ranked):
        try:
            run = run_of(config, each.strategy, facts)
        except ScalejaxError as error:  # it does not affect other strategies
            answers[index] = error
        else:
            name = f"strategy {each.place}"
            jobs[index] = ProfileJob(run=run, cluster=cluster, framework=framework, name=name)
    answers |= zip(jobs, profile_each(list(jobs.values()), on_progress), strict=True)
    found: list[Prediction | str] = []
    for index in range(len(ranked)):
        answer = answers[index]
        if isinstance(answer, ScalejaxError):
            found.append(" ".join(str(answer).split()))
        else:
            found.append(predict(answer, cluster, site=site))
    return found
