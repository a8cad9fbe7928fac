"""What evolution strategies cost: how the noise is made, what is sent, and beside evosax.

    python benchmarks/es.py                       # 100,000 parameters; some minutes
    python benchmarks/es.py --parameters 1000000 --rounds 2 --without-evosax
    python benchmarks/es.py --low-rank            # a population in a forward pass, by es_eggroll.py

The variants take turns, one generation each, and the first is there twice, to show the noise. CPU
time is the least of all rounds, of the whole process: a busy machine disturbs it least. Bytes and
memory are those of the compiled programs, on one of 8 simulated devices.
"""

import argparse
import dataclasses
import functools
import importlib.util
import math
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "examples")]

import es_common  # noqa: E402  # beside the programs that it measures
import es_eggroll  # noqa: E402  # the same
import es_large  # noqa: E402  # the same

_WAYS = [
    ("materialise", "gradient"),
    ("materialise", "gradient"),
    ("scan", "gradient"),
    ("scan", "scalar"),
    ("scan", "slice"),
    ("table", "gradient"),
    ("table", "scalar"),
    ("table", "slice"),
]
_BIG = 200_000_000  # bytes of noise on one device; more is only compiled


@dataclasses.dataclass
class Way:
    """One way to run a generation."""

    name: str
    run: Callable[[], object] | None  # one generation, to its end; None: only compiled
    exchanged: int  # bytes
    temporary: int  # bytes
    table: int = 0  # bytes
    cpu: list[float] = dataclasses.field(default_factory=list)  # seconds
    wall: list[float] = dataclasses.field(default_factory=list)  # seconds


def ours(parameters: int, noise: str, comm: str) -> Way:
    plan = es_large.Plan(parameters, noise, comm)
    program = es_large.build(plan, jax.devices(), jax.random.key(0))
    state, number = program.state, 0

    def run() -> None:
        nonlocal state, number
        number += 1
        key = jax.device_put(jax.random.key(number), program.table.sharding)
        state, losses = program.run(state, key)
        jax.block_until_ready((state, losses))

    rows = es_large.PAIRS if comm == "scalar" else es_large.PAIRS // len(jax.devices())
    too_big = noise == "materialise" and 4 * parameters * rows > _BIG
    return Way(
        f"{noise}, {comm}",
        None if too_big else run,
        sum(program.exchanged.values()),
        program.temporary,
        program.table_bytes,
    )


def of_evosax(parameters: int) -> Way:
    """Its Open_ES as its notebook on several devices has it: the population cut by a sharding."""
    from evosax.algorithms import Open_ES

    mesh = Mesh(jax.devices(), ("devices",))
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("devices"))
    strategy = Open_ES(
        population_size=2 * es_large.PAIRS,
        solution=jnp.zeros(parameters),
        optimizer=optax.adam(0.02),
        std_schedule=optax.constant_schedule(es_large.SIGMA),
    )
    params = strategy.default_params
    theta = es_large.first_theta(es_large.Plan(parameters), jax.random.key(0))
    state = strategy.init(jax.random.key(1), theta, params)
    state = jax.device_put(state, whole)

    def generation(key: jax.Array, state: object) -> object:
        ask_key, tell_key = jax.random.split(key)
        population, state = strategy.ask(ask_key, state, params)
        population = jax.lax.with_sharding_constraint(population, cut)
        losses = jax.vmap(es_large.rastrigin)(population)
        return strategy.tell(tell_key, population, losses, state, params)[0]

    key = jax.device_put(jax.random.key(2), whole)
    compiled = jax.jit(generation, out_shardings=whole).lower(key, state).compile()
    number = 0

    def run() -> None:
        nonlocal state, number
        number += 1
        state = compiled(jax.device_put(jax.random.key(number), whole), state)
        jax.block_until_ready(state)

    exchanged = sum(es_common.exchanged(compiled.as_text()).values())
    return Way("evosax Open_ES", run, exchanged, compiled.memory_analysis().temp_size_in_bytes)


def measure(ways: list[Way], rounds: int) -> None:
    for round_ in range(-1, rounds):  # the first warms up
        for way in ways:
            if way.run is None:
                continue
            cpu, wall = time.process_time(), time.perf_counter()
            way.run()
            if round_ >= 0:
                way.cpu.append(time.process_time() - cpu)
                way.wall.append(time.perf_counter() - wall)


def print_ways(ways: list[Way]) -> None:
    first = ways[0]
    print(
        f"{'':<28}{'bytes':>12}{'temporary':>12}{'of first':>9}{'table':>8}"
        f"{'CPU ms':>9}{'of first':>9}{'wall ms':>9}"
    )
    for way in ways:
        line = (
            f"{way.name:<28}{way.exchanged:>12,}{way.temporary / 1e6:>9.1f} MB"
            f"{way.temporary / first.temporary:>9.2f}{way.table / 1e6:>5.0f} MB"
        )
        if way.cpu:
            line += f"{1000 * min(way.cpu):>9.1f}"
            line += f"{min(way.cpu) / min(first.cpu):>9.2f}" if first.cpu else f"{'':>9}"
            line += f"{1000 * statistics.median(way.wall):>9.1f}"
        print(line)


