#!/usr/bin/env bash
# The comparison in README.md: the plain block and the sandwich block, same data, same order, same initial weights.
#
#   bash examples/sandwich_norm/run.sh                               one after the other, a few minutes each on one core
#   bash examples/sandwich_norm/run.sh --lr 5e-4 --min-lr 5e-5       any flag overrides
#
# PYTHON is the interpreter (default: python3), WORK the folder of data and logs (default: .quickstart/sandwich_norm).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
work=${WORK:-.quickstart/sandwich_norm}
mkdir -p "$work"

if [[ ! -f $work/bytes_text_document.idx ]]; then
    "$PYTHON" tools/build_stdlib_corpus.py --output "$work/corpus.jsonl" --megabytes 22
    "$PYTHON" tools/preprocess_data.py --input "$work/corpus.jsonl" --output-prefix "$work/bytes" \
        --tokenizer-type ByteTokenizer --append-eod --workers 1
fi

ARGS=(
    --num-layers 6
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 256
    --max-position-embeddings 256
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --hidden-dropout 0
    --attention-dropout 0
    --micro-batch-size 8
    --global-batch-size 8
    --train-iters 500
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta2 0.95
    --data-path "$work/bytes_text_document"
    --split 90,10,0
    --tokenizer-type ByteTokenizer
    --eval-interval 250
    --eval-iters 32
    --log-interval 50
    --num-workers 0
)
run() { # NAME FLAGS...
    echo "== $1"
    "$PYTHON" examples/sandwich_norm/pretrain_sandwich_norm.py "${ARGS[@]}" "${@:2}" 2>&1 | tee "$work/$1.log"
}
run plain --sandwich-norm none "$@"
run sandwich --sandwich-norm both "$@"
run sandwich-0.1 --sandwich-norm both --sandwich-norm-init 0.1 "$@"
grep -H "validation loss" "$work"/{plain,sandwich,sandwich-0.1}.log
