"""A small network of specs for tests of buckets: three linear layers with vectors, replayable inputs, a step."""

from __future__ import annotations

import torch
from torch import nn

from megatron.data_parallel.buckets import Buckets, parameters_in_model_order
from megatron.distributed.context import ParallelContext
from megatron.optimizer.adam import Adam
from megatron.optimizer.clip import Clip, clip_by_global_norm
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.sharded import Optimizer
from megatron.topology.param_spec import Constant, Normal, ParamSpec

WIDTH = 12
RATES = Rates({"": 1e-2, "embedding": 2e-2}, 0.1)


class Layer(nn.Module):
    """gelu(scale * (x W^T + b))."""

    def __init__(self, ctx: ParallelContext, number: int, lr_group: str = ""):
        super().__init__()
        name = f"decoder.layers.{number}"
        shape, std = (WIDTH, WIDTH), Normal(0.3)
        self.weight = ctx.parameter(
            ParamSpec(name=f"{name}.weight", shape=shape, axes=(None, None), init=std, lr_group=lr_group)
        )
        self.bias = ctx.parameter(ParamSpec(name=f"{name}.bias", shape=(WIDTH,), axes=(None,), decay=False))
        self.scale = ctx.parameter(
            ParamSpec(name=f"{name}.scale", shape=(WIDTH,), axes=(None,), decay=False, init=Constant(1.0))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.scale * nn.functional.linear(x, self.weight, self.bias))


class Network(nn.Module):
    """A stack of layers; the loss is a sum, as everywhere."""

    def __init__(self, ctx: ParallelContext, num_layers: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(ctx, i, "embedding" if i == 0 else "") for i in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().sum()


def inputs(step: int, sample: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[2, WIDTH] of one sample."""
    generator = torch.Generator().manual_seed(1000 * step + sample)
    return torch.randn(2, WIDTH, generator=generator).to(dtype)


def built(ctx: ParallelContext, **options) -> tuple[Network, Buckets, Optimizer]:
    """Network, buckets and AdamW."""
    network = Network(ctx)
    buckets = Buckets(parameters_in_model_order([network]), ctx, **options)
    buckets.attach_forward_waits([network])
    return network, buckets, Optimizer(buckets, Adam(beta1=0.9, beta2=0.95, eps=1e-8))


def backward(network: Network, buckets: Buckets, step: int, num_samples: int, scale: float = 1.0) -> None:
    """This replica's part of `num_samples` samples, one per microbatch, reduced."""
    ctx = buckets.ctx
    replicas = ctx.dp_cp.size
    mine = [sample for sample in range(num_samples) if sample % replicas == ctx.dp_cp.rank]
    buckets.zero_grads()
    buckets.start_step(len(mine))
    for sample in mine:
        (network(inputs(step, sample, ctx.params_dtype)) * scale / num_samples).backward()
    buckets.finish_reduce()


def train(ctx: ParallelContext, steps: int, num_samples: int, clip: float = 1.0, **options) -> dict:
    """Train; returns norms and the final fp32 weights by name."""
    network, buckets, optimizer = built(ctx, **options)
    norms = []
    for step in range(steps):
        backward(network, buckets, step, num_samples)
        result: Clip = clip_by_global_norm(buckets, clip)
        optimizer.step(result.is_finite, RATES, result.divisor)
        norms.append(result.norm.item())
    buckets.finish_publish()
    return {"norms": norms, "weights": weights(network)}


def weights(network: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name, cloned."""
    return {param.spec.name: param.detach().clone() for param in network.parameters()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **tolerance) -> None:
    """Same names and, bitwise unless a tolerance is given, the same values."""
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            torch.testing.assert_close(a[name], b[name], **tolerance)
        else:
            assert torch.equal(a[name], b[name]), name