def low_rank(rounds: int, *, width: int = 512, pairs: int = 128, rows: int = 4) -> None:
    """Three layers for a population, each member with rows of its own; on one device.

    Except for plain inference, noise is drawn in the pass, and both members of a pair share it.
    """
    layers = range(3)
    random = jax.random.key(0)
    matrices = jax.random.normal(random, (len(layers), width, width)) / width**0.5
    batch = jax.random.normal(random, (pairs, 2 * rows, width))
    scales = 0.01 * jnp.repeat(jnp.array([1.0, -1.0]), rows)[:, None]  # of a pair's rows

    def normal(key: jax.Array, pair: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        numbers = jax.random.normal(jax.random.fold_in(key, pair), shape)
        return jax.lax.optimization_barrier(numbers)  # drawn once, for all that use it

    def signs(key: jax.Array, pair: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        numbers = es_eggroll.signs_of(jax.random.fold_in(key, pair), math.prod(shape))
        return numbers.reshape(shape)

    def plain(matrices: jax.Array, batch: jax.Array, key: jax.Array) -> jax.Array:
        del key
        for layer in layers:
            batch = jnp.tanh(batch @ matrices[layer])
        return batch.mean((1, 2))

    def applied(
        draw: Callable[..., jax.Array], matrices: jax.Array, batch: jax.Array, key: jax.Array
    ) -> jax.Array:
        def one(pair: jax.Array, x: jax.Array) -> jax.Array:
            noise = draw(key, pair, (len(layers), 2, width, 1))
            for layer in layers:
                thin = noise[layer, 0], noise[layer, 1]
                x = jnp.tanh(es_eggroll.dense(x, matrices[layer], thin, scales))
            return x.mean()

        return jax.vmap(one)(jnp.arange(pairs), batch)

    def formed(matrices: jax.Array, batch: jax.Array, key: jax.Array) -> jax.Array:
        def one(each: tuple[jax.Array, jax.Array]) -> jax.Array:
            pair, x = each
            plus, minus = x[:rows], x[rows:]
            for layer in layers:
                noise = 0.01 * normal(key, len(layers) * pair + layer, (width, width))
                plus = jnp.tanh(plus @ (matrices[layer] + noise))
                minus = jnp.tanh(minus @ (matrices[layer] - noise))
            return (plus.mean() + minus.mean()) / 2

        return jax.lax.map(one, (jnp.arange(pairs), batch))

    names = {
        "plain inference": plain,
        "low rank, signs": functools.partial(applied, signs),
        "low rank, normal": functools.partial(applied, normal),
        "full rank, formed": formed,
    }
    ways = []
    for name, pass_ in names.items():
        compiled = jax.jit(pass_).lower(matrices, batch, random).compile()

        def run(compiled: jax.stages.Compiled = compiled) -> None:
            jax.block_until_ready(compiled(matrices, batch, random))

        ways.append(Way(name, run, 0, compiled.memory_analysis().temp_size_in_bytes))
    measure(ways, rounds)
    print(f"{2 * pairs} members, width {width}, {rows} rows each, jax {jax.__version__}")
    least = [min(way.cpu) for way in ways]
    for way, seconds in zip(ways, least, strict=True):
        print(
            f"{way.name:<20}{1000 * seconds:>9.1f} CPU ms{least[0] / seconds:>8.3f} of plain"
            f"{least[-1] / seconds:>8.1f} times full rank{way.temporary / 1e6:>8.1f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program (5)")
    parser.add_argument("--without-evosax", action="store_true")
    parser.add_argument("--low-rank", action="store_true", help="a forward pass of a population")
    parser.add_argument("--rows", type=int, default=4, help="of each member, with --low-rank")
    options = parser.parse_args()
    rounds = options.rounds
    if options.low_rank:
        low_rank(rounds, rows=options.rows)
        return
    jax.config.update("jax_num_cpu_devices", 8)
    makers = [functools.partial(ours, options.parameters, *way) for way in _WAYS]
    if not options.without_evosax:
        if importlib.util.find_spec("evosax") is None:
            parser.error("evosax is not here: pip install 'evosax>=0.3', or --without-evosax")
        makers.append(functools.partial(of_evosax, options.parameters))
    ways = [make() for make in makers]
    measure(ways, rounds)
    print(f"{options.parameters:,} parameters, jax {jax.__version__}, rounds: {rounds}")
    print_ways(ways)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux in KiB
    print(f"{peak / 1e9:.1f} GB: the most that the process held, for all 8 devices")


if __name__ == "__main__":
    main()
