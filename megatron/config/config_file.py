"""A YAML (or JSON) file of flags -> the words that would say the same on a command line.

Keys are flag names with - or _, with or without the leading dashes; they may be nested in sections of any name. The
words go through the same reader as typed ones, so the same spellings are accepted and refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.config.command_line import unknown_flag
from megatron.config.flags import ConfigError, Option, options
from megatron.config.megatron_flags import RENAMED, known_flags


def words_of_file(path: str, concerns: Iterable[type]) -> list[str]:
    """The words of the file at `path`; ConfigError names what cannot be read."""
    switches = {
        spelling: option
        for concern in concerns
        for option in options(concern)
        for spelling in (*option.names, *option.opposites)
    }
    words: list[str] = []
    problems: list[str] = []
    seen: set[str] = set()
    for key, value in _entries(_load(path), path):
        name = "--" + str(key).lstrip("-").replace("_", "-")
        name = _spelling(name, switches)
        option = switches.get(name)
        if option is not None and option.field == "config":
            problems.append(f"{path}: {key} cannot stand in a file; give one --config on the command line")
        elif option is None and name not in known_flags() and name not in RENAMED:
            problems.append(f"{path}: {unknown_flag(str(key), switches)}")
        elif value is not None:
            field = name if option is None else option.field
            if field in seen:
                problems.append(f"{path}: {key} stands twice; keep one")
            seen.add(field)
            words.extend(_words(name, value, option))
    if problems:
        raise ConfigError(problems)
    return words


def _spelling(name: str, switches: dict[str, Option]) -> str:
    """`name`, or the spelling with an underscore that Megatron gives two of its flags."""
    if name in switches:
        return name
    return next((spelling for spelling in switches if spelling.replace("_", "-") == name), name)


def _load(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError([f"--config {path}: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"--config {path}: not UTF-8 at byte {error.start}"]) from None
    if path.endswith(".json"):
        try:
            return json.loads(text, object_pairs_hook=_each_once)
        except ValueError as error:
            raise ConfigError([f"--config {path}: not JSON: {error}"]) from None
    try:
        import yaml
    except ImportError:
        raise ConfigError([f"--config {path}: reading YAML needs PyYAML; pip install pyyaml, or write JSON"]) from None
    try:
        return yaml.load(text, _yaml_loader(yaml))
    except yaml.YAMLError as error:
        raise ConfigError([f"--config {path}: not YAML: {' '.join(str(error).split())}"]) from None
    except ValueError as error:
        raise ConfigError([f"--config {path}: {error}"]) from None


def _each_once(pairs: list[tuple[Any, Any]]) -> dict:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} stands twice; keep one")
    return dict(pairs)


def _yaml_loader(yaml: Any) -> type:
    """YAML's safe loader, which would let the last of two equal keys win, made to refuse them."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            _each_once([(key.value, None) for key, _ in node.value])
            return super().construct_mapping(node, deep)

    return Loader


def _entries(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if tree is None:
        return
    if not isinstance(tree, dict):
        raise ConfigError([f"--config {path}: expected keys and values, found {type(tree).__name__}"])
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _entries(value, path)
        else:
            yield key, value


def _words(name: str, value: Any, option: Option | None) -> list[str]:
    if value is True and (option is None or option.kind is bool):
        return [name]
    if value is False and option is None:
        return []
    if value is False and option.kind is bool:
        return [option.opposites[0] if name in option.names else option.names[0]]
    if isinstance(value, (list, tuple)):
        if option is not None and option.nargs is None:
            return [f"{name}={','.join(map(str, value))}"]
        return [name, *map(str, value)]
    if option is not None and option.nargs is not None:
        return [name, *str(value).split()]
    return [f"{name}={value}"]
