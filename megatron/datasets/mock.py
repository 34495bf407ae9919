"""`--mock-data`: generated documents for speed runs and tests, the ones Megatron generates.

100,000 documents of 1 to 4,095 tokens; each counts 1, 2, 3, ... (modulo the vocabulary) and ends with the
end-of-document token.
"""

from __future__ import annotations

import numpy as np

NUM_DOCUMENTS = 100_000
LENGTH_LIMIT = 4096


class MockSource:
    """A token source without files."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.sequence_lengths = np.random.default_rng(0).integers(1, LENGTH_LIMIT, size=NUM_DOCUMENTS, dtype=np.int32)

    def __len__(self) -> int:
        return NUM_DOCUMENTS

    def identity(self) -> dict:
        return {"mock": NUM_DOCUMENTS, "vocab_size": self.vocab_size, "eod": self.eod}

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `offset` to `offset + length` (default: to the end) of one document."""
        total = int(self.sequence_lengths[sequence])
        end = total if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1, dtype=np.int64) % self.vocab_size
        if end == total and len(tokens):
            tokens[-1] = self.eod
        return tokens
