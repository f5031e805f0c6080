"""Gradient synchronisation along the data axis, one module for each method.

Rows that do not count (padding, unreadable ones): the mean and the compressed methods use gradients
weighted by their devices' rows. Adasum combines gradients as they are, each the step that its
device would make alone; a gradient of 0 adds nothing to it.

`local_sgd` averages parameters in place of gradients, and so has its own update.
"""

from scalejax.training.gradient_sync import (  # noqa: F401  each registers itself
    adasum,
    fp16,
    top_k,
    two_bit,
)
from scalejax.training.gradient_sync.method import GradientSync, build_gradient_sync

__all__ = ["GradientSync", "build_gradient_sync"]
