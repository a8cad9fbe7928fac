"""Time of the first step in a fresh process, with a cold and a warm compilation cache.

    python benchmarks/cache.py --rounds 5          # some minutes

The program is the gradient of a network of 24 layers, in jit(shard_map) on 8 devices. A first step
is tracing, then compiling or loading, then running; the import of JAX is not counted. Variants run
in random order. Printed are ratios to a run without a cache: the median over rounds, and the lowest
to highest in brackets. A range that holds 1 is not a finding.
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

import numpy as np

VARIANTS = {  # who keeps the cache, and whether it is filled
    "without a cache": ("none", "cold"),
    "without a cache, again": ("none", "cold"),
    "jax alone, cold": ("jax", "cold"),
    "jax alone, warm": ("jax", "warm"),
    "enable(), cold": ("ours", "cold"),
    "enable(), warm": ("ours", "warm"),
}
DEVICES, LAYERS, WIDTH, BATCH = 8, 24, 64, 32


def time_first_step(keeper: str, folder: str) -> float:
    """Return the seconds of the first step in this process, which must be a fresh one."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if keeper == "ours":
        from jax_dist import cache

        cache.enable(folder)
    elif keeper == "jax":
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    def loss(weights, x):
        for weight in weights:
            x = jax.nn.gelu(x @ weight) + x
        return (x**2).mean()

    def step(weights, x):  # x: [batch / devices, width]
        gradients = jax.lax.pmean(jax.grad(loss)(weights, x), "i")
        return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients)

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    spec = jax.sharding.PartitionSpec
    specs = {"in_specs": (spec(), spec("i")), "out_specs": spec()}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))
    weights = [np.full((WIDTH, WIDTH), 0.01, np.float32)] * LAYERS
    start = time.perf_counter()
    jax.block_until_ready(mapped(weights, np.ones((BATCH, WIDTH), np.float32)))
    return time.perf_counter() - start


def run_fresh(keeper: str, folder: str) -> float:
    process = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps([keeper, folder])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(process.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(time_first_step(*json.loads(options.child)))
        return
    warm = {keeper: tempfile.mkdtemp() for keeper in ("jax", "ours")}
    for keeper, folder in warm.items():
        run_fresh(keeper, folder)  # fills it
    seconds = {name: np.empty(options.rounds) for name in VARIANTS}
    order, shuffle = list(VARIANTS), random.Random(0).shuffle
    for number in range(options.rounds):
        shuffle(order)
        for name in order:
            keeper, state = VARIANTS[name]
            with tempfile.TemporaryDirectory() as empty:
                folder = warm[keeper] if state == "warm" else empty
                seconds[name][number] = run_fresh(keeper, folder)
    for folder in warm.values():
        shutil.rmtree(folder)
    baseline = seconds["without a cache"]
    print(f"{np.median(baseline):.3g} s for the first step without a cache")
    for name, times in seconds.items():
        ratio = times / baseline
        spread = f"[{ratio.min():.2f}..{ratio.max():.2f}]"
        print(f"  {name:<26}{np.median(ratio):7.2f} {spread}", flush=True)


if __name__ == "__main__":
    main()
