#!/bin/bash
# Two machines with four GPUs each, one process a GPU. On each of them:
#   HOST=node1 JAX_DIST_TOKEN=... bash torchrun.sh
set -euo pipefail

# What only the processes of this job know: the same on all machines, as by `openssl rand -hex 16`.
: "${JAX_DIST_TOKEN:?}"
export JAX_DIST_TOKEN

# Each process takes the GPU of its own number. exec: SIGTERM goes to Python, not to the shell.
torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint="$HOST:29400" \
    --no-python bash -c 'JAX_LOCAL_DEVICE_IDS=$LOCAL_RANK exec python train.py'
