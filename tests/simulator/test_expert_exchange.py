"""Where a framework's experts are, and what its hosts and devices do while tokens travel: numbers
by hand of a small network in closed form."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from scalejax import load_cluster, predict, resolve
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue, build
from scalejax.hardware import load_dispatch
from scalejax.simulator.collectives import find_route
from scalejax.simulator.collectives.expert_dispatch import dispatch_seconds, expected_reach
from scalejax.simulator.frameworks import FRAMEWORKS
from scalejax.simulator.program import Loop, Operation, Program, RoutedTokens
from scalejax.simulator.timeline.timeline import timeline
from scalejax.training.setup import train_setup
from scalejax.xla import ProfileJob
from scalejax.xla.closed_form import program_in_closed_form

CLUSTER = load_cluster("dgx-h100")
TOKENS, HIDDEN, EXPERT_HIDDEN, EXPERTS, PER_TOKEN = 1024, 256, 512, 16, 2
TENSOR, EXPERT = 4, 2
WORDS: tuple[dict[str, Any], ...] = ({"expert_tensor": 1}, {"overlap_expert_exchange": True})


def job(
    framework: str = "megatron-core-2026",
    model: Mapping[str, JsonValue] | None = None,
    moe: Mapping[str, JsonValue] | None = None,
    **layout: Any,
) -> ProfileJob:
    """Eight devices, each with a fourth of the heads of a sequence."""
    axes: dict[str, JsonValue] = {"expert": EXPERT, "tensor": TENSOR, "sequence_parallel": True}
    experts: dict[str, JsonValue] = {
        "experts": EXPERTS,
        "experts_per_token": PER_TOKEN,
        "expert_hidden": EXPERT_HIDDEN,
    }
    tables: dict[str, JsonValue] = {
        "model": {
            "name": "llama", "layers": 3, "hidden": HIDDEN, "heads": 4, "kv_heads": 4,
            "compute_dtype": "bfloat16", "moe": {**experts, **(moe or {})}, **(model or {}),
        },
        "data": {"name": "synthetic_tokens", "tokens": TOKENS, "vocabulary": 1024},
        "batch": {"per_device_batch": 2, "microbatches": 2},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        "layout": axes | layout,
    }  # fmt: skip
    run = resolve(build(RunConfig, tables), 8)
    return ProfileJob(run=run, cluster=CLUSTER, framework=FRAMEWORKS[framework])


def of_layer(program: Program) -> dict[str, Operation]:
    """Operations by their names."""
    return {item.name: item for item, _ in program.walk()}


def exchanges(program: Program) -> list[Operation]:
    """All-to-alls of tokens, once each."""
    found = of_layer(program).values()
    return [each for each in found if each.collective is not None and each.collective.tokens]


def test_tokens_go_out_once_and_to_whole_experts_over_the_tensor_axis():
    """Sixteen experts over 2 x 4 devices are two each, in place of a fourth of eight: the same
    rows of each, twice the width four times; a device sends a fourth of the tokens, and they are
    neither gathered before nor summed after."""
    split, whole = (program_in_closed_form(job(expert_tensor=each)) for each in (None, 1))
    up, wide = of_layer(split)["forward.block.up"], of_layer(whole)["forward.block.up"]
    rows = 2 * TOKENS * PER_TOKEN * EXPERT // EXPERTS // 2
    assert up.shape == (8, rows, 2 * EXPERT_HIDDEN // TENSOR, HIDDEN)
    assert wide.shape == (2, rows, 2 * EXPERT_HIDDEN, HIDDEN)
    assert of_layer(whole)["forward.block.down"].shape == (2, rows, HIDDEN, EXPERT_HIDDEN)
    gradient = of_layer(whole)["backward.block.up.gradient"]
    assert gradient.shape == (2, rows, HIDDEN, 2 * EXPERT_HIDDEN)
    assert wide.flop == up.flop

    assert len(exchanges(whole)) == 4
    for each in exchanges(whole):
        assert each.collective is not None
        assert each.collective.group.axes == ("expert", "tensor")
        assert each.collective.group.size == EXPERT * TENSOR
        assert each.collective.payload_bytes == TOKENS * PER_TOKEN * HIDDEN * 2 // TENSOR
        assert each.collective.tokens == RoutedTokens(
            tokens=TOKENS // TENSOR, experts_per_token=PER_TOKEN, experts=EXPERTS
        )
    over_tensor = [
        name
        for name, item in of_layer(whole).items()
        if item.collective is not None and item.collective.group.axes == ("tensor",)
    ]
    assert not [name for name in over_tensor if "feed_forward" in name or "experts" in name]
    assert [name for name in over_tensor if "attention" in name]
    assert of_layer(whole)["forward.router"].shape == (1, TOKENS // TENSOR, EXPERTS, HIDDEN)

    # Each shard of an expert gets the rows of all, which the axis gathers once they have come.
    (first, *_) = exchanges(split)
    assert first.collective is not None
    assert first.collective.group.size == EXPERT
    assert first.collective.payload_bytes == TOKENS * PER_TOKEN * HIDDEN * 2 // TENSOR
    gathered = sum(
        item.collective.payload_bytes
        for name, item in of_layer(split).items()
        if item.collective is not None and "forward.feed_forward.gather_tokens" in name
    )
    assert gathered == TOKENS * HIDDEN * 2 * PER_TOKEN


def test_shared_experts_keep_the_gather_of_all_tokens():
    """They are split over tensor as dense layers are."""
    names = of_layer(program_in_closed_form(job(moe={"shared_experts": 1}, expert_tensor=1)))
    assert any(name.startswith("forward.feed_forward.gather_tokens") for name in names)


def test_nothing_computes_while_tokens_travel_but_another_microbatch():
    """In turn they are synchronous; beside compute they start with the block and are waited for at
    its end, which is never slower."""
    apart = program_in_closed_form(job(expert_tensor=1))
    beside = program_in_closed_form(job(expert_tensor=1, overlap_expert_exchange=True))
    assert all(each.collective and not each.collective.is_async for each in exchanges(apart))
    assert all(each.collective and each.collective.is_async for each in exchanges(beside))

    far = replace(CLUSTER, devices_per_node=4)
    one, other = timeline(apart, far), timeline(beside, far)
    assert one.exchange_seconds > 0
    assert other.exchange_seconds == 0
    assert sum(s for _, s in other.exposed) < sum(s for _, s in one.exposed)
    assert predict(beside, far).step_seconds < predict(apart, far).step_seconds


def test_hosts_wait_for_tokens_before_they_dispatch_what_follows():
    """A step is its dispatches and the exchanges between them where that is longer than the
    devices' work; with a capacity it is known what comes, and hosts are as of other steps."""
    program = program_in_closed_form(job(expert_tensor=1))
    slow = replace(
        CLUSTER,
        chip=replace(
            CLUSTER.chip,
            rates_of="megatron-core-2026",
            attainable=replace(CLUSTER.chip.attainable, routed_dispatch_seconds=1e-3),
        ),
    )
    found = timeline(program, slow)
    operations = sum(times for item, times in program.walk() if item.kind != "wait")
    assert found.dispatch_seconds == pytest.approx(1e-3 * operations)
    waited = found.dispatch_seconds + found.exchange_seconds + found.overhead_seconds
    assert found.step_seconds == pytest.approx(waited)
    assert found.exchange_seconds > 0

    padded = program_in_closed_form(job(expert_tensor=1, moe={"capacity_factor": 1.0}))
    assert timeline(padded, slow).dispatch_seconds < 1e-3 * operations
    graph = replace(slow, launch_mode="graph")
    assert timeline(program, graph).dispatch_seconds == 0


