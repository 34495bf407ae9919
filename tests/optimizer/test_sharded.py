"""The optimizer over buckets: groups, skipped steps, and fp16 with a dynamic loss scale as the loop drives it."""

from __future__ import annotations

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.context import ParallelContext
from megatron.optimizer.adam import Adam
from megatron.optimizer.clip import clip_by_global_norm
from megatron.optimizer.loss_scale import DynamicLossScale
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.sgd import Sgd
from megatron.optimizer.sharded import build_optimizer, build_rule
from tests.helpers.ranks import run_ranks
from tests.helpers.small_network import RATES, Network, assert_equal, backward, built, inputs, weights


@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_equals_torch_adamw_with_its_parameter_groups(sharding):
    def check(ctx: ParallelContext) -> None:
        network, buckets, optimizer = built(ctx, sharding=sharding)
        plain = Network(ctx)
        first, *others = [layer.weight for layer in plain.layers]
        vectors = [p for p in plain.parameters() if p.dim() == 1]
        groups = [
            {"params": [first], "lr": 2e-2, "weight_decay": 0.1},
            {"params": others, "lr": 1e-2, "weight_decay": 0.1},
            {"params": vectors, "lr": 1e-2, "weight_decay": 0.0},
        ]
        reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
        for step in range(4):
            backward(network, buckets, step, 2)
            clip = clip_by_global_norm(buckets, 0.5)
            optimizer.step(clip.is_finite, RATES, clip.divisor)
            reference.zero_grad()
            for sample in range(2):
                (plain(inputs(step, sample)) / 2).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
            assert clip.norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert_equal(weights(network), weights(plain), rtol=1e-5, atol=1e-6)  # unfused torch rounds in other places

    for world in (1, 2):
        run_ranks(world, check)


@pytest.mark.parametrize("ok", [False, torch.tensor(0.0)], ids=["bool", "tensor"])
def test_a_skipped_step_leaves_weights_states_and_step_count(ok):
    def check(ctx: ParallelContext) -> None:
        network, buckets, optimizer = built(ctx, sharding="optim")
        backward(network, buckets, 0, 2)
        optimizer.step(True, RATES)
        before = weights(network)
        states = [{name: values.clone() for name, values in of_bucket.items()} for of_bucket in optimizer.states]
        backward(network, buckets, 1, 2)
        optimizer.step(ok, RATES, torch.tensor(1.0))
        assert_equal(weights(network), before)
        for now, then in zip(optimizer.states, states):
            assert_equal(now, then)
        assert optimizer.state_dict() == {"num_updates": 1}

    run_ranks(2, check)


def test_a_run_with_a_skipped_step_equals_one_without_it():
    """Bias correction counts updates, not steps."""

    def check(ctx: ParallelContext, steps: list[tuple[int, bool]]) -> dict[str, torch.Tensor]:
        network, buckets, optimizer = built(ctx)
        for step, is_made in steps:
            backward(network, buckets, step, 2)
            optimizer.step(torch.tensor(float(is_made)), RATES)
        return weights(network)

    with_skips = run_ranks(1, check, [(7, False), (0, True), (8, False), (1, True)])[0]
    assert_equal(with_skips, run_ranks(1, check, [(0, True), (1, True)])[0])


def fp16_run(ctx: ParallelContext, steps: int, overflow_at: dict[int, int], restart_at: tuple[int, ...] = ()) -> list:
    """Train with a dynamic scale; `overflow_at`: step -> rank that overflows (-1: all). Rebuilt at each restart."""

    def fresh():
        scale = DynamicLossScale(initial=2.0**10, minimum=1.0, window=2, hysteresis=2, device=ctx.device)
        return *built(ctx, sharding="optim"), scale

    network, buckets, optimizer, scale = fresh()
    log = []
    for step in range(1, steps + 1):
        if step in restart_at:
            saved = [(piece.kind, piece.view.clone()) for piece in optimizer.state_pieces()]
            scalars = optimizer.state_dict(), scale.state_dict()
            network, buckets, optimizer, scale = fresh()
            for piece, (kind, values) in zip(optimizer.state_pieces(), saved, strict=True):
                assert piece.kind == kind
                piece.view.copy_(values)
            optimizer.load_state_dict(scalars[0])
            scale.load_state_dict(scalars[1])
            optimizer.publish()
        factor = scale.scale.item() * (2.0**40 if overflow_at.get(step) in (ctx.rank, -1) else 1.0)
        backward(network, buckets, step, 2, scale=factor)
        clip = clip_by_global_norm(buckets, 1.0, scale.scale)
        ok = clip.is_finite
        optimizer.step(ok, RATES, clip.divisor)
        scale.update(ok)
        log.append((ok.item(), scale.scale.item(), optimizer.state_dict()["num_updates"]))
    return [log, weights(network)]


def test_fp16_ranks_skip_together_and_states_continue_over_breaks():
    overflow_at = {3: 1, 5: 0, 6: -1}  # on one rank, on the other, on both
    unbroken = run_ranks(2, fp16_run, 8, overflow_at, params_dtype=torch.float16)
    log = [(1, 1024, 1), (1, 2048, 2), (0, 2048, 2), (1, 2048, 3), (0, 1024, 3), (0, 512, 3), (1, 512, 4), (1, 1024, 5)]
    assert unbroken[0][0] == unbroken[1][0] == [tuple(map(float, line)) for line in log]
    broken = run_ranks(2, fp16_run, 8, overflow_at, (2, 4, 6, 7), params_dtype=torch.float16)
    for ours, theirs in zip(broken, unbroken):
        assert ours[0] == theirs[0]
        assert_equal(ours[1], theirs[1])


def test_state_exists_before_the_first_update_was_made():
    """A run that has only skipped steps saves and resumes with zero moments."""
    overflow_at = dict.fromkeys((1, 2, 3), -1)
    unbroken = run_ranks(2, fp16_run, 5, overflow_at, params_dtype=torch.float16)
    broken = run_ranks(2, fp16_run, 5, overflow_at, (3,), params_dtype=torch.float16)
    assert broken[0][0] == unbroken[0][0] and unbroken[0][0][2][2] == 0
    assert_equal(broken[0][1], unbroken[0][1])


def test_rules_by_flag():
    adam = build_rule(OptimizerConfig(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-5))
    assert isinstance(adam, Adam) and (adam.beta1, adam.beta2, adam.eps) == (0.8, 0.9, 1e-5)
    sgd = build_rule(OptimizerConfig(optimizer="sgd", sgd_momentum=0.7))
    assert isinstance(sgd, Sgd) and sgd.momentum == 0.7


def test_sgd_over_buckets():
    def check(ctx: ParallelContext) -> None:
        network, buckets, _ = built(ctx, sharding="optim")
        optimizer = build_optimizer(OptimizerConfig(optimizer="sgd"), buckets)
        assert {piece.kind for piece in optimizer.state_pieces()} == {"momentum"}
        plain = Network(ctx)
        reference = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9, fused=True)
        for step in range(3):
            backward(network, buckets, step, 2)
            optimizer.step(True, Rates({"": 1e-3}, 0.0))
            reference.zero_grad()
            for sample in range(2):
                (plain(inputs(step, sample)) / 2).backward()
            reference.step()
        # the kernel rounds the end of a vector of 12 otherwise than the inside of a bucket
        assert_equal(weights(network), weights(plain), rtol=1e-5, atol=1e-7)

    run_ranks(1, check)
    run_ranks(2, check)
