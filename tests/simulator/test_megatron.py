"""What Megatron-LM runs otherwise than the compiler, on blocks of two products."""

from dataclasses import replace

from ledger_cases import GPT, case
from program_cases import fusion, gather, matmul, program_of, wait

from scalejax.simulator.frameworks.megatron import (
    with_attention_dropout,
    with_full_recompute,
    with_half_gradients,
    with_unpadded_heads,
)
from scalejax.simulator.program import (
    Collective,
    CollectiveName,
    DeviceGroup,
    Loop,
    Operation,
    Program,
)

OTHER = GPT | {"fsdp": "2", "tensor": "4", "vocab": "50257"}
MEGATRON = OTHER | {"framework": "Megatron-DeepSpeed"}


def step_of_blocks(depth: int) -> Program:
    """Two blocks forward, and back again with the first product computed anew."""
    last = (matmul("down", 2), gather("sum", 1), fusion("norm", 1), wait("sum"))
    forward = Loop(name="forward", trip_count=2, body=(matmul("up", 2), *last))
    back = (matmul("up again", 2), matmul("to input", 4), matmul("to weight", 4))
    body = (forward, matmul("logits", 1), Loop(name="back", trip_count=2, body=back))
    for _ in range(depth):
        body = (Loop(name="microbatches", trip_count=3, body=body),)
    return program_of(*body, matmul("update", 1))


def names(program: Program) -> list[str]:
    """Of all operations, in order."""
    return [operation.name for operation, _ in program.walk()]


def test_last_product_of_a_block_is_computed_again_and_summed_again():
    """Before the rest of the backward pass, whether or not in a loop over microbatches."""
    for depth in (0, 1):
        whole = names(with_full_recompute(step_of_blocks(depth)))

        start = whole.index("logits") + 1
        assert whole[start : start + 4] == ["down.again", "sum.again", "sum-done.again", "up again"]
        assert len(whole) == len(set(whole)) == len(names(step_of_blocks(depth))) + 3


def test_again_waits_for_its_own_sum():
    """And not for that of the forward pass, long done."""
    walked = with_full_recompute(step_of_blocks(0)).walk()
    waits = {operation.name: operation.waits_for for operation, _ in walked if operation.waits_for}

    assert waits == {"sum-done": "sum", "sum-done.again": "sum.again"}


def test_step_without_pairs_of_loops_stays_as_it_is():
    """A forward pass alone has nothing to compute again."""
    alone = program_of(Loop(name="forward", trip_count=2, body=(matmul("up", 2),)))

    assert with_full_recompute(alone) == alone


def test_heads_lose_their_padding():
    """225 wide, padded to 232; products of all heads together are left alone."""

    def product(*shape: int) -> Operation:
        return replace(matmul(str(shape), 1), shape=shape)

    padded = program_of(
        Loop(name="blocks", trip_count=2, body=(product(8, 64, 64, 232), product(1, 64, 232, 64)))
    )
    shapes = [each.shape for each, _ in with_unpadded_heads(padded, 225).walk()]

    assert shapes == [(8, 64, 64, 225), (1, 64, 232, 64)]
    assert with_unpadded_heads(padded, 224) == padded


def test_scores_are_dropped_by_a_kernel_of_their_own():
    """8 heads of 64 x 64: 32,768 scores read, and written with a byte of mask, 5 bytes each."""
    scores = replace(matmul("qk", 1), shape=(8, 64, 64, 32))
    values = replace(matmul("av", 1), shape=(8, 64, 32, 64))
    step = program_of(Loop(name="blocks", trip_count=2, body=(scores, values)))

    walked = [operation for operation, _ in with_attention_dropout(step, 64).walk()]

    assert [each.name for each in walked] == ["qk", "qk.dropout", "av"]
    assert (walked[1].read_bytes, walked[1].write_bytes) == (65_536, 98_304)


def test_gradients_and_parameters_of_half_precision_are_half_as_many_bytes():
    """On the data axis, summed or gathered; other axes and other types stay as they are."""

    def communicated(
        name: str, axis: str, dtype: str, kind: CollectiveName = "all_reduce"
    ) -> Operation:
        group = DeviceGroup(extents=((2, 1),), axes=(axis,))
        collective = Collective(name=kind, payload_bytes=800, group=group, is_async=True)
        return Operation(name=name, kind="collective", dtype=dtype, collective=collective)

    sums = (
        communicated("gradient", "data", "f32"),
        communicated("parameters", "data", "f32", "all_gather"),
        communicated("activation", "tensor", "f32"),
        communicated("half", "data", "bf16"),
    )
    step = program_of(Loop(name="microbatches", trip_count=2, body=sums))

    halved = [each.collective for each, _ in with_half_gradients(step).walk()]
    assert [each.payload_bytes for each in halved if each is not None] == [400, 400, 800, 800]


def test_table_of_words_is_padded_where_it_is_divided(row):
    """Over 4 devices to a multiple of 512; alone, or by others, as stated."""

    def words(cells: dict[str, str]) -> int:
        return case(row(cells)).runs[0].dataset.classes

    assert words(MEGATRON) == 50_688
    assert words(MEGATRON | {"tensor": "1", "fsdp": "8"}) == 50_257
    assert words(OTHER) == 50_257
