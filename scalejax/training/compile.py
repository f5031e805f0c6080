"""Compiles the programs of a run on this machine, and feeds them with its batches."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
from jax.sharding import Mesh

from scalejax.config.run import ResolvedRun
from scalejax.config.schedule import Phase
from scalejax.core.errors import OUT_OF_MEMORY, DoesNotFit
from scalejax.core.process_group import GO_ON
from scalejax.core.units import UNKNOWN, format_bytes, format_seconds
from scalejax.data.loader.loader import Batches, evaluation_batches, training_batches
from scalejax.data.loader.skip_unreadable import Skipped
from scalejax.data.source import Source
from scalejax.simulator.predict import slow_note
from scalejax.simulator.program import MemoryUse
from scalejax.training.evaluation import Evaluation, build_evaluation
from scalejax.training.record import RunFolder
from scalejax.training.run_folder import kept_prediction
from scalejax.training.sharpness import Sharpness, build_sharpness
from scalejax.training.step import Step, build_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrograms:
    """The compiled programs of a run, and what goes in and out of them.

    `sweep.vmapped` has those of several runs: each argument and result has one more dimension.
    """

    step: Step
    """The training step, with the shapes of its arguments."""
    update: Any
    """The training step, compiled."""
    later: tuple[tuple[Step, Any], ...] = ()
    """Step and compiled step of each later batch-size phase, if the batch grows."""
    evaluation: Evaluation
    """The evaluation of a batch, with the shapes of its arguments."""
    evaluate: Any
    """The evaluation, compiled."""
    sharpness: Sharpness | None = None
    """The measurement of sharpness, compiled; None if the run does not ask for it."""
    together: str = ""
    """Which other runs are trained with it, in words for the record; empty for a run alone."""

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
        """The batches of a batch-size phase, for `step`, from `start_step` to `stop_step` - 1.

        Args:
            run: the run that trains.
            sources: the training examples, of each seed.
            skipped: counters of unreadable rows, one for each seed.
            step: the step of the phase.
            phase: the batch-size phase.
            start_step: the first step.
            stop_step: the step before which to end.
        """
        return training_batches(
            sources[0],
            step.batch,
            seed=run.config.seed,
            start_step=start_step,
            stop_step=stop_step,
            first_epoch=phase.first_epoch,
            first_step=phase.first_step,
            how=run.config.input,
            skipped=skipped[0],
        )

    def evaluation_batches(
        self, run: ResolvedRun, sources: Sequence[Source], skipped: Sequence[Skipped]
    ) -> Batches:
        """The batches of all examples of `sources`."""
        return evaluation_batches(sources[0], self.evaluation.batch, run.config.input, skipped[0])

    def of_run(self, index: int, values: Any) -> Any:
        """The part of a state or of metrics that belongs to the run `index`."""
        return values


def compile_run(run: ResolvedRun, mesh: Mesh) -> RunPrograms:
    """The programs of `run`, compiled for the devices of `mesh`.

    Raises:
        ConfigError: if the step has an array that no compiler can index.
        DoesNotFit: if the step needs more memory than there is.
    """
    step, evaluation = build_step(run, mesh), build_evaluation(run, mesh)
    later = [build_step(run, mesh, phase=index) for index in range(1, len(run.phases))]
    update = _compiled(step, mesh)
    evaluate = evaluation.function.lower(*evaluation.weights_shapes, evaluation.batch).compile()
    _require_memory("an evaluation", evaluate, mesh)
    return RunPrograms(
        step=step,
        update=update,
        later=tuple((each, _compiled(each, mesh)) for each in later),
        evaluation=evaluation,
        evaluate=evaluate,
        sharpness=(
            build_sharpness(run, mesh, step.state, evaluation)
            if run.config.train.sharpness
            else None
        ),
    )


def _compiled(step: Step, mesh: Mesh) -> Any:
    compiled = step.lower().compile()
    _require_memory("the training step", compiled, mesh)
    return compiled


def _require_memory(what: str, compiled: Any, mesh: Mesh) -> None:
    """Refuse a program that needs more memory than this machine has at all.

    A GPU or TPU refuses by itself; a host promises whatever memory is requested, and the system
    kills the process that uses it.
    """
    needed = program_bytes(compiled)
    if mesh.local_devices[0].platform != "cpu" or needed is None:
        return
    needed *= len(mesh.local_devices)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise DoesNotFit(
            f"{what} needs {format_bytes(needed)} of memory, and this machine has "
            f"{format_bytes(there)}: {_LESS}."
        )


_LESS = "a smaller batch, batch.microbatches, a smaller network or shorter samples need less"


@contextmanager
def refusing_without_memory() -> Iterator[None]:
    """Turn the error of a device whose memory is used up into a refusal.

    Raises:
        DoesNotFit: in place of that error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        is_of_memory = re.search("out of memory|allocat", str(error), re.IGNORECASE)
        if not (str(error).startswith(OUT_OF_MEMORY) and is_of_memory):
            raise  # the status has other causes too, such as a message that is too long
        said = str(error).splitlines()[0].removeprefix(f"{OUT_OF_MEMORY}: ").rstrip(".")
        raise DoesNotFit(f"the memory of a device is used up ({said}): {_LESS}.") from error


def program_bytes(compiled: Any) -> int | None:
    """Device memory that a compiled program needs, including its arguments; None if the compiler
    does not say."""
    statistics = compiled.memory_analysis()
    return None if statistics is None else MemoryUse.of_statistics(statistics).peak_bytes


def measured_and_predicted(files: RunFolder, step_times: Sequence[float]) -> str:
    """The measured median step time and the predicted one in words; empty without measurements."""
    if not step_times:
        return ""
    step_seconds = median(step_times)
    if (prediction := kept_prediction(files)) is None:
        return f"; median step {format_seconds(step_seconds)}, predicted {UNKNOWN}"
    predicted = format_seconds(prediction.step_seconds)
    note = slow_note(prediction, step_seconds)
    suffix = f" ({note})" if note else ""
    return f"; median step {format_seconds(step_seconds)}, predicted {predicted}{suffix}"


def resume_command(files: RunFolder, run: ResolvedRun) -> str:
    """The shell command that resumes a run as it was started: by `scalejax launch`, or alone."""
    path, count = files.path, run.layout.device_count
    virtual = f" --cpu-devices {count}" if jax.default_backend() == "cpu" and count > 1 else ""
    alone = f"scalejax train {path / 'run.toml'} --folder {path}{virtual} --resume"
    return os.environ.get(GO_ON, alone)
