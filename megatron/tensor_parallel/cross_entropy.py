"""Output layer and cross-entropy in one: logits split over tp by vocabulary, computed and differentiated piece by
piece.

What is kept for backward is the logits once, in the parameters' dtype, and log-sum-exp per token; fp32 logits exist
for one piece (a chunk of tokens x a block of the vocabulary) at a time, in both directions. Backward needs no
collective for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron.distributed.collectives import all_gather, all_reduce
from megatron.tensor_parallel.column_linear import SplitInput, start_input_gradient

PIECE_BYTES = 32 << 20
"""fp32 logits of one piece. Up to 32 MiB glibc keeps freed memory, so a CPU need not fault in fresh pages each time."""
WIDENED_BYTES = 16 << 20
"""Largest part of the weight that is held in a wider format than it is stored in."""


class VocabularyShard(NamedTuple):
    """Rows of the output layer on this rank: the first one's token, and how many are in the softmax."""

    first: int
    valid: int


def _steps(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + max(1, size), total)) for start in range(0, total, max(1, size))]


def _blocks(weight: torch.Tensor, valid: int, how: SplitInput) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of the softmax, all at once, or in blocks where the products need them in a wider format."""
    size = valid
    if how.backend.prepared(weight[:0]).dtype != weight.dtype:
        size = WIDENED_BYTES // (4 * weight.shape[1])
    for rows in _steps(valid, size):
        yield rows, how.backend.prepared(weight[rows])


def _chunks(num_tokens: int, block: slice) -> list[slice]:
    return _steps(num_tokens, PIECE_BYTES // (4 * (block.stop - block.start)))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Statistics(NamedTuple):
    """Per token over the columns seen so far: largest logit, sum of exp(logit - largest), label's logit (0 unseen)."""

    largest: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor

    def see_(self, part: slice, logits: torch.Tensor, columns: torch.Tensor) -> None:
        """Merge a piece of logits of tokens `part`; `columns` are their labels' columns in the piece."""
        wide = _wide(logits)
        inside = (columns >= 0) & (columns < wide.shape[1])
        target = wide.gather(1, columns.clamp(0, wide.shape[1] - 1)[:, None])[:, 0]
        self.target[part] += target.masked_fill_(~inside, 0.0)
        before = self.largest[part].clone()
        largest = torch.maximum(before, wide.amax(1))
        self.total[part] *= (before - largest).exp_()
        self.total[part] += (wide - largest[:, None]).exp_().sum(1)
        self.largest[part] = largest


def _start(targets: torch.Tensor, dtype: torch.dtype) -> _Statistics:
    largest = torch.full(targets.shape, float("-inf"), dtype=dtype, device=targets.device)
    return _Statistics(largest, *torch.zeros((2, *targets.shape), dtype=dtype, device=targets.device))


def _logit_gradient(logits: torch.Tensor, lse: torch.Tensor, columns: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """g (softmax - one-hot) of a piece, fp32 (or wider)."""
    wide = (_wide(logits) - lse[:, None]).exp_()
    inside = (columns >= 0) & (columns < wide.shape[1])
    wide.scatter_add_(1, columns.clamp(0, wide.shape[1] - 1)[:, None], -inside[:, None].to(wide.dtype))
    return wide.mul_(g[:, None])


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the input as it came, the weight, the logits in the parameters' dtype and log-sum-exp per token."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, shard: VocabularyShard, how: SplitInput
    ) -> torch.Tensor:
        whole = all_gather(x, how.group) if how.sequence_parallel else x
        rows, columns = how.backend.prepared(whole.flatten(0, -2)), labels.flatten() - shard.first
        keep = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        logits = x.new_empty((len(rows), shard.valid)) if keep else None
        seen = _start(columns, torch.promote_types(x.dtype, torch.float32))
        for block, block_weight in _blocks(weight, shard.valid, how):
            for part in _chunks(len(rows), block):
                piece = how.backend.forward(rows[part], block_weight)
                seen.see_(part, piece, columns[part] - block.start)
                if keep:
                    logits[part, block] = piece
        largest = all_reduce(seen.largest, how.group, op="max")
        total, target = all_reduce(torch.stack([seen.total * (seen.largest - largest).exp(), seen.target]), how.group)
        lse = total.log_() + largest
        if keep:
            ctx.save_for_backward(x, weight, logits, columns, lse)
            ctx.how = how
        return (lse - target).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, logits, columns, lse = ctx.saved_tensors
        how: SplitInput = ctx.how
        whole = all_gather(x, how.group) if how.sequence_parallel else x
        rows, g = how.backend.prepared(whole.flatten(0, -2)), g.flatten()
        dx = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        dw = torch.empty_like(weight)
        dw[logits.shape[1] :] = 0.0
        for block, block_weight in _blocks(weight, logits.shape[1], how):
            wide = torch.promote_types(weight.dtype, torch.float32)
            block_dw = dw[block] if weight.dtype == wide else torch.empty(dw[block].shape, dtype=wide, device=dw.device)
            for number, part in enumerate(_chunks(len(rows), block)):
                dlogits = _logit_gradient(logits[part, block], lse[part], columns[part] - block.start, g[part])
                dx[part] += how.backend.dgrad(dlogits, block_weight)
                how.backend.wgrad_into_(block_dw, dlogits, rows[part], accumulate=number > 0)
            if block_dw.dtype != dw.dtype:
                dw[block] = block_dw
        dx, sending = start_input_gradient(dx.to(x.dtype).view(whole.shape), how)
        sending.wait()
        return dx, dw, None, None, None


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, shard: VocabularyShard, how: SplitInput
) -> torch.Tensor:
    """-log softmax(x W^T)[label] of every token, fp32 [s, b], the same on all ranks of the group.

    Shapes: x [s/t, b, h] under sequence parallelism, else [s, b, h]; weight [padded vocabulary / t, h]; labels [s, b]
    global ids. Group: forward all-reduces the maximum, then the sum of exponentials and the label's logit together;
    the input's gradient is reduce-scattered (all-reduced without sequence parallelism). Rows of `weight` beyond
    `shard.valid` are no part of the softmax.
    """
    return _LinearCrossEntropy.apply(x, weight, labels, shard, how)
