"""Time of tracing, and what rewriting costs and saves: trace time, bytes moved, compile time.

    python benchmarks/rewriting.py                 # all tables; some minutes
    python benchmarks/rewriting.py --only trace    # or bytes, compile
    python benchmarks/rewriting.py --rounds 20

Variants take turns, in an order that changes each round. Printed are ratios: the median over
rounds, and the 10th to 90th percentile in brackets. The baseline stands there twice: the second one
shows the noise. A range that holds 1 is not a finding. On simulated devices nothing crosses a wire,
so bytes saved do not show in times; they are read from the compiled program.
"""

import argparse
import functools
import gc
import random
import time
import warnings
from collections.abc import Callable

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.testing import simulated_devices

Make = Callable[[], Callable[[], object]]  # a new variant, and what of it is timed

LAYERS, WIDTH = 110, 8  # a train step of about 2400 equations


def seconds(variants: dict[str, Make], rounds: int) -> dict[str, np.ndarray]:
    """`{name: [rounds]}`. Each round makes each variant anew, so that no cache knows it.

    The garbage collector waits: it would start in one variant or another.
    """
    taken = {name: np.empty(rounds) for name in variants}
    order = list(variants)
    shuffle = random.Random(0).shuffle
    for round_ in range(-1, rounds):  # the first warms up
        shuffle(order)
        for name in order:
            run = variants[name]()
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            jax.block_until_ready(run())
            elapsed = time.perf_counter() - start
            gc.enable()
            if round_ >= 0:
                taken[name][round_] = elapsed
    return taken


def print_ratios(title: str, taken: dict[str, np.ndarray], baseline: str) -> None:
    print(f"\n{title}; {np.median(taken[baseline]) * 1e3:.4g} ms for '{baseline}'")
    for name, each in taken.items():
        low, middle, high = np.percentile(each / taken[baseline], [10, 50, 90])
        print(f"  {name:<28}{middle:6.2f} [{low:.2f}..{high:.2f}]")


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("i",))


def loss(weights, x):
    for w, b in weights:
        x = x + jnp.tanh(x @ w + b)
    return jnp.mean(x**2)


def mapped_step(pmap: Callable) -> tuple[Callable, tuple]:
    """Return the train step mapped by a pmap, and its arguments."""
    weights = [(np.ones((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32))] * LAYERS
    mapped = pmap(make_step(by_mean), axis_name="i", in_axes=(None, 0), out_axes=None)
    return mapped, (weights, np.ones((8, 2, WIDTH), np.float32))


def make_step(average: Callable) -> Callable:
    """Return a step of gradient descent whose gradients are averaged by `average`."""

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * average(g), weights, gradients)

    return step


