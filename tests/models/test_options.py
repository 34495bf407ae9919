"""Each option of the model does what it says, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.distributed.context import single_process_context
from megatron.models.gpt import build_stages
from megatron.topology.mesh import Mesh
from tests.models.layouts import GPT, LLAMA, SIZES, VOCAB, batch, config_of, logits

PLAIN = GPT.format(dropout=0)
BATCH = batch(0)


def _stage(flags):
    (stage,) = build_stages(config_of(flags, Mesh()), single_process_context(), VOCAB)
    return stage


def _names(flags):
    return {p.spec.name for p in _stage(flags).parameters()}


def test_layernorm_1p_stores_the_weight_minus_one():
    assert torch.equal(logits(PLAIN + "--apply-layernorm-1p ", BATCH), logits(PLAIN, BATCH))
    params = {p.spec.name: p for p in _stage(PLAIN + "--apply-layernorm-1p ").parameters()}
    assert (params["decoder.final_layernorm.weight"] == 0).all()


def test_embedding_multiplier():
    stage, scaled = _stage(PLAIN).eval(), _stage(PLAIN + "--embedding-multiplier 3.0 ").eval()
    arguments = BATCH["tokens"], BATCH["position_ids"], stage._sequence_info(BATCH)
    torch.testing.assert_close(scaled.embedding(*arguments), stage.embedding(*arguments) * 3)


@pytest.mark.parametrize(
    "flag",
    [
        "--openai-gelu --no-bias-gelu-fusion",
        "--no-bias-gelu-fusion",
        "--squared-relu",
        "--swiglu",
        "--geglu",
        "--quick-geglu",
        "--swiglu --glu-linear-offset 1",
        "--swiglu --activation-func-clamp-value 0.05",
        "--normalization RMSNorm",
        "--norm-epsilon 0.1",
        "--position-embedding-type rope",
        "--position-embedding-type rope --rotary-base 100",
        "--position-embedding-type rope --rotary-percent 0.5",
        "--position-embedding-type rope --rotary-interleaved",
        "--position-embedding-type rope --rotary-seq-len-interpolation-factor 4",
        "--position-embedding-type rope --use-rope-scaling --rotary-base 1000000",
        "--position-embedding-type none",
        "--kv-channels 16",
        "--qk-layernorm",
        "--untie-embeddings-and-output-weights",
        "--window-size=4,0",
        "--window-size=4,0 --window-attn-skip-freq 2",
        "--position-embedding-type rope --no-rope-freq 2",
        "--init-method-std 0.1",
        "--embedding-init-method-std 0.1",
        "--init-method-xavier-uniform",
        "--embedding-multiplier 2.0",
    ],
)
def test_every_option_changes_the_function(flag):
    base = PLAIN + ("" if flag == "--init-method-xavier-uniform" else "--init-method-std 0.3 ")
    if flag.startswith("--position-embedding-type rope --"):
        base += "--position-embedding-type rope "
    for start in ("--swiglu ", "--window-size=4,0 "):
        base += start if flag.startswith(start) else ""
    if flag == "--openai-gelu --no-bias-gelu-fusion":
        base += "--no-bias-gelu-fusion "
    assert not torch.allclose(logits(base + flag + " ", BATCH), logits(base, BATCH), rtol=0, atol=1e-6)


def test_gelu_follows_megatrons_fusion_flag():
    assert torch.equal(logits(PLAIN, BATCH), logits(PLAIN + "--openai-gelu ", BATCH))
    assert not torch.equal(logits(PLAIN, BATCH), logits(PLAIN + "--no-bias-gelu-fusion ", BATCH))


def test_biases():
    bias = {"linear_qkv.bias", "linear_proj.bias", "linear_fc1.bias", "linear_fc2.bias"}
    found = {".".join(name.split(".")[-2:]) for name in _names(PLAIN) if name.endswith("bias")}
    assert found == bias | {"input_layernorm.bias", "pre_mlp_layernorm.bias", "final_layernorm.bias"}
    found = {name for name in _names(PLAIN + "--disable-bias-linear --normalization RMSNorm ") if name.endswith("bias")}
    assert not found
    only_qkv = _names(PLAIN + "--disable-bias-linear --normalization RMSNorm --add-qkv-bias ")
    assert {name for name in only_qkv if name.endswith("bias")} == {
        f"decoder.layers.{i}.self_attention.linear_qkv.bias" for i in range(4)
    }


def test_names_are_megatrons():
    assert _names(LLAMA.format(dropout=0)) == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
        *(
            f"decoder.layers.{i}.{part}.weight"
            for i in range(4)
            for part in (
                "input_layernorm",
                "self_attention.linear_qkv",
                "self_attention.q_layernorm",
                "self_attention.k_layernorm",
                "self_attention.linear_proj",
                "pre_mlp_layernorm",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
            )
        ),
    }
    assert "embedding.position_embeddings.weight" in _names(PLAIN) and "output_layer.weight" not in _names(PLAIN)


def test_initial_deviations():
    flags = SIZES.replace("--hidden-size 32", "--hidden-size 128").replace("--ffn-hidden-size 48", "")
    params = _stage(flags + "--init-method-std 0.05 --embedding-init-method-std 0.1 ").parameters()
    for param in params:
        name = param.spec.name
        if name.endswith("bias"):
            assert (param == 0).all()
        elif "layernorm" in name:
            assert (param == 1).all()
        else:
            std = 0.1 if "embedding" in name else 0.05
            if "linear_proj" in name or "linear_fc2" in name:
                std /= math.sqrt(2 * 4)
            expected = pytest.approx(std, rel=5 / math.sqrt(2 * param.numel()))  # five deviations of the estimate
            assert param.std().item() == expected, name


@pytest.mark.parametrize("embedding_std", [None, 0.1])
def test_xavier_uniform_bounds(embedding_std):
    flags = LLAMA.format(dropout=0) + "--position-embedding-type learned_absolute --make-vocab-size-divisible-by 64 "
    flags += "--init-method-xavier-uniform " + (
        f"--embedding-init-method-std {embedding_std} " if embedding_std else ""
    )
    # Rows and columns: QKV is 2 groups x (2 queries + key + value) x 8, fc1 is 2 x 48, the vocabulary is not padded.
    sizes = {
        "linear_qkv": 64 + 32,
        "linear_proj": 32 + 32,
        "linear_fc1": 96 + 32,
        "linear_fc2": 32 + 48,
        "output_layer": VOCAB + 32,
        "word_embeddings": VOCAB + 32,
        "position_embeddings": 16 + 32,
    }
    found = set()
    for param in _stage(flags).parameters():
        name = param.spec.name.split(".")[-2]
        if name.endswith("layernorm"):
            continue
        found.add(name)
        if embedding_std and name.endswith("_embeddings"):
            assert param.std().item() == pytest.approx(embedding_std, rel=0.1)
            continue
        bound = (6 / sizes[name]) ** 0.5
        assert 0.97 * bound < param.abs().max() < bound, name
        assert param.std().item() == pytest.approx(bound / 3**0.5, rel=0.1), name
    assert found == sizes.keys()


def test_weight_decay_of_query_and_key_norms():
    for flag in ("", "--apply-wd-to-qk-layernorm "):
        params = _stage(PLAIN + "--qk-layernorm " + flag).parameters()
        decayed = {p.spec.name for p in params if p.spec.decay and "layernorm" in p.spec.name}
        assert decayed == (
            {f"decoder.layers.{i}.self_attention.{x}_layernorm.weight" for i in range(4) for x in "qk"}
            if flag
            else set()
        )


def test_weight_decay_and_rate_groups():
    params = {p.spec.name: p.spec for p in _stage(PLAIN + "--untie-embeddings-and-output-weights ").parameters()}
    for name, spec in params.items():
        assert spec.decay == (not name.endswith("bias") and "layernorm" not in name)
        assert spec.lr_group == (
            "embedding" if name in ("embedding.word_embeddings.weight", "output_layer.weight") else ""
        )
