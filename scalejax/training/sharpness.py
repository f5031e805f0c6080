"""The sharpness of a run: the largest eigenvalue of the Hessian of its training loss, and with
AdamW that of the preconditioned Hessian.

The Hessian is never built: Lanczos takes products of it with vectors, each the gradient of the
product of the gradient with the vector. Vectors are trees like the parameters, sharded as they are.
Knows the network and the samples; no loop and no record.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scalejax.config.input import InputConfig
from scalejax.config.model import DecoderConfig
from scalejax.config.optimizer import AdamWConfig, OptimizerConfig, SgdConfig
from scalejax.config.run import ResolvedRun
from scalejax.config.training import SharpnessConfig
from scalejax.data.held_out import part_of
from scalejax.data.loader.loader import evaluation_batches
from scalejax.data.source import Source
from scalejax.models import BatchNormScope
from scalejax.training.data_parallel import with_constraints
from scalejax.training.evaluation import Evaluation
from scalejax.training.gradients import Batch, mean_loss, of_mean_1, with_target_weights
from scalejax.training.mesh import replicated
from scalejax.training.optimizers.fine_tuning import updated
from scalejax.training.setup import TrainSetup, train_setup
from scalejax.training.state import (
    PyTree,
    TrainState,
    gathered_params,
    learning_params,
    shardings_of,
)

_INVARIANT = 1e-5
"""The most that is left of a product outside of the vectors before it, relative to the largest
entry of the tridiagonal matrix, if these span all that the Hessian reaches: rounding of float32.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharpness:
    """The measurement over a mesh."""

    wanted: SharpnessConfig
    """Which samples, and how many products."""
    how: InputConfig
    """How samples are read."""
    batch: Batch
    """Shapes, types and shardings of the samples."""
    function: Any
    """The compiled (params, model_state, adam, batch) -> "sharpness" and its "error", float32, and
    the same two of the preconditioned Hessian as "preconditioned_sharpness" and
    "preconditioned_error", if `adam` is not None."""
    adam: Callable[[TrainState], "_Adam | None"]
    """Maps a state to what AdamW preconditions the Hessian by, or to None for other optimizers."""
    optimizer: OptimizerConfig
    """The optimizer as it steps, with its hyper-parameters at the run's batch."""
    schedule: Any
    """Learning rate by updates made."""

    def samples(self, source: Source) -> Batch:
        """The samples of every measurement, from the training examples `source`."""
        order = np.random.default_rng(self.wanted.seed).permutation(len(source))
        chosen = part_of(source, np.sort(order[: self.wanted.samples]))
        with closing(evaluation_batches(chosen, self.batch, self.how)) as batches:
            return next(iter(batches))

    def measured(self, state: TrainState, batch: Batch) -> dict[str, float]:
        """The "sharpness" at the parameters that the next gradient is taken at, and its "error":
        the distance to the nearest eigenvalue is no larger. With AdamW also these two of the
        preconditioned Hessian, once it has a second moment."""
        adam = self.adam(state)
        values = jax.device_get(self.function(state.params, state.model_state, adam, batch))
        found = {name: float(value) for name, value in values.items()}
        if adam is None or int(jax.device_get(adam.updates)):
            return found
        return {name: found[name] for name in ("sharpness", "error")}

    def learning_rate(self, step: int) -> float:
        """The rate of the update after `step` updates."""
        return float(self.schedule(step))


def build_sharpness(
    run: ResolvedRun, mesh: Mesh, state: TrainState, evaluation: Evaluation
) -> Sharpness:
    """The measurement of the sharpness of `run` over `mesh`, compiled: for the trained weights,
    shaped like those of `state`, and for samples like those of `evaluation`."""
    wanted = run.config.train.sharpness
    assert wanted is not None  # noqa: S101  checked by the caller
    batch = {
        name: like.update(shape=(wanted.samples, *like.shape[1:]))
        for name, like in evaluation.batch.items()
    }
    setup = train_setup(_in_float32(run))
    optimizer = run.config.schedule.scaled_optimizer(run.config.optimizer, run.split.global_batch)
    adam = _adam if _is_preconditioned(run) else _nothing
    shapes = state.params, state.model_state, adam(state), batch
    measure = partial(_measure, setup, optimizer, mesh, wanted, shardings_of(state.params))
    function = jax.jit(
        partial(with_constraints, setup, mesh, measure),
        in_shardings=shardings_of(shapes),
        out_shardings=replicated(mesh),
    )
    return Sharpness(
        wanted=wanted,
        how=replace(run.config.input, workers=0),  # for one batch
        batch=batch,
        function=function.lower(*shapes).compile(),
        adam=adam,
        optimizer=optimizer,
        schedule=setup.schedule,
    )


