"""Rows become runs and clusters, or say what is in the way."""

from dataclasses import replace

import pytest
from ledger_cases import GPT, RESNET, case

from scalejax.config.model import GptConfig, LlamaConfig
from scalejax.config.presets import PRESETS
from scalejax.config.training import FineTuningConfig, LoraConfig
from scalejax.validation import Skipped, find_ledger, read_ledger
from scalejax.validation.cases import case_of, has_channels_first


def test_image_row_becomes_its_run(row):
    """Network, arithmetic, batch and layout as stated; BatchNorm per device."""
    run = case(row(RESNET)).runs[0]

    assert run.config.model.name == "resnet50"
    assert run.config.model.compute_dtype == "float32"
    assert run.dataset.input_shape == (224, 224, 3)
    assert (run.layout.data, run.split.per_device_batch, run.split.microbatches) == (16, 96, 1)
    assert run.bn_groups == 16


def test_text_row_becomes_its_run(row):
    """Half precision of either kind is traced as bfloat16."""
    run = case(row(GPT | {"precision": "fp16", "attention": "unfused"})).runs[0]

    assert run.config.model.compute_dtype == "bfloat16"
    assert isinstance(run.config.model, GptConfig)
    assert run.config.model.attention == "unfused"
    assert (run.layout.fsdp, run.split.microbatches) == (8, 2)
    assert run.dataset.classes == 512


def test_a_batch_of_more_samples_than_any_is_left_out(row):
    """All divisors of what one row stated, 9e15, were tried, for ever."""
    found = case_of(row(GPT | {"per_device_batch": 2**53 + 1, "global_batch": None}))

    assert isinstance(found, Skipped)
    assert "1,000,000 are the most" in found.reason


@pytest.mark.parametrize(
    ("framework", "source", "expected"),
    [
        ("NVIDIADeepLearningExamples/PyTorch", "github:Oneflow-Inc/DLPerf@c89430bac6", True),
        ("PyTorch", "github:NVIDIA/DeepLearningExamples@729963dd47", False),
        ("MxNet", "github:Oneflow-Inc/DLPerf@c89430bac6", False),
    ],
)
def test_channels_come_first_in_pytorch_unless_it_is_told_otherwise(
    row, framework, source, expected
):
    """As NVIDIA's published results tell it."""
    change = {"framework": framework, "source": source, "precision": "fp16"}

    assert has_channels_first(row(RESNET | change)) == expected


def test_what_a_row_leaves_open_is_tried_in_order(row):
    """The largest microbatch first, each without recompute and then with it."""
    runs = case(row(GPT | {"microbatch": "", "recompute": ""})).runs

    models = [run.config.model for run in runs]
    remats = [model.remat for model in models if isinstance(model, GptConfig)]
    tried = list(zip([run.split.microbatches for run in runs], remats, strict=True))
    assert tried == [(n, remat) for n in (1, 2, 4) for remat in ("none", "full")]


def test_nanotron_recomputes_nothing(row):
    """Unless it is asked to: a run that died for want of memory is not said to fit with it."""
    found = case(row(GPT | {"recompute": "", "framework": "nanotron (a sweep)"}))

    assert [getattr(run.config.model, "remat", None) for run in found.runs] == ["none"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hardware": "abacus"}, "the catalogue has no chip for 'abacus'"),
        ({"intra_node_link": "string"}, "the link 'string' is none of"),
        ({"model": "perceptron"}, "no network 'perceptron'"),
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"precision": ""}, "precision is not stated"),
        ({"precision": "tf32"}, "precision 'tf32', which v100 does not have"),
        ({"pipeline": "4"}, "a pipeline of 'resnet50'"),
        ({"context": "2", "data": "8"}, "it splits transformers"),
        ({"recompute": "selective"}, "selective recompute"),
        ({"data": "4"}, "its axes multiply to 4, not to 16 devices"),
        ({"per_device_batch": "", "global_batch": ""}, "neither per_device_batch nor global_batch"),
        ({"gradient_exchange": "pigeons"}, "gradient_exchange 'pigeons'"),
    ],
)
def test_row_that_cannot_be_expressed_is_skipped_with_a_reason(change, reason, row):
    """One line that says what is in the way."""
    found = case_of(row(RESNET | change))

    assert isinstance(found, Skipped)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("framework", "strategy"),
    [("NeMo 25.04 / Megatron-Core", "ring"), ("torchtitan (PyTorch FSDP2)", "all_gather")],
)
def test_fused_attention_over_context_is_that_of_its_framework(framework, strategy, row):
    """Megatron's default is a ring, torchtitan's gathers keys."""
    spread = {
        "fsdp": "4",
        "context": "2",
        "attention": "flash",
        "precision": "bf16",
        "framework": framework,
    }
    (run,) = case(row(GPT | LLAMA | spread | {"recompute": "full"})).runs

    assert run.config.layout.context_strategy == strategy


