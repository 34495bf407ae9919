"""Opening and closing process groups, and what a device is called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.distributed import device
from megatron.distributed.launch import NCCL_ENVIRONMENT, launch, set_environment
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import run_ranks


def test_a_world_of_one_opens_no_group():
    with launch(mesh=Mesh(), params_dtype=torch.bfloat16, init_seed=3) as ctx:
        assert not dist.is_initialized()
        assert ctx.world.size == 1 and ctx.world.transport is None
        assert ctx.params_dtype == torch.bfloat16 and ctx.init_seed == 3


def is_open(ctx):
    return dist.is_initialized()


def test_groups_are_closed_after_each_run():
    """The pool's processes live on; each run finds no process group and leaves none, so the next layout may differ."""
    for mesh in (Mesh(tp=2), Mesh(pp=2, dp=2), Mesh(tp=4), Mesh(dp=3)):
        assert run_ranks(mesh.world_size, is_open, mesh=mesh, backend="gloo") == [True] * mesh.world_size


def test_nccl_settings_keep_what_the_user_set(monkeypatch):
    for name in NCCL_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert set_environment("gloo") == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    lines = set_environment("nccl")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8" in lines and len(lines) == len(NCCL_ENVIRONMENT)


def test_backend_falls_back_only_where_torch_has_no_cuda(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    assert device.resolve_backend("gloo") == ("gloo", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    backend, line = device.resolve_backend("nccl")
    assert backend == "gloo" and "CPU build" in line
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="--distributed-backend gloo"):
        device.resolve_backend("nccl")


def test_cpu_device():
    cpu = device.local_device("gloo", 5)
    assert cpu.type == "cpu" and device.device_name(cpu) == "CPU"
    memory = device.memory_bytes(cpu)
    assert (
        set(memory) == {"reserved", "allocated", "max-allocated", "allocated-count"} and memory["max-allocated"] > 1e6
    )
    device.synchronize(cpu)
