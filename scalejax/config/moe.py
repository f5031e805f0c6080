"""Config of mixtures of experts: routed feed-forward layers instead of dense ones.

Config only: `scalejax.models.moe` routes and computes tokens.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from scalejax.config.parallelism import stage_layers
from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_multiple,
    require_size,
)

Balance = Literal["auxiliary_loss", "bias", "none"]
"""What keeps the loads of experts even; see `RouterConfig.balance`."""

AT_EVEN_LOAD = "blocks_at_even_load_"
"""Prefix of the name of a loop in a compiled step whose length depends on the loads of experts, up
to its length at even loads."""


def block_rows(mean: float) -> int:
    """Rows of a block of one expert that has `mean` rows on average.

    A quarter of them, rounded up to a multiple of 8: on average an eighth of an expert's work is
    padding, and at even loads fewer than 32 of its rows are.
    """
    return max(1, -int(-mean / 4 // 8)) * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksAtEvenLoad:
    """A loop over blocks of the rows of a device's experts, at even loads."""

    blocks: int
    """Iterations of the loop."""
    experts: int
    """Experts on the device."""
    rows: int
    """Rows of a block, all of one expert."""
    experts_per_token: int
    """Distinct experts that each token passes through: no expert has more rows than all tokens."""

    @property
    def scope(self) -> str:
        """Name scope of the loop, which identifies it in the compiled step."""
        words = f"{self.blocks}_experts_{self.experts}_rows_{self.rows}"
        return f"{AT_EVEN_LOAD}{words}_per_token_{self.experts_per_token}"