LLAMA = {"model": "llama", "layers": "2", "hidden": "64", "heads": "8", "kv_heads": "2"}
LLAMA |= {"ffn_hidden": "192", "vocab": "256", "seq_len": "64", "precision": "bf16"}


def test_llama_is_built_as_its_row_says(row):
    """Sizes, what is recomputed, how it is spread; stage 3 is the fsdp axis."""
    spread = {"device_count": "16", "data": "1", "fsdp": "8", "tensor": "2", "zero_stage": "3"}
    spread |= {"sequence_parallel": "1", "recompute": "selective"}
    (run,) = case(row(GPT | LLAMA | spread)).runs
    model = run.config.model

    assert isinstance(model, LlamaConfig)
    assert (model.kv_heads, model.ffn_hidden, model.remat) == (2, 192, "selective")
    assert run.config.layout.sequence_parallel
    assert run.config.layout.zero_stage == 0


def test_network_is_the_rows_own(row):
    """100 Gb/s are 12.5e9 bytes per second, whatever the catalogue's cluster has."""
    slow = case(row(RESNET | {"node_network_gbit_per_second": "10"})).cluster

    assert slow.network is not None
    assert slow.network.bytes_per_second == 1.25e9
    assert slow.chip.name == "v100"
    assert slow.devices_per_node == 8


def test_rows_of_the_playbook_ran_on_its_cluster(row):
    """Whose network was measured; rows of others on as many H100 have another."""
    playbook = {"source": "github:vinjn/nanotron-ultrascale-playbook@924e4d0"}
    h100 = {"hardware": "h100_sxm_80gb", "intra_node_link": "", "node_network_gbit_per_second": ""}

    assert case(row(GPT | h100 | playbook)).cluster.name == "hf-ultrascale"
    assert case(row(GPT | h100)).cluster.name != "hf-ultrascale"


def test_fp32_is_computed_without_tf32(row):
    """On chips that would round f32 operands, unless the row says tf32."""
    ampere = {"hardware": "a100_sxm_80gb", "intra_node_link": "nvlink3_nvswitch"}
    by_precision = {
        precision: case(row(RESNET | ampere | {"precision": precision})).cluster.chip
        for precision in ("fp32", "tf32")
    }

    assert by_precision["fp32"].rate_type("f32") == "f32"
    assert by_precision["tf32"].rate_type("f32") == "tf32"


def test_parameter_servers_replace_the_all_reduce(row):
    """The library is another, the hardware the same."""
    plain = case(row(RESNET)).cluster
    served = case(row(RESNET | {"gradient_exchange": "parameter_server"})).cluster

    assert {method.algorithm for method in served.library.methods} == {"parameter_server"}
    assert replace(served, library=plain.library) == plain


def test_library_is_that_of_its_year(row):
    """NCCL 2 came out in the summer of 2017; a server is no matter of years."""

    def library(**cells: str) -> str:
        return case(row(RESNET | cells)).cluster.library.name

    assert library(year="2017") == "nccl-1"
    assert library(year="2018") == "nccl"
    assert library(year="2017", gradient_exchange="parameter_server") == "parameter-server"
    k80 = {"hardware": "k80_die", "intra_node_link": "pcie_gen3", "precision": "fp32"}
    assert library(year="2017", **k80) == library(year="2018", **k80) == "nccl-pcie"


def test_memory_of_a_device_is_that_of_its_year(row):
    """In 2020 an A100 held 40 GB, whatever the ledger assumes; a stated size is believed."""
    machine = {"hardware": "a100_sxm_80gb", "intra_node_link": "nvswitch", "devices_per_node": "8"}

    def chip(**cells: str) -> str:
        return case(row(GPT | machine | cells)).cluster.chip.name

    assert chip(year="2020", assumed="vocab, HBM size") == "a100-40gb"
    assert chip(year="2021", assumed="vocab, HBM size") == "a100-80gb"
    assert chip(year="2020", assumed="vocab") == "a100-80gb"


