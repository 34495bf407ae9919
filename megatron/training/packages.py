"""Optional packages: a flag that needs one which is not installed is refused at the start, before torch is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

from megatron.config.run import RunConfig


class Need(NamedTuple):
    """A flag in use, the module it imports, and what installs it."""

    flag: str
    module: str
    install: str


def needs(config: RunConfig) -> Iterator[Need]:
    """What the flags of this run import beside the core."""
    logging, optimizer, tokenizer = config.logging, config.optimizer, config.data.tokenizer_type
    if tokenizer in ("HuggingFaceTokenizer", "GPT2BPETokenizer"):
        yield Need(f"--tokenizer-type {tokenizer}", "tokenizers", "pip install tokenizers")
    if tokenizer == "TikTokenizer":
        yield Need("--tokenizer-type TikTokenizer", "tiktoken", "pip install tiktoken")
    if logging.wandb_project:
        yield Need(f"--wandb-project {logging.wandb_project}", "wandb", "pip install wandb")
    if logging.tensorboard_dir:
        yield Need(f"--tensorboard-dir {logging.tensorboard_dir}", "tensorboard", "pip install tensorboard")
    if optimizer.adam_backend == "apex":
        yield Need("--adam-backend apex", "apex", "build NVIDIA apex with --cpp_ext --cuda_ext")
    if optimizer.adam_backend == "transformer_engine":
        install = "pip install transformer-engine[pytorch]"
        yield Need("--adam-backend transformer_engine", "transformer_engine", install)


def check_packages(config: RunConfig) -> None:
    """ValueError, a line for each flag whose package is not installed."""
    missing = [need for need in needs(config) if importlib.util.find_spec(need.module) is None]
    if missing:
        raise ValueError(
            "\n".join(
                f"{need.flag} needs the package {need.module}, which is not installed; "
                f"{need.install}, or leave the flag out"
                for need in missing
            )
        )
