"""How many FLOP/s a device can do at most: the denominator of MFU.

GPUs: dense (no sparsity) tensor-core peaks from the vendor's data sheets, by device name. fp32 is the peak of the
matrix products that run: TF32 stays off unless asked for, so it is the CUDA-core figure. A CPU has no such sheet: its
peak is measured once by a matrix product, so its MFU reads "share of what a large product reaches here".
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from megatron.ops.compute_dtype import matmul_dtype


class Peak(NamedTuple):
    """TFLOP/s of one device in the run's precision, and where the number comes from."""

    tflops: float
    source: str


# Device name fragment (first match wins, so longer names stand first): TFLOP/s in bf16/fp16, in fp32.
GPU_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB300", 2500.0, 80.0),
    ("B300", 2250.0, 76.0),
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("B100", 1750.0, 60.0),
    ("GH200", 989.4, 67.0),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.4, 67.0),
    ("H100 NVL", 835.5, 60.0),
    ("H100 PCIe", 756.5, 51.0),
    ("H100", 989.4, 67.0),
    ("H800", 989.4, 67.0),
    ("H20", 148.0, 44.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("A10G", 70.0, 31.5),
    ("A10", 125.0, 31.2),
    ("L40S", 362.05, 91.6),
    ("L40", 181.05, 90.5),
    ("L4", 121.0, 30.3),
    ("RTX 6000 Ada", 364.2, 91.1),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
)


def table_peak(device_name: str, dtype: torch.dtype) -> Peak | None:
    """The data sheet's peak of a GPU by its name, or None for one that is not in the table."""
    for fragment, half, single in GPU_PEAKS:
        if fragment.lower() in device_name.lower():
            return Peak(single if dtype == torch.float32 else half, f"data sheet of {fragment}")
    return None


def measured_peak(device: torch.device, dtype: torch.dtype, size: int = 768, seconds: float = 0.2) -> Peak:
    """The rate of a square matrix product on `device`: the best of the repetitions that fit in `seconds`.

    In the format that the layers multiply in, which on a CPU without bf16 instructions is fp32.
    """
    dtype = matmul_dtype(dtype, device)
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones(size, size, device=device, dtype=dtype)
    torch.mm(left, right).sum().item()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        torch.mm(left, right).sum().item()
        best = min(best, time.perf_counter() - start)
    return Peak(2 * size**3 / best / 1e12, f"matrix product of {size} measured at start")


def device_peak(device: torch.device, device_name: str, dtype: torch.dtype, typed_tflops: float | None) -> Peak:
    """The peak to divide by: `--peak-tflops` where typed, else the table, else a measurement."""
    if typed_tflops is not None:
        return Peak(typed_tflops, "--peak-tflops")
    return table_peak(device_name, dtype) or measured_peak(device, dtype)