def test_settings_that_a_table_leaves_open_are_those_of_the_script_that_made_it(row):
    """The table of Narayanan et al. 2021 states neither microbatch nor chunks; a stated number of
    chunks is believed, and a row that no script is known of has none and the fastest microbatch."""
    stages = {"layers": "12", "pipeline": "2", "fsdp": "2", "recompute": "full", "zero_stage": "0"}
    stages |= {"device_count": "4", "per_device_batch": "8", "microbatch": "", "global_batch": "16"}
    megatron = GPT | stages | {"framework": "Megatron-LM", "pipeline_chunks": "1"}

    def found(change: dict[str, str]) -> list[tuple[int, int]]:
        runs = case(row(megatron | change)).runs
        return [(run.split.microbatch, run.config.layout.pipeline_chunks) for run in runs]

    assert found({"case_id": "megatron_sc21_weak_76B"}) == [(2, 3)]
    assert found({"case_id": "megatron_sc21_weak_39B"}) == [(4, 1)]
    assert found({"case_id": "another"}) == [(8, 1), (4, 1), (2, 1), (1, 1)]
    assert found({"case_id": "another", "pipeline_chunks": "3", "microbatch": "4"}) == [(4, 3)]


TRAINED = {"source": "github:mlcommons/training_results_v4.1"}
DEEP_LEARNING_EXAMPLES = "github:NVIDIA/DeepLearningExamples@729963dd47"
DLPERF = "github:Oneflow-Inc/DLPerf@c89430bac6"
TF2 = "tensorflow-2020"
"""A submission to MLPerf."""
NEMO = TRAINED | {
    "model": "llama", "kv_heads": "4", "ffn_hidden": "96", "layers": "14", "data": "2",
    "fsdp": "", "tensor": "1", "pipeline": "4", "microbatch": "1", "per_device_batch": "8",
    "recompute": "", "zero_stage": "",
    "framework": "PyTorch NVIDIA Release 25.09",
}  # fmt: skip
"""One with a pipeline that states no interleaving, no ZeRO stage and no recompute."""
TITAN = {"source": "github:pytorch/torchtitan@b5bc", "framework": "torchtitan (PyTorch FSDP2)"}


def test_interleaving_that_its_source_does_not_state_is_not_taken_from_the_ledger(row):
    """Tables of dgxc-benchmarking say "NA" of it, the ledger 1: chunks of two layers."""
    stated = GPT | NEMO | {"framework": "NeMo", "pipeline_chunks": "1", "layers": "16"}

    def chunks(source: str) -> int:
        made = case(row(stated | {"source": source}))
        return made.runs[0].config.layout.pipeline_chunks

    assert chunks("github:NVIDIA/dgxc-benchmarking@85380ff") == 2
    assert chunks("github:NVIDIA/NeMo@85380ff") == 1


def test_what_nemo_leaves_open_is_as_in_its_recipes(row):
    """Chunks of two layers, embedding and loss as layers where they must be, and the distributed
    optimizer; what a row states is believed, and a network that divides counts no ends."""

    def found(change: dict[str, str]):
        made = case(row(GPT | NEMO | change))
        layout = made.runs[0].config.layout
        return layout.pipeline_chunks, layout.zero_stage, layout.pipeline_counts_ends

    assert found({}) == (2, 1, True)
    assert found({"layers": "16"}) == (2, 1, False)
    assert found({"layers": "16", "pipeline_chunks": "1", "zero_stage": "0"}) == (1, 0, False)
    assert found({"layers": "16", "framework": "nanotron", "source": "its paper"})[:2] == (1, 0)
    odd = {"layers": "36", "device_count": "12", "data": "1", "pipeline": "12"}
    assert found(odd | {"per_device_batch": "24", "global_batch": "24"})[0] == 1
    assert found(odd | {"layers": "72", "per_device_batch": "24", "global_batch": "24"})[0] == 3
    assert case(row(GPT | NEMO)).nearest[0] == "2 chunks a stage: its interleaving is not stated"
    flat = NEMO | {"data": "8", "pipeline": "", "microbatch": "", "per_device_batch": "2"}
    tried = [
        (getattr(each.config.model, "remat", ""), each.split.microbatches)
        for each in case(row(GPT | flat)).runs
    ]
    assert tried == [(kind, n) for kind in ("none", "selective", "full") for n in (1, 2)]


def test_selective_recompute_is_what_its_framework_means_by_it(row):
    """Of torchtitan every second product, of others what attention takes most memory for."""
    selective = GPT | {"recompute": "selective"}

    remats = [
        getattr(case(row(each)).runs[0].config.model, "remat", None)
        for each in (selective, selective | TITAN, selective | {"framework": "llm-foundry"})
    ]

    assert remats == ["selective", "selective_op", "selective"]


