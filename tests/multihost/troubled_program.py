"""One rank of a job, which has the trouble that is asked for: `troubled_program.py RANK TROUBLE`.

The others wait for it in a collective. With JAX_DIST_PLAIN=1, jax.distributed.initialize joins
them instead of ours, for the comparison.
"""

import atexit
import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jobs import say

from jax_dist import multihost

_unread = []  # as a state at the end of a script


def main() -> None:
    rank, trouble = int(sys.argv[1]), sys.argv[2]
    if trouble == "dies before JAX joins" and os.environ["JAX_PROCESS_ID"] == str(rank):
        jax.distributed.initialize = lambda *_, **__: os._exit(7)
    if trouble == "exits with 3 slowly" and os.environ["JAX_PROCESS_ID"] == str(rank):
        atexit.register(time.sleep, 3.0)  # longer than rank 0 gives the others
    _join()
    summed = _summed()
    total = lambda: np.asarray(summed().addressable_shards[0].data)  # waits for it
    total()  # compiled, and all have met
    if jax.process_index() == rank:
        time.sleep(0.5)
        say(f"trouble at {time.time()}")
        _have(trouble)
        if trouble == "has a step more":
            _unread.append(summed())
    if trouble not in ("none", "slow end", "parts early", "computes on", "has a step more"):
        total()
        say("got through")
    elif trouble == "parts early" and jax.process_index() != rank:
        jax.distributed.shutdown()
    say("end of the program")


def _join() -> None:
    if os.environ.get("JAX_DIST_PLAIN"):
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"],
            int(os.environ["JAX_NUM_PROCESSES"]),
            int(os.environ["JAX_PROCESS_ID"]),
            coordinator_bind_address=os.environ["JAX_COORDINATOR_ADDRESS"],
        )
    else:
        # "slow end" takes longer than this, and nobody may be blamed for it.
        multihost.initialize(early_exit_timeout=1.0 if sys.argv[2] == "slow end" else None)


def _summed():
    mesh = Mesh(np.array(jax.devices()), ("i",))
    sharding = NamedSharding(mesh, P("i"))
    ones = np.ones(jax.local_device_count(), np.float32)
    x = jax.make_array_from_process_local_data(sharding, ones)
    summed = jax.jit(
        jax.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    )
    return lambda: summed(x)


class _MuteError(ValueError):
    def __str__(self) -> str:
        while True:
            time.sleep(1.0)


def _have(trouble: str) -> None:
    if trouble == "raises":
        raise ValueError("the learning rate is negative")
    if trouble == "raises at length":
        raise ValueError(9_000_000 * "x" + " is too long")
    if trouble == "raises without a text":
        raise _MuteError
    if trouble == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if trouble == "exits":
        sys.exit(0)
    if trouble in ("exits with 3", "exits with 3 slowly"):
        sys.exit(3)
    if trouble == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if trouble == "is interrupted":
        raise KeyboardInterrupt
    if trouble == "raises in a thread":
        threading.Thread(target=int, args=["seven"]).start()
        time.sleep(100)
    if trouble == "slow end":
        time.sleep(2.0)
    if trouble == "computes on":
        x = np.ones((300, 300), np.float32)
        until = time.monotonic() + 6
        powers = jax.jit(lambda x: lax.fori_loop(0, 2000, lambda _, y: y @ x / 300, x))
        while time.monotonic() < until:
            powers(x).block_until_ready()


if __name__ == "__main__":
    main()
