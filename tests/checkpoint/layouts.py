"""A network of specs laid out over any mesh without communication: every rank's parameters and optimizer states as
pieces.

Values are functions of (tensor name, logical index), so what a rank must hold in any layout is known without a
checkpoint.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.pieces import Piece, narrow, parameter_piece, range_pieces
from megatron.checkpoint.save import save_checkpoint
from megatron.topology.mesh import Mesh
from megatron.topology.param_spec import ParamSpec
from tests.helpers.ranks import run_ranks

HIDDEN, VOCAB, LAYERS, GROUPS = 24, 101, 4, 2
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Layout:
    """How a test network is spread."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: bool = False
    sequence_parallel: bool = False
    divisor: int = 8
    order: str = "tp-cp-dp-pp"
    dtype: torch.dtype = torch.bfloat16
    layers: int = LAYERS
    vocab: int = VOCAB

    @property
    def mesh(self) -> Mesh:
        return Mesh(tp=self.tp, pp=self.pp, dp=self.dp, order=self.order)


def layer_specs(layout: Layout, layer: int) -> list[ParamSpec]:
    """Fused qkv (kv replicated where tp exceeds the groups), gated fc1, column and row parallel weights, vectors."""
    replicated = ("tp",) if layout.sequence_parallel else ()
    split = GROUPS % layout.tp == 0
    base = f"decoder.layers.{layer}"
    return [
        ParamSpec(name=f"{base}.input_layernorm.weight", shape=(HIDDEN,), axes=(None,), partial_over=replicated),
        ParamSpec(
            name=f"{base}.self_attention.linear_qkv.weight",
            shape=(GROUPS, 4, 6, HIDDEN),
            axes=("tp" if split else None, None, None, None),
            fold=3,
            partial_over=() if split else ("tp",),
        ),
        ParamSpec(
            name=f"{base}.self_attention.linear_proj.weight", shape=(HIDDEN, 4, 6), axes=(None, "tp", None), fold=1
        ),
        ParamSpec(name=f"{base}.mlp.linear_fc1.weight", shape=(2, 20, HIDDEN), axes=(None, "tp", None), fold=2),
        ParamSpec(name=f"{base}.mlp.linear_fc1.bias", shape=(2, 20), axes=(None, "tp"), fold=2),
        ParamSpec(name=f"{base}.mlp.linear_fc2.weight", shape=(HIDDEN, 20), axes=(None, "tp"), fold=1),
    ]


def specs_of_stage(layout: Layout, stage: int) -> list[ParamSpec]:
    """Contiguous layers a stage, the first ones more; the tied embedding on the first and the last."""
    multiple = layout.divisor * layout.tp
    padded = -(-layout.vocab // multiple) * multiple
    embedding = ParamSpec(
        name="embedding.word_embeddings.weight",
        shape=(padded, HIDDEN),
        axes=("tp", None),
        valid=(layout.vocab, HIDDEN),
        partial_over=("embd",),
    )
    bounds = [-(-layout.layers * s // layout.pp) for s in range(layout.pp + 1)]
    specs = [spec for layer in range(bounds[stage], bounds[stage + 1]) for spec in layer_specs(layout, layer)]
    return [embedding, *specs] if stage in (0, layout.pp - 1) else specs


def expected(name: str, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """What the piece's memory must hold: real values where the logical index is real, zero in the padding."""
    index = torch.zeros((), dtype=torch.float64)
    valid = torch.ones((), dtype=torch.bool)
    for dim, (offset, size) in enumerate(zip(*piece.box)):
        along = torch.arange(offset, offset + size).view([-1] + [1] * (len(piece.shape) - dim - 1))
        index = index * 1009 + along
        valid = valid & (along < piece.valid[dim])
    value = torch.sin(index + zlib.crc32(name.encode()) % 1000)
    return (value * valid).to(dtype).expand(piece.box.size)


def rank_pieces(layout: Layout, rank: int, fill: bool, states: tuple[str, ...] = STATES) -> list[Piece]:
    """All pieces of one rank: parameters and flat optimizer states, filled with their values or with poison."""
    mesh, place = layout.mesh, layout.mesh.coordinates(rank)
    pieces = []
    for spec in specs_of_stage(layout, place.pp):
        stored = torch.full(spec.stored_shape(mesh), -7.0, dtype=layout.dtype)
        pieces.append(parameter_piece(spec, mesh, place, stored))
        group = mesh.ranks_of(spec.gradient_axes, rank)
        count, index = (len(group), group.index(rank)) if layout.zero else (1, 0)
        start, stop = stored.numel() * index // count, stored.numel() * (index + 1) // count
        for kind in states:
            flat = torch.full((stop - start,), -7.0)
            sharded = spec.gradient_axes if layout.zero else ()
            pieces += range_pieces(kind, spec, mesh, place, start, flat, sharded_over=sharded)
    if fill:
        for piece in pieces:
            piece.view.copy_(expected(piece.name, piece, piece.view.dtype))
    return pieces


def whole_of(pieces: list[Piece], name: str) -> torch.Tensor:
    """The global tensor `name` put together from what the pieces' owners write; NaN where nobody writes."""
    shape = next(piece.valid for piece in pieces if piece.name == name)
    out = torch.full(shape, float("nan"), dtype=torch.float64)
    for piece in pieces:
        if piece.name == name:
            for part in piece.written():
                if part.name == name:
                    target = narrow(out, part.box)
                    assert target.isnan().all(), f"{name}: {part.box} is written twice"
                    target.copy_(part.view)
    return out


def save_ranks(directory, layout, iteration=5, states=STATES, **options):
    """Save `layout` from all its ranks; returns the path."""

    def body(ctx):
        options.setdefault("scalars", {"consumed": iteration})
        pieces = rank_pieces(layout, ctx.rank, fill=True, states=states)
        return save_checkpoint(directory, iteration, ctx, pieces, config={"layers": layout.layers}, **options)

    return run_ranks(layout.mesh.world_size, body, mesh=layout.mesh)[0]


def load_ranks(directory, layout, states=STATES, check=True, **options):
    """Load into `layout` on all its ranks and compare every element; returns (iteration or None, lines logged)."""
    lines = []

    def body(ctx):
        pieces = rank_pieces(layout, ctx.rank, fill=False, states=states)
        checkpoint = load_checkpoint(directory, ctx, pieces, log=lines.append, **options)
        for piece in pieces if check and checkpoint else ():
            wanted = expected(piece.name, piece, piece.view.dtype)
            assert torch.equal(piece.view, wanted), f"{piece.name} at {piece.box}"
        return checkpoint and checkpoint.iteration

    iterations = run_ranks(layout.mesh.world_size, body, mesh=layout.mesh)
    assert len(set(iterations)) == 1
    return iterations[0], lines
