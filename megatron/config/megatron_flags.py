"""What becomes of every flag of Megatron-LM: the same, another form of one of ours, without effect, or refused.

A flag that is a field of a configuration class is the same flag, with Megatron's type, default and meaning, unless
`DIFFERENCES` says how it differs. The others are listed here and in `megatron_refused`, which explains the notation.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

from megatron.config.megatron_refused import REFUSED


class Kind(enum.Enum):
    """What happens to a flag that is no field."""

    NO_EFFECT = "no effect"
    REFUSED = "refused"


class MegatronFlag(NamedTuple):
    """One spelling of Megatron-LM's that is no field."""

    kind: Kind
    arity: int | str  # values that follow: 0, 1 or "*"
    harmless: tuple[str, ...]
    sentence: str


# Old spelling -> words that take its place; a value that follows stays.
RENAMED: dict[str, tuple[str, ...]] = {
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--encoder-seq-length": ("--seq-length",),
    "--encoder-num-layers": ("--num-layers",),
    "--exit-signal-handler-for-training": ("--exit-signal-handler",),
}

# Field -> how its default or meaning is not Megatron's, and why.
DIFFERENCES: dict[str, str] = {
    "calculate_per_token_loss": "On by default: every unmasked token of the global batch weighs the same. "
    "--no-calculate-per-token-loss gives Megatron's mean of microbatch means.",
    "distributed_backend": "Default: nccl where every process has a GPU, else gloo; the same script runs on a laptop.",
    "data_parallel_sharding_strategy": "Needs no --use-megatron-fsdp; default: what --use-distributed-optimizer says.",
    "no_load_optim": "The default is false instead of None, with the same meaning.",
    "no_load_rng": "The default is false instead of None, with the same meaning.",
    "no_save_optim": "The default is false instead of None, with the same meaning.",
    "no_save_rng": "The default is false instead of None, with the same meaning.",
    "position_embedding_type": "yarn, mrope and relative are not yet supported.",
    "optimizer": "Only adam (AdamW) and sgd.",
    "tokenizer_type": "No BERT, multimodal or SFT tokenizers; ByteTokenizer is ours and needs no file.",
    "dataloader_type": "external is not supported.",
    "exit_signal_handler": "SIGTERM and SIGINT are handled without it; it adds --exit-signal.",
    "num_query_groups": "Refused without --group-query-attention, where Megatron ignores it.",
    "recompute_modules": "Only core_attn and mlp yet.",
    "profile_ranks": "None given: rank 0, where Megatron profiles no rank.",
    "step_batch_size_schedule": "Needs --train-samples, and processes that divide every batch of it.",
    "rampup_batch_size": "Works; Megatron accepts it and trains with the whole batch from the start.",
    "bias_gelu_fusion": "Only says which GELU: exact with the flag, else the tanh form where there are biases.",
    "activation_func_clamp_value": "Works with every gated MLP; Megatron's fused dense SwiGLU does not apply it.",
    "init_method_xavier_uniform": "Rows and columns are those of the whole matrix without vocabulary padding, so that "
    "every layout starts the same; Megatron counts those of a rank's shard.",
    "fp32_residual_connection": "Every sum is kept in fp32; Megatron's bias-dropout-add rounds it to the training "
    "precision.",
    "use_checkpoint_args": "A typed flag that contradicts the stored model is refused instead of overwritten.",
    "exit_on_missing_checkpoint": "Concerns an empty --load directory; one that does not exist is always an error.",
    "sequence_parallel": "Without effect on one tensor-parallel rank, and said so.",
}

