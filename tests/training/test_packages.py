"""A flag that needs a package which is not there is refused at the start, all of them at once."""

import pytest

from megatron.config.run import RunConfig
from megatron.training.packages import check_packages

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 "


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--wandb-project demo --wandb-exp-name x", "--wandb-project demo needs the package wandb"),
        ("--tensorboard-dir x", "--tensorboard-dir x needs the package tensorboard"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x",
            "--tokenizer-type HuggingFaceTokenizer needs the package tokenizers",
        ),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file x --merge-file y", "GPT2BPETokenizer needs the package"),
        (
            "--tokenizer-type TikTokenizer --tokenizer-model x --vocab-size 9",
            "--tokenizer-type TikTokenizer needs the package tiktoken",
        ),
        ("--adam-backend apex", "--adam-backend apex needs the package apex"),
        ("--adam-backend transformer_engine", "transformer_engine needs the package transformer_engine"),
    ],
)
def test_missing_package_is_an_error_at_its_flag(flags, said, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=said):
        check_packages(RunConfig.from_flags(MODEL + flags))


def test_all_missing_packages_are_named_at_once(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError) as caught:
        check_packages(RunConfig.from_flags(MODEL + "--tensorboard-dir x --adam-backend apex"))
    assert len(str(caught.value).splitlines()) == 2


def test_the_core_needs_none(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_packages(RunConfig.from_flags(MODEL))
