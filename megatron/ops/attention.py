"""Causal self-attention that never holds an s x s matrix: a fused kernel, and a chunked one for masks and dropout.

Letters: S sequence, B batch, N query heads, G key-value heads (N a multiple of G; head n reads group n // (N/G)), D
head width. Tensors enter and leave as [S, B, heads, D], any strides; scores and softmax are fp32 whatever the dtype,
so Megatron's --attention-softmax-in-fp32 and --apply-query-key-layer-scaling ask for what already holds.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.ops.compute_dtype import cpu_multiplies
from megatron.ops.library import define
from megatron.ops.masked_attention import AttentionDropout, masked_attention

aten = torch.ops.aten


def _like_kernel(x: torch.Tensor) -> torch.Tensor:
    """Empty [B, heads, S, D] laid out as the kernels write it: [B, S, heads, D]."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)


def _forward_cpu(q, k, v, scale, causal):
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    if cpu_multiplies(q.dtype):
        return kernel(q, k, v, 0.0, causal, scale=scale)
    out, lse = _like_kernel(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for sample in range(len(q)):
        part = slice(sample, sample + 1)
        out[part], lse[part] = kernel(*(t[part].float() for t in (q, k, v)), 0.0, causal, scale=scale)
    return out, lse


def _backward_cpu(g, q, k, v, out, lse, scale, causal):
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    if cpu_multiplies(q.dtype):
        return kernel(g, q, k, v, out, lse, 0.0, causal, scale=scale)
    grads = tuple(map(_like_kernel, (q, k, v)))
    for sample in range(len(q)):
        part = slice(sample, sample + 1)
        wide = kernel(*(t[part].float() for t in (g, q, k, v, out)), lse[part], 0.0, causal, scale=scale)
        for grad, wide_grad in zip(grads, wide, strict=True):
            grad[part] = wide_grad
    return grads


def _forward_gpu(q, k, v, scale, causal):
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]


def _backward_gpu(g, q, k, v, out, lse, scale, causal):
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the dropout generator's state; there is no dropout
    if q.dtype in (torch.float16, torch.bfloat16):
        lengths = (None, None, q.shape[2], k.shape[2])
        return aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, *lengths, 0.0, causal, unused, unused, scale=scale
        )
    shape, ratio = k.shape, q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(ratio, dim=1) for t in (k, v))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        g, q, k, v, None, out, lse, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, *(t.unflatten(1, (shape[1], ratio)).sum(2) for t in (dk, dv))


def _forward_meta(q, k, v, scale, causal):
    return _like_kernel(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_meta(g, q, k, v, out, lse, scale, causal):
    return _like_kernel(q), _like_kernel(k), _like_kernel(v)


define(
    "attention(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor, Tensor)",
    _forward_gpu,
    CPU=_forward_cpu,
    Meta=_forward_meta,
)
define(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, bool causal)"
    " -> (Tensor, Tensor, Tensor)",
    _backward_gpu,
    CPU=_backward_cpu,
    Meta=_backward_meta,
)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(1, 2, 0, 3)


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 0, 1, 3)


class _FusedAttention(torch.autograd.Function):
    """Saves q, k, v, log-sum-exp per row, and the output in the layout the next layer saves too: held once."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        out, lse = torch.ops.megatron.attention(*map(_heads_first, (q, k, v)), scale, causal)
        out = _sequence_first(out).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, lse = ctx.saved_tensors
        grads = torch.ops.megatron.attention_backward(*map(_heads_first, (g, *saved)), lse, ctx.scale, ctx.causal)
        return *map(_sequence_first, grads), None, None


def attention(
    q_SBND: torch.Tensor,
    k_SBGD: torch.Tensor,
    v_SBGD: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    document_ids_BS: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v per head, [S, B, N, D] contiguous.

    Args:
        window: how many tokens a query sees to its left and right (-1: no limit), itself always.
        document_ids_BS: a query sees only keys with its own number.
        dropout: of the probabilities, by coordinates.

    Without the last three the fused kernel runs; with any of them the chunked one, which honours them all.
    """
    if window in (None, (-1, -1)) or (causal and window == (-1, 0)):
        if document_ids_BS is None and dropout is None:
            return _FusedAttention.apply(q_SBND, k_SBGD, v_SBGD, scale, causal)
    return masked_attention(q_SBND, k_SBGD, v_SBGD, scale, causal, window, document_ids_BS, dropout)
