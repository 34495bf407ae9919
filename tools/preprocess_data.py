#!/usr/bin/env python3
"""Tokenizes text into the .bin/.idx pair that --data-path reads: `{output-prefix}_{key}_document.{bin,idx}`.

Flags are Megatron's, and so are the bytes written. What users most often ask about:
one record is one document; a record without tokens becomes an empty document (kept as a boundary, no sequence);
outputs appear only when complete; --workers changes the speed and never the output.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.datasets.preprocess import BadLineError, EncodingRules, Progress, preprocess  # noqa: E402
from megatron.datasets.tokenizer import TOKENIZER_TYPES, TokenizerOptions  # noqa: E402

MAX_NAMED_BAD_LINES = 100


def make_parser() -> argparse.ArgumentParser:
    """The tool's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    files = parser.add_argument_group("input and output")
    files.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl (or .json with a record a line), .txt (each LINE is a document), or either with .gz; several files"
        " are read one after the other",
    )
    files.add_argument("--output-prefix", required=True, help="path of the outputs without _text_document.bin")
    files.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys to extract, each into a pair of its own (default: text)"
    )
    files.add_argument(
        "--on-bad-line",
        choices=("error", "skip"),
        default="error",
        help="a line that is no usable record: stop and leave nothing behind (default), or name it, count it, go on",
    )
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    tokens.add_argument("--tokenizer-model", help="file or directory of the tokenizer")
    tokens.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    tokens.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    tokens.add_argument("--vocab-size", type=int, help="of NullTokenizer and TikTokenizer")
    tokens.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="of TikTokenizer (default: v2)")
    tokens.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, help="of TikTokenizer (default: 1000)")
    tokens.add_argument("--tokenizer-special-tokens", nargs="+", help="of TikTokenizer, placed first")
    tokens.add_argument("--null-tokenizer-eod-id", type=int, help="of NullTokenizer (default: the last id)")
    tokens.add_argument("--null-tokenizer-pad-id", type=int, default=-1, help="of NullTokenizer (default: none)")
    tokens.add_argument("--append-eod", action="store_true", help="end every document that has tokens with this token")
    tokens.add_argument("--split-sentences", action="store_true", help="not built; documents are kept whole")
    tokens.add_argument("--keep-newlines", action="store_true", help="not built; belongs to --split-sentences")
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    work.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="accepted for Megatron's sake: the input is not divided into files here, and order and output are those of"
        " one partition",
    )
    work.add_argument("--log-interval", type=int, default=1000, help="documents between two progress lines")
    return parser


class Reporter:
    """Progress on stderr: a bar on a terminal, else a line every `--log-interval` documents."""

    def __init__(self, inputs: list[str], log_interval: int) -> None:
        self.start = time.monotonic()
        self.total_bytes = sum(Path(path).stat().st_size for path in inputs if Path(path).is_file())
        self.log_interval = log_interval
        self.next_line = log_interval
        self.named = 0
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=self.total_bytes, unit="B", unit_scale=True, desc="tokenizing")

    def __call__(self, progress: Progress) -> None:
        for line in progress.bad_lines:
            self.named += 1
            if self.named <= MAX_NAMED_BAD_LINES:
                self.say(f"skipped {line}")
            elif self.named == MAX_NAMED_BAD_LINES + 1:
                self.say("more bad lines follow; they are counted only")
        seconds = max(time.monotonic() - self.start, 1e-9)
        speed = f"{progress.read / seconds:.0f} docs/s, {progress.text_bytes / seconds / 2**20:.2f} MB/s"
        if self.bar is not None:
            self.bar.set_postfix_str(speed, refresh=False)
            self.bar.update(progress.bytes_on_disk - self.bar.n)
        elif progress.read >= self.next_line:
            self.next_line = progress.read - progress.read % self.log_interval + self.log_interval
            done = progress.bytes_on_disk / max(self.total_bytes, 1)
            left = seconds / max(done, 1e-9) * (1 - done)
            self.say(f"processed {progress.read} documents ({speed}), {done:.0%}, {left:.0f} s left")

    def say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def check_flags(arguments: argparse.Namespace) -> None:
    """ValueError for what is not built and for numbers out of range."""
    if arguments.split_sentences or arguments.keep_newlines:
        raise ValueError(
            "--split-sentences and --keep-newlines are not built: GPT samples are cut from whole documents. To store"
            " sentences as sequences, give lists of texts under the key"
        )
    for flag, value in (("--workers", arguments.workers), ("--partitions", arguments.partitions)):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    if arguments.log_interval < 1:
        raise ValueError(f"--log-interval {arguments.log_interval} must be at least 1")
    if len(set(arguments.json_keys)) != len(arguments.json_keys):
        raise ValueError(f"--json-keys {' '.join(arguments.json_keys)} names a key twice")
    if arguments.tokenizer_special_tokens is not None:
        arguments.tokenizer_special_tokens = tuple(arguments.tokenizer_special_tokens)


def stop_on_signal(number: int, frame: object) -> None:
    """Unwinds the stack, so that unfinished outputs are removed."""
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; 0 when everything was written, 1 when nothing was."""
    arguments = make_parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_on_signal)
    start = time.monotonic()
    try:
        check_flags(arguments)
        rules = EncodingRules(
            tokenizer=TokenizerOptions.of(arguments),
            keys=tuple(arguments.json_keys),
            append_eod=arguments.append_eod,
            stop_at_bad_line=arguments.on_bad_line == "error",
        )
        reporter = Reporter(arguments.input, arguments.log_interval)
        try:
            progress = preprocess(arguments.input, arguments.output_prefix, rules, arguments.workers, reporter)
        finally:
            reporter.close()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, BadLineError):
            print("nothing was written; --on-bad-line skip leaves such lines out", file=sys.stderr)
        return 1
    print(f"{progress.summary()} in {time.monotonic() - start:.1f} s")
    for key in arguments.json_keys:
        print(f"wrote {arguments.output_prefix}_{key}_document.bin and .idx")
    return 0


if __name__ == "__main__":
    sys.exit(main())
