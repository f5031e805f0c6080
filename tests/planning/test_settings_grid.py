"""Settings of a page: which layouts are compiled, and what is said of those that are not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scalejax import load_cluster
from scalejax.config.run import RunConfig
from scalejax.core.errors import ProfileError, ScalejaxError
from scalejax.core.progress import OnProgress, Progress
from scalejax.core.serialization import build
from scalejax.hardware import NO_SITE
from scalejax.planning import settings_grid as planned
from scalejax.planning.settings_grid import Axes, Place, SettingsGrid, settings_grid
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import Strategy
from scalejax.xla import ProfileJob
from scalejax.xla.closed_form import program_in_closed_form

RUN = {
    "model": {"name": "gpt", "layers": 2, "hidden": 256, "heads": 2},
    "data": {"name": "synthetic_tokens", "tokens": 256, "vocabulary": 1024,
             "train_examples": 100_000},
    "batch": {"global_batch": 8},
    "optimizer": {"name": "adamw"},
    "schedule": {"base_learning_rate": 0.001},
}  # fmt: skip
HUGE = 10**12


class Compiler:
    """In place of the compiler: it refuses the first step of each type, needs all memory for the
    second, and makes of others the closed form twice over."""

    def __init__(self) -> None:
        self.jobs: list[list[ProfileJob]] = []

    def __call__(
        self, jobs: Sequence[ProfileJob], on_progress: OnProgress
    ) -> list[Program | ScalejaxError]:
        """The answers to jobs, of which it keeps a list."""
        self.jobs.append(list(jobs))
        on_progress(Progress(done=1))
        return [self._made(job) for job in jobs]

    def _made(self, job: ProfileJob) -> Program | ScalejaxError:
        if len(self.jobs) == 1:
            return ProfileError("it does not compile")
        program = program_in_closed_form(job)
        if len(self.jobs) == 2:
            return replace(program, memory=replace(program.memory, temporary_bytes=HUGE))
        return replace(program, operations=program.operations * 2)


def grid_of(
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    compute_dtypes: tuple[str, ...],
    *,
    has_compiler: bool = True,
) -> SettingsGrid:
    """The grid of a small network on four devices, with that compiler."""
    monkeypatch.setattr(planned, "profile_each", compiler)
    monkeypatch.setattr(planned, "has_cuda_compiler", lambda: has_compiler)
    axes = Axes(
        places=(Place(cluster=load_cluster("dgx-h100"), site=NO_SITE),),
        device_counts=(4,),
        global_batches=(8,),
        compute_dtypes=compute_dtypes,
        network_multiples=(0.5, 1),
        frameworks=("xla-2026", "megatron-core-2026"),
    )
    return settings_grid(build(RunConfig, RUN), axes, layouts=4)


def test_layouts_are_compiled_until_one_fits(monkeypatch: pytest.MonkeyPatch):
    """What the compiler refuses is no layout of the page, since `predict` refuses it; what does not
    fit is followed by the next. The one that fits comes first, though closed forms beside it are
    faster, and at every rate of the network, of one program."""
    compiler = Compiler()

    grid = grid_of(compiler, monkeypatch, ("bfloat16", "float32"))

    assert [len(each) for each in compiler.jobs] == [2, 2, 2]  # of either type, thrice
    types = {job.run.config.model.compute_dtype for job in compiler.jobs[0]}
    assert types == {"bfloat16", "float32"}
    for setting, entries in grid.entries.items():
        if setting.framework == "megatron-core-2026":
            assert {each.origin for each in entries} == {"kernels"}
            continue
        assert [each.origin for each in entries] == ["compiled", "compiled", "closed_form"]
        assert [each.prediction.fits for each in entries] == [True, False, True]
        best = entries[0]
        assert best.closed_form_seconds is not None
        assert best.prediction.step_seconds > 1.5 * best.closed_form_seconds
    lowest, *_, highest = grid.closed_form_errors
    assert lowest == pytest.approx(-0.5, abs=0.1)
    assert highest == pytest.approx(0, abs=0.01)
    assert grid.why_not_compiled == {}


def test_what_is_fastest_at_another_rate_of_the_network_is_compiled_too(
    monkeypatch: pytest.MonkeyPatch,
):
    """The page lets nobody choose what was not compiled: where the layout that suits the cluster's
    own network were the only one, a network of a hundredth would look slower than it is."""

    def compiled(jobs: Sequence[ProfileJob], on_progress: OnProgress) -> list[Program]:
        del on_progress
        return [program_in_closed_form(job) for job in jobs]

    monkeypatch.setattr(planned, "profile_each", compiled)
    monkeypatch.setattr(planned, "has_cuda_compiler", lambda: True)
    axes = Axes(
        places=(Place(cluster=load_cluster("dgx-h100"), site=NO_SITE),),
        device_counts=(16, 32),
        global_batches=(64,),
        compute_dtypes=("bfloat16",),
        network_multiples=(0.01, 1, 4),
        frameworks=("xla-2026",),
    )
    config = build(RunConfig, RUN)

    plain = settings_grid(config, axes, confirm=0).entries
    found = settings_grid(config, axes).entries

    fastest: dict[int, set[Strategy]] = {}
    for setting, entries in plain.items():
        fastest.setdefault(setting.device_count, set()).add(entries[0].strategy)
        assert found[setting][0].strategy == entries[0].strategy
    assert max(map(len, fastest.values())) > 1, "one layout suits all"
    for setting, entries in found.items():
        made = {each.strategy for each in entries if each.origin == "compiled"}
        assert made == fastest[setting.device_count]


def test_without_a_compiler_closed_forms_are_said_to_be_that(monkeypatch: pytest.MonkeyPatch):
    """The chip's: that of this machine's CPU would say too much time."""
    compiler = Compiler()

    grid = grid_of(compiler, monkeypatch, ("bfloat16",), has_compiler=False)

    assert compiler.jobs == []
    assert grid.why_not_compiled == {"dgx-h100": "no compiler for GPUs is installed"}
    of_xla = [
        each for s, some in grid.entries.items() if s.framework == "xla-2026" for each in some
    ]
    assert {each.origin for each in of_xla} == {"closed_form"}
