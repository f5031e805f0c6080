"""The verbs of `from scalejax import ...`: what the commands do, as functions.

Where a command takes a flag, these accept the name of a cluster or framework, the path of a run
file, or a step of any kind. JAX starts only if something is compiled in this process.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import ResolvedRun, RunConfig, load_config, with_fields
from scalejax.core.errors import ConfigError, DoesNotFit, refusal, require_at_least
from scalejax.core.progress import compiling, compiling_programs, costing, in_cell, searching
from scalejax.core.serialization import JsonValue
from scalejax.data.facts import fitting_facts, resolve
from scalejax.hardware import NO_SITE, Cluster, Site, load_cluster_and_site
from scalejax.planning.bill import rates_of
from scalejax.planning.explain_run import CASES, explain_run
from scalejax.planning.run_cost import (
    CostOption,
    RunCost,
    Work,
    cost_programs,
    cost_run,
    named_decoder,
    published_tokens,
)
from scalejax.planning.scaling_study import predict_run, study
from scalejax.planning.search import Objective
from scalejax.planning.search.run import (
    SEARCHED_FIELDS,
    SearchReport,
    confirm_search,
    report_search,
    search_run,
)
from scalejax.planning.time_to_target.plan import Plan
from scalejax.planning.time_to_target.run import (
    ClusterOption,
    Layouts,
    find_convergence,
    plan_run,
)
from scalejax.simulator.comparison import Bounds, Comparison
from scalejax.simulator.comparison import compare as compare_programs
from scalejax.simulator.explain import Explanation
from scalejax.simulator.explain import explain as explain_program
from scalejax.simulator.frameworks import XLA, Framework, framework_named
from scalejax.simulator.predict import (
    Prediction,
    Scaling,
    ScalingPrediction,
    scaling_prediction,
)
from scalejax.simulator.predict import predict as predict_program
from scalejax.simulator.program import Program
from scalejax.simulator.timeline.trace import StepTrace, trace_step
from scalejax.training.record import facts_of
from scalejax.xla import ProfileJob, profile, profile_calls, profile_many
from scalejax.xla.functions import scaled

if TYPE_CHECKING:
    from scalejax.training.profiler import TraceSchedule
    from scalejax.training.record import RunRecord
    from scalejax.training.reporter import Reporter
    from scalejax.training.step import Step

Run = RunConfig | Path | str
"""A config, or the path of its run file."""


@overload
def predict(
    subject: "Run | Callable[..., Any] | tuple[Callable[..., Any], Sequence[Any]]",
    cluster: Cluster | Path | str,
    devices: Sequence[int],
    *,
    arguments: Sequence[Any] = (),
    batch_argnums: int | Sequence[int] | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    scaling: Scaling | None = None,
) -> ScalingPrediction: ...


@overload
def predict(
    subject: "Run | Program | Step | Callable[..., Any] | tuple[Callable[..., Any], Sequence[Any]]",
    cluster: Cluster | Path | str,
    devices: int | None = None,
    *,
    arguments: Sequence[Any] = (),
    batch_argnums: int | Sequence[int] | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    scaling: Scaling | None = None,
) -> Prediction: ...


def predict(
    subject: "Run | Program | Step | Callable[..., Any] | tuple[Callable[..., Any], Sequence[Any]]",
    cluster: Cluster | Path | str,
    devices: int | Sequence[int] | None = None,
    *,
    arguments: Sequence[Any] = (),
    batch_argnums: int | Sequence[int] | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    scaling: Scaling | None = None,
) -> Prediction | ScalingPrediction:
    """Predicted time, throughput, efficiency and memory of a step on a cluster you do not have.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import predict
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> prediction = predict(path, "dgx-h100", 2)
        >>> prediction.fits, prediction.global_batch
        (True, 32)

    Args:
        subject: a run (its config or run file), a compiled `Program`, a `Step` from `build_step`,
            or any function, jitted or not, including one typed into a notebook, alone or as
            (function, arguments).
        cluster: a cluster, its name in the catalogue, or the path of its file.
        devices: number of devices, or several; a `Program` and a `Step` have their own.
        arguments: for a function given without them: arrays or `jax.ShapeDtypeStruct`s of the
            whole step over all devices. If none has a `NamedSharding`, the function is data
            parallel.
        batch_argnums: positions of the arguments that hold samples; if None, the last.
        site: conditions and input of the cluster; if None, those in its file.
        framework: for a run: the framework that trains it, or its name.
        scaling: what stays fixed as devices are added: the batch per device (weak), or the global
            batch (strong). Runs default to weak; functions default to strong, since their arguments
            hold the whole batch. With "weak" they hold the batch of the fewest devices.

    Returns: a `ScalingPrediction` for several numbers of devices, else a `Prediction`.

    Raises:
        ConfigError: if the run, the arguments or a name is refused.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses the step.
    """
    where, at = _placed(cluster, site)
    subject, arguments = _unpacked(subject, arguments)
    if isinstance(subject, RunConfig | Path | str):
        _refuse_arguments(arguments, batch_argnums)
        config, facts = _read(subject)
        if config.batch.ramp_epochs:
            accepted = "its batch grows: scalejax.planning.scaling_study.ramp_study predicts that"
            raise ConfigError(refusal("batch.ramp_epochs", config.batch.ramp_epochs, accepted))
        counts = _counts(devices)
        with in_cell(compiling(len(counts))) as on_progress:
            found = study(
                config,
                where,
                counts,
                scaling or "weak",
                site=at,
                facts=facts,
                framework=_framework(framework),
                on_progress=on_progress,
            )
        return found if isinstance(devices, Sequence) else found.predictions[0]
    if isinstance(subject, Program) or _run_of(subject) is not None:
        if scaling is not None:
            accepted = "a step that is compiled or built has one number of devices; leave it out"
            raise ConfigError(refusal("scaling", scaling, accepted))
        program = _program(subject, arguments, batch_argnums, where, devices, framework)
        if (run := _run_of(subject)) is not None:
            return predict_run(run, program, where, site=at, epochs=run.config.train.epochs)
        return predict_program(program, where, site=at)
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        if scaling is not None:
            accepted = "it is of several numbers of devices; leave it out"
            raise ConfigError(refusal("scaling", scaling, accepted))
        program = _program(subject, arguments, batch_argnums, where, devices, framework)
        return predict_program(program, where, site=at)
    _refuse_framework(framework)
    function = _function(subject)
    counts = sorted(_counts(devices))
    of_each = {count: arguments for count in counts}
    if scaling == "weak":
        for count in counts[1:]:
            of_each[count] = scaled(arguments, Fraction(count, counts[0]), batch_argnums)
    cases = [(of_each[count], where, count) for count in counts]
    programs = _programs(function, cases, batch_argnums)
    return scaling_prediction(
        [predict_program(each, where, site=at) for each in programs],
        scaling or "strong",
        f"{programs[0].name} on {where.title}",
    )


def train(
    run: Run,
    folder: Path | str,
    *,
    device_count: int | None = None,
    resume: bool = False,
    start_over: bool = False,
    reporter: "Reporter | None" = None,
    traces: "TraceSchedule | None" = None,
    predicts: bool = True,
    startup_seconds: float = 0.0,
    leave: Callable[[int], None] | None = None,
) -> "RunRecord":
    """Train a run on the devices of this machine, and return its record.

    Example:
        >>> from importlib.resources import files
        >>> from tempfile import mkdtemp
        >>> from scalejax import load_config, train
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> config = load_config(path, {"train.epochs": 1, "batch.global_batch": 500})
        >>> record = train(config, mkdtemp(), device_count=1, predicts=False)
        >>> record.status, record.training[-1].loss < record.training[0].loss
        ('completed', True)

    Args:
        run: a config, or the path of its run file.
        folder: where its files go; it may already hold a run only with `resume`.
        device_count: devices to use; if None, as many as the config's layout asks for, or all.
        resume: continue from the newest checkpoint of the run in `folder` that verifies.
        start_over: with `resume`, begin at step 0 if steps are recorded but no checkpoint
            verifies, instead of refusing.
        reporter: where progress is reported; if None, standard error.
        traces: which steps to record with the profiler; None for none.
        predicts: write a prediction first. This measures the devices for a second or two; on a CPU
            for about ten, if the run takes longer.
        startup_seconds: see `scalejax.training.train.train`.
        leave: see `scalejax.training.train.train`.

    Raises:
        ConfigError: if the config cannot work here, or the folder holds another run or cannot
            be written.
        DoesNotFit: if the layout needs more devices than there are.
        Damaged: if steps are recorded but no checkpoint verifies.
        CheckpointMismatch: if the checkpoint to resume from holds another state.
        Unavailable: if that checkpoint, or its manifest, cannot be read at present.
        Interrupted: on SIGINT or SIGTERM, after a checkpoint or before training.
    """
    from scalejax.measure.own_prediction import predict_run as predict_itself
    from scalejax.training.train import train as train_run

    return train_run(
        _config(run),
        Path(folder),
        device_count=device_count,
        resume=resume,
        start_over=start_over,
        reporter=reporter,
        traces=traces,
        on_compiled=predict_itself if predicts else None,
        startup_seconds=startup_seconds,
        leave=leave,
    )


def explain(
    subject: "Run | Program | Step | Callable[..., Any] | tuple[Callable[..., Any], Sequence[Any]]",
    cluster: Cluster | Path | str,
    devices: int | None = None,
    *,
    arguments: Sequence[Any] = (),
    batch_argnums: int | Sequence[int] | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
) -> Explanation:
    """Breakdown of a predicted step, its costliest operations, and what would shorten it.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import explain
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> explanation = explain(path, "dgx-h100", 2)
        >>> [term.name for term in explanation.terms][:2]
        ['compute at peak', 'attainable rates']

    Args:
        subject: as in `predict`; the effect of twice the batch is given for runs only.
        cluster: a cluster, its name in the catalogue, or the path of its file.
        devices: number of devices of a run or a function.
        arguments: as in `predict`.
        batch_argnums: as in `predict`.
        site: conditions and input of the cluster; if None, those in its file.
        framework: for a run: the framework that trains it, or its name.

    Raises:
        ConfigError: if the run, the arguments or a name is refused.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses the step.
    """
    where, at = _placed(cluster, site)
    if not isinstance(subject, RunConfig | Path | str):
        program = _program(subject, arguments, batch_argnums, where, devices, framework)
        return explain_program(program, where, site=at)
    _refuse_arguments(arguments, batch_argnums)
    count = _one_count(devices)
    config, facts = _read(subject)
    by = _framework(framework)
    with in_cell(compiling(CASES)) as on_progress:
        found = explain_run(
            config, where, count, site=at, facts=facts, framework=by, on_progress=on_progress
        )
    return found.explanation


def timeline(
    subject: "Run | Program | Step | Callable[..., Any] | tuple[Callable[..., Any], Sequence[Any]]",
    cluster: Cluster | Path | str,
    devices: int | None = None,
    *,
    arguments: Sequence[Any] = (),
    batch_argnums: int | Sequence[int] | None = None,
    framework: Framework | str = "xla",
) -> StepTrace:
    """One predicted step on one device, operation by operation: what runs when, and what waits.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import timeline
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> step = timeline(path, "dgx-h100", 2)
        >>> sorted({event.stream for event in step.events})
        ['compute', 'links']

    Args:
        subject: as in `predict`.
        cluster: a cluster, its name in the catalogue, or the path of its file.
        devices: number of devices of a run or a function.
        arguments: as in `predict`.
        batch_argnums: as in `predict`.
        framework: for a run: the framework that trains it, or its name.

    Raises:
        ConfigError: if the run, the arguments or a name is refused.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses the step.
    """
    where, _ = _placed(cluster, None)
    return trace_step(_program(subject, arguments, batch_argnums, where, devices, framework), where)


def compare(
    a: "Run | Program | Step | tuple[Callable[..., Any], Sequence[Any]]",
    b: "Run | Program | Step | tuple[Callable[..., Any], Sequence[Any]]",
    cluster: Cluster | Path | str,
    devices: int | None = None,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    bounds: Bounds | None = None,
) -> Comparison:
    """Comparison of two revisions of a step: time, memory, and bytes and kinds of collectives.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import compare, load_config
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> wider = load_config(path, {"model.hidden": [256, 256]})
        >>> found = compare(path, wider, "dgx-h100", 2)
        >>> found.after_flop > found.before_flop, len(found.exceeded) > 0
        (True, True)

    Args:
        a: the step before: a run (its config or run file), a compiled `Program`, a `Step`, or
            (function, arguments). Only the command compares steps at a commit.
        b: the step after, likewise.
        cluster: a cluster, its name in the catalogue, or the path of its file.
        devices: number of devices of a run or a function; if None, as many as a run's layout asks
            for.
        batch_argnums: as in `predict`.
        site: conditions and input of the cluster; if None, those in its file.
        framework: for runs: the framework that trains them, or its name.
        bounds: how much worse `b` may be; if None, the usual bounds.

    Raises:
        ConfigError: if a run or a name is refused, or the steps cannot be compared.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses a step.
    """
    (where, at), by = _placed(cluster, site), _framework(framework)
    jobs, others, takes_devices = [], dict[int, Program](), False
    for position, each in enumerate((a, b)):
        subject, arguments = _unpacked(each, ())
        if isinstance(subject, RunConfig | Path | str):
            config, facts = _read(subject)
            run = resolve(config, None if devices is None else _one_count(devices), facts)
            jobs.append(ProfileJob(run=run, cluster=where, framework=by))
            takes_devices = True
        elif isinstance(subject, Program) or _run_of(subject) is not None:
            others[position] = _program(subject, (), batch_argnums, where, None, "xla")
        else:
            others[position] = _program(subject, arguments, batch_argnums, where, devices, "xla")
            takes_devices = True
    if not takes_devices:
        _refuse_devices(devices, "a program")
    if not jobs:
        _refuse_framework(framework)
    with in_cell(compiling(len(jobs))) as on_progress:
        compiled = iter(profile_many(jobs, on_progress))
    before, after = (others.get(position) or next(compiled) for position in (0, 1))
    return compare_programs(before, after, where, bounds, site=at)


def search(
    run: Run,
    cluster: Cluster | Path | str,
    devices: int | Sequence[int],
    *,
    global_batch: int | None = None,
    objective: Objective = "time",
    site: Site | None = None,
    framework: Framework | str = "xla",
    price_per_device_hour: float | None = None,
    top: int = 10,
    confirm: int = 3,
) -> SearchReport:
    """The best parallelisation strategies of a transformer that fit, ranked by an objective.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import load_config, search
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> tables = {"model": {"name": "gpt2-124m"}, "data": {"name": "synthetic_tokens"}}
        >>> report = search(load_config(path, tables), "dgx-h100", 2, confirm=0)
        >>> report.ranked[0].place, report.ranked[0].strategy.layout.device_count
        (1, 2)

    Args:
        run: a config or a run file; its layout, microbatches and remat are replaced.
        cluster: a cluster, its name in the catalogue, or the path of its file.
        devices: number of devices, or several to choose from.
        global_batch: samples per update; if None, that of the run.
        objective: what is minimised: step time, device-hours per sample, or memory.
        site: conditions and input of the cluster; if None, those in its file.
        framework: the framework that trains it, or its name.
        price_per_device_hour: price of a device-hour, in any currency.
        top: number of strategies in the result.
        confirm: number of the best strategies that are compiled.

    Raises:
        ConfigError: if the network has no closed form, or no batch is given.
        DoesNotFit: if the cluster has fewer devices, or no strategy fits.
    """
    (where, at), by = _placed(cluster, site), _framework(framework)
    config, facts = _read(run, SEARCHED_FIELDS)
    with in_cell(searching()) as on_progress:
        found = search_run(
            config,
            where,
            tuple(_counts(devices)),
            site=at,
            facts=facts,
            global_batch=global_batch,
            objective=objective,
            on_progress=on_progress,
        )
    if not found.ranked:
        raise DoesNotFit(f"no strategy fits on devices={devices} of {where.name}.")
    report = report_search(
        config,
        where,
        found,
        site=at,
        facts=facts,
        objective=objective,
        framework=by,
        price_per_device_hour=price_per_device_hour,
        top=top,
    )
    if not confirm:
        return report
    with in_cell(compiling(min(confirm, len(report.ranked)))) as on_progress:
        return confirm_search(
            report,
            config,
            where,
            site=at,
            facts=facts,
            confirm=confirm,
            framework=by,
            on_progress=on_progress,
        )


def plan(
    run: Run,
    clusters: Cluster | Path | str | Sequence[Cluster | Path | str],
    devices: int | Sequence[int],
    *,
    prices_per_device_hour: float | Sequence[float] | None = None,
    global_batches: Sequence[int] = (),
    convergence: str | None = None,
    target: float | None = None,
    deadline_seconds: float | None = None,
    budget: float | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    layouts: Layouts = "search",
) -> Plan:
    """The devices and the batch that reach a target soonest, or cheapest.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import plan
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> found = plan(path, ["dgx-h100"], [1, 2])
        >>> found.soonest in found.front, {point.cluster for point in found.points}
        (True, {'dgx-h100'})

    Args:
        run: a config or a run file; a `layout.data` in it is replaced.
        clusters: clusters to choose from, or one: names in the catalogue or paths of files will
            do.
        devices: numbers of devices to choose from, or one.
        prices_per_device_hour: a price for each cluster, in any currency; None for their list
            prices, in dollars, if all have one.
        global_batches: batches to choose from; if none, the batch per device is kept.
        convergence: steps to target by batch: a file, the folder of a run or sweep, or published
            points; if None, the published points of the network, or else the epochs of the run.
        target: test metric to reach; if None, that of the convergence points.
        deadline_seconds: time within which the target must be reached.
        budget: maximum cost: in the currency of the prices, in dollars of list prices, or in
            device-hours if a cluster has no price.
        site: conditions and input of each cluster; if None, those in its file.
        framework: the framework that trains it, or its name.
        layouts: "search" takes the fastest of the common layouts in each row, if the closed form
            knows the network; "file" keeps that of the run.

    Raises:
        ConfigError: if a name, a number or the run is refused.
        DoesNotFit: if a cluster has fewer devices.
        ProfileError: if the compiler refuses a step.
    """
    config, facts = _read(run)
    options = [
        ClusterOption(cluster=where, site=at, price_per_device_hour=price)
        for where, at, price in _priced(clusters, prices_per_device_hour, site)
    ]
    convergence_points = find_convergence(config, convergence, target=target, facts=facts)
    with in_cell(compiling_programs()) as on_progress:
        return plan_run(
            config,
            options,
            _counts(devices),
            global_batches=global_batches,
            facts=facts,
            convergence=convergence_points,
            target=target,
            deadline_seconds=deadline_seconds,
            budget=budget,
            framework=_framework(framework),
            layouts=layouts,
            on_progress=on_progress,
        )


def cost(
    run: "Run | tuple[Callable[..., Any], Sequence[Any]]",
    clusters: Cluster | Path | str | Sequence[Cluster | Path | str],
    devices: int | Sequence[int],
    *,
    tokens: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    tokens_per_step: float | None = None,
    prices_per_device_hour: float | Sequence[float] | None = None,
    watts_per_device: float | None = None,
    pue: float | None = None,
    grid_grams_per_kwh: float | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    confirm: int = 1,
) -> RunCost:
    """What a whole run costs on each cluster and number of devices, with the best layout for each.

    Example:
        >>> from scalejax import cost
        >>> found = cost("gpt3-125m", ["dgx-h100"], [2], tokens=1e9, confirm=0)
        >>> (row,) = found.rows
        >>> row.updates, round(row.price / row.device_hours, 2)
        (1908, 2.95)

    Args:
        run: a config, a run file (a path that ends in .toml), a published decoder by name,
            "llama-like:N=1b", or (function, arguments), which keeps its layout and its batch on any
            number of devices.
        clusters: clusters, their names in the catalogue, or paths of their files; or one.
        devices: numbers of devices, or one.
        tokens: tokens to train on. Without tokens, epochs and steps, a decoder by name trains on
            its published tokens, and a run for its own epochs.
        epochs: passes over the data of a config or a run file, instead of tokens.
        steps: updates, instead of tokens.
        tokens_per_step: with `tokens`: tokens that one call of a function trains on; for anything
            else scalejax knows them.
        prices_per_device_hour: a price for each cluster; None for their list prices, in dollars.
        watts_per_device: power of a device with host, network and cooling; None for that in the
            clusters' files.
        pue: power of the data centre over that of its machines; None for that in their files.
        grid_grams_per_kwh: grams of CO2 per kWh; None for no CO2.
        site: conditions and input of each cluster; if None, those in its file.
        framework: the framework that trains it, or its name.
        confirm: number of the best layouts of each row that are compiled; the fastest is taken. 0
            for closed forms only.

    Raises:
        ConfigError: if a name, a number or the run is refused.
        ProfileError: if the compiler refuses a function.
    """
    options = []
    for where, at, price in _priced(clusters, prices_per_device_hour, site):
        rates = rates_of(
            where,
            price_per_device_hour=price,
            watts_per_device=watts_per_device,
            pue=pue,
            grid_grams_per_kwh=grid_grams_per_kwh,
        )
        options.append(CostOption(cluster=where, rates=rates, site=at))
    counts = _counts(devices)
    steps = None if steps is None else _whole("steps", steps)
    work = Work(tokens=tokens, epochs=epochs, steps=steps)
    if isinstance(run, tuple):
        _refuse_framework(framework)
        subject, arguments = _unpacked(run, ())
        updates = work.updates_of_function(tokens_per_step)
        cases = [(arguments, option.cluster, count) for option in options for count in counts]
        programs = _programs(_function(subject), cases, None)
        return cost_programs(programs, [o for o in options for _ in counts], updates)
    if tokens_per_step is not None:
        accepted = "it is of (function, arguments); leave it out"
        raise ConfigError(refusal("tokens_per_step", tokens_per_step, accepted))
    notes: list[str] = []
    name: str | None = None
    if isinstance(run, str) and not run.endswith(".toml"):
        config, notes = named_decoder(run)
        name, facts = run, fitting_facts(config)
        if steps is None:
            work = Work(tokens=published_tokens(run, tokens=tokens, epochs=epochs))
    else:
        config, facts = _read(run)
    rows = len(options) * len(counts)
    with in_cell(costing()) as on_progress, in_cell(compiling(rows)) as on_compiled:
        found, _ = cost_run(
            config,
            options,
            counts,
            work,
            name=name,
            framework=_framework(framework),
            facts=facts,
            confirm=confirm,
            notes=notes,
            on_progress=on_progress,
            on_compiled=on_compiled,
        )
    return found


def _unpacked(subject: Any, arguments: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The subject and its arguments; a pair (function, arguments) is taken apart."""
    if not isinstance(subject, tuple):
        return subject, arguments
    if len(subject) != 2 or not isinstance(subject[1], tuple | list):
        kinds = ", ".join(type(each).__name__ for each in subject)
        accepted = "a pair is (function, arguments), the arguments a tuple: (step, (params, batch))"
        raise ConfigError(refusal("subject", f"({kinds})", accepted))
    if arguments:
        accepted = "the pair (function, arguments) has them already; leave one out"
        raise ConfigError(refusal("arguments", f"{len(arguments)} of them", accepted))
    return subject


