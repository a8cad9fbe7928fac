"""Evolution strategies with many parameters: where the noise comes from, and what is sent.

    python examples/es_large.py --parameters 100000 --noise table --comm scalar --generations 20

The noise of a population is as large as the population itself: 128 rows of a million parameters are
half a gigabyte, which need not exist at any one time. What is sent can be the gradient, or scores
alone, where each device makes everyone's noise again. Prints what the choice costs: bytes, memory
and CPU time. All choices but `--noise table` learn with the same noise, so they have the same
curve, on any number of devices.

Shapes: `N` parameters in `BLOCKS` blocks, `P` mirrored pairs, `D` devices. A row is the noise of
one pair, `[N]`, or those of its blocks that are asked for.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import chex
import es_common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from es_common import FLAGS
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

flags.DEFINE_integer("parameters", 100_000, "How many; a multiple of 8.", lower_bound=64)
flags.DEFINE_enum(
    "noise",
    "scan",
    ["table", "scan", "materialise"],
    "table: rows are read from one long table, at random places. scan: a row is drawn, used and"
    " forgotten, and drawn again for the gradient. materialise: all rows of a device are there at"
    " once.",
)
flags.DEFINE_enum(
    "comm",
    "gradient",
    ["scalar", "gradient", "slice"],
    "What devices send besides the scores. scalar: nothing, each makes all noise again. gradient:"
    " its share of the gradient, which is summed. slice: each updates a part of the parameters,"
    " with everyone's noise for that part, and sends the part.",
)

PAIRS, SIGMA, BLOCKS = 128, 0.1, 8
ADAM = optax.adam(0.02)
SMALLEST_TABLE = 4_000_000  # 16 MB

Row: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]  # pair, blocks [b] -> [b * N / BLOCKS]
State: TypeAlias = tuple[jax.Array, optax.OptState]  # theta, [N], and Adam's


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes, and the choices of the flags."""

    parameters: int  # N
    noise: str = "scan"
    comm: str = "gradient"

    def __post_init__(self) -> None:
        chex.assert_is_divisible(self.parameters, BLOCKS)

    @property
    def block(self) -> int:
        return self.parameters // BLOCKS

    @property
    def table_size(self) -> int:
        return max(SMALLEST_TABLE, 2 * self.parameters) if self.noise == "table" else 0


def rastrigin(x: jax.Array) -> jax.Array:
    """Return `[N] -> []`, for each parameter; 0 at 0, and full of other valleys."""
    return jnp.mean(10 + x**2 - 10 * jnp.cos(2 * jnp.pi * x))


def first_theta(plan: Plan, key: jax.Array) -> jax.Array:
    """Return `[N]`, which is not 0: there, both of a mirrored pair score the same."""
    return 2.5 + 0.2 * jax.random.normal(key, (plan.parameters,))


def row_maker(plan: Plan, key: jax.Array, table: jax.Array) -> Row:
    """Return the function that makes rows in one generation. The key is not consumed.

    A row is the same on every device, in any batch, and in parts.
    """
    es_common.check_redrawable(key)

    def from_table(pair: jax.Array, blocks: jax.Array) -> jax.Array:
        pair_key = jax.random.fold_in(key, pair)
        offset = jax.random.randint(pair_key, (), 0, table.size - plan.parameters)
        size = blocks.size * plan.block
        return lax.dynamic_slice(table, (offset + blocks[0] * plan.block,), (size,))

    def drawn(pair: jax.Array, blocks: jax.Array) -> jax.Array:
        keys = es_common.keys_of(jax.random.fold_in(key, pair), blocks)
        return jax.vmap(lambda k: jax.random.normal(k, (plan.block,)))(keys).ravel()

    return from_table if plan.noise == "table" else drawn


def play(theta: jax.Array, row: jax.Array) -> jax.Array:
    """Return `[N], [N] -> [2]`: the losses of both of a pair. Put your simulator here."""
    return jnp.stack([rastrigin(theta + SIGMA * row), rastrigin(theta - SIGMA * row)])


