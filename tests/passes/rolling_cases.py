"""Loops of Python, each with what is left of its `while` loops (or sines) when rolled up."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

ROWS = np.linspace(-1.0, 2.0, 24, dtype=np.float32).reshape(8, 3)
DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One program, and what becomes of it."""

    name: str
    function: Callable[..., Any]
    before: int  # equations of the primitive, at any depth
    after: int
    scans: tuple[int, ...]  # lengths, outermost first
    args: tuple[Any, ...] = (ROWS,)
    primitive: str = "while"
    tolerance: float = 0.0


def episode(x: jax.Array) -> jax.Array:
    """As many turns as `x` needs, so nothing can be computed while it is compiled."""
    return lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: y * 1.5 + 0.1, jnp.abs(x))


def independent(rows: jax.Array) -> list[jax.Array]:
    return [episode(row) for row in rows]


def carried(rows: jax.Array) -> jax.Array:
    x = rows[0]
    for _ in range(6):
        x = jnp.sin(episode(x))
    return x


def carried_and_stacked(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    total, each = jnp.zeros(3), []
    for row in rows:
        total = total * 0.5 + episode(row)
        each.append(total.max())
    return total, jnp.stack(each)


def weak_start(rows: jax.Array) -> jax.Array:
    total = 0.0
    for row in rows:
        total = total + episode(row).sum()
    return jnp.asarray(total)


def reads_two_back(rows: jax.Array) -> jax.Array:
    one, two = rows[0], rows[1]
    for _ in range(6):
        one, two = two, jnp.sin(episode(one)) + two
    return two


def typed_keys(seed: jax.Array) -> jax.Array:
    keys = jax.random.split(jax.random.key(seed), 8)
    return jnp.stack([episode(jax.random.normal(key, (3,))) for key in keys])


def raw_keys(seed: jax.Array) -> jax.Array:
    keys = jax.random.split(jax.random.PRNGKey(seed), 8)
    return jnp.stack([episode(jax.random.normal(key, (3,))) for key in keys])


def gives_keys(seed: jax.Array) -> list[jax.Array]:
    given = []
    for number in range(5):
        key, draw = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        given += [key, episode(jax.random.normal(draw, (3,)))]
    return given


def indexed(rows: jax.Array) -> jax.Array:
    total = jnp.zeros(3)
    for i in range(8):
        total += episode(rows[i])
    return total


def indexed_backwards(rows: jax.Array) -> list[jax.Array]:
    return [episode(rows[7 - i]) for i in range(8)]


def columns(rows: jax.Array) -> list[jax.Array]:
    return [episode(rows[2:7, i]) for i in range(3)] + [episode(rows[2:7, 1] * 2)]


def literals(rows: jax.Array) -> jax.Array:
    x = rows[0]
    for i in range(6):
        x = jnp.sin(episode(x * i + 1.0 / (i + 1)))
    return x


def weak_numbers(rows: jax.Array) -> list[jax.Array]:
    """Each gives a number of Python back, as a weak type."""
    step = jax.jit(lambda x, number: (number * 2, episode(x + number)))
    return [part for number in (0.0, 0.1, 0.2, 0.4) for part in step(rows[0], number)]


def unsigned_numbers(rows: jax.Array) -> list[jax.Array]:
    small = jnp.asarray(rows * 9, jnp.uint8)
    return [episode((small + jnp.uint8(250 + number)).astype(float)) for number in range(5)]


def signed_zeros(rows: jax.Array) -> list[jax.Array]:
    signs = (0.0, -0.0) * 4
    return [1 / (episode(row) * sign) for row, sign in zip(rows, signs, strict=True)]


def jitted_calls(rows: jax.Array) -> list[jax.Array]:
    step = jax.jit(lambda x, number: episode(x + number))
    return [step(rows[0], number / 7) for number in range(5)]


def relus(rows: jax.Array) -> jax.Array:
    x = rows
    for _ in range(6):
        x = jnp.sin(episode(jax.nn.relu(x)))
    return x


def nested(rows: jax.Array) -> jax.Array:
    x = rows[0]
    for row in rows[:4]:
        for _ in range(5):
            x = jnp.sin(episode(x))
        x = x * row
    return x


def in_a_scan(rows: jax.Array) -> jax.Array:
    def step(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        for _ in range(4):
            x = jnp.sin(episode(x + row))
        return x, None

    return lax.scan(step, rows[0], rows)[0]


def in_a_branch(rows: jax.Array) -> jax.Array:
    return lax.cond(rows[0, 0] > 5, lambda: rows[0], lambda: indexed(rows))


def dense(rows: jax.Array) -> jax.Array:
    """Without a loop: 24 equations a copy."""
    x = rows
    for i in range(6):
        for _ in range(6):
            x = jnp.sin(x) * 0.5 + x * 0.25
        x = x + i
    return x


def deep(rows: jax.Array) -> jax.Array:
    """Bodies count: one equation at the top, 30 in it."""

    @jax.jit
    def layer(x: jax.Array, number: float) -> jax.Array:
        for power in range(1, 11):
            x = x + jnp.sin(x * power) * number
        return x

    return layer(layer(layer(layer(rows, 0.1), 0.2), 0.3), 0.4)


def mapped(body: Callable[[jax.Array], Any], *, check_vma: bool) -> Callable[..., Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("i",))
    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)


def summed(block: jax.Array) -> jax.Array:
    """`[2, 3] -> [2, 3]`, with a collective in each copy."""
    x = block
    for number in range(5):
        x = jnp.sin(episode(x + lax.psum(x * number, "i")))
    return x


def in_groups(block: jax.Array) -> jax.Array:
    x = block
    for _ in range(5):
        x = jnp.sin(episode(x + lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]])))
    return x


