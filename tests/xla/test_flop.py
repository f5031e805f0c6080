"""FLOP by kind of call, against counts by hand; the lines are XLA's own."""

import pytest

from scalejax.xla.flop import FlopCount, count_flop
from scalejax.xla.hlo import parse_module


def counted(line: str, *operands: str) -> FlopCount:
    """What is counted for one line of a program, its operands having these shapes."""
    found = uncounted_or_counted(line, *operands)
    assert found is not None
    return found


def uncounted_or_counted(line: str, *operands: str) -> FlopCount | None:
    """The same, or None for a line that multiplies nothing."""
    parameters = [f"  %{name} = {shape} parameter({i})" for i, (name, shape) in enumerate(
        operand.split(": ") for operand in operands
    )]  # fmt: skip
    text = "HloModule m\n\nENTRY %main () -> f32[] {\n" + "\n".join([*parameters, line]) + "\n}\n"
    entry = parse_module(text).computations["main"]
    instruction = list(entry.instructions.values())[-1]
    return count_flop(instruction, entry.operand_shapes(instruction))


def test_a_batched_dot_is_two_operations_per_product():
    """2 x 32 x 2048 x 2048 x 128 for the scores of 32 heads."""
    found = counted(
        "  %dot.1 = bf16[32,2048,2048]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}",
        "a: bf16[32,2048,128]{2,1,0}",
        "b: bf16[32,2048,128]{2,1,0}",
    )

    assert found.shape == (32, 2048, 2048, 128)
    assert found.flop == 2 * 32 * 2048 * 2048 * 128


def test_a_cublas_call_says_its_dimensions_in_its_settings():
    """The gradient of a weight: both operands are summed over their first dimension."""
    found = counted(
        "  %custom-call.33 = (f32[256,1000]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{'
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],'
        '"rhs_batch_dimensions":[]}}}',
        "a: f32[32,256]{1,0}",
        "b: f32[32,1000]{1,0}",
    )

    assert found.shape == (1, 256, 1000, 32)
    assert (found.kind, found.dtype, found.flop) == ("matmul", "f32", 2 * 256 * 1000 * 32)


