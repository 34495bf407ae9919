"""What one parameter is and how it is sharded, said once where it is allocated and read by everybody else.

`shape` is logical: one entry per dimension that means something, so that every shard is an even contiguous slice of one
logical dimension (a fused QKV is kv-groups x heads x head-dim x hidden, a gated fc1 is 2 x ffn x hidden). The stored
tensor folds the first `fold` logical dimensions into its dim 0 and the rest into its dim 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt

from megatron.topology.mesh import Coordinates, Mesh, canonical_axes


@dataclass(frozen=True)
class Normal:
    """Initial values drawn from N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class XavierUniform:
    """Initial values drawn from U(-b, b) with b = sqrt(6 / (rows + columns)) of the whole matrix (Glorot, Bengio 2010,
    equation 16)."""


@dataclass(frozen=True)
class Constant:
    """One initial value everywhere."""

    value: float


class Slice(tuple):
    """(offset, size) of a shard along one logical dimension."""

    __slots__ = ()

    def __new__(cls, offset: int, size: int):
        return super().__new__(cls, (offset, size))

    @property
    def offset(self) -> int:
        """First index."""
        return self[0]

    @property
    def size(self) -> int:
        """Number of indices."""
        return self[1]


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One logical parameter; the same value on all ranks and layouts but for `axes`, `partial_over` and padding."""

    name: str
    """Global, layout-independent name ("decoder.layers.7.mlp.linear_fc1.weight")."""
    shape: tuple[int, ...]
    """Logical shape of the whole parameter."""
    axes: tuple[str | None, ...]
    """For each logical dimension the mesh axis that shards it, or None."""
    fold: int = 1
    """How many leading logical dimensions make up dim 0 of the stored tensor; len(shape) for a stored vector."""
    init: Normal | XavierUniform | Constant = Constant(0.0)
    decay: bool = True
    """Whether weight decay applies."""
    partial_over: tuple[str, ...] = ()
    """Axes beside dp and cp over which each replica's gradient is only a part of the sum."""
    valid: tuple[int, ...] | None = None
    """Logical extents of real entries; what lies beyond is padding (vocabulary rows). None: all of them are real."""
    lr_group: str = ""
    """"embedding" for what --decoupled-lr applies to, else empty."""

    def __post_init__(self):
        if len(self.axes) != len(self.shape) or not 1 <= self.fold <= len(self.shape):
            raise ValueError(f"{self.name}: axes {self.axes} and fold {self.fold} do not fit shape {self.shape}")
        if self.valid is not None and len(self.valid) != len(self.shape):
            raise ValueError(f"{self.name}: valid {self.valid} does not fit shape {self.shape}")

    @property
    def numel(self) -> int:
        """Entries of the whole parameter, padding included."""
        return prod(self.shape)

    @property
    def valid_shape(self) -> tuple[int, ...]:
        """Logical extents without padding: the shape that checkpoints hold."""
        return self.shape if self.valid is None else self.valid

    @property
    def xavier_bound(self) -> float:
        """Largest magnitude of the initial values under `XavierUniform`; padding does not count."""
        rows, columns = prod(self.valid_shape[: self.fold]), prod(self.valid_shape[self.fold :])
        return sqrt(6.0 / (rows + columns))

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """Mesh axes over which gradients are summed, in canonical order."""
        return canonical_axes(("dp", "cp", *self.partial_over))

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Model-parallel axes along which ranks hold equal copies with equal gradients: count such an element once."""
        return () if "tp" in self.axes or "tp" in self.partial_over else ("tp",)

    def local_slice(self, mesh: Mesh, place: Coordinates) -> tuple[Slice, ...]:
        """(offset, size) per logical dimension of the shard at `place`; ValueError if an axis does not divide it."""
        slices = []
        for extent, axis in zip(self.shape, self.axes, strict=True):
            if axis is None:
                slices.append(Slice(0, extent))
                continue
            parts = mesh.size(axis)
            if extent % parts:
                raise ValueError(
                    f"{self.name}: dimension of {extent} does not divide over {parts} ranks of axis {axis}"
                )
            size = extent // parts
            slices.append(Slice(getattr(place, axis) * size, size))
        return tuple(slices)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Logical shape of one shard."""
        return tuple(part.size for part in self.local_slice(mesh, mesh.coordinates(0)))

    def stored_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of the tensor that holds one shard: a matrix, or a vector when `fold` covers all dimensions."""
        local = self.local_shape(mesh)
        rows, columns = prod(local[: self.fold]), local[self.fold :]
        return (rows, prod(columns)) if columns else (rows,)
