"""Dynamic loss scaling for float16: scales the loss, and skips updates whose gradients overflow.

The loss is multiplied by a power of two, so that small gradients do not vanish in the 5 bits of
float16's exponent; the gradient, float32 after the backward pass of the parameter's cast, is
divided by it again. If it overflowed, the update is skipped and the scale is halved; after enough
finite updates in a row it is doubled (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2;
numbers as in PyTorch's GradScaler).

Wraps an optimizer, so that scale and counts are part of its state: saved and restored with it, and
absent in other types. Flax's `DynamicScale` differentiates and updates the scale in one call: with
microbatches, it would do so for each of them and never for their accumulated gradient.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

INITIAL_SCALE = 2.0**16
"""As in PyTorch's GradScaler (`init_scale`), like the three below (`growth_factor`,
`backoff_factor`, `growth_interval`)."""
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # powers of two that float32 holds to the last bit


class LossScaled(NamedTuple):
    """State of an optimizer that takes gradients of a scaled loss."""

    scale: jax.Array
    """Factor of the next loss, float32."""
    finite_updates: jax.Array
    """Updates made since the scale last changed, int32."""
    skipped_updates: jax.Array
    """Updates of the run that were skipped, int32."""
    inner: optax.OptState
    """State of the optimizer itself."""


def with_loss_scale(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` for gradients of a loss that is multiplied by the `scale` of the state.

    If any entry of a gradient is not finite, on any device, updates are zero and the state of
    `inner` stays as it was, including its count of updates (and so the learning rate).
    """

    def init(params: optax.Params) -> LossScaled:
        none = jnp.zeros((), jnp.int32)
        scale = jnp.asarray(INITIAL_SCALE, jnp.float32)
        return LossScaled(scale, none, none, inner.init(params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, LossScaled]:
        assert isinstance(state, LossScaled)  # noqa: S101  what `init` made
        gradient = jax.tree.map(lambda leaf: leaf / state.scale, updates)
        is_finite = _is_finite(gradient)
        updates, inner_state = inner.update(gradient, state.inner, params)
        return (
            _chosen(is_finite, updates, jax.tree.map(jnp.zeros_like, updates)),
            _settled(state, is_finite)._replace(inner=_chosen(is_finite, inner_state, state.inner)),
        )

    return optax.GradientTransformation(init, update)


def _settled(state: LossScaled, is_finite: jax.Array) -> LossScaled:
    """The scale and counts after an update that is made if `is_finite`."""
    finite_updates = jnp.where(is_finite, state.finite_updates + 1, 0)
    grows = finite_updates == GROWTH_INTERVAL
    factor = jnp.where(is_finite, jnp.where(grows, GROWTH, 1.0), BACKOFF)
    return state._replace(
        scale=jnp.clip(state.scale * factor, _SMALLEST, _LARGEST),
        finite_updates=jnp.where(grows, 0, finite_updates),
        skipped_updates=state.skipped_updates + ~is_finite,
    )


def _is_finite(gradient: optax.Updates) -> jax.Array:
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]
    return jnp.stack(leaves).all()


def _chosen(is_first: jax.Array, first: Any, second: Any) -> Any:
    """`first` if `is_first`, else `second`; `where` drops infinities of the tree not chosen."""
    return jax.tree.map(lambda a, b: jnp.where(is_first, a, b), first, second)
