"""Every layout trains the model that one process trains: losses and gradient norms of ten steps.

Layouts whose sums are the same sums in the same order (pipelines of an untied model) are equal to the bit. The others
are compared in fp32 to 1e-5 relative: tensor parallelism splits the sum over the hidden dimension, data parallelism the
sum over microbatches, and a tied embedding is summed by use before it is summed by microbatch.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from megatron.models.gpt import build_stages
from tests.training.runs import TINY, Result, run_all, same_numbers

MODELS = {
    "gpt2": "--num-layers 4 --hidden-size 32 --num-attention-heads 4",
    "llama": (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
        "--ffn-hidden-size 48 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
        "--untie-embeddings-and-output-weights"
    ),
}
BASE = (
    f"{TINY} --seq-length 16 --max-position-embeddings 16 --global-batch-size 4 --train-iters 10 --lr 2e-3 "
    "--lr-warmup-iters 2 --clip-grad 0.5"
)


class Layout(NamedTuple):
    """Sizes of the axes, and what is switched on."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    sp: bool = False
    zero: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> str:
        words = [f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"]
        if self.vpp > 1:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.vpp}")
        if self.pp * self.vpp > 4:
            words.append("--num-layers 8")
        words += ["--sequence-parallel"] * self.sp + ["--use-distributed-optimizer"] * self.zero
        return " ".join(words)

    def __str__(self) -> str:
        sizes = "".join(f"{name}{size}" for name, size in zip(("tp", "pp", "vpp", "dp"), self[:4]) if size > 1)
        return sizes + "sp" * self.sp + "zero" * self.zero


def all_layouts() -> list[Layout]:
    """Every mixture that makes sense and fits four ranks."""
    return [
        Layout(tp, pp, vpp, dp, sp, zero)
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        for dp in (1, 2)
        for vpp in ((1, 2) if pp > 1 else (1,))
        for sp in ((False, True) if tp > 1 else (False,))
        for zero in ((False, True) if dp > 1 else (False,))
        if 1 < tp * pp * dp <= 4
    ]


@cache
def one_process(model: str, extra: str = "") -> Result:
    return run_all(f"{MODELS[model]} {extra}", build=build_stages, base=BASE)[0]


def check(
    model: str,
    layout: Layout,
    extra: str = "",
    *,
    moves: str = "",
    backend: str = "threads",
    is_exact: bool = False,
) -> None:
    """Compare with one process; `extra` flags change the run, `moves` only how its parts travel."""
    layers = "--num-layers 8" if "--num-layers 8" in layout.flags else ""
    expected = one_process(model, f"{layers} {extra}")
    flags = f"{MODELS[model]} {layout.flags} {extra} {moves}"
    results = run_all(flags, world=layout.world, build=build_stages, base=BASE, backend=backend)
    for result in results:
        if is_exact:
            assert same_numbers(result, expected)
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
        assert result.norms == pytest.approx(expected.norms, rel=1e-5)
        assert result.rates == expected.rates


@pytest.mark.parametrize("layout", all_layouts(), ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_layout_trains_what_one_process_trains(model, layout):
    is_pure_pipeline = layout.tp == layout.dp == 1
    check(model, layout, is_exact=is_pure_pipeline and model == "llama")
    losses = one_process(model).losses
    assert len(losses) == 10 and losses[-1] < losses[0]


DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.1"
WITH_DROPOUT = [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2, vpp=2), Layout(tp=2, pp=2, sp=True), Layout(dp=2)]


