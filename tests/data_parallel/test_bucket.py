"""One bucket: views, verbs and pieces."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.context import ParallelContext
from tests.helpers.ranks import run_ranks
from tests.helpers.small_network import RATES, backward, built, inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_parameters_are_views_and_fp32_ones_are_their_own_master(dtype):
    def check(ctx: ParallelContext) -> None:
        network, buckets, _ = built(ctx, sharding="optim")
        for bucket in buckets:
            assert bucket.has_master == (dtype != torch.float32)
            assert bucket.master.numel() == bucket.layout.numel // 2
            inside = bucket.params.untyped_storage().data_ptr()
            assert (bucket.master.untyped_storage().data_ptr() == inside) == (not bucket.has_master)
            for slot in bucket.layout.slots:
                assert buckets.params[slot.index].untyped_storage().data_ptr() == inside
        backward(network, buckets, 0, 2)
        shares = [param.grad is not None for param in network.parameters()]
        assert all(shares) if dtype == torch.float32 else not any(shares)

    run_ranks(2, check, params_dtype=dtype)


def test_gradients_stay_in_the_flat_buffer_from_step_to_step():
    def check(ctx: ParallelContext) -> None:
        network, buckets, _ = built(ctx)
        for step in range(2):
            backward(network, buckets, step, 2)
            for bucket in buckets:
                for slot, view in zip(bucket.layout.slots, bucket.grad_views):
                    assert buckets.params[slot.index].grad.data_ptr() == view.data_ptr()

    run_ranks(1, check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_state_pieces_cover_every_parameter_and_restore_by_their_views(sharding, dtype):
    def check(ctx: ParallelContext) -> dict:
        network, buckets, optimizer = built(ctx, sharding=sharding, bucket_numel=100)
        for step in range(2):
            backward(network, buckets, step, 4)
            optimizer.step(True, RATES)
        pieces = list(optimizer.state_pieces())
        kinds = {piece.kind for piece in pieces}
        assert kinds == {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype == torch.bfloat16 else set())
        assert all(p.view.numel() == p.stop - p.start and p.view.dtype == torch.float32 for p in pieces)
        assert {p.sharded_over for p in pieces} == ({()} if sharding == "no_shard" else {("dp", "cp")})
        whole = {p.spec.name: p for p in buckets.parameter_pieces()}
        assert all((p.start, p.stop, p.sharded_over) == (0, p.spec.numel, ()) for p in whole.values())

        saved = [(p.kind, p.spec.name, p.start, p.view.clone()) for p in pieces]
        saved_params = {name: p.view.clone() for name, p in whole.items()}
        scalars = optimizer.state_dict()
        reference = continued(network, buckets, optimizer)

        network, buckets, optimizer = built(ctx, sharding=sharding, bucket_numel=100)
        for piece in buckets.parameter_pieces():
            piece.view.copy_(saved_params[piece.spec.name])
        for piece, (kind, name, start, values) in zip(optimizer.state_pieces(), saved, strict=True):
            assert (piece.kind, piece.spec.name, piece.start) == (kind, name, start)
            piece.view.copy_(values)
        optimizer.load_state_dict(scalars)
        optimizer.publish()
        assert all(torch.equal(a, b) for a, b in zip(continued(network, buckets, optimizer), reference))
        return {(kind, name, start): values.numel() for kind, name, start, values in saved}

    ranks = run_ranks(2, check, params_dtype=dtype)
    merged: dict[tuple[str, str], int] = {}
    for rank in ranks:
        for (kind, name, _), numel in rank.items():
            merged[kind, name] = merged.get((kind, name), 0) + numel
    copies = 2 if sharding == "no_shard" else 1
    assert {numel for (_, name), numel in merged.items() if "weight" in name} == {copies * 144}
    assert {numel for (_, name), numel in merged.items() if "weight" not in name} == {copies * 12}


def continued(network, buckets, optimizer) -> list[torch.Tensor]:
    backward(network, buckets, 2, 4)
    optimizer.step(True, RATES)
    return [param.detach().clone() for param in network.parameters()]


def test_weights_written_from_outside_become_the_master():
    def check(ctx: ParallelContext) -> None:
        network, buckets, optimizer = built(ctx, sharding="optim")
        for piece in buckets.parameter_pieces():
            piece.view.fill_(0.5)
        optimizer.sync_master_from_params()
        for bucket in buckets:
            covered = torch.zeros(bucket.layout.numel)
            for slot in bucket.layout.slots:
                covered[slot.start : slot.stop] = 0.5
            assert torch.equal(bucket.master, covered[bucket.kept.start : bucket.kept.stop])
        optimizer.publish()
        assert all((param == 0.5).all() for param in network.parameters())

    run_ranks(2, check, params_dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_parameter_without_a_gradient_gets_zeros_not_those_of_the_last_step(dtype):
    def check(ctx: ParallelContext) -> None:
        network, buckets, _ = built(ctx)
        backward(network, buckets, 0, 2)
        buckets.zero_grads()
        buckets.start_step(1)
        network.layers[1](inputs(0, 0, dtype)).sum().backward()
        buckets.finish_reduce()
        for bucket in buckets:
            for slot, view in zip(bucket.layout.slots, bucket.grad_views):
                assert bool(view.any()) == (".1." in slot.spec.name)

    run_ranks(1, check, params_dtype=dtype)
