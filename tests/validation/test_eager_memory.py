"""What PyTorch holds where it compiles nothing, against Llama 3.1 8B counted by hand."""

import pytest
from program_cases import matmul, program_of

from scalejax.program import Program
from scalejax.units import GIB
from scalejax.validation.eager_memory import with_eager_blocks, with_eager_loss

TOKENS, WORDS, HIDDEN, LAYERS = 2 * 8192, 128_256, 4096, 32


def added_gib(program: Program) -> float:
    """Memory that the program has got more of than an empty one has."""
    return (program.memory.peak_bytes - program_of(matmul("product", 1)).memory.peak_bytes) / GIB


def test_a_loss_holds_three_arrays_in_float32_where_ours_holds_one():
    """16,384 x 128,256 x 4 bytes are 7.83 GiB; two more of them, and three where divided."""
    program = program_of(matmul("product", 1))
    whole = with_eager_loss(program, TOKENS * WORDS, is_divided=False)
    divided = with_eager_loss(program, TOKENS * WORDS, is_divided=True)

    assert added_gib(whole) == pytest.approx(2 * 7.828, rel=1e-3)
    assert added_gib(divided) == pytest.approx(3 * 7.828, rel=1e-3)


def test_blocks_keep_what_their_last_product_gives():
    """16,384 x 4,096 x 2 bytes are 128 MiB, of 32 blocks 4 GiB."""
    program = with_eager_blocks(program_of(matmul("product", 1)), TOKENS * HIDDEN * 2, LAYERS)

    assert added_gib(program) == 4.0
