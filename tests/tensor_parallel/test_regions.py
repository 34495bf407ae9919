"""The four borders: values, and that each is the adjoint of its partner."""

from __future__ import annotations

import pytest
import torch

from megatron.tensor_parallel.regions import (
    copy_to_split,
    gather_sequence,
    leave_split,
    reduce_from_split,
    scatter_to_sequence,
)
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import run_ranks


def _values(ctx):
    generator = torch.Generator().manual_seed(ctx.rank)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    results = {}
    for border in (copy_to_split, reduce_from_split, gather_sequence, scatter_to_sequence):
        y = border(x, ctx.tp)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + ctx.rank), dtype=torch.float64)
        results[border.__name__] = (y.detach(), torch.autograd.grad(y, x, g)[0], g)
    return x.detach(), results


@pytest.mark.parametrize("size", [1, 2])
def test_values_and_gradients(size):
    ranks = run_ranks(size, _values, mesh=Mesh(tp=size))
    xs = [x for x, _ in ranks]
    for rank, (x, results) in enumerate(ranks):
        gs = {name: [r[name][2] for _, r in ranks] for name in results}
        rows = slice(rank * 4 // size, (rank + 1) * 4 // size)
        expected = {
            "copy_to_split": (x, sum(gs["copy_to_split"])),
            "reduce_from_split": (sum(xs), gs["reduce_from_split"][rank]),
            "gather_sequence": (torch.cat(xs), sum(gs["gather_sequence"])[rank * 4 : rank * 4 + 4]),
            "scatter_to_sequence": (sum(xs)[rows], torch.cat(gs["scatter_to_sequence"])),
        }
        for name, (y, dx, _) in results.items():
            torch.testing.assert_close(y, expected[name][0])
            torch.testing.assert_close(dx, expected[name][1])


def _leave(ctx):
    return leave_split(torch.ones(4, 2), ctx.tp, ctx.sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_leave_split_takes_the_layout_of_the_residual_stream(sequence_parallel):
    for y in run_ranks(2, _leave, mesh=Mesh(tp=2), sequence_parallel=sequence_parallel):
        assert y.shape == ((2, 2) if sequence_parallel else (4, 2)) and (y == 2).all()
