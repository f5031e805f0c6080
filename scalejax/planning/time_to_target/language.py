"""Plan of time to a loss for a language model: tokens from the loss surface, closed-form steps.

For each cluster and device count it considers the batches around the best one, the tokens that each
needs and the fastest of the common layouts, and takes the soonest, which is also the cheapest.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import RunConfig, load_config, published_run
from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.serialization import JsonValue
from scalejax.core.units import counted, format_count
from scalejax.hardware import load_chip, require_own_names
from scalejax.planning.convergence.hyperbola import Estimate
from scalejax.planning.convergence.loss_surface import (
    AGREED,
    DIVERGES_ABOVE,
    FITTED,
    LanguageRun,
    LossModel,
    fit_ladder,
    published_surface,
    relative_loss,
)
from scalejax.planning.search.costs import Candidate
from scalejax.planning.search.parallel import SearchSpec, fastest_common
from scalejax.planning.search.run import SEARCHED_FIELDS, in_words, prediction_of
from scalejax.planning.time_to_target.plan import Plan, PlanPoint, answered, plan_point
from scalejax.planning.time_to_target.run import ClusterOption, at_list_prices
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.transformer import TransformerShape
from scalejax.training.record import RunRecord, facts_of
from scalejax.xla.closed_form import installed_compiler, shape_of

_VOCABULARY, _TOKENS = 65_536, 2048
"""Vocabulary and tokens of a sample of the runs behind the published surface, and of a Llama-like
network."""
_HEAD, _FFN_MULTIPLE = 128, 256
_SHARDED = 512
_SIZES = {"": 1.0, "m": 1e6, "b": 1e9, "t": 1e12}
_BATCHES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Batches that are considered, over the best one."""
_MOST_BEYOND = 4.0
"""Factor beyond the batches of its runs up to which a surface is used: its band there comes from
leaving out sizes and tokens, and batches were never left out."""
_TOO_FAR = f"a batch more than {_MOST_BEYOND:g} times beyond those of the runs"
_NOT_SHOWN = "the batch needs more tokens than the ladder holds to"
_TOO_MANY = "more devices than the cluster has"
_NO_LAYOUT = "no common layout fits or divides; scalejax search tries all, with pipelines"
_NOT_REACHED = "the batch is so large that no number of tokens reaches the loss"


LIKE_LLAMA = "llama-like"
"""Prefix of the names of networks that are defined by their number of parameters."""


def like_llama(text: str, overrides: Mapping[str, JsonValue] | None = None) -> RunConfig:
    """Run of a decoder with Llama's blocks and about as many parameters without embeddings as
    `text` says, such as "llama-like:N=1b": width 128 times the layers, as in Llama 7B and 13B
    (Touvron et al. 2023, arXiv 2302.13971, table 2), heads of 128, SwiGLU of 8/3 the width.

    Raises:
        ConfigError: if `text` has another form.
    """
    accepted = "it must be llama-like:N=SIZE, such as llama-like:N=1b, or a published decoder"
    match = re.fullmatch(r"llama-like:n=([0-9.]+)([mbt]?)", text.strip().lower())
    if match is None:
        raise ConfigError(refusal("model", text, accepted))
    try:
        parameters = float(match[1]) * _SIZES[match[2]]
    except ValueError as error:
        raise ConfigError(refusal("model", text, accepted)) from error
    if not 1e6 <= parameters <= 1e13:
        raise ConfigError(refusal("model", text, "N must be from 1m to 10t"))
    # A block has 4 h^2 parameters of attention and 8 h^2 of SwiGLU; there are h / 128 blocks.
    ideal = (parameters * _HEAD / 12) ** (1 / 3)
    multiple = _SHARDED if ideal > 4 * _SHARDED else _HEAD
    hidden = max(_HEAD, round(ideal / multiple) * multiple)
    layers = max(1, round(parameters / (12 * hidden**2)))
    ffn = max(_FFN_MULTIPLE, round(8 / 3 * hidden / _FFN_MULTIPLE) * _FFN_MULTIPLE)
    sizes: dict[str, JsonValue] = {
        "model.layers": layers,
        "model.hidden": hidden,
        "model.heads": hidden // _HEAD,
        "model.kv_heads": hidden // _HEAD,
        "model.ffn_hidden": ffn,
        "data.vocabulary": _VOCABULARY,
        "data.tokens": _TOKENS,
        "batch.global_batch": 1024,
    }
    return published_run("llama3-8b", {**SEARCHED_FIELDS, **sizes, **(overrides or {})})


