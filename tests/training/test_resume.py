"""A run that is killed or interrupted ends as if nothing had happened, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from scalejax.config.run import load_config, resolve
from scalejax.training.evaluation import trained_weights
from scalejax.training.record import RunFolder, RunRecord, figures

WORKER = Path(__file__).parents[1] / "support" / "train_worker.py"

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
train_examples = 240
test_examples = 30
validation_fraction = 0.15
[batch]
global_batch = 8
[optimizer]
name = "adamw"
[schedule]
base_learning_rate = 0.001
warmup = "gradual"
warmup_from = "zero"
warmup_epochs = 2
decay = "cosine"
[train]
epochs = 6
log_every_steps = 1
checkpoint_every_steps = 20
evaluate_every_epochs = 2
[train.early_stopping]
patience = 50
"""
STEPS = 6 * 25  # 36 of 240 examples are held out


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """The file of a run of 150 short updates, checkpointed every 20."""
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(RUN)
    return path


def start(run_file, folder, mode="new"):
    """Start a worker that trains into `folder`."""
    return subprocess.Popen(
        [sys.executable, WORKER, run_file, folder, mode],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in this process
            "JAX_COMPILATION_CACHE_DIR": str(run_file.parent / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONPATH": str(WORKER.parents[2]),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Wait for a worker that is to succeed; what it said."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def wait_for_step(process, folder, step):
    """Return once the record in `folder` has reached `step`."""
    measurements = RunFolder(path=folder).measurements
    while process.poll() is None:
        if measurements.exists() and f'"step": {step},' in measurements.read_text():
            return
        time.sleep(0.005)
    raise AssertionError(process.communicate()[1])


def weights(run_file, folder):
    """The bytes of all arrays that a run ended with, by path."""
    tree = trained_weights(resolve(load_config(run_file), 4), folder)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.fixture(scope="module")
def uninterrupted(run_file, tmp_path_factory):
    """The folder of the run that nothing happened to, trained in a process of its own: what other
    tests did in this one changes the last bit."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(start(run_file, folder))
    assert len(RunRecord.load(folder).training) == STEPS
    return folder


@pytest.mark.slow  # three processes train
def test_an_interrupted_and_then_killed_run_ends_with_the_same_bits(
    run_file, uninterrupted, tmp_path
):
    """SIGTERM, then SIGKILL, at random steps: metrics, their order and the weights are the same.

    The polite signal ends the update at hand, saves, and says how to go on; the other one leaves
    what it leaves.
    """
    folder = tmp_path / "run"
    polite, sudden = sorted(random.sample(range(1, STEPS - 60), 2))

    process = start(run_file, folder)
    wait_for_step(process, folder, polite)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    record = RunRecord.load(folder)
    stopped_at = record.statuses[-1].step
    assert process.returncode == 128 + signal.SIGTERM
    assert record.status == "interrupted"
    assert f"at step {stopped_at}; continue with: scalejax train {folder}" in said
    assert "Traceback" not in said

    process = start(run_file, folder, "resume")
    wait_for_step(process, folder, max(sudden, stopped_at + 1))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert RunRecord.load(folder).statuses[-1].step == stopped_at

    finish(start(run_file, folder, "resume"))

    record = RunRecord.load(folder)
    where = f"stopped at {stopped_at}, killed at {sudden}"
    assert [change.status for change in record.statuses][-2:] == ["resumed", "completed"], where
    assert figures(folder) == figures(uninterrupted), where
    assert weights(run_file, folder) == weights(run_file, uninterrupted), where
