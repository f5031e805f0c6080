"""Error feedback: the compression error of a gradient is added to the next one.

    p = g + e,  sent = C(p),  e' = p - sent

on each device, for its gradient g, its memory e and the compression C; the synchronised gradient is
the mean of what all devices sent. Nothing is lost, only delayed.

Source: Stich et al. 2018, algorithm 1, arXiv 1809.07599 (applied to steps, with the learning rate;
here to gradients, as in MXNet, for any optimizer); Karimireddy et al. 2019, arXiv 1901.09847.
"""

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def with_error_feedback(
    gradient_sync: Callable[[PyTree], tuple[PyTree, PyTree]],
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """The map from a device's gradient and memory to the synchronised gradient and new memory.

    Args:
        gradient_sync: maps a device's tree to the mean of what all devices sent, and what this
            device sent.
    """

    def combine(gradient: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        whole = jax.tree.map(lambda new, left: new + left, gradient, memory)
        mean, sent = gradient_sync(whole)
        return mean, jax.tree.map(lambda full, part: full - part, whole, sent)

    return combine
