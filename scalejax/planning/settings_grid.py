"""Predictions of one decoder at every setting of a grid, for a page that has no simulator.

A setting is a cluster, devices, batch, compute type, rate of the network and framework, and has its
own best layouts; nothing is interpolated. Layouts are searched in closed form and in two rounds,
over some hundreds of the tens of thousands that `search` visits: first data or fsdp over all
devices with each size of the other axes, then all layouts of the best sizes. For a framework with
its own kernels, every entry is what `predict` says. For others the best layouts of each setting are
compiled, as `predict` does, and each program is costed at every rate of the network. Knows neither
pages nor files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.parallelism import Layout
from scalejax.config.run import RunConfig, with_fields
from scalejax.core.errors import (
    ConfigError,
    DoesNotFit,
    ScalejaxError,
    refusal,
    require_above,
    require_at_least,
)
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.core.workers import Pool, Worker
from scalejax.data.facts import fitting_facts
from scalejax.hardware import Chip, Cluster, Site, require_own_names
from scalejax.planning.search import Candidate, deduplicated, pareto
from scalejax.planning.search.costs import StrategyCosts, workspace_bytes
from scalejax.planning.search.parallel import (
    SearchSpec,
    collecting_seldom,
    fitting_candidates,
)
from scalejax.planning.search.run import in_words, program_of, run_of
from scalejax.planning.search.space import Group, groups
from scalejax.simulator.frameworks import framework_named
from scalejax.simulator.memory import memory_verdict
from scalejax.simulator.predict import Prediction, predict
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import Strategy, TransformerShape, memory_use
from scalejax.xla import ProfileJob, has_cuda_compiler, profile_each
from scalejax.xla.closed_form import installed_compiler, shape_of
from scalejax.xla.target import has_tpu_compiler

_FAMILIES = 2
"""Combinations of sizes of the axes other than data and fsdp that the second round visits."""
_MICROBATCHES = 1, 4
"""Samples that a device processes at once in the first round."""
_MOST_TENSOR, _MOST_PIPELINE, _LEAST_TOKENS = 16, 32, 1024
"""Bounds of both rounds: most devices along tensor (a node is a bound too) and along pipeline, and
least tokens of a sample on a device if context is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A cluster of the grid."""

    cluster: Cluster
    """The hardware."""
    site: Site
    """Conditions and input of its hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Axes of a grid; a setting takes one value from each."""

    places: tuple[Place, ...]
    """Clusters, by different names."""
    device_counts: tuple[int, ...]
    """Numbers of devices, rising."""
    global_batches: tuple[int, ...]
    """Samples per update, rising."""
    compute_dtypes: tuple[str, ...]
    """Values of `model.compute_dtype`; layouts are searched with the first."""
    network_multiples: tuple[float, ...]
    """Rates of the network between nodes over those of the cluster; layouts are searched at 1."""
    frameworks: tuple[str, ...]
    """Full names of frameworks that train it; layouts are searched as XLA runs them."""

    def __post_init__(self) -> None:
        for name in ("device_counts", "global_batches"):
            for value in getattr(self, name):
                require_at_least(name, value, 1)
        for multiple in self.network_multiples:
            require_above("network", multiple, 0)
        for name in self.__slots__:
            if not getattr(self, name):
                raise ConfigError(refusal(name, [], "one at least is needed"))
        require_own_names([place.cluster for place in self.places])

    @property
    def cases(self) -> list[tuple[int, int, int]]:
        """Index of the cluster, devices and batch of each case, the largest first."""
        return [
            (index, count, batch)
            for count in reversed(self.device_counts)
            for index in range(len(self.places))
            for batch in reversed(self.global_batches)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a grid."""

    cluster: str
    """Name of the cluster."""
    device_count: int
    """Devices."""
    global_batch: int
    """Samples per update."""
    compute_dtype: str
    """`model.compute_dtype`."""
    network_multiple: float
    """Rate of the network between nodes over that of the cluster."""
    framework: str
    """Name of the framework."""


