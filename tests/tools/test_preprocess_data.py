"""The preprocessing tool: Megatron's bytes, a rule for empty records (B21), named bad lines, no half outputs."""

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from megatron.datasets.blend import Blend
from megatron.datasets.build import DataPlan, build_splits
from megatron.datasets.indexed import IndexedDataset
from megatron.datasets.loader import SampleLoader, order_of
from megatron.datasets.masks import MaskRules
from tools import preprocess_data

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "data"
TOOL = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
BYTES = ["--tokenizer-type", "ByteTokenizer"]
EOD = 256


def run(*arguments):
    """The finished tool. Several workers fork, which wants a process without this one's threads."""
    words = [str(argument) for argument in arguments]
    if "--workers" in words and words[words.index("--workers") + 1] != "1":
        return subprocess.run([*TOOL, *words], capture_output=True, text=True, timeout=120)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        try:
            code = preprocess_data.main(words)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def outputs(folder):
    return {path.name: path.read_bytes() for path in folder.glob("o_*")}


def documents(prefix):
    data = IndexedDataset(prefix)
    bounds = data.document_indices.tolist()
    return [[sequence.tolist() for sequence in data[first:last]] for first, last in zip(bounds[:-1], bounds[1:])]


@pytest.mark.parametrize("name", ["toy_text_document", "a_text_document", "b_text_document", "c_text_sentence"])
def test_writes_megatrons_bytes_for_the_same_tokens(name, tmp_path):
    """The golden pairs were written by Megatron; their tokens as text go through the tool and come out equal."""
    data = IndexedDataset(GOLDEN / name)
    bounds = data.document_indices.tolist()
    texts = [[" ".join(map(str, s)) for s in data[first:last]] for first, last in zip(bounds[:-1], bounds[1:])]
    source = write_jsonl(tmp_path / "x.jsonl", [text[0] if len(text) == 1 else text for text in texts])
    vocab_size = 1000 if data.index.dtype.itemsize == 2 else 70_000
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size]
    result = run("--input", source, "--output-prefix", tmp_path / "o", *null)
    assert result.returncode == 0, result.stderr
    for suffix in (".bin", ".idx"):
        assert outputs(tmp_path)[f"o_text_document{suffix}"] == (GOLDEN / f"{name}{suffix}").read_bytes()


B21 = {
    "as reported": ["", "a b", "", "c", "", "d e f"],
    "empty last": ["a b", "c", "d e f", "", "", ""],
    "empty first": ["", "", "", "a b", "c", "d e f"],
    "list of nothing": [[], "a b", ["", ""], "c", [""], "d e f"],
}


@pytest.mark.parametrize(
    "order, eod, workers", [*itertools.product(B21, (True, False), (1,)), ("as reported", True, 2)]
)
def test_b21_empty_records_keep_their_place_and_train(order, eod, workers, tmp_path):
    texts = B21[order]
    source = write_jsonl(tmp_path / "x.jsonl", texts)
    extra = ["--append-eod"] if eod else []
    result = run("--input", source, "--output-prefix", tmp_path / "o", *BYTES, "--workers", workers, *extra)
    assert result.returncode == 0, result.stderr
    assert "read 6, written 3, skipped 3 (empty 3, bad 0)" in result.stdout
    expected = [[[*text.encode(), *([EOD] if eod else [])]] if isinstance(text, str) and text else [] for text in texts]
    assert documents(tmp_path / "o_text_document") == expected
    assert IndexedDataset(tmp_path / "o_text_document").sequence_lengths.min() > 0
    plan = DataPlan(
        sequence_length=4,
        seed=1,
        masks=MaskRules(EOD),
        blend=Blend((str(tmp_path / "o_text_document"),), None),
        split="1",
    )
    train, _, _ = build_splits(plan, (4, 0, 0))
    loader = SampleLoader(train, order_of(train, "single", "train"), micro_batch_size=2)
    for _ in range(2):
        (batch,) = loader.next_step(2)
        assert batch["tokens"].shape == (2, 4)


