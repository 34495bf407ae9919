"""Flags from a file."""

from __future__ import annotations

import json

import pytest

from megatron.config import ConfigError, RunConfig

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 "


def test_yaml_keys_values_and_sections(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "num_layers: 4\nhidden-size: 64\nmodel:\n  num-attention-heads: 4\n  swiglu: true\n  add_bias_linear: false\n"
        "lr: 1e-4\ntrain:\n  rampup_batch_size: [2, 2, 8]\n  train_samples: 16\n  global_batch_size: 4\n"
        "override_opt_param_scheduler: true\nuse_flash_attn: true\nwindow_size: [8, 0]\nload: null\nsplit: 90,5,5\n"
        "data_path: 0.3 a 0.7 b\nbf16: false\n"
    )
    config = RunConfig.from_flags(f"--config {file} --num-layers 2")
    assert config.model.num_layers == 2 and config.origin("num_layers") == "typed"
    assert config.model.hidden_size == 64 and config.origin("hidden_size") == "file"
    assert config.model.swiglu and not config.model.add_bias_linear
    assert config.optimizer.lr == 1e-4
    assert config.training.rampup_batch_size == (2, 2, 8)
    assert config.optimizer.override_opt_param_scheduler
    assert config.model.window_size == (8, 0)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.checkpoint.load is None and not config.precision.bf16
    assert any("--use-flash-attn has no effect" in notice for notice in config.notices)


def test_json(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}}))
    assert RunConfig.from_flags(f"--config {file}").model.hidden_size == 64


def test_a_typed_switch_takes_back_the_file_s(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("swiglu: true\n")
    assert not RunConfig.from_flags(SMALL + f"--config {file} --no-swiglu").model.swiglu


@pytest.mark.parametrize(
    "text, said",
    [
        ("num_layer: 2\n", "num_layer is unknown; the nearest flag is --num-layers"),
        ("lr: fast\n", "expected a number"),
        ("async_save: true\n", "not yet supported"),
        ("- 3\n", "expected keys and values, found list"),
        ("a: [\n", "not YAML"),
        ("seed: 1\nseed: 2\n", "seed stands twice"),
        ("train:\n  seed: 1\n  seed: 2\n", "seed stands twice"),
        ("seed: 1\ntrain:\n  seed: 2\n", "seed stands twice"),
        ("swiglu: true\nno-swiglu: true\n", "no-swiglu stands twice"),
        ("seed: \udcff\n", "not UTF-8 at byte 6"),
        ("config: other.yaml\n", "config cannot stand in a file"),
        (None, "No such file"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, said):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as error:
        RunConfig.from_flags(SMALL + f"--config {file}")
    (problem,) = error.value.problems
    assert str(file) in problem and said in problem
