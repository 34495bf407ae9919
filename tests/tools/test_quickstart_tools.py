"""The tools of the quickstart on small inputs: corpus, tokenizer, unigram loss, loss plot."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.datasets.indexed import IndexedDatasetWriter
from megatron.datasets.tokenizer_sentencepiece import SentencePieceTokenizer
from tools import build_stdlib_corpus, plot_loss, train_tokenizer, unigram_loss

ROOT = Path(__file__).resolve().parents[2]


def run_tool(name: str, *flags: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=None)


def test_corpus_is_real_text_of_the_size_asked_for(tmp_path):
    output = tmp_path / "corpus.jsonl"
    first = run_tool("build_stdlib_corpus", "--output", output, "--megabytes", 3)
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert 3e6 <= sum(len(row["text"].encode()) for row in rows) < 4e6
    assert len({row["text"] for row in rows}) == len(rows), "no document twice"
    assert all(row["text"].strip() for row in rows)
    again = tmp_path / "again.jsonl"
    run_tool("build_stdlib_corpus", "--output", again, "--megabytes", 3)
    assert again.read_bytes() == output.read_bytes(), "the same corpus on the same machine"


def test_a_corpus_larger_than_the_machine_holds_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(build_stdlib_corpus, "documents", lambda: iter([("a", "text"), ("b", "text"), ("c", "  ")]))
    with pytest.raises(ValueError, match="hold 0.0 MB of text"):
        build_stdlib_corpus.collect(10**6)
    assert [row["source"] for row in build_stdlib_corpus.collect(4)] == ["a"]


def test_documentation_of_compiled_modules():
    docs = dict(build_stdlib_corpus.compiled_module_docs())
    assert "builtins" in "".join(docs) and "itertools" in docs["help(itertools)"]


def test_tokenizer_keeps_every_character(tmp_path):
    source = Path(json.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(source.glob("*.py"))]
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = tmp_path / "tokenizer.model"
    train_tokenizer.train(data, model, 600, "bpe", "text", 10**6)
    tokenizer = SentencePieceTokenizer(str(model))
    assert tokenizer.vocab_size == 600
    for text in [*texts, "  two  spaces\n\n\ttab and \u6f22\u5b57 \U0001f600\n", " "]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    with pytest.raises(ValueError, match="text.jsonl:1 has no 'body'"):
        train_tokenizer.train(data, model, 600, "bpe", "body", 10**6)


def test_unigram_loss_is_the_cross_entropy_of_smoothed_counts(tmp_path):
    """Counts 3, 1, 0 plus one: probabilities 4/7, 2/7, 1/7; scored on tokens 0, 2."""
    prefix = tmp_path / "data"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([0, 0, 1, 0], [4])
        writer.add_document([0, 2], [2])
        writer.finalize()
    expected = -(math.log(4 / 7) + math.log(1 / 7)) / 2
    assert math.isclose(unigram_loss.unigram_loss(np.array([3, 1, 0]), np.array([1, 0, 1])), expected)
    result = run_tool("unigram_loss", "--data-path", prefix, "--split", "1,1", "--vocab-size", 3)
    assert f"unigram loss on 2 validation tokens: {expected:.4f}" in result.stdout, result.stderr
    result = run_tool("unigram_loss", "--data-path", prefix, "--split", "1", "--vocab-size", 3)
    assert result.returncode == 1 and "no validation part" in result.stderr


def test_unigram_loss_of_the_samples_of_one_evaluation(tmp_path):
    """Validation holds 1 1 2 2 2: samples of two tokens have labels (1 2), (2 2); the second is scored alone."""
    prefix = tmp_path / "data"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([0, 0, 1, 0], [4])
        writer.add_document([1, 1, 2, 2, 2], [5])
        writer.finalize()
    common = ("--data-path", prefix, "--split", "1,1", "--vocab-size", 3)
    both = run_tool("unigram_loss", *common, "--seq-length", 2, "--samples", 0, 2)
    assert f"on 4 validation tokens: {-(math.log(2 / 7) + 3 * math.log(1 / 7)) / 4:.4f}" in both.stdout, both.stderr
    last = run_tool("unigram_loss", *common, "--seq-length", 2, "--samples", 1, 2)
    assert "on 2 validation tokens" in last.stdout, last.stderr
    assert "FIRST" in run_tool("unigram_loss", *common, "--seq-length", 2, "--samples", 2, 2).stderr
    assert "belong together" in run_tool("unigram_loss", *common, "--samples", 0, 2).stderr


def train_record(iteration: int, loss: float | None) -> dict:
    return {"event": "train", "iteration": iteration, "loss": loss, "seconds_per_step": 0.5}


def test_plot_shows_what_the_run_kept(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    records = [
        train_record(1, 9.0),
        train_record(2, 8.0),
        {"event": "eval", "split": "valid", "iteration": 2, "loss": 8.5},
        train_record(3, 100.0),  # lost: the run was resumed from iteration 2
        train_record(3, 7.0),
        train_record(4, None),  # not a number
        {"event": "eval", "split": "test", "iteration": 4, "loss": 6.0},
    ]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    curves = plot_loss.read_curves(metrics)
    assert curves.train == {1: 9.0, 2: 8.0, 3: 7.0} and curves.valid == {2: 8.5}
    picture = tmp_path / "loss.png"
    result = run_tool("plot_loss", "--metrics", metrics, "--output", picture, "--baseline", "unigram=6.5")
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    wrong = run_tool("plot_loss", "--metrics", metrics, "--output", tmp_path / "loss.xyz").stderr
    assert wrong.startswith("error: Format 'xyz' is not supported") and "Traceback" not in wrong


def test_plot_names_a_bad_line(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"event": "other"}\n{"event"\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2 is not JSON"):
        plot_loss.read_curves(metrics)
    metrics.write_text("")
    assert "no training record" in run_tool("plot_loss", "--metrics", metrics, "--output", "x.png").stderr
