"""Work queue of one large batch: assignment of work items to replicas, with backup copies.

Knows the numbers of work items and of replicas; neither time nor values.
"""

from bisect import bisect_left, insort
from collections import deque


class WorkQueue:
    """The work items of one batch, assigned one at a time to free replicas.

    A replica starts at its own offset and continues in the order of the items, so that it gets
    mostly the same ones from batch to batch. When all are assigned, unfinished ones are also given
    to further replicas, those assigned longest ago first, and the first result is used (Dean et
    al. 2012, section 4.2: backup tasks, as in Dean & Ghemawat 2004, section 3.6).
    """

    def __init__(self, parts: int, replicas: int, *, backup_copies: int) -> None:
        self._count, self._replicas, self._backup_copies = parts, replicas, backup_copies
        self._places = [replica * parts // replicas for replica in range(replicas)]
        self._free = list(range(parts))
        self._held: dict[int, list[int]] = {}
        self._again: deque[int] = deque()

    def take(self, replica: int) -> int | None:
        """A work item for `replica` to compute; None if there is nothing to do."""
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
        """Mark `part` as computed by some replica."""
        self._held.pop(part, None)

    def give_back(self, part: int, replica: int) -> bool:
        """Return the unfinished `part` of `replica`; whether another replica must compute it."""
        holders = self._held.get(part, [])
        if replica in holders:
            holders.remove(replica)
            if not holders:
                del self._held[part]
                insort(self._free, part)
                return True
        return False
