"""Which process was lost is told by exit codes, heartbeats and what the system says."""

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from scalejax.cli.main import main
from scalejax.config.data import FashionMnistConfig, ParquetConfig
from scalejax.core.elastic import shared_folder
from scalejax.core.environment import handling
from scalejax.core.errors import ConfigError, ExitCode
from scalejax.core.heartbeat import Beat, Heartbeat, packed, read_beat, unpacked
from scalejax.core.remote import deadlines
from scalejax.launch import local
from scalejax.launch.local import Launch, launch
from scalejax.launch.places import Elastic
from scalejax.launch.watchdog import Watch
from scalejax.training.loop import store_seconds

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "scalejax" / "config" / "examples" / "fashion_no_warmup.toml"
RUNNING, LIVES = (None, None), (False, False)


def beat(
    *,
    liveness_count=0,
    progress_count=0,
    step=0,
    phase="training",
    slowest_seconds=1.0,
    store_seconds=0.0,
):
    """What a process says."""
    return Beat(
        liveness_count=liveness_count,
        progress_count=progress_count,
        step=step,
        phase=phase,
        slowest_seconds=slowest_seconds,
        store_seconds=store_seconds,
    )


def said(path):
    """What a process has said last; it must have said something."""
    last = read_beat(path)
    assert last is not None
    return last


@pytest.fixture
def clock():
    """A clock that is set by hand: [now]."""
    return [0.0]


@pytest.fixture
def watch(clock):
    """One that waits 10 s for the stopped, and 100 s for the stuck."""
    return Watch(10.0, 100.0, clock=lambda: clock[0])


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ((None, 0), None),
        ((2, 2), None),
        ((143, 130), None),
        ((None, -9), r"process 1 was killed by SIGKILL .* at step 7"),
        ((ExitCode.LOST, -9), r"process 1 was killed by SIGKILL"),
        ((ExitCode.LOST, 1), r"process 1 ended with exit code 1"),
        ((1, -11), r"process 1 was killed by SIGSEGV"),
        ((ExitCode.LOST, None), r"process 1 no longer answers the others at step 7"),
        ((ExitCode.LOST, ExitCode.LOST), r"process 0 lost contact"),
        ((-6, -9), r"process 1 was killed by SIGKILL"),
        ((2, -6), None),
        ((3, 3), None),  # diverged: to start again would change nothing
        ((3, -6), None),
        ((ExitCode.LOST, 2), None),
        ((ExitCode.LOST, 4), r"process 1 found what is stored damaged"),
        ((75, -6), r"process 0 could not reach the network or a store"),
        ((130, -6), None),
        ((2, -9), r"process 1 was killed by SIGKILL"),
    ],
)
def test_the_cause_is_named_and_not_those_that_missed_it(watch, codes, told):
    """A refusal or a wish to stop is no loss; one that was killed is, and is named first."""
    loss = watch.lost_by_code(codes, (beat(step=7), beat(step=7)))

    assert (loss is None) == (told is None)
    assert told is None or re.match(told, str(loss))


def test_a_stopped_process_is_lost_after_a_while_and_not_if_it_goes_on(watch, clock):
    """The system says that it is stopped; a debugger may let it go on."""
    beats = (beat(), beat())

    for clock[0] in (0.0, 9.0):
        assert watch.hanging(RUNNING, beats, (False, True)) is None
    assert watch.hanging(RUNNING, beats, LIVES) is None
    clock[0] = 12.0
    assert watch.hanging(RUNNING, beats, (False, True)) is None
    clock[0] = 23.0

    assert str(watch.hanging(RUNNING, beats, (False, True))).startswith(
        "process 1 has been stopped"
    )


@pytest.mark.parametrize(
    ("beats", "culprit"),
    [
        ((beat(step=5), beat(step=4)), 1),
        ((beat(step=5), beat(step=5, phase="waiting for input")), 1),
        ((beat(step=5, phase="waiting for input"), beat(step=5)), 0),
    ],
)
def test_of_stuck_processes_the_one_is_named_that_the_others_wait_for(watch, clock, beats, culprit):
    """It is behind, or at something else than the update that the others are in."""
    assert watch.hanging(RUNNING, beats, LIVES) is None
    clock[0] = 101.0

    assert watch.hanging(RUNNING, beats, LIVES).process == culprit


