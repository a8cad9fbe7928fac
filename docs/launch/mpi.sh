#!/bin/bash
# Two machines with four GPUs each, one process a GPU:  bash mpi.sh, on the first of the machines.
# The variables are those of Open MPI, or else of Intel MPI.
set -euo pipefail

HOSTS=${HOSTS:-"$(hostname):4,node2:4"}
ADDRESS=${JAX_COORDINATOR_ADDRESS:-"$(hostname):55527"} # where rank 0 runs

# shellcheck disable=SC2016  # the variables are those of each rank
as_rank='
export JAX_COORDINATOR_ADDRESS=$1
export JAX_LOCAL_DEVICE_IDS=${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}
shift
exec "$@"'

mpirun --host "$HOSTS" bash -c "$as_rank" rank "$ADDRESS" python train.py
