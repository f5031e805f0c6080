"""A run of which only network, data and batch are given: searched, and its winners compiled.

Decides what of a run the closed form can say; relates what it says to what the compiler says.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scalejax.config.data import facts
from scalejax.config.model import ELEMENT_BYTES, CausalConfig, LlamaConfig
from scalejax.config.optimizer import OptimizerConfig, ScheduleFreeConfig, SgdConfig
from scalejax.config.run import ResolvedRun, RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError, ScalejaxError, refusal
from scalejax.core.progress import OnCase, nothing_said
from scalejax.hardware import Chip, Cluster
from scalejax.planning.search import (
    Candidate,
    Objective,
    SearchResult,
    StrategyCosts,
    breakdown_difference,
    deduplicated,
    left_out,
    pareto,
    search,
    workspace_bytes,
)
from scalejax.simulator.predict import Prediction, predict
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import Strategy, TransformerShape, transformer_program
from scalejax.xla import ProfileJob, has_cuda_compiler, require_type
from scalejax.xla.batch import compile_cases

_FUSED_CAPABILITY, _WIDE_CAPABILITY = (8, 0), (9, 0)  # as `models.attention` has them
_FUSED_HEAD, _WIDE_HEAD = 128, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One strategy of the table."""

    place: int
    """In the order of the closed form, from 1."""
    prediction: Prediction
    """What its closed form comes to."""
    strategy: Strategy
    """How the step is spread."""
    price: float | None
    """Of a million samples; None without a price of a device-hour."""
    losses: tuple[tuple[str, float], ...]
    """(term, seconds) by which its step is longer than the first's; empty for the first."""
    confirmed: Prediction | None
    """What the compiled step comes to; None if it was not compiled."""
    note: str | None
    """Why it was not compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What a search found for a run."""

    title: str
    """What was searched, for people."""
    devices: str
    """Numbers of devices that were searched: "64, 128"."""
    objective: Objective
    """What is least."""
    global_batch: int | None
    """Samples of an update; None where nothing fits."""
    considered: int
    """Strategies that the devices can be divided into."""
    fitting: int
    """Those that fit."""
    ranked: tuple[Ranked, ...]
    """The best, in order: of the closed form, or of the compiled steps once there are any."""
    front: tuple[tuple[str, float, int], ...]
    """(strategy, seconds, bytes) of those that no other beats in both time and memory."""
    nearest: tuple[str, float] | None
    """Where none fits: the strategy that needs least memory, and how many times what there is."""
    notes: tuple[str, ...] = ()
    """What was not searched."""


def shape_of(config: RunConfig, chip: Chip) -> TransformerShape:
    """The dimensions of the network of `config`, as it would run on `chip`.

    Raises:
        ConfigError: if it is no transformer whose blocks are all alike, only parts of it learn,
            its gradients are not summed as they are, or the chip lacks its type.
    """
    model = config.model
    if not isinstance(model, CausalConfig):
        accepted = "search knows gpt and llama in closed form; use predict"
        raise ConfigError(refusal("model.name", model.name, accepted))
    if config.fine_tuning is not None and config.fine_tuning.trainable:
        accepted = "the closed form costs training in full; use scalejax predict"
        raise ConfigError(refusal("fine_tuning.trainable", config.fine_tuning.trainable, accepted))
    if config.gradient_sync is not None:
        accepted = "the closed form sums gradients as they are; use scalejax predict"
        raise ConfigError(refusal("gradient_sync.name", config.gradient_sync.name, accepted))
    require_type(model, chip)
    dataset = facts(config.data)
    is_llama = isinstance(model, LlamaConfig)
    return TransformerShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads if isinstance(model, LlamaConfig) else model.heads,
        ffn_hidden=model.ffn_hidden if isinstance(model, LlamaConfig) else model.inner_width,
        is_gated=is_llama,
        has_tied_embeddings=model.tied_embeddings,
        has_learned_positions=not is_llama,
        vocabulary=dataset.classes,
        tokens=dataset.input_shape[0],
        is_fused=model.attention != "unfused" and has_fused_attention(model, chip),
        compute_dtype=model.compute_dtype,
    )


