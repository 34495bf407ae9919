"""Output layer and cross-entropy in one: logits split over tp by vocabulary, differentiated in place, piece by piece.

Logits are held once, in the parameters' dtype, and become their own gradient; fp32 copies exist for one piece (some
tokens x a block of the vocabulary) at a time, in both directions. Backward needs no collective for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron.distributed.collectives import all_gather, all_reduce
from megatron.ops.compute_dtype import matmul_dtype, row_blocks
from megatron.ops.linear import product_into_
from megatron.tensor_parallel.column_linear import SplitInput, start_input_gradient

PIECE_BYTES = 4 << 20
"""fp32 logits of one piece: small enough to stay in a CPU's cache."""


class VocabularyShard(NamedTuple):
    """Rows of the output layer on this rank: the first one's token, and how many are in the softmax."""

    first: int
    valid: int


class _Block(NamedTuple):
    """Rows of the weight that are multiplied together: which, their values, and the tokens of each product."""

    columns: slice
    weight: torch.Tensor
    tokens: list[slice]


def _steps(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + max(1, size), total)) for start in range(0, total, max(1, size))]


def _pieces(num_tokens: int, columns: slice) -> list[slice]:
    return _steps(num_tokens, PIECE_BYTES // (4 * (columns.stop - columns.start)))


def _blocks(weight: torch.Tensor, valid: int, num_tokens: int) -> Iterator[_Block]:
    """One block; or, where products need wider operands than are stored, blocks whose operands are small."""
    wide = matmul_dtype(weight.dtype, weight.device)
    if wide == weight.dtype:
        yield from (_Block(columns, weight[columns], [slice(0, num_tokens)]) for columns in _steps(valid, valid))
        return
    for columns in row_blocks(valid, weight.shape[1]):
        tokens = row_blocks(num_tokens, columns.stop - columns.start)
        yield _Block(columns, weight[columns].to(wide), tokens)


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
    """Saves the input as it came, the weight, the logits in the parameters' dtype and log-sum-exp per token.

    Backward turns the saved logits into their gradient in place, so it can run once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, shard: VocabularyShard, how: SplitInput
    ) -> torch.Tensor:
        whole = all_gather(x, how.group) if how.sequence_parallel else x
        rows = whole.flatten(0, -2).to(matmul_dtype(x.dtype, x.device))
        columns = labels.flatten() - shard.first
        logits = x.new_empty((len(rows), shard.valid))
        seen = _start(columns, torch.promote_types(x.dtype, torch.float32))
        for block in _blocks(weight, shard.valid, len(rows)):
            for part in block.tokens:
                product_into_(logits[part, block.columns], rows[part], block.weight.t())
            for part in _pieces(len(rows), block.columns):
                seen.see_(part, logits[part, block.columns], columns[part] - block.columns.start)
        largest = all_reduce(seen.largest, how.group, op="max")
        total, target = all_reduce(torch.stack([seen.total * (seen.largest - largest).exp(), seen.target]), how.group)
        lse = total.log_() + largest
        ctx.save_for_backward(x, weight, logits, columns, lse)
        ctx.how, ctx.is_spent = how, False
        return (lse - target).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.is_spent:
            raise RuntimeError("the loss was differentiated before: its logits became gradients; run forward again")
        ctx.is_spent = True
        x, weight, logits, columns, lse = ctx.saved_tensors
        how: SplitInput = ctx.how
        whole = all_gather(x, how.group) if how.sequence_parallel else x
        rows, g = whole.flatten(0, -2).to(matmul_dtype(x.dtype, x.device)), g.flatten()
        dx = torch.zeros_like(rows)
        dw = torch.empty_like(weight)
        dw[logits.shape[1] :] = 0.0
        for block in _blocks(weight, logits.shape[1], len(rows)):
            dlogits = logits[:, block.columns]
            for part in _pieces(len(rows), block.columns):
                local = columns[part] - block.columns.start
                dlogits[part] = _logit_gradient(dlogits[part], lse[part], local, g[part])
            block_dw = dw[block.columns]
            if block.weight.dtype != dw.dtype:
                block_dw = torch.empty_like(block.weight)
            for number, part in enumerate(block.tokens):
                wide = dlogits[part].to(rows.dtype)
                product_into_(dx[part], wide, block.weight, accumulate=block.columns.start > 0)
                product_into_(block_dw, wide.t(), rows[part], accumulate=number > 0)
            if block_dw.dtype != dw.dtype:
                dw[block.columns] = block_dw
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
