"""Several processes of a run are started, watched and stopped together, whatever happens to one."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from scalejax.cli.main import main
from scalejax.config.run import load_config
from scalejax.core.errors import ExitCode
from scalejax.launch import Launch, launch
from scalejax.training.manifest import first_difference, read_manifest
from scalejax.training.record import RunFolder, figures
from scalejax.training.reporter import Silent
from scalejax.training.time_accounting import load_intervals, load_time_account
from scalejax.training.train import train

ROOT = Path(__file__).parents[2]
RUN = """
seed = 3
[model]
name = "mlp"
hidden = [16]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 200
test_examples = 30
[batch]
global_batch = 8
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
warmup = "none"
[train]
epochs = 8
log_every_steps = 1
checkpoint_every_steps = 20
evaluate_every_epochs = 4
"""
STEPS = 8 * 25
CODE = "import sys; from scalejax.cli.main import main; sys.exit(main())"
IMPATIENT = (
    "import functools; from scalejax.cli import launch as command; "
    f"command.Launch = functools.partial(command.Launch, stopped_seconds=2.0); {CODE}"
)
"""A launch that waits for a stopped process for two seconds, and not for fifteen."""

# Every test starts processes that each import JAX.
pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def run_file(tmp_path):
    """The file of a run of 200 short updates, checkpointed every 20."""
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of what is started; a program is compiled by the first process that needs it."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in this process
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def start(run_file, environment):
    """Starts `scalejax launch` of two processes that train into a folder."""

    def started(folder, *flags, code=CODE):
        words = ("launch", "--np", "-2", str(run_file), "--folder", str(folder), *flags)
        return subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return started


def workers_of(launcher):
    """Ids of its processes, the first first."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return [int(child) for child in children.split()]


def wait_for_step(launcher, folder, step):
    """Return once the record in `folder` has reached `step`."""
    measurements = RunFolder(path=folder).measurements
    while launcher.poll() is None:
        if measurements.exists() and f'"step": {step},' in measurements.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(launcher.communicate()[0])


def ended(launcher, workers):
    """Exit code, and what was said; every process must be gone."""
    said, _ = launcher.communicate(timeout=240)
    end = time.monotonic() + 60
    while any(is_alive(worker) for worker in workers) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [worker for worker in workers if is_alive(worker)], said
    return launcher.returncode, said


