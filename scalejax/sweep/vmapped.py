"""Several runs trained in one program: the real `Step`, vmapped over a leading axis of runs.

Knows nothing about the sweep except whether a run in a folder has ended; the loop is `training`'s.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.config.run import ResolvedRun
from scalejax.config.schedule import Phase
from scalejax.core.heartbeat import Heartbeat
from scalejax.core.serialization import save
from scalejax.data.loader.loader import (
    Batches,
    evaluation_batches_of_seeds,
    training_batches_of_seeds,
)
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.data.source import Source
from scalejax.sweep.results import is_finished
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.compile import RunPrograms, program_bytes
from scalejax.training.data_fingerprints import refuse_other_files
from scalejax.training.evaluation import build_evaluation
from scalejax.training.logger import MetricsLogger
from scalejax.training.loop import TrainingLoop
from scalejax.training.manifest import newest, newest_file, set_newest
from scalejax.training.mesh import build_mesh
from scalejax.training.profiler import StepTraces
from scalejax.training.record import EMPTY_RECORD, RunFolder
from scalejax.training.reporter import Reporter, Silent
from scalejax.training.resume import RunIdentity, checkpoint_to_resume_from
from scalejax.training.run_folder import describe_run
from scalejax.training.setup import schedule_of
from scalejax.training.signals import StopSignals
from scalejax.training.start import start_of
from scalejax.training.state import PyTree, TrainState
from scalejax.training.step import Step, build_step, init_state
from scalejax.training.time_accounting import RunClock
from scalejax.training.trackers import require_trackers

_SECONDS_BETWEEN_CHECKPOINTS = 20.0
"""Time between checkpoints: at most this much training is repeated after a kill."""
_RESUME = "the same scalejax sweep with --resume"
_KEPT = 2
"""Number of common checkpoints kept: if one is damaged, the runs resume from the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedPrograms(RunPrograms):
    """The step and the evaluation of several runs, each compiled as one program for all of them.

    `update` and `evaluate` take a state of all runs and batches of all seeds.
    """

    runs: tuple[ResolvedRun, ...]
    """The runs, equal except for seed and schedule."""
    memory_bytes: int | None
    """Memory of the compiled update, with the batches queued for the next one; None if the
    compiler does not report it."""

    def initial_state(self, *, is_restored: bool = False) -> PyTree:
        """The state of all runs before the first update, with a leading axis of runs; a state that
        a checkpoint will overwrite does not need the weights that runs began with."""
        seeds, which = _seeds_of(self.runs)
        of_seed = {run.config.seed: run for run in self.runs}
        if is_restored:
            of_seed = {
                seed: replace(run, config=replace(run.config, start=None))
                for seed, run in of_seed.items()
            }
        mesh = build_mesh(self.runs[0].layout)
        states = [init_state(of_seed[seed], mesh) for seed in seeds]
        return jax.tree.map(lambda *leaves: jnp.stack([leaves[i] for i in which]), *states)

    def training_batches(
        self,
        run: ResolvedRun,
        sources: Sequence[Source],
        skipped: Sequence[Skipped],
        *,
        step: Step,
        phase: Phase,
        start_step: int,
        stop_step: int,
    ) -> Batches:
        """For each step, the batches of all seeds."""
        return training_batches_of_seeds(
            sources,
            step.batch,
            seeds=_seeds_of(self.runs)[0],
            start_step=start_step,
            stop_step=stop_step,
            how=run.config.input,
            skipped=skipped,
        )

    def evaluation_batches(
        self, run: ResolvedRun, sources: Sequence[Source], skipped: Sequence[Skipped]
    ) -> Batches:
        """The batches of the examples, for all seeds."""
        return evaluation_batches_of_seeds(
            sources, self.evaluation.batch, run.config.input, skipped
        )

    def of_run(self, index: int, values: PyTree) -> PyTree:
        """The part of a state or of metrics that belongs to the run `index`."""
        return jax.tree.map(lambda leaf: np.asarray(leaf[index]), values)


def mapped_programs(runs: Sequence[ResolvedRun]) -> MappedPrograms:
    """The programs of `runs`, with the step compiled."""
    run = runs[0]
    mesh = build_mesh(run.layout)
    seeds, which = _seeds_of(runs)
    rates = jnp.stack([_rates(each) for each in runs])
    step, evaluation = build_step(run, mesh), build_evaluation(run, mesh)

    def by_run(batches: PyTree) -> PyTree:
        """Batches by run, from batches by seed."""
        return jax.tree.map(lambda rows: rows[which], batches)

    def update(rates: jax.Array, state: TrainState, batch: PyTree) -> Any:
        def schedule(count: Any) -> jax.Array:
            return jnp.take(rates, count, mode="clip")

        return build_step(run, mesh, schedule=schedule).function(state, batch)

    # These vmap the update of `training.step`; no part of the step is defined here.
    def updates(rates: jax.Array, state: PyTree, batches: PyTree) -> Any:
        return jax.vmap(update)(rates, state, by_run(batches))

    def evaluations(params: PyTree, model_state: PyTree, batches: PyTree) -> Any:
        return jax.vmap(evaluation.function)(params, model_state, by_run(batches))

    state, batches = _repeated(step.state, len(runs)), _repeated(step.batch, len(seeds))
    compiled = jax.jit(updates, donate_argnums=1).lower(rates, state, batches).compile()
    return MappedPrograms(
        step=step,
        update=partial(compiled, rates),
        evaluation=replace(evaluation, weights=jax.jit(jax.vmap(evaluation.weights))),
        evaluate=jax.jit(evaluations),
        together=f", with {len(runs) - 1} others in one program",
        runs=tuple(runs),
        memory_bytes=program_bytes(compiled),
    )


