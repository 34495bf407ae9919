"""Counter-based numbers: the same parameter bits in every layout, masks by coordinates, sane statistics."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.rng import (
    fold_in,
    initialize_,
    keep_mask,
    key_of,
    mix64,
    normal_at,
    sample_keys,
    uniform_at,
)
from megatron.topology.mesh import Coordinates, Mesh
from megatron.topology.param_spec import Constant, Normal, ParamSpec, XavierUniform

SPECS = [
    ParamSpec(name="qkv", shape=(4, 3, 8, 40), axes=("tp", None, None, None), fold=3, init=Normal(0.02)),
    ParamSpec(name="fc1", shape=(2, 36, 40), axes=(None, "tp", None), fold=2, init=Normal(0.02)),
    ParamSpec(name="proj", shape=(40, 4, 8), axes=(None, "tp", None), fold=1, init=Normal(0.5)),
    ParamSpec(name="word", shape=(300, 40), axes=("tp", None), init=Normal(1.0)),
    ParamSpec(name="xavier", shape=(4, 3, 8, 40), axes=("tp", None, None, None), fold=3, init=XavierUniform()),
]


def shard(spec: ParamSpec, mesh: Mesh, tp: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    stored = torch.empty(spec.stored_shape(mesh), dtype=dtype)
    initialize_(stored, spec, mesh, Coordinates(tp=tp, cp=0, dp=0, pp=0), seed)
    return stored.view(spec.local_shape(mesh))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("tp", [2, 4])
def test_every_layout_starts_with_the_same_bits(spec, tp):
    whole = shard(spec, Mesh(), 0)
    parts = [shard(spec, Mesh(tp=tp), rank) for rank in range(tp)]
    assert torch.equal(torch.cat(parts, dim=spec.axes.index("tp")), whole)


def test_values_depend_on_seed_and_name_only():
    first, other = SPECS[0], ParamSpec(name="qkv2", shape=SPECS[0].shape, axes=SPECS[0].axes, fold=3, init=Normal(0.02))
    assert torch.equal(shard(first, Mesh(), 0), shard(first, Mesh(dp=2, pp=2), 0))
    assert not torch.equal(shard(first, Mesh(), 0), shard(first, Mesh(), 0, seed=8))
    assert not torch.equal(shard(first, Mesh(), 0), shard(other, Mesh(), 0))
    assert torch.equal(shard(first, Mesh(), 0, dtype=torch.bfloat16), shard(first, Mesh(), 0).bfloat16()), (
        "drawn in fp32"
    )


def test_constants():
    spec = ParamSpec(name="norm", shape=(5,), axes=(None,), init=Constant(1.0))
    assert torch.equal(shard(spec, Mesh(), 0), torch.ones(5))


def test_normal_values_are_normal():
    """A million draws: mean, variance, kurtosis and neighbour correlation within 5 standard errors."""
    x = normal_at(key_of("test", 1), torch.arange(1_000_000)).double()
    assert abs(x.mean()) < 5e-3
    assert abs(x.var() - 1) < 7.1e-3
    assert abs((x**4).mean() - 3) < 5 * (96 / 1e6) ** 0.5
    assert abs((x[1:] * x[:-1]).mean()) < 5e-3
    assert x.isfinite().all() and x.abs().max() < 6.7, "the smallest of 2^32 uniform values gives sqrt(2 ln 2^32)"


def test_uniform_values_are_uniform():
    """A million draws: mean, variance and neighbour correlation within 5 standard errors, open bounds, never zero."""
    x = uniform_at(key_of("test", 1), torch.arange(1_000_000)).double()
    assert abs(x.mean()) < 5 * (1 / 3e6) ** 0.5
    assert abs(x.var() - 1 / 3) < 5 * (4 / 45 / 1e6) ** 0.5
    assert abs((x[1:] * x[:-1]).mean()) < 5 / 3 / 1e3
    share = (torch.histc(x, 10, -1, 1) / 1e6 - 0.1).abs().max()
    assert share < 5 * (0.09 / 1e6) ** 0.5
    assert 0.9999 < x.abs().max() < 1 and x.abs().min() > 0


def test_padding_does_not_change_xavier_values():
    def whole(rows):
        spec = ParamSpec(name="w", shape=(rows, 40), axes=("tp", None), valid=(300, 40), init=XavierUniform())
        return shard(spec, Mesh(), 0)

    assert torch.equal(whole(320)[:300], whole(300))
    assert whole(300).abs().max() == pytest.approx((6 / 340) ** 0.5, rel=1e-3)


def test_normal_values_do_not_depend_on_the_neighbours_drawn_with_them():
    positions = torch.randint(0, 2**40, (50_001,), generator=torch.Generator().manual_seed(3))
    whole = normal_at(5, positions)
    assert torch.equal(torch.cat([normal_at(5, part) for part in positions.split(777)]), whole)


def test_mix64_is_splitmix64():
    """First outputs of the reference generator seeded with 0 and 1234567 (Vigna's splitmix64.c)."""
    unsigned = [value % 2**64 for value in mix64(torch.tensor([1, 2])).tolist()]
    assert unsigned == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1])
def test_masks_keep_the_share_asked_for(keep):
    keys = fold_in(sample_keys(1, torch.arange(40), 3, "hidden")[:, None], torch.arange(64))
    mask = keep_mask(keys, 256, keep)
    share = mask.double().mean().item()
    assert abs(share - keep) < 5 * (keep * (1 - keep) / mask.numel()) ** 0.5
    rows = mask.double().mean(dim=(0, 1)) - keep
    assert rows.abs().max() < 6 * (keep * (1 - keep) / (40 * 64)) ** 0.5, "no column is favoured"


def test_shards_draw_their_part_of_one_mask():
    keys = sample_keys(9, torch.tensor([4, 17]), 0, "attention")
    whole = keep_mask(keys, 64, 0.7)
    assert torch.equal(
        torch.cat([keep_mask(keys, 16, 0.7, first_column=start) for start in range(0, 64, 16)], dim=1), whole
    )
    assert torch.equal(keep_mask(keys[1:], 64, 0.7), whole[1:]), "a microbatch that holds only the second sample"


def test_masks_of_samples_sites_and_seeds_are_unrelated():
    ids = torch.arange(200)
    base = keep_mask(sample_keys(1, ids, 0, "hidden"), 512, 0.5)
    others = [
        sample_keys(1, ids, 1, "hidden"),
        sample_keys(1, ids, 0, "mlp"),
        sample_keys(2, ids, 0, "hidden"),
        sample_keys(1, ids + 1, 0, "hidden"),
    ]
    for keys in others:
        agree = (keep_mask(keys, 512, 0.5) == base).double().mean().item()
        assert abs(agree - 0.5) < 5 * 0.5 / base.numel() ** 0.5
