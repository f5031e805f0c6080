"""Sandblaster is L-BFGS of the whole batch, whoever computes its work items."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from emulated_outcomes import AT_ONCE, CONFIG, VARIED, Outcome, emulated, run_of, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.config.emulation import (
    EmulationConfig,
    FailuresConfig,
    SandblasterConfig,
    StragglersConfig,
)
from scalejax.config.run import with_fields
from scalejax.core.errors import ConfigError
from scalejax.data.datasets import open_source
from scalejax.emulation.checks import emulated_run
from scalejax.emulation.work_queue import WorkQueue
from scalejax.training.mesh import build_mesh
from scalejax.training.step import init_state

EPOCHS = 14
FIELDS = {"train.epochs": EPOCHS, "data.train_examples": 93}  # 11 work items; 5 examples fill none
SHAPES = {"convex": {"model.hidden": []}, "hidden": {"model.hidden": [8]}}


def sandblaster(
    workers: int = 1, durations=AT_ONCE, *, fields=None, shards: int = 1, seed: int = 0, **faults
) -> Outcome:
    """The small run by so many replicas."""
    algorithm = SandblasterConfig(backup_copies=faults.pop("backup_copies", 1))
    emulation = EmulationConfig(
        algorithm=algorithm,
        workers=workers,
        server_shards=shards,
        stragglers=faults.pop("stragglers", StragglersConfig()),
        failures=FailuresConfig(**faults),
    )
    return emulated(emulation, durations, {**FIELDS, **(fields or {})})


def direct(fields) -> tuple[list[float], jax.Array]:
    """Losses of Optax's L-BFGS on all 88 examples at once, a step each, and its parameters.

    The network is written out here; the examples are those of the first epoch's shuffle.
    """
    run = run_of({**FIELDS, **fields})
    source = open_source(run.config.data, "train", seed=run.config.seed)
    rows = np.random.default_rng([run.config.seed, 0]).permutation(len(source))[:88]
    batch = source.take(rows, 0)
    params = init_state(run, build_mesh(run.layout)).params
    facts = run.dataset

    def loss(params) -> jax.Array:
        x = (batch["inputs"].astype(jnp.float32) / 255 - facts.pixel_mean) / facts.pixel_std
        x = x.reshape(88, -1)
        layers = [params["layers"][number] for number in sorted(params["layers"])]
        for layer in layers[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
        logits = x @ layers[-1]["kernel"] + layers[-1]["bias"][None]
        chosen = jax.nn.log_softmax(logits)[jnp.arange(88), batch["targets"]]
        return -chosen.mean()

    search = optax.scale_by_backtracking_linesearch(
        20, slope_rtol=1e-4, decrease_factor=0.5, increase_factor=np.inf
    )
    solver = optax.lbfgs(memory_size=10, linesearch=search)
    state, losses, evaluations = solver.init(params), [float(loss(params))], 1

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = solver.update(
            gradient, state, params, value=value, grad=gradient, value_fn=loss
        )
        return optax.apply_updates(params, updates), state

    while True:
        following, state = step(params, state)
        evaluations += int(state[-1].info.num_linesearch_steps)
        if evaluations > EPOCHS:
            return losses, params
        params = following
        losses.append(float(loss(params)))


@pytest.mark.slow_except("convex")
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_lbfgs_of_the_whole_batch(shape: str):
    """The losses of Optax's own, with the same line search, to the rounding of float32."""
    found = sandblaster(3, VARIED, fields=SHAPES[shape], shards=2)

    losses, params = direct(SHAPES[shape])

    ours = [loss for kind, _, loss, _ in found.figures if kind == "train"]
    ours = list(dict.fromkeys(ours))  # a trial that is refused leaves the loss as it is
    assert len(losses) > 8
    assert losses[-1] < losses[0] / 2
    # rounding grows along the path: 1e-6 of a loss at first
    assert ours == pytest.approx(losses, rel=1e-4)
    for leaf, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-3)


