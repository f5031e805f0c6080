"""The wall time of a run is divided with nothing left over, whatever ends its sessions."""

import errno
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from scalejax.config.run import load_config
from scalejax.core.errors import ConfigError
from scalejax.training.record import RunFolder, RunRecord
from scalejax.training.reporter import Silent
from scalejax.training.time_accounting import (
    LINE_BYTES,
    PARTS,
    Interval,
    RunClock,
    line_of,
    load_intervals,
    load_time_account,
    process_seconds,
    time_account,
    time_account_in_words,
)
from scalejax.training.train import train

ROOT = Path(__file__).parents[2]
RUN = """
[model]
name = "mlp"
hidden = [16]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 80
test_examples = 24
[batch]
global_batch = 8
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.01
[train]
epochs = 2
log_every_steps = 5
checkpoint_every_steps = 4
"""


def interval(session, end, /, *, began=0.0, first=0, finished=True, **seconds):
    """A stretch of `session`, by the seconds of its parts."""
    return Interval(
        session=session,
        began_unix_seconds=began,
        first_step=first,
        step=end,
        is_finished=finished,
        **{f"{part}_seconds": value for part, value in seconds.items()},
    )


KILLED_AND_RESUMED = (
    interval(0, 100, startup=5.0, compile=3.0, step=10.0, input_wait=1.0, checkpoint=0.5),
    interval(0, 200, step=9.0, evaluation=2.0, checkpoint=0.5),  # this checkpoint was not whole
    interval(0, 230, finished=False, step=3.0, input_wait=0.25),
    interval(1, 200, began=40.0, first=100, startup=6.0, compile=2.0, step=8.0, checkpoint=0.5),
    interval(1, 200, began=40.0, first=100, step=0.25),
)
"""Killed at step 230, 5.75 s later begun again at step 100."""


def test_ledger_of_a_run_that_was_killed_and_went_on():
    """By hand: what the first session did after step 100 was for nothing."""
    ledger = time_account(KILLED_AND_RESUMED)

    assert ledger.sessions == 2
    assert ledger.repeated_steps == 130
    assert ledger.startup_seconds == 11
    assert ledger.compile_seconds == 5
    assert ledger.step_seconds == 10 + 8 + 0.25
    assert ledger.input_wait_seconds == 1
    assert ledger.evaluation_seconds == 0
    assert ledger.checkpoint_seconds == 0.5 + 0.5
    assert ledger.wasted_seconds == 9 + 2 + 0.5 + 3 + 0.25
    assert ledger.down_seconds == 40 - 34.25
    assert ledger.seconds == 40 + 16.75
    assert ledger.goodput == (18.25 + 1) / 56.75
    assert time_account_in_words(ledger) == (
        "goodput 33.9 % of 56.8 s in 2 sessions, 130 steps repeated: steps 32.2 %, input wait "
        "1.8 %, checkpoint 1.8 %, start-up 19.4 %, compile 8.8 %, wasted 26.0 %, down 10.1 %"
    )


def test_a_step_that_was_cut_off_counts_for_nothing():
    """One long update was under way when the run was killed, just behind a checkpoint."""
    cut_off = interval(0, 100, finished=False, step=30.0)
    later = interval(1, 150, began=100.0, first=100, step=5.0)
    first = interval(0, 100, step=10.0)

    assert time_account((first, cut_off, later)).wasted_seconds == 30
    assert time_account((first, cut_off)).wasted_seconds == 0  # it goes on


def test_a_session_wastes_all_that_lies_behind_its_begin():
    """A damaged checkpoint was deleted by hand: two sessions before have worked for nothing."""
    ledger = time_account(
        (
            interval(0, 100, step=1.0),
            interval(0, 200, step=2.0),
            interval(1, 300, began=10.0, first=200, startup=1.0, step=4.0),
            interval(2, 400, began=20.0, first=100, startup=1.0, step=8.0),
        )
    )

    assert (ledger.step_seconds, ledger.wasted_seconds) == (1 + 8, 2 + 4)
    assert ledger.repeated_steps == 100 + 100


def test_a_clock_set_back_between_sessions_takes_no_time_away():
    """The time between them is then unknown, and none."""
    earlier = interval(0, 100, began=1000.0, step=5.0)
    later = interval(1, 200, began=400.0, first=100, step=5.0)

    assert time_account((earlier, later)).seconds == 10


