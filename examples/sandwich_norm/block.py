"""A transformer block with a norm before and behind each branch.

x + norm(attention(norm(x))), then x + norm(MLP(norm(x))): "Sandwich-LN" of CogView (Ding et al. 2021,
arXiv:2105.13290, section 3.3). The second norm has no bias; it is RMSNorm or LayerNorm, as --normalization says.
"""

from __future__ import annotations

import torch
from torch import nn

from examples.sandwich_norm.config import SandwichNormConfig
from megatron.config.run import RunConfig
from megatron.distributed.context import ParallelContext
from megatron.models.block import TransformerBlock
from megatron.models.sequence_info import SequenceInfo
from megatron.ops.norm import layer_norm, rms_norm
from megatron.tensor_parallel.layers import residual_partial_over
from megatron.topology.param_spec import Constant, ParamSpec


class BranchNorm(nn.Module):
    """Normalises what a branch adds to the residual stream: [s, b, h] (or [s/t, b, h]) -> the same.

    Whole on every tensor-parallel rank; under sequence parallelism each rank sees other tokens, which
    `residual_partial_over` says, and the gradient is summed over them.
    """

    def __init__(self, config: RunConfig, ctx: ParallelContext, name: str):
        super().__init__()
        model, initial = config.model, config.extra(SandwichNormConfig).sandwich_norm_init
        self.epsilon, self.plus_one = model.norm_epsilon, model.apply_layernorm_1p
        self.is_rms = model.normalization == "RMSNorm"
        self.weight = ctx.parameter(
            ParamSpec(
                name=f"{name}.weight",
                shape=(model.hidden_size,),
                axes=(None,),
                init=Constant(initial - 1.0 if self.plus_one else initial),
                decay=False,
                partial_over=residual_partial_over(ctx),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.is_rms:
            return rms_norm(x, self.weight, self.epsilon, self.plus_one)
        return layer_norm(x, self.weight, torch.zeros_like(self.weight), self.epsilon, self.plus_one)


class SandwichBlock(TransformerBlock):
    """The block of `megatron.models` with a `BranchNorm` behind the branches that --sandwich-norm names."""

    def __init__(self, config: RunConfig, ctx: ParallelContext, layer_number: int):
        super().__init__(config, ctx, layer_number)
        where, name = config.extra(SandwichNormConfig).sandwich_norm, f"decoder.layers.{layer_number}"
        self.post_attention_norm = self.post_mlp_norm = None
        if where in ("both", "attention"):
            self.post_attention_norm = BranchNorm(config, ctx, f"{name}.post_self_attn_layernorm")
        if where in ("both", "mlp"):
            self.post_mlp_norm = BranchNorm(config, ctx, f"{name}.post_mlp_layernorm")

    def forward(self, hidden: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        """See `TransformerBlock.forward`."""
        branch = self.self_attention(self.input_layernorm(hidden), info)
        if self.post_attention_norm is not None:
            branch = self.post_attention_norm(branch)
        hidden = hidden + self._dropped(branch, info, "attention")
        branch = self.mlp(self.pre_mlp_layernorm(hidden))
        if self.post_mlp_norm is not None:
            branch = self.post_mlp_norm(branch)
        return hidden + self._dropped(branch, info, "mlp")
