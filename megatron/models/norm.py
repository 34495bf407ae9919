"""The norm layer that the configuration asks for."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.distributed.context import ParallelContext
from megatron.ops.norm import layer_norm, rms_norm
from megatron.topology.param_spec import Constant, ParamSpec


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension.

    Args:
        name: of the layer; its parameters are `name`.weight and, for LayerNorm, `name`.bias.
        size: of the last dimension.
        partial_over: axes over which each rank normalises other entries with the same weight.
        decays: whether weight decay acts on the weight; it never does on the bias.
    """

    def __init__(
        self,
        model: ModelConfig,
        ctx: ParallelContext,
        name: str,
        size: int,
        partial_over: tuple[str, ...],
        decays: bool = False,
    ):
        super().__init__()

        def vector(part: str, value: float, decay: bool) -> nn.Parameter:
            return ctx.parameter(
                ParamSpec(
                    name=f"{name}.{part}",
                    shape=(size,),
                    axes=(None,),
                    init=Constant(value),
                    decay=decay,
                    partial_over=partial_over,
                )
            )

        self.epsilon, self.plus_one = model.norm_epsilon, model.apply_layernorm_1p
        self.weight = vector("weight", 0.0 if self.plus_one else 1.0, decays)
        self.bias = vector("bias", 0.0, False) if model.normalization == "LayerNorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] normalised, in the weight's dtype."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.epsilon, self.plus_one)
        return layer_norm(x, self.weight, self.bias, self.epsilon, self.plus_one)
