"""What two processes see when they do not do the same: plain JAX against ours.

    python benchmarks/disagreements.py [CASE ...]

Each case is run by two processes on this machine, once with `jax.pmap` and `jax.distributed`,
and once with ours. Printed is what each process saw, and after how many seconds
the last of them did. What still waits after 45 seconds is stopped. All cases take some
minutes, most of them spent in waiting for plain JAX.
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_TESTS = pathlib.Path(__file__).parents[1] / "tests" / "multihost"
sys.path.insert(0, str(_TESTS))
from jobs import Ended, free_port, run_job, say  # noqa: E402  # beside the tests

import jax_dist  # noqa: E402  # after the path is set
from jax_dist import multihost  # noqa: E402

_PATIENCE = 45.0  # seconds
_WIDTH = 74  # of what one process saw

# --- what the processes run


def _unlike(rank: int) -> np.ndarray:
    return np.ones(2 + rank, np.float32)


def _mapped(*, plain: bool) -> Callable:
    return jax.pmap if plain else jax_dist.pmap


def shapes(rank: int, *, plain: bool) -> object:
    """psum of (2,) and (3,)"""
    return _mapped(plain=plain)(lambda x: lax.psum(x, "i"), axis_name="i")(_unlike(rank)[None])


def types(rank: int, *, plain: bool) -> object:
    """psum of float32 and int32"""
    x = np.ones((1, 3), np.int32 if rank else np.float32)
    return _mapped(plain=plain)(lambda x: lax.psum(x, "i"), axis_name="i")(x)


def orders(rank: int, *, plain: bool) -> object:
    """psum(x) and psum(2x), in another order"""
    one = _mapped(plain=plain)(lambda x: lax.psum(x, "i"), axis_name="i")
    two = _mapped(plain=plain)(lambda x: lax.psum(2 * x, "i"), axis_name="i")
    x = np.full((1,), 2.0, np.float32)
    results = [np.asarray(step(x)).tolist() for step in ((one, two) if rank == 0 else (two, one))]
    return results if rank == 0 else results[::-1]


def collectives(rank: int, *, plain: bool) -> object:
    """psum and all_gather, in another order"""
    one = _mapped(plain=plain)(lambda x: lax.psum(x, "i"), axis_name="i")
    two = _mapped(plain=plain)(lambda x: lax.all_gather(x, "i"), axis_name="i")
    x = np.ones((1, 4), np.float32)
    return [np.asarray(step(x)).sum() for step in ((one, two) if rank == 0 else (two, one))]


def stuck(rank: int, *, plain: bool) -> object:
    """one is alive, and stuck"""
    total = _mapped(plain=plain)(lambda x: lax.psum(x, "i"), axis_name="i")
    watched = contextlib.nullcontext() if plain else multihost.watchdog(5)
    with watched as watch:
        for step in range(3):
            with contextlib.nullcontext() if plain else watch.step():
                if rank and step == 2:
                    time.sleep(100)
                jax.block_until_ready(total(jnp.ones((1,))))
    return "all steps"


def late(rank: int, *, plain: bool) -> object:
    """one comes 35 s late to the first collective"""
    time.sleep(35 * rank)
    return _mapped(plain=plain)(lambda x: lax.psum(x, "i"), axis_name="i")(np.ones(1, np.float32))


def backend(rank: int, *, plain: bool) -> object:
    """initialize after the backend has started"""
    del rank
    jax.devices()
    return _join(plain=plain)


def counts(rank: int, *, plain: bool) -> object:
    """num_processes is 3 on one, 2 on the other"""
    os.environ["JAX_NUM_PROCESSES"] = "3" if rank == 0 else "2"
    return _join(plain=plain)


def _joins(rank: int, *, plain: bool) -> object:
    del rank
    return _join(plain=plain)


_CASES = {
    each.__name__: each
    for each in (shapes, types, orders, collectives, stuck, late, backend, counts)
}
_JOINING = {  # these go wrong before the processes have met
    "missing": "a process never starts",
    "doubled": "both have the same process_id",
    "taken": "the coordinator's port is taken",
}
_BEFORE = ("backend", "counts", *_JOINING)


def _join(*, plain: bool) -> str:
    if plain:
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"],
            int(os.environ["JAX_NUM_PROCESSES"]),
            int(os.environ["JAX_PROCESS_ID"]),
            initialization_timeout=10,
        )
    else:
        multihost.initialize(initialization_timeout=10)
    return "joined"


def _rank_of(case: str, way: str) -> None:
    plain = way == "jax"
    if case not in _BEFORE:
        _join(plain=plain)
    start = time.time()
    say(f"trouble at {start}")
    try:
        found = _CASES.get(case, _joins)(int(os.environ["JAX_PROCESS_ID"]), plain=plain)
        say(f"saw {np.asarray(found).tolist() if isinstance(found, jax.Array) else found}")
    except Exception as error:  # noqa: BLE001  # whatever it raises is what is shown
        say(f"saw {type(error).__name__}: {' '.join(str(error).split())}")
    say(f"took {time.time() - start}")
    time.sleep(3)  # whoever leaves first may end the others
    os._exit(0)  # how it ends is another table: benchmarks/failures.py


# --- the table


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = [*_CASES, *_JOINING]
    parser.add_argument("cases", nargs="*", choices=[[], *every], metavar="CASE")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        _rank_of(*options.rank_of)
        return
    print(f"jax {jax.__version__}, two processes; what each saw, and after how many seconds")
    for case in options.cases or every:
        print(f"\n{_JOINING.get(case) or _CASES[case].__doc__}")
        for way in ("jax", "jax_dist"):
            _print_row(way, _run(case, way))


def _run(case: str, way: str) -> list[Ended]:
    with _surroundings(case) as (ranks, environment):
        return run_job(
            str(pathlib.Path(__file__).resolve()),
            "--rank-of",
            case,
            way,
            ranks=ranks,
            environment=environment,
            timeout=_PATIENCE,
        )


@contextlib.contextmanager
def _surroundings(case: str) -> Iterator[tuple[int, dict[str, str]]]:
    """How many ranks are started, and with what."""
    if case == "missing":
        yield 1, {"JAX_NUM_PROCESSES": "2"}
    elif case == "doubled":
        yield 2, {"JAX_PROCESS_ID": "0"}
    elif case == "taken":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", free_port()))
            taken.listen()
            yield 2, {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{taken.getsockname()[1]}"}
    else:
        yield 2, {}


def _print_row(way: str, ended: list[Ended]) -> None:
    for rank, each in enumerate(ended):
        seconds = f"{max(map(_seconds, ended)):6.1f} s" if rank == 0 else ""
        print(f"  {way if rank == 0 else '':<9}{seconds:<9}rank {rank}: {_seen(each)}", flush=True)


def _seconds(ended: Ended) -> float:
    took = re.search(r"(?m)^took (.*)$", ended.output)
    return float(took[1]) if took else ended.seconds


def _seen(ended: Ended) -> str:
    if ended.code == -signal.SIGALRM:
        return "still waiting"
    saw = [line for line in ended.output.splitlines() if line.startswith("saw ")]
    if saw:
        return saw[-1].removeprefix("saw ")[:_WIDTH]
    if ended.code < 0:
        return signal.Signals(-ended.code).name
    stopped = re.findall(r"(?m)^.*(?:stopping|watchdog|stuck).*$", ended.output)
    lines = stopped or ended.output.strip().splitlines()[::-1] or [""]
    return f"exit code {ended.code}: {lines[0][:_WIDTH]}"


if __name__ == "__main__":
    main()
