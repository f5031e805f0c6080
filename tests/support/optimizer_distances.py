"""How far optimizers were from what they were held against, noted by the tests that hold them.

`experiments/optimizers_held/measure.py` runs those tests, and reads what they noted.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from scalejax.config.optimizer import OptimizerConfig

Reference = Literal["NumPy", "Optax"]

NOTED: dict[tuple[str, Reference], float] = {}
"""The largest distance of each optimizer from each reference, so far."""


def noted(config: OptimizerConfig, against: Reference, distance: float) -> float:
    """`distance`, once it is noted."""
    name = f"{config.name}, cautious" if getattr(config, "cautious", False) else config.name
    NOTED[name, against] = max(distance, NOTED.get((name, against), 0.0))
    return distance


def distance_after(
    found: Mapping[str, Any], expected: Mapping[str, Any], initial: Mapping[str, Any]
) -> float:
    """The largest distance of trained parameters from the expected ones, over the largest change of
    these: trees of one structure."""
    far, moved = (
        max(
            float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        )
        for one, other in ((found, expected), (expected, initial))
    )
    return far / moved
