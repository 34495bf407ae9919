"""`run_ranks`: one test body on any number of ranks, as threads of this process or as gloo processes.

Threads are quick (milliseconds, up to 64 ranks), repeatable to the bit and explain mismatches; gloo processes are the
real thing. The body is a module-level function `fn(ctx, *args)`; with threads its arguments are shared, so it must not
change them.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from megatron.distributed.context import GROUP_AXES, ParallelContext, build_groups
from megatron.topology.mesh import Mesh
from tests.helpers.gloo_pool import raise_from_rank, shared_pool
from tests.helpers.meeting import CommunicationError, Meeting, PeerFailed
from tests.helpers.thread_transport import ThreadTransport

BACKENDS = ("threads", "gloo")


def run_ranks(
    world_size: int,
    fn: Callable,
    *args: Any,
    mesh: Mesh | None = None,
    backend: str = "threads",
    params_dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    seed: int = 1234,
    timeout_s: float = 120.0,
) -> list[Any]:
    """[fn(ctx, *args) for each rank], run at the same time.

    Args:
        mesh: the layout; all ranks on the data-parallel axis if not given.
        backend: "threads" or "gloo".
        timeout_s: how long one wait (threads) or the whole run (gloo) may take.

    Raises:
        The error of the rank that failed first, its message headed by "[rank N]"; CommunicationError when ranks
        disagree, wait for each other for ever, or leave messages behind (threads).
    """
    mesh = Mesh(dp=world_size) if mesh is None else mesh
    if mesh.world_size != world_size:
        raise ValueError(f"{mesh} has {mesh.world_size} ranks, not {world_size}")
    options = {"params_dtype": params_dtype, "sequence_parallel": sequence_parallel, "init_seed": seed}
    if backend == "threads":
        return _run_threads(fn, args, mesh, options, timeout_s)
    if backend == "gloo":
        return shared_pool().run(fn, mesh, args, options, timeout_s)
    raise ValueError(f"backend {backend!r} is not one of {BACKENDS}")


def _run_threads(fn: Callable, args: tuple, mesh: Mesh, options: dict[str, Any], timeout_s: float) -> list[Any]:
    meeting = Meeting(mesh.world_size, timeout_s)
    results: list[Any] = [None] * mesh.world_size
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        torch.set_num_threads(1)  # counts per thread
        try:
            results[rank] = fn(_thread_context(meeting, mesh, rank, options), *args)
            meeting.finish(rank)
        except BaseException as error:
            errors[rank] = error
            meeting.fail(rank, error)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(mesh.world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not meeting.failure:
            thread.join(timeout=0.2)
    for rank, thread in enumerate(threads):
        thread.join(timeout=timeout_s)
        if thread.is_alive() and not errors:
            stack = "".join(traceback.format_stack(sys._current_frames()[thread.ident]))
            raise CommunicationError(f"rank {rank} still works {timeout_s:g} s after the others stopped:\n{stack}")
    for rank, error in errors.items():  # in order of failure
        if not isinstance(error, PeerFailed):
            raise_from_rank(error, rank)
    if meeting.failure:
        raise CommunicationError(meeting.failure)
    left = meeting.unfinished()
    if left:
        raise CommunicationError("all ranks returned, but left open:\n  " + "\n  ".join(left))
    return results


def _thread_context(meeting: Meeting, mesh: Mesh, rank: int, options: dict[str, Any]) -> ParallelContext:
    def open_transport(ranks: tuple[int, ...]) -> ThreadTransport:
        axes = min((axes for axes in GROUP_AXES if mesh.ranks_of(axes, rank) == ranks), key=len)
        return ThreadTransport(meeting, ".".join(axes), ranks, ranks.index(rank))

    return ParallelContext(
        mesh=mesh, rank=rank, device=torch.device("cpu"), groups=build_groups(mesh, rank, open_transport), **options
    )