def test_a_library_whose_network_takes_messages_pays_for_each_token_and_node():
    """Whatever their size: 512 tokens to the nodes elsewhere that have one of their experts."""
    efa, tokens = (
        load_dispatch("deepep-efa"),
        RoutedTokens(tokens=512, experts_per_token=8, experts=128),
    )
    route = find_route(CLUSTER, members=32, members_per_node=8, nodes=4)
    plain = replace(efa, chips={}, rates=replace(efa.rates, message_seconds=0.0))
    posted = replace(plain, rates=replace(plain.rates, message_seconds=1e-5))
    small, more = (
        dispatch_seconds(512 * 8 * 16, tokens, route, library, chip="h100")
        for library in (plain, posted)
    )
    _, nodes = expected_reach(tokens, 32, 4)
    assert more - small == pytest.approx(512 * nodes * 3 / 4 * 1e-5, rel=0.01)
    assert efa.rates_on("h100").message_seconds > 0


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"expert_tensor": 2}, "expert_tensor=2 is refused: it must be 1, or layout.tensor=4"),
        ({"expert_tensor": 1, "sequence_parallel": False}, "needs layout.sequence_parallel=true"),
        (
            {"expert_tensor": 1, "expert": 8, "tensor": 1, "sequence_parallel": False},
            (("expert",), 8),
        ),
        ({"expert_tensor": 1, "tensor": 8, "expert": 1}, (("tensor",), 8)),
    ],
)
def test_where_experts_can_be_is_checked_at_the_door(layout, words):
    """By field, value and what is accepted. Along either axis alone tokens are sent over that."""
    heads: dict[str, JsonValue] = {"heads": 8, "kv_heads": 8}
    if not isinstance(words, str):
        sent = exchanges(program_in_closed_form(job(model=heads, **layout)))
        groups = [each.collective.group for each in sent if each.collective is not None]
        assert [(group.axes, group.size) for group in groups] == [words] * 4
        return
    with pytest.raises(ConfigError, match=words):
        job(model=heads, **layout)


