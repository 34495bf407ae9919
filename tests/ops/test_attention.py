"""Attention against softmax written out, for every mask, head ratio and kernel; gradients; what is kept."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.rng import sample_keys
from megatron.ops import masked_attention as masked
from megatron.ops.attention import attention
from megatron.ops.masked_attention import AttentionDropout, masked_attention

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [2], [0] * 2 + [1] * 11])


def _inputs(heads=4, groups=2, dtype=torch.float64, length=13, width=8):
    torch.manual_seed(0)
    return tuple(torch.randn(length, 2, n, width, dtype=dtype, requires_grad=True) for n in (heads, groups, groups))


def _written_out(q, k, v, scale, causal=True, window=None, documents=None, kept=None, probability=0.0):
    ratio = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(ratio, dim=2) for t in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * scale
    i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None]
    seen = (j <= i) if causal else (j == j + 0 * i)
    if window is not None:
        left, right = window
        seen = seen & ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    seen = seen[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    if kept is not None:
        weights = weights * kept / (1 - probability)
    return torch.einsum("bnij,jbnd->ibnd", weights, v)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_fused(groups, causal):
    q, k, v = _inputs(groups=groups)
    torch.testing.assert_close(attention(q, k, v, scale=0.3, causal=causal), _written_out(q, k, v, 0.3, causal))
    assert torch.autograd.gradcheck(lambda *a: attention(*a, scale=0.3, causal=causal), (q, k, v), fast_mode=True)


MASKS = [
    dict(),
    dict(causal=False),
    dict(window=(3, 0)),
    dict(window=(2, 4), causal=False),
    dict(window=(-1, 2), causal=False),
    dict(documents=DOCUMENTS),
    dict(documents=DOCUMENTS, window=(3, 0)),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_masks(mask, groups, monkeypatch):
    monkeypatch.setattr(masked, "CHUNK_BYTES", 1)  # 16 queries at once is the least
    q, k, v = _inputs(groups=groups)
    plain = dict(mask)
    documents = plain.pop("documents", None)

    def call(*a):
        return masked_attention(*a, scale=0.3, document_ids_BS=documents, **plain)

    torch.testing.assert_close(call(q, k, v), _written_out(q, k, v, 0.3, **mask))
    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("window", [None, (10, 0)])
def test_many_chunks_equal_one(window, monkeypatch):
    q, k, v = _inputs(length=100)
    documents = torch.arange(100)[None].expand(2, -1) // 37
    dropout = AttentionDropout(sample_keys(1, torch.arange(2), 0, "attention"), 0.2)

    def grads():
        out = attention(q, k, v, scale=0.3, window=window, document_ids_BS=documents, dropout=dropout)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    whole = grads()
    monkeypatch.setattr(masked, "CHUNK_BYTES", 1)
    for got, expected in zip(grads(), whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_dropout():
    q, k, v = _inputs(length=32, width=16)
    keys = sample_keys(1, torch.tensor([5, 9]), 2, "attention")
    dropout = AttentionDropout(keys, 0.25)
    # The kept entries, read off with values that pick out one key each.
    identity = torch.eye(32, dtype=torch.float64)[:, None, None].expand(32, 2, 2, 32)
    zero = torch.zeros(32, 2, 4, 32, dtype=torch.float64)
    weights = masked_attention(zero, zero[:, :, :2], identity, 1.0, dropout=dropout)
    kept = (weights != 0).permute(1, 2, 0, 3)
    below = torch.ones(32, 32).tril().bool()
    assert abs(kept[..., below].double().mean() - 0.75) < 0.03
    assert not torch.equal(kept[0, 0], kept[0, 1]) and not torch.equal(kept[0], kept[1])
    out = attention(q, k, v, scale=0.3, dropout=dropout)
    torch.testing.assert_close(out, _written_out(q, k, v, 0.3, kept=kept, probability=0.25))
    assert torch.autograd.gradcheck(lambda *a: attention(*a, scale=0.3, dropout=dropout), (q, k, v), fast_mode=True)
    half = attention(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], scale=0.3, dropout=dropout._replace(first_head=2))
    torch.testing.assert_close(half, out[:, :, 2:])


@pytest.mark.parametrize("name", ["fused", "masked"])
def test_low_precision(name):
    q, k, v = _inputs(dtype=torch.bfloat16, length=64, width=32)
    call = attention if name == "fused" else masked_attention
    out = call(q, k, v, scale=0.2)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = _written_out(*wide, 0.2)
    g = torch.randn_like(out)
    out.backward(g)
    expected.backward(g.double())
    for got, right in zip((out, q.grad, k.grad, v.grad), (expected, *(t.grad for t in wide)), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), right, rtol=2**-6, atol=2**-6)  # a few roundings of 2^-9


@pytest.mark.parametrize("name", ["fused", "masked"])
def test_keeps_nothing_of_sequence_squared(name):
    saved = []
    q, k, v = _inputs(length=64)
    call = attention if name == "fused" else masked_attention
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = call(q, k, v, scale=0.2)
    assert sum(t.numel() for t in saved) == 2 * q.numel() + 2 * k.numel() + 2 * 4 * 64
    assert out.is_contiguous() and out.data_ptr() in {t.data_ptr() for t in saved}


def test_meta_has_the_shapes_and_strides_of_the_kernel():
    q, k, v = _inputs(dtype=torch.bfloat16)
    fakes = [t.detach().to("meta").requires_grad_() for t in (q, k, v)]
    for real, fake in ((q, fakes[0]), (k, fakes[1])):
        out, fake_out = attention(q, k, v, scale=1.0), attention(*fakes, scale=1.0)
        assert out.shape == fake_out.shape and out.stride() == fake_out.stride()
        out.sum().backward()
        fake_out.sum().backward()
        assert real.grad.shape == fake.grad.shape and real.grad.dtype == fake.grad.dtype
