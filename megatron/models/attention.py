"""Self-attention with multi-head, grouped or multi-query keys and values, split over tp by heads.

Letters: S sequence, B batch, G key-value groups and R query heads per group on this rank, N = G R, D head width, H
hidden.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from megatron.config.run import RunConfig
from megatron.distributed.context import ParallelContext
from megatron.models.initial_values import branch_output_init, weight_init
from megatron.models.norm import Norm
from megatron.models.recompute import run
from megatron.models.sequence_info import SequenceInfo
from megatron.ops.attention import attention
from megatron.ops.masked_attention import AttentionDropout
from megatron.ops.rope import apply_rotary
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, residual_partial_over
from megatron.topology.param_spec import ParamSpec


class HeadSplit(NamedTuple):
    """Which heads a tensor-parallel rank computes."""

    groups: int
    """Key-value groups here."""
    heads_per_group: int
    """Query heads per group here."""
    rows: tuple[slice, ...] | None
    """Stored rows of the whole linear_qkv to use; None: the weight is split over tp by groups, use all of it."""

    @classmethod
    def of(cls, heads: int, groups: int, head_dim: int, tp_size: int, tp_rank: int) -> HeadSplit:
        """Whole groups per rank where tp divides them; else every rank holds all rows and uses its query heads and its
        group's key and value."""
        per_group = heads // groups
        if groups % tp_size == 0:
            return cls(groups // tp_size, per_group, None)
        if tp_size % groups or heads % tp_size:
            raise ValueError(
                f"--tensor-model-parallel-size {tp_size} and {groups} key-value heads (--num-query-groups): one must "
                f"divide the other, and --num-attention-heads {heads} must divide by the tensor-parallel size"
            )
        ranks_per_group = tp_size // groups
        group, part = divmod(tp_rank, ranks_per_group)
        mine = heads // tp_size
        first = (group * (per_group + 2) + part * mine) * head_dim
        key = (group * (per_group + 2) + per_group) * head_dim
        return cls(1, mine, (slice(first, first + mine * head_dim), slice(key, key + 2 * head_dim)))


class SelfAttention(nn.Module):
    """Residual stream -> residual stream. `layer_number` is global, from 0."""

    def __init__(self, config: RunConfig, ctx: ParallelContext, layer_number: int):
        super().__init__()
        model = config.model
        self.layer_number = layer_number
        self.head_dim = config.head_dim
        self.scale = 1.0 / math.sqrt(config.head_dim)
        self.window = model.window_size if model.window_layers[layer_number] else None
        self.rotates = model.rope_layers[layer_number]
        self.dropout_probability = model.attention_dropout
        self.recomputes_core = config.recompute.recomputes("core_attn")
        heads, groups = model.num_attention_heads, config.num_kv_heads
        self.split = HeadSplit.of(heads, groups, config.head_dim, ctx.tp.size, ctx.tp.rank)
        self.first_head = ctx.tp.rank * (heads // ctx.tp.size)

        name = f"decoder.layers.{layer_number}.self_attention"
        is_whole = self.split.rows is not None
        qkv_shape = (groups, heads // groups + 2, config.head_dim)
        qkv_axes = (None if is_whole else "tp", None, None)
        partial_over = ("tp",) if is_whole else ()
        self.linear_qkv = ColumnParallelLinear(
            ctx,
            ParamSpec(
                name=f"{name}.linear_qkv.weight",
                shape=(*qkv_shape, model.hidden_size),
                axes=(*qkv_axes, None),
                fold=3,
                init=weight_init(model),
                partial_over=partial_over,
            ),
            ParamSpec(
                name=f"{name}.linear_qkv.bias",
                shape=qkv_shape,
                axes=qkv_axes,
                fold=3,
                decay=False,
                partial_over=partial_over,
            )
            if model.has_qkv_bias
            else None,
            rows=self.split.rows,
        )
        self.q_layernorm = self.k_layernorm = None
        if model.qk_layernorm:  # each rank normalises its own heads
            decays = config.optimizer.apply_wd_to_qk_layernorm
            self.q_layernorm = Norm(model, ctx, f"{name}.q_layernorm", config.head_dim, ("tp",), decays)
            self.k_layernorm = Norm(model, ctx, f"{name}.k_layernorm", config.head_dim, ("tp",), decays)
        self.linear_proj = RowParallelLinear(
            ctx,
            ParamSpec(
                name=f"{name}.linear_proj.weight",
                shape=(model.hidden_size, heads, config.head_dim),
                axes=(None, "tp", None),
                init=branch_output_init(model),
            ),
            ParamSpec(
                name=f"{name}.linear_proj.bias",
                shape=(model.hidden_size,),
                axes=(None,),
                decay=False,
                partial_over=residual_partial_over(ctx),
            )
            if model.add_bias_linear
            else None,
        )

    def forward(self, x: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        """x [S' B H] -> [S' B H]."""
        q_SBND, k_SBGD, v_SBGD = self._queries_keys_values(self.linear_qkv(x), info)
        out_SBND = run(self._core, q_SBND, k_SBGD, v_SBGD, info, is_recomputed=self.recomputes_core)
        return self.linear_proj(out_SBND.flatten(2))

    def _core(
        self, q_SBND: torch.Tensor, k_SBGD: torch.Tensor, v_SBGD: torch.Tensor, info: SequenceInfo
    ) -> torch.Tensor:
        return attention(
            q_SBND,
            k_SBGD,
            v_SBGD,
            scale=self.scale,
            window=self.window,
            document_ids_BS=info.document_ids_BS,
            dropout=self._dropout(info),
        )

    def _queries_keys_values(
        self, qkv: torch.Tensor, info: SequenceInfo
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cut the product (rows by group: its query heads, its key, its value), normalise, rotate."""
        groups, heads = self.split.groups, self.split.heads_per_group
        q, k, v = qkv.view(*qkv.shape[:2], groups, heads + 2, self.head_dim).split((heads, 1, 1), dim=3)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if self.rotates:
            q, k = apply_rotary(q, info.rotary), apply_rotary(k, info.rotary)
        if self.q_layernorm is not None or self.rotates or (groups > 1 and heads > 1):
            v = v.contiguous()  # a view would keep the whole product alive until backward, for a part of it
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)

    def _dropout(self, info: SequenceInfo) -> AttentionDropout | None:
        if not self.training or self.dropout_probability == 0.0:
            return None
        keys = info.sample_keys(self.layer_number, "attention probability")
        return AttentionDropout(keys, self.dropout_probability, self.first_head)