@pytest.mark.parametrize("texts", [["", "", ""], []])
def test_b21_nothing_but_empty_records(texts, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", texts)
    result = run("--input", source, "--output-prefix", tmp_path / "o", *BYTES, "--append-eod")
    assert result.returncode == 1
    assert "has any token" in result.stderr and "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


BAD_LINES = {
    b"{nonsense": "not JSON",
    b"": "blank line",
    b'{"other": "x"}': "no key 'text'; it has other",
    b'{"text": null}': "key 'text' is not a text",
    b'{"text": 3}': "key 'text' is not a text",
    b'{"text": ["a", 3]}': "key 'text' is not a text",
    b"[1, 2]": "a JSON list, not an object",
    b"null": "a JSON NoneType, not an object",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "a\\ud83d"}': "key 'text' holds half of a character",
}


@pytest.mark.parametrize("line, workers", [*((line, 1) for line in BAD_LINES), (b"{nonsense", 2)])
def test_bad_lines_are_named_and_stop_or_are_counted(line, workers, tmp_path):
    source = tmp_path / "x.jsonl"
    source.write_bytes(b'{"text": "one"}\n{"text": "two"}\n' + line + b'\n{"text": "four"}\n')
    arguments = ("--input", source, "--output-prefix", tmp_path / "o", *BYTES, "--workers", workers)
    result = run(*arguments)
    assert result.returncode == 1
    assert f"{source}:3: {BAD_LINES[line]}" in result.stderr and "--on-bad-line skip" in result.stderr
    assert "Traceback" not in result.stderr and outputs(tmp_path) == {}
    result = run(*arguments, "--on-bad-line", "skip")
    assert result.returncode == 0
    assert f"skipped {source}:3: {BAD_LINES[line]}" in result.stderr
    assert "read 4, written 3, skipped 1 (empty 0, bad 1)" in result.stdout
    assert documents(tmp_path / "o_text_document") == [[list(word)] for word in (b"one", b"two", b"four")]


def test_a_text_the_tokenizer_refuses_is_a_bad_line(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", ["1 2", "three"])
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 10]
    result = run("--input", source, "--output-prefix", tmp_path / "o", *null)
    assert result.returncode == 1 and f"{source}:2: invalid literal" in result.stderr


def test_a_record_that_is_bad_under_one_key_is_left_out_under_all(tmp_path):
    source = tmp_path / "x.jsonl"
    source.write_text('{"q": "a", "a": "b"}\n{"q": "c"}\n{"q": "d", "a": ""}\n')
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", *BYTES, "--json-keys", "q", "a"]
    assert run(*arguments).returncode == 1
    assert run(*arguments, "--on-bad-line", "skip").returncode == 0
    assert documents(tmp_path / "o_q_document") == [[[97]], [[100]]]
    assert documents(tmp_path / "o_a_document") == [[[98]], []]


def test_ids_that_do_not_fit_are_refused_even_when_bad_lines_are_skipped(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", ["1 2", "70000"])
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 100, "--on-bad-line", "skip"]
    for workers in (1, 2):
        result = run("--input", source, "--output-prefix", tmp_path / "o", *null, "--workers", workers)
        assert result.returncode == 1
        assert f"{source}:2: token id 70000 does not fit uint16" in result.stderr
        assert outputs(tmp_path) == {}


@pytest.fixture(scope="module")
def corpus():
    random = np.random.default_rng(0)
    alphabet = list('abcdefghij \té東🙂"\\')
    return ["".join(random.choice(alphabet, size)) for size in random.integers(0, 60_000, 80)]


def test_output_depends_on_the_input_only(corpus, tmp_path):
    """Several blocks and files: workers, partitions, compression, line ends and a byte order mark change nothing."""
    plain = write_jsonl(tmp_path / "x.jsonl", corpus)
    assert plain.stat().st_size > 2 * 2**20
    reference = None
    half = len(corpus) // 2
    parts = [write_jsonl(tmp_path / "x1.jsonl", corpus[:half]), write_jsonl(tmp_path / "x2.jsonl", corpus[half:])]
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
    windows = tmp_path / "windows.jsonl"
    windows.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    variants = [
        ([plain], 1, []),
        ([plain], 3, ["--partitions", 3]),
        ([packed], 2, ["--partitions", 2]),
        (parts, 2, []),
        ([windows], 1, []),
    ]
    for inputs, workers, more in variants:
        result = run("--input", *inputs, "--output-prefix", tmp_path / "o", *BYTES, "--workers", workers, *more)
        assert result.returncode == 0, result.stderr
        reference = reference or outputs(tmp_path)
        assert outputs(tmp_path) == reference
    assert documents(tmp_path / "o_text_document") == [[list(text.encode())] if text else [] for text in corpus]


