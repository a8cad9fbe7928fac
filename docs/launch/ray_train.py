"""One process on each host of a Ray cluster:  python ray_train.py python train.py

From a machine outside:  ray job submit --working-dir . -- python ray_train.py python train.py
"""

import os
import socket
import subprocess
import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote
class Worker:
    """On one host. Each program is a process of its own, which gets signals as it should."""

    def address(self) -> str:
        """Where the others find this host: "ip:port"."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, command: list[str], variables: dict[str, str]) -> int:
        """Return the exit code."""
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


def start_workers() -> list:
    """One on each host that runs; it has all GPUs of its host."""
    workers = []
    for node in (node for node in ray.nodes() if node["Alive"]):
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        gpus = int(node["Resources"].get("GPU", 0))
        workers.append(Worker.options(scheduling_strategy=here, num_gpus=gpus).remote())
    return workers


def main(command: list[str]) -> int:
    ray.init()
    workers = start_workers()
    job = {
        "JAX_COORDINATOR_ADDRESS": ray.get(workers[0].address.remote()),
        "JAX_NUM_PROCESSES": str(len(workers)),
    }
    ends = [
        worker.run.remote(command, {**job, "JAX_PROCESS_ID": str(rank)})
        for rank, worker in enumerate(workers)
    ]
    codes = ray.get(ends)  # when one fails, the others end by themselves
    print("exit codes by rank:", codes)
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
