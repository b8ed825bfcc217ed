#!/usr/bin/env bash
# Trains a small model on Python source three ways: without a break; killed after a checkpoint; resumed from it. Then
# checks that the resumed run did exactly what the first one did, and writes demo/report.html. Needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

steps=20
save_at=10
kill_at=12
limit_seconds=1800
context_length=2048
data=demo/data/python
reference_log=demo/uninterrupted.jsonl
log=demo/steps.jsonl
python=.venv/bin/python
job=

main() {
    trap stop EXIT
    bash scripts/setup.sh
    mkdir -p demo
    rm -rf "$log" "$reference_log" demo/checkpoint
    "$python" -m scripts.demo.make_data --output "$data" --context-length "$context_length"
    choose_layout
    choose_model

    echo "== $steps steps without a break"
    train uninterrupted "$reference_log"
    finish uninterrupted
    echo "== the same, killed after step $kill_at; the checkpoint is of step $save_at"
    train interrupted "$log" --save demo/checkpoint --save-interval "$save_at"
    kill_after_step interrupted "$kill_at"
    echo "== resumed from the checkpoint"
    train resumed "$log" --load demo/checkpoint
    finish resumed

    "$python" scripts/demo/check_resume.py "$log" "$reference_log"
    "$python" scripts/demo/report.py --log "$log" --reference-log "$reference_log" --data "$data" \
        --context-length "$context_length" --output demo/report.html --picture demo/report.png
    echo "demo/report.html written; $SECONDS seconds in all"
}

choose_layout() {
    local gpus
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null)
    local pipeline=(--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2)
    case $gpus in
        1) processes=1 layout=() ;;
        2 | 3) processes=2 layout=(--context-parallel-size 2) ;;
        0 | [4-7]) processes=4 layout=(--context-parallel-size 2 "${pipeline[@]}") ;;
        *)
            processes=8
            layout=(--context-parallel-size 2 "${pipeline[@]}" --tensor-model-parallel-size 2 --sequence-parallel)
            ;;
    esac
    if [[ $gpus == 0 ]]; then
        layout+=(--distributed-backend gloo) # asks for the CPU
    else
        # Otherwise atomics in backward add in another order every time, and no two runs are equal to the bit.
        layout+=(--bf16 --deterministic-mode)
        if ! "$python" -c 'import transformer_engine' 2>/dev/null; then
            layout+=(--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion)
            layout+=(--no-gradient-accumulation-fusion --no-rope-fusion)
        fi
    fi
    echo "== $processes processes, $gpus GPUs: ${layout[*]}"
}

choose_model() {
    local vocab_size
    vocab_size=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["vocab_size"])' "$data.json")
    flags=(
        --num-layers 4 --hidden-size 128 --ffn-hidden-size 384
        --num-attention-heads 8 --group-query-attention --num-query-groups 2
        --seq-length "$context_length" --max-position-embeddings "$context_length"
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --micro-batch-size 1 --global-batch-size 8 --train-iters "$steps"
        --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0
        --tokenizer-type NullTokenizer --vocab-size "$vocab_size" --data-path "$data" --split '100,0,0'
        --eval-iters 0 --log-interval 1 --ckpt-format torch_dist --calculate-per-token-loss
        --wlb --wlb-packing wlb --wlb-outlier-thresholds '768,1536' --wlb-max-tokens 3072
    )
}

# train NAME LOG [FLAG...]: starts a run in the background and shows our lines of its output, demo/NAME.txt.
train() {
    local name=$1 wlb_log=$2
    shift 2
    : >"demo/$name.txt"
    CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" pretrain_gpt.py \
        "${layout[@]}" "${flags[@]}" --wlb-log "$wlb_log" "$@" >"demo/$name.txt" 2>&1 &
    job=$!
    deadline=$((SECONDS + limit_seconds))
    tail -n +1 -s 0.2 -f --pid="$job" "demo/$name.txt" | { grep --line-buffered '^ wlb step' || true; } &
    viewer=$!
}

finish() {
    while running "$1"; do
        sleep 0.2
    done
    wait "$job" || fail "$1" "it ended with an error"
    wait "$viewer"
    job=
}

kill_after_step() {
    until logged "$2"; do
        running "$1" || fail "$1" "it ended before step $2"
        sleep 0.02
    done
    stop
    wait "$viewer"
    if logged "$steps"; then
        fail "$1" "it was at its end before it could be killed"
    fi
    if [[ $(<demo/checkpoint/latest_checkpointed_iteration.txt) != "$save_at" ]]; then
        fail "$1" "it left no checkpoint of step $save_at"
    fi
}

logged() {
    grep -qsE "\"step\": ?$1," "$log"
}

running() {
    [[ $SECONDS -lt $deadline ]] || fail "$1" "it took more than $limit_seconds seconds"
    kill -0 "$job" 2>/dev/null
}

fail() {
    grep -E '(Error|error): ' "demo/$1.txt" | head -n 4 >&2 || tail -n 20 "demo/$1.txt" >&2
    echo "demo: run '$1' failed: $2; its output is demo/$1.txt" >&2
    exit 1
}

# Kills the run without a chance to say goodbye. Workers have sessions of their own: no process group holds them all.
stop() {
    local processes_of_job
    if [[ -n $job ]]; then
        read -ra processes_of_job <<<"$(descendants "$job")"
        kill -KILL "${processes_of_job[@]}" 2>/dev/null || true
        wait "$job" 2>/dev/null || true
        job=
    fi
}

descendants() {
    local child
    echo -n "$1 "
    for child in $(pgrep -P "$1"); do
        descendants "$child"
    done
}

main