def _seeds_of(runs: Sequence[ResolvedRun]) -> tuple[tuple[int, ...], np.ndarray]:
    """The distinct seeds, for each of which one batch is prepared, and the position of each run's
    seed among them."""
    seeds = tuple(dict.fromkeys(run.config.seed for run in runs))
    return seeds, np.asarray([seeds.index(run.config.seed) for run in runs])


def _rates(run: ResolvedRun) -> jax.Array:
    return jnp.asarray(schedule_of(run)(jnp.arange(run.total_steps)), jnp.float32)


def _repeated(shapes: PyTree, count: int) -> PyTree:
    """Shapes with a leading axis of `count`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), shapes)


# Entry point: train several runs in one program.


def train_together(
    runs: Sequence[ResolvedRun],
    folders: Sequence[RunFolder],
    checkpoints: Path,
    reporter: Reporter,
    *,
    memory_bytes: int | None = None,
    leave: Callable[[int], None] | None = None,
) -> None:
    """Train `runs` in one program to their end, with the record of each in its folder.

    Resumes at the latest checkpoint of their common state, if there is one.

    Args:
        runs: equal except for seed and schedule, each on one device.
        folders: the folder of each run.
        checkpoints: folder of the common checkpoints during training.
        reporter: receives the progress of the first run.
        memory_bytes: memory limit of the program; if exceeded, halves of the runs train one
            after the other. None: no limit.
        leave: as in `train`.

    Raises:
        Interrupted: on SIGINT or SIGTERM, after a checkpoint.
    """
    for run in runs:
        require_trackers(run.config.tracking)
    halves = checkpoints / "halves"  # halved jobs stay halved, even if resumed with more memory
    programs = None if halves.exists() else mapped_programs(runs)
    limit = math.inf if memory_bytes is None or len(runs) == 1 else memory_bytes
    is_too_large = programs is not None and (programs.memory_bytes or 0) > limit
    if programs is None or (is_too_large and not _has_state(checkpoints)):
        halves.mkdir(parents=True, exist_ok=True)
        middle = (len(runs) + 1) // 2
        was_none_finished = newest(checkpoints) == 0
        for number, part in enumerate((slice(None, middle), slice(middle, None))):
            half = halves / str(number)
            if was_none_finished and not half.exists():  # steps of all runs may be recorded
                set_newest(half, 0)
            if not all(is_finished(folder) for folder in folders[part]):
                train_together(
                    runs[part],
                    folders[part],
                    half,
                    reporter,
                    memory_bytes=memory_bytes,
                    leave=leave,
                )
    else:
        _train_at_once(programs, folders, checkpoints, reporter, leave)
    newest_file(checkpoints).unlink(missing_ok=True)
    shutil.rmtree(checkpoints)  # completed runs have their weights; nothing is left to resume


def _has_state(checkpoints: Path) -> bool:
    """Whether a checkpoint exists; a job killed before the first leaves an empty folder."""
    if not checkpoints.exists():
        return False
    with Checkpoints(checkpoints, keep=_KEPT) as saved:
        return saved.latest_step is not None


def _train_at_once(
    programs: MappedPrograms,
    folders: Sequence[RunFolder],
    checkpoints: Path,
    reporter: Reporter,
    leave: Callable[[int], None] | None,
) -> None:
    runs, heartbeat, clock = programs.runs, Heartbeat.from_environment(), RunClock()
    for run, folder in zip(runs, folders, strict=True):
        refuse_other_files(folder, run.config.data)
        describe_run(folder, run, _RESUME)
    signals = StopSignals(heartbeat, leave=leave)
    identities = [RunIdentity.of(run, files) for run, files in zip(runs, folders, strict=True)]
    with Checkpoints(checkpoints, keep=_KEPT) as saved, signals, ExitStack() as open_logs:
        resumed, _ = checkpoint_to_resume_from(
            saved, list(zip(identities, folders, strict=True)), say=reporter.say
        )
        begin = resumed.step if resumed else 0
        state = programs.initial_state(is_restored=begin > 0)
        words = ""
        if begin:
            state = saved.restore(begin, state)
        else:  # a checkpoint would have its own weights
            for start, folder in zip(map(start_of, runs), folders, strict=True):
                if start is not None:
                    save(start, folder.start)
                    words = start.words
        saved.resume_from(begin)
        loggers = []
        for index, folder in enumerate(folders):
            said_to = Silent() if loggers else reporter
            logger = MetricsLogger(
                folder,
                said_to,
                heartbeat,
                clock,
                after_step=begin,
                proved=resumed.runs[index].record if resumed else EMPTY_RECORD,
                runs_together=len(runs),
                config=runs[index].config,
            )
            loggers.append(open_logs.enter_context(closing(logger)))
        loop = TrainingLoop(
            runs,
            programs,
            saved,
            loggers,
            signals,
            StepTraces(folders[0].traces, None),
            resume_command=_RESUME,
            # None, unless a kill came after one run ended and before another did.
            ended=[index for index, folder in enumerate(folders) if is_finished(folder)],
            checkpoint_seconds=_SECONDS_BETWEEN_CHECKPOINTS,
            identities=identities,
            resumed=resumed,
        )
        signals.begin()
        loop.train(state, begin, start=words)
