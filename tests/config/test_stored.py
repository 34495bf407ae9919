"""A configuration in a checkpoint: JSON and back, and typed > stored > default (field report B54)."""

from __future__ import annotations

import json

import pytest

from megatron.config import ConfigError, parse
from megatron.config.describe import describe
from megatron.config.flags import options
from megatron.config.run import CONCERNS
from megatron.config.stored import concern_from_dict, function_mismatches, to_dict

LLAMA = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --norm-epsilon 1e-6 "
    "--untie-embeddings-and-output-weights --disable-bias-linear --window-size 16,0 --window-attn-skip-freq 2 "
    "--seq-length 32 --max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 100 --hidden-dropout 0 "
)
RUN = "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data "


@pytest.fixture
def stored():
    config = parse((LLAMA + RUN + "--tensor-model-parallel-size 2 --data-cache-path old").split(), world_size=4)
    return json.loads(json.dumps(to_dict(config)))


def resume(stored, words: str, world_size: int = 1):
    run = "--use-checkpoint-args --load ckpt --micro-batch-size 1 --train-iters 20 --lr 2e-3 --mock-data "
    return parse((run + words).split(), world_size, read_stored=lambda checkpoint: stored)


def test_json_and_back(stored):
    config = parse((LLAMA + RUN + "--tensor-model-parallel-size 2 --data-cache-path old").split(), world_size=4)
    for name, concern in CONCERNS.items():
        assert concern_from_dict(concern, stored) == getattr(config, name)


def test_stored_values_apply_to_all_that_defines_the_model(stored):
    config = resume(stored, "")
    written = parse((LLAMA + RUN).split(), 1)
    assert config.model == written.model
    assert config.data.vocab_size == 100 and config.data.seq_length == 32
    assert config.origin("rotary_base") == "stored" and config.origin("lr") == "typed"
    text = "\n".join(describe(config))
    assert "stored in the checkpoint" in text
    (line,) = [line for line in text.splitlines() if "--rotary-base" in line]
    assert line.split() == ["--rotary-base", "500000", "stored", "in", "the", "checkpoint"]


def test_layout_batch_and_run_come_from_the_command_line(stored):
    config = resume(stored, "--save new --save-interval 5")
    assert config.parallel.tensor_model_parallel_size == 1 and config.data_parallel_size == 1
    assert config.training.micro_batch_size == 1 and config.optimizer.lr == 2e-3
    assert config.checkpoint.save == "new" and config.data.data_cache_path is None


def test_typed_values_win_where_they_may(stored):
    config = resume(stored, "--seq-length 16 --hidden-dropout 0.2 --tokenizer-type ByteTokenizer")
    assert config.data.seq_length == 16 and config.model.hidden_dropout == 0.2
    assert config.data.tokenizer_type == "ByteTokenizer" and config.data.vocab_size is None


def test_the_residual_stream_keeps_its_precision_until_told_otherwise():
    written = parse((LLAMA + RUN + "--bf16 --fp32-residual-connection").split(), 1)
    stored = json.loads(json.dumps(to_dict(written)))
    assert resume(stored, "--bf16").model.fp32_residual_connection
    assert not resume(stored, "--bf16 --no-fp32-residual-connection").model.fp32_residual_connection
    resume(stored, "")  # weights read in fp32: the stream is fp32 with or without


def test_a_typed_tokenizer_path_keeps_the_stored_kind(stored):
    stored["data"] |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "old", "vocab_size": None}
    data = resume(stored, "--tokenizer-model moved").data
    assert (data.tokenizer_type, data.tokenizer_model) == ("HuggingFaceTokenizer", "moved")


def test_the_tokenizer_can_be_left_out(stored):
    with pytest.raises(ConfigError, match="--tokenizer-type is required"):
        resume(stored, "--no-use-tokenizer-model-from-checkpoint-args")