def has_fused_attention(model: CausalConfig, chip: Chip) -> bool:
    """Whether `chip` has one kernel for the attention of `model`."""
    capability = (0, 0) if chip.cuda is None else chip.cuda.compute_capability
    if capability < _FUSED_CAPABILITY or ELEMENT_BYTES[model.compute_dtype] != 2:
        return False
    largest = _WIDE_HEAD if capability >= _WIDE_CAPABILITY else _FUSED_HEAD
    size = model.hidden // model.heads
    return size % 8 == 0 and size <= largest


def search_run(
    config: RunConfig,
    cluster: Cluster,
    device_counts: tuple[int, ...],
    *,
    global_batch: int | None = None,
    objective: Objective = "time",
    processes: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """The strategies for `config` that fit; its layout, microbatches and remat are replaced.

    Args:
        config: network, data, batch and optimizer.
        cluster: where it would run.
        device_counts: numbers of devices to choose from.
        global_batch: samples of an update; that of `config` unless given.
        objective: what is least.
        processes: see `search`.
        on_progress: see `search`.

    Raises:
        ConfigError: if the network is not known in closed form, or the batch is not given.
        DoesNotFit: if the cluster has fewer devices.
        ScalejaxError: if the system ends a process.
    """
    shape = shape_of(config, cluster.chip)
    batch = config.batch.global_batch if global_batch is None else global_batch
    if batch is None:
        raise ConfigError("batch.global_batch is missing: give --global-batch.")
    return search(
        shape,
        cluster,
        device_counts,
        batch,
        objective=objective,
        moments=_moments(config.optimizer),
        processes=processes,
        on_progress=on_progress,
    )


def _moments(optimizer: OptimizerConfig) -> Literal[0, 1, 2]:
    """Arrays like the parameters that it keeps."""
    if isinstance(optimizer, SgdConfig):
        return 1 if optimizer.momentum else 0
    if isinstance(optimizer, ScheduleFreeConfig):
        return 2 if optimizer.base == "adamw" else 1
    return 2 if optimizer.name in ("adamw", "lamb") else 1


def report_search(
    config: RunConfig,
    cluster: Cluster,
    found: SearchResult,
    *,
    objective: Objective = "time",
    price_per_device_hour: float | None = None,
    top: int = 10,
    notes: Sequence[str] = (),
) -> SearchReport:
    """The best of what was found, none of them compiled.

    Args:
        config: what was searched.
        cluster: where.
        found: by `search_run`.
        objective: what was least.
        price_per_device_hour: of one device, in any currency.
        top: strategies that are told of in full.
        notes: to a reader, besides its own.
    """
    best = deduplicated(found.ranked)[:top]
    front = pareto(found.ranked)
    counts = sorted({each.strategy.layout.device_count for each in found.ranked})
    return SearchReport(
        title=f"{config.model.name} on {cluster.title}",
        devices=", ".join(map(str, counts)),
        objective=objective,
        global_batch=best[0].strategy.split.global_batch if best else None,
        considered=found.considered,
        fitting=len(found.ranked),
        ranked=tuple(_ranked(config, cluster, best, price_per_device_hour)),
        front=tuple(
            (in_words(each.strategy), each.step_seconds, each.peak_memory_bytes) for each in front
        ),
        nearest=found.nearest and (in_words(found.nearest[0]), found.nearest[1]),
        notes=(
            *notes,
            *([_SCHEDULE_NOTE] if any(each.strategy.layout.pipeline > 1 for each in best) else []),
            *left_out_notes(shape_of(config, cluster.chip), counts),
        ),
    )


def confirm_search(
    report: SearchReport,
    config: RunConfig,
    cluster: Cluster,
    *,
    confirm: int,
    on_case: OnCase = nothing_said,
) -> SearchReport:
    """`report` with its first compiled, in the order of what they then come to.

    Args:
        report: of `report_search`.
        config: what was searched.
        cluster: where.
        confirm: strategies that are compiled.
        on_case: told of what is compiled.
    """
    first = report.ranked[:confirm]
    answers = _confirmed(config, cluster, [each.strategy for each in first], on_case)
    answered = (
        replace(
            each,
            confirmed=answer if isinstance(answer, Prediction) else None,
            note=answer if isinstance(answer, str) else None,
        )
        for each, answer in zip(first, answers, strict=True)
    )
    ranked = [*answered, *report.ranked[confirm:]]
    ranked.sort(key=lambda each: _order(each, report.objective))
    costs = StrategyCosts(shape_of(config, cluster.chip), cluster)
    winner = costs.terms(ranked[0].strategy)
    return replace(
        report,
        ranked=tuple(
            replace(each, losses=breakdown_difference(costs.terms(each.strategy), winner))
            for each in ranked
        ),
    )


_SCHEDULE_NOTE = (
    "pp above 1 is costed as 1F1B, as Megatron-LM runs it; scalejax trains GPipe, which holds more "
    "microbatches at once and deals out chunks: confirming (--confirm), and predict, cost that"
)


def left_out_notes(shape: TransformerShape, device_counts: Sequence[int]) -> tuple[str, ...]:
    """A note on the tensor axes that are not searched, since they do not divide the vocabulary;
    none where all do.

    The trainer runs them with the token embedding and the logits whole on every device, which
    nobody wants; Megatron-LM pads the vocabulary instead (arXiv 1909.08053, section 5.1).
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
    """What ranks compiled steps: those that fit by what they come to, then those that were not
    compiled as they were, and last those that turned out not to fit."""
    compiled = each.confirmed
    if compiled is None:
        return 1, 0.0
    if not compiled.fits:
        return 2, 0.0
    if objective == "memory":
        return 0, float(compiled.peak_memory_bytes)
    return 0, compiled.step_seconds * (compiled.device_count if objective == "cost" else 1)


def _ranked(
    config: RunConfig,
    cluster: Cluster,
    best: Sequence[Candidate],
    price_per_device_hour: float | None,
) -> Iterator[Ranked]:
    """Each of the best in full: the whole program is written down and predicted."""
    shape, workspace = shape_of(config, cluster.chip), workspace_bytes(cluster.chip)
    costs = StrategyCosts(shape, cluster)
    winner = costs.terms(best[0].strategy) if best else ()
    for place, each in enumerate(best, start=1):
        program = transformer_program(shape, each.strategy, workspace_bytes=workspace)
        price = None
        if price_per_device_hour is not None:
            price = 1e6 * each.device_hours_per_sample * price_per_device_hour
        yield Ranked(
            place=place,
            prediction=predict(program, cluster),
            strategy=each.strategy,
            price=price,
            losses=breakdown_difference(costs.terms(each.strategy), winner),
            confirmed=None,
            note=None,
        )


def in_words(strategy: Strategy) -> str:
    """A strategy on one line; what divides or recomputes nothing is left out."""
    parts = [str(strategy.layout), f"microbatch {strategy.split.microbatch}"]
    if strategy.pipeline_chunks > 1:
        parts.append(f"{strategy.pipeline_chunks} chunks")
    if strategy.recompute != "none":
        parts.append(f"{strategy.recompute} recompute")
    if strategy.zero_stage:
        parts.append(f"ZeRO {strategy.zero_stage}")
    if strategy.sequence_parallel:
        parts.append("sequence parallel")
    return ", ".join(parts)


def run_of(config: RunConfig, strategy: Strategy) -> ResolvedRun:
    """`config`, spread as `strategy` says.

    Raises:
        ConfigError: if the two do not go together.
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
                "layout.pipeline_chunks": strategy.pipeline_chunks,
                "model.remat": strategy.recompute,
            },
        ),
        layout.device_count,
    )


