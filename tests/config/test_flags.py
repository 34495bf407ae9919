"""Fields as flags: spellings, kinds, help, and what a word is read as."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron.config.flags import (
    flag,
    help_texts,
    options,
    parse_int_pair,
    parse_signal,
)
from megatron.config.run import CONCERNS


@dataclass(frozen=True, kw_only=True)
class IdeaConfig:
    """Flags of an idea."""

    idea_width: int = flag(3, own=True)
    """How wide."""
    add_idea: bool = flag(True, names=("--disable-idea",))
    """Leave it out."""
    idea_ratio: float | None = flag(None)
    """What part."""
    idea_paths: tuple[str, ...] | None = flag(None, nargs="*")
    """Where."""


def option(name: str):
    return next(o for o in options(IdeaConfig) if o.field == name)


def test_kind_comes_from_the_annotation():
    assert [o.kind for o in options(IdeaConfig)] == [int, bool, float, str]


def test_a_switch_has_spellings_that_take_it_back():
    assert option("add_idea").names == ("--disable-idea",)
    assert option("add_idea").opposites == ("--idea", "--add-idea")


def test_help_is_the_string_under_the_field():
    assert help_texts(IdeaConfig)["idea_width"] == "How wide."


@pytest.mark.parametrize("concern", CONCERNS.values())
def test_every_field_has_help_that_ends_a_sentence(concern):
    texts = help_texts(concern)
    for o in options(concern):
        assert texts[o.field].endswith("."), o.field


def test_no_spelling_and_no_field_stands_twice():
    spellings = [s for c in CONCERNS.values() for o in options(c) for s in (*o.names, *o.opposites)]
    fields = [o.field for c in CONCERNS.values() for o in options(c)]
    assert len(spellings) == len(set(spellings))
    assert len(fields) == len(set(fields))


def test_none_gives_back_the_default_only_where_the_default_is_none():
    assert option("idea_ratio").read("None") is None
    with pytest.raises(ValueError, match="whole number"):
        option("idea_width").read("None")


def test_lists_are_tuples():
    assert option("idea_paths").read(["0.3", "a"]) == ("0.3", "a")


@pytest.mark.parametrize("text", ["128,0", "(128,0)", "128, 0"])
def test_pairs(text):
    assert parse_int_pair(text) == (128, 0)


@pytest.mark.parametrize("text", ["SIGUSR1", "usr1", "10"])
def test_signals_by_name_and_number(text):
    assert parse_signal(text) == "SIGUSR1"


@pytest.mark.parametrize("text", ["SIGNOPE", "999", "-1"])
def test_unknown_signals_are_refused(text):
    with pytest.raises(ValueError, match="signal"):
        parse_signal(text)
