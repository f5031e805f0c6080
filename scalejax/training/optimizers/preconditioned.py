"""Optimizers with preconditioners on both sides of each matrix: SOAP and Shampoo.

Knows stacks of matrices; nothing of networks, and of meshes only that arrays may be sharded, so
that this must be traced outside of `shard_map`. Shapes: B matrices of an array, M rows, N columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from scalejax.config.optimizer import REFRESH, PreconditionedConfig, ShampooConfig, SoapConfig
from scalejax.training.optimizers.matrices import HiddenMatrices, MatrixAxes


class PreconditionedState(NamedTuple):
    """State of the matrices: trees of arrays, one for each parameter in each tree."""

    updates_made: jax.Array
    """Int32."""
    mu: Any
    """First moment, of the shape of the parameter."""
    nu: Any
    """Second moment, likewise; in SOAP, of the gradient in the basis."""
    left: Any
    """Mean of G G^T, [*B, M, M]; one element if that side has no preconditioner."""
    right: Any
    """Mean of G^T G, [*B, N, N]."""
    left_factor: Any
    """The preconditioner of rows, computed from `left`: a basis, or a root."""
    right_factor: Any
    """That of columns."""


def scale_by_soap(config: SoapConfig, hidden: HiddenMatrices) -> optax.GradientTransformation:
    """Adam in the eigenbasis of the means of G G^T and G^T G (Vyas et al. 2024, algorithm 3)."""

    def direction(
        gradient: jax.Array, mu: jax.Array, nu: jax.Array, left: Any, right: Any, count: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        turned = _multiplied(left, gradient, right, is_back=False)
        nu = config.beta2 * nu + (1 - config.beta2) * turned**2
        step = _adam(_multiplied(left, mu, right, is_back=False), nu, config, count)
        return _multiplied(left, step, right, is_back=True), nu

    def basis(mean: jax.Array, largest: jax.Array, before: jax.Array, sides: int) -> jax.Array:
        return _orthogonalised(mean @ before)

    return _preconditioned(config, hidden, direction, basis)


def scale_by_shampoo(config: ShampooConfig, hidden: HiddenMatrices) -> optax.GradientTransformation:
    """L^-1/4 M R^-1/4, or the inverse square root of the only side that has a preconditioner, with
    the length of Adam's step for each matrix."""

    def direction(
        gradient: jax.Array, mu: jax.Array, nu: jax.Array, left: Any, right: Any, count: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        nu = config.beta2 * nu + (1 - config.beta2) * gradient**2
        adam, step = _adam(mu, nu, config, count), _multiplied(left, mu, right, is_back=False)
        lengths = (jnp.linalg.norm(each, axis=(-2, -1), keepdims=True) for each in (adam, step))
        wanted, made = lengths
        return step * jnp.where(made > 0, wanted / jnp.where(made > 0, made, 1), 0), nu

    def root(mean: jax.Array, largest: jax.Array, before: jax.Array, sides: int) -> jax.Array:
        # A power of -1 / (2 sides) of each, so that the step does not depend on the gradient's
        # scale.
        return _inverse_root(mean, largest, 2 * sides, config.root_steps)

    return _preconditioned(config, hidden, direction, root)


def _preconditioned(
    config: PreconditionedConfig,
    hidden: HiddenMatrices,
    direction: Callable[..., tuple[jax.Array, jax.Array]],
    factor: Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array],
) -> optax.GradientTransformation:
    """The transformation of matrices by `direction`, from gradient, moments and factors. `factor`
    makes the factors from the means with their ridge, a bound on their eigenvalues, the factors
    before, and the number of sides that have one."""

    def refreshed_factor(mean: jax.Array, before: jax.Array, sides: int) -> jax.Array:
        if _or_none(mean) is None:
            return before
        one = jnp.broadcast_to(jnp.eye(mean.shape[-1], dtype=mean.dtype), mean.shape)
        largest = jnp.max(jnp.sum(jnp.abs(mean), axis=-1), axis=-1)[..., None, None]
        largest = jnp.where(largest > 0, largest, 1)
        mean, bound = mean + config.ridge * largest * one, largest * (1 + config.ridge)
        return factor(mean, bound, before, sides)

    def side(axes: MatrixAxes | None, leaf: jax.Array, which: int, *, is_one: bool) -> jax.Array:
        assert axes is not None  # noqa: S101  masked otherwise
        size = axes.sides(leaf.shape)[which]
        if size > config.largest_side:
            return jnp.zeros((1,), jnp.float32)
        shape = (*(leaf.shape[axis] for axis in axes.batch), size, size)
        one = jnp.eye(size, dtype=jnp.float32)
        return jnp.broadcast_to(one, shape) if is_one else jnp.zeros(shape, jnp.float32)

    def init(params: Any) -> PreconditionedState:
        def sides(which: int, *, is_one: bool) -> Any:
            return hidden.mapped(lambda axes, leaf: side(axes, leaf, which, is_one=is_one), params)

        def zeros() -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)

        return PreconditionedState(
            updates_made=jnp.zeros((), jnp.int32),
            mu=zeros(),
            nu=zeros(),
            left=sides(0, is_one=False),
            right=sides(1, is_one=False),
            left_factor=sides(0, is_one=True),
            right_factor=sides(1, is_one=True),
        )

    def of_leaf(
        axes: MatrixAxes, gradient: jax.Array, count: jax.Array, *state: jax.Array
    ) -> tuple[jax.Array, ...]:
        shape = gradient.shape
        mu, nu, left, right, left_factor, right_factor = state
        gradient, mu, nu = map(axes.as_matrices, (gradient, mu, nu))
        mu = config.beta1 * mu + (1 - config.beta1) * gradient
        factors = (_or_none(left_factor), _or_none(right_factor))
        step, nu = direction(gradient, mu, nu, *factors, count)
        means = []
        for mean, products in (
            (left, "...mn,...kn->...mk"),
            (right, "...mn,...mk->...nk"),
        ):
            if _or_none(mean) is not None:
                product = jnp.einsum(products, gradient, gradient)
                mean = config.beta2 * mean + (1 - config.beta2) * product
            means.append(mean)
        sides = sum(_or_none(mean) is not None for mean in means)
        with jax.named_scope(REFRESH):
            refreshed = lax.cond(
                (count - 1) % config.refresh_every_steps == 0,
                lambda means, factors: [
                    refreshed_factor(mean, before, sides)
                    for mean, before in zip(means, factors, strict=True)
                ],
                lambda _, factors: factors,
                means,
                [left_factor, right_factor],
            )
        back = (axes.as_array(each, shape) for each in (step, mu, nu))
        return *back, *means, *refreshed

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, PreconditionedState]:
        count = state.updates_made + 1
        with jax.default_matmul_precision("highest"):  # roots become NaN in tf32 or bfloat16
            made = hidden.mapped(
                lambda axes, *leaves: of_leaf(axes, leaves[0], count, *leaves[1:]),
                updates,
                *state[1:],
            )
        steps, *parts = (
            jax.tree.map(lambda _, each, at=at: each[at], updates, made) for at in range(7)
        )
        return steps, PreconditionedState(count, *parts)  # in the order of its fields

    return optax.GradientTransformation(init, update)


