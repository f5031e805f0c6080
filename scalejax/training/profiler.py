"""Profiler traces of selected steps of a run: wait, warm up, record, repeat.

Knows when the profiler starts and stops; knows nothing of the contents of a step.
"""

import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax

from scalejax.core.errors import ConfigError, refusal, require_at_least
from scalejax.simulator.perfetto import STEP_MARK


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSchedule:
    """Steps of a run to record, counted from its start, as in `torch.profiler.schedule`."""

    wait: int = 10
    """Steps before the profiler starts."""
    warmup: int = 2
    """Steps that are recorded and discarded: starting the profiler is slow."""
    active: int = 5
    """Steps that are recorded, in one trace."""
    repeat: int = 1
    """Number of cycles."""

    def __post_init__(self) -> None:
        require_at_least("profile.wait", self.wait, 0)
        require_at_least("profile.warmup", self.warmup, 0)
        require_at_least("profile.active", self.active, 1)
        require_at_least("profile.repeat", self.repeat, 1)

    @property
    def cycle(self) -> int:
        """Steps in one cycle."""
        return self.wait + self.warmup + self.active


def parse_schedule(text: str) -> TraceSchedule:
    """The schedule in "wait,warmup,active,repeat", such as "10,2,5,1".

    Raises:
        ConfigError: if there are not four whole numbers, or they are not a valid schedule.
    """
    try:
        wait, warmup, active, repeat = (int(part) for part in text.split(","))
    except ValueError as error:
        accepted = "it must be four whole numbers of steps: WAIT,WARMUP,ACTIVE,REPEAT (10,2,5,1)"
        raise ConfigError(refusal("profile_schedule", text, accepted)) from error
    return TraceSchedule(wait=wait, warmup=warmup, active=active, repeat=repeat)


class StepTraces:
    """Starts and stops the profiler between the steps of one session."""

    def __init__(self, folder: Path, schedule: TraceSchedule | None) -> None:
        """Create without starting the profiler.

        Args:
            folder: parent of one folder for each trace, named by its first step.
            schedule: which steps; None to record nothing at all.
        """
        self._folder = folder
        self._schedule = schedule
        self._done = 0
        self._kept: Path | None = None
        self._discarded: Path | None = None

    @property
    def is_boundary(self) -> bool:
        """Whether the profiler starts or stops before the next step: no step may be running."""
        schedule = self._schedule
        if schedule is None or self._done > schedule.cycle * schedule.repeat:
            return False
        begins = (0, schedule.wait, schedule.wait + schedule.warmup)
        return self._done % schedule.cycle in begins

    def cross(self, step: int) -> None:
        """Start or stop the profiler, as due after `step` updates."""
        schedule = self._schedule
        if schedule is None:
            return
        self.close()
        place, cycle = self._done % schedule.cycle, self._done // schedule.cycle
        if cycle >= schedule.repeat:
            return
        if place == schedule.wait + schedule.warmup:
            self._kept = self._folder / f"step-{step + 1:06d}"
            _start(self._kept)
        elif place == schedule.wait:
            self._discarded = self._folder / ".warm-up"
            _start(self._discarded)

    def step(self, number: int) -> AbstractContextManager[object]:
        """Context around the dispatch of update `number`, which annotates it in the trace."""
        self._done += 1
        if self._kept is None:
            return nullcontext()
        return jax.profiler.StepTraceAnnotation(STEP_MARK, step_num=number)

    def close(self) -> None:
        """Stop the profiler if it runs."""
        if self._kept is not None or self._discarded is not None:
            jax.profiler.stop_trace()
        if self._discarded is not None:
            shutil.rmtree(self._discarded, ignore_errors=True)
        self._kept = self._discarded = None


def require_room(schedule: TraceSchedule, steps: int) -> None:
    """Refuse a schedule that would record nothing in `steps` steps.

    Raises:
        ConfigError: naming the longest wait that would do.
    """
    if schedule.wait + schedule.warmup < steps:
        return
    accepted = (
        f"the run has {steps} steps, so that wait and warm-up must be below {steps} together "
        f"(profile_schedule 0,0,{min(schedule.active, steps)},1 records the first)"
    )
    raise ConfigError(refusal("profile.wait", schedule.wait, accepted))


def _start(folder: Path) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions would be most of the file
    jax.profiler.start_trace(str(folder), profiler_options=options)
