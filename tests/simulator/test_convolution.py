"""Convolutions as the products they amount to, by pass, channels and type."""

from dataclasses import replace

import pytest
from hardware_cases import CHIP

from scalejax.hardware import load_chip
from scalejax.simulator.operations.convolution import channel_use, implicit_product, is_transposed
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.program import Operation

FLOP = 2 * 32 * 784 * 64 * 128 * 9
"""Of a 3 x 3 convolution from 64 to 128 channels, 32 samples of 28 x 28."""


def convolution(**fields: object) -> Operation:
    """That convolution, or another."""
    described = {"shape": (32, 784, 64, 128, 9), "flop": FLOP, "dtype": "bf16", **fields}
    return Operation(name="c", kind="convolution", **described)  # type: ignore[arg-type]


def seconds(operation: Operation, **attainable: float) -> float:
    """On paper, where nothing but arithmetic takes time, with other attainable rates."""
    chip = replace(CHIP, attainable=replace(CHIP.attainable, **attainable))
    return operation_time(operation, chip).seconds


@pytest.mark.parametrize(
    ("kind", "product"),
    [
        (None, (1, 32 * 784, 128, 64 * 9)),
        ("forward", (1, 32 * 784, 128, 64 * 9)),
        ("input_gradient", (1, 32 * 784, 64, 128 * 9)),
    ],
)
def test_a_pass_is_a_product_of_its_own(kind: str | None, product: tuple[int, ...]):
    """The same multiplications, summed over something else."""
    operation = convolution(convolution_pass=kind)

    assert implicit_product(operation, CHIP) == product
    batch, m, n, k = product
    assert 2 * batch * m * n * k == FLOP


def test_the_sum_of_a_filter_gradient_is_split_over_the_multiprocessors():
    """576 x 128 results are 4.5 tiles of 128 x 128; for 132 multiprocessors, 30 parts of each."""
    h100 = load_chip("h100")
    gradient = convolution(convolution_pass="filter_gradient")
    short = convolution(convolution_pass="filter_gradient", shape=(1, 784, 64, 128, 9))

    assert implicit_product(gradient, h100) == (30, 576, 128, -(-32 * 784 // 30))
    assert implicit_product(gradient, CHIP) == (1, 576, 128, 32 * 784)
    assert implicit_product(short, h100) == (1, 576, 128, 784)


def test_groups_are_products_side_by_side():
    """4 groups of 16 to 32 channels."""
    grouped = convolution(shape=(32, 784, 16, 128, 9), convolution_groups=4)

    assert implicit_product(grouped, CHIP) == (4, 32 * 784, 32, 16 * 9)


def test_gradients_run_at_their_share_of_the_forward_rate():
    """A share of 0.8 takes 5/4 as long; an unknown pass counts as forward."""
    shares = {"input_gradient_share": 0.5, "filter_gradient_share": 0.8}
    forward = seconds(convolution(convolution_pass="forward"), **shares)

    times = {
        kind: seconds(convolution(convolution_pass=kind), **shares) / forward
        for kind in ("input_gradient", "filter_gradient", None)
    }

    assert times == pytest.approx({"input_gradient": 2.0, "filter_gradient": 1.25, None: 1.0})


def test_f32_operands_have_a_rate_of_their_own():
    """Half the share of the f32 peak: twice as long; bf16 does not notice."""
    half = {"convolution_f32_fraction": 0.5}
    wide, narrow = convolution(dtype="f32"), convolution()

    assert seconds(wide, **half) == pytest.approx(2 * seconds(wide))
    assert seconds(narrow, **half) == seconds(narrow)


def test_tf32_convolutions_are_transposed_before_hopper():
    """A100 reads and writes everything twice more for f32, not for bf16; H100 never does."""
    moved = 10**9
    wide = convolution(dtype="f32", read_bytes=moved)
    a100, h100 = load_chip("a100-80gb"), load_chip("h100")
    untransposed = replace(a100, cuda=None)
    extra = 2 * moved / (a100.memory_bytes_per_second * a100.attainable.memory_fraction)

    assert is_transposed(wide, a100)
    assert not is_transposed(wide, h100)
    assert not is_transposed(convolution(), a100)
    assert operation_time(wide, a100).seconds == pytest.approx(
        operation_time(wide, untransposed).seconds + extra
    )


def test_half_precision_is_transposed_where_channels_come_first():
    """For units of 16 bits, from V100 on; P100 has none and reads channels first."""
    first = convolution(channels_first=True)
    depthwise = convolution(channels_first=True, shape=(32, 784, 1, 128, 9), convolution_groups=128)

    assert all(is_transposed(first, load_chip(name)) for name in ("v100", "a100-80gb", "h100"))
    assert not is_transposed(first, load_chip("p100"))
    assert not is_transposed(depthwise, load_chip("v100"))
    assert not is_transposed(convolution(), load_chip("v100"))


def test_depthwise_convolutions_run_on_f32_units():
    """A quarter of the f32 peak of 10 TFLOP/s, whatever the type."""
    work = {"flop": 10**10, "shape": (32, 784, 1, 128, 9), "convolution_groups": 128}

    for dtype in ("bf16", "f32"):
        time = seconds(convolution(dtype=dtype, **work), depthwise_fraction=0.25)
        assert time == pytest.approx(10**10 / 2.5e12)


@pytest.mark.parametrize(
    ("shape", "dtype", "use"),
    [
        ((32, 12544, 3, 64, 49), "bf16", 3 / 8),  # the first layer of ResNet-50
        ((32, 12544, 3, 64, 49), "f32", 3 / 4),
        ((32, 3136, 64, 256, 1), "bf16", 1.0),
        ((32, 3136, 20, 64, 9), "f8e4m3fn", 20 / 32),
        ((), "bf16", 1.0),
    ],
)
def test_few_channels_waste_the_vectors_they_are_padded_to(
    shape: tuple[int, ...], dtype: str, use: float
):
    """Channels come in vectors of 16 bytes, whatever of it they fill."""
    assert channel_use(shape, dtype) == pytest.approx(use)


def test_convolutions_of_few_channels_are_slower():
    """The same FLOP take 8/3 as long with 3 bf16 channels as with 64."""
    few, many = (
        operation_time(
            Operation(
                name="c", kind="convolution", dtype="bf16", flop=10**11, shape=(32, 100, c, 64, 9)
            ),
            CHIP,
        ).seconds
        for c in (3, 64)
    )

    assert few == pytest.approx(many * 8 / 3)
