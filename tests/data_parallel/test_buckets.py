"""Data parallelism over whole steps: DDP and ZeRO-1 against one rank and each other, bf16 masters, tied embedding."""

from __future__ import annotations

import pytest
import torch

from megatron.data_parallel.buckets import Buckets, parameters_in_model_order
from megatron.distributed.context import ParallelContext
from megatron.distributed.p2p import exchange
from megatron.optimizer.adam import Adam
from megatron.optimizer.clip import clip_by_global_norm
from megatron.optimizer.sharded import Optimizer
from megatron.topology.mesh import Mesh
from megatron.topology.param_spec import Normal, ParamSpec
from tests.helpers.ranks import run_ranks
from tests.helpers.small_network import RATES, WIDTH, Network, assert_equal, backward, built, inputs, train

OVERLAP = {"overlap_grad_reduce": True}
GATHER = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def test_gradients_are_sums_over_microbatches_and_replicas():
    def check(ctx: ParallelContext) -> None:
        network, buckets, _ = built(ctx)
        backward(network, buckets, step=0, num_samples=4)
        plain = Network(ctx)
        for sample in range(4):
            (plain(inputs(0, sample)) / 4).backward()
        for ours, theirs in zip(network.parameters(), plain.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)  # order of four terms

    for world in (1, 2, 4):
        run_ranks(world, check)


def test_one_rank_equals_plain_autograd_bitwise():
    def check(ctx: ParallelContext) -> None:
        network, buckets, _ = built(ctx, sharding="optim", overlap_grad_reduce=True, bucket_numel=64)
        backward(network, buckets, step=0, num_samples=3)
        plain = Network(ctx)
        for sample in range(3):
            (plain(inputs(0, sample)) / 3).backward()
        for ours, theirs in zip(network.parameters(), plain.parameters()):
            assert torch.equal(ours.grad, theirs.grad)

    run_ranks(1, check)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", [{}, OVERLAP, GATHER], ids=["plain", "overlap", "gather"])
def test_zero1_equals_ddp_bitwise(world, options, dtype):
    ddp = run_ranks(world, train, 4, 8, params_dtype=dtype)
    ranks = run_ranks_with(world, dtype, sharding="optim", bucket_numel=100, **options)
    for rank in ranks:
        assert_equal(rank["weights"], ddp[0]["weights"])
        assert rank["norms"] == ddp[0]["norms"]


def run_ranks_with(world: int, dtype: torch.dtype = torch.float32, **options):
    return run_ranks(world, train_with, 4, 8, options, params_dtype=dtype)


def train_with(ctx: ParallelContext, steps: int, num_samples: int, options: dict) -> dict:
    return train(ctx, steps, num_samples, **options)


@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_replicas_match_one_rank(sharding):
    alone = run_ranks_with(1)[0]
    for world in (2, 4):
        for rank in run_ranks_with(world, sharding=sharding):
            assert_equal(rank["weights"], alone["weights"], rtol=1e-5, atol=1e-6)  # order of eight terms
            assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_microbatch_on_two_replicas_is_the_same_sum_as_two_microbatches(dtype):
    """a + b either way: bitwise. Clipping is off, since the norm adds squares in another order."""

    def run(world):
        return run_ranks(world, train_with, 3, 2, {"clip": 0.0}, params_dtype=dtype)

    for rank in run(2):
        assert_equal(rank["weights"], run(1)[0]["weights"])


def test_gloo_processes_give_what_threads_give():
    for rank in run_ranks(2, train_with, 3, 4, {"sharding": "optim", **GATHER, "bucket_numel": 100}, backend="gloo"):
        expected = run_ranks(2, train_with, 3, 4, {"sharding": "optim"})[0]
        assert_equal(rank["weights"], expected["weights"])


@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_padding_stays_zero(sharding):
    def check(ctx: ParallelContext) -> None:
        network, buckets, optimizer = built(ctx, sharding=sharding, bucket_numel=1)
        for step in range(2):
            backward(network, buckets, step, 4)
            optimizer.step(True, RATES, clip_by_global_norm(buckets, 1.0).divisor)
        assert any(bucket.layout.padding for bucket in buckets)
        for bucket, states in zip(buckets, optimizer.states):
            is_padding = torch.ones(bucket.layout.numel, dtype=torch.bool)
            for slot in bucket.layout.slots:
                is_padding[slot.start : slot.stop] = False
            kept = is_padding[bucket.kept.start : bucket.kept.stop]
            assert not bucket.params[is_padding].any()
            assert not any(values[kept].any() for values in (bucket.master, *states.values()))

    run_ranks(2, check)


