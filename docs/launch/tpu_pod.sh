#!/bin/bash
# One process on each host of a TPU pod:  TPU=my-pod ZONE=us-central2-b bash tpu_pod.sh
set -euo pipefail

gcloud compute tpus tpu-vm scp train.py "$TPU": --zone="$ZONE" --worker=all
# The hosts learn from their metadata who they are. exec: SIGTERM goes to Python, not to the shell.
gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
    --command='exec python3 train.py'
