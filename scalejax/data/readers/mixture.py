"""Mixtures: texts from several sources, in turns that depend only on the place in the run."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import numpy as np

from scalejax.config.data import MixtureConfig
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.data.datasets import Opening, for_process, open_source, reader_of
from scalejax.data.facts import read_facts
from scalejax.data.source import Reader, Source, Split, UsedPart
from scalejax.data.transforms.augmentation import Augmentation


class Turns:
    """Which source each example of a run is from, by Webster's method of apportionment.

    The j-th example of a source is due when its share of the run reaches j - 1/2, and examples
    come in the order in which they are due (Balinski and Young 1982, "Fair Representation").
    """

    def __init__(self, config: MixtureConfig, epoch_examples: int) -> None:
        """Turns of the mixture `config` in epochs of `epoch_examples`."""
        ends = [round(each.until_epoch * epoch_examples) for each in config.stages]
        self._starts = np.array([0, *ends], float)
        self._ends = np.array([*ends, np.inf])
        weights = np.array([*(each.weights for each in config.stages), config.weights], float)
        self._shares = weights / weights.sum(axis=1, keepdims=True)
        lasting = (self._ends - self._starts)[:-1, None] * self._shares[:-1]
        self._before = np.concatenate([np.zeros((1, weights.shape[1])), np.cumsum(lasting, 0)])

    def between(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each of the examples `begin` to `end` - 1 of a run, and how many examples
        of that source came before; int64 [end - begin]."""
        passed, which, numbers = self._around(begin, end)
        there = slice(begin - passed.sum(), end - passed.sum())
        return which[there], numbers[there]

    def before(self, place: int) -> np.ndarray:
        """How many of the first `place` examples of a run are from each source."""
        passed, which, _ = self._around(place, place)
        return passed + np.bincount(which[: place - passed.sum()], minlength=len(passed))

    def _around(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How many examples of each source are due well before `begin`; source and number of those
        that follow until well after `end`."""
        sources = self._shares.shape[1]
        # Due times differ from places by less than the number of sources.
        first, last = max(begin - sources, 0), end + sources
        found = [self._due(source, first, last) for source in range(sources)]
        which = np.repeat(np.arange(sources), [len(due) for _, due in found])
        numbers = np.concatenate([before + np.arange(len(due)) for before, due in found])
        order = np.argsort(np.concatenate([due for _, due in found]), kind="stable")
        return np.array([before for before, _ in found]), which[order], numbers[order]

    def _due(self, source: int, first: float, last: float) -> tuple[int, np.ndarray]:
        """How many examples of a source are due by `first`, and when each of those after it and up
        to `last` is due."""
        due, counts = [np.zeros(0)], []
        for start, end, share, before in zip(
            self._starts, self._ends, self._shares[:, source], self._before[:, source], strict=True
        ):
            if first >= end or last <= start:
                continue
            ends = np.clip([first, last], start, end) - start
            passed = np.floor(before + ends * share + 0.5).astype(np.int64)
            counts.append(int(passed[0]))
            if share:
                numbers = np.arange(passed[0], passed[1])
                due.append(start + (numbers + 0.5 - before) / share)
        return counts[0], np.concatenate(due).round(6)  # ties go by the order of sources


class Mixture(Reader, names=("mixture",)):
    """Examples from several sources. In training, an index identifies the example: its place among
    the examples of all sources, and the pass over its source."""

    def __init__(self, config: MixtureConfig, split: Split, augmentation: Augmentation) -> None:
        self._config, self._augmentation = config, augmentation
        self._split: Split = split
        self._hold(
            [open_source(each, split, seed=augmentation.seed) for each in config.divided_sources]
        )

    def _hold(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._counts = np.array([len(each) for each in sources])
        self._ends = np.cumsum(self._counts)
        self._length = int(self._ends[-1])
        if self._split == "train":
            self._length = self._config.epoch_examples or self._length
        self._turns = Turns(self._config, self._length)

    @staticmethod
    def facts(config: MixtureConfig) -> DatasetFacts:
        """Counts and shapes.

        Raises:
            ConfigError: as for each source; if they differ in tokens or vocabulary.
        """
        return config.mixed([read_facts(each) for each in config.divided_sources])

    @staticmethod
    def files(config: MixtureConfig, part: Split) -> Iterable[UsedPart]:
        """The current files of all sources."""
        in_files = (each for each in config.sources if each.is_of_files)
        return chain.from_iterable(reader_of(each).files(each, part) for each in in_files)

    @property
    def opening(self) -> Callable[[], "Mixture"]:
        """Opens the mixture again in another process, from the files that were listed here."""
        sources = [for_process(each, 1) for each in self._sources]
        return partial(_opened, self._config, self._split, self._augmentation, sources)

    def __len__(self) -> int:
        """Number of examples of an epoch in training, else of all sources."""
        return self._length

    def order_of_epoch(self, epoch: int, steps: int, global_batch: int) -> np.ndarray:
        """The examples of an epoch: those at its places of the run, whatever the batch."""
        del steps, global_batch
        which, numbers = self._turns.between(epoch * self._length, (epoch + 1) * self._length)
        passes, places = np.divmod(numbers, self._counts[which])
        rows = np.empty_like(places)
        for source, of_it in enumerate(self._counts):
            mine = np.flatnonzero(which == source)
            for each in np.unique(passes[mine]):
                chosen = mine[passes[mine] == each]
                seeds = [self._augmentation.seed, int(each), 2, source + 1]
                shuffled = np.random.default_rng(seeds).permutation(of_it)
                rows[chosen] = shuffled[places[chosen]]
        return passes * self._ends[-1] + (self._ends - self._counts)[which] + rows

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The rows of `Source.take`; for validation and test also "source", the number of each
        row's source.

        Raises:
            UnreadableExample: if one of them cannot be read.
        """
        passes, places = np.divmod(np.asarray(indices, np.int64), self._ends[-1])
        which = np.searchsorted(self._ends, places, side="right")
        rows = places - (self._ends - self._counts)[which]
        found: dict[str, np.ndarray] = {}
        if self._split != "train":
            found["source"] = which.astype(np.int32)
        for source, number in np.unique(np.stack([which, passes], 1), axis=0):
            chosen = np.flatnonzero((which == source) & (passes == number))
            its_epoch = None if epoch is None else int(number)
            taken = self._sources[source].take(rows[chosen], its_epoch)
            for name, values in taken.items():
                whole = found.setdefault(
                    name, np.empty((len(places), *values.shape[1:]), values.dtype)
                )
                whole[chosen] = values
        return found


def _opened(
    config: MixtureConfig,
    split: Split,
    augmentation: Augmentation,
    sources: Sequence[Source | Opening],
) -> Mixture:
    mixture = Mixture.__new__(Mixture)
    mixture._config, mixture._split, mixture._augmentation = config, split, augmentation
    mixture._hold([each() if isinstance(each, partial) else each for each in sources])
    return mixture
