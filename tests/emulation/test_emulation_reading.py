"""What stops a gradient stops the run: samples that cannot be read, too few of them, Ctrl-C."""

from dataclasses import replace

import pytest
from emulated_outcomes import CONFIG, VARIED, emulated, run_of

from scalejax.config.emulation import (
    DownpourConfig,
    EmulationConfig,
    FailuresConfig,
    SynchronousConfig,
)
from scalejax.core.errors import ConfigError
from scalejax.emulation.checks import emulated_run
from scalejax.emulation.instructions import InstructionLog, Rows
from scalejax.emulation.run import executor_of
from scalejax.emulation.sampler import Samples

ALGORITHMS = {
    "downpour": DownpourConfig(),
    "synchronous": SynchronousConfig(),
    "backup": SynchronousConfig(gradient_sync="parameter_server", backup_workers=1),
}


def refuse_reading(error: BaseException, monkeypatch) -> None:
    """No samples can be read."""

    def taken(samples: Samples, rows: Rows):
        raise error

    monkeypatch.setattr(Samples, "take", taken)


@pytest.mark.parametrize(
    ("name", "error", "mtbf_seconds"),
    [
        ("downpour", ConfigError("no samples"), None),
        ("downpour", KeyboardInterrupt(), 50.0),
        ("synchronous", ConfigError("no samples"), 50.0),
        ("backup", KeyboardInterrupt(), None),
    ],
)
@pytest.mark.timeout(60)
def test_samples_that_cannot_be_read_end_the_run(name, error, mtbf_seconds, monkeypatch):
    """Though others wait for gradients that were begun in one program with those."""
    failures = FailuresConfig(worker_mtbf_seconds=mtbf_seconds, worker_restart_seconds=1.0)
    emulation = EmulationConfig(algorithm=ALGORITHMS[name], workers=4, failures=failures)
    refuse_reading(error, monkeypatch)

    with pytest.raises(type(error)):
        emulated(emulation, VARIED, {"batch.global_batch": 12})


def test_whoever_asks_after_a_failure_is_told(monkeypatch):
    """Of another gradient that waited as well."""
    executor = executor_of(run_of(), EmulationConfig(algorithm=DownpourConfig()))
    instructions = InstructionLog(executor, lambda: 0.0, 1)
    params = instructions.initial()
    refuse_reading(ConfigError("no samples"), monkeypatch)
    rows = [Rows(worker=0, index=index, workers=1, way="own") for index in range(2)]
    made = [instructions.gradient(params, each) for each in rows]

    for _, metrics in made:
        with pytest.raises(ConfigError, match="no samples"):
            instructions.read(metrics)


@pytest.mark.parametrize(
    ("name", "workers", "message"),
    [
        ("downpour", 12, None),
        ("downpour", 13, r"workers=13 is refused: .* 96 training .* 8 of it .*nearest: 12"),
        ("backup", 9, None),
        ("synchronous", 8, None),
    ],
)
def test_workers_with_too_few_examples_are_refused(name: str, workers: int, message: str | None):
    """At the door, where each has a part of them for itself."""
    emulation = EmulationConfig(algorithm=ALGORITHMS[name], workers=workers)
    asked = replace(CONFIG, emulation=emulation)

    if message is None:
        emulated_run(asked)
        return
    with pytest.raises(ConfigError, match=message):
        emulated_run(asked)
