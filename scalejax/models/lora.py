"""Low-rank adapters (LoRA) of the linear layers of a network.

A frozen matrix W [in, out] is trained as W + scale x A B, with A [in, rank] and B [rank, out]: the
layer computes x W + scale x (x A) B, and W + A B is never formed. A starts random and B at zero,
so that training starts from the given network.

Knows layers and how their matrices are split; nothing of which parameters learn, nor of steps.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685,
equation 3 and section 4.1.
"""

from typing import Protocol, cast, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from scalejax.config.parallelism import FSDP, PIPELINE
from scalejax.config.training import LoraConfig
from scalejax.core.errors import ConfigError, unknown_name

ADAPTERS = ("lora_a", "lora_b")
"""Last parts of the paths of A [in, rank] and B [rank, out], next to the "kernel" they adapt."""

_init_of_a = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Uniform within 1 / sqrt(in), as the paper's published code (microsoft/LoRA, `reset_parameters`:
kaiming_uniform_ with a = sqrt(5)) and PEFT have it; the paper's text says Gaussian."""


@runtime_checkable
class AdaptedLayer(Protocol):
    """A linear layer with adapters."""

    lora_a: nnx.Param
    """A, [layers, in, rank]."""
    lora_b: nnx.Param
    """B, [layers, rank, out...]."""
    lora_scale: float
    """Factor on the adapters' output."""


def add_adapters(config: LoraConfig, network: nnx.Module, rngs: nnx.Rngs) -> None:
    """Add adapters to the stacked linear layers of `network` that `config` names.

    Each becomes an `AdaptedLayer`, which `scalejax.models.fsdp.linear` recognises.

    Raises:
        ConfigError: if the network has no such layer.
    """
    linear = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(network)
        if isinstance(module, nnx.Linear | nnx.LinearGeneral) and path and path[0] == "blocks"
    }
    names = {path.rpartition("/")[2] for path in linear}
    for target, layers in config.layers.items():
        if layers and not names.intersection(layers):
            raise ConfigError(unknown_name("fine_tuning.lora.targets", target, names))
    wanted = {name for layers in config.layers.values() for name in layers or names}
    for path, layer in linear.items():
        if path.rpartition("/")[2] not in wanted:
            continue
        count, inputs, *outputs = layer.kernel[...].shape
        a_shape, b_shape = (count, inputs, config.rank), (count, config.rank, *outputs)
        # The fan-in of one layer: the first dimension counts layers.
        one = jnp.stack([_init_of_a(rngs.params(), a_shape[1:], jnp.float32) for _ in range(count)])
        adapted = cast(AdaptedLayer, layer)
        adapted.lora_a = nnx.Param(one)
        adapted.lora_b = nnx.Param(jnp.zeros(b_shape, jnp.float32))
        adapted.lora_scale = config.scale


def adapter_specs(kept: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
    """How A and B are split where their matrix is split as `kept`: its inputs over the same axes,
    its outputs too, and the rank of B over fsdp where that splits the inputs.

    Args:
        kept: sharding of [in, out...], or of [layers, in, out...] with layers over the pipeline.
    """
    axes = tuple(kept)
    layers = axes[:1] if axes[:1] == (PIPELINE,) else ()
    inputs, *outputs = axes[len(layers) :] or (None,)
    over_fsdp = FSDP in (inputs if isinstance(inputs, tuple) else (inputs,))
    rank = FSDP if over_fsdp else None
    return PartitionSpec(*layers, inputs, None), PartitionSpec(*layers, rank, *outputs)


def adapted_path(path: str) -> tuple[str, int | None]:
    """The path of the matrix that the parameter at `path` adapts, and which of `ADAPTERS` it is;
    `path` itself and None for any other parameter."""
    layer, _, last = path.rpartition("/")
    return (f"{layer}/kernel", ADAPTERS.index(last)) if last in ADAPTERS else (path, None)
