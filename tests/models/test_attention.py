"""What attention must not see, and which heads a rank computes."""

from __future__ import annotations

import pytest
import torch

from megatron.models.attention import HeadSplit
from tests.models.layouts import GPT, LENGTH, LLAMA, VOCAB, batch, logits

CUT = 6


def _packed(seed: int, isolated: bool) -> dict[str, torch.Tensor]:
    """Document X (CUT tokens, by seed) then Y, with positions that restart and document ids, or without either."""
    fields = batch(0, samples=1)
    fields["tokens"] = fields["tokens"].clone()
    fields["tokens"][:, :CUT] = torch.randint(0, VOCAB, (1, CUT), generator=torch.Generator().manual_seed(seed))
    if isolated:
        documents = (torch.arange(LENGTH) >= CUT).int()[None]
        fields["document_ids"] = documents
        fields["position_ids"] = torch.arange(LENGTH)[None] - documents * CUT
    return fields


@pytest.mark.parametrize("flags", [GPT, LLAMA])
@pytest.mark.parametrize("window", ["", "--window-size=8,0 "])
def test_documents_are_isolated_exactly_when_asked(flags, window):
    flags = flags.format(dropout=0) + "--init-method-std 0.2 " + window
    one, other = (logits(flags, _packed(seed, isolated=True))[:, CUT:] for seed in (1, 2))
    assert torch.equal(one, other)
    alone = batch(0, samples=1)
    alone = {name: value[:, CUT:] if value.dim() == 2 else value for name, value in alone.items()}
    alone["position_ids"] = alone["position_ids"] - CUT
    # Another kernel computes it, and weights are large here.
    torch.testing.assert_close(one, logits(flags, alone), rtol=1e-5, atol=1e-5)
    one, other = (logits(flags, _packed(seed, isolated=False))[:, CUT:] for seed in (1, 2))
    assert (one - other).abs().max() > 1e-3


def test_window_limits_what_a_token_sees():
    flags = GPT.format(dropout=0) + "--init-method-std 0.2 --num-layers 1 --window-size=3,0 "
    fields = batch(0, samples=1)
    before = logits(flags, fields)
    fields["tokens"] = fields["tokens"].clone()
    fields["tokens"][0, 4] += 1 if fields["tokens"][0, 4] < VOCAB - 1 else -1
    changed = (logits(flags, fields) - before).abs().amax((0, 2)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_layers_without_the_window_see_everything():
    plain = GPT.format(dropout=0) + "--init-method-std 0.2 "
    windowed, fields = plain + "--window-size 3,0 ", batch(0)

    def with_pattern(pattern):
        return logits(f"{windowed} --window-attn-skip-freq {pattern} ", fields)

    for pattern in ("1", "[0]*4"):
        assert torch.equal(with_pattern(pattern), logits(plain, fields))
    assert torch.equal(with_pattern("[1]*4"), logits(windowed, fields))
    mixed = with_pattern("2")
    assert torch.equal(mixed, with_pattern("[1,0,1,0]"))
    for other in (with_pattern("[0,1,0,1]"), logits(plain, fields), logits(windowed, fields)):
        assert (mixed - other).abs().max() > 1e-3


@pytest.mark.parametrize(("pattern", "reach"), [("[1,1,1,1]", 12), ("[1,1,0,1]", LENGTH - 1)])
def test_one_layer_without_the_window_opens_the_distance(pattern, reach):
    flags = GPT.format(dropout=0) + f"--init-method-std 0.2 --window-size 3,0 --window-attn-skip-freq {pattern} "
    fields = batch(0, samples=1)
    before = logits(flags, fields)
    fields["tokens"] = (fields["tokens"] + (torch.arange(LENGTH) == 0)) % VOCAB
    changed = (logits(flags, fields) - before).abs().amax((0, 2)) > 0
    assert changed.nonzero().flatten().tolist() == list(range(reach + 1))


def test_layers_without_rotation():
    rope = LLAMA.format(dropout=0) + "--init-method-std 0.2 "
    none, fields = rope.replace("--position-embedding-type rope", "--position-embedding-type none"), batch(0)

    def with_pattern(pattern):
        return logits(f"{rope} --no-rope-freq {pattern} ", fields)

    for pattern in ("1", "[1]*4"):
        assert torch.equal(with_pattern(pattern), logits(none, fields))
    assert torch.equal(with_pattern("5"), logits(rope, fields))
    mixed = with_pattern("2")
    assert torch.equal(mixed, with_pattern("[0,1,0,1]"))
    for other in (with_pattern("[1,0,1,0]"), logits(rope, fields), logits(none, fields)):
        assert (mixed - other).abs().max() > 1e-3


def test_attention_is_causal():
    fields = batch(0, samples=1)
    before = logits(LLAMA.format(dropout=0), fields)
    fields["tokens"] = fields["tokens"].clone()
    fields["tokens"][0, 10:] = 0
    assert torch.equal(logits(LLAMA.format(dropout=0), fields)[:, :10], before[:, :10])


def test_head_split():
    assert HeadSplit.of(8, 4, 2, 2, 1) == HeadSplit(2, 2, None)
    # Two groups of 4 query heads + key + value, two rows each: rank 3 of 4 has heads 2, 3 of group 1 and its key and
    # value.
    assert HeadSplit.of(8, 2, 2, 4, 3) == HeadSplit(1, 2, (slice(16, 20), slice(20, 24)))
    assert HeadSplit.of(8, 1, 2, 2, 0) == HeadSplit(1, 4, (slice(0, 8), slice(16, 20)))
    with pytest.raises(ValueError, match="--num-query-groups"):
        HeadSplit.of(12, 3, 2, 2, 0)
