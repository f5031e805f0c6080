"""Mixtures of experts: a feed-forward layer in which each token goes through some of many experts.

A router scores the experts for each token, and the token's result is the weighted sum of the
results of the experts with the highest scores. Experts are sharded over the expert axis of the
mesh, which shards the rows of the batch as well, so that tokens travel:

- Dropless (`capacity_factor` absent): devices along the axis gather each other's tokens, compute
  those of their own experts, and reduce-scatter the sums (Megatron's all-gather dispatcher). Tokens
  are sorted by expert and multiplied in blocks of rows of one expert; the number of blocks follows
  the loads. Nothing is padded to the worst case, in which all tokens choose one device.
- With a capacity: each expert takes a fixed number of tokens of each sample, in their order;
  tokens are sent to their experts and back in two all-to-alls, with experts per token x capacity
  factor / expert axis times the bytes of gathering them all. Shapes do not depend on the loads.

Everything is computed in a `shard_map` over all axes, with explicit collectives. Knows nothing of
other layers, nor of how losses and loads are applied.

Shapes: B batch, S tokens, T all tokens of a device, D hidden, E experts, K experts per token, F
width of an expert, C capacity, L layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Initializer
from jax import lax
from jax.sharding import PartitionSpec as P

from scalejax.config.model import DecoderRemat, LlamaConfig, ModelConfig
from scalejax.config.moe import BlocksAtEvenLoad, MoeConfig, block_rows
from scalejax.config.parallelism import BATCH_AXES, CONTEXT, EXPERT, FSDP, PIPELINE, TENSOR
from scalejax.models.network import PartitionRules
from scalejax.models.remat import is_recomputed, named
from scalejax.models.sharding import (
    constraints,
    divisible,
    is_of_layout,
    is_zigzag,
    without,
    zigzag_chunks,
)

EXPERT_GATED = P(EXPERT, FSDP, None, TENSOR)
EXPERT_DOWN = P(EXPERT, (TENSOR, FSDP), None)
SHARED_GATED = P(FSDP, None, TENSOR)
SHARED_DOWN = P((TENSOR, FSDP), None)
"""How matrices are split: within an expert as in a dense layer, experts over the expert axis."""

PARTITION_RULES: PartitionRules = (
    (r"experts/gated/kernel$", P(PIPELINE, *EXPERT_GATED)),
    (r"experts/down/kernel$", P(PIPELINE, *EXPERT_DOWN)),
    (r"shared/gated/kernel$", P(PIPELINE, *SHARED_GATED)),
    (r"shared/down/kernel$", P(PIPELINE, *SHARED_DOWN)),
)
"""Partition rules of the stacked parameters; the router is replicated."""


def is_of_experts(path: Any) -> bool:
    """Whether the parameter at this path of a tree has the experts as the first dimension of a
    layer."""
    return any(getattr(key, "key", None) == "experts" for key in path)


class Routing(NamedTuple):
    """The experts that each token goes through."""

    experts_BSK: jax.Array
    """Index of each, int32."""
    weights_BSK: jax.Array
    """Weight of the result of each, float32."""
    scores_BSE: jax.Array
    """Scores of all experts, float32, summing to 1."""
    logits_BSE: jax.Array
    """Logits of the router, float32."""


class RouterReport(NamedTuple):
    """What a layer reports about its routing: means and sums over the tokens of a forward pass on
    all devices, of each microbatch separately, as in Megatron-LM, not of the global batch."""

    auxiliary_loss: jax.Array
    """experts x sum of (share of assignments x mean score); 1 where loads are even."""
    z_loss: jax.Array
    """Mean square of the logarithm of the sum of exponentials of a token's logits."""
    load_E: jax.Array
    """Assignments of each expert, float32."""
    dropped_share: jax.Array
    """Assignments beyond the capacity of their expert, over all assignments."""


class Routers(nnx.Variable):
    """The `RouterReport` of a forward pass, stacked over layers: [layers, ...], or in a pipeline
    also over microbatches, [microbatches, layers, ...]."""


def load_of_all(reports: RouterReport) -> jax.Array:
    """Assignments of each expert of each layer, summed over microbatches, [L, E]."""
    load = reports.load_E
    return load.reshape(-1, *load.shape[-2:]).sum(axis=0) if load.ndim > 2 else load


def with_later_layers(reports: RouterReport, later: RouterReport) -> RouterReport:
    """Reports of some layers, followed by those of `later` ones."""
    axis = reports.z_loss.ndim - 1
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis=axis), reports, later)


ROUTER_METRICS = ("auxiliary_loss", "router_z_loss", "expert_load", "dropped_share")
"""Metrics of a step with experts."""

WINDOW_METRIC = "expert_load_of_window"
"""A further metric, if `load_window` is given."""


