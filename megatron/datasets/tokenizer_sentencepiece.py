"""SentencePiece models (`.model` files), for SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer."""

from __future__ import annotations

import sentencepiece

from megatron.datasets.tokenizer import file_identity


class SentencePieceTokenizer:
    """A trained model. With `add_bos` (Llama2Tokenizer) every text begins with the begin-of-sequence id.

    End-of-document is the model's `</s>`. Special pieces written out in a text stay text.
    """

    def __init__(self, model_path: str, add_bos: bool = False) -> None:
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.Load(model_path)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"--tokenizer-model {model_path} is not a SentencePiece model: {error}") from None
        self._add_bos = add_bos
        self.vocab_size = self.num_ids = self._model.get_piece_size()
        self.eod = self._model.eos_id()
        if self.eod < 0:
            raise ValueError(f"--tokenizer-model {model_path} has no </s> to end a document; train it with one")
        self.pad = self._model.pad_id() if self._model.pad_id() >= 0 else None
        specials = (self._model.bos_id(), self.eod, self._model.unk_id())
        self.special_ids = frozenset(number for number in specials if number >= 0)
        self.identity = file_identity("Llama2Tokenizer" if add_bos else "SentencePieceTokenizer", model_path)

    def tokenize(self, text: str) -> list[int]:
        return self._model.encode(text, out_type=int, add_bos=self._add_bos)

    def detokenize(self, ids: list[int]) -> str:
        return self._model.decode(list(ids))
