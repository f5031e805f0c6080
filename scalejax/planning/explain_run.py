"""Explanation of a run: compiles its step, and the step with twice the batch, and explains both.

Knows neither compiler nor equations: those are in `profile` and `explain`.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.model import DecoderConfig, Remat
from scalejax.config.run import ResolvedRun, RunConfig, with_fields
from scalejax.core.errors import ConfigError, ProfileError, UnknownHardware
from scalejax.core.progress import OnProgress, no_display
from scalejax.core.serialization import JsonValue
from scalejax.core.units import counted
from scalejax.data.facts import resolve
from scalejax.hardware import NO_SITE, Cluster, Site
from scalejax.planning.memory_advice import memory_notes
from scalejax.simulator.device_state import under_load
from scalejax.simulator.explain import Explanation, MemoryChoice, explain, match_trace
from scalejax.simulator.frameworks import XLA, Framework
from scalejax.simulator.memory import memory_verdict
from scalejax.simulator.perfetto import MeasuredTrace
from scalejax.simulator.predict import predict
from scalejax.simulator.program import Program
from scalejax.xla import ProfileJob, profile_many

CASES = 2
"""Programs that are compiled for one explanation: the run's, and one with twice the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRun:
    """An explanation with its compiled program."""

    explanation: Explanation
    """Breakdown of the time of a step."""
    program: Program
    """The compiled step."""
    shortage: str | None
    """Memory advice, which is also the explanation's first note; None if the step fits."""


def explain_run(
    config: RunConfig,
    cluster: Cluster,
    device_count: int,
    *,
    site: Site = NO_SITE,
    framework: Framework = XLA,
    facts: DatasetFacts | None = None,
    on_progress: OnProgress = no_display,
) -> ExplainedRun:
    """Explanation of the predicted step time of `config` on `device_count` devices of `cluster`.

    The effect of twice the batch is left out, with a note, if the data or the compiler refuse it.

    Args:
        config: the run.
        cluster: where it would run.
        device_count: devices in the run.
        site: conditions and input of its hosts.
        framework: the framework that trains it.
        facts: counts and shapes of its data; if None, they are read.
        on_progress: called as each of the two programs starts to compile, is done, or is cached.

    Raises:
        ConfigError: if the batch or layout does not divide.
        DoesNotFit: if the cluster has fewer devices.
        ProfileError: if the compiler refuses the step.
    """
    run = resolve(config, device_count, facts)
    runs, refused = [run], None
    try:
        runs.append(_with_doubled_batch(run))
    except ConfigError as error:
        refused = error
    names = ("", f"{counted(device_count, 'device')} with twice the batch")
    jobs = [
        ProfileJob(run=each, cluster=cluster, framework=framework, name=name)
        for each, name in zip(runs, names, strict=False)
    ]
    try:
        programs = profile_many(jobs, on_progress)
    except ProfileError as error:
        if len(jobs) == 1:
            raise
        refused, programs = error, profile_many(jobs[:1], on_progress)
    doubled = programs[1] if len(programs) > 1 else None
    explanation = explain(programs[0], cluster, site=site, doubled_batch=doubled)
    if refused is not None:
        note = f"twice the batch is left out: {str(refused).rstrip('.')}"
        explanation = replace(explanation, notes=(*explanation.notes, note))
    held = cluster.host_memory_bytes(programs[0].device_count)
    memory = memory_verdict(programs[0].memory, under_load(cluster, programs[0]).chip, held)
    shortage = memory_notes(run, needed_bytes=memory.peak_bytes, memory_bytes=memory.memory_bytes)
    if shortage is not None:
        explanation = replace(explanation, notes=(shortage, *explanation.notes))
    return ExplainedRun(explanation=explanation, program=programs[0], shortage=shortage)


def with_memory_choices(
    explained: ExplainedRun,
    config: RunConfig,
    cluster: Cluster,
    *,
    site: Site = NO_SITE,
    framework: Framework = XLA,
    facts: DatasetFacts | None = None,
    on_progress: OnProgress = no_display,
) -> ExplainedRun:
    """`explained` with what each recompute and offload costs and saves; arguments as in
    `explain_run`.

    Each is compiled, since the compiler recomputes more of its own accord and decides when to
    copy. Choices that the run cannot have, or that cannot be costed, are left out.
    """
    jobs: dict[str, ProfileJob] = {}
    for field, value in _memory_changes(config):
        change = f"{field} = {json.dumps(value)}"
        with contextlib.suppress(ConfigError):
            changed = with_fields(config, {field: value})
            run = resolve(changed, explained.program.device_count, facts)
            jobs[change] = ProfileJob(run=run, cluster=cluster, framework=framework, name=change)
    choices = [_choice("as it is", explained.program, cluster, site)]
    for change, program in _compiled(jobs, on_progress).items():
        with contextlib.suppress(UnknownHardware):  # the memory of the host
            choices.append(_choice(change, program, cluster, site))
    choices.sort(key=lambda each: each.peak_memory_bytes)
    explanation = replace(explained.explanation, memory_choices=tuple(choices))
    return replace(explained, explanation=explanation)


def _compiled(jobs: Mapping[str, ProfileJob], on_progress: OnProgress) -> dict[str, Program]:
    """Programs of the jobs that compile, compiled together or, if one fails, one by one."""
    try:
        return dict(zip(jobs, profile_many(list(jobs.values()), on_progress), strict=True))
    except ProfileError:
        programs: dict[str, Program] = {}
        for name, job in jobs.items():
            with contextlib.suppress(ProfileError):
                (programs[name],) = profile_many([job], on_progress)
        return programs


def _memory_changes(config: RunConfig) -> list[tuple[str, JsonValue]]:
    """Every other recompute of the network, and the other choice of offloading."""
    own = getattr(config.model, "remat", None)
    offload = "layout.optimizer_memory_host_offload"
    others = [] if own is None else [name for name in get_args(Remat) if name != own]
    if isinstance(config.model, DecoderConfig) and own != "minimal_offloaded":
        others.append("minimal_offloaded")
    is_offloaded = config.layout.optimizer_memory_host_offload
    return [*(("model.remat", name) for name in others), (offload, not is_offloaded)]


def _choice(change: str, program: Program, cluster: Cluster, site: Site) -> MemoryChoice:
    predicted = predict(program, cluster, site=site)
    return MemoryChoice(
        change=change,
        step_seconds=predicted.step_seconds,
        peak_memory_bytes=predicted.peak_memory_bytes,
        host_bytes=program.memory.host_bytes,
        fits=predicted.fits,
    )


def compare_trace(
    explained: ExplainedRun, cluster: Cluster, recorded: MeasuredTrace
) -> ExplainedRun:
    """`explained` with the comparison of the predicted step and a profiled one."""
    match = match_trace(explained.program, cluster, recorded.seconds_by_name)
    notes = explained.explanation.notes
    if recorded.device_count != explained.program.device_count:
        notes = (
            *notes,
            f"the trace is of one process, with {counted(recorded.device_count, 'device')}",
        )
    return replace(explained, explanation=replace(explained.explanation, trace=match, notes=notes))


def _with_doubled_batch(run: ResolvedRun) -> ResolvedRun:
    """`run` with twice the samples on each of the same devices."""
    batch = {
        "batch.per_device_batch": 2 * run.split.per_device_batch,
        "batch.global_batch": None,
    }
    return resolve(with_fields(run.config, batch), run.layout.device_count, run.dataset)
