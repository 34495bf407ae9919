"""How parameters are laid out in flat buckets: a frozen plan from their specs, the same on every replica; no torch.

A bucket holds parameters that are reduced over the same ranks and updated by the same rule. Within it each parameter
starts at a multiple of `ALIGNMENT` elements and the whole divides evenly, in aligned parts, over the ranks that reduce
it; what no parameter covers is padding and stays zero. The plan lists buckets in the order in which backward
completes them. Buckets that two pipeline stages reduce together come last: the stages finish them at different times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.topology.mesh import Coordinates, Mesh
from megatron.topology.param_spec import ParamSpec

ALIGNMENT = 64  # elements: vector loads, and shards of equal parameters start alike on every stage


class BucketKey(NamedTuple):
    """What the parameters of a bucket have in common."""

    dtype: str
    gradient_axes: tuple[str, ...]
    replicated_axes: tuple[str, ...]
    decay: bool
    lr_group: str


class Span(NamedTuple):
    """Elements start .. stop of something flat."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Slot(NamedTuple):
    """Where one parameter lies in its bucket."""

    index: int
    """Number of the parameter in model order."""
    spec: ParamSpec
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """End in the bucket, without padding."""
        return self.start + self.numel


class Cut(NamedTuple):
    """The part of one parameter that lies in a range of its bucket."""

    slot: Slot
    inside: Span
    """Elements of the stored parameter, flattened."""
    at: Span
    """The same elements in the bucket."""


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: what lies where."""

    key: BucketKey
    slots: tuple[Slot, ...]
    group_size: int
    """Ranks that reduce it and may share its optimizer state."""
    numel: int
    """All elements, padding included; a multiple of group_size * ALIGNMENT."""

    @property
    def whole(self) -> Span:
        """All of it."""
        return Span(0, self.numel)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    @property
    def crosses_stages(self) -> bool:
        """Whether ranks of two pipeline stages reduce it together (a tied embedding)."""
        return "embd" in self.key.gradient_axes

    def shard(self, rank: int) -> Span:
        """The even part of member `rank` of the reducing group."""
        size = self.numel // self.group_size
        return Span(rank * size, (rank + 1) * size)

    def owned(self, rank: int, place: Coordinates) -> Span:
        """The part that member `rank`, at `place` of the mesh, counts in norms: each element has one owner."""
        if any(getattr(place, axis) for axis in self.key.replicated_axes):
            return Span(0, 0)
        return self.shard(rank)

    def cuts(self, span: Span) -> Iterator[Cut]:
        """The parts of parameters within `span`, in order."""
        for slot in self.slots:
            start, stop = max(slot.start, span.start), min(slot.stop, span.stop)
            if start < stop:
                yield Cut(slot, Span(start - slot.start, stop - slot.start), Span(start, stop))


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of one rank, in the order in which their reductions are started."""

    buckets: tuple[BucketLayout, ...]

    @property
    def numel(self) -> int:
        """Elements of all flat buffers."""
        return sum(bucket.numel for bucket in self.buckets)


def plan_buckets(
    specs: Sequence[ParamSpec], dtypes: Sequence[str], mesh: Mesh, *, bucket_numel: int | None = None
) -> BucketPlan:
    """Lay out the parameters of one rank.

    Args:
        specs: in model order; backward is taken to complete them in the reverse order.
        dtypes: name of each parameter's dtype.
        mesh: gives local sizes and the size of reducing groups.
        bucket_numel: close a bucket once it has that many elements; None: never.
    """
    if bucket_numel is not None and bucket_numel < 1:
        raise ValueError(
            f"--ddp-bucket-size {bucket_numel} is not a positive number of elements; leave it out or raise it"
        )
    filling: dict[BucketKey, list[Slot]] = {}
    closed: list[tuple[BucketKey, list[Slot]]] = []
    for index in reversed(range(len(specs))):
        spec = specs[index]
        key = BucketKey(dtypes[index], spec.gradient_axes, spec.replicated_axes, spec.decay, spec.lr_group)
        slots = filling.setdefault(key, [])
        start = _round_up(slots[-1].stop, ALIGNMENT) if slots else 0
        slots.append(Slot(index, spec, start, _numel(spec, mesh)))
        if bucket_numel is not None and slots[-1].stop >= bucket_numel:
            closed.append((key, filling.pop(key)))
    layouts = [_layout(key, slots, mesh) for key, slots in (*closed, *filling.items())]
    return BucketPlan(tuple(sorted(layouts, key=_completion)))


def _layout(key: BucketKey, slots: list[Slot], mesh: Mesh) -> BucketLayout:
    group_size = mesh.size(*key.gradient_axes)
    return BucketLayout(key, tuple(slots), group_size, _round_up(slots[-1].stop, group_size * ALIGNMENT))


def _completion(layout: BucketLayout) -> tuple[bool, int]:
    """Sorts by when the last gradient of a bucket arrives: that of its first parameter in model order."""
    return layout.crosses_stages, -min(slot.index for slot in layout.slots)


def _numel(spec: ParamSpec, mesh: Mesh) -> int:
    numel = 1
    for extent in spec.stored_shape(mesh):
        numel *= extent
    return numel


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
