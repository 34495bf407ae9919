#!/usr/bin/env python3
"""Continues prompts with a trained model, on one process, from a checkpoint of any parallel layout.

    python tools/generate_text.py --load checkpoints/llama --prompt "def main(" --max-new-tokens 100
    python tools/generate_text.py --load checkpoints/llama --prompt-file prompts.txt --temperature 0.8 --top-p 0.95
    --seed 7

Model, precision and tokenizer come from the checkpoint; tokenizer flags override a path that has moved. Temperature 0
(the default) takes the likeliest token. A prompt's text depends on its own seed (--seed plus its number), not on the
others. Generation ends at the end-of-document token; beyond the model's sequence length it goes on with the latest
tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from megatron.checkpoint.catalog import find_checkpoint  # noqa: E402
from megatron.checkpoint.pieces import parameter_piece  # noqa: E402
from megatron.checkpoint.reader import Checkpoint  # noqa: E402
from megatron.config.flags import ConfigError  # noqa: E402
from megatron.config.run import RunConfig, parse  # noqa: E402
from megatron.datasets.tokenizer import Tokenizer, TokenizerOptions, build_tokenizer, token_rows  # noqa: E402
from megatron.distributed.context import ParallelContext, single_process_context  # noqa: E402
from megatron.distributed.device import has_gpu, local_device  # noqa: E402
from megatron.models.gpt import build_stages  # noqa: E402

TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
MAX_SEED = 2**63 - 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Logits = Callable[[torch.Tensor], torch.Tensor]
"""int64 tokens [b, s] -> the logits [b, s, vocabulary] of the token after each."""


def make_parser() -> argparse.ArgumentParser:
    """The tool's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--load", required=True, help="directory of checkpoints, or one iter_* directory")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the newest save)")
    parser.add_argument(
        "--prompt", action="append", default=[], help="text to continue; give it several times for several"
    )
    parser.add_argument("--prompt-file", type=Path, help="a file with a prompt on each line")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens to add to each prompt (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token each time")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens only; 0: from all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this total probability"
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the draws (default: 1234)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="precision of the weights (default: as trained)")
    for name in TOKENIZER_FLAGS:
        parser.add_argument("--" + name.replace("_", "-"), help="in place of the checkpoint's")
    return parser


def check_options(args: argparse.Namespace) -> None:
    """ValueError for a sampling option that makes no sense."""
    if not math.isfinite(args.temperature):
        raise ValueError(f"--temperature {args.temperature} is not a finite number; 1 draws as the model says")
    if args.temperature < 0:
        raise ValueError(f"--temperature {args.temperature} is negative; 0 takes the likeliest token")
    if not 0 <= args.seed <= MAX_SEED:
        raise ValueError(f"--seed {args.seed} is not between 0 and {MAX_SEED}")
    if args.top_k < 0:
        raise ValueError(f"--top-k {args.top_k} is negative; 0 draws from all tokens")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p} is not above 0 and at most 1; 1 draws from all tokens")
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens} is below 1")
    if not args.prompt and args.prompt_file is None:
        raise ValueError("nothing to continue: give --prompt or --prompt-file (--prompt '' starts a document)")
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        raise ValueError(
            "--top-k and --top-p choose among draws, and --temperature 0 draws nothing; add --temperature 1"
        )


def prompts_of(args: argparse.Namespace) -> list[str]:
    """All prompts, those of the command line first."""
    if args.prompt_file is None:
        return args.prompt
    try:
        from_file = args.prompt_file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {args.prompt_file} is not UTF-8: byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"--prompt-file {args.prompt_file}: {error.strerror}") from None
    if not args.prompt and not from_file:
        raise ValueError(f"--prompt-file {args.prompt_file} is empty; an empty line starts a document")
    return [*args.prompt, *from_file]


def configuration(checkpoint: Checkpoint, args: argparse.Namespace) -> RunConfig:
    """The stored model on one process; flags typed here win over what was stored."""
    precision = args.dtype or stored_dtype(checkpoint)
    argv = ["--use-checkpoint-args", "--load", args.load, "--hidden-dropout", "0", "--attention-dropout", "0"]
    argv += [] if precision == "fp32" else [f"--{precision}"]
    for name in TOKENIZER_FLAGS:
        if getattr(args, name) is not None:
            argv += ["--" + name.replace("_", "-"), getattr(args, name)]
    needed = {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-3, "mock_data": True}
    return parse(argv, 1, read_stored=lambda _: checkpoint.config, fill_in=lambda _: needed)


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The precision the weights were trained in."""
    dtype = checkpoint.dtype(checkpoint.names("param")[0])
    return next(name for name, known in DTYPES.items() if known == dtype)


def load_model(checkpoint: Checkpoint, config: RunConfig, ctx: ParallelContext, vocab_size: int) -> torch.nn.Module:
    """The whole network as one stage, with the checkpoint's weights, in evaluation mode."""
    (stage,) = build_stages(config, ctx, vocab_size)
    parameters = [(p.spec, p) for p in stage.parameters()]
    checkpoint.read_into(parameter_piece(spec, ctx.mesh, ctx.coords, parameter) for spec, parameter in parameters)
    return stage.eval()


