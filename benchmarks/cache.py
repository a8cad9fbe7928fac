"""What the persistent cache saves: the first step, cold and warm, with and without jax_dist.cache.

    python benchmarks/cache.py                      # all tables; several minutes
    python benchmarks/cache.py --only es            # or layers, stats
    python benchmarks/cache.py --rounds 5

Each first step is that of a fresh process: tracing, then compiling or loading, then running. The
import of JAX is not counted. Variants take turns, in an order that changes each round. Printed are
ratios: the median over rounds, and the lowest to highest in brackets. A range that holds 1 is not a
finding.

  es      the evolution strategy of examples/es_quickstart.py in small, before (it gathers all
          noise and averages) and after (it averages with pmean), each as a jax.pmap
  layers  the gradient of a network of 24 layers, in jit(shard_map)
  stats   compiling a program with and without `jax_dist.cache.stats()`, in one process
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

VARIANTS = {  # what each first step finds: who keeps the cache, and whether it is filled
    "without a cache": ("none", "cold"),
    "without a cache, again": ("none", "cold"),
    "jax alone, cold": ("jax", "cold"),
    "jax alone, warm": ("jax", "warm"),
    "enable(), cold": ("ours", "cold"),
    "enable(), warm": ("ours", "warm"),
}
DEVICES, PAIRS, PARAMETERS = 8, 32, 114
LAYERS, WIDTH, BATCH = 24, 64, 32


def es_step(*, gathered: bool) -> tuple[Callable, tuple]:
    """One generation on each device: theta `[N]` and a key, to the next theta."""
    import jax
    import jax.numpy as jnp

    def update(theta, key):
        noise = jax.random.normal(key, (PAIRS, *theta.shape))  # [pairs, N]
        gain = jax.vmap(fitness)(theta + 0.1 * noise) - jax.vmap(fitness)(theta - 0.1 * noise)
        if gathered:  # before: everything goes to every device
            noise = jax.lax.all_gather(noise, "i").reshape(-1, *theta.shape)
            gain = jax.lax.all_gather(gain, "i").reshape(-1)
            return theta + 0.05 * gain @ noise / noise.shape[0]
        return theta + 0.05 * jax.lax.pmean(gain @ noise / PAIRS, "i")

    def fitness(theta):
        """A policy on a pole, for some steps: `[N] -> []`."""

        def play(_, state):
            hidden = jnp.tanh(state @ theta[:64].reshape(4, 16))
            action = hidden @ theta[64:96].reshape(16, 2)
            return state + 0.02 * jnp.concatenate([action, jnp.sin(state[:2])])

        return jax.lax.fori_loop(0, 50, play, jnp.ones(4)).sum()

    step = jax.pmap(update, "i", in_axes=(None, 0))
    return step, (np.zeros(PARAMETERS, np.float32), jax.random.split(jax.random.key(0), DEVICES))


def layers_step() -> tuple[Callable, tuple]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    def loss(weights, x):
        for weight in weights:
            x = jax.nn.gelu(x @ weight) + x
        return jnp.mean(x**2)

    def step(weights, x):  # x: [batch / devices, width]
        gradients = jax.grad(loss)(weights, x)
        gradients = jax.lax.pmean(gradients, "i")
        return jax.tree.map(lambda weight, each: weight - 0.1 * each, weights, gradients)

    mesh = Mesh(np.array(jax.devices()), ("i",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False)
    weights = [np.full((WIDTH, WIDTH), 0.01, np.float32)] * LAYERS
    return jax.jit(mapped), (weights, np.ones((BATCH, WIDTH), np.float32))


PROGRAMS = {
    "es before": lambda: es_step(gathered=True),
    "es after": lambda: es_step(gathered=False),
    "layers": layers_step,
}


def first_step(program: str, keeper: str, folder: str) -> float:
    """The seconds of the first step in this process, which must be a fresh one."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if keeper == "ours":
        from jax_dist import cache

        cache.enable(folder)
    elif keeper == "jax":
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    step, args = PROGRAMS[program]()
    start = time.perf_counter()
    jax.block_until_ready(step(*args))
    return time.perf_counter() - start


def in_fresh_process(program: str, keeper: str, folder: str) -> float:
    ran = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps([program, keeper, folder])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(ran.stdout)


def seconds(program: str, rounds: int) -> dict[str, np.ndarray]:
    """`{variant: [rounds]}`."""
    taken = {name: np.empty(rounds) for name in VARIANTS}
    warm = {keeper: tempfile.mkdtemp() for keeper in ("jax", "ours")}
    for keeper, folder in warm.items():
        in_fresh_process(program, keeper, folder)  # fills it
    order = list(VARIANTS)
    shuffle = random.Random(0).shuffle
    for round_ in range(rounds):
        shuffle(order)
        for name in order:
            keeper, state = VARIANTS[name]
            empty = tempfile.mkdtemp()
            folder = warm[keeper] if state == "warm" else empty
            taken[name][round_] = in_fresh_process(program, keeper, folder)
            shutil.rmtree(empty)
    for folder in warm.values():
        shutil.rmtree(folder)
    return taken


def print_ratios(title: str, taken: dict[str, np.ndarray], baseline: str, digits: int = 2) -> None:
    print(f"\n{title}; {np.median(taken[baseline]):.3g} s for '{baseline}'")
    for name, each in taken.items():
        ratio = each / taken[baseline]
        low, middle, high = ratio.min(), np.median(ratio), ratio.max()
        print(f"  {name:<26}{middle:7.{digits}f} [{low:.{digits}f}..{high:.{digits}f}]", flush=True)


def stats_overhead(rounds: int) -> dict[str, np.ndarray]:
    """Compiling the layers anew, without a cache: `{variant: [rounds]}`."""
    import jax

    from jax_dist import cache

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    cache.stats()  # from here on our hooks are in JAX, also where nobody counts
    taken = {name: np.empty(rounds) for name in ("compile", "compile, again", "in stats()")}
    order = list(taken)
    shuffle = random.Random(0).shuffle
    for round_ in range(-1, rounds):  # the first warms up
        shuffle(order)
        for name in order:
            step, args = layers_step()
            lowered = step.lower(*args)
            start = time.perf_counter()
            if name == "in stats()":
                with cache.stats():
                    lowered.compile()
            else:
                lowered.compile()
            if round_ >= 0:
                taken[name][round_] = time.perf_counter() - start
            jax.clear_caches()
    return taken


def hook_seconds(calls: int = 10_000) -> float:
    """What our code adds to one compile while stats() counts, in seconds."""
    from jax_dist.cache import stats
    from jax_dist.cache.activation import watcher

    with stats():
        start = time.perf_counter()
        for _ in range(calls):
            watcher.compiled("jit_step", 1.0, None)
        return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("es", "layers", "stats"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(first_step(*json.loads(options.child)))
        return
    for program in PROGRAMS:
        if options.only in (None, program.split()[0]):
            taken = seconds(program, options.rounds)
            print_ratios(f"first step of {program}", taken, "without a cache")
    if options.only in (None, "stats"):
        taken = stats_overhead(options.rounds)
        print_ratios("compiling 24 layers", taken, "compile", digits=3)
        each, compile_ = hook_seconds(), np.median(taken["compile"])
        print(f"  our own code: {each * 1e6:.1f} us a compile, {each / compile_:.5%} of it")


if __name__ == "__main__":
    main()