@pytest.mark.parametrize(
    ("phase", "slowest_seconds", "limit_seconds"),
    [
        ("training", 1.0, 100.0),
        ("training", 25.0, 250.0),  # ten times the slowest so far
        ("saving", 1.0, 500.0),
        ("training", 0.0, 3000.0),  # the first: it may load kernels, or join a collective
        ("compiling", 0.0, 3000.0),
    ],
)
def test_each_phase_has_a_limit_of_its_own(watch, clock, phase, slowest_seconds, limit_seconds):
    """From how long it took before; a process that waits for one that saves has that one's."""
    beats = (beat(step=1), beat(step=0, phase=phase, slowest_seconds=slowest_seconds))

    for clock[0] in (0.0, limit_seconds - 1):
        assert watch.hanging(RUNNING, beats, LIVES) is None
    clock[0] = limit_seconds + 1

    assert watch.hanging(RUNNING, beats, LIVES).process == 1


@pytest.mark.parametrize("phase", ["waiting for input", "evaluating"])
def test_an_outage_of_a_store_is_waited_for_as_long_as_it_is_tried_again(watch, clock, phase):
    """By a process whose data is at a URL, and those that wait for it: its own end is 75, with the
    address, and not that of a lost process."""
    config = ParquetConfig(train="s3://bucket/train", test="test")
    seconds = store_seconds(config)
    beats = (beat(step=1), beat(phase=phase, store_seconds=seconds))

    assert seconds == deadlines().total_seconds
    assert store_seconds(replace(config, train="train")) == 0
    assert store_seconds(FashionMnistConfig()) == 0
    assert unpacked(packed(beats[1])) == beats[1]
    for clock[0] in (0.0, seconds + 99):
        assert watch.hanging(RUNNING, beats, LIVES) is None
    clock[0] = seconds + 101
    assert watch.hanging(RUNNING, beats, LIVES).process == 1


def test_one_that_says_nothing_is_lost_sooner_than_one_that_is_slow(clock):
    """Frozen, or cut off from the network, it does not come back; also while others compile."""
    watch = Watch(10.0, 100.0, silent_seconds=20.0, clock=lambda: clock[0])

    for clock[0] in (0.0, 15.0, 21.0):
        beats = (beat(liveness_count=int(clock[0]), phase="compiling", slowest_seconds=0.0), beat())
        loss = watch.hanging(RUNNING, beats, LIVES)

    assert str(loss) == "process 1 has been silent for 21 s (training) at step 0"


def test_where_all_wait_at_the_same_place_all_are_named(watch, clock):
    """As in a collective that does not end."""
    beats = (beat(step=5), beat(step=5))
    watch.hanging(RUNNING, beats, LIVES)
    clock[0] = 101.0

    loss = watch.hanging(RUNNING, beats, LIVES)

    words = "process 0 and all others have made no progress for 101 s (training) at step 5"
    assert str(loss) == words


def test_of_stuck_processes_one_that_is_no_longer_alive_is_the_culprit(watch, clock):
    """Also if it is farther than the others."""
    for clock[0] in (0.0, 60.0, 101.0):
        liveness_count = int(clock[0])
        beats = (beat(step=4, liveness_count=liveness_count), beat(step=5))
        loss = watch.hanging(RUNNING, beats, LIVES)

    assert loss.process == 1


def test_while_one_makes_progress_none_hangs(watch, clock):
    """The others wait for it, and rightly."""
    for clock[0] in range(0, 1000, 50):
        beats = (beat(progress_count=int(clock[0])), beat())
        assert watch.hanging(RUNNING, beats, LIVES) is None


STOPS_ITSELF = """
import os, signal, time
def obey(number, frame):
    if os.environ["SCALEJAX_PROCESS"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
signal.signal(signal.SIGTERM, obey)
print("ready")
while True:
    time.sleep(60)
"""


