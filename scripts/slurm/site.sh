# What differs from cluster to cluster, in one place: edit it, then  . scripts/slurm/site.sh && sbatch scripts/slurm/7b.sbatch
# sbatch reads SBATCH_* itself and hands all that is exported to the job. What is set already is kept.
# shellcheck shell=bash
# export SBATCH_ACCOUNT=... SBATCH_PARTITION=...

# This repository, as the nodes see it.
export MEGATRON_WLB_HOME=${MEGATRON_WLB_HOME:-$PWD}

# A Megatron-LM checkout to train with, as the job sees it; without one, the installed megatron-core.
export CHECKOUT=${CHECKOUT:-}

# .bin/.idx prefix or blend, tokenizer, and the folder for checkpoints and TensorBoard, all on a shared file system.
export DATA_PATH=${DATA_PATH:-}
export TOKENIZER=${TOKENIZER:-}
export RUNS=${RUNS:-$PWD/runs}

# An image of the Dockerfile, only where pyxis is there, and what it sees besides RUNS, as OUTSIDE:INSIDE[,...]; without
# an image the nodes' own PYTHON runs.
export CONTAINER_IMAGE=${CONTAINER_IMAGE:-}
export CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-}
export PYTHON=${PYTHON:-python3}

# The network interface between nodes, where NCCL finds the wrong one by itself.
# export NCCL_SOCKET_IFNAME=ib0
