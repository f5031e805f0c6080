"""Maps a row of a ledger to runs of scalejax: network, data, batch, layout, cluster.

Knows how published runs were set up, as far as their rows state it; if a row leaves a choice
open, all runs that it may mean are returned. Compiles and predicts nothing.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from scalejax.config.model import (
    NARROW_TYPES,
    PRODUCT_NAMES,
    ActivationName,
    DecoderConfig,
    ModelConfig,
)
from scalejax.config.parallelism import ContextStrategy
from scalejax.config.presets import PRESETS
from scalejax.config.run import ResolvedRun, RunConfig, resolve
from scalejax.core.errors import ConfigError, ScalejaxError
from scalejax.core.serialization import JsonValue, build
from scalejax.core.units import counted
from scalejax.hardware import Cluster
from scalejax.simulator.frameworks import Framework, framework_named
from scalejax.simulator.transformer.shape import ENDS
from scalejax.validation.clusters import cluster_of
from scalejax.validation.experts import (
    MIXTURES,
    block_table,
    exchange_of,
    expert_axes,
    moe_table,
    nearest,
)
from scalejax.validation.ledger import LedgerRow
from scalejax.xla import ProfileJob

# Corrections of rows of the open ledger that differ from their source.

_H200 = "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
"""A report of pytorch/torchtitan: "8 NVIDIA H200 GPUs connected via NVLink"; run with
llama3_8b.toml, whose [activation_checkpoint] has mode = 'selective'. The ledger has the H100 of
the other reports, and full recompute."""


def as_published(row: LedgerRow) -> LedgerRow:
    """`row` corrected to its source, with scalejax's names of networks and JAX's devices; only the
    memory of a run that stalled is kept."""
    if row.stalled and row.peak_memory_gib is not None:
        row = replace(row, step_seconds=None, stalled=None)
    if row.machine.hardware in _TWO_DEVICES:
        # Axes count devices of JAX, two per chip; their batch follows from the global batch.
        work = replace(row.work, per_device_batch=None)
        row = replace(row, device_count=2 * row.device_count, work=work)
    is_open = "MaxText" in (row.framework or "") and row.spread.data is None
    if is_open and (found := _DATA_ARGUMENT.search(row.notes or "")):
        data = int(found[1])
        row = replace(row, spread=replace(row.spread, data=data, fsdp=_fsdp(row) // data))
    if (network := _SAME_NETWORK.get(row.model.model)) is not None:
        row = replace(row, model=replace(row.model, model=network))
    if (script := _TABLE_1.get(row.case_id)) is not None:
        microbatch, chunks = script
        row = replace(
            row,
            work=replace(row.work, microbatch=microbatch),
            spread=replace(row.spread, pipeline_chunks=chunks),
        )
    if row.source_locator != _H200 or "torchtitan" not in row.source:
        return row
    return replace(
        row,
        machine=replace(row.machine, hardware="h200_sxm_141gb"),
        work=replace(row.work, recompute="selective"),
    )


_TABLE_1 = {
    "megatron_sc21_weak_1.7B": (16, 1),
    "megatron_sc21_weak_3.6B": (16, 1),
    "megatron_sc21_weak_7.5B": (16, 1),
    "megatron_sc21_weak_18B": (8, 1),
    "megatron_sc21_weak_39B": (4, 1),
    "megatron_sc21_weak_76B": (2, 3),
    "megatron_sc21_weak_145B": (2, 2),
    "megatron_sc21_weak_310B": (1, 2),
    "megatron_sc21_weak_530B": (1, 3),
    "megatron_sc21_weak_1T": (1, 1),
}
"""Microbatch, and interleaved chunks per stage, of rows that leave both open, from the script that
made this table of Narayanan et al. 2021 (NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh: MBS, and
layers of a stage over --num-layers-per-virtual-pipeline-stage)."""
_DATA_ARGUMENT = re.compile(r"'ici_data_parallelism': '(\d+)'")
"""MaxText's argument for the data axis in the notes of a row whose fsdp column counts all
devices."""
_TWO_DEVICES = ("tpu7x_ironwood_chip",)
"""Names of chips that are two devices of JAX each, and whose rows count chips."""

# Fine-tuning.

_MLPERF_LORA = "llama2_70b_lora"
"""MLPerf's fine-tuning benchmark, a Llama."""
_ADAPTED = {
    _MLPERF_LORA: ("linear_qkv", "linear_proj"),
    "automodel": ("all-linear",),
    "": ("linear_qkv",),
}
"""Adapted layers by part of a row's name. MLPerf: qkv_proj and o_proj (mlcommons/training,
llama2_70b_lora/README.md). NeMo AutoModel: match_all_linear (examples/llm_finetune/llama3_3,
peft_benchmark.yaml). Others, of Megatron Bridge and NeMo: peft.target_modules = ["linear_qkv"] (the
performance recipes of both)."""
_RANK, _ALPHA = 16, 32.0
"""From MLPerf's and AutoModel's files above, and NeMo's llama3_70b; the rank of 8 in its llama3_8b
makes a step a thousandth shorter."""


