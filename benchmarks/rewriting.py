"""What rewriting costs and saves: trace time, bytes moved, memory, compile time, call time.

    python benchmarks/rewriting.py                 # all tables; some minutes
    python benchmarks/rewriting.py --only trace    # or bytes, compile, call
    python benchmarks/rewriting.py --rounds 20

Variants take turns, in an order that changes each round. Printed are ratios: the median over
rounds, and the 10th to 90th percentile in brackets. The baseline stands there twice: the second one
shows the noise. A range that holds 1 is not a finding. On simulated devices nothing crosses a wire,
so bytes saved do not show in times; they are read from the compiled program.
"""

import argparse
import random
import time
import warnings
from collections.abc import Callable

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.testing import simulated_devices

Make = Callable[[], Callable[[], object]]  # a new variant, and what of it is timed

LAYERS, WIDTH = 110, 8  # a train step of about 3000 equations


def seconds(variants: dict[str, Make], rounds: int) -> dict[str, np.ndarray]:
    """`{name: [rounds]}`. Each round makes each variant anew, so that no cache knows it."""
    taken = {name: np.empty(rounds) for name in variants}
    order = list(variants)
    shuffle = random.Random(0).shuffle
    for round_ in range(-1, rounds):  # the first warms up
        shuffle(order)
        for name in order:
            run = variants[name]()
            start = time.perf_counter()
            jax.block_until_ready(run())
            if round_ >= 0:
                taken[name][round_] = time.perf_counter() - start
    return taken


def print_ratios(title: str, taken: dict[str, np.ndarray], baseline: str) -> None:
    print(f"\n{title}; {np.median(taken[baseline]) * 1e3:.4g} ms for '{baseline}'")
    for name, each in taken.items():
        low, middle, high = np.percentile(each / taken[baseline], [10, 50, 90])
        print(f"  {name:<28}{middle:6.2f} [{low:.2f}..{high:.2f}]")


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("i",))


def train_step(average: Callable) -> tuple[Callable, tuple]:
    """A step of gradient descent, its gradients averaged over devices by `average`."""

    def loss(weights, x):
        for w, b in weights:
            x = x + jnp.tanh(x @ w + b)
        return jnp.mean(x**2)

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * average(g), weights, gradients)

    mapped = jax.shard_map(
        step, mesh=mesh(), in_specs=(P(), P("i")), out_specs=P(), check_vma=False
    )
    weights = [(np.ones((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32))] * LAYERS
    return mapped, (weights, np.ones((16, WIDTH), np.float32))


def by_gather(gradient: jax.Array) -> jax.Array:
    return jnp.mean(lax.all_gather(gradient, "i"), axis=0)


def by_mean(gradient: jax.Array) -> jax.Array:
    return lax.pmean(gradient, "i")


def equations(jaxpr: jax.extend.core.Jaxpr) -> int:
    inner = jax.extend.core.jaxprs_in_params
    return sum(1 + sum(map(equations, inner(eqn.params))) for eqn in jaxpr.eqns)


def trace_times(rounds: int) -> None:
    """Tracing and lowering, with and without the rewriting."""
    for name, average in (("nothing to rewrite", by_mean), ("220 gathers reduced", by_gather)):
        plain, args = train_step(average)
        count = equations(jax.make_jaxpr(plain)(*args).jaxpr)

        def lowered(transform: Callable, average: Callable = average) -> Make:
            def make() -> Callable:
                fun, args = train_step(average)
                return lambda: transform(fun).lower(*args) and 0

            return make

        variants = {
            "jit": lowered(jax.jit),
            "jit again": lowered(jax.jit),
            "rewrite": lowered(jax_dist.rewrite),
        }
        title = f"trace and lower, {count} equations, {name}"
        print_ratios(title, seconds(variants, rounds), "jit")


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


def call_times(rounds: int) -> None:
    """Calls after the first, in one process."""
    table = jnp.ones(1000)
    x = jnp.ones(4)
    many = [jnp.ones(4)] * 100
    rows = {
        "one argument": (lambda x: x + 1, (x,)),
        "100 leaves": (lambda x: [leaf + 1 for leaf in x], (many,)),
        "one captured array": (lambda x: x + table[0], (x,)),
    }
    for name, (fun, args) in rows.items():
        calls = {"jit": jax.jit(fun), "jit again": jax.jit(fun), "rewrite": jax_dist.rewrite(fun)}
        variants = {kind: _always(call, args) for kind, call in calls.items()}
        if name == "one captured array":
            by_hand = jax.jit(lambda table, x: x + table[0])
            variants["jit, passed by hand"] = _always(by_hand, (table, x))
        print_ratios(f"a call, {name}", seconds(variants, 100 * rounds), "jit")


def _always(call: Callable, args: tuple) -> Make:
    return lambda: lambda: call(*args)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=["trace", "bytes", "compile", "call"])
    parser.add_argument("--rounds", type=int, default=10, help="of each variant (10)")
    options = parser.parse_args()
    simulated_devices(8)
    warnings.simplefilter("ignore", jax_dist.CapturedArrayWarning)
    print(f"jax {jax.__version__}, {jax.device_count()} {jax.devices()[0].platform} devices")
    tables = {
        "trace": lambda: trace_times(options.rounds),
        "bytes": moved_bytes,
        "compile": lambda: compile_times(max(3, options.rounds // 3)),
        "call": lambda: call_times(options.rounds),
    }
    for name, table in tables.items():
        if options.only in (None, name):
            table()


if __name__ == "__main__":
    main()