@pytest.mark.parametrize(
    ("change", "framework"),
    [
        (TITAN | {"year": "2024", "notes": "full AC; eager"}, "torchtitan-2024-eager"),
        (TITAN | {"year": "2024", "notes": "compile"}, "torchtitan-2024"),
        (TITAN | {"year": "2024", "notes": "AsyncTP"}, "torchtitan-2024-async-tp"),
        (TITAN | {"year": "2025", "notes": "compile"}, "torchtitan-2025"),
        (TITAN | {"year": "2025", "notes": "AsyncTP"}, "torchtitan-2025-async-tp"),
        ({"framework": "PyTorch FSDP", "year": "2024", "notes": "eager"}, "pytorch-fsdp-2023"),
        ({"framework": "Megatron-LM", "precision": "fp16"}, "megatron-lm-2021"),
        ({"framework": "Megatron-DeepSpeed"}, "megatron-lm-2022"),
        ({"framework": "Megatron-Core r0.8.0"}, "megatron-core-2024"),
        ({"framework": "NVIDIA NeMo Framework Release 24.09"}, "nemo-2025"),
        ({"framework": "NeMo Megatron-Bridge 26.04"}, "megatron-bridge-2025"),
        ({"framework": "Megatron-Bridge 0.4.2 / Megatron-Core 0.17.1"}, "megatron-core-2026"),
        ({"framework": "NeMo Megatron-Bridge 26.06"}, "nemo-2026"),
        ({"framework": "Megatron-LM 0.14, TE 2.11"}, "megatron-core-2025"),
        ({"framework": "Primus-pipeline (Megatron)"}, "primus-2025"),
        ({"framework": "nanotron (Hugging Face)"}, "nanotron-2025"),
        ({"framework": "MaxText (JAX)"}, "maxtext-2025"),
        ({"framework": "JAX / PaxML"}, "pax-2023"),
        (TRAINED | {"framework": "PyTorch NVIDIA Release 24.09"}, "nemo-2025"),
        (TRAINED | {"framework": "ROCm PyTorch"}, "primus-2025"),
        ({"framework": "PyTorch NVIDIA Release 24.09"}, "pytorch-fsdp-2023"),
        ({"framework": "MXNet 19.05", "year": "2020"}, "mxnet-2020"),
        ({"framework": "MXNet NVIDIA Release 23.04", "year": "2023"}, "mxnet-2023"),
        ({"framework": "TensorFlow 1.x (May 2017)"}, "tensorflow-2017"),
        ({"framework": "TensorFlow 2.4"}, TF2),
        ({"framework": "TensorFlow 2.4", "notes": "batch size=32 & with xla"}, f"{TF2}-xla"),
        ({"framework": "TensorFlow 2.4", "notes": "batch size=32 & without xla"}, TF2),
        ({"framework": "TensorFlow1"}, "horovod-2018"),
        ({"framework": "TensorFlow1", "notes": "batch size=224 & withxla"}, "horovod-2018-xla"),
        ({"framework": "TensorFlow1", "source": DEEP_LEARNING_EXAMPLES}, "horovod-2018-xla"),
        ({"framework": "MxNet", "source": DLPERF}, "gluon-2020"),
        ({"framework": "NVIDIADeepLearningExamples/MxNet", "source": DLPERF}, "mxnet-2020"),
        ({"framework": "MXNet", "source": DEEP_LEARNING_EXAMPLES}, "mxnet-2020"),
        ({"framework": "NVIDIADeepLearningExamples/TensorFlow"}, "horovod-2018"),
        ({"framework": "TensorFlow 1.13 + Horovod 0.16"}, "horovod-2018"),
        ({"framework": "Horovod (TensorFlow)"}, "horovod-2018"),
        ({"framework": "Horovod"}, "horovod-2018"),
        ({"framework": "MXNet 1.5 + Horovod"}, "mxnet-2020"),
        ({"framework": "Horovod (MXNet)"}, "mxnet-2020"),
        ({"framework": "PyTorch 1.7 with Horovod"}, "pytorch-eager-2020"),
        ({"framework": "Keras + Horovod"}, "xla-2026"),
        ({"framework": "DeepSpeed ZeRO-3"}, "deepspeed-2021"),
        ({"framework": "Keras on TensorFlow 1.7, multi_gpu_model"}, "keras-multi-gpu-model"),
        ({"framework": "PyTorch 1.7, DataParallel"}, "pytorch-dataparallel"),
        ({"framework": "PyTorch 1.7, DistributedDataParallel"}, "pytorch-eager-2020"),
        ({"framework": "PyTorch 1.7"}, "pytorch-eager-2020"),
        ({}, "xla-2026"),
        ({"layers": "8", "fsdp": "1", "pipeline": "8", "recompute": "full"}, "pytorch-fsdp-2023"),
    ],
)
def test_a_row_is_predicted_with_the_framework_that_it_names(change, framework, row):
    """As a user can ask for it: torchtitan compiles its loss from 2025 on; whether its blocks are
    compiled, and overlap, its row says."""
    assert case(row(GPT | change)).framework.name == framework


