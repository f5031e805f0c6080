"""Workers: Python processes that answer requests from the process that started them, their caller.

Requests go to a worker, and progress, answers and refusals come back, through a socket that only
the two hold: (kind, value) as pickles, not lines of JSON, since input workers send arrays and
receive the user's own sources. What a worker prints is its log. A worker ends with its caller, and
Ctrl-C reaches only the caller. Does not know the work.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any, Literal, Self

from scalejax.core.environment import end_with_caller
from scalejax.core.errors import ScalejaxError

Kind = Literal["progress", "answer", "refused", "failed"]
"""Kind of a message from a worker; the value of the last two is a `ScalejaxError` or a
`WorkerFailed`."""

_SERVE = "from scalejax.core.workers import serve; serve()"


class WorkerFailed(Exception):
    """A worker has died, or the function that it called has raised more than a refusal."""

    def __init__(self, said: str, return_code: int | None = None, name: str = "") -> None:
        super().__init__(said, return_code, name)
        self.said = said
        """The traceback of the function; or the log of a dead worker, "" if it is not kept."""
        self.return_code = return_code
        """Exit code of a dead worker, negative for a signal; None if it lives on."""
        self.name = name
        """Name of a dead worker."""

    def __str__(self) -> str:
        return self.said.strip() or f"it ended with {self.return_code}"

    @property
    def was_killed(self) -> bool:
        """Whether the worker was killed, as by the system when memory runs out."""
        return self.return_code == -signal.SIGKILL

    @property
    def reason(self) -> str:
        """Why, in a few words: lack of memory if it was killed, else the last line of its text."""
        if self.was_killed:
            return "it was killed, most likely because memory ran out"
        return str(self).splitlines()[-1]


class Worker:
    """A Python process that receives requests, and answers them in order."""

    def __init__(
        self,
        first: object,
        *,
        program: str = _SERVE,
        name: str = "",
        environment: Mapping[str, str] = os.environ,
        search_path: Sequence[str] | None = None,
        log: int | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start it.

        Args:
            first: message sent by `begin`: for the default program, a function from request to
                answer, or a callable instance with settings.
            program: source to run; the descriptor of its end of the connection is `sys.argv[1]`.
            name: shown by `ps`, and kept by a `WorkerFailed`.
            environment: its environment variables, except PYTHONPATH.
            search_path: folders to import from; by default those of this process.
            log: descriptor for what it prints; if None, a temporary file for `WorkerFailed.said`.
            descriptors: additional descriptors that it inherits.
        """
        self._first = pickle.dumps(first)  # before it starts: not every user's source can be
        folders = sys.path if search_path is None else search_path
        path = os.pathsep.join(folder or os.getcwd() for folder in folders)
        self.connection, theirs = Pipe()
        self._name = name
        # The kernel ends a worker with the thread that started it, and only the main thread surely
        # outlives the worker; for other threads only `_listen` notices the end.
        is_main = threading.current_thread() is threading.main_thread()
        caller = os.getpid() if is_main else 0
        self._log = tempfile.TemporaryFile() if log is None else None  # noqa: SIM115  `close` does
        output = self._log.fileno() if self._log is not None else log
        with theirs:
            self._process = subprocess.Popen(
                # -P: the working folder may hold a json.py of the user.
                [sys.executable, "-P", "-c", program, str(theirs.fileno()), str(caller), name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, "PYTHONPATH": path},
                pass_fds=(theirs.fileno(), *descriptors),
                # Ctrl-C reaches only the caller, which then silently ends its workers. No new
                # session: Linux schedules cores by session, and workers should have the caller's
                # priority.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def begin(self) -> None:
        """Send the first message, if not yet sent; a large one blocks until it is read."""
        message, self._first = self._first, b""
        if message:
            with contextlib.suppress(OSError):  # it has died, as `receive` will say
                self.connection.send_bytes(message)

    def send(self, request: object) -> None:
        """Send a request, after `begin`; `receive` says if the worker has died."""
        self.begin()
        with contextlib.suppress(OSError):
            self.connection.send(request)

    def receive(self) -> tuple[Kind, Any]:
        """The next message of the worker: (kind, value). One that cannot be read here, such as an
        instance of a class whose module only the worker finds, is a refusal."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            return "failed", WorkerFailed(self._said(), code, self._name)
        except (ImportError, AttributeError, pickle.UnpicklingError) as error:
            who = self._name or "a worker"
            return "refused", ScalejaxError(f"What {who} sent cannot be read here: {error}.")

    def answer(self) -> Any:
        """The answer to the oldest request.

        Raises:
            ScalejaxError: if it was refused.
            WorkerFailed: if the worker died, or its function raised anything else.
        """
        kind, value = self.receive()
        while kind == "progress":
            kind, value = self.receive()
        if kind == "answer":
            return value
        raise value

    def signal(self, number: int) -> None:
        """Send a signal to the worker, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the worker, from any thread; a thread that waits in `receive` gets a failure."""
        self._process.kill()

    def close(self) -> None:
        """End the worker, and release its resources."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        if self._log is not None:
            self._log.close()

    def _said(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class _Member:
    worker: Worker
    number: int
    asked: deque[int] = field(default_factory=deque)
    """Indices of the requests that it has not answered."""


class Pool:
    """Workers among which requests are divided; none outlives the `with` block."""

    def __init__(
        self, start: Callable[[int], Worker], count: int, *, is_reused: bool = True
    ) -> None:
        """Set up the pool; no worker is started yet.

        Args:
            start: starts the worker with a number below `count`, again if it has died.
            count: most workers at a time.
            is_reused: whether a worker answers several requests, one after another.
        """
        self._start = start
        self._count = count
        self._is_reused = is_reused
        self._members: dict[Connection, _Member] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        for connection in list(self._members):
            self._close(connection)

    def work(
        self, requests: Sequence[object], *, ahead: int = 1, seconds: float | None = None
    ) -> Iterator[tuple[int, Kind, Any]]:
        """Yield (index of the request, kind, value) for every message as it arrives.

        Every request ends with a message that is not progress. If a worker dies, its request fails,
        and another worker continues with the next ones.

        Args:
            requests: requests, begun in order.
            ahead: requests sent to a worker before it has answered the first of them.
            seconds: time limit for all requests; None for no limit.

        Raises:
            TimeoutError: if they are not answered in time.
        """
        waiting = deque(range(len(requests)))
        deadline = None if seconds is None else time.monotonic() + seconds
        count = min(self._count, len(requests))
        for member in [self._started(number) for number in range(count)]:
            self._give(member, requests, waiting, ahead)
        while self._members:
            for connection in self._ready(deadline):
                member = self._members[connection]
                kind, value = member.worker.receive()
                yield member.asked[0], kind, value
                if kind == "progress":
                    continue
                member.asked.popleft()
                if not self._is_reused or (kind == "failed" and value.return_code is not None):
                    waiting.extendleft(reversed(member.asked))
                    self._close(connection)
                    if not waiting:
                        continue
                    member = self._started(member.number)
                self._give(member, requests, waiting, ahead)

    def stop(self, number: int, seconds: float) -> None:
        """Send a signal to the workers, and wait until they have ended, or finished a request."""
        for member in self._members.values():
            member.worker.signal(number)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while self._members:
                for connection in self._ready(deadline):
                    if self._members[connection].worker.receive()[0] != "progress":
                        self._close(connection)

    def _ready(self, deadline: float | None) -> list[Connection]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(self._members), left)
        if not ready:
            raise TimeoutError
        return ready  # type: ignore[return-value]  a subset of what it was given

    def _started(self, number: int) -> _Member:
        member = _Member(self._start(number), number)
        self._members[member.worker.connection] = member
        return member

    def _give(
        self, member: _Member, requests: Sequence[object], waiting: deque[int], ahead: int
    ) -> None:
        """Send a worker its next requests; close it if there are none."""
        while waiting and len(member.asked) < ahead:
            member.asked.append(waiting.popleft())
            member.worker.send(requests[member.asked[-1]])
        if not member.asked:
            self._close(member.worker.connection)

    def _close(self, connection: Connection) -> None:
        self._members.pop(connection).worker.close()


# The worker itself.

_callers: list[Connection] = []
"""Connection to the caller of this process, if it is a worker."""


def report(value: object) -> None:
    """Send progress on a request to the caller; no effect in a process that is not a worker."""
    for caller in _callers:
        with contextlib.suppress(OSError):  # it has ended, and this process is ending too
            caller.send(("progress", value))


def serve() -> None:
    """Answer requests until the caller ends."""
    caller = Connection(int(sys.argv[1]))
    os.set_inheritable(caller.fileno(), False)
    if (process := int(sys.argv[2])) != 0:
        end_with_caller(process)
    try:
        call: Callable[[Any], object] = caller.recv()
    except (EOFError, OSError):  # the caller has already ended
        return
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(caller, requests), daemon=True).start()
    _callers.append(caller)
    while True:
        message = _answered(call, requests.get())
        try:
            caller.send(message)
        except OSError:  # the caller has ended, and nobody would read an error
            os._exit(0)


def _listen(caller: Connection, requests: "SimpleQueue[Any]") -> None:
    """Queue requests; end this process when the caller ends."""
    try:
        while True:
            requests.put(caller.recv())
    except (EOFError, OSError):
        os._exit(0)
    except Exception:  # noqa: BLE001  an unreadable request: no caller's thread to raise it in
        traceback.print_exc()
        os._exit(1)


def _answered(call: Callable[[Any], object], request: object) -> tuple[Kind, object]:
    try:
        return "answer", call(request)
    except ScalejaxError as error:
        return "refused", _portable(error)
    except Exception:  # noqa: BLE001  the caller raises its traceback
        return "failed", WorkerFailed(traceback.format_exc())


def _portable(error: ScalejaxError) -> ScalejaxError:
    """`error`, or one with its message if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except (TypeError, AttributeError, pickle.PicklingError):
        return ScalejaxError(str(error))