def parameters_of(shape: TransformerShape) -> float:
    """Parameters without embeddings and output layer, all experts included."""
    tables = shape.vocabulary * shape.hidden * (1 if shape.has_tied_embeddings else 2)
    return float(shape.parameters - tables)


def sparsity_of(shape: TransformerShape) -> float:
    """Experts over experts of a token, shared ones in both; 1 where dense."""
    moe = shape.experts
    if moe is None:
        return 1.0
    shared = moe.shared_experts or 0
    return (moe.experts + shared) / (moe.experts_per_token + shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A batch with the tokens that it needs."""

    samples: int
    tokens: Estimate
    learning_rate: float


def plan_loss(
    config: RunConfig,
    options: Sequence[ClusterOption],
    device_counts: Sequence[int],
    model: LossModel,
    loss: float,
    *,
    name: str | None = None,
    deadline_seconds: float | None = None,
    budget: float | None = None,
    framework: Framework = XLA,
    facts: DatasetFacts | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = no_display,
) -> Plan:
    """Plan of `config` until `loss`: all clusters and device counts, and the best of them.

    Args:
        config: the network, its tokens and precision; batch, layout, microbatches and remat are
            chosen.
        options: clusters to choose from, all with a price or none; with none, at list prices if all
            have one.
        device_counts: device counts to choose from.
        model: the loss model.
        loss: final loss, nats per token.
        name: what the network is called; by default as in `config`.
        deadline_seconds: time within which it must be reached.
        budget: maximum cost: in the currency of the prices, in dollars of list prices, or in
            device-hours if a cluster has no price.
        framework: the framework that trains it.
        facts: counts and shapes of its data; if None, they are read.
        notes: further notes.
        on_progress: called with the number of device counts planned so far, and of all.

    Raises:
        ConfigError: if no number of tokens reaches the loss, or there is nothing to choose from.
    """
    require_above("target loss", loss, 0)
    for field, limit in (("deadline", deadline_seconds), ("budget", budget)):
        require_above(field, limit, 0)
    require_own_names([option.cluster for option in options])
    if len({option.price_per_device_hour is None for option in options}) != 1:
        raise ConfigError(refusal("price", "", "each cluster needs one, or none has one"))
    options, currency, of_prices = at_list_prices(options)
    counts = sorted(set(device_counts))
    require_at_least("devices", min(counts, default=0), 1)
    shape = shape_of(config, options[0].cluster.chip, facts, compiler=installed_compiler())
    if config.fine_tuning is not None:
        accepted = (
            "runs of the surface train all weights from the start: leave fine_tuning out; "
            "--convergence with a test metric plans a run that goes on from a network"
        )
        raise ConfigError(refusal("fine_tuning", "given", accepted))
    guess = math.log(shape.vocabulary)
    if loss >= guess:
        accepted = (
            f"it must be below {guess:.4g}, ln(vocabulary={shape.vocabulary:,}), which is what a "
            "network has that knows nothing"
        )
        raise ConfigError(refusal("target loss", loss, accepted))
    parameters, sparsity = parameters_of(shape), sparsity_of(shape)
    model.require_shown(parameters, 0.0, sparsity)
    best = model.tokens_to(loss, parameters, sparsity)
    model.require_shown(parameters, best.p50, sparsity)
    optimum = model.best(parameters, best.p50, sparsity)

    @cache
    def batch_of(samples: int) -> _Batch | str:
        """The batch, or why it is left out."""
        size = samples * shape.tokens
        if model.batch_factor(size) > _MOST_BEYOND:
            return _TOO_FAR
        try:
            tokens = model.tokens_to(loss, parameters, sparsity, batch_tokens=size)
        except ConfigError:
            return _NOT_REACHED
        try:
            model.require_shown(parameters, tokens.p50, sparsity)
        except ConfigError:
            return _NOT_SHOWN
        found = model.best(parameters, tokens.p50, sparsity, batch_tokens=size)
        return _Batch(samples=samples, tokens=tokens, learning_rate=found.learning_rate)

    left_out: Counter[str] = Counter()
    points: list[PlanPoint] = []
    predicted_notes: dict[str, None] = {}
    for done, (option, count) in enumerate((o, c) for o in options for c in counts):
        on_progress(Progress(done=done, total=len(options) * len(counts)))
        if count > option.cluster.most_devices:
            left_out[_TOO_MANY] += 1
            continue
        spec = SearchSpec(
            shape=shape_of(config, option.cluster.chip, facts, compiler=installed_compiler()),
            cluster=option.cluster,
            site=option.site,
            moments=config.optimizer.moments,
        )
        is_any_batch = False
        timed: list[tuple[float, _Batch, Candidate]] = []
        for samples in _samples(optimum.batch_tokens / shape.tokens, count):
            if isinstance(batch := batch_of(samples), str):
                left_out[batch] += 1
                continue
            is_any_batch = True
            if (fastest := fastest_common(spec, count, samples)) is not None:
                steps = batch.tokens.p50 / (samples * shape.tokens)
                timed.append((steps * fastest.step_seconds, batch, fastest))
        if is_any_batch and not timed:
            left_out[_NO_LAYOUT] += 1
        # Device-hours are these seconds times the same count, so the soonest is also the cheapest.
        for _, batch, candidate in sorted(timed, key=lambda each: each[0])[:1]:
            prediction, note = prediction_of(
                config, facts, option.cluster, option.site, candidate.strategy, framework
            )
            predicted_notes |= dict.fromkeys(
                each for each in (*prediction.notes, note) if each and not each.startswith("MFU ")
            )
            point = plan_point(
                prediction,
                batch.tokens.divided_by(batch.samples * shape.tokens),
                rates=option.rates,
                is_extrapolated=model.batch_factor(batch.samples * shape.tokens) > 1,
            )
            points.append(
                replace(
                    point,
                    are_steps_extrapolated=bool(
                        model.beyond(parameters, batch.tokens.p50, sparsity)
                    ),
                    tokens=batch.tokens.p50,
                    learning_rate=batch.learning_rate,
                    strategy=in_words(candidate.strategy),
                )
            )
    clusters = ", ".join(option.cluster.name for option in options)
    run = LanguageRun(
        parameters=parameters,
        tokens=best.p50,
        batch_tokens=optimum.batch_tokens,
        learning_rate=optimum.learning_rate,
        sparsity=sparsity,
    )
    plan = Plan(
        points=tuple(points),
        title=framework.title_of(f"{name or config.model.name} on {clusters}"),
        target=f"loss {loss:g}",
        steps_source=_source(model, run, best, shape),
        has_convergence=True,
        is_priced=currency != "device-hours",
        currency=currency,
        deadline_seconds=deadline_seconds,
        budget=budget,
        left_out=tuple(left_out.items()),
        notes=(
            *_of_optimizer(config, model),
            *_notes(model, run, best, shape, options),
            *of_prices,
            *notes,
            *predicted_notes,
        ),
    )
    return answered(plan)


def _samples(best: float, count: int) -> list[int]:
    """Batches around the best one that divide over the devices: powers of two times the odd part of
    their number."""
    odd = count
    while odd % 2 == 0:
        odd //= 2
    found = {odd * 2 ** max(0, round(math.log2(best * each / odd))) for each in _BATCHES}
    return sorted(found)


def _source(model: LossModel, run: LanguageRun, tokens: Estimate, shape: TransformerShape) -> str:
    late = format_count(tokens.p90) if math.isfinite(tokens.p90) else "never"
    return (
        f"{model.name}: {format_count(run.parameters)} parameters without embeddings need "
        f"{format_count(tokens.p50)} tokens ({format_count(tokens.p10)} to {late}) at the best "
        f"batch, {format_count(run.batch_tokens)} tokens "
        f"({run.batch_tokens / shape.tokens:,.0f} sequences), and peak rate "
        f"{run.learning_rate:.2g}"
    )


def _of_optimizer(config: RunConfig, model: LossModel) -> list[str]:
    """A note if the network is trained with another optimizer than the runs."""
    if config.optimizer.name == model.optimizer:
        return []
    theirs = "AdamW" if model.optimizer == "adamw" else model.optimizer
    return [
        f"the runs were trained with {theirs}, and this one trains with {config.optimizer.name}: "
        "nobody measured the loss, rate and tokens that it needs, and all of these assume that it "
        f"learns as {theirs} did"
    ]


def _notes(
    model: LossModel,
    run: LanguageRun,
    tokens: Estimate,
    shape: TransformerShape,
    options: Sequence[ClusterOption],
) -> list[str]:
    """Notes on what is not known, the most important first."""
    found = []
    if not math.isfinite(tokens.p90):
        found.append("one run in ten, or more, would not reach the loss with any number of tokens")
    if beyond := model.beyond(run.parameters, run.tokens, run.sparsity):
        found.append(
            f"EXTRAPOLATED: {'; '.join(beyond)}: the band is wider for that, and no such run "
            "has been seen here"
        )
    if model.shown:
        found.append(
            "its own largest runs were predicted by the smaller ones at "
            + " and ".join(f"{factor:.3g} times the {what}" for what, factor in model.shown.items())
            + ", and it is used no farther beyond the runs than that"
        )
    elif model.scale == 1.0:
        found.append(
            f"the loss is of the corpus and vocabulary of {model.name}, and another's may be "
            "anything: --anchor loss=L,tokens=D,parameters=N, or a run's folder, moves it there"
        )
    else:
        found.append(
            f"losses are {model.scale:.4g} times those of {model.name}, by the anchor; they are "
            "assumed to fall with tokens and parameters as there"
        )
    if model.anchored_beyond:
        found.append(
            f"the anchor itself is beyond the runs ({'; '.join(model.anchored_beyond)}): the band "
            "is wider for that"
        )
    apart = model.surface.disagreement(run.parameters, run.tokens, run.sparsity)
    if model.shown and model.surface.valley is None:
        found.append(
            "too few of its runs are near the best of their size and tokens to say where that is: "
            "batch and rate are those of the least loss by all of them"
        )
    elif apart > AGREED:
        found.append(
            "the batch and rate that its runs near the best point to have "
            f"{1 + apart:.4g} times the least loss by all of them: it goes over to those of the "
            "least loss"
        )
    found += model.context
    if shape.tokens != _TOKENS and model.context:
        found.append(f"samples have {shape.tokens} tokens, and those of its runs {_TOKENS}")
    if (chance := model.divergence_probability(run)) > DIVERGES_ABOVE:
        found.append(f"a run at that rate diverges with probability {chance:.0%}")
    found.append(
        "~ marks batches beyond any run, and steps where parameters or tokens are; layouts are "
        "data, fsdp, expert, and tensor within a node: scalejax search tries all"
    )
    if any(option.watts_per_device is None for option in options):
        found.append("no energy: --watts W,W,... of a device, host and cooling included, gives it")
    found.append("start-up, evaluations and checkpoints are not counted")
    return found


_ANCHORS = {
    "tokens": (1e6, 1e16),
    "parameters": (1e5, 1e14),
    "batch_tokens": (1.0, 1e10),
    "learning_rate": (1e-7, 1.0),
    "sparsity": (1.0, 1e4),
}
"""Least and most of each value of an anchor: wider than any run ever made."""


def anchors_of(text: str, model: LossModel) -> list[LanguageRun]:
    """The runs of a folder, or those that `parse_anchor` reads.

    Raises:
        ConfigError: see `parse_anchor` and `runs_in`.
    """
    return runs_in(Path(text)) if Path(text).is_dir() else parse_anchor(text, model)


def runs_in(folder: Path) -> list[LanguageRun]:
    """The decoders that were trained in the folder of a run or of a sweep, with their final losses.

    The loss of a run is that of the last evaluation, or else the mean over the last tenth of its
    recorded updates. Runs that did not complete or had growing batches are left out.

    Raises:
        ConfigError: if there is none.
    """
    return _with_losses(folder, [_run_in(each) for each in _folders(folder)])


def _with_losses(folder: Path, runs: Sequence[LanguageRun | None]) -> list[LanguageRun]:
    found = [run for run in runs if run is not None and run.loss]
    if not found:
        accepted = "it must hold a decoder that was trained to its end, at one batch"
        raise ConfigError(refusal("folder", str(folder), accepted))
    return found


def _folders(folder: Path) -> list[Path]:
    """The folders of the runs of a sweep, or of a run."""
    return sorted((folder / "runs").glob("*")) if (folder / "runs").is_dir() else [folder]


def _run_in(folder: Path) -> LanguageRun | None:
    """A run that completed, or one that diverged, as planned and without a loss; else None."""
    record = RunRecord.load(folder)
    config = load_config(folder / "run.toml")
    batches = {line.global_batch for line in record.training}
    if record.status not in ("completed", "diverged") or len(batches) != 1 or None in batches:
        return None
    facts = facts_of(config, folder / "run.toml", {}, None)
    shape = shape_of(config, load_chip("h100"), facts, compiler=installed_compiler())
    samples = batches.pop() or 0
    evaluated = [each.test_loss for each in record.evaluations]
    last = [line.loss for line in record.training][-max(1, len(record.training) // 10) :]
    losses = evaluated[-1:] or last
    run = LanguageRun(
        parameters=parameters_of(shape),
        tokens=float(record.training[-1].step * samples * shape.tokens),
        batch_tokens=float(samples * shape.tokens),
        learning_rate=max(line.learning_rate for line in record.training),
        sparsity=sparsity_of(shape),
    )
    if record.status == "diverged":
        # It may have diverged in the warmup: its planned rate and tokens say whether others do.
        peak, _ = config.schedule.scaled(samples)
        tokens = float(config.train.epochs * facts.train_examples * shape.tokens)
        return replace(
            run, learning_rate=max(peak, run.learning_rate), tokens=max(tokens, run.tokens)
        )
    if any(loss is None for loss in losses):
        return None
    return replace(run, loss=fmean(loss for loss in losses if loss is not None))


def parse_anchor(text: str, model: LossModel) -> list[LanguageRun]:
    """The runs in "loss=3.1,tokens=2e10,parameters=1e9", separated by semicolons; batch and rate
    are the best ones unless given as batch_tokens and learning_rate.

    Raises:
        ConfigError: if it holds anything else, or a value that no run has (`_ANCHORS`).
    """
    accepted = (
        "it must be loss=L,tokens=D,parameters=N and may have batch_tokens=B, learning_rate=R and "
        "sparsity=S, or be the folder of a run"
    )
    found = []
    for part in text.split(";"):
        values: dict[str, float] = {}
        for pair in part.split(","):
            key, _, value = pair.partition("=")
            if key.strip() in values:
                raise ConfigError(refusal("anchor", text, f"{key.strip()} is in it twice"))
            try:
                values[key.strip()] = _number(value)
            except ValueError as error:
                raise ConfigError(refusal("anchor", text, accepted)) from error
        allowed = {"loss", "tokens", "parameters", "batch_tokens", "learning_rate", "sparsity"}
        if not {"loss", "tokens", "parameters"} <= values.keys() <= allowed:
            raise ConfigError(refusal("anchor", text, accepted))
        for field, value in values.items():
            require_above(field, value, 0)
            least, most = _ANCHORS.get(field, (value, value))
            if not least <= value <= most:
                accepted = f"of an anchor it must be {least:g} to {most:g}"
                raise ConfigError(refusal(field, value, accepted))
        if values.get("batch_tokens", 0.0) > values["tokens"]:
            accepted = f"it must be at most the anchor's tokens, {values['tokens']:.4g}"
            raise ConfigError(refusal("batch_tokens", values["batch_tokens"], accepted))
        best = model.best(
            values["parameters"],
            values["tokens"],
            values.get("sparsity", 1.0),
            batch_tokens=values.get("batch_tokens"),
        )
        values.setdefault("batch_tokens", best.batch_tokens)
        values.setdefault("learning_rate", best.learning_rate)
        found.append(LanguageRun(**values))
    return found


def _number(text: str) -> float:
    """A number that may end in m, b or t: millions, billions, trillions."""
    text = text.strip().lower()
    unit = text[-1:] if text[-1:] in ("m", "b", "t") else ""
    value = float(text.removesuffix(unit)) * _SIZES[unit]
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def ladder_of(folder: Path) -> LossModel:
    """The model of a sweep of small decoders that were trained here.

    Raises:
        ConfigError: see `runs_in` and `fit_ladder`.
    """
    folders = _folders(folder)
    every = [_run_in(each) for each in folders]
    runs = _with_losses(folder, every)
    diverged = [run for run in every if run is not None and run.loss is None]
    used = sum(off < FITTED for off in relative_loss(runs))
    sizes = {run.parameters for run in runs}
    words = (
        f"{used} of {counted(len(folders), 'run')}, of {counted(len(sizes), 'size')}, in {folder}"
    )
    if diverged:
        words += f" ({len(diverged)} diverged)"
    optimizers = {load_config(each / "run.toml").optimizer.name for each in folders}
    return fit_ladder(
        runs,
        published_surface().surface,
        name=words,
        diverged=diverged,
        optimizer=" and ".join(sorted(optimizers)),
    )