def total_summed(block: jax.Array) -> jax.Array:
    """What is carried is the same on all devices, and what is stacked is not."""
    total = jnp.zeros(())
    for row in [block[0], block[1], block[0] * 2, block[1] * 3]:
        total = total + lax.psum(episode(row).sum(), "i")
    return block + total


def pmapped(rows: jax.Array) -> jax.Array:
    return jax.pmap(carried, axis_name="i")(rows.reshape(4, 2, 3))


CASES = (
    Case("independent", independent, 8, 1, (8,)),
    Case("carried", carried, 6, 1, (6,)),
    Case("carried and stacked", carried_and_stacked, 8, 1, (8,)),
    Case("a weak start", weak_start, 8, 1, (8,)),
    Case("typed keys", typed_keys, 8, 1, (8,), args=(3,)),
    Case("raw keys", raw_keys, 8, 1, (8,), args=(3,)),
    Case("gives keys", gives_keys, 5, 1, (5,), args=(3,)),
    Case("indexed", indexed, 8, 1, (8,)),
    Case("indexed backwards", indexed_backwards, 8, 1, (8,)),
    Case("literals", literals, 6, 1, (6,)),
    Case("weak numbers", weak_numbers, 4, 1, (4,)),
    Case("unsigned numbers", unsigned_numbers, 5, 1, (5,)),
    Case("signed zeros", signed_zeros, 8, 1, (8,)),
    Case("jitted calls", jitted_calls, 5, 1, (5,)),
    Case("relus", relus, 6, 1, (6,)),
    Case("nested", nested, 20, 1, (4, 5)),
    Case("in a scan", in_a_scan, 4, 1, (8, 4)),
    Case("in a branch", in_a_branch, 8, 1, (8,)),
    Case("dense", dense, 36, 6, (6,), primitive="sin", tolerance=1e-6),
    Case("deep", deep, 40, 10, (4,), primitive="sin", tolerance=1e-6),
    Case("psum, untyped", mapped(summed, check_vma=False), 5, 1, (5,)),
    Case("psum, typed", mapped(summed, check_vma=True), 5, 1, (5,)),
    Case("psum in groups", mapped(in_groups, check_vma=False), 5, 1, (5,)),
    Case("psum carried, untyped", mapped(total_summed, check_vma=False), 4, 1, (4,)),
    Case("psum carried, typed", mapped(total_summed, check_vma=True), 4, 1, (4,)),
    Case("pmap in jit", jax.jit(pmapped), 6, 1, (6,)),
)
