#!/usr/bin/env bash
# From a fresh machine to a trained language model: environment, corpus, tokenizer, data, training, resume, text.
#
#   bash examples/quickstart.sh
#
# Needs Python 3.10 to 3.13 and PyPI; no GPU, no data, no argument. Trains a Llama-style model of about 10 M parameters
# in bf16 on 2 processes (two GPUs where there are two, else the CPU): first as two tensor-parallel ranks, stopped
# halfway, then resumed as two pipeline stages. Everything is kept in .quickstart; a second run reuses what is there,
# and deleting the folder (or .quickstart/run, to train again) starts anew. QUICKSTART_DIR, QUICKSTART_ITERS and
# QUICKSTART_MEGABYTES change where, how long and on how much text.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
work=${QUICKSTART_DIR:-$root/.quickstart}
run=$work/run
started=$SECONDS

MEGABYTES=${QUICKSTART_MEGABYTES:-22}
TRAIN_ITERS=${QUICKSTART_ITERS:-100}
HALFWAY=$((TRAIN_ITERS / 2))

stage() {
    printf '\n\033[1m[%s/9] %s\033[0m  (%d s)\n' "$1" "$2" $((SECONDS - started))
}

stage 1 "Python environment"
source scripts/environment.sh
prepare_environment "$root"
started=$SECONDS  # what follows is the quickstart itself
mkdir -p "$work"

stage 2 "corpus: the Python standard library's sources and docstrings"
if [[ -f $work/corpus.jsonl ]]; then
    echo "reusing $work/corpus.jsonl"
else
    "$PYTHON" tools/build_stdlib_corpus.py --output "$work/corpus.jsonl" --megabytes "$MEGABYTES"
fi

stage 3 "tokenizer: SentencePiece, 8,192 pieces"
if [[ -f $work/tokenizer.model ]]; then
    echo "reusing $work/tokenizer.model"
else
    "$PYTHON" tools/train_tokenizer.py --input "$work/corpus.jsonl" --output "$work/tokenizer.model" --vocab-size 8192
fi

stage 4 "data: text to token ids (.bin/.idx)"
data=$work/corpus_text_document
if [[ -f $data.idx && $data.idx -nt $work/tokenizer.model ]]; then
    echo "reusing $data.bin and .idx"
else
    "$PYTHON" tools/preprocess_data.py \
        --input "$work/corpus.jsonl" --output-prefix "$work/corpus" --append-eod --workers 2 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$work/tokenizer.model"
fi

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 320
    --ffn-hidden-size 864
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 4
    --seq-length 256
    --max-position-embeddings 256
    --position-embedding-type rope
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0
    --attention-dropout 0
)
TRAINING_ARGS=(
    --bf16
    --global-batch-size 8
    --train-iters "$TRAIN_ITERS"
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta2 0.95
)
DATA_ARGS=(
    --data-path "$data"
    --split 96,2,2
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$work/tokenizer.model"
    --data-cache-path "$work/data_cache"
    --num-workers 0
)
LOGGING_ARGS=(
    --log-interval 10
    --eval-interval "$HALFWAY"
    --eval-iters 6
    --save "$run/checkpoints"
    --load "$run/checkpoints"
    --save-interval "$HALFWAY"
    --tensorboard-dir "$run/tensorboard"
    --metrics-file "$run/metrics.jsonl"
    --progress-bar on
)

# Two GPUs where there are two; otherwise two processes on the CPU, one core each.
if "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    BACKEND=nccl
else
    BACKEND=gloo
    export OMP_NUM_THREADS=1
fi
train() {
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py \
        "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" \
        --distributed-backend "$BACKEND" "$@"
}
trained_to() {
    [[ -f $run/checkpoints/latest_checkpointed_iteration.txt ]] || { echo 0; return; }
    cat "$run/checkpoints/latest_checkpointed_iteration.txt"
}

stage 5 "training on two tensor-parallel ranks ($BACKEND), stopped at iteration $HALFWAY of $TRAIN_ITERS"
if (( $(trained_to) >= HALFWAY )); then
    echo "reusing the checkpoint of iteration $(trained_to)"
else
    rm -rf "$run"
    train --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 8 --exit-interval "$HALFWAY"
fi

stage 6 "resuming as two pipeline stages, evaluating at the end"
if (( $(trained_to) >= TRAIN_ITERS )); then
    echo "reusing the checkpoint of iteration $(trained_to)"
else
    # The output layer costs as much as two layers: three layers before the border, one behind it.
    train --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 --micro-batch-size 1
fi

stage 7 "what a model without context would reach"
# The final evaluation takes the third block of 6 batches of 8 samples (after those at halfway and at the end).
"$PYTHON" tools/unigram_loss.py --data-path "$data" --split 96,2,2 --vocab-size 8192 --seq-length 256 \
    --samples 96 144 | tee "$work/unigram.txt"
unigram=$(sed -n 's/.*tokens: //p' "$work/unigram.txt")

stage 8 "text from the checkpoint"
"$PYTHON" tools/generate_text.py --load "$run/checkpoints" --prompt "def read(self, path):" --prompt "import os" \
    --max-new-tokens 60 --temperature 0.7 --top-p 0.9 --seed 1

stage 9 "loss curve"
"$PYTHON" tools/plot_loss.py --metrics "$run/metrics.jsonl" --output "$run/loss.png" \
    --title "quickstart: TP 2, then PP 2" --baseline "unigram=$unigram"
validation=$("$PYTHON" - "$run/metrics.jsonl" <<'PY'
import json, sys

records = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
print(f"{[r['loss'] for r in records if r['event'] == 'eval' and r['split'] == 'valid'][-1]:.4f}")
PY
)

cat <<END

validation loss   $validation   (a unigram model of the same tokens: $unigram)
checkpoint        $run/checkpoints
TensorBoard logs  $run/tensorboard   ($PYTHON -m tensorboard.main --logdir $run/tensorboard)
metrics           $run/metrics.jsonl
loss plot         $run/loss.png
done in $((SECONDS - started)) s after the installation
END
