"""Patterns of layers: Megatron's two spellings, and nothing that Python would run."""

from __future__ import annotations

import pytest

from megatron.config import RunConfig
from megatron.config.layer_pattern import as_list, evaluate, layers_of, parse_layer_pattern

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 "


@pytest.mark.parametrize(
    "text, value",
    [
        ("3", 3),
        (" 2 ", 2),
        ("[1,0,1]", (1, 0, 1)),
        ("[ 1, 0 ]", (1, 0)),
        ("1,0", (1, 0)),  # as a list in a YAML file arrives
        ("([1]*3+[0])*2", (1, 1, 1, 0, 1, 1, 1, 0)),
        ("2*[0]+[1]*(1+1)", (0, 0, 1, 1)),
        ("[]", ()),
    ],
)
def test_spellings(text, value):
    assert evaluate(text) == value
    assert parse_layer_pattern(text) == text.strip()
    if isinstance(value, tuple):
        assert evaluate(as_list(tuple(map(bool, value)))) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "1.5",
        "x",
        "[2]",
        "[1,[0]]",
        "[1]+2",
        "[1]*[1]",
        "[1]**9",
        "[1]*10**9",
        "[1]*999999",
        "f()",
        "[True]",
    ]
    + ["[x for x in y]", "'1'", "[1", "(" * 5000, "[0]*99999999999999999999"],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="a list of 0 and 1|at least 1"):
        parse_layer_pattern(text)


def test_a_number_counts_layers_from_one():
    assert layers_of("2", 5, every_nth=True) == (False, True, False, True, False)
    assert layers_of("2", 5, every_nth=False) == (True, False, True, False, True)
    assert layers_of("[1,0,0]", 3, every_nth=True) == layers_of("[1,0,0]", 3, every_nth=False) == (True, False, False)


def test_layers_of_a_model():
    def layers(flags):
        model = RunConfig.from_flags(SMALL + flags).model
        return as_list(model.window_layers), as_list(model.rope_layers)

    every, none = "[1,1,1,1]", "[0,0,0,0]"
    assert layers("") == (none, none)
    assert layers("--window-size 4,0 --position-embedding-type rope") == (every, every)
    # A window's 1 is a layer with it; a 1 of --no-rope-freq is a layer without rotation.
    patterns = "--window-size 4,0 --window-attn-skip-freq {} --position-embedding-type rope --no-rope-freq {}"
    assert layers(patterns.format(4, 4)) == ("[1,1,1,0]", "[1,1,1,0]")
    assert layers(patterns.format("[1,0]*2", "[1,0]*2")) == ("[1,0,1,0]", "[0,1,0,1]")
    assert layers(patterns.format(1, 1)) == (none, none)
