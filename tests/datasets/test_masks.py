"""What document ends and padding do to a sample (FIELD_REPORTS B27, the data side)."""

import numpy as np
import pytest

from megatron.datasets.indexed import DataError
from megatron.datasets.masks import MaskRules, batch_fields

EOD = 99


def packed(first_document, second_document):
    """One sample: first document, its end, second document; labels need one more token."""
    return np.array([[*first_document, EOD, *second_document, 50]], dtype=np.int64)


TEXT = packed(range(1, 10), range(20, 42))


def test_reset_options():
    rules = MaskRules(EOD, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    fields = batch_fields(TEXT, rules)
    assert fields["tokens"].shape == (1, 32)
    assert fields["tokens"][0].tolist() == TEXT[0, :-1].tolist()
    assert fields["labels"][0].tolist() == TEXT[0, 1:].tolist()
    assert fields["position_ids"][0].tolist() == [*range(10), *range(22)]
    assert fields["document_ids"][0].tolist() == [0] * 10 + [1] * 22
    assert fields["document_ids"].dtype == np.int32
    assert np.flatnonzero(fields["loss_mask"][0] == 0).tolist() == [9]
    assert fields["loss_mask"].sum() == 31


def test_without_options_documents_run_together():
    fields = batch_fields(TEXT, MaskRules(EOD))
    assert fields["position_ids"][0].tolist() == list(range(32))
    assert "document_ids" not in fields
    assert fields["loss_mask"].min() == 1


def test_masks_depend_on_the_place_of_document_ends_only():
    rules = MaskRules(EOD, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    other = batch_fields(packed(range(60, 69), range(20, 42)), rules)
    for name in ("loss_mask", "position_ids", "document_ids"):
        assert np.array_equal(other[name], batch_fields(TEXT, rules)[name])


def test_nothing_leaks_from_one_sample_to_the_next():
    rules = MaskRules(EOD, pad=0, eod_mask_loss=True)
    clean = np.arange(1, 34, dtype=np.int64)[None]
    before = batch_fields(clean, rules)
    padded = TEXT.copy()
    padded[0, 20:] = 0
    masked = batch_fields(padded, rules)
    assert masked["loss_mask"].sum() == 18
    after = batch_fields(clean, rules)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    both = batch_fields(np.concatenate([padded, clean]), rules)
    assert both["loss_mask"].sum(axis=1).tolist() == [18, 32]


def test_consecutive_and_outer_document_ends():
    text = np.array([[EOD, EOD, 1, 2, EOD, 3]])
    rules = MaskRules(EOD, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    fields = batch_fields(text, rules)
    assert fields["document_ids"][0].tolist() == [0, 1, 2, 2, 2]
    assert fields["position_ids"][0].tolist() == [0, 0, 0, 1, 2]
    assert fields["loss_mask"][0].tolist() == [0, 0, 1, 1, 0]


def test_padding_has_no_loss_and_a_valid_id():
    text = np.array([[4, 5, -1, -1]])
    fields = batch_fields(text, MaskRules(EOD, pad=-1))
    assert fields["tokens"][0].tolist() == [4, 5, 0]
    assert fields["labels"][0].tolist() == [5, 0, 0]
    assert fields["loss_mask"][0].tolist() == [1, 0, 0]


def test_without_an_extra_token_the_last_label_is_padding():
    fields = batch_fields(np.array([[4, 5, 6]]), MaskRules(EOD), extra_tokens=0)
    assert fields["tokens"][0].tolist() == [4, 5, 6]
    assert fields["labels"][0].tolist() == [5, 6, 0]
    assert fields["loss_mask"][0].tolist() == [1, 1, 0]


def test_a_negative_id_is_damage_unless_it_is_padding():
    text = np.array([[1, 2, -1, 3]])
    assert batch_fields(text, MaskRules(eod=9, pad=-1))["loss_mask"].tolist() == [[1, 0, 1]]
    with pytest.raises(DataError, match="token id -3, which no tokenizer gives"):
        batch_fields(text - 2, MaskRules(eod=9, pad=-1))
