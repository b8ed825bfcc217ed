#!/usr/bin/env bash
# One node's part of a job: node.sh ARGUMENTS of torchrun. On USR1 it lets the training processes save and stop, by the
# signal that Megatron's --exit-signal-handler waits for; those that do not listen yet end by it.
set -euo pipefail

signalled=false
# shellcheck disable=SC2329  # the trap calls it
stop() {
    $signalled && return 0 # train.sh repeats itself; a bare `return` has the status of a `sleep` that was killed
    signalled=true
    local stat line parent trainers=()
    # Children of torchrun, in bash alone, since an image may lack pkill. A line of stat is
    # "PID (NAME) STATE PARENT ...", and a name may have blanks.
    for stat in /proc/[0-9]*/stat; do
        { read -r line <"$stat"; } 2>/dev/null || continue # it has just ended
        read -r _ parent _ <<<"${line##*) }"
        if [[ $parent == "$torchrun" ]]; then
            trainers+=("${line%% *}")
        fi
    done
    # torchrun itself would kill them half a minute later; it ends by the signal where it has not started them.
    kill -TERM "${trainers[@]:-$torchrun}" || true # they may just have ended
}
# Slurm signals every process of a step, and only this one is to act on it.
(
    trap '' USR1
    exec "${PYTHON:-python3}" -m torch.distributed.run "$@"
) &
torchrun=$!
trap stop USR1
# Not by `wait`, which comes back for the signal with a status of its own.
while kill -0 "$torchrun" 2>/dev/null; do
    sleep 1 || true # the signal ends it
done
trap '' USR1
wait "$torchrun"
