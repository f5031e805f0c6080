"""Program of each case: from the archive, from the user's cache, or compiled.

Compiles several at a time, and each program once for all rows that share it, including rows that
differ only in the size of the data axis or in the number of microbatches. A case that the compiler
refuses is skipped.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scalejax.config.data import SyntheticTokensConfig
from scalejax.config.model import ELEMENT_BYTES, CausalConfig, GptConfig
from scalejax.config.parallelism import stage_layers
from scalejax.config.run import ResolvedRun
from scalejax.core.cache import user_folder
from scalejax.core.environment import compiler_settings
from scalejax.core.errors import ConfigError, ScalejaxError
from scalejax.simulator.frameworks.eager import (
    VOCABULARY_FACTORS,
    temporary_bytes_at_loss,
    with_eager_blocks,
    with_eager_loss,
)
from scalejax.simulator.frameworks.half_precision_weights import with_half_weights
from scalejax.simulator.frameworks.megatron import (
    with_attention_dropout,
    with_full_recompute,
    with_half_gradients,
    with_unpadded_heads,
)
from scalejax.simulator.frameworks.overlap import with_overlapped_state, with_overlapped_tensor
from scalejax.simulator.memory import memory_verdict
from scalejax.simulator.program import Program
from scalejax.simulator.timeline.timeline import timeline
from scalejax.simulator.transforms.pipeline import Pipeline, pipelined
from scalejax.simulator.transforms.scale_out import reduced, scaled_out
from scalejax.validation.archive import Archive, read_archive
from scalejax.validation.cases import Case
from scalejax.xla import for_chip, restored
from scalejax.xla.cache import cached_program, case_key, keep
from scalejax.xla.job import Compiled, RunJob
from scalejax.xla.target import Target, has_cuda_compiler, target_for
from scalejax.xla.worker_pool import run_jobs

OnProgress = Callable[[int, int], None]
"""Called with the number of programs that have been compiled, and of all that must be."""


class Programs:
    """Programs by key, found in the archive or the cache, or compiled on demand."""

    def __init__(
        self,
        archive: Archive | None = None,
        on_progress: OnProgress = lambda done, total: None,
        *,
        compiles: bool = True,
    ):
        """Start without programs.

        Args:
            archive: archive to read first; if None, the one that comes with scalejax.
            on_progress: see `OnProgress`.
            compiles: whether programs that are not in the archive are read from the user's cache
                or compiled; otherwise they are skipped.
        """
        if archive is None:
            # The user's own flags for the compiler change the programs; the archive knows none.
            archive = Archive({}) if compiler_settings() else read_archive()
        self.known: dict[str, Program | str] = {}
        """Program of each requested key, or the reason why there is none."""
        self._scaled_out: dict[tuple[str | int | bool, ...], Program | str | None] = {}
        self._archive = archive
        self._folder = user_folder()
        self._on_progress = on_progress
        self._compiles = compiles
        self._done = self._total = 0

    def find(self, cases: Sequence[Case]) -> list[Program | str]:
        """Program of each case, or the reason why there is none.

        Of the candidate runs of a case, the first whose program fits the device's memory is
        used, or else the last. Of a pipeline, the fastest of those that fit: the largest
        microbatch may leave too few of them to fill the stages.
        """
        answers: list[Program | str] = [""] * len(cases)
        shortest = [math.inf] * len(cases)
        open_cases, choice = list(range(len(cases))), 0
        while open_cases:
            tried = self._try(cases, open_cases, choice)
            still_open = []
            for index in open_cases:
                case, answer = cases[index], tried[index]
                seconds = _fitting_seconds(answer, case)
                if seconds is not None and seconds < shortest[index]:
                    shortest[index], answers[index] = seconds, answer
                elif shortest[index] == math.inf:
                    answers[index] = answer
                if choice + 1 < len(case.runs) and (seconds is None or case.stages > 1):
                    still_open.append(index)
            open_cases = still_open
            choice += 1
        return answers

    def _try(
        self, cases: Sequence[Case], indices: Sequence[int], choice: int
    ) -> dict[int, Program | str]:
        """Program of run number `choice` of each of these cases, or the reason why there is none.

        Programs that cannot be scaled out are compiled for all their devices.
        """
        answers: dict[int, Program | str] = {}
        open_ = list(indices)
        for is_reduced in (True, False):
            requested: dict[int, RequestedPrograms] = {}
            for index in open_:
                try:
                    requested[index] = request_for(cases[index], choice, is_reduced=is_reduced)
                except ScalejaxError as error:
                    answers[index] = one_line(error)
            self._require(
                job for each in requested.values() for job in (each.job, *each.larger_vocabularies)
            )
            for index, each in requested.items():
                answer = self._answer(each, cases[index])
                if answer is not None:
                    answers[index] = answer
            open_ = [index for index in open_ if index not in answers]
        return answers

    def _answer(self, requested: "RequestedPrograms", case: Case) -> Program | str | None:
        """Program for the requested devices, one object for equal requests; None if it cannot be
        scaled out to them."""
        split = requested.run.split
        sizes = (requested.run.layout.data, split.microbatches, case.stages, case.chunks)
        derived = (case.is_megatron, case.row.work.precision)
        derived = (*derived, case.overlaps_tensor, case.overlaps_state)
        derived = (*derived, case.has_eager_loss, case.has_eager_blocks)
        key = (case_key(requested.job), *sizes, *derived)
        if key not in self._scaled_out:
            program: Program | str | None = self.known[key[0]]
            if isinstance(program, Program):
                program = scaled_out(program, requested.job.run, requested.run)
            if isinstance(program, Program) and case.is_megatron:
                program = _as_megatron(program, requested.run, case)
            if isinstance(program, Program) and case.overlaps_tensor:
                program = with_overlapped_tensor(program)
            if isinstance(program, Program) and case.overlaps_state:
                program = with_overlapped_state(program)
            if isinstance(program, Program):
                larger_vocabularies = [
                    self.known[case_key(job)] for job in requested.larger_vocabularies
                ]
                program = _as_eager(program, requested.run, case, larger_vocabularies)
            if isinstance(program, Program):
                program = restored(program, case.runs[0])  # all are of one type
            if isinstance(program, Program) and case.stages > 1:
                program = _pipelined(program, requested.run, case)
            self._scaled_out[key] = program
        return self._scaled_out[key]

    def _require(self, jobs: Iterable[RunJob]) -> None:
        """Find or compile the programs of `jobs`."""
        missing: dict[str, RunJob] = {}
        for job in jobs:
            key = case_key(job)
            if key in self.known or key in missing:
                continue
            program = self._archive.program(key)
            if program is None and self._compiles:
                job = _compilable(job)
                program = cached_program(self._folder, job)
            if program is not None:
                self.known[key] = program
            elif self._compiles:
                missing[key] = job
            else:
                self.known[key] = "its program is not in the archive"
        self._total += len(missing)
        if missing:
            self._compile(list(missing), list(missing.values()))

    def _compile(self, keys: list[str], jobs: list[RunJob]) -> None:
        self._on_progress(self._done, self._total)

        def answer(index: int, program: Program | str) -> None:
            self.known[keys[index]] = program
            self._done += 1
            self._on_progress(self._done, self._total)

        def on_done(index: int, compiled: Compiled) -> None:
            keep(self._folder, jobs[index], compiled)
            answer(index, compiled.program)

        run_jobs(jobs, on_done, lambda index, error: answer(index, one_line(error)))


def _as_megatron(program: Program, run: ResolvedRun, case: Case) -> Program:
    """`program` of `run` with the differences of Megatron-LM."""
    model = run.config.model
    if not isinstance(model, GptConfig):
        return program
    if model.remat == "full":
        program = with_full_recompute(program)
    if model.attention == "unfused":
        (tokens,) = run.dataset.input_shape
        program = with_attention_dropout(program, tokens)
    if case.row.work.precision == "fp16":
        program = with_half_weights(with_half_gradients(program))
    return with_unpadded_heads(program, model.hidden // model.heads)


def _as_eager(
    program: Program, run: ResolvedRun, case: Case, larger_vocabularies: Sequence[Program | str]
) -> Program | str:
    """`program` of `run` with the memory of eager PyTorch, or the reason why it is unknown.

    `larger_vocabularies` are the programs of those jobs of `RequestedPrograms`.
    """
    model, layout = run.config.model, run.layout
    if not isinstance(model, CausalConfig):
        return program
    tokens = run.split.microbatch * run.dataset.input_shape[0] // layout.context
    if case.has_eager_loss:
        logits = tokens * run.dataset.classes // layout.tensor
        peaks: list[int] = []
        for each in larger_vocabularies:
            if isinstance(each, str):
                return each
            peaks.append(each.memory.temporary_bytes)
        at_loss = temporary_bytes_at_loss(peaks)
        program = with_eager_loss(program, logits, at_loss, is_divided=layout.tensor > 1)
    if case.has_eager_blocks and model.remat == "selective_op":
        size = tokens * model.hidden * ELEMENT_BYTES[model.compute_dtype]
        program = with_eager_blocks(program, size, model.layers)
    return program


def _pipelined(stage: Program, run: ResolvedRun, case: Case) -> Program | str:
    """Program of the pipeline whose last stage is `stage`, or the reason why there is none."""
    if not isinstance(run.config.model, GptConfig):
        return "only transformers have stages"
    if run.split.microbatches == 1:
        return "a pipeline with a single microbatch, which has no loop to take apart"
    (tokens,) = run.dataset.input_shape
    element_bytes = ELEMENT_BYTES[run.config.model.compute_dtype]
    pipeline = Pipeline(
        stages=case.stages,
        chunks=case.chunks,
        layers=_stage_layers(case),
        microbatches=run.split.microbatches,
        boundary_bytes=run.split.microbatch * tokens * run.config.model.hidden * element_bytes,
    )
    try:
        return pipelined(stage, pipeline)
    except ScalejaxError as error:
        return one_line(error)


def _stage_layers(case: Case) -> tuple[int, ...] | None:
    """Blocks of each stage; None if all stages hold equally many."""
    layers = case.row.model.layers or 0
    if case.chunks > 1 or layers % case.stages == 0:
        return None
    return stage_layers(layers, case.stages)


def one_line(error: ScalejaxError) -> str:
    """The text of an error as a reason, without line breaks and without its full stop."""
    return " ".join(str(error).split()).rstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedPrograms:
    """Programs that are compiled for a case."""

    job: RunJob
    """The reduced run, on the fewest devices and microbatches that suffice."""
    run: ResolvedRun
    """The run to which its program is scaled out."""
    larger_vocabularies: tuple[RunJob, ...] = ()
    """The run of `job` with `VOCABULARY_FACTORS` vocabularies, where its loss is not compiled."""


def request_for(case: Case, choice: int, *, is_reduced: bool) -> RequestedPrograms:
    """Programs to compile for run number `choice` of a case.

    Raises:
        ConfigError: if the chip cannot run it.
    """
    run = for_chip(case.runs[choice], case.cluster.chip)
    has_server = case.row.spread.gradient_exchange == "parameter_server"
    reduced_run = reduced(run, has_server=has_server) if is_reduced else run
    # Even if its compiler is not installed: the archive has its programs.
    target = target_for(case.cluster, reduced_run.layout.device_count, "cuda")
    times = VOCABULARY_FACTORS if case.has_eager_loss else ()
    larger_vocabularies = tuple(
        RunJob(run=_with_words(reduced_run, each), target=target) for each in times
    )
    return RequestedPrograms(
        job=RunJob(run=reduced_run, target=target), run=run, larger_vocabularies=larger_vocabularies
    )


def _with_words(run: ResolvedRun, times: int) -> ResolvedRun:
    """`run`, of a transformer, with a vocabulary `times` as large."""
    data, words = run.config.data, run.dataset.classes * times
    if not isinstance(data, SyntheticTokensConfig):
        raise ConfigError(f"the words of {data.name} are not counted out")
    config = replace(run.config, data=replace(data, vocabulary=words))
    return replace(run, config=config, dataset=replace(run.dataset, classes=words))


def _compilable(job: RunJob) -> RunJob:
    """`job` for the CPU, whose FLOP carry over, where no compiler for GPUs is installed."""
    if job.target.backend == "cpu" or has_cuda_compiler():
        return job
    substitute = Target(backend="cpu", name="cpu", device_count=job.target.device_count)
    return replace(job, target=substitute)


def _fitting_seconds(answer: Program | str, case: Case) -> float | None:
    """Step time of the program; None if it is missing or does not fit.

    Programs that the compiler refuses often do not fit. Where a case has no choice between runs,
    the time is not computed, and 0.
    """
    if isinstance(answer, str) or not memory_verdict(answer.memory, case.cluster.chip).fits:
        return None
    if case.stages == 1 or len(case.runs) == 1:
        return 0.0
    return timeline(answer, case.cluster).step_seconds