@pytest.mark.parametrize(
    "words, said",
    [
        ("--hidden-size 128", "--hidden-size is 128 here and 64 in the checkpoint"),
        ("--normalization LayerNorm", "--normalization is LayerNorm here and RMSNorm in the checkpoint"),
        ("--rotary-base 10000", "--rotary-base is 10000 here and 500000 in the checkpoint"),
        ("--num-query-groups 4", "--num-query-groups is 4 here and 2 in the checkpoint"),
        ("--no-swiglu --geglu", "is geglu here and swiglu in the checkpoint"),
        ("--window-attn-skip-freq 4", "--window-attn-skip-freq is [1,1,1,0] here and [1,0,1,0] in the checkpoint"),
        ("--window-attn-skip-freq None", "--window-attn-skip-freq is not used here and [1,0,1,0] in the checkpoint"),
        ("--no-rope-freq [0,0,0,1]", "--no-rope-freq is [0,0,0,1] here and not used in the checkpoint"),
        ("--glu-linear-offset 1", "--glu-linear-offset is 1.0 here and 0.0 in the checkpoint"),
    ],
)
def test_a_typed_value_that_contradicts_the_weights_is_refused_with_both(stored, words, said):
    with pytest.raises(ConfigError) as error:
        resume(stored, words)
    assert any(said in problem and "drop" in problem for problem in error.value.problems)


def test_a_typed_value_that_says_the_same_is_accepted(stored):
    resume(stored, "--ffn-hidden-size 128 --kv-channels 8 --window-attn-skip-freq [1,0]*2")


def test_without_the_flag_a_mismatch_can_be_seen(stored):
    other = LLAMA.replace("--rotary-base 500000", "").replace("--swiglu", "--squared-relu --ffn-hidden-size 128")
    lines = function_mismatches(parse((other + RUN).split(), 1).model, stored)
    assert len(lines) == 2
    assert function_mismatches(parse((LLAMA + RUN).split(), 1).model, stored) == []


def test_padding_and_start_values_do_not_define_the_function(stored):
    words = LLAMA + RUN + "--make-vocab-size-divisible-by 8 --init-method-xavier-uniform --no-mask-vocab-padding"
    assert function_mismatches(parse(words.split(), 1).model, stored) == []


@pytest.mark.parametrize("found", [None, FileNotFoundError("ckpt is not there")])
def test_no_configuration_to_take_is_a_problem(found):
    def read_stored(checkpoint):
        if found is not None:
            raise found
        return None

    with pytest.raises(ConfigError) as error:
        parse("--use-checkpoint-args --load ckpt".split(), 1, read_stored=read_stored)
    (problem,) = error.value.problems
    assert problem.startswith("--use-checkpoint-args") and "ckpt" in problem


def test_a_checkpoint_of_another_version_can_be_read(stored):
    del stored["model"]["qk_layernorm"]
    stored["model"]["field_of_the_future"] = 3
    assert resume(stored, "").model.qk_layernorm is False


def test_every_model_field_is_either_function_or_free(stored):
    """A new field must be sorted: change it, and the function differs unless it is declared free."""
    from megatron.config.flags import unchecked
    from megatron.config.model import ModelConfig
    from megatron.config.stored import function_of

    # A typed value wins, or the padding is redone; the weights compute the same.
    free = set(
        "fp32_residual_connection hidden_dropout attention_dropout "
        "init_method_std init_method_xavier_uniform embedding_init_method_std "
        "mask_vocab_padding make_vocab_size_divisible_by pad_vocab_size padded_vocab_size".split()
    )

    # The base makes every field matter: rope for the rotary ones, GELU for its two switches, experts for top-k.
    base = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64,
            "position_embedding_type": "rope", "use_rope_scaling": True, "num_experts": 4,
            "rotary_seq_len_interpolation_factor": 2, "window_size": (4, 0),
            "group_query_attention": True, "num_query_groups": 2}  # fmt: skip
    learned = {**base, "position_embedding_type": "learned_absolute"}
    unbiased = {**base, "add_bias_linear": False}
    seen = set()
    for start in (base, learned, unbiased):
        before = function_of(unchecked(ModelConfig, start))
        for option in options(ModelConfig):
            value = start.get(option.field, option.default)
            changed = not value if option.kind is bool else (8, 0) if option.field == "window_size" else "2" if (
                option.field.endswith("_freq")) else ("rope" if value != "rope" else "none") if (
                option.kind is str) else (value or 0) + 1  # fmt: skip
            if function_of(unchecked(ModelConfig, {**start, option.field: changed})) != before:
                seen.add(option.field)
    fields = {option.field for option in options(ModelConfig)}
    assert seen & free == set()
    assert fields - seen - free == {"add_position_embedding"}  # an old spelling that decides nothing
