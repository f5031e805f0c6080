"""What PyTorch holds where it compiles nothing, against Llama 3.1 8B counted by hand."""

from dataclasses import replace

import pytest
from program_cases import kept_jobs, matmul, program_of

from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.core.units import GIB
from scalejax.hardware import load_cluster
from scalejax.simulator.frameworks.eager import (
    VOCABULARY_FACTORS,
    temporary_bytes_at_loss,
    with_eager_blocks,
    with_eager_loss,
)
from scalejax.simulator.program import Program
from scalejax.xla import profile

TOKENS, WORDS, HIDDEN, LAYERS = 2 * 8192, 128_256, 4096, 32


def added_gib(program: Program) -> float:
    """Memory that the program has got more of than an empty one has."""
    return (program.memory.peak_bytes - program_of(matmul("product", 1)).memory.peak_bytes) / GIB


def test_a_loss_holds_three_arrays_in_float32_where_ours_holds_one():
    """16,384 x 128,256 x 4 bytes are 7.83 GiB; two more of them, and three where divided."""
    program = program_of(matmul("product", 1))
    at_loss = program.memory.temporary_bytes
    whole = with_eager_loss(program, TOKENS * WORDS, at_loss, is_divided=False)
    divided = with_eager_loss(program, TOKENS * WORDS, at_loss, is_divided=True)

    assert added_gib(whole) == pytest.approx(2 * 7.828, rel=1e-3)
    assert added_gib(divided) == pytest.approx(3 * 7.828, rel=1e-3)


def test_a_loss_below_the_peak_fills_it_up_first():
    """A loss at 30 GiB of a step that holds 40 elsewhere: two arrays more are 45.66."""
    program = program_of(matmul("product", 1))
    held = replace(program.memory, temporary_bytes=40 * GIB)
    eager = with_eager_loss(
        replace(program, memory=held), TOKENS * WORDS, 30 * GIB, is_divided=False
    )
    small = with_eager_loss(replace(program, memory=held), TOKENS, 30 * GIB, is_divided=False)

    assert eager.memory.temporary_bytes / GIB == pytest.approx(30 + 2 * 7.828, rel=1e-4)
    assert small.memory == held


def test_the_loss_is_found_on_the_line_of_wordier_steps():
    """5 GiB besides, and 12 for the loss: 29 with twice the words, 53 with four times."""
    assert VOCABULARY_FACTORS == (2, 4)
    assert temporary_bytes_at_loss([29 * GIB, 53 * GIB]) == 17 * GIB


def test_our_loss_holds_logits_and_one_array_in_float32(monkeypatch):
    """Twice the vocabulary takes 2 + 4 bytes more for each logit; and a table of words or both,
    gathered, 2 to 4 % of that."""
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", kept_jobs)
    words = 16_384
    small, large = (
        profile(llama(vocabulary), load_cluster("dgx-h100"), cache=None, backend="cuda")
        for vocabulary in (words, 2 * words)
    )

    more = large.memory.temporary_bytes - small.memory.temporary_bytes
    assert 1.02 <= more / (6 * 2 * 1024 * words) <= 1.05


def llama(vocabulary: int) -> ResolvedRun:
    """Two samples of 1,024 tokens on each of 8 devices, whose loss takes most of their memory."""
    tables = {
        "model": {
            "name": "llama", "layers": 2, "hidden": 128, "heads": 2, "kv_heads": 1,
            "ffn_hidden": 256, "remat": "full", "compute_dtype": "bfloat16",
        },
        "data": {"name": "synthetic_tokens", "tokens": 1024, "vocabulary": vocabulary},
        "batch": {"per_device_batch": 2},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        "layout": {"data": 1, "fsdp": 8},
    }  # fmt: skip
    return resolve(build(RunConfig, tables))


def test_blocks_keep_what_their_last_product_gives():
    """16,384 x 4,096 x 2 bytes are 128 MiB, of 32 blocks 4 GiB."""
    program = with_eager_blocks(program_of(matmul("product", 1)), TOKENS * HIDDEN * 2, LAYERS)

    assert added_gib(program) == 4.0
