"""Synthetic examples of any size and number, generated on demand and never stored.

An example is a window into one block of random values; the offset of the window, and the class, are
a hash of (seed, part, index). So an example costs a copy, not its own random stream: an image of
224 x 224 x 3 takes 10 us instead of 150.
"""

import numpy as np

from scalejax.config.data import (
    FIRST_TOKEN,
    MASK_TOKEN,
    SEPARATOR_TOKEN,
    MaskedTokensConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
)
from scalejax.data.source import Reader, Split
from scalejax.data.transforms.augmentation import Augmentation
from scalejax.data.transforms.random import hashed

OFFSETS = 2**20
"""Number of window offsets, and so of different examples."""
MASKS = 2**12
"""Number of different patterns of masked tokens."""


class SyntheticImages(Reader, names=("synthetic_images",)):
    """Random uint8 images with random classes."""

    def __init__(
        self, config: SyntheticImagesConfig, split: Split, augmentation: Augmentation
    ) -> None:
        self._length = config.train_examples if split == "train" else config.test_examples
        self._classes = config.classes
        self._augmentation = augmentation
        self._key = _key(augmentation.seed, split)
        self._shape = (config.image_size, config.image_size, config.channels)
        size = OFFSETS + int(np.prod(self._shape))
        pixels = np.random.default_rng([augmentation.seed, split == "test"]).bytes(size)
        self._windows = _windows(np.frombuffer(pixels, np.uint8), int(np.prod(self._shape)))

    def __len__(self) -> int:
        """Number of images."""
        return self._length

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The images and classes at `indices`."""
        bits = _hash(indices, self._key)
        images = self._windows[bits % OFFSETS].reshape(-1, *self._shape)
        classes = (bits >> np.uint64(32)) % np.uint64(self._classes)
        examples = {"inputs": images, "targets": classes.astype(np.int32)}
        return self._augmentation.of(indices, epoch).applied(examples)


class SyntheticTokens(Reader, names=("synthetic_tokens",)):
    """Random int32 tokens; the target of each place is the token that follows it."""

    def __init__(
        self, config: SyntheticTokensConfig, split: Split, augmentation: Augmentation
    ) -> None:
        self._length = config.train_examples if split == "train" else config.test_examples
        self._key = _key(augmentation.seed, split)
        size = OFFSETS + config.tokens + 1
        generator = np.random.default_rng([augmentation.seed, split == "test"])
        tokens = generator.integers(config.vocabulary, size=size, dtype=np.int32)
        self._windows = _windows(tokens, config.tokens + 1)

    def __len__(self) -> int:
        """Number of sequences."""
        return self._length

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The sequences at `indices`, and their targets: the sequences shifted by one."""
        windows = self._windows[_hash(indices, self._key) % OFFSETS]
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


class MaskedTokens(Reader, names=("masked_tokens",)):
    """Random int32 tokens in two segments of equal length, some of them masked.

    Of these 80 % are replaced by the mask token, 10 % by another token, and 10 % stay, as in
    Devlin et al. 2018, arXiv 1810.04805, section 3.1.
    """

    def __init__(
        self, config: MaskedTokensConfig, split: Split, augmentation: Augmentation
    ) -> None:
        self._length = config.train_examples if split == "train" else config.test_examples
        self._key = _key(augmentation.seed, split)
        generator = np.random.default_rng([augmentation.seed, split == "test"])
        size = OFFSETS + config.tokens
        words = generator.integers(MASK_TOKEN + 1, config.vocabulary, size=size, dtype=np.int32)
        self._windows = _windows(words, config.tokens)
        self._separators = (config.tokens // 2, config.tokens - 1)
        is_word = np.ones(config.tokens, bool)
        is_word[[0, *self._separators]] = False
        ranks = generator.random((MASKS, is_word.sum())).argsort(axis=1)[:, : config.masked]
        self._places = np.sort(np.flatnonzero(is_word)[ranks]).astype(np.int32)
        self._fates = generator.random(self._places.shape)
        self._others = generator.integers(
            MASK_TOKEN + 1, config.vocabulary, size=self._places.shape, dtype=np.int32
        )

    def __len__(self) -> int:
        """Number of sequences."""
        return self._length

    def take(self, indices: np.ndarray, epoch: int | None = None) -> dict[str, np.ndarray]:
        """The sequences at `indices`, their masked tokens, and the positions of these."""
        bits = _hash(indices, self._key)
        inputs = self._windows[bits % OFFSETS]  # a copy, for the index is an array
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


def _key(seed: int, split: Split) -> np.uint64:
    return hashed(np.array([2 * seed + (split == "test")], np.uint64))[0]


def _hash(indices: np.ndarray, key: np.uint64) -> np.ndarray:
    """64 evenly spread bits for each index."""
    return hashed(indices.astype(np.uint64) ^ key)
