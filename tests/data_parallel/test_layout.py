"""The bucket plan: alignment, padding, order, keys, ownership."""

from __future__ import annotations

from itertools import product

import pytest

from megatron.data_parallel.layout import ALIGNMENT, Span, plan_buckets
from megatron.topology.mesh import Mesh
from megatron.topology.param_spec import ParamSpec

SPECS = [
    ParamSpec(
        name="embedding.word_embeddings.weight",
        shape=(24, 8),
        axes=("tp", None),
        partial_over=("embd",),
        lr_group="embedding",
    ),
    *(
        spec
        for n in range(3)
        for spec in (
            ParamSpec(
                name=f"decoder.layers.{n}.input_layernorm.weight",
                shape=(8,),
                axes=(None,),
                decay=False,
                partial_over=("tp",),
            ),
            ParamSpec(
                name=f"decoder.layers.{n}.mlp.linear_fc1.weight", shape=(2, 30, 8), axes=(None, "tp", None), fold=2
            ),
            ParamSpec(name=f"decoder.layers.{n}.mlp.linear_fc2.bias", shape=(8,), axes=(None,), decay=False),
        )
    ),
]
DTYPES = ["float32"] * len(SPECS)


@pytest.mark.parametrize(("tp", "dp", "pp", "limit"), list(product((1, 2), (1, 2, 4), (1, 2), (None, 1, 500))))
def test_every_element_lies_once_aligned_and_shards_are_even(tp, dp, pp, limit):
    mesh = Mesh(tp=tp, dp=dp, pp=pp)
    plan = plan_buckets(SPECS, DTYPES, mesh, bucket_numel=limit)
    assert sorted(slot.index for bucket in plan.buckets for slot in bucket.slots) == list(range(len(SPECS)))
    for bucket in plan.buckets:
        assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
        assert all(a.stop <= b.start for a, b in zip(bucket.slots, bucket.slots[1:]))
        assert bucket.numel % (bucket.group_size * ALIGNMENT) == 0
        shards = [bucket.shard(rank) for rank in range(bucket.group_size)]
        assert [s.start for s in shards] + [bucket.numel] == [0] + [s.stop for s in shards]
        cuts = [cut for shard in shards for cut in bucket.cuts(shard)]
        for slot in bucket.slots:
            inside = [cut.inside for cut in cuts if cut.slot == slot]
            assert [s.start for s in inside] + [slot.numel] == [0] + [s.stop for s in inside]
        assert sum(cut.at.numel for cut in cuts) + bucket.padding == bucket.numel


def test_sizes_are_local_and_groups_follow_the_gradient_axes():
    plan = plan_buckets(SPECS, DTYPES, Mesh(tp=2, dp=3, pp=4))
    sizes = {b.key.gradient_axes: (b.group_size, sum(s.numel for s in b.slots)) for b in plan.buckets}
    assert sizes[("dp", "cp", "embd")] == (6, 24 * 8 // 2)
    assert sizes[("dp", "cp", "tp")] == (6, 3 * 8)
    dense = [b for b in plan.buckets if b.key.gradient_axes == ("dp", "cp")]
    assert {b.key.decay: (b.group_size, sum(s.numel for s in b.slots)) for b in dense} == {
        True: (3, 3 * 2 * 15 * 8), False: (3, 3 * 8)
    }  # fmt: skip


def test_buckets_are_in_order_of_backward_and_those_shared_between_stages_last():
    plan = plan_buckets(SPECS, DTYPES, Mesh(tp=2, dp=2, pp=2), bucket_numel=1)
    names = [bucket.slots[0].spec.name for bucket in plan.buckets]
    assert names[-1] == "embedding.word_embeddings.weight"
    layers = [int(name.split(".")[2]) for name in names[:-1]]
    assert layers == sorted(layers, reverse=True)
    assert names[0] == "decoder.layers.2.mlp.linear_fc2.bias"
    tied = [bucket.crosses_stages for bucket in plan.buckets]
    assert tied == [False] * (len(names) - 1) + [True]


def test_a_bucket_closes_when_it_is_full():
    plan = plan_buckets(SPECS, DTYPES, Mesh(), bucket_numel=500)
    fc1 = [b for b in plan.buckets if any("fc1" in s.spec.name for s in b.slots)]
    assert [len(b.slots) for b in fc1] == [2, 1]  # 480 + 480 >= 500, then the third
    assert len([b for b in plan_buckets(SPECS, DTYPES, Mesh()).buckets if "fc1" in b.slots[0].spec.name]) == 1


def test_dtype_and_rates_separate_buckets():
    plan = plan_buckets(SPECS, ["bfloat16", *DTYPES[1:]], Mesh())
    assert {(b.key.dtype, b.key.lr_group) for b in plan.buckets} == {("bfloat16", "embedding"), ("float32", "")}


def test_each_element_has_one_owner_over_all_ranks():
    mesh = Mesh(tp=2, dp=2, pp=2)
    counted: dict[str, int] = {}
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        held = [s for s in SPECS if (s.name.startswith("embedding") or int(s.name.split(".")[2]) % 2 == place.pp)]
        for bucket in plan_buckets(held, ["float32"] * len(held), mesh).buckets:
            group = mesh.ranks_of(bucket.key.gradient_axes, rank)
            for cut in bucket.cuts(bucket.owned(group.index(rank), place)):
                counted[cut.slot.spec.name] = counted.get(cut.slot.spec.name, 0) + cut.inside.numel
    assert counted == {spec.name: spec.numel for spec in SPECS}


def test_a_bucket_has_a_size():
    with pytest.raises(ValueError, match="--ddp-bucket-size 0"):
        plan_buckets(SPECS, DTYPES, Mesh(), bucket_numel=0)


def test_span():
    assert Span(3, 7).numel == 4
