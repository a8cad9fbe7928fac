#!/bin/bash
# Two machines with four GPUs each, one process a GPU:  bash mpi.sh, on the first of the machines.
# The variables are those of Open MPI, or else of MPICH and Intel MPI (PMI_..., MPI_...).
set -euo pipefail

HOSTS=${HOSTS:-"$(hostname):4,node2:4"}
JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS:-"$(hostname):55527"} # where rank 0 runs
export JAX_COORDINATOR_ADDRESS

# What only the processes of this job know: in a file, for arguments are seen by everybody.
token=$(mktemp "$PWD/token.XXXXXX")
trap 'rm -f "$token"' EXIT
od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >"$token"

# shellcheck disable=SC2016  # the variables are those of each rank
as_rank='
export JAX_COORDINATOR_ADDRESS=$1
JAX_DIST_TOKEN=$(cat "$2")
export JAX_DIST_TOKEN
export JAX_NUM_PROCESSES=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE}
export JAX_PROCESS_ID=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
export JAX_LOCAL_DEVICE_IDS=${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}
shift 2
exec "$@"'

mpirun --host "$HOSTS" bash -c "$as_rank" rank "$JAX_COORDINATOR_ADDRESS" "$token" python train.py