def stability_threshold(optimizer: OptimizerConfig, learning_rate: float) -> float | None:
    """The curvature of a quadratic above which SGD of this rate grows away from its minimum; None
    for other optimizers, whose limit is that of a preconditioned Hessian
    (`preconditioned_threshold`), and at rate 0.

    Source: Cohen et al. 2021, arXiv 2103.00065, section 2 and appendix B: 2 / rate, times 1 + m
    with momentum m, and divided by 1 + 2 m if it is Nesterov's.
    """
    if not isinstance(optimizer, SgdConfig) or learning_rate <= 0:
        return None
    momentum = optimizer.momentum
    limit = 2 * (1 + momentum) / learning_rate
    return limit / (1 + 2 * momentum) if optimizer.nesterov else limit


def preconditioned_threshold(optimizer: OptimizerConfig, learning_rate: float) -> float | None:
    """The largest eigenvalue of the preconditioned Hessian of a quadratic above which AdamW of this
    rate, its preconditioner as it is and without weight decay, grows away from the minimum; None
    for other optimizers, and at rate 0.

    Source: Cohen et al. 2022, arXiv 2207.14484, section 3: 2 (1 + beta1) / ((1 - beta1) rate).
    """
    if not isinstance(optimizer, AdamWConfig) or learning_rate <= 0:
        return None
    return 2 * (1 + optimizer.beta1) / ((1 - optimizer.beta1) * learning_rate)


def _is_preconditioned(run: ResolvedRun) -> bool:
    """Whether the steps of a run are its first moment over what `_preconditioner` says."""
    optimizer, fine_tuning = run.config.optimizer, run.config.fine_tuning
    return (
        isinstance(optimizer, AdamWConfig)
        and not (optimizer.has_blocks or optimizer.cautious)
        and getattr(run.config.model, "parametrization", None) is None
        and not (fine_tuning and fine_tuning.rate_factors)
    )


class _Adam(NamedTuple):
    """What the preconditioner is made of."""

    second_moment: PyTree
    """Without bias correction."""
    updates: jax.Array
    """Updates in it, int32, without those that a loss scale skipped, which a step counts."""


def _adam(state: TrainState) -> _Adam:
    found = optax.tree.get(state.opt_state, "ScaleByAdamState")
    return _Adam(found.nu, found.count)


def _nothing(_: TrainState) -> None:
    return None


def _preconditioner(optimizer: AdamWConfig, adam: _Adam) -> PyTree:
    """The diagonal that AdamW divides its first moment by, both without correction, after t
    updates: (1 - beta1^t) (sqrt(nu / (1 - beta2^t)) + epsilon).

    Source: Cohen et al. 2022, arXiv 2207.14484, section 2.
    """
    count = jnp.maximum(adam.updates, 1).astype(jnp.float32)
    first, second = 1 - optimizer.beta1**count, 1 - optimizer.beta2**count
    return jax.tree.map(
        lambda nu: first * (jnp.sqrt(nu.astype(jnp.float32) / second) + optimizer.epsilon),
        adam.second_moment,
    )


def _in_float32(run: ResolvedRun) -> ResolvedRun:
    """`run` computed in float32, and with attention that can be differentiated twice."""
    model = run.config.model
    if isinstance(model, DecoderConfig):
        model = replace(model, attention="unfused")
    model = replace(model, compute_dtype="float32")
    config = replace(run.config, model=model, dropout=None)
    return replace(run, config=config)


def _measure(
    setup: TrainSetup,
    optimizer: OptimizerConfig,
    mesh: Mesh,
    wanted: SharpnessConfig,
    shardings: PyTree,
    params: PyTree,
    model_state: PyTree,
    adam: _Adam | None,
    batch: Batch,
) -> dict[str, jax.Array]:
    mask = batch["mask"]
    batch = {name: rows for name, rows in batch.items() if name != "mask"}
    batch = of_mean_1(with_target_weights({**batch, "weights": mask}), None)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    learning = learning_params(setup, params)
    own = learning_params(setup, shardings)

    def loss(learning: PyTree) -> jax.Array:
        whole = gathered_params(setup, mesh, updated(params, learning))
        return mean_loss(setup, BatchNormScope(), whole, model_state, batch)[0]

    def product(vector: PyTree) -> PyTree:
        # Backward over backward: layers with a custom backward pass have no forward-mode
        # derivative.
        def along(learning: PyTree) -> jax.Array:
            return jnp.asarray(optax.tree.vdot(jax.grad(loss)(learning), vector))

        return jax.grad(along)(learning)

    def largest(product: Callable[[PyTree], PyTree]) -> tuple[jax.Array, jax.Array]:
        with jax.default_matmul_precision("highest"):
            return largest_eigenvalue(
                product, learning, own, iterations=wanted.iterations, seed=wanted.seed
            )

    value, error = largest(product)
    found = {"sharpness": value, "error": error}
    if adam is not None and isinstance(optimizer, AdamWConfig):
        diagonal = _preconditioner(optimizer, adam)
        root = jax.tree.map(lambda each: 1 / jnp.sqrt(each), diagonal)

        def scaled(vector: PyTree) -> PyTree:
            return jax.tree.map(jnp.multiply, root, vector)

        # P^-1/2 H P^-1/2 is symmetric, and has the eigenvalues of P^-1 H.
        value, error = largest(lambda vector: scaled(product(scaled(vector))))
        found |= {"preconditioned_sharpness": value, "preconditioned_error": error}
    return found


