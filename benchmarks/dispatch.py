"""Time of a call: jax_dist.pmap beside the bare jit(shard_map) object and jax.pmap.

    python benchmarks/dispatch.py                  # 1 device, 8 devices, 2 processes; some minutes
    python benchmarks/dispatch.py --only one       # only the rows on one device

Calls of all variants take turns, in an order that changes each round, so that a slow moment of the
machine hits them all. Printed are ratios to the first column: the median over rounds, and the 10th
to 90th percentile in brackets. The bare object stands there twice: the second shows the noise. A
range that holds 1 is not a finding. One simulated device shows the cost of Python best.
"""

import argparse
import functools
import os
import random
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.testing import run_processes, simulated_devices

Calls = dict[str, Callable[[], object]]


def time_calls(calls: Calls, rounds: int, warm_up: int = 3) -> dict[str, np.ndarray]:
    """Return seconds per call, `{name: [rounds]}`; the first rounds compile and do not count."""
    seconds = {name: np.empty(rounds) for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle  # the same order in every process
    for number in range(-warm_up, rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            result = calls[name]()
            elapsed = time.perf_counter() - start
            jax.block_until_ready(result)  # not counted: the call returns before the devices do
            if number >= 0:
                seconds[name][number] = elapsed
    return seconds


def print_ratios(title: str, rows: dict[str, dict[str, np.ndarray]], width: int = 22) -> None:
    """Print one line per row: the first variant in microseconds, the others as ratios to it."""
    baseline, *others = next(iter(rows.values()))
    print(f"\n{title}\n{'':{width}}{f'{baseline}, us':>12}  {''.join(f'{n:20}' for n in others)}")
    for name, seconds in rows.items():
        line = f"{name:{width}}{np.median(seconds[baseline]) * 1e6:12.1f}  "
        for other in others:
            low, middle, high = np.percentile(seconds[other] / seconds[baseline], [10, 50, 90])
            line += f"{f'{middle:.2f} [{low:.2f}..{high:.2f}]':20}"
        print(line, flush=True)


def make_mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("i",))


def place(tree: object, devices: int) -> object:
    return jax.device_put(tree, NamedSharding(make_mesh(devices), P("i")))


def compare(body: Callable, args: tuple, devices: int, *, in_axes: object = 0) -> Calls:
    """Return the same call by each variant. `body` must be right on blocks `[1, *s]`, too."""
    is_none = lambda axis: axis is None
    specs = jax.tree.map(lambda axis: P() if axis is None else P("i"), in_axes, is_leaf=is_none)
    mesh, out = make_mesh(devices), P("i")
    blocks = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    bare = jax.jit(blocks)
    ours = jax_dist.pmap(body, "i", in_axes=in_axes)
    theirs = jax.pmap(body, "i", in_axes=in_axes)
    calls = {"bare jit": bare, "bare again": bare, "jax_dist": ours, "jax.pmap": theirs}
    return {name: functools.partial(call, *args) for name, call in calls.items()}


def one_argument(devices: int) -> Calls:
    return compare(lambda x: x + 1, (place(np.ones((devices, 4), np.float32), devices),), devices)


def many_leaves(leaves: int, devices: int) -> Calls:
    x = place([np.ones((devices, 4), np.float32)] * leaves, devices)
    return compare(lambda x: [leaf + 1 for leaf in x], (x,), devices)


def replicated_and_mapped(leaves: int, devices: int) -> Calls:
    names = [f"layer_{i}" for i in range(leaves)]
    replicated = NamedSharding(make_mesh(devices), P())
    w = jax.device_put(dict.fromkeys(names, np.ones(4, np.float32)), replicated)
    x = place(np.ones((devices, 4), np.float32), devices)
    body = lambda w, x: {name: x * leaf for name, leaf in w.items()}
    return compare(body, (w, x), devices, in_axes=(None, 0))


def numpy_argument(devices: int) -> Calls:
    return compare(lambda x: x[..., :4] + 1, (np.ones((devices, 262144), np.float32),), devices)


def decorate_again(devices: int) -> Calls:
    """Map the same function anew in each call."""
    x = place(np.ones((devices, 4), np.float32), devices)
    body = lambda x: x + 1
    calls = compare(body, (x,), devices)
    calls["jax_dist"] = lambda: jax_dist.pmap(body, "i")(x)
    calls["jax.pmap"] = lambda: jax.pmap(body, "i")(x)
    return calls


def decorate_new(devices: int) -> Calls:
    """Decorate a new function in each call, without calling it; the baseline is jax.jit."""
    del devices
    decorators = {"jax.jit": jax.jit, "jit again": jax.jit}
    decorators |= {"jax_dist": jax_dist.pmap, "jax.pmap": jax.pmap}

    def decorate(decorator: Callable) -> Callable[[], object]:
        return lambda: decorator(lambda x: x + 1) and 0

    return {name: decorate(decorator) for name, decorator in decorators.items()}


ROWS = {
    "1 argument": one_argument,
    "100 leaves": functools.partial(many_leaves, 100),
    "1000 leaves": functools.partial(many_leaves, 1000),
    "100 leaves, replicated": functools.partial(replicated_and_mapped, 100),
    "NumPy, 1 MB a device": numpy_argument,
    "mapped again": decorate_again,
}


def feed_back(fun: Callable, state: object) -> Callable[[], object]:
    """Return a call that gives `fun` its last result."""
    states = [state]

    def call() -> object:
        states.append(fun(states.pop()))
        return states[0]

    return call


def time_in_process(rounds: int) -> dict[str, dict[str, np.ndarray]]:
    """Run in each of two processes with four devices: state `[4, 4]` of `[8, 4]`, fed back."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("i",)), P("i"))
    body = lambda x: [leaf + 1 for leaf in x]
    rows = {}
    for leaves in (1, 100, 1000):
        local = [np.ones((4, 4), np.float32)] * leaves
        whole = [jax.make_array_from_process_local_data(sharding, x) for x in local]
        bare = jax.jit(jax.shard_map(body, mesh=sharding.mesh, in_specs=P("i"), out_specs=P("i")))
        calls = {
            "jax.pmap": feed_back(jax.pmap(body, "i"), local),
            "pmap again": feed_back(jax.pmap(body, "i"), local),
            "process-local": feed_back(jax_dist.pmap(body, "i"), local),
            "global": feed_back(jax_dist.pmap(body, "i", arrays="global"), local),
            "bare jit": feed_back(bare, whole),
        }
        rows[f"{leaves} leaves"] = time_calls(calls, max(rounds // (1 + leaves // 50), 5))
    return rows


def count_programs(pmap: Callable) -> int:
    """Return how many programs three steps of a loop compile that feeds its state back."""
    compiled: list[object] = []
    place([jnp.ones((8, 64, 64))], 8)  # compiles JAX's own program that moves arrays

    def listen(event: str, _: float, **details: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details.get("fun_name"))

    state, batch = [jnp.ones((8, 64, 64))] * 12, np.ones((8, 4, 64), np.float32)
    step = pmap(lambda s, x: [jax.lax.pmean(w + x.sum(), "i") for w in s], axis_name="i")
    jax.monitoring.register_event_duration_secs_listener(listen)
    for _ in range(3):
        state = step(state, batch)
    jax.monitoring.clear_event_listeners()
    return len(compiled)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=400, help="rounds of the fast rows")
    parts = ["one", "eight", "loop", "processes"]
    parser.add_argument("--only", choices=parts, help="one part of the output")
    options = parser.parse_args()
    simulated_devices(8)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {jax.devices()[0].device_kind} devices")
    for part, devices, rounds in (("one", 1, options.rounds), ("eight", 8, options.rounds // 4)):
        if options.only in (None, part):
            few = lambda name, rounds=rounds: (
                rounds // 5 if "1000" in name or "MB" in name else rounds
            )
            rows = {name: time_calls(row(devices), max(few(name), 5)) for name, row in ROWS.items()}
            print_ratios(f"{devices} device(s): time of a call", rows)
    if options.only in (None, "one"):
        rows = {"a new function": time_calls(decorate_new(1), options.rounds)}
        print_ratios("decorating", rows)
    if options.only in (None, "loop"):
        counts = {pmap.__module__: count_programs(pmap) for pmap in (jax_dist.pmap, jax.pmap)}
        print(f"\nprograms compiled by 3 steps of a loop, 8 devices: {counts}")
    if options.only in (None, "processes"):
        outcomes = run_processes(time_in_process, options.rounds, processes=2, cpu_devices=4)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        print_ratios("2 processes x 4 devices: state fed back", outcomes[0].value)


if __name__ == "__main__":
    main()
