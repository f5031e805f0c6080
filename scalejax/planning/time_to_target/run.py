"""Plan of time to target for one run: every cluster, device count and batch compiled and costed.

Decides which configurations are considered and where steps to target come from; `plan` compares
them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import ResolvedRun, RunConfig, load_config, resolve, with_fields
from scalejax.core import serialization
from scalejax.core.errors import (
    ConfigError,
    nearest_multiples,
    refusal,
    require_above,
    require_at_least,
    unknown_name,
)
from scalejax.core.progress import OnProgress, no_display
from scalejax.data.facts import fitting_facts
from scalejax.hardware import NO_SITE, Cluster, Site, require_own_names
from scalejax.planning.bill import Rates, of_other_dates
from scalejax.planning.convergence import (
    ConvergenceData,
    fit,
    published_data,
    published_names,
    read_data,
    read_run,
)
from scalejax.planning.search.parallel import SearchSpec, fastest_common
from scalejax.planning.search.run import in_words, run_of, searchable
from scalejax.planning.search.space import common_groups
from scalejax.planning.time_to_target.notes import (
    notes_of,
    other_optimizer,
    source_in_words,
    target_in_words,
)
from scalejax.planning.time_to_target.plan import Plan, answered, plan_point
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.predict import predict
from scalejax.xla import ProfileJob
from scalejax.xla.batch import programs_of
from scalejax.xla.closed_form import installed_compiler, shape_of, strategy_of

FARTHEST = 2
"""Largest batch that is considered, over the largest that reached the target: the ratio of the
smallest batch that failed to the largest that did not in Goyal et al. 2017, arXiv 1706.02677,
figure 1 (8192 and 16384), so that no larger factor is safe."""

_TOO_MANY = "more devices than the cluster has"
_NOT_DIVISIBLE = "the batch does not divide over the devices, or exceeds the data set"
_TOO_LARGE = "a batch that failed, or more than twice the largest that reached the target"
_INDIVISIBLE = "no common layout divides the samples: --global-batch"
_NO_ROOM = (
    "no common layout fits the memory; more --devices, a smaller model.compute_dtype, or scalejax "
    "search, which tries pipelines too"
)
_MOST_PLACES = 3
_OF_LAYOUTS = (
    "layouts are the fastest of data, fsdp, expert, and tensor within a node for each row; "
    "scalejax cost tries all, --layouts file keeps the run's"
)
_NO_MEMORY = "does not fit into the memory of a device"


Layouts = Literal["search", "file"]
"""Whether a plan searches layouts, or keeps that of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOption:
    """A cluster to choose from, with its price."""

    cluster: Cluster
    """The hardware."""
    site: Site = NO_SITE
    """Conditions and input of its hosts."""
    price_per_device_hour: float | None = None
    """Price of a device-hour, in any currency; None for the list price in the cluster's file, if
    all clusters of a plan have one."""
    watts_per_device: float | None = None
    """Power of a device with its share of host, network and cooling; None if unknown."""

    def __post_init__(self) -> None:
        _ = self.rates  # refuses an invalid price or power

    @property
    def rates(self) -> Rates:
        """Price and power of a device, as given."""
        return Rates(
            price_per_device_hour=self.price_per_device_hour,
            watts_per_device=self.watts_per_device,
        )


def find_convergence(
    config: RunConfig,
    source: str | None = None,
    *,
    target: float | None = None,
    recipe: str | None = None,
    facts: DatasetFacts | None = None,
) -> ConvergenceData | None:
    """Convergence data for `config`; None if there is none.

    Args:
        config: the run.
        source: a file (see `planning.convergence.read_data`), the folder of a run (`read_run`) or
            of a sweep, or the name of published points; if None, the published points of its
            network, if they are of an equally large data set and counted from scratch.
        target: the requested target; if None, that of the points.
        recipe: see `scalejax.planning.convergence.read_data`.
        facts: counts and shapes of its data; if None, they are read.

    Raises:
        ConfigError: if `source` is none of these, or its points reach other targets.
    """
    examples = fitting_facts(config, facts).train_examples
    if source is None:
        data = published_data(config.model.name)
        if data is None or data.starts_from_checkpoint or data.train_examples != examples:
            return None
        return published_data(config.model.name, target=target)
    if source in published_names():
        return published_data(source, target=target)
    path = Path(source)
    if path.is_dir():
        results = path / "results.parquet"
        if results.exists():
            data = read_data(results, target=target, train_examples=examples, recipe=recipe)
        else:
            data = read_run(path, target=target)
        return replace(data, optimizer=_optimizer_in(path))
    if not path.suffix:
        names = ", ".join(published_names())
        accepted = f"it must be a file of points, the folder of a run, or published ones: {names}"
        raise ConfigError(refusal("convergence", source, accepted))
    return read_data(path, target=target, train_examples=examples, recipe=recipe)


