"""The network: everything that says what function the weights compute, and how they start."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag, parse_int_pair


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    num_layers: int | None = flag(None)
    """Number of transformer layers. Required."""
    hidden_size: int | None = flag(None)
    """Width of the residual stream. Required."""
    ffn_hidden_size: int | None = flag(None)
    """Inner width of the MLP. None: 4 x hidden size, or with a gated MLP 8/3 x hidden size rounded down to a multiple
    of 64."""
    num_attention_heads: int | None = flag(None)
    """Number of query heads. Required."""
    kv_channels: int | None = flag(None)
    """Width of one attention head. None: hidden size / number of heads."""
    group_query_attention: bool = flag(False)
    """Share each key and value head between several query heads (grouped-query attention)."""
    num_query_groups: int = flag(1)
    """Number of key and value heads under --group-query-attention; 1 is multi-query attention."""
    add_qkv_bias: bool = flag(False)
    """Give the query, key and value projection a bias even when --disable-bias-linear takes the others away."""
    qk_layernorm: bool = flag(False)
    """Normalise queries and keys per head before the dot product."""
    window_size: tuple[int, ...] | None = flag(None, parse=parse_int_pair, metavar="LEFT,RIGHT")
    """Sliding-window attention: how many tokens each query sees to its left and right. -1 means no limit; the model is
    causal, so the right side is 0 or -1. Write --window-size=-1,0 when the first number is negative. None: no window."""
    add_bias_linear: bool = flag(True, names=("--disable-bias-linear",))
    """Leave out the bias of every linear layer."""
    swiglu: bool = flag(False)
    """Gated MLP with SiLU: silu(gate) x up."""
    geglu: bool = flag(False)
    """Gated MLP with GELU: gelu(gate) x up."""
    squared_relu: bool = flag(False)
    """MLP activation relu(x) squared."""
    openai_gelu: bool = flag(False)
    """GELU by its tanh approximation, whatever --no-bias-gelu-fusion says."""
    bias_gelu_fusion: bool = flag(True, names=("--no-bias-gelu-fusion",))
    """Use the exact (erf) GELU. Without this flag GELU is the tanh approximation when the linear layers have biases and
    exact when they have none, because that is the function Megatron's fused kernel computes."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Norm before attention, before the MLP and at the end."""
    norm_epsilon: float = flag(1e-5)
    """Added to the variance in every norm."""
    apply_layernorm_1p: bool = flag(False)
    """Store the norm's weight minus one, so that weight decay pulls it to one."""
    position_embedding_type: str = flag(
        "learned_absolute", choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none")
    )
    """How tokens know where they are. yarn, mrope and relative are not supported yet."""
    add_position_embedding: bool = flag(True, names=("--no-position-embedding",))
    """Old spelling that goes with --position-embedding-type rope or none, where it changes nothing; refused elsewhere."""
    max_position_embeddings: int | None = flag(None)
    """Largest position the model is made for; at least the sequence length. Required."""
    rotary_base: int = flag(10000)
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = flag(1.0)
    """Share of each head that is rotated, above 0 and up to 1."""
    rotary_interleaved: bool = flag(False)
    """Rotate neighbouring pairs (0,1), (2,3), ... instead of first half with second half."""
    use_rope_scaling: bool = flag(False)
    """Llama-3 scaling of the rotary frequencies (low 1, high 4, old context 8192)."""
    rope_scaling_factor: float = flag(8.0)
    """Factor of --use-rope-scaling."""
    untie_embeddings_and_output_weights: bool = flag(False)
    """Give the output layer its own matrix instead of the word embeddings'."""
    embedding_multiplier: float = flag(1.0, own=True)
    """The embedding's output is multiplied by this (Gemma: the square root of the hidden size)."""
    make_vocab_size_divisible_by: int = flag(128)
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    pad_vocab_size: bool = flag(True, names=("--no-pad-vocab-size", "--disable-pad-vocab-size"))
    """Do not pad the vocabulary."""
    padded_vocab_size: int | None = flag(None)
    """Rows of the embedding, padding included. None: computed from the vocabulary."""
    mask_vocab_padding: bool = flag(True, names=("--no-mask-vocab-padding",), own=True)
    """Let the padding rows of the vocabulary take part in the softmax, as Megatron does. Without this flag they take no
    probability, so the loss does not depend on the padding."""
    hidden_dropout: float = flag(0.1)
    """Dropout after embeddings, attention and MLP, at least 0 and below 1."""
    attention_dropout: float = flag(0.1)
    """Dropout of attention probabilities, at least 0 and below 1."""
    init_method_std: float = flag(0.02)
    """Standard deviation of initial weights; projections into the residual stream get it divided by sqrt(2 x layers)."""
    embedding_init_method_std: float | None = flag(None)
    """Standard deviation of the initial word and position embeddings. None: --init-method-std."""
    num_experts: int | None = flag(None)
    """Number of experts of a mixture of experts. Not supported yet."""
    moe_router_topk: int = flag(2)
    """Experts per token. Not supported yet."""

    def __post_init__(self) -> None:
        pass