@pytest.mark.slow
def test_result_depends_on_no_replica():
    """Any number of them, slow or dead, with copies or without: the same bits."""
    one = sandblaster()
    stragglers = StragglersConfig(slow_share=0.3, slow_factor=10, cv=0.5)
    others = {
        "more than work items": sandblaster(25, VARIED),
        "without copies": sandblaster(6, VARIED, stragglers=stragglers, backup_copies=0),
        "many copies": sandblaster(6, VARIED, stragglers=stragglers, backup_copies=5),
        "failing": sandblaster(
            5,
            VARIED,
            worker_mtbf_seconds=4,
            worker_restart_seconds=3,
            server_mtbf_seconds=3,
            server_restart_seconds=2,
        ),
        "dying": sandblaster(30, VARIED, worker_mtbf_seconds=40, backup_copies=0),
    }

    for name, other in others.items():
        assert other.figures == one.figures, name
        assert same_bits(other.params, one.params), name
    assert others["many copies"].emulation.dropped_gradients > 10
    assert others["without copies"].emulation.dropped_gradients == 0
    assert others["failing"].emulation.worker_failures > 5
    assert others["dying"].emulation.worker_failures > 5
    assert others["failing"].emulation.server_failures > 5


def test_copies_of_the_last_work_items_save_the_wait_for_the_slowest():
    """As backup tasks are there for."""
    stragglers = StragglersConfig(slow_share=0.2, slow_factor=10)

    with_copies, without = (
        sandblaster(5, stragglers=stragglers, backup_copies=copies).emulation.virtual_seconds
        for copies in (1, 0)
    )

    assert without > 0.95 * EPOCHS * 10  # each batch waits for a work item of the slow one
    assert with_copies < without / 2


@pytest.mark.slow
def test_an_evaluation_takes_so_many_rounds():
    """By hand: 11 work items by 4 replicas are 3 rounds of a second, 1 by 11, 11 by one."""
    for workers, rounds in ((1, 11), (4, 3), (11, 1)):
        found = sandblaster(workers, backup_copies=0).emulation

        assert found.virtual_seconds == pytest.approx(EPOCHS * rounds)
        assert found.gradients == EPOCHS * 11


def test_it_ends_where_no_step_is_lower():
    """With no step but the first to try: before its epochs are over, and evaluated there."""
    algorithm = SandblasterConfig(line_search_trials=1)

    found = emulated(EmulationConfig(algorithm=algorithm), fields={"train.epochs": 300})

    assert found.emulation.gradients < 300 * 12
    assert found.figures[-1][:2] == ("test", found.emulation.gradients)
    assert found.figures[-1][:2] != found.figures[-2][:2]


def test_weight_decay_is_refused():
    """No optimizer would apply it; AdamW has some unless told otherwise."""
    emulation = EmulationConfig(algorithm=SandblasterConfig())
    config = with_fields(CONFIG, {"optimizer": {"name": "adamw"}})

    with pytest.raises(ConfigError, match=r"optimizer.weight_decay=0.01 is refused: sandblaster"):
        emulated_run(replace(config, emulation=emulation))


def test_all_replicas_dead_is_an_error():
    """And no silence, with or without servers that fail on and on."""
    for servers in (None, 5.0):
        with pytest.raises(ConfigError, match="the run does not end: 3 of 3 workers have failed"):
            sandblaster(3, worker_mtbf_seconds=2, server_mtbf_seconds=servers)


@given(data=st.data(), parts=st.integers(1, 12), replicas=st.integers(1, 5))
@settings(max_examples=60)
def test_every_work_item_is_done_whoever_gives_back(data, parts: int, replicas: int):
    """Handed out to who asks until all are done, each to so many at most at once."""
    copies = data.draw(st.integers(0, 2))
    batch, has, done = WorkQueue(parts, replicas, backup_copies=copies), {}, set()
    for turn in range(1000):
        replica = turn % replicas
        if replica not in has:
            part = batch.take(replica)
            if part is not None:
                has[replica] = part
                assert part not in done
                assert list(has.values()).count(part) <= 1 + copies
        elif turn < 500 and data.draw(st.integers(0, 3)) == 0:
            batch.give_back(has.pop(replica), replica)
        else:
            part = has.pop(replica)
            batch.finish(part)
            done.add(part)
        if len(done) == parts:
            break

    assert done == set(range(parts))


def test_replicas_take_work_items_in_order():
    """Each from a place of its own on, the same in every batch."""
    batch = WorkQueue(12, 3, backup_copies=0)

    taken = [[batch.take(replica) for replica in range(3)] for _ in range(4)]

    assert taken == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert batch.take(0) is None
