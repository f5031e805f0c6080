"""Kinds of element-wise operations in a compiled program."""

import pytest

from scalejax.xla.elementwise import elementwise_kinds

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
