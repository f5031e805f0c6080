"""What the model says of equal FLOP with 8 experts of 2 and with 56 of 14, beside MFU as published.

maxtext issue 1256: Mixtral-8x7B without attention on a v5p-64 (32 chips) ran at 50.4 % MFU, and at
25 to 28 % with seven times the experts, each a seventh as wide, and seven times as many per token.
The layer is written out by hand as MaxText computes it with megablox: rows gathered by expert,
three grouped products, rows put back in order, and summed by token in f32; backward the same in
reverse. Its FSDP collectives are equal in both and left out, as are embedding and loss; the source
gives no batch, so several are shown.

    python experiments/grouped_products/maxtext.py
"""

from scalejax.hardware import Chip, load_chip
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import Operation

HIDDEN, FLOP_WIDTH = 4096, 2 * 14336
"""Hidden width, and experts per token times their width, of Mixtral-8x7B."""
PUBLISHED = {(8, 2): 0.504, (56, 14): 0.28}


def layer(tokens: int, experts: int, per_token: int) -> list[Operation]:
    """Operations of the forward and the backward pass of one layer on one device."""
    width, rows = FLOP_WIDTH // per_token, tokens * per_token
    operations: list[Operation] = []

    def moved(name: str, read: int, write: int) -> None:
        operations.append(
            Operation(name=name, kind="fusion", dtype="bf16", read_bytes=read, write_bytes=write)
        )

    wide, narrow, token = 2 * rows * HIDDEN, 2 * rows * width, 2 * tokens * HIDDEN
    moved("gather", wide, wide)
    moved("activation", 2 * narrow, narrow)
    moved("unsort", wide, wide)
    moved("sum", wide, token)
    moved("sum backward", token, wide)
    moved("unsort backward", wide, wide)
    moved("activation backward", 3 * narrow, 2 * narrow)
    moved("scatter", wide, wide)
    moved("sum of copies", wide, token)
    for name, outer, inner in (
        ("gate", width, HIDDEN),
        ("up", width, HIDDEN),
        ("down", HIDDEN, width),
    ):
        for each in ("forward", "input_gradient", "weight_gradient"):
            operations.append(
                Operation(
                    name=f"{name} {each}",
                    kind="matmul",
                    dtype="bf16",
                    shape=(experts, -(-rows // experts), outer, inner),
                    flop=2 * rows * outer * inner,
                    grouped_pass=each,
                )
            )
    return operations


def utilisation(tokens: int, experts: int, per_token: int, chip: Chip) -> float:
    """Share of peak FLOP/s of the layer, without what is equal in both."""
    operations = layer(tokens, experts, per_token)
    seconds = sum(operation_time(each, chip).seconds for each in operations)
    return sum(each.flop for each in operations) / chip.peak("bf16") / seconds


def main() -> None:
    """Print both layers, and their ratio, by tokens on a device."""
    chip = load_chip("tpu-v5p")
    (few, many) = PUBLISHED.values()
    print(f"published: {few:.1%} and {many:.1%}, ratio {few / many:.2f}")
    for tokens in (8192, 32768, 98304):
        few, many = (utilisation(tokens, *each, chip) for each in PUBLISHED)
        print(f"{tokens:6d} tokens: {few:.1%} and {many:.1%}, ratio {few / many:.2f}")
    # Times over those at peak are a + b x experts per token; b is what copies of tokens cost.
    per_copy = {
        name: (1 / high - 1 / low) / (14 - 2)
        for name, (low, high) in {"published": (0.504, 0.28), "model": (few, many)}.items()
    }
    print(
        f"time for each copy of a token, over that of the layer at peak: {per_copy['model']:.4f}, "
        f"published {per_copy['published']:.4f}, {per_copy['published'] / per_copy['model']:.0f} x"
    )


if __name__ == "__main__":
    main()