def logits_of(stage: torch.nn.Module, device: torch.device) -> Logits:
    """The function from tokens to next-token logits that a one-stage model computes."""

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor:
        tokens = tokens_BS.to(device)
        position_ids = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        batch = {
            "tokens": tokens,
            "position_ids": position_ids,
            "sample_ids": torch.zeros(len(tokens), dtype=torch.int64, device=device),
        }
        return stage.logits(None, batch)

    return logits


def choose(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
) -> int:
    """One token from fp32 logits on the CPU: the likeliest at temperature 0, else a draw among those that top-k and
    top-p leave.

    Nucleus sampling (Holtzman et al., arXiv 1904.09751, section 3.1): the fewest likeliest tokens whose probabilities,
    after the temperature, sum to at least top_p.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    ordered, tokens = torch.sort(logits_V / temperature, descending=True, stable=True)
    if top_k:
        ordered, tokens = ordered[:top_k], tokens[:top_k]
    probabilities = torch.softmax(ordered.double(), dim=0)
    before = probabilities.cumsum(0) - probabilities
    probabilities = probabilities * (before < top_p)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@torch.inference_mode()
def generate(
    logits: Logits,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    context: int,
    vocab_size: int,
    eod: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
) -> list[list[int]]:
    """The new tokens of each prompt (not empty), without the `eod` that may have ended it.

    `context` is the most tokens that `logits` is given: the latest ones. Columns from `vocab_size` on are padding and
    are never chosen. Shorter rows of a batch are padded behind their end, where causal attention does not look.
    """
    texts = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed + number) for number in range(len(texts))]
    open_rows = list(range(len(texts)))
    for _ in range(max_new_tokens):
        windows = [texts[row][-context:] for row in open_rows]
        longest = max(map(len, windows))
        tokens = torch.tensor([window + [0] * (longest - len(window)) for window in windows])
        out = logits(tokens)
        last = torch.tensor([len(window) - 1 for window in windows], device=out.device)
        picked = out[torch.arange(len(windows), device=out.device), last, :vocab_size].float().cpu()
        for row, scores in zip(list(open_rows), picked, strict=True):
            token = choose(scores, temperature, top_k, top_p, generators[row])
            if token == eod:
                open_rows.remove(row)
            else:
                texts[row].append(token)
        if not open_rows:
            break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's tokens; an empty one starts after an end of document, as documents do in training."""
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError(f"--prompt {prompt!r} is not UTF-8")
    return tokenizer.tokenize(prompt) or [tokenizer.eod]


def run(args: argparse.Namespace) -> list[str]:
    """The prompts with their continuations."""
    check_options(args)
    prompts = prompts_of(args)
    with Checkpoint(find_checkpoint(args.load, ckpt_step=args.ckpt_step, required=True)[0]) as checkpoint:
        config = configuration(checkpoint, args)
        tokenizer = build_tokenizer(TokenizerOptions.of(config.data))
        dtype = DTYPES[config.params_dtype_name]
        device = local_device("nccl" if has_gpu() else "gloo", 0)
        ctx = single_process_context(device=device, params_dtype=dtype)
        vocab_size = token_rows(tokenizer, config.vocab_room(tokenizer.vocab_size))
        stage = load_model(checkpoint, config, ctx, vocab_size)
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    added = generate(
        logits_of(stage, device),
        encoded,
        max_new_tokens=args.max_new_tokens,
        context=config.data.seq_length,
        vocab_size=vocab_size,
        eod=tokenizer.eod,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    starts = [ids if prompt else [] for ids, prompt in zip(encoded, prompts, strict=True)]
    return [tokenizer.detokenize([*start, *new]) for start, new in zip(starts, added, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = make_parser().parse_args(argv)
    try:
        texts = run(args)
    except ConfigError as error:
        print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number, text in enumerate(texts, start=1):
        if len(texts) > 1:
            print(f"{'' if number == 1 else chr(10)}--- {number} of {len(texts)} ---")
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
