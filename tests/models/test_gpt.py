"""Every layout of the network against one process: weights, loss and every gradient, dropout on and off."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import nn

from megatron.distributed.context import single_process_context
from megatron.models.block import TransformerBlock
from megatron.models.gpt import build_stages
from megatron.pipeline_parallel.executor import run_schedule
from megatron.schedules.generators import build_schedule
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import run_ranks
from tests.models.layouts import GPT, LLAMA, VOCAB, batch, config_of, logits, run_layout, run_single

MODELS = {
    "gpt": GPT.format(dropout=0),
    "gpt-dropout": GPT.format(dropout=0.2),
    "llama": LLAMA.format(dropout=0),
    "llama-dropout": LLAMA.format(dropout=0.2),
}
QUICK = "--no-swiglu --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.02 "
LAYOUTS = {
    "tp2": (Mesh(tp=2), False, 1),
    "tp2-sp": (Mesh(tp=2), True, 1),
    "tp4": (Mesh(tp=4), False, 1),
    "tp4-sp": (Mesh(tp=4), True, 1),
    "pp2": (Mesh(pp=2), False, 1),
    "pp4": (Mesh(pp=4), False, 1),
    "pp2-vpp2": (Mesh(pp=2), False, 2),
    "tp2-sp-pp2": (Mesh(tp=2, pp=2), True, 1),
}
BATCHES = [batch(0), batch(1)]


@lru_cache
def _single(flags):
    return run_single(flags, BATCHES)


def _assert_same(got, expected):
    loss, weights, grads = got
    expected_loss, expected_weights, expected_grads = expected
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert weights.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        assert torch.equal(weights[name], weight), f"{name} starts from other values"
    floor = 1e-3 * max(
        grad.norm() for grad in expected_grads.values()
    )  # a bias of all keys has no gradient but rounding
    for name, grad in expected_grads.items():  # other partial sums, so not bitwise
        error = (grads[name] - grad).norm() / grad.norm().clamp(min=floor)
        assert error < 1e-5, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_layout_equals_one_process(model, layout):
    mesh, sequence_parallel, chunks = LAYOUTS[layout]
    _assert_same(run_layout(MODELS[model], mesh, BATCHES, sequence_parallel, chunks), _single(MODELS[model]))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["gpt", "llama-dropout"])
def test_more_ranks_than_key_value_heads(groups, sequence_parallel, kind):
    flags = MODELS[kind] + f" --group-query-attention --num-query-groups {groups} --qk-layernorm --add-qkv-bias "
    mesh = Mesh(tp=4)
    _assert_same(run_layout(flags, mesh, BATCHES, sequence_parallel), _single(flags))


def test_offset_and_clamp_of_a_gated_mlp():
    flags = MODELS["llama"] + QUICK
    assert _single(flags)[0] != _single(MODELS["llama"])[0]
    _assert_same(run_layout(flags, Mesh(tp=2, pp=2), BATCHES, sequence_parallel=True), _single(flags))


def test_xavier_uniform_starts_the_same_in_every_layout():
    flags = MODELS["llama"] + "--init-method-xavier-uniform --make-vocab-size-divisible-by 16 "
    mesh = Mesh(tp=2, pp=2)  # where the vocabulary has other padding than on one process
    _assert_same(run_layout(flags, mesh, BATCHES, sequence_parallel=True), _single(flags))


PATTERNS = "--window-size 4,0 --window-attn-skip-freq [1,0,0,1] --no-rope-freq 3 "


@pytest.mark.parametrize("layout", ["tp2-sp", "pp4", "pp2-vpp2", "tp2-sp-pp2"])
def test_layers_that_differ_are_the_same_ones_in_every_layout(layout):
    flags = MODELS["llama-dropout"] + PATTERNS
    mesh, sequence_parallel, chunks = LAYOUTS[layout]
    _assert_same(run_layout(flags, mesh, BATCHES, sequence_parallel, chunks), _single(flags))


def test_pipeline_alone_is_bitwise():
    got, expected = run_layout(MODELS["llama"], Mesh(pp=4), BATCHES), _single(MODELS["llama"])
    assert got[0] == expected[0]
    assert all(torch.equal(got[2][name], grad) for name, grad in expected[2].items())


def test_gloo_processes_agree_with_threads():
    mesh, flags = Mesh(tp=2), MODELS["llama-dropout"]
    got = run_layout(flags, mesh, BATCHES, sequence_parallel=True, backend="gloo")
    expected = run_layout(flags, mesh, BATCHES, sequence_parallel=True)
    assert got[0] == expected[0]
    assert all(torch.equal(got[2][name], grad) for name, grad in expected[2].items())


def test_dropout_changes_the_loss_and_follows_the_sample_not_the_batch():
    flags = MODELS["gpt-dropout"]
    assert _single(flags)[0] != _single(MODELS["gpt"])[0]
    joined = {name: torch.cat([b[name] for b in BATCHES]) for name in BATCHES[0]}
    assert run_single(flags, [joined])[0] == pytest.approx(_single(flags)[0], rel=1e-6)
    moved = [{**b, "sample_ids": b["sample_ids"] + 10} for b in BATCHES]
    assert run_single(flags, moved)[0] != _single(flags)[0]
    assert run_single(flags, BATCHES, init_seed=5)[0] != _single(flags)[0]


def test_evaluation_has_no_dropout():
    assert torch.equal(logits(MODELS["gpt-dropout"], BATCHES[0]), logits(MODELS["gpt"], BATCHES[0]))


def _counts(ctx, flags, chunks):
    stages = build_stages(config_of(flags, ctx.mesh, ctx.sequence_parallel, chunks), ctx, VOCAB)
    return {p.spec.name: (p.spec.numel, p.spec.valid_shape) for stage in stages for p in stage.parameters()}


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_parameter_count_is_the_same_in_every_layout(model):
    flags = MODELS[model] + "--make-vocab-size-divisible-by 1 "
    ((expected),) = run_ranks(1, _counts, flags, 1)
    for mesh, sequence_parallel, chunks in LAYOUTS.values():
        found = {}
        for rank in run_ranks(mesh.world_size, _counts, flags, chunks, mesh=mesh, sequence_parallel=sequence_parallel):
            found |= rank
        assert found == expected


def test_gpt_parameter_count_by_hand():
    h, f, layers, positions = 32, 48, 4, 16
    per_layer = 4 * h + 3 * h * h + 3 * h + h * h + h + 2 * h * f + f + h
    counts = run_ranks(1, _counts, MODELS["gpt"], 1)[0]
    assert sum(torch.Size(shape).numel() for _, shape in counts.values()) == (
        VOCAB * h + positions * h + layers * per_layer + 2 * h
    )


def test_vocabulary_padding_does_not_matter():
    expected = _single(MODELS["gpt"])
    for flags in ("--make-vocab-size-divisible-by 100 ", "--make-vocab-size-divisible-by 64 "):
        got = run_single(MODELS["gpt"] + flags, BATCHES)
        assert got[0] == pytest.approx(expected[0], rel=1e-6)
    # With the padding in the softmax the loss rises by log((100 + 28 exp(0)) / 100), about.
    open_softmax = run_single(MODELS["gpt"] + "--make-vocab-size-divisible-by 128 --no-mask-vocab-padding ", BATCHES)
    tokens = sum(float(b["loss_mask"].sum()) for b in BATCHES)
    rise = (open_softmax[0] - expected[0]) / tokens
    assert rise == pytest.approx(torch.tensor(1.28).log().item(), abs=0.02)


def test_all_padding_on_some_ranks():
    flags = MODELS["gpt"] + "--make-vocab-size-divisible-by 128 "
    _assert_same(run_layout(flags, Mesh(tp=4), BATCHES), _single(flags))


class Scaled(nn.Module):
    """A block of another class."""

    def __init__(self, config, ctx, layer_number):
        super().__init__()
        self.inner = TransformerBlock(config, ctx, layer_number)
        self.layer_number = layer_number

    def forward(self, hidden, info):
        """Half of what the block adds."""
        return hidden + 0.5 * (self.inner(hidden, info) - hidden)


def test_a_variant_passes_its_own_block():
    config = config_of(MODELS["gpt"], Mesh())
    (stage,) = build_stages(config, single_process_context(), VOCAB, block=Scaled)
    assert [layer.layer_number for layer in stage.layers] == [0, 1, 2, 3]
    (plain,) = build_stages(config, single_process_context(), VOCAB)
    assert not torch.equal(stage(None, BATCHES[0]).loss_sum, plain(None, BATCHES[0]).loss_sum)


@pytest.mark.parametrize("model", ["gpt-dropout", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near_fp32(model, dtype):
    precision = "--bf16 " if dtype == torch.bfloat16 else "--fp16 "
    expected = _single(MODELS[model])
    loss, _, grads = run_single(MODELS[model] + precision, BATCHES, params_dtype=dtype)
    assert loss == pytest.approx(expected[0], rel=2e-3)
    for name, grad in expected[2].items():
        assert grads[name].dtype == dtype
        assert (grads[name].float() - grad).norm() / grad.norm() < 0.05, name


WIDE = "--bf16 --fp32-residual-connection "


def _stream(ctx, flags, chunks):
    """Dtypes in and out of each layer in a step, of the gradients between stages, and of what is sent."""
    stages = build_stages(config_of(flags, ctx.mesh, ctx.sequence_parallel, chunks), ctx, VOCAB)
    seen = set()
    for stage in stages:
        seen.add(stage.hidden_dtype)
        for layer in stage.layers:
            layer.register_forward_hook(lambda _, inputs, output: seen.update((inputs[0].dtype, output.dtype)))
            layer.register_full_backward_hook(lambda _, inputs, outputs: seen.update(g.dtype for g in outputs))
    schedule = build_schedule("interleaved" if chunks > 1 else "1f1b", ctx.pp.size, 2, chunks)
    run_schedule(schedule, stages, BATCHES, ctx.pp)
    return seen, {p.grad.dtype for stage in stages for p in stage.parameters()}


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2-vpp2", "tp2-sp-pp2"])
@pytest.mark.parametrize("model", ["gpt-dropout", "llama"])
def test_an_fp32_residual_stream_is_fp32_everywhere(model, layout):
    mesh, sequence_parallel, chunks = LAYOUTS[layout]
    for flags, dtype in ((WIDE, torch.float32), ("--bf16 ", torch.bfloat16)):
        ranks = run_ranks(
            mesh.world_size,
            _stream,
            MODELS[model] + flags,
            chunks,
            mesh=mesh,
            sequence_parallel=sequence_parallel,
            params_dtype=torch.bfloat16,
        )
        assert all(rank == ({dtype}, {torch.bfloat16}) for rank in ranks)


def test_an_fp32_residual_stream_in_every_layout():
    flags, options = MODELS["llama-dropout"] + WIDE, {"params_dtype": torch.bfloat16}
    loss, _, grads = run_single(flags, BATCHES, **options)
    assert loss != run_single(MODELS["llama-dropout"] + "--bf16 ", BATCHES, **options)[0]
    for backend, chunks in (("threads", 1), ("threads", 2), ("gloo", 1)):  # the same sums in the same order
        got = run_layout(flags, Mesh(pp=2), BATCHES, chunks=chunks, backend=backend, **options)
        assert got[0] == loss and all(torch.equal(got[2][name], grad) for name, grad in grads.items())
    for mesh, sequence_parallel in ((Mesh(tp=2), False), (Mesh(tp=2), True), (Mesh(tp=2, pp=2), True)):
        got = run_layout(flags, mesh, BATCHES, sequence_parallel, **options)
        # Each rank rounds its part of a product to bf16 (2^-9) before the parts are added, eight times in a row.
        assert got[0] == pytest.approx(loss, rel=1e-4)
        for name, grad in grads.items():
            assert (got[2][name] - grad).norm() / grad.norm() < 0.03, name


def test_an_fp32_residual_stream_is_nearer_to_fp32():
    def hidden(flags, dtype, weights=None):
        (stage,) = build_stages(
            config_of(MODELS["llama"] + flags, Mesh()), single_process_context(params_dtype=dtype), VOCAB
        )
        for parameter, weight in zip(stage.parameters(), weights or stage.parameters(), strict=True):
            parameter.data.copy_(weight)
        weights = list(stage.parameters())
        stage.head = None
        with torch.no_grad():
            return stage(None, BATCHES[0]).float(), weights

    wide, weights = hidden(WIDE, torch.bfloat16)
    narrow, _ = hidden("--bf16 ", torch.bfloat16)
    exact, _ = hidden("", torch.float32, weights)
    # At the start branches add little to the stream, whose own rounding is then most of the error.
    assert (wide - exact).norm() < 0.5 * (narrow - exact).norm()


@pytest.mark.parametrize("model", ["gpt-dropout", "llama"])
def test_runs_on_meta_tensors(model):
    context = single_process_context(device="meta", params_dtype=torch.bfloat16)
    (stage,) = build_stages(config_of(MODELS[model] + "--bf16 ", Mesh()), context, VOCAB)
    stage(None, {name: value.to("meta") for name, value in BATCHES[0].items()}).loss_sum.backward()
    assert all(p.grad.shape == p.shape and p.grad.dtype == torch.bfloat16 for p in stage.parameters())