LORA = GPT | {"model": "llama", "kv_heads": "2", "ffn_hidden": "96", "recompute": "full"}


@pytest.mark.parametrize(
    ("change", "targets"),
    [
        (
            {"case_id": "mlperf_llama2_70b_lora", "model": "llama2_70b_lora", "precision": "fp8?"}
            | {"hardware": "h100_sxm_80gb", "intra_node_link": "NVLINK 4.0, NVSWITCH 3.0 900GB/s"},
            ("linear_qkv", "linear_proj"),
        ),
        ({"notes": "LoRA Performance; LLAMA3_70B"}, ("linear_qkv",)),
        ({"case_id": "automodel_8B", "notes": "Fine-Tuning (LoRA)"}, ("all-linear",)),
        ({"notes": "exploratory"}, None),
    ],
)
def test_a_row_of_fine_tuning_trains_adapters(change, targets, row):
    """Of the layers that its benchmark or recipe adapts, with rank 16 and a base in 16 bits."""
    tuning = case(row(LORA | change)).runs[0].config.fine_tuning

    if targets is None:
        assert tuning is None
    else:
        lora = LoraConfig(rank=16, alpha=32, targets=targets)
        assert tuning == FineTuningConfig(lora=lora, base_dtype="bfloat16")


def test_row_that_its_source_contradicts_is_run_as_published(row):
    """A report of H200, with the recompute of the file that it names."""
    place = "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
    titan = GPT | TITAN | {"source_locator": place, "year": "2025"}
    machine = {"hardware": "h100_sxm_96gb_500w", "recompute": "full"}

    found = case(row(titan | machine))

    assert found.cluster.chip.name == "h200"
    assert [getattr(run.config.model, "remat", None) for run in found.runs] == ["selective_op"]


def test_a_log_of_int8_is_no_run_in_bfloat16():
    """MaxText's GPT-3 on v5p, which would be at 96 % of the peak of bfloat16: at that of int8, with
    the layout and the samples of the script that the log is of."""
    rows = {each.case_id: each for each in read_ledger(find_ledger("tpu_and_jax"))}

    found = case(rows["tpurecipe_v5p_GPT3-175B-MaxText"])

    run = found.runs[0]
    assert (run.layout.fsdp, run.layout.tensor, run.dataset.input_shape) == (64, 8, (2048,))
    assert run.config.batch.microbatches == 1
    assert found.cluster.chip.peak("f8e4m3fn") == 918e12


def _places(place: str, *names: str) -> str:
    """Arguments of MaxText that put activations there."""
    return "{" + ", ".join(f"'{name}': '{place}'" for name in names) + "}"


_QKV = ("query_proj", "key_proj", "value_proj")
_GATED = ("mlpwi_0", "mlpwi_1")


@pytest.mark.parametrize(
    ("change", "save", "offload", "axes"),
    [
        ({"recompute": "custom", "notes": "{'context': 'device'}"}, ("context",), (), (1, 8)),
        ({"recompute": "custom", "notes": _places("offload", *_QKV)}, (), ("qkv_proj",), (1, 8)),
        ({"recompute": "custom", "notes": _places("device", *_GATED)}, ("mlpwi",), (), (1, 8)),
        ({"recompute": "custom", "notes": "{'ici_data_parallelism': '2'}"}, "full", "full", (2, 4)),
        (
            {"recompute": "save_dot_with_context_except_mlp"},
            ("qkv_proj", "context", "out_proj"),
            (),
            (1, 8),
        ),
        ({"recompute": "save_qkv_proj"}, ("qkv_proj",), (), (1, 8)),
        ({"recompute": "minimal"}, ("qkv_proj", "out_proj", "mlpwi", "mlpwo"), (), (1, 8)),
        (
            {"recompute": "minimal_offloaded"},
            (),
            ("qkv_proj", "out_proj", "mlpwi", "mlpwo"),
            (1, 8),
        ),
    ],
)
def test_arguments_of_maxtext_say_what_is_kept_and_how_it_is_spread(
    change, save, offload, axes, row
):
    """Without more microbatches than it is told to make. Where the policy is "custom" and nothing
    is said of the inputs of blocks, they may be offloaded: where the step does not fit else."""
    maxtext = GPT | {"framework": "MaxText (JAX)", "data": "", "microbatch": ""}

    runs = case(row(maxtext | change)).runs

    others = [getattr(each.config.model, "remat", None) for each in runs[1:]]
    is_open = change["recompute"] == "custom"
    assert ["decoder_layer_input" in getattr(each, "offload", ()) for each in others] == [
        True
    ] * is_open
    found = getattr(runs[0].config.model, "remat", None)
    assert (runs[0].layout.data, runs[0].layout.fsdp) == axes
    assert getattr(found, "save", found) == save
    assert getattr(found, "offload", found) == offload
    assert runs[0].config.batch.microbatches == 1