def _fine_tuning(row: LedgerRow) -> JsonValue:
    """The table `fine_tuning` of the run; None where all of the network is trained.

    The frozen base is kept in 16 bits, as these frameworks load it.
    """
    if row.kind != "lora":
        return None
    targets: list[JsonValue] = []
    targets += next(names for part, names in _ADAPTED.items() if part in row.case_id)
    base_dtype = "float32" if row.work.precision in ("fp32", "tf32") else "bfloat16"
    return {
        "base_dtype": base_dtype,
        "lora": {"rank": _RANK, "alpha": _ALPHA, "targets": targets},
    }


IMAGE_SIZES = {"alexnet": 227, "inception_v3": 299, "xception": 299}
"""Height and width of the images of networks whose input is not 224 x 224."""
_SAME_NETWORK = {
    _MLPERF_LORA: "llama",
    "llama31_8b": "llama",
    "llama31_405b": "llama",
    "llama_like_1b": "llama",
    "llama_like_3b": "llama",
    "llama_like_8b": "llama",
    "llama_like_80b": "llama",
    "llama_like": "llama",
    "mistral": "llama",
    "gpt3": "gpt",
}
"""Names of networks that are llama or gpt in the sizes of their rows. The window of Mistral 7B,
4,096 tokens, is left out, as in MaxText, whose rows these are."""
_BLOCKS = {
    "nemotron4": "nemotron4-15b", "qwen2.5": "qwen2.5-7b", "gemma4": "gemma3-1b", **MIXTURES,
}  # fmt: skip
"""Networks with the blocks of a preset, in the sizes of their rows."""
_CAUSAL = ("gpt", "llama", *_BLOCKS)
"""Networks whose sizes a row states, and which support recompute."""
_TIED = "embeddings tied"
"""Mark of rows whose output layer is the embedding."""
_OF_BLOCKS = ("block", "mla", "scaled_embeddings", "tied_embeddings")
"""What such a network takes from its preset."""
_VOCABULARIES = {"gpt": 51_200, "nemotron4": 256_000, "grok1_moe": 131_072}
"""Vocabulary where a row states none: GPT-3's 50,257 tokens, padded as in NVIDIA's recipes; those
of Nemotron-4 and Grok-1 as published."""
IMAGE_NETWORKS = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
    "inception_v3", "xception", "vgg16", "alexnet",
)  # fmt: skip
BERT_VOCABULARY, BERT_TOKENS, BERT_MASKED = 30_522, 128, 0.15
"""Vocabulary of the published BERT (Devlin et al. 2018, arXiv 1810.04805, and its code), the
sequence length of nine tenths of its training, and the fraction of masked tokens; defaults where a
row states none."""
_LLAMA_2_TOKENS = 4096
"""Context of Llama 2 (Touvron et al. 2023, arXiv 2307.09288, table 1), where a row states none."""
_WORDS_OF_DEVICE = 128
"""Megatron-LM's default of make-vocab-size-divisible-by (megatron/arguments.py)."""
_COMPUTE_TYPES = {
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "bfloat16",
    "bf16": "bfloat16",
    "fp8": "float8_delayed",
    "fp8?": "float8_delayed",
    "fp8-cs": "float8",
    "fp8-ds": "float8_delayed",
    "int8": "float8",
    "fp8-mx": "mxfp8",
    "mxfp8": "mxfp8",
    "fp4": "float4",
    "nvfp4": "float4",
    "Autocast:BF16+FP32Optimizer": "bfloat16",
    "Autocast:BF16+SR": "bfloat16",
}
"""Element type of the program. Half precision is traced as bfloat16, which has the same size; a
chip without bfloat16 is costed at its rates for f16. If a source leaves fp8 or fp4 open (fp8?), fp8
is used. If it does not say how fp8 is scaled, it is costed with delayed scaling, Transformer
Engine's default: in torchtitan, too, the largest values are computed by what produces the operands,
as torch.compile fuses it. torch-neuronx autocasts products; with stochastic rounding (SR) it holds
parameters in 16 bits, here in 32."""