@pytest.mark.parametrize(
    ("target", "flop"),
    [("cusolver_geqrf_ffi", 3 * 4 * 512**3 // 3), ("lapack_sorgqr_ffi", 3 * 4 * 512**3 // 3)],
)
def test_a_qr_factorisation_is_four_thirds_of_a_cube(target, flop):
    """Three square matrices of side 512: 4/3 n^3 each for the reflectors, and again for Q. In full
    float32, which the solvers keep."""
    found = counted(
        "  %custom-call.2 = (f32[3,512,512]{1,2,0}, f32[3,512]{1,0}) custom-call(%a), "
        f'custom_call_target="{target}", api_version=API_VERSION_TYPED_FFI',
        "a: f32[3,512,512]{1,2,0}",
    )

    assert (found.kind, found.dtype, found.flop) == ("matmul", "f32_highest", flop)


def test_a_tall_qr_factorisation():
    """LAPACK's count for 300 rows and 200 columns: 2 m n^2 - 2 n^3 / 3 = 18,666,667."""
    found = counted(
        "  %custom-call.2 = (f32[300,200]{0,1}, f32[200]{0}) custom-call(%a), "
        'custom_call_target="cusolver_geqrf_ffi"',
        "a: f32[300,200]{0,1}",
    )

    assert found.flop == pytest.approx(18_666_667, abs=1)


FORWARD_FLOP = 2 * 32 * 28 * 28 * 9 * 64 * 128
"""A 3x3 convolution of stride 2, 64 to 128 channels, 32 samples of 56 x 56."""
WINDOW = "window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f"


@pytest.mark.parametrize(
    ("target", "result", "first", "second", "of"),
    [
        ("convForward", "32,28,28,128", "32,56,56,64", "128,3,3,64", "forward"),
        ("convBackwardInput", "32,56,56,64", "32,28,28,128", "128,3,3,64", "input_gradient"),
        ("convBackwardFilter", "128,3,3,64", "32,56,56,64", "32,28,28,128", "filter_gradient"),
    ],
)
def test_a_cudnn_convolution_counts_the_same_in_every_pass(target, result, first, second, of):
    """Forward, gradient of the input, gradient of the filter: the same products, rearranged."""
    found = counted(
        f"  %conv = (bf16[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), {WINDOW}, "
        f'custom_call_target="__cudnn${target}"',
        f"a: bf16[{first}]{{3,2,1,0}}",
        f"b: bf16[{second}]{{3,2,1,0}}",
    )

    assert (found.kind, found.dtype, found.flop) == ("convolution", "bf16", FORWARD_FLOP)
    assert found.shape == (32, 28 * 28, 64, 128, 9)
    assert (found.convolution_pass, found.convolution_groups) == (of, 1)


def test_groups_divide_the_input_channels_of_a_cudnn_convolution():
    """A kernel of 4 groups holds 128 / 4 input channels."""
    found = counted(
        "  %conv = (bf16[256,14,14,128]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b), "
        "window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, "
        'feature_group_count=4, custom_call_target="__cudnn$convForward"',
        "a: bf16[256,28,28,128]{3,2,1,0}",
        "b: bf16[128,3,3,32]{3,2,1,0}",
    )

    assert found.flop == 2 * 256 * 14 * 14 * 9 * 32 * 128
    assert found.convolution_groups == 4


@pytest.mark.parametrize(
    ("result", "first", "second", "window", "of"),
    [
        pytest.param(
            "32,28,28,128", "32,56,56,64", "3,3,64,128",
            "size=3x3 stride=2x2 pad=1_1x1_1", "forward", id="forward",
        ),
        pytest.param(
            "32,56,56,64", "32,28,28,128", "3,3,128,64",
            "size=3x3 pad=1_2x1_2 lhs_dilate=2x2", "input_gradient", id="input",
        ),
        pytest.param(
            "64,3,3,128", "64,56,56,32", "28,28,32,128",
            "size=28x28 pad=1_0x1_0 rhs_dilate=2x2", "filter_gradient", id="filter",
        ),
    ],
)  # fmt: skip
def test_a_cpu_convolution_counts_no_holes_of_dilation(result, first, second, window, of):
    """XLA's own notation writes gradients as dilated convolutions: the products stay the same."""
    found = counted(
        f"  %conv = f32[{result}]{{3,2,1,0}} convolution(%a, %b), window={{{window}}}, "
        "dim_labels=b01f_01io->b01f",
        f"a: f32[{first}]{{3,2,1,0}}",
        f"b: f32[{second}]{{3,2,1,0}}",
    )

    assert found.flop == FORWARD_FLOP
    assert found.shape == (32, 28 * 28, 64, 128, 9)
    assert found.convolution_pass == of


def test_an_input_gradient_counts_no_holes_of_any_stride():
    """Two windows of 2, 3 apart in a row of 5: 2 x 2 pairs each way, as in the forward pass."""
    found = counted(
        "  %conv = f32[32,5,5,8]{3,2,1,0} convolution(%a, %b), "
        "window={size=2x2 pad=1_1x1_1 lhs_dilate=3x3}, dim_labels=b01f_01io->b01f",
        "a: f32[32,2,2,16]{3,2,1,0}",
        "b: f32[2,2,16,8]{3,2,1,0}",
    )

    assert found.flop == 2 * 32 * 8 * 16 * 4 * 4
    assert found.convolution_pass == "input_gradient"


def test_the_filter_gradient_of_a_grouped_cpu_convolution_counts_its_groups_once():
    """XLA spreads 4 groups over a dilated third dimension, of which a quarter is no hole."""
    found = counted(
        "  %conv = f32[32,3,3,4,32]{4,3,2,1,0} convolution(%a, %b), window={size=14x14x4 "
        "stride=1x1x3 pad=1_0x1_0x0_0 lhs_dilate=1x1x4 rhs_dilate=2x2x1}, "
        "dim_labels=b012f_012io->b012f",
        "a: f32[32,28,28,4,32]{4,3,2,1,0}",
        "b: f32[14,14,4,32,32]{4,3,2,1,0}",
    )

    # 32 samples, 14 x 14 places, 9 window positions, 128 outputs of 128 / 4 inputs each
    assert found.flop == 2 * 32 * 14 * 14 * 9 * 32 * 128


def test_other_instructions_multiply_nothing():
    """A sum of two arrays is bound by bytes."""
    assert uncounted_or_counted("  %add.1 = f32[8]{0} add(%a, %a)", "a: f32[8]{0}") is None


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("dot(%a, %b), {dims}", "f32"),
        ("dot(%a, %b), {dims}, operand_precision={{highest,highest}}", "f32_highest"),
        (
            'custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
            'backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{'
            '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}},'
            '"precision_config":{{"operand_precision":["HIGHEST","HIGHEST"]}}}}}}',
            "f32_highest",
        ),
    ],
)
def test_full_precision_is_told_from_tf32(line, dtype):
    """`jnp.dot(..., precision="highest")` may not run on tf32 units, seven times as fast."""
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    found = counted(
        "  %dot.1 = f32[8,8]{1,0} " + line.format(dims=dims),
        "a: f32[8,8]{1,0}",
        "b: f32[8,8]{1,0}",
    )

    assert found.dtype == dtype


def attention(target: str, mask: str, window: int = 0) -> FlopCount:
    """What is counted for a call of cuDNN's fused attention: 2 samples, 8 heads, 1024 tokens."""
    return counted(
        "  %fmha = (bf16[2,8,1024,128]{3,1,2,0}, f32[2,8,1024]{2,1,0}, u8[0]{0}) "
        f'custom-call(%q, %k, %v), custom_call_target="__cudnn$fmha{target}", '
        'backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": '
        '{"element_type": "BF16", "dimensions": ["2", "8", "1024", "1024"]}, '
        f'"mask_type": "{mask}", "sliding_window_length": {window}}}}}',
        *(f"{name}: bf16[2,1024,8,128]{{3,2,1,0}}" for name in "qkv"),
    )


def test_fused_attention_is_two_products_forward():
    """Scores and mixture: 2 x 2 x 16 x 1024 x 1024 x 128, of which a causal mask leaves half."""
    whole, causal = (attention("Softmax", mask) for mask in ("NO_MASK", "CAUSAL"))

    assert (whole.kind, whole.dtype) == ("attention", "bf16")
    assert whole.shape == (16, 1024, 1024, 128)
    assert whole.flop == 4 * 16 * 1024 * 1024 * 128
    assert causal.flop == whole.flop // 2


@pytest.mark.parametrize("target", ["Softmax", "SoftmaxBackward"])
def test_fused_attention_skips_what_lies_before_a_window(target):
    """A triangle of 1024 less that of the 768 before a window of 256."""
    causal, windowed = (attention(target, "CAUSAL", window) for window in (0, 256))

    assert windowed.flop * 1024**2 == causal.flop * (1024**2 - 768**2)


def test_fused_attention_is_five_products_backward():
    """It makes the scores again, and has four gradients."""
    forward = attention("Softmax", "CAUSAL")

    assert attention("SoftmaxBackward", "CAUSAL").flop == 5 * forward.flop // 2
