"""Recomputation: which layers, what is kept, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.config.recompute import RecomputeConfig
from megatron.distributed.context import single_process_context
from megatron.models.gpt import build_stages
from megatron.models.recompute import LayerRun, layer_runs
from megatron.topology.mesh import Mesh
from tests.models.layouts import GPT, LLAMA, VOCAB, batch, config_of

CTX = single_process_context()
FULL = "--recompute-granularity full --recompute-method {} --recompute-num-layers {} "


def full(method: str, num_layers: int) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=num_layers)


def test_groups_of_layers():
    assert layer_runs(RecomputeConfig(), 3) == [LayerRun(range(3), False)]
    assert layer_runs(RecomputeConfig(recompute_activations=True), 3) == [LayerRun(range(3), False)]
    assert layer_runs(full("uniform", 2), 5) == [(range(2), True), (range(2, 4), True), (range(4, 5), True)]
    assert layer_runs(full("block", 2), 3) == [(range(1), True), (range(1, 2), True), (range(2, 3), False)]
    assert layer_runs(full("block", 9), 1) == [(range(1), True), (range(1, 1), False)]
    assert layer_runs(full("uniform", 4), 0) == []


class Allocations(TorchDispatchMode):
    """Every tensor that is made inside, views of `weights` apart, to be asked which of them still live."""

    def __init__(self, weights: Iterable[torch.Tensor]):
        super().__init__()
        self.weights = {weight.data_ptr() for weight in weights}
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.weights:
                    self.made[StorageWeakRef(storage)] = storage.nbytes()
        return out

    @property
    def live_bytes(self) -> int:
        return sum(size for storage, size in self.made.items() if not storage.expired())


def kept_by_forward(flags: str) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Bytes that live between forward and backward beside the weights, the loss, and all gradients."""
    (stage,) = build_stages(config_of(f"{flags} ", Mesh()), CTX, VOCAB)
    tokens = batch(0)
    with Allocations(stage.parameters()) as allocations:
        loss = stage(None, tokens).loss_sum
    kept = allocations.live_bytes
    return kept, loss.detach(), list(torch.autograd.grad(loss, list(stage.parameters())))


@pytest.mark.parametrize("model", [GPT.format(dropout=0.2), LLAMA.format(dropout=0.2)], ids=["gpt", "llama"])
def test_less_is_kept_and_every_gradient_is_the_same(model):
    everything, expected, gradients = kept_by_forward(model)
    sizes = []
    for flags in (
        "--recompute-activations --recompute-modules core_attn mlp",
        FULL.format("block", 2),
        FULL.format("uniform", 1),
    ):
        kept, loss, got = kept_by_forward(f"{model} {flags}")
        assert torch.equal(loss, expected) and all(map(torch.equal, got, gradients))
        sizes.append(kept)
    assert sizes[2] < sizes[1] < everything and sizes[0] < everything


def test_full_recomputation_keeps_one_input_a_layer():
    """Uniform over single layers: 4 bytes x s x b x h for each layer more, in fp32."""
    few, *_ = kept_by_forward(f"{GPT.format(dropout=0)} {FULL.format('uniform', 1)}")
    many, *_ = kept_by_forward(f"{GPT.format(dropout=0)} --num-layers 7 {FULL.format('uniform', 1)}")
    assert many - few == (7 - 4) * 4 * 16 * 2 * 32


def test_evaluation_keeps_nothing():
    (stage,) = build_stages(config_of(f"{LLAMA.format(dropout=0)} {FULL.format('uniform', 1)}", Mesh()), CTX, VOCAB)
    with torch.no_grad():
        assert not stage(None, batch(0)).loss_sum.requires_grad