def test_bf16_masters_keep_updates_below_bf16_resolution():
    def check(ctx: ParallelContext) -> None:
        network, buckets, optimizer = built(ctx, sharding="optim")
        bucket = next(b for b in buckets if b.layout.key.decay and not b.layout.key.lr_group)
        assert bucket.has_master and bucket.grads.dtype == torch.float32
        start = bucket.params.clone()
        tiny = RATES._replace(lr={"": 1e-6}, weight_decay=0.0)
        changed = []
        for _ in range(400):
            backward(network, buckets, 0, 2)
            optimizer.step(True, tiny)
            changed.append(not torch.equal(bucket.params, start))
        assert not changed[0]  # one step of 1e-6 is lost in most bf16 weights
        assert changed[-1]  # but their sum is not

    # Near 1 a bf16 step is 0.0078: the vector of ones moves only through its master.
    def check_ones(ctx: ParallelContext) -> None:
        network, buckets, optimizer = built(ctx)
        scale = network.layers[0].scale
        tiny = RATES._replace(lr={"": 1e-4}, weight_decay=0.0)
        values = []
        for _ in range(60):
            backward(network, buckets, 0, 2)
            optimizer.step(True, tiny)
            values.append(scale.detach().clone())
        assert torch.equal(values[0], torch.ones_like(scale))
        assert (values[-1] != 1).any()

    run_ranks(2, check_ones, params_dtype=torch.bfloat16)


def test_bf16_gradients_may_be_reduced_in_bf16():
    def check(ctx: ParallelContext) -> torch.Tensor:
        network, buckets, optimizer = built(ctx, grad_dtype=torch.bfloat16, sharding="optim")
        assert all(b.grads.dtype == torch.bfloat16 and b.accumulates_in_place for b in buckets)
        backward(network, buckets, 0, 4)
        optimizer.step(True, RATES)
        return network.layers[1].weight.detach().clone()

    expected = run_ranks(2, train_with, 1, 4, {"clip": 0.0}, params_dtype=torch.bfloat16)[0]
    for weight in run_ranks(2, check, params_dtype=torch.bfloat16):
        torch.testing.assert_close(weight, expected["weights"]["decoder.layers.1.weight"], rtol=0.02, atol=0.02)


def test_a_parameter_of_two_stages_is_kept_once_and_waits_for_the_gradients_of_both():
    """As a tied embedding when one rank holds the first and the last stage."""

    def check(ctx: ParallelContext) -> None:
        stages = [Network(ctx, 1), Network(ctx, 1)]
        stages[1].layers[0].weight = stages[0].layers[0].weight
        buckets = Buckets(parameters_in_model_order(stages), ctx, overlap_grad_reduce=True)
        assert len(buckets.params) == 5
        for _ in range(2):
            buckets.zero_grads()
            buckets.start_step(2)
            for sample in range(2):
                for stage in stages:
                    stage(inputs(0, sample, ctx.params_dtype)).backward()
            buckets.finish_reduce()

    run_ranks(2, check)
    run_ranks(2, check, params_dtype=torch.bfloat16)


def test_gather_without_shards_is_refused():
    def check(ctx: ParallelContext) -> None:
        with pytest.raises(ValueError, match="--overlap-param-gather has nothing to gather"):
            built(ctx, overlap_param_gather=True)

    run_ranks(1, check)


# --- tied embedding on two stages -------------------------------------------------------------------------------------

VOCABULARY = 40


class FirstStage(torch.nn.Module):
    """Embedding, then a matrix."""

    def __init__(self, ctx: ParallelContext):
        super().__init__()
        self.embedding = ctx.parameter(tied_spec())
        self.weight = ctx.parameter(
            ParamSpec(name="decoder.layers.0.weight", shape=(WIDTH, WIDTH), axes=(None, None), init=Normal(0.3))
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.embedding(tokens, self.embedding) @ self.weight)


