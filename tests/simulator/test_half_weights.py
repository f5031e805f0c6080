"""What is done with weights once they are held in half precision, on layers of one product."""

from program_cases import fusion, matmul, program_of

from scalejax.simulator.frameworks.half_precision_weights import with_half_weights
from scalejax.simulator.program import Loop, Operation

LAYERS, TOKENS, OUT, IN = 3, 64, 8, 16
STACKED = LAYERS * OUT * IN
WORDS = 32 * IN


def moved(name: str, read: int, written: int) -> Operation:
    """Something that moves bytes and computes nothing."""
    return Operation(name=name, kind="fusion", dtype="f32", read_bytes=read, write_bytes=written)


def product(name: str, m: int, n: int, k: int) -> Operation:
    """A product of that shape."""
    return Operation(name=name, kind="matmul", dtype="bf16", flop=2 * m * n * k, shape=(1, m, n, k))


def step(*around: Operation) -> list[tuple[str, int, int]]:
    """Name, bytes read and written of what is left around the loops over layers."""
    forward = Loop(name="forward", trip_count=LAYERS, body=(product("up", TOKENS, OUT, IN),))
    back = Loop(name="back", trip_count=LAYERS, body=(product("to weight", OUT, IN, TOKENS),))
    logits = product("logits", TOKENS, 32, IN)
    body = (forward, logits, back, *around)
    program = program_of(Loop(name="microbatches", trip_count=2, body=body), matmul("update", 1))

    left = [each for each, _ in with_half_weights(program).walk() if each.kind == "fusion"]

    return [(each.name, each.read_bytes, each.write_bytes) for each in left]


def test_weights_in_half_precision_are_neither_cast_nor_cleared():
    """Those of all layers together, and the table of words, which the logits multiply."""
    assert step(moved("cast", 4 * STACKED, 2 * STACKED), moved("clear", 0, 2 * STACKED)) == []
    assert step(moved("cast table", 4 * WORDS, 2 * WORDS)) == []


def test_gradients_are_added_up_in_half_precision():
    """Two read and one written, of 2 bytes, instead of f32 sums beside gradients."""
    assert step(moved("add", 6 * STACKED, 4 * STACKED)) == [("add", 4 * STACKED, 2 * STACKED)]


def test_activations_stay_as_they_are():
    """A cast of the logits is one, of as many elements as tokens times words."""
    logits = ("cast", 4 * 32 * TOKENS, 2 * 32 * TOKENS)

    assert step(moved(*logits)) == [logits]
    assert step(fusion("norm", 5))[0][0] == "norm"


def test_step_without_layers_stays_as_it_is():
    """An update alone has no weights to be told by."""
    program = program_of(moved("cast", 4 * STACKED, 2 * STACKED))

    assert with_half_weights(program) == program
