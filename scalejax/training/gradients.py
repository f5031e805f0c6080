"""Loss of the given samples, and its gradient accumulated over microbatches.

Knows the network and the samples that it is given; nothing of the rest of the global batch, nor
of how gradients are synchronised and applied.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from scalejax.config.dataset_facts import IGNORED_TARGET, SEGMENT_IDS, DatasetFacts
from scalejax.config.model import LlamaConfig, activation_type
from scalejax.config.parallelism import DATA, stage_layers
from scalejax.config.pipeline_schedule import PipelineTicks, timetable
from scalejax.config.training import LossConfig
from scalejax.models import BatchNormScope
from scalejax.models.blocks import cast_kernel
from scalejax.models.decoder import CausalNetwork
from scalejax.models.dropout import dropping
from scalejax.models.float8 import scales_of, with_amaxes
from scalejax.models.moe import (
    RouterReport,
    load_of_all,
    router_losses,
    router_metrics,
    weighed_losses,
    with_later_layers,
)
from scalejax.models.normalization import weigh_rows
from scalejax.models.packing import documents_of, packed
from scalejax.models.pipeline import dealt_to_stages, of_dealt_layers
from scalejax.models.sharding import (
    in_token_order,
    of_all_tokens,
    of_own_tokens,
    sample_tokens,
    summed_over_tokens,
)
from scalejax.training.gradient_sync.device_rows import DeviceRows, PyTree
from scalejax.training.losses import losses_of
from scalejax.training.optimizers.fine_tuning import trainable, updated
from scalejax.training.passes import Parameters
from scalejax.training.pipeline import Network, scheduled_gradients
from scalejax.training.setup import TrainSetup, network_with, reads_features, with_features

Batch = dict[str, Any]
"""Arrays, or their shapes: "inputs" and "targets" of every sample of the global batch; for masked
language modelling, the "places" of masked tokens; for packed documents, "segment_ids" and
"positions"; if some rows do not count, training "weights", 1 for a row that counts and 0 for one
that does not; for mixup "mix", each sample's own share, its partner being its neighbour (rows 2i
and 2i + 1 are a pair); for CutMix "cut", where the partner's rectangle is
(`Changes.beside`); in evaluation "mask", 1 for a sample and 0 for padding."""


ROW_NUMBERS = "row_numbers"
"""Random numbers from which dropout masks are drawn, uint32 [rows], in the batch inside of a
step."""


def with_row_numbers(setup: TrainSetup, batch: Batch, step: jax.Array) -> Batch:
    """`batch` with a random number for each of its rows and this update, if the run has dropout."""
    if setup.run.config.dropout is None:
        return batch
    key = jax.random.fold_in(jax.random.key(setup.run.config.seed), step)
    numbers = jax.random.bits(key, (setup.run.split.global_batch,), jnp.uint32)
    return {**batch, ROW_NUMBERS: numbers}


LABEL_NUMBERS = "label_numbers"
"""Random numbers from which labels are sampled in place of the targets, uint32 [rows], in the batch
of an estimate of curvature inside of a step."""


def with_sampled_labels(setup: TrainSetup, batch: Batch, step: jax.Array) -> tuple[Batch, Any]:
    """`batch` for the gradient of the plain cross-entropy of labels that are sampled from the
    network's logits, by seed, update and row, however rows are split; and how many labels count."""
    key = jax.random.fold_in(jax.random.key(setup.run.config.seed), step)
    rows = setup.run.split.global_batch
    numbers = jax.random.bits(jax.random.fold_in(key, 1), (rows,), jnp.uint32)
    targets, labels = batch["targets"], batch["targets"].size
    if "weights" in batch:
        labels = batch["weights"].sum()
        labels = labels if SEGMENT_IDS in batch else labels * (targets.size // len(targets))
    return {**batch, LABEL_NUMBERS: numbers}, labels


def sampled_labels(logits: jax.Array, numbers_B: jax.Array) -> jax.Array:
    """A class for each place of each row, int32, sampled by the softmax of `logits` [rows, ...,
    classes]."""
    keys_B = jax.vmap(jax.random.key)(numbers_B)
    return jax.vmap(jax.random.categorical)(keys_B, logits.astype(jnp.float32)).astype(jnp.int32)


def normalised(inputs: jax.Array, dataset: DatasetFacts) -> jax.Array:
    """Images normalised by the data set's pixel mean and deviation; other inputs unchanged."""
    if dataset.is_text or dataset.is_table:
        return inputs
    return (inputs.astype(jnp.float32) / 255 - dataset.pixel_mean) / dataset.pixel_std


def sample_metrics(
    setup: TrainSetup, network: nnx.Module, batch: Batch, *, is_training: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss and accuracy of each sample, float32 of shape (samples,); and the logits.

    With "mix", the network sees mix x sample + (1 - mix) x partner, and loss and accuracy are
    weighted over both targets in these shares (Zhang et al. 2017, arXiv 1710.09412, section 2);
    with "cut" a rectangle is the partner's, and the shares are the areas. A partner may have weight
    0 in the mean: its row holds an image and a target nevertheless.
    """
    if reads_features(setup.run.config):
        logits = with_features(network).classified(batch["inputs"])
    else:
        inputs = normalised(batch["inputs"], setup.run.dataset)
        if "mix" in batch:
            inputs = _mixed(batch["mix"], inputs, _partners(inputs))
        if "cut" in batch:
            is_own = ~_rectangles(batch["cut"], inputs.shape[1:3])
            inputs = jnp.where(is_own[..., None], inputs, _partners(inputs))
        if setup.run.dataset.is_text:
            inputs = in_token_order(inputs)
        where = {"places": batch["places"]} if "places" in batch else {}
        with packed(documents_of(batch)):
            logits = network(inputs, is_training=is_training, **where)  # type: ignore[operator]  a Network
    return *loss_and_accuracy(setup, logits, batch, is_training=is_training), logits


def _metrics_of_two(
    setup: TrainSetup, both: tuple[jax.Array, jax.Array], batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss and accuracy of each sample in training, and its mean loss of the token after the next,
    float32 of shape (samples,), from the logits of both.

    The last token of a sample has no token after the next: it counts 0, and the mean is over the
    others (DeepSeek-V3, arXiv 2412.19437, equation 24).
    """
    targets, (logits, second) = batch["targets"], both
    tokens = sample_tokens(targets.shape[1])
    later = of_own_tokens(jnp.roll(of_all_tokens(targets), -1, axis=1), axis=1)
    losses = losses_of(second, later, setup.run.config.loss)
    is_counted = of_own_tokens(jnp.arange(tokens) < tokens - 1, axis=0)
    mean_count = max(tokens - 1, 1) / (tokens // targets.shape[1])  # of the shards of a sample
    seconds = jnp.where(is_counted[None], losses, 0).sum(axis=1) / mean_count
    return *loss_and_accuracy(setup, logits, batch, is_training=True), seconds


def with_target_weights(batch: Batch) -> Batch:
    """`batch` of packed documents with the number of a row's targets that have a loss as its
    weight, so that the mean loss is over such targets (as in MaxText, and in Megatron-LM without
    averages by sample); other batches unchanged."""
    if SEGMENT_IDS not in batch:
        return batch
    return {**batch, "weights": batch.get("weights", 1) * _target_counts(batch["targets"])}


def _target_counts(targets_BS: jax.Array) -> jax.Array:
    return jnp.sum(targets_BS != IGNORED_TARGET, axis=1).astype(jnp.float32)


def loss_and_accuracy(
    setup: TrainSetup, logits: jax.Array, batch: Batch, *, is_training: bool
) -> tuple[jax.Array, jax.Array]:
    """Loss and accuracy of each sample from these logits, float32 of shape (samples,); for packed
    documents, over its targets that have a loss."""
    is_sampled = LABEL_NUMBERS in batch
    how = setup.run.config.loss if is_training and not is_sampled else LossConfig()

    def loss_and_hits(targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        hits = (logits.argmax(axis=-1) == targets).astype(jnp.float32)
        return losses_of(logits, targets, how), hits

    targets = batch["targets"]
    if targets.ndim > 1:
        targets = in_token_order(targets)
    if is_sampled:
        labels = sampled_labels(lax.stop_gradient(logits), batch[LABEL_NUMBERS])
        targets = jnp.where(targets == IGNORED_TARGET, targets, labels)
    losses, hits = loss_and_hits(targets)
    if is_paired(batch) and not is_sampled:
        partner_losses, partner_hits = loss_and_hits(_partners(batch["targets"]))
        share = batch["mix"] if "mix" in batch else _own_shares(batch)
        losses = _mixed(share, losses, partner_losses)
        hits = _mixed(share, hits, partner_hits)
    if SEGMENT_IDS in batch:
        is_counted = targets != IGNORED_TARGET
        losses, hits = (jnp.where(is_counted, each, 0).sum(axis=1) for each in (losses, hits))
        # A device with some of the tokens has its share of these: their mean is that of the sample.
        shards = sample_tokens(targets.shape[1]) // targets.shape[1]
        counts = jnp.maximum(summed_over_tokens(_target_counts(targets)), 1) / shards
        return losses / counts, hits / counts
    positions = tuple(range(1, losses.ndim))
    return losses.mean(axis=positions), hits.mean(axis=positions)


def _partners(rows: jax.Array) -> jax.Array:
    """Each row's mixup partner: rows 1, 0, 3, 2, ... A pair is on one device: no communication."""
    return rows.reshape(-1, 2, *rows.shape[1:])[:, ::-1].reshape(rows.shape)


def is_paired(batch: Batch) -> bool:
    """Whether rows of `batch` are mixed in pairs."""
    return "mix" in batch or "cut" in batch


def _rectangles(cut: jax.Array, sides: tuple[int, ...]) -> jax.Array:
    """Whether each pixel is the partner's, bool [rows, height, width].

    Source: `rand_bbox` of the paper's code (github.com/clovaai/CutMix-PyTorch, train.py): whole
    pixels, half a rectangle to either side of its centre, cut off at the edges of the image.
    """
    inside = []
    for side, centre in zip(sides, (cut[:, 2], cut[:, 1]), strict=True):
        half = (jnp.floor(side * cut[:, 0]).astype(jnp.int32) // 2)[:, None]
        middle = jnp.floor(side * centre).astype(jnp.int32)[:, None]
        places = jnp.arange(side, dtype=jnp.int32)[None]
        inside.append((places >= middle - half) & (places < middle + half))
    return inside[0][:, :, None] & inside[1][:, None, :]


def _own_shares(batch: Batch) -> jax.Array:
    """Share of the pixels of each row that are its own, as they were cut."""
    is_other = _rectangles(batch["cut"], batch["inputs"].shape[1:3])
    return 1 - is_other.mean(axis=(1, 2), dtype=jnp.float32)


def _mixed(mix: jax.Array, own: jax.Array, others: jax.Array) -> jax.Array:
    """mix x own + (1 - mix) x others, row by row, for `mix` of shape [rows]."""
    share = mix.reshape(-1, *[1] * (own.ndim - 1))
    return share * own + (1 - share) * others


def mean_loss(
    setup: TrainSetup,
    bn: BatchNormScope,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, tuple[dict[str, jax.Array], PyTree]]:
    """Mean loss of the batch, times `scale` if given; and metrics and the running statistics after
    it.

    The loss that is differentiated includes the losses of routers and of multi-token prediction;
    the one among the metrics does not, and is comparable to that of evaluation. Losses of routers
    are over all tokens, whatever the weights.

    Weights multiply each sample's loss and accuracy: with those of `of_mean_1` this is the mean
    over the samples that count, like the statistics of BatchNorm.
    """
    network = network_with(setup, bn, params, model_state)
    if "weights" in batch:
        weigh_rows(network, batch["weights"])
    model, seconds = setup.run.config.model, None
    mtp = model.mtp if isinstance(model, LlamaConfig) else None
    with dropping(setup.run.config.dropout, batch.get(ROW_NUMBERS)):
        if mtp is None:
            losses, hits, _ = sample_metrics(setup, network, batch, is_training=True)
        else:
            both = cast(CausalNetwork, network).logits_of_two(batch["inputs"], batch["targets"])
            losses, hits, seconds = _metrics_of_two(setup, both, batch)
    model_state = nnx.to_pure_dict(nnx.state(network, nnx.BatchStat))
    if "weights" in batch:
        losses, hits = losses * batch["weights"], hits * batch["weights"]
    loss = losses.mean() if scale is None else losses.mean() * scale
    metrics = {"loss": loss, "accuracy": hits.mean()}
    if mtp is not None and seconds is not None:
        seconds = seconds * batch["weights"] if "weights" in batch else seconds
        metrics["mtp_loss"] = seconds.mean()
        added = mtp.loss_weight * metrics["mtp_loss"]
        loss += added if scale is None else added * scale
    if isinstance(model, LlamaConfig) and model.moe is not None:
        added, of_routers = router_losses(network, model.moe)
        loss += added if scale is None else added * scale
        metrics |= of_routers
    return loss, (metrics, model_state)


def gradients(
    setup: TrainSetup,
    bn: BatchNormScope,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    scale: jax.Array | None,
    reduce: Callable[[PyTree], PyTree] | None = None,
    rows: DeviceRows | None = None,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Mean gradient over the rows that count, running statistics after the last microbatch, and
    mean metrics.

    The rows are those of `batch` alone: of the global batch, or of one device, whose share of them
    `gradient_sync.device_rows` then gives. Without a row that counts, gradient and metrics are 0.
    The gradient of a frozen parameter is None. Gradient and loss are multiplied by `scale`, if
    given. `reduce`, if given, is applied to the gradient of each microbatch before accumulation.
    With `rows`, those of one device, the mean of gradient and metrics over the devices is that over
    all rows that count. For the noise scale, the metrics hold the squared norm of the gradients
    before accumulation. The largest values of operands in "float8_delayed", which come as the
    gradients of their scales, are those over all microbatches and devices.
    """
    is_pipelined = setup.run.layout.pipeline > 1  # its stages split the microbatches themselves
    microbatches = 1 if is_pipelined else setup.run.split.microbatches
    learning = trainable(setup.run.config.fine_tuning, params)
    scales = scales_of(model_state)
    batch = of_mean_1(batch, rows)

    def loss_of(learned: tuple[PyTree, PyTree], model_state: PyTree, batch: Batch) -> PyTree:
        learning, scales = learned
        model_state = updated(model_state, scales)
        return mean_loss(setup, bn, updated(params, learning), model_state, batch, scale)

    differentiate = jax.value_and_grad(loss_of, has_aux=True)

    def of_part(
        model_state: PyTree, batch: Batch
    ) -> tuple[PyTree, PyTree, PyTree, dict[str, jax.Array]]:
        (_, (metrics, model_state)), (gradient, amaxes) = differentiate(
            (learning, scales), model_state, batch
        )
        gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
        if setup.run.config.train.noise_scale is not None:
            metrics["small_squared_norm"] = optax.tree.norm(gradient, squared=True)
        return gradient if reduce is None else reduce(gradient), amaxes, model_state, metrics

    def accumulate(carry: tuple[PyTree, ...], microbatch: Batch) -> tuple[PyTree, PyTree]:
        total, largest, model_state = carry
        gradient, amaxes, model_state, metrics = of_part(model_state, microbatch)
        total = jax.tree.map(lambda t, g: t + g / microbatches, total, gradient)
        return (total, jax.tree.map(jnp.maximum, largest, amaxes), model_state), metrics

    if is_pipelined and setup.run.config.layout.pipeline_schedule != "gpipe":
        gradient, amaxes, model_state, metrics = by_timetable(
            setup, bn, params, learning, model_state, batch, scale
        )
        gradient = gradient if reduce is None else reduce(gradient)
    elif microbatches == 1:
        gradient, amaxes, model_state, metrics = of_part(model_state, batch)
    else:
        zeros = _zeros_like(learning) if reduce is None else _zeros_of(reduce, learning)
        split = partial(split_microbatches, microbatches, 2 if is_paired(batch) else 1)
        (gradient, amaxes, model_state), metrics = lax.scan(
            accumulate, (zeros, _zeros_like(scales), model_state), jax.tree.map(split, batch)
        )
        metrics = jax.tree.map(jnp.mean, metrics)
    if DATA in jax.sharding.get_abstract_mesh().manual_axes:
        amaxes = jax.tree.map(lambda leaf: lax.pmax(leaf, DATA), amaxes)
    return gradient, with_amaxes(model_state, amaxes), metrics


def by_timetable(
    setup: TrainSetup,
    bn: BatchNormScope,
    params: PyTree,
    learning: PyTree,
    model_state: PyTree,
    batch: Batch,
    scale: jax.Array | None,
) -> tuple[PyTree, PyTree, PyTree, dict[str, jax.Array]]:
    """`gradients` of a pipeline whose stages follow a timetable of forward and backward passes; the
    second result is the largest values of the step in place of scales, as `scales_of` gives
    those."""
    run, model = setup.run, setup.run.config.model
    chunks, stages = run.config.layout.pipeline_chunks, run.layout.pipeline
    microbatches, period = run.split.microbatches, getattr(model, "period", 1)
    ticks = PipelineTicks(run.config.layout.pipeline_schedule, stages, microbatches, chunks)
    dtype = jnp.dtype(activation_type(model))
    moe, mtp = (model.moe, model.mtp) if isinstance(model, LlamaConfig) else (None, None)
    statistics = model_state.get(_BLOCKS, {})

    def network_of(ends: PyTree, blocks: PyTree) -> CausalNetwork:
        """The network with these pairs of parameters and statistics."""
        params, state = (
            {**of_ends, _BLOCKS: own} for of_ends, own in zip(ends, blocks, strict=True)
        )
        network = network_with(setup, bn, params, state if statistics else {})
        assert isinstance(network, CausalNetwork)  # noqa: S101  the config refuses others
        return network

    whole_blocks = params[_BLOCKS], statistics
    of_ends_statistics = _without_blocks(model_state)

    def first(ends: PyTree, rows: Batch) -> jax.Array:
        with packed(documents_of(rows)):
            return network_of(ends, whole_blocks).embedded(rows["inputs"])

    def middle(blocks: PyTree, x_BSD: jax.Array) -> Any:
        network = network_of((_without_blocks(params), of_ends_statistics), blocks)
        x_BSD = network.through_blocks(x_BSD)
        if moe is None:
            return (x_BSD, None), None
        report = network.routers.get_value()  # type: ignore[attr-defined]  of a routed network
        return (x_BSD, weighed_losses(report, moe)), report

    def last(ends: PyTree, x_BSD: jax.Array, rows: Batch) -> tuple[jax.Array, PyTree]:
        network, seconds = network_of(ends, whole_blocks), None
        if mtp is None:
            logits = network.logits(x_BSD)
            losses, hits = loss_and_accuracy(setup, logits, rows, is_training=True)
        else:
            both = network.logits_of_two_after(x_BSD, rows["targets"])
            losses, hits, seconds = _metrics_of_two(setup, both, rows)
        if "weights" in rows:
            losses, hits = losses * rows["weights"], hits * rows["weights"]
        loss = losses.mean() * rows["scale"] if "scale" in rows else losses.mean()
        loss, accuracy = loss / microbatches, hits.mean() / microbatches
        metrics = {"loss": loss, "accuracy": accuracy}
        if mtp is not None and seconds is not None:
            seconds = seconds * rows["weights"] if "weights" in rows else seconds
            metrics["mtp_loss"] = seconds.mean() / microbatches
            loss += mtp.loss_weight * seconds.mean() * weight(rows)
            if moe is not None:
                report: Any = network.routers.get_value()  # type: ignore[attr-defined]  likewise
                loss += weighed_losses(report, moe) * weight(rows)
                # At the index of its microbatch, so that the sum over all of them keeps each.
                is_own = jnp.arange(microbatches) == rows["index"]
                metrics[_OF_MTP] = jax.tree.map(partial(jnp.multiply.outer, is_own), report)
        return loss, metrics

    def weight(rows: Batch) -> jax.Array:
        return rows.get("scale", jnp.ones((), jnp.float32)) / microbatches

    layers = getattr(model, "layers")  # noqa: B009  of a causal network
    counts = (
        stage_layers(layers, stages)
        if moe is None
        else moe.layers_of_stages(layers, stages, chunks, period)
    )

    def dealt(blocks: PyTree) -> PyTree:
        def in_periods(leaf: jax.Array) -> jax.Array:
            leaf = dealt_to_stages(leaf, chunks, counts)
            return leaf.reshape(*leaf.shape[:2], -1, period, *leaf.shape[3:])

        return jax.tree.map(in_periods, blocks)

    frozen = jax.tree.map(
        lambda leaf, own: leaf if own is None else None, params, learning, is_leaf=_is_none
    )
    cast = partial(jax.tree_util.tree_map_with_path, partial(cast_kernel, dtype))
    scales = scales_of(statistics)
    others = jax.tree.map(
        lambda leaf, own: leaf if own is None else None, statistics, scales, is_leaf=_is_none
    )
    blocks = Parameters(
        (dealt(cast(learning[_BLOCKS])), dealt(scales)),
        (dealt(cast(frozen[_BLOCKS])), dealt(others)),
    )

    def cast_ends(tree: PyTree) -> PyTree:
        ends = _without_blocks(tree)
        return {name: cast(part) if name in _STACKED else part for name, part in ends.items()}

    ends = Parameters(
        (cast_ends(learning), jax.tree.map(lambda _: None, of_ends_statistics)),
        (cast_ends(frozen), of_ends_statistics),
    )
    ordered = {
        name: in_token_order(leaf) if leaf.ndim > 1 else leaf for name, leaf in batch.items()
    }
    rows = jax.tree.map(partial(split_microbatches, microbatches, 1), ordered)
    if scale is not None:  # an argument: stages cannot close over arrays of the outer mesh
        rows["scale"] = jnp.broadcast_to(scale, microbatches)
    if mtp is not None:
        rows["index"] = jnp.arange(microbatches)
    own = None if moe is None or min(counts) == max(counts) else counts
    (of_ends, _), of_dealt, metrics, reports = scheduled_gradients(
        Network(first, middle, last, weight, own), timetable(ticks), ends, blocks, rows
    )
    whole = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), (learning[_BLOCKS], scales)
    )
    ((of_blocks, amaxes),) = jax.linear_transpose(dealt, whole)(of_dealt)
    gradient = {name: of_blocks if name == _BLOCKS else of_ends[name] for name in learning}
    if run.config.train.noise_scale is not None:
        metrics["small_squared_norm"] = optax.tree.norm(gradient, squared=True)
    if reports is not None:
        flat = jax.tree.map(
            lambda leaf: leaf.reshape(*leaf.shape[:3], -1, *leaf.shape[5:]), reports
        )
        report = jax.tree.map(partial(of_dealt_layers, counts=counts), flat)
        model_state = {**model_state, **_counted(model_state, _BLOCKS, report)}
        if (of_mtp := metrics.pop(_OF_MTP, None)) is not None:
            model_state = {**model_state, **_counted(model_state, _OF_MTP, of_mtp)}
            report = with_later_layers(report, of_mtp)
        metrics |= router_metrics(report)
    of_all = scales_of(model_state)
    return gradient, {**of_all, _BLOCKS: amaxes} if of_all else of_all, model_state, metrics


_BLOCKS = "blocks"
"""Name of the stacked blocks of a causal network."""
_OF_MTP = "mtp_blocks"
"""Name of the block of multi-token prediction."""
_STACKED = ("dense_blocks", _OF_MTP)
"""Names of other stacked blocks, which are outside of the stages."""


def _counted(model_state: PyTree, name: str, report: RouterReport) -> PyTree:
    """The statistics of the blocks of this name after the loads of a step; {} if they have none."""
    if name not in model_state:
        return {}
    layer = model_state[name]["feed_forward"]
    layer = {**layer, "load": layer["load"] + load_of_all(report)}
    return {name: {**model_state[name], "feed_forward": layer}}


def _without_blocks(params: PyTree) -> PyTree:
    return {name: part for name, part in params.items() if name != _BLOCKS}


def _is_none(leaf: Any) -> bool:
    return leaf is None


def of_mean_1(batch: Batch, rows: DeviceRows | None) -> Batch:
    """`batch` with the weights of its rows, if it has any, scaled to mean 1 over them, or with
    `rows` over those of all devices; 0 if no row counts.

    Done before rows are split into microbatches, which may hold different numbers of rows that
    count.
    """
    if "weights" not in batch:
        return batch
    weights = batch["weights"]
    counted = jnp.maximum(weights.sum(), 1) if rows is None else rows.mean
    return {**batch, "weights": weights * (weights.size / counted)}


def _zeros_like(params: PyTree) -> PyTree:
    """Float32 zeros of the shapes of `params`.

    Not `jnp.zeros`: under `shard_map` they must vary over the axis as the parameters do.
    """
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) * 0, params)


def _zeros_of(reduce: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """Zeros of the shapes that `reduce` returns, without running its collectives."""
    shapes = jax.eval_shape(reduce, _zeros_like(params))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def split_microbatches(microbatches: int, group: int, rows: jax.Array) -> jax.Array:
    """Rows split round-robin in groups of `group`: (microbatches, rows / microbatches, ...).

    Round-robin, not in blocks, so that the rows of a device stay on it.
    """
    if group == 1:
        return rows.reshape(-1, microbatches, *rows.shape[1:]).swapaxes(0, 1)
    split = rows.reshape(-1, microbatches, group, *rows.shape[1:]).swapaxes(0, 1)
    return split.reshape(microbatches, -1, *rows.shape[1:])