def weighted_sum(weights: jax.Array, row: Callable, pairs: jax.Array) -> jax.Array:
    """Return `[p], [p] -> [b * N / BLOCKS]`, of rows that are there one after the other."""

    def add(total: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        weight, pair = item
        return total + weight * row(pair), None

    size = jax.eval_shape(row, pairs[0])
    return lax.scan(add, jnp.zeros(size.shape), (weights, pairs))[0]


def generation(
    plan: Plan, state: State, table: jax.Array, key: jax.Array, pairs: jax.Array
) -> tuple[State, jax.Array]:
    """Update on one device, with its `pairs`, `[P / D]`; also return all losses, `[P, 2]`.

    The key is consumed. With slices, Adam's state is that of this device's slice.
    """
    theta, adam = state
    make = row_maker(plan, key, table)
    all_pairs, all_blocks = jnp.arange(PAIRS), jnp.arange(BLOCKS)
    own_blocks = lax.axis_index("devices") * (BLOCKS // lax.axis_size("devices"))
    own_blocks += jnp.arange(BLOCKS // lax.axis_size("devices"))

    def whole(pair: jax.Array) -> jax.Array:
        return make(pair, all_blocks)

    if plan.noise == "materialise":
        rows = jax.vmap(whole)(pairs)  # [P / D, N]
        local_losses = jax.vmap(play, in_axes=(None, 0))(theta, rows)
    else:
        local_losses = lax.map(lambda pair: play(theta, whole(pair)), pairs)
    losses = lax.all_gather(local_losses, "devices", tiled=True)  # [P, 2]
    ranks = es_common.centred_ranks(losses.ravel()).reshape(PAIRS, 2)
    weights = (ranks[:, 0] - ranks[:, 1]) / (2 * PAIRS * SIGMA)  # [P]

    add_up = weighted_sum
    if plan.noise == "materialise":
        add_up = lambda weights, row, pairs: weights @ jax.vmap(row)(pairs)
    if plan.comm == "gradient":
        gradient = lax.psum(add_up(weights[pairs], whole, pairs), "devices")
    else:
        blocks = own_blocks if plan.comm == "slice" else all_blocks
        gradient = add_up(weights, functools.partial(make, blocks=blocks), all_pairs)

    change, adam = ADAM.update(gradient, adam)
    if plan.comm == "slice":
        change = lax.all_gather(change, "devices", tiled=True)  # [N / D] -> [N]
    return (optax.apply_updates(theta, change), adam), losses


def specs_of(plan: Plan, adam: optax.OptState) -> Any:
    """Return specs of Adam's state: sharded where each device updates a slice."""
    if plan.comm != "slice":
        return jax.tree.map(lambda _: P(), adam)
    return jax.tree.map(lambda leaf: P("devices") if leaf.ndim else P(), adam)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled generation, and its first arguments."""

    compiled: jax.stages.Compiled  # state, table, key, pairs -> state, losses
    state: State
    table: jax.Array
    pairs: jax.Array

    def run(self, state: State, key: jax.Array) -> tuple[State, jax.Array]:
        return self.compiled(state, self.table, key, self.pairs)

    @property
    def exchanged(self) -> dict[str, int]:
        """Return the bytes of the results of collectives, on one device in one generation."""
        return es_common.exchanged(self.compiled.as_text())

    @property
    def temporary(self) -> int:
        """Return the bytes that one device needs besides arguments and results."""
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the noise table on one device."""
        return self.table.nbytes


def build(plan: Plan, devices: Sequence[jax.Device], key: jax.Array) -> Program:
    """Place the arguments, and compile. The key is consumed."""
    chex.assert_is_divisible(BLOCKS, len(devices))
    mesh = Mesh(np.array(devices), ("devices",))
    theta_key, table_key = jax.random.split(key)
    theta = first_theta(plan, theta_key)
    adam = ADAM.init(theta)
    specs = ((P(), specs_of(plan, adam)), P(), P(), P("devices"))
    table = jax.random.normal(table_key, (plan.table_size,))
    arguments = ((theta, adam), table, key, jnp.arange(PAIRS))
    placed = jax.tree.map(
        lambda spec, part: jax.device_put(part, NamedSharding(mesh, spec)),
        specs,
        arguments,
        is_leaf=lambda x: isinstance(x, P),
    )
    step = jax.shard_map(
        functools.partial(generation, plan),
        mesh=mesh,
        in_specs=specs,
        out_specs=(specs[0], P()),
        check_vma=False,  # which cannot tell that what is gathered is the same on all devices
    )
    compiled = jax.jit(step, donate_argnums=0).lower(*placed).compile()
    state, table, _, pairs = placed
    return Program(compiled, state, table, pairs)


def train(
    plan: Plan,
    devices: Sequence[jax.Device],
    seed: int,
    generations: int,
    follow: es_common.Follow,
    saved: es_common.Checkpoints,
) -> tuple[Program, State]:
    build_key, key = jax.random.split(jax.random.key(seed))
    program = build(plan, devices, build_key)
    whole = program.table.sharding
    state, done = saved.restore(program.state)
    for number in range(done, generations):
        step_key = jax.device_put(jax.random.fold_in(key, number), whole)
        state, losses = program.run(state, step_key)
        follow(number, loss=float(losses.mean()))
        saved.save(number + 1, state)
    return program, state


def main() -> None:
    out = es_common.prepare()
    plan = Plan(FLAGS.parameters, FLAGS.noise, FLAGS.comm)
    curve, start = es_common.Curve(out, FLAGS.generations), time.process_time()
    with es_common.checkpoints(out, FLAGS.save_every) as saved:
        devices, seed = es_common.devices(), FLAGS.seed
        program, _ = train(plan, devices, seed, FLAGS.generations, curve, saved)
    seconds = time.process_time() - start
    losses = curve["loss"]
    title = f"Rastrigin, {plan.parameters:,} parameters, {plan.noise}, {plan.comm}"
    lines = {"mean of the population": losses}
    picture = es_common.draw_curves(out, lines, title, "loss for each parameter")
    print(f"loss         {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"exchanged    {sum(program.exchanged.values()):,} bytes {program.exchanged}")
    print(f"temporary    {program.temporary:,} bytes on each device")
    print(f"noise table  {program.table_bytes:,} bytes on each device")
    print(f"CPU time     {seconds:.1f} s, compilation included")
    print(f"picture      {picture}")


if __name__ == "__main__":
    es_common.run(main, "es_large", generations=20)
