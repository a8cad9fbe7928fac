#!/bin/bash
# One process on each host of a TPU pod:  TPU=my-pod ZONE=us-central2-b bash tpu_pod.sh
set -euo pipefail

# What only the processes of this job know: in a file, for arguments are seen by everybody.
(umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >token)
gcloud compute tpus tpu-vm scp train.py token "$TPU": --zone="$ZONE" --worker=all
# The hosts learn from their metadata who they are. exec: SIGTERM goes to Python, not to the shell.
gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
    --command='JAX_DIST_TOKEN=$(cat token) exec python3 train.py'