def test_processes_are_watched_also_after_a_signal(tmp_path):
    """One of two that were asked to stop is stopped instead, and the other waits for it."""

    class Ears(io.StringIO):
        def write(self, text):
            count = super().write(text)
            if "ready" in text and self.getvalue().count("ready") == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return count

    said = Ears()
    job = Launch(
        command=(sys.executable, "-c", STOPS_ITSELF),
        processes=2,
        shows_all=True,
        folder=tmp_path,
        stopped_seconds=0.5,
    )
    impatient = threading.Timer(120, os.kill, (os.getpid(), signal.SIGTERM))
    impatient.start()
    try:
        code = launch(job, said)
    finally:
        impatient.cancel()

    assert code == ExitCode.LOST
    assert "process 1 has been stopped" in said.getvalue()


def test_the_end_of_a_terminal_is_a_wish_to_stop(tmp_path):
    """Of which processes know SIGTERM; what cannot be shown any more holds none of them up."""

    class Closed(io.StringIO):
        def write(self, text):
            if "ready" in text:
                os.kill(os.getpid(), signal.SIGHUP)
            raise OSError(errno.EIO, "Input/output error")

    says_much = "yes | head -c 200000; echo ready; exec sleep 60"
    job = Launch(command=("sh", "-c", says_much), processes=1, folder=tmp_path)

    with handling(signal.SIG_DFL, signal.SIGHUP):  # nohup has it ignored
        assert launch(job, Closed()) == 128 + signal.SIGTERM
    assert (tmp_path / "0.log").stat().st_size > 200000


LOSES_TWO = """
import os, pathlib, signal, sys, time
folder, process = pathlib.Path(sys.argv[1]), os.environ["SCALEJAX_PROCESS"]
if os.environ["SCALEJAX_PROCESSES"] == "6":
    (folder / f"up-{process}").touch()
    while len(list(folder.glob("up-*"))) < 6:
        time.sleep(0.01)
    if process in "25":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    sys.exit(5)
"""


@pytest.mark.parametrize(("divisors", "processes"), [((6, 4, 2), 4), ((6, 3), 3), ((6, 5, 1), 6)])
def test_as_many_go_on_as_are_left_and_can(tmp_path, divisors, processes):
    """Two of six are killed at once: the most of four that share the batch, not one fewer each
    time; where no number from two on does, all once they are back."""
    said = io.StringIO()
    job = Launch(
        command=(sys.executable, "-c", LOSES_TWO, str(tmp_path)),
        processes=6,
        elastic=Elastic(least=2, most=6, rejoin_seconds=1.0),
        can_train=lambda count: count in divisors,
        folder=tmp_path,
        most_restarts=1,
    )

    launch(job, said)

    assert "process 2 was killed by SIGKILL (by the system, if memory was short)" in said.getvalue()
    assert ", and 1 more; the others were stopped" in said.getvalue()
    assert f"restart 1, {processes} processes" in said.getvalue()


ELASTIC = """
import os, signal, sys, time
from scalejax.core.elastic import SharedFolder
from scalejax.core.heartbeat import Heartbeat
shared, heart = SharedFolder.from_environment(), Heartbeat.from_environment()
count, rank = (int(os.environ["SCALEJAX_" + name]) for name in ("PROCESSES", "PROCESS"))
starts = shared.path / f"starts-{rank}"
starts.open("a").write(f"{count} ")
start = len(starts.read_text().split())
heart.at("training", 10 * start)
"""
"""A process without a run, in its first start, second, ...; `LOST` and others say how it ends."""
LOST = """
if start == 1:
    while len(list(shared.path.glob("starts-*"))) < 4:
        time.sleep(0.01)
    if rank in (0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    sys.exit(5)
print(shared.change, flush=True)
while count == 2 and not shared.is_asked_to_stop:
    time.sleep(0.05)
sys.exit(143 if count == 2 else 0)
"""
ASKED = """
time.sleep(0.3)
sys.exit(143 if start == 1 else 0)
"""
FAILS = """
heart.at("training", {step})
time.sleep(0.3)
sys.exit(1)
"""


