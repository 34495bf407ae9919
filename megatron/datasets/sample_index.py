"""The three arrays that turn token sequences into fixed-length GPT samples, drawn exactly as Megatron draws them.

`document_index` is the order of sequences (all epochs), `sample_index` where in that order each sample begins, and
`shuffle_index` the order in which samples are used. One `RandomState(seed)` draws them in this order: the document
shuffle, then the sample shuffle. The same inputs give the same arrays on every machine, so each rank may build them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FINAL_EPOCH_THRESHOLD = 0.80


class SampleOrder(NamedTuple):
    """document_index [epochs x sequences], sample_index [samples + 1, 2], shuffle_index [samples]."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


@dataclass(frozen=True)
class EpochPlan:
    """How many passes over the data a number of samples needs, and whether the last pass is shuffled by itself."""

    tokens_per_epoch: int
    num_epochs: int
    is_final_epoch_separate: bool
    samples_before_final_epoch: int


def plan_epochs(tokens_per_epoch: int, num_samples: int | None, sequence_length: int, extra_tokens: int) -> EpochPlan:
    """The smallest number of epochs that holds `num_samples` (None: one epoch).

    The final epoch is separate when fewer than 80 % of its samples are wanted, so that a run never sees a few samples
    of an epoch it does not finish mixed into the epochs before it.
    """
    if num_samples is None:
        return EpochPlan(tokens_per_epoch, 1, False, 0)
    wanted = num_samples * sequence_length + extra_tokens
    num_epochs = max(1, -(-wanted // tokens_per_epoch))
    if num_epochs == 1:
        return EpochPlan(tokens_per_epoch, 1, False, 0)
    before = ((num_epochs - 1) * tokens_per_epoch - extra_tokens) // sequence_length
    per_epoch = (tokens_per_epoch - extra_tokens) // sequence_length
    separate = num_samples - before < int(FINAL_EPOCH_THRESHOLD * per_epoch)
    return EpochPlan(tokens_per_epoch, num_epochs, separate, before)


def build_document_index(
    sequences: np.ndarray, num_epochs: int, random: np.random.RandomState, is_final_epoch_separate: bool
) -> np.ndarray:
    """Sequence numbers of all epochs shuffled together, or of all but the last together and then the last."""
    if num_epochs > 1 and is_final_epoch_separate:
        first = build_document_index(sequences, num_epochs - 1, random, False)
        return np.concatenate([first, build_document_index(sequences, 1, random, False)])
    order = np.tile(sequences, num_epochs)
    random.shuffle(order)
    return order


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, num_samples: int, sequence_length: int, extra_tokens: int
) -> np.ndarray:
    """Row i is (position in document_index, token offset in it) at which sample i starts.

    Sample i covers tokens i*s to i*s + s + extra of the documents laid end to end, so the rows follow from a search of
    the running total. Row i is also where sample i-1 ends: when that end is the last token of a document the row stays
    on it, with offset length - extra.
    """
    ordered = lengths[document_index]
    ends = np.cumsum(ordered, dtype=np.int64)
    largest = max(len(document_index), int(ordered.max(initial=0)))
    rows = np.zeros((num_samples + 1, 2), dtype=np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    starts = np.arange(1, num_samples + 1, dtype=np.int64) * sequence_length
    last_tokens = np.minimum(starts + extra_tokens - 1, ends[-1] - 1)
    positions = np.searchsorted(ends, last_tokens, side="right")
    rows[1:, 0] = positions
    rows[1:, 1] = last_tokens + 1 - extra_tokens - (ends[positions] - ordered[positions])
    return rows


def build_shuffle_index(num_first: int, num_samples: int, random: np.random.RandomState) -> np.ndarray:
    """Samples 0 to num_first shuffled, then the rest shuffled."""
    dtype = np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    first = np.arange(num_first, dtype=dtype)
    random.shuffle(first)
    if num_first == num_samples:
        return first
    rest = np.arange(num_first, num_samples, dtype=dtype)
    random.shuffle(rest)
    return np.concatenate([first, rest])


def build_sample_order(
    lengths: np.ndarray,
    sequences: np.ndarray,
    *,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    extra_tokens: int = 1,
    keep_last_partial: bool = False,
) -> SampleOrder:
    """All three arrays for the given sequences of a data set.

    Args:
        lengths: tokens of every sequence of the file.
        sequences: the sequence numbers that belong to the split.
        num_samples: samples wanted; None is one epoch. The result may hold more, never fewer.
        extra_tokens: 1 when a sample carries one token more than it predicts from.
        keep_last_partial: keep a last sample that is filled up with padding (validation only).

    Raises ValueError when the split holds no tokens, too few for one sample of one epoch, or a negative number.
    """
    negative = int((lengths[sequences] < 0).sum())
    if negative:
        raise ValueError(f"{negative} have a negative length: the .idx file is damaged")
    tokens = int(lengths[sequences].sum(dtype=np.int64))
    if tokens == 0:
        raise ValueError(f"the {len(sequences)} of this split hold no tokens, so no number of epochs gives a sample")
    plan = plan_epochs(tokens, num_samples, sequence_length, extra_tokens)
    available = plan.num_epochs * tokens - extra_tokens
    count = -(-available // sequence_length) if keep_last_partial else available // sequence_length
    if count <= 0:
        raise ValueError(
            f"{tokens} tokens are too few for one sample of sequence length {sequence_length} + {extra_tokens}"
        )
    random = np.random.RandomState(seed)
    document_index = build_document_index(sequences, plan.num_epochs, random, plan.is_final_epoch_separate)
    sample_index = build_sample_index(lengths, document_index, count, sequence_length, extra_tokens)
    first = plan.samples_before_final_epoch if plan.is_final_epoch_separate else count
    return SampleOrder(document_index, sample_index, build_shuffle_index(first, count, random))
