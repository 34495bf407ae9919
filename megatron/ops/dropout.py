"""Dropout whose mask is a function of coordinates: one key per row is saved, and nothing depends on the layout.

A row key is an int64 for one row of the tensor (`distributed.rng.fold_in` of seed, sample, layer, site and position),
so the mask of a token is the same on any rank, in any order, and when the layer is computed again.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.distributed.rng import keep_mask


def _dropped(x: torch.Tensor, row_keys: torch.Tensor, probability: float) -> torch.Tensor:
    keep = 1.0 - probability
    return torch.where(keep_mask(row_keys, x.shape[-1], keep), x, 0.0).mul_(1.0 / keep)


class _Dropout(torch.autograd.Function):
    """Saves the row keys."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row_keys: torch.Tensor, probability: float) -> torch.Tensor:
        ctx.save_for_backward(row_keys)
        ctx.probability = probability
        return _dropped(x, row_keys, probability)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (row_keys,) = ctx.saved_tensors
        return _dropped(g, row_keys, ctx.probability), None, None


def dropout(x: torch.Tensor, row_keys: torch.Tensor, probability: float) -> torch.Tensor:
    """x [..., n] with entries zeroed at `probability` and the rest divided by 1 - probability; row_keys int64 [...]."""
    return _Dropout.apply(x, row_keys, probability)
