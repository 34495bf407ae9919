"""Open the process groups of one generation of a run and close them again: nccl on GPUs, gloo on CPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.distributed.context import ParallelContext, build_groups
from megatron.distributed.device import local_device
from megatron.distributed.transport import TorchTransport
from megatron.topology.mesh import Mesh

# What NCCL and CUDA read only from the environment; set unless the user has set it, and printed at start-up.
NCCL_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # kernels start in the order of issue, so overlapped collectives go first
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # a failed collective ends the process, after the flight recorder
}


def set_environment(backend: str) -> list[str]:
    """Set what `backend` needs and the user has not set; the settings as "NAME=value" lines for the log."""
    if backend != "nccl":
        return []
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return [f"{name}={os.environ[name]}" for name in NCCL_ENVIRONMENT]


@contextmanager
def launch(
    *,
    mesh: Mesh,
    rank: int = 0,
    local_rank: int = 0,
    backend: str = "gloo",
    params_dtype: torch.dtype = torch.float32,
    init_seed: int = 1234,
    sequence_parallel: bool = False,
    timeout_s: float = 600.0,
    generation: int = 0,
    store: dist.Store | None = None,
) -> Iterator[ParallelContext]:
    """Join the run as `rank` of `mesh` and yield the context; on exit destroy every group that was made.

    The meeting point is `store`, or torchrun's environment (MASTER_ADDR, MASTER_PORT) without one. A world of one opens
    no group.
    """
    device = local_device(backend, local_rank)
    if mesh.world_size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
            rank=rank,
            world_size=mesh.world_size,
            timeout=timedelta(seconds=timeout_s),
            **({} if store is None else {"store": store}),
        )
    try:
        yield ParallelContext(
            mesh=mesh,
            rank=rank,
            device=device,
            groups=build_groups(mesh, rank, lambda ranks: TorchTransport(_open(ranks, mesh.world_size, timeout_s))),
            params_dtype=params_dtype,
            init_seed=init_seed,
            sequence_parallel=sequence_parallel,
            generation=generation,
        )
    finally:
        if mesh.world_size > 1:
            dist.destroy_process_group()


def _open(ranks: tuple[int, ...], world_size: int, timeout_s: float) -> dist.ProcessGroup:
    if len(ranks) == world_size:
        return dist.group.WORLD
    # Only the members meet; all ranks walk GROUP_AXES in one order, so the members of a group arrive at it alike.
    return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True)