@pytest.mark.parametrize(
    ("notes", "unknown"),
    [
        (_places("offload", "query_proj"), ("query_proj",)),
        (_places("device", "query_proj", "key_proj"), ("query_proj", "key_proj")),
        (
            _places("device", "query_proj", "key_proj") + _places("offload", "value_proj"),
            ("query_proj", "key_proj", "value_proj"),
        ),
        (_places("device", "mlpwi_1", "engram"), ("mlpwi_1", "engram")),
    ],
)
def test_names_of_maxtext_that_are_not_told_apart_here_keep_nothing(notes, unknown, row):
    """Queries, keys and values have one name here, which needs all three in one place, as have both
    halves of a gate: less, and names that nothing has, are computed again, and the row says so."""
    maxtext = GPT | {"framework": "MaxText (JAX)", "data": "", "microbatch": ""}

    found = case(row(maxtext | {"recompute": "custom", "notes": notes}))

    assert getattr(found.runs[0].config.model, "remat", None) == "full"
    assert found.nearest == tuple(f"{name}, which is kept, computed again" for name in unknown)


EXPERTS_OF_MAXTEXT = GPT | {
    **{"framework": "MaxText (JAX)", "data": "", "microbatch": "", "kv_heads": "4"},
    **{"ffn_hidden": "96", "experts": "8", "experts_per_token": "2", "expert_hidden": "64"},
    "shared_experts": "0",
}


@pytest.mark.parametrize(
    ("model", "policy", "save", "offload"),
    [
        ("mixtral_moe", "minimal", ("qkv_proj", "out_proj", "mlpwo"), ()),
        ("mixtral_moe", "minimal_flash", ("qkv_proj", "out_proj", "mlpwo", "context"), ()),
        ("mixtral_moe", "minimal_with_context", ("qkv_proj", "out_proj", "mlpwo", "context"), ()),
        ("mixtral_moe", "minimal_offloaded", (), ("qkv_proj", "out_proj", "mlpwo")),
        (
            "deepseek_v3_moe",
            "minimal",
            ("qkv_proj", "kv_wa_proj", "query_wa_proj", "out_proj", "mlpwi", "mlpwo"),
            (),
        ),
    ],
)
def test_policies_of_maxtext_keep_what_a_network_of_experts_has(model, policy, save, offload, row):
    """Its policies name what some networks lack: without shared experts and dense layers there are
    no first matrices of theirs, and latents are of latent attention."""
    shared = {"shared_experts": "1"} if "mlpwi" in save else {}

    found = case(row(EXPERTS_OF_MAXTEXT | shared | {"model": model, "recompute": policy}))

    remat = getattr(found.runs[0].config.model, "remat", None)
    assert (getattr(remat, "save", None), getattr(remat, "offload", None)) == (save, offload)


def test_latent_attention_without_a_latent_of_queries_keeps_none(row, monkeypatch):
    """As DeepSeek-V2-Lite's, whose queries are made at once."""
    preset = PRESETS["deepseek-v3"]
    latent = preset.sizes["mla"]
    assert isinstance(latent, dict)
    latent = {name: size for name, size in latent.items() if name != "q_lora_rank"}
    lite = replace(preset, sizes={**preset.sizes, "mla": latent})
    monkeypatch.setitem(PRESETS, "deepseek-v3", lite)

    found = case(row(EXPERTS_OF_MAXTEXT | {"model": "deepseek_v3_moe", "recompute": "minimal"}))

    names = getattr(getattr(found.runs[0].config.model, "remat", None), "save", ())
    assert "kv_wa_proj" in names
    assert "query_wa_proj" not in names


RACK = GPT | {"model": "llama31_8b", "ffn_hidden": "96", "hardware": "gb200"}
RACK |= {"intra_node_link": "NVLINK Gen5", "devices_per_node": "4"}
RACK |= {"node_network_gbit_per_second": "1600"}


