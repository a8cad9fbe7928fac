"""What the processes run in the tests of `run_processes`; here, so that they import no pytest."""

import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import multihost


class OddError(Exception):
    """Pickles, but cannot be read back: its class wants two arguments."""

    def __init__(self, first: str, second: str):
        super().__init__(first + second)


def sum_over_all() -> list[float]:
    mesh = Mesh(jax.devices(), "i")
    total = jax.jit(
        jax.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    )
    x = jax.make_array_from_callback(
        (4,), NamedSharding(mesh, P("i")), lambda index: np.arange(4.0, dtype=np.float32)[index]
    )
    return [jax.process_index(), *total(x).addressable_data(0).tolist()]


def succeed(x: dict[str, int], y: int) -> dict[str, object]:
    """By what it is. The listeners come first: a collective adds those of gloo."""
    return {
        "listeners": listeners(),
        "added": x["x"] + y,
        "summed": sum_over_all(),
        "agreed": agreements(),
        "preempted": preemption(),
    }


def agreements() -> list[str]:
    """Return the errors of `agree` in a real job, which goes on after each."""
    multihost.initialize()  # joins nothing more
    rank = jax.process_index()
    multihost.agree("the same", {"x": np.ones(3)}, values=True)
    errors = []
    for call in (
        lambda: multihost.agree("settings", {"seed": rank}),
        lambda: multihost.agree(f"order {rank}"),
        lambda: rank or multihost.agree("alone", timeout=0.5),
    ):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def preemption() -> list[int]:
    """Return the steps at which this process is told to leave; rank 1 gets the signal."""
    steps = []
    for step in range(1, 200):
        if step == 3 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if multihost.preempted(step):
            steps.append(step)
        if len(steps) == 2:
            return steps
        sum_over_all()
        time.sleep(0.05)
    return []


def settings() -> list[str]:
    return [
        os.environ["XLA_FLAGS"],
        os.environ.get("JAX_PARTITION_INDEX", "not set"),
        str(jax.local_device_count()),
        str(jax.config.jax_cpu_collectives_implementation),
    ]


def listeners() -> list[str]:
    """Return the local addresses, as hexadecimal `address:port`, where this process listens."""
    links = [os.path.realpath(link) for link in pathlib.Path("/proc/self/fd").iterdir()]
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    own = [row for row in rows if any(link.endswith(f"socket:[{row[9]}]") for link in links)]
    return [row[1] for row in own if row[3] == "0A"]


def fail_on_rank_1(way: str) -> list[float] | str:
    """Rank 0 waits for rank 1 in a collective, or for nobody."""
    if jax.process_index() == 0:
        return "done" if way == "hang" else sum_over_all()
    match way:
        case "raise":
            raise KeyError("batch")
        case "leave":
            sys.exit(3)
        case "odd":
            raise OddError("a", "b")
        case "unpicklable":
            return (x for x in ())  # pyright: ignore[reportReturnType]
        case "killed":
            sys.stdout.write("about to go\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
    return ""
