"""Per-example random numbers from (seed, epoch, index), independent of process and batch.

A counter-based generator; knows nothing of examples.
"""

import numpy as np


def hashed(bits: np.ndarray) -> np.ndarray:
    """64 evenly spread bits for each uint64.

    Source: the output function of SplitMix64 (Steele, Lea & Flood 2014, OOPSLA, figure 13).
    """
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def uniforms(seed: int, epoch: int, indices: np.ndarray, count: int) -> np.ndarray:
    """Independent numbers in [0, 1), float64 [len(indices), count].

    They depend only on (seed, epoch, index) and the column, and are uncorrelated between examples,
    epochs, seeds and columns; no generator object is created for them.
    """
    key = hashed(hashed(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    examples = hashed(key ^ np.asarray(indices).astype(np.uint64))
    columns = hashed(np.arange(count, dtype=np.uint64))
    bits = hashed(examples[:, None] ^ columns)
    return (bits >> np.uint64(11)) * 2.0**-53


def noise_bytes(key: float, count: int) -> np.ndarray:
    """Independent bytes, uint8 [count], that depend only on one number of `uniforms`."""
    own = hashed(np.array([key]).view(np.uint64))
    counters = hashed(np.arange(-(-count // 8), dtype=np.uint64))
    return hashed(own ^ counters).view(np.uint8)[:count]
