"""Words of a command line (or of a file) -> values of fields, with every mistake collected instead of the first.

argparse does the splitting and the help; values are read here, so that one run of the parser finds all bad ones.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megatron.config.flags import Option, concern_summary, concern_title, help_texts, options
from megatron.config.megatron_flags import RENAMED, Kind, MegatronFlag, known_flags

_DESCRIPTION = """Train a GPT-style language model. Flags are Megatron-LM's; docs/flags.md says where they differ.
A flag that stands twice counts the last time. Every switch has a word that takes it back (--no-swiglu, --bias-linear);
the value None gives a flag whose default is None back its default."""


_NEGATIVE_VALUE = re.compile(r"-\.?\d")
"""Such a word is a value and no flag, whatever follows: -1, -1,0, -1e-5."""


class Reading(NamedTuple):
    """What a list of words says."""

    values: dict[str, Any]  # field -> value
    problems: list[str]
    notices: list[str]


class _Stop(Exception):
    """argparse cannot go on."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise _Stop(message.removeprefix("argument "))


def read_words(words: Sequence[str], concerns: Iterable[type]) -> Reading:
    """Read `words` as flags of `concerns` and of Megatron-LM."""
    reading = Reading({}, [], [])
    ineffective: dict[str, list[str]] = {}
    words = _rename(split_words(words))
    parser = _build(tuple(concerns), reading)
    _add_megatron(parser, {word.partition("=")[0] for word in words}, reading, ineffective)
    try:
        _, rest = parser.parse_known_args(words)
    except _Stop as stop:
        reading.problems.append(str(stop))
        rest = []
    reading.problems.extend(_unknown(rest, parser))
    for sentence, names in ineffective.items():
        verb = "has" if len(names) == 1 else "have"
        reading.notices.append(f"{', '.join(names)} {verb} no effect: {sentence}")
    return reading


def split_words(words: Iterable[str]) -> list[str]:
    """Split an item such as "--lr 1e-4", which an unquoted element of a bash array becomes, into its words."""
    split: list[str] = []
    for word in words:
        head = word.strip().split(maxsplit=1)
        if word.strip().startswith("--") and len(head) == 2 and "=" not in head[0]:
            split.extend(word.split())
        else:
            split.append(word)
    return split


def _rename(words: list[str]) -> list[str]:
    """Put the flags of `RENAMED` into their present form; a value that follows stays where it is."""
    renamed: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in RENAMED:
            replacement = RENAMED[name]
            renamed.extend((*replacement[:-1], replacement[-1] + equals + value))
        else:
            renamed.append(word)
    return renamed


def help_page(concerns: Iterable[type], program: str = "pretrain_gpt.py") -> str:
    """The text of --help: a group for each concern."""
    parser = _build(tuple(concerns), Reading({}, [], []), with_help=True)
    parser.prog = program
    return parser.format_help()


def _build(concerns: tuple[type, ...], reading: Reading, with_help: bool = False) -> _Parser:
    """A parser whose actions write into `reading`."""
    parser = _Parser(
        usage="%(prog)s [flags]",
        description=_DESCRIPTION,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser._negative_number_matcher = _NEGATIVE_VALUE
    for concern in concerns:
        group = parser.add_argument_group(concern_title(concern), concern_summary(concern) if with_help else None)
        texts = help_texts(concern) if with_help else {}
        for option in options(concern):
            _add(group, option, reading, help_line(option, texts[option.field]) if with_help else None)
    return parser


def _add_megatron(parser: _Parser, present: set[str], reading: Reading, ineffective: dict[str, list[str]]) -> None:
    """Let the parser know those of Megatron's other flags that are `present`; all of them would take it a while."""
    for name in sorted(present & known_flags().keys() - parser._option_string_actions.keys()):
        known = known_flags()[name]
        parser.add_argument(
            name,
            action=_MegatronAction,
            nargs={0: 0, 1: None}.get(known.arity, "*"),
            help=argparse.SUPPRESS,
            flag=known,
            reading=reading,
            ineffective=ineffective,
        )


def _add(group: Any, option: Option, reading: Reading, text: str | None) -> None:
    if option.kind is bool:
        for names, value, shown in (
            (option.names, not option.default, text),
            (option.opposites, option.default, argparse.SUPPRESS),
        ):
            group.add_argument(
                *names, action=_SwitchAction, help=shown, field=option.field, value=value, reading=reading
            )
        return
    group.add_argument(
        *option.names,
        action=_ValueAction,
        nargs=option.nargs,
        metavar=metavar(option),
        help=text,
        option=option,
        reading=reading,
    )


class _SwitchAction(argparse.Action):
    def __init__(self, option_strings, dest, *, field, value, reading, help):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)
        self.field, self.value, self.reading = field, value, reading

    def __call__(self, parser, namespace, words, option_string=None):
        self.reading.values[self.field] = self.value


class _ValueAction(argparse.Action):
    def __init__(self, option_strings, dest, *, option, reading, nargs, metavar, help):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, metavar=metavar, help=help)
        self.option, self.reading = option, reading

    def __call__(self, parser, namespace, words, option_string=None):
        try:
            self.reading.values[self.option.field] = self.option.read(words)
        except ValueError as error:
            shown = words if isinstance(words, str) else " ".join(words)
            self.reading.problems.append(f"{option_string} {shown}: {error}")


class _MegatronAction(argparse.Action):
    def __init__(self, option_strings, dest, *, flag, reading, ineffective, nargs, help):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, help=help)
        self.flag, self.reading, self.ineffective = flag, reading, ineffective

    def __call__(self, parser, namespace, words, option_string=None):
        flag: MegatronFlag = self.flag
        value = words if isinstance(words, str) else " ".join(words)
        if flag.kind is Kind.NO_EFFECT:
            self.ineffective.setdefault(flag.sentence, []).append(option_string)
        elif value not in flag.harmless:
            self.reading.problems.append(f"{f'{option_string} {value}'.strip()}: {flag.sentence}")


def _unknown(rest: list[str], parser: _Parser) -> list[str]:
    """One line for each unknown flag, with the nearest spelling, and for words that belong to no flag."""
    spellings = [*parser._option_string_actions, *known_flags(), *RENAMED]
    problems = []
    value_may_follow = False
    for word in rest:
        name = word.partition("=")[0]
        if name.startswith("-"):
            problems.append(unknown_flag(name, spellings))
        elif not value_may_follow:
            problems.append(f"{word!r} belongs to no flag; flags start with --")
        value_may_follow = name.startswith("-") or value_may_follow
    return problems


def unknown_flag(name: str, spellings: Iterable[str]) -> str:
    """The sentence about a flag that is not one of `spellings`."""
    wanted = "--" + name.lstrip("-").replace("_", "-").lower()
    nearest = difflib.get_close_matches(wanted, list(spellings), n=1, cutoff=0.6)
    return f"{name} is unknown; " + (f"the nearest flag is {nearest[0]}" if nearest else "see --help for all flags")


def metavar(option: Option) -> str | tuple[str, ...]:
    """What stands for the value in help."""
    if option.metavar is not None:
        return option.metavar
    if option.choices is not None:
        return "{" + ",".join(map(str, option.choices)) + "}"
    return {int: "N", float: "X", str: "TEXT"}[option.kind]


def help_line(option: Option, text: str) -> str:
    """Help with the default where the text does not speak of None."""
    if option.kind is bool or option.default is None:
        return text.replace("%", "%%")
    return f"{text} Default: {option.default}.".replace("%", "%%")
