"""One large batch in portions: who has which, and what has come of them.

Knows the numbers of portions and of replicas; neither time nor arithmetic.
"""

from bisect import bisect_left, insort
from collections import deque


class WorkQueue:
    """The portions of one batch, handed out one at a time to whichever replica is free.

    A replica begins at a place of its own and goes on in the order of the portions, so that it has
    much the same from batch to batch. When all are handed out, those that are not done go to
    further replicas, those first that were handed out first, and whoever is first is taken (Dean
    et al. 2012, section 4.2: backup tasks, as of Dean & Ghemawat 2004, section 3.6).
    """

    def __init__(self, parts: int, replicas: int, *, backup_copies: int) -> None:
        self._count, self._replicas, self._backup_copies = parts, replicas, backup_copies
        self._places = [replica * parts // replicas for replica in range(replicas)]
        self._free = list(range(parts))
        self._held: dict[int, list[int]] = {}
        self._again: deque[int] = deque()

    def take(self, replica: int) -> int | None:
        """A portion for `replica` to compute; None if there is none."""
        if self._free:
            part = self._free.pop(bisect_left(self._free, self._places[replica]) % len(self._free))
            self._places[replica] = part + 1
            self._held[part] = [replica]
            if not self._free:
                self._again = deque([*self._held] * self._backup_copies)
            return part
        while self._again:
            part = self._again.popleft()
            if part in self._held and replica not in self._held[part]:
                self._held[part].append(replica)
                return part
        return None

    def finish(self, part: int) -> None:
        """A replica has computed `part`, and what came of it is on its way."""
        self._held.pop(part, None)

    def give_back(self, part: int, replica: int) -> bool:
        """`replica` will not compute what it has; whether another must."""
        holders = self._held.get(part, [])
        if replica in holders:
            holders.remove(replica)
            if not holders:
                del self._held[part]
                insort(self._free, part)
                return True
        return False
