"""What the processes run in the tests of `run_processes`; here, so that they import no pytest."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


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


def add(x: dict[str, int], y: int) -> list[int]:
    return [jax.process_index(), x["x"] + y]


def listen_add_and_sum(x: dict[str, int], y: int) -> dict[str, list]:
    """By what it is. The listeners come first: a collective adds those of gloo."""
    return {"listeners": listeners(), "added": add(x, y), "summed": sum_over_all()}


def settings() -> list[str]:
    return [
        os.environ["XLA_FLAGS"],
        os.environ.get("JAX_PARTITION_INDEX", "not set"),
        str(jax.local_device_count()),
        str(jax.config.jax_cpu_collectives_implementation),
    ]


def listeners() -> list[str]:
    """The local addresses, as hexadecimal `address:port`, where this process listens."""
    links = [os.path.realpath(link) for link in pathlib.Path("/proc/self/fd").iterdir()]
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    own = [row for row in rows if any(link.endswith(f"socket:[{row[9]}]") for link in links)]
    return [row[1] for row in own if row[3] == "0A"]


def write_pid(folder: str) -> None:
    (pathlib.Path(folder) / f"{jax.process_index()}.pid").write_text(str(os.getpid()))


def raise_on_rank_1() -> list[float]:
    if jax.process_index() == 1:
        raise KeyError("batch")
    return sum_over_all()


def raise_odd_error() -> None:
    raise OddError("a", "b")


def leave_by_exit() -> None:
    sys.exit(3)


def die_on_rank(rank: int) -> list[float]:
    if jax.process_index() == rank:
        os._exit(7)
    return sum_over_all()


def kill_self_on_rank_1() -> str:
    if jax.process_index() == 1:
        sys.stdout.write("about to go\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def hang_on_rank_1(folder: str) -> str:
    if jax.process_index() == 1:
        hang(folder)
    return "done"


def hang(folder: str) -> None:
    write_pid(folder)
    time.sleep(100)


def hang_in_a_child(folder: str) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (pathlib.Path(folder) / "sleeper.pid").write_text(str(sleeper.pid))
    sleeper.wait()


def return_generator() -> object:
    return (x for x in ())
