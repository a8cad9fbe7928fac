"""One rank of a job that stops getting on: `stalling_program.py RANK WHERE`."""

import os
import signal
import sys
import time

import jax
import numpy as np
from jobs import say

import jax_dist
from jax_dist import multihost


def main() -> None:
    rank, where = int(sys.argv[1]), sys.argv[2]
    multihost.initialize()
    total = jax_dist.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    batch = np.ones(jax.local_device_count(), np.float32)
    total(batch).block_until_ready()
    with multihost.watchdog(2) as dog:
        for step in range(1, 6):
            here = jax.process_index() == rank and step == 3
            if here and where == "between":
                _stall(where)
            with dog.step():
                if here and where != "between":
                    _stall(where)
                total(batch).block_until_ready()


def _stall(where: str) -> None:
    say(f"trouble at {time.time()}")
    if where == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)


if __name__ == "__main__":
    main()
