#!/bin/bash
# Two machines with four GPUs each, one process a GPU. On each of them:
#   HOST=node1 bash torchrun.sh
set -euo pipefail

# Each process takes the GPU of its own number. exec: SIGTERM goes to Python, not to the shell.
torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint="$HOST:29400" \
    --no-python bash -c 'JAX_LOCAL_DEVICE_IDS=$LOCAL_RANK exec python train.py'
