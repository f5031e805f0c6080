"""What a whole run costs on each cluster and number of devices: days, dollars, energy, CO2.

Each row uses the best layout that a search finds for it, compiled, and the same global batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.presets import PRESETS
from scalejax.config.run import (
    ResolvedRun,
    RunConfig,
    published_run,
    require_decoder,
    with_fields,
)
from scalejax.core import drawing
from scalejax.core.errors import (
    OUT_OF_MEMORY,
    ConfigError,
    DoesNotFit,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
)
from scalejax.core.metrics import steps_per_epoch
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.serialization import JsonValue, document
from scalejax.core.tabular import Tabular
from scalejax.core.units import format_count, unit_of_axis
from scalejax.data.facts import fitting_facts, resolve
from scalejax.hardware import (
    NO_SITE,
    Cluster,
    Site,
    cluster_names,
    load_cluster,
    replaced_in_words,
    require_own_names,
)
from scalejax.planning.bill import MWH_JOULES, Rates, bill, of_other_dates, updates_for
from scalejax.planning.search import deduplicated, pareto
from scalejax.planning.search.run import (
    found_as_xla,
    in_words,
    prediction_of,
    report_search,
    run_of,
    search_run,
    searchable,
    uneven_notes,
)
from scalejax.planning.time_to_target.language import LIKE_LLAMA, like_llama
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.predict import Prediction, predict
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import Strategy
from scalejax.xla import ProfileJob, has_cuda_compiler, profile_each

_ASSUMED_TOKENS = 2**22
"""Tokens of an update assumed, with a note, for a published network whose batch is not known."""
_MOST = 1e18
"""Upper limit on tokens, epochs or updates: more than any run has."""
_TRIED = 3
"""How many of the fastest strategies are compiled until one fits, before leaner ones are tried."""
_USUALLY_OFF = 0.05
"""Fraction by which the closed form of most layouts is at most below the compiled step
(experiments/closed_form); if it is below by more, the next best may be faster."""
_BEYOND = 1.05
"""Memory, over that of a device, that a program is assumed to need if the compiler runs out of
memory on it, so that the next candidate is leaner by as much."""
_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOption:
    """A cluster to cost, and what an hour of its devices costs."""

    cluster: Cluster
    """The hardware."""
    rates: Rates
    """Price and power of a device."""
    site: Site = NO_SITE
    """Conditions and input of its hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """What the run costs on a number of devices of a cluster; figures are None if unknown."""

    cluster: str
    """Name of the cluster."""
    device_count: int
    """Devices in the run."""
    misfit: str | None = None
    """Why there is no answer; None if there is one."""
    layout: str | None = None
    """Layout, microbatch, recompute and ZeRO stage."""
    global_batch: int | None = None
    """Samples per update."""
    step_seconds: float | None = None
    """Median time of an update."""
    is_compiled: bool = False
    """Whether that is the time of the compiled step, not of its closed form."""
    closed_form_seconds: float | None = None
    """Time of an update in the closed form with which the layout was found."""
    updates: int | None = None
    """Updates in the run."""
    run_seconds: float | None = None
    """Time of all updates, failures and checkpoints included where they are known: the median."""
    p10_run_seconds: float | None = None
    """10th percentile of that time."""
    p90_run_seconds: float | None = None
    """90th percentile of that time."""
    device_hours: float | None = None
    """Hours of one device."""
    price: float | None = None
    """Device-hours times the price of one: dollars, if it is the list price."""
    p10_price: float | None = None
    """Price of the 10th percentile of the time."""
    p90_price: float | None = None
    """Price of the 90th percentile of the time."""
    energy_joules: float | None = None
    """Energy of all devices, with their hosts."""
    co2_kilograms: float | None = None
    """CO2 of that energy."""
    mfu: float | None = None
    """Model FLOP utilisation, 0..1."""
    peak_memory_bytes: int | None = None
    """Peak memory of a device."""
    memory_bytes: int | None = None
    """Memory of a device."""
    run_file: str | None = None
    """The file of this run, if one was written."""

    @property
    def days(self) -> float | None:
        """The time of the run in days."""
        return None if self.run_seconds is None else self.run_seconds / _DAY


