"""Runs the benchmarks of a plan, one at a time, round by round.

Knows processes and progress; the workers time the steps.
"""

import io
import os
import sys
from dataclasses import dataclass, field

from scalejax.core import serialization
from scalejax.core.environment import has_accelerator
from scalejax.core.folder import locked
from scalejax.core.progress import OnProgress, Progress, no_display
from scalejax.launch import Launch, launch
from scalejax.launch.gpus import VISIBLE, visible_gpus
from scalejax.launch.local import Signals
from scalejax.launch.watchdog import STOPPED
from scalejax.measure.bench.folder import BenchFolder
from scalejax.measure.bench.plan import Benchmark, BenchPlan, Job, Settings
from scalejax.measure.bench.results import BenchResult, read_result


@dataclass(slots=True)
class BenchProgress:
    """Progress of a bench, counted as in DLBS's progress file."""

    total: int
    """Number of rounds, summed over all benchmarks."""
    skipped: int = 0
    """Rounds finished earlier and not timed again."""
    finished: int = 0
    """Rounds timed in this call."""
    failed: list[str] = field(default_factory=list)
    """Error messages, one for each failed benchmark; its later rounds are skipped."""
    active: str | None = None
    """The benchmark being timed."""

    def save(self, folder: BenchFolder, status: str) -> None:
        """Write the progress file; `status` is "running", "completed" or "interrupted"."""
        table = {
            "status": status,
            "total": self.total,
            "skipped": self.skipped,
            "finished": self.finished,
            "failed": len(self.failed),
            "left": self.total - self.skipped - self.finished - len(self.failed),
            "active": self.active,
            "problems": self.failed,
        }
        serialization.save_text(serialization.stamped("bench_progress", 1, table), folder.progress)


def begin_bench(plan: BenchPlan, folder: BenchFolder) -> None:
    """Write `plan` into `folder` and keep existing results, which are found by benchmark."""
    serialization.save_text(plan.text, folder.run_file)
    serialization.save_text(plan.to_json(), folder.plan)


def run_bench(
    plan: BenchPlan,
    folder: BenchFolder,
    *,
    reruns: bool = False,
    monitor_seconds: float = 0.5,
    on_progress: OnProgress = no_display,
) -> list[str]:
    """Time every benchmark of `plan` that has no finished result.

    All are timed once before any is timed again, so that other load on the machine affects all
    of them equally.

    Args:
        plan: the benchmarks.
        folder: output folder.
        reruns: whether to repeat finished ones.
        monitor_seconds: sampling period of the usage of a benchmark; 0 for none.
        on_progress: called as each benchmark begins.

    Returns:
        Error messages, one for each failed benchmark; the others are done.

    Raises:
        ConfigError: if another process is measuring in `folder`.
        KeyboardInterrupt: on SIGINT or SIGTERM; finished results stay.
    """
    # Two at once would disturb each other's timings.
    refused = f"another process is measuring in {str(folder.path)!r}: wait for it, or stop it."
    with locked(folder.lock, refused), Signals() as signals:
        begin_bench(plan, folder)
        progress = BenchProgress(total=len(plan.rounds))
        lost: set[str] = set()
        try:
            for repeat, each in plan.rounds:
                signals.require_none()
                if each.name in lost:
                    progress.total -= 1
                    continue
                if not reruns and _is_timed_here(read_result(each, folder, repeat)):
                    progress.skipped += 1
                    continue
                progress.active = f"{each.label}, round {repeat + 1} of {plan.repeats}"
                progress.save(folder, "running")
                on_progress(Progress(part=progress.active))
                problem = _time(each, folder, repeat, monitor_seconds, signals)
                signals.require_none()  # even if the benchmark that got one ended normally
                if problem is None:
                    progress.finished += 1
                else:
                    lost.add(each.name)
                    progress.failed.append(f"{each.label}: {problem}")
            signals.require_none()
        except KeyboardInterrupt:
            progress.save(folder, "interrupted")
            raise
        progress.active = None
        progress.save(folder, "completed")
        return progress.failed


def _is_timed_here(result: BenchResult | None) -> bool:
    """Whether there is a result from the platform of this machine: machines with and without GPUs
    may share the folder."""
    return result is not None and (result.platform != "cpu") == has_accelerator()


def _time(
    benchmark: Benchmark,
    folder: BenchFolder,
    repeat: int,
    monitor_seconds: float,
    signals: Signals,
) -> str | None:
    """Time one round of a benchmark; returns the error message, or None."""
    settings, name = benchmark.settings, benchmark.name
    serialization.save(Job(settings=settings, run=benchmark.run), folder.job(name))
    folder.result(name, repeat).unlink(missing_ok=True)
    said = io.StringIO()
    code = launch(
        Launch(
            # -P: the working folder may hold a json.py of the user's.
            command=(
                *(sys.executable, "-P", "-m", "scalejax.measure.bench.worker"),
                *(str(folder.path), name, str(repeat), str(monitor_seconds)),
            ),
            processes=settings.processes,
            folder=folder.logs(name),
            environment=_environment(settings),
        ),
        said,
        signals,
    )
    if code in STOPPED:
        raise KeyboardInterrupt
    if code == 0 and read_result(benchmark, folder, repeat) is not None:
        return None
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    reason = lines[-1] if lines else "no output"
    return f"ended with exit code {code}: {reason} (logs: {folder.logs(name)})"


def _environment(settings: Settings) -> dict[str, str]:
    """Environment variables of the processes, which share the devices evenly."""
    found = {"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
    if not has_accelerator():
        devices = settings.devices // settings.processes
        return found | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    gpus = visible_gpus(os.environ)[: settings.devices]
    return found | ({VISIBLE: ",".join(gpus)} if gpus else {})
