"""Blending: several data sets drawn in proportion to weights, sample by sample, exactly as Megatron interleaves them.

Each draw takes the source that lags most behind its share (ties: the first). Sources of weight zero are never drawn.
A source asked for more samples than it holds starts over: draw k of a source of n samples is its sample k mod n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.datasets.gpt import GPTDataset
from megatron.datasets.index_cache import IndexCache
from megatron.datasets.masks import batch_fields


class Blend(NamedTuple):
    """Prefixes and their weights as written; weights None means in proportion to size, one epoch."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


class BlendOrder(NamedTuple):
    """For every draw: which source, and how many draws of it came before."""

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray


def parse_blend(items: Sequence[str], flag: str) -> Blend:
    """The grammar of `--data-path`: prefixes alone, or `weight prefix` pairs.

    An odd number of items, or an even one in which no weight is a number, is a list of prefixes. ValueError names
    the flag when weights are negative, all zero, not finite or only partly given.
    """
    items = list(items)
    if not items:
        raise ValueError(f"{flag} is empty; give the prefix of a .bin/.idx pair, or weight prefix pairs")
    numbers = [_number(item) for item in items[0::2]]
    if len(items) % 2 or all(number is None for number in numbers):
        if any(_number(item) is not None for item in items):
            raise ValueError(f"{flag} {' '.join(items)}: every weight needs a path after it and every path a weight")
        return Blend(tuple(items), None)
    for number, item, prefix in zip(numbers, items[0::2], items[1::2]):
        if number is None:
            raise ValueError(f"{flag}: '{item}' stands where the weight of {prefix} belongs; give all weights or none")
        if not math.isfinite(number) or number < 0:
            raise ValueError(f"{flag}: weight {item} of {prefix} is negative or not finite; use 0 to leave it out")
        if _number(prefix) is not None:
            raise ValueError(f"{flag}: weight {item} is followed by '{prefix}', not by a path")
    if not sum(numbers) > 0:
        raise ValueError(f"{flag}: all weights are zero, so there is nothing to draw from")
    return Blend(tuple(items[1::2]), tuple(numbers))


def _number(item: str) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1, in float64."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def share_of_samples(weight: float, num_samples: int, surplus: float = 0.0) -> int:
    """Samples to build for a source of a normalised weight; `surplus` is the fraction kept in reserve."""
    return math.ceil(math.ceil(num_samples * weight) * (1 + surplus))


def weighted_order(weights: Sequence[float], num_draws: int) -> BlendOrder:
    """Greedy interleaving by normalised weights: draw k takes argmax of weight * max(k, 1) - draws so far."""
    drawn_from = np.flatnonzero(np.asarray(weights, dtype=np.float64) > 0)
    shares = np.asarray(weights, dtype=np.float64)[drawn_from]
    choices = np.zeros(num_draws, dtype=np.int32)
    counts, lag = np.zeros(len(shares)), np.empty(len(shares))
    if len(shares) > 1:
        for draw in range(num_draws):
            np.multiply(shares, draw or 1.0, out=lag)
            lag -= counts
            choice = lag.argmax()
            counts[choice] += 1.0
            choices[draw] = choice
    return _with_sample_numbers(drawn_from.astype(np.int32)[choices], len(weights))


def exhaustive_order(sizes: Sequence[int]) -> BlendOrder:
    """Every sample of every source once, in proportion to the sizes; sources drop out when they are spent."""
    sizes = np.asarray(sizes, dtype=np.int64)
    total = int(sizes.sum())
    shares = sizes / np.float64(max(total, 1))
    choices = np.empty(total, dtype=np.int32)
    counts, lag = np.zeros(len(sizes)), np.empty(len(sizes))
    spent = np.where(sizes == 0, -np.inf, 0.0)
    for draw in range(total):
        np.multiply(shares, draw or 1.0, out=lag)
        lag -= counts
        lag += spent
        choice = lag.argmax()
        counts[choice] += 1.0
        choices[draw] = choice
        if counts[choice] == sizes[choice]:
            spent[choice] = -np.inf
    return _with_sample_numbers(choices, len(sizes))


def _with_sample_numbers(choices: np.ndarray, num_sources: int) -> BlendOrder:
    """Numbers the draws of each source 0, 1, 2, ..."""
    numbers = np.empty(len(choices), dtype=np.int64)
    by_source = np.argsort(choices, kind="stable")
    counts = np.bincount(choices, minlength=num_sources)
    starts = np.cumsum(counts) - counts
    numbers[by_source] = np.arange(len(choices), dtype=np.int64) - np.repeat(starts, counts)
    return BlendOrder(choices, numbers)


class BlendedDataset:
    """Draws from several GPT data sets of equal sequence length; the interface of a GPTDataset.

    `datasets[i]` may be None where `weights[i]` is 0. `num_draws` None draws every sample once (weights are sizes).
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset | None],
        weights: Sequence[float],
        num_draws: int | None,
        cache: IndexCache | None = None,
    ) -> None:
        self.datasets = list(datasets)
        drawn = [dataset for dataset in datasets if dataset is not None]
        self.rules, self.masks, self.text_length = drawn[0].rules, drawn[0].masks, drawn[0].text_length

        def build() -> BlendOrder:
            if num_draws is None:
                return exhaustive_order([int(weight) for weight in weights])
            return weighted_order(normalized(weights), num_draws)

        if cache is None:
            self.order = build()
        else:
            key = {"kind": "blend", "weights": [float(weight) for weight in weights], "num_draws": num_draws}
            self.order = BlendOrder(**cache.load_or_build(key, lambda: build()._asdict()))

    def __len__(self) -> int:
        return len(self.order.dataset_index)

    def locate(self, draw: int) -> tuple[int, int]:
        """(source, its sample) of a draw."""
        source = int(self.order.dataset_index[draw])
        return source, int(self.order.dataset_sample_index[draw]) % len(self.datasets[source])

    def text_into(self, out: np.ndarray, draw: int) -> None:
        """Fills `out` [text_length] with the tokens of a draw."""
        source, sample = self.locate(draw)
        self.datasets[source].text_into(out, sample)

    def __getitem__(self, draw: int) -> dict[str, np.ndarray]:
        """Fields of one sample, each [s], and `dataset_id`."""
        source, sample = self.locate(draw)
        return {**self.datasets[source][sample], "dataset_id": np.int64(source)}


def fields_of(dataset: GPTDataset | BlendedDataset, samples: Sequence[int]) -> dict[str, np.ndarray]:
    """Fields of several samples as [b, s] arrays, built together."""
    text = np.empty((len(samples), dataset.text_length), dtype=np.int64)
    for row, sample in zip(text, samples):
        dataset.text_into(row, sample)
    return batch_fields(text, dataset.masks, dataset.rules.extra_tokens)
