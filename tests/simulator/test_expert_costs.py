"""What it costs to route: grouped products, uneven experts, dispatch of tokens; by hand, bounds."""

import math
from dataclasses import replace

import pytest
from hardware_cases import CHIP, cluster_of
from hypothesis import given
from hypothesis import strategies as st

from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.errors import ConfigError, UnknownHardware
from scalejax.core.serialization import JsonValue, build
from scalejax.hardware import (
    Chip,
    DispatchLibrary,
    DispatchRates,
    RunConditions,
    Site,
    chip_names,
    grouped_matmul_names,
    load_chip,
    load_cluster,
    load_dispatch,
    load_grouped_matmul_rates,
    with_conditions,
)
from scalejax.simulator.collectives import find_route
from scalejax.simulator.collectives.expert_dispatch import dispatch_seconds, expected_reach
from scalejax.simulator.collectives.placement import collective_seconds
from scalejax.simulator.comparison import compare
from scalejax.simulator.expert_load import EVEN_LOADS, device_load_factor, with_expert_load
from scalejax.simulator.explain import explain
from scalejax.simulator.frameworks import FRAMEWORKS, Software
from scalejax.simulator.frameworks.grouped_experts import Capacity, with_grouped_experts
from scalejax.simulator.operations.grouped_matmul import (
    UNKNOWN_CHIP,
    GroupedProduct,
    grouped_product_time,
)
from scalejax.simulator.operations.roofline import operation_time
from scalejax.simulator.predict import predict
from scalejax.simulator.program import (
    Collective,
    DeviceGroup,
    ExpertBlocks,
    GroupedPass,
    Loop,
    MemoryUse,
    Operation,
    Program,
    RoutedTokens,
)
from scalejax.simulator.timeline.schedule import Schedule
from scalejax.simulator.transforms.float8 import in_float8
from scalejax.simulator.transforms.routed_tokens import routed_tokens, with_routed_tokens

PASSES: tuple[GroupedPass, ...] = ("forward", "input_gradient", "weight_gradient")
H100 = load_chip("h100")


def grouped(
    groups: int, rows: float, outer: int, inner: int, which: GroupedPass = "forward"
) -> GroupedProduct:
    """A grouped product in bf16."""
    return GroupedProduct(
        groups=groups, rows=rows, outer=outer, inner=inner, dtype="bf16", grouped_pass=which
    )


@pytest.mark.parametrize("which", PASSES)
def test_rows_of_each_group_are_rounded_up_to_a_tile(which: GroupedPass):
    """4 groups of 150 rows are 4 of 256 in tiles of 128: 8 us of arithmetic at 100 TFLOP/s."""
    time = grouped_product_time(grouped(4, 600, 500, 800, which), CHIP)

    assert time.compute_seconds == pytest.approx(2 * 4 * 256 * 500 * 800 / 100e12)
    assert time.busy_seconds == pytest.approx(time.compute_seconds + 4 * UNKNOWN_CHIP.group_seconds)


def test_every_group_s_matrix_is_moved_however_few_its_rows():
    """8 rows for 8 matrices of 1000 x 1000 in bf16: 16 MB at 1 TB/s, and 32 kB of rows."""
    forward = grouped_product_time(grouped(8, 8, 1000, 1000), CHIP)
    weights = grouped_product_time(grouped(8, 8, 1000, 1000, "weight_gradient"), CHIP)

    assert forward.memory_seconds == pytest.approx((16e6 + 8 * 2000 * 2) / 1e12)
    assert weights.memory_seconds == pytest.approx(forward.memory_seconds)


def test_groups_on_a_tpu_share_tiles_and_fill_its_matrix_units():
    """1,000 rows of 4 groups are 2 tiles of 512, and 3 more in which a group ends and the next
    begins. Widths of 704 fill three quarters and a bit of units of 256; operands are loaded for
    each step of 512 x 1024 x 1024."""
    chip = replace(load_chip("tpu-v6e"), memory_bytes_per_second=1e18)
    fraction = chip.attainable.matmul_fraction

    time = grouped_product_time(grouped(4, 1000, 1024, 704), chip)

    flop = 2 * 5 * 512 * 1024 * 768
    assert time.compute_seconds == pytest.approx(flop / (920e12 * fraction))
    slow = replace(chip, memory_bytes_per_second=1e12)
    moved = 5 * (512 * 704 + 1024 * 704) * 2 / (1e12 * chip.attainable.memory_fraction)
    assert grouped_product_time(grouped(4, 1000, 1024, 704), slow).memory_seconds == moved


