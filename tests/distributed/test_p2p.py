"""Messages: both directions at once cannot block, and messages of one pair keep their order."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.p2p import exchange
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import BACKENDS, run_ranks

both = pytest.mark.parametrize("backend", BACKENDS)


def swap(ctx, numel):
    other = 1 - ctx.pp.rank
    received = torch.empty(numel)
    works = exchange(ctx.pp, sends=[(other, torch.full((numel,), float(ctx.rank)))], receives=[(other, received)])
    for work in works:
        work.wait()
    return received[0].item(), received[-1].item()


@both
def test_two_stages_may_send_to_each_other_at_once(backend):
    """Large enough (4 MB) not to fit into a socket's buffer."""
    assert run_ranks(2, swap, 1 << 20, mesh=Mesh(pp=2), backend=backend) == [(1.0, 1.0), (0.0, 0.0)]


def ordered(ctx):
    other, first, second = 1 - ctx.pp.rank, torch.empty(1), torch.empty(2)
    works = exchange(
        ctx.pp,
        sends=[(other, torch.tensor([1.0])), (other, torch.tensor([2.0, 3.0]))],
        receives=[(other, first), (other, second)],
    )
    for work in works:
        work.wait()
    return first.tolist() + second.tolist()


@both
def test_messages_of_a_pair_keep_their_order(backend):
    assert run_ranks(2, ordered, mesh=Mesh(pp=2), backend=backend) == [[1.0, 2.0, 3.0]] * 2


def nothing(ctx):
    return exchange(ctx.pp)


def test_no_messages_is_no_work():
    assert run_ranks(2, nothing, mesh=Mesh(pp=2)) == [[], []]
