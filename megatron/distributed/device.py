"""Everything that differs between a GPU and a CPU, so that no other file asks."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

import torch


def has_gpu() -> bool:
    """Whether this process sees at least one GPU."""
    return torch.cuda.is_available()


def resolve_backend(requested: str) -> tuple[str, str | None]:
    """(backend to use, a line to print or None) for --distributed-backend.

    A torch without CUDA can only mean a CPU run, so nccl becomes gloo, and says so. A CUDA build that sees no GPU is a
    broken node or a wrong flag: ValueError.
    """
    if requested == "gloo" or has_gpu():
        return requested, None
    if torch.version.cuda is None:
        return "gloo", "this torch is a CPU build: --distributed-backend gloo instead of nccl, all ranks on CPU"
    raise ValueError(
        "--distributed-backend nccl, but torch sees no GPU; check the driver, or run on CPU with "
        "--distributed-backend gloo"
    )


def local_device(backend: str, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU under nccl, the CPU under gloo."""
    if backend != "nccl":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(f"local rank {local_rank} has no GPU: this node shows {count}; start {count} processes a node")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The GPU's product name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Megatron's memory figures in bytes: reserved, allocated, max-allocated, and the count of allocations.

    On a CPU: the process's resident set now and at its peak; allocations are not counted there (0).
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "reserved": stats["reserved_bytes.all.current"],
            "allocated": stats["allocated_bytes.all.current"],
            "max-allocated": stats["allocated_bytes.all.peak"],
            "allocated-count": stats["allocation.all.current"],
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    now = peak
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"reserved": now, "allocated": now, "max-allocated": peak, "allocated-count": 0}


def has_kernels_of_its_own(device: torch.device) -> bool:
    """Whether work on `device` is kernels that a profiler records apart from the host's."""
    return device.type == "cuda"


def mark_for_nsight() -> Callable[[int], None]:
    """Start the range that `nsys profile --capture-range=cudaProfilerApi` records, operators named; returns its end."""
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    ranges = torch.autograd.profiler.emit_nvtx()
    ranges.__enter__()

    def stop(_last: int) -> None:
        ranges.__exit__(None, None, None)
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())

    return stop


def read_lag(device: torch.device) -> int:
    """Steps by which the host should read device values late, so that the device is never idle for it: 1 on a GPU."""
    return 1 if device.type == "cuda" else 0


class HostCopy:
    """A device vector on its way to the host; `read` waits for this copy only, not for work queued after it."""

    def __init__(self, tensor: torch.Tensor):
        self._event = None
        self._values = tensor
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> torch.Tensor:
        """The values, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
