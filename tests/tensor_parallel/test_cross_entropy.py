"""Output layer and loss in one against `F.cross_entropy` of whole logits: values, gradients, padding, what is kept."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron.distributed.context import single_process_context
from megatron.ops import compute_dtype
from megatron.tensor_parallel import cross_entropy as module
from megatron.tensor_parallel.cross_entropy import VocabularyShard, linear_cross_entropy
from megatron.tensor_parallel.layers import split_input
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import run_ranks

S, B, H, V, PADDED = 8, 2, 6, 9, 16


def _tensor(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, WEIGHT, G = _tensor(1, S, B, H), _tensor(2, PADDED, H) * 3, _tensor(3, S, B)
LABELS = torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(4))


def _run(ctx, softmax_size):
    rows, sequence = PADDED // ctx.tp.size, S // ctx.tp.size
    first = ctx.tp.rank * rows
    shard = VocabularyShard(first, max(0, min(rows, softmax_size - first)))
    x = X[ctx.tp.rank * sequence : (ctx.tp.rank + 1) * sequence] if ctx.sequence_parallel else X
    x, weight = x.clone().requires_grad_(), WEIGHT[first : first + rows].clone().requires_grad_()
    losses = linear_cross_entropy(x, weight, LABELS, shard, split_input(ctx))
    losses.backward(G)
    return losses.detach(), x.grad, weight.grad


@pytest.mark.parametrize("softmax_size", [V, PADDED])
@pytest.mark.parametrize("pieces", ["one", "many"])
@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_equals_the_whole(size, sequence_parallel, softmax_size, pieces, monkeypatch):
    if pieces == "many":
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    ranks = run_ranks(
        size, _run, softmax_size, mesh=Mesh(tp=size), sequence_parallel=sequence_parallel, params_dtype=torch.float64
    )
    losses, dxs, dws = zip(*ranks, strict=True)
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    logits = F.linear(x, weight[:softmax_size])
    expected = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="none").view(S, B)
    expected.backward(G)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
        assert torch.equal(loss, losses[0])
    for dx in [torch.cat(dxs)] if sequence_parallel else dxs:
        torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(torch.cat(dws), weight.grad)


@pytest.mark.parametrize("pieces", ["one", "many"])
def test_gradient_is_the_slope(pieces, monkeypatch):
    """Central differences: `gradcheck` differentiates one graph many times, and this one is spent after the first."""
    if pieces == "many":
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    how = split_input(single_process_context(params_dtype=torch.float64))

    def loss(x, weight):
        return (linear_cross_entropy(x, weight, LABELS, VocabularyShard(0, V), how) * G).sum()

    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    loss(x, weight).backward()
    for seed in range(5):
        along_x, along_weight = _tensor(10 + seed, *X.shape) * 1e-5, _tensor(20 + seed, *WEIGHT.shape) * 1e-5
        slope = (loss(X + along_x, WEIGHT + along_weight) - loss(X - along_x, WEIGHT - along_weight)) / 2
        torch.testing.assert_close(
            (x.grad * along_x).sum() + (weight.grad * along_weight).sum(), slope, rtol=1e-6, atol=0
        )


def test_a_second_backward_is_refused():
    how = split_input(single_process_context(params_dtype=torch.float64))
    loss = linear_cross_entropy(X.clone().requires_grad_(), WEIGHT, LABELS, VocabularyShard(0, V), how).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


def test_padding_takes_no_probability():
    how = split_input(single_process_context(params_dtype=torch.float64))
    weight = WEIGHT.clone()
    weight[V:] = 1e3
    weight.requires_grad_()
    losses = linear_cross_entropy(X, weight, LABELS, VocabularyShard(0, V), how)
    torch.testing.assert_close(losses, linear_cross_entropy(X, WEIGHT, LABELS, VocabularyShard(0, V), how))
    losses.sum().backward()
    assert (weight.grad[V:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, monkeypatch):
    monkeypatch.setattr(compute_dtype, "WIDENED_BYTES", 4 * H * 5)  # blocks of five words, products of six tokens
    monkeypatch.setattr(module, "PIECE_BYTES", 4 * 5 * 7)
    how = split_input(single_process_context(params_dtype=dtype))
    x, weight = X.to(dtype).requires_grad_(), WEIGHT.to(dtype).requires_grad_()
    losses = linear_cross_entropy(x, weight, LABELS, VocabularyShard(0, PADDED), how)
    losses.backward(G.float())
    wide_x, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = F.linear(wide_x, wide_weight)
    rounded = logits + (logits.to(dtype) - logits).detach()  # as a low-precision output layer gives them
    expected = F.cross_entropy(rounded.flatten(0, 1), LABELS.flatten(), reduction="none").view(S, B)
    expected.backward(G)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=2**-8, atol=2**-5)  # a logit may round the other way
    for got, right in ((x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        torch.testing.assert_close(got.double(), right, rtol=2**-5, atol=2**-4)


def test_keeps_logits_once():
    how = split_input(single_process_context(params_dtype=torch.bfloat16))
    x, weight = X.bfloat16().requires_grad_(), WEIGHT.bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_cross_entropy(x, weight, LABELS, VocabularyShard(0, V), how)
    assert [(tuple(t.shape), t.dtype) for t in saved if t.numel() >= S * B * V] == [((S * B, V), torch.bfloat16)]
