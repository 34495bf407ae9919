#!/usr/bin/env python3
"""Loss of the best model without context on the validation tokens: what a language model must beat to have learnt.

Token frequencies are counted on the training split of a `.bin/.idx` pair (one added to every count) and scored, in nats
a token, on the tokens of its validation split, with the same --split as the training run. With --seq-length and
--samples it scores just the labels of those samples of the validation set: what one evaluation of the run averages.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.datasets.blend import parse_blend  # noqa: E402
from megatron.datasets.build import DataPlan, build_splits  # noqa: E402
from megatron.datasets.indexed import IndexedDataset  # noqa: E402
from megatron.datasets.masks import MaskRules  # noqa: E402
from megatron.datasets.split import parse_split, split_sequences  # noqa: E402


def token_counts(data: IndexedDataset, sequences: np.ndarray, vocab_size: int, title: str) -> np.ndarray:
    """int64 [vocab_size]: how often each token occurs in `sequences`."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sequence in tqdm(sequences.tolist(), desc=title, unit="doc", mininterval=0.5):
        counts += np.bincount(data.get(sequence), minlength=vocab_size)
    return counts


def label_counts(args: argparse.Namespace) -> np.ndarray:
    """int64 [vocab_size]: the labels of samples FIRST .. LAST - 1 of a validation set of LAST samples."""
    first, last = args.samples
    if not 0 <= first < last:
        raise ValueError(f"--samples {first} {last}: FIRST must be at least 0 and below LAST")
    plan = DataPlan(
        sequence_length=args.seq_length,
        seed=args.seed,
        masks=MaskRules(eod=-1),
        blend=parse_blend([args.data_path], "--data-path"),
        split=args.split,
    )
    valid = build_splits(plan, (0, last, 0))[1]
    counts = np.zeros(args.vocab_size, dtype=np.int64)
    for sample in range(first, last):
        counts += np.bincount(valid[sample]["labels"], minlength=args.vocab_size)
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
    parser.add_argument("--seq-length", type=int, help="tokens of a sample, as for training; with --samples")
    parser.add_argument(
        "--samples",
        type=int,
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="score samples FIRST .. LAST - 1 of a validation set that is LAST samples long; without: the whole split",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the order of samples, as for training")
    args = parser.parse_args()
    if (args.samples is None) != (args.seq_length is None):
        parser.error("--samples and --seq-length belong together; give both or neither")
    try:
        data = IndexedDataset(args.data_path)
        train, valid, _ = parse_split(args.split)
        if train is None or valid is None:
            raise ValueError(
                f"--split {args.split} has no training or no validation part; write weights such as 99,1,0"
            )
        train_sequences, valid_sequences = (split_sequences(share, len(data)) for share in (train, valid))
        if args.samples is None:
            valid_counts = token_counts(data, valid_sequences, args.vocab_size, "counting validation tokens")
        else:
            valid_counts = label_counts(args)
        counts = (token_counts(data, train_sequences, args.vocab_size, "counting training tokens"), valid_counts)
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
