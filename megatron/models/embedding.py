"""From tokens to the residual stream: word embedding, learned positions, multiplier, dropout."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.distributed.context import ParallelContext
from megatron.models.initial_values import embedding_init
from megatron.models.sequence_info import SequenceInfo
from megatron.ops.dropout import dropout
from megatron.tensor_parallel.embedding import VocabParallelEmbedding, look_up
from megatron.tensor_parallel.layers import residual_partial_over
from megatron.topology.param_spec import ParamSpec


def word_embedding_spec(config: RunConfig, ctx: ParallelContext, vocab_size: int) -> ParamSpec:
    """The word embedding. Tied, with the output layer on another stage: both hold it and their gradients add up."""
    model = config.model
    is_shared = not model.untie_embeddings_and_output_weights and ctx.pp.size > 1
    return ParamSpec(
        name="embedding.word_embeddings.weight",
        shape=(config.padded_vocab(vocab_size), model.hidden_size),
        axes=("tp", None),
        init=embedding_init(model),
        partial_over=("embd",) if is_shared else (),
        valid=(vocab_size, model.hidden_size),
        lr_group="embedding",
    )


class PositionEmbedding(nn.Module):
    """Learned positions: int64 ids of any shape -> the shape and [h]; whole on every tp rank."""

    def __init__(self, model: ModelConfig, ctx: ParallelContext):
        super().__init__()
        self.sum_wide = ctx.device.type == "cpu"
        self.weight = ctx.parameter(
            ParamSpec(
                name="embedding.position_embeddings.weight",
                shape=(model.max_position_embeddings, model.hidden_size),
                axes=(None, None),
                init=embedding_init(model),
                partial_over=residual_partial_over(ctx),
            )
        )

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return look_up(positions.contiguous(), self.weight, sum_wide=self.sum_wide)


def residual_dtype(model: ModelConfig, ctx: ParallelContext) -> torch.dtype:
    """Of the residual stream: that of the weights, or at least fp32 under --fp32-residual-connection.

    Whoever adds to the stream adds a tensor of the weights' dtype, which widens exactly, so the sum has this dtype."""
    if model.fp32_residual_connection:
        return torch.promote_types(ctx.params_dtype, torch.float32)
    return ctx.params_dtype


class Embedding(nn.Module):
    """tokens and position ids, int64 [b, s] -> the residual stream, [s, b, h] or a sequence part [s/t, b, h]."""

    def __init__(self, config: RunConfig, ctx: ParallelContext, vocab_size: int):
        super().__init__()
        model = config.model
        self.dtype = residual_dtype(model, ctx)
        self.multiplier, self.dropout_probability = model.embedding_multiplier, model.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(ctx, word_embedding_spec(config, ctx, vocab_size))
        self.position_embeddings = None
        if model.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(model, ctx)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        """See the class."""
        hidden = self.word_embeddings(tokens).to(self.dtype)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids.t()[info.positions_S])
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.training and self.dropout_probability > 0.0:
            hidden = dropout(hidden, info.row_keys("embedding"), self.dropout_probability)
        return hidden