NO_EFFECT: dict[str, str] = {
    "there is one implementation of the model": """
        --use-mcore-models --enable-experimental --transformer-impl= --DDP-impl=
    """,
    "which kernels are fused or chosen is not a setting; results are the same": """
        --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion
        --no-bias-dropout-fusion --no-persist-layer-norm --use-flash-attn --attention-backend=
        --flash-attention-version= --cross-entropy-loss-fusion --cross-entropy-fusion-impl= --disable-jit-fuser
        --use-te-activation-func --fused-residual-rmsnorm --use-transformer-engine-op-fuser
        --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
        --disable-bf16-reduced-precision-matmul --use-fused-weighted-squared-relu --use-grouped-gemm-for-dense-mlp
        --onnx-safe=
    """,
    "attention scores are always scaled and normalised in fp32": """
        --attention-softmax-in-fp32 --apply-query-key-layer-scaling
    """,
    "gradients are accumulated and reduced in fp32, unless --grad-reduce-in-bf16 asks otherwise": """
        --accumulate-allreduce-grads-in-fp32 --ddp-reduce-scatter-with-fp32-accumulation
        --ddp-param-name-patterns-for-fp32-local-accumulation=*
    """,
    "gradients are sums and divided once, by the number of tokens, before they are reduced": """
        --ddp-average-in-collective --no-gradient-reduce-div-fusion
    """,
    "initial values depend on seed, name and index of a weight: every layout and device starts the same": """
        --use-cpu-initialization --no-initialization --init-model-with-meta-device
    """,
    "random numbers come from counters, not from tracked generator states": """
        --te-rng-tracker --inference-rng-tracker
    """,
    "there are no checks that only run when asked for": """
        --test-mode
    """,
    "masks are never built by the loader": """
        --no-create-attention-mask-in-dataloader
    """,
    "how sample indices are built and opened is not a setting; samples are the same": """
        --num-dataset-builder-threads= --per-dataset-sequences-path= --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap
    """,
    "CUDA graphs are not used": """
        --cuda-graph-impl= --cuda-graph-warmup-steps= --cuda-graph-modules=* --cuda-graph-scope=* --enable-cuda-graph
        --external-cuda-graph --optimizer-cuda-graph
    """,
    "Transformer Engine's communication overlap is not used": """
        --tp-comm-overlap --tp-comm-overlap-cfg= --tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend=
        --no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs
        --no-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-bulk-wgrad --disable-tp-comm-bulk-dgrad
        --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --disable-tp-comm-split-ag
        --disable-tp-comm-split-rs
    """,
    "NCCL and its buffers are left at their own settings": """
        --use-nccl-ub --use-sharp --sharp-enabled-group= --nccl-communicator-config-path=
        --high-priority-stream-groups=* --high-priority-a2a-comm-stream --ddp-pad-buckets-for-high-nccl-busbw
        --disable-symmetric-registration --symmetric-ar-type= --create-all-gather-group --disable-gloo-process-groups
        --pipeline-model-parallel-comm-backend= --use-ring-exchange-p2p --suggested-communication-unit-size=
        --local-rank= --nccl-all-reduce-for-prefill
    """,
    "every message of the pipeline and every bucket is posted as early as its data allow": """
        --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush --no-align-grad-reduce
        --disable-align-grad-reduce --no-align-param-gather --no-use-layer-wise-param-layout
    """,
    "Python's garbage collector and the caching allocator are left at their own settings": """
        --manual-gc --manual-gc-interval= --no-manual-gc-eval --disable-manual-gc-eval --empty-unused-memory-level=
        --train-sync-interval=
    """,
    "checkpoints have one format, written in parallel by all ranks and verified on load; every layout can load it": """
        --ckpt-format= --dist-ckpt-strictness= --dist-ckpt-optim-fully-reshardable --dist-ckpt-save-pre-mcore-014
        --dist-ckpt-format= --dist-ckpt-workers= --auto-detect-ckpt-format --ckpt-fully-parallel-load
        --ckpt-fully-parallel-save --ckpt-fully-parallel-load-per-rank-objects
        --ckpt-fully-parallel-load-exchange-algo= --ckpt-fully-parallel-save-process-group=
        --ckpt-fully-parallel-load-process-group= --no-ckpt-fully-parallel-save --ckpt-assume-constant-structure
        --use-dist-ckpt --verify-integrity --no-ckpt-load-validate-sharding-integrity
        --disable-ckpt-load-validate-sharding-integrity --ckpt-drop-redundant-extra-state
        --distrib-optim-fully-reshardable-mem-efficient --no-strict-fsdp-dtensor-load
        --disable-strict-fsdp-dtensor-load --ckpt-pg-tensors-cache-path= --ckpt-pg-tensors-cache-create
        --no-save-tokenizer-assets --disable-save-tokenizer-assets --use-persistent-ckpt-worker --async-strategy=
        --async-ckpt-use-cpu-shm --async-ckpt-cpu-priority= --async-ckpt-io-priority=
    """,
    "nothing is reported to it": """
        --no-one-logger --one-logger-project= --one-logger-run-name= --one-logger-async --app-tag-run-name=
        --app-tag-run-version=
    """,
    "files are read and written through the file system": """
        --enable-msc --disable-msc
    """,
    "loader processes end with their rank": """
        --exit-signal-handler-for-dataloader
    """,
    "timings use no barrier of their own": """
        --no-barrier-with-level-1-timing
    """,
    "tokenizers are read from their files; no code that comes with them is run": """
        --trust-remote-code
    """,
    "the fast tokenizer is always used": """
        --tokenizer-hf-no-use-fast --use-gigatoken
    """,
}


@functools.lru_cache(maxsize=1)
def known_flags() -> dict[str, MegatronFlag]:
    """Every spelling of `NO_EFFECT` and `REFUSED`."""
    flags: dict[str, MegatronFlag] = {}
    for kind, table in ((Kind.NO_EFFECT, NO_EFFECT), (Kind.REFUSED, REFUSED)):
        for sentence, entries in table.items():
            for entry in entries.split():
                name, equals, values = entry.partition("=")
                arity = 0 if not equals else "*" if values == "*" else 1
                harmless = tuple(values.split("|")) if values not in ("", "*") else ()
                assert name not in flags, f"{name} is listed twice"
                flags[name] = MegatronFlag(kind, arity, harmless, sentence)
    return flags