def _optimizer_in(folder: Path) -> str | None:
    """Optimizer of the run, or of all runs of the sweep, in `folder`; None if they differ or it
    is unknown."""
    try:
        document = serialization.load(dict, folder / "sweep.json")
    except ConfigError:  # a run
        document = {"runs": [{}]}
    try:
        found = {
            load_config(folder / "run.toml", fields).optimizer.name for fields in document["runs"]
        }
    except ConfigError:  # written by an older version, for example
        return None
    return found.pop() if len(found) == 1 else None


def plan_run(
    config: RunConfig,
    options: Sequence[ClusterOption],
    device_counts: Sequence[int],
    *,
    global_batches: Sequence[int] = (),
    convergence: ConvergenceData | None = None,
    recipe: str | None = None,
    target: float | None = None,
    deadline_seconds: float | None = None,
    budget: float | None = None,
    framework: Framework = XLA,
    facts: DatasetFacts | None = None,
    layouts: Layouts = "search",
    on_progress: OnProgress = no_display,
) -> Plan:
    """Plan of `config` on `options`: all device counts and batches, and the best of them.

    The compiler runs once for each chip and per-device batch; other sizes of the data axis are
    derived from its program.

    Args:
        config: the run; a `layout.data` in it is replaced.
        options: clusters to choose from, all with a price or none; with none, at list prices if all
            have one.
        device_counts: device counts to choose from.
        global_batches: batches to choose from; if none, the per-device batch of `config` on the
            fewest devices is kept.
        convergence: measured samples to target; if None, those of the run's own epochs are used.
        recipe: which of the recipes of `convergence`; if None, for each batch that of the point
            nearest to it.
        target: the target to name in the plan if `convergence` does not state it.
        deadline_seconds: time within which the target must be reached.
        budget: maximum cost: in the currency of the prices, in dollars of list prices, or in
            device-hours if a cluster has no price.
        framework: the framework that trains it.
        facts: counts and shapes of its data; if None, they are read.
        layouts: "search" takes the fastest of the common layouts for each cluster, device count and
            batch, if the closed form knows the network; "file" keeps that of the run.
        on_progress: called with the number of programs that have been compiled, and of all that
            must be.

    Raises:
        ConfigError: if there is nothing to choose from, only some options have a price, or a
            limit is not above 0.
        ProfileError: if the compiler refuses a step.
    """
    _require_choice(options, deadline_seconds, budget)
    options, currency, of_prices = at_list_prices(options)
    _require_recipe(recipe, convergence)
    left_out: Counter[str] = Counter()
    curve = convergence and fit(
        convergence.points,
        noise_scale=convergence.noise_scale,
        is_plain_sgd=config.optimizer.moments == 0,
    )
    counts = sorted(set(device_counts))
    if not counts:
        raise ConfigError(refusal("devices", [], "at least one number is needed"))
    require_at_least("devices", counts[0], 1)
    facts = fitting_facts(config, facts)
    searched = None
    if layouts == "search":
        searched, _ = searchable(config, options[0].cluster, facts)
    if searched is None:
        planned_runs = _planned_runs(
            config, facts, options, counts, global_batches, convergence, left_out
        )
    else:
        planned_runs = _searched_runs(
            searched, config, facts, options, counts, global_batches, convergence, left_out
        )
    points, predictions = [], []
    jobs = [
        ProfileJob(run=run, cluster=option.cluster, framework=framework)
        for option, run in planned_runs
    ]
    programs = programs_of(jobs, on_progress)
    for (option, run), program in zip(planned_runs, programs, strict=True):
        prediction = predict(program, option.cluster, site=option.site)
        if not prediction.fits:
            left_out[_NO_MEMORY] += 1
            continue
        batch = run.split.global_batch
        point = plan_point(
            prediction,
            curve.steps(batch, recipe=recipe) if curve else float(run.total_steps),
            rates=option.rates,
            is_extrapolated=convergence is not None and batch > convergence.largest_reached,
        )
        points.append(replace(point, strategy=None if searched is None else _layout_of(run)))
        predictions.append(prediction)
    first, *others = (option.cluster for option in options)
    clusters = ", ".join(each.name for each in (first, *others)) if others else first.title
    plan = Plan(
        points=tuple(points),
        title=framework.title_of(f"{config.model.name} on {clusters}"),
        target=target_in_words(convergence, target),
        steps_source=source_in_words(config, convergence, curve),
        has_convergence=convergence is not None,
        is_priced=currency != "device-hours",
        currency=currency,
        deadline_seconds=deadline_seconds,
        budget=budget,
        left_out=tuple(left_out.items()),
        notes=(
            *notes_of(config, predictions, convergence, recipe, points),
            *([] if searched is None else [_OF_LAYOUTS]),
            *of_prices,
        ),
        points_optimizer=other_optimizer(config, convergence),
    )
    return answered(plan)


