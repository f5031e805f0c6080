"""Token files as examples of one length, by index; documents are shuffled every epoch."""

from collections.abc import Iterable
from copy import copy
from functools import lru_cache

import numpy as np

from scalejax.config.data import TokensConfig
from scalejax.data.formats.tokens import own_part, token_files, token_span, tokens_facts
from scalejax.data.readers.documents import token_rows
from scalejax.data.readers.memmap import FlatFile, gathered
from scalejax.data.source import Reader, Split, UnreadableExample, UsedPart
from scalejax.data.stage_clock import timed
from scalejax.data.transforms.augmentation import Augmentation

SCANNED_TOKENS = 2**22
"""Tokens read at once to find where documents end."""


class TokenExamples(Reader, names=("tokens",)):
    """Consecutive pieces of a stream of tokens, int32; the target of each place is the token that
    follows it."""

    facts = staticmethod(tokens_facts)

    def __init__(self, config: TokensConfig, split: Split, augmentation: Augmentation) -> None:
        self._config = config
        self._seed = augmentation.seed
        field = f"data.{own_part(config, split)}"
        self._files = tuple(
            FlatFile(
                field=field, file=each.file, dtype=each.dtype, offset=each.offset, count=each.count
            )
            for each in token_files(config, split)
        )
        self._file_ends = np.cumsum([file.count for file in self._files])
        self._begin, self._end = token_span(config, split)
        self._orders: dict[int | None, tuple[np.ndarray, np.ndarray]] = {}
        self._documents: np.ndarray | None = None
        self._held_out: tuple[int, int] | None = None
        if config.has_documents:
            ends = _document_ends(self._files, config.end_of_document)
            first, last = np.searchsorted(ends, [self._begin, self._end], side="right")
            inner = ends[first:last]
            self._documents = np.unique(np.concatenate([[self._begin], inner, [self._end]]))

    @staticmethod
    def files(config: TokensConfig, part: Split) -> Iterable[UsedPart]:
        """The current files of `part`."""
        return ((each.file, each.count, None) for each in token_files(config, part))

    def __len__(self) -> int:
        """Number of examples."""
        begin, end = self._held_out or (0, 0)
        return (self._end - self._begin - (end - begin) - 1) // self._config.tokens

    def without(self, held_out: np.ndarray) -> "TokenExamples | None":
        """The source without the tokens that are targets of the pieces `held_out`, whose bounds cut
        documents; None if pieces follow the stream, the same in every epoch."""
        if self._documents is None or self._config.packing == "concatenate":
            return None
        first = self._begin + int(held_out[0]) * self._config.tokens + 1
        rest = copy(self)
        rest._held_out = first, first + len(held_out) * self._config.tokens
        rest._documents = np.unique(np.concatenate([self._documents, rest._held_out]))
        rest._orders = {}
        return rest

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The pieces at `indices`, and their targets: the pieces shifted by one token.

        In evaluation, documents are in the order of the files.

        Raises:
            UnreadableExample: if a token is beyond the vocabulary, naming file and token.
            ConfigError: if a file cannot be read.
        """
        firsts = begins = np.asarray(indices, np.int64) * self._config.tokens
        ends = begins + self._config.tokens + 1
        document_ends = None if self._documents is None else self._documents[1:] - self._begin
        is_whole = epoch is None and self._held_out is None
        if self._documents is None or is_whole or self._config.packing == "concatenate":
            begins, ends = begins + self._begin, ends + self._begin
        else:
            starts, places = self._order(epoch)
            document_ends = places[1:]
            documents, begins, ends = cut(begins, ends, document_ends)
            shift = starts[documents] - places[documents]
            begins, ends = begins + shift, ends + shift
        which, begins, ends = cut(begins, ends, self._file_ends)
        before = (self._file_ends - [file.count for file in self._files])[which]
        with timed("storage"):
            tokens = gathered(self._files, which, begins - before, ends - before)
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self._config.vocabulary))
        if wrong.size:
            ranges = np.cumsum(ends - begins)
            each = int(np.searchsorted(ranges, wrong[0], side="right"))
            place = int(wrong[0] - ranges[each] + ends[each] - before[each])
            raise UnreadableExample(
                f"{self._files[which[each]].file.path}, token {place}: {tokens[wrong[0]]} is "
                f"beyond data.vocabulary={self._config.vocabulary} (or data.dtype is wrong)."
            )
        tokens = tokens.astype(np.int32).reshape(len(indices), -1)
        return token_rows(tokens, firsts, document_ends if self._config.document_mask else None)

    def _order(self, epoch: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Where each document begins in the files, and where it begins in the order of the epoch,
        followed by the end of the last; evaluation has the order of the files."""
        found = self._orders.get(epoch)
        if found is None:
            assert self._documents is not None  # noqa: S101  the caller has seen it
            begins, lengths = self._documents[:-1], np.diff(self._documents)
            if self._held_out is not None:
                is_held_out = (self._held_out[0] <= begins) & (begins < self._held_out[1])
                begins, lengths = begins[~is_held_out], lengths[~is_held_out]
            order = np.arange(len(begins))
            if epoch is not None:
                order = np.random.default_rng([self._seed, epoch, 1]).permutation(order)
            found = begins[order], np.concatenate([[0], np.cumsum(lengths[order])])
            # reading ahead crosses from one epoch into the next
            self._orders = {**dict([*self._orders.items()][-1:]), epoch: found}
        return found


def cut(
    begins: np.ndarray, ends: np.ndarray, piece_ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranges split at the boundaries of consecutive pieces.

    Args:
        begins: where each range begins, int64.
        ends: where it ends, above its begin.
        piece_ends: where each piece ends, ascending, the last at or after every end; the first
            piece begins at 0.

    Returns:
        Piece, begin and end of each resulting range.
    """
    first = np.searchsorted(piece_ends, begins, side="right")
    counts = np.searchsorted(piece_ends, ends, side="left") - first + 1
    owner = np.repeat(np.arange(len(begins)), counts)
    pieces = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
    piece_begins = np.where(pieces > 0, piece_ends[pieces - 1], 0)
    cut_begins = np.maximum(begins[owner], piece_begins)
    cut_ends = np.minimum(ends[owner], piece_ends[pieces])
    is_some = cut_begins < cut_ends  # a piece may be empty
    return pieces[is_some], cut_begins[is_some], cut_ends[is_some]


@lru_cache(maxsize=4)
def _document_ends(files: tuple[FlatFile, ...], end_of_document: int | None) -> np.ndarray:
    """End offsets of documents in the stream of the files, ascending."""
    ends, before = [], 0
    for file in files:
        if end_of_document is not None:
            for begin in range(0, file.count, SCANNED_TOKENS):
                end = np.array([min(begin + SCANNED_TOKENS, file.count)])
                tokens = gathered([file], np.array([0]), np.array([begin]), end)
                ends.append(before + begin + np.flatnonzero(tokens == end_of_document) + 1)
        before += file.count
        ends.append(np.array([before]))
    return np.unique(np.concatenate(ends))