def elastic_job(tmp_path, code, **changed):
    """A launch of four processes, of which three can go on as little as none."""
    return Launch(
        command=(sys.executable, "-c", ELASTIC + code),
        processes=4,
        elastic=Elastic(least=1, most=4, rejoin_seconds=0.5),
        can_train=lambda count: count != 3,
        folder=tmp_path,
        **{"most_restarts": 1, **changed},
    )


@pytest.mark.parametrize("code", [0, 5])
def test_what_is_in_memory_alone_is_saved(tmp_path, code):
    """Unless all has ended well. It is kept where it cannot be, and the next launcher leaves it."""
    said = io.StringIO()

    def save_copy(folder):
        folder.mkdir()
        raise ConfigError("the disk is full.")

    job = replace(elastic_job(tmp_path, ""), command=("sh", "-c", f"exit {code}"), most_restarts=0)
    for save, words in ((lambda folder: 14, "saved the copy of step 14"), (save_copy, "kept in ")):
        assert launch(replace(job, save_copy=save), said) == code
        assert (words in said.getvalue()) == bool(code)
    if code:
        assert "(the disk is full)" in said.getvalue()
        kept = Path(said.getvalue().partition("kept in ")[2].partition(". Move")[0])
        assert kept.is_dir()
        launch(job, said)
        assert kept.is_dir()
        shutil.rmtree(kept.parent)


def test_those_that_are_left_go_on_and_others_join_them(tmp_path, monkeypatch):
    """Two of four are killed, the first among them: two go on, and stop when asked for the others
    to join. What the record is to say of both is one change, where it has not said the first yet;
    nothing is left in memory."""
    said, memory = io.StringIO(), tmp_path / "memory"  # no other test's
    memory.mkdir()
    monkeypatch.setattr(local, "shared_folder", partial(shared_folder, memory))

    assert launch(elastic_job(tmp_path, LOST), said) == 0

    lines = said.getvalue()
    assert "process 0 was killed by SIGKILL" in lines
    assert re.findall(r"restart \d, \d process\w*", lines) == [
        "restart 1, 2 processes",
        "restart 2, 4 processes",
    ]
    first, second = re.findall(r"Change\(before=4, after=(\d).*?step=(\d+)", lines)
    assert (first, second) == (("2", "10"), ("4", "20"))
    assert "killed by SIGKILL at step 10, and 1 more; others joined" in lines
    assert not list(memory.iterdir())


def test_one_that_is_asked_to_go_takes_nothing_along(tmp_path):
    """A scheduler sent it SIGTERM: all have saved, and one fewer goes on, or as many as can."""
    said = io.StringIO()

    assert launch(elastic_job(tmp_path, ASKED), said) == 0
    assert "or another one was asked to stop" in said.getvalue()
    assert said.getvalue().count("restart ") == 1
    assert "restart 1, 2 processes" in said.getvalue()


@pytest.mark.parametrize(("step", "restarts"), [("7", 2), ("10 * min(start, 4)", 5)])
def test_an_elastic_run_that_makes_no_new_step_ends(tmp_path, step, restarts):
    """After so many restarts in a row: at the same step each time at once, else only where its
    steps end. Losses alone, however many, do not end it."""
    job = elastic_job(tmp_path, FAILS.format(step=step), most_restarts=2)
    job = replace(job, processes=2, elastic=Elastic(least=1, most=2, rejoin_seconds=0.0))
    said = io.StringIO()

    assert launch(job, said) == ExitCode.LOST
    assert said.getvalue().count("restart ") == restarts


def test_the_launcher_knows_how_many_can_train(tmp_path, monkeypatch):
    """The fewest and the most by the flags; between them what divides the batch of 64 by the two
    devices of each."""
    run_file, jobs = tmp_path / "run.toml", []
    run_file.write_text(EXAMPLE.read_text())
    monkeypatch.setattr("scalejax.cli.launch.launch", lambda job: jobs.append(job) or 0)
    flags = ["--folder", str(tmp_path / "run"), "--cpu-devices", "2", "--batch.global_batch", "64"]

    with pytest.raises(SystemExit):
        main(["launch", str(run_file), "--np", "-8", "--elastic", "3:8", *flags])

    assert [count for count in range(3, 9) if jobs[0].can_train(count)] == [4, 8]


