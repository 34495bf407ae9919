"""The loader: data order is a function of the consumed samples only (FIELD_REPORTS B18, B19)."""

import threading

import numpy as np
import pytest
import torch

from megatron.datasets.gpt import SampleRules
from megatron.datasets.loader import CyclicOrder, SampleLoader, SequentialOrder, order_of
from megatron.datasets.masks import MaskRules


class Numbered:
    """Sample i consists of token i, so the first token of each row names the sample."""

    def __init__(self, num_samples=24, masks=None):
        self.num_samples, self.masks = num_samples, masks or MaskRules(eod=-2)
        self.rules, self.text_length = SampleRules(4, 1), 5

    def __len__(self):
        return self.num_samples

    def text_into(self, out, sample):
        out[:] = sample


def loader_of(kind="single", consumed=0, dp_rank=0, dp_size=1, mbs=1, workers=0, num_samples=72, **more):
    dataset = Numbered(num_samples)
    return SampleLoader(
        dataset,
        order_of(dataset, kind, "train", **more),
        micro_batch_size=mbs,
        dp_rank=dp_rank,
        dp_size=dp_size,
        consumed_samples=consumed,
        num_workers=workers,
    )


def step_ids(loader, batch_size):
    return [batch["tokens"][:, 0].tolist() for batch in loader.next_step(batch_size)]


def flat(batches):
    return [sample for batch in batches for sample in batch]


def run_ids(loader, steps, batch_size=4):
    ids = [flat(step_ids(loader, batch_size)) for _ in range(steps)]
    loader.close()
    return ids


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind, num_samples", [("single", 72), ("cyclic", 24)])
def test_b18_a_resume_anywhere_continues_the_unbroken_run(workers, kind, num_samples):
    unbroken = run_ids(loader_of(kind, num_samples=num_samples, workers=workers), 18)
    for broken_at in range(1, 18):
        first = loader_of(kind, num_samples=num_samples, workers=workers)
        head = run_ids(first, broken_at)
        assert first.consumed_samples == broken_at * 4
        second = loader_of(kind, consumed=first.consumed_samples, num_samples=num_samples, workers=workers)
        assert head + run_ids(second, 18 - broken_at) == unbroken
        assert second.consumed_samples == 72


@pytest.mark.parametrize("kind, num_samples", [("single", 72), ("cyclic", 24)])
def test_b18_every_epoch_holds_each_sample_once(kind, num_samples):
    ids = sum(run_ids(loader_of(kind, num_samples=num_samples), 18), [])
    for start in range(0, 72, num_samples):
        assert sorted(ids[start : start + num_samples]) == list(range(num_samples))
    if kind == "cyclic":
        assert ids[:24] != ids[24:48] != ids[48:]


def test_b18_another_batch_size_after_the_break():
    ids = sum(run_ids(loader_of("cyclic", num_samples=24), 18), [])
    first = loader_of("cyclic", num_samples=24)
    head = sum(run_ids(first, 9), [])
    tail = sum(run_ids(loader_of("cyclic", consumed=first.consumed_samples, num_samples=24), 18, 2), [])
    assert head + tail == ids


@pytest.mark.parametrize("kind, num_samples", [("single", 24), ("cyclic", 24)])
def test_b19_every_layout_sees_the_same_samples_in_a_step(kind, num_samples):
    whole = run_ids(loader_of(kind, num_samples=num_samples), 6)
    for dp_size, mbs in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)):
        ranks = [
            loader_of(kind, dp_rank=rank, dp_size=dp_size, mbs=mbs, num_samples=num_samples) for rank in range(dp_size)
        ]
        for step in whole:
            parts = [step_ids(rank, 4) for rank in ranks]
            in_order = [parts[rank][number] for number in range(len(parts[0])) for rank in range(dp_size)]
            assert flat(in_order) == step


