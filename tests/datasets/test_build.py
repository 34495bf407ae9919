"""From data flags to data sets: every way to name data, and every mistake answered with the flag and the way out."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.config.run import RunConfig
from megatron.datasets.blend import BlendedDataset
from megatron.datasets.build import build_datasets, padding_id
from megatron.datasets.gpt import GPTDataset
from megatron.datasets.indexed import IndexedDatasetWriter
from megatron.datasets.tokenizer import NullTokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "data"
A, B, C = (str(GOLDEN / name) for name in ("a_text_document", "b_text_document", "c_text_sentence"))
TOKENIZER = NullTokenizer(1000)
BASE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --max-position-embeddings 64"
    " --tokenizer-type NullTokenizer --vocab-size 1000 "
)


def build(flags, sizes=(20, 2, 1)):
    return build_datasets(RunConfig.from_flags(BASE + flags), TOKENIZER, sizes)


def same(one, other):
    return len(one) == len(other) and all(
        np.array_equal(one[sample]["tokens"], other[sample]["tokens"]) for sample in range(len(one))
    )


def test_one_source_with_a_split():
    train, valid, test = build(f"--data-path {A} --split 80,15,5")
    assert [len(dataset) for dataset in (train, valid, test)] == [51, 11, 1]
    assert isinstance(train, GPTDataset)


def test_the_default_split_is_megatrons():
    train, valid, test = build(f"--data-path {A}", (20, 1, 0))
    assert len(np.unique(train.order.document_index)) == 39
    assert len(np.unique(valid.order.document_index)) == 1
    assert test is None


def test_a_weight_before_a_single_path_makes_a_blend_of_one():
    train, _, _ = build(f"--data-path 1.0 {A} --split 80,15,5")
    assert isinstance(train, BlendedDataset) and len(train) == 20 and train.datasets[0].num_samples == 21


def test_weights_and_their_normalisation():
    one = build(f"--data-path 3 {A} 7 {B} --split 80,15,5", (100, 10, 0))
    other = build(f"--data-path 0.3 {A} 0.7 {B} --split 80,15,5", (100, 10, 0))
    assert same(one[0], other[0]) and same(one[1], other[1]) and one[2] is None
    assert np.bincount(one[0].order.dataset_index).tolist() == [30, 70]


def test_a_blend_of_extreme_weights_reads_to_its_end():
    """FIELD_REPORTS B26: the rare source is never asked for more than it has, the frequent one starts over."""
    train, _, _ = build(f"--data-path 0.001 {A} 0.999 {B} --split 80,15,5", (500, 0, 0))
    counts = np.bincount(train.order.dataset_index)
    assert counts.sum() == len(train) and counts[0] <= 1
    for draw in range(len(train)):
        source, sample = train.locate(draw)
        assert 0 <= sample < len(train.datasets[source])
    assert train[len(train) - 1]["tokens"].shape == (64,)


def test_zero_weight_is_never_drawn():
    train, _, _ = build(f"--data-path 0 {A} 1 {B} --split 80,15,5", (100, 0, 0))
    assert set(train.order.dataset_index.tolist()) == {1}


def test_no_weights_draw_each_source_once():
    train, _, _ = build(f"--data-path {A} {B} {C} --split 80,15,5", (None, None, None))
    assert len(train) == sum(len(dataset) for dataset in train.datasets)
    shorter, _, _ = build(f"--data-path {A} {B} {C} --split 80,15,5", (30, 2, 1))
    assert len(shorter) == 30


def test_paths_from_a_file(tmp_path):
    (tmp_path / "args").write_text(f"0.3 {A}\n0.7 {B}\n")
    one = build(f"--data-args-path {tmp_path / 'args'} --split 80,15,5")
    assert same(one[0], build(f"--data-path 0.3 {A} 0.7 {B} --split 80,15,5")[0])


def test_a_path_for_each_split(tmp_path):
    flags = f"--train-data-path 1 {A} 2 {B} --valid-data-path {C} --test-data-path {A}"
    one = build(flags, (100, 5, 3))
    assert [len(dataset) for dataset in one] == [101, 15, 64]
    (tmp_path / "args.json").write_text(json.dumps({"train": f"1 {A} 2 {B}", "valid": [C], "test": [A]}))
    other = build(f"--per-split-data-args-path {tmp_path / 'args.json'}", (100, 5, 3))
    assert all(same(a, b) for a, b in zip(one, other))
    only_train = build(f"--train-data-path {A}", (10, 0, 0))
    assert only_train[1:] == (None, None)


def test_mock_data():
    train, valid, test = build("--mock-data", (40, 8, 4))
    assert [dataset.num_samples for dataset in (train, valid, test)] == [40, 8, 4]
    assert train[0]["tokens"].max() < 1000
    assert np.unique(train.order.document_index).tolist() == list(range(33_333))


@pytest.mark.parametrize("flags", ["", "--data-cache-path {cache}", "--no-mmap-bin-files"])
def test_how_files_are_read_changes_nothing(flags, tmp_path):
    plain = build(f"--data-path 3 {A} 7 {B} --split 80,15,5", (100, 10, 0))
    for _ in range(2):
        other = build(f"--data-path 3 {A} 7 {B} --split 80,15,5 " + flags.format(cache=tmp_path), (100, 10, 0))
        assert same(plain[0], other[0]) and same(plain[1], other[1])


def test_mask_flags_reach_the_samples():
    train, _, _ = build(f"--data-path {A} --split 80,15,5 --eod-mask-loss --reset-position-ids --reset-attention-mask")
    sample = train[1]
    ends = np.flatnonzero(sample["tokens"] == 999)
    assert len(ends) and np.flatnonzero(sample["loss_mask"] == 0).tolist() == ends.tolist()
    assert (sample["position_ids"][ends[ends < 63] + 1] == 0).all()
    assert sample["document_ids"].max() == (ends < 63).sum()


def test_padding_that_means_something_else_is_not_padding():
    assert padding_id(NullTokenizer(10), False) == -1
    assert padding_id(NullTokenizer(10, pad=3), False) == 3
    assert padding_id(NullTokenizer(10, eod=3, pad=3), False) == -1
    assert padding_id(NullTokenizer(10, eod=3, pad=3), True) == 3


TOY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    f" --data-path {GOLDEN / 'toy_text_document'} --split 90,10,0 --tokenizer-type NullTokenizer"
    " --make-vocab-size-divisible-by 8 "
)


def test_the_reference_run_reads_its_data():
    """Its --vocab-size is 119 and its documents end with 119, a padding row of the embedding in Megatron."""
    config = RunConfig.from_flags(TOY + "--vocab-size 119")
    train, valid, test = build_datasets(config, NullTokenizer(119), (80, 48, 16))
    assert max(int(train[sample]["labels"].max()) for sample in range(80)) == 119
    assert len(valid) >= 48 and test is None


@pytest.mark.parametrize("flags, is_read", [("", False), ("--no-mask-vocab-padding", True)])
def test_ids_without_a_logit_are_refused(flags, is_read):
    """With padding rows out of the softmax their loss would be infinite; with them in it, they are just tokens."""
    config = RunConfig.from_flags(TOY + "--vocab-size 117 " + flags)
    train, _, _ = build_datasets(config, NullTokenizer(117), (80, 0, 0))
    if is_read:
        assert all(train[sample] for sample in range(80))
    else:
        with pytest.raises(ValueError, match="token id 11[89].*--vocab-size is too small"):
            for sample in range(80):
                train[sample]


def test_a_share_without_tokens_is_an_error_not_a_loop():
    with pytest.raises(ValueError, match="2 samples are wanted for valid.*--split"):
        build(f"--data-path {C} --split 99,1,0")
    assert build(f"--data-path {C} --split 99,1,0", (20, 0, 0))[1] is None
    with pytest.raises(ValueError, match="wanted for valid"):
        build(f"--data-path 1 {C} 1 {A} --split 99,1,0")


def test_missing_files_are_named():
    for flags in ("--data-path no/such", f"--data-path 1 {A} 2 no/such", f"--data-path {A} no/such"):
        with pytest.raises(ValueError, match=r"no/such\.idx does not exist"):
            build(flags)
    with pytest.raises(ValueError, match="--data-args-path no/such"):
        build("--data-args-path no/such")


def test_a_file_for_each_split_must_name_all_three(tmp_path):
    for content, message in (("{", "not JSON"), ('{"train": []}', "train, valid and test"), ("[1]", "JSON object")):
        (tmp_path / "args.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            build(f"--per-split-data-args-path {tmp_path / 'args.json'}")


def test_weights_need_a_number_of_samples():
    with pytest.raises(ValueError, match="need a number of samples"):
        build(f"--data-path 1 {A} 2 {B} --split 80,15,5", (None, 2, 1))


@pytest.mark.parametrize("flags", [f"--data-path {A} --mock-data", f"--data-path {A} --valid-data-path {B}"])
def test_exactly_one_source(flags):
    with pytest.raises(ValueError, match="keep one"):
        build(flags)
    with pytest.raises(ValueError, match="drop --split"):
        build(f"--train-data-path {A} --split 9,1,0")


def test_regenerated_data_under_the_same_name_is_indexed_again(tmp_path):
    for lengths in ([100] * 20, [30] * 90):
        with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            for length in lengths:
                writer.add_document(range(length), [length])
            writer.finalize()
        train, _, _ = build(
            f"--data-path {tmp_path / 'x'} --data-cache-path {tmp_path / 'cache'} --split 1,0,0", (20, 0, 0)
        )
        assert all(train[sample]["tokens"].shape == (64,) for sample in range(len(train)))


def test_data_needs_no_torch():
    program = (
        "import sys; import megatron.datasets.build, megatron.datasets.preprocess, megatron.datasets.tokenizer;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent.parent)
