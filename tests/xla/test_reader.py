"""Real programs of both compiler generations, read against what the program was written to do."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from scalejax.config.moe import BlocksAtEvenLoad
from scalejax.core.errors import ProfileError
from scalejax.simulator.program import Collective, ExpertBlocks, Loop, Operation
from scalejax.xla import hlo
from scalejax.xla.hlo import Array, Instruction, Module, arrays, parse_shape
from scalejax.xla.reader import read_program

GOLDEN = Path(__file__).parents[1] / "golden"
SCANNED_MESH = (("data", 4), ("tensor", 8))
COLLECTIVES_MESH = (("data", 2), ("fsdp", 4), ("tensor", 2))

both_generations = pytest.mark.parametrize("version", ["0.10", "0.12"])


def scanned(version: str) -> tuple[Operation | Loop, ...]:
    """Six scanned layers, each two products and an all-reduce forward."""
    return read_program((GOLDEN / f"scanned_{version}.hlo").read_text(), SCANNED_MESH)


def every_kind(version: str) -> tuple[Operation | Loop, ...]:
    """Every kind of collective, in the order in which the source asks for them."""
    return read_program((GOLDEN / f"collectives_{version}.hlo").read_text(), COLLECTIVES_MESH)


def collectives(items: Iterable[Operation | Loop]) -> list[tuple[Operation, Collective]]:
    """The collectives at the top level, each with the operation that it is."""
    return [
        (item, item.collective)
        for item in items
        if isinstance(item, Operation) and item.collective is not None
    ]


@both_generations
def test_a_scan_is_a_loop_with_its_length(version):
    """Forward: 2 products per layer. Backward: 1 recomputed, 4 for gradients."""
    loops = [item for item in scanned(version) if isinstance(item, Loop)]

    product = 2 * 2048 * 512 * 1024  # 64 x 128 rows / 4, 4096 / 8, 1024
    assert [loop.trip_count for loop in loops] == [6, 6]
    assert [
        sum(item.flop for item in loop.body if isinstance(item, Operation)) for loop in loops
    ] == [2 * product, 5 * product]


@both_generations
def test_a_layer_of_stacked_parameters_is_read_as_one_layer(version):
    """No operation of a loop reads or writes as much as the stack of six holds."""
    stack = 6 * 1024 * 512 * 2
    loops = [item for item in scanned(version) if isinstance(item, Loop)]
    updates = [
        item
        for loop in loops
        for item in loop.body
        if isinstance(item, Operation) and item.kind not in ("matmul", "collective", "wait")
    ]

    slices = [item for item in updates if item.write_bytes == stack // 6]
    assert slices
    assert all(item.read_bytes < stack for item in slices)
    assert max(item.write_bytes for item in updates) == 16 * 128 * 1024 * 2  # activations


@both_generations
def test_tensor_and_data_axes_of_collectives_are_told_apart(version):
    """Activations are summed over tensor, gradients and the loss over data."""
    forward, backward = (item for item in scanned(version) if isinstance(item, Loop))

    ((_, activations),) = collectives(forward.body)
    axes_backward = [collective.group.axes for _, collective in collectives(backward.body)]
    ((_, loss),) = collectives(scanned(version))

    assert activations.group.axes == ("tensor",)
    assert sorted(axes_backward) == [("data",), ("tensor",)]
    assert (loss.payload_bytes, loss.group.extents) == (4, ((4, 8),))
    assert (activations.payload_bytes, activations.group.extents) == (
        16 * 128 * 1024 * 2,
        ((8, 1),),
    )


def test_copies_to_the_host_and_back_have_their_direction_and_bytes():
    """As XLA for GPUs writes an activation offloaded in a loop, of whose stack a slice is copied,
    and optimizer state (its last copy made synchronous). A CPU's memory is that of the host."""
    text = (GOLDEN / "offloaded.hlo").read_text()
    program = read_program(text, ())
    copies = collectives(program)
    waits = [item for item in program if getattr(item, "waits_for", None)]

    assert [(each.name, each.payload_bytes, each.is_async) for _, each in copies] == [
        ("copy_to_host", 4 * 16, True),
        ("copy_from_host", 4 * 16, True),
        ("copy_from_host", 4 * 64, True),
        ("copy_to_host", 4 * 64, False),
    ]
    assert len(waits) == 3
    assert not collectives(read_program(text, (), has_host_memory=False))


@both_generations
def test_every_asynchronous_collective_has_its_wait_behind_it(version):
    """What overlaps is what stands between a start and its wait."""
    found = 0
    for items in (scanned(version), *(i.body for i in scanned(version) if isinstance(i, Loop))):
        names = [item.name for item in items]
        waits = {i.waits_for: i.name for i in items if isinstance(i, Operation) and i.waits_for}
        for operation, collective in collectives(items):
            if collective.is_async:
                assert names.index(operation.name) < names.index(waits[operation.name]) - 1
                found += 1
            else:
                assert operation.name not in waits
    assert found >= 3


