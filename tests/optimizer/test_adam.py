"""AdamW on a flat range against torch's own optimizer, and the skip flag."""

from __future__ import annotations

import pytest
import torch

from megatron.optimizer.adam import Adam
from megatron.optimizer.rules import UpdateSettings


def tensors(count: int, numel: int = 257) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("fused", [True, False])
def test_equals_torch_adamw(weight_decay, fused):
    start, *grads = tensors(6)
    weights, reference = start.clone(), torch.nn.Parameter(start.clone())
    states = [torch.zeros_like(start), torch.zeros_like(start)]
    plain = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=weight_decay, fused=fused)
    for number, grad in enumerate(grads, start=1):
        step = torch.tensor(float(number))
        settings = UpdateSettings(1e-2, weight_decay, step, torch.tensor(4.0), torch.tensor(0.0))
        Adam(beta1=0.9, beta2=0.95, eps=1e-6).update_(weights, grad * 4.0, states, settings)
        reference.grad = grad
        plain.step()
    state = plain.state[reference]
    for ours, theirs in ((weights, reference), (states[0], state["exp_avg"]), (states[1], state["exp_avg_sq"])):
        if fused:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # the unfused one rounds in other places


def test_a_skipped_update_changes_nothing():
    weights, grad, mean, square = tensors(4)
    grad[0], square = float("inf"), square.abs()
    before = [weights.clone(), mean.clone(), square.clone()]
    settings = UpdateSettings(1e-2, 0.1, torch.tensor(3.0), torch.tensor(1.0), torch.tensor(1.0))
    Adam(beta1=0.9, beta2=0.95, eps=1e-6).update_(weights, grad, [mean, square], settings)
    assert all(torch.equal(a, b) for a, b in zip([weights, mean, square], before))