def test_sides_on_a_tpu_are_padded_to_its_matrix_units():
    """Heads of 64 fill a quarter of units of 256, and a half of units of 128; rows pass through."""
    product = Operation(name="one", kind="matmul", dtype="bf16", flop=2 * 64**3 * 8**6)
    product = replace(product, shape=(1, 64 * 8**6, 64, 64))
    attention = replace(product, kind="attention", shape=(8, 4096, 4096, 64))

    for name, filled in (("tpu-v6e", 1 / 4), ("tpu-v5p", 1 / 2)):
        chip = replace(load_chip(name), memory_bytes_per_second=1e18)
        attainable = chip.attainable
        least = product.flop / chip.peak("bf16")
        ramp = attainable.matmul_ramp_seconds
        for item, share in (
            (product, attainable.matmul_fraction * filled**2),
            (attention, attainable.attention_fraction * filled),
        ):
            seconds = operation_time(item, chip).busy_seconds - ramp
            assert seconds == pytest.approx(least / share, rel=1e-6)


def test_software_has_a_rate_of_its_own_for_grouped_products_and_for_sending_tokens():
    """Half of the chip's and twice the library's: other exchanges take as long as they did."""
    software = Software(grouped_share=0.5, token_exchange_share=2.0)
    chip = software.applied(CHIP)
    product = grouped(4, 600, 500, 800)
    plain = Collective(
        name="all_to_all",
        payload_bytes=10**8,
        group=DeviceGroup(extents=((8, 1),), axes=("expert",)),
        is_async=False,
    )
    tokens = replace(plain, tokens=RoutedTokens(tokens=96, experts_per_token=4, experts=8))

    of_chip, of_software = (grouped_product_time(product, each) for each in (CHIP, chip))
    assert of_software.compute_seconds == pytest.approx(2 * of_chip.compute_seconds)
    assert of_software.memory_seconds == pytest.approx(2 * of_chip.memory_seconds)
    here, there = cluster_of(), cluster_of(chip=chip)
    assert collective_seconds(tokens, there) == pytest.approx(collective_seconds(tokens, here) / 2)
    assert collective_seconds(plain, there) == collective_seconds(plain, here)


def test_the_gradient_of_the_input_is_the_forward_product_with_widths_swapped():
    """Results in bf16 from fp8 operands: the wider side costs more where it is the result."""
    up = replace(grouped(8, 4096, 8192, 1024), dtype="f8e4m3fn")
    back = replace(up, grouped_pass="input_gradient")
    swapped = replace(up, outer=1024, inner=8192)

    assert grouped_product_time(back, H100) == grouped_product_time(swapped, H100)
    assert up.compulsory_bytes("fp8") > back.compulsory_bytes("fp8")


SIZES = st.sampled_from((128, 512, 1024, 4096, 14336))
CHIPS = st.sampled_from([CHIP, *map(load_chip, ("h100", "b200", "gb300", "tpu-v5p"))])


@given(
    chip=CHIPS, which=st.sampled_from(PASSES), groups=st.integers(1, 64),
    rows=st.integers(1, 65536), outer=SIZES, inner=SIZES, more=st.integers(0, 4096),
    times=st.integers(2, 8),
)  # fmt: skip
def test_grouped_products_are_bounded_and_monotone(
    chip: Chip,
    which: GroupedPass,
    groups: int,
    rows: int,
    outer: int,
    inner: int,
    more: int,
    times: int,
):
    """Never above peak; more rows, or more groups of equal FLOP, are never faster."""

    def seconds(groups: int, rows: int) -> float:
        return grouped_product_time(grouped(groups, rows, outer, inner, which), chip).busy_seconds

    alone = seconds(groups, rows)
    assert alone >= 2 * rows * outer * inner / chip.peak("bf16")
    assert seconds(groups, rows + more) >= alone
    assert seconds(groups * times, rows) >= alone


