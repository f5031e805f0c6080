"""Random examples of any size and number, made as they are asked for and never stored.

An example is a window into one block of random values; where the window lies, and the class,
are a hash of (seed, part, index). So an example costs a copy, not a random stream of its own:
an image of 224 x 224 x 3 is made in 10 us instead of 150.
"""

import numpy as np

from scalejax.data.source import Split
from scalejax.data_config import SyntheticImagesConfig, SyntheticTokensConfig

OFFSETS = 2**20
"""Places at which a window can begin: how many different examples there can be."""


class SyntheticImages:
    """Random uint8 images with random classes."""

    def __init__(self, config: SyntheticImagesConfig, split: Split, *, seed: int) -> None:
        self._length = config.train_examples if split == "train" else config.test_examples
        self._classes = config.classes
        self._key = _key(seed, split)
        self._shape = (config.image_size, config.image_size, config.channels)
        size = OFFSETS + int(np.prod(self._shape))
        pixels = np.random.default_rng([seed, split == "test"]).bytes(size)
        self._windows = _windows(np.frombuffer(pixels, np.uint8), int(np.prod(self._shape)))

    def __len__(self) -> int:
        """Number of images."""
        return self._length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The images and classes at `indices`."""
        bits = _hash(indices, self._key)
        images = self._windows[bits % OFFSETS].reshape(-1, *self._shape)
        classes = (bits >> np.uint64(32)) % np.uint64(self._classes)
        return {"inputs": images, "targets": classes.astype(np.int32)}


class SyntheticTokens:
    """Random int32 tokens; the target of each place is the token that follows it."""

    def __init__(self, config: SyntheticTokensConfig, split: Split, *, seed: int) -> None:
        self._length = config.train_examples if split == "train" else config.test_examples
        self._key = _key(seed, split)
        size = OFFSETS + config.tokens + 1
        generator = np.random.default_rng([seed, split == "test"])
        tokens = generator.integers(config.vocabulary, size=size, dtype=np.int32)
        self._windows = _windows(tokens, config.tokens + 1)

    def __len__(self) -> int:
        """Number of sequences."""
        return self._length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences at `indices`, and the same one place on."""
        windows = self._windows[_hash(indices, self._key) % OFFSETS]
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def _windows(values: np.ndarray, width: int) -> np.ndarray:
    """Row i is values[i : i + width], without a copy."""
    return np.lib.stride_tricks.sliding_window_view(values, width)


def _key(seed: int, split: Split) -> np.uint64:
    return _mix(np.array([2 * seed + (split == "test")], np.uint64))[0]


def _hash(indices: np.ndarray, key: np.uint64) -> np.ndarray:
    """64 evenly spread bits for each index."""
    return _mix(indices.astype(np.uint64) ^ key)


def _mix(bits: np.ndarray) -> np.ndarray:
    """The SplitMix64 output function (Steele, Lea & Flood 2014, OOPSLA, figure 13)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
