"""Error feedback: what compression took off a gradient is added to the next one.

    p = g + e,  sent = C(p),  e' = p - sent

on each device, for its gradient g, its memory e and the compression C; a gradient of all is the
mean of what was sent. Nothing is lost, some of it comes late.

Source: Stich et al. 2018, algorithm 1, arXiv 1809.07599 (of steps, with the learning rate in them;
here of gradients, as in MXNet, whatever optimizer follows); Karimireddy et al. 2019, arXiv
1901.09847.
"""

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def with_error_feedback(
    gradient_sync: Callable[[PyTree], tuple[PyTree, PyTree]],
) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
    """From a device's gradient and memory to the mean of what was sent, and the next memory.

    Args:
        exchange: from what a device has to the mean of what all sent, and what it sent itself.
    """

    def combine(gradient: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        whole = jax.tree.map(lambda new, left: new + left, gradient, memory)
        mean, sent = gradient_sync(whole)
        return mean, jax.tree.map(lambda all_of_it, part: all_of_it - part, whole, sent)

    return combine