@document("cost")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost(Tabular):
    """What a run costs on each cluster and number of devices."""

    title: str
    """Network, framework and clusters."""
    work: str
    """What is trained: tokens or epochs, batch and precision."""
    rows: tuple[CostRow, ...]
    """One row for each cluster and number of devices, in the order requested."""
    soonest: int | None = None
    """Position of the row with the least time; None if nothing fits."""
    cheapest: int | None = None
    """Position of the row with the least price; None if nothing is priced."""
    currency: str = "dollars"
    """Unit of prices: "dollars" for list prices, "cost" for prices that were given."""
    notes: tuple[str, ...] = ()
    """Where the figures come from, and what is not in them."""

    @property
    def near_cheapest(self) -> tuple[CostRow, ...]:
        """The cheapest row of each other cluster, if its price is at most p90 of the cheapest of
        all: which is cheaper may be the other way round."""
        best = None if self.cheapest is None else self.rows[self.cheapest]
        if best is None or best.p90_price is None:
            return ()
        of_others: dict[str, CostRow] = {}
        for row in sorted(self.rows, key=lambda row: row.price or 0.0):
            if row.price is not None and row.cluster != best.cluster:
                of_others.setdefault(row.cluster, row)
        return tuple(row for row in of_others.values() if (row.price or 0.0) <= best.p90_price)

    def to_rows(self) -> list[dict[str, JsonValue]]:
        """The rows, with days and MWh in addition to SI units."""
        rows: list[dict[str, JsonValue]] = []
        for row in self.rows:
            joules = row.energy_joules
            energy = None if joules is None else joules / MWH_JOULES
            rows.append({**asdict(row), "days": row.days, "energy_mwh": energy})
        return rows

    def _repr_html_(self) -> str:
        """What a notebook shows: the rows, with the soonest and the cheapest in bold, and a plot of
        time over devices."""
        unit, size = unit_of_axis(max((row.run_seconds or 0.0 for row in self.rows), default=0.0))
        rows, lines = [], dict[str, list[tuple[float, float]]]()
        for row, full in zip(self.rows, self.to_rows(), strict=True):
            low, high = row.p10_run_seconds, row.p90_run_seconds
            rows.append(
                {
                    "cluster": row.cluster,
                    "device_count": row.device_count,
                    "layout": row.layout or row.misfit,
                    "step_seconds": row.step_seconds,
                    "days": row.days,
                    "p10 to p90 days": None
                    if low is None or high is None
                    else f"{low / _DAY:.3g} to {high / _DAY:.3g}",
                    "device-hours": None if row.device_hours is None else round(row.device_hours),
                    self.currency: None if row.price is None else round(row.price),
                    "MWh": full["energy_mwh"],
                    "mfu": row.mfu,
                    "memory_bytes": row.peak_memory_bytes,
                }
            )
            if row.run_seconds is not None:
                line = lines.setdefault(row.cluster, [])
                line.append((row.device_count, row.run_seconds / size))
        best = [each for each in (self.soonest, self.cheapest) if each is not None]
        return "".join(
            (
                drawing.heading(self.title),
                f"<p>{escape(self.work)}</p>",
                drawing.table(rows, bold=best),
                drawing.curves(lines, "devices", unit),
                drawing.notes(self.notes),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much is trained: one of these, or none for the epochs of the run."""

    tokens: float | None = None
    """Tokens."""
    epochs: float | None = None
    """Passes over the data."""
    steps: int | None = None
    """Updates."""

    def __post_init__(self) -> None:
        given = [name for name in ("tokens", "epochs", "steps") if getattr(self, name) is not None]
        if len(given) > 1:
            accepted = f"{given[1]} says it too; give one of the two"
            raise ConfigError(refusal(given[0], getattr(self, given[0]), accepted))
        for name in given:
            require_above(name, getattr(self, name), 0)
            require_at_most(name, getattr(self, name), _MOST)

    def updates_of_function(self, tokens_per_step: float | None) -> int:
        """Updates that this much training takes with a function of `tokens_per_step`.

        Raises:
            ConfigError: if the number of updates does not follow from what is given.
        """
        require_above("tokens_per_step", tokens_per_step, 0)
        if self.steps is not None and tokens_per_step is None:
            return self.steps
        if self.tokens is not None and tokens_per_step is not None:
            return math.ceil(self.tokens / tokens_per_step)
        raise ConfigError(
            "a function does not say how long it is trained: give steps, or tokens and "
            "tokens_per_step."
        )

    def updates(self, config: RunConfig, facts: DatasetFacts, batch: int) -> int:
        """Updates that this much training takes in a run with that batch.

        Raises:
            ConfigError: if tokens are given for a network that reads none.
        """
        if self.steps is not None:
            return self.steps
        if self.tokens is not None:
            if (size := tokens_of(facts)) is None:
                accepted = "a sample has no tokens here: give --epochs or --steps"
                raise ConfigError(refusal("tokens", f"{self.tokens:g}", accepted))
            if self.tokens < batch * size:
                least = f"one update has {batch * size:,}; 300B are 300,000,000,000"
                raise ConfigError(refusal("tokens", f"{self.tokens:g}", least))
            return updates_for(self.tokens, batch, size)
        if self.epochs is not None:
            return updates_for(self.epochs * facts.train_examples, batch)
        is_filled = config.input.remainder == "pad"
        return config.train.epochs * steps_per_epoch(
            facts.train_examples, batch, is_filled=is_filled
        )


def tokens_of(facts: DatasetFacts) -> int | None:
    """Tokens of a sample; None if the data are not tokens."""
    return facts.input_shape[0] if len(facts.input_shape) == 1 == len(facts.target_shape) else None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layout for a row."""

    words: str
    run: ResolvedRun | None
    """None if the trainer cannot run it, so that only its closed form is known."""
    closed_form: Prediction | None
    """None if no search found it."""
    why: str | None = None
    """Why the trainer cannot run it."""


@dataclass(slots=True)
class _Row:
    """A row whose layout is being chosen."""

    option: CostOption
    device_count: int
    candidates: list[_Candidate]
    """The best first."""
    misfit: str | None = None
    prediction: Prediction | None = None
    chosen: _Candidate | None = None
    is_compiled: bool = False
    refusals: list[str] = field(default_factory=list)
    """Why candidates do not fit, or do not compile."""
    leaner: Iterator[_Candidate] = field(default_factory=lambda: iter(()))
    """Candidates that each need less memory in closed form than all before, the fastest first."""
    excess: float = 1.0
    """Largest ratio of compiled to closed-form memory among candidates that do not fit."""
    notes: list[str] = field(default_factory=list)
    """Why the chosen candidate was not compiled."""

    def refuse(self, candidate: _Candidate, compiled: Prediction) -> None:
        """Note that a candidate does not fit, and by how much."""
        ratio = compiled.peak_memory_bytes / compiled.memory_bytes
        self.refusals.append(f"{candidate.words} needs {ratio:.3g}x the memory")
        closed = candidate.closed_form
        if closed is not None:
            excess = compiled.peak_memory_bytes / closed.peak_memory_bytes
            self.excess = max(self.excess, excess)

    def refuse_compiled(self, candidate: _Candidate, error: Exception) -> None:
        """Note that the compiler runs out of memory on a candidate, whose need stays unknown."""
        self.refusals.append(f"{candidate.words} does not compile: {_in_one_line(error)}")
        closed = candidate.closed_form
        if closed is not None:
            least = _BEYOND * closed.memory_bytes / closed.peak_memory_bytes
            self.excess = max(self.excess, least)

    def take_leaner(self) -> None:
        """Add the fastest leaner candidate that should fit once compiled, judging by how far
        earlier closed forms were off; if none should, the one that needs least memory."""
        found = None
        for found in self.leaner:
            closed = found.closed_form
            if closed is None or closed.peak_memory_bytes * self.excess <= closed.memory_bytes:
                break
        if found is not None:
            self.candidates.append(found)

    @property
    def place(self) -> str:
        """The row in words."""
        return f"{self.device_count} devices of {self.option.cluster.name}"

    def choose(
        self, candidate: _Candidate, compiled: Prediction | None, why: str | None = None
    ) -> None:
        """Take a candidate if it is the first, or faster as compiled than the chosen one; `why`
        says why it was not compiled."""
        closed = candidate.closed_form
        if compiled is None and closed is not None and not closed.fits:
            self.refuse(candidate, closed)
            return
        taken = self.prediction if self.is_compiled else None
        if self.chosen is None or (
            compiled is not None and (taken is None or compiled.step_seconds < taken.step_seconds)
        ):
            self.chosen, self.prediction = candidate, compiled or candidate.closed_form
            self.is_compiled = compiled is not None
            self.notes = [] if why is None else [f"{self.place}, not compiled: {why}"]

    def has_rival(self, place: int) -> bool:
        """Whether the closed form of the candidate at `place` is faster than the compiled step of
        the chosen one by more than closed forms are usually off."""
        if not self.is_compiled or self.prediction is None or place >= len(self.candidates):
            return False
        rival = self.candidates[place]
        closed = rival.closed_form
        return (
            place < _TRIED
            and rival.run is not None
            and closed is not None
            and closed.step_seconds < (1 - _USUALLY_OFF) * self.prediction.step_seconds
        )


def published_decoder(
    name: str, overrides: Mapping[str, JsonValue] | None = None
) -> tuple[RunConfig, list[str]]:
    """The run of a published decoder at its published batch, and notes on the batch's source.

    Raises:
        ConfigError: if there is no such decoder, or as in `published_run`.
    """
    require_decoder(name)
    preset, fields = PRESETS[name], dict(overrides or {})
    notes = []
    if "batch.global_batch" not in fields and preset.published_batch is None:
        fields["batch.global_batch"] = max(
            1, round(_ASSUMED_TOKENS / (preset.pretraining_tokens or 1))
        )
        notes.append(
            f"batch ASSUMED: none is recorded for {name}, so about {_ASSUMED_TOKENS / 1e6:.2g} M "
            "tokens; --global-batch sets another"
        )
    if preset.pretraining is not None:
        notes.append(f"as published, but for what is given: {preset.pretraining.source}")
    return published_run(name, fields), notes


def named_decoder(
    name: str, overrides: Mapping[str, JsonValue] | None = None
) -> tuple[RunConfig, list[str]]:
    """The run of a published decoder, or of llama-like:N=SIZE, and notes on what was assumed.

    Raises:
        ConfigError: as in `published_decoder` and `like_llama`.
    """
    if name.startswith(LIKE_LLAMA):
        return like_llama(name, overrides), []
    require_decoder(name, " A run file ends in .toml, and Python's is MODULE:NAME.")
    return published_decoder(name, overrides)


def published_tokens(
    name: str, *, tokens: float | None = None, epochs: float | None = None
) -> float:
    """Tokens to train a named decoder on: those given, or those published.

    Raises:
        ConfigError: if epochs are given, as there are no data to pass over, or if no tokens are
            given and none are known.
    """
    if epochs is not None:
        accepted = f"{name} has no data of its own to pass over: give --tokens T, such as 300B"
        raise ConfigError(refusal("epochs", epochs, accepted))
    if tokens is not None:
        return tokens
    found = PRESETS[name].pretraining if name in PRESETS else None
    if found is None or found.total_tokens is None:
        raise ConfigError(f"--tokens T is missing, such as 300B: none are recorded for {name}.")
    return float(found.total_tokens)


def cost_run(
    config: RunConfig,
    options: Sequence[CostOption],
    device_counts: Sequence[int],
    work: Work,
    *,
    name: str | None = None,
    framework: Framework = XLA,
    facts: DatasetFacts | None = None,
    confirm: int = 1,
    processes: int = 1,
    notes: Sequence[str] = (),
    on_progress: OnProgress = no_display,
    on_compiled: OnProgress = no_display,
) -> tuple[RunCost, list[RunConfig | None]]:
    """What a run costs on each cluster and number of devices, and the run of each row.

    The global batch is the same in all rows: that of the run, or what it is on the fewest devices.
    The run of a row has the row's layout and, if it reads random tokens, as many as it trains on.

    Args:
        config: network, data, batch and optimizer; if the closed form knows the network, its
            layout, microbatches and remat are replaced by those found, else they are kept.
        options: clusters, each with its rates.
        device_counts: numbers of devices.
        work: how much is trained.
        name: what the network is called; by default as in `config`.
        framework: the framework that trains it.
        facts: counts and shapes of its data; if None, they are read.
        confirm: number of the best layouts of each search that are compiled; the fastest is taken.
            0 for the closed form of the best.
        processes: see `search`.
        notes: further notes.
        on_progress: called as the search for a row begins, and as it proceeds.
        on_compiled: called for each compilation.

    Raises:
        ConfigError: if there is nothing to cost, or the work does not suit the network.
    """
    counts = list(dict.fromkeys(device_counts))
    if not counts or not options:
        raise ConfigError(refusal("devices", "", "at least one number and one cluster are needed"))
    require_at_least("devices", min(counts), 1)
    require_at_least("confirm", confirm, 0)
    require_own_names([option.cluster for option in options])
    if config.batch.ramp_epochs:
        accepted = "cost takes one batch: leave it out, or ask predict for the run"
        raise ConfigError(refusal("batch.ramp_epochs", config.batch.ramp_epochs, accepted))
    facts = fitting_facts(config, facts)
    batch = config.batch.global_batch or resolve(config, min(counts), facts).split.global_batch
    kept = with_fields(
        config,
        {"layout.data": None, "batch.global_batch": batch, "batch.per_device_batch": None},
    )
    updates = work.updates(config, facts, batch)
    searched, why = searchable(kept, options[0].cluster, facts)
    rows = [_Row(option, count, []) for option in options for count in counts]
    for row in rows:

        def progressed(progress: Progress, part: str = row.place) -> None:
            on_progress(replace(progress, part=part))

        if searched is None:
            _lay_out(row, kept, facts)
        else:
            most = max(_TRIED, confirm)
            _search(row, searched, facts, framework, processes, most, progressed)
    _compile(rows, framework, confirm if searched is not None else 1, on_compiled)
    where = _clusters(options) if len(options) > 1 else options[0].cluster.title
    report = _report(
        rows,
        updates,
        options,
        title=framework.title_of(f"{name or config.model.name} on {where}"),
        work=_in_words(kept, facts, batch, updates),
        notes=(
            *notes,
            *([] if why is None else [f"layouts are not searched, the run's is kept: {why}"]),
            *(found_as_xla(framework) if searched is not None else ()),
            *(uneven_notes(batch, counts) if searched is not None else ()),
        ),
    )
    return report, [_run_of(row, updates, batch) for row in rows]


def cost_programs(
    programs: Sequence[Program], options: Sequence[CostOption], updates: int
) -> RunCost:
    """What `updates` of a compiled step cost, such as that of a function, which brings its own
    layout and batch.

    Args:
        programs: the step on each cluster and number of devices.
        options: the cluster of each, with its rates.
        updates: updates in the run.
    """
    rows = []
    for program, option in zip(programs, options, strict=True):
        row = _Row(option, program.device_count, [])
        prediction = predict(program, option.cluster, site=option.site)
        layout = " x ".join(f"{axis}={size}" for axis, size in program.mesh_axes)
        candidate = _Candidate(layout, None, None)
        if prediction.fits:
            row.choose(candidate, prediction)
        else:
            row.refuse(candidate, prediction)
            row.misfit = _of_refusals(row.refusals)
        rows.append(row)
    each = list(dict.fromkeys(option.cluster.name for option in options))
    batch = programs[0].global_batch
    return _report(
        rows,
        updates,
        [next(o for o in options if o.cluster.name == name) for name in each],
        title=f"{programs[0].name} on {_clusters(options)}",
        work=f"{updates:,} updates" + ("" if batch is None else f" of {batch:,} samples"),
        notes=[],
    )


def _clusters(options: Sequence[CostOption]) -> str:
    """Names of the clusters, and what was replaced in them."""
    names = list(dict.fromkeys(option.cluster.name for option in options))
    return ", ".join([*names, *filter(None, [replaced_in_words(options[0].cluster)])])


def _report(
    rows: Sequence[_Row],
    updates: int,
    options: Sequence[CostOption],
    *,
    title: str,
    work: str,
    notes: Sequence[str],
) -> RunCost:
    """The rows with their figures, and the best of them."""
    done = [_costed(row, updates) for row in rows]
    priced = [place for place, row in enumerate(done) if row.price is not None]
    timed = [place for place, row in enumerate(done) if row.run_seconds is not None]
    return RunCost(
        title=title,
        work=work,
        rows=tuple(done),
        soonest=min(timed, key=lambda place: done[place].run_seconds or 0.0, default=None),
        cheapest=min(priced, key=lambda place: done[place].price or 0.0, default=None),
        currency="dollars" if all(map(_is_at_list_price, options)) else "cost",
        notes=(
            *notes,
            *_of_rates(options),
            *dict.fromkeys(
                note
                for row in rows
                for note in (
                    *row.notes,
                    *(row.prediction.notes if row.prediction is not None else ()),
                )
                if not note.startswith("MFU ")
            ),
            "start-up and evaluations are not counted",
        ),
    )


def _is_at_list_price(option: CostOption) -> bool:
    """Whether its price is that of its file, or unknown."""
    return option.rates.price_per_device_hour is None or _has_list_price(option)


def _has_list_price(option: CostOption) -> bool:
    """Whether its price is known, and is that of its file."""
    listed, price = option.cluster.price, option.rates.price_per_device_hour
    return listed is not None and price == listed.dollars_per_device_hour


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _search(
    row: _Row,
    config: RunConfig,
    facts: DatasetFacts,
    framework: Framework,
    processes: int,
    most: int,
    on_progress: OnProgress,
) -> None:
    """Find the best layouts of a row, at most `most`, or why there are none."""
    cluster, site = row.option.cluster, row.option.site
    try:
        found = search_run(
            config,
            cluster,
            (row.device_count,),
            site=site,
            processes=processes,
            facts=facts,
            on_progress=on_progress,
        )
    except (ConfigError, DoesNotFit) as error:
        row.misfit = _in_one_line(error)
        return
    if not found.ranked:
        row.misfit = "no layout divides network and samples evenly"
        if found.nearest is not None:
            strategy, ratio = found.nearest
            row.misfit = (
                f"nothing fits: the nearest needs {ratio:.2g}x the memory, {in_words(strategy)}"
            )
        return
    report = report_search(
        config, cluster, found, site=site, framework=framework, facts=facts, top=most
    )

    def candidate(strategy: Strategy, prediction: Prediction) -> _Candidate:
        run, why = None, None
        try:
            run = run_of(config, strategy, facts)
        except ConfigError as error:  # scalejax trains no such run
            why = _in_one_line(error)
        return _Candidate(in_words(strategy), run, prediction, why)

    row.candidates += [candidate(each.strategy, each.prediction) for each in report.ranked]
    least = min(each.peak_memory_bytes for each in deduplicated(found.ranked)[:most])
    row.leaner = (
        candidate(
            each.strategy,
            prediction_of(config, facts, cluster, site, each.strategy, framework)[0],
        )
        for each in pareto(found.ranked)
        if each.peak_memory_bytes < least
    )


def _lay_out(row: _Row, config: RunConfig, facts: DatasetFacts) -> None:
    """Take the layout of the run for a row, or say why it has none there."""
    try:
        row.option.cluster.require_devices(row.device_count)
        run = resolve(config, row.device_count, facts)
    except (ConfigError, DoesNotFit) as error:
        row.misfit = _in_one_line(error)
        return
    row.candidates.append(_Candidate(str(run.layout), run, None))


def _compile(
    rows: Sequence[_Row], framework: Framework, confirm: int, on_compiled: OnProgress
) -> None:
    """Choose a candidate for each row: the fastest, as compiled, of the first `confirm` and of
    those that might be faster; if none fits, the next that does, then leaner ones. A candidate
    stays in closed form if nothing is to be compiled, or if the compiler refuses it for a reason
    other than memory."""
    begin, end = 0, confirm
    while tried := [row for row in rows if _is_open(row) or row.has_rival(begin)]:
        jobs: list[ProfileJob] = []
        compiled: list[tuple[_Row, _Candidate]] = []
        for row in tried:
            cluster = row.option.cluster
            is_here = cluster.chip.cuda is None or has_cuda_compiler()
            for each in row.candidates[begin : max(end, begin + 1)]:
                if each.run is None or (each.closed_form is not None and not (confirm and is_here)):
                    no_compiler = None if is_here else "no compiler for GPUs is installed"
                    row.choose(each, None, (each.why or no_compiler) if confirm else None)
                    continue
                jobs.append(
                    ProfileJob(run=each.run, cluster=cluster, framework=framework, name=row.place)
                )
                compiled.append((row, each))
        answers = profile_each(jobs, on_compiled) if jobs else []
        for (row, each), answer in zip(compiled, answers, strict=True):
            if isinstance(answer, Program):
                prediction = predict(answer, row.option.cluster, site=row.option.site)
                if prediction.fits:
                    row.choose(each, prediction)
                else:
                    row.refuse(each, prediction)
            elif OUT_OF_MEMORY in str(answer):
                row.refuse_compiled(each, answer)
            elif each.closed_form is not None:
                row.choose(each, None, _in_one_line(answer))
            else:
                row.refusals.append(_in_one_line(answer))
        begin = max(end, begin + 1)
        end = begin + 1
        for row in filter(_is_open, rows):
            if begin >= len(row.candidates):
                row.take_leaner()
            if begin >= len(row.candidates):
                row.misfit = _of_refusals(row.refusals)


def _of_refusals(refusals: Sequence[str]) -> str:
    """Why no candidate is taken: the first that does not fit and, if several, the last, leanest."""
    first, *rest = refusals
    if not rest:
        return f"nothing fits: {first}"
    return (
        f"none of the {len(refusals)} layouts that were tried fits: the fastest, {first}; "
        f"the last, {rest[-1]}"
    )


def _is_open(row: _Row) -> bool:
    return row.chosen is None and row.misfit is None


def _costed(row: _Row, updates: int) -> CostRow:
    """The row with its figures."""
    cluster, prediction, chosen = row.option.cluster, row.prediction, row.chosen
    if prediction is None or chosen is None:
        return CostRow(
            cluster=cluster.name, device_count=row.device_count, misfit=row.misfit or "unknown"
        )
    seconds = updates * prediction.step_seconds / (prediction.goodput or 1.0)
    low, high = (
        None if step is None else seconds * step / prediction.step_seconds
        for step in (prediction.p10_step_seconds, prediction.p90_step_seconds)
    )
    rates = row.option.rates
    found = bill(seconds, row.device_count, rates)
    lowest, highest = (
        None if each is None else bill(each, row.device_count, rates).price for each in (low, high)
    )
    closed = chosen.closed_form
    return CostRow(
        cluster=cluster.name,
        device_count=row.device_count,
        layout=chosen.words,
        global_batch=prediction.global_batch,
        step_seconds=prediction.step_seconds,
        is_compiled=prediction.backend != "closed_form",
        closed_form_seconds=None if closed is None else closed.step_seconds,
        updates=updates,
        run_seconds=seconds,
        p10_run_seconds=low,
        p90_run_seconds=high,
        device_hours=found.device_hours,
        price=found.price,
        p10_price=lowest,
        p90_price=highest,
        energy_joules=found.energy_joules,
        co2_kilograms=found.co2_kilograms,
        mfu=prediction.mfu,
        peak_memory_bytes=prediction.peak_memory_bytes,
        memory_bytes=prediction.memory_bytes,
    )


def _run_of(row: _Row, updates: int, batch: int) -> RunConfig | None:
    """The run of a row; random tokens, if it reads them, are as many as it trains on, in one
    epoch."""
    if row.prediction is None or row.chosen is None or row.chosen.run is None:
        return None
    config = row.chosen.run.config
    if config.data.name != "synthetic_tokens":
        return config
    return with_fields(config, {"data.train_examples": updates * batch, "train.epochs": 1})


def _in_words(config: RunConfig, facts: DatasetFacts, batch: int, updates: int) -> str:
    """What is trained."""
    samples = f"{updates:,} updates of {batch:,} samples"
    dtype = config.model.compute_dtype
    if (size := tokens_of(facts)) is None:
        return f"{samples} in {dtype}"
    total = format_count(updates * batch * size)
    return f"{total} tokens: {samples} of {size:,} tokens, in {dtype}"


def _of_rates(options: Sequence[CostOption]) -> Iterator[str]:
    """Notes on the sources of prices and power, and on what is unknown."""
    for option in options:
        cluster, rates = option.cluster, option.rates
        price, power = cluster.price, cluster.power
        if rates.price_per_device_hour is None:
            yield f"no price of {cluster.name}: give --price"
        elif price is not None and _is_at_list_price(option):
            yield (
                f"{cluster.name}: {price.dollars_per_device_hour:g} dollars a device-hour, "
                f"{price.in_words}{_source(cluster, 'price.dollars_per_device_hour')}"
            )
        if rates.watts_per_device is None:
            yield f"no watts of {cluster.name}: give --watts"
            continue
        if power is None or rates.watts_per_device != power.watts:
            continue
        field = "max_watts" if power.training_watts is None else "training_watts"
        words = {"max_watts": "the most it is rated for", "training_watts": "in training"}[field]
        source = _source(cluster, f"power.{field}")
        yield (
            f"{cluster.name}: {power.watts:,.4g} W a device with its share of the node, "
            f"{words}{source}"
        )
        if rates.pue is None:
            yield f"no PUE of {cluster.name}: energy is of the machines alone; --pue F adds it"
    yield from of_other_dates([each.cluster for each in options if _has_list_price(each)])
    known = [option for option in options if option.rates.watts_per_device is not None]
    if known and all(option.rates.grid_grams_per_kwh is None for option in known):
        yield "no CO2: give --grid-intensity, grams of CO2 for a kWh, such as 400"
    for grams in {each.rates.grid_grams_per_kwh for each in known} - {None}:
        yield f"CO2 at {grams:g} g for a kWh, as --grid-intensity says"


def _source(cluster: Cluster, field: str) -> str:
    """Source of a figure of a cluster, in parentheses: for a cluster in the catalogue, whose
    sources are long, the command that shows them."""
    source = cluster.sources.get(field)
    if cluster.name in cluster_names() and source == load_cluster(cluster.name).sources.get(field):
        return f" (source: scalejax hardware {cluster.name})"
    return f" ({source})" if source else " (as its file says)"
