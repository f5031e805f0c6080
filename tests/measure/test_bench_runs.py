"""Benches with real processes: what is timed, what is kept, and what an interrupt leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_cases import RUN

from scalejax.cli.main import main
from scalejax.measure.bench import BenchFolder, measured_runs, read_summaries
from scalejax.measure.bench.results import read_plan

ROOT = Path(__file__).parents[2]
# Every test starts processes that each import JAX.
pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def run_file(tmp_path):
    """The file of a run of tiny steps."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_real_steps_are_timed_and_not_timed_again(run_file, tmp_path, capsys):
    """One device, and two in two processes with batches of the data; then a report."""
    folder = BenchFolder(path=tmp_path / "bench")
    words = [
        *("bench", str(run_file), "--folder", str(folder.path), "--steps", "6"),
        *("--warmup-steps", "2", "--repeats", "1", "--monitor", "0.02"),
        *("-E", '{"cases": [{}, {"devices": 2, "processes": 2, "batches": "real"}]}'),
    ]
    begin = time.perf_counter()

    assert main(words) == 0

    wall_seconds = time.perf_counter() - begin
    one, two = summaries = read_summaries(read_plan(folder), folder)
    for each, batch in ((one, 8), (two, 16)):
        (result,) = each.results
        assert (len(result.warmup_seconds), len(result.step_seconds)) == (2, 6)
        assert result.global_batch == batch
        assert all(seconds > 0 for seconds in result.step_seconds)
        assert sum(result.step_seconds) < wall_seconds
        assert result.usage[0].seconds < 0 <= result.usage[-1].seconds
    assert one.wait_share == 0
    assert {each.process for each in two.results[0].usage} == {0, 1}
    runs = [run for count in (1, 2) for run in measured_runs(summaries, folder, processes=count)]
    assert [run.program.device_count for run in runs] == [1, 2]
    assert "images/sec: " in capsys.readouterr().out

    written = folder.result(one.benchmark.name, 0).stat().st_mtime_ns
    assert main(words) == 0
    assert folder.result(one.benchmark.name, 0).stat().st_mtime_ns == written
    assert json.loads(folder.progress.read_text())["skipped"] == 2


def test_an_end_from_outside_keeps_what_is_finished_and_leaves_no_process(run_file, tmp_path):
    """A kill takes the processes that were started with it; what was timed is not timed again;
    Ctrl-C says how to go on."""
    folder = BenchFolder(path=tmp_path / "bench")
    words = ["bench", str(run_file), "--folder", str(folder.path), "--repeats", "1"]
    words += ["-V", "steps=[3,1000000]", "--warmup-steps", "1"]
    written = []
    for number in (signal.SIGKILL, signal.SIGINT):
        bench = subprocess.Popen(
            [sys.executable, "-m", "scalejax", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _wait_until(lambda: _is_training(folder))
            bench.send_signal(number)
            _, said = bench.communicate(timeout=240)
        finally:
            bench.kill()
        (result,) = folder.path.glob("runs/*/result-0.json")
        written.append(result.stat().st_mtime_ns)
        _wait_until(lambda: not _processes_of(folder))
        for beat in folder.path.glob("runs/*/logs/heartbeat-0"):
            beat.unlink()

    assert bench.returncode == 130
    assert "1 of 2 rounds are in" in said
    assert json.loads(folder.progress.read_text())["status"] == "interrupted"
    assert written[0] == written[1]


def _is_training(folder: BenchFolder) -> bool:
    """Whether the long benchmark is at its steps."""
    beats = folder.path.glob("runs/*/logs/heartbeat-0")
    return any(folder.path.glob("runs/*/result-0.json")) and any(
        b"training" in beat.read_bytes()
        for beat in beats
        if not (beat.parents[1] / "result-0.json").exists()
    )


def _processes_of(folder: BenchFolder) -> list[str]:
    """Those whose command names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if str(folder.path).encode() in command:
            found.append(command.decode())
    return found


def _wait_until(is_so) -> None:
    deadline = time.monotonic() + 240
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