def test_plain_text_is_a_document_a_line(tmp_path):
    (tmp_path / "x.txt").write_bytes("first line\r\n\nthird é".encode())
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress(b"fourth\n"))
    inputs = [tmp_path / "x.txt", tmp_path / "y.txt.gz"]
    result = run("--input", *inputs, "--output-prefix", tmp_path / "o", *BYTES)
    assert result.returncode == 0
    texts = ["first line", "", "third é", "fourth"]
    assert documents(tmp_path / "o_text_document") == [[list(text.encode())] if text else [] for text in texts]
    result = run("--input", *inputs, "--output-prefix", tmp_path / "o", *BYTES, "--json-keys", "a", "b")
    assert result.returncode == 1 and "--json-keys" in result.stderr


def test_a_damaged_archive_is_an_error(corpus, tmp_path):
    whole = gzip.compress(write_jsonl(tmp_path / "x.jsonl", corpus[:20]).read_bytes())
    (tmp_path / "x.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    result = run("--input", tmp_path / "x.jsonl.gz", "--output-prefix", tmp_path / "o", *BYTES)
    assert result.returncode == 1 and "cannot be read" in result.stderr and outputs(tmp_path) == {}


def test_an_older_output_survives_a_failed_run(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", ["abc"])
    arguments = ("--input", source, "--output-prefix", tmp_path / "o", *BYTES)
    assert run(*arguments).returncode == 0
    before = outputs(tmp_path)
    source.write_text('{"text": "new"}\nbroken\n')
    assert run(*arguments).returncode == 1
    assert outputs(tmp_path) == before


def children_of(process_id):
    listed = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    return [int(number) for number in listed]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker processes in /proc")
def test_a_worker_that_dies_ends_the_run(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", ["word " * 20_000] * 150)
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", *BYTES, "--workers", "2"]
    tool = subprocess.Popen([*TOOL, *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (children := children_of(tool.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(children[0], signal.SIGKILL)
    _, errors = tool.communicate(timeout=20)
    assert tool.returncode == 1
    assert "a worker process died" in errors and "Traceback" not in errors
    assert outputs(tmp_path) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(number, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", ["word " * 20_000] * 150)
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", *BYTES, "--workers", "2"]
    tool = subprocess.Popen([*TOOL, *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not outputs(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    tool.send_signal(number)
    tool.communicate(timeout=20)
    assert tool.returncode == 128 + number
    assert outputs(tmp_path) == {}


def test_progress_lines(corpus, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", corpus)
    result = run("--input", source, "--output-prefix", tmp_path / "o", *BYTES, "--log-interval", 50)
    lines = [line for line in result.stderr.splitlines() if line.startswith("processed")]
    assert lines
    assert all("docs/s" in line and "MB/s" in line and "left" in line for line in lines)


def test_flags_are_checked_before_work(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", ["abc"])
    (tmp_path / "x.parquet").write_text("")
    base = {"--input": source, "--output-prefix": tmp_path / "o", "--tokenizer-type": "ByteTokenizer"}
    for changes, message in (
        ({"--split-sentences": None}, "--split-sentences and --keep-newlines are not built"),
        ({"--keep-newlines": None}, "--split-sentences and --keep-newlines are not built"),
        ({"--input": "no/such.jsonl"}, "--input no/such.jsonl: no such file"),
        ({"--input": tmp_path / "x.parquet"}, "must end in"),
        ({"--workers": 0}, "--workers 0"),
        ({"--log-interval": 0}, "--log-interval 0"),
        ({"--tokenizer-type": "SentencePieceTokenizer"}, "needs --tokenizer-model"),
    ):
        words = [word for flag, value in {**base, **changes}.items() for word in (flag, value) if word is not None]
        result = run(*words)
        assert result.returncode == 1 and message in result.stderr, result.stderr
        assert "Traceback" not in result.stderr


def test_start_up_does_not_load_torch(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", ["abc"])
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['preprocess_data.py', '--input', {str(source)!r}, '--output-prefix', {str(tmp_path / 'o')!r},"
        " '--tokenizer-type', 'ByteTokenizer']\n"
        "try:\n"
        f"    runpy.run_path({TOOL[1]!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules and 'tqdm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
