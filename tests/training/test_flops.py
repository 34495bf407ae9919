"""Model FLOPs against sums written out by hand, per convention."""

import pytest

from megatron.config import RunConfig
from megatron.training.flops import attention_pairs, model_flops


def tiny(flags="", *, kv_heads=2, ffn=160, gated=True):
    return RunConfig.from_flags(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
        f"--num-query-groups {kv_heads} --ffn-hidden-size {ffn} --seq-length 32 "
        + ("--swiglu " if gated else "")
        + flags
    )


def test_worked_example_of_a_gated_grouped_query_model():
    # Per token and layer: QKV 2*64*16*(4+2*2) = 16,384; scores and values 4*32*64 = 8,192 (causal half 4,096);
    # projection 8,192; gated MLP 6*64*160 = 61,440. Head 2*64*128 = 16,384. 128 tokens, backward twice the forward.
    assert model_flops(tiny(), 4, 128, causal=False) == 78_643_200
    assert model_flops(tiny(), 4, 128) == 75_497_472


def test_variants_count_what_they_compute():
    base = model_flops(tiny(), 4, 128)
    # Four KV heads: QKV 24,576 instead of 16,384 a token and layer.
    assert model_flops(tiny(kv_heads=4), 4, 128) - base == (24_576 - 16_384) * 2 * 128 * 3
    # An ungated MLP of 256: 4*64*256 = 65,536 instead of 61,440.
    assert model_flops(tiny(ffn=256, gated=False), 4, 128) - base == (65_536 - 61_440) * 2 * 128 * 3
    assert model_flops(tiny("--no-swiglu --quick-geglu"), 4, 128) == base
    assert model_flops(tiny(), 8, 128) == 2 * base


@pytest.mark.parametrize(("keys", "pairs"), [(None, 512), (32, 512), (100, 512), (8, 32 * 8 - 32), (1, 31.5)])
def test_window_counts_only_what_a_query_sees(keys, pairs):
    assert attention_pairs(32, keys) == pairs
    assert model_flops(tiny("--window-size 7,0"), 4, 128) < model_flops(tiny(), 4, 128)
    assert model_flops(tiny("--window-size=-1,0"), 4, 128) == model_flops(tiny(), 4, 128)


def test_only_layers_with_the_window_are_cheaper():
    whole, windowed = model_flops(tiny(), 4, 128), model_flops(tiny("--window-size 7,0"), 4, 128)
    for pattern in ("2", "[0,1]"):
        half = model_flops(tiny(f"--window-size 7,0 --window-attn-skip-freq {pattern}"), 4, 128)
        assert half == (whole + windowed) / 2
