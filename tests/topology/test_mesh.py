"""Mesh arithmetic: Megatron's rank order, groups that partition the world, the tied-embedding group."""

from __future__ import annotations

from itertools import product

import pytest

from megatron.topology.mesh import Coordinates, Mesh, canonical_axes

LAYOUTS = [
    Mesh(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    for tp, cp, dp, pp, order in product((1, 2, 4), (1, 2), (1, 3), (1, 2, 4), ("tp-cp-dp-pp", "tp-cp-pp-dp"))
]


def test_ranks_follow_megatron_order():
    """Megatron's documented example, 16 ranks, tp 2, pp 4: neighbours share a tensor group, stages are far apart."""
    mesh = Mesh(tp=2, pp=4, dp=2)
    assert mesh.groups(("tp",)) == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert mesh.groups(("pp",)) == [(rank, rank + 4, rank + 8, rank + 12) for rank in range(4)]
    assert mesh.groups(("dp",)) == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]


def test_tp_pp_dp_order_puts_stages_next_to_each_other():
    mesh = Mesh(tp=2, pp=4, dp=2, order="tp-cp-pp-dp")
    assert mesh.groups(("pp",))[0] == (0, 2, 4, 6)
    assert mesh.groups(("dp",))[0] == (0, 8)


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_rank_and_coordinates_are_inverse(mesh):
    seen = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert len(set(seen)) == mesh.world_size
    assert [mesh.rank(place) for place in seen] == list(range(mesh.world_size))


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("dp", "cp"), ("dp", "cp", "tp"), ("tp", "cp", "dp", "pp"), ()])
def test_groups_partition_the_world(mesh, axes):
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.size(*axes)}
    for group in groups:
        assert list(group) == sorted(group)
        assert all(mesh.ranks_of(axes, rank) == group for rank in group)
        fixed = [axis for axis in ("tp", "cp", "dp", "pp") if axis not in axes]
        assert len({tuple(getattr(mesh.coordinates(rank), axis) for axis in fixed) for rank in group}) == 1


def test_tied_embeddings_live_on_the_first_and_the_last_stage():
    mesh = Mesh(tp=2, pp=4)
    assert mesh.ranks_of(("embd",), 0) == (0, 6)
    assert mesh.ranks_of(("embd",), 2) == ()
    assert mesh.groups(("embd",)) == [(0, 6), (1, 7)]
    assert mesh.size("dp", "cp", "embd") == 2
    assert Mesh(tp=2).groups(("embd",)) == [(0,), (1,)]


def test_axis_sets_have_one_order():
    assert canonical_axes(["tp", "dp", "cp"]) == canonical_axes(("cp", "tp", "dp")) == ("dp", "cp", "tp")


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="axis tp has size 0"):
        Mesh(tp=0)
    with pytest.raises(ValueError, match="'pp-tp' is not one of"):
        Mesh(order="pp-tp")
    with pytest.raises(ValueError, match="rank 4 is outside a world of 4"):
        Mesh(tp=4).coordinates(4)
    with pytest.raises(ValueError, match=r"unknown mesh axes \['ep'\]"):
        Mesh().ranks_of(("ep",), 0)


def test_rank_of_coordinates():
    assert Mesh(tp=2, cp=2, dp=2, pp=2).rank(Coordinates(tp=1, cp=0, dp=1, pp=1)) == 1 + 4 + 8