def train_step(average: Callable) -> tuple[Callable, tuple]:
    """Return the train step in a shard_map, and its arguments, placed as pmap places them."""
    mapped = jax.shard_map(
        make_step(average), mesh=mesh(), in_specs=(P(), P("i")), out_specs=P(), check_vma=False
    )
    weights = [(np.ones((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32))] * LAYERS
    x = np.ones((16, WIDTH), np.float32)
    placed = jax.device_put(
        (weights, x), (NamedSharding(mesh(), P()), NamedSharding(mesh(), P("i")))
    )
    return mapped, placed


def by_gather(gradient: jax.Array) -> jax.Array:
    return jnp.mean(lax.all_gather(gradient, "i"), axis=0)


def by_mean(gradient: jax.Array) -> jax.Array:
    return lax.pmean(gradient, "i")


def equations(build: Callable[[], tuple[Callable, tuple]]) -> int:
    """Return the number of equations of a function, those of its bodies included."""

    def count(jaxpr: jax.extend.core.Jaxpr) -> int:
        inner = jax.extend.core.jaxprs_in_params
        return sum(1 + sum(map(count, inner(eqn.params))) for eqn in jaxpr.eqns)

    fun, args = build()
    return count(jax.make_jaxpr(fun)(*args).jaxpr)


def trace_times(rounds: int) -> None:
    """Trace and lower: pmap beside a hand-written port, and rewrite beside jit."""

    def lower(transform: Callable, build: Callable[[], tuple[Callable, tuple]]) -> Make:
        def make() -> Callable:
            fun, args = build()
            return lambda: transform(fun).lower(*args) and 0

        return make

    step = functools.partial(train_step, by_mean)
    title = f"trace and lower, {equations(step)} equations"
    variants = {
        "shard_map by hand": lower(jax.jit, step),
        "by hand again": lower(jax.jit, step),
        "jax_dist.pmap": lower(lambda fun: fun, functools.partial(mapped_step, jax_dist.pmap)),
        "jax.pmap": lower(lambda fun: fun, functools.partial(mapped_step, jax.pmap)),
    }
    print_ratios(f"{title}, pmap", seconds(variants, rounds), "shard_map by hand")
    for name, average in (("nothing to rewrite", by_mean), ("220 gathers reduced", by_gather)):
        step = functools.partial(train_step, average)
        transforms = {"jit": jax.jit, "jit again": jax.jit, "rewrite": jax_dist.rewrite}
        variants = {kind: lower(transform, step) for kind, transform in transforms.items()}
        print_ratios(f"{title}, {name}", seconds(variants, rounds), "jit")


def moved_bytes() -> None:
    """Bytes and memory of one device, before and after, from the compiled program."""

    def weighted(x):
        gathered = lax.all_gather(x, "i")
        return jnp.einsum("n...,n->...", gathered, jnp.arange(8.0) / 28)

    programs = {
        "mean": lambda x: jnp.mean(lax.all_gather(x, "i"), axis=0),
        "mean of rows": lambda x: jnp.mean(lax.all_gather(x, "i", tiled=True), axis=0),
        "variance": lambda x: jnp.var(lax.all_gather(x, "i"), axis=0),
        "maximum": lambda x: jnp.max(lax.all_gather(x, "i"), axis=0),
        "logsumexp": lambda x: jax.nn.logsumexp(lax.all_gather(x, "i"), axis=0),
        "weighted": weighted,
        "gradient of mean": jax.grad(lambda x: jnp.sum(jnp.mean(lax.all_gather(x, "i"), 0) ** 2)),
    }
    print("\nbytes that one device moves in a step, and its peak of temporary memory")
    print(f"  {'':<20}{'moved':>24}{'temporary':>28}")
    x = jax.ShapeDtypeStruct((8, 64, 1024), jnp.float32)
    for name, body in programs.items():
        report = jax_dist.explain(jax_dist.pmap(body, "i", gathers="keep"), x)
        moved = f"{report.before.moved_bytes:.0f} -> {report.after.moved_bytes:.0f}"
        memory = f"{report.before.temp_bytes} -> {report.after.temp_bytes}"
        print(f"  {name:<20}{moved:>24}{memory:>28}")


def compile_times(rounds: int) -> None:
    """Lowering and compiling with a captured array, and with the array lifted."""
    x = np.ones(1000, np.float32)
    for megabytes in (1, 16, 100):
        table = jnp.asarray(np.random.default_rng(0).normal(size=(megabytes * 250, 1000)), "f4")
        variants = {
            "captured": _compiled(jax.jit, table, x),
            "captured again": _compiled(jax.jit, table, x),
            "lifted": _compiled(jax_dist.rewrite, table, x),
        }
        title = f"trace, lower and compile, {megabytes} MB captured"
        print_ratios(title, seconds(variants, rounds), "captured")
        text = [len(both(_product(table)).lower(x).as_text()) for both in _BOTH]
        print(f"  program text: {text[0]} -> {text[1]} bytes")


def _product(table: jax.Array) -> Callable:
    return lambda x: (table @ x).sum()


def _compiled(transform: Callable, table: jax.Array, x: np.ndarray) -> Make:
    def make() -> Callable:
        fun = transform(_product(table))
        return lambda: fun.lower(x).compile() and 0

    return make


_BOTH = (jax.jit, jax_dist.rewrite)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=["trace", "bytes", "compile"])
    parser.add_argument("--rounds", type=int, default=10, help="of each variant (10)")
    options = parser.parse_args()
    simulated_devices(8)
    warnings.simplefilter("ignore", jax_dist.CapturedArrayWarning)
    print(f"jax {jax.__version__}, {jax.device_count()} {jax.devices()[0].platform} devices")
    tables = {
        "trace": lambda: trace_times(options.rounds),
        "bytes": moved_bytes,
        "compile": lambda: compile_times(max(3, options.rounds // 3)),
    }
    for name, table in tables.items():
        if options.only in (None, name):
            table()


if __name__ == "__main__":
    main()
