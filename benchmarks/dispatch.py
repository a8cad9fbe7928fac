"""What a call costs: jax_dist.pmap beside the bare jit(shard_map) object and jax.pmap.

Beside them, in the rows where all take the same arguments, `mapped` of the vendored module.

    python benchmarks/dispatch.py                  # 1 device, 8 devices, 2 processes; some minutes
    python benchmarks/dispatch.py --only one       # only the rows on one device
    python benchmarks/dispatch.py --rounds 100

Calls of all variants take turns, in an order that changes each round, so that a slow moment of the
machine hits them all. Printed are ratios: the median over rounds, and the 10th to 90th percentile
in brackets. The baseline stands there twice: the second one shows the noise. A range that holds 1
is not a finding. On one simulated device the program itself takes the least time, so those rows
show the cost of Python best.
"""

import argparse
import functools
import os
import random
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.migrate._mapped import mapped as vendored
from jax_dist.testing import run_processes, simulated_devices

Calls = dict[str, Callable[[], object]]


def seconds_per_call(calls: Calls, rounds: int, warm_up: int = 3) -> dict[str, np.ndarray]:
    """`{name: [rounds]}`. The calls take turns; the first rounds compile, and do not count."""
    seconds = {name: np.empty(rounds) for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle  # the same order in every process
    for round_ in range(-warm_up, rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            result = calls[name]()
            elapsed = time.perf_counter() - start
            jax.block_until_ready(result)  # not counted: the call returns before the devices do
            if round_ >= 0:
                seconds[name][round_] = elapsed
    return seconds


def ratios(seconds: dict[str, np.ndarray], baseline: str) -> dict[str, str]:
    """Median and spread of each against the baseline, round by round."""
    texts = {}
    for name, each in seconds.items():
        low, middle, high = np.percentile(each / seconds[baseline], [10, 50, 90])
        texts[name] = f"{middle:5.2f} [{low:.2f}..{high:.2f}]"
    return texts


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("i",))


def hand_written(body: Callable, in_specs: object, devices: int, **options: object) -> Callable:
    """jit(shard_map) as one writes it by hand, of a body on blocks `[1, *s]`."""
    mesh = mesh_of(devices)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P("i"), check_vma=False)
    return jax.jit(mapped, **options)


def variants(body: Callable, blocks: Callable, args: tuple, devices: int, *, in_axes=0) -> Calls:
    """The same call by each of them. `blocks` is `body` for the hand-written program."""
    specs = jax.tree.map(lambda axis: P() if axis is None else P("i"), in_axes, is_leaf=_is_none)
    bare = hand_written(blocks, specs, devices)
    ours = jax_dist.pmap(body, "i", in_axes=in_axes)
    theirs = jax.pmap(body, "i", in_axes=in_axes)
    written = vendored(body, "i", in_axes=in_axes)
    return {
        "bare jit": lambda: bare(*args),
        "bare again": lambda: bare(*args),
        "jax_dist": lambda: ours(*args),
        "jax.pmap": lambda: theirs(*args),
        "mapped": lambda: written(*args),
    }


def placed(tree: object, devices: int) -> object:
    return jax.device_put(tree, NamedSharding(mesh_of(devices), P("i")))


def one_argument(devices: int) -> Calls:
    x = placed(np.ones((devices, 4), np.float32), devices)
    return variants(lambda x: x + 1, lambda x: x + 1, (x,), devices)


def many_leaves(leaves: int, devices: int) -> Calls:
    def body(x):
        return [leaf + 1 for leaf in x]

    x = placed([np.ones((devices, 4), np.float32)] * leaves, devices)
    return variants(body, body, (x,), devices)


def shared_and_mapped(leaves: int, devices: int) -> Calls:
    def body(w, x):
        return {name: x * leaf for name, leaf in w.items()}

    names = [f"layer_{i}" for i in range(leaves)]
    mesh = mesh_of(devices)
    w = jax.device_put(dict.fromkeys(names, np.ones(4, np.float32)), NamedSharding(mesh, P()))
    x = placed(np.ones((devices, 4), np.float32), devices)
    return variants(body, body, (w, x), devices, in_axes=(None, 0))


def static_argument(devices: int) -> Calls:
    x = placed(np.ones((devices, 4), np.float32), devices)
    body = lambda n, x: x + n
    ours = jax_dist.pmap(body, "i", static_broadcasted_argnums=0)
    theirs = jax.pmap(body, "i", static_broadcasted_argnums=0)
    mesh = mesh_of(devices)
    bare = jax.jit(
        lambda n, x: jax.shard_map(
            functools.partial(body, n), mesh=mesh, in_specs=P("i"), out_specs=P("i")
        )(x),
        static_argnums=0,
    )
    return _four(lambda f: lambda: f(3, x), bare, ours, theirs)


