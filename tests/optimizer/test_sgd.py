"""SGD on a flat range against torch's own optimizer, and the skip flag."""

from __future__ import annotations

import pytest
import torch

from megatron.optimizer.rules import UpdateSettings
from megatron.optimizer.sgd import Sgd


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_sgd(momentum, weight_decay):
    generator = torch.Generator().manual_seed(3)
    start, *grads = [torch.randn(257, generator=generator) for _ in range(6)]
    weights, reference = start.clone(), torch.nn.Parameter(start.clone())
    rule = Sgd(momentum=momentum)
    states = [torch.zeros_like(start) for _ in rule.state_names]
    plain = torch.optim.SGD([reference], lr=1e-2, momentum=momentum, weight_decay=weight_decay, fused=True)
    for number, grad in enumerate(grads, start=1):
        settings = UpdateSettings(1e-2, weight_decay, torch.tensor(float(number)), None, None)
        rule.update_(weights, grad.clone(), states, settings)
        reference.grad = grad
        plain.step()
    assert torch.equal(weights, reference)
    assert [torch.equal(s, plain.state[reference]["momentum_buffer"]) for s in states] == [True] * len(states)


def test_a_skipped_update_changes_nothing_and_gradients_are_divided():
    weights, momentum = torch.ones(64), torch.full((64,), 2.0)
    grads = torch.full((64,), 8.0)
    rule, step = Sgd(momentum=0.5), torch.tensor(1.0)
    rule.update_(
        weights, grads.clone(), [momentum], UpdateSettings(0.25, 0.0, step, torch.tensor(4.0), torch.tensor(1.0))
    )
    assert (weights == 1).all() and (momentum == 2).all()
    rule.update_(
        weights, grads.clone(), [momentum], UpdateSettings(0.25, 0.0, step, torch.tensor(4.0), torch.tensor(0.0))
    )
    assert (momentum == 3).all() and (weights == 0.25).all()
