"""Model FLOPs of a training step, from the configuration alone.

Conventions, constant over every layout and option:

- a multiply-add is two operations; the backward pass is twice the forward pass; recomputed activations are not counted,
  so the number says what the model needs and not what a memory-saving choice makes it do;
- matrix products only: QKV, attention scores and values, output projection, MLP, output layer (over the padded
  vocabulary, as Megatron counts). Norms, activations, embeddings look-ups and the optimizer are left out;
- causal attention is counted as the half of the score matrix that it needs: s*s/2 query-key pairs a sequence, and
  s*w - w*w/2 in layers with a window that lets a query see w keys (w = s gives s*s/2). `--reset-attention-mask` is not
  counted.

`causal=False` counts whole score matrices, the convention of the PaLM paper (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations


def attention_pairs(seq_tokens: int, keys: int | None = None, causal: bool = True) -> float:
    """Query-key pairs of a sequence; `keys`: how many keys a query sees at most, itself included (None: no window)."""
    if not causal:
        return float(seq_tokens * seq_tokens)
    width = seq_tokens if keys is None else min(keys, seq_tokens)
    return seq_tokens * width - width * width / 2


def layer_forward_flops(
    *,
    seq_tokens: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    gated: bool,
    keys: int | None = None,
    causal: bool = True,
) -> float:
    """Forward FLOPs of one transformer layer over one sequence."""
    qkv = 2 * seq_tokens * hidden * head_dim * (heads + 2 * kv_heads)
    scores_and_values = 2 * 2 * attention_pairs(seq_tokens, keys, causal) * heads * head_dim
    projection = 2 * seq_tokens * heads * head_dim * hidden
    mlp = 2 * seq_tokens * hidden * ffn * (3 if gated else 2)
    return qkv + scores_and_values + projection + mlp


def model_flops(config, batch_size: int, padded_vocab: int, causal: bool = True) -> float:
    """FLOPs of one training step (forward and backward) of `batch_size` sequences, over all ranks."""
    model, seq_tokens = config.model, config.data.seq_length
    left = -1 if model.window_size is None else model.window_size[0]

    def layer(keys: int | None) -> float:
        return layer_forward_flops(
            seq_tokens=seq_tokens,
            hidden=model.hidden_size,
            ffn=config.ffn_size,
            heads=model.num_attention_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            gated=model.gated_linear_unit,
            keys=keys,
            causal=causal,
        )

    windowed = sum(model.window_layers)
    layers = windowed * layer(None if left < 0 else left + 1) + (model.num_layers - windowed) * layer(None)
    head = 2 * seq_tokens * model.hidden_size * padded_vocab
    return 3 * batch_size * (layers + head)
