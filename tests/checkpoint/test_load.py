"""Any layout reads what any other wrote, bit for bit; damage is found, named and survived."""

import itertools

import pytest
import torch

from megatron.checkpoint import pieces as pieces_module
from megatron.checkpoint.format import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    step_name,
)
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.pieces import Piece
from megatron.checkpoint.save import save_checkpoint
from megatron.topology.mesh import Mesh
from tests.checkpoint.layouts import Layout, expected, load_ranks, rank_pieces, save_ranks
from tests.helpers.ranks import run_ranks

LAYOUTS = [
    Layout(),
    Layout(tp=2, dp=2, zero=True, sequence_parallel=True),
    Layout(tp=4, divisor=100, zero=True),
    Layout(pp=2, dp=3, zero=True, divisor=50),
    Layout(tp=2, pp=4, divisor=64, order="tp-cp-pp-dp"),
    Layout(pp=3, tp=2, dp=2),
]


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_reads_every_other(tmp_path, source, monkeypatch):
    monkeypatch.setattr(pieces_module, "SPREAD_NUMEL", 64)
    save_ranks(tmp_path, source)
    for target in LAYOUTS:
        assert load_ranks(tmp_path, target) == (5, [])


def test_there_and_back_is_bit_identical(tmp_path):
    """TP 2 -> 4 -> 2 of a gated network, moments included (values are checked at every stop)."""
    two, four = Layout(tp=2, dp=2, zero=True), Layout(tp=4)
    save_ranks(tmp_path / "a", two)

    def reshard(ctx):
        pieces = rank_pieces(four, ctx.rank, fill=False)
        load_checkpoint(tmp_path / "a", ctx, pieces)
        save_checkpoint(tmp_path / "b", 6, ctx, pieces, scalars={}, config={})

    run_ranks(4, reshard, mesh=four.mesh)
    assert load_ranks(tmp_path / "b", two)[0] == 6


def padding_of(pieces):
    """The values in this rank's padding rows, of parameters and states."""
    parts = [piece.padding() for piece in pieces]
    return {value for part in parts if part is not None for value in part.view.flatten().tolist()}


def test_vocabulary_rows_stay_and_padding_is_redone(tmp_path):
    """101 rows of 128, the others 1e3: a run that pads alike gets its padding back to the bit, another gets zeros."""
    source = Layout(divisor=128)

    def save(ctx):
        pieces = rank_pieces(source, 0, fill=True)
        for piece in pieces:
            if piece.padding() is not None:
                piece.padding().view.fill_(1e3)
        save_checkpoint(tmp_path, 1, ctx, pieces, scalars={}, config={})

    def load(ctx, target):
        pieces = rank_pieces(target, ctx.rank, fill=False)
        checkpoint = load_checkpoint(tmp_path, ctx, pieces)
        for piece in pieces:
            real = piece.real()
            if real is not None:
                alone = Piece(piece.name, piece.shape, piece.valid, real.box, real.view)
                assert torch.equal(real.view, expected(piece.name, alone, piece.view.dtype))
        assert checkpoint.shape("param/embedding.word_embeddings.weight") == (101, 24)
        return padding_of(pieces)

    run_ranks(1, save)
    assert run_ranks(1, load, source) == [{1e3}]
    assert run_ranks(2, load, Layout(divisor=64, tp=2), mesh=Mesh(tp=2))[1] == {1e3}  # 128 rows again
    assert run_ranks(2, load, Layout(divisor=100, tp=2), mesh=Mesh(tp=2))[1] == {0.0}  # 200 rows


def test_precisions_read_each_other(tmp_path):
    """A float32 run takes the master weights of a bf16 run; a bf16 run makes masters of a float32 run's weights."""
    save_ranks(tmp_path / "bf16", Layout())
    save_ranks(tmp_path / "fp32", Layout(dtype=torch.float32), states=("exp_avg", "exp_avg_sq"))

    def into_fp32(ctx):
        pieces = rank_pieces(Layout(dtype=torch.float32), 0, fill=False, states=())
        load_checkpoint(tmp_path / "bf16", ctx, pieces)
        return all(torch.equal(p.view, expected("master" + p.name[5:], p, torch.float32)) for p in pieces)

    def into_bf16(ctx):
        pieces = rank_pieces(Layout(), 0, fill=False)
        load_checkpoint(tmp_path / "fp32", ctx, pieces)
        masters = [p for p in pieces if p.name.startswith("master/")]
        return all(torch.equal(p.view, expected("param" + p.name[6:], p, torch.float32)) for p in masters)

    assert run_ranks(1, into_fp32) == run_ranks(1, into_bf16) == [True]