def _or_none(side: jax.Array) -> jax.Array | None:
    """The array of a side, or None if it has no preconditioner."""
    return None if side.ndim == 1 else side


def _multiplied(
    left: jax.Array | None, matrices: jax.Array, right: jax.Array | None, *, is_back: bool
) -> jax.Array:
    """left^T X right, or left X right^T on the way back; for symmetric factors these are the
    same."""
    if left is not None:
        rule = "...ij,...jn->...in" if is_back else "...ji,...jn->...in"
        matrices = jnp.einsum(rule, left, matrices)
    if right is not None:
        rule = "...mj,...ij->...mi" if is_back else "...mj,...ji->...mi"
        matrices = jnp.einsum(rule, matrices, right)
    return matrices


def _adam(
    mu: jax.Array, nu: jax.Array, config: PreconditionedConfig, count: jax.Array
) -> jax.Array:
    """Adam's step for these moments, with its bias corrections (Kingma & Ba 2015, algorithm 1)."""
    mu, nu = mu / (1 - config.beta1**count), nu / (1 - config.beta2**count)
    return mu / (jnp.sqrt(nu) + config.epsilon)


def _orthogonalised(matrices: jax.Array) -> jax.Array:
    """Q of the QR decomposition of (..., n, n) matrices; on a CPU one after another.

    jaxlib's LAPACK hands a batch to the threads of XLA's pool and waits for them on one of these,
    so that as many concurrent decompositions as there are threads deadlock (seen with jaxlib
    0.10.2: two devices on two cores).
    """

    def one_by_one(several: jax.Array) -> jax.Array:
        size = several.shape[-1]
        each = lax.map(lambda matrix: jnp.linalg.qr(matrix)[0], several.reshape(-1, size, size))
        return each.reshape(several.shape)

    def at_once(several: jax.Array) -> jax.Array:
        return jnp.linalg.qr(several)[0]

    return lax.platform_dependent(matrices, cpu=one_by_one, default=at_once)


def _inverse_root(mean: jax.Array, largest: jax.Array, degree: int, steps: int) -> jax.Array:
    """A^-1/p of symmetric positive A with no eigenvalue above `largest`, p being 2 or 4, by
    the coupled Newton method: X -> X T, M -> T^p M with T = ((p + 1) I - M) / p, from M = z A
    with no eigenvalue above (p + 1) / 2 and X = z^1/p I, until M is I."""
    one = jnp.broadcast_to(jnp.eye(mean.shape[-1], dtype=mean.dtype), mean.shape)
    factor = (degree + 1) / 2 / largest

    def improved(_: Any, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        root, product = pair
        step = ((degree + 1) * one - product) / degree
        square = step @ step
        power = square if degree == 2 else square @ square
        return root @ step, power @ product

    root, _ = lax.fori_loop(0, steps, improved, (one * factor ** (1 / degree), mean * factor))
    return root
