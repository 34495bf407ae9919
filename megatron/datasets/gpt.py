"""GPT samples: fixed-length windows over documents laid end to end, in the order `sample_index` draws.

A sample's text may begin and end anywhere in a document and cross any number of document ends. `len(dataset)` may
exceed the number asked for; asking beyond it is the loader's decision, not wrapped here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from megatron.datasets.index_cache import IndexCache
from megatron.datasets.masks import MaskRules, batch_fields
from megatron.datasets.sample_index import SampleOrder, build_sample_order


class TokenSource(Protocol):
    """What a GPT data set reads from: a `.bin/.idx` pair or generated tokens."""

    @property
    def sequence_lengths(self) -> np.ndarray: ...

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def identity(self) -> dict: ...


@dataclass(frozen=True)
class SampleRules:
    """What decides the order and extent of samples (and therefore keys the index cache)."""

    sequence_length: int
    seed: int
    extra_tokens: int = 1
    keep_last_partial: bool = False


class GPTDataset:
    """Samples of one split of one token source."""

    def __init__(
        self,
        source: TokenSource,
        sequences: np.ndarray,
        num_samples: int | None,
        rules: SampleRules,
        masks: MaskRules,
        cache: IndexCache | None = None,
    ) -> None:
        self.source = source
        self.num_samples = num_samples
        self.rules = rules
        self.masks = masks

        def build() -> SampleOrder:
            return build_sample_order(
                source.sequence_lengths,
                sequences,
                num_samples=num_samples,
                sequence_length=rules.sequence_length,
                seed=rules.seed,
                extra_tokens=rules.extra_tokens,
                keep_last_partial=rules.keep_last_partial,
            )

        if cache is None:
            self.order = build()
        else:
            key = {
                "kind": "gpt samples",
                "source": source.identity(),
                "sequences": [int(sequences[0]), int(sequences[-1]) + 1] if len(sequences) else [],
                "num_samples": num_samples,
                **asdict(rules),
            }
            self.order = SampleOrder(**cache.load_or_build(key, lambda: build()._asdict()))

    def __len__(self) -> int:
        return len(self.order.shuffle_index)

    @property
    def text_length(self) -> int:
        """Tokens of a sample's text: the sequence length and the extra token."""
        return self.rules.sequence_length + self.rules.extra_tokens

    def text_into(self, out: np.ndarray, sample: int) -> None:
        """Fills `out` [text_length] with the sample's tokens, then padding."""
        document_index, sample_index, shuffle_index = self.order
        row = int(shuffle_index[sample])
        first, offset = (int(number) for number in sample_index[row])
        last, last_offset = (int(number) for number in sample_index[row + 1])
        filled = 0
        for position in range(first, last + 1):
            length = last_offset + self.rules.extra_tokens - offset if position == last else None
            piece = self.source.get(int(document_index[position]), offset, length)
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            offset = 0
        out[filled:] = self.masks.pad

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        """Fields of one sample, each [s]; see `masks.batch_fields`."""
        text = np.empty((1, self.text_length), dtype=np.int64)
        self.text_into(text[0], sample)
        return {name: value[0] for name, value in batch_fields(text, self.masks, self.rules.extra_tokens).items()}
