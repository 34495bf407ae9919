"""The worked variant: it trains, splits over ranks as the model it came from, and its flags are flags."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from examples.sandwich_norm.block import SandwichBlock
from examples.sandwich_norm.config import SandwichNormConfig
from megatron.config.run import RunConfig
from megatron.models.gpt import build_stages
from megatron.training.supervise import mesh_of
from tests.helpers.ranks import run_ranks
from tests.training.runs import Result, body, corpus

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "sandwich_norm" / "pretrain_sandwich_norm.py"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 4 --train-iters 8 --lr 3e-3 "
    "--hidden-dropout 0.1 --attention-dropout 0 --eval-iters 0 --log-interval 1 --num-workers 0 --progress-bar off "
    "--peak-tflops 1 "
)
build_sandwich = partial(build_stages, block=SandwichBlock)


def train(flags: str, world: int = 1, build=build_sandwich) -> Result:
    """The first rank's view of a run on threads."""
    config = RunConfig.from_flags(FLAGS + flags, world_size=world, extra_configs=(SandwichNormConfig,))
    options = {"mesh": mesh_of(config), "sequence_parallel": config.sequence_parallel, "seed": config.training.seed}
    return run_ranks(world, body, config, build, {}, None, **options)[0]


def assert_same(left: Result, right: Result) -> None:
    # Sums over hidden entries, tokens and ranks are in another order when a matrix is split.
    torch.testing.assert_close(torch.tensor(left.losses), torch.tensor(right.losses), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(left.norms), torch.tensor(right.norms), rtol=1e-4, atol=0)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm --apply-layernorm-1p"])
def test_layouts_train_alike(norm: str):
    flags = f"--normalization {norm} --data-path {corpus()} --split 8,1,1"
    alone = train(flags)
    assert alone.losses[-1] < alone.losses[0]
    for world, layout in (
        (2, "--tensor-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--use-distributed-optimizer"),
    ):
        assert_same(train(f"{flags} {layout}", world), alone)


def test_without_second_norms_it_is_the_plain_model():
    plain = train("", build=build_stages)
    none = train("--sandwich-norm none")
    assert none.losses == plain.losses and none.norms == plain.norms


def test_a_branch_is_as_large_as_its_second_norm_says():
    config = RunConfig.from_flags(FLAGS + "--sandwich-norm-init 0.25", extra_configs=(SandwichNormConfig,))
    (rms,) = run_ranks(1, branch_size, config)
    assert rms == pytest.approx(0.25, rel=1e-3)


def branch_size(ctx, config: RunConfig) -> float:
    """Root mean square of what the first block's attention branch adds."""
    (stage,) = build_sandwich(config, ctx, 128)
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(0))
    return float(stage.layers[0].post_attention_norm(x).detach().square().mean().sqrt())


@pytest.mark.parametrize("where, count", [("both", 4), ("attention", 2), ("mlp", 2), ("none", 0)])
def test_second_norms_stand_where_the_flag_says(where: str, count: int):
    config = RunConfig.from_flags(FLAGS + f"--sandwich-norm {where}", extra_configs=(SandwichNormConfig,))
    (names,) = run_ranks(1, parameter_names, config)
    assert sum(".post_" in name for name in names) == count


def parameter_names(ctx, config: RunConfig) -> list[str]:
    """Global names of all parameters."""
    return [parameter.spec.name for stage in build_sandwich(config, ctx, 128) for parameter in stage.parameters()]


def test_the_stream_may_be_wider_than_the_weights():
    flags = (
        "--bf16 --fp32-residual-connection --quick-geglu --window-size 8,0 --window-attn-skip-freq 2 --no-rope-freq 2"
    )
    config = RunConfig.from_flags(FLAGS + flags, extra_configs=(SandwichNormConfig,))
    assert run_ranks(1, stream_dtypes, config, params_dtype=torch.bfloat16) == [{torch.float32}]


def stream_dtypes(ctx, config: RunConfig) -> set[torch.dtype]:
    """Of what the blocks return."""
    (stage,) = build_sandwich(config, ctx, 128)
    seen = set()
    for layer in stage.layers:
        layer.register_forward_hook(lambda _, inputs, output: seen.add(output.dtype))
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    positions = torch.arange(32)[None]
    stage.logits(None, {"tokens": tokens, "position_ids": positions, "sample_ids": torch.zeros(1, dtype=torch.int64)})
    return seen


def test_help_shows_the_flags():
    done = subprocess.run([sys.executable, str(PROGRAM), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--sandwich-norm {both,attention,mlp,none}" in done.stdout
    assert "--sandwich-norm-init" in done.stdout and "--num-layers" in done.stdout


def test_a_wrong_flag_is_refused_before_anything_is_built():
    command = [sys.executable, str(PROGRAM), *FLAGS.split(), "--mock-data", "--sandwich-norm-init", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "error: --sandwich-norm-init 0.0 is not above 0" in done.stderr
