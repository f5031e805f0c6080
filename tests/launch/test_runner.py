"""A function is called in several processes, and the first gives its value back, as HorovodRunner
has it."""

import io
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from scalejax.core.errors import ConfigError
from scalejax.launch import ProcessesFailed, Runner

# Every test starts processes that each import JAX.
pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """Processes look for no accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """One call of `main` in two processes of two devices each."""

    value: dict[str, Any]
    """What it gave back."""
    said: list[str]
    """What the caller heard, by line."""


@pytest.fixture(scope="module")
def called() -> Called:
    """A call, the function one of another, with a word of the caller's in it."""
    word = "of the caller"

    def main(start, step):
        import sys

        import child_processes  # that lies beside this file
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.experimental.multihost_utils import process_allgather
        from jax.sharding import AxisType, NamedSharding, PartitionSpec

        count = jax.device_count()
        mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,))
        values = jax.make_array_from_callback(
            (count,),
            NamedSharding(mesh, PartitionSpec("all")),
            lambda index: jnp.arange(start, start + step * count, step)[index],
        )
        total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(values)
        print(f"printed by {jax.process_index()}")
        print(f"complained by {jax.process_index()}", file=sys.stderr)
        return {
            "rank": jax.process_index(),
            "processes": jax.process_count(),
            "devices": count,
            "devices of one": jax.local_device_count(),
            "total": int(total),
            "pids": [int(pid) for pid in process_allgather(np.int32(os.getpid()))],
            "host": socket.gethostname(),
            "word": word,
            "module": child_processes.__name__,
        }

    out = io.StringIO()
    value = Runner(np=-2, cpu_devices=2, out=out).run(main, start=1, step=2)
    return Called(value=value, said=out.getvalue().splitlines())


PARITY = {
    # Behaviour of HorovodRunner: what is seen of it here, and what it must be.
    "np=-2: two processes": (lambda call: call.value["processes"], 2),
    "np < 0: on the machine of the caller": (
        lambda call: call.value["host"],
        socket.gethostname(),
    ),
    "np < 0: subprocesses, each its own": (
        lambda call: len({*call.value["pids"], os.getpid()}),
        3,
    ),
    "hvd.size() counts devices, of all processes": (lambda call: call.value["devices"], 4),
    "hvd.local_size(): those of one": (lambda call: call.value["devices of one"], 2),
    "run(main, **kwargs): main is given them": (lambda call: call.value["total"], 1 + 3 + 5 + 7),
    "a collective reaches all processes": (lambda call: call.value["total"], 16),
    "the return value is that of rank 0": (lambda call: call.value["rank"], 0),
    "main is pickled with what it refers to": (lambda call: call.value["word"], "of the caller"),
    "stdout goes to the caller": (lambda call: "printed by 0" in call.said, True),
    "stderr goes to the caller": (lambda call: "complained by 0" in call.said, True),
    # Of the first alone; `shows_all` is driver_log_verbosity="all", in another test.
    'driver_log_verbosity="log_callback_only", the default: few words': (
        lambda call: [line for line in call.said if line.endswith("by 1")],
        [],
    ),
    # Better than HorovodRunner, which does not send modules of the caller's to its workers.
    "modules beside the caller's can be imported": (
        lambda call: call.value["module"],
        "child_processes",
    ),
}
"""Source: docstrings and behaviour of HorovodRunner (sparkdl, Databricks)."""


@pytest.mark.parametrize("behaviour", PARITY)
def test_a_runner_behaves_as_horovod_runner(behaviour, called):
    """One row of the parity table."""
    seen, expected = PARITY[behaviour]

    assert seen(called) == expected


def test_one_process_is_one_too():
    """np=-1: a process of its own, whose value may be anything."""
    pid, nothing = Runner(-1, out=io.StringIO()).run(lambda: (os.getpid(), None))

    assert (pid != os.getpid(), nothing) == (True, None)


