"""What a call costs in several processes: jax_dist.pmap against jax.pmap.

Beside it, `mapped` of `jax-dist migrate --to jax`.

    python benchmarks/processes.py [--rounds 200]

Two processes of two simulated devices each, over the loopback interface. Ratios to `jax.pmap`,
which stands there twice: the second row is the noise. The calls take turns, in an order that is
shuffled anew in each round; counted is the time until a call returns.

`mapped` uses public functions only: each result, an array over all processes, is split into the
slices of this one by `addressable_data` and `make_array_from_single_device_arrays`. The row "the
split alone" is their time for as many arrays, without a program; in `jax.pmap` this is one private
step. So `mapped` costs about the row "global", the split, and a look-up for each argument.
"""

import argparse
from collections.abc import Callable, Sequence

import jax
import numpy as np
from dispatch import Calls, seconds_per_call
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.codemod.vendored.mapped import mapped as vendored
from jax_dist.testing import run_processes


def leaves(count: int) -> Calls:
    """Fed back: the results of a call are the arguments of the next one."""
    body = lambda state: [leaf + 1 for leaf in state]
    start = [np.ones((2, 4), np.float32)] * count

    def loop(mapped: Callable) -> Callable[[], object]:
        state = [mapped(start)]

        def call() -> object:
            state[0] = mapped(state[0])
            return state[0]

        return call

    here = NamedSharding(Mesh(np.array(jax.local_devices()), "i"), P("i"))
    results = jax_dist.pmap(body, "i", arrays="global")(start)

    def part(whole: jax.Array) -> jax.Array:
        slices = [whole.addressable_data(i) for i in range(2)]
        return jax.make_array_from_single_device_arrays((2, 4), here, slices)

    return {
        "the split alone": lambda: [part(whole) for whole in results],
        "jax.pmap": loop(jax.pmap(body, "i")),
        "jax.pmap again": loop(jax.pmap(body, "i")),
        "local": loop(jax_dist.pmap(body, "i")),
        "global": loop(jax_dist.pmap(body, "i", arrays="global")),
        "mapped": loop(vendored(body, "i")),
    }


def shared(count: int) -> Calls:
    """`count` arrays that are the same on all devices, and one that is cut."""
    body = lambda weights, x: sum(weights) * x
    weights = [np.ones(4, np.float32)] * count
    x = np.ones((2, 4), np.float32)
    options, here = {"in_axes": (None, 0)}, jax.local_devices()

    def placed(mapped: Callable, devices: Sequence[jax.Device]) -> Callable[[], object]:
        mesh = Mesh(np.array(devices), "i")
        given = jax.device_put(weights, NamedSharding(mesh, P()))
        cut = jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), x)
        return lambda: mapped(given, cut)

    return {
        "jax.pmap": placed(jax.pmap(body, "i", **options), here),
        "jax.pmap again": placed(jax.pmap(body, "i", **options), here),
        "local": placed(jax_dist.pmap(body, "i", **options), here),
        "global": placed(jax_dist.pmap(body, "i", arrays="global", **options), jax.devices()),
        "mapped": placed(vendored(body, "i", **options), here),
    }


def numpy_input(megabytes: int) -> Calls:
    """A batch that comes from the host."""
    body = lambda x: x[:4] + 1
    batch = np.ones((2, megabytes * 131072), np.float32)
    mesh = Mesh(np.array(jax.devices()), "i")
    whole = NamedSharding(mesh, P("i"))
    bare = jax.jit(
        jax.shard_map(lambda x: x[:, :4] + 1, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    )
    theirs, local = jax.pmap(body, "i"), jax_dist.pmap(body, "i")
    kept, written = jax_dist.pmap(body, "i", arrays="global"), vendored(body, "i")
    return {
        "jax.pmap": lambda: theirs(batch),
        "jax.pmap again": lambda: theirs(batch),
        "local": lambda: local(batch),
        "global": lambda: kept(batch),
        "mapped": lambda: written(batch),
        "from_process_local_data": lambda: bare(
            jax.make_array_from_process_local_data(whole, batch)
        ),
    }


CASES: dict[str, Callable[[], Calls]] = {
    "1 array, fed back": lambda: leaves(1),
    "10 arrays, fed back": lambda: leaves(10),
    "100 arrays, fed back": lambda: leaves(100),
    "100 shared arrays, 1 cut": lambda: shared(100),
    "NumPy, 1 MB": lambda: numpy_input(1),
    "NumPy, 4 MB": lambda: numpy_input(4),
}


def measure(rounds: int) -> dict[str, dict[str, tuple[float, float, float, float]]]:
    """Runs in every process; per case and call, microseconds and percentiles of the ratio."""
    return {name: ratios(case(), rounds) for name, case in CASES.items()}


def ratios(calls: Calls, rounds: int) -> dict[str, tuple[float, float, float, float]]:
    seconds = seconds_per_call(calls, rounds, warm_up=5)
    theirs = seconds["jax.pmap"]
    found = {}
    for name, each in seconds.items():
        low, middle, high = np.percentile(each / theirs, [10, 50, 90])
        found[name] = (1e6 * float(np.median(each)), float(low), float(middle), float(high))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=200, help="calls of each kind")
    rounds = parser.parse_args().rounds
    outcome = run_processes(measure, rounds, processes=2, cpu_devices=2, timeout=900)[0]
    if outcome.error is not None:
        raise outcome.error
    print(f"jax {jax.__version__}, 2 processes x 2 devices, rank 0; median [10%..90%] of ratios")
    for case, calls in outcome.value.items():
        print(case)
        for name, (microseconds, low, middle, high) in calls.items():
            print(f"  {name:<24}{microseconds:9.0f} us {middle:6.2f}  [{low:.2f}..{high:.2f}]")


if __name__ == "__main__":
    main()
