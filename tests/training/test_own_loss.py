"""A loss of the user's own, by import path: trained over layouts as the built-in one is, told apart
in the cache of programs, and refused at the door where it is none."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.config.dataset_facts import IGNORED_TARGET
from scalejax.config.run import RunConfig, resolve
from scalejax.config.training import LossConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.training.losses import losses_of
from scalejax.training.mesh import build_mesh
from scalejax.training.setup import train_setup
from scalejax.training.step import build_step, init_state
from scalejax.xla.cache import _own_modules
from scalejax.xla.closed_form import shape_of
from scalejax.xla.job import RunJob
from scalejax.xla.target import Target

CODE = """
import jax
import jax.numpy as jnp

def entropy(logits, targets, power=0.0):
    is_target = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)
    picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return losses * (1 - jnp.exp(-losses)) ** power

def of_shares(logits, targets):
    shares = jax.nn.softmax(logits) * jax.nn.one_hot(targets, logits.shape[-1])
    return -jnp.log(jnp.sum(shares, axis=-1))

def mean(logits, targets): return entropy(logits, targets).mean()
def whole(logits, targets): return targets
def fails(logits, targets): raise RuntimeError("no licence\\nfound")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of losses in the working directory."""
    name = f"losses_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return name


def run_of(loss: dict[str, Any], devices: int = 1, **layout: Any) -> Any:
    """A run of a small decoder."""
    tables = {
        "model": {"name": "gpt", "layers": 1, "hidden": 16, "heads": 2},
        "data": {"name": "synthetic_tokens", "tokens": 8, "vocabulary": 32, "train_examples": 64},
        "batch": {"global_batch": 8},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.01},
        "loss": loss,
        "layout": layout,
    }
    return resolve(build(RunConfig, tables, where="run"), devices)


def losses(run: Any) -> list[float]:
    """Losses of two updates on the same batch."""
    mesh = build_mesh(run.layout)
    step, state = build_step(run, mesh), init_state(run, mesh)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, size=(8, 9)), jnp.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch = {name: jax.device_put(each, step.batch[name].sharding) for name, each in batch.items()}
    found = []
    for _ in range(2):
        state, metrics = step.function(state, batch)
        found.append(float(metrics["loss"]))
    return found


def test_the_cross_entropy_by_import_path_trains_as_the_built_in_one(module: str):
    """Three programs are compiled: the built-in loss, and the same by path, on one device and on
    four whose tensor axis splits the classes. To the rounding of float32 in another order."""
    usual = losses(run_of({}))

    own = {"kind": f"{module}:entropy"}

    assert losses(run_of(own)) == pytest.approx(usual, rel=1e-5)
    sharded = losses(run_of(own, 4, tensor=2))
    assert sharded == pytest.approx(usual, rel=1e-5)
    assert usual[1] < usual[0]


def test_a_target_that_is_left_out_makes_no_gradient_nan(module: str):
    """Of packed documents; as a one-hot row of zeros its loss is infinite, before it is masked."""
    how = LossConfig(kind=f"{module}:of_shares")
    targets = jnp.asarray([0, IGNORED_TARGET])

    def loss(logits: jax.Array) -> jax.Array:
        return jnp.where(targets == IGNORED_TARGET, 0, losses_of(logits, targets, how)).sum()

    gradient = jax.grad(loss)(jnp.zeros((2, 2)))

    np.testing.assert_allclose(gradient, [[-0.5, 0.5], [0, 0]], rtol=1e-6)


def test_a_focal_loss_by_hand(module: str):
    """-(1 - p)^2 log p of p = 1/2 for two equal logits: log(2) / 4."""
    how = LossConfig(kind=f"{module}:entropy", options={"power": 2.0})

    found = losses_of(jnp.zeros((3, 2)), jnp.zeros(3, jnp.int32), how)

    np.testing.assert_allclose(found, np.log(2) / 4, rtol=1e-6)


def test_another_file_of_a_loss_is_another_program(module: str):
    """The cache of programs has its digest, and the closed form does not pretend to know it."""
    run = run_of({"kind": f"{module}:entropy"})
    job = RunJob(run=run, target=Target(backend="cpu", name="cpu", device_count=1))

    (path,) = _own_modules(job)

    assert Path(path).name == f"{module}.py"
    with pytest.raises(ConfigError, match="the closed form knows the cross-entropy"):
        shape_of(run.config, load_cluster("dgx-h100").chip)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({"kind": "focal"}, r"loss\.kind='focal' is refused.*cross_entropy"),
        ({"kind": "no_such_module:made"}, r"loss\.kind='no_such_module:made' is refused.* import"),
        ({"kind": "{}:entropi"}, "did you mean '.*:entropy'"),
        ({"kind": "{}:jnp"}, "must be a function of logits and targets"),
        ({"kind": "{}:entropy", "options": {"gamma": 1}}, r"loss\.options=.*'gamma'"),
        ({"kind": "{}:mean"}, r"it gives float32 of shape \(\), but must .* of that shape"),
        ({"kind": "{}:whole"}, r"it gives int32 of shape \(2, 8\)"),
        ({"kind": "{}:fails"}, "but RuntimeError: no licence found"),
        ({"kind": "{}:entropy", "z_loss": 0.1}, r"loss\.z_loss=0\.1 is refused"),
        ({"options": {"power": 1}}, "it is for a loss of your own"),
    ],
)
def test_what_is_no_loss_is_refused(module: str, loss: dict[str, Any], said: str):
    """Before anything is compiled, in one sentence."""
    if "kind" in loss:
        loss = loss | {"kind": loss["kind"].format(module)}

    def refused() -> None:
        train_setup(run_of(loss))

    with pytest.raises(ConfigError, match=said) as error:
        refused()
    assert "\n" not in str(error.value)
