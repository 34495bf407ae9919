"""What the model reads: corpora, how samples are cut from them, and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    seq_length: int | None = flag(None)
    """Tokens of one training sequence. Required."""
    data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """Prefixes of .bin/.idx pairs, or weights and prefixes in turn: 0.3 A 0.7 B."""
    train_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """As --data-path, for training only."""
    valid_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """As --data-path, for validation only."""
    test_data_path: tuple[str, ...] | None = flag(None, nargs="*")
    """As --data-path, for the test only."""
    data_args_path: str | None = flag(None)
    """File that holds what --data-path would."""
    per_split_data_args_path: str | None = flag(None)
    """JSON file with the keys train, valid and test, each holding what --data-path would."""
    split: str | None = flag(None)
    """Shares of training, validation and test, as in 969,30,1. None: 969,30,1 with --data-path."""
    data_cache_path: str | None = flag(None)
    """Directory of the sample indices. None: beside each data set."""
    mock_data: bool = flag(False)
    """Made-up documents; needs no file."""
    mid_level_dataset_surplus: float = flag(0.005)
    """Share of spare samples drawn from each data set of a blend."""
    eod_mask_loss: bool = flag(False)
    """No loss where the input token is end-of-document."""
    reset_position_ids: bool = flag(False)
    """Count positions from 0 after each end-of-document."""
    reset_attention_mask: bool = flag(False)
    """Keep attention within documents."""
    allow_ambiguous_pad_tokens: bool = flag(False)
    """Let the padding token be one that also has another meaning."""
    dataloader_type: str | None = flag(None, choices=("single", "cyclic", "external"))
    """single: samples in the order of the data set; cyclic: a new permutation each epoch. None: single. external is not
    supported."""
    num_workers: int = flag(2)
    """Loader processes on each rank. 0: load in the training process."""
    mmap_bin_files: bool = flag(True, names=("--no-mmap-bin-files",))
    """Read .bin files by seek and read instead of mapping them into memory."""
    tokenizer_type: str | None = flag(
        None,
        choices=(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "NullTokenizer",
            "ByteTokenizer",
        ),
    )
    """Kind of tokenizer. ByteTokenizer needs no file; NullTokenizer needs --vocab-size."""
    tokenizer_model: str | None = flag(None)
    """File or directory of the tokenizer."""
    vocab_size: int | None = flag(None)
    """Tokens of the vocabulary before padding. None: as the tokenizer says."""
    vocab_file: str | None = flag(None)
    """vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = flag(None)
    """merges.txt of GPT2BPETokenizer."""
    vocab_extra_ids: int = flag(0)
    """Extra tokens added to the vocabulary."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Pre-tokenisation pattern of TikTokenizer. None: v2."""
    tiktoken_num_special_tokens: int = flag(1000)
    """Special tokens of TikTokenizer, placed first."""
    tokenizer_special_tokens: tuple[str, ...] | None = flag(None, nargs="+")
    """Special tokens of TikTokenizer or SentencePieceTokenizer."""
    trust_remote_code: bool = flag(False)
    """Let HuggingFaceTokenizer run code that comes with the tokenizer."""
    null_tokenizer_eod_id: int | None = flag(None)
    """End-of-document token of NullTokenizer. None: the vocabulary size."""
    null_tokenizer_pad_id: int = flag(-1)
    """Padding token of NullTokenizer. -1: none."""

    def __post_init__(self) -> None:
        pass
