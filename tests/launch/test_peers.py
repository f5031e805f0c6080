"""Processes watch each other's progress, whoever started them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from scalejax.core.errors import ConfigError, ExitCode
from scalejax.core.heartbeat import Heartbeat
from scalejax.core.process_group import Place
from scalejax.launch.peers import PeerWatch
from scalejax.launch.watchdog import Watch

ROOT = Path(__file__).parents[2]
CODE = "import sys; from scalejax.cli.main import main; sys.exit(main())"
SECONDS = 0.5
"""Limit without progress, in place of 60, where it is passed, whatever else holds up a process."""
LONG_SECONDS = 1.5
"""Where it is not to be passed: a process may be held up for half a second by a busy machine."""


class Shelf:
    """The store, in this process; it answers until it is frozen."""

    def __init__(self):
        self.values = {}
        self.mute = ""
        self.reads = 0
        self.answers = threading.Event()
        self.answers.set()

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        """As that of JAX."""
        self.answers.wait()
        if key != self.mute:
            self.values[key] = value

    def key_value_dir_get_bytes(self, key):
        """As that of JAX."""
        self.answers.wait()
        found = [pair for pair in self.values.items() if pair[0].startswith(key)]
        self.reads += key == "scalejax/told" and bool(found)
        return found


@pytest.fixture
def shelf():
    """A store, whose threads go on at the end."""
    store = Shelf()
    yield store
    store.answers.set()


@pytest.fixture
def heart():
    """The heartbeat of this process, which has trained for three steps."""
    heart = Heartbeat(None)
    for step in range(3):
        heart.at("waiting for input", step)
        heart.at("training", step)
    return heart


@pytest.fixture
def watched(shelf):
    """Starts the watch of one of two processes; its codes at the end."""
    watches, codes = [], {}

    def start(process, seconds=SECONDS, **changes):
        place = Place(process=process, processes=2, coordinator=None, told_by="a test")
        leave = partial(codes.setdefault, process)
        watch = PeerWatch(place, seconds, store=shelf, leave=leave, **changes)
        watches.append(watch)
        return watch

    yield start, codes
    shelf.answers.set()
    for watch in watches:
        watch.close()


def blamed(capfd):
    """What was said of a process that hangs: some time before any leaves."""
    return re.findall("error: .*", capfd.readouterr().err)


def until(codes, count):
    """Wait for so many codes."""
    wait_for(lambda: len(codes) >= count)


def wait_for(is_so):
    """Wait until something is so, a minute at most."""
    end = time.monotonic() + 60
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)


def test_processes_without_progress_name_one_and_leave(watched, heart, capfd):
    """All write where they are, and end with the code of a lost process."""
    start, codes = watched
    start(0, 2 * SECONDS)  # else one that is held up for a moment is named
    start(1, 2 * SECONDS)

    until(codes, 2)

    said = capfd.readouterr().err
    assert codes == {0: ExitCode.LOST, 1: ExitCode.LOST}
    assert "error: process 0 and all others have made no progress for " in said
    assert "stacks of all threads of process 0 of 2:" in said
    assert "stacks of all threads of process 1 of 2:" in said
    assert "in until" in said  # the main thread of this one, which is both


def test_progress_of_any_keeps_all(watched, heart, capfd):
    """For longer than the limit and the three rounds in which it is noticed."""
    start, _ = watched
    start(0, LONG_SECONDS)
    start(1, LONG_SECONDS)

    for step in range(3, 71):
        heart.at("training", step)
        time.sleep(LONG_SECONDS / 40)

    assert blamed(capfd) == []


def test_a_first_process_that_does_not_answer_is_left(watched, heart, shelf, capfd):
    """It holds the store, which then waits for ever."""
    start, codes = watched
    start(0)
    start(1)
    wait_for(lambda: shelf.reads >= 2)
    shelf.answers.clear()

    until(codes, 2)

    said = capfd.readouterr().err
    assert codes[1] == ExitCode.LOST
    words = r"error: process 0 has (not answered|been silent) for \d s .* process 1 of 2 exits"
    assert re.search(words, said)


def test_one_that_has_ended_is_not_missed(watched, heart, shelf, capfd):
    """The others go on to their own end."""
    start, _ = watched
    first = start(0, LONG_SECONDS)
    start(1, LONG_SECONDS)
    wait_for(lambda: shelf.reads)
    first.close()

    time.sleep(1.7 * LONG_SECONDS)

    assert blamed(capfd) == []


def test_a_function_without_heartbeat_makes_no_progress_and_goes_on(watched, heart, capfd):
    """As of a `Runner`."""
    start, _ = watched
    start(0, LONG_SECONDS, has_progress=False)
    start(1, LONG_SECONDS, has_progress=False)

    time.sleep(1.7 * LONG_SECONDS)

    assert blamed(capfd) == []


def test_a_function_without_heartbeat_is_to_be_there(watched, heart, shelf, capfd):
    """One of two is silent."""
    start, codes = watched
    start(0, has_progress=False)
    start(1, has_progress=False)
    wait_for(lambda: "scalejax/beats/1" in shelf.values)

    shelf.mute = "scalejax/beats/1"
    until(codes, 2)

    assert codes == {0: ExitCode.LOST, 1: ExitCode.LOST}
    assert "error: process 1 has been silent for " in capfd.readouterr().err


def test_no_watch_where_none_is_wanted():
    """0: such as to debug by hand; a limit that is none is refused."""
    before = threading.active_count()
    with PeerWatch(None, 0):
        assert threading.active_count() == before

    with pytest.raises(ConfigError, match=r"stuck_seconds=-1 is refused: it must be a number"):
        PeerWatch(None, -1)


AT_A_BREAKPOINT = """
from scalejax.core.heartbeat import Heartbeat
from scalejax.launch.peers import PeerWatch
heart = Heartbeat(None)
for step in range(3):
    heart.at("training", step)
