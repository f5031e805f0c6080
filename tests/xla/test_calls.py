"""Products and convolutions of a program are called alone as the program has them, and the kinds of
its element-wise operations are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.xla.calls import ConvolutionCall, calls_of, elementwise_kinds


def loss(image, filters, small, products):
    """A convolution with stride, one of images smaller than its window, and a product."""

    def convolved(x, y, stride):
        how = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, y, (stride,) * 2, "SAME", dimension_numbers=how)

    x = jnp.tanh(convolved(convolved(image, filters, 2), small, 2))
    return jnp.sum(jnp.tanh(convolved(x, small, 1)).reshape(4, -1) @ products)


@pytest.fixture(scope="module")
def text():
    """The compiler's text of a step with their gradients."""
    shapes = ((4, 8, 8, 3), (3, 3, 3, 16), (3, 3, 16, 16), (2 * 2 * 16, 10))
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(jax.grad(loss, (1, 2, 3))).lower(*given).compile().as_text()


def test_each_is_compiled_to_what_the_program_has(text):
    """The compiler makes the same operation of each, swapped arguments and holes included."""
    found = calls_of(text)

    assert {kind for kind, _ in found} == {None, "forward", "filter_gradient"}
    assert "rhs_reversal" in text  # so that one of them was swapped
    assert "rhs_dilate" in text
    for key, calls in found.items():
        for call, _ in calls:
            given = [jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in call.operands]
            alone = calls_of(jax.jit(call.run).lower(*given).compile().as_text() or "")
            assert [each for each, _ in alone[key]] == [call]


def test_half_the_samples_are_those_of_the_batch():
    """Of a gradient of a filter, which is summed over them, its two arguments have half as many."""
    forward = ConvolutionCall(
        operands=((4, 8, 8, 3), (3, 3, 3, 16)),
        labels="b01f_01io->b01f",
        strides=(1, 1),
        padding=((1, 1), (1, 1)),
        holes=((1, 1), (1, 1)),
        groups=(1, 1),
    )
    half, of_filter = (
        forward.with_half_the_samples(each) for each in ("forward", "filter_gradient")
    )

    assert half is not None
    assert half.operands == ((2, 8, 8, 3), (3, 3, 3, 16))
    assert np.shape(half.run(*map(jnp.ones, half.operands))) == (2, 8, 8, 16)
    assert of_filter is not None
    assert of_filter.operands == ((4, 8, 8, 1), (3, 3, 1, 16))
    assert of_filter.with_half_the_samples("filter_gradient") is None


TEXT = """HloModule a_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[8,64,32], q: f32[8]) -> f32[8,64,32] {
  %p = f32[8,64,32]{2,1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %few = f32[8]{0} exponential(%q)
  %wide = f32[8,64,32]{2,1,0} broadcast(%few), dimensions={0}
  ROOT %r = f32[8,64,32]{2,1,0} OPERATION
}

ENTRY %main (x: f32[8,64,32], y: f32[8]) -> f32[8,64,32] {
  %x = f32[8,64,32]{2,1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  ROOT %f = f32[8,64,32]{2,1,0} fusion(%x, %y), kind=kLoop, calls=%fused
}
"""


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("multiply(%p, %wide)", None),
        ("tanh(%p)", "transcendental"),
        ("transpose(%p), dimensions={0,2,1}", "transposition"),
        ("transpose(%p), dimensions={1,0,2}", None),  # rows stay whole
        ("reduce(%p, %few), dimensions={2}, to_apply=%add", "reduction"),
        ("reduce(%p, %few), dimensions={0}, to_apply=%add", None),  # rows are added to rows
    ],
)
def test_a_fusion_is_of_the_kind_of_most_of_its_elements(operation, kind):
    """The exponentials of eight numbers are nothing beside sixteen thousand."""
    assert elementwise_kinds(TEXT.replace("OPERATION", operation)).get("f") == kind
