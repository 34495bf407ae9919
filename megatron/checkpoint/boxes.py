"""Boxes: axis-aligned blocks of a global array as (offset, size), and how flat ranges and shards cut into them.

Plain integer arithmetic. A flat range of a row-major array is the only shape that is not a box but must become some: it
cuts into at most 2 * ndim - 1 boxes, each again contiguous in the flat array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """The block of indices offset[d] <= i[d] < offset[d] + size[d]."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of indices."""
        return prod(self.size)

    def shifted(self, by: Sequence[int]) -> Box:
        """The same block `by` further along each dimension."""
        return Box(tuple(o + b for o, b in zip(self.offset, by)), self.size)

    def relative_to(self, other: Box) -> Box:
        """The same block counted from the corner of `other`."""
        return Box(tuple(o - c for o, c in zip(self.offset, other.offset)), self.size)


def whole(shape: Sequence[int]) -> Box:
    """The box of all indices of an array of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The indices in both, or None where there are none."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset))
    ends = (min(x + n, y + m) for x, n, y, m in zip(a.offset, a.size, b.offset, b.size))
    size = tuple(end - start for start, end in zip(offset, ends))
    return Box(offset, size) if all(n > 0 for n in size) else None


def flat_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut elements start..stop of a row-major array of `shape` into boxes, in order: (flat index of its first element,
    box).

    Every box is contiguous in the flat array. At most 2 * ndim - 1 of them: a tail of a row, whole rows, a head of a
    row, and the same again inside each partial row.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range {start}..{stop} is outside an array of shape {shape}")
    if start == stop:
        return
    if len(shape) <= 1:
        yield start, Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _within_row(shape, last, start, stop)
        return
    yield from _within_row(shape, first - 1, start, first * row)
    if last > first:
        yield first * row, Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    yield from _within_row(shape, last, last * row, stop)


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    base = index * prod(shape[1:])
    for flat, box in flat_range(shape[1:], start - base, stop - base) if stop > start else ():
        yield base + flat, Box((index, *box.offset), (1, *box.size))


def flat_span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """First flat index of `box` in a row-major array of `shape`, and one past its last."""
    first = last = 0
    for extent, offset, size in zip(shape, box.offset, box.size):
        first, last = first * extent + offset, last * extent + offset + size - 1
    return first, last + 1