def at_list_prices(
    options: Sequence[ClusterOption],
) -> tuple[list[ClusterOption], str, list[str]]:
    """Options with their clusters' list prices if none are given, the unit of costs, and notes on
    the source of the prices. The unit is "dollars", "cost" for prices that were given, or
    "device-hours" if a cluster has no price."""
    if all(option.price_per_device_hour is not None for option in options):
        return [*options], "cost", []
    priced, parts, without = [], [], []
    for option in options:
        name, price = option.cluster.name, option.cluster.price
        if price is None:
            without.append(name)
            continue
        dollars = price.dollars_per_device_hour
        priced.append(replace(option, price_per_device_hour=dollars))
        parts.append(f"{name} {dollars:g} ({price.in_words})")
    if without:
        note = f"no list price of {', '.join(without)}, so that costs are device-hours"
        return [*options], "device-hours", [f"{note}: --price P,P,... gives costs"]
    note = f"dollars a device-hour: {', '.join(parts)}; --price P,P,... says others"
    return priced, "dollars", [note, *of_other_dates([each.cluster for each in options])]


def _require_choice(
    options: Sequence[ClusterOption], deadline_seconds: float | None, budget: float | None
) -> None:
    priced = {option.price_per_device_hour is not None for option in options}
    if len(priced) != 1:
        accepted = "each cluster needs one, or none has one" if priced else "one is needed"
        raise ConfigError(refusal("cluster" if not priced else "price", "", accepted))
    require_own_names([option.cluster for option in options])
    for name, limit in (("deadline", deadline_seconds), ("budget", budget)):
        require_above(name, limit, 0)


def _require_recipe(recipe: str | None, convergence: ConvergenceData | None) -> None:
    known = convergence.recipes if convergence is not None else ()
    if recipe is not None and recipe not in known:
        if not any(known):
            raise ConfigError(refusal("recipe", recipe, "the points name none"))
        raise ConfigError(unknown_name("recipe", recipe, known))


def _planned_runs(
    config: RunConfig,
    facts: DatasetFacts,
    options: Sequence[ClusterOption],
    device_counts: Sequence[int],
    global_batches: Sequence[int],
    convergence: ConvergenceData | None,
    left_out: Counter[str],
) -> list[tuple[ClusterOption, ResolvedRun]]:
    """Runs that can be resolved and whose batch is plausible; others are counted in `left_out`."""
    planned_runs = []
    for fields in _batches(config, facts, device_counts, global_batches):
        wanted = with_fields(config, {"layout.data": None, **fields})
        for option in options:
            for count in device_counts:
                if count > option.cluster.most_devices:
                    left_out[_TOO_MANY] += 1
                    continue
                made = partial(resolve, wanted, count, facts)
                if (run := _plausible_run(made, convergence, left_out)) is not None:
                    planned_runs.append((option, run))
    return planned_runs


def _plausible_run(
    made: Callable[[], ResolvedRun], convergence: ConvergenceData | None, left_out: Counter[str]
) -> ResolvedRun | None:
    """The run that `made` returns, or None if it is refused or its batch is not plausible, which is
    counted in `left_out`."""
    try:
        run = made()
    except ConfigError as error:
        left_out[_reason(error, left_out)] += 1
        return None
    if convergence is not None and not _is_plausible(run, convergence):
        left_out[_TOO_LARGE] += 1
        return None
    return run