def test_rows_of_2026_become_runs(row):
    """Types after fp8, chips that are two devices, racks, rings, chunks that do not divide layers
    or whose microbatches make no groups, and blocks that are not Llama's."""
    rack = case(row(RACK | {"precision": "nvfp4"}))
    assert rack.cluster.devices_per_node == 72
    assert rack.cluster.network is not None
    assert rack.cluster.network.bytes_per_second == 18 * 1600e9 / 8
    assert rack.runs[0].config.model.compute_dtype == "float4"

    torus = {"hardware": "tpu7x_ironwood_chip", "device_count": "8", "fsdp": "16", "data": ""}
    torus |= {"intra_node_link": "", "devices_per_node": "4", "node_network_gbit_per_second": ""}
    torus |= {"global_batch": "16", "per_device_batch": "0.5", "recompute": "custom"}
    tpu = case(row(RACK | torus | {"microbatch": "1"}))
    assert (tpu.runs[0].layout.fsdp, tpu.runs[0].layout.device_count) == (16, 16)
    assert getattr(tpu.runs[0].config.model, "remat", "") == "full"

    stages = {"layers": "6", "fsdp": "1", "pipeline": "4", "context": "2", "pipeline_chunks": "2"}
    for layers in ("6", "8"):
        piped = case(row(RACK | stages | {"recompute": "none?", "layers": layers})).runs[0].config
        assert (piped.layout.pipeline_chunks, piped.layout.context_strategy) == (1, "all_to_all")
        assert getattr(piped.model, "layers", 0) == int(layers)
    grouped = case(row(RACK | stages | {"recompute": "none?", "microbatch": "1"}))
    dealt = grouped.runs[0].config
    assert (dealt.layout.pipeline_chunks, getattr(dealt.model, "layers", 0)) == (2, 8)
    assert "6 layers, embedding and loss in equal chunks by 8 layers" in grouped.nearest
    ring = case(row(RACK | {"context": "2", "fsdp": "4"})).runs[0].config
    assert ring.layout.context_strategy == "ring"

    nemotron = {"model": "nemotron4", "kv_heads": "2", "vocab": ""}
    found = case(row(RACK | nemotron)).runs[0]
    assert isinstance(found.config.model, LlamaConfig)
    assert found.config.model.block.activation == "squared_relu"
    assert found.dataset.classes == 256_000
    tied = case(row(RACK | {"notes": "embeddings tied"})).runs[0].config.model
    assert isinstance(tied, LlamaConfig)
    assert tied.tied_embeddings

    nemo = {"framework": "NeMo / Megatron-Core", "tensor": "2", "fsdp": "4", "recompute": ""}
    runs = case(row(RACK | nemo)).runs
    assert runs[0].config.layout.sequence_parallel
    remats = [getattr(run.config.model, "remat", "") for run in runs]
    assert remats == ["none", "selective", "full"]

    cores = {"hardware": "trainium1_neuroncore", "intra_node_link": "", "devices_per_node": "32"}
    cores |= {"precision": "Autocast:BF16+SR", "case_id": "neuron_llama2_7b", "seq_len": ""}
    cores |= {"tensor": "8", "fsdp": "1", "heads": "8", "kv_heads": "4"}
    found = case(row(RACK | cores))
    assert found.cluster.name == "aws-trn1"
    assert found.runs[0].dataset.input_shape == (4096,)
    assert isinstance(found.runs[0].config.model, LlamaConfig)
    assert found.runs[0].config.model.kv_heads == 8

    stalled = case_of(row(RACK | {"stalled": "1"}))
    assert isinstance(stalled, Skipped)
    assert "stalled" in stalled.reason

    held = case(row(RACK | {"stalled": "1", "peak_memory_gib": "40"}))
    assert (held.row.step_seconds, held.row.peak_memory_gib) == (None, 40)


MIXTURE = GPT | {"model": "qwen3_moe", "hidden": "256", "kv_heads": "4", "ffn_hidden": "96"}
MIXTURE |= {"framework": "Megatron-Core MoE", "data": "8", "fsdp": "1", "device_count": "8"}
MIXTURE |= {"experts": "16", "experts_per_token": "2", "expert_hidden": "64", "recompute": "full"}
TENSOR = {"tensor": "8", "data": "4", "device_count": "32", "heads": "8", "per_device_batch": ""}


