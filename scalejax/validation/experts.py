"""Mixtures of experts in the rows of a ledger: the sizes of their layers, and where experts lie.

Says what approximates a row's choice if scalejax does not have the choice itself. Reads rows and
presets; builds no runs.
"""

import math
import re
from dataclasses import dataclass

from scalejax.config.presets import PRESETS
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import JsonValue
from scalejax.core.units import counted
from scalejax.validation.ledger import LedgerRow

MIXTURES = {
    "deepseek_v3_moe": "deepseek-v3",
    "gemma4_moe": "gemma3-12b",
    "gpt_oss_moe": "gpt-oss-120b",
    "grok1_moe": "grok-1",
    "kimi_k2_moe": "kimi-k2",
    "llama4_moe": "llama4-scout",
    "mixtral_moe": "mixtral-8x22b",
    "qwen3_moe": "qwen3-235b-a22b",
}
"""The preset whose blocks and routers a network of a ledger has, in the sizes of its rows."""

_BETWEEN = {("llama4_moe", 128): 2}
"""Every n-th layer has experts: n by network and number of experts. Llama 4 Maverick's
interleave_moe_layer_step is 2 (config.json of the checkpoint)."""
_CAPACITY = re.compile(r"capacity_factor ([\d.]+)")
_DEEPEP = re.compile("(?:dispatcher|kernels).*?(deepep|hybridep)(_uccl)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAxes:
    """Devices along the axes that experts are spread over; `expert` takes its own from the rest."""

    expert: int
    """Devices along the expert axis."""
    data: int | None
    """Devices along the data axis, without those of `expert`; None for all that are left."""
    fsdp: int
    """Devices along the fsdp axis, without those of `expert`."""


def block_table(row: LedgerRow, published: JsonValue) -> JsonValue:
    """The table `model.block` of the run, from its preset's; experts have gates of SiLU."""
    if (row.model.experts or 0) < 2 or not isinstance(published, dict):
        return published
    return {name: value for name, value in published.items() if name != "activation"}


def moe_table(row: LedgerRow) -> JsonValue:
    """The table `model.moe` of the run; None for a network without experts.

    Routers are the preset's. In most rows they were forced to be balanced, and loads are costed as
    such; experts padded to a capacity of the mean load have even loads too. Layers without experts
    come first in scalejax, wherever they are in the network.

    Raises:
        ConfigError: if a size is missing, or scalejax has no such network.
    """
    model = row.model
    if (model.experts or 0) < 2:
        return None
    if "Next-80B" in row.case_id:
        raise ConfigError("gated DeltaNet, which Qwen3-Next has in three of four layers")
    if model.expert_hidden is None or model.experts_per_token is None:
        raise ConfigError("experts_per_token and expert_hidden are not both stated")
    preset = PRESETS.get(MIXTURES.get(model.model, ""))
    usual = preset.sizes.get("moe") if preset is not None else None
    table = dict(usual) if isinstance(usual, dict) else {}
    table |= {
        "experts": model.experts,
        "experts_per_token": model.experts_per_token,
        "expert_hidden": model.expert_hidden,
        "shared_experts": _shared_experts(row),
        "dense_layers": _dense_layers(row),
    }
    capacity = _capacity(row)
    is_megatron = "Megatron" in (row.framework or "")
    if capacity is not None and (capacity != 1 or is_megatron):
        table["capacity_factor"] = capacity
    return table


def _capacity(row: LedgerRow) -> float | None:
    found = _CAPACITY.search(row.model.moe_balance or "")
    return None if found is None else float(found[1])


def _shared_experts(row: LedgerRow) -> int:
    """Experts of every token; for Gemma 4, as many as its dense layer is wide."""
    model = row.model
    if model.model != "gemma4_moe":
        return model.shared_experts or 0
    return (model.ffn_hidden or 0) // (model.expert_hidden or 1)


def _dense_layers(row: LedgerRow) -> int:
    model, spread = row.model, row.spread
    step = _BETWEEN.get((model.model, model.experts or 0))
    if step is None:
        return model.dense_layers or 0
    stages, chunks = spread.pipeline or 1, spread.pipeline_chunks or 1
    if stages > 1 and chunks % step:
        raise ConfigError("stages in which layers with and without experts alternate")
    return (model.layers or 0) * (step - 1) // step


def expert_axes(row: LedgerRow, fsdp: int) -> ExpertAxes:
    """Devices along expert, data and fsdp.

    The expert axis of scalejax shards the batch, and tensor shards each expert like other layers.
    MaxText's is an axis of its own too. In other frameworks experts reuse the devices of data,
    fsdp, context and tensor (Megatron-LM's --expert-model-parallel-size), and expert_tensor of them
    shard an expert: an expert axis of expert_parallel x expert_tensor / tensor, taken out of data
    or fsdp, leaves a device the same share of the experts.

    Args:
        row: a row of the ledger.
        fsdp: devices along its fsdp axis.

    Raises:
        ConfigError: if the devices that share the batch cannot be divided like this.
    """
    spread = row.spread
    spread_over = spread.expert_parallel or 1
    if "MaxText" in (row.framework or ""):
        return ExpertAxes(expert=spread_over, data=spread.data, fsdp=fsdp)
    expert, rest = divmod(spread_over * _expert_tensor(row), spread.tensor or 1)
    if rest or not expert:
        expert = 1
    of_fsdp = math.gcd(fsdp, expert)
    data = spread.data
    of_data = expert // of_fsdp
    if data is not None and data % of_data == 0:
        return ExpertAxes(expert=expert, data=data // of_data, fsdp=fsdp // of_fsdp)
    if data is None and _batch_devices(row) % (fsdp * of_data) == 0:
        return ExpertAxes(expert=expert, data=None, fsdp=fsdp // of_fsdp)
    shards = counted(_batch_devices(row), "device")
    raise ConfigError(f"an expert axis of {expert} over {shards} that share the batch")


def _expert_tensor(row: LedgerRow) -> int:
    """Devices that shard an expert: as stated, else those of the tensor axis, as in Megatron-LM
    (--expert-tensor-parallel-size), unless that leaves too few devices for all experts, or the row
    is from recipes of NVIDIA's that have 1 throughout."""
    spread, tensor = row.spread, row.spread.tensor or 1
    if spread.expert_tensor is not None:
        return spread.expert_tensor
    if _WHOLE_EXPERTS.search(f"{row.source} {row.framework}"):
        return 1
    left = _batch_devices(row) * (spread.context or 1)
    return tensor if left % (spread.expert_parallel or 1) == 0 else 1


def _batch_devices(row: LedgerRow) -> int:
    spread = row.spread
    sharing = (spread.tensor or 1) * (spread.context or 1) * (spread.pipeline or 1)
    return row.device_count // sharing


def dispatch_of(row: LedgerRow) -> str | None:
    """The library that sends tokens to experts, by its name in the catalogue; None for NCCL's
    all-to-all, assumed if the row names none and is from no table of NVIDIA's recipes.

    Rows of Megatron-Bridge's performance summary name none; its recipes for GB200, GB300, B200,
    B300 and H100 have moe_flex_dispatcher_backend "hybridep" or "deepep"
    (NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs/*/*_workload_base_configs.py).
    """
    if found := _DEEPEP.search(row.notes or ""):
        if found[2]:
            return "deepep-uccl"
        return "deepep-efa" if "EFA" in (row.machine.intra_node_link or "") else "deepep"
    is_recipe = "performance-summary" in (row.source_locator or "")
    is_expert = (row.model.experts or 0) > 1
    return "deepep" if is_expert and is_recipe and "Bridge" in (row.framework or "") else None


def exchange_of(row: LedgerRow) -> dict[str, JsonValue]:
    """Fields of the layout: where experts are along the tensor axis, and whether compute overlaps
    with the exchange of tokens."""
    words: dict[str, JsonValue] = {}
    if is_spread_over_tensor(row):
        words["expert_tensor"] = 1
    if _ON_MEGATRON_CORE.search(row.framework or "") and _OVERLAPPED.search(row.notes or ""):
        words["overlap_expert_exchange"] = True
    return words


def is_spread_over_tensor(row: LedgerRow) -> bool:
    """Whether devices of the tensor axis have experts of their own: with Megatron-Core, if experts
    are whole and the expert axis has a multiple of the tensor axis's devices."""
    spread, tensor = row.spread, row.spread.tensor or 1
    if tensor == 1 or (row.model.experts or 0) < 2:
        return False
    if not _ON_MEGATRON_CORE.search(row.framework or ""):
        return False
    return _expert_tensor(row) == 1 and (spread.expert_parallel or 1) % tensor == 0


_WHOLE_EXPERTS = re.compile("Megatron-MoE-ModelZoo|Megatron-Bridge")
"""Recipes with expert_tensor_parallel_size = 1 (NVIDIA-NeMo/Megatron-Bridge,
scripts/performance/configs/*/*_workload_base_configs.py; yanring/Megatron-MoE-ModelZoo,
model_configs/benchmarking/*.yaml)."""
_ON_MEGATRON_CORE = re.compile(r"Megatron-(Core|Bridge)|Megatron-LM 0\.")
_OVERLAPPED = re.compile(r"overlap on|1f1b overlap")
"""Mark of rows whose all-to-alls overlap with compute."""


def nearest(row: LedgerRow, axes: ExpertAxes) -> tuple[str, ...]:
    """Which parts of the row are only approximated, one line each.

    Args:
        row: a row of the ledger.
        axes: its axes.
    """
    model, spread, notes = row.model, row.spread, []
    if (model.experts or 0) < 2:
        return ()
    tensor, within = spread.tensor or 1, _expert_tensor(row)
    if (
        tensor != within
        and not is_spread_over_tensor(row)
        and "MaxText" not in (row.framework or "")
    ):
        notes.append(
            f"experts over {spread.expert_parallel or 1} devices, each in {within}, by an expert "
            f"axis of {axes.expert}, each in {tensor}"
        )
    if axes.expert > 1 and (spread.fsdp or 1) > axes.fsdp:
        notes.append("ZeRO 3 over the expert axis, of all but experts, by ZeRO 1")
    if (model.model, model.experts) in _BETWEEN:
        notes.append("layers without experts, every second one, by the first ones")
    if model.model == "gemma4_moe":
        notes.append(
            "Gemma 4 by the blocks of Gemma 3, whose global layers have smaller heads, with SiLU"
        )
    if model.model == "gpt_oss_moe":
        if "MaxText" in (row.framework or ""):
            notes.append("attention and products without sinks and biases")
        elif not _ON_MEGATRON_CORE.search(row.framework or ""):
            notes.append("fused attention with sinks by unfused attention")
    if found := _DEEPEP.search(row.notes or ""):
        if found[1].lower() == "hybridep":
            notes.append("HybridEP by DeepEP")
    elif dispatch_of(row) is not None:
        notes.append("HybridEP or DeepEP, as recipes have them, by DeepEP")
    if _capacity(row) == 1 and "Megatron" not in (row.framework or ""):
        notes.append("a capacity of the mean load by even loads without a capacity")
    if "," in (row.work.recompute or ""):
        notes.append(f"recompute of {row.work.recompute} by selective recompute")
    return tuple(notes)
