"""Skips unreadable examples, and counts them.

Knows sources and the rows of batches; nothing of steps or the kind of damage.
"""

from collections.abc import Mapping

import numpy as np

from scalejax.data.loader.sampler import Rows
from scalejax.data.source import Source, UnreadableExample

READABLE, LOST = "readable", "lost"
"""Auxiliary columns of a batch until it is used: whether an example was readable, and its index if
it should have counted but was unreadable, else -1."""
MOST_NAMED = 5
"""Largest number of unreadable examples whose errors a line of the record holds."""


class ReadableExamples:
    """A source that returns blank rows for unreadable examples, marked in "readable"."""

    def __init__(self, source: Source, blank: Mapping[str, np.ndarray]) -> None:
        """Wrap `source`; `blank` is the row to return for an unreadable example, by name."""
        self._source = source
        self._blank = blank
        self._known: set[int] = set()  # indices known to be damaged, not searched again

    def __len__(self) -> int:
        """Number of examples, unreadable ones included."""
        return len(self._source)

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The rows of `Source.take`, and "readable", bool [rows]."""
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
        """The readable ones of `places`, with their examples.

        Found by bisection, as a source reports only the first example that it cannot read.
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


def without_unreadable(batch: dict[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
    """`batch` of `rows` with weight 0 for unreadable rows, and "lost" in place of "readable".

    An unreadable row is replaced by its neighbour (rows 0 and 1, 2 and 3, ... are neighbours), as
    mixup mixes neighbours, or by zeros if that is unreadable too. If each process has an even
    number of rows, neighbours are in one process, and no row depends on the number of processes.
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
    """File, row and error of an unreadable example, found by reading it again, as a worker process
    may have read it."""
    try:
        source.take(np.array([index]))
    except UnreadableExample as error:
        return str(error)
    return f"example {index} could not be read, and now it can"


class Skipped:
    """Number and first errors of the unreadable examples in batches used since the last `taken`."""

    def __init__(self) -> None:
        self.count = 0
        """Unreadable rows; an example read twice counts twice."""
        self.reasons: list[str] = []
        """File, row and error of the first few examples."""

    def add(self, source: Source, lost: np.ndarray) -> None:
        """Count the unreadable rows of a batch: indices of `source`, or -1."""
        indices = lost[lost >= 0]
        self.count += len(indices)
        named = indices[: MOST_NAMED - len(self.reasons)]
        self.reasons += [why_unreadable(source, int(index)) for index in named]

    def taken(self) -> tuple[int, list[str]]:
        """Return number and errors so far, and reset them."""
        found = self.count, self.reasons
        self.count, self.reasons = 0, []
        return found
