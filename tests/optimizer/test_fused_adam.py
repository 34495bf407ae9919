"""The seam to apex and Transformer Engine: refused where missing or unknown, equal to ours with stand-ins."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.adam import Adam
from megatron.optimizer.rules import UpdateSettings
from megatron.optimizer.sharded import build_rule

MODULES = {
    "apex": ("apex", "apex.optimizers", "apex.multi_tensor_apply", "amp_C"),
    "transformer_engine": (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.optimizers",
        "transformer_engine_torch",
    ),
}


class FusedAdam:
    """The constructor both libraries have."""

    def __init__(
        self, params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad=False, capturable=False
    ):
        raise AssertionError("the kernel is used without it")


def applier(kernel, skip, lists, *args):
    """`multi_tensor_applier` of both libraries, with their chunk size."""
    return kernel(2048 * 32, skip, lists, *args)


def kernel(chunk, skip, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, inverse_scale):
    """`multi_tensor_adam_capturable`, written out."""
    assert (mode, bias_correction, step.dtype, skip.dtype) == (1, 1, torch.int32, torch.int32)
    if skip.item():
        return
    for grad, weight, mean, square in zip(*lists):
        grad = grad * inverse_scale
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + eps)
        weight.sub_(lr * (update + weight_decay * weight))


@pytest.fixture(params=sorted(MODULES))
def backend(request, monkeypatch):
    """Both libraries as modules that hold the stand-ins."""
    for name in MODULES[request.param]:
        module = ModuleType(name)
        module.FusedAdam, module.multi_tensor_applier, module.multi_tensor_adam_capturable = FusedAdam, applier, kernel
        monkeypatch.setitem(sys.modules, name, module)
    return request.param


def config(backend: str) -> OptimizerConfig:
    return OptimizerConfig(adam_backend=backend, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_missing_library_is_refused_at_the_flag(name, monkeypatch):
    for module in MODULES[name]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"--adam-backend {name} needs .*use --adam-backend torch"):
        build_rule(config(name))


def test_another_version_is_refused(backend, monkeypatch):
    monkeypatch.setattr(FusedAdam, "__init__", lambda self, params, lr: None)
    with pytest.raises(ValueError, match="its FusedAdam lacks adam_w_mode, betas"):
        build_rule(config(backend))


def test_calls_the_kernel_with_our_meaning(backend):
    generator = torch.Generator().manual_seed(1)
    start, *grads = [torch.randn(128, generator=generator) for _ in range(4)]
    ours, theirs = (
        [start.clone(), torch.zeros(128), torch.zeros(128)],
        [start.clone(), torch.zeros(128), torch.zeros(128)],
    )
    rule, reference = build_rule(config(backend)), Adam(beta1=0.9, beta2=0.95, eps=1e-6)
    for number, grad in enumerate(grads, start=1):
        skip = torch.tensor(float(number == 2))
        settings = UpdateSettings(1e-2, 0.1, torch.tensor(float(number)), torch.tensor(2.0), skip)
        rule.update_(ours[0], grad.clone(), ours[1:], settings)
        reference.update_(theirs[0], grad.clone(), theirs[1:], settings)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    rule.update_(ours[0], grads[0], ours[1:], UpdateSettings(1e-2, 0.1, torch.tensor(4.0), None, None))
    reference.update_(theirs[0], grads[0].clone(), theirs[1:], UpdateSettings(1e-2, 0.1, torch.tensor(4.0), None, None))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-7)
