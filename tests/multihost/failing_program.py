"""A job in which rank 1 fails in one way while the others wait for it in a collective.

    python failing_program.py WAY

writes the process id of each rank.
"""

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax import lax

import jax_dist
from jax_dist import multihost


@contextlib.contextmanager
def last_checkpoint(step: Callable[[], None]) -> Iterator[None]:
    """Return a context whose end needs all processes."""
    try:
        yield
    finally:
        step()


def fail(way: str, step: Callable[[], None]) -> None:
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
        case "works alone" | "waits for its thread":  # at the end, when the others have finished
            uploaded = queue.SimpleQueue()
            if way == "works alone":
                time.sleep(4.0 * (jax.process_index() == 1))
            elif jax.process_index() == 1:
                threading.Timer(4.0, uploaded.put, [True]).start()
                uploaded.get()
            sys.exit(0)
        case "cleans up":  # a collective which the others, who sleep, never enter
            with last_checkpoint(step):
                raise ValueError("the loss is NaN")


def main(way: str) -> None:
    multihost.initialize()
    total = jax_dist.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    step = lambda: print(total(np.ones(jax.local_device_count())), file=sys.stderr)  # noqa: T201
    step()
    sys.stdout.write(f"pid {os.getpid()}\n")
    sys.stdout.flush()
    with multihost.watchdog(4.0 if way in ("hangs", "cleans up") else 1000.0) as dog:
        for number in dog.steps(range(3)):
            if number == 1 and (jax.process_index() == 1 or way.startswith("w")):
                fail(way, step)
            elif number == 1 and way == "cleans up":
                time.sleep(1000)
            step()


if __name__ == "__main__":
    main(sys.argv[1])
