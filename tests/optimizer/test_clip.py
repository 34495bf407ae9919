"""The global norm over stages, shards and copies; clipping; counts."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.data_parallel.buckets import Buckets
from megatron.distributed.context import ParallelContext
from megatron.optimizer.clip import clip_by_global_norm, count_zeros, params_norm, squared_sum
from megatron.optimizer.rules import UpdateSettings
from megatron.optimizer.sharded import Optimizer
from megatron.topology.mesh import Mesh
from megatron.topology.param_spec import Constant, ParamSpec
from tests.helpers.ranks import run_ranks
from tests.helpers.small_network import RATES


def one_parameter(ctx: ParallelContext, grad: list[float], **changes) -> Buckets:
    """Buckets over one vector whose gradient on this rank is `grad`."""
    settings = {"name": f"stage{ctx.coords.pp}.weight", "axes": (None,), "init": Constant(1.0), **changes}
    spec = ParamSpec(shape=(len(grad) * (ctx.mesh.tp if "tp" in settings["axes"] else 1),), **settings)
    buckets = Buckets([ctx.parameter(spec)], ctx, sharding="optim")
    buckets.params[0].grad.copy_(torch.tensor(grad))
    return buckets


def test_stage_norms_3_and_4_give_5_everywhere():
    def check(ctx: ParallelContext) -> float:
        buckets = one_parameter(ctx, [3.0, 0.0] if ctx.coords.pp == 0 else [0.0, 4.0])
        clip = clip_by_global_norm(buckets, 1.0)
        assert clip.divisor.item() == pytest.approx(5.0, rel=1e-6)
        return clip.norm.item()

    assert run_ranks(2, check, mesh=Mesh(pp=2)) == [5.0, 5.0]


class Plain:
    """weights -= grad / divisor."""

    state_names = ()

    def update_(self, weights, grads, states, settings: UpdateSettings) -> None:
        weights -= grads / settings.divisor


def test_all_stages_are_clipped_by_the_same_factor():
    def check(ctx: ParallelContext) -> list[float]:
        buckets = one_parameter(ctx, [3.0, 0.0] if ctx.coords.pp == 0 else [0.0, 4.0])
        clip = clip_by_global_norm(buckets, 0.5)
        Optimizer(buckets, Plain()).step(clip.is_finite, RATES, clip.divisor)
        return buckets.params[0].tolist()

    first, last = run_ranks(2, check, mesh=Mesh(pp=2))
    factor = 0.5 / (5.0 + 1e-6)
    assert first == pytest.approx([1 - 3 * factor, 1.0], rel=1e-6)
    assert last == pytest.approx([1.0, 1 - 4 * factor], rel=1e-6)


def test_copies_over_tensor_parallel_ranks_count_once_and_shards_add_up():
    def norm(ctx: ParallelContext, axes: tuple, partial: tuple, grad: list[float]) -> float:
        buckets = one_parameter(ctx, grad, axes=axes, partial_over=partial)
        buckets.finish_reduce()
        return clip_by_global_norm(buckets, 0.0).norm.item()

    mesh = Mesh(tp=2, dp=2)
    assert run_ranks(4, norm, (None,), (), [1.5, 2.0], mesh=mesh) == [5.0] * 4  # sums over dp: 3, 4
    assert run_ranks(4, norm, ("tp",), (), [0.5], mesh=mesh) == pytest.approx([math.sqrt(2)] * 4)  # shards of 1 each
    assert run_ranks(4, norm, (None,), ("tp",), [0.75, 1.0], mesh=mesh) == [5.0] * 4  # sums over dp and tp: 3, 4


def test_the_divisor_holds_loss_scale_and_clipping():
    def check(ctx: ParallelContext) -> None:
        buckets = one_parameter(ctx, [3.0 * 1024, 4.0 * 1024])
        clip = clip_by_global_norm(buckets, 1.0, torch.tensor(1024.0))
        assert clip.norm.item() == 5.0
        assert clip.divisor.item() == pytest.approx(1024 * (5 + 1e-6), rel=1e-6)
        assert clip_by_global_norm(buckets, 0.0, 1024.0).divisor.item() == 1024.0
        assert clip_by_global_norm(buckets, 6.0, 1024.0).divisor.item() == 1024.0
        assert torch.equal(buckets.params[0].grad, torch.tensor([3072.0, 4096.0]))  # gradients are left alone

    run_ranks(1, check)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=2), Mesh(pp=2)], ids=["tp2", "dp2", "pp2"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_stops_all(mesh, value):
    def check(ctx: ParallelContext) -> float:
        buckets = one_parameter(ctx, [value if ctx.rank == 1 else 1.0, 1.0], axes=("tp",))
        buckets.finish_reduce()
        return clip_by_global_norm(buckets, 1.0).is_finite.item()

    assert run_ranks(2, check, mesh=mesh) == [0.0, 0.0]


def test_zeros_are_counted_without_padding():
    def check(ctx: ParallelContext) -> float:
        vocabulary = ParamSpec(
            name="embedding.word_embeddings.weight", shape=(8, 3), axes=("tp", None), valid=(5, 3), decay=False
        )
        vector = ParamSpec(name="bias", shape=(7,), axes=(None,), decay=False)
        buckets = Buckets([ctx.parameter(vocabulary), ctx.parameter(vector)], ctx, sharding="optim")
        embedding, bias = buckets.params
        bias.grad[1:] = 1.0
        if ctx.coords.tp == 0:
            embedding.grad[1] = 1.0
        buckets.finish_reduce()
        return count_zeros(buckets).item()

    # 1 of the vector, 5 * 3 - 3 of the real vocabulary rows
    assert run_ranks(1, check) == [13.0]
    assert run_ranks(4, check, mesh=Mesh(tp=2, dp=2)) == [13.0] * 4


def test_norm_of_weights_counts_each_once():
    def check(ctx: ParallelContext) -> float:
        return params_norm(one_parameter(ctx, [0.0] * 8)).item()

    for mesh in (Mesh(), Mesh(tp=2), Mesh(dp=2)):
        assert run_ranks(mesh.world_size, check, mesh=mesh) == pytest.approx([math.sqrt(8)] * mesh.world_size)
    assert run_ranks(2, check, mesh=Mesh(pp=2)) == [4.0, 4.0]


def test_sums_of_many_squares_are_exact():
    values = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    assert squared_sum(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-8)
    assert squared_sum(values[:0]).item() == 0.0
    assert squared_sum(values[: 2**10].bfloat16()).item() == pytest.approx(
        values[: 2**10].bfloat16().double().square().sum().item(), rel=1e-6
    )
