"""What the processes of a run must agree on: who writes, and what is there."""

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
