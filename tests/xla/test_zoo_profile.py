"""Compiled programs of the published networks against counts by hand; each was kept."""

import pytest
from program_cases import kept_jobs, require_same

from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.xla import has_cuda_compiler, profile

SAMPLES = 4
"""Per device."""
CONVOLUTIONAL = {
    # pixels; multiply-adds of an image, forward (as published, see test_image_networks), and of
    # the layer that reads the images, whose own gradient nobody needs
    "vgg16": (224, 15.4702643e9, 224**2 * 27 * 64),
    "alexnet": (227, 0.8387888e9, 55**2 * 363 * 64),
    "inception_v3": (299, 5.7132161e9, 149**2 * 27 * 32),
    "xception": (299, 8.3574035e9, 149**2 * 27 * 32),
}
BERT = {"bert_base": (12, 768), "bert_large": (24, 1024)}
TOKENS, MASKED, VOCABULARY = 128, 20, 30_522


def profiled(name: str, data: dict):
    """The program of a network on 2 V100."""
    tables = {
        "model": {"name": name},
        "data": data,
        "batch": {"per_device_batch": SAMPLES},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.1},
    }
    run = resolve(build(RunConfig, tables), 2)
    return profile(run, load_cluster("dgx1-v100"), cache=None, backend="cuda")


@pytest.fixture
def kept(monkeypatch):
    """What is profiled was compiled once, and kept."""
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_flop_of_a_convolutional_network_are_those_counted_by_hand(name):
    """Three times the forward pass, less the gradient of the images; depthwise ones included."""
    pixels, forward, first = CONVOLUTIONAL[name]

    program = profiled(name, {"name": "synthetic_images", "image_size": pixels})

    assert program.flop == pytest.approx(2 * SAMPLES * (3 * forward - first), rel=0.02)
    gradient = {"vgg16": 138_357_544, "alexnet": 61_838_248}.get(name)
    if gradient is not None:  # and two metrics: no other collectives
        assert program.collective_bytes("all_reduce") == 4 * gradient + 8


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", BERT)
def test_flop_of_bert_are_those_counted_by_hand(name):
    """Three times the forward pass, its logits of the hidden words alone."""
    layers, hidden = BERT[name]
    blocks = layers * TOKENS * (12 * hidden**2 + 2 * TOKENS * hidden)
    logits = MASKED * hidden * (hidden + VOCABULARY)

    program = profiled(name, {"name": "masked_tokens"})

    assert program.flop == pytest.approx(6 * SAMPLES * (blocks + logits), rel=0.02)


@pytest.mark.slow  # compiles for CUDA
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs the compiler plug-in for NVIDIA GPUs")
def test_what_was_kept_is_what_the_compiler_makes_today(monkeypatch):
    """The smallest network; REMAKE_PROGRAMS=1 compiles them all anew."""
    data = {"name": "synthetic_images", "image_size": 227}
    compiled = profiled("alexnet", data)
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)

    require_same(profiled("alexnet", data), compiled)
