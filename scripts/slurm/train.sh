# Sourced by the .sbatch files: trains what their flags say, and comes back after preemption.
# shellcheck shell=bash
#
# A signal USR1 to the job's steps (before the time limit, by `scancel --signal=USR1 JOB`, or on preemption where
# PreemptParameters has send_user_signal) lets training save and stop; the job is then requeued and resumes. A job that
# Slurm itself requeues resumes from its last checkpoint as well.
set -euo pipefail

# What all models of the paper have in common, and a recipe to train them.
# shellcheck disable=SC2034,SC2054  # for the .sbatch files; commas as Megatron wants them
llama=(
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
# shellcheck disable=SC2034,SC2054
recipe=(
    --bf16 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --calculate-per-token-loss
    --train-iters 10000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --split 99,1,0
    --eval-interval 500 --eval-iters 4 --log-interval 1 --save-interval 200
)
# shellcheck disable=SC2034
balanced=(--wlb --wlb-packing adaptive --wlb-cp-sharding adaptive)

required() {
    local name
    for name; do
        if [[ -z ${!name:-} ]]; then
            echo "$name is not set; edit scripts/slurm/site.sh and source it before sbatch" >&2
            exit 2
        fi
    done
}

# nodes N: what this layout needs. The default of the .sbatch file is one of several layouts.
nodes() {
    if [[ $SLURM_JOB_NUM_NODES != "$1" ]]; then
        echo "this layout needs $1 nodes and the job has $SLURM_JOB_NUM_NODES; give sbatch --nodes $1" >&2
        exit 2
    fi
}

train() { # FLAGS of pretrain_gpt.py
    required MEGATRON_WLB_HOME DATA_PATH RUNS
    local run=$RUNS/$SLURM_JOB_NAME home=$MEGATRON_WLB_HOME head status=0
    mkdir -p "$run"
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    local container=()
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then
        if ! srun --help | grep -q -- --container-image; then
            echo "CONTAINER_IMAGE is set, but this cluster's srun has no --container-image (pyxis); leave it empty" >&2
            exit 2
        fi
        home=/opt/megatron_wlb # of the Dockerfile's image
        container=(--container-image "$CONTAINER_IMAGE" --container-mounts "$RUNS:$RUNS${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    fi
    local data
    read -ra data <<<"$DATA_PATH"
    local flags=(
        --data-path "${data[@]}"
        --save "$run/checkpoints" --load "$run/checkpoints" --exit-signal-handler --ckpt-format torch_dist
        --tensorboard-dir "$run/tensorboard" --log-throughput
    )
    srun --kill-on-bad-exit=1 --ntasks-per-node=1 "${container[@]}" \
        bash "$home/scripts/slurm/node.sh" \
        --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${PROCESSES_PER_NODE:-8}" \
        --rdzv-backend c10d --rdzv-endpoint "$head:$((20000 + SLURM_JOB_ID % 20000))" \
        --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
        "$home/pretrain_gpt.py" "${flags[@]}" "$@" || status=$?
    if [[ $status == 99 ]]; then # node.sh: stopped by the signal
        echo "stopped by a signal with a checkpoint; requeued"
        scontrol requeue "$SLURM_JOB_ID"
        sleep 60 # until Slurm ends this script
    fi
    exit "$status"
}
