"""The ranks of a run as a grid with named axes: coordinates and groups as plain arithmetic.

Axes from fastest to slowest, as Megatron orders them: tp, cp, dp, pp (or tp, cp, pp, dp with --use-tp-pp-dp-mapping).
The pseudo axis "embd" is the part of "pp" that holds a copy of a tied embedding: the first and the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

AXES = ("pp", "dp", "cp", "tp", "embd")
ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp")


class Coordinates(NamedTuple):
    """A rank's place on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


def canonical_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """The axis set in the one order used as a key; ValueError for an unknown axis."""
    wanted = set(axes)
    unknown = wanted - set(AXES)
    if unknown:
        raise ValueError(f"unknown mesh axes {sorted(unknown)}; known: {AXES}")
    return tuple(axis for axis in AXES if axis in wanted)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes of a run of tp * cp * dp * pp ranks."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "tp-cp-dp-pp"

    def __post_init__(self):
        if self.order not in ORDERS:
            raise ValueError(f"mesh order {self.order!r} is not one of {ORDERS}")
        for axis in ("tp", "cp", "dp", "pp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh axis {axis} has size {getattr(self, axis)}; sizes start at 1")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def size(self, *axes: str) -> int:
        """Number of ranks in a group that varies over `axes`."""
        total = 1
        for axis in canonical_axes(axes):
            total *= min(self.pp, 2) if axis == "embd" else getattr(self, axis)
        return total

    def rank(self, coordinates: Coordinates) -> int:
        """The global rank at `coordinates`."""
        rank, stride = 0, 1
        for axis in self.order.split("-"):
            rank += stride * getattr(coordinates, axis)
            stride *= getattr(self, axis)
        return rank

    def coordinates(self, rank: int) -> Coordinates:
        """The place of global `rank`; ValueError outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        place = {}
        for axis in self.order.split("-"):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**place)

    def ranks_of(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        """Global ranks, ascending, of the group of `rank` that varies over `axes`.

        With "embd" the group varies over the stages that hold a tied embedding; a rank of a middle stage is in no such
        group and gets the empty tuple.
        """
        axes = canonical_axes(axes)
        here = self.coordinates(rank)
        if "embd" in axes and here.pp not in (0, self.pp - 1):
            return ()
        choices = {axis: (getattr(here, axis),) for axis in ("tp", "cp", "dp", "pp")}
        for axis in axes:
            if axis == "embd":
                choices["pp"] = tuple(sorted({0, self.pp - 1}))
            else:
                choices[axis] = tuple(range(getattr(self, axis)))
        places = product(choices["tp"], choices["cp"], choices["dp"], choices["pp"])
        return tuple(sorted(self.rank(Coordinates(*place)) for place in places))

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """All groups that vary over `axes`, each a tuple of global ranks, in order of their first rank."""
        axes = canonical_axes(axes)
        found = {self.ranks_of(axes, rank) for rank in range(self.world_size)}
        return sorted(group for group in found if group)
