"""A run that is broken off goes on as if it had not been: to the bit on its own layout, to rounding on any other.

Dropout is on: its masks are a function of the sample's number, so they continue as well.
"""

from __future__ import annotations

import pytest

from megatron.config.run import parse
from megatron.models.gpt import build_stages
from megatron.training.start import stored_configuration
from tests.test_parity import BASE, DROPOUT, MODELS, Layout, one_process
from tests.training.runs import corpus, run_all

CHANGES = [
    (Layout(tp=2, sp=True), Layout(pp=2)),
    (Layout(pp=2, vpp=2), Layout(tp=2, dp=2, zero=True)),
    (Layout(dp=2, zero=True), Layout(tp=4, sp=True)),
    (Layout(), Layout(tp=2, pp=2)),
]


def broken(model: str, before: Layout, after: Layout, directory, extra: str = DROPOUT):
    """Losses and norms of ten steps, the last six by `after`."""
    flags = f"{MODELS[model]} {extra}"
    save = f"--save {directory} --save-interval 100 --exit-interval 4 {before.flags}"
    first = run_all(f"{flags} {save}", world=before.world, build=build_stages, base=BASE)[0]
    rest = run_all(f"{flags} --load {directory} {after.flags}", world=after.world, build=build_stages, base=BASE)[0]
    return rest._replace(records=first.records + rest.records)


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=[f"{a or 'one'}-to-{b}" for a, b in CHANGES])
@pytest.mark.parametrize("model", MODELS)
def test_resume_on_another_layout(model, before, after, tmp_path):
    whole, parts = one_process(model, DROPOUT), broken(model, before, after, tmp_path)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert parts.norms == pytest.approx(whole.norms, rel=1e-5)
    assert parts.rates == whole.rates


@pytest.mark.parametrize("precision", ["", "--bf16"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True), Layout(pp=2, dp=2, zero=True)], ids=str)
def test_resume_on_the_same_layout_is_exact(layout, precision, tmp_path):
    extra = f"{DROPOUT} {precision}"
    flags = f"{MODELS['gpt2']} {extra} {layout.flags}"
    whole = run_all(flags, world=layout.world, build=build_stages, base=BASE)[0]
    parts = broken("gpt2", layout, layout, tmp_path, extra)
    assert parts.losses == whole.losses and parts.norms == whole.norms


def test_configuration_from_the_checkpoint(tmp_path):
    """The model, its sequence length and its tokenizer come from there; layout, data and lengths from the flags."""
    run_all(f"{MODELS['llama']} --save {tmp_path} --save-interval 10", build=build_stages, base=BASE)
    typed = (
        f"--use-checkpoint-args --load {tmp_path} --micro-batch-size 2 --global-batch-size 4 --train-iters 12 "
        f"--lr 1e-3 --data-path {corpus()} --split 8,1,1 --tensor-model-parallel-size 2"
    )
    config = parse(typed.split(), 2, read_stored=stored_configuration)
    assert config.model.swiglu and config.num_kv_heads == 2 and config.data.seq_length == 16
    assert config.model.untie_embeddings_and_output_weights and config.model.normalization == "RMSNorm"
    assert config.origin("swiglu") == "stored" and config.origin("lr") == "typed"
    assert config.optimizer.lr == 1e-3 and config.training.micro_batch_size == 2
