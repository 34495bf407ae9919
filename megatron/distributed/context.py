"""Where this process stands in the run: mesh, coordinates, device, groups. A value handed down, never a global."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron.distributed.collectives import Group
from megatron.distributed.rng import initialize_
from megatron.distributed.transport import Transport
from megatron.topology.mesh import Coordinates, Mesh, canonical_axes
from megatron.topology.param_spec import ParamSpec

WORLD_AXES = ("pp", "dp", "cp", "tp")
# Every set of axes that some part of the codebase sums, gathers or sends over; a fork adds a line.
GROUP_AXES = (
    WORLD_AXES,
    ("tp",),
    ("cp",),
    ("dp",),
    ("pp",),
    ("dp", "cp"),
    ("dp", "cp", "tp"),
    ("dp", "cp", "embd"),
)


def build_groups(
    mesh: Mesh, rank: int, open_transport: Callable[[tuple[int, ...]], Transport]
) -> dict[tuple[str, ...], Group]:
    """This rank's group for each of `GROUP_AXES`. Equal sets of ranks share a transport; all open in one order."""
    opened: dict[tuple[int, ...], Transport] = {}
    groups = {}
    for axes in map(canonical_axes, GROUP_AXES):
        ranks = mesh.ranks_of(axes, rank)
        if not ranks:
            continue
        if len(ranks) > 1 and ranks not in opened:
            opened[ranks] = open_transport(ranks)
        groups[axes] = Group(axes=axes, ranks=ranks, rank=ranks.index(rank), transport=opened.get(ranks))
    return groups


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelContext:
    """One process's view of one generation of a run."""

    mesh: Mesh
    rank: int
    """Global rank."""
    device: torch.device
    groups: Mapping[tuple[str, ...], Group]
    params_dtype: torch.dtype = torch.float32
    init_seed: int = 1234
    sequence_parallel: bool = False
    """Whether the residual stream is split over tp along the sequence (else every tp rank holds it whole)."""
    generation: int = 0
    """Counts the contexts this process has lived in."""

    @property
    def coords(self) -> Coordinates:
        """This rank's place on each axis."""
        return self.mesh.coordinates(self.rank)

    def group(self, *axes: str) -> Group:
        """The group of this rank that varies over `axes`, in any order; KeyError if it is in none or none is kept."""
        key = canonical_axes(axes)
        if key not in self.groups:
            raise KeyError(f"rank {self.rank} {self.coords} is in no group over {key}; groups: {sorted(self.groups)}")
        return self.groups[key]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.group(*WORLD_AXES)

    @property
    def tp(self) -> Group:
        """Ranks that hold shards of the same layers."""
        return self.group("tp")

    @property
    def pp(self) -> Group:
        """The stages of one pipeline, in order of stage."""
        return self.group("pp")

    @property
    def dp_cp(self) -> Group:
        """Ranks that hold the same weights and see different tokens."""
        return self.group("dp", "cp")

    def parameter(self, spec: ParamSpec) -> torch.nn.Parameter:
        """Allocate this rank's shard of `spec` with its initial values, in the run's dtype; `.spec` is the spec."""
        stored = torch.empty(spec.stored_shape(self.mesh), dtype=self.params_dtype, device=self.device)
        if self.device.type != "meta":
            with torch.no_grad():
                initialize_(stored, spec, self.mesh, self.coords, self.init_seed)
        parameter = torch.nn.Parameter(stored)
        parameter.spec = spec
        return parameter


def single_process_context(
    *,
    device: torch.device | str = "cpu",
    params_dtype: torch.dtype = torch.float32,
    init_seed: int = 1234,
) -> ParallelContext:
    """A world of one rank, without any process group: tools, inference, the reference of every parity test."""
    mesh = Mesh()
    return ParallelContext(
        mesh=mesh,
        rank=0,
        device=torch.device(device),
        groups=build_groups(mesh, 0, _refuse),
        params_dtype=params_dtype,
        init_seed=init_seed,
    )


def _refuse(ranks: tuple[int, ...]) -> Transport:
    raise AssertionError(f"a world of one needs no transport among {ranks}")
