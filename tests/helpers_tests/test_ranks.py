"""run_ranks itself: results in rank order, errors with the rank's number, groups of the mesh, hangs reported."""

from __future__ import annotations

import os
import time

import pytest
import torch

from megatron.distributed.collectives import all_gather, all_reduce, all_reduce_, barrier, reduce_scatter
from megatron.distributed.p2p import exchange
from megatron.topology.mesh import Mesh
from tests.helpers.meeting import CommunicationError
from tests.helpers.ranks import BACKENDS, run_ranks

both = pytest.mark.parametrize("backend", BACKENDS)


def sum_over_axes(ctx, scale):
    x = torch.tensor([float(ctx.rank)]) * scale
    return [all_reduce(x, ctx.group(*axes)).item() for axes in (("tp",), ("pp",), ("tp", "cp", "dp", "pp"))]


@both
def test_groups_are_those_of_the_mesh(backend):
    results = run_ranks(4, sum_over_axes, 10.0, mesh=Mesh(tp=2, pp=2), backend=backend)
    assert results == [[10.0, 20.0, 60.0], [10.0, 40.0, 60.0], [50.0, 20.0, 60.0], [50.0, 40.0, 60.0]]


def ring(ctx):
    group, received = ctx.pp, torch.empty(3)
    ahead, behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for work in exchange(group, sends=[(ahead, torch.full((3,), float(ctx.rank)))], receives=[(behind, received)]):
        work.wait()
    return received.tolist()


@both
def test_messages_go_round_a_ring(backend):
    assert run_ranks(3, ring, mesh=Mesh(pp=3), backend=backend) == [[2.0] * 3, [0.0] * 3, [1.0] * 3]


def gather_and_scatter(ctx):
    x = torch.arange(8.0).view(2, 4) + ctx.rank
    return all_gather(x, ctx.tp, dim=1), reduce_scatter(x, ctx.tp, dim=1)


@both
def test_gather_and_scatter_along_any_dimension(backend):
    x = torch.arange(8.0).view(2, 4)
    for rank, (whole, part) in enumerate(run_ranks(2, gather_and_scatter, mesh=Mesh(tp=2), backend=backend)):
        assert torch.equal(whole, torch.cat([x, x + 1], dim=1))
        assert torch.equal(part, (2 * x + 1)[:, 2 * rank : 2 * rank + 2])


def fail_on(ctx, bad_rank):
    if ctx.rank == bad_rank:
        raise KeyError("no such layer")
    barrier(ctx.world)


@both
def test_an_error_keeps_its_type_and_names_its_rank(backend):
    started = time.monotonic()
    with pytest.raises(KeyError, match=r"\[rank 1\] no such layer"):
        run_ranks(3, fail_on, 1, backend=backend)
    assert time.monotonic() - started < 60
    assert run_ranks(2, sum_over_axes, 1.0, mesh=Mesh(tp=2), backend=backend)[0] == [1.0, 0.0, 1.0], "still usable"


def sleep_if_second(ctx, seconds):
    if ctx.rank == 1:
        time.sleep(seconds)


def test_a_hung_process_is_shown_where_it_was():
    with pytest.raises(RuntimeError, match=r"(?s)no answer from ranks 1 after 8 s.*sleep_if_second"):
        run_ranks(2, sleep_if_second, 600.0, backend="gloo", timeout_s=8.0)


def die_if_second(ctx):
    if ctx.rank == 1:
        os._exit(7)
    barrier(ctx.world)


def test_a_dead_process_is_reported_with_its_exit_code():
    with pytest.raises(RuntimeError, match=r"\[rank 1\] the process died, exit code 7|Connection|closed"):
        run_ranks(2, die_if_second, backend="gloo", timeout_s=60.0)


def disagree(ctx):
    all_reduce_(torch.ones(ctx.rank + 1), ctx.world)


def leave_a_message(ctx):
    if ctx.pp.rank == 0:
        exchange(ctx.pp, sends=[(1, torch.ones(1))])


def test_disagreeing_threads_and_lost_messages_are_named():
    with pytest.raises(CommunicationError, match=r"(?s)\[rank [01]\] ranks disagree in all_reduce .*\[1\].*\[2\]"):
        run_ranks(2, disagree)
    with pytest.raises(CommunicationError, match=r"left open:\s+message from rank 0 to rank 1 .* never by rank 1"):
        run_ranks(2, leave_a_message, mesh=Mesh(pp=2))


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="not 3"):
        run_ranks(3, ring, mesh=Mesh(pp=2))
    with pytest.raises(ValueError, match="'mpi' is not one of"):
        run_ranks(1, ring, backend="mpi")