def keyword(devices: int) -> Calls:
    x = placed(np.ones((devices, 4), np.float32), devices)
    body = lambda x, y: x + y
    ours, theirs = jax_dist.pmap(body, "i"), jax.pmap(body, "i")
    mesh = mesh_of(devices)
    blocks = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    bare = jax.jit(lambda x, y: blocks(x, y))
    return _four(lambda f: lambda: f(x=x, y=x), bare, ours, theirs)


def numpy_argument(devices: int) -> Calls:
    x = np.ones((devices, 262144), np.float32)
    return variants(lambda x: x[:4] + 1, lambda x: x[:, :4] + 1, (x,), devices)


def donation(devices: int) -> Calls:
    body = lambda x: [leaf + 1 for leaf in x]
    bare = hand_written(body, P("i"), devices, donate_argnums=0)
    ours = jax_dist.pmap(body, "i", donate_argnums=0)
    theirs = jax.pmap(body, "i", donate_argnums=0)

    def loop(f: Callable) -> Callable:
        state = [placed([np.ones((devices, 4), np.float32)] * 10, devices)]

        def call():
            state[0] = f(state[0])
            return state[0]

        return call

    return _four(loop, bare, ours, theirs)


def misplaced(devices: int) -> Calls:
    """`jax.pmap` refuses it, so it and the bare object get an explicit device_put each time."""
    x = jax.device_put(np.ones((devices, 262144), np.float32), jax.devices()[0])
    body = lambda x: x[..., :4] + 1
    sharding = NamedSharding(mesh_of(devices), P("i"))
    bare = hand_written(body, P("i"), devices)
    theirs = jax.pmap(body, "i")
    same, fresh = jax_dist.pmap(body, "i"), jax_dist.pmap(body, "i")
    return {
        "bare jit": lambda: bare(jax.device_put(_again(x), sharding)),
        "bare again": lambda: bare(jax.device_put(_again(x), sharding)),
        "jax_dist": lambda: fresh(_again(x)),
        "jax.pmap": lambda: theirs(jax.device_put(_again(x), sharding)),
        "same array": lambda: same(x),
    }


