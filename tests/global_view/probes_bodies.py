"""Branches, loops, derivatives and rules of one's own, with collectives in them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from probe import Probe, normal
from probes_collective import RING

X = normal(8, 8, 16)
W = 0.3 * normal(16, 16)
SCALARS = np.arange(8, dtype=np.float32)
COUNTS = np.arange(8, dtype=np.int32)
LONG = normal(8, 512, 16)


def _newton(a: jax.Array) -> jax.Array:
    far = lambda c: jnp.abs(c * c - a - 1) > 1e-6 * (a + 1)
    return lax.while_loop(far, lambda c: 0.5 * (c + (a + 1) / c), a + 1.0)


def _times(count: Any, v: jax.Array) -> jax.Array:
    turn = lambda c: (c[0] - 1, c[1] * 1.1 + 0.1)
    return lax.while_loop(lambda c: c[0] > 0, turn, (count, v))[1]


def _branch_in_scan(v: jax.Array) -> jax.Array:
    def turn(c: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.cond(c.sum() > 0, lambda c: c - r, lambda c: c + r, c), c

    return lax.scan(turn, jnp.zeros(16), v)[0]


FLOW = [
    Probe("cond", lambda v: lax.cond(v.sum() > 0, jnp.sin, lambda v: v * 2, v), (X,)),
    Probe(
        "cond whose other branch is nan",
        lambda a: lax.cond(a > 3, lambda a: jnp.log(a - 3), lambda a: a, a),
        (SCALARS,),
    ),
    Probe(
        "gradient of such a cond",
        jax.grad(lambda a: lax.cond(a > 3, lambda a: jnp.sqrt(a - 3), lambda a: a * 0.0, a)),
        (SCALARS,),
    ),
    Probe(
        "cond on shared",
        lambda p, v: lax.cond(p, jnp.sin, lambda v: v * 2, v),
        (np.ones((), bool), X),
        (0,),
    ),
    Probe(
        "cond on a mean",
        lambda v: lax.cond(lax.pmean(v.sum(), "i") > 0, jnp.sin, lambda v: v * 2, v),
        (X,),
    ),
    Probe(
        "cond with psum in it",
        lambda v: lax.cond(
            lax.psum(v.sum(), "i") > -1e9, lambda v: lax.psum(v, "i"), lambda v: v, v
        ),
        (X,),
    ),
    Probe(
        "switch by axis_index",
        lambda v: lax.switch(lax.axis_index("i") % 3, [jnp.sin, jnp.cos, lambda v: v @ W], v),
        (X,),
    ),
    Probe("while of each device", _times, (COUNTS, X)),
    Probe("while to a limit", _newton, (SCALARS,)),
    Probe(
        "while whose last turn is infinite",
        lambda k: lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1.0, 1 / c[0]), (k, 0.0))[1],
        (SCALARS,),
    ),
    Probe(
        "while with pmean in it",
        lambda v: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + lax.pmean(c[1], "i")), (0, v)
        )[1],
        (X,),
    ),
    Probe(
        "while on psum",
        lambda v: lax.while_loop(
            lambda c: jnp.abs(c).max() > 1.0, lambda c: c * 0.5, lax.psum(v, "i")
        ),
        (X,),
    ),
    Probe(
        "fori_loop of each device",
        lambda k, v: lax.fori_loop(0, k, lambda _, c: c @ W, v),
        (COUNTS, X),
    ),
    Probe(
        "scan with pmean in it",
        lambda v: lax.scan(lambda c, r: (c + lax.pmean(r, "i"), c.sum()), jnp.zeros(16), v),
        (X,),
    ),
    Probe("scan with cond in it", _branch_in_scan, (X,)),
    Probe(
        "associative_scan, cumsum, cumlogsumexp",
        lambda v: (lax.associative_scan(jnp.add, v), jnp.cumsum(v, 0), lax.cumlogsumexp(v)),
        (X,),
    ),
    Probe("map", lambda v: lax.map(lambda r: jnp.sin(r @ W), v), (X,)),
    Probe("jit", jax.jit(lambda v: lax.psum(jnp.sin(v), "i")), (X,)),
    Probe("optimization_barrier", lambda v: lax.optimization_barrier(v) * 2, (X,)),
    Probe("reduce_precision", lambda v: lax.reduce_precision(lax.stop_gradient(v), 5, 10), (X,)),
]


def _of_square(w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(v @ w) ** 2)


def _through_gather(v: jax.Array) -> jax.Array:
    return (lax.all_gather(v, "i", tiled=True) @ lax.all_gather(v, "i", tiled=True).T).var()


@jax.custom_vjp
def _synced(a: jax.Array) -> jax.Array:
    return jnp.sin(a)


_synced.defvjp(lambda a: (jnp.sin(a), a), lambda a, g: (lax.psum(g * jnp.cos(a), "i"),))


@jax.custom_jvp
def _straight(a: jax.Array) -> jax.Array:
    return lax.pmean(a, "i")


_straight.defjvp(lambda primals, tangents: (lax.pmean(primals[0], "i"), tangents[0]))


def _of(step: Any, name: str = "") -> Probe:
    """The gradient of a sum, by the batch."""
    return Probe(f"gradient {name}", jax.grad(lambda v: jnp.sum(step(v))), (X,))


def _of_hessian(v: jax.Array) -> jax.Array:
    found = jax.hessian(lambda a: jnp.tanh(a).sum() * (v @ a).sum())(v[0])
    return lax.pmean(found, "i")


DERIVATIVES = [
    Probe("mean gradient", lambda w, v: lax.pmean(jax.grad(_of_square)(w, v), "i"), (W, X), (0,)),
    Probe(
        "gradient of a mean",
        lambda w, v: jax.grad(lambda w: lax.pmean(_of_square(w, v), "i"))(w),
        (W, X),
        (0,),
    ),
    _of(lambda v: lax.psum(v, "i") ** 2, "through psum"),
    _of(_through_gather, "through all_gather"),
    _of(lambda v: v * lax.ppermute(v, "i", RING), "through ppermute"),
    _of(lambda v: lax.psum_scatter(v, "i", tiled=True) ** 3, "through psum_scatter"),
    _of(lambda v: lax.all_to_all(v, "i", 0, 1, tiled=True) ** 2, "through all_to_all"),
    _of(lambda v: lax.all_gather(v, "i").max(0) * v, "through max of gathered"),
    Probe(
        "gradient through pmax",
        jax.grad(lambda v: lax.pmax(v, "i").sum()),
        (X,),
        refused=NotImplementedError,
    ),
    Probe("hessian", _of_hessian, (X,)),
    Probe(
        "jacfwd through pmean",
        lambda v: jax.jacfwd(lambda a: lax.pmean(jnp.sin(a * v[0]), "i"))(v[1]),
        (X,),
    ),
    _of(lambda v: _synced(v) * v, "by a rule with psum"),
    Probe(
        "gradient by a rule with psum, of shared",
        lambda w, v: jax.grad(lambda w: (_synced(w) * v[:, :16].sum()).sum())(w),
        (W, X),
        (0,),
    ),
    _of(lambda v: _straight(v) ** 2, "straight through pmean"),
    Probe(
        "remat",
        lambda w, v: lax.pmean(
            jax.grad(jax.checkpoint(lambda w: jnp.tanh(jnp.tanh(v @ w) @ w).sum()))(w), "i"
        ),
        (W, X),
        (0,),
    ),
    Probe(
        "remat with psum in it and a policy",
        lambda w, v: jax.grad(
            jax.checkpoint(
                lambda w: (lax.psum(v @ w, "i") ** 2).sum(),
                policy=jax.checkpoint_policies.dots_saveable,
            )
        )(w),
        (W, X),
        (0,),
    ),
]


def _normalized(v: jax.Array, *, synced: bool) -> jax.Array:
    mean, square = v.mean(0), (v * v).mean(0)
    if synced:
        mean, square = lax.pmean((mean, square), "i")
    return (v - mean) * lax.rsqrt(square - mean * mean + 1e-5)


def _mean_gradient(w: jax.Array, v: jax.Array) -> jax.Array:
    return lax.pmean(jax.grad(lambda w: jnp.mean(jnp.tanh(v @ w)))(w), "i")


def _clipped(w: jax.Array, v: jax.Array) -> jax.Array:
    gradient = _mean_gradient(w, v)
    return gradient * jnp.minimum(1.0, 1 / jnp.sqrt((gradient * gradient).sum()))


def _products(dtype: Any, name: str) -> list[Probe]:
    small, long = (W.astype(dtype), X.astype(dtype)), (W.astype(dtype), LONG.astype(dtype))
    return [
        Probe(f"matmul {name}", lambda w, v: v @ w, small, (0,)),
        Probe(f"weight gradient {name}", _mean_gradient, long, (0,)),
    ]


TRAINING = [
    Probe("batch norm of each device", lambda v: _normalized(v, synced=False), (X,)),
    Probe("batch norm of all", lambda v: _normalized(v, synced=True), (X,)),
    _of(lambda v: _normalized(v, synced=True) ** 3, "of batch norm of all"),
    Probe("running mean", lambda v: 0.9 * v.mean(0), (X,)),
    *_products(np.float32, "float32"),
    *_products(jnp.bfloat16, "bfloat16"),
    *_products(np.float16, "float16"),
    Probe("clip by norm", _clipped, (W, X), (0,)),
    Probe(
        "softmax of layer norm",
        lambda v: jax.nn.softmax((v - v.mean(-1, keepdims=True)) / v.std(-1, keepdims=True)),
        (X,),
    ),
    Probe(
        "int32 overflows",
        lambda v: (v * 1103515245 + 12345).sum(),
        (np.random.default_rng(0).integers(0, 2**31 - 1, (8, 99)).astype(np.int32),),
    ),
    Probe("long sum", jnp.sum, (normal(8, 100003),)),
    Probe(
        "long sum bfloat16",
        lambda v: lax.reduce_sum(v, axes=(0,)),
        (normal(8, 10003).astype(jnp.bfloat16),),
    ),
    Probe("own max with nan", jnp.max, (np.where(X > 2, np.nan, X).astype(np.float32),)),
]

PROBES = [*FLOW, *DERIVATIVES, *TRAINING]
