"""Compressed gradients and Adasum, on their way between emulated workers and servers."""

import json
from functools import cache
from typing import Any

import jax.numpy as jnp
import least_squares_cases as least_squares
import numpy as np
import pytest
from emulate_cases import config, durations
from emulated_outcomes import LastEvaluated
from exchange_cases import assert_same, placed
from least_squares_cases import LeastSquares

from scalejax.config.emulation import EmulationConfig
from scalejax.config.gradient_sync import Fp16Config, TopKConfig, TwoBitConfig
from scalejax.config.run import resolve
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.emulation.executor import compressed
from scalejax.emulation.instructions import Rows
from scalejax.emulation.run import emulate_run
from scalejax.emulation.sampler import Samples
from scalejax.training.gradient_sync.adasum import pairwise
from scalejax.training.mesh import build_mesh
from scalejax.training.step import build_step, init_state

TWO_BIT = TwoBitConfig(name="two_bit", threshold=0.5)


def emulated(algorithm: dict[str, Any], workers: int, **emulation: Any):
    """What came of a tiny run, and its last test loss; the same is emulated once."""
    return _emulated(json.dumps({"algorithm": algorithm, "workers": workers, **emulation}))


@cache
def _emulated(text: str):
    tables = json.loads(text)
    lines: list[Any] = []
    settings = build(EmulationConfig, tables)
    made = emulate_run(resolve(config(), 1), settings, durations(), write=lines.append)
    return made, lines[-1].test_loss


def test_two_bits_are_those_of_mxnet():
    """Threshold, 0 or -threshold; what is left comes later: 0.3 twice makes one 0.5."""
    gradient = np.array([0.3, 0.5, -0.7, 2.0, -0.1], np.float32)

    sent, left = compressed(TWO_BIT, 1, gradient, None)
    again, rest = compressed(TWO_BIT, 1, gradient, left)

    np.testing.assert_allclose(sent, [0, 0.5, -0.5, 0.5, 0])
    np.testing.assert_allclose(left, [0.3, 0, -0.2, 1.5, -0.1], atol=1e-7)
    np.testing.assert_allclose(again, [0.5, 0.5, -0.5, 0.5, 0])
    np.testing.assert_allclose(rest, [0.1, 0, -0.4, 3.0, -0.2], atol=1e-6)


def test_largest_entries_are_sent_as_they_are():
    """Two of five by size, of each array by itself; at least one."""
    gradient = {"w": np.array([[1.0, -5.0], [0.5, 3.0]], np.float32), "b": np.ones(1, np.float32)}

    sent, left = compressed(TopKConfig(name="top_k", fraction=0.5), 1, gradient, None)

    np.testing.assert_array_equal(sent["w"], [[0, -5], [0, 3]])
    np.testing.assert_array_equal(left["w"], [[1, 0], [0.5, 0]])
    np.testing.assert_array_equal(sent["b"], [1])


def test_half_precision_rounds():
    """To eleven bits; too large is infinite, as there."""
    sent, _ = compressed(Fp16Config(name="fp16"), 1, jnp.array([1 + 2**-12, 0.1, 1e5]), None)

    np.testing.assert_array_equal(sent, [1, np.float32(np.float16(0.1)), np.inf])