def _again(x: jax.Array) -> jax.Array:
    """Another array object on the same buffer, as a program makes one in each step."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])


def decorating_again(devices: int) -> Calls:
    x = placed(np.ones((devices, 4), np.float32), devices)
    body = lambda x: x + 1
    bare = hand_written(body, P("i"), devices)
    return {
        "bare jit": lambda: bare(x),
        "bare again": lambda: bare(x),
        "jax_dist": lambda: jax_dist.pmap(body, "i")(x),
        "jax.pmap": lambda: jax.pmap(body, "i")(x),
    }


def _four(call: Callable, bare: Callable, ours: Callable, theirs: Callable) -> Calls:
    return {
        "bare jit": call(bare),
        "bare again": call(bare),
        "jax_dist": call(ours),
        "jax.pmap": call(theirs),
    }


def _is_none(x: object) -> bool:
    return x is None


ROWS = {
    "1 argument": one_argument,
    "100 leaves": functools.partial(many_leaves, 100),
    "1000 leaves": functools.partial(many_leaves, 1000),
    "100 leaves, shared": functools.partial(shared_and_mapped, 100),
    "1000 leaves, shared": functools.partial(shared_and_mapped, 1000),
    "static argument": static_argument,
    "keywords": keyword,
    "NumPy, 1 MB a device": numpy_argument,
    "donated state": donation,
    "misplaced argument": misplaced,
    "decorating again": decorating_again,
}


def print_rows(devices: int, rounds: int) -> None:
    print(f"\n{devices} device{'s' * (devices > 1)}: time of a call, against the bare jit object")
    print(f"{'':22}{'bare, us':>9}  {'bare again':20}{'jax_dist':20}{'jax.pmap':20}mapped")
    for number, (name, row) in enumerate(ROWS.items()):
        _progress(f"{number + 1}/{len(ROWS)} {name}")
        slow = "1000" in name or "MB" in name or "misplaced" in name
        seconds = seconds_per_call(row(devices), max(rounds // (5 if slow else 1), 5))
        texts = ratios(seconds, "bare jit")
        base = np.median(seconds["bare jit"]) * 1e6
        cells = "".join(f"{text:20}" for key, text in texts.items() if key != "bare jit")
        _progress("")
        print(f"{name:22}{base:9.1f}  {cells}", flush=True)


BLOCKS, WIDTH = 12, 64  # of the network whose first steps are timed


def network(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jax.nn.gelu(x @ w[:WIDTH]) @ w[WIDTH:]
    return jnp.mean(x**2)


def train(state: tuple, batch: jax.Array) -> tuple:
    params, momentum = state
    loss, gradient = jax.value_and_grad(network)(params, batch)
    gradient = jax.lax.pmean(gradient, "i")
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
    return (params, momentum), jax.lax.pmean(loss, "i")


def first_state(kind: str) -> tuple:
    weights = np.random.default_rng(0).normal(size=(8, 2 * WIDTH, WIDTH)).astype(np.float32) / 8
    make = np.copy if kind == "NumPy" else jnp.asarray
    return [make(weights) for _ in range(BLOCKS)], [make(0 * weights) for _ in range(BLOCKS)]


def first_steps(pmap: Callable, kind: str, *, donated: bool, lowers: bool) -> tuple[int, float]:
    """Programs compiled in three steps, and CPU seconds that they take."""
    compiled: list[object] = []

    def heard(event: str, _: float, **details: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details.get("fun_name"))

    jax.clear_caches()
    batch = np.ones((8, 4, WIDTH), np.float32)
    step = pmap(lambda s, x: train(s, x), axis_name="i", donate_argnums=0 if donated else ())
    state = first_state(kind)
    placed(jax.tree.leaves(state)[0], 8)  # compiles JAX's own program that moves arrays
    jax.monitoring.register_event_duration_secs_listener(heard)
    start = time.process_time()
    if lowers:
        step.lower(state, batch)
    for _ in range(3):
        state, loss = step(state, batch)
    jax.block_until_ready(loss)
    seconds = time.process_time() - start
    jax.monitoring.clear_event_listeners()
    return len(compiled), seconds


def print_first_steps() -> None:
    """Compilation is most of what a user waits for at the start of a training loop."""
    print(f"\nthe first 3 steps of a training loop, {BLOCKS} blocks, 8 devices")
    print(f"{'first state':32}{'programs compiled':24}CPU seconds")
    print(f"{'':32}{'jax_dist':12}{'jax.pmap':12}{'jax_dist':12}{'jax.pmap':12}ratio")
    for kind in ("NumPy", "jnp"):
        for donated, lowers in ((False, False), (True, False), (True, True)):
            ours, theirs = (
                first_steps(pmap, kind, donated=donated, lowers=lowers)
                for pmap in (jax_dist.pmap, jax.pmap)
            )
            name = f"{kind}{', donated' * donated}{', lowered before' * lowers}"
            counts = f"{ours[0]:<12}{theirs[0]:<12}"
            print(f"{name:32}{counts}{ours[1]:<12.2f}{theirs[1]:<12.2f}{ours[1] / theirs[1]:.2f}")


def process_rows(rounds: int) -> dict[str, dict[str, np.ndarray]]:
    """Runs in each of two processes with four devices: state `[4, 4]` of `[8, 4]`, fed back."""
    mesh = Mesh(np.array(jax.devices()), ("i",))
    results = {}
    for leaves in (1, 100, 1000):
        body = lambda x: [leaf + 1 for leaf in x]
        local = [np.ones((4, 4), np.float32)] * leaves
        whole = [
            jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), x) for x in local
        ]
        bare = jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
        )
        calls = {
            "jax.pmap": _fed_back(jax.pmap(body, "i"), local),
            "pmap again": _fed_back(jax.pmap(body, "i"), local),
            "local": _fed_back(jax_dist.pmap(body, "i"), local),
            "global": _fed_back(jax_dist.pmap(body, "i", arrays="global"), local),
            "bare jit": _fed_back(bare, whole),
        }
        results[f"{leaves} leaves"] = seconds_per_call(calls, max(rounds // (1 + leaves // 50), 5))
    return results


def _fed_back(f: Callable, state: object) -> Callable:
    held = [state]

    def call():
        held[0] = f(held[0])
        return held[0]

    return call


def print_processes(rounds: int) -> None:
    print("\n2 processes x 4 devices: time of a call whose state is fed back, against jax.pmap")
    print(f"{'':14}{'pmap, us':>9}  {'pmap again':20}{'local':20}{'global':20}{'bare jit':20}")
    outcomes = run_processes(process_rows, rounds, processes=2, cpu_devices=4, timeout=600)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    for name, seconds in outcomes[0].value.items():
        texts = ratios(seconds, "jax.pmap")
        base = np.median(seconds["jax.pmap"]) * 1e6
        cells = "".join(f"{text:20}" for key, text in texts.items() if key != "jax.pmap")
        print(f"{name:14}{base:9.1f}  {cells}", flush=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=400, help="rounds of the fast rows")
    parser.add_argument(
        "--only", choices=["one", "eight", "loop", "processes"], help="one part of the table"
    )
    options = parser.parse_args()
    simulated_devices(8)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {jax.devices()[0].device_kind} devices")
    if options.only in (None, "one"):
        print_rows(1, options.rounds)
    if options.only in (None, "eight"):
        print_rows(8, options.rounds // 4)
    if options.only in (None, "loop"):
        print_first_steps()
    if options.only in (None, "processes"):
        print_processes(options.rounds)


if __name__ == "__main__":
    main()
