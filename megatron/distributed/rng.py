"""Counter-based random numbers: a value is a function of a key and a position, whatever the layout, order or restart.

The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a 64-bit position mixed with a 64-bit key. Nothing here
has state.
"""

from __future__ import annotations

import hashlib
import math

import torch

from megatron.topology.mesh import Coordinates, Mesh
from megatron.topology.param_spec import Constant, ParamSpec, XavierUniform

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
# A CPU kernel may round the last, partial vector of a buffer differently from the rest; blocks of this size (a multiple
# of every vector width, below the size at which torch splits work between threads) have no such tail.
_BLOCK = 16384
_CHUNK = 1 << 20  # positions drawn at once: bounds the temporaries


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64 positions, elementwise."""
    x = x * _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def key_of(*parts: int | str) -> int:
    """A signed 64-bit key from a seed and names, the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def normal_at(key: int, positions: torch.Tensor) -> torch.Tensor:
    """Standard normal fp32 values at int64 `positions` [n]: Box and Muller on the two halves of one 64-bit draw."""
    out = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    for start in range(0, positions.numel(), _BLOCK):
        part = positions[start : start + _BLOCK]
        count = part.numel()
        padded = -count % 64
        bits = mix64(torch.nn.functional.pad(part, (0, padded)) + key)
        radius = ((_shift(bits, 32) + 1).to(torch.float32) * 2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = ((bits & 0xFFFFFFFF).to(torch.float32) * (2.0 * math.pi * 2.0**-32)).cos_()
        out[start : start + count] = (radius * angle)[:count]
    return out


def uniform_at(key: int, positions: torch.Tensor) -> torch.Tensor:
    """Uniform fp32 values in (-1, 1) at int64 `positions` [n]: the odd multiples of 2^-23, each an exact result."""
    odd = _shift(mix64(positions + key), 41) * 2 + 1
    return odd.to(torch.float32).mul_(2.0**-23).sub_(1.0)


def initialize_(stored: torch.Tensor, spec: ParamSpec, mesh: Mesh, place: Coordinates, seed: int) -> None:
    """Fill the local shard of `spec`: values are functions of (seed, name, logical index), in fp32, then cast."""
    if isinstance(spec.init, Constant):
        stored.fill_(spec.init.value)
        return
    is_uniform = isinstance(spec.init, XavierUniform)
    draw, scale = (uniform_at, spec.xavier_bound) if is_uniform else (normal_at, spec.init.std)
    key = key_of("init", seed, spec.name)
    slices = spec.local_slice(mesh, place)
    strides = [math.prod(spec.shape[dim + 1 :]) for dim in range(len(slices))]
    sharded = [dim for dim, part in enumerate(slices) if part.size != spec.shape[dim]]
    last = sharded[-1] if sharded else 0
    inner = math.prod(part.size for part in slices[last:])  # entries that follow each other in the whole parameter
    starts = torch.full((1,), slices[last].offset * strides[last], dtype=torch.int64, device=stored.device)
    for part, stride in zip(slices[:last], strides[:last], strict=True):
        starts = (starts[:, None] + (torch.arange(part.size, device=stored.device) + part.offset) * stride).flatten()
    flat = stored.view(-1)
    rows_at_once = max(1, _CHUNK // inner)
    for row in range(0, len(starts), rows_at_once):
        some = starts[row : row + rows_at_once, None]
        for done in range(0, inner, _CHUNK):
            count = min(_CHUNK, inner - done)
            positions = (some + torch.arange(done, done + count, device=stored.device)).flatten()
            first = row * inner + done
            flat[first : first + len(positions)] = draw(key, positions).mul_(scale)


def sample_keys(seed: int, sample_ids_B: torch.Tensor, *site: int | str) -> torch.Tensor:
    """int64 [B]: one key per sample of the run for a place in the network (layer number, name)."""
    return mix64(sample_ids_B + key_of(seed, *site))


def fold_in(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """int64 keys for each `index` (int64), broadcast against `keys`: rows, heads, positions."""
    return mix64(keys ^ (index * _GOLDEN))


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """An avalanche on int32, in place (two rounds of multiply and xor-shift, constants of C. Wellons' `lowbias32`)."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261  # 0x846CA68B
    x ^= (x >> 16) & 0xFFFF
    return x


def keep_mask(row_keys: torch.Tensor, num_columns: int, keep_prob: float, first_column: int = 0) -> torch.Tensor:
    """bool [*row_keys.shape, num_columns]: each entry True with `keep_prob`, a function of its row's key and column.

    `first_column` is the global number of the first column, so that shards of a row draw their part of one mask.
    """
    columns = torch.arange(first_column, first_column + num_columns, dtype=torch.int64, device=row_keys.device)
    bits = mix64(columns).to(torch.int32) + row_keys.to(torch.int32)[..., None]
    threshold = min(round(keep_prob * 2.0**32), 2**32 - 1) - 2**31
    return _mix32_(bits) < threshold
