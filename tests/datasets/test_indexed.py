"""Token files: bytes as Megatron writes them, 64-bit offsets, damage found at opening, nothing half-written."""

import gc
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.datasets.indexed import DataError, IndexedDataset, IndexedDatasetWriter, SequenceIndex, token_dtype
from megatron.datasets.sample_index import build_sample_order

GOLDEN = Path(__file__).parent.parent / "golden" / "data"
PAIRS = ("toy_text_document", "a_text_document", "b_text_document", "c_text_sentence")


def write_pair(prefix, documents, dtype="<u2"):
    with IndexedDatasetWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document, [len(document)] if document else [])
        writer.finalize()
    return prefix


@pytest.mark.parametrize("name", PAIRS)
def test_writes_the_bytes_megatron_wrote(name, tmp_path):
    source = IndexedDataset(GOLDEN / name)
    with IndexedDatasetWriter(tmp_path / "copy", source.index.dtype) as writer:
        for first, last in zip(source.document_indices[:-1], source.document_indices[1:]):
            sequences = source[first:last]
            writer.add_document(np.concatenate(sequences), [len(sequence) for sequence in sequences])
        writer.finalize()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"copy{suffix}").read_bytes() == (GOLDEN / f"{name}{suffix}").read_bytes()


@pytest.mark.parametrize("mmap", [True, False])
def test_reads_sequences_slices_and_parts(mmap, tmp_path):
    documents = [[5, 6, 7, 8], [], [9], [10, 11]]
    data = IndexedDataset(write_pair(tmp_path / "x", documents), mmap=mmap)
    assert len(data) == 3
    assert data.sequence_lengths.tolist() == [4, 1, 2]
    assert data.document_indices.tolist() == [0, 1, 1, 2, 3]
    assert [sequence.tolist() for sequence in data[0:3]] == [[5, 6, 7, 8], [9], [10, 11]]
    assert data[-1].tolist() == [10, 11]
    assert data.get(0, 1, 2).tolist() == [6, 7]
    assert data.get(0, 2).tolist() == [7, 8]
    assert data.get(0, 4).tolist() == []
    copy = pickle.loads(pickle.dumps(data))
    assert copy.mmap == mmap and copy[2].tolist() == [10, 11]
    for wrong in (lambda: data[3], lambda: data.get(0, 3, 2), lambda: data.get(0, -1, 1)):
        with pytest.raises(IndexError):
            wrong()
    with pytest.raises(ValueError, match="step"):
        data[0:3:2]


@pytest.mark.parametrize("mmap", [True, False])
def test_arrays_outlive_their_reader(mmap):
    tokens, lengths = (
        IndexedDataset(GOLDEN / "a_text_document", mmap)[0],
        IndexedDataset(GOLDEN / "a_text_document", mmap).sequence_lengths,
    )
    gc.collect()
    assert int(tokens[0]) == 636 and int(lengths.sum()) == 4154


def sparse_pair(prefix, sequences=3, tokens=600_000_000):
    """Sequences of 600 million int32 tokens: 2.4 GB each, but only the last 16 bytes are on disk."""
    lengths = np.full(sequences, tokens, dtype=np.int32)
    SequenceIndex.from_lengths(np.dtype("<i4"), lengths, np.arange(sequences + 1)).write(f"{prefix}.idx")
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(sequences * tokens * 4)
        file.seek(-16, os.SEEK_END)
        file.write(np.array([1, 2, 3, 4], dtype="<i4").tobytes())
    return prefix


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mmap", [True, False])
def test_offsets_beyond_32_bits(mmap, tmp_path):
    """FIELD_REPORTS B23: pointers were summed in the type of the lengths and wrapped."""
    data = IndexedDataset(sparse_pair(tmp_path / "big"), mmap)
    assert data.index.pointers.dtype == np.int64
    assert data.index.pointers.tolist() == [0, 2_400_000_000, 4_800_000_000]
    assert data.get(2, 600_000_000 - 4, 4).tolist() == [1, 2, 3, 4]
    joined = data.index.followed_by(data.index)
    assert len(joined.lengths) == 6
    assert joined.pointers.tolist() == [2_400_000_000 * number for number in range(6)]
    assert joined.document_indices.tolist() == list(range(7))
    assert joined.num_bytes == 14_400_000_000


