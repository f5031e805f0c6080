"""A signal ends a run where all can stop, and within a stated time whatever hangs."""

import contextlib
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_train import run

from scalejax.cli.launch import LaunchRun
from scalejax.cli.train import Train
from scalejax.core.heartbeat import Heartbeat
from scalejax.training import loop
from scalejax.training import signals as stop_signals
from scalejax.training.checkpoint import Checkpoints
from scalejax.training.record import RunRecord, figures
from scalejax.training.signals import HONOUR_SECONDS, SETUP_SECONDS, Interrupted, StopSignals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_kept_for_the_loop_and_the_handlers_are_set_back(number):
    """The first is a wish; after it, and at the end, signals do what they did before."""
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopSignals() as signals:
        signals.begin()
        assert signals.agreed("training") == 0
        os.kill(os.getpid(), number)
        assert signals.agreed("training") == number
        assert [signal.getsignal(each) for each in SIGNALS] == before
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_run_that_is_set_up_ends_at_once(capsys):
    """There is nothing to save."""
    heartbeat = Heartbeat(None)
    heartbeat.at("compiling", 0)
    with StopSignals(heartbeat), pytest.raises(Interrupted) as stop:
        signal.raise_signal(signal.SIGTERM)

    with StopSignals(heartbeat) as signals:
        with contextlib.suppress(Interrupted):  # as JAX may, while it looks for plug-ins
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            signals.begin()

    assert stop.value.code == 128 + signal.SIGTERM
    assert "interrupted while compiling: the run is as it was before" in capsys.readouterr().err


@pytest.mark.parametrize("is_training", [True, False])
def test_what_hangs_is_ended_within_the_stated_time(monkeypatch, capsys, is_training):
    """The main thread may be in XLA, where Python's handlers wait: here it does not listen."""
    monkeypatch.setattr(stop_signals, "SETUP_SECONDS", 0.2)
    ended, codes = threading.Event(), []
    heartbeat = Heartbeat(None)
    heartbeat.at("waiting for input", 3)

    def leave(code):
        codes.append(code)
        ended.set()

    with StopSignals(heartbeat, honour_seconds=0.2, leave=leave) as signals:
        if is_training:
            signals.begin()
        else:  # what was raised by the handler is lost, as it may be
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        begin = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(60)

    assert 0.2 <= time.monotonic() - begin < HONOUR_SECONDS
    assert codes == [128 + signal.SIGTERM]
    said = capsys.readouterr().err
    assert "waiting for input did not end within 0 s" in said


def test_a_process_that_is_there_for_other_things_is_not_ended(monkeypatch):
    """As a notebook is: whoever calls `train` in it decides what becomes of it."""
    codes = []
    monkeypatch.setattr(stop_signals, "SETUP_SECONDS", 0.1)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.delenv("SCALEJAX_LAUNCHER", raising=False)

    with StopSignals(honour_seconds=0.1) as signals:
        assert signal.set_wakeup_fd(-1) == -1, "its own would be taken from the host's loop"
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
        with contextlib.suppress(Interrupted):
            signals.begin()
        time.sleep(0.5)

    assert codes == []


@pytest.mark.parametrize("slow_seconds", [0.2, 0.4])
@pytest.mark.parametrize("calls_before", [1500, 2027])
def test_processes_agree_in_time_also_where_updates_slow_down(
    monkeypatch, slow_seconds, calls_before
):
    """From 1 ms to so long, where a signal comes; two clocks differ, and both exchange at the same
    calls, or neither would come back from it."""
    clocks, meeting, notes = threading.local(), threading.Barrier(2, timeout=60), {}
    gradient_syncs, answered = [], []

    def gathered(note):
        notes[clocks.number] = note
        meeting.wait()
        gradient_syncs.append(clocks.now)
        found = np.stack([notes[0], notes[1]])
        meeting.wait()
        return found

    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: clocks.now))
    monkeypatch.setattr(stop_signals.jax, "process_count", lambda: 2)
    monkeypatch.setattr(stop_signals.multihost_utils, "process_allgather", gathered)

    def process(number):
        clocks.number, clocks.now, factor = number, 100.0 * number, 1 + 0.3 * number
        signals = StopSignals()
        signals.begin()
        for _ in range(calls_before):
            clocks.now += 0.001 * factor
            assert signals.agreed("training") == 0
        if number:
            signals._received = signal.SIGTERM
        begin = clocks.now
        while not signals.agreed("training"):
            clocks.now += slow_seconds
        answered.append(clocks.now - begin)

    threads = [threading.Thread(target=process, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answered) == 2
    assert answered[0] == pytest.approx(answered[1])
    assert answered[0] <= HONOUR_SECONDS
    assert len(gradient_syncs) / 2 < calls_before / 20


def test_one_that_is_honoured_in_time_is_not_ended():
    """What comes after, a checkpoint, may take its time."""
    codes = []
    with StopSignals(honour_seconds=0.2, leave=codes.append) as signals:
        signals.begin()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.agreed("training") == signal.SIGTERM
        time.sleep(0.5)

    assert codes == []


def test_the_help_states_the_times_that_hold():
    """Those of signals; `experiments/faults` holds runs to the others."""
    for command in (Train, LaunchRun):
        words = " ".join((command.__doc__ or "").split())
        assert f"without a checkpoint {HONOUR_SECONDS:.0f} s later" in words
        assert f"within {SETUP_SECONDS:.0f} s before training" in words


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("at_call", [1, 2])
def test_an_evaluation_that_a_signal_fell_into_is_made_again(tmp_path, monkeypatch, at_call):
    """Between two of its batches; the record is then as if nothing had happened."""
    whole = run(tmp_path / "whole")
    calls = []

    def agreed(signals, kind):
        calls.append(kind)
        return signal.SIGTERM if calls.count("evaluating") == at_call and kind != "training" else 0

    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "agreed", agreed)
        with pytest.raises(Interrupted):
            run(tmp_path / "cut")
    interrupted = RunRecord.load(tmp_path / "cut")
    step = interrupted.statuses[-1].step
    assert interrupted.status == "interrupted"
    assert not interrupted.evaluations
    assert whole.evaluations[0].step == step

    run(tmp_path / "cut", resume=True)

    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")
    assert (tmp_path / "cut" / "checkpoints" / str(step)).exists() == (
        tmp_path / "whole" / "checkpoints" / str(step)
    ).exists()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_whoever_watches_is_told_of_every_save(tmp_path, monkeypatch, is_interrupted):
    """Also behind an evaluation and at the end: it may take its time."""
    heartbeat, phases = Heartbeat(None), []

    def noted(function):
        def call(*arguments, **named):
            phases.append(heartbeat.phase)
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(Heartbeat, "from_environment", lambda: heartbeat)
    for name in ("save", "close"):  # by which all that wait do so
        monkeypatch.setattr(Checkpoints, name, noted(getattr(Checkpoints, name)))
    monkeypatch.setattr(loop, "save_weights", noted(loop.save_weights))
    if is_interrupted:
        monkeypatch.setattr(
            StopSignals,
            "agreed",
            lambda *unused: signal.SIGTERM * (heartbeat.phase == "evaluating"),
        )
    with pytest.raises(Interrupted) if is_interrupted else contextlib.nullcontext():
        run(tmp_path / "run")

    assert len(phases) == (3 if is_interrupted else 6)
    assert set(phases) == {"saving", "finishing"}