def blocks_at_even_load(scope: str) -> BlocksAtEvenLoad | None:
    """The loop over blocks in the innermost name scope; None if that is not such a loop.

    Example:
        >>> from scalejax.config.moe import blocks_at_even_load
        >>> scope = "blocks_at_even_load_16_experts_4_rows_64_per_token_2"
        >>> blocks_at_even_load(f"jvp()/{scope}/while")
        BlocksAtEvenLoad(blocks=16, experts=4, rows=64, experts_per_token=2)
    """
    words = rf"{AT_EVEN_LOAD}(\d+)_experts_(\d+)_rows_(\d+)_per_token_(\d+)"
    found = re.search(rf"{words}(?:/while)?$", scope)
    if found is None:
        return None
    blocks, experts, rows, per_token = map(int, found.groups())
    return BlocksAtEvenLoad(blocks=blocks, experts=experts, rows=rows, experts_per_token=per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts, and what keeps their loads even."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts for a token, from its logits: softmax over all experts (Shazeer et al.
    2017, arXiv 1701.06538), or sigmoid of each (DeepSeek-V3, arXiv 2412.19437, equation 15)."""
    normalise_weights: bool = True
    """Whether the scores of the chosen experts are divided by their sum: with softmax this is a
    softmax over the chosen ones only (Mixtral, arXiv 2401.04088, section 2.1)."""
    scaling: float = 1.0
    """Factor of the weights (DeepSeek's `routed_scaling_factor`)."""
    groups: int = 1
    """Groups of experts, of which a token may use only some (DeepSeek-V2, arXiv 2405.04434, section
    2.2.2)."""
    groups_per_token: int = 1
    """Groups that a token may choose from: those with the highest score, which is that of the best
    expert with softmax, and the sum of the best two with sigmoid (DeepSeek-V3, section 2.1.2)."""
    balance: Balance = "auxiliary_loss"
    """auxiliary_loss: experts x sum of (share of assignments x mean score) over experts is added to
    the loss (Fedus et al. 2021, arXiv 2101.03961, equation 4), over the tokens of each microbatch
    on all devices, so that more microbatches balance fewer tokens at a time. bias: a bias is added
    to the scores when experts are chosen; after each step it is raised if an expert had fewer
    tokens of the global batch than the mean and lowered if it had more, without a gradient
    (DeepSeek-V3, section 2.1.2). none: neither."""
    auxiliary_loss_weight: float = 0.01
    """Weight of the auxiliary loss of each layer (Fedus et al. 2021, section 2.2: 0.01)."""
    bias_update_rate: float = 0.001
    """Change of an expert's bias in a step (DeepSeek-V3, section 4.2: 0.001); with
    bias_update="error", when its load is off by one mean load."""
    bias_update: Literal["sign", "error"] = "sign"
    """What `bias_update_rate` is multiplied by: sign, sign(mean load - load) (DeepSeek-V3), or
    error, (mean load - load) / mean load, which moves the bias further if the load is far off, so
    that loads are even in the first steps too (Wang et al. 2024, arXiv 2408.15664, section 4.3)."""
    z_loss_weight: float = 0.0
    """Weight of the router z-loss of each layer, the mean square of the logarithm of the sum of
    exponentials of a token's logits (Zoph et al. 2022, arXiv 2202.08906, equation 5: 0.001)."""

    def __post_init__(self) -> None:
        require_above("model.moe.router.scaling", self.scaling, 0)
        for name in ("groups", "groups_per_token"):
            require_size(f"model.moe.router.{name}", getattr(self, name))
        if self.groups_per_token > self.groups:
            accepted = f"at most model.moe.router.groups={self.groups}"
            raise ConfigError(
                refusal("model.moe.router.groups_per_token", self.groups_per_token, accepted)
            )
        for name in ("auxiliary_loss_weight", "bias_update_rate", "z_loss_weight"):
            require_at_least(f"model.moe.router.{name}", getattr(self, name), 0)
        usual = type(self).__dataclass_fields__
        for name, read_by in (
            ("auxiliary_loss_weight", "auxiliary_loss"),
            ("bias_update_rate", "bias"),
            ("bias_update", "bias"),
        ):
            default = usual[name].default
            if self.balance != read_by and (value := getattr(self, name)) != default:
                accepted = (
                    f'balance="{self.balance}" does not read it, "{read_by}" does; leave it at '
                    f"its default, {default}"
                )
                raise ConfigError(refusal(f"model.moe.router.{name}", value, accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts instead of the feed-forward layer: each token passes through some of many."""

    experts: int
    """Routed experts of a layer."""
    experts_per_token: int = 2
    """Experts that each token passes through."""
    expert_hidden: int
    """Width of each expert (SwiGLU: two projections up, one down); Megatron's and transformers'
    moe_ffn_hidden_size and moe_intermediate_size, MaxText's base_moe_mlp_dim."""
    shared_experts: int = 0
    """Experts of the same width that every token passes through as well (DeepSeekMoE, arXiv
    2401.06066, section 3.2): one feed-forward layer as wide as all of them."""
    dense_layers: int = 0
    """Number of first layers that are dense, with `model.ffn_hidden`; transformers'
    first_k_dense_replace, MaxText's first_num_dense_layers."""
    capacity_factor: float | None = None
    """Tokens of each sample that an expert accepts, over the mean of all experts, rounded up; later
    ones skip it (Fedus et al. 2021, section 2.2). If absent, none is dropped."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How tokens choose experts."""
    load_window: int | None = None
    """Number of assignments of tokens to a layer's experts, in whole updates, over which the metric
    `expert_load_of_window` takes the load of the fullest expert over the mean. If absent, there is
    only `expert_load`, of each single update."""

    def __post_init__(self) -> None:
        require_size("model.moe.experts", self.experts, 2)
        for name in ("experts_per_token", "expert_hidden"):
            require_size(f"model.moe.{name}", getattr(self, name))
        for name in ("shared_experts", "dense_layers"):
            require_size(f"model.moe.{name}", getattr(self, name), 0)
        require_above("model.moe.capacity_factor", self.capacity_factor, 0)
        require_at_least("model.moe.load_window", self.load_window, 1)
        router = self.router
        require_multiple("model.moe.experts", self.experts, router.groups, "router.groups")
        choice = self.experts // router.groups * router.groups_per_token
        if self.experts_per_token > choice:
            accepted = f"at most the {choice} experts that a token may choose from"
            raise ConfigError(
                refusal("model.moe.experts_per_token", self.experts_per_token, accepted)
            )

    @property
    def counts_loads(self) -> bool:
        """Whether a network's state holds the loads of its experts in an update."""
        return self.router.balance == "bias" or self.load_window is not None

    def layers_of_stages(
        self, layers: int, stages: int, chunks: int, period: int
    ) -> tuple[int, ...]:
        """Layers with experts that each pipeline stage computes by a timetable, in a network of
        `layers` layers: the first stage also has the dense ones, and that many fewer with experts,
        unless chunks or a period of layers must be whole."""
        before = self.dense_layers if chunks == 1 and period == 1 else 0
        return stage_layers(layers - self.dense_layers, stages, before)

    def capacity(self, tokens: int) -> int | None:
        """Tokens that an expert accepts from a sample of `tokens`; None if there is no bound."""
        if self.capacity_factor is None:
            return None
        mean = tokens * self.experts_per_token / self.experts
        return min(tokens, max(1, -int(-(mean * self.capacity_factor) // 1)))
