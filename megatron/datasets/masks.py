"""From packed tokens to what a step trains on: inputs, labels, loss mask, position ids, document ids.

All functions work on [b, s] arrays and return new ones; nothing is cached, so no sample can see another's mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.datasets.indexed import DataError


@dataclass(frozen=True)
class MaskRules:
    """How document ends and padding act on a sample. `pad` is -1 when no token id means padding.

    `num_ids`: ids from here on are refused, since no logit stands for them and their loss would be infinite.
    """

    eod: int
    pad: int = -1
    num_ids: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False


def starts_document(tokens: np.ndarray, eod: int) -> np.ndarray:
    """True on the token after an end-of-document token; that token itself belongs to the document it ends."""
    starts = np.zeros(tokens.shape, dtype=bool)
    starts[:, 1:] = tokens[:, :-1] == eod
    return starts


def position_ids(tokens: np.ndarray, eod: int, reset: bool) -> np.ndarray:
    """int64 positions; with `reset` they restart at 0 on the first token of each document."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    if not reset:
        return positions.copy()
    first_of_document = np.maximum.accumulate(np.where(starts_document(tokens, eod), positions, 0), axis=1)
    return positions - first_of_document


def document_ids(tokens: np.ndarray, eod: int) -> np.ndarray:
    """int32 ordinal of each token's document within its sample; attention stays inside equal numbers."""
    return np.cumsum(starts_document(tokens, eod), axis=1, dtype=np.int32)


def batch_fields(text: np.ndarray, rules: MaskRules, extra_tokens: int = 1) -> dict[str, np.ndarray]:
    """Fields of a batch from its text, int64 [b, s + extra_tokens].

    tokens, labels, position_ids int64 [b, s]; loss_mask float32 [b, s]: 0 where the label is padding and, with
    eod_mask_loss, exactly where the input token is the end of a document; document_ids int32 [b, s] when the
    attention mask is to be reset. Padding is replaced by id 0 so that it can be looked up.
    """
    if text.size and text.min() < min(rules.pad, 0):
        raise DataError(f"the data holds token id {text.min()}, which no tokenizer gives: the token file is damaged")
    if rules.num_ids is not None and text.size and text.max() >= rules.num_ids:
        raise DataError(
            f"the data holds token id {text.max()}, but the vocabulary has ids 0 to {rules.num_ids - 1} only; it was"
            " written with another tokenizer, or --vocab-size is too small"
        )
    if extra_tokens:
        tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()
    else:
        tokens, labels = text.copy(), np.roll(text, -1, axis=1)
        labels[:, -1] = rules.pad
    loss_mask = np.ones(tokens.shape, dtype=np.float32)
    if rules.eod_mask_loss:
        loss_mask[tokens == rules.eod] = 0.0
    loss_mask[labels == rules.pad] = 0.0
    fields = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
    fields["position_ids"] = position_ids(tokens, rules.eod, rules.reset_position_ids)
    if rules.reset_attention_mask:
        fields["document_ids"] = document_ids(tokens, rules.eod)
    tokens[tokens == rules.pad] = 0
    labels[labels == rules.pad] = 0
    return fields