def _run_of(subject: Any) -> ResolvedRun | None:
    """The run of a `Step`; None for anything else."""
    run = getattr(subject, "run", None)
    return run if isinstance(run, ResolvedRun) else None


def _function(subject: Any) -> Callable[..., Any]:
    if not callable(subject):
        accepted = (
            "it must be a config, a run file, a program, a step, or a function, alone or with its "
            "arguments"
        )
        raise ConfigError(refusal("subject", subject, accepted))
    return subject


def _program(
    subject: Any,
    arguments: Sequence[Any],
    batch_argnums: int | Sequence[int] | None,
    cluster: Cluster,
    devices: int | Sequence[int] | None,
    framework: Framework | str,
) -> Program:
    """The program of any subject, on one number of devices."""
    subject, arguments = _unpacked(subject, arguments)
    if isinstance(subject, RunConfig | Path | str):
        _refuse_arguments(arguments, batch_argnums)
        count = _one_count(devices)
        config, facts = _read(subject)
        run = resolve(config, count, facts)
        job = ProfileJob(run=run, cluster=cluster, framework=_framework(framework))
        with in_cell(compiling(1)) as on_progress:
            return profile_many([job], on_progress)[0]
    _refuse_framework(framework)
    run = _run_of(subject)
    if isinstance(subject, Program) or run is not None:
        _refuse_arguments(arguments, batch_argnums)
        _refuse_devices(devices, "a program" if run is None else "a step")
        return subject if run is None else profile(run, cluster)
    function, count = _function(subject), _one_count(devices)
    return _programs(function, [(arguments, cluster, count)], batch_argnums)[0]


