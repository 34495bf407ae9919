"""A configuration dataclass read as command-line flags: `flag` declares a field, `options` reads a class.

The field's name is Megatron's `dest`; the flag is derived from it unless the field spells it out. The string under a
field is its help. A boolean whose default is true is switched off by its flag (`--disable-bias-linear`), and every
boolean has a spelling that takes the flag back, so that a later word on the command line can always undo an earlier
one.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import signal
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple


class ConfigError(ValueError):
    """What is wrong with a configuration: `problems` holds one line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def flag(
    default: Any,
    *,
    names: tuple[str, ...] = (),
    choices: tuple[Any, ...] | None = None,
    nargs: int | str | None = None,
    metavar: str | tuple[str, ...] | None = None,
    parse: Callable[[str], Any] | None = None,
    own: bool = False,
) -> Any:
    """A dataclass field that is also a flag.

    names: Megatron's spellings where they are not `--field-name` (or `--no-field-name` for a boolean that is true by
    default). parse: text -> value, raising ValueError; derived from the annotation when left out. own: Megatron has no
    such flag, or gives it another default.
    """
    details = {"names": names, "choices": choices, "nargs": nargs, "metavar": metavar, "parse": parse, "own": own}
    return dataclasses.field(default=default, metadata={"flag": details})


class Option(NamedTuple):
    """One field seen from the command line."""

    field: str
    concern: type
    names: tuple[str, ...]  # spellings that set the field (to `not default` for a boolean)
    opposites: tuple[str, ...]  # spellings that put a boolean back to its default
    kind: type  # bool, int, float or str: of the value, or of each element where nargs is given
    default: Any
    choices: tuple[Any, ...] | None
    nargs: int | str | None
    metavar: str | tuple[str, ...] | None
    parse: Callable[[str], Any]
    own: bool

    def read(self, words: list[str] | str) -> Any:
        """The value that `words` spell; ValueError says what was expected instead."""
        if isinstance(words, str):
            if words == "None" and self.default is None:
                return None
            return self._read_one(words)
        return tuple(self._read_one(word) for word in words)

    def _read_one(self, word: str) -> Any:
        value = self.parse(word)
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"choose from {', '.join(map(str, self.choices))}")
        return value

    def spell(self, value: Any) -> str:
        """Flag and value as a user types them."""
        if self.kind is bool:
            return self.names[0] if value != self.default else self.opposites[0]
        if isinstance(value, tuple):
            separator = " " if self.nargs is not None else ","
            return f"{self.names[0]} {separator.join(map(str, value))}"
        return f"{self.names[0]} {value}"


@functools.cache
def options(concern: type) -> tuple[Option, ...]:
    """The flags of a configuration dataclass, in the order of its fields."""
    hints = typing.get_type_hints(concern)
    return tuple(_option(concern, field, hints[field.name]) for field in dataclasses.fields(concern))


def _option(concern: type, field: dataclasses.Field, hint: Any) -> Option:
    details = field.metadata.get("flag")
    if details is None:
        raise TypeError(f"{concern.__name__}.{field.name} is not declared with flag(...)")
    kind = _kind(hint)
    dashed = field.name.replace("_", "-")
    names = details["names"] or ((f"--{dashed}",) if kind is not bool or not field.default else (f"--no-{dashed}",))
    return Option(
        field=field.name,
        concern=concern,
        names=names,
        opposites=_opposites(names, dashed) if kind is bool else (),
        kind=kind,
        default=field.default,
        choices=details["choices"],
        nargs=details["nargs"],
        metavar=details["metavar"],
        parse=details["parse"] or _PARSERS[kind],
        own=details["own"],
    )


def _kind(hint: Any) -> type:
    """bool, int, float or str of `int`, `int | None`, `tuple[int, ...]` or `tuple[int, ...] | None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint


def _opposites(names: tuple[str, ...], dashed: str) -> tuple[str, ...]:
    """--swiglu <-> --no-swiglu; --disable-bias-linear <-> --bias-linear, --add-bias-linear."""
    spellings = []
    for name in names:
        for prefix in ("--no-", "--disable-"):
            if name.startswith(prefix):
                spellings.append("--" + name[len(prefix) :])
                if f"--{dashed}" not in names:
                    spellings.append(f"--{dashed}")
                break
        else:
            spellings.append("--no-" + name[2:])
    return tuple(dict.fromkeys(spellings))


def help_texts(concern: type) -> dict[str, str]:
    """Field name -> the string under it, on one line. Reads the source, so only for --help and for the documents."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(concern)))
    body = tree.body[0].body
    texts = {}
    for statement, following in zip(body, body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            texts[statement.target.id] = " ".join(ast.literal_eval(following.value).split())
    return texts


def concern_title(concern: type) -> str:
    """The heading of a concern: `ModelConfig` -> `model`; a fork's class likewise."""
    return concern.__name__.removesuffix("Config").lower()


def concern_summary(concern: type) -> str:
    """First line of the docstring of the module that holds the concern, or of the class where it has one."""
    own = concern.__dict__.get("__doc__") or ""
    if own and not own.startswith(concern.__name__ + "("):
        return own.strip().splitlines()[0]
    module = inspect.getmodule(concern)
    return ((module.__doc__ if module else None) or "").strip().split("\n", 1)[0]


def unchecked(concern: type, values: dict[str, Any]) -> Any:
    """An instance whose `__post_init__` has not run, so that the problems of all concerns can be collected first."""
    instance = object.__new__(concern)
    for option in options(concern):
        object.__setattr__(instance, option.field, values.get(option.field, option.default))
    return instance


def parse_int(text: str) -> int:
    """A whole number; underscores may group digits."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def parse_float(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def parse_int_pair(text: str) -> tuple[int, int]:
    """Two whole numbers with a comma between, bare or in parentheses."""
    parts = text.strip("()[] ").split(",")
    if len(parts) != 2:
        raise ValueError("expected two whole numbers with a comma between, as in 128,0")
    return parse_int(parts[0].strip()), parse_int(parts[1].strip())


def parse_signal(text: str) -> str:
    """A signal's name, from its name (SIGUSR1, usr1) or number."""
    try:
        if text.isdigit():
            return signal.Signals(int(text)).name
        name = text.upper()
        return signal.Signals[name if name.startswith("SIG") else "SIG" + name].name
    except (KeyError, ValueError):
        raise ValueError("expected the name or number of a signal, as SIGUSR1") from None


_PARSERS: dict[type, Callable[[str], Any]] = {bool: bool, int: parse_int, float: parse_float, str: str}
