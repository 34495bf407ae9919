"""Tokenizers of the `tokenizers` library: a `tokenizer.json`, or GPT-2's `vocab.json` and `merges.txt`."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.datasets.tokenizer import file_identity

try:
    import tokenizers
except ImportError:
    raise ValueError(
        "--tokenizer-type HuggingFaceTokenizer and GPT2BPETokenizer need the package tokenizers, which is not"
        " installed: pip install tokenizers"
    ) from None

EOD_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or a directory that holds one (with `tokenizer_config.json` beside it where there is one).

    Special tokens written out in a text become their ids, and the file's post-processor applies (a tokenizer that
    begins texts with a begin-of-sequence id does so here), as in transformers. End-of-document is `eos_token` of the
    configuration, else the first well-known name the vocabulary holds.
    """

    def __init__(self, path: str) -> None:
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ValueError(f"--tokenizer-model {path}: no tokenizer.json there")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"--tokenizer-model {path} is not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = file.with_name("tokenizer_config.json")
        names = json.loads(settings.read_text()) if settings.is_file() else {}
        self.vocab_size = self.num_ids = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        eod = self._id_of(names.get("eos_token"))
        if eod is None:
            eod = next((self._id_of(name) for name in EOD_NAMES if self._id_of(name) is not None), None)
        if eod is None:
            raise ValueError(
                f"--tokenizer-model {path}: no end-of-document token; name it as eos_token in tokenizer_config.json"
            )
        self.eod = eod
        self.pad = self._id_of(names.get("pad_token"))
        roles = {self._id_of(names.get(role)) for role in ROLES}
        self.special_ids = frozenset((roles | {self.eod}) - {None})
        paths = [str(file)] + ([str(settings)] if settings.is_file() else [])
        self.identity = file_identity("HuggingFaceTokenizer", *paths)

    def _id_of(self, token: str | dict | None) -> int | None:
        name = token["content"] if isinstance(token, dict) else token
        return None if name is None else self._tokenizer.token_to_id(name)

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def detokenize(self, ids: list[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from `--vocab-file` and `--merge-file`; end-of-document is `<|endoftext|>`."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        try:
            model = tokenizers.models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"--vocab-file {vocab_file}, --merge-file {merge_file}: not a BPE: {error}") from None
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        eod = self._tokenizer.token_to_id("<|endoftext|>")
        if eod is None:
            raise ValueError(f"--vocab-file {vocab_file} has no <|endoftext|>, which ends documents")
        self._tokenizer.add_special_tokens(["<|endoftext|>"])
        self.vocab_size = self.num_ids = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eod = eod
        self.pad = None
        self.special_ids = frozenset({eod})
        self.identity = file_identity("GPT2BPETokenizer", vocab_file, merge_file)

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def detokenize(self, ids: list[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
