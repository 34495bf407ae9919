"""Training, validation and test sets from the flags that describe them.

`data_plan` reads the flags into a value; `build_splits` builds what it says. Every rank may call it by itself: the
result depends on the files and the plan only, and there is no barrier.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.datasets.blend import Blend, BlendedDataset, normalized, parse_blend, share_of_samples
from megatron.datasets.gpt import GPTDataset, SampleRules, TokenSource
from megatron.datasets.index_cache import IndexCache
from megatron.datasets.indexed import IndexedDataset
from megatron.datasets.masks import MaskRules
from megatron.datasets.mock import MockSource
from megatron.datasets.split import SPLIT_NAMES, SplitRange, parse_split, split_sequences
from megatron.datasets.tokenizer import Tokenizer, token_rows

if TYPE_CHECKING:
    from megatron.config.run import RunConfig

DEFAULT_SPLIT = "969,30,1"
MOCK_SPLIT = "1,1,1"
WHOLE = SplitRange(0.0, 1.0)

Dataset = GPTDataset | BlendedDataset


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """Where samples come from and how they are cut: exactly one of blend, blend_per_split and mock_vocab_size."""

    sequence_length: int
    seed: int
    masks: MaskRules
    blend: Blend | None = None
    split: str | None = None
    blend_per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None
    mock_vocab_size: int | None = None
    surplus: float = 0.005
    mmap: bool = True
    cache_path: str | None = None
    extra_tokens: int = 1
    keep_last_partial_valid: bool = False


def build_datasets(
    config: RunConfig, tokenizer: Tokenizer, sizes: Sequence[int | None]
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """(train, valid, test) of a run. `sizes`: samples wanted of each; None means one epoch, 0 means none needed."""
    return build_splits(data_plan(config, tokenizer), sizes)


def data_plan(config: RunConfig, tokenizer: Tokenizer) -> DataPlan:
    """The plan the data flags ask for. That they name exactly one source, the configuration has checked."""
    data = config.data
    blend, per_split = None, None
    if data.data_path is not None:
        blend = parse_blend(data.data_path, "--data-path")
    elif data.data_args_path is not None:
        blend = parse_blend(_words(data.data_args_path, "--data-args-path"), "--data-args-path")
    elif data.per_split_data_args_path is not None:
        per_split = _read_per_split(data.per_split_data_args_path)
    elif not data.mock_data:
        paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
        per_split = tuple(
            None if path is None else parse_blend(path, f"--{name}-data-path") for name, path in zip(SPLIT_NAMES, paths)
        )
    vocab_room = config.vocab_room(tokenizer.vocab_size)
    return DataPlan(
        sequence_length=data.seq_length,
        seed=config.training.seed,
        masks=MaskRules(
            eod=tokenizer.eod,
            pad=padding_id(tokenizer, data.allow_ambiguous_pad_tokens),
            num_ids=token_rows(tokenizer, vocab_room) if config.model.mask_vocab_padding else vocab_room,
            eod_mask_loss=data.eod_mask_loss,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
        ),
        blend=blend,
        split=data.split or DEFAULT_SPLIT,
        blend_per_split=per_split,
        mock_vocab_size=tokenizer.vocab_size if data.mock_data else None,
        surplus=data.mid_level_dataset_surplus,
        mmap=data.mmap_bin_files,
        cache_path=data.data_cache_path,
    )


def padding_id(tokenizer: Tokenizer, allow_ambiguous: bool) -> int:
    """The id whose labels carry no loss: the tokenizer's, or -1 when it has none or it also means something else."""
    pad = tokenizer.pad
    if pad is None or (pad in tokenizer.special_ids and not allow_ambiguous):
        return -1
    return pad


def _words(path: str, flag: str) -> list[str]:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{flag} {path}: no such file")
    return file.read_text().split()


