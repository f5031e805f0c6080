"""What the processes of a run must agree on: who writes, what is there, when to stop."""

import signal
import threading
from types import FrameType, TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process is the one that writes and talks."""
    return jax.process_index() == 0


def first_says(value: bool) -> bool:
    """The value of the first process, in all of them; every process must ask."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def all_say(text: str) -> tuple[str, ...]:
    """What each process says, the same in all of them; every process must say something."""
    if jax.process_count() == 1:
        return (text,)
    content = np.frombuffer(text.encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.int32(len(content))).max())
    padded = np.pad(content, (0, longest - len(content)))
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return tuple(row.tobytes().rstrip(b"\0").decode() for row in gathered)


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a wish; the second one ends the process as ever."""

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[int, object] = {}

    def agreed(self, step: int, *, every: int) -> int:
        """The signal that some process received, the same answer in all; 0 if none.

        Several processes compare notes at every `every`-th step only: it takes an exchange.
        """
        if jax.process_count() == 1:
            return self._received
        if step % every:
            return 0
        return int(multihost_utils.process_allgather(np.int32(self._received)).max())

    def __enter__(self) -> "StopSignals":
        # Python delivers signals to the main thread; in another, they stay with the host program.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  what `signal` returned
        self._previous.clear()
