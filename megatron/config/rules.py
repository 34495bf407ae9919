"""Rules that concerns share: a required flag, a number below its least value, flags that exclude others."""

from __future__ import annotations

from typing import Any

from megatron.config.flags import ConfigError, options


def flag_name(config: Any, field: str) -> str:
    """The flag of a field."""
    return next(option.names[0] for option in options(type(config)) if option.field == field)


def shown(config: Any, field: str) -> str:
    """Flag and value as typed."""
    option = next(option for option in options(type(config)) if option.field == field)
    return option.spell(getattr(config, field))


def required(config: Any, *fields: str) -> list[str]:
    """A line for each field that is None."""
    return [f"{flag_name(config, name)} is required" for name in fields if getattr(config, name) is None]


def at_least(config: Any, least: float, *fields: str) -> list[str]:
    """A line for each field that is given and below `least`."""
    return [
        f"{shown(config, name)} is below {least:g}, the least value it can have"
        for name in fields
        if getattr(config, name) is not None and not getattr(config, name) >= least
    ]


def above_zero(config: Any, *fields: str) -> list[str]:
    """A line for each field that is given and not above 0."""
    return [
        f"{shown(config, name)} is not above 0, as it must be"
        for name in fields
        if getattr(config, name) is not None and not getattr(config, name) > 0
    ]


def at_most_one(config: Any, rule: str, *fields: str) -> list[str]:
    """A line when more than one of the fields differs from its default."""
    given = changed(config, *fields)
    if len(given) < 2:
        return []
    return [f"{' and '.join(shown(config, name) for name in given)}: {rule}; keep one of them"]


def changed(config: Any, *fields: str) -> list[str]:
    """Those of the fields whose value is not the default."""
    defaults = {option.field: option.default for option in options(type(config))}
    return [name for name in fields if getattr(config, name) != defaults[name]]


def whole_at_least_one(*values: Any) -> bool:
    """Whether all are numbers from 1 up, so that they can be divided by."""
    return all(isinstance(value, int) and value >= 1 for value in values)


def raise_if(problems: list[str]) -> None:
    """ConfigError with the problems, if there are any."""
    if problems:
        raise ConfigError(problems)
