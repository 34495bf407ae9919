"""One frozen dataclass per concern, its fields turned into command-line flags: `flag` declares, the rest reads."""

from __future__ import annotations

import dataclasses
from typing import Any

Problems = list


def flag(default: Any, **details: Any) -> Any:
    """A dataclass field that is also a flag; `details` are kept in its metadata."""
    return dataclasses.field(default=default, metadata=details)
