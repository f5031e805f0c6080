"""Predicted memory against the growth of a process that runs the step (Linux, on the CPU)."""

import importlib
import sys
from pathlib import Path

import pytest

from scalejax.config.run import RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.hardware import load_chip
from scalejax.simulator.memory import memory_verdict
from scalejax.simulator.program import MemoryUse
from scalejax.training.mesh import build_mesh
from scalejax.training.state import stage_parameters
from scalejax.xla.compiled import convolution_workspace_bytes
from scalejax.xla.hlo import parse_module

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "memory_against_run"


@pytest.mark.slow  # processes that run the steps
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", ["cnn", "mlp:2"])
def test_predicted_memory_is_within_a_tenth_of_what_a_run_takes(case, monkeypatch):
    """Seen, of six cases of the experiment: - 7 to - 1 %. What is missing, 30 to 60 MB, is the
    runtime's packing of operands."""
    monkeypatch.syspath_prepend(str(EXPERIMENT))
    name, _, devices = case.partition(":")

    row = importlib.import_module("measure").measure(name, int(devices or 1))

    assert row.predicted_bytes == pytest.approx(row.measured_bytes, rel=0.1)


CONVOLUTIONS = """HloModule m

ENTRY %e () -> f32[] {
  %x = f32[64,32,32,32]{3,2,1,0} parameter(0)
  %w = f32[3,3,32,64]{3,2,1,0} parameter(1)
  %y = f32[64,16,16,64]{3,2,1,0} convolution(%x, %w), window={size=3x3 stride=2x2 pad=1_0x1_0}, dim_labels=b01f_01io->b01f
  %v = f32[3,3,64,32]{3,2,1,0} parameter(2)
  %g = f32[64,32,32,32]{3,2,1,0} convolution(%y, %v), window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2}, dim_labels=b01f_01io->b01f
  %s = f32[64,32,32,32]{3,2,1,0} convolution(%x, %w), window={size=1x1}, dim_labels=b01f_01io->b01f
  ROOT %r = f32[] constant(0)
}
"""  # noqa: E501  lines as the compiler writes them


def test_convolutions_of_a_cpu_take_padded_copies_of_their_operands():
    """The two largest: 33 x 33 of 32 channels, and 34 x 34 of 64; with their kernels."""
    forward = 64 * 33 * 33 * 32 * 4 + 3 * 3 * 32 * 64 * 4
    gradient = 64 * 34 * 34 * 64 * 4 + 3 * 3 * 64 * 32 * 4

    assert convolution_workspace_bytes(parse_module(CONVOLUTIONS)) == forward + gradient


def test_what_a_cpus_kernels_take_is_not_charged_to_other_chips():
    """A program for the CPU may stand in for one for a GPU, whose kernels are others."""
    memory = MemoryUse(
        argument_bytes=100, output_bytes=60, alias_bytes=50, temporary_bytes=30, kernel_bytes=7
    )
    chip = load_chip("h100")

    assert memory.peak_bytes == 100 + 60 - 50 + 30 + 7
    assert memory_verdict(memory, chip).peak_bytes == 140 + chip.runtime_reserve_bytes


@pytest.mark.parametrize(
    ("optimizer", "layout", "bytes_each"),
    [
        ({}, {}, 4 + 4 + 4),
        ({"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}, {}, 4 + 2 + 2),
        ({}, {"optimizer_memory_host_offload": True}, 4),
        ({}, {"zero_stage": 1}, 0),
    ],
)
def test_a_second_stage_is_counted_in_the_types_that_it_is_kept_in(optimizer, layout, bytes_each):
    """By hand, 2 of 4 layers over tensor 2: half of the matrices, whole norms; no moments that the
    host holds, and none that ZeRO shards."""
    hidden, ffn = 64, 96
    tables = {
        "model": {
            "name": "llama",
            "layers": 4,
            "hidden": hidden,
            "heads": 4,
            "kv_heads": 4,
            "ffn_hidden": ffn,
        },
        "data": {"name": "synthetic_tokens", "tokens": 16, "vocabulary": 64},
        "batch": {"global_batch": 16, "microbatches": 8},
        "optimizer": {"name": "adamw", **optimizer},
        "schedule": {"base_learning_rate": 0.01},
        "layout": {"data": 2, "tensor": 2, "pipeline": 2, "pipeline_schedule": "1f1b", **layout},
    }
    run = resolve(build(RunConfig, tables))
    own = 2 * ((4 * hidden**2 + 3 * hidden * ffn) // 2 + 2 * hidden)

    assert stage_parameters(run, build_mesh(run.layout)) == (own, bytes_each * own)
