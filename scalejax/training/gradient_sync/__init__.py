"""Gradient synchronisation along the data axis, one module for each method.

What rows that do not count (padding, unreadable ones) mean to a method: the mean, and what
compressed methods compress, is of gradients weighted by their devices' rows. Adasum combines
gradients as they are, each the step that its device would make alone; 0 adds nothing to it.

`local_sgd` averages parameters in place of gradients, and so has an update of its own.
"""

from scalejax.training.gradient_sync import (  # noqa: F401  each registers itself
    adasum,
    fp16,
    top_k,
    two_bit,
)
from scalejax.training.gradient_sync.method import GradientSync, build_gradient_sync

__all__ = ["GradientSync", "build_gradient_sync"]
