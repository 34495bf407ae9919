"""Impossible combinations are refused before anything is built: one line each, with flags, values and a way out."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import ConfigError, RunConfig, parse
from megatron.config.flags import options
from megatron.config.run import CONCERNS

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 "


def refused(flags: str, world_size: int = 1) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        RunConfig.from_flags(SMALL + flags, world_size)
    assert all("\n" not in problem for problem in error.value.problems)
    return error.value.problems


# Field report B52: each must name both options with their values.
B52 = [
    ("--group-query-attention --num-query-groups 3", 1, "--num-query-groups 3", "--num-attention-heads 8"),
    ("--group-query-attention --num-query-groups 0", 1, "--num-query-groups 0", "below 1"),
    ("--group-query-attention --num-query-groups 16", 1, "--num-query-groups 16", "--num-attention-heads 8"),
    ("--hidden-size 100", 1, "--hidden-size 100", "--num-attention-heads 8"),
    (
        "--seq-length 33 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "--seq-length 33",
        "--tensor-model-parallel-size 2",
    ),
    (
        "--seq-length 36 --context-parallel-size 2 --tensor-model-parallel-size 4",
        8,
        "--seq-length 36",
        "--context-parallel-size 2 x --tensor-model-parallel-size 4",
    ),
    (
        "--train-iters 9 --lr-warmup-iters 10 --lr-decay-iters 5",
        1,
        "--lr-warmup-iters 10",
        "--lr-decay-iters 5",
    ),
    ("--global-batch-size 6 --micro-batch-size 4", 1, "--global-batch-size 6", "--micro-batch-size 4"),
    ("--num-experts 4 --expert-model-parallel-size 3", 3, "--expert-model-parallel-size 3", "--num-experts 4"),
    ("--num-experts 4 --moe-router-topk 5", 1, "--moe-router-topk 5", "--num-experts 4"),
    ("--vocab-size 0 --tokenizer-type NullTokenizer", 1, "--vocab-size 0", "below 1"),
    ("--lr 1e-4 --min-lr 1e-3", 1, "--min-lr 0.001", "--lr 0.0001"),
    ("--num-query-groups 2", 1, "--num-query-groups 2", "--group-query-attention"),
    ("--num-query-groups 1", 1, "--num-query-groups 1", "--group-query-attention"),
]


@pytest.mark.parametrize("flags, world, first, second", B52, ids=[row[2] + "/" + row[3] for row in B52])
def test_both_options_and_their_values_are_named(flags, world, first, second):
    assert any(first in problem and second in problem for problem in refused(flags, world))


PAIR = "--pipeline-model-parallel-size 2 "
ONE_LINE = [
    # processes and layout
    ("--tensor-model-parallel-size 2", 3, "does not divide the 3 processes"),
    ("--tensor-model-parallel-size 0", 1, "--tensor-model-parallel-size 0 is below 1"),
    ("--tensor-model-parallel-size 16 --hidden-size 128 --num-attention-heads 8", 16, "--num-attention-heads 8"),
    ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 8 --ffn-hidden-size 30", 4, "--ffn-h"),
    (
        "--tensor-model-parallel-size 2 --num-attention-heads 6 --hidden-size 66 --group-query-attention "
        "--num-query-groups 3",
        2,
        "one must divide the other",
    ),
    ("--tensor-model-parallel-size 2 --padded-vocab-size 201", 2, "does not divide --padded-vocab-size 201"),
    ("--context-parallel-size 2", 2, "context parallelism is not yet supported"),
    ("--expert-model-parallel-size 2", 2, "needs --num-experts"),
    ("--num-experts 4", 1, "mixture of experts is not yet supported"),
    ("--data-parallel-sharding-strategy optim_grads", 1, "not yet supported; use optim or no_shard"),
    ("--data-parallel-sharding-strategy no_shard --use-distributed-optimizer", 1, "contradict each other"),
    ("--overlap-param-gather --use-distributed-optimizer", 1, "--overlap-param-gather needs"),
    ("--overlap-param-gather --overlap-grad-reduce", 1, "--overlap-param-gather needs"),
    # pipeline (field report B40)
    (PAIR + "--num-layers 7", 2, "--num-layers 7"),
    (
        PAIR + "--num-layers 10 --num-layers-per-virtual-pipeline-stage 2",
        2,
        "--num-layers-per-virtual-pipeline-stage 2",
    ),
    (PAIR + "--num-layers 8 --num-layers-per-virtual-pipeline-stage 3", 2, "--num-layers-per-virtual-pipeline-stage 3"),
    (PAIR + "--pipeline-schedule interleaved", 2, "--pipeline-schedule interleaved needs virtual stages"),
    (PAIR + "--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2", 2, "use interleaved or gpipe"),
    (PAIR + "--microbatch-group-size-per-virtual-pipeline-stage 2", 2, "ignored without virtual stages"),
    (
        PAIR + "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 1",
        2,
        "--microbatch-group-size-per-virtual-pipeline-stage 1 is below --pipeline-model-parallel-size 2",
    ),
    # batches and lengths
    ("--train-samples 8 --train-iters 2", 1, "both set the length of the run"),
    ("--train-iters 99999999999999999999", 1, "is above 1099511627776, the longest a run can be"),
    ("--train-samples 1099511627777", 1, "is above 1099511627776, the longest a run can be"),
    ("--valid-data-path a", 1, "--valid-data-path without --train-data-path: nothing to train on"),
    ("--test-data-path a", 1, "--test-data-path without --train-data-path: nothing to train on"),
    ("--train-samples 8 --lr-warmup-iters 2", 1, "use --lr-warmup-samples"),
    ("--train-samples 8 --lr-decay-iters 2", 1, "use --lr-decay-samples"),
    ("--train-iters 8 --lr-decay-samples 2", 1, "use --lr-decay-iters"),
    ("--train-iters 8 --lr-warmup-samples 2", 1, "use --lr-warmup-iters"),
    ("--train-iters 8 --rampup-batch-size 1 1 4 --global-batch-size 4", 1, "needs --train-samples"),
    ("--train-samples 8 --rampup-batch-size 3 2 4 --global-batch-size 4", 1, "does not reach --global-batch-size 4"),
    ("--train-samples 8 --rampup-batch-size 0 2 4 --global-batch-size 4", 1, "each be at least 1"),
    (
        "--train-samples 8 --rampup-batch-size 2 1 4 --global-batch-size 4 --micro-batch-size 2",
        1,
        "passes through batches of 3",
    ),
    ("--train-samples 8 --step-batch-size-schedule '5:1'", 1, "the first step must start at 0 tokens"),
    (
        "--train-samples 8 --step-batch-size-schedule '0:2 64:3' --micro-batch-size 2",
        1,
        "a batch of 3 does not divide by --micro-batch-size 2",
    ),
    ("--train-iters 8 --step-batch-size-schedule '0:2 64:4'", 1, "needs --train-samples"),
    (
        "--train-samples 8 --step-batch-size-schedule 0:2 --global-batch-size 2",
        1,
        "--step-batch-size-schedule 0:2 and --global-batch-size 2: each sets",
    ),
    ("--eval-global-batch-size 3 --eval-micro-batch-size 2", 1, "--eval-global-batch-size 3 does not divide"),
    ("--global-batch-size 3 --eval-micro-batch-size 2", 1, "evaluation's global batch 3 does not divide"),
    ("--eval-micro-batch-size 0", 1, "--eval-micro-batch-size 0 is below 1"),
    ("--start-eval-at-iter 5", 1, "would be ignored without --eval-interval"),
    ("--profile-ranks 0", 1, "--profile-ranks 0 would be ignored without --profile"),
    ("--profile --profile-step-end 10", 1, "no step would be recorded"),
    ("--profile --use-pytorch-profiler", 1, "writes into --tensorboard-dir"),
    ("--profile --pytorch-profiler-collect-shapes", 1, "would be ignored without --use-pytorch-profiler"),
    ("--profile --profile-ranks 0 2", 2, "no rank 2 among 2 processes; use 0 to 1"),
    ("--recompute-granularity full --recompute-num-layers 1", 1, "needs --recompute-method; use uniform or block"),
    ("--recompute-granularity full --recompute-method block", 1, "needs --recompute-num-layers"),
    ("--recompute-num-layers 1", 1, "--recompute-num-layers 1 would be ignored without --recompute-granularity full"),
    ("--recompute-modules mlp", 1, "would be ignored without --recompute-granularity selective"),
    ("--recompute-activations --recompute-modules moe", 1, "--recompute-modules moe is not supported; use core_attn"),
    (
        "--recompute-activations --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        1,
        "the first means selective",
    ),
    ("--grad-reduce-in-bf16", 1, "--grad-reduce-in-bf16 needs --bf16"),
    ("--ddp-num-buckets 2 --ddp-bucket-size 9", 1, "both set how large a bucket is"),
    ("--micro-batch-size 0", 1, "--micro-batch-size 0 is below 1"),
    ("--seq-length 64 --max-position-embeddings 32", 1, "--max-position-embeddings 32"),
    # optimizer
    ("--train-iters 5 --lr-warmup-iters 5", 1, "not shorter than --train-iters 5"),
    ("--train-iters 9 --lr-warmup-fraction 0.1 --lr-warmup-iters 2", 1, "both set the warm-up"),
    ("--lr-warmup-fraction 1.5", 1, "--lr-warmup-fraction 1.5 is not in [0, 1)"),
    ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters"),
    ("--lr-decay-style WSD --train-iters 5 --lr-wsd-decay-iters 6", 1, "--lr-wsd-decay-iters 6 is longer"),
    ("--lr-wsd-decay-iters 1", 1, "would be ignored with --lr-decay-style linear"),
    ("--decoupled-min-lr 0.1", 1, "--decoupled-lr"),
    ("--weight-decay-incr-style linear", 1, "needs both --start-weight-decay and --end-weight-decay"),
    ("--start-weight-decay 0.1", 1, "--weight-decay-incr-style"),
    ("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", 1, "contradict each other"),
    ("--apply-wd-to-qk-layernorm", 1, "ignored without --qk-layernorm"),
    ("--adam-beta2 1", 1, "--adam-beta2 1.0 is not in [0, 1)"),
    ("--optimizer sgd --adam-backend apex", 1, "--adam-backend apex"),
    ("--optimizer lion", 1, "choose from adam, sgd"),
    # precision
    ("--fp16 --bf16", 1, "--fp16 and --bf16"),
    ("--fp32-residual-connection", 1, "--fp32-residual-connection would be ignored without --bf16 or --fp16"),
    ("--loss-scale 128", 1, "ignored without --fp16"),
    ("--fp16 --min-loss-scale 64 --initial-loss-scale 32", 1, "--min-loss-scale 64.0"),
    # model
    ("--swiglu --squared-relu", 1, "--swiglu and --squared-relu"),
    ("--swiglu --hidden-size 16", 1, "give --ffn-hidden-size"),
    ("--openai-gelu --swiglu", 1, "--openai-gelu and --swiglu"),
    ("--quick-geglu --swiglu", 1, "--swiglu and --quick-geglu"),
    ("--openai-gelu --quick-geglu", 1, "--openai-gelu and --quick-geglu"),
    ("--glu-linear-offset 1", 1, "--glu-linear-offset 1.0 would be ignored without a gated MLP"),
    ("--squared-relu --activation-func-clamp-value 7", 1, "--activation-func-clamp-value 7.0 would be ignored"),
    ("--swiglu --activation-func-clamp-value 0", 1, "--activation-func-clamp-value 0.0 is not above 0"),
    ("--hidden-dropout 1", 1, "--hidden-dropout 1.0 is not in [0, 1)"),
    ("--attention-dropout -0.1", 1, "--attention-dropout -0.1 is not in [0, 1)"),
    ("--window-size 4,1", 1, "--window-size 4,1"),
    ("--window-size 4", 1, "--window-size 4: expected two whole numbers"),
    ("--window-attn-skip-freq 2", 1, "--window-attn-skip-freq 2 would be ignored without --window-size"),
    ("--window-size 4,0 --window-attn-skip-freq [1,0]", 1, "--window-attn-skip-freq [1,0] has 2 entries for"),
    ("--window-size 4,0 --window-attn-skip-freq 0", 1, "--window-attn-skip-freq 0: every N-th layer needs"),
    ("--no-rope-freq 2", 1, "--no-rope-freq 2 would be ignored with --position-embedding-type learned_absolute"),
    ("--position-embedding-type rope --no-rope-freq [0]*5", 1, "--no-rope-freq [0]*5 has 5 entries for --num-layers 4"),
    ("--position-embedding-type rope --no-rope-freq x", 1, "--no-rope-freq x: expected a whole number"),
    ("--position-embedding-type yarn", 1, "yarn is not yet supported"),
    ("--no-position-embedding", 1, "--no-position-embedding contradicts"),
    ("--rotary-base 500000", 1, "--rotary-base 500000 would be ignored"),
    ("--position-embedding-type rope --rotary-percent 1.5", 1, "--rotary-percent 1.5"),
    ("--position-embedding-type rope --kv-channels 7", 1, "rotates 7 dimensions"),
    ("--position-embedding-type rope --rope-scaling-factor 4", 1, "without --use-rope-scaling"),
    ("--init-method-std 0", 1, "--init-method-std 0.0 is not above 0"),
    ("--init-method-xavier-uniform --init-method-std 0.1", 1, "--init-method-std 0.1 would be ignored with"),
    ("--no-pad-vocab-size --padded-vocab-size 128", 1, "--padded-vocab-size 128 and --no-pad-vocab-size"),
    # data
    ("--mock-data --data-path a", 1, "--mock-data and --data-path"),
    ("--data-path a --train-data-path b", 1, "--data-path and --train-data-path"),
    ("--train-data-path a --split 9,1", 1, "--split 9,1 and --train-data-path"),
    ("--data-path", 1, "--data-path names no data set"),
    ("--data-path a --split 0,0,0", 1, "--split 0,0,0"),
    ("--data-path a --split nan,1,1", 1, "--split nan,1,1"),
    ("--data-path a --split inf,1,1", 1, "--split inf,1,1"),
    ("--data-path a --split 1e2,1,1", 1, "--split 1e2,1,1"),
    ("--seed 4294967296", 1, "--seed 4294967296 is above 4294967295"),
    ("--data-path a --split 1,2,3,4", 1, "--split 1,2,3,4"),
    ("--dataloader-type external", 1, "--dataloader-type external is not supported"),
    ("--tokenizer-type NullTokenizer", 1, "needs --vocab-size"),
    ("--tokenizer-type SentencePieceTokenizer", 1, "needs --tokenizer-model"),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file a", 1, "needs --merge-file"),
    # checkpoints, logging, stopping
    ("--save a", 1, "--save a needs --save-interval"),
    ("--save a --save-interval 4 --save-retain-interval 6", 1, "--save-retain-interval 6"),
    ("--finetune", 1, "--finetune needs --load"),
    ("--ckpt-step 3", 1, "--ckpt-step 3 needs --load"),
    ("--exit-on-missing-checkpoint", 1, "needs --load"),
    ("--log-progress", 1, "--log-progress needs --save"),
    ("--wandb-project a", 1, "--wandb-exp-name"),
    ("--exit-signal SIGUSR1", 1, "without --exit-signal-handler"),
    ("--exit-signal SIGKILL --exit-signal-handler", 1, "no process can catch it"),
    ("--exit-interval 0", 1, "--exit-interval 0 is below 1"),
    ("--log-interval 0", 1, "--log-interval 0 is below 1"),
    ("--eval-interval 0", 1, "--eval-interval 0 is below 1"),
    ("--seed 0", 1, "--seed 0 is below 1"),
    ("--peak-tflops 0", 1, "--peak-tflops 0.0 is not above 0"),
]


@pytest.mark.parametrize("flags, world, said", ONE_LINE, ids=[row[0] for row in ONE_LINE])
def test_a_broken_rule_is_one_line(flags, world, said):
    assert sum(said in problem for problem in refused(flags, world)) == 1


LEGAL = [
    (PAIR + "--num-layers 12 --num-layers-per-virtual-pipeline-stage 3", 2),
    (PAIR + "--global-batch-size 1", 2),
    (PAIR + "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 3", 2),
    (PAIR + "--num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule gpipe", 2),
    ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2", 4),
    ("--train-samples 100 --rampup-batch-size 2 2 24 --global-batch-size 8 --micro-batch-size 2", 1),
    ("--data-path a --split '99,1,0'", 1),
    ("--position-embedding-type rope --no-position-embedding --rotary-percent 0.5", 1),
    ("--data-parallel-sharding-strategy optim --overlap-grad-reduce --overlap-param-gather", 2),
    ("--skip-train", 1),
    ("--skip-train --valid-data-path a", 1),
    ("--fp16 --fp32-residual-connection", 1),
    ("--fp32-residual-connection --no-fp32-residual-connection", 1),
    ("--init-method-xavier-uniform --embedding-init-method-std 0.1", 1),
    ("--window-size 4,0 --window-attn-skip-freq '([1] + [0]) * 2'", 1),
    ("--position-embedding-type rope --no-rope-freq 3", 1),
    ("--glu-linear-offset 0 --no-bias-gelu-fusion", 1),
    ("--quick-geglu --glu-linear-offset -0.5 --activation-func-clamp-value 7 --bias-gelu-fusion", 1),
    ("--save-interval 100 --no-load-optim --no-load-rng --log-params-norm", 1),
    ("--train-iters 0", 1),
    ("--train-samples 8 --train-iters 5 --train-samples None", 1),
    ("--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2", 1),
]


@pytest.mark.parametrize("flags, world", LEGAL, ids=[row[0] for row in LEGAL])
def test_what_is_possible_is_accepted(flags, world):
    RunConfig.from_flags(SMALL + flags, world)


def test_all_problems_at_once():
    problems = refused("--fp16 --bf16 --save x --min-lr 3 --hidden-size 63 --num-layer 3", world_size=0)
    for said in ("--fp16 and --bf16", "--save x", "--min-lr 3.0", "--hidden-size 63", "--num-layer ", "0 processes"):
        assert sum(said in problem for problem in problems) == 1, said


def test_what_is_required_is_named():
    with pytest.raises(ConfigError) as error:
        parse([], 1)
    named = [problem.split()[0] for problem in error.value.problems]
    assert named == [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--max-position-embeddings",
        "--micro-batch-size",
        "--train-iters",
        "--seq-length",
        "--tokenizer-type",
        "--data-path",
        "--lr",
    ]


def test_a_quoted_split_is_read_by_its_numbers():
    from megatron.config.data import split_shares

    assert split_shares("'99,1,0'") == (99, 1, 0)
    assert split_shares("969, 30, 1") == (969, 30, 1)
    assert split_shares(".5,.25") == (0.5, 0.25)


def words(option):
    """Strategy: the flag with some value, sensible or not."""
    if option.kind is bool:
        return st.sampled_from([[option.names[0]], [option.opposites[0]]])
    if option.choices is not None:
        value = st.sampled_from([str(choice) for choice in option.choices])
    elif option.kind is int:
        value = st.integers(-2, 12).map(str)
    elif option.kind is float:
        value = st.sampled_from(["-1", "0", "0.5", "1", "3", "nan", "inf"])
    else:
        value = st.sampled_from(["a", "3", "", "1,2", "Et|tL"])
    count = option.nargs if isinstance(option.nargs, int) else 1
    return st.lists(value, min_size=count, max_size=count).map(
        lambda values: [option.names[0], *values] if count > 1 else [f"{option.names[0]}={values[0]}"]
    )


ALL = [option for concern in CONCERNS.values() for option in options(concern) if option.field != "config"]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(ALL).flatmap(words), max_size=8), st.integers(0, 8))
def test_any_flags_are_accepted_or_refused_in_lines(groups, world_size):
    """No combination of flags ends in another exception; what is accepted has all its derived values."""
    flags = [word for group in groups for word in group]
    try:
        config = RunConfig.from_flags(SMALL + shlex.join(flags), world_size)
    except ConfigError as error:
        assert error.problems
        return
    assert config.num_microbatches(config.batch_size_at(0)) >= 1
