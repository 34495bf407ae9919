"""Dropout by coordinates: rate, expectation, gradient, independence of the layout."""

from __future__ import annotations

import torch

from megatron.distributed.rng import fold_in, sample_keys
from megatron.ops.dropout import dropout


def _row_keys(samples, positions):
    return fold_in(sample_keys(7, samples, 3, "attention")[None], positions[:, None])


def test_rate_scale_and_gradient():
    x = torch.rand(64, 4, 256, dtype=torch.float64) + 0.5
    x.requires_grad_()
    y = dropout(x, _row_keys(torch.arange(4), torch.arange(64)), 0.25)
    kept = y != 0
    assert abs(kept.double().mean() - 0.75) < 5 * (0.25 * 0.75 / x.numel()) ** 0.5
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad != 0, kept)


def test_shards_draw_their_part_of_one_mask():
    x = torch.randn(8, 6, 32)
    whole = dropout(x, _row_keys(torch.arange(6), torch.arange(8)), 0.5)
    part = dropout(x[4:, 2:5], _row_keys(torch.arange(2, 5), torch.arange(4, 8)), 0.5)
    assert torch.equal(part, whole[4:, 2:5])


def test_saves_keys_only():
    saved = []
    x = torch.randn(8, 6, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(x, _row_keys(torch.arange(6), torch.arange(8)), 0.5)
    assert [t.shape for t in saved] == [(8, 6)]