def started_at(process):
    """When the system started it, to a hundredth of a second."""
    about = Path(f"/proc/{process}/stat").read_text()
    ticks = int(about.rpartition(")")[2].split()[19])  # proc(5): starttime
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def is_alive(process):
    """Whether it runs; a zombie does not."""
    try:
        about = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return about.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Figures of the same run in one process of two devices, to which nothing happens."""
    folder = tmp_path_factory.mktemp("alone")
    run_file = folder / "run.toml"
    run_file.write_text(RUN)
    config = load_config(run_file)
    train(config, folder / "run", device_count=2, reporter=Silent())
    return figures(folder / "run")


def assert_alike(folder, alone):
    """The same steps, and figures to the order of sums over devices: 1e-5 after 200 updates."""
    ours = figures(folder)
    assert [row[0] for row in ours] == [row[0] for row in alone]
    ours, alone = (np.array([row[1:] for row in rows], float) for rows in (ours, alone))
    np.testing.assert_allclose(ours, alone, rtol=1e-5, atol=1e-6)


def test_a_killed_process_is_named_and_the_run_goes_on_to_the_same_end(start, tmp_path, alone):
    """The first, which the other has met, after a checkpoint; restarted on the one process that is
    left, from that checkpoint or a later one. The ledger has both sessions, and the time between.
    """
    folder = tmp_path / "run"
    launcher = start(folder, "--elastic", "1:2", "--rejoin-seconds", "600", "--copy-seconds", "0")
    wait_for_step(launcher, folder, 50)
    workers = workers_of(launcher)
    begin = started_at(workers[0])

    whole = [int(path.name) for path in (folder / "checkpoints").glob("[0-9]*[0-9]")]
    os.kill(workers[0], signal.SIGKILL)
    code, said = ended(launcher, workers)

    assert code == 0, said
    files = RunFolder(path=folder)
    intervals = load_intervals(files.time)
    ledger, last_line = load_time_account(files.time), intervals[-1]
    assert ledger is not None
    assert last_line.first_step is not None
    assert ledger.goodput is not None
    assert (ledger.sessions, last_line.session) == (2, 1)
    assert last_line.first_step >= max(whole, default=0)
    # The ledger is up to half a second behind a kill: it may not have seen the steps made anew.
    seen = max(interval.step for interval in intervals if interval.session == 0)
    assert ledger.repeated_steps == max(0, seen - last_line.first_step) < STEPS
    assert (ledger.wasted_seconds > 0) >= (ledger.repeated_steps > 0)
    assert min(ledger.startup_seconds, ledger.compile_seconds) > 0
    ended_at = files.time.stat().st_mtime
    assert ended_at - begin - 4 < ledger.seconds < ended_at - begin + 0.1
    assert f"goodput {ledger.goodput:.1%}".replace("%", " %") in " ".join(said.split())
    assert re.search(r"process 0 was killed by SIGKILL .* at step \d+", said)
    assert "restart 1, 1 process" in said
    assert "Traceback" not in said
    assert_alike(folder, alone)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.1])
def test_an_interrupt_while_processes_start_is_one(start, tmp_path, delay_seconds):
    """Also before Python has come so far as to handle it."""
    launcher = start(tmp_path / "run")
    while len(workers := workers_of(launcher)) < 2:
        time.sleep(0.005)
    time.sleep(delay_seconds)

    launcher.send_signal(signal.SIGINT)
    code, said = ended(launcher, workers)

    assert code == 128 + signal.SIGINT, said
    assert "Traceback" not in said


def test_a_stopped_process_counts_as_lost_and_without_restarts_the_run_ends(start, tmp_path):
    """SIGSTOP: the other waits for it, and would for ever. An exit code of its own, within seconds,
    and nothing left behind."""
    folder = tmp_path / "run"
    launcher = start(folder, "--train.epochs", "4000", code=IMPATIENT)
    wait_for_step(launcher, folder, 30)
    workers = workers_of(launcher)

    os.kill(workers[1], signal.SIGSTOP)
    begin = time.monotonic()
    code, said = ended(launcher, workers)

    assert code == ExitCode.LOST, said
    assert time.monotonic() - begin < 120
    assert "process 1 has been stopped for 2 s" in said
    assert Launch(command=(), processes=1, folder=folder).stopped_seconds == 15


def test_a_wish_to_stop_is_passed_on_and_all_save(start, run_file, tmp_path, alone):
    """SIGTERM to the launcher: both processes write the checkpoint of that step, and it counts. The
    run is then resumed by it, from there, and says how it went."""
    folder = tmp_path / "run"
    launcher = start(folder)
    wait_for_step(launcher, folder, 30)
    workers = workers_of(launcher)

    launcher.send_signal(signal.SIGTERM)
    code, said = ended(launcher, workers)
    assert code == 128 + signal.SIGTERM, said
    assert "interrupted: at step" in said
    assert f"continue with: scalejax launch --np -2 {run_file} --folder {folder} --resume" in said
    (step,) = map(int, re.findall(r"interrupted: at step (\d+)", said))
    checkpoint = RunFolder(path=folder).checkpoints / str(step)
    assert first_difference(checkpoint, read_manifest(checkpoint).files) is None
    writers = {path.name for path in (checkpoint / "state").glob("ocdbt.process_*")}
    assert writers == {"ocdbt.process_0", "ocdbt.process_1"}
    code, said = ended(start(folder, "--resume", "--json", str(tmp_path / "out.json")), ())

    assert f"resumed: at step {step}," in said
    assert code == 0, said
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["status"], run["steps"]) == ("completed", STEPS)
    assert_alike(folder, alone)


def test_processes_die_with_the_launcher(start, tmp_path):
    """Which is killed, and can do nothing for them any more."""
    folder = tmp_path / "run"
    launcher = start(folder, "--train.epochs", "4000")
    wait_for_step(launcher, folder, 30)
    workers = workers_of(launcher)

    launcher.kill()

    ended(launcher, workers)


def test_what_is_refused_is_refused_once(start, run_file, tmp_path, capfd):
    """By the launcher, or by the processes where only they can know."""
    words = ["launch", "--np", "-2", str(run_file), "--folder", str(tmp_path / "run")]
    assert main([*words, "--model.name", "mpl"]) == 2
    assert capfd.readouterr().err.count("error:") == 1

    code, said = ended(start(tmp_path / "run", "--batch.global_batch", "7"), ())
    assert (code, said.count("error:")) == (2, 1), said
    assert "batch.global_batch=7" in said


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_result_that_cannot_be_written_leaves_the_code_of_the_run(
    run_file, tmp_path, monkeypatch, capsys, flags
):
    """Without --json the record is not even read; with it, it is said that it is damaged."""
    folder = RunFolder(path=tmp_path / "run")

    def lose(job):
        folder.path.mkdir()
        folder.measurements.write_text("{}\n{}\n")
        return ExitCode.LOST

    monkeypatch.setattr("scalejax.cli.launch.launch", lose)
    words = ["launch", "--np", "-2", str(run_file), "--folder", str(folder.path)]

    with pytest.raises(SystemExit) as ended:
        main([*words, *flags, *(str(tmp_path / "out.json") for _ in flags)])

    assert ended.value.code == ExitCode.LOST
    assert ("error: how it went is not written" in capsys.readouterr().err) == bool(flags)


def test_a_run_that_diverged_is_not_started_again(tmp_path):
    """Every process ends with code 3, and so does the launcher."""
    code = "import sys; print('begun'); sys.exit(3)"
    job = Launch(
        command=(sys.executable, "-c", code), processes=2, folder=tmp_path, most_restarts=2
    )
    said = io.StringIO()

    assert launch(job, out=said) == 3
    assert said.getvalue().count("begun") == 1  # of the first process


def test_processes_of_mpirun_train_as_one(run_file, environment, tmp_path, alone):
    """With nothing said but mpirun -n 2; tasks of SLURM do in `test_slurm`."""
    if not shutil.which("mpirun"):
        pytest.skip("needs the Debian package openmpi-bin")
    folder = tmp_path / "run"
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    done = subprocess.run(
        [*mpirun, sys.executable, "-c", CODE, "train", str(run_file), "--folder", str(folder)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout
    assert done.stdout.count("completed: 200 steps") == 1
    assert_alike(folder, alone)
