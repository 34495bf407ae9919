"""The data file: items in order, aligned, checksummed, nothing written twice into one name."""

import json
import zlib

import pytest
import torch

from megatron.checkpoint import writer
from megatron.checkpoint.boxes import whole
from megatron.checkpoint.format import ALIGNMENT
from megatron.checkpoint.pieces import Piece, Share
from megatron.checkpoint.writer import bytes_of, planned_bytes, write_rank


def piece(name, tensor, **options):
    return Piece(name, tuple(tensor.shape), tuple(tensor.shape), whole(tensor.shape), tensor, **options)


@pytest.mark.parametrize("write_bytes", [64, 16 << 20], ids=["direct", "collected"])
def test_bytes_lie_where_the_index_says(tmp_path, monkeypatch, write_bytes):
    monkeypatch.setattr(writer, "WRITE_BYTES", write_bytes)
    tensors = {
        "param/a": torch.rand(3, 5).bfloat16(),
        "param/transposed": torch.rand(7, 4).t(),
        "param/b": torch.rand(1),
        "exp_avg/b": torch.rand(1000),
    }
    files = write_rank(tmp_path, 3, [piece(*pair) for pair in tensors.items()], {"rng": 1})
    content, index = (tmp_path / files.data).read_bytes(), json.loads((tmp_path / files.index).read_bytes())
    assert files.data == "rank_00003.data" and len(content) == files.data_bytes and index["state"] == {"rng": 1}
    assert zlib.crc32((tmp_path / files.index).read_bytes()) == files.index_crc
    for item, (name, tensor) in zip(index["items"], tensors.items()):
        assert item["name"] == name and item["at"] % ALIGNMENT == 0 and tuple(item["size"]) == tuple(tensor.shape)
        found = content[item["at"] : item["at"] + item["nbytes"]]
        assert found == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert item["crc"] == [zlib.crc32(found)]


def test_nothing_is_written_into_an_existing_name(tmp_path):
    write_rank(tmp_path, 0, [], {})
    with pytest.raises(FileExistsError):
        write_rank(tmp_path, 0, [], {})


def test_contiguous_memory_is_not_copied():
    tensor = torch.rand(8, 8)
    assert bytes_of(tensor[2:4]).__array_interface__["data"][0] == tensor[2:4].data_ptr()


def test_copies_that_are_not_ours_are_not_planned():
    pieces = [piece("param/w", torch.rand(4), share=Share(0, 0)), piece("param/v", torch.rand(4))]
    assert planned_bytes(pieces) == 16
