"""GPT samples: their text is a window of the documents laid end to end, whatever reads the files."""

from pathlib import Path

import numpy as np
import pytest

from megatron.datasets.gpt import GPTDataset, SampleRules
from megatron.datasets.index_cache import IndexCache
from megatron.datasets.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.datasets.masks import MaskRules
from megatron.datasets.split import parse_split, split_sequences

GOLDEN = Path(__file__).parent.parent / "golden" / "data"


def dataset_of(source, num_samples=None, cache=None, **rules):
    sequences = np.arange(len(source.sequence_lengths), dtype=np.int32)
    rules = SampleRules(**{"sequence_length": 32, "seed": 1234, **rules})
    return GPTDataset(source, sequences, num_samples, rules, MaskRules(eod=119), cache)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("num_samples", [None, 100, 1100])
def test_text_is_a_window_of_the_documents(mmap, num_samples):
    source = IndexedDataset(GOLDEN / "toy_text_document", mmap)
    dataset = dataset_of(source, num_samples)
    stream = np.concatenate([source[int(sequence)] for sequence in dataset.order.document_index])
    for sample in range(0, len(dataset), 7):
        start = int(dataset.order.shuffle_index[sample]) * 32
        assert np.array_equal(dataset[sample]["tokens"], stream[start : start + 32])
        assert np.array_equal(dataset[sample]["labels"], stream[start + 1 : start + 33])


def test_an_epoch_trains_every_token_once_but_the_rest():
    source = IndexedDataset(GOLDEN / "toy_text_document")
    dataset = dataset_of(source)
    stream = np.concatenate([source[int(sequence)] for sequence in dataset.order.document_index])
    seen = np.concatenate([dataset[sample]["tokens"] for sample in np.argsort(dataset.order.shuffle_index)])
    assert np.array_equal(seen, stream[: len(seen)])
    assert len(stream) - len(seen) <= 32


def test_the_run_of_the_reference_losses_draws_from_the_training_share():
    """`--split 90,10,0 --seed 1234 --seq-length 32`, 10 steps of 8: all from sequences 0 to 269, seeded order."""
    source = IndexedDataset(GOLDEN / "toy_text_document")
    train, valid, test = parse_split("90,10,0")
    assert test is None
    sequences = split_sequences(train, len(source))
    assert sequences[-1] == 269 and split_sequences(valid, len(source)).tolist() == list(range(270, 300))
    dataset = GPTDataset(source, sequences, 80, SampleRules(32, 1234), MaskRules(eod=119))
    random = np.random.RandomState(1234)
    order = np.arange(270, dtype=np.int32)
    random.shuffle(order)
    assert np.array_equal(dataset.order.document_index, order)
    shuffled = np.arange(len(dataset), dtype=np.uint32)
    random.shuffle(shuffled)
    assert np.array_equal(dataset.order.shuffle_index, shuffled)


def test_empty_documents_do_not_disturb_samples(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        for document in ([], [1, 2, 3], [], [4, 5], [], [6, 7, 8, 9]):
            writer.add_document(document, [len(document)] if document else [])
        writer.finalize()
    dataset = dataset_of(IndexedDataset(tmp_path / "x"), sequence_length=2)
    assert len(dataset) == 4
    assert len({int(token) for sample in range(4) for token in dataset[sample]["tokens"]}) == 8


def test_a_partial_last_sample_is_padded(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add_document(range(1, 8), [7])
        writer.finalize()
    dataset = dataset_of(IndexedDataset(tmp_path / "x"), sequence_length=4, keep_last_partial=True)
    assert len(dataset) == 2
    last = dataset[int(np.flatnonzero(dataset.order.shuffle_index == 1)[0])]
    assert last["tokens"].tolist() == [5, 6, 7, 0]
    assert last["labels"].tolist() == [6, 7, 0, 0]
    assert last["loss_mask"].tolist() == [1, 1, 0, 0]


def test_cached_orders_are_the_same_and_never_stale(tmp_path):
    """Each option, and the data under an unchanged name, has an entry of its own."""
    cache = IndexCache(tmp_path / "cache")
    source = IndexedDataset(GOLDEN / "toy_text_document")
    variants = [{}, {"seed": 1}, {"sequence_length": 16}, {"extra_tokens": 0}, {"keep_last_partial": True}]
    for number, rules in enumerate(variants, 1):
        for _ in range(2):
            built, cached = dataset_of(source, 50, **rules), dataset_of(source, 50, cache, **rules)
            assert all(np.array_equal(a, b) for a, b in zip(built.order, cached.order))
            assert np.array_equal(built[3]["tokens"], cached[3]["tokens"])
        assert len(list(cache.directory.iterdir())) == number
    dataset_of(source, 51, cache)
    assert len(list(cache.directory.iterdir())) == len(variants) + 1

    lengths = ([5, 6, 7], [9, 9])
    for document_lengths in lengths:
        with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            for length in document_lengths:
                writer.add_document(range(length), [length])
            writer.finalize()
        dataset = dataset_of(IndexedDataset(tmp_path / "x"), 3, cache, sequence_length=4)
        assert all(dataset[sample]["tokens"].shape == (4,) for sample in range(len(dataset)))