_ASYNC_TENSOR = "asynctp"
"""Mark of torchtitan's rows with asynchronous tensor parallelism."""
_EAGER = "eager"
"""Mark of torchtitan's rows that compile nothing."""
_LOSS_COMPILED = 2025
"""The year in which torchtitan began to compile its loss (`simulator.frameworks`)."""
_TITAN_2024 = "torchtitan-2024"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the ledger as runs that can be compiled."""

    row: LedgerRow
    """The published measurement."""
    cluster: Cluster
    """The cluster of the measurement."""
    runs: tuple[ResolvedRun, ...]
    """The run; if the row leaves microbatch or recompute open, all candidates: the first that fits
    the device's memory is used, or else the last; for a pipeline, the fastest."""
    framework: Framework
    """The framework that trained it."""
    nearest: tuple[str, ...] = ()
    """Which parts of the row are only approximated."""

    def job(self, choice: int) -> ProfileJob:
        """Job of the program of one of the runs."""
        return ProfileJob(run=self.runs[choice], cluster=self.cluster, framework=self.framework)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that cannot be predicted."""

    row: LedgerRow
    """The published measurement."""
    reason: str
    """Reason in one line."""
    is_mapped: bool = False
    """Whether it could be expressed as a run, but not compiled."""


def case_of(row: LedgerRow) -> Case | Skipped:
    """Case of `row`, or the reason why it cannot be predicted."""
    row = as_published(row)
    try:
        _require_axes(row)
        return Case(
            row=row,
            cluster=cluster_of(row),
            runs=tuple(_runs(row)),
            framework=framework_of(row),
            nearest=(
                *_nearest_layers(row),
                *_nearest_chunks(row),
                *_nearest_blocks(row),
                *_nearest_activations(row),
                *nearest(row, expert_axes(row, _fsdp(row))),
            ),
        )
    except ScalejaxError as error:
        return Skipped(row=row, reason=one_line(error))


def one_line(error: ScalejaxError) -> str:
    """The text of an error as a reason, without line breaks and full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _chunks(row: LedgerRow) -> int:
    """Interleaved chunks per pipeline stage.

    Those that a row states, or its framework's default. Interleaving is left out, so that the
    bubble is too long, if they do not divide the layers, alone or with embedding and loss counted
    as layers, or if microbatches cannot be grouped by one for each stage.
    """
    stages, chunks = row.spread.pipeline or 1, _interleaving(row)
    if stages == 1 or (_layers(row) or stages) % (stages * chunks) or not _has_groups(row):
        return 1
    return chunks


