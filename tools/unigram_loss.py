#!/usr/bin/env python3
"""Loss of the best model without context on the validation tokens: what a language model must beat to have learnt.

Token frequencies are counted on the training split of a `.bin/.idx` pair (one added to every count) and scored, in nats
a token, on the tokens of its validation split, with the same --split as the training run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.datasets.indexed import IndexedDataset  # noqa: E402
from megatron.datasets.split import parse_split, split_sequences  # noqa: E402


def token_counts(data: IndexedDataset, sequences: np.ndarray, vocab_size: int, title: str) -> np.ndarray:
    """int64 [vocab_size]: how often each token occurs in `sequences`."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sequence in tqdm(sequences.tolist(), desc=title, unit="doc", mininterval=0.5):
        counts += np.bincount(data.get(sequence), minlength=vocab_size)
    return counts


def unigram_loss(train_counts: np.ndarray, valid_counts: np.ndarray) -> float:
    """Mean negative log-likelihood (nats) of the validation tokens under add-one smoothed training frequencies."""
    smoothed = train_counts + 1.0
    log_probability = np.log(smoothed / smoothed.sum())
    return float(-(valid_counts * log_probability).sum() / valid_counts.sum())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True, help="prefix of the .bin/.idx pair")
    parser.add_argument("--split", default="969, 30, 1", help="weights of train, validation and test, as for training")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of different tokens")
    args = parser.parse_args()
    try:
        data = IndexedDataset(args.data_path)
        train, valid, _ = parse_split(args.split)
        if train is None or valid is None:
            raise ValueError(
                f"--split {args.split} has no training or no validation part; write weights such as 99,1,0"
            )
        counts = [
            token_counts(data, split_sequences(share, len(data)), args.vocab_size, f"counting {name} tokens")
            for share, name in ((train, "training"), (valid, "validation"))
        ]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not counts[1].sum():
        print(f"error: the validation part of --split {args.split} holds no token", file=sys.stderr)
        return 1
    print(f"unigram loss on {counts[1].sum():,} validation tokens: {unigram_loss(*counts):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
