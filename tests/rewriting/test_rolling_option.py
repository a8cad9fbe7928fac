"""`loops="roll"`: through `rewrite` and `explain`, with the other passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from observing import assert_same, mesh_of, nesting, numbers, traced_names

import jax_dist

pytestmark = pytest.mark.rewriting


def episode(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: y * 1.5 + 0.1, jnp.abs(x))


def mean_return(theta: jax.Array, key: jax.Array) -> jax.Array:
    """On one device: six episodes, and what all devices have gathered."""
    returns = []
    for episode_key in jax.random.split(key, 6):
        returns.append(episode(theta + jax.random.normal(episode_key, (3,))).sum())
    return lax.all_gather(jnp.stack(returns), "i").mean()


def train(theta: jax.Array, seeds: jax.Array) -> jax.Array:
    """`[4, 3], [4] -> [4]`."""
    keys = jax.vmap(jax.random.PRNGKey)(seeds)
    return jax.pmap(mean_return, axis_name="i")(theta, keys)


THETA, SEEDS = numbers(4, 3), np.arange(4, dtype=np.uint32)


def test_it_is_asked_for():
    kept = jax_dist.rewrite(train, mesh=mesh_of(devices=4))
    rolled = jax_dist.rewrite(train, mesh=mesh_of(devices=4), loops="roll")

    assert traced_names(kept, THETA, SEEDS)["while"] == 6
    assert traced_names(rolled, THETA, SEEDS)["while"] == 1
    assert_same(rolled(THETA, SEEDS), kept(THETA, SEEDS))


def test_it_comes_after_the_other_passes():
    """The mean is one reduction, and stands behind the scan."""
    rolled = jax_dist.rewrite(train, mesh=mesh_of(devices=4), loops="roll")

    names = traced_names(rolled, THETA, SEEDS)

    assert (names["all_gather"], names["psum"], names["shard_map"]) == (0, 1, 1)
    found = nesting(rolled.trace(THETA, SEEDS).jaxpr, "shard_map", "scan", "while", "psum")
    assert found == ["shard_map", "shard_map/scan", "shard_map/scan/while", "shard_map/psum"]


def told(loops: str) -> list[tuple[str, str, str]]:
    report = jax_dist.explain(train, THETA, SEEDS, mesh=mesh_of(devices=4), loops=loops)
    return [
        (each.outcome, each.what.split(" equations")[1], each.where.split(":")[0])
        for each in report.findings
        if each.code == "JXD407"
    ]


def test_the_report_says_what_was_rolled():
    assert told("roll") == [("rewritten", ": one scan", "tests/rewriting/test_rolling_option.py")]


def test_the_report_says_what_could_be():
    note = ": one scan, with loops='roll'"
    assert told("keep") == [("noted", note, "tests/rewriting/test_rolling_option.py")]


def test_under_grad_and_vmap_and_jit():
    def loss(x: jax.Array) -> jax.Array:
        for number in range(5):
            for _ in range(8):
                x = jnp.sin(x) * 0.5 + 0.25 * x
            x = x + number
        return jnp.sum(x**2)

    rolled = jax_dist.rewrite(loss, loops="roll")
    x = numbers(4, 3)

    assert traced_names(rolled, x)["sin"] < 40
    assert_same(jax.jit(jax.grad(rolled))(x), jax.jit(jax.grad(loss))(x), rtol=1e-5)
    assert_same(jax.vmap(rolled)(x), jax.vmap(loss)(x), rtol=1e-5)


def test_captured_arrays_and_loops():
    """The copies share what was captured: an argument by then."""
    table = jnp.linspace(0.0, 1.0, 3000).reshape(1000, 3)

    def play(offsets: jax.Array) -> jax.Array:
        rows = [lax.dynamic_slice(table, (offset, 0), (1, 3)) for offset in offsets]
        return jnp.stack([episode(row) for row in rows])

    rolled = jax_dist.rewrite(play, loops="roll", warn_bytes=10**9)
    offsets = np.arange(6, dtype=np.int32)

    assert_same(rolled(offsets), play(offsets))
    assert traced_names(rolled, offsets)["while"] == 1
