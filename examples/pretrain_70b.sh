#!/usr/bin/env bash
# Pretrain a 70 B Llama-3-style model on 64 nodes of 8 GPUs: tensor 8 x pipeline 4 (interleaved) x data 16.
#
#   bash examples/pretrain_70b.sh                      on each node; or once: sbatch scripts/slurm_train.sbatch 70b
#   bash examples/pretrain_70b.sh --lr 1e-4 --seed 7   a flag given again at the end wins
#   bash examples/pretrain_70b.sh --check-config       all checks and what would run; no GPU or other node needed
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Cluster: scripts/slurm_train.sbatch sets it under Slurm; by hand, give each node its NODE_RANK, all one MASTER_ADDR.
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NUM_NODES:-${SLURM_NNODES:-64}}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}

# Paths: DATA_PATH may name several prefixes with their weights, "0.7 web 0.3 code".
DATA_PATH=${DATA_PATH:-$root/data/corpus_text_document}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-$root/data/tokenizer.json}
RUN_DIR=${RUN_DIR:-$root/runs/pretrain_70b}

MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0
    --attention-dropout 0
    --init-method-std 0.02
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 8  # within a node
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 5  # 4 chunks a stage: a quarter of the bubble
    --use-distributed-optimizer  # ZeRO-1: optimizer states over the 16 replicas
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING_ARGS=(
    --bf16
    --micro-batch-size 1
    --global-batch-size 2048
    --train-iters 900000  # about 15 T tokens
    --optimizer adam
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --lr 1.5e-4
    --min-lr 1.5e-6
    --lr-decay-style cosine
    --lr-warmup-iters 8000
)

DATA_ARGS=(
    --data-path $DATA_PATH
    --split 998,1,1
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --data-cache-path "$RUN_DIR/data_cache"
)

LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints"
    --save-interval 500
    --eval-interval 1000
    --eval-iters 20
    --exit-signal-handler
)

ARGS=(
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
)
cd "$root"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600  # seconds between torchrun's SIGTERM and SIGKILL: time for the last save
if [[ " $* " == *" --check-config "* ]]; then
    exec env WORLD_SIZE=$((NUM_NODES * GPUS_PER_NODE)) RANK=0 LOCAL_RANK=0 python3 pretrain_gpt.py "${ARGS[@]}"
fi
exec torchrun \
    --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    pretrain_gpt.py "${ARGS[@]}"