@pytest.mark.parametrize(
    ("several", "expected"),
    [
        ([[1, 0], [0, 2]], [1, 2]),  # orthogonal: added up
        ([[3, 4], [3, 4]], [3, 4]),  # equal: averaged
        ([[1, 0], [3, 0]], [2, 0]),  # parallel: (1 - 3/2) 1 + (1 - 1/6) 3
        ([[0, 0], [1, 2]], [1, 2]),
        ([[1, 1], [1, 1], [1, -1], [1, -1]], [2, 0]),  # pairs of equal ones, then orthogonal
    ],
)
def test_adasum_adds_orthogonal_and_averages_parallel_gradients(several: list, expected: list):
    """By the formula of its paper, in pairs."""
    found = pairwise([np.array(each, np.float32) for each in several])

    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "downpour"},
        {"name": "stale_synchronous", "staleness_bound": 1},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_sending_all_of_a_gradient_changes_nothing_but_the_bytes(algorithm: dict):
    """Every entry and its place: twice the bytes up, and the same losses bit for bit."""
    plain, loss = emulated(algorithm, 2, server_shards=2)
    whole, same = emulated(
        algorithm, 2, server_shards=2, compression={"name": "top_k", "fraction": 1.0}
    )

    assert same == loss
    assert whole.staleness == plain.staleness
    assert whole.sent_bytes == pytest.approx(1.5 * plain.sent_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("compression", "part"),
    [({"name": "fp16"}, 1 / 2), ({"name": "two_bit", "threshold": 1.0}, 11 / 172)],
    ids=["fp16", "two_bit"],
)
def test_compressed_gradients_train_with_fewer_bytes(compression: dict, part: float):
    """Half of what is pushed, or a word for 16 numbers, 11 for 172; what is fetched is whole."""
    plain, loss = emulated({"name": "downpour"}, 2)
    small, compressed_loss = emulated({"name": "downpour"}, 2, compression=compression)

    assert compressed_loss < 3
    assert compressed_loss != loss
    assert small.sent_bytes == pytest.approx((1 + part) / 2 * plain.sent_bytes, rel=0.03)


@pytest.mark.parametrize(("servers", "pushed_bytes"), [(1, 4 * 8), (5, 19 * 8)])
def test_at_least_one_entry_of_each_piece_is_sent_and_paid_for(servers: int, pushed_bytes: int):
    """Four bytes for it and four for its place. Of five servers, the first has nothing of the four
    biases of the last layer: it has pieces of three parameters, and each other one of four."""
    plain, _ = emulated({"name": "downpour"}, 1, server_shards=servers)
    small, _ = emulated(
        {"name": "downpour"},
        1,
        server_shards=servers,
        compression={"name": "top_k", "fraction": 0.001},
    )

    payload = 4 * (16 * 8 + 8 + 8 * 4 + 4)
    pushes, rest = divmod(plain.sent_bytes - small.sent_bytes, payload - pushed_bytes)
    assert rest == 0
    assert pushes in (plain.updates, plain.updates + 1)  # one may be under way at the end


def test_stacked_layers_are_compressed_each_by_itself():
    """The largest entry of each of two layers, not the two largest; other arrays are whole."""
    leaf = np.array([[[1.0, -5.0], [0.5, 3.0]], [[0.5, 0.0], [0.0, -0.75]]], np.float32)

    config = TopKConfig(name="top_k", fraction=0.25)

    sent, _ = compressed(config, 1, {"blocks": leaf, "head": leaf}, None, ("blocks",))

    np.testing.assert_array_equal(sent["blocks"].reshape(2, 4), [[0, -5, 0, 0], [0, 0, 0, -0.75]])
    np.testing.assert_array_equal(sent["head"].reshape(2, 4), [[0, -5, 0, 3], [0, 0, 0, 0]])


