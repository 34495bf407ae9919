"""Every flag of Megatron-LM 0.20 is covered, and "the same" is the same: name, type, default."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from megatron.config import ConfigError, RunConfig
from megatron.config.flags import options
from megatron.config.megatron_flags import DIFFERENCES, RENAMED, known_flags
from megatron.config.run import CONCERNS

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron_flags.tsv"
OPTIONS = {name: option for concern in CONCERNS.values() for option in options(concern) for name in option.names}
FLIPPED = {"--calculate-per-token-loss": OPTIONS["--no-calculate-per-token-loss"]}  # the default is the other way round
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 "


def rows():
    with GOLDEN.open() as file:
        return [row for row in csv.DictReader(file, delimiter="\t") if row["flag"] != "-h --help"]


def test_the_list_is_whole():
    assert len(rows()) == 838


def test_every_flag_is_covered_once():
    problems = []
    for row in rows():
        arity = 0 if row["action"] != "Store" else "*" if row["nargs"] in ("*", "+") else 1
        for name in row["flag"].split():
            places = [name in OPTIONS, name in FLIPPED, name in RENAMED, name in known_flags()]
            if sum(places) != 1:
                problems.append(f"{name} is covered {sum(places)} times")
            elif name in known_flags() and known_flags()[name].arity != arity:
                problems.append(f"{name} takes {arity} values, not {known_flags()[name].arity}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "row", [row for row in rows() if row["flag"].split()[0] in OPTIONS], ids=lambda row: row["flag"]
)
def test_the_same_flag_is_the_same(row):
    for name in row["flag"].split():
        check_same(OPTIONS[name], row)


def check_same(option, row):
    """Type, number of values and default agree with Megatron's, or `DIFFERENCES` says why not."""
    assert (option.kind is bool) == (row["action"] != "Store")
    if option.field in DIFFERENCES:
        return
    if option.kind is bool:
        assert row["default"] == str(option.default)
        return
    assert str(option.nargs) == row["nargs"]
    if row["type"] in ("int", "float", "str"):
        assert option.kind.__name__ == row["type"]
    if row["default"].startswith("<Signals."):
        assert row["default"] == f"<Signals.{option.default}: 15>"
    elif option.kind is float and option.default is not None:
        assert float(row["default"]) == option.default
    else:
        assert row["default"].strip("'") == str(option.default)
    if option.choices is not None:
        for choice in option.choices:
            assert f"'{choice}'" in row["choices"]


def test_no_difference_is_declared_for_a_field_that_is_gone():
    assert DIFFERENCES.keys() <= {option.field for option in OPTIONS.values()}


def test_our_own_flags_are_marked_and_only_they():
    theirs = {name for row in rows() for name in row["flag"].split()}
    for name, option in OPTIONS.items():
        assert option.own == (name not in theirs), name


def test_known_flags_do_not_repeat_fields():
    assert not known_flags().keys() & OPTIONS.keys()


def test_a_flag_without_effect_is_said_in_one_line_and_takes_its_values():
    config = RunConfig.from_flags(
        SMALL + "--attention-backend flash --no-rope-fusion --high-priority-stream-groups a b"
    )
    (line,) = [notice for notice in config.notices if "--no-rope-fusion" in notice]
    assert "--attention-backend" in line and "no effect" in line


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--distribute-saved-activations", "kept activations are not yet split"),
        ("--fp8-format hybrid", "--fp8-format hybrid: FP8 and FP4 are not yet supported"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp: sharding gradients and parameters is not yet supported"),
        ("--async-save", "--async-save: saving in the background is not yet supported"),
        ("--moe-grouped-gemm", "--moe-grouped-gemm: mixture of experts is not yet supported"),
        ("--model-parallel-size 2", "the flag is now --tensor-model-parallel-size"),
        ("--batch-size 2", "the flag is now --micro-batch-size"),
        ("--warmup 2", "the flag is now --lr-warmup-fraction"),
        ("--checkpoint-activations", "the flag is now --recompute-granularity"),
        ("--activations-checkpoint-method uniform", "the flag is now --recompute-granularity"),
    ],
)
def test_a_refused_flag_prints_its_sentence(words, sentence):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_flags(SMALL + words)
    (line,) = error.value.problems
    assert sentence in line


@pytest.mark.parametrize("words", ["--rerun-mode disabled", "--softmax-type vanilla", "--exp-avg-dtype fp32"])
def test_a_refused_flag_may_ask_for_nothing(words):
    RunConfig.from_flags(SMALL + words)


def test_old_spellings():
    config = RunConfig.from_flags(SMALL + "--use-rotary-position-embeddings --encoder-seq-length=16")
    assert config.model.position_embedding_type == "rope"
    assert config.data.seq_length == 16
