"""Rows predicted by the closed form of the step, which compiles nothing."""

from dataclasses import replace
from typing import Any

import pytest
from ledger_cases import GPT, RESNET, case

from scalejax.config.run import RunConfig, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.facts import resolve
from scalejax.hardware import load_cluster
from scalejax.simulator.frameworks import XLA
from scalejax.simulator.program import HOST_MEMORY, Program
from scalejax.simulator.timeline.timeline import timeline
from scalejax.simulator.transformer import transformer_program
from scalejax.validation import compile_cases, evaluate
from scalejax.validation.programs import NEITHER
from scalejax.xla.archive import Archive
from scalejax.xla.closed_form import program_in_closed_form, shape_of, strategy_of


def test_rows_that_the_closed_form_knows_need_no_compiler(row):
    """As their framework runs them, also in a pipeline; other networks are compiled as ever."""
    megatron = {"framework": "Megatron-Core MoE", "hidden": "256", "ffn_hidden": "512"}
    experts = {"model": "qwen3_moe", "kv_heads": "4", "experts": "16", "experts_per_token": "2"}
    experts |= {"expert_hidden": "64", "expert_parallel": "4", "data": "8", "fsdp": "1"}
    stages = {"pipeline": "2", "fsdp": "4", "pipeline_chunks": "1", "recompute": "full"}
    titan = {"framework": "torchtitan", "year": "2024"}
    cells = GPT, GPT | stages, GPT | megatron | experts, RESNET, GPT | titan
    rows = [row(each | {"hardware": "h100_sxm_80gb", "intra_node_link": ""}) for each in cells]

    with pytest.raises(ConfigError, match="pipelines in 1F1B"):
        program_in_closed_form(replace(case(rows[1]).job(0), framework=XLA))
    cases = compile_cases(rows, archive=Archive({}), compiles=False, closed_form=True)
    plain, staged, mixture, images, eager = evaluate(cases)

    for each in (plain, staged, mixture):
        assert each.status == "ok"
        assert each.is_closed_form
    for each in (images, eager):
        assert not each.is_closed_form
        assert each.skip_reason == NEITHER


@pytest.mark.parametrize(
    ("field", "value"),
    [("model.remat", "minimal_offloaded"), ("layout.optimizer_memory_host_offload", True)],
)
def test_what_the_closed_form_does_not_know_of_a_run_is_refused(field, value, row):
    """Recompute that names activations, and state in the memory of the host."""
    run = case(row(GPT)).runs[0]

    config = with_fields(run.config, {field: value})
    with pytest.raises(ConfigError, match=field):
        strategy_of(resolve(config, 8, run.dataset))


@pytest.mark.parametrize("schedule", ["zb_h1", "dualpipe"])
def test_schedules_that_the_closed_form_does_not_know_are_refused(schedule, row):
    """Its pipelines are in 1F1B; the command that knows the others is named."""
    run = case(row(GPT)).runs[0]
    fields = {"layout.fsdp": 4, "layout.pipeline": 2, "layout.pipeline_schedule": schedule}

    config = with_fields(run.config, {**fields, "layout.data": 1, "batch.microbatches": 4})
    with pytest.raises(ConfigError, match=f"'{schedule}' is refused: .* use scalejax predict"):
        strategy_of(resolve(config, 8, run.dataset))


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"model": {"name": "llama", "remat": "selective_op"}}, "model.remat"),
        ({"layout": {"data": 8, "zero_stage": 1}}, "layout.zero_stage"),
        ({"layout": {"pipeline": 3}}, "layout.pipeline"),
        ({"model": {"name": "llama", "tied_embeddings": True}}, "fine_tuning.lora"),
        ({"model": {"name": "gpt"}}, "fine_tuning.lora"),
    ],
)
def test_adapters_that_the_closed_form_does_not_know_are_refused(table: dict[str, Any], field: str):
    """Each would be costed wrongly: kept products, parts of frozen matrices, layers dealt anew."""
    tables: dict[str, Any] = {
        "model": {"name": "llama"},
        "data": {"name": "synthetic_tokens", "tokens": 64, "vocabulary": 256},
        "batch": {"global_batch": 24, "microbatches": 3},
        "optimizer": {"name": "adamw"},
        "schedule": {"base_learning_rate": 0.1},
        "layout": {"data": 1},
        "fine_tuning": {"lora": {"rank": 4}},
    }
    devices = 3 if "pipeline" in table.get("layout", {}) else 8 if "layout" in table else 1
    run = resolve(build(RunConfig, tables | table), devices)
    chip = load_cluster("dgx-h100").chip

    with pytest.raises(ConfigError, match=field):
        transformer_program(shape_of(run.config, chip, run.dataset), strategy_of(run))


