"""A save is complete or invisible, whatever happens at whichever moment, and every rank knows which."""

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import retention, writer
from megatron.checkpoint.catalog import find_checkpoint, list_steps, open_step, read_tracker
from megatron.checkpoint.format import TRASH, CheckpointError, step_name
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.retention import Retention, prepare_save_directory
from megatron.checkpoint.save import save_checkpoint
from tests.checkpoint.killed_saver import LAYOUT, save
from tests.checkpoint.layouts import Layout, expected, load_ranks, rank_pieces, save_ranks
from tests.helpers.ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]


def holds_one_state(step):
    """The scale of a step whose every byte is verified and of one save."""
    with Checkpoint(step) as checkpoint:
        assert list(checkpoint.verify()) == []
        pieces = rank_pieces(LAYOUT, 0, fill=False)
        checkpoint.read_into(pieces)
        scale = checkpoint.scalars["scale"]
        for piece in pieces:
            assert torch.equal(piece.view, expected(piece.name, piece, piece.view.dtype) * scale)
        return scale


@pytest.mark.parametrize("scenario", ["next", "replace"])
def test_killed_at_any_system_call(tmp_path, scenario):
    command = [sys.executable, "-m", "tests.checkpoint.killed_saver", str(tmp_path), scenario]
    subprocess.run(command, check=True, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    points = sorted((entry for entry in tmp_path.iterdir() if entry.name.isdigit()), key=lambda entry: int(entry.name))
    assert len(points) > 20
    outcomes = []
    for directory in points:
        newest = find_checkpoint(directory, log=lambda _: None)[0]
        scale = holds_one_state(newest)
        assert (newest.iteration, scale) in {(10, 2.0), (15 if scenario == "next" else 10, 4.0)}
        assert any(step.iteration == read_tracker(directory) for step in list_steps(directory).complete)
        prepare_save_directory(directory, log=lambda _: None)
        after = find_checkpoint(directory, log=lambda _: None)[0]
        assert holds_one_state(after) == scale and after.path == directory / step_name(after.iteration)
        assert not [entry for entry in directory.iterdir() if ".tmp" in entry.name or ".old" in entry.name]
        save(directory, 20, 8.0)
        assert find_checkpoint(directory, log=lambda _: None)[0].iteration == 20
        outcomes.append(scale)
    assert outcomes == sorted(outcomes), "once visible, never invisible again"
    assert set(outcomes) == {2.0, 4.0}
    assert not (points[-1] / step_name(5)).exists()  # the survivor pruned


def test_a_full_disk_on_one_rank_reaches_all_and_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    layout = Layout(tp=2, dp=2, zero=True)
    save_ranks(tmp_path, layout)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    real = writer._DataFile.flush

    def full(self):
        if os.readlink(f"/proc/self/fd/{self.fd}").endswith("rank_00002.data"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self)

    monkeypatch.setattr(writer._DataFile, "flush", full)

    def body(ctx):
        with pytest.raises(CheckpointError) as caught:
            pieces = rank_pieces(layout, ctx.rank, fill=True)
            save_checkpoint(tmp_path, 6, ctx, pieces, scalars={}, config={})
        return str(caught.value)

    messages = set(run_ranks(4, body, mesh=layout.mesh))
    assert len(messages) == 1
    (message,) = messages
    assert "saving iteration 6" in message and "rank 2: OSError" in message and "No space left" in message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    monkeypatch.undo()
    assert load_ranks(tmp_path, Layout()) == (5, [])


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 0, 1000))
    with pytest.raises(CheckpointError, match=r"needs .* MB free .* the disk has"):
        save_ranks(tmp_path, Layout(dp=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["rename", "fsync", "replace"])
def test_an_error_of_rank_0_while_committing_reaches_all(tmp_path, monkeypatch, call):
    layout = Layout(dp=2)
    save_ranks(tmp_path, layout)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    def body(ctx):
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_checkpoint(tmp_path, 6, ctx, rank_pieces(layout, ctx.rank, fill=True), scalars={}, config={})
        return True

    monkeypatch.setattr(os, call, broken)
    assert run_ranks(2, body) == [True, True]
    monkeypatch.undo()
    assert [step.iteration for step in list_steps(tmp_path).complete] == [5]


def test_the_same_iteration_is_replaced(tmp_path):
    save(tmp_path, 5, 1.0)
    save(tmp_path, 5, 2.0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        TRASH,
        step_name(5),
        "latest_checkpointed_iteration.txt",
    ]
    assert not list((tmp_path / TRASH).iterdir())
    assert holds_one_state(open_step(tmp_path / step_name(5))) == 2.0


def test_the_newest_save_wins_after_going_back(tmp_path):
    """Back from 20 to 10 and on to 15: the next start continues from 15, not from the abandoned 20."""
    for iteration in (10, 20, 15):
        save(tmp_path, iteration, 1.0)
    assert [step.iteration for step in find_checkpoint(tmp_path)] == [15, 20, 10]


def test_retention_keeps_multiples_and_the_newest(tmp_path):
    for iteration in (2, 4, 6, 8, 10):
        save(tmp_path, iteration, 1.0, Retention(interval=4))
        assert list_steps(tmp_path).complete[0].iteration == iteration
    assert [step.iteration for step in list_steps(tmp_path).complete] == [10, 8, 4]


def test_a_step_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    lines = []
    save_ranks(tmp_path, Layout(), iteration=1)

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(retention, "discard", refuse)
    save_ranks(tmp_path, Layout(), iteration=2, retention=Retention(keep_last=1), log=lines.append)
    assert len(lines) == 1 and "WARNING: could not delete" in lines[0] and "Permission denied" in lines[0]
    assert [step.iteration for step in list_steps(tmp_path).complete] == [2, 1]


def test_files_are_the_size_of_the_state(tmp_path):
    """bf16 weights and three fp32 states of every real element, once, whatever the replication; alignment aside."""
    layout = Layout(dp=4, tp=2)
    path = save_ranks(tmp_path, layout)
    with Checkpoint(path) as checkpoint:
        elements = sum(torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names("param"))
        data = sum(files.data_bytes for files in checkpoint.manifest.ranks)
        count = sum(len(items) for items in checkpoint.items().values())
    assert 14 * elements <= data <= 14 * elements + 64 * count
