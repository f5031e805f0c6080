"""The places of an elastic run, and in which of them its processes are started.

A place is a share of this machine, with its GPUs, that has room for one process. Arithmetic on
counts and times; starts nothing.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scalejax.core.errors import ConfigError, refusal, require_at_least

_MOST_DOUBLINGS = 5
"""Limit on doublings of the time that a place is out of use: at most 32 times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How far the number of processes may fall and rise, and what they keep in memory."""

    least: int
    """Smallest number of processes."""
    most: int
    """Largest number of processes, and number of places."""
    rejoin_seconds: float = 60.0
    """How long a place is out of use after its process was lost; twice as long each further time,
    up to 32 times."""
    copy_seconds: float = 10.0
    """Least time between two copies of the state in memory; 0 for none."""

    def __post_init__(self) -> None:
        require_at_least("elastic: MIN", self.least, 1)
        require_at_least("rejoin_seconds", self.rejoin_seconds, 0)
        require_at_least("copy_seconds", self.copy_seconds, 0)
        if self.most < self.least:
            accepted = f"its most must be at least its least, {self.least}"
            raise ConfigError(refusal("elastic", f"{self.least}:{self.most}", accepted))


class Places:
    """The places of a run, and until when each is out of use."""

    def __init__(
        self,
        elastic: Elastic,
        processes: int,
        can_train: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All places up to `processes` are free, the others after `rejoin_seconds`.

        Args:
            elastic: the bounds.
            processes: number of processes to begin with.
            can_train: whether so many processes can train the run, such as divide its global batch.
            clock: monotonic clock in seconds.
        """
        self._elastic = elastic
        self._can_train = can_train
        self._clock = clock
        later = clock() + elastic.rejoin_seconds
        self._free_at = {
            place: -math.inf if place < processes else later for place in range(elastic.most)
        }
        self._losses: Counter[int] = Counter()
        self._doubtful: set[int] = set()
        self.answers: Callable[[Sequence[int]], Mapping[int, bool]] = all_answer
        """Whether places whose process was lost can be used again; called when their time has come,
        and at each look until the answer holds them. It does not wait."""

    def lose(self, places: Iterable[int]) -> None:
        """Note that the processes in these places were lost."""
        for place in places:
            doublings = min(self._losses[place], _MOST_DOUBLINGS)
            self._losses[place] += 1
            self._doubtful.add(place)
            self._free_at[place] = self._clock() + self._elastic.rejoin_seconds * 2**doublings

    def chosen(self) -> tuple[int, ...]:
        """The places to start processes in: as many free ones as can train the run; none if too few
        are free, and all if every place is free but no number of them can train it."""
        now = self._clock()
        if asked := self._asked(now):
            for place, answers in self.answers(asked).items():
                if answers:
                    self._doubtful.remove(place)
                else:
                    self.lose([place])
        free = [
            place
            for place, at in self._free_at.items()
            if at <= now and place not in self._doubtful
        ]
        for count in range(len(free), self._elastic.least - 1, -1):
            if self._can_train(count):
                return tuple(free[:count])
        return tuple(free) if len(free) == self._elastic.most else ()

    def seconds_to_wait(self) -> float:
        """Seconds until the next place is free; 0 if all are, or one is asked if it answers."""
        now = self._clock()
        if self._asked(now):
            return 0.0
        return min((at - now for at in self._free_at.values() if at > now), default=0.0)

    def _asked(self, now: float) -> list[int]:
        """The places whose time has come, but which are not known to answer."""
        return sorted(place for place in self._doubtful if self._free_at[place] <= now)


def all_answer(places: Sequence[int]) -> dict[int, bool]:
    """Say that all places can be used again, as for those of this machine."""
    return dict.fromkeys(places, True)
