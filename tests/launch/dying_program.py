"""Checked collectives without end, until one rank dies:  dying_program.py RANK HOW DELAY

Says `pid N` when it starts, `dies` when it does so by itself, and `wrong` where a sum is.
"""

import ctypes
import os
import sys
import threading
import time

import jax
import numpy as np

import jax_dist
from jax_dist import multihost


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def die(how: str) -> None:
    say("dies")
    if how == "an exception":
        raise ValueError("planned")
    if how == "a long exception":
        raise ValueError(9_000_000 * "x")
    if how == "sys.exit(3)":
        sys.exit(3)
    if how == "sys.exit(0)":
        sys.exit(0)
    if how == "os._exit(5)":
        os._exit(5)
    if how == "os.abort()":
        os.abort()
    if how == "a crash":
        ctypes.string_at(0)
    if how == "an exception in a thread":
        threading.Thread(target=int, args=["seven"]).start()


def main() -> None:
    say(f"pid {os.getpid()}")
    rank, how, delay = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    at = time.monotonic() + delay
    multihost.initialize()
    me, ranks, own = jax.process_index(), jax.process_count(), jax.local_device_count()
    total = jax_dist.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    for step in range(1_000_000):
        found = np.asarray(total(np.full(own, me + step, np.float32)))
        if not np.all(found == own * sum(other + step for other in range(ranks))):
            say("wrong")
        if step % 5 == 0:
            multihost.agree("step", step)
        if step == 1500:
            return  # nobody has died of a signal that may be ignored
        if me == rank and at and time.monotonic() > at:
            at = 0.0
            die(how)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