def _interleaving(row: LedgerRow) -> int:
    """Chunks per stage as a row states them, or else its framework's default.

    NVIDIA's NeMo recipes for dense networks interleave all pipelines: chunks have
    `_LAYERS_OF_CHUNK` layers, or the nearest number that divides the layers, alone or with
    embedding and loss.
    """
    spread, layers = row.spread, row.model.layers or 0
    stages = spread.pipeline or 1
    if stages == 1:
        return 1
    if not _is_interleaving_open(row):
        return spread.pipeline_chunks or 1
    wanted = max(1.0, layers / stages / _LAYERS_OF_CHUNK)
    fitting = [
        count
        for count in range(1, layers // stages + 2)
        if any(each % (stages * count) == 0 for each in (layers, layers + ENDS))
    ]
    return min(fitting, key=lambda count: abs(math.log(count / wanted)), default=1)


def _is_interleaving_open(row: LedgerRow) -> bool:
    """Whether NeMo's pipeline of a dense network states no interleaving: tables of NVIDIA's
    dgxc-benchmarking have "NA" there, which is 1 in the ledger, even for networks that the releases
    before and after interleave (nemotron/README.md)."""
    stages, chunks = row.spread.pipeline or 1, row.spread.pipeline_chunks
    is_open = chunks is None or (chunks == 1 and "dgxc-benchmarking" in row.source)
    return stages > 1 and is_open and row.kind == "dense" and _is_nemo(row)


_LAYERS_OF_CHUNK = 2
"""Layers of a chunk in six of the thirteen pipelines of dense networks that NVIDIA's recipes state
(ledgers `dgxc_benchmarking` and `megatron_bridge`), and their median; one in five. Its submissions
to MLPerf have two as well: INTERLEAVED_PIPELINE=8 of 126 layers on 8 stages
(mlcommons/training_results_v5.1, Dell, llama31_8b, config_GB300_128x4x72xtp2pp8cp2_cg.sh)."""


def _is_nemo(row: LedgerRow) -> bool:
    """Whether NeMo or Megatron-Bridge trained it, as in NVIDIA's submissions to MLPerf."""
    return framework_of(row).name.startswith(("nemo-", "megatron-bridge-"))


def _has_groups(row: LedgerRow) -> bool:
    """Whether microbatches may be grouped by one for each stage."""
    counts = _microbatch_counts(row, _per_device_batch(row))
    return any(count % (row.spread.pipeline or 1) == 0 for count in counts)


def _layers(row: LedgerRow) -> int | None:
    """Layers of the run: two more than the network's if its chunks count embedding and loss as
    layers (Megatron-LM's account_for_embedding_in_pipeline_split), the nearest that equal chunks
    come."""
    layers = row.model.layers
    return layers + ENDS if layers is not None and _counts_ends(row) else layers


def _deals_ends(row: LedgerRow) -> bool:
    """Whether its framework has an option for that: those with a closed form of their own do."""
    return _counts_ends(row) and _chunks(row) > 1 and framework_of(row).kernels is not None


def _nearest_layers(row: LedgerRow) -> tuple[str, ...]:
    if (layers := _layers(row)) == row.model.layers or _deals_ends(row):
        return ()
    return (f"{row.model.layers} layers, embedding and loss in equal chunks by {layers} layers",)


def _counts_ends(row: LedgerRow) -> bool:
    """Whether stages count embedding and loss as layers."""
    layers, chunks = row.model.layers, _interleaving(row)
    parts = (row.spread.pipeline or 1) * chunks
    if layers is None or chunks == 1 or layers % parts == 0:
        return False
    return (layers + ENDS) % parts == 0 and _has_groups(row)


def _nearest_chunks(row: LedgerRow) -> tuple[str, ...]:
    if not _is_interleaving_open(row):
        return ()
    return (f"{_chunks(row)} chunks a stage: its interleaving is not stated",)


def _nearest_blocks(row: LedgerRow) -> tuple[str, ...]:
    if row.model.model != "gemma4":
        return ()
    return (
        "Gemma 4 by the blocks of Gemma 3, without embeddings of each layer, and layers of two "
        "widths by their mean",
    )


def _nearest_activations(row: LedgerRow) -> tuple[str, ...]:
    if _policy_of_maxtext(row) is None:
        return ()
    _, others = _stated_activations(row)
    return tuple(f"{name}, which is kept, computed again" for name in others)


def _is_megatron(row: LedgerRow) -> bool:
    """Whether Megatron-LM trained it, or one of its descendants."""
    return (row.framework or "").startswith("Megatron")


def framework_of(row: LedgerRow) -> Framework:
    """The framework that trained a row, by its name in `predict --framework`.

    Submissions of NVIDIA and its partners to MLPerf name a container of PyTorch for all
    benchmarks, but train decoders with NeMo and image networks with MXNet. NeMo AutoModel groups
    the products of experts and sends tokens to them as torchtitan does.

    Raises:
        ConfigError: if no framework of that name is known.
    """
    named, marks = row.framework or "", f"{row.case_id} {row.notes}".lower()
    if _is_titan(row):
        name = "torchtitan-2025" if (row.year or _LOSS_COMPILED) >= _LOSS_COMPILED else _TITAN_2024
        name += "-async-tp" if _ASYNC_TENSOR in marks else "-eager" if _EAGER in marks else ""
        return framework_named(name)
    is_benchmark = "training_results" in row.source and "rocm" not in named.lower()
    if is_benchmark and row.model.model in _CAUSAL:
        return framework_named("nemo-2025")
    found_names = (
        name for pattern, name in _TRAINED_BY if re.search(pattern, named, re.IGNORECASE)
    )
    name = next(found_names, "xla-2026")
    if name == "xla-2026" and (row.spread.pipeline or 1) > 1:
        name = "pytorch-fsdp-2023"
    if name == "megatron-lm-2022" and row.work.precision == "fp16":
        name = "megatron-lm-2021"
    if name == "megatron-lm-2022" and (row.year or 0) >= _MEGATRON_CORE:
        name = "megatron-core-2024" if row.year == _MEGATRON_CORE else "nemo-2025"
    if name == "megatron-bridge-2025":
        found = _NEMO_RELEASE.search(named)
        name = "nemo-2026" if found is not None and found[0] >= _NEMO_2026 else name
    if name == "mxnet-2020" and (row.year or 0) >= _MXNET_2023:
        name = "mxnet-2023"
    if name == "mxnet-2020" and "DLPerf" in row.source and named.lower() == "mxnet":
        name = "gluon-2020"  # DLPerf, MxNet/BERT and MxNet/Classification/RN50v1b: their scripts
    if name in ("horovod-2018", "tensorflow-2020") and _compiles_graph(row):
        name += "-xla"
    return framework_named(name)


def _compiles_graph(row: LedgerRow) -> bool:
    """Whether XLA compiled TensorFlow's graph: as a row says, and in NVIDIA's published results,
    whose tables are for "TF32 + XLA" and "mixed precision + XLA"
    (NVIDIA/DeepLearningExamples, TensorFlow/Classification/ConvNets/resnet50v1.5/README.md)."""
    if "NVIDIA/DeepLearningExamples" in row.source:
        return True
    return bool(_WITH_XLA.search(f"{row.framework} {row.notes}"))


_WITH_XLA = re.compile(r"(?<!out)(with ?|\+ ?|use_)xla", re.IGNORECASE)
"""Mark of TensorFlow's rows whose graph XLA compiled: "with xla", "withxla"."""


def has_channels_first(row: LedgerRow) -> bool:
    """Whether arrays of images have channels first: the framework's default, unless it was
    overridden, as in NVIDIA's published results in mixed precision (NVIDIA/DeepLearningExamples,
    PyTorch/Classification/ConvNets/configs.yml: memory_format is nhwc). DLPerf ran the release
    before (its README's log: "memory_format : nchw")."""
    return framework_of(row).channels_first and "NVIDIA/DeepLearningExamples" not in row.source


_TRAINED_BY = (
    ("MaxText|MaxDiffusion", "maxtext-2025"),
    ("PaxML", "pax-2023"),
    (r"TensorFlow 1\.x \(May 2017\)", "tensorflow-2017"),
    ("multi_gpu_model", "keras-multi-gpu-model"),
    ("TensorFlow.*Horovod|Horovod.*TensorFlow|^Horovod$", "horovod-2018"),
    ("NVIDIADeepLearningExamples/TensorFlow|^TensorFlow1$", "horovod-2018"),
    ("TensorFlow", "tensorflow-2020"),
    ("Gluon", "gluon-2020"),
    ("MXNet", "mxnet-2020"),
    ("OneFlow", "oneflow-2020"),
    ("MindSpore", "mindspore-2020"),
    ("PaddlePaddle", "paddlepaddle-2020"),
    ("DeepSpeed ZeRO-3", "deepspeed-2021"),
    ("AutoModel", "torchtitan-2025"),
    ("Primus|ROCm", "primus-2025"),
    ("Megatron-Core r0", "megatron-core-2024"),
    (r"Megatron-LM 0\.", "megatron-core-2025"),
    (r"Megatron-Bridge 0\.", "megatron-core-2026"),
    ("Megatron-Bridge", "megatron-bridge-2025"),
    (r"NeMo|Megatron-Core", "nemo-2025"),
    ("Megatron", "megatron-lm-2022"),
    ("nanotron", "nanotron-2025"),
    ("neuronx", "neuronx-2025"),
    ("(?<!Distributed)DataParallel", "pytorch-dataparallel"),
    ("FSDP|Colossal-AI|PyTorch NVIDIA", "pytorch-fsdp-2023"),
    ("PyTorch", "pytorch-eager-2020"),
)
"""Framework by a pattern in the ledger's name for it; the first match counts."""
_NEMO_RELEASE, _NEMO_2026 = re.compile(r"2\d\.\d\d"), "26.06"
"""NeMo's release, and the first from which equal settings take up to 1.77 times less (the ledger
of 2026)."""
_MEGATRON_CORE = 2024
"""The first year in which Megatron-LM trains with Megatron-Core and Transformer Engine alone; from
the next on its examples set what NeMo's recipes set: fp8, graphs, overlap over tensor and data."""
_MXNET_2023 = 2022
_ON_MEGATRON_CORE = re.compile(r"Megatron-Core|NeMo (Framework|/)|Primus|Megatron-LM 0\.")


def _is_on_megatron_core(row: LedgerRow) -> bool:
    return _is_nemo(row) or bool(_ON_MEGATRON_CORE.search(row.framework or ""))


def _is_titan(row: LedgerRow) -> bool:
    """Whether torchtitan trained it. It selects recompute by operation: with
    selective_ac_option = 'op' in its train_configs, torchtitan/parallelisms/parallelize_llama.py
    keeps attention, every second matrix product, and reduce-scatters over tensor."""
    return (row.framework or "").startswith("torchtitan")


def _require_axes(row: LedgerRow) -> None:
    """Refuse axes that no layout of scalejax expresses.

    Raises:
        ConfigError: naming the axis.
    """
    spread = row.spread
    if row.stalled:
        raise ConfigError("its source marks it as stalled: no program explains its time")
    if (spread.pipeline or 1) > 1 and row.model.model not in _CAUSAL:
        raise ConfigError(f"a pipeline of {row.model.model!r}")
    axes = (spread.data, spread.fsdp, spread.tensor, spread.context, spread.pipeline)
    product = math.prod(size or 1 for size in axes)
    if spread.data is not None and product != row.device_count:
        raise ConfigError(
            f"its axes multiply to {product}, not to {counted(row.device_count, 'device')}"
        )


def _runs(row: LedgerRow) -> list[ResolvedRun]:
    """Runs that the row may mean, the likeliest first.

    Raises:
        ConfigError: if it means none that scalejax can build.
    """
    unknown = {"custom", "vit"}  # rows lack their sizes
    if row.model.model not in {*ModelConfig.names(), *_BLOCKS} - unknown:
        raise ConfigError(f"no network {row.model.model!r}")
    if row.work.precision is None:
        raise ConfigError("precision is not stated")
    compute_type = _COMPUTE_TYPES.get(row.work.precision)
    if compute_type is None or (compute_type in NARROW_TYPES and row.model.model not in _CAUSAL):
        raise ConfigError(f"precision {row.work.precision!r}")
    per_device = _per_device_batch(row)
    runs = []
    spread, tensor, stages = row.spread, row.spread.tensor or 1, row.spread.pipeline or 1
    axes = expert_axes(row, _fsdp(row))
    counts, remats = _microbatch_counts(row, per_device), _recomputes(row)
    tried = [(count, remat) for count in counts for remat in remats]
    if _is_nemo(row):
        # Smaller microbatches before recompute, as in its recipes, most of which have one sample
        # and no recompute.
        tried.sort(key=lambda choice: remats.index(choice[1]))
    for microbatches, remat in tried:
        if _chunks(row) > 1 and microbatches % stages:
            continue
        tables: dict[str, JsonValue] = {
            "model": _model(row, compute_type, remat),
            "data": _data(row),
            "batch": {"per_device_batch": per_device, "microbatches": microbatches},
            "optimizer": _optimizer(row),
            "schedule": {"base_learning_rate": 0.1},
            "layout": {
                "data": axes.data,
                "fsdp": axes.fsdp,
                "expert": axes.expert,
                "tensor": tensor,
                **exchange_of(row),
                "context": spread.context or 1,
                "context_strategy": _context_strategy(row),
                "pipeline": stages,
                "pipeline_chunks": _chunks(row),
                "pipeline_counts_ends": _deals_ends(row),
                # Without a tensor axis there is no such sharding, whatever the row states.
                "sequence_parallel": _is_sequence_parallel(row) and tensor > 1,
                "zero_stage": _zero_stage(row, axes.expert),
                "bn_scope": "local",  # as the frameworks of these rows do
            },
        }
        if (fine_tuning := _fine_tuning(row)) is not None:
            tables["fine_tuning"] = fine_tuning
        runs.append(resolve(build(RunConfig, tables), row.device_count))
    return runs


def _is_sequence_parallel(row: LedgerRow) -> bool:
    """Whether activations between layers are split over the tensor axis: as stated, else if
    Megatron-Core trained it, whose recipes always do so (NVIDIA/NeMo and Megatron-Bridge:
    `sequence_parallel = tensor_model_parallel_size > 1`)."""
    if row.spread.sequence_parallel is not None:
        return bool(row.spread.sequence_parallel)
    return _is_on_megatron_core(row)


def _fsdp(row: LedgerRow) -> int:
    """Devices along the fsdp axis; all that the other axes leave if a row states ZeRO 3 but not
    over how many (MaxText's ici_fsdp_parallelism = -1)."""
    spread = row.spread
    if spread.fsdp is not None or spread.data is not None or spread.zero_stage != 3:
        return spread.fsdp or 1
    others = (spread.tensor or 1) * (spread.context or 1) * (spread.pipeline or 1)
    others *= spread.expert_parallel or 1
    return max(1, row.device_count // others)


def _zero_stage(row: LedgerRow, experts: int) -> int:
    """ZeRO's stage besides the fsdp axis, which expresses stage 3; over an expert axis, which fsdp
    does not reach, stage 3 becomes 1. The default is 0, or 1 with NeMo, whose recipes all have the
    distributed optimizer (NVIDIA/NeMo, nemo/collections/llm/recipes: use_distributed_optimizer =
    True); the state of adapters, a thousandth of the network, is assumed to be whole."""
    stage = row.spread.zero_stage
    if stage is None:
        stage = int(_is_nemo(row) and row.kind != "lora")
    return stage if stage < 3 else int(experts > 1)


def _context_strategy(row: LedgerRow) -> ContextStrategy:
    """How attention works across the context axis: by its framework's default.

    Keys are gathered in torchtitan (context_parallel_rotate_method is allgather;
    torchtitan/config_manager.py) and in MaxText (context_parallel_strategy is all_gather;
    MaxText/configs/base.yml). Elsewhere it is a ring, the default of Transformer Engine and of
    Megatron-LM (--cp-comm-type p2p; megatron/training/arguments.py), but in a pipeline, whose
    stages cannot have rings, heads are exchanged.
    """
    spread = row.spread
    if (spread.context or 1) == 1 or row.work.attention == "unfused":
        return "all_gather"
    if _is_titan(row) or "MaxText" in (row.framework or ""):
        return "all_gather"
    return "all_to_all" if (spread.pipeline or 1) > 1 else "ring"


_MOST_SAMPLES = 1_000_000
"""Most samples per device and update that make sense: all of their divisors are tried."""


def _per_device_batch(row: LedgerRow) -> int:
    """Samples per device per update, stated or implied."""
    found = _stated_or_implied(row)
    if found > _MOST_SAMPLES:
        raise ConfigError(f"{found:,} samples per device, and {_MOST_SAMPLES:,} are the most")
    return found


def _stated_or_implied(row: LedgerRow) -> int:
    work, spread = row.work, row.spread
    if work.per_device_batch and work.per_device_batch == int(work.per_device_batch):
        return int(work.per_device_batch)
    if not work.global_batch:
        raise ConfigError("neither per_device_batch nor global_batch is stated")
    sharing = (spread.tensor or 1) * (spread.context or 1) * (spread.pipeline or 1)
    shards = row.device_count // sharing
    if shards == 0 or work.global_batch % shards:
        raise ConfigError(f"a global batch of {work.global_batch} over {counted(shards, 'device')}")
    return work.global_batch // shards


def _microbatch_counts(row: LedgerRow, per_device: int) -> list[int]:
    """Candidate numbers of microbatches per update. If the row states none: one with MaxText, which
    accumulates no gradients by default (gradient_accumulation_steps is 1;
    MaxText/configs/base.yml), else all divisors."""
    microbatch = row.work.microbatch
    if microbatch is None and "MaxText" in (row.framework or ""):
        return [1]
    if microbatch is None:
        return [count for count in range(1, per_device + 1) if per_device % count == 0]
    if microbatch == 0 or per_device % microbatch:
        raise ConfigError(f"microbatches of {microbatch} in {per_device} samples of a device")
    return [per_device // microbatch]


_MAXTEXT_POLICIES: dict[str, tuple[ActivationName, ...]] = {
    "minimal": PRODUCT_NAMES,
    "minimal_flash": (*PRODUCT_NAMES, "context"),
    "minimal_with_context": (*PRODUCT_NAMES, "context"),
    "save_dot_with_context_except_mlp": ("qkv_proj", "context", "out_proj"),
    "save_dot_except_mlpwi": ("qkv_proj", "out_proj", "mlpwo"),
    "save_dot_except_mlp": ("qkv_proj", "out_proj"),
    "save_qkv_proj": ("qkv_proj",),
    "save_out_proj": ("out_proj",),
    "custom": (),
}
"""Activations that MaxText's remat policies keep by name; "custom" keeps those that the run names
(AI-Hypercomputer/maxtext, MaxText/layers/decoders.py: get_remat_policy)."""
_OFFLOADED_POLICIES: dict[str, tuple[ActivationName, ...]] = {
    "minimal_offloaded": PRODUCT_NAMES,
    "qkv_proj_offloaded": ("qkv_proj",),
}
"""Activations that its policies offload."""
_ACTIVATION = re.compile(r"'(\w+)': '(device|offload)'")
"""MaxText's arguments for activations, in a row's notes: "'context': 'device'"."""
_PARTS_OF_ACTIVATIONS: dict[ActivationName, tuple[str, ...]] = {
    "qkv_proj": ("query_proj", "key_proj", "value_proj"),
    "mlpwi": ("mlpwi_0", "mlpwi_1"),
}
"""MaxText's names of all parts of what has one name here."""

_MEGATRON_MODULES = {"norm", "act", "shared_expert"}
"""Entries of --recompute-modules that Megatron-Core's rows list: cheap to compute again."""


def _recomputes(row: LedgerRow) -> list[JsonValue]:
    """Candidate recompute settings. For MaxText's policies: what they keep or offload by name; then
    the same with the inputs of blocks offloaded, as a run may have without its row saying so. For a
    transformer whose row states none: "none", then "full", and "selective" between them with
    Megatron-Core. nanotron recomputes nothing by default (huggingface/nanotron,
    config/parallelism_config.py: recompute_layer = False)."""
    if (policy := _policy_of_maxtext(row)) is not None:
        return _kept_by_name(row, policy)
    stated = _stated_recompute(row)
    if stated is not None and set(stated.split(", ")) <= _MEGATRON_MODULES:
        stated = "selective"
    if stated not in (None, "none", "selective", "full"):
        raise ConfigError(f"recompute {stated!r}")
    if stated == "selective" and _is_titan(row):
        stated = "selective_op"
    if row.model.model not in _CAUSAL:
        if stated in ("selective", "selective_op", "full"):
            raise ConfigError(f"{stated} recompute of {row.model.model!r}")
        return ["none"]
    if stated is None and _is_on_megatron_core(row):
        return ["none", "selective", "full"]
    if stated is None and "nanotron" in (row.framework or ""):
        return ["none"]
    return ["none", "full"] if stated is None else [stated]


def _stated_recompute(row: LedgerRow) -> str | None:
    return (row.work.recompute or "").rstrip("?") or None


def _policy_of_maxtext(row: LedgerRow) -> str | None:
    """MaxText's policy that keeps or offloads activations by name, if a row states one."""
    stated = _stated_recompute(row)
    return stated if stated in _MAXTEXT_POLICIES or stated in _OFFLOADED_POLICIES else None


def _kept_by_name(row: LedgerRow, policy: str) -> list[JsonValue]:
    """Candidates for one of MaxText's policies, without activations that the network lacks."""
    stated, _ = _stated_activations(row)
    network = build(ModelConfig, _model(row, "bfloat16", "full"))
    absent = network.unnamed_activations if isinstance(network, DecoderConfig) else {}

    def kept(policies: Mapping[str, tuple[ActivationName, ...]], place: str) -> list[JsonValue]:
        of_row = [name for name, stated_place in stated.items() if stated_place == place]
        names = dict.fromkeys((*policies.get(policy, ()), *of_row))
        return [name for name in names if name not in absent]

    offload = kept(_OFFLOADED_POLICIES, "offload")
    on_device = kept(_MAXTEXT_POLICIES, "device")
    save: list[JsonValue] = [name for name in on_device if name not in (*offload, _INPUT)]
    first: JsonValue = {"save": save, "offload": offload} if save or offload else "full"
    if policy != "custom" or _INPUT in (*on_device, *offload):
        return [first]
    return [first, {"save": save, "offload": [*offload, _INPUT]}]


def _stated_activations(row: LedgerRow) -> tuple[dict[ActivationName, str], list[str]]:
    """Places, "device" or "offload", of the activations that a row of MaxText keeps; and MaxText's
    names of those that are no activation here, or whose parts are not all in one place.
    """
    places: dict[str, str] = dict(_ACTIVATION.findall(row.notes or ""))
    found: dict[ActivationName, str] = {}
    read = set[str]()
    for name in get_args(ActivationName):
        parts = _PARTS_OF_ACTIVATIONS.get(name, ())
        of_parts = {places.get(part) for part in parts}
        place = places.get(name) or (of_parts.pop() if len(of_parts) == 1 else None)
        if place is not None:
            found[name] = place
            read |= {name, *parts}
    return found, [name for name in places if name not in read]


_INPUT: ActivationName = "decoder_layer_input"


def _model(row: LedgerRow, compute_type: str, remat: JsonValue) -> JsonValue:
    """The table `model` of the run.

    Raises:
        ConfigError: if a size is missing, or scalejax has no such experts.
    """
    model = row.model
    if model.model not in _CAUSAL:
        return {"name": model.model, "compute_dtype": compute_type}
    if model.layers is None or model.hidden is None or model.heads is None:
        raise ConfigError("layers, hidden and heads are not all stated")
    sizes: dict[str, JsonValue] = {}
    name, block = model.model, _BLOCKS.get(model.model)
    if block is not None:
        name, published = "llama", PRESETS[block].sizes
        sizes = {field: published[field] for field in _OF_BLOCKS if field in published}
    if name == "llama":
        if model.ffn_hidden is None:
            raise ConfigError("ffn_hidden of a llama is not stated")
        sizes |= {"kv_heads": _heads_of_keys(row) or model.heads, "ffn_hidden": model.ffn_hidden}
        if _TIED in (row.notes or ""):
            sizes["tied_embeddings"] = True
        if (experts := moe_table(row)) is not None:
            sizes |= {"moe": experts, "block": block_table(row, sizes.get("block", {}))}
    elif model.kv_heads not in (None, model.heads):
        raise ConfigError(f"{model.kv_heads} heads of keys for {model.heads} of queries")
    elif model.ffn_hidden not in (None, 4 * model.hidden):
        sizes = {"ffn_hidden": model.ffn_hidden}
    return {
        **sizes,
        "name": name,
        "layers": model.layers if _deals_ends(row) else _layers(row),
        "hidden": model.hidden,
        "heads": model.heads,
        "remat": remat,
        "attention": _attention(row),
        "compute_dtype": compute_type,
    }


def _heads_of_keys(row: LedgerRow) -> int | None:
    """Heads of keys and values, at least one for every device of the tensor axis: Megatron-Core
    repeats them if there are fewer (num_query_groups below the tensor axis), as does Neuron's NxD
    (kv_replicator)."""
    kv_heads, tensor = row.model.kv_heads, row.spread.tensor or 1
    return tensor if kv_heads is not None and tensor % kv_heads == 0 else kv_heads


def _attention(row: LedgerRow) -> str:
    """Attention kernel of the run; "auto" where the row states none."""
    kinds = {None: "auto", "flash": "fused", "unfused": "unfused"}
    if row.work.attention not in kinds:
        raise ConfigError(f"attention {row.work.attention!r}")
    return kinds[row.work.attention]


def _data(row: LedgerRow) -> JsonValue:
    """Random samples of the row's shape: time does not depend on their content."""
    model = row.model
    if model.model in IMAGE_NETWORKS:
        size = IMAGE_SIZES.get(model.model, 224)
        return {"name": "synthetic_images", "image_size": size}
    if model.model.startswith("bert"):
        tokens = model.seq_len or BERT_TOKENS
        return {
            "name": "masked_tokens",
            "tokens": tokens,
            "masked": math.ceil(BERT_MASKED * tokens),
            "vocabulary": model.vocab or BERT_VOCABULARY,
        }
    tokens = model.seq_len or (_LLAMA_2_TOKENS if "llama2" in row.case_id else None)
    if tokens is None or _words(row) is None:
        raise ConfigError("seq_len and vocab are not both stated")
    return {"name": "synthetic_tokens", "tokens": tokens, "vocabulary": _vocabulary(row)}


def _vocabulary(row: LedgerRow) -> int | None:
    """Vocabulary of the run.

    Megatron-LM pads it to a multiple of 128 for each device of the tensor axis (its
    make-vocab-size-divisible-by) and divides it. An undivided vocabulary stays as stated: the
    compiler pads its products, and the difference is below 0.1 % of a step.
    """
    words, devices = _words(row), row.spread.tensor or 1
    if words is None or devices == 1 or not _is_megatron(row):
        return words
    multiple = _WORDS_OF_DEVICE * devices
    return -(-words // multiple) * multiple


def _words(row: LedgerRow) -> int | None:
    """Vocabulary of the row's network; None where neither the row nor its publication states it."""
    return row.model.vocab or _VOCABULARIES.get(row.model.model)


def _optimizer(row: LedgerRow) -> JsonValue:
    """SGD with momentum for images, Adam for text."""
    if row.model.model in IMAGE_NETWORKS:
        return {"name": "sgd", "momentum": 0.9, "weight_decay": 1e-4}
    return {"name": "adamw"}
