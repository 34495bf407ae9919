"""The loader: the microbatches of each step, a function of the number of samples consumed before it and nothing else.

Step data is samples `consumed` to `consumed + global_batch_size` of the run; microbatch i of data-parallel rank r is
the block that starts at `consumed + (i * dp_size + r) * micro_batch_size`. So every layout and every resume sees the
same samples in the same step, and `consumed_samples` is the loader's whole state.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from megatron.datasets.blend import BlendedDataset, fields_of
from megatron.datasets.gpt import GPTDataset
from megatron.datasets.indexed import DataError


class Order(Protocol):
    """Which sample of the data set stands at each position of the run."""

    def samples_at(self, positions: np.ndarray) -> np.ndarray: ...


class SequentialOrder:
    """`--dataloader-type single`: the data set's own order, once (`wraps`: again from the start)."""

    def __init__(self, num_samples: int, name: str, wraps: bool = False) -> None:
        if num_samples < 1:
            raise ValueError(f"the {name} data set holds no samples")
        self.num_samples = num_samples
        self.name = name
        self.wraps = wraps

    def samples_at(self, positions: np.ndarray) -> np.ndarray:
        """The samples at ascending positions of the run; DataError beyond the end unless the order wraps."""
        if self.wraps:
            return positions % self.num_samples
        if len(positions) and positions[-1] >= self.num_samples:
            raise DataError(
                f"the {self.name} data set holds {self.num_samples} samples, but samples up to {positions[-1] + 1} are"
                " wanted; it is sized by --train-iters or --train-samples when a run starts, so give those their new"
                " value at the start, or use --dataloader-type cyclic"
            )
        return positions


class CyclicOrder:
    """`--dataloader-type cyclic`: every epoch a new permutation of the whole set, seeded by the epoch number.

    An epoch is all samples of the set, whatever the batch size or the number of ranks (Megatron shortens it to whole
    batches, so its order changes with the layout); a step may reach into the next epoch.
    """

    def __init__(self, num_samples: int, name: str) -> None:
        if num_samples < 1:
            raise ValueError(f"the {name} data set holds no samples")
        self.num_samples = num_samples
        self._permutations: dict[int, np.ndarray] = {}

    def samples_at(self, positions: np.ndarray) -> np.ndarray:
        """The samples at positions of the run, which has no end."""
        epochs, places = np.divmod(positions, self.num_samples)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            samples[inside] = self._permutation(int(epoch))[places[inside]]
        return samples

    def _permutation(self, epoch: int) -> np.ndarray:
        found = self._permutations.get(epoch)
        if found is None:
            generator = torch.Generator().manual_seed(epoch)
            found = torch.randperm(self.num_samples, generator=generator).numpy()
            kept = {number: order for number, order in self._permutations.items() if abs(number - epoch) == 1}
            self._permutations = {**kept, epoch: found}
        return found


def order_of(dataset: GPTDataset | BlendedDataset, dataloader_type: str, name: str, wraps: bool = False) -> Order:
    """The order `--dataloader-type` asks for ("single" or "cyclic")."""
    if dataloader_type == "cyclic":
        return CyclicOrder(len(dataset), name)
    if dataloader_type == "single":
        return SequentialOrder(len(dataset), name, wraps)
    raise ValueError(f"--dataloader-type {dataloader_type}: single or cyclic")


class SampleLoader:
    """Microbatches of one data-parallel rank, one step at a time.

    With `num_workers` > 0 one thread reads the next step while this one trains; it is a thread because reading
    releases the interpreter lock and a process would have to copy every batch. What fails in it is raised by the
    `next_step` that would have returned the batch.
    """

    def __init__(
        self,
        dataset: GPTDataset | BlendedDataset,
        order: Order,
        *,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.consumed_samples = consumed_samples
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader") if num_workers else None
        self._prefetched: tuple[tuple[int, int], Future] | None = None

    def next_step(self, global_batch_size: int) -> list[dict[str, torch.Tensor]]:
        """The microbatches of this rank for the next step.

        tokens, labels, position_ids int64 [b, s]; loss_mask float32 [b, s]; sample_ids int64 [b]: positions in the
        run; document_ids int32 [b, s] with --reset-attention-mask. ValueError when the batch cannot be divided or
        the data ends.
        """
        step = (self.consumed_samples, global_batch_size)
        if self._prefetched is not None and self._prefetched[0] == step:
            batches = self._prefetched[1].result()
        else:
            batches = self._read(*step)
        self.consumed_samples += global_batch_size
        if self._thread is not None:
            step = (self.consumed_samples, global_batch_size)
            self._prefetched = (step, self._thread.submit(self._read, *step))
        return batches

    def close(self) -> None:
        """Ends the reading thread."""
        self._prefetched = None
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _read(self, consumed: int, global_batch_size: int) -> list[dict[str, torch.Tensor]]:
        block = self.micro_batch_size * self.dp_size
        if global_batch_size < 1 or global_batch_size % block:
            raise ValueError(
                f"a global batch of {global_batch_size} samples is not a multiple of --micro-batch-size"
                f" {self.micro_batch_size} x data-parallel size {self.dp_size}"
            )
        samples = self.order.samples_at(np.arange(consumed, consumed + global_batch_size, dtype=np.int64))
        batches = []
        for start in range(self.dp_rank * self.micro_batch_size, global_batch_size, block):
            fields = fields_of(self.dataset, samples[start : start + self.micro_batch_size])
            batch = {name: torch.from_numpy(array) for name, array in fields.items()}
            batch["sample_ids"] = torch.arange(consumed + start, consumed + start + self.micro_batch_size)
            batches.append(batch)
        return batches