def test_only_the_first_start_starts_over(tmp_path, monkeypatch):
    """What it trained is not to be lost to a checkpoint that is damaged since."""
    run_file, jobs = tmp_path / "run.toml", []
    run_file.write_text(EXAMPLE.read_text())
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").touch()
    monkeypatch.setattr("scalejax.cli.launch.launch", lambda job: jobs.append(job) or 0)
    flags = ["--folder", str(folder), "--cpu-devices", "2", "--resume", "--start-over"]
    with pytest.raises(SystemExit):
        main(["launch", str(run_file), "--np", "-2", *flags])
    said = tmp_path / "said"
    code = f"import sys; open({str(said)!r}, 'a').write(f'{{sys.argv[1:]}}'); sys.exit(5)"
    job = Launch(
        command=(sys.executable, "-c", code),
        once=jobs[0].once,
        again=lambda: ("--resume",),
        processes=1,
        folder=tmp_path,
        most_restarts=1,
    )

    launch(job, out=io.StringIO())

    assert jobs[0].command[-1] == "--resume"
    assert "--start-over" not in jobs[0].command
    assert said.read_text() == "['--start-over']['--resume']"


def test_a_heartbeat_is_read_as_it_was_written(tmp_path):
    """Step and phase at once, the liveness count by its own thread."""
    path = tmp_path / "heartbeat"
    heart = Heartbeat(path)
    heart.at("waiting for input", 12)
    first = said(path)
    end = time.monotonic() + 30
    while said(path).liveness_count == first.liveness_count and time.monotonic() < end:
        time.sleep(0.05)
    heart.close()

    assert (first.step, first.phase, first.progress_count) == (12, "waiting for input", 1)
    assert said(path).liveness_count > first.liveness_count
    assert first.slowest_seconds == 0
    assert read_beat(tmp_path / "none") is None


def test_a_heartbeat_says_how_slow_its_phase_was(tmp_path):
    """Once the phase has ended twice: a first update is only queued."""
    heart, seen = Heartbeat(tmp_path / "heartbeat"), []
    for step in range(3):
        heart.at("training", step)
        seen.append(said(tmp_path / "heartbeat").slowest_seconds)
        time.sleep(0.02)
        heart.at("waiting for input", step)
    heart.close()

    assert seen[:2] == [0.0, 0.0]
    assert seen[2] >= 0.02


BREATHING = """
import sys, threading
from pathlib import Path
from scalejax.core.heartbeat import Heartbeat
first = Heartbeat(Path(sys.argv[1]))
move = lambda: [first.at("training", step) for step in iter(int, 1)]
threading.Thread(target=move, daemon=True).start()
for _ in range(300):
    Heartbeat(Path(sys.argv[1])).close()
"""


@pytest.mark.slow
def test_a_second_heartbeat_in_a_process_does_not_end_the_first(tmp_path):
    """As where two runs follow each other: by SIGBUS, where the file was cut off first."""
    command = [sys.executable, "-c", BREATHING, str(tmp_path / "heartbeat")]

    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 0


@pytest.mark.parametrize(("code", "starts"), [(ExitCode.DAMAGED, 2), (ExitCode.TRANSIENT, 4)])
def test_damage_and_outages_are_tried_again_and_told_at_last(tmp_path, code, starts):
    """Not as a lost process, without which fewer would go on; damage once, as the second try takes
    what was stored before it."""
    said = io.StringIO()
    job = Launch(
        command=(sys.executable, "-c", f"raise SystemExit({code:d})"),
        processes=2,
        elastic=Elastic(least=1, most=2, rejoin_seconds=1e9),
        folder=tmp_path,
        most_restarts=3,
    )

    assert launch(job, said) == code
    assert said.getvalue().count("restart ") == starts - 1
    assert ", 1 process" not in said.getvalue()
