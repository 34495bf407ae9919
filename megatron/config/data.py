"""What the model reads: corpora, how samples are cut from them, and the tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.rules import at_least, changed, flag_name, raise_if, required


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    seq_length: int | None = flag(None)
    """Tokens of one training sequence. Required."""
    data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Prefixes of .bin/.idx pairs, or weights and prefixes in turn: 0.3 A 0.7 B."""
    train_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """As --data-path, for training only."""
    valid_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """As --data-path, for validation only."""
    test_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """As --data-path, for the test only."""
    data_args_path: str | None = flag(None)
    """File that holds what --data-path would."""
    per_split_data_args_path: str | None = flag(None)
    """JSON file with the keys train, valid and test, each holding what --data-path would."""
    split: str | None = flag(None)
    """Shares of training, validation and test, as in 969,30,1. None: 969,30,1 with --data-path."""
    data_cache_path: str | None = flag(None)
    """Directory in which sample indices are kept for the next start. None: built at each start and not kept."""
    mock_data: bool = flag(False)
    """Made-up documents; needs no file."""
    mid_level_dataset_surplus: float = flag(0.005)
    """Share of spare samples drawn from each data set of a blend."""
    eod_mask_loss: bool = flag(False)
    """No loss where the input token is end-of-document."""
    reset_position_ids: bool = flag(False)
    """Count positions from 0 after each end-of-document."""
    reset_attention_mask: bool = flag(False)
    """Keep attention within documents."""
    allow_ambiguous_pad_tokens: bool = flag(False)
    """Let the padding token be one that also has another meaning."""
    dataloader_type: str | None = flag(None, choices=("single", "cyclic", "external"))
    """single: samples in the order of the data set; cyclic: a new permutation each epoch. None: single. external is not
    supported."""
    num_workers: int = flag(2)
    """0: read data in the training thread. Any other number: one thread reads ahead, on each rank."""
    mmap_bin_files: bool = flag(True, names=("--no-mmap-bin-files",))
    """Read .bin files by seek and read instead of mapping them into memory."""
    tokenizer_type: str | None = flag(
        None,
        choices=(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "NullTokenizer",
            "ByteTokenizer",
        ),
    )
    """Kind of tokenizer. ByteTokenizer needs no file; NullTokenizer needs --vocab-size."""
    tokenizer_model: str | None = flag(None)
    """File or directory of the tokenizer."""
    vocab_size: int | None = flag(None)
    """Tokens of the vocabulary before padding. None: as the tokenizer says."""
    vocab_file: str | None = flag(None)
    """vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = flag(None)
    """merges.txt of GPT2BPETokenizer."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Pre-tokenisation pattern of TikTokenizer. None: v2."""
    tiktoken_num_special_tokens: int = flag(1000)
    """Special tokens of TikTokenizer, placed first."""
    tokenizer_special_tokens: tuple[str, ...] | None = flag(None, nargs="+")
    """Special tokens of TikTokenizer or SentencePieceTokenizer."""
    null_tokenizer_eod_id: int | None = flag(None)
    """End-of-document token of NullTokenizer. None: the last one, --vocab-size - 1."""
    null_tokenizer_pad_id: int = flag(-1)
    """Padding token of NullTokenizer. -1: none."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = required(self, "seq_length", "tokenizer_type")
        lines += at_least(self, 1, "seq_length", "vocab_size")
        lines += at_least(self, 0, "num_workers", "mid_level_dataset_surplus", "tiktoken_num_special_tokens")
        if self.dataloader_type == "external":
            lines.append("--dataloader-type external is not supported; use single or cyclic")
        return lines + self._source_problems() + self._split_problems() + self._tokenizer_problems()

    def _source_problems(self) -> list[str]:
        per_split = changed(self, "train_data_path", "valid_data_path", "test_data_path")
        sources = changed(self, "mock_data", "data_path", "data_args_path", "per_split_data_args_path")
        names = [flag_name(self, name) for name in sources + per_split[:1]]
        lines = []
        if len(names) > 1:
            lines.append(
                f"{' and '.join(names)} each say what to train on; keep one (the train, valid and test paths count as "
                "one)"
            )
        if not names:
            lines.append(
                "--data-path is required, or one of --train-data-path, --data-args-path, --mock-data: the data"
            )
        lines += [
            f"{flag_name(self, name)} names no data set; give at least one prefix or drop it"
            for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path")
            if getattr(self, name) == ()
        ]
        return lines

    def _split_problems(self) -> list[str]:
        if self.split is None:
            return []
        each = changed(self, "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
        if each:
            return [
                f"--split {self.split} and {flag_name(self, each[0])}: the splits have data sets of their own; drop "
                "--split"
            ]
        shares = split_shares(self.split)
        if not 1 <= len(shares) <= 3 or sum(shares) <= 0 or re.search("[A-Za-z-]", self.split):
            return [
                f"--split {self.split}: expected up to three shares (training, validation, test), none negative and "
                "not all 0, "
                "as in 969,30,1"
            ]
        return []

    def _tokenizer_problems(self) -> list[str]:
        kind, lines = self.tokenizer_type, []
        needs = {
            "NullTokenizer": ("vocab_size",),
            "GPT2BPETokenizer": ("vocab_file", "merge_file"),
            "ByteTokenizer": (),
        }
        for name in needs.get(kind, ("tokenizer_model",)) if kind is not None else ():
            if getattr(self, name) is None:
                lines.append(f"--tokenizer-type {kind} needs {flag_name(self, name)}; give it")
        return lines


def split_shares(split: str) -> tuple[float, ...]:
    """The numbers of --split, whatever stands between them (scripts pass it with its quotes); not normalised."""
    return tuple(float(number) for number in re.findall(r"[0-9]+\.?[0-9]*|\.[0-9]+", split))
