#!/usr/bin/env python3
"""Train a SentencePiece tokenizer on jsonl or plain text, without losing a byte of it: spaces and newlines are kept.

Unknown characters fall back to bytes, runs of spaces may become one piece (indentation), and a newline is a piece of
its own. `</s>` is the end-of-document token that tools/preprocess_data.py --append-eod writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
from tqdm import tqdm


def sentences(path: Path, key: str, largest_bytes: int) -> Iterator[str]:
    """Lines of the documents in `path` until `largest_bytes` of text were given, with a progress bar."""
    total, done = min(path.stat().st_size, largest_bytes), 0
    with open(path, encoding="utf-8") as file, tqdm(total=total, unit="B", unit_scale=True, desc="reading text") as bar:
        for number, row in enumerate(file, 1):
            if path.suffix == ".jsonl":
                document = json.loads(row)
                if key not in document:
                    raise ValueError(f"{path}:{number} has no {key!r}; name the text with --json-key")
                row = document[key]
            size = len(row.encode())
            done += size
            bar.update(min(size, total - bar.n))
            yield from (line for line in row.split("\n") if line.strip())
            if done >= largest_bytes:
                return


def train(input_path: Path, output: Path, vocab_size: int, model_type: str, key: str, largest_bytes: int) -> None:
    """Write `output` (a .model file); it appears only when complete."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".unfinished")
    with open(unfinished, "wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(input_path, key, largest_bytes),
            model_writer=writer,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=0.9999,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=16384,
            user_defined_symbols=["\n"],
            minloglevel=1,
        )
    unfinished.replace(output)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="jsonl file, or plain text, one document a line")
    parser.add_argument("--output", type=Path, required=True, help=".model file to write")
    parser.add_argument("--vocab-size", type=int, default=8192, help="number of pieces")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="how pieces are found")
    parser.add_argument("--json-key", default="text", help="field of a jsonl line that holds the text")
    parser.add_argument("--megabytes", type=float, default=8.0, help="train on the first millions of bytes of text")
    args = parser.parse_args()
    if not args.input.is_file():
        print(f"error: --input {args.input} is not there", file=sys.stderr)
        return 1
    try:
        train(args.input, args.output, args.vocab_size, args.model_type, args.json_key, int(args.megabytes * 10**6))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {args.vocab_size:,} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