Origin = Literal["compiled", "kernels", "closed_form"]
"""Origin of a step: the compiled program; the closed form of a framework with its own kernels,
which `predict` uses too; or the closed form of a step that was not compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEntry:
    """A layout at one setting."""

    strategy: Strategy
    """Parallelism, microbatches and recompute."""
    origin: Origin
    """Origin of its step; "closed_form" is not what `predict` says."""
    prediction: Prediction
    """The step, its memory and its band."""
    closed_form_seconds: float | None = None
    """Time of a compiled step in closed form; None for other origins."""
    state_bytes: int
    """Part of the peak memory that holds parameters, optimizer state and the batch."""
    working_bytes: int
    """Part of the peak memory that holds activations, gradients and workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsGrid:
    """Predictions of a run at every setting."""

    axes: Axes
    """What the settings are made of."""
    tokens_per_sample: int
    """Tokens of a sample."""
    entries: dict[Setting, tuple[LayoutEntry, ...]]
    """Layouts of each setting, the fastest that fits first and those that do not fit last; entries
    of origin "closed_form" come after all others."""
    refused: dict[Setting, str]
    """Why a setting has no layout."""
    considered: int
    """Layouts that were costed to choose from."""
    why_not_compiled: Mapping[str, str] = field(default_factory=dict)
    """Why nothing was to be compiled for a cluster, by its name."""

    @property
    def closed_form_errors(self) -> tuple[float, ...]:
        """Relative error of the closed form of each compiled step, (closed - compiled) / compiled,
        rising."""
        return tuple(
            sorted(
                each.closed_form_seconds / each.prediction.step_seconds - 1
                for entries in self.entries.values()
                for each in entries
                if each.closed_form_seconds is not None
            )
        )

    def start(self, global_batch: int | None) -> Setting:
        """The setting to begin with: the first value of each axis, with that batch and the
        cluster's own network if possible, on a middle number of devices on which it fits."""
        axes = self.axes
        first = axes.compute_dtypes[0], axes.frameworks[0], axes.places[0].cluster.name

        def distance(each: Setting) -> tuple[int, ...]:
            own = each.compute_dtype, each.framework, each.cluster
            place = axes.device_counts.index(each.device_count)
            return (
                sum(one != other for one, other in zip(own, first, strict=True)),
                each.network_multiple != 1,
                each.global_batch != global_batch,
                not self.entries[each][0].prediction.fits,
                abs(place - len(axes.device_counts) // 2),
            )

        return min(self.entries, key=distance)


def settings_grid(
    config: RunConfig,
    axes: Axes,
    *,
    facts: DatasetFacts | None = None,
    layouts: int = 8,
    confirm: int = 1,
    processes: int = 1,
    on_progress: OnProgress = no_display,
    on_compiled: OnProgress = no_display,
) -> SettingsGrid:
    """The predictions of `config` at every setting of `axes`.

    Args:
        config: network, data and optimizer; its layout, batch and remat are replaced.
        axes: clusters, devices and other values.
        facts: counts and shapes of its data; if None, they are read.
        layouts: maximum number of layouts of a setting.
        confirm: number of layouts of a setting, the fastest in closed form, that are compiled;
            more only until one fits. With 0 nothing is compiled.
        processes: maximum number of processes.
        on_progress: called with the number of cases (cluster, devices and batch) that are done.
        on_compiled: called with the number of programs that are compiled, and of all that must be.

    Raises:
        ConfigError: if the network is not known in closed form.
        DoesNotFit: if no setting has a layout.
        ScalejaxError: if the system ends a process.
    """
    require_at_least("layouts", layouts, 1)
    require_at_least("confirm", confirm, 0)
    require_at_least("processes", processes, 1)
    tokens = fitting_facts(config, facts).input_shape[0]
    shape_of(config, axes.places[0].cluster.chip, facts)  # refuses networks it does not know
    cases = axes.cases
    costs = _CaseCosts(config, axes, facts, layouts)
    found: dict[int, _CaseAnswer] = {}
    on_progress(Progress(done=0, total=len(cases)))
    with Pool(lambda number: Worker(costs), min(processes, len(cases))) as pool:
        for index, kind, value in pool.work(cases):
            if kind == "failed" and value.return_code is not None:
                raise ScalejaxError(f"A process of the page ended: {value.reason}.") from value
            if kind != "answer":
                raise value
            found[index] = value
            on_progress(Progress(done=len(found), total=len(cases)))
    entries = {key: each for i in sorted(found) for key, each in found[i].entries.items()}
    refused = {key: why for i in sorted(found) for key, why in found[i].refused.items()}
    why = {place.cluster.name: "nothing was to be compiled" for place in axes.places}
    if confirm:
        why = _Compilation(config, axes, facts, on_compiled).replace(entries, refused, confirm)
    grid = SettingsGrid(
        axes=axes,
        tokens_per_sample=tokens,
        entries=entries,
        refused=refused,
        considered=sum(each.considered for each in found.values()),
        why_not_compiled=why,
    )
    if not grid.entries:
        reasons = "; ".join(dict.fromkeys(grid.refused.values()))
        raise DoesNotFit(f"no setting of the page has a layout: {reasons}.")
    return grid


@dataclass(frozen=True, slots=True)
class _CaseAnswer:
    """Layouts of all settings with one cluster, number of devices and batch."""

    entries: dict[Setting, tuple[LayoutEntry, ...]]
    refused: dict[Setting, str]
    considered: int


class _CaseCosts:
    """Answers of cases, in one process; costs of operations are kept between them."""

    def __init__(
        self, config: RunConfig, axes: Axes, facts: DatasetFacts | None, layouts: int
    ) -> None:
        self._config, self._axes, self._facts, self._layouts = config, axes, facts, layouts
        self._costs: dict[int, tuple[TransformerShape, StrategyCosts]] = {}

    def __call__(self, case: tuple[int, int, int]) -> _CaseAnswer:
        index, count, batch = case
        place = self._axes.places[index]
        settings = [
            Setting(
                cluster=place.cluster.name,
                device_count=count,
                global_batch=batch,
                compute_dtype=dtype,
                network_multiple=multiple,
                framework=framework,
            )
            for dtype in self._axes.compute_dtypes
            for framework in self._axes.frameworks
            for multiple in self._axes.network_multiples
        ]
        try:
            place.cluster.require_devices(count)
            strategies, considered = self._chosen(index, count, batch)
        except (ConfigError, DoesNotFit) as error:
            why = " ".join(str(error).split()).rstrip(".")
            return _CaseAnswer({}, dict.fromkeys(settings, why), 0)
        if not strategies:
            why = f"no layout divides {batch} samples and the network over {count} devices"
            return _CaseAnswer({}, dict.fromkeys(settings, why), considered)
        return self._priced(place, settings, strategies, considered)

    def _priced(
        self,
        place: Place,
        settings: Sequence[Setting],
        strategies: Sequence[Strategy],
        considered: int,
    ) -> _CaseAnswer:
        """Every setting with what `predict` says of each strategy."""
        entries: dict[Setting, tuple[LayoutEntry, ...]] = {}
        refused: dict[Setting, str] = {}
        programs: dict[tuple[str, str], list[tuple[Strategy, Program]]] = {}
        whys: dict[tuple[str, str], str] = {}
        for setting in settings:
            cluster = with_network(place.cluster, setting.network_multiple)
            if cluster is None:
                refused[setting] = f"{place.cluster.name} has no network between nodes"
                continue
            key = setting.compute_dtype, setting.framework
            if key not in programs:
                config = with_fields(self._config, {"model.compute_dtype": key[0]})
                programs[key] = []
                for strategy in strategies:
                    try:
                        program, note = program_of(
                            config, self._facts, place.cluster, strategy, framework_named(key[1])
                        )
                    except (ConfigError, DoesNotFit) as error:
                        whys[key] = " ".join(str(error).split()).rstrip(".")
                        continue
                    if note is None:
                        programs[key].append((strategy, program))
                    else:
                        whys[key] = note.removeprefix("as XLA runs it: ").rstrip(".")
            has_kernels = framework_named(key[1]).kernels is not None
            origin: Origin = "kernels" if has_kernels else "closed_form"
            found = [
                _entry(strategy, program, cluster, place.site, origin)
                for strategy, program in programs[key]
            ]
            if found:
                entries[setting] = _in_order(found)
            else:
                refused[setting] = whys[key]
        return _CaseAnswer(entries, refused, considered)

    def _chosen(self, index: int, count: int, batch: int) -> tuple[list[Strategy], int]:
        """Strategies of a case, and the number that was costed; if none fits, the one that needs
        least memory."""
        place, config = self._axes.places[index], self._config
        if index not in self._costs:
            chip = place.cluster.chip
            of_first = with_fields(config, {"model.compute_dtype": self._axes.compute_dtypes[0]})
            shape = shape_of(of_first, chip, self._facts, compiler=installed_compiler())
            self._costs[index] = shape, StrategyCosts(shape, place.cluster, place.site)
        shape, costs = self._costs[index]
        moments = config.optimizer.moments

        spec = SearchSpec(shape=shape, cluster=place.cluster, site=place.site, moments=moments)

        def costed(some: Sequence[Group]) -> list[Candidate]:
            with collecting_seldom():
                return [each for group in some for each in fitting_candidates(costs, spec, group)]

        every = [
            _with_few_chunks(group)
            for group in groups(shape, count, batch)
            if _is_usual(group, shape, place)
        ]
        first = [group for group in every if _is_coarse(group)] or every
        found = costed(first)
        considered = sum(map(len, first))
        found.sort(key=lambda each: (each.step_seconds, each.peak_memory_bytes))
        best = list(dict.fromkeys(_family(each.strategy.layout) for each in found))[:_FAMILIES]
        wanted = set(best)
        second = [g for g in every if _family(g.split.layout) in wanted and not _is_coarse(g)]
        found += costed(second)
        considered += sum(map(len, second))
        found.sort(key=lambda each: (each.step_seconds, each.peak_memory_bytes))
        if not found:
            return _nearest(shape, place.cluster, first, moments), considered
        return _diverse(found, self._layouts), considered


def with_network(cluster: Cluster, multiple: float) -> Cluster | None:
    """`cluster` with the rate of its network between nodes times `multiple`; None if it has no
    network and the multiple is not 1."""
    if multiple == 1:
        return cluster
    if cluster.network is None:
        return None
    rate = multiple * cluster.network.bytes_per_second
    return replace(cluster, network=replace(cluster.network, bytes_per_second=rate))


def _family(layout: Layout) -> tuple[int, int, int, int]:
    return layout.tensor, layout.pipeline, layout.context, layout.expert


def _is_usual(group: Group, shape: TransformerShape, place: Place) -> bool:
    layout = group.split.layout
    return (
        layout.tensor <= min(_MOST_TENSOR, place.cluster.devices_per_node)
        and layout.pipeline <= _MOST_PIPELINE
        and (layout.context == 1 or shape.tokens // layout.context >= _LEAST_TOKENS)
        and (group.sequence_parallel or layout.tensor == 1 or _cannot(group, shape))
    )


def _with_few_chunks(group: Group) -> Group:
    counts = group.chunk_counts
    return replace(group, chunk_counts=tuple(dict.fromkeys((*counts[:2], counts[-1]))))


def _cannot(group: Group, shape: TransformerShape) -> bool:
    """Whether the tokens cannot be sharded between layers, as they do not divide over tensor."""
    layout = group.split.layout
    return shape.tokens % (layout.context * layout.tensor) != 0


def _is_coarse(group: Group) -> bool:
    """Whether a group belongs to the first round."""
    layout = group.split.layout
    return (
        min(layout.data, layout.fsdp) == 1
        and group.split.microbatch in _MICROBATCHES
        and group.recompute in ("none", "selective", "full")
    )


def _diverse(found: Sequence[Candidate], most: int) -> list[Strategy]:
    """At most `most` strategies of the candidates, which are sorted by time: the fastest of each
    family, then those that need less memory than all faster ones, then the rest."""
    ranked = deduplicated(found)
    of_family: dict[object, Candidate] = {}
    for each in ranked:
        of_family.setdefault(_family(each.strategy.layout), each)
    chosen = [*list(of_family.values())[: (most + 1) // 2], *pareto(tuple(found)), *ranked]
    strategies = dict.fromkeys(each.strategy for each in chosen)
    return list(strategies)[:most]


def _nearest(
    shape: TransformerShape, cluster: Cluster, some: Sequence[Group], moments: Any
) -> list[Strategy]:
    """The strategy that needs least memory, if there is any."""
    workspace = workspace_bytes(cluster.chip)
    every: Iterator[Strategy] = (each for group in some for each in group.strategies(moments))
    needed = [
        (memory_verdict(memory_use(shape, each, workspace_bytes=workspace), cluster.chip), each)
        for each in every
    ]
    return [min(needed, key=lambda pair: pair[0].peak_bytes)[1]] if needed else []


class _Compilation:
    """Replaces the best closed forms of settings by compiled steps."""

    def __init__(
        self, config: RunConfig, axes: Axes, facts: DatasetFacts | None, on_progress: OnProgress
    ) -> None:
        self._config, self._axes, self._facts = config, axes, facts
        self._on_progress = on_progress
        self._done = self._total = 0

    def replace(
        self,
        entries: dict[Setting, tuple[LayoutEntry, ...]],
        refused: dict[Setting, str],
        wanted: int,
    ) -> dict[str, str]:
        """Compile the first `wanted` of the closed forms of each setting, and cost them at every
        rate of the network; where none fits, compile further ones, one at a time. Those that the
        compiler refuses are removed. Returns why nothing was to be compiled, by name of each
        cluster for which that is so."""
        places = {place.cluster.name: place for place in self._axes.places}
        families: dict[Setting, list[Setting]] = {}
        whys: dict[str, str] = {}
        for setting in entries:
            framework = framework_named(setting.framework)
            if framework.kernels is not None:
                continue
            if (missing := _missing_compiler(places[setting.cluster].cluster.chip)) is not None:
                whys[setting.cluster] = f"no compiler for {missing} is installed"
                continue
            # The rate of the network changes which program is fastest, not the programs.
            families.setdefault(replace(setting, network_multiple=1), []).append(setting)
        last: dict[Setting, str] = {}
        while families:
            tried = list(
                dict.fromkeys(
                    (key, each.strategy)
                    for key, settings in families.items()
                    for setting in settings
                    for each in [e for e in entries[setting] if e.origin == "closed_form"][:wanted]
                )
            )
            answers = self._programs(tried, places)
            for (key, strategy), answer in zip(tried, answers, strict=True):
                for setting in families[key]:
                    place = places[setting.cluster]
                    old = next(e for e in entries[setting] if e.strategy == strategy)
                    others = [e for e in entries[setting] if e is not old]
                    if isinstance(answer, ScalejaxError):
                        last[setting] = " ".join(str(answer).split()).rstrip(".")
                        entries[setting] = tuple(others)
                        continue
                    cluster = with_network(place.cluster, setting.network_multiple)
                    assert cluster is not None  # noqa: S101  else the setting has no entry
                    new = replace(
                        _entry(strategy, answer, cluster, place.site, "compiled"),
                        closed_form_seconds=old.prediction.step_seconds,
                    )
                    entries[setting] = _in_order([*others, new])
            families = {
                key: settings
                for key, settings in families.items()
                if any(_lacks_one(entries[setting]) for setting in settings)
            }
            wanted = 1
        for setting in [each for each, some in entries.items() if not some]:
            del entries[setting]
            refused[setting] = last[setting]
        return whys

    def _programs(
        self, tried: Sequence[tuple[Setting, Strategy]], places: Mapping[str, Place]
    ) -> list[Program | ScalejaxError]:
        """The compiled program of a strategy at each setting, or why there is none."""
        answers: list[Program | ScalejaxError | None] = []
        jobs: list[ProfileJob] = []
        for setting, strategy in tried:
            config = with_fields(self._config, {"model.compute_dtype": setting.compute_dtype})
            try:
                run = run_of(config, strategy, self._facts)
            except ConfigError as error:  # scalejax cannot train this run
                answers.append(error)
                continue
            answers.append(None)
            framework = framework_named(setting.framework)
            cluster = places[setting.cluster].cluster
            name = f"{setting.device_count} of {cluster.name}"
            jobs.append(ProfileJob(run=run, cluster=cluster, framework=framework, name=name))
        self._total += len(jobs)

        def count(progress: Progress) -> None:
            if progress.done:
                self._done += 1
                self._on_progress(Progress(done=self._done, total=self._total))

        self._on_progress(Progress(done=self._done, total=self._total))
        made = iter(profile_each(jobs, count) if jobs else ())
        return [next(made) if each is None else each for each in answers]


def _lacks_one(entries: Sequence[LayoutEntry]) -> bool:
    """Whether no compiled layout of a setting fits, and there are others to compile."""
    compiled = [each for each in entries if each.origin == "compiled"]
    return len(compiled) < len(entries) and not any(each.prediction.fits for each in compiled)


def _missing_compiler(chip: Chip) -> str | None:
    """The kind of devices whose compiler `chip` needs and this machine lacks; the CPU's compiler
    would predict too long a time for them."""
    if chip.cuda is not None and not has_cuda_compiler():
        return "GPUs"
    return "TPUs" if chip.tpu is not None and not has_tpu_compiler() else None


def _in_order(entries: Sequence[LayoutEntry]) -> tuple[LayoutEntry, ...]:
    """Entries in order: what `predict` says first, and within that the fastest that fits first."""
    return tuple(
        sorted(
            entries,
            key=lambda each: (
                each.origin == "closed_form",
                not each.prediction.fits,
                each.prediction.step_seconds,
            ),
        )
    )


def _entry(
    strategy: Strategy, program: Program, cluster: Cluster, site: Site, origin: Origin
) -> LayoutEntry:
    memory = program.memory
    return LayoutEntry(
        strategy=strategy,
        origin=origin,
        prediction=predict(program, cluster, site=site),
        state_bytes=memory.argument_bytes + memory.output_bytes - memory.alias_bytes,
        working_bytes=memory.temporary_bytes,
    )


def words_of(entry: LayoutEntry) -> str:
    """Description of the layout of an entry on one line."""
    return in_words(entry.strategy)
