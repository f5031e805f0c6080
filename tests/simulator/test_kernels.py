"""The closed form of a step as a framework with kernels of its own runs it: by hand, and of whole
decoders."""

from dataclasses import replace
from typing import Any

import pytest
from program_cases import program_of

from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.serialization import build
from scalejax.hardware import load_cluster
from scalejax.simulator.frameworks import XLA, Framework, Kernels, framework_named
from scalejax.simulator.frameworks.kernels import with_kernels
from scalejax.simulator.program import Collective, DeviceGroup, Loop, Operation, Program
from scalejax.xla import ProfileJob
from scalejax.xla.closed_form import program_in_closed_form

EAGER = Kernels()
FUSED = Kernels(accumulates_in_products=True, overlaps_sends=True, casts_once=True)
CLUSTER = load_cluster("dgx-h100")
STRIDES = {"data": (2, 4), "context": (4, 1), "pipeline": (2, 8)}


def fusion(name: str, read: int = 4, write: int = 4, **changes: Any) -> Operation:
    """Element-wise work of that name."""
    return Operation(
        name=name, kind="fusion", dtype="f32", read_bytes=read, write_bytes=write, **changes
    )


def product(name: str, m: int = 1, n: int = 1, k: int = 1, dtype: str = "bf16") -> Operation:
    """A matrix product of that name."""
    return Operation(name=name, kind="matmul", dtype=dtype, shape=(1, m, n, k))


def sent(name: str, kind: Any, *axes: str, payload: int = 8, is_async: bool = True) -> Operation:
    """A collective of that name over those axes."""
    group = DeviceGroup(extents=tuple(STRIDES[axis] for axis in axes), axes=axes)
    collective = Collective(name=kind, payload_bytes=payload, group=group, is_async=is_async)
    return Operation(name=name, kind="collective", dtype="bf16", collective=collective)


def done(name: str) -> Operation:
    """The wait for the collective of that name."""
    return Operation(name=f"{name}.done", kind="wait", dtype="bf16", waits_for=name)


def loop(*body: Operation | Loop, name: str = "microbatches") -> Loop:
    """What runs four times."""
    return Loop(name=name, trip_count=4, body=body)


def run_of(devices: int, *, dtype: str = "bfloat16", **layout: Any) -> ResolvedRun:
    """A small llama on so many devices, in 1F1B if it has stages."""
    config = {
        "model": {
            "name": "llama",
            "layers": 8,
            "hidden": 1024,
            "heads": 8,
            "kv_heads": 4,
            "ffn_hidden": 4096,
            "compute_dtype": dtype,
        },
        "data": {"name": "synthetic_tokens", "tokens": 2048, "vocabulary": 32000},
        "batch": {"per_device_batch": 4, "microbatches": 4},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        "layout": layout | ({"pipeline_schedule": "1f1b"} if "pipeline" in layout else {}),
    }
    return resolve(build(RunConfig, config), devices)


ONE = run_of(1)
CONTEXT = run_of(8, data=2, context=4, context_strategy="all_to_all")
CHUNKS = run_of(2, data=1, pipeline=2, pipeline_chunks=2)


def names(items: Any) -> list[str]:
    """Names of operations and loops, in order; a loop's before those in it."""
    found: list[str] = []
    for item in items:
        found += [item.name, *names(item.body)] if isinstance(item, Loop) else [item.name]
    return found


def made(*items: Operation | Loop, run: ResolvedRun = ONE, kernels: Kernels = EAGER) -> Any:
    """What is made of a step of these."""
    return with_kernels(program_of(*items), run, kernels).operations


def compiled(run: ResolvedRun, framework: Framework) -> Program:
    """The closed form of a run's step, as that framework runs it."""
    return program_in_closed_form(ProfileJob(run=run, cluster=CLUSTER, framework=framework))


# --- stacks, layouts and sums ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "forward.counter.0",
        "forward.qkv.slice",
        "accumulator.zero.vectors.3",
        "forward.stream.copy.2",
        "forward.kept.queries",
        "backward.qkv.stack",
        "backward.attention.gradient.queries.halves",
        "forward.attention.keys.transpose",
        "backward.qkv.concatenate",
        "embedding.tables.cast",
        "stage.up.cast",
        "logits.output.cast",
        "chunks.qkv.0.take",
        "forward.qkv.slice.bubble",
    ],
)
def test_what_xla_does_with_stacks_and_layouts_is_dropped(name: str):
    """In loops as well; products and what else a step needs stay."""
    rest = (
        product("forward.qkv"),
        fusion("forward.attention.norm.apply"),
        fusion("update.qkv.cast"),
    )

    assert made(fusion(name), *rest) == rest
    assert made(loop(fusion(name), *rest)) == (loop(*rest),)


