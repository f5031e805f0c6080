"""Exchanges between devices: each trains what its definition says, worked out in NumPy from the
gradients of the devices one by one; and sends as little as it promises.

Tolerances as in `test_conformance`: both sides are float32 and differ in the order of sums.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from exchange_cases import (
    LOCAL,
    Reference,
    Tree,
    assert_same,
    collective_bytes,
    flat,
    mean,
    placed,
    run_with,
    trained,
)
from jax.sharding import AxisType, PartitionSpec
from test_conformance import RTOL, batches_of

from scalejax.config.parallelism import DATA
from scalejax.config.run import load_config, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.hardware import load_cluster
from scalejax.training.evaluation import build_evaluation, trained_weights
from scalejax.training.gradient_sync import adasum
from scalejax.training.mesh import build_mesh
from scalejax.training.record import figures
from scalejax.training.reporter import Silent
from scalejax.training.step import build_step, init_state
from scalejax.training.train import train
from scalejax.xla.cache import _path, case_key
from scalejax.xla.job import RunJob
from scalejax.xla.target import target_for


def layers(stacked: tuple[str, ...], name: str, array: np.ndarray) -> list[np.ndarray]:
    """Those of a parameter, flat."""
    return [row.ravel() for row in (array if name.split("/")[0] in stacked else array[None])]


class Adasum:
    """By recursion over pairs, in double precision."""

    def __init__(self, stacked: tuple[str, ...]) -> None:
        self.stacked = stacked

    def pair(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Of two gradients of a layer."""
        a, b = a.astype(float), b.astype(float)
        dot, aa, bb = a @ b, a @ a, b @ b
        of_a = 1 - dot / (2 * aa) if aa else 1.0
        of_b = 1 - dot / (2 * bb) if bb else 1.0
        return of_a * a + of_b * b

    def of(self, vectors: list[np.ndarray]) -> np.ndarray:
        """Of the gradients of a layer: neighbours first."""
        while len(vectors) > 1:
            vectors = [self.pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def __call__(self, gradients: list[Tree]) -> Tree:
        """Layer by layer."""
        combined = {}
        for name, first in gradients[0].items():
            split = [layers(self.stacked, name, each[name]) for each in gradients]
            rows = [self.of(list(of_layer)) for of_layer in zip(*split, strict=True)]
            combined[name] = np.concatenate(rows).reshape(first.shape)
        return combined


class Compressed:
    """The mean of what devices send, each with its memory, or without."""

    def __init__(
        self,
        compress: Callable[[str, np.ndarray], np.ndarray],
        *,
        feedback: bool,
        mean: Callable[[list[Tree]], Tree],
    ) -> None:
        self.compress, self.feedback, self.mean = compress, feedback, mean
        self.memories: list[Tree] | None = None

    def __call__(self, gradients: list[Tree]) -> Tree:
        """The mean; memories are kept for the next call."""
        if self.memories is None:
            self.memories = [{name: 0 * g for name, g in each.items()} for each in gradients]
        sent = []
        for device, each in enumerate(gradients):
            memory = self.memories[device]
            whole = {n: g + memory[n] if self.feedback else g for n, g in each.items()}
            sent.append({n: self.compress(n, g) for n, g in whole.items()})
            self.memories[device] = {n: whole[n] - sent[-1][n] for n in whole}
        return self.mean(sent)


def two_bit(threshold: float, name: str, gradient: np.ndarray) -> np.ndarray:
    """Three values."""
    return threshold * ((gradient >= threshold) * 1.0 - (gradient <= -threshold) * 1.0)


def largest(fraction: float, stacked: tuple[str, ...], name: str, gradient: np.ndarray) -> Any:
    """The largest entries of each layer, and zeros."""
    rows = []
    for layer in layers(stacked, name, gradient):
        count = max(1, int(np.ceil(fraction * layer.size)))
        kept = np.argsort(-np.abs(layer), kind="stable")[:count]
        rows.append(np.zeros_like(layer))
        rows[-1][kept] = layer[kept]
    return np.concatenate(rows).reshape(gradient.shape)


def half(name: str, gradient: np.ndarray) -> np.ndarray:
    """Rounded to float16."""
    return gradient.astype(np.float16).astype(np.float32)


def mean_of_halves(gradients: list[Tree]) -> Tree:
    """Of each array, added up in float16."""
    total = {name: array.astype(np.float16) for name, array in gradients[0].items()}
    for each in gradients[1:]:
        total = {name: array + each[name].astype(np.float16) for name, array in total.items()}
    return {name: array.astype(np.float32) / len(gradients) for name, array in total.items()}


THRESHOLD, FRACTION = 0.02, 0.05
"""With which some entries of each gradient are sent and most are not."""
GRADIENT_SYNCS: dict[str, dict[str, Any]] = {
    "adasum": {"name": "adasum"},
    "fp16": {"name": "fp16"},
    "fp16 with feedback": {"name": "fp16", "error_feedback": True},
    "two_bit": {"name": "two_bit"},
    "two_bit without feedback": {"name": "two_bit", "error_feedback": False},
    "top_k": {"name": "top_k", "fraction": FRACTION},
    "top_k without feedback": {"name": "top_k", "fraction": FRACTION, "error_feedback": False},
}
QUICK = {
    ("adasum", 4, "sgd", "mlp"),
    ("fp16 with feedback", 2, "sgd", "mlp"),
    ("two_bit", 4, "sgd", "mlp"),
    ("top_k", 2, "adamw", "mlp"),
}


def exchange_rows() -> list[Any]:
    """Every two of an exchange, a number of devices and an optimizer, which for Adasum is SGD; two
    of stacked layers."""
    rows = [
        (name, devices, "sgd" if name == "adasum" else optimizer, "mlp")
        for index, name in enumerate(GRADIENT_SYNCS)
        for devices, optimizer in zip(
            (2, 4), ("adamw", "sgd") if index % 2 else ("sgd", "adamw"), strict=True
        )
    ]
    rows += [("adasum", 4, "sgd", "gpt"), ("top_k", 4, "adamw", "gpt")]
    return [pytest.param(*row, marks=[] if row in QUICK else [pytest.mark.slow]) for row in rows]


def definition(name: str, reference: Reference) -> Callable[[list[Tree]], Tree]:
    """What an exchange makes of gradients, in NumPy."""
    gradient_sync = GRADIENT_SYNCS[name]
    feedback = gradient_sync.get("error_feedback", gradient_sync["name"] != "fp16")
    match gradient_sync["name"]:
        case "adasum":
            return Adasum(reference.stacked)
        case "fp16":
            return Compressed(half, feedback=feedback, mean=mean_of_halves)
        case "two_bit":
            return Compressed(partial(two_bit, THRESHOLD), feedback=feedback, mean=mean)
        case _:
            kept = partial(largest, FRACTION, reference.stacked)
            return Compressed(kept, feedback=feedback, mean=mean)


def as_given(name: str, devices: int) -> dict[str, Any]:
    """The table of an exchange: MXNet's threshold is of gradients summed over samples."""
    gradient_sync = GRADIENT_SYNCS[name]
    samples = {"threshold": THRESHOLD * 32 / devices} if gradient_sync["name"] == "two_bit" else {}
    return gradient_sync | samples


@pytest.mark.slow_except("adasum-4-sgd-mlp", "two_bit-4-sgd-mlp", "top_k-2-adamw-mlp")
@pytest.mark.parametrize(("name", "devices", "optimizer", "model"), exchange_rows())
def test_an_exchange_trains_what_its_definition_says(name, devices, optimizer, model):
    """Five updates of momentum or Adam on the gradients of devices brought together in NumPy.

    A gradient that rounding puts on the other side of a half of float16's last bit is off by
    2**-11 of itself, and so much of an update: a hundredth of the parameters.
    """
    run = run_with(as_given(name, devices), devices, model=model, optimizer=optimizer)
    reference = Reference(run)
    expected_losses, expected = reference.trained(definition(name, reference))

    losses, state = trained(run)

    is_half = name.startswith("fp16")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4 if is_half else RTOL)
    assert_same(state.params, expected, atol=1e-4 if is_half else RTOL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adasum", "two_bit", "top_k"])
def test_an_exchange_is_not_the_mean(name):
    """The test above would tell: without the exchange parameters are elsewhere."""
    run = run_with(as_given(name, 4), 4)
    reference = Reference(run)
    _, expected = reference.trained(definition(name, reference))
    _, state = trained(run_with(None, 4))

    with pytest.raises(AssertionError):
        assert_same(state.params, expected, atol=100 * RTOL)


def adasum_of(vectors: list[np.ndarray]) -> np.ndarray:
    """Adasum of one vector for each device, as each has it."""
    mesh = jax.make_mesh((len(vectors),), (DATA,), axis_types=(AxisType.Auto,))
    split = PartitionSpec(DATA)

    def on_device(rows: jax.Array) -> jax.Array:
        return adasum.combined({"layer": rows[0]}, ())["layer"][None]

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return np.asarray(jax.jit(mapped)(np.stack(vectors).astype(np.float32)))


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_adasum_adds_orthogonal_gradients_and_averages_parallel_ones(devices):
    """And leaves every device with the same bits; of 0 it is 0."""
    length = 11  # which no number of devices divides
    basis = np.eye(length)[:devices] * np.arange(1, devices + 1)[:, None]
    orthogonal = adasum_of(list(basis))
    parallel = adasum_of([np.arange(length)] * devices)
    none = adasum_of([np.zeros(length)] * devices)

    np.testing.assert_array_equal(orthogonal, [basis.sum(axis=0)] * devices)
    np.testing.assert_allclose(parallel, [np.arange(length)] * devices, rtol=1e-6)
    np.testing.assert_array_equal(none, np.zeros((devices, length)))


def test_what_travels_is_small():
    """Of P parameters on n devices: 4 P bytes without an exchange, 2 P in float16, P / 4 from each
    in two bits, 8 for each entry that is kept; Adasum sends about what an all-reduce does."""
    devices = 4
    state = build_step(run := run_with(None, devices), build_mesh(run.layout)).state
    leaves = jax.tree.leaves(state.params)
    size = sum(leaf.size for leaf in leaves)
    metrics = 8
    words = -(-size // 16)
    kept = sum(max(1, int(np.ceil(FRACTION * leaf.size))) for leaf in leaves)
    columns = sum(-(-leaf.size // devices) for leaf in leaves)
    products = 3 * 4 * len(leaves) * 2

    found = {
        name: collective_bytes(run_with(GRADIENT_SYNCS[name], devices))
        for name in ("adasum", "fp16", "two_bit", "top_k")
    }

    assert collective_bytes(run) == {"all_reduce": 4 * size + metrics}
    assert found["fp16"] == {"all_reduce": 2 * size + metrics}
    assert found["two_bit"] == {"all_reduce": metrics, "all_gather": 4 * words * devices}
    assert found["top_k"] == {"all_reduce": metrics, "all_gather": 8 * kept * devices}
    assert found["adasum"] == {
        "all_reduce": metrics + products,
        "all_gather": 4 * columns * devices,
        "collective_permute": 4 * columns * (2 + 1),
    }


def test_memories_lie_on_their_devices():
    """One for each device, of its own; without feedback there is none."""
    run = run_with(as_given("top_k", 4), 4)
    _, state = trained(run)

    for memory, leaf in zip(
        jax.tree.leaves(state.exchange), jax.tree.leaves(state.params), strict=True
    ):
        assert memory.shape == (4, *leaf.shape)
        assert memory.sharding.spec[0] == DATA
        copies = np.asarray(memory)
        assert np.abs(copies - copies[:1]).max() > 0
    forgetful = run_with(GRADIENT_SYNCS["two_bit without feedback"], 4)
    assert init_state(forgetful, build_mesh(run.layout)).exchange is None


def test_an_overflow_of_float16_is_skipped_by_all():
    """The loss scale sees what one device alone overflows, through Adasum and through float16."""
    for name in ("adasum", "fp16"):
        run = run_with(GRADIENT_SYNCS[name], 4, fields={"model.compute_dtype": "float16"})
        mesh = build_mesh(run.layout)
        step, state = build_step(run, mesh), init_state(run, mesh)
        scale = jax.device_put(np.float32(2.0**60), state.opt_state.scale.sharding)
        state = replace(state, opt_state=state.opt_state._replace(scale=scale))
        before = flat(state.params)
        state, metrics = step.function(state, placed(step, batches_of(run)[0]))

        assert int(metrics["skipped_updates"]) == 1
        for path, array in flat(state.params).items():
            np.testing.assert_array_equal(array, before[path])


def test_microbatches_and_batch_norm_go_with_an_exchange():
    """Statistics are of all devices, as without an exchange; float16 is off by its rounding."""
    synchronised = trained(run_with(GRADIENT_SYNCS["fp16"], 4, model="cnn", microbatches=2))
    usual = trained(run_with(None, 4, model="cnn", microbatches=2))

    np.testing.assert_allclose(synchronised[0], usual[0], rtol=1e-3)
    for ours, theirs in zip(
        jax.tree.leaves(synchronised[1].model_state),
        jax.tree.leaves(usual[1].model_state),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-2 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"layout.data": 6}, r"layout\.data=6 is refused: .* power of two \(nearest: 4 or 8\)"),
        ({"layout.mode": "jit"}, r'layout\.mode=.jit. is refused: .* use "shard_map"'),
        (
            {"optimizer": {"name": "lamb"}},
            r"optimizer\.name='lamb' is refused: .* \"local_sgd\".* reduction = \"adasum\"",
        ),
        (
            {"gradient_sync": {"name": "local_sgd", "every_steps": 1, "reduction": "adasum"}}
            | {"layout.data": 6},
            r"layout\.data=6 is refused: gradient_sync\.reduction=\"adasum\"",
        ),
        (
            {"gradient_sync": {"name": "local_sgd", "every_steps": 1}}
            | {"optimizer.momentum_form": "rate_inside_corrected", "input.remainder": "pad"},
            r"momentum_form='rate_inside_corrected' is refused: .* use \"rate_outside\"",
        ),
        ({"train.noise_scale": {}}, r"gradient_sync\.name='adasum' is refused: train\.noise_scale"),
        (
            {"gradient_sync": {"name": "two_bit"}, "model.compute_dtype": "float16"},
            r'model\.compute_dtype=.float16. is refused: .* use "bfloat16"',
        ),
        (
            {"gradient_sync": {"name": "top_k", "fraction": 0}},
            r"gradient_sync\.fraction=0.* is refused",
        ),
        (
            {"gradient_sync": {"name": "two_bit", "threshold": 0}},
            r"gradient_sync\.threshold=0.* is refused",
        ),
        ({"gradient_sync": {"name": "fp8"}}, r"gradient_sync"),
        ({"layout.fsdp": 2}, r"layout\.fsdp=2 is refused"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, refused):
    """Before a device is touched, with what to do."""
    config = run_with({"name": "adasum"}, 4).config
    with pytest.raises(ConfigError, match=refused):
        resolve(with_fields(config, {"batch.global_batch": 48, **fields}))


@pytest.mark.parametrize(
    "name", [pytest.param("adasum", marks=pytest.mark.slow), "top_k", "local_sgd"]
)
def test_only_what_learns_is_exchanged(name):
    """Parameters that do not learn stay as they are, and have no memory."""
    gradient_sync = (
        {"name": "local_sgd", **LOCAL["DiLoCo"]} if name == "local_sgd" else GRADIENT_SYNCS[name]
    )
    run = run_with(gradient_sync, 4, fields={"fine_tuning": {"trainable": ["layers/2"]}})
    begin = flat(Reference(run).begin.params)
    _, state = trained(run)
    params, _ = build_evaluation(run, build_mesh(run.layout)).weights(state)

    for path, array in flat(params).items():
        is_same = np.array_equal(array, begin[path])
        assert is_same != path.startswith("layers/2"), path
    arrays_of_layer = 2  # kernel and bias; an outer optimizer has an average and momentum of each
    kept = {"adasum": 0, "top_k": arrays_of_layer, "local_sgd": 2 * arrays_of_layer}[name]
    assert len(jax.tree.leaves(state.exchange)) == kept


def test_a_program_is_remembered_with_its_exchange():
    """A prediction of one does not take the program of another, nor of other shares of steps."""
    target = target_for(load_cluster("dgx-h100"), 4, "cpu")
    post_local = {"name": "local_sgd", **LOCAL["post-local"]}
    runs = [
        run_with(gradient_sync, 4) for gradient_sync in (None, *GRADIENT_SYNCS.values(), post_local)
    ]
    runs.append(run_with(post_local, 4, fields={"train.epochs": 2}))

    jobs = [RunJob(target=target, run=run) for run in runs]

    assert len({_path(Path(), job) for job in jobs}) == len(runs)
    assert len({case_key(job) for job in jobs}) == len(runs)


RUN = """
seed = 3
[model]
name = "mlp"
hidden = [16]
[data]
name = "synthetic_images"
image_size = 8
channels = 1
classes = 4
train_examples = 64
test_examples = 32
[batch]
global_batch = 16
[optimizer]
name = "sgd"
[schedule]
base_learning_rate = 0.01
[layout]
data = {devices}
mode = "shard_map"
[train]
epochs = {epochs}
log_every_steps = 1
checkpoint_every_steps = 3
[gradient_sync]
"""
RESUMED = {
    "adasum": 'name = "adasum"',
    "two_bit": 'name = "two_bit"\nthreshold = 0.1',
    "top_k": 'name = "top_k"\nfraction = 0.05',
    "local_sgd": 'name = "local_sgd"\nevery_steps = 5\nouter_momentum = 0.9\nbegin_epoch = 0.5',
    "local adasum": 'name = "local_sgd"\nevery_steps = 1\nreduction = "adasum"',
}


def run_in(
    folder: Path, gradient_sync: str, *, epochs: int, devices: int = 4, resume: bool = False
) -> Any:
    """Figures of a run of so many epochs, and the bits of its weights."""
    file = folder.with_suffix(".toml")
    file.write_text(RUN.format(epochs=epochs, devices=devices) + gradient_sync, encoding="utf-8")
    config = load_config(file)
    train(config, folder, resume=resume, reporter=Silent())
    tree = trained_weights(resolve(config), folder)
    return figures(folder), [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "top_k" else [pytest.mark.slow]) for name in RESUMED],
)
def test_a_run_goes_on_as_if_nothing_had_happened(name, tmp_path):
    """Bit for bit, what devices keep included; on another number of devices it would be another
    run, and is refused."""
    whole = run_in(tmp_path / "whole", RESUMED[name], epochs=3)
    run_in(tmp_path / "parts", RESUMED[name], epochs=2)
    with pytest.raises(ConfigError, match=r"layout\.data=2 is refused: .* Resume on 4"):
        run_in(tmp_path / "parts", RESUMED[name], epochs=3, devices=2, resume=True)
    resumed = run_in(tmp_path / "parts", RESUMED[name], epochs=3, resume=True)

    assert resumed[1] == whole[1]
    assert resumed[0] == whole[0]
