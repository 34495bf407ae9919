"""`--split`: which sequences of a data set train, validate and test."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

SPLIT_NAMES = ("train", "valid", "test")
NUMBER = re.compile(r"[.0-9]+")


class SplitRange(NamedTuple):
    """A share of the data set, as fractions of its sequences."""

    start: float
    end: float


def parse_split(text: str) -> tuple[SplitRange | None, SplitRange | None, SplitRange | None]:
    """'99,1,0' (any separators, quotes allowed; missing numbers are 0) -> three ranges, None where one is empty."""
    try:
        numbers = [float(number) for number in NUMBER.findall(text)]
    except ValueError:
        raise ValueError(f"--split {text}: not numbers; write weights such as 99,1,0") from None
    if not 1 <= len(numbers) <= 3 or sum(numbers) <= 0:
        raise ValueError(f"--split {text}: one to three weights with a positive sum are needed, such as 99,1,0")
    weights = np.array(numbers + [0.0] * (3 - len(numbers)), dtype=np.float64)
    shares = (weights / weights.sum()).tolist()
    edges = [0]
    for share in shares:
        edges.append(edges[-1] + share)
    ranges = zip(edges[:-1], edges[1:])
    return tuple(SplitRange(start, end) if end > start else None for start, end in ranges)


def split_sequences(share: SplitRange, num_sequences: int) -> np.ndarray:
    """Sequence numbers of a range. Rounds half to even, as Megatron does, so borders fall on the same sequence."""
    first, last = round(share.start * float(num_sequences)), round(share.end * float(num_sequences))
    return np.arange(first, last, dtype=np.int32 if num_sequences <= np.iinfo(np.int32).max else np.int64)
