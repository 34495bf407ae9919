"""The same weights in Hugging Face's models give the same logits."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.context import single_process_context
from megatron.models.gpt import build_stages
from megatron.topology.mesh import Mesh
from tests.models.layouts import VOCAB, batch, config_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install '.[hf]')")

BATCH = batch(0)


def _stage(flags):
    (stage,) = build_stages(config_of(flags, Mesh()), single_process_context(), VOCAB)
    stage.eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in stage.parameters():  # norms and biases too
            param += torch.randn(param.shape, generator=generator) * 0.1
    return stage, {p.spec.name: p.detach().view(p.spec.shape) for p in stage.parameters()}


def _compare(stage, model):
    model.eval()
    with torch.no_grad():
        ours = stage.logits(None, BATCH)
        theirs = model(BATCH["tokens"]).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(4, 4, 8), (4, 2, 8), (4, 1, 8), (6, 2, 16)])
@pytest.mark.parametrize("rope", ["", "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8"])
def test_llama(heads, groups, head_dim, rope):
    hidden, ffn, layers = 48, 64, 2
    stage, weights = _stage(
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --kv-channels {head_dim} "
        f"--group-query-attention --num-query-groups {groups} --ffn-hidden-size {ffn} --swiglu --disable-bias-linear "
        f"--normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope {rope} --seq-length 16 "
        "--max-position-embeddings 16 --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 100 "
    )
    scaling = {"rope_type": "default", "rope_theta": 10000.0}
    if rope:
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=head_dim,
            rms_norm_eps=1e-6,
            max_position_embeddings=16,
            rope_parameters=scaling,
        )
    )
    state = {
        "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"],
        "model.norm.weight": weights["decoder.final_layernorm.weight"],
        "lm_head.weight": weights["output_layer.weight"],
    }
    for i in range(layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        qkv, fc1 = weights[ours + "self_attention.linear_qkv.weight"], weights[ours + "mlp.linear_fc1.weight"]
        per_group = heads // groups
        state |= {
            theirs + "input_layernorm.weight": weights[ours + "input_layernorm.weight"],
            theirs + "self_attn.q_proj.weight": qkv[:, :per_group].reshape(-1, hidden),
            theirs + "self_attn.k_proj.weight": qkv[:, per_group].reshape(-1, hidden),
            theirs + "self_attn.v_proj.weight": qkv[:, per_group + 1].reshape(-1, hidden),
            theirs + "self_attn.o_proj.weight": weights[ours + "self_attention.linear_proj.weight"].flatten(1),
            theirs + "post_attention_layernorm.weight": weights[ours + "pre_mlp_layernorm.weight"],
            theirs + "mlp.gate_proj.weight": fc1[0],
            theirs + "mlp.up_proj.weight": fc1[1],
            theirs + "mlp.down_proj.weight": weights[ours + "mlp.linear_fc2.weight"],
        }
    model.load_state_dict(state, strict=True)
    _compare(stage, model)


def test_gpt2():
    hidden, layers, heads = 32, 2, 4
    stage, weights = _stage(
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 16 "
        "--max-position-embeddings 16 --make-vocab-size-divisible-by 100 "
    )
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=hidden, n_layer=layers, n_head=heads)
    )
    state = {
        "transformer.wte.weight": weights["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": weights["embedding.position_embeddings.weight"],
        "lm_head.weight": weights["embedding.word_embeddings.weight"],
    }
    for part in ("weight", "bias"):
        state[f"transformer.ln_f.{part}"] = weights[f"decoder.final_layernorm.{part}"]
    for i in range(layers):
        ours, theirs = f"decoder.layers.{i}.", f"transformer.h.{i}."
        for part in ("weight", "bias"):
            qkv = weights[f"{ours}self_attention.linear_qkv.{part}"]
            linears = {
                "attn.c_attn": torch.cat([qkv[:, j].flatten(0, 1) for j in range(3)]),
                "attn.c_proj": weights[f"{ours}self_attention.linear_proj.{part}"],
                "mlp.c_fc": weights[f"{ours}mlp.linear_fc1.{part}"],
                "mlp.c_proj": weights[f"{ours}mlp.linear_fc2.{part}"],
            }
            for name, value in linears.items():
                state[f"{theirs}{name}.{part}"] = value.flatten(1).t() if part == "weight" else value
            state[f"{theirs}ln_1.{part}"] = weights[f"{ours}input_layernorm.{part}"]
            state[f"{theirs}ln_2.{part}"] = weights[f"{ours}pre_mlp_layernorm.{part}"]
    model.load_state_dict(state, strict=True)
    _compare(stage, model)
