"""Pieces: every element is written by exactly one rank of any layout, from memory that was never copied."""

import random
from math import prod

import pytest
import torch

from megatron.checkpoint import pieces as pieces_module
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.pieces import Piece, Share, narrow, parameter_piece, range_pieces, share_of
from megatron.topology.mesh import Mesh
from megatron.topology.param_spec import ParamSpec
from tests.checkpoint.layouts import Layout, expected, rank_pieces, whole_of

LAYOUTS = [
    Layout(),
    Layout(tp=2, dp=2, zero=True),
    Layout(tp=4, dp=3, zero=True, sequence_parallel=True),
    Layout(pp=3, dp=2, tp=2, sequence_parallel=True),
    Layout(pp=2, dp=2, zero=True, divisor=50, order="tp-cp-pp-dp"),
    Layout(pp=4, tp=4, dp=2),
]


@pytest.mark.parametrize("spread", [1, 1 << 16], ids=["spread", "whole"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_is_written_once(layout, spread, monkeypatch):
    monkeypatch.setattr(pieces_module, "SPREAD_NUMEL", spread)
    pieces = [piece for rank in range(layout.mesh.world_size) for piece in rank_pieces(layout, rank, fill=True)]
    for name in {piece.name for piece in pieces}:
        found = whole_of(pieces, name)  # fails where an element is written twice
        assert not found.isnan().any(), f"{name} is not written everywhere"
        dtype = next(piece.view.dtype for piece in pieces if piece.name == name)
        shape = tuple(found.shape)
        all_of_it = Piece(name, shape, shape, Box((0,) * len(shape), shape), torch.empty(shape))
        assert torch.equal(found, expected(name, all_of_it, dtype).double())


@pytest.mark.parametrize("seed", range(100))
def test_random_specs_cut_exactly(seed):
    """Any logical shape, fold, sharded dimension, padding, TP x DP: what ranks write is the logical tensor, once."""
    rng = random.Random(seed)
    tp, dp = rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 5])
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    axis = rng.choice([None, *range(len(shape))])
    valid = None
    if axis is not None:
        shape[axis] *= tp
    if rng.random() < 0.5:
        valid = (rng.randint(1, shape[0]), *shape[1:])
    spec = ParamSpec(
        name=f"w{seed}",
        shape=tuple(shape),
        axes=tuple("tp" if dim == axis else None for dim in range(len(shape))),
        fold=rng.randint(1, len(shape)),
        valid=valid,
    )
    mesh = Mesh(tp=tp, dp=dp)
    logical = torch.arange(prod(shape), dtype=torch.float64).view(shape)
    pieces = []
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        shard = narrow(logical, Box(*zip(*spec.local_slice(mesh, place)))).contiguous().view(spec.stored_shape(mesh))
        start = shard.numel() * place.dp // dp
        flat = shard.view(-1)[start : shard.numel() * (place.dp + 1) // dp]
        cut = range_pieces("state", spec, mesh, place, start, flat, sharded_over=spec.gradient_axes)
        assert len(cut) <= 2 * len(shape) - 1
        assert all(piece.view.data_ptr() >= flat.data_ptr() for piece in cut) and sum(
            piece.view.numel() for piece in cut
        ) == len(flat)
        pieces += [*cut, parameter_piece(spec, mesh, place, shard)]
    real = narrow(logical, Box((0,) * len(shape), spec.valid_shape))
    for kind in ("state", "param"):
        if any(piece.name == f"{kind}/{spec.name}" for piece in pieces):
            assert torch.equal(whole_of(pieces, f"{kind}/{spec.name}"), real)


def test_pieces_are_views_of_the_callers_memory():
    spec, mesh = ParamSpec(name="w", shape=(2, 4, 3), axes=(None, "tp", None), fold=2), Mesh(tp=2)
    stored = torch.nn.Parameter(torch.zeros(4, 3))
    parameter_piece(spec, mesh, mesh.coordinates(0), stored).view[1, 0] = 5.0
    assert stored[2].eq(5).all() and stored.sum() == 15


def test_a_tied_embedding_is_written_by_the_first_stage_unless_sharded_over_both():
    spec = ParamSpec(name="e", shape=(8, 2), axes=("tp", None), partial_over=("embd",))
    mesh = Mesh(tp=2, pp=4, dp=2)
    last = mesh.coordinates(mesh.world_size - 1)
    assert share_of(spec, mesh, last) == Share(0, 0)
    assert share_of(spec, mesh, mesh.coordinates(0)) == Share(0, 2)
    assert share_of(spec, mesh, last, sharded_over=spec.gradient_axes) == Share(0, 1)


def test_large_copies_are_spread_evenly_over_their_holders():
    spec, mesh = ParamSpec(name="w", shape=(1000, 256), axes=(None, None)), Mesh(dp=4, tp=2)
    copies = [parameter_piece(spec, mesh, mesh.coordinates(rank), torch.zeros(1000, 256)) for rank in range(8)]
    sizes = [sum(part.view.numel() for part in copy.written()) for copy in copies]
    assert sum(sizes) == 256_000 and max(sizes) - min(sizes) <= 256