def test_experts_an_eighth_as_wide_and_eight_times_as_many_are_slower():
    """Equal FLOP and parameters, 7 times the copies of tokens: maxtext issue 1256 on TPU v5p.

    Published: 1.8 times as slow. Products alone are 3 % slower here, as the rest is gathering rows
    (`experiments/grouped_products`); on few tokens more groups cost more.
    """

    def three_products(experts: int, per_token: int, tokens: int) -> float:
        rows, width = tokens * per_token, 2 * 14336 // per_token
        return sum(
            grouped_product_time(grouped(experts, rows, outer, inner, which), load_chip("tpu-v5p"))
            .busy_seconds
            for outer, inner in ((width, 4096), (width, 4096), (4096, width))
            for which in PASSES
        )  # fmt: skip

    many, few = (
        three_products(56, 14, tokens) / three_products(8, 2, tokens) for tokens in (65536, 128)
    )

    assert 1.0 <= many < few


@pytest.mark.parametrize("chip", ["h100", "b200"])
def test_one_group_costs_what_the_plain_product_does(chip: str):
    """From 4096 rows the form meets the surface of plain products: differences seen up to 12 %, on
    B200, where neighbours in the table of plain products differ by more."""
    for m, n, k in ((4096, 4096, 4096), (8192, 2048, 7168), (16384, 14336, 4096)):
        plain = Operation(
            name="plain", kind="matmul", dtype="bf16", shape=(1, m, n, k), flop=2 * m * n * k
        )
        one = replace(plain, grouped_pass="forward")
        assert len(Schedule((plain, replace(one, name="grouped"))).operations) == 2
        ratio = (
            operation_time(one, load_chip(chip)).busy_seconds
            / operation_time(plain, load_chip(chip)).busy_seconds
        )
        assert ratio == pytest.approx(1, abs=0.13)


def test_rates_of_grouped_products_are_named_by_chips():
    """Each file of the catalogue is a chip's; a wrong name is refused with the nearest."""
    names = {load_chip(name).attainable.grouped_matmul_rates for name in chip_names()} - {None}
    assert names == set(grouped_matmul_names())
    assert load_chip("h800").attainable.grouped_matmul_rates == "h100"
    with pytest.raises(UnknownHardware, match="did you mean 'h100'"):
        load_grouped_matmul_rates("h10")
    rates = load_grouped_matmul_rates("h100")
    with pytest.raises(ConfigError, match=r"matmul_fraction\.bf16=1\.2 is refused"):
        replace(rates, matmul_fraction={"bf16": 1.2})


# Uneven experts.


def test_load_of_the_fullest_device_by_hand_and_by_bounds():
    """Balanced is 1, as is one device. No expert gets more than all tokens: at most E / k."""
    assert device_load_factor(None, experts=64, devices=8) == 1.0
    assert device_load_factor(1.2, experts=64, devices=1) == 1.0
    # 2 experts, 2 per token: each token goes to both, whatever their loads.
    assert device_load_factor(1.2, experts=2, devices=2, experts_per_token=2) == pytest.approx(1)
    # Uniform in the logarithm from 1 to M for exponent 1: of two, by quadrature over both draws.
    mean = _mean_of_the_larger_share(math.log(0.8 * 4096))
    assert device_load_factor(1.0, experts=2, devices=2) == pytest.approx(2 * mean, rel=0.02)
    for devices in (2, 8, 64):
        factor = device_load_factor(1.2, experts=64, devices=devices, experts_per_token=8)
        assert 1 < factor <= min(devices, 64 / 8)
    with pytest.raises(ConfigError, match="devices=7 must divide"):
        device_load_factor(1.2, experts=64, devices=7)


def _mean_of_the_larger_share(log_range: float) -> float:
    """Mean of max(a, b) / (a + b) for ln a and ln b uniform on [0, log_range]."""
    steps = 2000
    total = 0.0
    for i in range(steps):
        gap = log_range * (i + 0.5) / steps  # |ln a - ln b| has density 2 (L - gap) / L^2
        total += 2 * (log_range - gap) / log_range**2 / (1 + math.exp(-gap))
    return total * log_range / steps


