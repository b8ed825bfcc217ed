# Sourced by the .sbatch files: trains what their flags say, and comes back after preemption.
# shellcheck shell=bash
#
# A signal USR1 to the batch script (before the time limit, by `scancel --batch --signal=USR1 JOB`, or on preemption where
# PreemptParameters has send_user_signal) lets training save and stop; the job is then requeued and resumes. A job that
# Slurm itself requeues resumes from its last checkpoint as well.
#
# `bash scripts/slurm/7b.sbatch --dry-run` prints what would be run, with or without Slurm, for megatron-wlb analyze.
set -euo pipefail

dry_run=false
if [[ " $* " == *" --dry-run "* ]]; then
    dry_run=true
    TOKENIZER=${TOKENIZER:-TOKENIZER} RUNS=${RUNS:-runs}
    SLURM_JOB_NAME=${SLURM_JOB_NAME:-job} SLURM_JOB_ID=${SLURM_JOB_ID:-0} SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}
fi

stopped=false
trap 'stopped=true' USR1

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
    if $dry_run; then
        SLURM_JOB_NUM_NODES=$1
    elif [[ $SLURM_JOB_NUM_NODES != "$1" ]]; then
        echo "this layout needs $1 nodes and the job has $SLURM_JOB_NUM_NODES; give sbatch --nodes $1" >&2
        exit 2
    fi
}

train() { # FLAGS of pretrain_gpt.py
    local run=$RUNS/$SLURM_JOB_NAME home=$MEGATRON_WLB_HOME head=HOST status=0
    if ! $dry_run; then
        required MEGATRON_WLB_HOME DATA_PATH RUNS
        mkdir -p "$run"
        head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    fi
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # upstream demands it before Blackwell
    # Micro-batches differ in length, and the caching allocator's fixed segments fragment by it. Under its newer name,
    # PYTORCH_ALLOC_CONF, upstream would not see it where it checks what does not go with expandable segments.
    if [[ -z ${PYTORCH_ALLOC_CONF+set} ]]; then
        export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}
    fi
    local container=()
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then
        if ! $dry_run && [[ $(srun --help) != *--container-image* ]]; then # not by grep -q, which may end srun early
            echo "CONTAINER_IMAGE is set, but this cluster's srun has no --container-image (pyxis); leave it empty" >&2
            exit 2
        fi
        home=/opt/megatron_wlb # of the Dockerfile's image
        export PYTHON=python3  # the image's: a path of the nodes' leads nowhere, or to another Python
        container=(
            --container-image "$CONTAINER_IMAGE"
            --container-mounts "$RUNS:$RUNS${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
            --container-env CUDA_DEVICE_MAX_CONNECTIONS # the image sets it, which would win over ours
        )
    fi
    local script=("$home/pretrain_gpt.py")
    if [[ -n ${CHECKOUT:-} ]]; then
        script=(-m megatron_wlb.run "$CHECKOUT/pretrain_gpt.py")
    fi
    local data
    read -ra data <<<"${DATA_PATH:-}"
    local flags=(
        ${data[@]+--data-path "${data[@]}"}
        --save "$run/checkpoints" --load "$run/checkpoints" --exit-signal-handler --ckpt-format torch_dist
        --tensorboard-dir "$run/tensorboard" --log-throughput
    )
    # Unbound: a task is all trainers of its node, and Slurm takes it for one of a single CPU; where the site binds by
    # default (TaskPluginParam, CpuBind), it would hold them all on one core. The step has all CPUs of the job anyway.
    local command=(
        srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpu-bind=none "${container[@]}"
        bash "$home/scripts/slurm/node.sh"
        --nnodes "${SLURM_JOB_NUM_NODES:-1}" --nproc-per-node "${PROCESSES_PER_NODE:-8}"
        --rdzv-backend c10d --rdzv-endpoint "$head:$((20000 + SLURM_JOB_ID % 20000))"
        --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
        "${script[@]}" "${flags[@]}"
    )
    local word
    for word; do
        [[ $word == --dry-run ]] || command+=("$word")
    done
    if $dry_run; then
        printf '%q ' "${command[@]}"
        echo
        exit
    fi
    "${command[@]}" &
    local step=$!
    while kill -0 "$step" 2>/dev/null; do
        if $stopped; then
            # srun hands it on to node.sh. Again until all have ended: tasks that are still to start miss it.
            kill -USR1 "$step" || true
        fi
        sleep 2 || true # `scancel --full` signals it, too
    done
    wait "$step" || status=$?
    if $stopped; then # whatever the status: before training listens, the signal ends it
        echo "stopped by a signal, with status $status; requeued"
        scontrol requeue "$SLURM_JOB_ID"
        sleep 60 || true # until Slurm ends this script
    fi
    exit "$status"
}