def _searched_runs(
    config: RunConfig,
    given: RunConfig,
    facts: DatasetFacts,
    options: Sequence[ClusterOption],
    counts: Sequence[int],
    global_batches: Sequence[int],
    convergence: ConvergenceData | None,
    left_out: Counter[str],
) -> list[tuple[ClusterOption, ResolvedRun]]:
    """Runs with the fastest of the common layouts for each option, device count and batch.

    Args:
        config: the run whose layout is replaced.
        given: the run with its original layout, which determines the batch.
        facts: counts and shapes of its data.
        options: clusters.
        counts: numbers of devices, ascending.
        global_batches: batches; if none, each device has as many samples as on the fewest devices,
            or all counts have the same batch if it does not divide over the fewest.
        convergence: points that decide which batches are plausible.
        left_out: counts the runs that are left out, by reason.
    """
    batch = given.batch.global_batch
    if batch is None:
        first = counts[0] if given.layout.data is None else None
        batch = resolve(given, first, facts).split.global_batch
    planned = []
    without: dict[str, list[str]] = {}
    for option in options:
        spec = SearchSpec(
            shape=shape_of(config, option.cluster.chip, facts, compiler=installed_compiler()),
            cluster=option.cluster,
            site=option.site,
            moments=config.optimizer.moments,
        )
        for count in counts:
            grown = batch * count // counts[0] if batch % counts[0] == 0 else batch
            for samples in sorted(set(global_batches)) or [grown]:
                if count > option.cluster.most_devices:
                    left_out[_TOO_MANY] += 1
                elif samples > facts.train_examples:
                    left_out[_NOT_DIVISIBLE] += 1
                elif (fastest := fastest_common(spec, count, samples)) is None:
                    nodes = option.cluster.devices_per_node
                    divides = any(
                        found for _, found in common_groups(spec.shape, count, samples, nodes)
                    )
                    nearest = nearest_multiples(samples, count)
                    at = f"{samples:,} over {count:,} devices"
                    without.setdefault(_NO_ROOM if divides else _INDIVISIBLE, []).append(
                        at if divides else f"{at} (nearest that does: {nearest})"
                    )
                else:
                    made = partial(run_of, config, fastest.strategy, facts)
                    if (run := _plausible_run(made, convergence, left_out)) is not None:
                        planned.append((option, run))
    for reason, places in without.items():
        some = places[:_MOST_PLACES]
        more = f" and {len(places) - len(some)} more" if len(places) > len(some) else ""
        batch_of = "" if reason == _INDIVISIBLE else "batches of "
        left_out[f"{reason}: {batch_of}{', '.join(some)}{more}"] += len(places)
    return planned


def _layout_of(run: ResolvedRun) -> str:
    """Layout, microbatch, recompute and ZeRO stage of a run that a search found."""
    return in_words(strategy_of(run))


def _reason(error: ConfigError, left_out: Counter[str]) -> str:
    """Reason why a run cannot be resolved: for batch and layout one phrase that quotes the first
    refusal, else the error."""
    text = " ".join(str(error).split()).rstrip(".")
    if not text.startswith(("batch.", "layout.", "devices=")):
        return text
    known = (reason for reason in left_out if reason.startswith(_NOT_DIVISIBLE))
    return next(known, f"{_NOT_DIVISIBLE} ({text})")


def _batches(
    config: RunConfig, facts: DatasetFacts, counts: Sequence[int], global_batches: Sequence[int]
) -> list[dict[str, int | None]]:
    """Fields of the run for each batch that is considered."""
    if global_batches:
        return [
            {"batch.global_batch": batch, "batch.per_device_batch": None}
            for batch in sorted(set(global_batches))
        ]
    kept = config.batch.per_device_batch
    if kept is None:
        first = counts[0] if config.layout.data is None else None
        kept = resolve(config, first, facts).split.per_device_batch
    return [{"batch.global_batch": None, "batch.per_device_batch": kept}]


def _is_plausible(run: ResolvedRun, convergence: ConvergenceData) -> bool:
    batch, failed = run.split.global_batch, convergence.smallest_failed
    is_below_failed = failed is None or batch < failed
    return is_below_failed and batch <= FARTHEST * convergence.largest_reached
