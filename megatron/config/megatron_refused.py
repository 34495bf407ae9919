"""Flags of Megatron-LM that are refused, by the sentence a user reads: not yet or never, and what to use.

Entries are written `--switch`, `--flag=` (one value) or `--flag=*` (several); `--flag=a|b` accepts the values a and b
in silence, because they ask for nothing that is missing.
"""

from __future__ import annotations

REFUSED: dict[str, str] = {
    "the flag is now --tensor-model-parallel-size": """
        --model-parallel-size=
    """,
    "the flag is now --micro-batch-size (with --global-batch-size for the whole batch)": """
        --batch-size=
    """,
    "the flag is now --lr-warmup-fraction, a share between 0 and 1": """
        --warmup=
    """,
    "the flag is now --recompute-granularity, with --recompute-method and --recompute-num-layers": """
        --checkpoint-activations --activations-checkpoint-method= --activations-checkpoint-num-layers=
        --checkpoint-num-layers=
    """,
    "kept activations are not yet split over the tensor-parallel group; use --sequence-parallel": """
        --distribute-saved-activations --distribute-checkpointed-activations
    """,
    "mixture of experts is not yet supported; drop it for a dense model": """
        --moe-router-load-balancing-type=* --moe-token-dispatcher-type= --moe-aux-loss-coeff=* --moe-ffn-hidden-size=
        --moe-grouped-gemm --moe-router-dtype= --moe-shared-expert-intermediate-size= --moe-router-score-function=
        --moe-router-topk-scaling-factor= --moe-router-enable-expert-bias --moe-layer-freq= --moe-permute-fusion
        --moe-router-pre-softmax --moe-router-bias-update-rate= --moe-router-num-groups= --moe-router-group-topk=
        --moe-z-loss-coeff= --moe-token-drop-policy= --moe-flex-dispatcher-backend= --moe-shared-expert-overlap
        --moe-shared-expert-gate --moe-pad-experts-for-cuda-graph-inference --moe-router-fusion --moe-latent-size=
        --moe-enable-routing-replay --moe-router-force-load-balancing --moe-per-layer-logging
        --moe-router-padding-for-quantization --moe-hybridep-num-sms= --moe-flex-dispatcher-num-sms=
        --moe-shared-expert-glu-interleave-size= --moe-router-padding-for-fp8 --moe-router-quantile-balancing-ema=
        --moe-router-force-biased= --moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias
        --moe-input-jitter-eps= --moe-enable-deepep --moe-permute-fusion-into-hybridep
        --moe-hybridep-pad-uneven-dispatch-inputs --moe-expert-capacity-factor= --moe-pad-expert-input-to-capacity
        --moe-apply-probs-on-input --moe-deepep-num-sms= --moe-hybridep-num-blocks-permute=
        --moe-hybridep-num-blocks-unpermute= --moe-hybridep-num-sms-preprocessing= --moe-ncclep-zero-copy
        --moe-dispatch-fwd-dtype= --moe-combine-bwd-dtype= --moe-mlp-glu-interleave-size=
        --moe-expert-rank-capacity-factor= --moe-paged-stash --moe-paged-stash-page-size=
        --moe-paged-stash-buffer-size-factor-cuda= --moe-paged-stash-buffer-size-factor-cpu= --moe-use-upcycling
        --moe-upcycling-granularity= --moe-routing-trace-path= --moe-routing-trace-max-training-iters=
        --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
        --expert-tensor-parallel-size=1 --expert-tensor-parallel-num-weight-shards= --overlap-moe-expert-parallel-comm
        --overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release
        --use-grouped-gemm-for-shared-expert --save-tokens-per-expert-interval= --delay-wgrad-compute
        --moe-layer-recompute
    """,
    "context parallelism is not yet supported; drop it": """
        --cp-comm-type=* --hierarchical-context-parallel-sizes=* --hybrid-context-parallel
        --max-seqlen-per-dp-cp-rank=
    """,
    "FP8 and FP4 are not yet supported; use --bf16": """
        --fp8-format= --fp8-param-gather --fp8-recipe= --fp8-amax-history-len= --fp8-amax-compute-algo=
        --fp8-quantizer-factory= --fp8-margin= --fp8-interval= --fp8-output-proj --no-fp8-wgrad --disable-fp8-wgrad
        --fp4-format= --fp4-recipe= --fp4-quantizer-factory= --fp4-param-gather --first-last-layers-bf16
        --num-layers-at-start-in-bf16= --num-layers-at-end-in-bf16= --te-precision-config-file=
        --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag
    """,
    "sharding gradients and parameters is not yet supported; use --use-distributed-optimizer": """
        --use-megatron-fsdp --fsdp-double-buffer --megatron-fsdp-main-grads-dtype= --megatron-fsdp-grad-comm-dtype=
        --fsdp-manual-registration --megatron-fsdp-main-params-dtype= --use-torch-fsdp2 --megatron-fsdp-version=
        --torch-fsdp2-no-reshard-after-forward --megatron-fsdp-enable-fine-grained-param-gather
        --megatron-fsdp-max-pool-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail
        --outer-dp-sharding-strategy=no_shard --enable-full-sharding-in-hsdp --num-distributed-optimizer-instances=1
    """,
    "optimizer states and master weights are fp32; other formats are not yet supported": """
        --use-precision-aware-optimizer --main-grads-dtype=fp32 --main-params-dtype=fp32 --exp-avg-dtype=fp32
        --exp-avg-sq-dtype=fp32
    """,
    "offloading to host memory is not yet supported; use more parallelism": """
        --optimizer-cpu-offload --optimizer-offload-fraction=1|1.0 --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --cpu-offloading-num-layers=0
        --cpu-offloading-retain-pinned-cpu-buffers --fine-grained-activation-offloading
        --fine-grained-offloading-max-inflight-offloads= --offload-modules=* --min-offloaded-tensor-size=
        --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks= --activation-offload-fraction=1|1.0
    """,
    "this overlap is not yet supported; use --overlap-grad-reduce and --overlap-param-gather": """
        --overlap-param-gather-with-optimizer-step --defer-embedding-wgrad-compute --wgrad-deferral-limit=0
    """,
    "sharding weights inside the tensor-parallel group is not supported": """
        --tensor-parallel-num-weight-shards=1 --gtp-remat-opt-in-modules=*
        --gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub
    """,
    "saving in the background is not yet supported; drop it, checkpoints are saved synchronously": """
        --async-save
    """,
    "checkpoints on local disks or in memory are not yet supported; use --save and --save-interval": """
        --non-persistent-save-interval= --non-persistent-ckpt-type= --non-persistent-global-ckpt-dir=
        --non-persistent-local-ckpt-dir= --non-persistent-local-ckpt-algo= --replication --replication-jump=
        --replication-factor=
    """,
    "converting checkpoints while training is not supported": """
        --ckpt-convert-format= --ckpt-convert-save= --ckpt-convert-update-legacy-dist-opt-format
        --load-main-params-from-ckpt --override-ckpt-iteration=
    """,
    "layout and batch always come from the command line; give the sizes": """
        --use-mp-args-from-checkpoint-args
    """,
    "saving tensors of single steps is not supported": """
        --save-params-interval= --save-activations-interval= --save-wgrads-interval= --save-dgrads-interval=
        --dump-param-to-param-group-map= --config-logger-dir=
    """,
    "this way of profiling is not yet supported; use --profile, with --use-pytorch-profiler for a trace file": """
        --record-memory-history --memory-snapshot-path= --pytorch-profiler-collect-chakra --record-shapes --nvtx-ranges
    """,
    "this log is not yet supported": """
        --log-straggler --log-energy --log-device-memory-used --log-max-attention-logit
        --otel-enabled --otel-service-name= --otel-span-groups= --run-workload-inspector-server
    """,
    "the global batch is as given or the run does not start; give one that the processes divide": """
        --decrease-batch-size-if-needed
    """,
    "an evaluation is --eval-iters batches of one validation set; other ways are not yet supported": """
        --full-validation --multiple-validation-sets --validation-set-names=*
    """,
    "rerunning steps, checks for spikes and skipping chosen steps are not yet supported": """
        --rerun-mode=disabled --error-injection-rate=0 --error-injection-type= --check-for-large-grads
        --check-for-spiky-loss --check-weight-hash-across-dp-replicas-interval= --iterations-to-skip=*
        --result-rejected-tracker-filename= --gpu-sniff-test-interval= --batch-invariant-mode
        --batch-invariant-backend=
    """,
    "recovery inside a job, straggler detection and fault drills are not yet supported": """
        --inprocess-restart --inprocess-max-iterations= --inprocess-monitor-thread-interval=
        --inprocess-monitor-process-interval= --inprocess-progress-watchdog-interval= --inprocess-heartbeat-interval=
        --inprocess-soft-timeout= --inprocess-hard-timeout= --inprocess-heartbeat-timeout=
        --inprocess-barrier-timeout= --inprocess-completion-timeout= --inprocess-last-call-wait=
        --inprocess-termination-grace-time= --inprocess-granularity= --inprocess-active-world-size=
        --inprocess-empty-cuda-cache --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters=
        --straggler-minmax-count= --straggler-ctrlr-port= --disable-straggler-on-startup --fault-injector-ranks=
        --fault-injector-num-ranks= --fault-injector-fault-types= --fault-injector-fault-probabilities=
        --fault-injector-fault-delay= --fault-injector-delay-start-iteration= --fault-injector-mtti-seconds=
        --fault-injector-offset-seconds= --fault-injector-seed= --flight-recorder-dump-path=
        --flight-recorder-trace-buffer-size= --flight-recorder-include-stack-trace
        --no-flight-recorder-dump-on-timeout --no-flight-recorder-include-only-active
        --no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-dump-on-timeout
        --disable-flight-recorder-include-only-active --disable-flight-recorder-extra-dump-on-exec
        --distributed-timeout-seconds-after-init= --adlr-autoresume --adlr-autoresume-interval=
    """,
    "runs without a process group are not yet supported; --check-config checks without starting": """
        --fake-process-group --lazy-mpu-init
    """,
    "multi-latent attention is not yet supported; use multi-head or grouped-query attention": """
        --multi-latent-attention --kv-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim=
        --rotary-scaling-factor= --mscale= --mscale-all-dim= --q-lora-rank= --cache-mla-latents --mla-down-proj-fusion
    """,
    "multi-token prediction is not yet supported": """
        --mtp-num-layers= --mtp-loss-scaling-factor= --mtp-use-repeated-layer --mtp-standalone --mtp-detach-heads
        --mtp-hsm --mtp-hybrid-override-pattern=
    """,
    "only attention and MLP layers are built in; put another block in a folder of its own under examples/": """
        --experimental-attention-variant= --linear-conv-kernel-dim= --linear-key-head-dim= --linear-value-head-dim=
        --linear-num-key-heads= --linear-num-value-heads= --linear-attention-freq= --dsa-indexer-n-heads=
        --dsa-indexer-head-dim= --dsa-indexer-topk= --dsa-indexer-loss-coeff= --dsa-indexer-topk-freq=
        --dsa-indexer-skip-topk-offset= --dsa-indexer-use-sparse-loss --dsa-kernel-backend=
        --dsa-indexer-rope-interleaved --dsa-indexer-k-norm-epsilon= --dsa-indexer-k-norm-fp32
        --no-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu --disable-dsa-indexer-rotate-activation
        --disable-dsa-indexer-scoring-relu --gdp-num-householder= --gdp-cutedsl-kernel
        --gdp-num-chunk-states-to-recompute= --mamba-head-dim= --mamba-num-heads= --mamba-state-dim=
        --mamba-num-groups= --mamba-training-ssm-states-dtype= --mamba-inference-conv-states-dtype=
        --mamba-inference-ssm-states-dtype= --disable-mamba-mem-eff-path --hybrid-layer-pattern=
        --hybrid-override-pattern= --is-hybrid-model --enable-mhc-connections --mhc-num-residual-streams=
        --mhc-sinkhorn-iterations= --mhc-init-gating-factor= --mhc-recompute-layer-num=
        --heterogeneous-layers-config-path= --heterogeneous-layers-config-encoded-json= --attention-output-gate
        --use-kitchen-attention --kitchen-attention-backend= --spec=*
    """,
    "this variant of attention is not supported": """
        --softmax-type=vanilla --qk-l2-norm --qk-clip --qk-clip-alpha= --qk-clip-threshold=
    """,
    "the MLP is always computed at once": """
        --mlp-chunks-for-training=1
    """,
    "this position embedding is not yet supported; use rope (with --use-rope-scaling), learned_absolute or none": """
        --rope-type=rope --yarn-original-max-position-embeddings=
        --yarn-beta-fast= --yarn-beta-slow= --yarn-correction-range-round-to-int
        --no-yarn-correction-range-round-to-int --mrope-section=* --relative-attention-num-buckets=
        --relative-attention-max-distance=
    """,
    "only pre-norm layers are built in": """
        --apply-residual-connection-post-layernorm
    """,
    "the loss is always computed in fp32": """
        --output-logit-dtype=fp32 --fp16-lm-cross-entropy
    """,
    "this initialisation or scaling is not yet supported; use --init-method-std": """
        --data-parallel-random-init --use-mup --mup-base-hidden-size=
        --mup-width-mult=1|1.0 --mup-embedding-mult=1|1.0 --mup-output-mult=1|1.0 --mup-base-head-dim=
        --mup-attn-scale-power=
    """,
    "this rule for weight decay or frozen weights is not yet supported": """
        --no-weight-decay-cond-type= --freeze-all-layers
    """,
    "this optimizer is not supported; use --optimizer adam or sgd": """
        --muon-momentum= --muon-scale-mode= --muon-extra-scale-factor= --muon-no-split-qkv --muon-nesterov
        --muon-fp32-matmul-prec= --muon-coefficient-type= --muon-num-ns-steps= --muon-tp-mode= --muon-use-syrk
        --muon-scalar-optimizer= --lion-beta1= --lion-beta2=
    """,
    "fill-in-the-middle samples are not yet supported": """
        --fim-data --fim-rate= --fim-spm-rate= --fim-split-sample= --fim-fragment-rate= --fim-no-prefix=
        --fim-prefix-token= --fim-middle-token= --fim-suffix-token= --fim-pad-token= --fim-eod-token=
    """,
    "supervised fine-tuning is not supported": """
        --sft --sft-tokenizer-prompt-format= --chat-template=
    """,
    "documents are kept apart by --reset-attention-mask and --reset-position-ids; use them": """
        --dataloader-inter-document-masking
    """,
    "data in object storage is not yet supported; copy it to a file system": """
        --object-storage-cache-path=
    """,
    "the data of a run are one blend from start to end": """
        --phase-transition-iterations=
    """,
    "this tokenizer option is not supported": """
        --vocab-extra-ids=0 --tokenizer-metadata= --tokenizer-sentencepiece-legacy
        --tokenizer-hf-no-include-special-tokens --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces
    """,
    "flags in a file are given with --config": """
        --yaml-cfg=
    """,
    "distillation is not supported": """
        --logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k= --logits-save-dir= --logits-save-dtype=
        --logits-load-dir= --logits-load-decode-threads= --logits-load-prefetch-factor=
        --logits-load-msc-prefetch-depth= --logits-load-kd-loss-alpha= --logits-load-ignore-errors
    """,
    "reinforcement learning is not supported": """
        --grpo-prompts-per-step= --grpo-group-size= --grpo-iterations= --grpo-clamp-eps-lower= --grpo-clamp-eps-upper=
        --grpo-kl-beta= --langrl-env-config= --grpo-entropy-term-weight= --rl-use-sequence-packing
        --no-rl-use-sequence-packing --rl-sequence-packing-algo= --perform-rl-step --rl-generation-lag=
        --rl-offload-optimizer-during-inference --rl-partial-rollouts --no-rl-partial-rollouts
        --rl-inference-tensor-model-parallel-size= --rl-default-temperature= --rl-default-top-p= --refit-method=
        --rl-submission-granularity= --rl-consumption-granularity= --rl-kv-cache-management-mode=
        --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs --rl-training-cuda-graphs --no-rl-training-cuda-graphs
        --rl-inference-pipeline-model-parallel-size= --rl-inference-expert-model-parallel-size=
        --rl-inference-expert-tensor-model-parallel-size= --rl-inference-model-unified-memory-level=
        --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle
        --rl-prompts-per-eval= --rl-max-inflight-requests= --rl-durable-rollout-bank --rl-rollout-bank-dir=
        --rl-rollout-bank-max-bytes= --grpo-filter-groups-with-same-reward --rl-default-top-k=
        --rl-inference-logprobs-is-correction --no-rl-inference-logprobs-is-correction
        --rl-importance-sampling-truncation-coef= --rl-sequence-packing-max-sequences-per-bin=
        --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token --no-rl-skip-bos-token
        --rl-profile --rl-profile-dir= --rl-inference-parsers=*
    """,
    "there is no inference engine; tools/generate_text.py writes text from a checkpoint": """
        --inference-max-seq-length= --max-tokens-to-oom= --inference-dynamic-batching-buffer-size-gb=
        --inference-logging-step-interval= --inference-max-requests= --inference-dynamic-batching-prefix-caching
        --no-inference-dynamic-batching-prefix-caching --inference-dynamic-batching-max-requests=
        --inference-dynamic-batching-max-tokens= --inference-dynamic-batching-num-cuda-graphs=
        --use-legacy-static-engine --enable-chunked-prefill --inference-dynamic-batching-unified-memory-level=
        --decode-only-cuda-graphs --inference-dynamic-batching-prefix-caching-eviction-policy=
        --inference-dynamic-batching-block-size= --inference-dynamic-batching-sampling-backend=
        --inference-dynamic-batching-prefix-caching-coordinator-policy=
        --inference-dynamic-batching-cuda-graph-sizing-distribution= --inference-dynamic-batching-async-sched-mode=
        --inference-batch-times-seqlen-threshold= --output-bert-embeddings --bert-embedder-type=
        --inference-dynamic-batching --inference-dynamic-batching-paused-buffer-size-gb=
        --inference-dynamic-batching-mamba-memory-ratio= --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events --inference-cuda-graph-all-prefills
        --inference-cuda-graph-max-tokens= --num-speculative-tokens=0
        --inference-dynamic-batching-prefix-caching-routing-alpha=
        --inference-dynamic-batching-prefix-caching-mamba-gb=
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count= --use-same-sampling-seed-across-dp-ranks
        --inference-dynamic-batching-logprobs-mode= --inference-text-gen-server-logging
        --no-inference-text-gen-server-logging --inference-wandb-logging --no-inference-wandb-logging
        --inference-coordinator-port= --inference-use-synchronous-zmq-collectives
        --no-inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus
        --no-inference-disable-ep-consensus --inference-shards= --flash-decode --inference-fuse-tp-communication
        --inference-cuda-graph-scope= --inference-grouped-gemm-backend= --inference-moe-token-dispatcher-type=
        --inference-disable-triton-nvls-kernels --inference-moe-disable-fused-quant-kernels --mlp-chunks-for-prefill=
    """,
    "only GPT-style language models are supported": """
        --img-h= --img-w= --patch-dim= --num-classes= --num-channels= --classes-fraction= --data-per-class-fraction=
        --no-data-sharding --head-lr-mult= --vision-pretraining --vision-pretraining-type= --vision-backbone-type=
        --swin-backbone-type= --mask-type= --mask-factor= --iter-per-epoch= --dino-local-img-size=
        --dino-local-crops-number= --dino-head-hidden-size= --dino-bottleneck-size= --dino-freeze-last-layer=
        --dino-norm-last-layer --dino-warmup-teacher-temp= --dino-teacher-temp= --dino-warmup-teacher-temp-epochs=
        --ict-head-size= --biencoder-projection-dim= --biencoder-shared-query-context-model --ict-load= --bert-load=
        --titles-data-path= --query-in-block-prob= --use-one-sent-docs --evidence-data-path=
        --retriever-report-topk-accuracies=* --retriever-score-scaling --block-data-path= --embedding-path=
        --indexer-batch-size= --indexer-log-interval= --decoder-seq-length= --decoder-num-layers= --mask-prob=
        --short-seq-prob= --sample-rate=1|1.0 --bert-no-binary-head
    """,
}