def _programs(
    function: Callable[..., Any],
    cases: Sequence[tuple[Sequence[Any], Cluster, int]],
    batch_argnums: int | Sequence[int] | None,
) -> list[Program]:
    """The programs of a function by arguments, cluster and number of devices."""
    with in_cell(compiling(len(cases))) as on_progress:
        return profile_calls(function, cases, batch_argnums=batch_argnums, on_progress=on_progress)


def _config(run: Run) -> RunConfig:
    return run if isinstance(run, RunConfig) else load_config(Path(run))


def _read(
    run: Run, fields: Mapping[str, JsonValue] | None = None
) -> tuple[RunConfig, DatasetFacts]:
    """The config with `fields` replaced, and the counts and shapes of its data: those that a run
    stored next to its run.toml, or else those read from the data."""
    if isinstance(run, RunConfig):
        config = with_fields(run, fields) if fields else run
        return config, fitting_facts(config)
    config = load_config(Path(run), fields)
    return config, facts_of(config, Path(run))


def _placed(cluster: Cluster | Path | str, site: Site | None) -> tuple[Cluster, Site]:
    """The cluster and its site: the one given, or else that of the cluster's file."""
    if isinstance(cluster, Cluster):
        return cluster, site or NO_SITE
    found, stated = load_cluster_and_site(str(cluster))
    return found, site or stated


