"""Peaks come from the flag, the table or a measurement, in this order."""

import pytest
import torch

from megatron.training.peak import device_peak, measured_peak, table_peak


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("NVIDIA H200", torch.float16, 989.4),
        ("NVIDIA H20", torch.bfloat16, 148.0),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA A10", torch.bfloat16, 125.0),
        ("NVIDIA GB200", torch.bfloat16, 2500.0),
        ("NVIDIA B200", torch.bfloat16, 2250.0),
        ("NVIDIA L40S", torch.bfloat16, 362.05),
        ("NVIDIA L4", torch.bfloat16, 121.0),
    ],
)
def test_table_finds_the_longest_name(name, dtype, tflops):
    assert table_peak(name, dtype).tflops == tflops


def test_order_of_sources():
    cpu = torch.device("cpu")
    assert device_peak(cpu, "CPU", torch.float32, 3.5) == (3.5, "--peak-tflops")
    assert table_peak("CPU", torch.float32) is None
    peak = measured_peak(cpu, torch.float32, size=64, seconds=0.01)
    assert peak.tflops > 0 and "measured" in peak.source


def test_a_cpu_without_bf16_instructions_is_measured_in_the_format_it_multiplies_in(monkeypatch):
    seen = []
    monkeypatch.setattr("megatron.ops.compute_dtype.cpu_multiplies", lambda dtype: dtype == torch.float32)
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda left, right: seen.append(left.dtype) or product(left, right))
    measured_peak(torch.device("cpu"), torch.bfloat16, size=8, seconds=0.0)
    assert set(seen) == {torch.float32}
