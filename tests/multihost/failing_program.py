"""A job in which rank 1 fails in one way while the others wait for it in a collective.

    python failing_program.py WAY

writes the process id of each rank.
"""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax import lax

import jax_dist
from jax_dist import multihost


class CleanUp:
    """A context whose end needs all processes, such as a last checkpoint."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        step()


def step() -> None:
    np.asarray(total(np.ones(jax.local_device_count())))


def fail(way: str) -> None:
    match way:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise ValueError("the loss is NaN")
        case "exits":
            sys.exit(3)
        case "returns":
            sys.exit(0)
        case "hangs":
            time.sleep(1000)
        case "cleans up":  # a collective which the others, who sleep, never enter
            with CleanUp():
                raise ValueError("the loss is NaN")


if __name__ == "__main__":
    multihost.initialize()
    total = jax_dist.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    step()
    sys.stdout.write(f"pid {os.getpid()}\n")
    sys.stdout.flush()
    needs_watchdog = sys.argv[1] in ("hangs", "cleans up")
    with multihost.watchdog(4.0 if needs_watchdog else 1000.0) as dog:
        for number in dog.steps(range(3)):
            if number == 1 and jax.process_index() == 1:
                fail(sys.argv[1])
            elif number == 1 and sys.argv[1] == "cleans up":
                time.sleep(1000)
            step()
