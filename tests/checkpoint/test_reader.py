"""Reads: exact for any box and item shape, only the blocks that are needed, checked before they are used."""

import os
import random
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint import reader, writer
from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.catalog import Step
from megatron.checkpoint.format import CheckpointDamaged, CheckpointMismatch, Manifest
from megatron.checkpoint.pieces import Piece, narrow
from megatron.checkpoint.reader import Checkpoint


def stored(directory, tensors):
    """A checkpoint of one rank that holds whole tensors by name."""
    pieces = [Piece(name, tuple(t.shape), tuple(t.shape), whole(t.shape), t) for name, t in tensors.items()]
    files = writer.write_rank(directory, 0, pieces, {})
    return Checkpoint(Step(directory, Manifest(iteration=1, sequence=1, ranks=(files,))))


@pytest.mark.parametrize("seed", range(60))
def test_any_box_of_any_shape(tmp_path, seed, monkeypatch):
    """With blocks of 64 bytes and spans of 256, so that small tensors take every path."""
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    monkeypatch.setattr(reader, "SPAN_BYTES", 256)
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 4)))
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8])
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 200).to(dtype)
    with stored(tmp_path, {"param/other": torch.rand(3), "param/w": tensor}) as checkpoint:
        assert torch.equal(checkpoint.read("param/w"), tensor)
        for _ in range(20):
            offset = tuple(rng.randrange(n) for n in shape)
            box = Box(offset, tuple(rng.randint(1, n - o) for n, o in zip(shape, offset)))
            assert torch.equal(checkpoint.read("param/w", box), narrow(tensor, box))


def bytes_read(monkeypatch, act):
    total, real = [0], os.preadv

    def counted(fd, buffers, at):
        got = real(fd, buffers, at)
        total[0] += got
        return got

    monkeypatch.setattr(
        reader, "os", SimpleNamespace(preadv=counted, open=os.open, close=os.close, O_RDONLY=os.O_RDONLY)
    )
    act()
    return total[0]


@pytest.mark.parametrize(
    "shape, box, most",
    [
        ((4096, 1024), Box((1024, 0), (1024, 1024)), 1.01),  # rows: just those
        ((2, 2048, 1024), Box((0, 512, 0), (2, 512, 1024)), 1.01),  # a gated fc1 shard: two runs, not what lies between
        ((2, 2, 2048, 1024), Box((0, 1, 100, 0), (2, 1, 512, 1024)), 1.8),  # runs at odd rows: block ends come along
        ((2048, 1024), Box((0, 256), (2048, 256)), 4.01),  # columns: the blocks they are spread over, i.e. all
    ],
)
def test_only_the_needed_blocks_are_read(tmp_path, monkeypatch, shape, box, most):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    with stored(tmp_path, {"param/w": tensor}) as checkpoint:
        found = []
        total = bytes_read(monkeypatch, lambda: found.append(checkpoint.read("param/w", box)))
        assert torch.equal(found[0], narrow(tensor, box))
        assert total <= most * box.numel * 4


def test_a_flipped_bit_is_found_only_by_those_who_need_it(tmp_path):
    tensor = torch.rand(2048, 1024)
    with stored(tmp_path, {"param/a": torch.zeros(16), "param/w": tensor}) as checkpoint:
        (item,) = checkpoint.items()["param/w"]
        path = tmp_path / item.file
        content = bytearray(path.read_bytes())
        content[item.at + 5_000_000] ^= 1
        path.write_bytes(content)
        assert torch.equal(checkpoint.read("param/w", Box((0, 0), (1024, 1024))), tensor[:1024])
        with pytest.raises(CheckpointDamaged, match="rank_00000.data: checksum mismatch in param/w, bytes "):
            checkpoint.read("param/w")
        assert [name for name, _ in checkpoint.verify()] == ["param/w"]


def test_names_shapes_types(tmp_path):
    with stored(tmp_path, {"param/w": torch.zeros(2, 3, dtype=torch.bfloat16), "exp_avg/w": torch.zeros(2, 3)}) as ckpt:
        assert ckpt.names() == ["exp_avg/w", "param/w"] and ckpt.names("param") == ["param/w"]
        assert ckpt.shape("param/w") == (2, 3) and ckpt.dtype("param/w") == torch.bfloat16
        with pytest.raises(CheckpointMismatch, match="holds no param/v"):
            ckpt.read("param/v")


def test_missing_names_are_returned_when_not_strict(tmp_path):
    with stored(tmp_path, {"param/w": torch.ones(2)}) as checkpoint:
        pieces = [Piece(name, (2,), (2,), whole((2,)), torch.zeros(2)) for name in ("param/v", "param/w")]
        assert checkpoint.read_into(pieces, strict=False) == ["param/v"]
        assert pieces[0].view.eq(0).all() and pieces[1].view.eq(1).all()


def test_incomplete_and_doubled_tensors_are_reported_by_verify(tmp_path):
    half = Piece("param/w", (4, 2), (4, 2), Box((0, 0), (2, 2)), torch.zeros(2, 2))
    twice = [Piece("param/v", (2,), (2,), whole((2,)), torch.zeros(2)) for _ in range(2)]
    files = writer.write_rank(tmp_path, 0, [half, *twice], {})
    with Checkpoint(Step(tmp_path, Manifest(iteration=1, sequence=1, ranks=(files,)))) as checkpoint:
        problems = dict(checkpoint.verify())
        assert "4 of 8 elements" in problems["param/w"] and "param/v" in problems
        with pytest.raises(CheckpointDamaged, match="param/w has 4 of the 8 elements"):
            checkpoint.read("param/w")
