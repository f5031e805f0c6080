"""Config of the optimizers and their hyper-parameters, and what follows from them.

Each class checks its own fields when built; `training/optimizers/` builds what it names.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from scalejax.core.errors import (
    ConfigError,
    refusal,
    require_above,
    require_at_least,
    require_at_most,
    require_import_path,
)
from scalejax.core.serialization import Family

MomentumForm = Literal["rate_outside", "rate_inside", "rate_inside_corrected"]
"""Where the learning rate r enters a momentum buffer, for gradients g and momentum m (Goyal et
al. 2017, section 3, arXiv 1706.02677): u = m u + g and an update of r u (equation 9); v = m v + r g
and an update of v (equation 10); equation 10 with m r / r_before in place of m, its momentum
correction."""


MomentType = Literal["float32", "bfloat16", "blockwise8"]
"""How a moment is kept between updates: in a type, or in 8 bits in blocks of up to 256 entries
along the last dimension, with a scale each (Dettmers et al. 2021, arXiv 2110.02861; arrays of fewer
than 4,096 entries in float32)."""


_LARGEST_CONSTANT = 1e6
"""Above this, weight decay leaves no weights, and epsilon no steps."""


def _require_moderate(field: str, value: float) -> None:
    require_at_least(field, value, 0)
    require_at_most(field, value, _LARGEST_CONSTANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(Family):
    """One of the optimizers, selected by `name`."""

    name: str
    averages_iterates: ClassVar[bool] = False
    """Whether it evaluates an average of its iterates, instead of a learning rate decay and any
    other average."""
    is_layer_wise: ClassVar[bool] = False
    """Whether it takes norms of whole layers, so that servers must hold layers whole."""

    normalises_entries: ClassVar[bool] = False
    """Whether each entry of a step has the size of the rate, whatever the gradient, as the rules of
    muP and CompleteP for AdamW assume."""

    is_in_closed_form: ClassVar[bool] = True
    """Whether its state is `moments` arrays like the parameters and its work is element-wise, as
    the closed form of a step assumes."""

    @property
    def in_words(self) -> str:
        """Its name, and what distinguishes it from a plainer one of that name."""
        return self.name

    @property
    def shares(self) -> dict[str, float]:
        """Share of the updates, 0..1, in which each conditional part of an update runs, by its
        named scope."""
        return {}

    @property
    def own_module(self) -> str | None:
        """The user's own module that builds it; None for those of scalejax."""
        return None

    @property
    def moments(self) -> Literal[0, 1, 2]:
        """Number of arrays like the parameters that it keeps; 0 if it steps along one gradient."""
        return 1

    def scaled_by_sde(self, k: float, reference_batch: int) -> "OptimizerConfig":
        """The optimizer for k times the reference batch, by the rule of Malladi et al. 2022
        (definition 5.3, arXiv 2205.10287).

        Raises:
            ConfigError: if it has no such rule, or k is too large for it.
        """
        accepted = f"its rule is that of adamw, not of optimizer.name={self.name!r}"
        raise ConfigError(refusal("schedule.scaling", "sde", accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent, with or without momentum."""

    name: Literal["sgd"] = "sgd"
    """Selects this optimizer."""
    momentum: float = 0.9
    """Momentum: the share of the buffer that an update keeps; 0 for none."""
    nesterov: bool = False
    """Whether momentum is Nesterov's: the gradient is taken ahead of the momentum step."""
    momentum_form: MomentumForm = "rate_outside"
    """Where the learning rate enters the buffer: outside (Goyal et al. 2017, equation 9; a
    changing rate needs no momentum correction), inside (equation 10), inside and corrected."""
    weight_decay: float = 0.0
    """L2 weight decay, added to the gradient before momentum: weight_decay x parameter."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also applies to biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_fraction("optimizer.momentum", self.momentum)
        _require_moderate("optimizer.weight_decay", self.weight_decay)
        if self.momentum == 0:
            accepted = "it needs a momentum above 0"
            if self.nesterov:
                raise ConfigError(refusal("optimizer.nesterov", True, accepted))
            if self.momentum_form != "rate_outside":
                form = self.momentum_form
                raise ConfigError(refusal("optimizer.momentum_form", form, accepted))

    @property
    def in_words(self) -> str:
        """Its name, and whether it has momentum."""
        return "sgd with momentum" if self.momentum else "sgd"

    @property
    def moments(self) -> Literal[0, 1]:
        """1 for momentum."""
        return 1 if self.momentum else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    normalises_entries = True
    name: Literal["adamw"] = "adamw"
    """Selects this optimizer."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay per unit of learning rate."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also applies to biases and normalisation parameters."""
    mu_dtype: MomentType = "float32"
    """Element type in which the first moment is kept; it is updated in float32 (Optax's and
    MaxText's name). "blockwise8": 8 bits in blocks of up to 256 entries along the last dimension,
    with a scale each (Dettmers et al. 2021, arXiv 2110.02861); arrays of fewer than 4,096 entries
    in float32."""
    nu_dtype: MomentType = "float32"
    """Element type in which the second moment is kept; it is updated in float32. In bfloat16,
    rounded to the nearest of 8 bits, it stops falling if `beta2` is above 0.998, which subtracts
    less than 1 / 512 of it each time."""
    main_params_dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type in which matrices and embeddings are kept and updated (Megatron-Core's name);
    bfloat16, rounded to the nearest, loses updates below 1 / 512 of a parameter."""
    cautious: bool = False
    """Whether entries of a step that point against the gradient are zeroed, and the others enlarged
    to compensate (C-AdamW; Liang et al. 2024, arXiv 2411.16085, algorithm 1)."""

    def __post_init__(self) -> None:
        _require_moments(self)

    @property
    def is_layer_wise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  by field
        """Whether it counts entries of whole layers, or keeps moments in blocks of them."""
        return self.cautious or self.has_blocks

    @property
    def has_blocks(self) -> bool:
        """Whether a moment is kept in blocks."""
        return "blockwise8" in (self.mu_dtype, self.nu_dtype)

    @property
    def moments(self) -> Literal[2]:
        """Two: of the gradient, and of its square."""
        return 2

    def scaled_by_sde(self, k: float, reference_batch: int) -> "AdamWConfig":
        """1 - beta1 and 1 - beta2 times k, and epsilon over root k; weight decay, which the rule
        does not cover, is unchanged."""
        largest = 1 / (1 - min(self.beta1, self.beta2))
        if k > largest:
            most = int(largest * reference_batch)
            accepted = (
                f"k={k:g} would leave no average of gradients (1 - beta becomes k (1 - beta)); "
                f"with schedule.reference_batch={reference_batch} it may be at most {most}"
            )
            raise ConfigError(refusal("batch.global_batch", round(k * reference_batch), accepted))
        return replace(
            self,
            beta1=max(1 - k * (1 - self.beta1), 0.0),
            beta2=max(1 - k * (1 - self.beta2), 0.0),
            epsilon=self.epsilon / k**0.5,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LionConfig(OptimizerConfig):
    """Lion: steps along the sign of a momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2),
    as in Optax. Its authors use 1/3 to 1/10 of AdamW's rate, and as much more decay."""

    normalises_entries = True
    name: Literal["lion"] = "lion"
    """Selects this optimizer."""
    beta1: float = 0.9
    """Share of the momentum in the step's direction."""
    beta2: float = 0.99
    """Decay of the momentum."""
    weight_decay: float = 0.1
    """Decoupled decay per unit of learning rate."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also applies to biases and normalisation parameters."""
    mu_dtype: MomentType = "float32"
    """Element type in which the momentum is kept; it is updated in float32. "blockwise8" as for
    adamw."""
    cautious: bool = False
    """Whether entries of a step that point against the gradient are zeroed, and the others enlarged
    to compensate (C-Lion; Liang et al. 2024, arXiv 2411.16085, algorithm 1)."""

    def __post_init__(self) -> None:
        _require_fraction("optimizer.beta1", self.beta1)
        _require_fraction("optimizer.beta2", self.beta2)
        _require_moderate("optimizer.weight_decay", self.weight_decay)

    @property
    def is_layer_wise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  by field
        """Whether it counts entries of whole layers, or keeps moments in blocks of them."""
        return self.cautious or self.has_blocks

    @property
    def has_blocks(self) -> bool:
        """Whether the momentum is kept in blocks."""
        return self.mu_dtype == "blockwise8"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarsConfig(OptimizerConfig):
    """MARS-AdamW with the gradient of the previous batch instead of that of this batch at the
    previous weights (Yuan et al. 2024, arXiv 2411.10438, algorithm 2, "MARS-approx"): a step needs
    no second gradient, and keeps a third array like the parameters."""

    is_layer_wise = True
    is_in_closed_form = False
    name: Literal["mars"] = "mars"
    """Selects this optimizer."""
    gamma: float = 0.025
    """Share of the gradients' difference, times beta1 / (1 - beta1), that corrects a gradient."""
    beta1: float = 0.95
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay per unit of learning rate."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also applies to biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_moments(self)
        _require_moderate("optimizer.gamma", self.gamma)

    @property
    def moments(self) -> Literal[2]:
        """Two, in addition to the previous gradient."""
        return 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235, algorithms 4 and 5), as in Optax: it keeps
    a row and a column of the second moment of a matrix, and no first moment."""

    is_layer_wise = True
    is_in_closed_form = False
    name: Literal["adafactor"] = "adafactor"
    """Selects this optimizer."""
    decay_exponent: float = 0.8
    """The decay of the second moment at step t is 1 - t^-decay_exponent (section 7.2)."""
    clipping_threshold: float = 1.0
    """Largest root mean square of the update of an array, before the rate (section 6)."""
    scales_by_parameter: bool = True
    """Whether the rate is relative to the root mean square of an array (section 8)."""
    smallest_factored: int = 128
    """Arrays with two dimensions of at least this size are factored; others have a whole second
    moment (128 in Optax; the paper factors all matrices)."""
    weight_decay: float = 0.0
    """Decoupled decay per unit of learning rate."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also applies to biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_fraction("optimizer.decay_exponent", self.decay_exponent)
        require_above("optimizer.decay_exponent", self.decay_exponent, 0)
        require_above("optimizer.clipping_threshold", self.clipping_threshold, 0)
        require_at_least("optimizer.smallest_factored", self.smallest_factored, 1)
        _require_moderate("optimizer.weight_decay", self.weight_decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOptimizerConfig(OptimizerConfig):
    """What optimizers of matrices have in common: they update hidden matrices, and AdamW updates
    embeddings, patches, the head, filters of one channel each (layers named "depthwise"), biases,
    norms, routers and adapters. Matrices that are kept side by side (queries, keys and values of
    gpt, gate and up of llama) count separately; queries, keys and values of llama, whose heads have
    groups, count as one, and a convolution as (height x width x in) by out."""

    is_layer_wise = True
    is_in_closed_form = False
    weight_decay: float = 0.1
    """Decoupled decay per unit of learning rate."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also applies to biases and normalisation parameters."""
    adamw_beta1: float = 0.9
    """Decay of the first moment of AdamW, which updates all but hidden matrices."""
    adamw_beta2: float = 0.95
    """Decay of AdamW's second moment."""
    adamw_rate_factor: float = 1.0
    """AdamW's learning rate over that of the schedule."""
    epsilon: float = 1e-8
    """Added to the root of second moments."""

    def __post_init__(self) -> None:
        _require_fraction("optimizer.adamw_beta1", self.adamw_beta1)
        _require_fraction("optimizer.adamw_beta2", self.adamw_beta2)
        require_above("optimizer.adamw_rate_factor", self.adamw_rate_factor, 0)
        require_above("optimizer.epsilon", self.epsilon, 0)
        _require_moderate("optimizer.epsilon", self.epsilon)
        _require_moderate("optimizer.weight_decay", self.weight_decay)

    @property
    def moments(self) -> Literal[2]:
        """Two, for the parameters of AdamW; matrices have more, or fewer."""
        return 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig(MatrixOptimizerConfig):
    """Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations (Jordan et al.
    2024, kellerjordan.github.io/posts/muon), as in Optax. Products of whole matrices, of which
    devices hold parts, and the exchanges for them are in the program."""

    name: Literal["muon"] = "muon"
    """Selects this optimizer."""
    momentum: float = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Whether the gradient is taken ahead of the momentum step."""
    newton_schulz_steps: int = 5
    """Iterations, each of three products, with the coefficients of Jordan et al.; on float32 arrays
    at the device's default precision (tf32 on GPUs since Ampere, bfloat16 on TPUs), as in Optax;
    Jordan et al. use bfloat16."""
    scale: Literal["rms", "width"] = "rms"
    """Factor on the orthogonal matrix, of `in` rows and `out` columns: "rms" 0.2 sqrt(max(in,
    out)), the size of AdamW's steps, so that both share a rate (Liu et al. 2025, arXiv 2502.16982,
    equation 4); "width" sqrt(max(1, out / in)) (Jordan et al.), with rates of about 0.02."""

    def __post_init__(self) -> None:
        MatrixOptimizerConfig.__post_init__(self)
        _require_fraction("optimizer.momentum", self.momentum)
        require_at_least("optimizer.newton_schulz_steps", self.newton_schulz_steps, 1)


REFRESH = "preconditioner_refresh"
"""Named scope of the computation of preconditioners, which runs in some of the updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreconditionedConfig(MatrixOptimizerConfig):
    """What SOAP and Shampoo have in common: means of G G^T and G^T G of the gradient G of each
    matrix, and preconditioners that are computed from them now and then; all products run, and are
    costed, in full float32, without tf32."""

    beta1: float = 0.95
    """Decay of the first moment of matrices."""
    beta2: float = 0.95
    """Decay of the second moment of matrices, and of G G^T and G^T G."""
    refresh_every_steps: int = 10
    """Updates between computations of the preconditioners; the first is made after one update."""
    largest_side: int = 8192
    """Longer sides of a matrix have no preconditioner: its memory grows with their square, and its
    work with their cube."""
    ridge: float = 1e-6
    """Added to the diagonals of these means before preconditioners are computed from them, as a
    share of the largest row sum: without it, rounding would decide directions that have no
    gradients."""

    def __post_init__(self) -> None:
        MatrixOptimizerConfig.__post_init__(self)
        _require_fraction("optimizer.beta1", self.beta1)
        _require_fraction("optimizer.beta2", self.beta2)
        require_at_least("optimizer.refresh_every_steps", self.refresh_every_steps, 1)
        require_at_least("optimizer.largest_side", self.largest_side, 1)
        require_above("optimizer.ridge", self.ridge, 0)
        require_at_most("optimizer.ridge", self.ridge, 1)

    @property
    def shares(self) -> dict[str, float]:
        """The share of updates after which preconditioners are computed."""
        return {REFRESH: 1 / self.refresh_every_steps}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoapConfig(PreconditionedConfig):
    """SOAP: Adam in the eigenbasis of Shampoo's preconditioners (Vyas et al. 2024, arXiv
    2409.11321, algorithms 3 and 4). The basis starts as the identity, and each refresh is one step
    of power iteration and QR, as theirs is after the first."""

    name: Literal["soap"] = "soap"
    """Selects this optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShampooConfig(PreconditionedConfig):
    """Shampoo: L^-1/4 M R^-1/4 of the momentum M of a matrix (Gupta et al. 2018, arXiv 1802.09568,
    algorithm 1), with means instead of sums, and steps as long as Adam's (grafting; Shi et al.
    2023, arXiv 2309.06497, section 2.4). If only one side has a preconditioner, it is L^-1/2 M or M
    R^-1/2: each of k sides has the exponent -1 / (2 k) (as in Distributed Shampoo, Anil et al.
    2020). Roots are computed with products only."""

    name: Literal["shampoo"] = "shampoo"
    """Selects this optimizer."""
    root_steps: int = 25
    """Iterations of the coupled Newton method for the roots, each of four products, or three for a
    square root (Guo & Higham 2006; as in Anil et al. 2020, arXiv 2002.09018, section 5)."""

    def __post_init__(self) -> None:
        PreconditionedConfig.__post_init__(self)
        require_at_least("optimizer.root_steps", self.root_steps, 1)


CURVATURE = "curvature_estimate"
"""Named scope of Sophia's estimate of curvature, which runs in some of the updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SophiaConfig(OptimizerConfig):
    """Sophia-G (Liu et al. 2023, arXiv 2305.14342, algorithms 2 and 3): its steps are
    clip(m / max(gamma h, epsilon), 1) for the means m of gradients and h of estimates of the
    Gauss-Newton matrix's diagonal. An estimate is B g * g, for the gradient g of the mean
    cross-entropy of B labels, which are sampled from the network's logits for the same samples by
    seed, update and row: a second forward and backward pass. Mixed images get one label each."""

    is_in_closed_form = False
    name: Literal["sophia"] = "sophia"
    """Selects this optimizer."""
    beta1: float = 0.96
    """Decay of the mean of gradients."""
    beta2: float = 0.99
    """Decay of the mean of estimates; neither mean is corrected for its first updates."""
    gamma: float = 0.05
    """Factor on the curvature (rho in the authors' code); the larger, the fewer entries are
    clipped."""
    epsilon: float = 1e-12
    """Smallest gamma h: below it, and if curvature is negative or absent, the step is a sign."""
    refresh_every_steps: int = 10
    """Updates between estimates; the first is made in the first update."""
    weight_decay: float = 0.2
    """Decoupled decay per unit of learning rate."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also applies to biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_moments(self)
        require_above("optimizer.gamma", self.gamma, 0)
        _require_moderate("optimizer.gamma", self.gamma)
        require_at_least("optimizer.refresh_every_steps", self.refresh_every_steps, 1)

    @property
    def moments(self) -> Literal[2]:
        """Two: of the gradient, and of the estimates."""
        return 2

    @property
    def shares(self) -> dict[str, float]:
        """The share of updates in which an estimate is made."""
        return {CURVATURE: 1 / self.refresh_every_steps}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradConfig(OptimizerConfig):
    """Adagrad: steps over the root of the sum of squared gradients (Duchi et al. 2011, JMLR 12)."""

    name: Literal["adagrad"] = "adagrad"
    """Selects this optimizer."""
    initial_accumulator: float = 0.1
    """Initial value of the sum of squares; 0 in Dean et al. 2012, who have no epsilon either."""
    epsilon: float = 1e-7
    """Added to the sum under the root."""

    def __post_init__(self) -> None:
        require_at_least("optimizer.initial_accumulator", self.initial_accumulator, 0)
        _require_moderate("optimizer.epsilon", self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFreeConfig(OptimizerConfig):
    """Schedule-free optimization (Defazio et al. 2024, arXiv 2405.15682), as in Optax: iterates are
    averaged instead of a learning rate decay.

    Gradients are computed between the average and the newest iterate; evaluation uses the average.
    """

    averages_iterates = True
    name: Literal["schedule_free"] = "schedule_free"
    """Selects this optimizer."""
    base: Literal["sgd", "adamw"] = "adamw"
    """Base optimizer: plain SGD, or AdamW without its first moment."""
    interpolation: float = 0.9
    """Weight of the average, 0..1, in the point at which gradients are computed (Optax: b1); it
    replaces momentum."""
    beta2: float = 0.999
    """Decay of the second moment (adamw)."""
    epsilon: float = 1e-8
    """Added to the root of the second moment (adamw)."""
    weight_decay: float = 0.0
    """Weight decay; decoupled with base adamw, added to the gradient with base sgd."""
    decays_norm_and_bias: bool = False
    """Whether weight decay also applies to biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_fraction("optimizer.interpolation", self.interpolation)
        require_above("optimizer.interpolation", self.interpolation, 0)
        _require_fraction("optimizer.beta2", self.beta2)
        require_above("optimizer.epsilon", self.epsilon, 0)
        _require_moderate("optimizer.epsilon", self.epsilon)
        _require_moderate("optimizer.weight_decay", self.weight_decay)

    @property
    def moments(self) -> Literal[1, 2]:
        """1 for the average, and 1 for the second moment of base adamw."""
        return 2 if self.base == "adamw" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsConfig(OptimizerConfig):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888)."""

    is_layer_wise = True
    name: Literal["lars"] = "lars"
    """Selects this optimizer."""
    variant: Literal["optax", "paper"] = "optax"
    """Trust ratio of a layer with gradient g, weights w and decay d, before the coefficient:
    "optax" |w| / |g + d w|; "paper" |w| / (|g| + d |w|), as also in MLPerf's reference."""
    momentum: float = 0.9
    """Momentum: the share of the buffer that an update keeps."""
    nesterov: bool = False
    """Whether momentum is Nesterov's: the gradient is taken ahead of the momentum step."""
    momentum_form: MomentumForm = "rate_inside"
    """Where the learning rate enters the buffer; inside, as published: after a rise of the rate,
    updates lag by about 1 / (1 - momentum) steps."""
    weight_decay: float = 1e-4
    """L2 weight decay, added to the gradient: weight_decay x parameter."""
    trust_coefficient: float = 0.001
    """Trust coefficient: step size as a share of the norm of a layer's weights."""
    decays_norm_and_bias: bool = False
    """Whether decay and trust ratio also apply to biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_fraction("optimizer.momentum", self.momentum)
        _require_moderate("optimizer.weight_decay", self.weight_decay)
        require_above("optimizer.trust_coefficient", self.trust_coefficient, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LambConfig(OptimizerConfig):
    """Adam with layer-wise trust ratios (You et al. 2019, arXiv 1904.00962)."""

    is_layer_wise = True
    name: Literal["lamb"] = "lamb"
    """Selects this optimizer."""
    variant: Literal["optax", "paper", "nvlamb"] = "optax"
    """"optax": trust ratio |w| / |update|; "paper": |w| is bounded first (its phi); "nvlamb":
    gradients are first clipped to a global norm of at most 1, and biases and normalisation
    parameters have a trust ratio even where they are not decayed (NVIDIA Apex, FusedLAMB)."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-6
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay, inside the trust ratio."""
    weight_norm_bound: float = 10.0
    """Largest norm of weights in the trust ratio (phi, variant "paper"). The paper does not state
    the number; 10 is that of cybertronai/pytorch-lamb."""
    trust_clip: float | None = None
    """Largest trust ratio; if absent, it is not clipped. Some ports use 1."""
    decays_norm_and_bias: bool = False
    """Whether decay and trust ratio also apply to biases and normalisation parameters."""

    def __post_init__(self) -> None:
        _require_moments(self)
        require_above("optimizer.weight_norm_bound", self.weight_norm_bound, 0)
        require_above("optimizer.trust_clip", self.trust_clip, 0)

    @property
    def moments(self) -> Literal[2]:
        """Two: of the gradient, and of its square."""
        return 2


OptionValue = bool | int | float | str | None
"""Value of an option for a user's own function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOptimizerConfig(OptimizerConfig):
    """An optimizer of your own, or another of Optax, by import path."""

    is_layer_wise = True
    is_in_closed_form = False
    name: Literal["custom"] = "custom"
    """Selects an optimizer of your own."""
    path: str
    """Import path "module:function", such as "optax:adabelief". The function is called with the
    learning rate by update as its first argument, and returns an Optax transformation, whose
    updates are added; one that needs more than gradients, state and parameters is refused. The
    module is imported, which runs its code: name one that you trust."""
    options: dict[str, OptionValue] = field(default_factory=dict)
    """Keyword arguments of the function."""

    def __post_init__(self) -> None:
        require_import_path("optimizer.path", self.path, "optax:adabelief")

    @property
    def own_module(self) -> str:
        """The module that `path` names."""
        return self.path.split(":")[0]

    @property
    def in_words(self) -> str:
        """Its path."""
        return self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippingConfig:
    """Clipping of the gradient of the global batch by its norm, before the optimizer (Pascanu et
    al. 2013, algorithm 1, arXiv 1211.5063). The norm is that of whole arrays, however they are
    sharded, and is in the record."""

    max_norm: float = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it (1.0 in Megatron-LM, MaxText
    and torchtitan)."""
    scope: Literal["global", "block"] = "global"
    """What is clipped by its own norm: "global", all parameters together; "block", each layer of
    stacked blocks, and each other top-level part of the network."""

    def __post_init__(self) -> None:
        require_above("clipping.max_norm", self.max_norm, 0)


def _require_fraction(field: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(refusal(field, value, "it must be from 0 to below 1"))


def _require_moments(config: AdamWConfig | LambConfig | MarsConfig | SophiaConfig) -> None:
    _require_fraction("optimizer.beta1", config.beta1)
    _require_fraction("optimizer.beta2", config.beta2)
    require_above("optimizer.epsilon", config.epsilon, 0)
    _require_moderate("optimizer.epsilon", config.epsilon)
    _require_moderate("optimizer.weight_decay", config.weight_decay)
