"""Tokenizers: what every one offers, the two that need no file, and the choice by `--tokenizer-type`.

The libraries behind the others are imported only by the tokenizer that needs them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

TOKENIZER_TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "NullTokenizer",
    "ByteTokenizer",
)


class Tokenizer(Protocol):
    """Text to token ids and back.

    `vocab_size` sizes the embedding and the stored token type, `num_ids` bounds the ids that data may hold (more than
    vocab_size for NullTokenizer only), `eod` ends a document, `pad` is None when there is no padding token,
    `special_ids` are the ids that mean something other than padding or text.
    """

    vocab_size: int
    num_ids: int
    eod: int
    pad: int | None
    special_ids: frozenset[int]
    identity: dict

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """The tokenizer flags, under their flag names."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tokenizer_special_tokens: tuple[str, ...] | None = None
    null_tokenizer_eod_id: int | None = None
    null_tokenizer_pad_id: int = -1

    @classmethod
    def of(cls, flags: object) -> TokenizerOptions:
        """The same-named fields of a DataConfig or of parsed arguments."""
        return cls(**{field.name: getattr(flags, field.name) for field in fields(cls)})


class NullTokenizer:
    """Numbers as text: '5 7 9' is the ids 5, 7, 9. For data that holds tokens already.

    As in Megatron 0.20, the end-of-document id defaults to the last of the vocabulary. Older releases used the id after
    it; data written then holds `vocab_size` as a token, which is therefore allowed where padding leaves it a row.
    """

    def __init__(self, vocab_size: int, eod: int | None = None, pad: int = -1) -> None:
        self.vocab_size = vocab_size
        self.num_ids = vocab_size + 1
        self.eod = vocab_size - 1 if eod is None else eod
        self.pad = None if pad < 0 else pad
        self.special_ids = frozenset({self.eod})
        self.identity = {"type": "NullTokenizer", "vocab_size": vocab_size, "eod": self.eod, "pad": self.pad}

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(str(number) for number in ids)


class ByteTokenizer:
    """The bytes of the UTF-8 text, 0 to 255, and 256 as end-of-document. Needs no file and loses nothing."""

    def __init__(self) -> None:
        self.vocab_size = self.num_ids = 257
        self.eod = 256
        self.pad = None
        self.special_ids = frozenset({self.eod})
        self.identity = {"type": "ByteTokenizer"}

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogatepass"))

    def detokenize(self, ids: list[int]) -> str:
        return bytes(number for number in ids if number < self.eod).decode("utf-8", errors="replace")


def file_identity(kind: str, *paths: str) -> dict:
    """Type and content of a tokenizer's files; the same files under another path are the same tokenizer."""
    digests = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths]
    return {"type": kind, "sha256": digests}


def required_file(path: str | None, flag: str, kind: str) -> str:
    """The path, or ValueError naming the flag when it is missing or leads nowhere."""
    if path is None:
        raise ValueError(f"--tokenizer-type {kind} needs {flag}")
    if not Path(path).exists():
        raise ValueError(f"{flag} {path}: no such file (tokenizers are read from disk, never downloaded)")
    return path


def token_rows(tokenizer: Tokenizer, vocab_room: int) -> int:
    """Rows of the embedding that are tokens; the rest is padding and takes no probability.

    `vocab_room` is the same for every layout (`RunConfig.vocab_room`), so the softmax and the checkpoint are too.
    """
    return min(tokenizer.num_ids, vocab_room)


def build_tokenizer(options: TokenizerOptions) -> Tokenizer:
    """The tokenizer the flags name. ValueError for a missing file, flag or package."""
    kind = options.tokenizer_type
    if options.tokenizer_special_tokens is not None and kind != "TikTokenizer":
        raise ValueError(f"--tokenizer-special-tokens is for TikTokenizer; {kind} has its own. Drop it")
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if options.vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(options.vocab_size, options.null_tokenizer_eod_id, options.null_tokenizer_pad_id)
    if kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        from megatron.datasets.tokenizer_sentencepiece import SentencePieceTokenizer

        model = required_file(options.tokenizer_model, "--tokenizer-model", kind)
        return SentencePieceTokenizer(model, add_bos=kind == "Llama2Tokenizer")
    if kind == "HuggingFaceTokenizer":
        from megatron.datasets.tokenizer_huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(required_file(options.tokenizer_model, "--tokenizer-model", kind))
    if kind == "GPT2BPETokenizer":
        from megatron.datasets.tokenizer_huggingface import GPT2BPETokenizer

        vocab_file = required_file(options.vocab_file, "--vocab-file", kind)
        return GPT2BPETokenizer(vocab_file, required_file(options.merge_file, "--merge-file", kind))
    if kind == "TikTokenizer":
        from megatron.datasets.tokenizer_tiktoken import TikTokenizer

        return TikTokenizer(
            required_file(options.tokenizer_model, "--tokenizer-model", kind),
            pattern=options.tiktoken_pattern or "v2",
            vocab_size=options.vocab_size,
            num_special_tokens=options.tiktoken_num_special_tokens,
            special_tokens=options.tokenizer_special_tokens,
        )
    raise ValueError(f"--tokenizer-type {kind} is not known")
