"""Programs of several runs at once: the real `Step`, vmapped over a leading axis of runs.

Knows steps and shapes; no files, no clock, and nothing of run status.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.config.run import ResolvedRun
from scalejax.training.evaluation import build_evaluation
from scalejax.training.mesh import build_mesh
from scalejax.training.setup import schedule_of
from scalejax.training.state import PyTree, TrainState
from scalejax.training.step import build_step, init_state


class MappedPrograms:
    """The step and the evaluation of `runs`, each compiled as one program for all of them."""

    def __init__(self, runs: Sequence[ResolvedRun]) -> None:
        run = runs[0]
        self._runs, self._mesh = runs, (mesh := build_mesh(run.layout))
        self.seeds = tuple(dict.fromkeys(each.config.seed for each in runs))
        """The distinct seeds; one batch is prepared for each."""
        self._which = np.asarray([self.seeds.index(each.config.seed) for each in runs])
        self.rates = jnp.stack([_rates(each) for each in runs])
        """Learning rates, (runs, steps)."""
        step, evaluation = build_step(run, mesh), build_evaluation(run, mesh)
        self.batch = step.batch
        """Shapes of the global batch of one run."""
        self.evaluation_batch = evaluation.batch
        """Shapes of the evaluation batch of one run."""

        def update(rates: jax.Array, state: TrainState, batch: PyTree) -> Any:
            def schedule(count: Any) -> jax.Array:
                return jnp.take(rates, count, mode="clip")

            return build_step(run, mesh, schedule=schedule).function(state, batch)

        def updates(rates: jax.Array, state: PyTree, batches: PyTree) -> Any:
            return jax.vmap(update)(rates, state, self._by_run(batches))

        def evaluations(weights: PyTree, batches: PyTree) -> Any:
            return jax.vmap(evaluation.function)(*weights, self._by_run(batches))

        # These vmap the update of `training.step`; no part of a step is defined here.
        state = _repeated(step.state, len(runs))
        batches = _repeated(step.batch, len(self.seeds))
        jitted = jax.jit(updates, donate_argnums=1)
        self.update = jitted.lower(self.rates, state, batches).compile()
        """(rates, state, batches of all seeds) -> (state, metrics), of all runs."""
        self.weights = jax.jit(jax.vmap(evaluation.weights))
        """From the state to the (params, model_state) that are evaluated, of all runs."""
        self.evaluate = jax.jit(evaluations)
        """(weights, evaluation batches of all seeds) -> sums, of all runs."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the compiled update, with the batches queued for the next one; None if the
        compiler does not report it."""
        used = self.update.memory_analysis()
        if used is None:
            return None
        kept = used.argument_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
        return kept + used.temp_size_in_bytes

    def initial_state(self) -> PyTree:
        """The state of all runs before the first update, with a leading axis of runs."""
        of_seed = {each.config.seed: each for each in self._runs}
        states = [init_state(of_seed[seed], self._mesh) for seed in self.seeds]
        return jax.tree.map(lambda *leaves: jnp.stack([leaves[i] for i in self._which]), *states)

    def _by_run(self, batches: PyTree) -> PyTree:
        """Batches by run, from batches by seed."""
        return jax.tree.map(lambda rows: rows[self._which], batches)


def _repeated(shapes: PyTree, count: int) -> PyTree:
    """Shapes with a leading axis of `count`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), shapes)


def _rates(run: ResolvedRun) -> jax.Array:
    return jnp.asarray(schedule_of(run)(jnp.arange(run.total_steps)), jnp.float32)