@pytest.mark.parametrize(("boot_id", "down"), [("a", 3), ("b", 3600), (None, 3600)])
def test_a_clock_set_forward_between_sessions_adds_no_time(boot_id, down):
    """By an hour; known only where the machine was not started anew between them."""
    earlier = interval(0, 100, began=1000.0, step=5.0)
    later = interval(1, 200, began=1005.0 + 3600, first=100, step=5.0)

    ledger = time_account(
        (
            replace(earlier, boot_id="a", began_boot_seconds=200.0),
            replace(later, boot_id=boot_id, began_boot_seconds=208.0),
        )
    )

    assert ledger.down_seconds == down


def test_a_session_knows_when_it_began_by_a_clock_that_nobody_sets(tmp_path, monkeypatch):
    """Two sessions, and the clock of the system set forward by an hour between them."""
    path, begin, now = tmp_path / "time.jsonl", time.perf_counter(), time.time()
    for ahead in (0, 3600):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: now + ahead)
        with RunClock() as clock:
            clock.open(path)

    ledger = load_time_account(path)

    assert ledger is not None
    assert ledger.seconds <= time.perf_counter() - begin + 0.1


@pytest.mark.parametrize("is_failing", [False, True])
def test_times_that_cannot_be_written_are_refused_by_name(tmp_path, monkeypatch, is_failing):
    """And keep no other refusal from being told."""
    path = tmp_path / "time.jsonl"

    def full(*unused):
        raise OSError(errno.ENOSPC, "No space left on device")

    def session():
        with RunClock() as clock:
            clock.open(path)
            monkeypatch.setattr(os, "pwrite", full)
            with pytest.raises(ConfigError, match=r"time.jsonl' cannot be written"):
                clock.finish_interval()
            if is_failing:
                raise ConfigError("the real one")

    told = "the real one" if is_failing else r"time.jsonl' cannot be written: .*No space left"
    with pytest.raises(ConfigError, match=told):
        session()


seconds = st.floats(min_value=0, max_value=1e4)
stretches_of_a_session = st.lists(
    st.tuples(st.integers(0, 50), st.booleans(), st.lists(seconds, min_size=6, max_size=6)),
    min_size=1,
    max_size=4,
)


@given(
    sessions=st.lists(
        st.tuples(seconds, st.none() | st.integers(0, 100), stretches_of_a_session),
        min_size=1,
        max_size=5,
    )
)
def test_the_parts_add_up_to_the_wall_time(sessions):
    """Whatever the sessions did, and wherever they began."""
    lines, now = [], 0.0
    for number, (down, first, parts) in enumerate(sessions):
        began = now = now + (down if number else 0.0)
        step = first or 0
        for steps, is_finished, times in parts:
            step += steps
            now += sum(times)
            lines.append(
                interval(
                    number,
                    step,
                    began=began,
                    first=first,
                    finished=is_finished,
                    **dict(zip(PARTS, times, strict=True)),
                )
            )

    assert time_account(lines).seconds == pytest.approx(now, abs=1e-6)


KILLED = """
import sys, time
from pathlib import Path
from scalejax.training.time_accounting import RunClock, process_seconds
clock = RunClock(process_seconds())
clock.open(Path(sys.argv[1]))
first = int(sys.argv[2])
clock.begin(first)
for step in range(first, first + 20):
    clock.enter("step")
    time.sleep(0.06)
    clock.waited(0.02)
    clock.at(step + 1)
    if (step + 1) % 5 == 0:
        with clock.within("checkpoint"):
            time.sleep(0.05)
        clock.finish_interval()
print("up", flush=True)
clock.enter("evaluation")
time.sleep(60)
"""