@pytest.mark.parametrize("layout", WITH_DROPOUT, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_dropout_draws_the_same_masks_in_every_layout(model, layout):
    assert one_process(model, DROPOUT).losses != one_process(model).losses
    check(model, layout, DROPOUT)


RECOMPUTE = {
    "core": "--recompute-activations",
    "core-mlp": "--recompute-granularity selective --recompute-modules core_attn mlp",
    "uniform1": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "uniform2": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "block1": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
}
WITH_RECOMPUTE = [Layout(), Layout(tp=2, sp=True), Layout(pp=2, vpp=2), Layout(tp=2, pp=2), Layout(dp=2, zero=True)]


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize(
    ("model", "layout"), [("llama", layout) for layout in WITH_RECOMPUTE] + [("gpt2", Layout()), ("gpt2", Layout(tp=2))]
)
def test_recomputation_changes_no_bit(model, layout, mode):
    """Field report B14: with dropout, loss and gradient norm of every step are those of the same layout without."""
    flags = f"{MODELS[model]} {layout.flags} --train-iters 4 --hidden-dropout 0.3 --attention-dropout 0.3"
    plain = _run_with_dropout(flags, layout.world)
    for result in run_all(f"{flags} {RECOMPUTE[mode]}", world=layout.world, build=build_stages, base=BASE):
        assert same_numbers(result, plain)


@cache
def _run_with_dropout(flags: str, world: int) -> Result:
    return run_all(flags, world=world, build=build_stages, base=BASE)[0]


OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 4000"
OVER_GLOO = [
    ("gpt2", Layout(tp=2, pp=2, sp=True), ""),
    ("gpt2", Layout(pp=2, dp=2, zero=True), f"{OVERLAP} --overlap-param-gather"),
    ("llama", Layout(pp=2, vpp=2), ""),
    ("llama", Layout(tp=2, dp=2, zero=True), OVERLAP),
]


@pytest.mark.parametrize(("model", "layout", "moves"), OVER_GLOO, ids=[f"{m}-{x}" for m, x, _ in OVER_GLOO])
def test_layout_over_gloo_processes(model, layout, moves):
    check(model, layout, moves=moves, backend="gloo")


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, zero=True), Layout(pp=2, dp=2, zero=True)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_overlapped_reduction_and_small_buckets(model, layout):
    gather = " --overlap-param-gather" if layout.zero else ""
    check(model, layout, moves=OVERLAP + gather)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(pp=2, vpp=2)], ids=str)
def test_any_number_of_microbatches(layout, microbatches):
    extra = f"--global-batch-size {microbatches} --micro-batch-size 1 --train-iters 3 --eval-interval 2 --eval-iters 1"
    check("llama", layout, extra, is_exact=True)


SCHEDULES = [("gpipe", Layout(pp=2)), ("1f1b", Layout(pp=2)), ("gpipe", Layout(pp=2, vpp=2))]


@pytest.mark.parametrize(("schedule", "layout"), SCHEDULES, ids=[f"{s}-{x}" for s, x in SCHEDULES])
def test_schedules_compute_the_same(schedule, layout):
    check("llama", layout, moves=f"--pipeline-schedule {schedule}", is_exact=True)


UNEVEN = [
    "--decoder-first-pipeline-num-layers 1",
    "--decoder-last-pipeline-num-layers 1",
    "--num-layers 3 --account-for-embedding-in-pipeline-split",
    "--num-layers 3 --account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-layout Et|ttt|L",
    "--pipeline-model-parallel-layout E|tt|tt|L",
]


@pytest.mark.parametrize("flags", UNEVEN)
@pytest.mark.parametrize("model", MODELS)
def test_uneven_stages_compute_the_same(model, flags):
    pp = flags.count("|") + 1 if "|" in flags else 2
    layers = "--num-layers 3" if "--num-layers 3" in flags else ""
    moves = flags.removeprefix(layers)
    check(model, Layout(pp=pp), layers, moves=moves, is_exact=model == "llama")


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(pp=2, dp=2, zero=True)], ids=str)
def test_another_order_of_ranks_computes_the_same(layout):
    check("gpt2", layout, moves="--use-tp-pp-dp-mapping")


@pytest.mark.parametrize("extra", ["--optimizer sgd --clip-grad 0", "--decoupled-lr 1e-2 --decoupled-min-lr 1e-4"])
@pytest.mark.parametrize("mode", ["", "--no-calculate-per-token-loss"])
@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2), Layout(tp=2, dp=2, zero=True)], ids=str)
def test_no_factor_hides_behind_the_optimizer(layout, extra, mode):
    """SGD shows a wrong factor of the gradient that Adam would divide away."""
    check("gpt2", layout, f"{extra} {mode}")


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2, zero=True)], ids=str)
def test_bf16_and_fp16_layouts_stay_close(layout):
    """Activations round to 8 or 11 bits, so sums in another order differ; the curves stay together."""
    for precision, tolerance in (("--bf16", 5e-3), ("--fp16 --initial-loss-scale 1024", 2e-3)):
        expected = one_process("llama", precision)
        result = run_all(
            f"{MODELS['llama']} {layout.flags} {precision}", world=layout.world, build=build_stages, base=BASE
        )
        assert result[0].losses == pytest.approx(expected.losses, rel=tolerance)
        assert [record.is_skipped for record in result[0].records] == [r.is_skipped for r in expected.records]