def step_with_experts(*, tokens: int = 4096) -> Program:
    """One grouped product, and the all-to-all that feeds it, on 8 devices."""
    group = DeviceGroup(extents=((8, 1),), axes=("expert",))
    routed = RoutedTokens(tokens=tokens, experts_per_token=8, experts=64)
    sent = Collective(
        name="all_to_all", payload_bytes=tokens * 8 * 2048 * 2, group=group, is_async=False,
        tokens=routed,
    )  # fmt: skip
    rows = tokens * 8
    operations = (
        Operation(name="send", kind="collective", dtype="bf16", collective=sent),
        Operation(
            name="up", kind="matmul", dtype="bf16", grouped_pass="forward",
            shape=(8, rows // 8, 1024, 2048), flop=2 * rows * 1024 * 2048,
            read_bytes=2 * (rows * 2048 + 8 * 1024 * 2048), write_bytes=2 * rows * 1024,
        ),
    )  # fmt: skip
    memory = MemoryUse(argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=0)
    return Program(
        name="experts", backend="closed_form", target="any", compiler="none",
        mesh_axes=(("expert", 8),), operations=operations, memory=memory,
    )  # fmt: skip


def skewed_by(exponent: float) -> Site:
    """A site of which nothing but the imbalance of experts is known."""
    return Site(conditions=RunConditions(expert_load_exponent=exponent))


DGX = load_cluster("dgx-h100")


def test_a_step_takes_as_long_as_on_its_fullest_device():
    """Rows and bytes of the fullest device, in the step and in what explains it."""
    program = step_with_experts()
    factor = device_load_factor(1.2, experts=64, devices=8, experts_per_token=8)
    loaded, site = with_expert_load(program, 1.2), skewed_by(1.2)

    (send, _), (up, _) = loaded.walk()
    assert up.flop == pytest.approx(factor * 2 * 4096 * 8 * 1024 * 2048, rel=1e-6)
    assert up.shape == (8, math.ceil(4096 * factor), 1024, 2048)
    assert send.collective is not None
    assert send.collective.payload_bytes == pytest.approx(factor * 4096 * 8 * 2048 * 2, rel=1e-6)
    balanced, step = (predict(program, DGX, site=at).step_seconds for at in (Site(), site))
    assert step == predict(loaded, DGX).step_seconds > balanced
    explained = explain(program, DGX, site=site)
    assert explained.operations == explain(loaded, DGX).operations
    assert explained.improvements == explain(loaded, DGX).improvements
    assert compare(program, program, DGX, site=site).axes == compare(loaded, loaded, DGX).axes


@given(exponent=st.sampled_from((0.5, 1.01, 1.2, 2.0)), tokens=st.integers(8, 20000))
def test_balanced_experts_are_never_slower(exponent: float, tokens: int):
    """Imbalance only adds rows to the fullest device."""
    program = step_with_experts(tokens=tokens)
    skewed = predict(program, DGX, site=skewed_by(exponent))

    assert skewed.step_seconds >= predict(program, DGX).step_seconds


# Experts in a loop over blocks, as scalejax compiles them, and grouped, as others train them.


def step_in_blocks() -> Program:
    """2 experts on each of 4 devices, 3 blocks of 64 rows each, widths 32 and 48, backward."""

    def product(name: str, *shape: int) -> Operation:
        return Operation(
            name=name, kind="matmul", dtype="bf16", shape=(1, *shape), flop=2 * math.prod(shape),
            read_bytes=10, write_bytes=10,
        )  # fmt: skip

    def moved(name: str, write: int) -> Operation:
        return Operation(
            name=name, kind="fusion", dtype="bf16", read_bytes=write, write_bytes=write
        )

    group = DeviceGroup(extents=((4, 1),), axes=("expert",))
    gathered = Collective(
        name="all_gather", payload_bytes=4 * 96 * 64 + 8 * 96, group=group, is_async=False
    )
    loop = Loop(
        name="blocks",
        trip_count=6,
        expert_blocks=ExpertBlocks(experts=2, rows=64, experts_per_token=4),
        body=(
            moved("rows", 64 * 32 * 2 + 2),
            moved("matrix of the block", 32 * 48 * 2),
            product("up", 64, 48, 32),
            product("of weights", 32, 48, 64),
            replace(moved("sum of gradients", 32 * 48 * 4), dtype="f32"),
        ),
    )
    memory = MemoryUse(argument_bytes=1, output_bytes=1, alias_bytes=0, temporary_bytes=0)
    return Program(
        name="blocks", backend="closed_form", target="any", compiler="none",
        mesh_axes=(("expert", 4),), memory=memory,
        operations=(
            Loop(
                name="layers",
                trip_count=2,
                body=(
                    Operation(name="all", kind="collective", dtype="bf16", collective=gathered),
                    product("attention", 96, 32, 32),
                    moved("copy of all", 4 * 96 * 64),
                    loop,
                ),
            ),
        ),
    )  # fmt: skip


def test_blocks_of_experts_become_grouped_products_by_hand():
    """Of 6 blocks of 64 rows: 384 rows in 2 groups; neither matrices nor all tokens are copied."""
    tokens = RoutedTokens(tokens=96, experts_per_token=4, experts=8)
    program = with_grouped_experts(step_in_blocks(), tokens, token_bytes=64)
    sent, attention, rows, up, of_weights = (item for item, _ in program.walk())

    assert all(times == 2 for _, times in program.walk())
    assert attention.grouped_pass is None
    assert up.grouped_pass == "input_gradient"
    assert of_weights.grouped_pass == "weight_gradient"
    assert up.shape == (2, 192, 32, 48)
    assert of_weights.shape == (2, 192, 32, 48)
    assert up.flop == of_weights.flop == 2 * 384 * 32 * 48
    assert rows.write_bytes == 6 * (64 * 32 * 2 + 2)
    assert sent.collective is not None
    assert sent.collective.name == "all_to_all"
    assert sent.collective.payload_bytes == 96 * 4 * 64
    assert sent.collective.tokens == tokens


def test_a_gather_of_parameters_as_large_as_all_tokens_is_no_exchange():
    """Over the expert axis too: only a layer sends tokens."""
    step = step_in_blocks()
    (layers,) = step.operations
    assert isinstance(layers, Loop)
    update = replace(layers.body[0], name="update.gather")
    tokens = RoutedTokens(tokens=96, experts_per_token=4, experts=8)

    program = with_grouped_experts(
        replace(step, operations=(layers, update)), tokens, token_bytes=64
    )

    assert program.operations[1] == update


def test_experts_with_a_capacity_are_a_batch_of_plain_products():
    """A quarter more rows than assignments, which a product with 160 places for the 32 tokens of
    each of 3 samples puts there: of tokens, of results and of the mask, backward."""
    tokens = RoutedTokens(tokens=96, experts_per_token=4, experts=8, has_capacity=True)
    capacity = Capacity(factor=1.25, samples=3, sample_tokens=32, width=64)

    program = with_grouped_experts(
        step_in_blocks(), tokens, token_bytes=64, has_matrices_once=True, capacity=capacity
    )

    found = {item.name: item for item, _ in program.walk()}
    places = [item for name, item in found.items() if "places" in name]
    assert [item.shape for item in places] == 3 * [(3, 160, 64, 32)]
    for name in ("up", "of weights"):
        assert found[name].flop == 2 * 480 * 32 * 48
        assert found[name].grouped_pass is None
    sent = found["all"].collective
    assert sent is not None
    assert sent.payload_bytes == 96 * 4 * 64 * 5 // 4


def block_product(name: str, *shape: int) -> Operation:
    """A product of a block of 64 rows."""
    return Operation(
        name=name, kind="matmul", dtype="bf16", shape=(1, *shape), flop=2 * math.prod(shape)
    )


GATED, DOWN = block_product("gated", 64, 96, 32), block_product("down", 64, 32, 48)
BACKWARD = (
    block_product("of inner", 48, 64, 32),  # transposed
    block_product("of x", 64, 32, 96),
    block_product("of gated", 32, 96, 64),
    block_product("of down", 48, 32, 64),
)


@pytest.mark.parametrize(
    "again", ["nothing", "in the loop", "in a loop of its own", "nothing, in two", "in both"]
)
def test_products_of_experts_are_two_in_each_pass_whatever_xla_computes_again(again: str):
    """Without and with an expert axis, and with checkpoints; and in the two backward passes of
    ZB-H1, of which the second computes "of inner" again too. Full recompute adds two, of the same
    FLOP. Which product is computed again is told by order alone: "gated" before "of x"."""

    def blocks(name: str, *body: Operation) -> Loop:
        return Loop(
            name=name,
            trip_count=6,
            body=body,
            expert_blocks=ExpertBlocks(experts=2, rows=64, experts_per_token=4),
        )

    other = replace(GATED, name="gated again")
    backward = [blocks("back", *((other,) if again == "in the loop" else ()), *BACKWARD)]
    if again == "in a loop of its own":
        backward.insert(0, blocks("again", other))
    layers = (
        Loop(name="forward", trip_count=3, body=(blocks("blocks", GATED, DOWN),)),
        Loop(name="backward", trip_count=3, body=tuple(backward)),
    )
    if again in ("nothing, in two", "in both"):
        first = (other,) if again == "in both" else ()
        of_inner, of_x, *of_weights = BACKWARD
        layers = (
            layers[0],
            Loop(name="backward_pass", trip_count=3, body=(blocks("b", *first, of_inner, of_x),)),
            Loop(
                name="weights_pass",
                trip_count=3,
                body=(blocks("w", *first, of_inner, *of_weights),),
            ),
        )
    program = replace(step_in_blocks(), operations=layers)
    tokens = RoutedTokens(tokens=96, experts_per_token=4, experts=8)

    for recomputed in (0, 1, 2):
        grouped = with_grouped_experts(program, tokens, 64, recomputed_products=recomputed)
        found: dict[str, list[tuple[int, ...]]] = {}
        for item, _ in grouped.walk():
            found.setdefault(item.grouped_pass or "none", []).append(item.shape)
        both = [(2, 192, 96, 32), (2, 192, 32, 48)]
        assert found == {
            "forward": both + both[:recomputed],
            "input_gradient": both[::-1],
            "weight_gradient": [(2, 192, 32, 96), (2, 192, 48, 32)],
        }


def test_a_residual_stream_in_float32_is_no_copy_of_gathered_tokens():
    """With two devices along the axis it has as many bytes; copies lie between the collectives."""
    program = step_in_blocks()
    (layers,) = program.operations
    assert isinstance(layers, Loop)
    gather, attention, copy, *rest = layers.body
    assert isinstance(gather, Operation)
    assert isinstance(copy, Operation)
    stream = replace(copy, name="stream", dtype="f32")
    early, clear = replace(copy, name="early"), replace(copy, name="clear", read_bytes=0)
    body = (early, clear, gather, attention, copy, stream, *rest)
    program = replace(program, operations=(replace(layers, body=body),))
    tokens = RoutedTokens(tokens=96, experts_per_token=4, experts=8)

    kept = {item.name for item, _ in with_grouped_experts(program, tokens, 64).walk()}

    assert {"stream", "early"} <= kept
    assert not kept & {"copy of all", "clear"}


def routed_run(**moe: JsonValue) -> ResolvedRun:
    """Llama with 8 experts, 4 per token, on 4 devices along the expert axis; tokens of 64 bytes."""
    return resolve(
        build(
            RunConfig,
            {
                "model": {
                    "name": "llama", "layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 48,
                    "compute_dtype": "bfloat16",
                    "moe": {"experts": 8, "experts_per_token": 4, "expert_hidden": 48, **moe},
                },
                "data": {"name": "synthetic_tokens", "tokens": 24, "vocabulary": 64},
                "batch": {"per_device_batch": 8, "microbatches": 2},
                "optimizer": {"name": "adamw"},
                "schedule": {"base_learning_rate": 0.1},
                "layout": {"expert": 4},
            },
        ),
        4,
    )  # fmt: skip


def test_frameworks_with_grouped_kernels_group_what_the_compiled_step_loops_over():
    """By the words of the run: 4 samples of 24 tokens in a microbatch. XLA's step stays as it is,
    and compiled with a capacity it has batched products and all-to-alls already; the closed form
    knows none but that of the mean load."""
    run, program = routed_run(), step_in_blocks()
    tokens = RoutedTokens(tokens=96, experts_per_token=4, experts=8)

    assert routed_tokens(run) == tokens
    by_hand = with_grouped_experts(program, tokens, token_bytes=64)
    for name in ("megatron-core-2024", "torchtitan-2025"):
        assert FRAMEWORKS[name].applied(program, run).operations == by_hand.operations
    assert FRAMEWORKS["xla-2026"].applied(program, run) == program
    capped = routed_run(capacity_factor=1.25)
    compiled = replace(program, backend="cuda")
    assert FRAMEWORKS["torchtitan-2025"].applied(compiled, capped).operations == program.operations
    in_closed_form = replace(program, backend="closed_form")
    with pytest.raises(ConfigError, match=r"^model\.moe\.capacity_factor=1\.25 is refused"):
        FRAMEWORKS["torchtitan-2025"].applied(in_closed_form, capped)
    limited = routed_tokens(routed_run(router={"groups": 4, "groups_per_token": 2}))
    assert limited == replace(tokens, most_nodes=2)


def test_all_to_alls_of_a_compiled_step_say_which_tokens_they_send():
    """Over the expert axis only; with a capacity, uneven loads send no more."""
    run, program = routed_run(capacity_factor=1.25), step_with_experts()
    (send, _), _ = with_routed_tokens(program, run).walk()
    assert send.collective is not None
    assert send.collective.tokens == routed_tokens(run)

    (loaded, _), _ = with_expert_load(with_routed_tokens(program, run), 1.2).walk()
    assert loaded == send


def test_experts_are_linear_layers_in_fp8():
    """In a loop over blocks, and grouped: operands of 192 rows of 32 and 48, and 2 matrices."""
    program = step_in_blocks()
    tokens = RoutedTokens(tokens=96, experts_per_token=4, experts=8)
    in_blocks = {item.name: item for item, _ in in_float8(program).walk()}
    grouped = with_grouped_experts(program, tokens, token_bytes=64)
    at_once = {item.name: item for item, _ in in_float8(grouped).walk()}

    assert in_blocks["up"].dtype == at_once["up"].dtype == "f8e4m3fn"
    assert in_blocks["attention"].dtype == at_once["attention"].dtype == "f8e4m3fn"
    assert at_once["up.cast"].write_bytes == 2 * (192 * 32 + 32 * 48)
    assert at_once["of weights.cast"].write_bytes == 2 * 192 * (32 + 48)


def test_a_loop_over_blocks_is_as_long_as_on_the_fullest_device():
    """Its trip count is that of even loads; the gather of all tokens does not grow. No expert has
    more than a quarter of the assignments, as a token has 4; nothing says that loads are even."""
    program = replace(step_in_blocks(), notes=(EVEN_LOADS,))
    loaded = with_expert_load(program, 1.2)
    factor = device_load_factor(1.2, experts=8, devices=4, experts_per_token=4)
    (note,) = loaded.notes
    assert "power law" in note
    before, after = ({item.name: n for item, n in each.walk()} for each in (program, loaded))

    assert after["up"] == 2 * math.ceil(6 * factor) > before["up"] == 12
    assert after["all"] == before["all"] == 2


# Dispatch and combine.

LIBRARY = DispatchLibrary(
    name="paper",
    title="No token twice",
    rates=DispatchRates(base_seconds=10e-6, token_seconds=1e-9, link_bytes_per_second=50e9),
    network_fraction=0.5,
    network_seconds=20e-6,
)


def route_of(nodes: int):
    """All devices of some nodes of paper chips."""
    return find_route(cluster_of(), members=8 * nodes, members_per_node=8, nodes=nodes)


def test_a_token_goes_once_to_each_node_and_device():
    """16 experts on 2 nodes of 8, 2 of them per token: 2 devices, and a node or both.

    The second expert is one of the other 15, of which 7 are in the first one's node: 1 + 8 / 15
    nodes, half of which is elsewhere. 1000 tokens of 4 kB: 4 MB on 1.53 / 2 x 8 devices over
    10 GB/s x 0.5, against 8 MB over links of 50 GB/s.
    """
    tokens = RoutedTokens(tokens=1000, experts_per_token=2, experts=16)

    devices, nodes = expected_reach(tokens, 16, 2)
    assert (devices, nodes) == pytest.approx((2, 1 + 8 / 15))
    alone = 10e-6 + 1000 * 1e-9
    inside = dispatch_seconds(8_000_000, tokens, route_of(1), LIBRARY, chip="paper")
    reach = 8 * (1 - 14 * 13 / (16 * 15))  # 2 experts on each of 8 devices
    assert inside == pytest.approx(alone + 4e6 * reach / 50e9)
    across = dispatch_seconds(8_000_000, tokens, route_of(2), LIBRARY, chip="paper")
    network = 8 * 4e6 * (1 + 8 / 15) / 2 / (10e9 * 0.5)
    assert across == pytest.approx(alone + 20e-6 + network)


@given(
    per_token=st.integers(1, 16), nodes=st.sampled_from((1, 2, 4, 8)), limit=st.integers(1, 8),
    tokens=st.integers(1, 100_000),
)  # fmt: skip
def test_a_limit_on_nodes_saves_network_and_no_reach_is_beyond_the_choices(
    per_token: int, nodes: int, limit: int, tokens: int
):
    """DeepSeek-V3 limits a token to 4 nodes (arXiv 2412.19437, section 3.2.2)."""
    free = RoutedTokens(tokens=tokens, experts_per_token=per_token, experts=64 * nodes)
    limited = replace(free, most_nodes=limit)
    devices, reached = expected_reach(limited, 8 * nodes, nodes)

    assert reached >= 1 - 1e-9
    assert reached <= min(nodes, limit, per_token) + 1e-9
    assert devices <= min(8 * nodes, per_token) + 1e-9
    assert reached <= expected_reach(free, 8 * nodes, nodes)[1] + 1e-9
    payload = tokens * per_token * 4096
    seconds = dispatch_seconds(payload, limited, route_of(nodes), LIBRARY, chip="paper")
    assert (
        seconds <= dispatch_seconds(payload, free, route_of(nodes), LIBRARY, chip="paper") + 1e-12
    )


def test_the_library_of_a_cluster_is_used_for_tokens_only():
    """Named in a cluster's file; without it, and for other all-to-alls, NCCL's times as before."""
    program, plain = step_with_experts(), DGX
    (send, _), _ = program.walk()
    sent = send.collective
    assert sent is not None
    named = replace(plain, dispatch=load_dispatch("deepep"))
    other = replace(sent, tokens=None)

    assert collective_seconds(sent, plain) == collective_seconds(other, plain)
    assert collective_seconds(other, named) == collective_seconds(other, plain)
    assert collective_seconds(sent, named) != collective_seconds(sent, plain)
    site = Site()
    assert with_conditions(plain, site, {"dispatch": "deepep"}) == (named, site)
    assert with_conditions(named, site, {"dispatch": "all_to_all"}) == (plain, site)
    with pytest.raises(ConfigError, match="dispatch=3 is refused"):
        with_conditions(plain, site, {"dispatch": 3})
    assert named.dispatch is not None
    assert named.dispatch.rates_on("h100") != named.dispatch.rates_on("a chip not measured")
    with pytest.raises(UnknownHardware, match="did you mean 'deepep'"):
        load_dispatch("depep")


def test_routing_that_cannot_be_is_refused():
    """More experts per token than there are; devices that do not divide them."""
    with pytest.raises(ConfigError, match="experts_per_token=9 is refused"):
        RoutedTokens(tokens=1, experts_per_token=9, experts=8)
    with pytest.raises(ConfigError, match="the 16 devices of the group must divide them"):
        expected_reach(RoutedTokens(tokens=1, experts_per_token=1, experts=24), 16, 2)
