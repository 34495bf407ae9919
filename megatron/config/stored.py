"""A configuration as JSON in a checkpoint, and what a later run takes from it.

Whatever defines the function of the weights must be the same when they are loaded. `function_of` states that function
with every derived number filled in, so two ways of saying the same (a typed --ffn-hidden-size and its default) agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.config.data import DataConfig
from megatron.config.flags import concern_title, options, unchecked
from megatron.config.layer_pattern import as_list
from megatron.config.model import ModelConfig

TOKENIZER_FIELDS = tuple(
    option.field
    for option in options(DataConfig)
    if option.field.startswith(("tokenizer", "vocab", "merge", "tiktoken", "null_tokenizer"))
)
# Never taken: padding belongs to the layout, initial values to the start of a run.
_NOT_TAKEN = frozenset(
    "make_vocab_size_divisible_by pad_vocab_size padded_vocab_size init_method_std embedding_init_method_std "
    "init_method_xavier_uniform".split()
)


def to_dict(config: Any) -> dict[str, Any]:
    """Every field of every concern of a RunConfig, as JSON can hold it: {concern: {field: value}}."""
    stored: dict[str, Any] = {"world_size": config.world_size}
    for concern in config.concerns:
        stored[concern_title(type(concern))] = dataclasses.asdict(concern)
    return stored


def concern_from_dict(concern: type, stored: Mapping[str, Any]) -> Any:
    """The instance that `to_dict` stored; fields it does not know are left at their defaults, unknown ones ignored."""
    return unchecked(concern, fields_of(concern, stored))


def fields_of(concern: type, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The stored fields of one concern, JSON's lists turned back into tuples."""
    known = {option.field for option in options(concern)}
    section = stored.get(concern_title(concern), {})
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in section.items() if name in known
    }


def take_stored(stored: Mapping[str, Any], given: Mapping[str, Any], with_tokenizer: bool) -> dict[str, Any]:
    """Fields of the checkpoint that apply where nothing was typed: the model, its sequence length and its tokenizer.

    Layout, batch, data and optimizer are never taken.
    """
    taken = {name: value for name, value in fields_of(ModelConfig, stored).items() if name not in _NOT_TAKEN}
    data = fields_of(DataConfig, stored)
    if "seq_length" in data:
        taken["seq_length"] = data["seq_length"]
    # A typed kind of tokenizer replaces the stored one as a whole; a typed path is where its files are now.
    if with_tokenizer and "tokenizer_type" not in given:
        taken.update({name: data[name] for name in TOKENIZER_FIELDS if name in data})
    return {name: value for name, value in taken.items() if name not in given}


def function_of(model: ModelConfig) -> dict[str, Any]:
    """Flag -> value, for everything that decides what the weights compute."""
    function = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.ffn_size,
        "--num-attention-heads": model.num_attention_heads,
        "--kv-channels": model.head_dim,
        "--num-query-groups": model.num_kv_heads,
        "--disable-bias-linear": not model.add_bias_linear,
        "--add-qkv-bias": model.has_qkv_bias,
        "--qk-layernorm": model.qk_layernorm,
        "--window-size": model.window_size,
        "MLP activation (--swiglu, --geglu, --quick-geglu, --squared-relu, --openai-gelu, --no-bias-gelu-fusion)": (
            model.activation
        ),
        "--glu-linear-offset": model.glu_linear_offset,
        "--activation-func-clamp-value": model.activation_func_clamp_value,
        "--normalization": model.normalization,
        "--norm-epsilon": model.norm_epsilon,
        "--apply-layernorm-1p": model.apply_layernorm_1p,
        "--position-embedding-type": model.position_embedding_type,
        "--untie-embeddings-and-output-weights": model.untie_embeddings_and_output_weights,
        "--embedding-multiplier": model.embedding_multiplier,
        "--num-experts": model.num_experts,
    }
    if not all(model.window_layers) and model.window_size is not None:
        function["--window-attn-skip-freq"] = as_list(model.window_layers)
    if model.position_embedding_type == "learned_absolute":
        function["--max-position-embeddings"] = model.max_position_embeddings
    if model.position_embedding_type == "rope":
        function["--rotary-base"] = model.rotary_base
        function["--rotary-percent"] = model.rotary_percent
        function["--rotary-interleaved"] = model.rotary_interleaved
        function["--rotary-seq-len-interpolation-factor"] = model.rotary_seq_len_interpolation_factor or 1
        function["--use-rope-scaling"] = model.use_rope_scaling
        if not all(model.rope_layers):
            function["--no-rope-freq"] = as_list(tuple(not rotates for rotates in model.rope_layers))
        if model.use_rope_scaling:
            function["--rope-scaling-factor"] = model.rope_scaling_factor
    if model.num_experts is not None:
        function["--moe-router-topk"] = model.moe_router_topk
    return function


def function_mismatches(model: ModelConfig, stored: Mapping[str, Any]) -> list[str]:
    """One line for each flag by which `model` computes another function than the checkpoint's, naming both values."""
    ours, theirs = function_of(model), function_of(concern_from_dict(ModelConfig, stored))
    return [
        f"{name} is {ours.get(name, 'not used')} here and {theirs.get(name, 'not used')} in the checkpoint"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]