def test_an_error_in_any_process_is_told_with_its_words():
    """And ends the call in all; with everything shown, each line has the number of its process."""

    def fail():
        import jax

        print("here I am")
        if jax.process_index() == 1:
            raise LookupError("nothing is there")

    out = io.StringIO()
    with pytest.raises(ProcessesFailed, match="fail failed in 2 processes"):
        Runner(-2, shows_all=True, out=out).run(fail)

    said = out.getvalue().splitlines()
    assert "[1] LookupError: nothing is there" in said
    assert {"[0] here I am", "[1] here I am"} <= set(said)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"np": 0}, "np=0 is refused: it must be -4 for 4 processes on this machine, or 4"),
        ({"np": 4}, "np=4 is refused: there is no srun on this machine; np=-4 starts as many"),
        ({"np": 2, "hosts": ["a", "b"]}, "np=2 is refused: there is no ssh on this machine"),
        ({"np": 3, "hosts": ["a", "b"]}, "hosts='a b' is refused: there must be one for each"),
        ({"np": 1, "hosts": ["-oProxyCommand=x"]}, "hosts='-oProxyCommand=x' is refused"),
        ({"np": -2, "hosts": ["a", "b"]}, "hosts='a b' is refused: it is for a cluster"),
        ({"np": -2, "stuck_seconds": -1.0}, "stuck_seconds=-1.0 is refused"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments, refused, monkeypatch, tmp_path):
    """np > 0 are slots of Spark there, and 0 all of them, which it advises against."""
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match=refused):
        Runner(**arguments)


def ranks():
    """What each process of a call is, gathered."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    print(f"printed by {jax.process_index()}")
    pids = process_allgather(np.array([jax.process_index(), os.getpid()], np.int32))
    return jax.device_count(), pids[:, 0].tolist(), pids[:, 1].tolist()


def hang():
    """The second process freezes, and the first waits for it for ever."""
    if (ranks := __import__("jax").process_index()) == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600 * (1 - ranks))


@pytest.fixture
def by_ssh(tmp_path, monkeypatch):
    """An ssh whose only host is this machine: it runs what it is told in a session of its own."""
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\necho "$4" >> {tmp_path}/hosts\nexec setsid --wait sh -c "$5"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "hosts"


def test_processes_on_hosts_join_and_the_value_is_that_of_the_first(by_ssh, tmp_path):
    """One for each host named, the first of which has the coordinator."""
    out = io.StringIO()
    runner = Runner(2, hosts=("localhost", "127.0.0.1"), folder=tmp_path, cpu_devices=1, out=out)

    devices, processes, _ = runner.run(ranks)

    assert (devices, processes) == (2, [0, 1])
    assert sorted(by_ssh.read_text().split()) == ["127.0.0.1", "localhost"]
    assert [line for line in out.getvalue().splitlines() if "printed" in line] == ["printed by 0"]


def test_processes_of_slurm_join_and_a_frozen_one_ends_all(slurm, tmp_path, monkeypatch):
    """Through srun; the frozen one, which cannot end itself, is killed with its step."""
    monkeypatch.setenv("SLURM_CONF", slurm)
    out = io.StringIO()
    runner = Runner(2, folder=tmp_path, cpu_devices=1, stuck_seconds=4, shows_all=True, out=out)

    devices, processes, _ = runner.run(ranks)
    assert (devices, processes) == (2, [0, 1])
    assert {"[0] printed by 0", "[1] printed by 1"} <= set(out.getvalue().splitlines())

    begin = time.monotonic()
    with pytest.raises(ProcessesFailed, match=r"hang failed in 2 processes \(exit code 5\)"):
        runner.run(hang)
    assert time.monotonic() - begin < 90  # most of it to start, on a busy machine
    assert "error: process 1 has been silent for 4 s (starting)" in out.getvalue()


def test_what_cannot_be_pickled_is_refused():
    """Before any process is started."""
    lock = threading.Lock()

    def hold():
        return lock

    with pytest.raises(ConfigError, match=r"hold cannot be sent .*cannot pickle '_thread.lock'"):
        Runner(-2).run(hold)