@pytest.mark.slow
def test_a_kill_leaves_all_but_the_last_half_second(tmp_path):
    """Two processes are killed while they wait; their times are those of another clock. What is
    written grows by half a second from one write to the next, of which a slow machine lengthens
    some."""
    path = tmp_path / "time.jsonl"
    begin = time.time()
    between_writes, before = [], begin
    for first in (0, 10):
        killed = subprocess.Popen(
            [sys.executable, "-c", KILLED, path, str(first)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert killed.stdout is not None
        with closing(killed.stdout):
            killed.stdout.readline()
            written, looked = [], begin
            while len(written) < 3:
                before, looked = looked, time.time()
                last = load_intervals(path)[-1]
                if not last.is_finished and last.seconds not in written:
                    written.append(last.seconds)
                assert killed.poll() is None
                time.sleep(0.02)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
        between_writes += [after - earlier for earlier, after in pairwise(written)]
    wall, seen = time.time() - begin, before - begin

    ledger = load_time_account(path)

    assert ledger is not None
    assert ledger.sessions == 2
    assert 0.5 <= min(between_writes) < 0.75
    # From the start of a process, to a tick; what was read last was not yet there a look before.
    assert seen - 0.1 < ledger.seconds < wall + 0.02
    assert ledger.repeated_steps == 10
    assert ledger.input_wait_seconds == pytest.approx(30 * 0.02)  # of 10 steps and of 20
    assert ledger.step_seconds > 30 * 0.04
    assert ledger.checkpoint_seconds > 6 * 0.05
    assert ledger.wasted_seconds > 10 * 0.06 + 2 * 0.05
    assert ledger.evaluation_seconds > 0.99  # three writes, to a microsecond


def test_the_ledger_of_a_run_is_its_wall_time(tmp_path):
    """In this process, in two sessions, by another clock."""
    (tmp_path / "run.toml").write_text(RUN)
    said, spent = [], 0.0

    class Listener(Silent):
        def say(self, text):
            said.append(text)

    for epochs in (2, 3):
        config = load_config(tmp_path / "run.toml", {"train.epochs": epochs})
        begin = time.perf_counter()
        train(
            config,
            tmp_path / "run",
            device_count=2,
            resume=epochs > 2,
            reporter=Listener(),
            startup_seconds=100.0,
        )
        spent += 100 + time.perf_counter() - begin

    ledger = RunRecord.load(tmp_path / "run").time

    assert ledger is not None
    assert ledger.seconds - ledger.down_seconds == pytest.approx(spent, rel=0.01)
    assert ledger.down_seconds == 0  # the second is said to have begun before the first
    assert (ledger.sessions, ledger.repeated_steps, ledger.wasted_seconds) == (2, 0, 0)
    assert ledger.startup_seconds >= 200
    assert min(ledger.step_seconds, ledger.compile_seconds, ledger.evaluation_seconds) > 0
    intervals = load_intervals(RunFolder(path=tmp_path / "run").time)
    ends = [(each.session, each.step) for each in intervals]
    assert ends == [
        *((0, step) for step in (4, 8, 10, 12, 16, 20, 20)),
        *((1, step) for step in (24, 28, 30, 30)),
    ]
    assert said[-1] == time_account_in_words(ledger)


def test_a_line_that_was_cut_off_is_written_anew(tmp_path):
    """A machine that fails may leave part of a line; one that is damaged is refused."""
    path = tmp_path / "time.jsonl"
    path.write_bytes(line_of(interval(0, 5, step=1.0)) + b'{"session": 0, "be')
    assert len(load_intervals(path)) == 1

    with RunClock() as clock:
        clock.open(path)
    assert [each.session for each in load_intervals(path)] == [0, 1]

    path.write_bytes(b"x" * LINE_BYTES)
    with pytest.raises(ConfigError, match=r"time.jsonl, line 1 is damaged .* delete that file"):
        load_time_account(path)
    with pytest.raises(ConfigError, match="line 1 is damaged"), RunClock() as clock:
        clock.open(path)

    for damage in (b"[]", b'{"session": 0}', b'{"session": 0, "began_unix_seconds": NaN}'):
        path.write_bytes(damage.ljust(LINE_BYTES))
        with pytest.raises(ConfigError, match=r"time.jsonl, line 1"):
            load_time_account(path)
    path.write_bytes(line_of(interval(0, 5, step=1.5)).replace(b" 1.5", b"-1.5"))
    with pytest.raises(ConfigError, match=r"time.jsonl, line 1: step_seconds=-1.5 is refused"):
        load_time_account(path)


def test_no_time_has_no_goodput():
    """A file that says nothing but zeros."""
    ledger = time_account([interval(0, 0)])

    assert ledger.goodput is None
    assert time_account_in_words(ledger) == "goodput n/a of 0 us in 1 session: n/a"


def test_a_line_is_never_longer_than_its_place():
    """Ten years of everything, a thousand sessions and a quadrillion steps."""
    longest = replace(
        interval(
            1000, 10**15, began=4e9 + 1 / 3, first=10**15, **dict.fromkeys(PARTS, 3e8 + 1 / 3)
        ),
        boot_id=str(uuid.uuid4()),
        began_boot_seconds=3e8 + 1 / 3,
    )

    assert len(line_of(longest)) == LINE_BYTES


def test_age_of_a_process():
    """By another process, which has seen it start."""
    code = "from scalejax.training.time_accounting import process_seconds; print(process_seconds())"
    begin = time.perf_counter()
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    ).stdout

    assert 0 < float(said) < time.perf_counter() - begin + 0.02
    assert process_seconds() > float(said)