def largest_eigenvalue(
    product: Callable[[PyTree], PyTree],
    like: PyTree,
    shardings: PyTree,
    *,
    iterations: int,
    seed: int,
) -> tuple[jax.Array, jax.Array]:
    """The largest eigenvalue of a symmetric matrix, and the norm of its residual, by Lanczos with
    every vector made orthogonal to all before it, twice.

    Source: Golub & Van Loan, Matrix Computations, 4th edition, sections 10.1 and 10.3.

    Args:
        product: the matrix times a vector, a tree of float32 arrays.
        like: a tree of the shapes of a vector.
        shardings: of these arrays.
        iterations: products to take.
        seed: of the first vector.
    """
    leaves, structure = jax.tree.flatten(like)
    placed = jax.tree.leaves(shardings)

    def as_placed(vector: list[jax.Array]) -> list[jax.Array]:
        return [
            lax.with_sharding_constraint(leaf, at) for leaf, at in zip(vector, placed, strict=True)
        ]

    def norm(vector: list[jax.Array]) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in vector))

    def without(basis: list[jax.Array], vector: list[jax.Array]) -> list[jax.Array]:
        """`vector` without its parts along the rows of `basis`, [iterations, ...] each."""
        shares = sum(
            jnp.sum(rows * leaf[None], axis=tuple(range(1, rows.ndim)))
            for rows, leaf in zip(basis, vector, strict=True)
        )
        return [
            leaf - jnp.tensordot(shares, rows, axes=1)
            for rows, leaf in zip(basis, vector, strict=True)
        ]

    def iterate(index: jax.Array, carry: PyTree) -> PyTree:
        basis, vector, is_alive, diagonal, beside = carry
        basis = [rows.at[index].set(leaf) for rows, leaf in zip(basis, vector, strict=True)]
        found = as_placed(jax.tree.leaves(product(jax.tree.unflatten(structure, vector))))
        along = sum(jnp.vdot(leaf, own) for leaf, own in zip(found, vector, strict=True))
        # Once all is spanned, the rest of the matrix is another block; its entries are those of the
        # first vector, which are no larger than the largest eigenvalue.
        along = jnp.where(is_alive, along, diagonal[0])
        diagonal = diagonal.at[index].set(along)
        rest = without(basis, without(basis, found))
        length = norm(rest)
        scale = jnp.maximum(jnp.abs(diagonal).max(), beside.max())
        is_alive = is_alive & ~(length <= _INVARIANT * scale)  # stays True for NaN, which must show
        beside = beside.at[index].set(jnp.where(is_alive, length, 0))
        vector = as_placed([jnp.where(is_alive, leaf / length, 0) for leaf in rest])
        return basis, vector, is_alive, diagonal, beside

    keys = jax.random.split(jax.random.key(seed), len(leaves))
    first = [
        jax.random.normal(key, leaf.shape, jnp.float32)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    length = norm(first)
    first = as_placed([leaf / length for leaf in first])
    basis = [
        lax.with_sharding_constraint(
            jnp.zeros((iterations, *leaf.shape), jnp.float32),
            NamedSharding(at.mesh, PartitionSpec(None, *at.spec)),
        )
        for leaf, at in zip(leaves, placed, strict=True)
    ]
    zeros = jnp.zeros(iterations, jnp.float32)
    carry = (basis, first, jnp.ones((), bool), zeros, zeros)
    *_, diagonal, beside = lax.fori_loop(0, iterations, iterate, carry)
    matrix = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
    values, vectors = jnp.linalg.eigh(matrix)
    return values[-1], beside[-1] * jnp.abs(vectors[-1, -1])
