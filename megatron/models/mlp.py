"""The MLP of a block, gated or not, split over tp by its inner width."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.run import RunConfig
from megatron.distributed.context import ParallelContext
from megatron.models.initial_values import branch_output_init, weight_init
from megatron.models.recompute import run
from megatron.ops.activation import activation
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, residual_partial_over
from megatron.topology.param_spec import ParamSpec


class MLP(nn.Module):
    """Residual stream -> residual stream. Gated fc1 is (gate, up) x width: a rank holds gate rows, then up rows."""

    def __init__(self, config: RunConfig, ctx: ParallelContext, layer_number: int):
        super().__init__()
        model, ffn = config.model, config.ffn_size
        self.is_recomputed = config.recompute.recomputes("mlp")
        name = f"decoder.layers.{layer_number}.mlp"
        inner, inner_axes = ((2, ffn), (None, "tp")) if model.gated_linear_unit else ((ffn,), ("tp",))
        self.activation = activation(model.activation, model.glu_linear_offset, model.activation_func_clamp_value)
        self.linear_fc1 = ColumnParallelLinear(
            ctx,
            ParamSpec(
                name=f"{name}.linear_fc1.weight",
                shape=(*inner, model.hidden_size),
                axes=(*inner_axes, None),
                fold=len(inner),
                init=weight_init(model),
            ),
            ParamSpec(name=f"{name}.linear_fc1.bias", shape=inner, axes=inner_axes, fold=len(inner), decay=False)
            if model.add_bias_linear
            else None,
        )
        self.linear_fc2 = RowParallelLinear(
            ctx,
            ParamSpec(
                name=f"{name}.linear_fc2.weight",
                shape=(model.hidden_size, ffn),
                axes=(None, "tp"),
                init=branch_output_init(model),
            ),
            ParamSpec(
                name=f"{name}.linear_fc2.bias",
                shape=(model.hidden_size,),
                axes=(None,),
                decay=False,
                partial_over=residual_partial_over(ctx),
            )
            if model.add_bias_linear
            else None,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [S' B H] -> [S' B H]."""
        return run(self._whole, x, is_recomputed=self.is_recomputed)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))
