"""The verbs of `from scalejax import ...`: what the commands do, as functions.

Names of clusters and frameworks, paths of run files, and a step of any kind are accepted where a
command accepts a flag. JAX starts only where something is compiled in this process.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import ResolvedRun, RunConfig, load_config, with_fields
from scalejax.core.errors import ConfigError, DoesNotFit, refusal
from scalejax.core.serialization import JsonValue
from scalejax.data.facts import fitting_facts, resolve
from scalejax.hardware import NO_SITE, Cluster, Site, load_cluster_and_site
from scalejax.planning.bill import rates_of
from scalejax.planning.explain_run import explain_run
from scalejax.planning.run_cost import (
    CostOption,
    RunCost,
    Work,
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
from scalejax.simulator.predict import Prediction, Scaling, ScalingPrediction
from scalejax.simulator.predict import predict as predict_program
from scalejax.simulator.program import Program
from scalejax.training.record import facts_of
from scalejax.xla import ProfileJob, profile, profile_call, profile_many

if TYPE_CHECKING:
    from scalejax.training.profiler import TraceSchedule
    from scalejax.training.record import RunRecord
    from scalejax.training.reporter import Reporter
    from scalejax.training.step import Step

Run = RunConfig | Path | str
"""A config, or the path of its run file."""


@overload
def predict(
    subject: Run,
    cluster: Cluster | Path | str,
    devices: Sequence[int],
    *,
    site: Site | None = None,
    framework: Framework | str = "xla",
    scaling: Scaling = "weak",
) -> ScalingPrediction: ...


@overload
def predict(
    subject: "Run | Program | Step | Callable[..., Any]",
    cluster: Cluster | Path | str,
    devices: int | None = None,
    *,
    arguments: Sequence[Any] = (),
    batch_argnums: int | Sequence[int] | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    scaling: Scaling = "weak",
) -> Prediction: ...


def predict(
    subject: "Run | Program | Step | Callable[..., Any]",
    cluster: Cluster | Path | str,
    devices: int | Sequence[int] | None = None,
    *,
    arguments: Sequence[Any] = (),
    batch_argnums: int | Sequence[int] | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    scaling: Scaling = "weak",
) -> Prediction | ScalingPrediction:
    """Predicted time, throughput, efficiency and memory of a step on a cluster that is not here.

    Example:
        >>> from importlib.resources import files
        >>> from scalejax import predict
        >>> path = files("scalejax") / "config/examples/fashion_small_batch.toml"
        >>> prediction = predict(path, "dgx-h100", 2)
        >>> prediction.fits, prediction.global_batch
        (True, 32)

    Args:
        subject: a run (its config or run file), a compiled `Program`, a `Step` of `build_step`, or
            any function of `arguments`, jitted or not, also one typed into a notebook.
        cluster: a cluster, its name in the catalogue, or the path of its file.
        devices: number of devices, or several; a `Program` and a `Step` have their own.
        arguments: of a function: arrays or `jax.ShapeDtypeStruct`s of the whole step over all
            devices. Where none has a `NamedSharding`, the function is data parallel.
        batch_argnums: positions of the arguments that hold samples; if None, the last.
        site: its conditions and input; if None, those in the cluster's file.
        framework: the framework that trains it, or its name; of a run.
        scaling: what stays fixed as devices are added: the batch per device (weak), or the global
            batch (strong); of a run.

    Returns: a `ScalingPrediction` for several numbers of devices, else a `Prediction`.

    Raises:
        ConfigError: if the run, the arguments or a name is refused.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses the step.
    """
    where, at = _placed(cluster, site)
    is_run = isinstance(subject, RunConfig | Path | str)
    is_step = isinstance(getattr(subject, "run", None), ResolvedRun)
    if is_run or is_step or isinstance(subject, Program):
        for name, value in (("arguments", arguments or None), ("batch_argnums", batch_argnums)):
            if value is not None:
                raise ConfigError(refusal(name, value, "it is of a function; leave it out"))
    if not is_run and scaling != "weak":
        accepted = "only a run is scaled to several numbers of devices; leave it out"
        raise ConfigError(refusal("scaling", scaling, accepted))
    if isinstance(subject, Program):
        _refuse_devices(devices, "a program")
        _refuse_framework(framework)
        return predict_program(subject, where, site=at)
    if isinstance(subject, RunConfig | Path | str):
        config, facts = _read(subject)
        if config.batch.ramp_epochs:
            accepted = "its batch grows: scalejax.planning.scaling_study.ramp_study predicts that"
            raise ConfigError(refusal("batch.ramp_epochs", config.batch.ramp_epochs, accepted))
        found = study(
            config,
            where,
            _counts(devices),
            scaling,
            site=at,
            facts=facts,
            framework=_framework(framework),
        )
        return found if isinstance(devices, Sequence) else found.predictions[0]
    _refuse_framework(framework)
    if isinstance(run := getattr(subject, "run", None), ResolvedRun):
        _refuse_devices(devices, "a step")
        epochs = run.config.train.epochs
        return predict_run(run, profile(run, where), where, site=at, epochs=epochs)
    if not callable(subject):
        accepted = "it must be a config, a run file, a program, a step or a function"
        raise ConfigError(refusal("subject", subject, accepted))
    if devices is None or (isinstance(devices, Sequence) and not isinstance(devices, str)):
        raise ConfigError(refusal("devices", devices, "one number is needed for a function"))
    program = profile_call(
        subject, arguments, cluster=where, device_count=_count(devices), batch_argnums=batch_argnums
    )
    return predict_program(program, where, site=at)


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
    """Train a run on the devices that are here, and return its record.

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
        folder: where its files go; it may hold a run only with `resume`.
        device_count: devices to use; if None, those that the config's layout asks for, or all.
        resume: continue from the newest checkpoint of the run in `folder` that verifies.
        start_over: with `resume`, begin at step 0 where steps are recorded and no checkpoint
            verifies, in place of refusing.
        reporter: where progress is reported; if None, standard error.
        traces: which steps to record with the profiler; None for none.
        predicts: write a prediction first, for which these devices are measured for a second.
        startup_seconds: see `scalejax.training.train.train`.
        leave: see `scalejax.training.train.train`.

    Raises:
        ConfigError: if the config cannot work here, or the folder holds another run or cannot
            be written.
        DoesNotFit: if the layout takes more devices than there are.
        Damaged: if steps are recorded and no checkpoint verifies.
        CheckpointMismatch: if the checkpoint to resume from is of another state.
        Unavailable: if it, or its manifest, cannot be read at present.
        Interrupted: when SIGINT or SIGTERM asked to stop: after a checkpoint, or before training.
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
    subject: Run | Program,
    cluster: Cluster | Path | str,
    devices: int | None = None,
    *,
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
        subject: a run (its config or run file), or a compiled `Program`.
        cluster: a cluster, its name in the catalogue, or the path of its file.
        devices: number of devices of a run.
        site: its conditions and input; if None, those in the cluster's file.
        framework: the framework that trains it, or its name; of a run.

    Raises:
        ConfigError: if the run or a name is refused.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses the step.
    """
    where, at = _placed(cluster, site)
    if isinstance(subject, Program):
        _refuse_devices(devices, "a program")
        _refuse_framework(framework)
        return explain_program(subject, where, site=at)
    (count,) = _counts(devices)
    config, facts = _read(subject)
    by = _framework(framework)
    found = explain_run(config, where, count, site=at, facts=facts, framework=by)
    return found.explanation


def compare(
    a: Run | Program,
    b: Run | Program,
    cluster: Cluster | Path | str,
    devices: int | None = None,
    *,
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
        a: the step before: a run (its config or run file), or a compiled `Program`. Steps at a
            commit are compared by the command alone.
        b: the step after, likewise.
        cluster: a cluster, its name in the catalogue, or the path of its file.
        devices: number of devices of a run; if None, those that its layout asks for.
        site: its conditions and input; if None, those in the cluster's file.
        framework: the framework that trains them, or its name; of runs.
        bounds: how much worse `b` may be; if None, the usual bounds.

    Raises:
        ConfigError: if a run or a name is refused, or the steps do not compare.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses a step.
    """
    (where, at), by = _placed(cluster, site), _framework(framework)
    jobs = []
    for config, facts in (_read(each) for each in (a, b) if not isinstance(each, Program)):
        run = resolve(config, devices, facts)
        jobs.append(ProfileJob(run=run, cluster=where, framework=by))
    if not jobs:
        _refuse_devices(devices, "a program")
        _refuse_framework(framework)
    compiled = iter(profile_many(jobs))
    before, after = (each if isinstance(each, Program) else next(compiled) for each in (a, b))
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
    """The best parallelisation strategies of a transformer, those that fit ranked by an objective.

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
        site: its conditions and input; if None, those in the cluster's file.
        framework: the framework that trains it, or its name.
        price_per_device_hour: price of a device-hour, in any currency.
        top: number of strategies in the result.
        confirm: number of the best that are compiled.

    Raises:
        ConfigError: if the network has no closed form, or no batch is given.
        DoesNotFit: if the cluster has fewer devices, or no strategy fits.
    """
    (where, at), by = _placed(cluster, site), _framework(framework)
    config, facts = _read(run, SEARCHED_FIELDS)
    found = search_run(
        config,
        where,
        tuple(_counts(devices)),
        site=at,
        facts=facts,
        global_batch=global_batch,
        objective=objective,
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
    return confirm_search(
        report, config, where, site=at, facts=facts, confirm=confirm, framework=by
    )


def plan(
    run: Run,
    clusters: Sequence[Cluster | Path | str],
    devices: Sequence[int],
    *,
    prices_per_device_hour: Sequence[float] | None = None,
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
        clusters: clusters to choose from, their names in the catalogue, or paths of their files.
        devices: numbers of devices to choose from.
        prices_per_device_hour: a price for each cluster, in any currency; None for their list
            prices, in dollars, where all have one.
        global_batches: batches to choose from; if none, the batch per device is kept.
        convergence: steps to target by batch: a file, the folder of a run or sweep, or published
            points; if None, those of the network, or else the epochs of the run.
        target: test metric to reach; if None, that of the convergence points.
        deadline_seconds: time within which the target must be reached.
        budget: maximum cost: in the currency of the prices, in dollars of list prices, or in
            device-hours where a cluster has no price.
        site: conditions and input of each cluster; if None, those in its file.
        framework: the framework that trains it, or its name.
        layouts: "search" takes the fastest of the common layouts in each row, where the closed form
            knows the network; "file" keeps that of the run.

    Raises:
        ConfigError: if a name, a number or the run is refused.
        DoesNotFit: if a cluster has fewer devices.
        ProfileError: if the compiler refuses a step.
    """
    config, facts = _read(run)
    prices = [None] * len(clusters) if prices_per_device_hour is None else prices_per_device_hour
    if len(prices) != len(clusters):
        accepted = f"there must be one for each of {len(clusters)} clusters"
        raise ConfigError(refusal("prices_per_device_hour", list(prices), accepted))
    options = []
    for cluster, price in zip(clusters, prices, strict=True):
        where, at = _placed(cluster, site)
        options.append(ClusterOption(cluster=where, site=at, price_per_device_hour=price))
    return plan_run(
        config,
        options,
        devices,
        global_batches=global_batches,
        facts=facts,
        convergence=find_convergence(config, convergence, target=target, facts=facts),
        target=target,
        deadline_seconds=deadline_seconds,
        budget=budget,
        framework=_framework(framework),
        layouts=layouts,
    )


def cost(
    run: Run,
    clusters: Sequence[Cluster | Path | str],
    devices: Sequence[int],
    *,
    tokens: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    prices_per_device_hour: Sequence[float] | None = None,
    watts_per_device: float | None = None,
    pue: float | None = None,
    grid_grams_per_kwh: float | None = None,
    site: Site | None = None,
    framework: Framework | str = "xla",
    confirm: int = 1,
) -> RunCost:
    """What a whole run costs on each cluster and number of devices, with the best layout of each.

    Example:
        >>> from scalejax import cost
        >>> found = cost("gpt3-125m", ["dgx-h100"], [2], tokens=1e9, confirm=0)
        >>> (row,) = found.rows
        >>> row.updates, round(row.price / row.device_hours, 2)
        (1908, 2.95)

    Args:
        run: a config, a run file (a path that ends in .toml), a published decoder by name, or
            "llama-like:N=1b".
        clusters: clusters, their names in the catalogue, or paths of their files.
        devices: numbers of devices.
        tokens: tokens to train on; with neither these nor epochs or steps those published of a
            decoder by name, and of others the epochs of the run.
        epochs: passes over the data of a config or a run file, in place of tokens.
        steps: updates, in place of tokens.
        prices_per_device_hour: a price for each cluster; None for their list prices, in dollars.
        watts_per_device: power of a device with host, network and cooling; None for that in the
            clusters' files.
        pue: power of the data centre over that of its machines; None for that in their files.
        grid_grams_per_kwh: grams of CO2 for a kWh; None for no CO2.
        site: conditions and input of each cluster; if None, those in its file.
        framework: the framework that trains it, or its name.
        confirm: number of the best layouts of each row that are compiled, of which the fastest is
            taken; 0 for closed forms.

    Raises:
        ConfigError: if a name, a number or the run is refused.
    """
    notes: list[str] = []
    name: str | None = None
    if isinstance(run, str) and not run.endswith(".toml"):
        config, notes = named_decoder(run)
        name, facts = run, fitting_facts(config)
        if steps is None:
            tokens = published_tokens(run, tokens=tokens, epochs=epochs)
    else:
        config, facts = _read(run)
    prices: Sequence[float | None] = prices_per_device_hour or [None] * len(clusters)
    if len(prices) != len(clusters):
        accepted = f"one is needed for each of {len(clusters)} clusters"
        raise ConfigError(refusal("prices_per_device_hour", prices, accepted))
    options = []
    for cluster, price in zip(clusters, prices, strict=True):
        where, at = _placed(cluster, site)
        rates = rates_of(
            where,
            price_per_device_hour=price,
            watts_per_device=watts_per_device,
            pue=pue,
            grid_grams_per_kwh=grid_grams_per_kwh,
        )
        options.append(CostOption(cluster=where, rates=rates, site=at))
    found, _ = cost_run(
        config,
        options,
        devices,
        Work(tokens=tokens, epochs=epochs, steps=steps),
        name=name,
        framework=_framework(framework),
        facts=facts,
        confirm=confirm,
        notes=notes,
    )
    return found


def _config(run: Run) -> RunConfig:
    return run if isinstance(run, RunConfig) else load_config(Path(run))


def _read(
    run: Run, fields: Mapping[str, JsonValue] | None = None
) -> tuple[RunConfig, DatasetFacts]:
    """The config with `fields` replaced, and the counts and shapes of its data: those that a run
    kept beside its run.toml, or else those read from the data."""
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


def _counts(devices: int | Sequence[int] | None) -> Sequence[int]:
    if devices is None:
        raise ConfigError(refusal("devices", None, "the number of devices is needed for a run"))
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return [_count(each) for each in devices]
    return [_count(devices)]


def _count(devices: Any) -> int:
    """A number of devices as an int, NumPy's too."""
    try:
        if not isinstance(devices, bool):
            return index(devices)
    except TypeError:
        pass
    raise ConfigError(refusal("devices", devices, "it must be a whole number, or a list of them"))


def _refuse_framework(framework: Framework | str) -> None:
    if (asked := _framework(framework)) != XLA:
        accepted = "a framework is for a run; a step of your own is predicted as XLA compiles it"
        raise ConfigError(refusal("framework", asked.name, accepted))


def _refuse_devices(devices: int | Sequence[int] | None, subject: str) -> None:
    if devices is not None:
        raise ConfigError(refusal("devices", devices, f"{subject} has its own number of devices"))
