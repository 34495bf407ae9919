"""TikTokenizer: byte-pair ranks run by `tiktoken`, from Megatron's JSON, a tekken file or a `.tiktoken` file.

The special tokens come first (`--tiktoken-num-special-tokens` ids), the ranks after them, cut to `--vocab-size`.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from megatron.datasets.tokenizer import file_identity

try:
    import tiktoken
except ImportError:
    raise ValueError(
        "--tokenizer-type TikTokenizer needs the package tiktoken, which is not installed: pip install tiktoken"
    ) from None

DEFAULT_VOCAB_SIZE = 2**17
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class TikTokenizer:
    """Special tokens written out in a text become their ids, as in Megatron. End-of-document is `</s>`."""

    def __init__(
        self,
        path: str,
        pattern: str = "v2",
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: tuple[str, ...] | None = None,
    ) -> None:
        self.vocab_size = self.num_ids = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        specials = list(SPECIAL_TOKENS if special_tokens is None else special_tokens)
        self._check_specials(specials, num_special_tokens)
        specials += [f"<SPECIAL_{number}>" for number in range(len(specials), num_special_tokens)]
        ranks = read_ranks(path)
        wanted = self.vocab_size - num_special_tokens
        if len(ranks) < wanted:
            raise ValueError(
                f"--tokenizer-model {path} holds {len(ranks)} tokens; with --tiktoken-num-special-tokens"
                f" {num_special_tokens} it fills --vocab-size {len(ranks) + num_special_tokens} at most, not"
                f" {self.vocab_size}"
            )
        self._encoding = tiktoken.Encoding(
            name=Path(path).name,
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: rank + num_special_tokens for rank, token in enumerate(ranks[:wanted])},
            special_tokens={token: number for number, token in enumerate(specials)},
        )
        self.eod = specials.index("</s>")
        self.pad = specials.index("<pad>")
        self.special_ids = frozenset(specials.index(token) for token in SPECIAL_TOKENS if token != "<pad>")
        self.identity = {
            **file_identity("TikTokenizer", path),
            "pattern": pattern,
            "vocab_size": self.vocab_size,
            "special_tokens": specials,
        }

    def _check_specials(self, specials: list[str], num_special_tokens: int) -> None:
        missing = [token for token in SPECIAL_TOKENS if token not in specials]
        if missing or len(set(specials)) != len(specials):
            raise ValueError(f"--tokenizer-special-tokens must be unique and include {' '.join(SPECIAL_TOKENS)}")
        if not len(specials) <= num_special_tokens < self.vocab_size:
            raise ValueError(
                f"--tiktoken-num-special-tokens {num_special_tokens} must be at least {len(specials)}, the number of"
                f" special tokens, and less than --vocab-size {self.vocab_size}"
            )

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def detokenize(self, ids: list[int]) -> str:
        return self._encoding.decode(list(ids))


def read_ranks(path: str) -> list[bytes]:
    """Tokens in rank order from a JSON list of {rank, token_bytes}, such a list under "vocab", or base64 lines."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        if path.endswith(".json"):
            record = json.loads(text)
            entries = record["vocab"] if isinstance(record, dict) else record
            ranked = {entry["rank"]: base64.b64decode(entry["token_bytes"]) for entry in entries}
        else:
            pairs = (line.split() for line in text.splitlines() if line)
            ranked = {int(rank): base64.b64decode(token) for token, rank in pairs}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--tokenizer-model {path} is neither Megatron's JSON nor .tiktoken ranks: {error}") from None
    if set(ranked) != set(range(len(ranked))):
        raise ValueError(f"--tokenizer-model {path}: the ranks are not 0 to {len(ranked) - 1}")
    return [ranked[rank] for rank in range(len(ranked))]
