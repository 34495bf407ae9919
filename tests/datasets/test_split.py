"""The grammar of --split and where its borders fall."""

import pytest

from megatron.datasets.split import SplitRange, parse_split, split_sequences


@pytest.mark.parametrize("text", ["80,15,5", "'80,15,5'", "80/15/5", "80 15 5", "[0.80, 0.15, 0.05]"])
def test_spellings(text):
    train, valid, test = parse_split(text)
    assert train == SplitRange(0, 0.8)
    assert valid == (0.8, 0.9500000000000001)
    assert test == (0.9500000000000001, 1.0)


def test_missing_and_zero_shares():
    assert parse_split("1") == (SplitRange(0, 1.0), None, None)
    assert parse_split("90,10,0")[2] is None
    assert parse_split("0,0,1") == (None, None, SplitRange(0.0, 1.0))


@pytest.mark.parametrize("text", ["", "none", "0,0,0", "1,2,3,4", "1.2.3"])
def test_refused(text):
    with pytest.raises(ValueError, match="--split"):
        parse_split(text)


def test_borders_round_half_to_even():
    assert split_sequences(SplitRange(0.0, 0.5), 5).tolist() == [0, 1]
    assert split_sequences(SplitRange(0.5, 1.0), 5).tolist() == [2, 3, 4]
    assert split_sequences(SplitRange(0.0, 0.5), 7).tolist() == [0, 1, 2, 3]


def test_every_sequence_belongs_to_one_split():
    for count in range(1, 60):
        parts = [split_sequences(share, count).tolist() for share in parse_split("969,30,1")]
        assert sum(parts, []) == list(range(count))