def _framework(framework: Framework | str) -> Framework:
    return framework_named(framework) if isinstance(framework, str) else framework


def _priced(
    clusters: Cluster | Path | str | Sequence[Cluster | Path | str],
    prices: float | Sequence[float] | None,
    site: Site | None,
) -> list[tuple[Cluster, Site, float | None]]:
    """Each cluster, its site, and the price given for a device-hour of it; None without a price.

    Raises:
        ConfigError: if there is no cluster, or prices are given but not one for each.
    """
    if isinstance(clusters, Cluster | Path | str):
        clusters = [clusters]
    if not isinstance(clusters, Sequence) or not clusters:
        raise ConfigError(refusal("clusters", clusters, "at least one cluster, or name, is needed"))
    if prices is None:
        given = [None] * len(clusters)
    else:
        several = [prices] if isinstance(prices, int | float) else prices
        try:
            given = [float(each) for each in several]
        except (TypeError, ValueError):
            given = []
        if len(given) != len(clusters):
            accepted = f"there must be one number for each of {len(clusters)} clusters"
            raise ConfigError(refusal("prices_per_device_hour", prices, accepted))
    return [
        (*_placed(cluster, site), price) for cluster, price in zip(clusters, given, strict=True)
    ]


def _counts(devices: int | Sequence[int] | None) -> list[int]:
    """Numbers of devices without duplicates; a single number becomes a list of one."""
    several = (
        devices if isinstance(devices, Sequence) and not isinstance(devices, str) else [devices]
    )
    if devices is None or not several:
        raise ConfigError(refusal("devices", devices, "at least one number is needed"))
    counts = list(dict.fromkeys(_whole("devices", each, ", or a list of them") for each in several))
    require_at_least("devices", min(counts), 1)
    return counts


def _one_count(devices: int | Sequence[int] | None) -> int:
    """The number of devices where only one is allowed."""
    counts = [] if devices is None else _counts(devices)
    if len(counts) != 1:
        raise ConfigError(refusal("devices", devices, "one number is needed"))
    return counts[0]


def _whole(field: str, value: Any, more: str = "") -> int:
    """A whole number, NumPy's included, as an int; `more` says what else is accepted."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise ConfigError(refusal(field, value, f"it must be a whole number{more}"))


def _refuse_framework(framework: Framework | str) -> None:
    if (asked := _framework(framework)) != XLA:
        accepted = "a framework is for a run; a step of your own is predicted as XLA compiles it"
        raise ConfigError(refusal("framework", asked.name, accepted))


def _refuse_arguments(arguments: Sequence[Any], batch_argnums: int | Sequence[int] | None) -> None:
    for name, value in (("arguments", arguments or None), ("batch_argnums", batch_argnums)):
        if value is not None:
            raise ConfigError(refusal(name, value, "it is of a function; leave it out"))


def _refuse_devices(devices: int | Sequence[int] | None, subject: str) -> None:
    if devices is not None:
        raise ConfigError(refusal("devices", devices, f"{subject} has its own number of devices"))
