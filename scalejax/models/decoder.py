"""The base of decoder-only transformers: embedding, blocks, final norm and output layer.

Knows the layers before and after the blocks; not what a block consists of.
Shapes: B batch, S tokens, D hidden, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.model import DecoderRemat
from scalejax.config.parallelism import FSDP, TENSOR
from scalejax.models.blocks import through_blocks
from scalejax.models.dropout import dropped
from scalejax.models.fsdp import gathered, linear, looked_up
from scalejax.models.network import Network
from scalejax.models.normalization import normalised
from scalejax.models.sharding import (
    constrained_for_head,
    constrained_for_layer,
    constrained_residual,
)

TOKENS = P(TENSOR, FSDP)
"""Sharding of the token embedding: the vocabulary over tensor, as in Megatron (arXiv 1909.08053);
the width, which is more often divisible, over fsdp."""
JOIN = P(FSDP, None)
"""Sharding of the matrix of multi-token prediction: rows over fsdp, replicated over tensor."""


class CausalNetwork(Network):
    """Token embedding, blocks, final norm, and an output layer, tied to the embedding or not."""

    stacked = ("blocks", "mtp_blocks")

    dtype: jnp.dtype
    """Type in which matrices are multiplied."""
    remat: DecoderRemat
    """What the backward pass recomputes."""
    is_tied: bool
    """Whether the output layer is the token embedding."""
    logit_scale: float = 1.0
    """Factor on logits."""
    period: int = 1
    """Layers after which the kinds of layers repeat."""
    first: int = 0
    """Layers before `blocks`."""
    before_mtp: int = 0
    """Layers before the block of multi-token prediction."""
    total: int | None = None
    """Layers, the last being the block of multi-token prediction; None if `blocks` are all."""
    tokens: nnx.Embed
    """Token embedding."""
    blocks: nnx.Module
    """Made by `stacked_blocks`."""
    norm: nnx.LayerNorm | nnx.RMSNorm
    """Norm before the output layer."""
    output: nnx.Embed
    """The output layer, if it is not the token embedding."""
    mtp_join: nnx.LinearGeneral
    """For multi-token prediction, as are the three below: from twice the width to the width."""
    mtp_norms: nnx.List
    """Norms of the residual stream and of the next token before they are joined."""
    mtp_blocks: nnx.Module
    """One block, made by `stacked_blocks`."""
    mtp_norm: nnx.LayerNorm | nnx.RMSNorm
    """Norm before the output layer."""

    def __call__(self, inputs: jax.Array, *, is_training: bool) -> jax.Array:
        """Logits [B, S, V] of the token after each of `inputs` [B, S]."""
        # Gathered over fsdp here, once: both ends of the network may use the token embedding.
        tokens_VD = self._table(self.tokens, TOKENS)
        x_BSD = self.through_first_blocks(self._embedded(tokens_VD, inputs))
        x_BSD = self.through_blocks(x_BSD)
        return self._logits(tokens_VD if self.is_tied else self._table(self.output, TOKENS), x_BSD)

    def logits_of_two(self, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [B, S, V] of the token after each of `inputs` [B, S], and of the one after that.

        h' = M [norm(h); norm(embedding of the next token)] goes through one block, a norm of its
        own and the shared output layer. Each stage of a pipeline computes the block for some of the
        microbatches.

        Source: DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, equations 21 to 23.

        Args:
            inputs: tokens.
            targets: the tokens after them.
        """
        tokens_VD = self._table(self.tokens, TOKENS)
        x_BSD = self.through_first_blocks(self._embedded(tokens_VD, inputs))
        return self._logits_of_two(tokens_VD, self.through_blocks(x_BSD), targets)

    def logits_of_two_after(
        self, x_BSD: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`logits_of_two` of the residual stream after the last block."""
        return self._logits_of_two(self._table(self.tokens, TOKENS), x_BSD, targets)

    def _logits_of_two(
        self, tokens_VD: jax.Array, x_BSD: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        output_VD = tokens_VD if self.is_tied else self._table(self.output, TOKENS)
        next_BSD = self._embedded(tokens_VD, targets)
        both = (
            normalised(norm, part)
            for norm, part in zip(self.mtp_norms, (x_BSD, next_BSD), strict=True)
        )
        joined_BSE = constrained_for_layer(jnp.concatenate(list(both), axis=-1))
        joined_BSD = linear(self.mtp_join, "bse,ed->bsd", JOIN, joined_BSE, "none")
        second_BSD = self.through_mtp_block(constrained_residual(joined_BSD))
        second_BSV = self._logits(output_VD, second_BSD, self.mtp_norm)
        return self._logits(output_VD, x_BSD), second_BSV

    def through_mtp_block(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after the block of multi-token prediction, [B, S, D]."""
        return through_blocks(
            self.mtp_blocks,
            x_BSD,
            dtype=self.dtype,
            remat=self.remat,
            is_staged=False,
            first=self.before_mtp,
            total=self.total,
        )

    def embedded(self, inputs: jax.Array) -> jax.Array:
        """The residual stream before the blocks that stages hold, [B, S, D], of tokens [B, S]."""
        return self.through_first_blocks(self._embedded(self._table(self.tokens, TOKENS), inputs))

    def through_first_blocks(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after the unlike blocks before `blocks`; here there are none."""
        return x_BSD

    def through_blocks(self, x_BSD: jax.Array) -> jax.Array:
        """The residual stream after the blocks that this network holds, [B, S, D]."""
        return through_blocks(
            self.blocks,
            x_BSD,
            dtype=self.dtype,
            remat=self.remat,
            period=self.period,
            first=self.first,
            total=self.total,
        )

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Logits [B, S, V] of the residual stream after the last block."""
        return self._logits(
            self._table(self.tokens if self.is_tied else self.output, TOKENS), x_BSD
        )

    def _embedded(self, tokens_VD: jax.Array, inputs: jax.Array) -> jax.Array:
        x_BSD = constrained_for_layer(looked_up(tokens_VD, inputs, P(TENSOR, None)))
        return dropped(constrained_residual(self._positioned(x_BSD)))

    def _logits(
        self,
        output_VD: jax.Array,
        x_BSD: jax.Array,
        norm: nnx.LayerNorm | nnx.RMSNorm | None = None,
    ) -> jax.Array:
        # In the compute type, then cast up for the loss: gradients are multiplied in it too.
        normalised_BSD = constrained_for_head((norm or self.norm)(x_BSD))
        if self.logit_scale != 1:  # on the narrower of the two
            normalised_BSD = normalised_BSD * self.logit_scale
        logits_BSV = jnp.einsum("bsd,vd->bsv", normalised_BSD, output_VD)
        return constrained_for_head(logits_BSV).astype(jnp.float32)

    def _positioned(self, x_BSD: jax.Array) -> jax.Array:
        """Embedded tokens plus position embeddings, if blocks do not encode positions."""
        return x_BSD

    def _table(self, embedding: nnx.Embed, kept: P) -> jax.Array:
        """An embedding, gathered over fsdp, in the compute type."""
        return gathered(embedding.embedding[...].astype(self.dtype), kept)
