"""Collectives on threads and on gloo: the same bits, groups of one return their input, inputs are left alone."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.collectives import (
    all_gather,
    all_gather_into_,
    all_gather_object,
    all_reduce,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    reduce_scatter,
    reduce_scatter_into_,
)
from megatron.distributed.context import single_process_context
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import BACKENDS, run_ranks

both = pytest.mark.parametrize("backend", BACKENDS)


def every_collective(ctx, dtype):
    group = ctx.tp
    x = (torch.arange(8.0).view(4, 2) * (group.rank + 1)).to(dtype)
    kept = x.clone()
    results = {
        "sum": all_reduce(x, group),
        "max": all_reduce(x, group, op="max"),
        "min": all_reduce(x, group, op="min"),
        "gather": all_gather(x, group),
        "gather last": all_gather(x, group, dim=-1),
        "scatter": reduce_scatter(x, group),
        "scatter last": reduce_scatter(x, group, dim=1),
        "broadcast": broadcast(x, group, src=1),
        "all_to_all": all_to_all(x, group),
    }
    barrier(group)
    assert torch.equal(x, kept), "an input was changed"
    return results


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_values(backend, dtype):
    x = torch.arange(8.0).view(4, 2).to(dtype)
    for rank, got in enumerate(run_ranks(2, every_collective, dtype, mesh=Mesh(tp=2), backend=backend)):
        expected = {
            "sum": 3 * x,
            "max": 2 * x,
            "min": x,
            "gather": torch.cat([x, 2 * x]),
            "gather last": torch.cat([x, 2 * x], dim=1),
            "scatter": 3 * x[2 * rank : 2 * rank + 2],
            "scatter last": 3 * x[:, rank : rank + 1],
            "broadcast": 2 * x,
            "all_to_all": torch.cat([x[2 * rank : 2 * rank + 2], 2 * x[2 * rank : 2 * rank + 2]]),
        }
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def in_place(ctx):
    group = ctx.dp_cp
    flat = torch.arange(6.0) + group.rank
    works = [all_reduce_(flat, group, async_op=True)]
    for work in works:
        work.wait()
    shard = torch.empty(3)
    reduce_scatter_into_(shard, flat, group)
    whole = torch.empty(6)
    all_gather_into_(whole, shard, group, async_op=True).wait()
    return whole


@both
def test_reduce_scatter_and_gather_are_inverse(backend):
    for whole in run_ranks(2, in_place, backend=backend):
        assert torch.equal(whole, 2 * (2 * torch.arange(6.0) + 1))


def objects(ctx):
    return all_gather_object({"rank": ctx.rank}, ctx.world), broadcast_object(f"from {ctx.rank}", ctx.world, src=1)


@both
def test_objects_travel(backend):
    assert run_ranks(3, objects, backend=backend) == [([{"rank": 0}, {"rank": 1}, {"rank": 2}], "from 1")] * 3


def test_a_group_of_one_returns_its_input():
    group = single_process_context().tp
    x = torch.arange(4.0)
    for result in (all_reduce(x, group), all_gather(x, group), reduce_scatter(x, group), broadcast(x, group)):
        assert result is x
    out = torch.empty(4)
    all_gather_into_(out, x, group)
    assert torch.equal(out, x)
    reduce_scatter_into_(out, 2 * x, group)
    assert torch.equal(out, 2 * x)
    all_reduce_(out, group).wait()
    assert torch.equal(out, 2 * x)
    assert all_gather_object(1, group) == [1]
    barrier(group)


def uneven(ctx):
    rows = torch.full((3, 2), float(ctx.rank))
    return all_to_all(
        rows, ctx.world, out_splits=[1, 2] if ctx.rank == 0 else [2, 1], in_splits=[1, 2] if ctx.rank == 0 else [2, 1]
    )


@both
def test_uneven_parts(backend):
    assert [r[:, 0].tolist() for r in run_ranks(2, uneven, backend=backend)] == [[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