def test_a_checkpoint_without_optimizer_says_so(tmp_path):
    save_ranks(tmp_path, Layout(), states=())
    assert load_ranks(tmp_path, Layout(tp=2), states=())[0] == 5
    with pytest.raises(CheckpointMismatch, match="no optimizer state.*--no-load-optim"):
        load_ranks(tmp_path, Layout(tp=2))


@pytest.mark.parametrize(
    "other, words",
    [
        (Layout(layers=6), "lacks what this model asks for: .*layers.4"),
        (Layout(layers=3), "parameters this model has not.*layers.3"),
        (Layout(vocab=90), r"word_embeddings.weight is \(101, 24\) there and \(90, 24\) in this model"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, other, words):
    save_ranks(tmp_path, Layout(tp=2))
    with pytest.raises(CheckpointMismatch, match=words):
        load_ranks(tmp_path, other)


def test_a_step_may_be_refused_before_it_is_read(tmp_path):
    save_ranks(tmp_path, Layout(dp=2))

    def accept(manifest):
        raise ValueError(f"--num-layers is 9 here and {manifest.config['layers']} in the checkpoint")

    with pytest.raises(ValueError, match="--num-layers is 9 here and 4"):
        load_ranks(tmp_path, Layout(dp=2, layers=9), accept=accept)


def damage(path, how):
    """Change one file; returns the file's name."""
    if how == "flip":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
    elif how == "truncate":
        path.write_bytes(path.read_bytes()[:-9])
    elif how == "remove":
        path.unlink()
    return path.name


FILES = ("rank_00001.data", "rank_00000.json", "manifest.json")


@pytest.mark.parametrize("file, how", list(itertools.product(FILES, ("flip", "truncate", "remove"))))
def test_damage_is_named_and_the_next_older_step_is_loaded(tmp_path, file, how):
    layout = Layout(tp=2, dp=2, zero=True)
    save_ranks(tmp_path, layout, iteration=5)
    save_ranks(tmp_path, layout, iteration=10)
    damage(tmp_path / step_name(10) / file, how)
    iteration, lines = load_ranks(tmp_path, Layout(pp=2))
    assert iteration == 5
    text = "\n".join(lines)
    assert file in text and "WARNING" in text
    if file.endswith("data"):
        assert "/decoder.layers." in text or "/embedding" in text  # the parameter
    with pytest.raises(CheckpointDamaged, match=file):
        load_ranks(tmp_path, Layout(pp=2), ckpt_step=10)


def test_a_damaged_only_checkpoint_is_an_error(tmp_path):
    save_ranks(tmp_path, Layout())
    damage(tmp_path / step_name(5) / "rank_00000.data", "flip")
    with pytest.raises(
        CheckpointDamaged, match="every checkpoint there is damaged: .*rank_00000.data.*checksum mismatch"
    ):
        load_ranks(tmp_path, Layout(tp=2))
    damage(tmp_path / step_name(5) / "rank_00000.data", "truncate")
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint.*rank_00000.data.*lost: "):
        load_ranks(tmp_path, Layout(tp=2))


def test_all_ranks_get_the_error_of_a_missing_directory(tmp_path):
    def body(ctx):
        with pytest.raises(CheckpointNotFound, match="no such directory"):
            load_checkpoint(tmp_path / "typo", ctx, [])
        return "raised"

    assert run_ranks(4, body) == ["raised"] * 4


def test_an_empty_directory_starts_from_scratch_in_one_line_or_not_at_all(tmp_path):
    iteration, lines = load_ranks(tmp_path, Layout(dp=2))
    assert iteration is None and len(lines) == 1 and "STARTING FROM SCRATCH" in lines[0]
    with pytest.raises(CheckpointError, match="one is required"):
        load_ranks(tmp_path, Layout(dp=2), required=True)


def test_scalars_config_and_rank_state_come_back(tmp_path):
    scalars = {"loss_scale": 2.0**32, "lr": 0.1 + 0.2, "tiny": 5e-324, "nan": None, "skipped": 3}

    def body(ctx):
        state = {"rng": [ctx.rank, 2**63]}
        save_checkpoint(tmp_path, 7, ctx, [], scalars=scalars, config={"lr": 1e-3}, rank_state=state)
        checkpoint = load_checkpoint(tmp_path, ctx, [])
        return checkpoint.scalars, checkpoint.config, checkpoint.rank_state(ctx.rank), checkpoint.rank_state(9)

    for rank, found in enumerate(run_ranks(2, body)):
        assert found == (scalars, {"lr": 1e-3}, {"rng": [rank, 2**63]}, None)
