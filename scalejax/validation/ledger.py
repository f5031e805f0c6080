"""Ledger of published step times, one measurement per row, read from CSV.

Knows the columns and their types; nothing of networks, clusters or predictions.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from scalejax.core.errors import require_at_most
from scalejax.validation.table import MAY_BE_ZERO, read_table, rows_of

RowKind = Literal["dense", "expert", "lora"]
"""What was trained: a network with experts, adapters of LoRA, or any other network."""
_MOST_STEP_SECONDS = 1e6
"""Longer than any step ever measured: eleven days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerModel:
    """Network of a row; None where the row does not state a size."""

    model: str
    """Name of the network: "resnet50", "gpt"."""
    layers: int | None = None
    """Blocks of a transformer."""
    hidden: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values."""
    ffn_hidden: int | None = None
    """Inner width of the feed-forward layers."""
    vocab: int | None = None
    """Size of the vocabulary."""
    seq_len: int | None = None
    """Tokens in a sample."""
    experts: int | None = field(default=None, metadata=MAY_BE_ZERO)
    """Routed experts of a layer."""
    experts_per_token: int | None = None
    """Experts that each token goes through."""
    shared_experts: int | None = field(default=None, metadata=MAY_BE_ZERO)
    """Shared experts, which every token goes through as well."""
    expert_hidden: int | None = None
    """Inner width of each expert."""
    dense_layers: int | None = field(default=None, metadata=MAY_BE_ZERO)
    """Number of first layers without experts."""
    moe_balance: str | None = None
    """How loads of experts were balanced, and which tokens were dropped: "capacity_factor 1.25"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMachine:
    """Machine of a row."""

    hardware: str
    """Name of the device: "v100_sxm2_16gb"."""
    devices_per_node: int | None = None
    """Devices in a node."""
    intra_node_link: str | None = None
    """Link between the devices of a node: "nvlink2_mesh"."""
    node_network_gbit_per_second: float | None = None
    """Rate of all network cards of a node, 1e9 bits per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpread:
    """Parallelism of a row; an axis that is not stated is 1."""

    data: int | None = None
    """Devices along the data axis."""
    fsdp: int | None = None
    """Devices along the axis that shards batch and parameters."""
    tensor: int | None = None
    """Devices along the axis that shards layers."""
    context: int | None = None
    """Devices along the axis that shards sequences."""
    pipeline: int | None = None
    """Pipeline stages."""
    pipeline_chunks: int | None = None
    """Interleaved chunks per pipeline stage."""
    zero_stage: int | None = field(default=None, metadata=MAY_BE_ZERO)
    """What the data axis shards: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
    parameters."""
    sequence_parallel: int | None = field(default=None, metadata=MAY_BE_ZERO)
    """1 where activations between the layers are sharded over the tensor axis."""
    expert_parallel: int | None = None
    """Devices over which experts are spread."""
    expert_tensor: int | None = None
    """Devices along the axis that shards each expert."""
    gradient_exchange: str | None = None
    """Gradient synchronisation: "all_reduce" or "parameter_server"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerWork:
    """Batch, precision and recompute of a row."""

    precision: str | None = None
    """Arithmetic: "fp32", "tf32", "fp16", "bf16", "fp8"."""
    per_device_batch: float | None = None
    """Samples per device per update; a fraction if devices share a sample."""
    microbatch: int | None = None
    """Samples per device per forward pass."""
    global_batch: int | None = None
    """Samples per update over all devices."""
    recompute: str | None = None
    """Recompute in the backward pass: "none", "selective", "full"."""
    attention: str | None = None
    """Attention kernel: "unfused" or "flash"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One published measurement."""

    case_id: str
    """Name of the row; several rows may share one."""
    series: str
    """Rows of one series differ in the number of devices."""
    source: str
    """Publication."""
    source_locator: str | None = None
    """Place in the publication."""
    year: int | None = None
    """Year of publication."""
    framework: str | None = None
    """Training framework."""
    assumed: str | None = None
    """Columns that the source does not state."""
    device_count: int
    """Devices in the run."""
    step_seconds: float | None = None
    """Measured time of one update; None where it is not stated."""
    step_seconds_kind: str | None = None
    """Where the step time is from: "printed", what it is derived from, or that the run died."""
    peak_memory_gib: float | None = None
    """Peak memory of a device, GiB; None where it is not stated."""
    notes: str | None = None
    """Remarks."""
    stalled: int | None = field(default=None, metadata=MAY_BE_ZERO)
    """1 where the source's run stalled for reasons of its own, so that no program explains it."""
    model: LedgerModel
    """Network."""
    machine: LedgerMachine
    """Machine."""
    spread: LedgerSpread
    """Parallelism."""
    work: LedgerWork
    """Batch, precision and recompute of one update."""

    def __post_init__(self) -> None:
        require_at_most("step_seconds", self.step_seconds, _MOST_STEP_SECONDS)

    @property
    def has_died(self) -> bool:
        """Whether its source says that the run crashed or ran out of memory."""
        return (self.step_seconds_kind or "").startswith("crashed")

    @property
    def kind(self) -> RowKind:
        """What was trained: adapters of LoRA, a network with experts, or any other."""
        words = f"{self.case_id} {self.notes}".lower().replace("_", " ")
        if _LORA.search(words):
            return "lora"
        is_mixture = (self.model.experts or 0) > 1 or self.model.model.endswith("_moe")
        return "expert" if is_mixture else "dense"

    @property
    def states_layout(self) -> bool:
        """Whether it states what a prediction needs (network, devices, batch, precision, step time
        and an axis of its layout), and its source does not mark it as stalled."""
        model, work, spread = self.model, self.work, self.spread
        needed = (model.layers, model.hidden, work.global_batch, work.precision, self.step_seconds)
        axes = (spread.data, spread.fsdp, spread.tensor, spread.pipeline)
        return None not in needed and any(axes) and not self.stalled

    @property
    def family(self) -> str:
        """Short name of the row's source, by which results are grouped."""
        name = next((name for part, name in _FAMILIES if part in self.source), None)
        if name is None:
            repository = self.source.rpartition("/")[2].partition("@")[0] or self.source
            name = re.sub(r"\W+", "_", repository.lower()).strip("_") or "unnamed"
        if name != "vtrain":
            return name
        per_node = self.machine.devices_per_node
        is_single = per_node is not None and self.device_count <= per_node
        return "vtrain_single" if is_single else "vtrain_multi"


_LORA = re.compile("(?<![a-z])lora(?![a-z])")
_FAMILIES = (
    ("tensorflow/tensorflow", "tensorflow_2017"),
    ("DLPerf", "dlperf"),
    ("DeepLearningExamples", "deep_learning_examples"),
    ("llm-foundry", "llm_foundry"),
    ("JAX-Toolbox", "paxml"),
    ("torchtitan", "torchtitan"),
    ("Megatron-LM", "megatron"),
    ("bigscience", "bloom"),
    ("vTrain", "vtrain"),
)
"""(part of `source`, family); other sources have the repository's own name."""


def read_ledger(path: Path) -> list[LedgerRow]:
    """The rows of a ledger in the format of the project's `step_times.csv`, in order; files that
    end in `.gz` or `.xz` are unpacked.

    Unknown columns are ignored, and optional ones may be missing or blank; but a column that looks
    like a misspelt missing one is refused.

    Raises:
        ConfigError: if the file cannot be read, a column is missing or misspelt, or a line is
            malformed: with file, line, column.
    """
    return rows_of(read_table(path), LedgerRow)
