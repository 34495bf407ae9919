"""Pieces: what a rank holds of a global tensor, as views of its own memory, straight from the parameter's spec.

A parameter shard is one box of the logical shape. A flat range of it (a ZeRO shard of an optimizer state) is a few
boxes, each a view of the flat buffer: nothing is gathered, and the state is stored under the parameter's logical shape,
so any tensor, pipeline or data parallel layout reads what any other wrote. Which of several equal copies is written, or
which part of it, is arithmetic on the mesh coordinates; no communication.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from megatron.checkpoint.boxes import Box, flat_range, intersect, whole
from megatron.topology.mesh import Coordinates, Mesh
from megatron.topology.param_spec import ParamSpec

SPREAD_NUMEL = 1 << 16
"""Copies of fewer elements than this are written whole by one of their holders, larger ones in even parts by all."""


class Share(NamedTuple):
    """Which of `count` equal copies this rank holds; `count` 0: it never writes its copy."""

    index: int
    count: int


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a named global tensor and the local memory that holds it."""

    name: str
    """Kind and parameter: "param/decoder.layers.0.mlp.linear_fc2.weight", "exp_avg/...", "master/..."."""
    shape: tuple[int, ...]
    """Global logical shape as this run allocates it, padding included."""
    valid: tuple[int, ...]
    """Global extents without padding: the shape the checkpoint holds."""
    box: Box
    """Where this piece lies in the global tensor."""
    view: torch.Tensor
    """Local memory, of shape box.size; written in place on load."""
    share: Share = Share(0, 1)

    def __post_init__(self):
        assert tuple(self.view.shape) == self.box.size, f"{self.name}: view {tuple(self.view.shape)} of box {self.box}"
        assert intersect(self.box, whole(self.shape)) == self.box, f"{self.name}: {self.box} outside {self.shape}"

    def real(self) -> tuple[Box, torch.Tensor] | None:
        """The box and view without padding; None when all of it is padding."""
        box = intersect(self.box, whole(self.valid))
        return None if box is None else (box, narrow(self.view, box.relative_to(self.box)))

    def written(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of this piece that this rank writes: those of all holders make up the unpadded piece, once."""
        real = self.real()
        index, count = self.share
        if real is None or count == 0:
            return
        box, view = real
        if count == 1:
            yield real
        elif view.numel() < SPREAD_NUMEL or not view.is_contiguous():
            if zlib.crc32(self.name.encode()) % count == index:
                yield real
        else:
            flat, unit = view.view(-1), box.size[-1] if view.numel() >= count * box.size[-1] else 1
            rows = view.numel() // unit
            start, stop = rows * index // count * unit, rows * (index + 1) // count * unit
            for at, part in flat_range(box.size, start, stop):
                yield part.shifted(box.offset), flat[at : at + part.numel].view(part.size)


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of `tensor` at `box`."""
    for dim, (offset, size) in enumerate(zip(*box)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def share_of(spec: ParamSpec, mesh: Mesh, place: Coordinates, sharded_over: Sequence[str] = ()) -> Share:
    """Which of the equal copies of a shard of `spec` the rank at `place` holds.

    Copies differ in the axes that neither shard the parameter nor are in `sharded_over` (the axes a ZeRO shard is cut
    over). Of a tied embedding held by two stages the first stage's copy is the one written.
    """
    if "embd" in spec.partial_over and "embd" not in sharded_over and place.pp != 0:
        return Share(0, 0)
    index, count = 0, 1
    for axis in ("dp", "cp", "tp"):
        if axis not in spec.axes and axis not in sharded_over:
            index, count = index * mesh.size(axis) + getattr(place, axis), count * mesh.size(axis)
    return Share(index, count)


def parameter_piece(
    spec: ParamSpec, mesh: Mesh, place: Coordinates, stored: torch.Tensor, *, kind: str = "param"
) -> Piece:
    """The piece of a parameter whose stored tensor (of any shape with the shard's numel, contiguous) is `stored`."""
    offset, size = zip(*spec.local_slice(mesh, place))
    view = stored.detach().view(size)
    return Piece(
        f"{kind}/{spec.name}", spec.shape, spec.valid_shape, Box(offset, size), view, share_of(spec, mesh, place)
    )


def range_pieces(
    kind: str,
    spec: ParamSpec,
    mesh: Mesh,
    place: Coordinates,
    start: int,
    flat: torch.Tensor,
    *,
    sharded_over: Sequence[str] = (),
) -> list[Piece]:
    """The pieces of elements start .. start + len(flat) of the rank's stored shard of `spec`, which `flat` (1-D) holds.

    `sharded_over` names the mesh axes over which the shard is cut into such ranges: those of ZeRO's group, or none
    where every replica holds the whole state.
    """
    offset, size = zip(*spec.local_slice(mesh, place))
    assert flat.dim() == 1 and start + flat.numel() <= prod(size), f"{spec.name}: {start} + {flat.numel()} of {size}"
    share = share_of(spec, mesh, place, sharded_over)
    flat = flat.detach()
    return [
        Piece(
            f"{kind}/{spec.name}",
            spec.shape,
            spec.valid_shape,
            box.shifted(offset),
            flat[at - start : at - start + box.numel].view(box.size),
            share,
        )
        for at, box in flat_range(size, start, start + flat.numel())
    ]