def test_adasum_of_stacked_layers_is_of_each_by_itself():
    """The first layers are equal, the second orthogonal; as one array they would be neither."""
    left, right = np.array([[1.0, 0], [0, 2]]), np.array([[1.0, 0], [3, 0]])

    found = pairwise([{"blocks": each.astype(np.float32)} for each in (left, right)], ("blocks",))

    np.testing.assert_allclose(found["blocks"], [[1, 0], [3, 2]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gradient_sync", ["adasum", "top_k"])
def test_emulated_transformers_compress_as_trained_ones(gradient_sync: str):
    """Two updates of two devices, layer by layer of the stacked blocks, with what each keeps.

    Slow for the compiler: the step of a transformer on two devices, and its emulation.
    """
    fields: dict[str, Any] = {"seed": 0, "optimizer": {"name": "sgd", "momentum": 0.0}}
    fields["schedule"] = {"base_learning_rate": 0.5, "warmup": "none"}
    fields["data"] = {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 16}
    fields["data"] |= {"train_examples": 8, "test_examples": 4}
    fields["model"] = {"name": "gpt", "layers": 3, "hidden": 8, "heads": 2}
    fields |= {"batch": {"global_batch": 4}, "train": {"epochs": 1, "log_every_steps": 1}}
    how = {"name": gradient_sync} | ({"fraction": 0.1} if gradient_sync == "top_k" else {})
    layout = {"layout": {"data": 2, "mode": "shard_map"}, "gradient_sync": how}
    real = resolve(config(**fields, **layout))
    step = build_step(real, mesh := build_mesh(real.layout))
    state, samples = (
        init_state(real, mesh),
        Samples(real, open_source(real.config.data, "train", seed=0)),
    )
    for index in range(2):
        rows = Rows(worker=0, index=index, workers=1, way="part")
        state, _ = step.function(state, placed(step, samples.take(rows)))
    tables: dict[str, Any] = {
        "algorithm": {"name": "synchronous", "gradient_sync": "parameter_server"}
    }
    if gradient_sync == "adasum":
        tables["algorithm"]["reduction"] = "adasum"
    else:
        tables["compression"] = {"name": "top_k", "fraction": 0.1}
    settings = build(EmulationConfig, tables | {"workers": 2})

    with LastEvaluated() as last:
        emulate_run(resolve(config(**fields), 1), settings, durations())

    assert_same(last.parts[0], state.params)


def test_adasum_of_one_worker_is_its_gradient():
    """Adasum of several gradients is the same by either gradient synchronisation."""
    gradient_syncs = ("all_reduce", "parameter_server")
    ways = [
        {"name": "synchronous", "gradient_sync": each, "reduction": "adasum"}
        for each in gradient_syncs
    ]

    assert emulated(ways[0], 1)[1] == emulated({"name": "synchronous"}, 1)[1]
    assert emulated(ways[0], 4)[1] == emulated(ways[1], 4)[1]


@pytest.mark.parametrize("gradient_sync", ["all_reduce", "parameter_server"])
def test_update_is_of_the_adasum_of_all_workers(gradient_sync: str):
    """Neighbours first, of the gradients of their parts of a global batch."""
    algorithm = {"name": "synchronous", "gradient_sync": gradient_sync, "reduction": "adasum"}
    tables: dict[str, Any] = {"algorithm": algorithm, "workers": 2}
    problem = LeastSquares(learning_rate=0.01)

    result = least_squares.emulated(build(EmulationConfig, tables), 10, problem)

    params = problem.initial
    for step in range(10):
        parts = [slice(0, 3), slice(3, 6)]
        left, right = (problem.gradient(params, 0, step, part) for part in parts)
        params = params - 0.01 * least_squares.adasum_by_hand(left, right)
    np.testing.assert_allclose(result.params, params, rtol=1e-10)


def test_each_worker_keeps_back_what_it_has_not_sent():
    """Two workers, two servers, alternating updates: the memory of each is its own."""
    tables: dict[str, Any] = {
        "algorithm": {"name": "downpour"},
        "workers": 2,
        "server_shards": 2,
        "compression": {"name": "two_bit", "threshold": 18.0},
    }
    problem = LeastSquares(shards=2, learning_rate=0.02)

    result = least_squares.emulated(build(EmulationConfig, tables), 30, problem)

    params, read = problem.initial, [problem.initial] * 2
    kept = [np.zeros_like(params)] * 2
    for update in range(30):
        index, worker = divmod(update, 2)
        whole = problem.gradient(read[worker], worker, index) + kept[worker]
        sent = 3.0 * (whole >= 3) - 3.0 * (whole <= -3)  # 18 over the six samples of a minibatch
        kept[worker] = whole - sent
        params = read[worker] = params - 0.02 * sent
    np.testing.assert_allclose(result.params, params, rtol=1e-10)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"algorithm": {"name": "synchronous", "reduction": "adasum"}, "workers": 6}, "4 or 8"),
        (
            {"algorithm": {"name": "synchronous", "reduction": "adasum"}, "server_shards": 2},
            "whole layers",
        ),
        ({"algorithm": {"name": "synchronous"}, "compression": {"name": "fp16"}}, "pushed"),
        ({"algorithm": {"name": "easgd"}, "compression": {"name": "fp16"}}, "pushed"),
        (
            {"algorithm": {"name": "downpour"}, "compression": {"name": "top_k", "fraction": 0}},
            "fraction=0",
        ),
        (
            {"algorithm": {"name": "downpour"}, "compression": {"name": "adasum"}},
            "fp16, two_bit and top_k are",
        ),
    ],
)
def test_what_cannot_work_is_refused(tables: dict, words: str):
    """By field, at the door."""
    with pytest.raises(ConfigError, match=words):
        build(EmulationConfig, tables)