def _confirmed(
    config: RunConfig, cluster: Cluster, best: Sequence[Strategy], on_case: OnCase
) -> list[Prediction | str]:
    """What the compiled step of each of the best comes to, or why it was not compiled."""
    answers: dict[int, Prediction | str] = {}
    jobs: dict[int, ProfileJob] = {}
    needs_compiler = cluster.chip.cuda is not None and not has_cuda_compiler()
    for index, each in enumerate(best):
        reason = None
        if needs_compiler:
            reason = "no compiler for GPUs is installed (scalejax[gpu-target])"
        if reason is not None:
            answers[index] = reason
            continue
        try:
            run = run_of(config, each)
        except ConfigError as error:
            answers[index] = str(error)
        else:
            jobs[index] = ProfileJob(run=run, cluster=cluster)
    for index, job in jobs.items():
        compiled = _compiled(job, in_words(best[index]), on_case)
        answers[index] = compiled if isinstance(compiled, str) else predict(compiled, cluster)
    return [answers[index] for index in range(len(best))]


def _compiled(job: ProfileJob, case: str, on_case: OnCase) -> Program | str:
    """The compiled step, or what the compiler says: one refusal leaves the others standing."""
    try:
        return compile_cases([job], [case], on_case)[0]
    except ScalejaxError as error:
        return " ".join(str(error).split())
