"""One step: what a token weighs, wherever it lands, and what an empty step does."""

from __future__ import annotations

import pytest
import torch

from megatron.config.run import RunConfig
from megatron.ledger.writer import Ledger
from megatron.topology.mesh import Mesh
from megatron.training.metrics import ROW
from megatron.training.report import Reporter
from megatron.training.setup import build_run
from megatron.training.step import Wishes, count_targets, loss_weights, train_step
from tests.helpers.ranks import run_ranks
from tests.training.bigram import build_bigram
from tests.training.runs import TINY, corpus

SEQ = 32
COUNTS = (3, 29, 0, 0)
"""Unmasked targets of four samples: the last two are fully masked."""


def sample(number: int, count: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(127, (1, SEQ + 1), generator=draw)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": (torch.arange(SEQ) < count).float()[None],
        "position_ids": torch.arange(SEQ)[None],
        "sample_ids": torch.tensor([number]),
    }


def joined(samples):
    return {name: torch.cat([one[name] for one in samples]) for name in samples[0]}


def step_on(ctx, counts, micro_batch_size, flags):
    """(row of metrics, all gradients in order of name) after one step on these samples, dealt as the loader deals."""
    world = ctx.mesh.world_size
    config = RunConfig.from_flags(f"{TINY} --data-path {corpus()} --train-iters 1 {flags}", world_size=world)
    reporter = Reporter(is_first=False, logging=config.logging, total_iterations=1, world_size=world)
    run = build_run(config, ctx, build_bigram, Ledger(None), reporter)
    samples = [sample(number, count) for number, count in enumerate(counts)]
    block = micro_batch_size * ctx.mesh.dp
    starts = range(ctx.coords.dp * micro_batch_size, len(samples), block)
    batches = [joined(samples[start : start + micro_batch_size]) for start in starts]
    result = train_step(run, batches, Wishes())
    grads = {param.spec.name: param.grad.clone() for param in run.buckets.params}
    return dict(zip(ROW, result.row.tolist())), grads, bool(result.ok)


def reference(counts):
    """Loss and gradients of sum of token losses / unmasked tokens, in fp64, from the same initial weights."""

    def body(ctx):
        config = RunConfig.from_flags(f"{TINY} --data-path {corpus()} --train-iters 1")
        stage = build_bigram(config, ctx, 128)[0].double()
        output = stage(None, joined([sample(number, count) for number, count in enumerate(counts)]))
        loss = output.loss_sum / sum(counts)
        loss.backward()
        return loss.item(), {param.spec.name: param.grad for param in stage.parameters()}

    return run_ranks(1, body)[0]


def is_close(grad, expected):
    """Within 1e-5 of the whole: fp32 against fp64, or sums in another order."""
    return (grad.double() - expected.double()).norm() <= 1e-5 * expected.double().norm()


LAYOUTS = [
    ("one pass", Mesh(), COUNTS[:2], 2),
    ("two microbatches", Mesh(), COUNTS[:2], 1),
    ("two replicas", Mesh(dp=2), COUNTS[:2], 1),
    ("two replicas, two microbatches, half of them empty", Mesh(dp=2), COUNTS, 1),
    ("empty microbatches first", Mesh(dp=2), COUNTS[::-1], 1),
    ("two stages", Mesh(pp=2), COUNTS, 1),
]


@pytest.mark.parametrize(("mesh", "counts", "micro"), [row[1:] for row in LAYOUTS], ids=[row[0] for row in LAYOUTS])
def test_a_token_weighs_the_same_wherever_it_lands(mesh, counts, micro):
    flags = f"--pipeline-model-parallel-size {mesh.pp}"
    loss, grads = reference(counts)
    for values, mine, ok in run_ranks(mesh.world_size, step_on, counts, micro, flags, mesh=mesh):
        assert ok and values["tokens"] == sum(counts)
        assert values["loss"] == pytest.approx(loss, rel=1e-6)
        for name, grad in mine.items():
            assert is_close(grad, grads[name])


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)], ids=["one", "dp2"])
@pytest.mark.parametrize("flags", ["", "--no-calculate-per-token-loss"])
def test_a_step_without_targets_is_finite_and_has_no_gradient(mesh, flags):
    for values, grads, ok in run_ranks(mesh.world_size, step_on, (0, 0), 1, flags, mesh=mesh):
        assert ok and values["loss"] == values["tokens"] == values["grad_norm"] == 0
        assert all(not grad.any() for grad in grads.values())


def test_megatrons_mean_of_microbatch_means():
    """Each microbatch's mean counts alike: (1/3 + 1/29) / 2 a token, not 1/32; the printed loss is the tokens'."""
    values, grads, _ = run_ranks(1, step_on, COUNTS[:2], 1, "--no-calculate-per-token-loss")[0]
    first, second = reference((3,))[1], reference((0, 29))[1]
    for name, grad in grads.items():
        assert is_close(grad, (first[name] + second[name]) / 2)
    assert values["loss"] == pytest.approx(reference(COUNTS[:2])[0], rel=1e-6)
    for replica in run_ranks(2, step_on, COUNTS[:2], 1, "--no-calculate-per-token-loss", mesh=Mesh(dp=2)):
        for name, grad in replica[1].items():
            assert is_close(grad, grads[name])


def test_worked_example_of_the_weights():
    """Sums 6.0 over 3 tokens and 29.0 over 29 give 35/32, not the mean of the means, 1.5."""

    def body(ctx):
        batches = [sample(0, 3), sample(1, 29)]
        targets = count_targets(batches)
        sums = torch.tensor([6.0, 29.0])
        return [
            float((sums * loss_weights(targets, targets.sum(), ctx, is_per_token=is_per_token)).sum())
            for is_per_token in (True, False)
        ]

    assert run_ranks(1, body)[0] == pytest.approx([1.09375, 1.5])
