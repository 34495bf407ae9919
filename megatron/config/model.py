"""The network: everything that says what function the weights compute, and how they start."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag, parse_int_pair
from megatron.config.layer_pattern import layers_of, parse_layer_pattern
from megatron.config.rules import (
    above_zero,
    at_least,
    at_most_one,
    changed,
    raise_if,
    required,
    shown,
    whole_at_least_one,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    num_layers: int | None = flag(None)
    """Number of transformer layers. Required."""
    hidden_size: int | None = flag(None)
    """Width of the residual stream. Required."""
    ffn_hidden_size: int | None = flag(None)
    """Inner width of the MLP. None: 4 x hidden size, or with --swiglu or --geglu 8/3 x hidden size rounded down to a
    multiple of 64."""
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
    causal, so the right side is 0 or -1. None: no window."""
    window_attn_skip_freq: str | None = flag(None, parse=parse_layer_pattern, metavar="PATTERN")
    """Layers without the window. A number N: layers N, 2 N, ... attend to everything. A list with an entry for each
    layer, as in [1,1,0] or ([1]*3+[0])*4: 1 has the window, 0 attends to everything. None: every layer has it."""
    add_bias_linear: bool = flag(True, names=("--disable-bias-linear",))
    """Leave out the bias of every linear layer."""
    swiglu: bool = flag(False)
    """Gated MLP with SiLU: silu(gate) x up."""
    geglu: bool = flag(False, own=True)
    """Gated MLP with GELU: gelu(gate) x up."""
    quick_geglu: bool = flag(False)
    """Gated MLP with the sigmoid approximation of GELU: gate x sigmoid(1.702 gate) x up."""
    glu_linear_offset: float = flag(0.0)
    """Added to the ungated half of a gated MLP: act(gate) x (up + offset)."""
    activation_func_clamp_value: float | None = flag(None)
    """Limits both halves of a gated MLP before the activation: the gate from above to this value, the other half to
    plus and minus it. None: no limit."""
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
    fp32_residual_connection: bool = flag(False)
    """Keep the residual stream in fp32 under --bf16 or --fp16: additions to it are not rounded to 8 or 11 bits. Costs
    twice its memory and twice the bytes between pipeline stages."""
    apply_layernorm_1p: bool = flag(False)
    """Store the norm's weight minus one: numbers around zero, which low precision rounds less."""
    position_embedding_type: str = flag(
        "learned_absolute", choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none")
    )
    """How tokens know where they are. yarn, mrope and relative are not yet supported."""
    add_position_embedding: bool = flag(True, names=("--no-position-embedding",))
    """Old spelling that goes with --position-embedding-type rope or none, and changes nothing there."""
    max_position_embeddings: int | None = flag(None)
    """Largest position the model is made for; at least the sequence length. Required."""
    rotary_base: int = flag(10000)
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = flag(1.0)
    """Share of each head that is rotated, above 0 and up to 1."""
    rotary_interleaved: bool = flag(False)
    """Rotate neighbouring pairs (0,1), (2,3), ... instead of first half with second half."""
    rotary_seq_len_interpolation_factor: int | None = flag(None)
    """Divide the positions by this before they are rotated (linear interpolation to a longer context). None: 1."""
    use_rope_scaling: bool = flag(False)
    """Llama-3 scaling of the rotary frequencies (low 1, high 4, old context 8192)."""
    rope_scaling_factor: float = flag(8.0)
    """Factor of --use-rope-scaling."""
    no_rope_freq: str | None = flag(None, parse=parse_layer_pattern, metavar="PATTERN")
    """Layers that do not rotate queries and keys. A number N: layers N, 2 N, ...; a list with an entry for each layer,
    as in [0,0,1] or ([0]*3+[1])*4: 1 does not rotate. None: every layer rotates."""
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
    """Standard deviation of initial weights; projections into the residual stream get it divided by
    sqrt(2 x layers)."""
    init_method_xavier_uniform: bool = flag(False)
    """Draw initial weights evenly between plus and minus sqrt(6 / (rows + columns)) of their matrix. Projections into
    the residual stream get no smaller ones; embeddings are drawn so unless --embedding-init-method-std is given."""
    embedding_init_method_std: float | None = flag(None)
    """Standard deviation of the initial word and position embeddings. None: as all weights."""
    num_experts: int | None = flag(None)
    """Number of experts of a mixture of experts. Not yet supported."""
    moe_router_topk: int = flag(2)
    """Experts per token. Not yet supported."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    @property
    def gated_linear_unit(self) -> bool:
        """Whether the MLP multiplies by a gate."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def activation(self) -> str:
        """swiglu, geglu, geglu-tanh, quick-geglu, squared-relu, gelu or gelu-tanh."""
        if self.swiglu:
            return "swiglu"
        if self.quick_geglu:
            return "quick-geglu"
        if self.squared_relu:
            return "squared-relu"
        if self.geglu:
            return "geglu-tanh" if self.openai_gelu else "geglu"
        fused = self.bias_gelu_fusion and self.add_bias_linear
        return "gelu-tanh" if self.openai_gelu or fused else "gelu"

    @property
    def ffn_size(self) -> int | None:
        """Inner width of the MLP; Megatron's default where none is given."""
        if self.ffn_hidden_size is not None or self.hidden_size is None:
            return self.ffn_hidden_size
        # As Megatron, which narrows the MLP for --swiglu and not for --quick-geglu.
        return int(8 * self.hidden_size / 3 / 64) * 64 if self.swiglu or self.geglu else 4 * self.hidden_size

    @property
    def head_dim(self) -> int | None:
        """Width of one attention head."""
        if self.kv_channels is not None or not whole_at_least_one(self.hidden_size, self.num_attention_heads):
            return self.kv_channels
        return self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int | None:
        """Key and value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query, key and value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def rotary_dims(self) -> int | None:
        """Dimensions of a head that are rotated; 0 without rotary positions."""
        if self.position_embedding_type != "rope" or self.head_dim is None:
            return 0
        return int(self.head_dim * self.rotary_percent)

    @property
    def window_layers(self) -> tuple[bool, ...]:
        """For each layer whether its attention has the window."""
        if self.window_size is None or self.window_attn_skip_freq is None:
            return (self.window_size is not None,) * (self.num_layers or 0)
        return layers_of(self.window_attn_skip_freq, self.num_layers or 0, every_nth=False)

    @property
    def rope_layers(self) -> tuple[bool, ...]:
        """For each layer whether it rotates queries and keys."""
        if self.position_embedding_type != "rope" or self.no_rope_freq is None:
            return (self.position_embedding_type == "rope",) * (self.num_layers or 0)
        skips = layers_of(self.no_rope_freq, self.num_layers or 0, every_nth=True)
        return tuple(not skipped for skipped in skips)

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        sizes = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        lines = required(self, *sizes)
        lines += at_least(
            self,
            1,
            *sizes,
            "ffn_hidden_size",
            "kv_channels",
            "num_query_groups",
            "make_vocab_size_divisible_by",
            "padded_vocab_size",
            "rotary_seq_len_interpolation_factor",
            "num_experts",
            "moe_router_topk",
        )
        lines += above_zero(
            self,
            "norm_epsilon",
            "init_method_std",
            "embedding_init_method_std",
            "embedding_multiplier",
            "activation_func_clamp_value",
        )
        lines += [
            f"{shown(self, name)} is not in [0, 1): it is the share of values that are dropped"
            for name in ("hidden_dropout", "attention_dropout")
            if not 0 <= getattr(self, name) < 1
        ]
        if self.init_method_xavier_uniform and changed(self, "init_method_std"):
            lines.append(
                f"{shown(self, 'init_method_std')} would be ignored with --init-method-xavier-uniform; drop one of them"
            )
        if self.padded_vocab_size is not None and not self.pad_vocab_size:
            lines.append(f"{shown(self, 'padded_vocab_size')} and --no-pad-vocab-size contradict each other; keep one")
        if self.gated_linear_unit and self.ffn_size == 0:
            lines.append(
                f"{shown(self, 'hidden_size')} with a gated MLP has no default MLP width (8/3 of it rounded down to a "
                "multiple "
                "of 64 is 0); give --ffn-hidden-size"
            )
        return lines + self._attention_problems() + self._activation_problems() + self._position_problems()

    def _attention_problems(self) -> list[str]:
        lines = []
        heads, hidden, groups = self.num_attention_heads, self.hidden_size, self.num_query_groups
        if whole_at_least_one(hidden, heads) and self.kv_channels is None and hidden % heads:
            lines.append(
                f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}; use --hidden-size "
                f"{hidden // heads * heads or heads} or {-(-hidden // heads) * heads}, or give --kv-channels"
            )
        if self.group_query_attention and whole_at_least_one(heads, groups) and heads % groups:
            lines.append(
                f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; use {divisors(heads)}"
            )
        if groups != 1 and not self.group_query_attention:
            lines.append(
                f"--num-query-groups {groups} would be ignored without --group-query-attention; add that flag or drop "
                "this one"
            )
        if self.window_size is not None:
            left, right = self.window_size
            if left < -1 or right not in (-1, 0):
                lines.append(
                    f"--window-size {left},{right}: the left side is -1 (no limit) or more, and the right side of a "
                    "causal "
                    "model is 0 or -1; use for instance 128,0"
                )
        lines += self._pattern_problems("window_attn_skip_freq")
        if self.window_attn_skip_freq is not None and self.window_size is None:
            lines.append(
                f"{shown(self, 'window_attn_skip_freq')} would be ignored without --window-size; add that flag or drop "
                "this one"
            )
        if self.num_experts is not None:
            if self.num_experts >= 1 and self.moe_router_topk > self.num_experts:
                lines.append(
                    f"--moe-router-topk {self.moe_router_topk} is more than --num-experts {self.num_experts}; lower it"
                )
            lines.append(f"--num-experts {self.num_experts}: mixture of experts is not yet supported; drop the flag")
        return lines

    def _pattern_problems(self, field: str) -> list[str]:
        pattern, layers = getattr(self, field), self.num_layers
        if pattern is None or not whole_at_least_one(layers):
            return []
        found = len(layers_of(pattern, layers, every_nth=True))
        if found == layers:
            return []
        return [f"{shown(self, field)} has {found} entries for --num-layers {layers}; give one for each layer"]

    def _activation_problems(self) -> list[str]:
        others = ("swiglu", "quick_geglu", "squared_relu")
        lines = at_most_one(self, "each is another MLP activation", "geglu", *others)
        if self.openai_gelu and changed(self, *others):
            other = shown(self, changed(self, *others)[0])
            lines.append(f"--openai-gelu and {other}: each is another MLP activation; keep one of them")
        if not self.gated_linear_unit:
            lines += [
                f"{shown(self, name)} would be ignored without a gated MLP; add --swiglu, --geglu or --quick-geglu, or "
                "drop it"
                for name in changed(self, "glu_linear_offset", "activation_func_clamp_value")
            ]
        return lines

    def _position_problems(self) -> list[str]:
        kind, lines = self.position_embedding_type, []
        if kind in ("yarn", "mrope", "relative"):
            lines.append(f"--position-embedding-type {kind} is not yet supported; use rope, learned_absolute or none")
        if not self.add_position_embedding and kind == "learned_absolute":
            lines.append(
                "--no-position-embedding contradicts --position-embedding-type learned_absolute; use "
                "--position-embedding-type rope or none"
            )
        if kind != "rope":
            lines += [
                f"{shown(self, name)} would be ignored with --position-embedding-type {kind}; add "
                "--position-embedding-type rope or drop it"
                for name in changed(
                    self,
                    "rotary_base",
                    "rotary_percent",
                    "rotary_interleaved",
                    "rotary_seq_len_interpolation_factor",
                    "use_rope_scaling",
                    "no_rope_freq",
                )
            ]
        lines += self._pattern_problems("no_rope_freq")
        if changed(self, "rope_scaling_factor") and not self.use_rope_scaling:
            lines.append(
                f"{shown(self, 'rope_scaling_factor')} would be ignored without --use-rope-scaling; add that flag or "
                "drop it"
            )
        lines += above_zero(self, "rotary_base", "rope_scaling_factor")
        if not 0 < self.rotary_percent <= 1:
            lines.append(
                f"--rotary-percent {self.rotary_percent} is not above 0 and up to 1, the share of a head to rotate"
            )
        elif kind == "rope" and self.head_dim is not None and (self.rotary_dims < 2 or self.rotary_dims % 2):
            lines.append(
                f"--rotary-percent {self.rotary_percent} of a head of {self.head_dim} (--kv-channels, or --hidden-size "
                f"{self.hidden_size} / --num-attention-heads {self.num_attention_heads}) rotates {self.rotary_dims} "
                "dimensions, which must be even and at least 2; change one of them"
            )
        return lines


def divisors(number: int) -> str:
    """The divisors of a number as a list to choose from."""
    *most, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(most)} or {last}" if most else last
