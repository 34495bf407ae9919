"""Words as users type them: idioms of their scripts, mistakes, help."""

from __future__ import annotations

import pytest

from megatron.config.command_line import help_page, read_words, split_words
from megatron.config.flags import concern_title
from megatron.config.run import CONCERNS


def read(*words: str):
    return read_words(words, CONCERNS.values())


def test_values_get_their_types():
    values = read("--num-layers", "4", "--lr", "1e-4", "--swiglu", "--data-path", "0.3", "a", "0.7", "b").values
    assert values == {"num_layers": 4, "lr": 1e-4, "swiglu": True, "data_path": ("0.3", "a", "0.7", "b")}


def test_an_unquoted_array_item_is_split():
    assert read("--lr-decay-style cosine", "--lr\n 1e-4").values == {"lr_decay_style": "cosine", "lr": 1e-4}


def test_a_value_with_a_space_stays_whole():
    assert split_words(["--load=my dir", "a b"]) == ["--load=my dir", "a b"]


def test_a_negative_value_is_not_a_flag():
    values = read("--window-size", "-1,0", "--null-tokenizer-pad-id", "-1").values
    assert values == {"window_size": (-1, 0), "null_tokenizer_pad_id": -1}
    values = read("--data-path", "-1", "a", "-.5e-3", "b", "--lr", "-1e-3").values
    assert values == {"data_path": ("-1", "a", "-.5e-3", "b"), "lr": -1e-3}


def test_the_last_word_counts():
    assert read("--lr", "1", "--swiglu", "--lr", "2", "--no-swiglu").values == {"lr": 2.0, "swiglu": False}


def test_both_spellings_of_a_flag_with_an_underscore():
    for name in ("--override-opt_param-scheduler", "--override-opt-param-scheduler"):
        assert read(name).values == {"override_opt_param_scheduler": True}


def test_every_mistake_is_reported_in_a_line():
    problems = read("--lr", "fast", "--normalization", "Norm", "--num-layer", "3", "--bf16", "--async-save").problems
    assert problems == [
        "--lr fast: expected a number",
        "--normalization Norm: choose from LayerNorm, RMSNorm",
        "--async-save: saving in the background is not yet supported; drop it, checkpoints are saved synchronously",
        "--num-layer is unknown; the nearest flag is --num-layers",
    ]


@pytest.mark.parametrize(
    "word, nearest",
    [("--num_layers", "--num-layers"), ("--tensor-parallel-size", "--tensor-model-parallel-size"), ("-lr", "--lr")],
)
def test_an_unknown_flag_names_the_nearest(word, nearest):
    (problem,) = read(word, "1").problems
    assert problem.endswith(f"the nearest flag is {nearest}")


def test_flags_are_not_abbreviated():
    assert "unknown" in read("--num-attention-head", "3").problems[0]


def test_a_word_without_a_flag_is_refused():
    assert read("pretrain.sh", "--bf16").problems == ["'pretrain.sh' belongs to no flag; flags start with --"]


@pytest.mark.parametrize("words", [("--lr",), ("--lr", "--bf16"), ("--rampup-batch-size", "1", "2"), ("--bf16=3",)])
def test_a_wrong_number_of_values_names_the_flag(words):
    (problem,) = read(*words).problems
    assert problem.startswith(words[0].split("=")[0])


def test_help_is_grouped_by_concern():
    page = help_page(CONCERNS.values())
    for concern in CONCERNS.values():
        assert f"\n{concern_title(concern)}:\n" in page
    assert "--moe-grouped-gemm" not in page
