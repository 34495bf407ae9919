"""Tokenizers: ids and text, end-of-document, identities, and mistakes answered with the flag. No network, no hub."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.datasets.tokenizer import ByteTokenizer, NullTokenizer, TokenizerOptions, build_tokenizer, token_rows

TEXTS = ("the quick brown fox", "naïve café → 東京 🙂", "def f(x):\n\treturn x\n", "  spaces  kept ", "")
WORDS = ["the quick brown fox jumps over the lazy dog", "def f(x): return x", "naïve café", "the theory of the thing"]


def build(kind, **options):
    return build_tokenizer(TokenizerOptions(tokenizer_type=kind, **options))


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A byte-fallback BPE model of 400 pieces that keeps white space."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sp")
    (folder / "text.txt").write_text("\n".join(WORDS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "sp"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return str(folder / "sp.model")


@pytest.fixture(scope="module")
def bpe_files(tmp_path_factory):
    """A byte-level BPE as tokenizer.json, and as vocab.json and merges.txt."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator(WORDS * 20, vocab_size=330, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.save_model(str(folder))
    return folder


@pytest.fixture(scope="module")
def rank_files(tmp_path_factory):
    """The 256 bytes and a few merges, in Megatron's JSON, as a tekken file, and as .tiktoken lines."""
    pytest.importorskip("tiktoken")
    folder = tmp_path_factory.mktemp("tik")
    tokens = [bytes([value]) for value in range(256)] + [b"th", b"the", b" t", b" the", b"qu"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    (folder / "ranks.json").write_text(json.dumps(entries))
    (folder / "tekken.json").write_text(json.dumps({"config": {}, "vocab": entries}))
    lines = [f"{entry['token_bytes']} {entry['rank']}" for entry in entries]
    (folder / "ranks.tiktoken").write_text("\n".join(lines) + "\n")
    return folder


def assert_round_trip(tokenizer):
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        assert all(isinstance(number, int) and 0 <= number < tokenizer.vocab_size for number in ids)
        assert tokenizer.detokenize(ids) == text
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    json.dumps(tokenizer.identity)


def test_bytes():
    tokenizer = build("ByteTokenizer")
    assert_round_trip(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)
    assert tokenizer.tokenize("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.detokenize([97, 256, 98]) == "ab"


def test_null():
    """As Megatron 0.20: NullTokenizer(1000) ends documents with 999 and has no padding (tests/golden/data)."""
    tokenizer = build("NullTokenizer", vocab_size=1000)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (1000, 999, None)
    assert tokenizer.tokenize("5 7  9\n") == [5, 7, 9] and tokenizer.detokenize([5, 7]) == "5 7"
    assert (tokenizer.num_ids, token_rows(tokenizer, 1024), token_rows(tokenizer, 1000)) == (1001, 1001, 1000)
    other = build("NullTokenizer", vocab_size=1000, null_tokenizer_eod_id=3, null_tokenizer_pad_id=4)
    assert (other.eod, other.pad) == (3, 4)
    assert tokenizer.identity != other.identity
    with pytest.raises(ValueError, match="--vocab-size"):
        build("NullTokenizer")


def test_special_tokens_belong_to_tiktokenizer():
    with pytest.raises(ValueError, match="--tokenizer-special-tokens is for TikTokenizer"):
        build("ByteTokenizer", tokenizer_special_tokens=("<x>",))


def test_sentencepiece(sentencepiece_model):
    tokenizer = build("SentencePieceTokenizer", tokenizer_model=sentencepiece_model)
    assert_round_trip(tokenizer)
    assert (tokenizer.eod, tokenizer.pad) == (2, None)
    assert tokenizer.tokenize("</s>") != [2]
    same = build("GPTSentencePieceTokenizer", tokenizer_model=sentencepiece_model)
    assert same.tokenize(TEXTS[0]) == tokenizer.tokenize(TEXTS[0])
    llama = build("Llama2Tokenizer", tokenizer_model=sentencepiece_model)
    assert llama.tokenize(TEXTS[0]) == [1, *tokenizer.tokenize(TEXTS[0])]
    assert llama.identity != tokenizer.identity


def test_huggingface(bpe_files, tmp_path):
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=str(bpe_files / "tokenizer.json"))
    assert_round_trip(tokenizer)
    assert tokenizer.eod == 0
    assert tokenizer.tokenize("the<|endoftext|>the").count(0) == 1
    (tmp_path / "tokenizer.json").write_bytes((bpe_files / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "the"}, "pad_token": "a"}))
    named = build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert named.eod == named.tokenize("the")[0]
    assert named.pad == named.tokenize("a")[0]
    assert named.identity != tokenizer.identity


