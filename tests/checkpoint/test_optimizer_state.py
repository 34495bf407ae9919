"""The real buckets and optimizer through a checkpoint: DDP and ZeRO-1, 16-bit and fp32, any layout to any other."""

import itertools

import pytest
import torch

from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.pieces import range_pieces
from megatron.checkpoint.save import save_checkpoint
from megatron.data_parallel.buckets import Buckets
from megatron.optimizer.adam import Adam
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.sharded import Optimizer
from tests.checkpoint.layouts import Layout, expected, specs_of_stage
from tests.helpers.ranks import run_ranks

LAYOUTS = [
    Layout(),
    Layout(tp=2, dp=2, zero=True, sequence_parallel=True),
    Layout(pp=2, dp=2, zero=True, divisor=50),
    Layout(tp=2, pp=2, divisor=64),
]


def optimizer_of(ctx, layout):
    params = [ctx.parameter(spec) for spec in specs_of_stage(layout, ctx.coords.pp)]
    sharding = "optim" if layout.zero else "no_shard"
    buckets = Buckets(params, ctx, sharding=sharding, bucket_numel=1000)
    return Optimizer(buckets, Adam(beta1=0.9, beta2=0.95, eps=1e-8))


def pieces_of(ctx, optimizer):
    return [
        piece
        for source in (optimizer.buckets.parameter_pieces(), optimizer.state_pieces())
        for kind, spec, start, _, view, sharded_over in source
        for piece in range_pieces(kind, spec, ctx.mesh, ctx.coords, start, view, sharded_over=sharded_over)
    ]


def value(piece):
    """The piece's part of the test value; fp32 masters round to the 16-bit weights, as in training."""
    name = piece.name.replace("param/", "master/")
    wide = expected(name, piece, torch.float32)
    return wide.to(piece.view.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_weights_masters_and_moments(tmp_path, source, dtype):
    def save(ctx):
        pieces = pieces_of(ctx, optimizer_of(ctx, source))
        for piece in pieces:
            piece.view.copy_(value(piece))
        save_checkpoint(tmp_path, 3, ctx, pieces, scalars={}, config={})

    def load(ctx, target):
        optimizer = optimizer_of(ctx, target)
        load_checkpoint(tmp_path, ctx, pieces_of(ctx, optimizer))
        optimizer.publish()
        pieces = pieces_of(ctx, optimizer)
        kinds = {piece.name.partition("/")[0] for piece in pieces}
        assert kinds == {"param", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype != torch.float32 else set())
        for piece in pieces:
            assert torch.equal(piece.view, value(piece)), piece.name

    run_ranks(source.mesh.world_size, save, mesh=source.mesh, params_dtype=dtype)
    for target in LAYOUTS:
        run_ranks(target.mesh.world_size, load, target, mesh=target.mesh, params_dtype=dtype)


@pytest.mark.parametrize("dtypes", list(itertools.permutations([torch.bfloat16, torch.float32])), ids=str)
def test_a_change_of_precision_goes_on_with_the_same_fp32_weights(tmp_path, dtypes):
    """The next update, made from loaded weights and moments, is bitwise the one that the first run makes."""

    def step(ctx, optimizer):
        optimizer.buckets.zero_grads()
        optimizer.step(True, Rates(lr={"": 0.1}, weight_decay=0.1))
        pieces = pieces_of(ctx, optimizer)
        kind = "param" if ctx.params_dtype == torch.float32 else "master"
        return {p.name.partition("/")[2]: p.view.clone() for p in pieces if p.name.startswith(f"{kind}/")}

    def begin(ctx):
        optimizer = optimizer_of(ctx, Layout())
        for piece in pieces_of(ctx, optimizer):
            piece.view.copy_(value(piece).abs())
        pieces = pieces_of(ctx, optimizer)
        save_checkpoint(tmp_path, 1, ctx, pieces, scalars=optimizer.state_dict(), config={})
        return step(ctx, optimizer)

    def go_on(ctx):
        optimizer = optimizer_of(ctx, Layout())
        found = load_checkpoint(tmp_path, ctx, pieces_of(ctx, optimizer))
        optimizer.load_state_dict(found.scalars)
        optimizer.publish()
        return step(ctx, optimizer)

    (first,), (second,) = run_ranks(1, begin, params_dtype=dtypes[0]), run_ranks(1, go_on, params_dtype=dtypes[1])
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