def test_maxtext_keeps_attention_and_reaches_windows_by_blocks(row):
    """Attention that is kept by name runs twice in place of thrice; of 36 blocks of 1,024 queries
    and keys a window of 128, in every second layer, reaches into 15."""
    maxtext = GPT | {"framework": "MaxText (JAX)", "data": "", "microbatch": "", "seq_len": "8192"}
    maxtext |= {"hardware": "tpu_v5p", "intra_node_link": "", "layers": "4", "hidden": "1024"}
    maxtext |= {"model": "gpt_oss_moe", "kv_heads": "4", "ffn_hidden": "1024", "heads": "16"}
    maxtext |= {"experts": "8", "experts_per_token": "2", "expert_hidden": "1024"}
    maxtext |= {"recompute": "custom", "node_network_gbit_per_second": ""}

    def attention(notes: str) -> list[int]:
        job = case(row(maxtext | {"notes": notes})).job(0)
        found = program_in_closed_form(job).walk()
        return [item.flop for item, _ in found if item.kind == "attention"]

    again, kept = attention("{}"), attention("{'context': 'offload'}")
    whole = 2 * 4 * 16 * 8192**2 * 64  # two products of half of the scores, of all heads
    share = (1 + 15 / 36) / 2
    assert again == [round(whole * share), round(whole * share), round(whole * share * 5 / 2)]
    assert kept == [again[0], again[2]]


OF_MAXTEXT = GPT | {
    **{"framework": "MaxText (JAX)", "data": "", "microbatch": "", "seq_len": "8192"},
    **{"hardware": "tpu_v5p", "intra_node_link": "", "layers": "4", "hidden": "1024"},
    **{"model": "llama", "kv_heads": "4", "ffn_hidden": "1024", "heads": "16"},
    **{"node_network_gbit_per_second": "", "global_batch": "8", "per_device_batch": "1"},
}


def test_what_maxtext_keeps_or_offloads_is_no_work_again_and_in_memory(row):
    """Of 4 layers of 8,192 tokens: queries, keys and values, 16 + 2 x 4 heads of 64, are kept by
    save_qkv_proj, and sent to the host by qkv_proj_offloaded, 24 x 64 numbers of 2 bytes a token;
    with the inputs of blocks there, 2 of 4 are in flight, and memory is less by the other two."""
    cluster = load_cluster("tpu-v5p")

    def found(policy: str, notes: str = "") -> Program:
        said = {"recompute": policy, "notes": notes}
        return program_in_closed_form(case(row(OF_MAXTEXT | said)).job(0))

    def again(program: Program) -> set[str]:
        return {each.name for each, _ in program.walk() if each.kind == "matmul"}

    whole, saved, offloaded = map(found, ("full", "save_qkv_proj", "qkv_proj_offloaded"))
    inputs = found("custom", "{'decoder_layer_input': 'offload'}")

    layer, stream = 8192 * 24 * 64 * 2, 8192 * 1024 * 2
    assert again(whole) - again(saved) == again(whole) - again(offloaded) == {"backward.qkv"}
    assert again(inputs) == again(whole)
    held = [each.memory.temporary_bytes - whole.memory.temporary_bytes for each in (saved, inputs)]
    assert held == [4 * layer, -2 * stream]
    assert [each.memory.host_bytes for each in (saved, offloaded)] == [0, 4 * layer]
    copies = {
        each.name: each.collective.payload_bytes
        for each, _ in offloaded.walk()
        if each.collective is not None and each.collective.group == HOST_MEMORY
    }
    assert copies == {"forward.copy_to_host": layer, "backward.copy_from_host": layer}
    assert timeline(saved, cluster).step_seconds < timeline(whole, cluster).step_seconds


@pytest.mark.parametrize(("model", "is_kept"), [("llama", False), ("gemma4", True)])
def test_the_result_of_a_block_is_kept_where_a_norm_follows_it(model, is_kept, row):
    """8,192 tokens x 1,024 numbers of 2 bytes in each of 4 layers, "mlpwo": without a norm after it
    the backward pass reads it nowhere, and JAX keeps and copies nothing."""

    def found(policy: str) -> Program:
        cells = OF_MAXTEXT | {"model": model, "recompute": policy}
        return program_in_closed_form(case(row(cells)).job(0))

    without, named, offloaded = map(
        found, ("save_dot_except_mlp", "save_dot_except_mlpwi", "minimal_offloaded")
    )

    size = is_kept * 8192 * 1024 * 2
    assert named.memory.temporary_bytes - without.memory.temporary_bytes == 4 * size
    width = 256 if model == "gemma4" else 64  # of a head, by its preset
    others = 8192 * ((16 + 2 * 4) * width + 1024 + 2 * 1024) * 2  # with the halves of "mlpwi"
    assert offloaded.memory.host_bytes == 4 * (others + size)
    copies = [
        each.collective.payload_bytes
        for each, _ in offloaded.walk()
        if each.collective is not None and each.collective.group == HOST_MEMORY
    ]
    assert copies == [others + size] * 2
