"""Examples that cannot be read, left out and counted.

Knows sources and the rows of batches; nothing of steps, and nothing of what is wrong with a row.
"""

from collections.abc import Mapping

import numpy as np

from scalejax.data.loader.sampler import Rows
from scalejax.data.source import Source, UnreadableExample

READABLE, LOST = "readable", "lost"
"""Columns that go with the rows of a batch until it is used: whether an example could be read; and
its index if it was to count and could not, else -1."""
MOST_NAMED = 5
"""Lost examples of which a line of the record says what is wrong with them."""


class ReadableExamples:
    """A source whose examples may be unreadable: their rows are blank, and "readable" says so."""

    def __init__(self, source: Source, blank: Mapping[str, np.ndarray]) -> None:
        """The examples of `source`; `blank` is one row, by name, of what stands for none."""
        self._source = source
        self._blank = blank
        self._known: set[int] = set()  # what is damaged stays so, and costs no second search

    def __len__(self) -> int:
        """Number of examples, unreadable ones included."""
        return len(self._source)

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """What `Source.take` gives, and "readable", bool [rows]."""
        places = np.arange(len(indices))
        if self._known:
            places = places[[int(index) not in self._known for index in indices]]
        found = self._searched(indices, places, epoch)
        if len(found) == 1 and len(found[0][0]) == len(indices):
            return found[0][1] | {READABLE: np.ones(len(indices), bool)}
        rows = {
            name: np.repeat(value[None], len(indices), axis=0)
            for name, value in self._blank.items()
        }
        rows[READABLE] = np.zeros(len(indices), bool)
        for part, taken in found:
            for name, values in (taken | {READABLE: np.True_}).items():
                rows[name][part] = values
        return rows

    def _searched(
        self, indices: np.ndarray, places: np.ndarray, epoch: int | None
    ) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Those of `places` whose examples can be read, with these.

        By halves: a source names the first that it cannot read, and others may follow.
        """
        if not len(places):
            return []
        try:
            return [(places, self._source.take(indices[places], epoch))]
        except UnreadableExample:
            if len(places) == 1:
                self._known.add(int(indices[places[0]]))
                return []
        middle = len(places) // 2
        first = self._searched(indices, places[:middle], epoch)
        return first + self._searched(indices, places[middle:], epoch)


def settled(batch: dict[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
    """`batch`, of which `rows` were taken, with the unreadable counting for nothing; "lost" in
    place of "readable".

    They hold what their neighbour does (of rows 0 and 1, 2 and 3, ... each is the other's), for
    statistics of BatchNorm are of all rows of a batch, and mixup mixes neighbours; zeros if that is
    lost too. Neighbours are in one process where each has an even number of rows: then no row
    depends on how many processes there are.
    """
    (counted,) = rows.beside
    held = dict(batch)
    is_readable, counts = held.pop(READABLE), held.pop(counted)
    if not is_readable.all():
        places = np.arange(len(is_readable))
        neighbours = np.minimum(places ^ 1, len(places) - 1)
        filled = np.where(is_readable | ~is_readable[neighbours], places, neighbours)
        held = {name: values[filled] for name, values in held.items()}
    lost = np.where(~is_readable & (counts > 0), rows.indices, -1)
    return held | {counted: counts * is_readable, LOST: lost}


def why_unreadable(source: Source, index: int) -> str:
    """File and row of an unreadable example, and what is wrong with it: by reading it once more,
    for what found it may be another process."""
    try:
        source.take(np.array([index]))
    except UnreadableExample as error:
        return str(error)
    return f"example {index} could not be read, and now it can"


class Skipped:
    """Lost examples of the batches used since it was last asked: their number, and the first."""

    def __init__(self) -> None:
        self.count = 0
        """Rows lost; an example that is met twice counts twice."""
        self.reasons: list[str] = []
        """File and row of the first few, and what is wrong with each."""

    def add(self, source: Source, lost: np.ndarray) -> None:
        """Count what a batch has lost: indices of `source`, or -1."""
        indices = lost[lost >= 0]
        self.count += len(indices)
        named = indices[: MOST_NAMED - len(self.reasons)]
        self.reasons += [why_unreadable(source, int(index)) for index in named]

    def taken(self) -> tuple[int, list[str]]:
        """Number and reasons so far; begins again."""
        found = self.count, self.reasons
        self.count, self.reasons = 0, []
        return found
