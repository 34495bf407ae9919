"""inspect_checkpoint: what it prints and its exit codes, on a checkpoint of four ranks."""

import pytest

from megatron.checkpoint.format import step_name
from tests.checkpoint.layouts import Layout, save_ranks
from tools.inspect_checkpoint import main, size_text


@pytest.fixture
def directory(tmp_path):
    for iteration in (5, 10):
        save_ranks(tmp_path, Layout(tp=2, dp=2, zero=True), iteration=iteration)
    return tmp_path


def test_summary_and_tensors(directory, capsys):
    assert main([str(directory)]) == 0
    out = capsys.readouterr().out
    assert "iteration    10" in out and "4 ranks, tp=2 cp=1 dp=2 pp=1" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("param/")}
    assert "101 x 24" in lines["param/embedding.word_embeddings.weight"]
    assert "bfloat16" in lines["param/decoder.layers.0.mlp.linear_fc1.weight"]
    assert f"{2 * 20 * 24:,}" in lines["param/decoder.layers.0.mlp.linear_fc1.weight"]
    assert "exp_avg_sq" in out and "padding" in out


def test_a_step_a_pattern_and_the_configuration(directory, capsys):
    assert main([str(directory), "--ckpt-step", "5", "--tensors", "exp_avg/*layers.3*", "--config"]) == 0
    out = capsys.readouterr().out
    assert "iteration    5 " in out and '"layers": 4' in out
    listed = [line for line in out.splitlines() if line.startswith("exp_avg/")]
    assert listed and all("layers.3." in line and "float32" in line for line in listed)


def test_verify_finds_a_flipped_bit(directory, capsys):
    assert main([str(directory / step_name(10)), "--verify"]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    path = directory / step_name(10) / "rank_00002.data"
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)
    assert main([str(directory), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "FAULT" in out and "rank_00002.data" in out and "verified: 1 faults" in out


def test_list_shows_unusable_ones_with_the_reason(directory, capsys):
    (directory / step_name(5) / "rank_00001.data").unlink()
    assert main([str(directory), "--list"]) == 0
    out = capsys.readouterr().out
    assert "iter_0000010  complete" in out and "iter_0000005  UNUSABLE" in out and "rank_00001.data" in out


def test_errors_are_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "typo")]) == 1
    assert capsys.readouterr().err.startswith("error: directory ")
    assert main([str(tmp_path)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err


def test_sizes():
    assert [size_text(n) for n in (5, 2500, 3_000_000, 4_200_000_000)] == ["5 B", "2.50 kB", "3.00 MB", "4.20 GB"]