def router_losses(network: nnx.Module, moe: MoeConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What the routers of a network add to the loss after its forward pass, and their metrics;
    means over microbatches where a pipeline had several.

    Metrics of losses are without their weights, means over layers, so that 1 is even balance;
    "expert_load" is the largest load of any expert over the mean of its layer, and "dropped_share"
    the mean over layers. The auxiliary loss is added only where the router balances by it.
    """
    report: RouterReport = network.routers.get_value()  # type: ignore[attr-defined]  of a routed network
    return weighed_losses(report, moe).mean(), router_metrics(report)


def weighed_losses(report: RouterReport, moe: MoeConfig) -> jax.Array:
    """What routers add to the loss, summed over layers; for each microbatch if reports are."""
    router = moe.router
    loss = router.z_loss_weight * report.z_loss.sum(axis=-1)
    if router.balance == "auxiliary_loss":
        loss += router.auxiliary_loss_weight * report.auxiliary_loss.sum(axis=-1)
    return loss


def router_metrics(report: RouterReport) -> dict[str, jax.Array]:
    """The metrics of `router_losses`."""
    metrics = (
        report.auxiliary_loss.mean(),
        report.z_loss.mean(),
        _fullest(report.load_E).max(axis=-1).mean(),
        report.dropped_share.mean(),
    )
    return dict(zip(ROUTER_METRICS, metrics, strict=True))


def with_counted_loads(model: ModelConfig, model_state: Any) -> tuple[Any, dict[str, jax.Array]]:
    """The statistics of a network after a step, with counts of loads reset, and metrics of them.

    Where experts are balanced by a bias, it is moved against their loads in that step's global
    batch: bias += bias_update_rate x sign(mean load - load), or, with `bias_update` "error",
    bias_update_rate x (mean load - load) / mean load.

    With a window of loads, its metric is the largest of all layers in the last complete window; 0
    before the first.

    Source: DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv 2408.15664,
    algorithm 1 and section 4.3.
    """
    moe = model.moe if isinstance(model, LlamaConfig) else None
    if moe is None or not moe.counts_loads:
        return model_state, {}

    def updated(blocks: Any) -> Any:
        layers = blocks["feed_forward"]
        load_LE = layers["load"]
        after = {**layers, "load": jnp.zeros_like(load_LE)}
        if moe.router.balance == "bias":
            mean_L1 = load_LE.mean(axis=-1, keepdims=True)
            error_LE = mean_L1 - load_LE
            is_by_sign = moe.router.bias_update == "sign"
            move_LE = jnp.sign(error_LE) if is_by_sign else error_LE / jnp.maximum(mean_L1, 1)
            after["bias"] += moe.router.bias_update_rate * move_LE
        if moe.load_window is not None:
            load_LE += layers["window_load"]
            is_whole_L1 = load_LE.sum(axis=-1, keepdims=True) >= moe.load_window
            fullest_L1 = _fullest(load_LE)[:, None]
            after["window_load"] = jnp.where(is_whole_L1, 0, load_LE)
            after["window_fullest"] = jnp.where(is_whole_L1, fullest_L1, layers["window_fullest"])
        return {**blocks, "feed_forward": after}

    routed = [name for name in ("blocks", "mtp_blocks") if name in model_state]
    after = {**model_state, **{name: updated(model_state[name]) for name in routed}}
    if moe.load_window is None:
        return after, {}
    fullest = [after[name]["feed_forward"]["window_fullest"].max() for name in routed]
    return after, {WINDOW_METRIC: jnp.max(jnp.stack(fullest))}


def _fullest(load_LE: jax.Array) -> jax.Array:
    """Load of the fullest expert of each layer over the mean, [L]; with microbatches [M, L]."""
    return load_LE.max(axis=-1) / load_LE.mean(axis=-1)


class Matrix(nnx.Module):
    """A matrix, without a bias, that its layer multiplies itself."""

    def __init__(self, shape: tuple[int, ...], init: Initializer, rngs: nnx.Rngs):
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))


class Experts(nnx.Module):
    """The matrices of gated feed-forward layers: those of several experts, or one wide one."""

    def __init__(self, config: LlamaConfig, lead: tuple[int, ...], width: int, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        residual = nnx.initializers.normal(0.02 / (2 * config.layers) ** 0.5)
        self.gated = Matrix((*lead, config.hidden, 2, width), init, rngs)
        self.down = Matrix((*lead, width, config.hidden), residual, rngs)


class MoeFeedForward(nnx.Module):
    """A router, its experts, and shared experts if there are any.

    Source: Shazeer et al. 2017, arXiv 1701.06538; DeepSeek-AI 2024, arXiv 2412.19437, section
    2.1.2.
    """

    def __init__(self, config: LlamaConfig, moe: MoeConfig, *, rngs: nnx.Rngs):
        self.moe = moe
        self.remat: DecoderRemat = config.remat
        init = nnx.initializers.normal(0.02)
        self.router = nnx.Param(init(rngs.params(), (config.hidden, moe.experts), jnp.float32))
        zeros_E = jnp.zeros((moe.experts,), jnp.float32)
        if moe.router.balance == "bias":
            self.bias = nnx.BatchStat(zeros_E)
        if moe.counts_loads:
            self.load = nnx.BatchStat(zeros_E)
        if moe.load_window is not None:
            self.window_load = nnx.BatchStat(zeros_E)
            self.window_fullest = nnx.BatchStat(zeros_E[:1])
        self.experts = Experts(config, (moe.experts,), moe.expert_hidden, rngs)
        if moe.shared_experts:
            self.shared = Experts(config, (), moe.shared_experts * moe.expert_hidden, rngs)

    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, RouterReport]:
        """The result of its experts for each token, [B, S, D], and the router's report on all.

        With sequence parallelism tokens are sharded over tensor before and after.
        """
        mesh = jax.sharding.get_abstract_mesh()
        is_split = is_of_layout(mesh)
        sizes = {name: size for name, size in mesh.shape.items() if size > 1} if is_split else {}
        manual = frozenset(mesh.manual_axes) if is_split else frozenset()
        parts = {"experts": (self.experts, EXPERT_GATED, EXPERT_DOWN)}
        if self.moe.shared_experts:
            parts["shared"] = (self.shared, SHARED_GATED, SHARED_DOWN)
        matrices, specs = {}, {}
        for name, (layer, gated, down) in parts.items():
            matrices[name] = tuple(
                matrix.kernel[...].astype(x_BSD.dtype) for matrix in (layer.gated, layer.down)
            )
            specs[name] = tuple(
                divisible(name, without(manual, spec), matrix.shape, sizes_of(mesh, is_split))
                for spec, matrix in zip((gated, down), matrices[name], strict=True)
            )
        bias_E = self.bias[...] if self.moe.router.balance == "bias" else None
        axes = _Axes(frozenset(sizes), frozenset(sizes) - manual, is_zigzag())
        layer = partial(self._of_device, specs, axes)
        arguments = (x_BSD, self.router[...], bias_E, matrices)
        if not sizes:
            return layer(*arguments)
        own = set(mesh.axis_names) - manual
        tokens = tuple(axis for axis in (CONTEXT, *_sequence_axes()) if axis in sizes)
        split = without(manual, P(BATCH_AXES, tokens or None, None))
        split = divisible("tokens", split, x_BSD.shape, mesh.shape)
        return jax.shard_map(
            layer,
            in_specs=(split, P(), P(), specs),
            out_specs=(split, P()),
            axis_names=own,
            check_vma=False,
        )(*arguments)

    def _of_device(
        self,
        specs: dict[str, tuple[P, P]],
        own: "_Axes",
        x_BSD: jax.Array,
        router_DE: jax.Array,
        bias_E: jax.Array | None,
        matrices: dict[str, tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, RouterReport]:
        """The layer for the tokens of one device, with its shards of the matrices.

        Args:
            specs: how the matrices are sharded.
            own: the axes over which there is more than one device.
            x_BSD: tokens of the device.
            router_DE: the router.
            bias_E: bias of the experts, if they are balanced by one.
            matrices: shards of the matrices in the compute type.
        """
        parts = {
            name: tuple(
                _Sharded(matrix, _Whole(own, _dimension(spec, FSDP)))
                for matrix, spec in zip(pair, specs[name], strict=True)
            )
            for name, pair in matrices.items()
        }
        # A recomputed block gathers them again as well.
        is_again = is_recomputed(self.remat)
        if is_again:
            parts = {name: tuple(map(_gathered, pair)) for name, pair in parts.items()}
        is_sequence_parallel = bool(_sequence_axes()) and TENSOR in own.used
        if is_sequence_parallel:
            x_BSD = own.gathered(x_BSD, TENSOR, 1)
        routing = routed(x_BSD, router_DE, bias_E, self.moe)
        loads_BE = _loads(routing.experts_BSK, self.moe.experts)
        if self.moe.capacity_factor is None:
            made_BSD = _dropless(own, x_BSD, routing, *parts["experts"], is_kept=not is_again)
            kept = jnp.ones((), jnp.float32)
        else:
            made_BSD, kept = _within_capacity(
                own, self.moe, x_BSD, routing, loads_BE, *parts["experts"]
            )
        if "shared" in parts:
            gated_DNF, down_FD = parts["shared"]
            hidden_BSNF = named(_multiplied("bsd,dnf->bsnf", x_BSD, gated_DNF), "mlpwi")
            made_BSD += _multiplied("bsf,fd->bsd", _swiglu(hidden_BSNF), down_FD)
        if is_sequence_parallel:
            made_BSD = lax.psum_scatter(made_BSD, TENSOR, scatter_dimension=1, tiled=True)
        elif TENSOR in own.used:
            made_BSD = _summed_over_tensor(made_BSD)
        return named(made_BSD, "mlpwo"), self._reported(own, routing, loads_BE, kept)

    def _reported(
        self, own: "_Axes", routing: Routing, loads_BE: jax.Array, kept: jax.Array
    ) -> RouterReport:
        """The router's report on the tokens of all devices.

        Losses are linear in what depends on parameters: where the data axis is manual outside, the
        mean of gradients over it is the gradient of the loss over all.
        """
        load_E = own.summed(loads_BE.sum(axis=0))
        share_E = lax.stop_gradient(load_E / load_E.sum())
        mean_E = routing.scores_BSE.mean(axis=(0, 1))
        auxiliary = self.moe.experts * jnp.sum(share_E * mean_E)
        z_loss = jnp.mean(jnp.square(jax.nn.logsumexp(routing.logits_BSE, axis=-1)))
        auxiliary, z_loss, kept = (own.mean(each) for each in (auxiliary, z_loss, kept))
        return RouterReport(auxiliary, z_loss, load_E, 1 - kept)


def sizes_of(mesh: Any, is_split: bool) -> dict[str, int]:
    """Devices along each axis that a matrix may be sharded over; 1 without a mesh."""
    names = (PIPELINE, *BATCH_AXES, CONTEXT, TENSOR)
    return {name: mesh.shape[name] if is_split else 1 for name in names}


def _sequence_axes() -> tuple[str, ...]:
    return (TENSOR,) if constraints().is_sequence_parallel else ()


def _dimension(spec: P, axis: str) -> int | None:
    """The dimension that `spec` shards over `axis`; None if there is none."""
    for index, entry in enumerate(spec):
        if axis in (entry if isinstance(entry, tuple) else (entry,)):
            return index
    return None


class _Axes(NamedTuple):
    """Collectives over the axes of a mesh that have more than one device."""

    used: frozenset[str]
    """The axes."""
    inner: frozenset[str]
    """Those that are manual only within the layer: over the others, which are manual around it,
    gradients and metrics are averaged outside."""
    is_zigzag: bool
    """Whether each device along context has two chunks of a sample (`zigzag_chunks`)."""

    def gathered(self, array: jax.Array, axis: str, dimension: int | None) -> jax.Array:
        """`array` gathered along a dimension that is sharded over `axis`; in the backward pass its
        gradient is reduce-scattered."""
        if axis not in self.used or dimension is None:
            return array
        return lax.all_gather(array, axis, axis=dimension, tiled=True)

    def summed(self, array: jax.Array) -> jax.Array:
        """The sum of `array` over the devices that hold different tokens."""
        axes = tuple(axis for axis in (*BATCH_AXES, CONTEXT) if axis in self.used)
        return lax.psum(array, axes) if axes else array

    def mean(self, value: jax.Array) -> jax.Array:
        """The mean of a value over the devices along `inner` axes that hold different tokens."""
        axes = tuple(axis for axis in (*BATCH_AXES, CONTEXT) if axis in self.inner)
        return lax.pmean(value, axes) if axes else value


class _Whole(NamedTuple):
    """How the shard of a matrix is gathered over fsdp."""

    own: _Axes
    """The axes."""
    dimension: int | None
    """The dimension that is sharded over fsdp; None if there is none."""

    def __call__(self, shard: jax.Array) -> jax.Array:
        return self.own.gathered(shard, FSDP, self.dimension)


class _Sharded(NamedTuple):
    """A matrix, as a device holds it.

    Its products gather it in the forward pass and again in the backward pass, and keep only the
    shard in between: with a policy of `jax.checkpoint` that gathers again, a loop over blocks would
    keep nothing (jax 0.10.2).
    """

    shard: jax.Array
    """Its part on the device."""
    whole: _Whole
    """How it is gathered."""


def _gathered(matrix: _Sharded) -> _Sharded:
    """`matrix`, gathered once: its products keep all of it."""
    return _Sharded(matrix.whole(matrix.shard), matrix.whole._replace(dimension=None))


def _multiplied(equation: str, x: jax.Array, matrix: _Sharded) -> jax.Array:
    return _product(equation, matrix.whole, x, matrix.shard)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation: str, whole: _Whole, x: jax.Array, shard: jax.Array) -> jax.Array:
    """The einsum of `x` and a matrix that is gathered in each pass."""
    return jnp.einsum(equation, x, whole(shard))


def _product_forward(
    equation: str, whole: _Whole, x: jax.Array, shard: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(equation, whole, x, shard), (x, shard)


def _product_backward(
    equation: str, whole: _Whole, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, shard = saved
    matrix = whole(shard)
    # A product is linear in either operand; `jax.vjp` would trace it once more for its value.
    (of_x,) = jax.linear_transpose(lambda x: jnp.einsum(equation, x, matrix), x)(gradient)
    to_matrix = jax.linear_transpose(lambda matrix: jnp.einsum(equation, x, matrix), matrix)
    return of_x, _scattered(whole, shard, *to_matrix(gradient))


_product.defvjp(_product_forward, _product_backward)


def _scattered(whole: _Whole, shard: jax.Array, of_matrix: jax.Array) -> jax.Array:
    """The gradient of a shard, from that of the matrix: summed over fsdp."""
    (of_shard,) = jax.linear_transpose(whole, shard)(of_matrix)
    return of_shard


@jax.custom_vjp
def _summed_over_tensor(partial_BSD: jax.Array) -> jax.Array:
    """The sum of every device's part over tensor.

    Along an axis that its result does not name, a `shard_map` gives each device an equal part of
    the gradient; left to JAX, the sum's transpose would be a second sum, of equal parts.
    """
    return lax.psum(partial_BSD, TENSOR)


_summed_over_tensor.defvjp(
    lambda partial_BSD: (lax.psum(partial_BSD, TENSOR), None),
    lambda _, gradient_BSD: (gradient_BSD * lax.axis_size(TENSOR),),
)


def routed(
    x_BSD: jax.Array, router_DE: jax.Array, bias_E: jax.Array | None, moe: MoeConfig
) -> Routing:
    """The experts of each token and their weights, in float32.

    Args:
        x_BSD: tokens.
        router_DE: logits are products with its columns.
        bias_E: added to the scores to choose experts, but not in the weights; None for none.
        moe: the numbers of experts, and how they are chosen.
    """
    config, (batch, tokens, _) = moe.router, x_BSD.shape
    logits_BSE = jnp.einsum(
        "bsd,de->bse", x_BSD.astype(jnp.float32), router_DE, precision=lax.Precision.HIGHEST
    )
    is_softmax = config.scores == "softmax"
    scores_BSE = jax.nn.softmax(logits_BSE) if is_softmax else jax.nn.sigmoid(logits_BSE)
    choice_BSE = lax.stop_gradient(scores_BSE)
    if bias_E is not None:
        choice_BSE += jnp.expand_dims(bias_E, (0, 1))
    if config.groups > 1:
        grouped_BSGE = choice_BSE.reshape(batch, tokens, config.groups, -1)
        of_group = min(1 if is_softmax else 2, grouped_BSGE.shape[-1])
        best_BSG = lax.top_k(grouped_BSGE, of_group)[0].sum(axis=-1)
        _, groups_BSN = lax.top_k(best_BSG, config.groups_per_token)
        is_chosen_BSG = jax.nn.one_hot(groups_BSN, config.groups, dtype=bool).any(axis=-2)
        choice_BSE = jnp.where(is_chosen_BSG[..., None], grouped_BSGE, -jnp.inf)
        choice_BSE = choice_BSE.reshape(batch, tokens, -1)
    _, experts_BSK = lax.top_k(choice_BSE, moe.experts_per_token)
    weights_BSK = jnp.take_along_axis(scores_BSE, experts_BSK, axis=-1)
    if config.normalise_weights:
        weights_BSK /= weights_BSK.sum(axis=-1, keepdims=True)
    if not is_softmax:
        scores_BSE /= scores_BSE.sum(axis=-1, keepdims=True)
    return Routing(experts_BSK, weights_BSK * config.scaling, scores_BSE, logits_BSE)


def _loads(experts_BSK: jax.Array, experts: int) -> jax.Array:
    """Assignments of each expert by the tokens of each sample, float32 [B, E]."""
    flat_BA = experts_BSK.reshape(experts_BSK.shape[0], -1)
    zeros_E = jnp.zeros((experts,), jnp.float32)
    return jax.vmap(lambda chosen_A: zeros_E.at[chosen_A].add(1))(flat_BA)


# Dropless: blocks of rows of one expert.


def _dropless(
    own: _Axes,
    x_BSD: jax.Array,
    routing: Routing,
    gated_EDNF: _Sharded,
    down_EFD: _Sharded,
    *,
    is_kept: bool,
) -> jax.Array:
    """The results of experts for every token, partial sums over tensor, [B, S, D]. With `is_kept`
    the backward pass may read products of the forward pass instead of recomputing them."""
    width, per_token = x_BSD.shape[-1], routing.experts_BSK.shape[-1]
    x_TD = own.gathered(x_BSD.reshape(-1, width), EXPERT, 0)
    weights_TK = own.gathered(routing.weights_BSK.reshape(-1, per_token), EXPERT, 0)
    experts_TK = own.gathered(routing.experts_BSK.reshape(-1, per_token), EXPERT, 0)
    here = gated_EDNF.shard.shape[0]
    is_split = EXPERT in own.used
    places_TK = experts_TK - (here * lax.axis_index(EXPERT) if is_split else 0)
    is_here_TK = (places_TK >= 0) & (places_TK < here)
    places_A = jnp.where(is_here_TK, places_TK, here).reshape(-1)
    # A token has at most one assignment to each expert.
    most = x_TD.shape[0] * min(per_token, here)
    order_A = jnp.argsort(places_A, stable=True)[:most]
    sizes_E = jnp.zeros((here + 1,), jnp.int32).at[places_A].add(1)[:here]
    parts = lax.axis_size(EXPERT) if is_split else 1
    mean = places_A.size / parts / here
    is_kept = is_kept and not is_split
    blocks = _Blocks(
        rows=block_rows(mean), mean=mean, most=most, per_token=per_token, is_kept=is_kept
    )
    made_TD: Any = _grouped(
        blocks,
        (gated_EDNF.whole, down_EFD.whole),
        x_TD,
        order_A // per_token,
        weights_TK.reshape(-1)[order_A],
        sizes_E,
        gated_EDNF.shard,
        down_EFD.shard,
    )
    if is_split:
        made_TD = lax.psum_scatter(made_TD, EXPERT, scatter_dimension=0, tiled=True)
    return made_TD.reshape(x_BSD.shape)


class _Blocks(NamedTuple):
    """How the assignments of the experts of a device are cut into blocks."""

    rows: int
    """Rows of a block, all of one expert."""
    mean: float
    """Mean assignments of an expert."""
    most: int
    """Most assignments that a device can have."""
    per_token: int
    """Experts that each token goes through."""
    is_kept: bool
    """Whether the products before the activation function are kept for the backward pass; otherwise
    it recomputes them, as it does where the block is recomputed. They take memory for the most
    assignments that a device can have, about what it does have only without an expert axis."""

    def count(self, experts: int) -> int:
        """Most blocks that a device can have."""
        return (self.most + experts * (self.rows - 1)) // self.rows

    def at_even_load(self, experts: int) -> int:
        """Blocks of a device whose experts have equal loads."""
        return experts * -int(-self.mean // self.rows)


class _Table(NamedTuple):
    """Where the blocks of each expert lie among sorted assignments."""

    blocks_E: jax.Array
    """Blocks of each expert and of those before it, summed."""
    ends_E: jax.Array
    """Assignments of each expert and of those before it, summed."""
    sizes_E: jax.Array
    """Assignments of each expert."""


def _table(blocks: _Blocks, sizes_E: jax.Array) -> _Table:
    return _Table(jnp.cumsum(-(-sizes_E // blocks.rows)), jnp.cumsum(sizes_E), sizes_E)


def _rows(
    blocks: _Blocks, table: _Table, index: jax.Array, tokens_A: jax.Array, weights_A: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Expert of a block, and the assignments, tokens and weights of its rows; rows beyond the
    expert's last have indices beyond the arrays, and weight 0."""
    expert = jnp.searchsorted(table.blocks_E, index, side="right", method="compare_all")
    size, end = table.sizes_E[expert], table.ends_E[expert]
    before = table.blocks_E[expert] - -(-size // blocks.rows)
    rows_R = end - size + (index - before) * blocks.rows + jnp.arange(blocks.rows)
    rows_R = jnp.where(rows_R < end, rows_R, tokens_A.size)
    tokens_R = tokens_A.at[rows_R].get(mode="fill", fill_value=np.iinfo(np.int32).max)
    return expert, rows_R, tokens_R, weights_A.at[rows_R].get(mode="fill", fill_value=0)


def _over_blocks(
    blocks: _Blocks, table: _Table, body: Callable[[jax.Array, Any], Any], start: Any
) -> Any:
    """Run `body` for each block. The scope's name says how many blocks there are at even loads, by
    which the compiled loop is costed (`scalejax.xla.reader`)."""
    experts = table.sizes_E.size
    even = BlocksAtEvenLoad(
        blocks=blocks.at_even_load(experts),
        experts=experts,
        rows=blocks.rows,
        experts_per_token=blocks.per_token,
    )
    with jax.named_scope(even.scope):
        return lax.fori_loop(0, table.blocks_E[-1], body, start)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(
    blocks: _Blocks,
    wholes: tuple[_Whole, _Whole],
    x_TD: jax.Array,
    tokens_A: jax.Array,
    weights_A: jax.Array,
    sizes_E: jax.Array,
    gated_shard: jax.Array,
    down_shard: jax.Array,
) -> jax.Array:
    """The weighted sum of the experts' results for each token, [T, D], in the type of tokens.

    `lax.ragged_dot` expresses one such product, but XLA computes it as if every token went through
    every expert, on CPU and NVIDIA GPUs (jax 0.10.2): experts / experts per token times the work.
    Here a loop multiplies blocks of rows of one expert.

    Args:
        blocks: how assignments are cut.
        wholes: how both matrices are gathered, in each pass.
        x_TD: tokens.
        tokens_A: token of each assignment, sorted by expert.
        weights_A: weight of each.
        sizes_E: assignments of each expert here; those after their sum belong to none of them.
        gated_shard: gate and up projections, [E, D, 2, F] when gathered.
        down_shard: down projections, [E, F, D] when gathered.
    """
    made_TD, _ = _grouped_forward(
        blocks, wholes, x_TD, tokens_A, weights_A, sizes_E, gated_shard, down_shard
    )
    return made_TD


def _grouped_forward(
    blocks: _Blocks,
    wholes: tuple[_Whole, _Whole],
    x_TD: jax.Array,
    tokens_A: jax.Array,
    weights_A: jax.Array,
    sizes_E: jax.Array,
    gated_shard: jax.Array,
    down_shard: jax.Array,
) -> tuple[jax.Array, tuple[Any, ...]]:
    gated_EDNF, down_EFD = wholes[0](gated_shard), wholes[1](down_shard)
    table = _table(blocks, sizes_E)

    def body(index: jax.Array, carry: Any) -> Any:
        made_TD, kept = carry
        expert, _, tokens_R, weights_R = _rows(blocks, table, index, tokens_A, weights_A)
        hidden_RNF = _expanded(x_TD, tokens_R, gated_EDNF, expert)
        result_RD = _swiglu(hidden_RNF) @ down_EFD[expert]
        result_RD = result_RD.astype(jnp.float32) * weights_R[:, None]
        made_TD = made_TD.at[tokens_R].add(result_RD, mode="drop")
        return made_TD, None if kept is None else kept.at[index].set(hidden_RNF)

    shape = (blocks.count(sizes_E.size), blocks.rows, *gated_EDNF.shape[2:])
    kept = jnp.zeros(shape, x_TD.dtype) if blocks.is_kept else None
    zeros_TD = jnp.zeros(x_TD.shape, jnp.float32)
    made_TD, kept = _over_blocks(blocks, table, body, (zeros_TD, kept))
    saved = (x_TD, tokens_A, weights_A, sizes_E, gated_shard, down_shard, kept)
    return made_TD.astype(x_TD.dtype), saved


def _grouped_backward(
    blocks: _Blocks,
    wholes: tuple[_Whole, _Whole],
    saved: tuple[Any, ...],
    gradient_TD: jax.Array,
) -> tuple[Any, ...]:
    x_TD, tokens_A, weights_A, sizes_E, gated_shard, down_shard, kept = saved
    gated_EDNF, down_EFD = wholes[0](gated_shard), wholes[1](down_shard)
    table = _table(blocks, sizes_E)

    def body(index: jax.Array, carry: Any) -> Any:
        of_x_TD, of_weights_A, of_gated_EDNF, of_down_EFD = carry
        expert, rows_R, tokens_R, weights_R = _rows(blocks, table, index, tokens_A, weights_A)
        x_RD = _taken(x_TD, tokens_R)
        hidden_RNF = _expanded(x_TD, tokens_R, gated_EDNF, expert) if kept is None else kept[index]
        inner_RF, to_hidden = jax.vjp(_swiglu, hidden_RNF)
        of_result_RD = _taken(gradient_TD, tokens_R)
        # Before the result's weight, whose gradient is then a sum over the inner width.
        of_inner_RF = jnp.einsum("rd,fd->rf", of_result_RD, down_EFD[expert])
        products_RF = inner_RF.astype(jnp.float32) * of_inner_RF.astype(jnp.float32)
        of_weights_A = of_weights_A.at[rows_R].set(products_RF.sum(axis=-1), mode="drop")
        weight_R1 = weights_R[:, None].astype(x_TD.dtype)
        (of_hidden_RNF,) = to_hidden(of_inner_RF * weight_R1)
        of_x_RD = jnp.einsum("rnf,dnf->rd", of_hidden_RNF, gated_EDNF[expert])
        of_x_TD = of_x_TD.at[tokens_R].add(of_x_RD.astype(jnp.float32), mode="drop")
        of_gated_DNF = _float32("rd,rnf->dnf", x_RD, of_hidden_RNF)
        of_down_FD = _float32("rf,rd->fd", inner_RF * weight_R1, of_result_RD)
        return (
            of_x_TD,
            of_weights_A,
            of_gated_EDNF.at[expert].add(of_gated_DNF),
            of_down_EFD.at[expert].add(of_down_FD),
        )

    zeros = tuple(
        jnp.zeros(like.shape, jnp.float32) for like in (x_TD, weights_A, gated_EDNF, down_EFD)
    )
    of_x, of_weights, of_gated, of_down = _over_blocks(blocks, table, body, zeros)
    of_gated = _scattered(wholes[0], gated_shard, of_gated.astype(gated_shard.dtype))
    of_down = _scattered(wholes[1], down_shard, of_down.astype(down_shard.dtype))
    return of_x.astype(x_TD.dtype), None, of_weights, None, of_gated, of_down


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _taken(table_TD: jax.Array, tokens_R: jax.Array) -> jax.Array:
    """Rows of `table_TD`; zeros for those beyond it."""
    return table_TD.at[tokens_R].get(mode="fill", fill_value=0)


def _expanded(
    x_TD: jax.Array, tokens_R: jax.Array, gated_EDNF: jax.Array, expert: jax.Array
) -> jax.Array:
    """Gate and up projections of the rows of a block, [R, 2, F]."""
    return jnp.einsum("rd,dnf->rnf", _taken(x_TD, tokens_R), gated_EDNF[expert])


def _float32(equation: str, *factors: jax.Array) -> jax.Array:
    """The product in float32. Factors in 16 bits are multiplied as they are on GPUs, but XLA needs
    them cast on CPU ("Unsupported element type for DotThunk", jax 0.10.2)."""

    def cast(*factors: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *(each.astype(jnp.float32) for each in factors))

    product = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    if factors[0].dtype == jnp.float32:
        return product(*factors)
    return lax.platform_dependent(*factors, cpu=cast, default=product)


@partial(jax.checkpoint, prevent_cse=False)  # a loop or a scan already prevents it
def _swiglu(hidden_XNF: jax.Array) -> jax.Array:
    """SiLU of the gate [..., 0, F], times the other; recomputed in the backward pass."""
    return jax.nn.silu(hidden_XNF[..., 0, :]) * hidden_XNF[..., 1, :]


# With a capacity: buffers of fixed size.


def _within_capacity(
    own: _Axes,
    moe: MoeConfig,
    x_BSD: jax.Array,
    routing: Routing,
    loads_BE: jax.Array,
    gated_EDNF: _Sharded,
    down_EFD: _Sharded,
) -> tuple[jax.Array, jax.Array]:
    """The results of experts for tokens, the first of each sample up to the capacity, partial sums
    over tensor, [B, S, D]; and the share of assignments kept.

    Over context a device holds part of a sample: it counts the tokens of earlier parts, and has
    room for the capacity or for all of its own tokens, whichever is less.
    """
    batch, tokens, width = x_BSD.shape
    per_token = moe.experts_per_token
    parts = lax.axis_size(CONTEXT) if CONTEXT in own.used else 1
    capacity = moe.capacity(tokens * parts)
    assert capacity is not None  # noqa: S101  the caller asked
    room = min(capacity, tokens)
    earlier_BHE = _earlier_loads(own, routing.experts_BSK, moe.experts, parts)

    def slots(chosen_A: jax.Array, load_E: jax.Array, earlier_HE: jax.Array) -> jax.Array:
        """The assignment in each place of the buffers of a sample; an index beyond all if empty."""
        order_A = jnp.argsort(chosen_A, stable=True)
        sorted_A = chosen_A[order_A]
        place_A = jnp.arange(order_A.size) - (jnp.cumsum(load_E) - load_E)[sorted_A]
        chunk_A = order_A * earlier_HE.shape[0] // order_A.size
        is_kept_A = place_A + earlier_HE[chunk_A, sorted_A] < capacity
        slot_A = jnp.where(is_kept_A, sorted_A * room + place_A, moe.experts * room)
        empty = jnp.full((moe.experts * room,), order_A.size, jnp.int32)
        return empty.at[slot_A].set(order_A.astype(jnp.int32), mode="drop")

    chosen_BA = routing.experts_BSK.reshape(batch, -1)
    whole = (each.astype(jnp.int32) for each in (loads_BE, earlier_BHE))
    slots_BC = jax.vmap(slots)(chosen_BA, *whole)
    kept = jnp.mean((slots_BC < chosen_BA.shape[1]).sum(axis=1) / chosen_BA.shape[1])
    sent_BCD = jax.vmap(_taken)(x_BSD, slots_BC // per_token)
    sent_ECD = jnp.moveaxis(sent_BCD.reshape(batch, moe.experts, room, width), 1, 0)
    sent_ECD = sent_ECD.reshape(moe.experts, batch * room, width)
    if is_split := EXPERT in own.used:
        sent_ECD = lax.all_to_all(sent_ECD, EXPERT, split_axis=0, concat_axis=1, tiled=True)
    hidden_ECNF = _multiplied("ecd,ednf->ecnf", sent_ECD, gated_EDNF)
    made_ECD = _multiplied("ecf,efd->ecd", _swiglu(hidden_ECNF), down_EFD)
    if is_split:
        made_ECD = lax.all_to_all(made_ECD, EXPERT, split_axis=1, concat_axis=0, tiled=True)
    made_BCD = jnp.moveaxis(made_ECD.reshape(moe.experts, batch, room, width), 1, 0)

    def combined(made_CD: jax.Array, slots_C: jax.Array, weights_A: jax.Array) -> jax.Array:
        weights_C = weights_A.at[slots_C].get(mode="fill", fill_value=0)
        weighted_CD = made_CD.astype(jnp.float32) * weights_C[:, None]
        zeros_SD = jnp.zeros((tokens, width), jnp.float32)
        return zeros_SD.at[slots_C // per_token].add(weighted_CD, mode="drop")

    made_BSD = jax.vmap(combined)(
        made_BCD.reshape(batch, -1, width), slots_BC, routing.weights_BSK.reshape(batch, -1)
    )
    return made_BSD.astype(x_BSD.dtype), kept


def _earlier_loads(own: _Axes, experts_BSK: jax.Array, experts: int, parts: int) -> jax.Array:
    """Assignments of each expert by tokens of a sample on other devices that come before those
    here, [B, H, E]: H is 2 where a device holds two chunks of the sample (`zigzag_chunks`), and
    the count before the second leaves out those of the first, which is on this device."""
    batch = experts_BSK.shape[0]
    chunks = 2 if own.is_zigzag else 1
    if parts == 1:
        return jnp.zeros((batch, 1, experts), jnp.float32)
    own_HBE = jnp.stack([_loads(part, experts) for part in jnp.split(experts_BSK, chunks, axis=1)])
    held_C = zigzag_chunks(parts) if chunks == 2 else np.arange(parts)
    every_CBE = lax.all_gather(own_HBE, CONTEXT).reshape(held_C.size, batch, experts)
    every_CBE = every_CBE[np.argsort(held_C)]
    before_CBE = jnp.cumsum(every_CBE, axis=0) - every_CBE
    here_H = jnp.asarray(held_C).reshape(parts, chunks)[lax.axis_index(CONTEXT)]
    before_HBE = before_CBE[here_H] - (jnp.cumsum(own_HBE, axis=0) - own_HBE)
    return jnp.moveaxis(before_HBE, 0, 1)