def _read_per_split(path: str) -> tuple[Blend | None, ...]:
    flag = "--per-split-data-args-path"
    try:
        record = json.loads(" ".join(_words(path, flag)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {path} is not JSON: {error}") from None
    if not isinstance(record, dict) or set(record) != set(SPLIT_NAMES):
        raise ValueError(f"{flag} {path} must be a JSON object with the keys train, valid and test")
    blends = []
    for name in SPLIT_NAMES:
        items = record[name].split() if isinstance(record[name], str) else record[name]
        blends.append(None if not items else parse_blend([str(item) for item in items], f"{flag} {path}, {name}"))
    return tuple(blends)


@dataclass
class SplitBuilder:
    """Builds the data sets of one plan, opening each pair of files once."""

    plan: DataPlan
    cache: IndexCache | None
    sources: dict[str, TokenSource] = field(default_factory=dict)

    def source(self, prefix: str) -> TokenSource:
        if prefix not in self.sources:
            self.sources[prefix] = IndexedDataset(prefix, self.plan.mmap)
        return self.sources[prefix]

    def dataset(self, source: TokenSource, share: SplitRange, split: str, num_samples: int | None) -> GPTDataset:
        """Samples of one source; ValueError when its share cannot give any."""
        plan = self.plan
        rules = SampleRules(
            sequence_length=plan.sequence_length,
            seed=plan.seed,
            extra_tokens=plan.extra_tokens,
            keep_last_partial=plan.keep_last_partial_valid and split == "valid",
        )
        sequences = split_sequences(share, len(source.sequence_lengths))
        return GPTDataset(source, sequences, num_samples, rules, plan.masks, self.cache)

    def single(self, prefix: str, share: SplitRange, split: str, size: int | None) -> GPTDataset | None:
        """One source alone; None when nothing is wanted of it and it holds nothing."""
        return self._named(prefix, self.source(prefix), share, split, size, is_required=size != 0)

    def _named(
        self, name: str, source: TokenSource, share: SplitRange, split: str, size: int | None, is_required: bool
    ) -> GPTDataset | None:
        try:
            return self.dataset(source, share, split, size)
        except ValueError as error:
            if not is_required:
                return None
            wanted = "one epoch" if size is None else f"{size} samples"
            raise ValueError(
                f"{name}: {wanted} are wanted for {split}, but of its {len(source.sequence_lengths)} sequences {error}."
                " Give that split a larger share with --split, more data or its own --"
                f"{split}-data-path, or ask for none of it (--eval-iters 0)"
            ) from None
        except MemoryError:
            raise ValueError(
                f"{name}: the order of {size} samples for {split} does not fit into memory; ask for fewer with"
                " --train-iters or --train-samples"
            ) from None

    def blended(self, blend: Blend, share: SplitRange, split: str, size: int | None) -> BlendedDataset | None:
        """Several sources; None when no sample is wanted."""
        if size == 0:
            return None
        if blend.weights is None:
            datasets = [
                self._named(prefix, self.source(prefix), share, split, None, is_required=False)
                for prefix in blend.prefixes
            ]
            lengths = [0 if dataset is None else len(dataset) for dataset in datasets]
            if not sum(lengths):
                raise ValueError(f"none of {', '.join(blend.prefixes)} holds a sample for {split}")
            draws = None if size is None else min(size, sum(lengths))
            return BlendedDataset(datasets, lengths, draws, self.cache)
        if size is None:
            raise ValueError(f"weights of {', '.join(blend.prefixes)} need a number of samples; one epoch is undefined")
        weights, datasets = normalized(blend.weights), []
        for prefix, weight in zip(blend.prefixes, weights):
            source = self.source(prefix)
            wanted = share_of_samples(weight, size, self.plan.surplus)
            datasets.append(self._named(prefix, source, share, split, wanted, True) if weight > 0 else None)
        draws = sum(share_of_samples(weight, size) for weight in weights)
        return BlendedDataset(datasets, weights, draws, self.cache)


def build_splits(plan: DataPlan, sizes: Sequence[int | None]) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Builds what the plan says. A split is None when it has no source, an empty share, or is not needed."""
    builder = SplitBuilder(plan, None if plan.cache_path is None else IndexCache(plan.cache_path))
    if plan.blend_per_split is not None:
        jobs = [(blend, WHOLE, False) for blend in plan.blend_per_split]
    elif plan.mock_vocab_size is not None:
        builder.sources["mock data"] = MockSource(plan.mock_vocab_size, plan.masks.eod)
        jobs = [(Blend(("mock data",), None), share, False) for share in parse_split(MOCK_SPLIT)]
    else:
        jobs = [(plan.blend, share, plan.blend.weights is not None) for share in parse_split(plan.split)]
    datasets = []
    for (blend, share, is_blend_of_one), split, size in zip(jobs, SPLIT_NAMES, sizes):
        if blend is None or share is None:
            datasets.append(None)
        elif len(blend.prefixes) == 1 and not is_blend_of_one:
            datasets.append(builder.single(blend.prefixes[0], share, split, size))
        else:
            datasets.append(builder.blended(blend, share, split, size))
    return tuple(datasets)
