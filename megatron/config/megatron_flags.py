"""What becomes of every flag of Megatron-LM that is not a field of ours: renamed, without effect, or refused.

A flag that is a field of a configuration class is not repeated here: it is the same one, or `DIFFERENCES` says how it
differs. Entries are written `--switch`, `--flag=` (one value) or `--flag=*` (several); `--flag=a|b` accepts the values
a and b in silence, because they ask for nothing that is missing.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple


class Kind(enum.Enum):
    """What happens to a flag that is no field."""

    NO_EFFECT = "no effect"
    REFUSED = "refused"


class MegatronFlag(NamedTuple):
    """One spelling of Megatron-LM's that is no field."""

    kind: Kind
    arity: int | str  # values that follow: 0, 1 or "*"
    harmless: tuple[str, ...]
    sentence: str


RENAMED: dict[str, tuple[str, ...]] = {
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
}

NO_EFFECT: dict[str, str] = {}
REFUSED: dict[str, str] = {}


@functools.lru_cache(maxsize=1)
def known_flags() -> dict[str, MegatronFlag]:
    """Every spelling of `NO_EFFECT` and `REFUSED`."""
    flags = {}
    for kind, table in ((Kind.NO_EFFECT, NO_EFFECT), (Kind.REFUSED, REFUSED)):
        for sentence, entries in table.items():
            for entry in entries.split():
                name, equals, values = entry.partition("=")
                arity = 0 if not equals else "*" if values == "*" else 1
                harmless = tuple(values.split("|")) if values not in ("", "*") else ()
                assert name not in flags, f"{name} is listed twice"
                flags[name] = MegatronFlag(kind, arity, harmless, sentence)
    return flags