def test_stages_exchange_no_chunks():
    """Nor wait for them; each holds its layers. Other sends stay."""
    send = sent("pipeline.send.forward.0", "collective_permute", "pipeline")
    chunk = sent("chunks.qkv.0", "collective_permute", "pipeline")

    assert made(chunk, send, done(chunk.name), done(send.name)) == (send, done(send.name))


def test_products_add_to_sums_of_gradients_where_they_can():
    """Else a kernel does, of each matrix; sums of vectors are of no product."""
    added = (fusion("embedding.gradient.accumulate"), fusion("backward.up.sums.add.bubble"))
    vectors = fusion("embedding.gradient.accumulate.vectors.0")

    assert made(*added, vectors) == (*added, vectors)
    assert made(*added, vectors, kernels=FUSED) == (vectors,)


def test_compiled_steps_are_left_alone():
    """Whose operations have other names."""
    step = replace(program_of(fusion("forward.qkv.slice")), backend="cuda")

    assert with_kernels(step, ONE, FUSED) == step


# --- sums over context ----------------------------------------------------------------------


def test_gradients_are_summed_over_data_and_context_at_once():
    """Not over context for every microbatch; keys still go where they belong."""
    home = sent("backward.attention.gradient.home", "reduce_scatter", "context")
    summed = sent("backward.sum_qkv", "all_reduce", "context")
    of_stage = sent("update.sum.qkv.of_stage", "all_reduce", "context")
    over_data = sent("update.sum.qkv", "reduce_scatter", "data")
    waits = [done(each.name) for each in (home, summed, of_stage, over_data)]

    found = made(
        loop(home, summed, waits[0], waits[1]), of_stage, waits[2], over_data, waits[3], run=CONTEXT
    )

    both = sent("update.sum.qkv", "reduce_scatter", "data", "context")
    assert found == (loop(home, waits[0]), both, waits[3])


def test_gradients_that_are_not_summed_over_data_are_over_context():
    """As in XLA's step."""
    summed = sent("backward.sum_qkv", "all_reduce", "context")
    step = (loop(summed, done(summed.name)),)

    assert made(*step, run=CONTEXT) == step


# --- rings ----------------------------------------------------------------------------------


def test_keys_and_values_go_around_a_ring_beside_attention():
    """To 3 others, in place of exchanges of heads with all: queries and results stay."""
    own = [
        sent(f"forward.attention.{name}", "all_to_all", "context", payload=10)
        for name in ("queries", "keys", "values")
    ]
    result = sent("forward.attention.result", "all_to_all", "context", payload=10)
    attention = Operation(name="forward.attention", kind="attention", dtype="bf16")

    found = made(
        *own, *(done(each.name) for each in own), attention, result, done(result.name), run=CONTEXT
    )

    ring = [
        sent(each.name, "collective_permute", "context", payload=30)  # to 3 others
        for each in own[1:]
    ]
    assert found[:3] == (*ring, attention)
    assert [each.waits_for for each in found[3:]] == [each.name for each in ring]


def test_both_halves_of_a_step_of_a_ring_are_one_kernel():
    """Half of the queries over all keys that arrived, with what both halves computed and moved."""

    def half(name: str) -> Operation:
        return Operation(
            name=name, kind="attention", dtype="bf16", shape=(8, 64, 64, 16), flop=5, read_bytes=3
        )

    step = loop(half("forward.step.0"), fusion("forward.step.queries"), half("forward.step.1"))
    own = replace(half("forward.own"), flop=9)
    ring = run_of(2, context=2, context_strategy="ring")

    found = made(own, step, run=ring, kernels=FUSED)

    whole = replace(half("forward.step"), flop=10, read_bytes=6, shape=(8, 64, 128, 16))
    assert found == (own, loop(whole, fusion("forward.step.queries")))