@pytest.mark.filterwarnings("error")
def test_sample_index_beyond_32_bits():
    """B23, second half: more than 2^31 tokens in one sample order."""
    lengths = np.full(6, 600_000_000, dtype=np.int32)
    order = build_sample_order(
        lengths, np.arange(6, dtype=np.int32), num_samples=None, sequence_length=1_000_000, seed=1
    )
    assert len(order.shuffle_index) == 3599
    assert order.sample_index[-1].tolist() == [5, 599_000_000]
    starts = order.sample_index[:, 0] * np.int64(600_000_000) + order.sample_index[:, 1]
    assert (np.diff(starts) == 1_000_000).all()


def test_joining_different_types_is_refused():
    lengths = np.array([1], dtype=np.int32)
    small, large = (SequenceIndex.from_lengths(np.dtype(kind), lengths, [0, 1]) for kind in ("<u2", "<i4"))
    with pytest.raises(ValueError, match="types differ"):
        small.followed_by(large)


def test_token_type_follows_the_vocabulary():
    assert [str(token_dtype(size)) for size in (1, 65499, 65500, 65536, None)] == ["uint16", "uint16"] + ["int32"] * 3


def test_ids_that_do_not_fit_are_refused(tmp_path):
    for token in (65536, 70000, -1):
        with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            with pytest.raises(ValueError, match="does not fit"):
                writer.add_document([1, token], [2])
    with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        with pytest.raises(ValueError, match="do not fill"):
            writer.add_document([1, 2, 3], [2])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_visible_until_complete(tmp_path):
    write_pair(tmp_path / "x", [[1, 2, 3]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="stop"):
        with IndexedDatasetWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            writer.add_document([4, 5], [2])
            assert IndexedDataset(tmp_path / "x")[0].tolist() == [1, 2, 3]
            raise RuntimeError("stop")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_dying_between_the_renames_leaves_no_readable_mixture(tmp_path, monkeypatch):
    write_pair(tmp_path / "x", [[1, 2, 3]])
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(str(target))
        if len(calls) == 2:
            raise OSError("killed here")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="killed"):
        write_pair(tmp_path / "x", [[4, 5, 6]])
    assert [Path(name).suffix for name in calls] == [".bin", ".idx"]
    with pytest.raises(ValueError, match="does not exist"):
        IndexedDataset(tmp_path / "x")


def test_damage_is_found_at_opening(tmp_path):
    prefix = write_pair(tmp_path / "x", [[1, 2, 3], [4]])
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    damages = [
        (".bin", tokens[:-2], "describes 8"),
        (".bin", tokens + b"\0\0", "describes 8"),
        (".idx", index[:-3], "not written completely"),
        (".idx", index[:20], "too short"),
        (".idx", b"X" + index[1:], "not a version 1 token index"),
        (".idx", index[:17] + b"\x63" + index[18:], "not a version 1 token index"),
        (".idx", index[:-8] + b"\x07" + b"\0" * 7, "last document boundary"),
    ]
    for suffix, content, message in damages:
        Path(f"{prefix}{suffix}").write_bytes(content)
        for mmap in (True, False):
            with pytest.raises(ValueError, match=message):
                IndexedDataset(prefix, mmap)
        Path(f"{prefix}.idx").write_bytes(index)
        Path(f"{prefix}.bin").write_bytes(tokens)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(ValueError, match="does not exist"):
        IndexedDataset(prefix)


def test_a_file_cut_while_in_use_is_an_error_not_garbage(tmp_path):
    data = IndexedDataset(write_pair(tmp_path / "x", [[1, 2, 3], [4]]), mmap=False)
    os.truncate(tmp_path / "x.bin", 3)
    with pytest.raises(DataError, match="cut while in use"):
        data[0]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("pointer", [-2, 10**15])
def test_a_sequence_outside_the_file_is_an_error_that_names_it(mmap, pointer, tmp_path):
    prefix = write_pair(tmp_path / "x", [[1, 2, 3], [4]])
    index = Path(f"{prefix}.idx")
    content = bytearray(index.read_bytes())
    content[34 + 8 : 34 + 16] = pointer.to_bytes(8, "little", signed=True)
    index.write_bytes(content)
    data = IndexedDataset(prefix, mmap)
    assert list(data[1]) == [4]
    with pytest.raises(DataError, match=f"sequence 0 at byte {pointer}"):
        data[0]


def test_identity_follows_the_content(tmp_path):
    one = IndexedDataset(write_pair(tmp_path / "x", [[1, 2, 3], [4]])).identity()
    same = IndexedDataset(write_pair(tmp_path / "y", [[7, 7, 7], [7]])).identity()
    other = IndexedDataset(write_pair(tmp_path / "x", [[1, 2], [3, 4]])).identity()
    assert one == same != other
