"""What a guard costs: calls inside one `strict` block beside the same calls outside of any.

    python benchmarks/guards.py
    python benchmarks/guards.py --rounds 2000

A round calls each row once in a block and once outside, in turns, in an order that changes. Printed
are ratios: the median over rounds, and the 10th to 90th percentile in brackets. "outside again" is
the noise: a range that holds 1 is not a finding.
"""

import argparse
import contextlib
import os
import random
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_dist
from jax_dist.testing import simulated_devices

_CALLS = 100  # of each row in a round, so that a clock of microseconds will do


def seconds(call: Callable[[], object], block: contextlib.AbstractContextManager) -> float:
    """Of one call, in the middle of many in one block."""
    with block:
        for _ in range(5):  # the first ones are looked at
            call()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        return (time.perf_counter() - start) / _CALLS


def one_array() -> Callable[[], object]:
    step, x = jax.jit(lambda x: x + 1), jnp.ones(4)
    return lambda: step(x)


def donated(leaves: int) -> Callable[[], object]:
    step = jax.jit(lambda state: [leaf + 1 for leaf in state], donate_argnums=0)
    state = [[jnp.ones(4) for _ in range(leaves)]]

    def call() -> None:
        state[0] = step(state[0])

    return call


def sharded() -> Callable[[], object]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    x = jax.device_put(np.ones(8, np.float32), jax.sharding.NamedSharding(mesh, spec))
    step = jax.jit(jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=spec, out_specs=spec))
    return lambda: step(x)


def python_number() -> Callable[[], object]:
    step = jax.jit(lambda x: x + 1)
    return lambda: step(2.0)


ROWS = {
    "one array": one_array,
    "50 donated leaves": lambda: donated(50),
    "8 devices": sharded,
    "a Python number": python_number,
}


def print_calls(rounds: int) -> None:
    blocks = {
        "outside": contextlib.nullcontext,
        "outside again": contextlib.nullcontext,
        "strict": jax_dist.strict,
        "always": lambda: jax_dist.strict(donation="always"),
    }
    print(
        f"{'time of a call':20}{'outside, us':>12}  outside again       strict              always"
    )
    shuffle = random.Random(0).shuffle
    for name, row in ROWS.items():
        call, order = row(), list(blocks)
        call()
        taken = {block: np.empty(rounds) for block in blocks}
        for round_ in range(-2, rounds):
            shuffle(order)
            for block in order:
                each = seconds(call, blocks[block]())
                if round_ >= 0:
                    taken[block][round_] = each
        cells = "".join(f"{_ratio(taken, block):20}" for block in blocks if block != "outside")
        print(f"{name:20}{np.median(taken['outside']) * 1e6:12.1f}  {cells}", flush=True)


def _ratio(taken: dict[str, np.ndarray], block: str) -> str:
    low, middle, high = np.percentile(taken[block] / taken["outside"], [10, 50, 90])
    return f"{middle:.3f} [{low:.2f}..{high:.2f}]"


def print_entering(rounds: int) -> None:
    guard, memory = jax_dist.strict(), jax_dist.memory_guard()
    for name, block in {"strict": guard, "memory_guard": memory}.items():
        taken = []
        for _ in range(rounds):
            start = time.perf_counter()
            with block:
                pass
            taken.append(time.perf_counter() - start)
        low, middle, high = np.percentile(taken, [10, 50, 90]) * 1e6
        print(f"entering and leaving {name:14}{middle:8.1f} us  [{low:.1f}..{high:.1f}]")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    simulated_devices(8)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {jax.devices()[0].device_kind} devices")
    print_calls(options.rounds)
    print_entering(options.rounds * 5)


if __name__ == "__main__":
    main()
