"""Workers answer their caller, say how they failed, and never outlive it."""

import math
import operator
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from child_processes import children_of, is_running, wait_until

from scalejax.core.errors import ConfigError, ScalejaxError, require_at_least
from scalejax.core.workers import Pool, Worker, report


def pool_of(call: object, count: int = 2, **options: bool) -> Pool:
    """Workers that call one function."""
    return Pool(lambda number: Worker(call, name=f"worker {number}"), count, **options)


def test_every_request_is_answered_and_no_worker_is_left():
    """By few workers, by two that are asked ahead, and by a worker for each."""
    expected = {index: -index for index in range(5)}

    for ahead, is_reused in ((1, True), (2, True), (1, False)):
        with pool_of(operator.neg, is_reused=is_reused) as pool:
            said = list(pool.work(range(5), ahead=ahead))

        assert {kind for _, kind, _ in said} == {"answer"}
        assert {index: value for index, _, value in said} == expected
        assert not children_of()


def test_progress_comes_before_the_answer():
    """And without a caller it goes nowhere."""
    report("nobody")

    with pool_of(report, 1) as pool:
        said = list(pool.work(["half"]))

    assert said == [(0, "progress", "half"), (0, "answer", None)]


def test_refusals_are_errors_of_ours_and_mistakes_are_tracebacks():
    """The worker goes on after both."""
    with pool_of(partial(require_at_least, "size", minimum=1), 1) as pool:
        (_, kind, refused), (_, last, _) = pool.work([0, 1])
    assert (kind, last) == ("refused", "answer")
    assert isinstance(refused, ConfigError)
    assert "size=0 is refused" in str(refused)

    with pool_of(math.sqrt, 1) as pool:
        (_, kind, failed), (_, last, _) = pool.work([-1, 4])
    assert (kind, last) == ("failed", "answer")
    assert failed.return_code is None
    assert str(failed).splitlines()[-1].startswith("ValueError: ")


def test_the_requests_of_a_worker_that_dies_are_answered_by_another():
    """But for the one that it died of, which says how; its last words are kept."""
    with pool_of(sys.exit, 1) as pool:
        first, second = pool.work(["last words", 7], ahead=2)

    assert [first[:2], second[:2]] == [(0, "failed"), (1, "failed")]
    assert (first[2].return_code, str(first[2]), first[2].name) == (1, "last words", "worker 0")
    assert (second[2].return_code, str(second[2])) == (7, "it ended with 7")
    with pool_of(signal.raise_signal, 1) as pool:
        ((_, _, killed),) = pool.work([signal.SIGKILL])
    assert killed.was_killed
    assert [failed.reason.rpartition(" ")[2] for failed in (first[2], second[2], killed)] == [
        "words",
        "7",
        "out",
    ]


def test_workers_that_take_too_long_are_killed():
    """Where the block is left; so are those of a caller that fails."""
    with pytest.raises(TimeoutError), pool_of(time.sleep) as pool:
        list(pool.work([600, 600], seconds=0.2))
    assert not children_of()

    with pytest.raises(ZeroDivisionError), pool_of(time.sleep) as pool:
        sum(1 / index for index, _, _ in pool.work([0, 600]))
    assert not children_of()


def test_workers_are_asked_to_stop_before_they_are_killed():
    """Those that end by a signal are not waited for."""
    with pool_of(time.sleep) as pool:
        requests = pool.work([0, 600])
        assert next(requests) == (0, "answer", None)
        begin = time.monotonic()
        pool.stop(signal.SIGTERM, 60)

        assert time.monotonic() - begin < 30
        assert not children_of()


def test_what_cannot_be_sent_starts_no_process():
    """A source of a user's may be anything."""
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local"):
        Worker(lambda: None)
    assert not children_of(os.getpid())


def test_workers_start_side_by_side_however_much_they_are_sent_first():
    """None waits until the one before it reads."""
    begin = time.monotonic()

    worker = Worker(bytes(2**22), program="import time; time.sleep(20)")

    assert time.monotonic() - begin < 10
    worker.close()


def test_an_answer_of_a_class_that_is_not_here_is_a_refusal(tmp_path):
    """The worker finds its module, and the caller does not; the worker goes on."""
    (tmp_path / "only_there.py").write_text("class Thing: pass\n")
    worker = Worker(eval, search_path=[*sys.path, str(tmp_path)])

    worker.send("__import__('only_there').Thing()")
    with pytest.raises(ScalejaxError, match="cannot be read here: No module named 'only_there'"):
        worker.answer()

    worker.send("1 + 1")
    assert worker.answer() == 2
    worker.close()


CALLER = """
import os, signal, time
from scalejax.core.workers import Worker
worker = Worker(sum)
worker.send((1, 2))
worker.answer()
holder = os.fork() or time.sleep(600)
print(worker.pid, holder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of the kernel")
def test_a_worker_ends_with_its_caller_though_another_process_holds_the_connection():
    """The caller is killed; what it forked goes on."""
    command = [sys.executable, "-c", CALLER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        worker, holder = map(int, caller.stdout.readline().split())
        try:
            assert wait_until(lambda: not is_running(worker), 60)
        finally:
            os.kill(holder, signal.SIGKILL)