@pytest.mark.parametrize(
    ("change", "axes", "notes"),
    [
        ({"expert_parallel": "4"}, {"expert": 4, "data": 2}, ()),
        # Experts whole on 32 devices, which are 4 of the batch, 8 of the tensor axis each.
        (
            TENSOR | {"expert_parallel": "32", "expert_tensor": "1", "experts": "32"},
            {"expert": 4, "data": 1, "tensor": 8},
            (),
        ),
        # Megatron-LM splits an expert over tensor where enough devices are left.
        (TENSOR | {"expert_parallel": "4"}, {"expert": 4, "data": 1, "tensor": 8}, ()),
        (
            {"data": "1", "fsdp": "8", "expert_parallel": "2", "zero_stage": "3"},
            {"expert": 2, "fsdp": 4, "data": 1},
            ("ZeRO 3 over the expert axis, of all but experts, by ZeRO 1",),
        ),
        (
            {"framework": "MaxText (JAX)", "data": "", "zero_stage": "3", "expert_parallel": "4"}
            | {"fsdp": ""},
            {"expert": 4, "fsdp": 2, "data": 1},
            (),
        ),
    ],
)
def test_experts_lie_where_their_framework_has_them(change, axes, notes, row):
    """On the same share of devices, taken out of those that share the batch."""
    found = case(row(MIXTURE | change))

    layout = found.runs[0].layout
    assert {name: getattr(layout, name) for name in axes} == axes
    assert found.nearest == notes
    model = found.runs[0].config.model
    assert isinstance(model, LlamaConfig)
    assert model.moe is not None
    assert (model.moe.experts_per_token, model.moe.expert_hidden) == (2, 64)
    assert model.block.qk_norm == "head"
    assert model.kv_heads == layout.tensor if layout.tensor > 4 else 4


def test_where_experts_are_and_what_hides_their_exchange_are_words_of_the_layout(row):
    """Of Megatron-Core's rows, in which a run says what it is: two that differ in it are two."""
    whole = TENSOR | {"expert_parallel": "32", "expert_tensor": "1", "experts": "32"}
    notes = {"notes": "dispatcher nccl_alltoall; MoE all-to-all overlap on; "}
    layout = case(row(MIXTURE | whole | notes | {"microbatch": "1"})).runs[0].config.layout
    assert (layout.expert_tensor, layout.overlap_expert_exchange) == (1, True)
    assert layout.spreads_experts

    # NVIDIA's recipes have whole experts, said or not.
    recipe = {"source": "github:yanring/Megatron-MoE-ModelZoo@e865", "experts": "32"}
    layout = case(row(MIXTURE | TENSOR | recipe | {"expert_parallel": "16"})).runs[0].config.layout
    assert (layout.expert, layout.expert_tensor) == (2, 1)

    off = {"notes": "dispatcher nccl_alltoall; MoE all-to-all overlap off; "}
    layout = case(row(MIXTURE | TENSOR | {"expert_parallel": "4"} | off)).runs[0].config.layout
    assert (layout.expert_tensor, layout.overlap_expert_exchange) == (None, False)


def test_what_networks_with_experts_lack_is_expressed_by_what_is_nearest(row):
    """And said: a capacity of the mean load, layers that alternate, libraries for the dispatch."""
    dropped = MIXTURE | {"model": "grok1_moe", "vocab": ""}
    for balance, capacity, notes in (("1.0", 1.0, 0), ("1.25", 1.25, 0)):
        found = case(row(dropped | {"moe_balance": f"capacity_factor {balance}, pad"}))
        model = found.runs[0].config.model
        assert isinstance(model, LlamaConfig)
        assert model.moe is not None
        assert model.moe.capacity_factor == capacity
        assert len(found.nearest) == notes
        assert found.runs[0].dataset.classes == 131_072

    maverick = MIXTURE | {"model": "llama4_moe", "layers": "4", "experts": "128"}
    alternating = case(row(maverick)).runs[0].config.model
    assert isinstance(alternating, LlamaConfig)
    assert alternating.moe is not None
    assert alternating.moe.dense_layers == 2
    stages = case_of(row(maverick | {"pipeline": "2", "device_count": "16"}))
    assert isinstance(stages, Skipped)
    assert "alternate" in stages.reason

    sent = case(row(MIXTURE | {"notes": "dispatcher deepep_uccl; MoE all-to-all overlap off;"}))
    assert sent.cluster.dispatch is not None
    assert sent.cluster.dispatch.name == "deepep-uccl"
    assert not sent.nearest
    over = {"intra_node_link": "NVLink; EFA between nodes", "notes": "dispatcher deepep_nvshmem;"}
    assert (library := case(row(MIXTURE | over)).cluster.dispatch) is not None
    assert library.name == "deepep-efa"
    recipe = {"framework": "Megatron-Bridge, NeMo 26.04"}
    recipe |= {"source_locator": "docs/performance-summary.md:45"}
    assert (library := case(row(MIXTURE | recipe)).cluster.dispatch) is not None
    assert library.name == "deepep"
    plain = case(row(MIXTURE | {"notes": "dispatcher nccl_alltoall;"}))
    assert plain.cluster.dispatch is None

    latent = case(row(MIXTURE | {"model": "deepseek_v3_moe", "recompute": "norm, act"}))
    assert isinstance(model := latent.runs[0].config.model, LlamaConfig)
    assert model.mla is not None
    assert model.remat == "selective"