class LastStage(torch.nn.Module):
    """A matrix, then the output layer on a copy of the embedding (or on the first stage's own)."""

    def __init__(self, ctx: ParallelContext, embedding: torch.nn.Parameter | None = None):
        super().__init__()
        self.weight = ctx.parameter(
            ParamSpec(name="decoder.layers.1.weight", shape=(WIDTH, WIDTH), axes=(None, None), init=Normal(0.3))
        )
        self.embedding = ctx.parameter(tied_spec()) if embedding is None else embedding

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = torch.tanh(hidden @ self.weight) @ self.embedding.T
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def tied_spec() -> ParamSpec:
    return ParamSpec(
        name="embedding.word_embeddings.weight",
        shape=(VOCABULARY, WIDTH),
        axes=(None, None),
        init=Normal(0.5),
        partial_over=("embd",),
        lr_group="embedding",
    )


def train_tied(ctx: ParallelContext, sharding: str, options: dict) -> dict[str, torch.Tensor]:
    """Five clipped steps on eight samples, over one or two stages; weights and norm after each."""
    alone = ctx.mesh.pp == 1
    is_first, is_last = ctx.coords.pp == 0, ctx.coords.pp == ctx.mesh.pp - 1
    first = FirstStage(ctx)
    last = LastStage(ctx, first.embedding if alone else None)
    mine = [*(first.parameters() if is_first else ()), *(last.parameters() if is_last else ())]
    buckets = Buckets(mine, ctx, sharding=sharding, **options)
    optimizer = Optimizer(buckets, Adam(beta1=0.9, beta2=0.95, eps=1e-8))
    samples = [s for s in range(8) if s % ctx.mesh.dp == ctx.coords.dp]
    history = {}
    for step in range(5):
        buckets.zero_grads()
        buckets.start_step(len(samples))
        for sample in samples:
            generator = torch.Generator().manual_seed(100 * step + sample)
            tokens, labels = torch.randint(VOCABULARY, (2, 6), generator=generator)
            hidden = hand_over(ctx, first(tokens) if is_first else None)
            if is_last:
                received = hidden if alone else hidden.detach().requires_grad_()
                (last(received, labels) / 48).backward()
                gradient = None if alone else received.grad
            else:
                gradient = None
            if not alone:
                gradient = hand_back(ctx, gradient)
                if is_first:
                    hidden.backward(gradient)
        buckets.finish_reduce()
        clip = clip_by_global_norm(buckets, 0.1)
        optimizer.step(clip.is_finite, RATES, clip.divisor)
        for param in mine:
            history[f"{step}.{param.spec.name}.{ctx.coords.pp}"] = param.detach().clone()
        history[f"{step}.norm"] = clip.norm
    return history


def hand_over(ctx: ParallelContext, hidden: torch.Tensor | None) -> torch.Tensor:
    """The first stage's output, on both stages."""
    if ctx.mesh.pp == 1:
        return hidden
    if ctx.coords.pp == 0:
        for work in exchange(ctx.pp, sends=[(1, hidden.detach().contiguous())]):
            work.wait()
        return hidden
    received = torch.empty(6, WIDTH)
    for work in exchange(ctx.pp, receives=[(0, received)]):
        work.wait()
    return received


def hand_back(ctx: ParallelContext, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of the last stage's input, on the first stage."""
    if ctx.coords.pp == 1:
        for work in exchange(ctx.pp, sends=[(0, gradient)]):
            work.wait()
        return None
    received = torch.empty(6, WIDTH)
    for work in exchange(ctx.pp, receives=[(1, received)]):
        work.wait()
    return received


@pytest.mark.parametrize("options", [{}, {"bucket_numel": 64, **OVERLAP}], ids=["plain", "overlap-small"])
@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_tied_embedding_on_two_stages_stays_one_matrix(sharding, options):
    alone = run_ranks(1, train_tied, "no_shard", {})[0]
    ranks = run_ranks(4, train_tied, sharding, options, mesh=Mesh(dp=2, pp=2))
    name = "embedding.word_embeddings.weight"
    for step in range(5):
        copies = [
            rank[f"{step}.{name}.{stage}"] for rank in ranks for stage in (0, 1) if f"{step}.{name}.{stage}" in rank
        ]
        assert len(copies) == 4
        assert all(torch.equal(copy, copies[0]) for copy in copies)
        torch.testing.assert_close(copies[0], alone[f"{step}.{name}.0"], rtol=1e-5, atol=1e-6)  # order of sums
        assert len({rank[f"{step}.norm"].item() for rank in ranks}) == 1
        assert ranks[0][f"{step}.norm"].item() == pytest.approx(alone[f"{step}.norm"].item(), rel=1e-5)
