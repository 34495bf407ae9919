"""The vocabulary-split embedding against `F.embedding`, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron.distributed.context import single_process_context
from megatron.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.topology.mesh import Mesh
from megatron.topology.param_spec import Normal, ParamSpec
from tests.helpers.ranks import run_ranks

S, B, H, V = 8, 2, 6, 12
SPEC = ParamSpec(name="e", shape=(V, H), axes=("tp", None), init=Normal(1.0))
TOKENS = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(0))
G = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _run(ctx):
    layer = VocabParallelEmbedding(ctx, SPEC)
    y = layer(TOKENS)
    size = S // ctx.tp.size
    y.backward(G[ctx.tp.rank * size : (ctx.tp.rank + 1) * size] if ctx.sequence_parallel else G)
    return y.detach(), layer.weight.detach(), layer.weight.grad


@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_equals_the_whole_table(size, sequence_parallel):
    ranks = run_ranks(size, _run, mesh=Mesh(tp=size), sequence_parallel=sequence_parallel, params_dtype=torch.float64)
    outputs, weights, grads = zip(*ranks, strict=True)
    weight = torch.cat(weights).requires_grad_()
    expected = F.embedding(TOKENS.t(), weight)
    expected.backward(G)
    # One term of each sum is not zero, so every layout is equal to the bit.
    for y in [torch.cat(outputs)] if sequence_parallel else outputs:
        assert torch.equal(y, expected.detach())
    torch.testing.assert_close(torch.cat(grads), weight.grad)


def test_low_precision_gradients_of_a_frequent_token_do_not_saturate():
    layer = VocabParallelEmbedding(single_process_context(params_dtype=torch.bfloat16), SPEC)
    layer(torch.zeros(1, 1000, dtype=torch.int64)).backward(torch.ones(1000, 1, H, dtype=torch.bfloat16))
    assert (layer.weight.grad[0] == 1000).all()  # bf16 sums of ones stop at 256
