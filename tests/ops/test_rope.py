"""Rotary embedding against complex multiplication, Llama 3's scaling against its published definition."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.ops.rope import apply_rotary, rotary_angles, rotary_frequencies


def _complex_rotation(x, positions, frequencies, interleaved):
    rotated = 2 * len(frequencies)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions.double()[..., None, None] * frequencies.double())
    part = x[..., :rotated].double()
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    part = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([part, x[..., rotated:].double()], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotation(interleaved, percent):
    torch.manual_seed(0)
    x = torch.randn(7, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.randint(0, 50, (7, 2))
    frequencies = rotary_frequencies(8, base=100.0, percent=percent)
    angles = rotary_angles(positions, frequencies, interleaved=interleaved)
    torch.testing.assert_close(
        apply_rotary(x, angles), _complex_rotation(x, positions, frequencies, interleaved), rtol=1e-5, atol=1e-5
    )  # angles are fp32
    assert torch.autograd.gradcheck(lambda t: apply_rotary(t, angles), (x,))


def test_frequencies():
    expected = [10000.0 ** (-2 * i / 64) for i in range(32)]
    torch.testing.assert_close(rotary_frequencies(64, base=10000.0), torch.tensor(expected))


def test_llama3_scaling():
    plain = rotary_frequencies(128, base=500000.0).double()
    scaled = rotary_frequencies(128, base=500000.0, llama3_factor=8.0)
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        smooth = (8192 / wavelength - 1) / (4 - 1)
        expected = before
        if wavelength > 8192 / 1:
            expected = before / 8
        elif wavelength > 8192 / 4:
            expected = (1 - smooth) * before / 8 + smooth * before
        assert math.isclose(after, expected, rel_tol=1e-5)


def test_interpolation_divides_positions():
    frequencies = rotary_frequencies(8, base=100.0)
    stretched = rotary_angles(torch.arange(8)[:, None] * 4, frequencies, interpolation=4.0)
    torch.testing.assert_close(stretched.cos, rotary_angles(torch.arange(8)[:, None], frequencies).cos)


def test_low_precision_is_turned_in_fp32():
    x = torch.randn(100, 1, 1, 8).bfloat16()
    angles = rotary_angles(torch.arange(100)[:, None] + 4000, rotary_frequencies(8, base=10000.0))
    assert torch.equal(apply_rotary(x, angles), apply_rotary(x.float(), angles).bfloat16())