def test_gradients_of_keys_go_home_beside_attention():
    """Those that are made by it, and in XLA's step are sent after it."""
    home = [
        sent(f"backward.attention.gradient.home.{name}", "all_to_all", "context", payload=10)
        for name in ("keys", "values", "queries")
    ]
    attention = Operation(name="backward.attention.gradient", kind="attention", dtype="bf16")
    after = product("backward.qkv.gradient")

    found = made(loop(attention, *home, after, *(done(each.name) for each in home)), run=CONTEXT)[
        0
    ].body

    keys, values = (each.name for each in home[:2])
    assert names(found) == [
        keys, values, attention.name, f"{keys}.done", f"{values}.done", after.name,
    ]  # fmt: skip
    assert {each.collective.payload_bytes for each in found[:2]} == {30}


def test_without_a_context_axis_all_to_alls_stay():
    """Those of experts, say."""
    step = (sent("forward.attention.keys", "all_to_all", "context"),)

    assert made(*step) == step


# --- sends of stages ------------------------------------------------------------------------


def test_stages_of_several_chunks_send_while_they_compute():
    """Started first and waited for last; in the bubble, and with one chunk, nothing is beside."""
    send = sent("pipeline.send.backward.0", "collective_permute", "pipeline", is_async=False)
    step = (loop(product("up"), send), loop(send, name="microbatches.bubble"))

    chunked = made(*step, run=CHUNKS, kernels=FUSED)
    beside = sent(send.name, "collective_permute", "pipeline")

    assert chunked[0].body[:2] == (beside, product("up"))
    assert [each.waits_for for each in chunked[0].body[2:]] == [send.name]
    assert chunked[1] == step[1]
    assert made(*step, run=ONE, kernels=FUSED) == step
    assert made(*step, run=CHUNKS, kernels=EAGER) == step


# --- casts ----------------------------------------------------------------------------------


def narrow(name: str, read: int, write: int) -> Operation:
    """Work on elements in fp8."""
    return replace(fusion(name, read, write), dtype="f8e4m3fn")


def test_activations_are_cast_once_and_matrices_once_a_step():
    """By hand, of [8, 2] x [2, 4]: 16 activations of 2 bytes are read and twice 16 of 1 written, of
    24 operands that XLA casts."""
    down = product("forward.down", 8, 4, 2, "f8e4m3fn")
    step = (
        narrow("forward.down.amax", 24, 8),
        narrow("forward.down.cast", 48, 24),
        down,
        narrow("backward.down.gradient.cast", 48, 24),
        product("backward.down.gradient", 4, 2, 8, "f8e4m3fn"),
        fusion("update.down.cast"),
    )

    found = made(*step, kernels=FUSED)

    assert found == (
        narrow("forward.down.amax", 32, 8),
        narrow("forward.down.cast", 32, 32),
        down,
        *step[4:],
    )
    assert made(*step, kernels=EAGER) == step


def test_what_a_norm_makes_is_cast_by_it_if_the_scale_is_known():
    """With delayed scaling; else its largest value must be found first."""
    qkv = product("forward.qkv.bubble", 8, 4, 2, "f8e4m3fn")
    cast = narrow("forward.qkv.cast.bubble", 48, 24)
    found = narrow("forward.qkv.amax.bubble", 24, 8)

    assert made(cast, qkv, kernels=FUSED) == (qkv,)
    assert names(made(found, cast, qkv, kernels=FUSED)) == [found.name, cast.name, qkv.name]


def test_grouped_products_cast_their_activations():
    """Of a gradient of the input these are its columns; that of a matrix casts nothing."""
    given = replace(product("experts.up.input", 8, 4, 2, "f8e4m3fn"), grouped_pass="input_gradient")
    matrix = replace(product("experts.up.matrix", dtype="f8e4m3fn"), grouped_pass="weight_gradient")

    found = made(
        narrow("experts.up.input.cast", 48, 40), given,
        narrow("experts.up.matrix.cast", 48, 40), matrix,
        kernels=FUSED,
    )  # fmt: skip

    # 32 activations of 40 operands
    assert found == (narrow("experts.up.input.cast", 64, 64), given, matrix)


# --- whole decoders -------------------------------------------------------------------------


IN_1F1B = replace(XLA, schedule="1f1b")
"""XLA, with the pipelines that closed forms know."""