@pytest.mark.parametrize("before, after", [(2, 1), (2, 4), (4, 2), (1, 2)])
def test_b19_another_number_of_ranks_after_the_break(before, after):
    whole = run_ids(loader_of(), 6)
    ranks = [loader_of(dp_rank=rank, dp_size=before) for rank in range(before)]
    for _ in range(3):
        for rank in ranks:
            rank.next_step(4)
    resumed = [loader_of(dp_rank=rank, dp_size=after, consumed=ranks[0].consumed_samples) for rank in range(after)]
    for step in whole[3:]:
        assert sorted(flat(sum((step_ids(rank, 4) for rank in resumed), []))) == step


def test_a_microbatch_is_a_contiguous_block():
    """Microbatch i of rank r begins at consumed + (i x dp + r) x mbs."""
    loader = loader_of(consumed=8, dp_rank=1, dp_size=2, mbs=2)
    batches = loader.next_step(8)
    assert [batch["tokens"][:, 0].tolist() for batch in batches] == [[10, 11], [14, 15]]
    assert [batch["sample_ids"].tolist() for batch in batches] == [[10, 11], [14, 15]]


def test_sample_ids_are_positions_in_the_run():
    loader = loader_of("cyclic", consumed=48, num_samples=24)
    batch = loader.next_step(4)
    assert [int(part["sample_ids"]) for part in batch] == [48, 49, 50, 51]


def test_fields_and_types():
    dataset = Numbered(8, MaskRules(eod=3, reset_attention_mask=True))
    loader = SampleLoader(dataset, SequentialOrder(8, "train"), micro_batch_size=4)
    (batch,) = loader.next_step(4)
    types = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()}
    assert types == {
        "tokens": (torch.int64, (4, 4)),
        "labels": (torch.int64, (4, 4)),
        "loss_mask": (torch.float32, (4, 4)),
        "position_ids": (torch.int64, (4, 4)),
        "document_ids": (torch.int32, (4, 4)),
        "sample_ids": (torch.int64, (4,)),
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_size_may_change_at_every_step(workers):
    loader = loader_of(workers=workers)
    ids = [flat(step_ids(loader, size)) for size in (2, 2, 4, 4, 8, 6)]
    loader.close()
    assert sum(ids, []) == list(range(26))
    assert [len(step) for step in ids] == [2, 2, 4, 4, 8, 6]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_of_the_data_names_numbers(workers):
    loader = loader_of(num_samples=10, workers=workers)
    assert flat(step_ids(loader, 4)) == [0, 1, 2, 3]
    assert flat(step_ids(loader, 4)) == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="holds 10 samples, but samples up to 12"):
        loader.next_step(4)
    loader.close()


def test_validation_starts_over():
    loader = loader_of(num_samples=6, wraps=True)
    assert sum(run_ids(loader, 3), []) == [0, 1, 2, 3, 4, 5] * 2


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="global batch of 6 .*micro-batch-size 2 x data-parallel size 2"):
        loader_of(mbs=2, dp_size=2).next_step(6)


def test_an_empty_set_is_refused():
    for kind in ("single", "cyclic"):
        with pytest.raises(ValueError, match="train data set holds no samples"):
            loader_of(kind, num_samples=0)
    with pytest.raises(ValueError, match="external"):
        order_of(Numbered(), "external", "train")


def test_what_fails_in_the_thread_surfaces_in_the_caller():
    loader = loader_of(workers=1)
    flat(step_ids(loader, 4))
    loader._prefetched[1].result()

    def fail(out, sample):
        raise OSError("disk gone")

    loader.dataset.text_into = fail
    loader.next_step(4)
    with pytest.raises(OSError, match="disk gone"):
        loader.next_step(4)
    loader.close()


def test_reading_happens_in_one_thread_ahead_and_ends_with_close():
    before = threading.active_count()
    loader = loader_of(workers=8)
    loader.next_step(4)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


def test_cyclic_order_is_megatrons_for_one_rank_and_whole_batches():
    order = CyclicOrder(24, "train").samples_at(np.arange(48))
    for epoch in range(2):
        permutation = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))
        assert order[epoch * 24 : epoch * 24 + 24].tolist() == permutation.tolist()