def test_experts_must_be_enough_for_both_axes():
    """Four experts over 2 x 4 devices."""
    with pytest.raises(ConfigError, match=r"model\.moe\.experts=4 is refused.*layout\.tensor"):
        job(moe={"experts": 4}, expert_tensor=1)


@pytest.mark.parametrize("framework", ["xla-2026", "megatron-lm-2022"])
def test_frameworks_without_such_exchange_refuse_the_words(framework):
    """As their step would be costed as if it had none."""
    for words in WORDS:
        with pytest.raises(ConfigError, match=f"{next(iter(words))}.*--framework"):
            program_in_closed_form(job(framework, **words))


def test_words_of_the_exchange_are_for_costing_only():
    """The trainer has neither, and says so."""
    for words in WORDS:
        with pytest.raises(ConfigError, match="for costing only"):
            train_setup(job(**words).run)


def test_kernels_of_transformer_engine_have_sinks_windows_and_routers_in_16_bits():
    """gpt-oss: half of the layers see 128 of 1,024 tokens, 15 of 36 blocks of 128 by 128."""
    block: dict[str, JsonValue] = {
        "sliding_window": 128, "global_every": 2, "attention_sinks": True, "head_size": 64,
    }  # fmt: skip
    llama: dict[str, JsonValue] = {"head_size": 64}
    plain, sinks = (
        of_layer(program_in_closed_form(job(model={"layers": 4, "block": each})))
        for each in (llama, block)
    )
    share = (15 / 36 + 1) / 2
    assert sinks["forward.attention"].kind == "attention"
    assert sinks["forward.attention"].flop == pytest.approx(
        share * plain["forward.attention"].flop, rel=1e-6
    )
    assert sinks["forward.router"].dtype == "bf16"
    assert sinks["backward.router.gradient"].dtype == "f32"
    with pytest.raises(ConfigError, match=r"block\.sliding_window=128 is refused"):
        program_in_closed_form(job("xla-2026", model={"layers": 4, "block": block}))


def test_megatron_gathers_over_fsdp_while_the_layers_beside_compute():
    """Gathers start with each layer and are waited for at its end (--overlap-param-gather)."""
    sharded = job(expert=1, tensor=1, fsdp=8, sequence_parallel=False)
    program = program_in_closed_form(sharded)
    passes = next(item for item in program.operations if isinstance(item, Loop))
    layers = next(item for item in passes.body if isinstance(item, Loop))
    body = [item for item in layers.body if isinstance(item, Operation)]
    gathers = [item for item in body if item.collective and item.collective.name == "all_gather"]
    names = {item.name for item in gathers}
    waits = [item for item in body if item.waits_for in names]
    assert len(gathers) == len(waits) > 1
    assert body[: len(gathers)] == gathers
    assert body[-len(waits) :] == waits


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ({}, ("tensor",)),
        (
            {"expert": 2, "context": 2, "tensor": 2, "context_strategy": "ring"},
            ("context", "tensor"),
        ),
        ({"expert": 8, "tensor": 1, "sequence_parallel": False}, None),
    ],
)
def test_megatron_sums_loads_over_the_devices_of_a_sample(
    layout: dict[str, Any], axes: tuple[str, ...] | None
):
    """core/transformer/moe/router.py: apply_load_balancing_loss sums over tp_cp_group alone, where
    scalejax sums loads and losses over all devices; whose sums are gone nothing waits for."""
    found = {
        name: of_layer(program_in_closed_form(job(name, **layout)))
        for name in ("torchtitan-2025", "megatron-core-2026")
    }

    ours, theirs = (
        {
            name: each.collective.group.axes
            for name, each in operations.items()
            if each.collective is not None and ".router." in name
        }
        for operations in found.values()
    )

    assert all("expert" in group for group in ours.values())
    assert len(ours) > len(theirs)
    assert set(theirs.values()) == (set() if axes is None else {axes})
    waits = {each.waits_for for each in found["megatron-core-2026"].values() if each.waits_for}
    assert waits <= found["megatron-core-2026"].keys()