with PeerWatch(None, 0.4):
    breakpoint()
    print("went on")
"""


def test_a_process_at_a_breakpoint_does_not_hang():
    """Alone, with a person before it, who takes more than twice the limit."""
    process = subprocess.Popen(
        [sys.executable, "-c", AT_A_BREAKPOINT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process:
        line = process.stdout.readline()
        time.sleep(1.0)
        said, _ = process.communicate("c\n", timeout=240)

    assert process.returncode == 0, line + said
    assert "went on" in said


def test_one_that_was_stopped_itself_does_not_blame_others(watched, heart, monkeypatch):
    """After Ctrl-Z and fg, it begins to watch anew."""
    judged = []
    monkeypatch.setattr(Watch, "hanging", lambda self, *_: judged.append(id(self)))
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    start, _ = watched
    watch = start(0)
    while len(judged) < 3:
        time.sleep(SECONDS / 10)
    now[0] += 100
    for _ in range(200):
        if len(set(judged)) > 1:
            break
        time.sleep(SECONDS / 10)
    monkeypatch.undo()
    watch.close()

    assert len(set(judged)) > 1


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
epochs = 8000
log_every_steps = 10
"""


@pytest.mark.slow  # two processes that each import JAX, and a limit of three seconds
@pytest.mark.alone
def test_a_frozen_process_of_mpirun_ends_the_run_in_the_stated_time(tmp_path):
    """The first, which holds the store: the other names it, writes its stacks, and leaves with
    code 5, upon which mpirun kills the frozen one."""
    if not shutil.which("mpirun"):
        pytest.skip("needs the Debian package openmpi-bin")
    run_file, folder = tmp_path / "run.toml", tmp_path / "run"
    run_file.write_text(RUN)
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    train = ("train", str(run_file), "--folder", str(folder), "--stuck-seconds", "3")
    launcher = subprocess.Popen(
        [*mpirun, sys.executable, "-c", CODE, *train],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",  # another test may have asked for more
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        measurements = folder / "measurements.jsonl"
        while not (measurements.exists() and '"step": 100,' in measurements.read_text()):
            assert launcher.poll() is None, launcher.communicate()[0]
            time.sleep(0.05)
        os.kill(first_of(launcher.pid), signal.SIGSTOP)
        begin = time.monotonic()
        said, _ = launcher.communicate(timeout=240)
    finally:
        launcher.kill()

    assert launcher.returncode == ExitCode.LOST, said
    assert time.monotonic() - begin < 3 + 10 + 60  # the limit, as `--help` says, and a busy machine
    assert "error: process 0 has not answered for " in said
    assert "process 1 of 2 exits." in said
    assert "stacks of all threads of process 1 of 2:" in said
    assert "in _run_batches" in said


def first_of(mpirun):
    """Id of its first process."""
    children = Path(f"/proc/{mpirun}/task/{mpirun}/children").read_text().split()
    for child in children:
        if b"OMPI_COMM_WORLD_RANK=0" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"mpirun has no first process: {children}")


def test_only_a_step_of_slurm_that_is_the_run_is_killed(heart, tmp_path, monkeypatch):
    """A run alone in `srun --pty bash`, or a launcher's, is in a step of others."""
    called = tmp_path / "called"
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    scancel.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    codes = {}

    with PeerWatch(None, SECONDS, leave=partial(codes.setdefault, 0)):
        until(codes, 1)

    assert codes == {0: ExitCode.LOST}
    assert not called.exists()
