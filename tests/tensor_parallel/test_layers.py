"""Split linear layers against the whole matrix: output, input gradient, weight and bias gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron.distributed.context import single_process_context
from megatron.ops.linear import linear_backend
from megatron.tensor_parallel.column_linear import SplitInput, column_linear
from megatron.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, residual_partial_over
from megatron.topology.mesh import Mesh
from megatron.topology.param_spec import Normal, ParamSpec
from tests.helpers.ranks import run_ranks

S, B, H, OUT = 8, 2, 6, 8
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def _tensor(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _specs(kind):
    column = kind == "column"
    axes = ("tp", None) if column else (None, "tp")
    size = (OUT, H) if column else (H, OUT)
    weight = ParamSpec(name="w", shape=size, axes=axes, init=Normal(1.0))
    bias = ParamSpec(name="b", shape=size[:1], axes=axes[:1], init=Normal(1.0))
    return weight, bias


def _run(ctx, kind):
    """(output, dx, dw, db) of this rank, the input and output gradient cut from whole ones."""
    sequence = S // ctx.tp.size
    mine = slice(ctx.tp.rank * sequence, (ctx.tp.rank + 1) * sequence) if ctx.sequence_parallel else slice(None)
    columns = slice(ctx.tp.rank * OUT // ctx.tp.size, (ctx.tp.rank + 1) * OUT // ctx.tp.size)
    if kind == "column":
        layer = ColumnParallelLinear(ctx, *_specs(kind))
        x, g = _tensor(1, S, B, H)[mine], _tensor(2, S, B, OUT)[..., columns]
    else:
        layer = RowParallelLinear(ctx, *_specs(kind))
        x, g = _tensor(1, S, B, OUT)[..., columns], _tensor(2, S, B, H)[mine]
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad, layer.weight.detach(), layer.bias.detach()


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(("size", "sequence_parallel"), LAYOUTS)
def test_equals_the_whole_matrix(kind, size, sequence_parallel):
    ranks = run_ranks(
        size, _run, kind, mesh=Mesh(tp=size), sequence_parallel=sequence_parallel, params_dtype=torch.float64
    )
    outputs, dxs, dws, dbs, weights, biases = zip(*ranks, strict=True)
    sequence_dim = 0 if sequence_parallel else None
    column = kind == "column"
    x = _tensor(1, S, B, H if column else OUT).requires_grad_()
    g = _tensor(2, S, B, OUT if column else H)
    weight = torch.cat(weights, 0 if column else 1).requires_grad_()
    bias = (torch.cat(biases) if column else biases[0]).clone().requires_grad_()
    y = F.linear(x, weight, bias)
    y.backward(g)

    def whole(parts, dim):
        if dim is None:
            assert all(torch.equal(parts[0], part) for part in parts)
            return parts[0]
        return torch.cat(parts, dim)

    torch.testing.assert_close(whole(outputs, -1 if column else sequence_dim), y.detach())
    torch.testing.assert_close(whole(dxs, sequence_dim if column else -1), x.grad)
    torch.testing.assert_close(torch.cat(dws, 0 if column else 1), weight.grad)
    if column:
        torch.testing.assert_close(torch.cat(dbs), bias.grad)
    elif sequence_parallel:  # a partial sum on each rank
        torch.testing.assert_close(sum(dbs), bias.grad)
    else:
        torch.testing.assert_close(whole(dbs, None), bias.grad)


def test_chosen_rows_and_gradcheck():
    ctx = single_process_context(params_dtype=torch.float64)
    how = SplitInput(ctx.tp, False, linear_backend("local", ctx.device, torch.float64))
    rows = (slice(1, 3), slice(5, 8))
    x, weight, bias = (
        _tensor(1, 3, 2, H).requires_grad_(), _tensor(2, OUT, H).requires_grad_(), _tensor(3, OUT).requires_grad_()
    )  # fmt: skip
    picked = [1, 2, 5, 6, 7]
    torch.testing.assert_close(column_linear(x, weight, bias, how, rows), F.linear(x, weight[picked], bias[picked]))
    assert torch.autograd.gradcheck(lambda *a: column_linear(*a, how, rows), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *a: column_linear(*a, how), (x, weight, bias))


def _kept(ctx):
    layer = ColumnParallelLinear(ctx, *_specs("column"))
    x = torch.randn(S // 2, B, H, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        layer(x)
    return saved, residual_partial_over(ctx)


def test_sequence_parallel_column_keeps_the_shard():
    for saved, partial in run_ranks(2, _kept, mesh=Mesh(tp=2), sequence_parallel=True, params_dtype=torch.float64):
        assert sorted(saved) == [(4,), (4, 2, 6), (4, 6)]
        assert partial == ("tp",)