@pytest.mark.parametrize(
    "layout",
    [
        {"devices": 1},
        {"devices": 4, "data": 2, "tensor": 2, "zero_stage": 1, "sequence_parallel": True},
        {"devices": 8, "data": 2, "context": 2, "tensor": 2, "context_strategy": "ring"},
        {"devices": 4, "data": 2, "pipeline": 2, "pipeline_chunks": 2},
        {"devices": 8, "context": 4, "pipeline": 2, "context_strategy": "all_to_all"},
    ],
)
@pytest.mark.parametrize("framework", ["nanotron-2025", "megatron-core-2024"])
def test_a_decoder_computes_what_it_did(framework: str, layout: dict[str, Any]):
    """The same products and attention, of stages that are dealt alike; less memory is moved, and
    every wait has its collective."""
    run, named = run_of(**layout), framework_named(framework)
    dealt = {"layers_of_stages": named.layers_of_stages}
    alike = replace(IN_1F1B, closed_form=named.closed_form, **dealt)
    ours, theirs = compiled(run, alike), compiled(run, named)

    assert theirs.flop == ours.flop
    moved = [
        sum(times * (each.read_bytes + each.write_bytes) for each, times in program.walk())
        for program in (ours, theirs)
    ]
    assert moved[1] < moved[0]
    started = {each.name for each, _ in theirs.walk() if each.collective is not None}
    waited = [each.waits_for for each, _ in theirs.walk() if each.waits_for]
    assert set(waited) <= started
    assert not any("slice" in each.name.split(".") for each, _ in theirs.walk())


def test_a_decoder_sums_its_gradients_once_a_step():
    """Over data and context: by hand, 4 bytes of each parameter of 8 blocks and both tables, and no
    sum of matrices for each microbatch."""
    run = run_of(4, data=2, context=2, context_strategy="ring")
    block = 1024 * (1024 + 2 * 512) + 1024 * 1024 + 3 * 1024 * 4096

    summed = [
        (each.collective.group.axes, times * each.collective.payload_bytes)
        for each, times in compiled(run, framework_named("nanotron-2025")).walk()
        if each.collective is not None and each.collective.name == "all_reduce"
    ]

    total = sum(size for axes, size in summed if axes == ("data", "context"))
    assert total == pytest.approx(4 * (8 * block + 2 * 32000 * 1024), rel=1e-3)
    assert {axes for axes, _ in summed} == {("data", "context")}


def test_gradients_are_as_wide_as_their_framework_sums_them():
    """Megatron-Core in float32, NeMo's recipes in bfloat16."""
    run = run_of(2, data=2)

    sums = [
        compiled(run, framework_named(name)).collective_bytes("all_reduce")
        for name in ("megatron-core-2024", "nemo-2025")
    ]

    assert sums[0] == pytest.approx(2 * sums[1], rel=1e-3)


def test_stages_over_context_send_keys_around_a_ring():
    """By hand, of a stage of 4 layers and 4 microbatches: keys and values of 512 tokens of 4 heads
    of 128 elements in 2 bytes, to 3 others, forward and home; the bubble sends as many as one
    microbatch more."""
    run = run_of(8, context=4, pipeline=2, context_strategy="all_to_all")

    theirs = compiled(run, framework_named("megatron-core-2024"))

    over_context = {
        each.collective.name
        for each, _ in theirs.walk()
        if each.collective is not None and each.collective.group.axes == ("context",)
        and ".attention." in each.name
    }  # fmt: skip
    assert over_context == {"collective_permute"}
    around = sum(
        times * each.collective.payload_bytes
        for each, times in theirs.walk()
        if each.collective is not None and ".attention." in each.name
    )
    assert around == (4 + 1) * 4 * 2 * 2 * 3 * 512 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("dtype", "casts"),
    [
        ("float8", {"qkv", "projection", "up", "down"}),
        ("float8_delayed", {"projection", "down"}),
    ],
)
def test_a_decoder_in_fp8_casts_activations_alone(dtype: str, casts: set[str]):
    """Forward each once, but what a norm casts; no operands of gradients of matrices."""
    theirs = compiled(run_of(1, dtype=dtype), framework_named("megatron-core-2024"))

    cast = [
        each.name.split(".")
        for each, _ in theirs.walk()
        if each.name.endswith(".cast") and each.dtype.startswith("f8")
    ]
    assert {name for direction, name, *_ in cast if direction == "forward"} == casts
    assert not any(part[-2] == "gradient" for part in cast)
    assert {part[-2] for part in cast if part[0] == "backward"} == {"input_gradient"}
