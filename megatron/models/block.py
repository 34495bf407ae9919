"""A pre-norm transformer block; the thing a research variant replaces.

A replacement is any `nn.Module` class with this constructor and this `forward`, given to
`models.gpt.build_stages(block=...)`. It allocates its parameters with `ctx.parameter(ParamSpec(...))` under names
that start with `decoder.layers.{layer_number}.`, and is then sharded, reduced, checkpointed and resharded like any
other.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.run import RunConfig
from megatron.distributed.context import ParallelContext
from megatron.models.attention import SelfAttention
from megatron.models.mlp import MLP
from megatron.models.norm import Norm
from megatron.models.sequence_info import SequenceInfo
from megatron.ops.dropout import dropout
from megatron.tensor_parallel.layers import residual_partial_over


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), with dropout on what is added.

    Args:
        config: the run.
        ctx: this rank's place in it.
        layer_number: of this block in the whole model, from 0, whatever stage it is on.
    """

    def __init__(self, config: RunConfig, ctx: ParallelContext, layer_number: int):
        super().__init__()
        model, name = config.model, f"decoder.layers.{layer_number}"
        partial_over = residual_partial_over(ctx)
        self.layer_number = layer_number
        self.dropout_probability = model.hidden_dropout
        self.input_layernorm = Norm(model, ctx, f"{name}.input_layernorm", model.hidden_size, partial_over)
        self.self_attention = SelfAttention(config, ctx, layer_number)
        self.pre_mlp_layernorm = Norm(model, ctx, f"{name}.pre_mlp_layernorm", model.hidden_size, partial_over)
        self.mlp = MLP(config, ctx, layer_number)

    def forward(self, hidden: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        """hidden [s, b, h] ([s/t, b, h] under sequence parallelism) -> the same shape and dtype."""
        hidden = hidden + self._dropped(self.self_attention(self.input_layernorm(hidden), info), info, "attention")
        return hidden + self._dropped(self.mlp(self.pre_mlp_layernorm(hidden)), info, "mlp")

    def _dropped(self, x: torch.Tensor, info: SequenceInfo, site: str) -> torch.Tensor:
        if not self.training or self.dropout_probability == 0.0:
            return x
        return dropout(x, info.row_keys(self.layer_number, site), self.dropout_probability)
