"""Pieces: what a rank holds of a global tensor, as views of its own memory, straight from the parameter's spec.

Padding rows of the vocabulary are stored under a name of their own: they come back for a run that pads alike, and
everybody else sees tensors without padding.

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


class Part(NamedTuple):
    """A box of a stored tensor and the memory that holds it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    view: torch.Tensor

    def shared(self, index: int, count: int) -> Iterator[Part]:
        """What the `index`-th of `count` holders of this part writes."""
        view, size = self.view, self.box.size
        if count == 1:
            yield self
        elif view.numel() < SPREAD_NUMEL or not view.is_contiguous():
            if zlib.crc32(self.name.encode()) % count == index:
                yield self
        else:
            flat, unit = view.view(-1), size[-1] if view.numel() >= count * size[-1] else 1
            rows = view.numel() // unit
            start, stop = rows * index // count * unit, rows * (index + 1) // count * unit
            for at, box in flat_range(size, start, stop):
                yield self._replace(box=box.shifted(self.box.offset), view=flat[at : at + box.numel].view(box.size))


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a named global tensor and the local memory that holds it."""

    name: str
    """Kind and parameter: "param/decoder.layers.0.mlp.linear_fc2.weight", "exp_avg/...", "master/..."."""
    shape: tuple[int, ...]
    """Global logical shape as this run allocates it, padding included."""
    valid: tuple[int, ...]
    """Global extents without padding, which is rows at the end: the shape under which the checkpoint holds it."""
    box: Box
    """Where this piece lies in the global tensor."""
    view: torch.Tensor
    """Local memory, of shape box.size; written in place on load."""
    share: Share = Share(0, 1)

    def __post_init__(self):
        assert tuple(self.view.shape) == self.box.size, f"{self.name}: view {tuple(self.view.shape)} of box {self.box}"
        assert intersect(self.box, whole(self.shape)) == self.box, f"{self.name}: {self.box} outside {self.shape}"
        assert self.valid[1:] == self.shape[1:], f"{self.name}: padding {self.valid} of {self.shape} beyond dim 0"

    @property
    def padding_name(self) -> str:
        """Under which the padding rows of this tensor are stored, apart from it."""
        return f"padding/{self.name}"

    def real(self) -> Part | None:
        """The part without padding; None when all of it is padding."""
        return self._part(self.name, self.valid, 0, self.valid[0])

    def padding(self) -> Part | None:
        """The part that is padding, under a name of its own; None when there is none."""
        return self._part(self.padding_name, self.shape, self.valid[0], self.shape[0])

    def written(self) -> Iterator[Part]:
        """The parts of this piece that this rank writes: those of all holders make up the piece, once."""
        for part in (self.real(), self.padding()):
            if part is not None and self.share.count:
                yield from part.shared(*self.share)

    def _part(self, name: str, shape: tuple[int, ...], first: int, last: int) -> Part | None:
        rows = Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
        box = intersect(self.box, rows)
        return None if box is None else Part(name, shape, box, narrow(self.view, box.relative_to(self.box)))


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
