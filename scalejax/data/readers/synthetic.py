"""Synthetic examples of any size and number, generated on demand and never stored.

An example is a window into one block of random values; the offset of the window, and the class, are
a hash of (seed, part, index). So an example costs a copy, not a random stream of its own: an image
of 224 x 224 x 3 takes 10 us instead of 150.
"""

from typing import Any

import numpy as np

from scalejax.config.data import (
    FIRST_TOKEN,
    MASK_TOKEN,
    SEPARATOR_TOKEN,
    MaskedTokensConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
)
from scalejax.data.readers.documents import token_rows
from scalejax.data.source import Reader, Split
from scalejax.data.transforms.augmentation import Augmentation
from scalejax.data.transforms.random import hashed

OFFSETS = 2**20
"""Number of window offsets, and thus of different examples."""
MASKS = 2**12
"""Number of different patterns of masked tokens."""


class _Synthetic(Reader):
    """Examples from one random stream per seed and part."""

    def __init__(self, config: Any, split: Split, augmentation: Augmentation) -> None:
        seed = augmentation.seed
        self._length = config.train_examples if split == "train" else config.test_examples
        self._key = hashed(np.array([2 * seed + (split == "test")], np.uint64))[0]
        self._random = np.random.default_rng([seed, split == "test"])

    def __len__(self) -> int:
        """Number of examples."""
        return self._length

    def _hash(self, indices: np.ndarray) -> np.ndarray:
        """64 evenly spread bits for each index."""
        return hashed(indices.astype(np.uint64) ^ self._key)


class SyntheticImages(_Synthetic, names=("synthetic_images",)):
    """Random uint8 images with random classes."""

    def __init__(
        self, config: SyntheticImagesConfig, split: Split, augmentation: Augmentation
    ) -> None:
        super().__init__(config, split, augmentation)
        self._classes = config.classes
        self._augmentation = augmentation
        self._shape = (config.image_size, config.image_size, config.channels)
        size = OFFSETS + int(np.prod(self._shape))
        pixels = np.frombuffer(self._random.bytes(size), np.uint8)
        self._windows = _windows(pixels, int(np.prod(self._shape)))

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The images and classes at `indices`."""
        bits = self._hash(indices)
        images = self._windows[bits % OFFSETS].reshape(-1, *self._shape)
        classes = (bits >> np.uint64(32)) % np.uint64(self._classes)
        examples = {"inputs": images, "targets": classes.astype(np.int32)}
        return self._augmentation.of(indices, epoch).applied(examples)


class SyntheticTokens(_Synthetic, names=("synthetic_tokens",)):
    """Random int32 tokens; the target of each place is the token that follows it."""

    def __init__(
        self, config: SyntheticTokensConfig, split: Split, augmentation: Augmentation
    ) -> None:
        super().__init__(config, split, augmentation)
        size = OFFSETS + config.tokens + 1
        tokens = self._random.integers(config.vocabulary, size=size, dtype=np.int32)
        self._windows = _windows(tokens, config.tokens + 1)
        self._document_ends = None
        if (mean := config.document_tokens) is not None:
            lengths = self._random.geometric(1 / mean, 2 * size // mean + 1)
            self._document_ends = np.append(np.cumsum(lengths), size + lengths.sum())

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The sequences at `indices`, and their targets: the sequences shifted by one."""
        begins = (self._hash(indices) % OFFSETS).astype(np.int64)
        return token_rows(self._windows[begins], begins, self._document_ends)


class MaskedTokens(_Synthetic, names=("masked_tokens",)):
    """Random int32 tokens in two segments of equal length, some of them masked.

    80 % of these are replaced by the mask token, 10 % by another token, and 10 % stay, as in
    Devlin et al. 2018, arXiv 1810.04805, section 3.1.
    """

    def __init__(
        self, config: MaskedTokensConfig, split: Split, augmentation: Augmentation
    ) -> None:
        super().__init__(config, split, augmentation)
        size = OFFSETS + config.tokens
        words = self._random.integers(MASK_TOKEN + 1, config.vocabulary, size=size, dtype=np.int32)
        self._windows = _windows(words, config.tokens)
        self._separators = (config.tokens // 2, config.tokens - 1)
        is_word = np.ones(config.tokens, bool)
        is_word[[0, *self._separators]] = False
        ranks = self._random.random((MASKS, is_word.sum())).argsort(axis=1)[:, : config.masked]
        self._places = np.sort(np.flatnonzero(is_word)[ranks]).astype(np.int32)
        self._fates = self._random.random(self._places.shape)
        self._others = self._random.integers(
            MASK_TOKEN + 1, config.vocabulary, size=self._places.shape, dtype=np.int32
        )

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The sequences at `indices`, their masked tokens, and the positions of these."""
        bits = self._hash(indices)
        inputs = self._windows[bits % OFFSETS]  # a copy, because the index is an array
        inputs[:, 0] = FIRST_TOKEN
        inputs[:, self._separators] = SEPARATOR_TOKEN
        mask = (bits >> np.uint64(32)) % MASKS
        places, fates = self._places[mask], self._fates[mask]
        targets = np.take_along_axis(inputs, places, axis=1)
        shown = np.where(
            fates < 0.8, MASK_TOKEN, np.where(fates < 0.9, self._others[mask], targets)
        )
        np.put_along_axis(inputs, places, shown.astype(np.int32), axis=1)
        return {"inputs": inputs, "targets": targets, "places": places}


def _windows(values: np.ndarray, width: int) -> np.ndarray:
    """Row i is values[i : i + width], without a copy."""
    return np.lib.stride_tricks.sliding_window_view(values, width)
