# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryTypeIgnoreComment=true
"""A user's project under strict checking: what is mapped keeps the types that it had.

pyright reads this file, and nothing runs it.
"""

import functools
from typing import Any, assert_type

import jax
import jax.numpy as jnp

import jax_dist


def loss(w: jax.Array, batch: dict[str, jax.Array], *, scale: float = 1.0) -> tuple[jax.Array, int]:
    return jax.lax.pmean(jnp.sum(w * batch["x"]) * scale, "i"), 3


def called() -> None:
    mapped = jax_dist.pmap(loss, "i", in_axes=(None, 0), donate_argnums=0)
    results = mapped(jnp.ones(3), {"x": jnp.ones((8, 3))}, scale=2.0)
    assert_type(results, tuple[jax.Array, int])
    mapped(jnp.ones(3))  # pyright: ignore[reportCallIssue]
    mapped(jnp.ones(3), {"x": 1})  # pyright: ignore[reportArgumentType]
    assert_type(mapped.lower(jnp.ones(3)), jax.stages.Lowered)


@jax_dist.pmap
def bare(x: jax.Array) -> jax.Array:
    return x + 1


@jax_dist.pmap(axis_name="i", out_axes=None)
def with_options(x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, "i")


@functools.partial(jax_dist.pmap, axis_name="i", gathers="exact")
def by_partial(x: jax.Array, n: int = 2) -> dict[str, jax.Array]:
    return {"y": x * n}


def decorated() -> None:
    assert_type(bare(jnp.ones(8)), jax.Array)
    assert_type(with_options(jnp.ones(8)), jax.Array)
    assert_type(by_partial(jnp.ones(8), n=3), dict[str, jax.Array])
    by_partial(jnp.ones(8), m=3)  # pyright: ignore[reportCallIssue]


class Trainer:
    @jax_dist.pmap(axis_name="i", static_broadcasted_argnums=0)
    def step(self, x: jax.Array) -> jax.Array:
        return x

    def run(self) -> None:
        assert_type(self.step(jnp.ones(8)), jax.Array)
        self.step()  # pyright: ignore[reportCallIssue]


def rewritten() -> None:
    fixed = jax_dist.rewrite(loss, captures="warn")
    assert_type(fixed(jnp.ones(3), {}, scale=2.0), tuple[jax.Array, int])
    fixed(jnp.ones(3))  # pyright: ignore[reportCallIssue]


def on_global_arrays() -> None:
    view = jax_dist.global_view(loss, "i", shardings="fsdp")
    assert_type(view(jnp.ones(3), {"x": jnp.ones((8, 3))}), tuple[jax.Array, int])
    view(jnp.ones(3), {"x": 1})  # pyright: ignore[reportArgumentType]


def wrong_options() -> None:
    jax_dist.pmap(loss, gathers="often")  # pyright: ignore[reportArgumentType]
    jax_dist.pmap(loss, axis="i")  # pyright: ignore[reportCallIssue]


def untyped(fun: Any) -> None:
    jax_dist.pmap(fun, "i")(1, 2, three=3)