@both_generations
def test_every_kind_of_collective_has_its_payload_and_group(version):
    """A 1024 x 1024 f32 array each; the full buffer is the payload."""
    mebibytes_4 = 1024 * 1024 * 4
    outer_and_inner = (((2, 8), (2, 1)), ("data", "tensor"))
    expected = [
        ("all_to_all", ((4, 2),), ("fsdp",), False),
        ("collective_permute", ((2, 1),), ("tensor",), False),
        ("reduce_scatter", *outer_and_inner, False),
        ("all_gather", *outer_and_inner, False),
        ("all_reduce", ((8, 1),), ("fsdp", "tensor"), True),
        ("all_reduce", ((2, 8),), ("data",), False),  # of the costlier branch
    ]

    found = collectives(every_kind(version))

    assert [(c.name, c.group.extents, c.group.axes, c.is_async) for _, c in found] == expected
    assert {collective.payload_bytes for _, collective in found} == {mebibytes_4}
    assert [(op.read_bytes, op.write_bytes) for op, _ in found[2:4]] == [
        (mebibytes_4, mebibytes_4 // 4),
        (mebibytes_4 // 4, mebibytes_4),
    ]


@both_generations
def test_nested_loops_multiply(version):
    """3 x 5 products in the nested loop, 7 in the other, 2 outside, 1 in the branch."""
    operations = every_kind(version)
    product = 2 * 1024**3

    outer = operations[-1]
    assert isinstance(outer, Loop)
    inner = next(item for item in outer.body if isinstance(item, Loop))
    assert (outer.trip_count, inner.trip_count) == (3, 5)
    total = sum(operation.flop * times for operation, times in walk(operations, 1))
    assert total == (3 * 5 + 7 + 2 + 1) * product


def walk(items: Iterable[Operation | Loop], times: int) -> Iterator[tuple[Operation, int]]:
    """Every operation with the number of times it runs."""
    for item in items:
        if isinstance(item, Loop):
            yield from walk(item.body, times * item.trip_count)
        else:
            yield item, times


@both_generations
def test_operations_say_which_line_asked_for_them(version):
    """The line of the user's file, through the tables of stack frames."""
    first = every_kind(version)[0]

    assert isinstance(first, Operation)
    assert (first.kind, first.source) == ("matmul", "coll.py:16")


@both_generations
def test_names_are_unique(version):
    """Waits and reports refer to operations by name."""
    names: list[str] = []

    def collect(items: Iterable[Operation | Loop]) -> None:
        for item in items:
            names.append(item.name)
            if isinstance(item, Loop):
                collect(item.body)

    collect(scanned(version))
    assert len(names) == len(set(names))


def test_generic_asynchronous_wrappers_are_seen_through():
    """`async-start` of a computation that holds a collective is that collective."""
    text = """HloModule m, num_partitions=8
%wrapped (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}
ENTRY %main (a: f32[64]) -> f32[8] {
  %a = f32[64]{0} parameter(0)
  %start = ((f32[64]{0}), f32[8]{0}, u32[]) async-start(%a), calls=%wrapped
  %b = f32[64]{0} negate(%a)
  %step = ((f32[64]{0}), f32[8]{0}, u32[]) async-update(%start)
  ROOT %done = f32[8]{0} async-done(%step)
}
"""
    operations = read_program(text, (("data", 8),))

    ((start, collective),) = collectives(operations)
    assert (collective.name, collective.payload_bytes, collective.is_async) == (
        "reduce_scatter",
        256,
        True,
    )
    _, negation, done = (item for item in operations if isinstance(item, Operation))
    assert negation.kind == "fusion"
    assert (done.kind, done.waits_for) == ("wait", start.name)


def test_a_loop_of_unknown_length_is_refused():
    """A guess would be a wrong prediction; the source line tells what to change."""
    text = """HloModule m
%body (p: (s32[])) -> (s32[]) {
  ROOT %p = (s32[]) parameter(0)
}
ENTRY %main (a: (s32[])) -> (s32[]) {
  %a = (s32[]) parameter(0)
  ROOT %w = (s32[]) while(%a), condition=%c, body=%body, metadata={source_file="/x/y.py" source_line=7}
}
"""  # noqa: E501  one instruction is one line
    with pytest.raises(ProfileError, match=r"'w' \(y\.py:7\) runs an unknown number of times"):
        read_program(text, (("data", 1),))


def test_a_loop_over_blocks_of_experts_is_as_long_as_at_even_loads():
    """Its length follows the loads; its name scope says what it is where they are even."""
    scope = BlocksAtEvenLoad(blocks=6, experts=2, rows=64, experts_per_token=3).scope
    text = f"""HloModule m
%body (p: (s32[])) -> (s32[]) {{
  ROOT %p = (s32[]) parameter(0)
}}
ENTRY %main (a: (s32[])) -> (s32[]) {{
  %a = (s32[]) parameter(0)
  ROOT %w = (s32[]) while(%a), condition=%c, body=%body, metadata={{op_name="jit(step)/{scope}/while"}}
}}
"""  # noqa: E501  one instruction is one line
    (loop,) = read_program(text, ())

    assert isinstance(loop, Loop)
    blocks = ExpertBlocks(experts=2, rows=64, experts_per_token=3)
    assert (loop.trip_count, loop.expert_blocks) == (6, blocks)


def test_the_costlier_branch_of_a_conditional_is_taken():
    """Whichever stands first: the slowest device sets the pace."""
    text = """HloModule m
%cheap (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %small = f32[8]{0} negate(%p)
}
%dear (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %large = f32[8,8]{1,0} broadcast(%q), dimensions={0}
  ROOT %row = f32[8]{0} slice(%large), slice={[0:1], [0:8]}
}
ENTRY %main (a: f32[8], i: s32[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = f32[8]{0} conditional(%i, %a, %a), branch_computations={ORDER}
}
"""
    for order in ("%cheap, %dear", "%dear, %cheap"):
        operations = read_program(text.replace("ORDER", order), (("data", 1),))
        assert [item.name for item in operations] == ["large", "row"]


def test_a_library_of_others_is_not_where_the_user_asked():
    """The innermost frame outside installed packages; callers are printed one too high."""
    text = """HloModule m

FileNames
1 "/home/user/train.py"
2 "/usr/lib/site-packages/flax/linear.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=1}
2 {file_name_id=1 function_name_id=2 line=50 end_line=50 column=1 end_column=1}
3 {file_name_id=2 function_name_id=3 line=700 end_line=700 column=1 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%a), metadata={op_name="jit(f)/neg" stack_frame_id=3}
}
"""
    (negation,) = read_program(text, (("data", 1),))

    assert isinstance(negation, Operation)
    assert negation.source == "train.py:50"


@pytest.mark.parametrize(
    ("innermost", "expected"),
    [
        ("/venv/site-packages/scalejax/models/gpt.py", "gpt.py:9"),
        ("/venv/site-packages/scalejax_plugins/gpt.py", "step.py:7"),
        ("/venv/site-packages/flax/linear.py", "step.py:7"),
        ("<frozen runpy>", "step.py:7"),
    ],
)
def test_scalejax_is_where_the_user_asked_wherever_it_is_installed(
    innermost: str, expected: str, monkeypatch: pytest.MonkeyPatch
):
    """Its networks and its step count; its worker, and how Python starts that, do not."""
    package = Path("/venv/site-packages/scalejax")
    monkeypatch.setattr(hlo, "_PACKAGE", package)
    monkeypatch.setattr(hlo, "_WORKER", package / "profile" / "worker.py")
    paths = ["<frozen runpy>", f"{package}/profile/worker.py", f"{package}/step.py", innermost]
    lines = enumerate(zip(paths, (88, 50, 7, 9), strict=True), start=1)
    frames = {n: (f"{path}:{line}", n - 1) for n, (path, line) in lines}
    negate = Instruction(
        name="n", shape=(), opcode="negate", operands=(), literal="", is_root=True,
        rest="metadata={stack_frame_id=4}",
    )  # fmt: skip

    module = Module(entry="", computations={}, partition_count=1, frames=frames)

    assert module.source(negate) == expected


def test_text_that_is_no_program_is_refused():
    """A compiler that speaks another language is named, not guessed at."""
    with pytest.raises(ProfileError, match="no entry computation"):
        read_program("module @jit_f {}", (("data", 1),))


def test_shapes_nest_and_lose_their_layouts():
    """Tiles and memory spaces in a layout hold brackets of their own."""
    shape = parse_shape("((f32[2,3]{1,0:T(8,128)S(1)}, token[]), /*index=1*/pred[], s4[5]{0})")

    assert isinstance(shape, tuple)
    assert len(shape) == 3
    assert [array.dims for array in arrays(shape)] == [(2, 3), (), (), (5,)]
    assert [array.bytes for array in arrays(shape)] == [24, 0, 1, 3]
    assert parse_shape("f32[8]{0:T(128)S(1)}") == Array("f32", (8,))
