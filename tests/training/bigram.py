"""The smallest model that a run can train on any layout: embedding, a residual layer per `--num-layers`, output layer.

It has the interface of a real stage and none of its parallel maths, so tests of the loop do not depend on the network.
Tensor-parallel ranks hold equal copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from megatron.config.run import RunConfig
from megatron.distributed.context import ParallelContext
from megatron.topology.param_spec import Normal, ParamSpec


class Loss(NamedTuple):
    loss_sum: torch.Tensor
    num_tokens: torch.Tensor


class BigramStage(nn.Module):
    """Layers `first` to `last` of the run, with the embedding before and the loss behind where they belong."""

    def __init__(self, config: RunConfig, ctx: ParallelContext, vocab_size: int, layers, is_first: bool, is_last: bool):
        super().__init__()
        hidden, padded = config.model.hidden_size, config.padded_vocab(vocab_size)
        self.is_first, self.is_last, self.hidden, self.hidden_dtype = is_first, is_last, hidden, ctx.params_dtype

        def matrix(name, rows):
            spec = ParamSpec(name=name, shape=(rows, hidden), axes=(None, None), init=Normal(0.1))
            return ctx.parameter(spec)

        self.embedding = matrix("embedding.word_embeddings.weight", padded) if is_first else None
        self.layers = nn.ParameterList(matrix(f"decoder.layers.{n}.mlp.linear_fc1.weight", hidden) for n in layers)
        self.output = matrix("output_layer.weight", padded) if is_last else None

    def hidden_shape(self, batch):
        tokens = batch["tokens"]
        return (tokens.shape[1], tokens.shape[0], self.hidden)

    def forward(self, hidden, batch):
        if self.is_first:
            hidden = nn.functional.embedding(batch["tokens"].t(), self.embedding)
        for weight in self.layers:
            hidden = hidden + torch.tanh(hidden @ weight.t())
        if not self.is_last:
            return hidden
        logits = (hidden @ self.output.t()).float()
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].t().flatten(), reduction="none")
        mask = batch["loss_mask"].t().flatten()
        return Loss((losses * mask).sum(), mask.sum())


def build_bigram(config: RunConfig, ctx: ParallelContext, vocab_size: int) -> list[BigramStage]:
    """One stage for each pipeline rank; no virtual stages."""
    here, stages = ctx.coords.pp, ctx.mesh.pp
    count = config.model.num_layers // stages
    layers = range(here * count, (here + 1) * count)
    return [BigramStage(config, ctx, vocab_size, layers, here == 0, here == stages - 1)]