def test_huggingface_equals_transformers(bpe_files):
    transformers = pytest.importorskip("transformers")
    ours = build("HuggingFaceTokenizer", tokenizer_model=str(bpe_files / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe_files / "tokenizer.json"))
    assert ours.vocab_size == len(theirs)
    for text in TEXTS + ("the<|endoftext|>the",):
        assert ours.tokenize(text) == theirs(text).input_ids


def test_gpt2(bpe_files):
    files = {"vocab_file": str(bpe_files / "vocab.json"), "merge_file": str(bpe_files / "merges.txt")}
    tokenizer = build("GPT2BPETokenizer", **files)
    assert_round_trip(tokenizer)
    whole = build("HuggingFaceTokenizer", tokenizer_model=str(bpe_files / "tokenizer.json"))
    assert tokenizer.eod == whole.eod and tokenizer.vocab_size == whole.vocab_size
    for text in TEXTS:
        assert tokenizer.tokenize(text) == whole.tokenize(text)
    for missing in files:
        with pytest.raises(ValueError, match="--" + missing.replace("_", "-")):
            build("GPT2BPETokenizer", **{**files, missing: None})


@pytest.mark.parametrize("name", ["ranks.json", "tekken.json", "ranks.tiktoken"])
@pytest.mark.parametrize("pattern", ["v1", "v2", None])
def test_tiktoken(rank_files, name, pattern):
    tokenizer = build(
        "TikTokenizer",
        tokenizer_model=str(rank_files / name),
        vocab_size=270,
        tiktoken_num_special_tokens=10,
        tiktoken_pattern=pattern,
    )
    assert_round_trip(tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (270, 2, 4)
    assert tokenizer.tokenize("the the") == [257 + 10, 259 + 10]
    assert tokenizer.tokenize("the</s><SPECIAL_9>") == [267, 2, 9]


def test_tiktoken_mistakes(rank_files):
    options = {"tokenizer_model": str(rank_files / "ranks.json"), "vocab_size": 270, "tiktoken_num_special_tokens": 10}
    for changes, message in (
        ({"vocab_size": 300}, "holds 261 tokens.*--vocab-size 271 at most"),
        ({"tiktoken_num_special_tokens": 3}, "at least 7"),
        ({"tokenizer_special_tokens": ("<x>",)}, "--tokenizer-special-tokens"),
        ({"tokenizer_model": __file__}, "neither"),
    ):
        with pytest.raises(ValueError, match=message):
            build("TikTokenizer", **{**options, **changes})


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"])
def test_missing_and_wrong_files_are_named(kind, tmp_path):
    with pytest.raises(ValueError, match="needs --tokenizer-model"):
        build(kind)
    with pytest.raises(ValueError, match="--tokenizer-model no/such: no such file"):
        build(kind, tokenizer_model="no/such")
    (tmp_path / "wrong.json").write_text("not a tokenizer")
    with pytest.raises(ValueError, match="--tokenizer-model"):
        build(kind, tokenizer_model=str(tmp_path / "wrong.json"))


@pytest.mark.parametrize("kind, package", [("HuggingFaceTokenizer", "tokenizers"), ("TikTokenizer", "tiktoken")])
def test_a_missing_package_is_an_error_at_the_flag(kind, package):
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from megatron.datasets.tokenizer import TokenizerOptions, build_tokenizer\n"
        f"build_tokenizer(TokenizerOptions(tokenizer_type={kind!r}, tokenizer_model='.'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parent.parent.parent
    )
    assert result.returncode == 1
    assert f"--tokenizer-type {kind}" in result.stderr and f"pip install {package}" in result.stderr


def test_options_come_from_flags_of_the_same_name():
    from megatron.config.run import RunConfig

    config = RunConfig.from_flags(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --tokenizer-type NullTokenizer --vocab-size 77"
    )
    assert build_tokenizer(TokenizerOptions.of(config.data)).vocab_size == 77
    assert isinstance(build("ByteTokenizer"), ByteTokenizer) and isinstance(
        build("NullTokenizer", vocab_size=3), NullTokenizer
    )
