#!/usr/bin/env bash
# One node's part of a job: node.sh ARGUMENTS of torchrun. On USR1 it lets the training processes save and stop, by the
# signal that Megatron's --exit-signal-handler waits for, and exits with 99 once they have.
set -euo pipefail

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # upstream demands it before Blackwell
stopped=false
# shellcheck disable=SC2329  # the trap calls it
stop() {
    stopped=true
    pkill -TERM -P "$torchrun" || true # its children train; torchrun itself would kill them half a minute later
}
trap stop USR1
# Slurm signals every process of a step, and only this one is to act on it.
(
    trap '' USR1
    exec "${PYTHON:-python3}" -m torch.distributed.run "$@"
) &
torchrun=$!
status=0
wait "$torchrun" || status=$?
while kill -0 "$torchrun" 2>/dev/null; do # `wait` came back for the signal
    status=0
    wait "$torchrun" || status=$?
done
if $stopped && [[ $status == 0 ]]; then
    exit 99
fi
exit "$status"
