"""Attention with sliding windows, document isolation and dropout by coordinates, in chunks of queries.

Only one chunk of scores lives at a time, in the forward pass and again in the backward pass, which computes them anew
from the saved q, k and log-sum-exp (as FlashAttention does, Dao et al. 2022, section 3.1). Keys that no query of a
chunk can see are never read. Letters as in `attention`; R = N/G query heads of one group, C queries of a chunk, K
keys of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron.distributed.rng import fold_in, keep_mask
from megatron.ops.compute_dtype import matmul_dtype

CHUNK_BYTES = 16 << 20
"""Aim for the fp32 scores of one chunk."""


class AttentionDropout(NamedTuple):
    """Which probabilities are dropped: a function of `keys_B` (seed, sample, layer), global head, query and key."""

    keys_B: torch.Tensor
    probability: float
    first_head: int = 0
    """Global number of this rank's first query head."""


class _Rules(NamedTuple):
    """Who may see whom."""

    scale: float
    causal: bool
    window: tuple[int, int]
    dropout_probability: float
    first_head: int


class _Chunk(NamedTuple):
    """Queries start..stop-1 and the keys first..last-1 that any of them may see."""

    start: int
    stop: int
    first: int
    last: int


def _chunks(rows: int, num_queries: int, num_keys: int, rules: _Rules) -> list[_Chunk]:
    """Chunks of queries so that rows x queries x keys fp32 scores stay near `CHUNK_BYTES`."""
    left, right = rules.window
    widest = num_keys if left < 0 else min(num_keys, left + 256)
    size = min(num_queries, max(16, CHUNK_BYTES // (4 * rows * widest)))
    chunks = []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        first = 0 if left < 0 else max(0, start - left)
        last = stop if rules.causal else num_keys
        if right >= 0:
            last = min(last, stop + right)
        chunks.append(_Chunk(start, stop, first, min(last, num_keys)))
    return chunks


def _hidden(chunk: _Chunk, rules: _Rules, documents_BS: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """bool [B or 1, 1, 1, C, K]: True where the query must not see the key."""
    queries = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    keys = torch.arange(chunk.first, chunk.last, device=device)[None, :]
    left, right = rules.window
    hidden = keys > queries if rules.causal else torch.zeros_like(keys > queries)
    if left >= 0:
        hidden = hidden | (keys < queries - left)
    if right >= 0:
        hidden = hidden | (keys > queries + right)
    hidden = hidden[None]
    if documents_BS is not None:
        mine, theirs = documents_BS[:, chunk.start : chunk.stop, None], documents_BS[:, None, chunk.first : chunk.last]
        hidden = hidden | (mine != theirs)
    return hidden[:, None, None]


def _keep(chunk: _Chunk, rules: _Rules, keys_B: torch.Tensor, num_groups: int, ratio: int) -> torch.Tensor:
    """bool [B, G, R, C, K]: which probabilities survive."""
    heads = torch.arange(num_groups * ratio, device=keys_B.device) + rules.first_head
    queries = torch.arange(chunk.start, chunk.stop, device=keys_B.device)
    rows_BNC = fold_in(fold_in(keys_B[:, None], heads)[:, :, None], queries)
    kept = keep_mask(rows_BNC, chunk.last - chunk.first, 1.0 - rules.dropout_probability, first_column=chunk.first)
    return kept.unflatten(1, (num_groups, ratio))


def _grouped(x_SBND: torch.Tensor, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, G, R, S, D] contiguous, widened to `dtype`."""
    x = x_SBND.unflatten(2, (num_groups, -1)).permute(1, 2, 3, 0, 4)
    return x.to(dtype=dtype, memory_format=torch.contiguous_format)


def _scores(q: torch.Tensor, k: torch.Tensor, chunk: _Chunk, scale: float) -> torch.Tensor:
    """fp32 (or wider) [B, G, R, C, K]; the R heads of a group are stacked as rows, so keys are never repeated."""
    rows = q[:, :, :, chunk.start : chunk.stop].flatten(2, 3)
    scores = rows @ k[:, :, 0, chunk.first : chunk.last].transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    return scores.unflatten(2, (q.shape[2], -1))


class _MaskedAttention(torch.autograd.Function):
    """Saves q, k, v, the output and log-sum-exp per row; and the keys of documents and dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: torch.Tensor,
        k_SBGD: torch.Tensor,
        v_SBGD: torch.Tensor,
        rules: _Rules,
        documents_BS: torch.Tensor | None,
        dropout_keys_B: torch.Tensor | None,
    ) -> torch.Tensor:
        num_groups = k_SBGD.shape[2]
        dtype = matmul_dtype(q_SBND.dtype, q_SBND.device)
        q, k, v = (_grouped(x, num_groups, dtype) for x in (q_SBND, k_SBGD, v_SBGD))
        batch, _, ratio, num_queries, _ = q.shape
        lse = torch.empty(q.shape[:-1], dtype=torch.promote_types(dtype, torch.float32), device=q.device)
        out = torch.empty(q_SBND.shape, dtype=q_SBND.dtype, device=q.device)
        for chunk in _chunks(batch * num_groups * ratio, num_queries, k.shape[3], rules):
            scores = _scores(q, k, chunk, rules.scale)
            scores.masked_fill_(_hidden(chunk, rules, documents_BS, q.device), float("-inf"))
            lse[:, :, :, chunk.start : chunk.stop] = total = scores.logsumexp(-1)
            weights = scores.sub_(total[..., None]).exp_()
            if dropout_keys_B is not None:
                weights.mul_(_keep(chunk, rules, dropout_keys_B, num_groups, ratio))
                weights.mul_(1.0 / (1.0 - rules.dropout_probability))
            part = weights.to(dtype).flatten(2, 3) @ v[:, :, 0, chunk.first : chunk.last]
            part = part.unflatten(2, (ratio, -1)).permute(3, 0, 1, 2, 4).flatten(2, 3)
            out[chunk.start : chunk.stop] = part
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGD, out, lse, documents_BS, dropout_keys_B)
        ctx.rules = rules
        return out

    @staticmethod
    def backward(ctx: Any, g_SBND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_SBND, k_SBGD, v_SBGD, out, lse, documents_BS, dropout_keys_B = ctx.saved_tensors
        rules: _Rules = ctx.rules
        num_groups = k_SBGD.shape[2]
        dtype = matmul_dtype(q_SBND.dtype, q_SBND.device)
        q, k, v, g, o = (_grouped(x, num_groups, dtype) for x in (q_SBND, k_SBGD, v_SBGD, g_SBND, out))
        batch, _, ratio, num_queries, _ = q.shape
        wide = lse.dtype
        pull = (g.to(wide) * o).sum(-1, keepdim=True)  # sum over keys of dropped probability times its gradient
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for chunk in _chunks(batch * num_groups * ratio, num_queries, k.shape[3], rules):
            queries, keys = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.last)
            weights = _scores(q, k, chunk, rules.scale)
            weights.masked_fill_(_hidden(chunk, rules, documents_BS, q.device), float("-inf"))
            weights.sub_(lse[:, :, :, queries, None]).exp_()
            rows = g[:, :, :, queries].flatten(2, 3)
            g_weights = (rows @ v[:, :, 0, keys].transpose(-1, -2)).to(wide).unflatten(2, (ratio, -1))
            dropped = weights
            if dropout_keys_B is not None:
                scaled = _keep(chunk, rules, dropout_keys_B, num_groups, ratio).to(wide)
                scaled.mul_(1.0 / (1.0 - rules.dropout_probability))
                g_weights.mul_(scaled)
                dropped = scaled.mul_(weights)
            dv[:, :, 0, keys] += dropped.to(dtype).flatten(2, 3).transpose(-1, -2) @ rows
            g_scores = g_weights.sub_(pull[:, :, :, queries]).mul_(weights).mul_(rules.scale)
            g_rows = g_scores.to(dtype).flatten(2, 3)
            dq[:, :, :, queries] = (g_rows @ k[:, :, 0, keys]).unflatten(2, (ratio, -1))
            dk[:, :, 0, keys] += g_rows.transpose(-1, -2) @ q[:, :, :, queries].flatten(2, 3)
        grads = (x.permute(3, 0, 1, 2, 4).flatten(2, 3).to(q_SBND.dtype) for x in (dq, dk, dv))
        return *grads, None, None, None


def masked_attention(
    q_SBND: torch.Tensor,
    k_SBGD: torch.Tensor,
    v_SBGD: torch.Tensor,
    scale: float,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    document_ids_BS: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> torch.Tensor:
    """See `attention.attention`, whose masks and dropout this honours in every combination."""
    probability, first_head = (0.0, 0) if dropout is None else (dropout.probability, dropout.first_head)
    rules = _Rules(scale, causal, (-1, -1) if window is None else tuple(window), probability, first_head)
    keys_B = None if dropout is None else dropout.keys_B
    return _MaskedAttention.apply(q_SBND, k_SBGD, v_SBGD, rules, document_ids_BS, keys_B)
