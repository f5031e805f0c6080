"""One large batch in portions: who has which, and what has come of them.

Knows the numbers of portions and of replicas; neither time nor arithmetic.
"""

from bisect import bisect_left, insort
from collections import deque


class Portions:
    """The portions of one batch, handed out one at a time to whichever replica is free.

    A replica begins at a place of its own and goes on in the order of the portions, so that it has
    much the same from batch to batch. When all are handed out, those that are not done go to
    further replicas, those first that were handed out first, and whoever is first is taken (Dean
    et al. 2012, section 4.2: backup tasks, as of Dean & Ghemawat 2004, section 3.6).
    """

    def __init__(self, portions: int, replicas: int, *, backup_copies: int) -> None:
        self._count, self._replicas, self._backup_copies = portions, replicas, backup_copies
        self._places = [replica * portions // replicas for replica in range(replicas)]
        self._free = list(range(portions))
        self._held: dict[int, list[int]] = {}
        self._again: deque[int] = deque()

    def take(self, replica: int) -> int | None:
        """A portion for `replica` to compute; None if there is none."""
        if self._free:
            portion = self._free.pop(
                bisect_left(self._free, self._places[replica]) % len(self._free)
            )
            self._places[replica] = portion + 1
            self._held[portion] = [replica]
            if not self._free:
                self._again = deque([*self._held] * self._backup_copies)
            return portion
        while self._again:
            portion = self._again.popleft()
            if portion in self._held and replica not in self._held[portion]:
                self._held[portion].append(replica)
                return portion
        return None

    def finish(self, portion: int) -> None:
        """A replica has computed `portion`, and what came of it is on its way."""
        self._held.pop(portion, None)

    def give_back(self, portion: int, replica: int) -> bool:
        """`replica` will not compute what it has; whether another must."""
        holders = self._held.get(portion, [])
        if replica in holders:
            holders.remove(replica)
            if not holders:
                del self._held[portion]
                insort(self._free, portion)
                return True
        return False
