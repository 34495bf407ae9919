"""From the residual stream to the loss: final norm, output layer (tied or not), summed cross-entropy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from megatron.config.run import RunConfig
from megatron.distributed.collectives import all_gather
from megatron.distributed.context import ParallelContext
from megatron.models.embedding import word_embedding_spec
from megatron.models.initial_values import weight_init
from megatron.models.norm import Norm
from megatron.tensor_parallel.column_linear import column_linear
from megatron.tensor_parallel.cross_entropy import VocabularyShard, linear_cross_entropy
from megatron.tensor_parallel.layers import residual_partial_over, split_input
from megatron.topology.param_spec import ParamSpec


class LossOutput(NamedTuple):
    """What the last stage gives for a microbatch."""

    loss_sum: torch.Tensor
    """fp32 scalar: the sum of the unmasked tokens' losses."""
    num_tokens: torch.Tensor
    """fp32 scalar: how many tokens that are."""


class OutputLayer(nn.Module):
    """The matrix from hidden states to logits, split over tp by vocabulary; the word embedding itself when tied."""

    def __init__(self, config: RunConfig, ctx: ParallelContext, vocab_size: int, embedding_weight: nn.Parameter | None):
        """`embedding_weight`: the word embedding's parameter when tied and on this rank."""
        super().__init__()
        model = config.model
        spec = word_embedding_spec(config, ctx, vocab_size)
        if model.untie_embeddings_and_output_weights:
            spec = ParamSpec(
                name="output_layer.weight",
                shape=spec.shape,
                axes=spec.axes,
                init=weight_init(model),
                valid=spec.valid,
                lr_group=spec.lr_group,
            )
        is_here = embedding_weight is not None and not model.untie_embeddings_and_output_weights
        self.weight = embedding_weight if is_here else ctx.parameter(spec)
        rows = spec.local_slice(ctx.mesh, ctx.coords)[0]
        in_softmax = vocab_size if model.mask_vocab_padding else spec.shape[0]
        self.vocab_size = vocab_size
        self.shard = VocabularyShard(rows.offset, max(0, min(rows.size, in_softmax - rows.offset)))
        self.how = split_input(ctx)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """Losses fp32 [s, b] for labels int64 [s, b]; without labels the whole logits [s, b, vocabulary], not
        differentiable
        with respect to other tp ranks' columns."""
        if labels is not None:
            return linear_cross_entropy(hidden, self.weight, labels, self.shard, self.how)
        logits = column_linear(hidden, self.weight, None, self.how)
        return all_gather(logits, self.how.group, dim=-1)[..., : self.vocab_size]


class Head(nn.Module):
    """Final norm and output layer."""

    def __init__(self, config: RunConfig, ctx: ParallelContext, vocab_size: int, embedding_weight: nn.Parameter | None):
        super().__init__()
        self.final_layernorm = Norm(
            config.model, ctx, "decoder.final_layernorm", config.model.hidden_size, residual_partial_over(ctx)
        )
        self.output_layer = OutputLayer(config, ctx, vocab_size, embedding_weight)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """See `OutputLayer.forward`."""
        return self.output_layer(self.final_layernorm(hidden), labels)


def summed_loss(losses_SB: torch.Tensor, loss_mask_BS: torch.Tensor) -> LossOutput:
    """The masked sum of per-token losses, and the number of tokens in it."""
    mask = loss_mask_BS.t()
    return LossOutput((losses_SB * mask).sum(), mask.sum())
