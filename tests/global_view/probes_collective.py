"""Every collective, of every kind of number, shared and not; and what is read from a gather."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from probe import Probe, normal

I = "i"  # noqa: E741  # the axis, as short as in a formula
RING = [(n, (n + 1) % 8) for n in range(8)]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]

X = normal(8, 8, 16)
WITH_NAN = X.copy()
WITH_NAN[3, 2, 5] = WITH_NAN[5, :, 0] = np.nan
ZEROS = np.where(X > 0, 0.0, -0.0).astype(np.float32)
BFLOAT, HALF = X.astype(jnp.bfloat16), X.astype(np.float16)
_RANDOM = np.random.default_rng(0)
WORDS = _RANDOM.integers(-(2**31), 2**31 - 1, (8, 8, 16)).astype(np.int32)
BYTES = _RANDOM.integers(-128, 127, (8, 8, 16)).astype(np.int8)
COMPLEX = (X + 1j * X[::-1]).astype(np.complex64)
LONG = normal(8, 4096)


def _all(*cases: tuple[str, Callable[[Any], Any], np.ndarray]) -> list[Probe]:
    return [Probe(name, step, (array,)) for name, step, array in cases]


SUMS = _all(
    ("psum", lambda v: lax.psum(v, I), X),
    ("psum of a tree", lambda v: lax.psum({"a": v, "b": v[0]}, I), X),
    ("psum of many numbers", lambda v: lax.psum(v, I), LONG),
    ("psum bfloat16", lambda v: lax.psum(v, I), BFLOAT),
    ("psum of many bfloat16", lambda v: lax.psum(v, I), LONG.astype(jnp.bfloat16)),
    ("psum float16", lambda v: lax.psum(v, I), HALF),
    ("psum float16 overflows", lambda v: lax.psum(v, I), (HALF * 20000).astype(np.float16)),
    ("psum int32 overflows", lambda v: lax.psum(v, I), WORDS),
    ("psum int8 overflows", lambda v: lax.psum(v, I), BYTES),
    ("psum complex", lambda v: lax.psum(v, I), COMPLEX),
    ("psum bool", lambda v: lax.psum(v, I), X > 0),
    ("psum nan", lambda v: lax.psum(v, I), WITH_NAN),
    ("psum signed zeros", lambda v: lax.psum(v, I), -np.zeros((8, 4), np.float32)),
    ("psum of one", lambda v: v * lax.psum(1, I), X),
    ("psum of shared", lambda v: v + lax.psum(jnp.ones(3) * 0.1, I).sum(), X),
    ("psum of psum", lambda v: lax.psum(lax.psum(v, I) * 0.1, I), X),
    ("psum over a tuple", lambda v: lax.psum(v, (I,)), X),
    ("pmean", lambda v: lax.pmean(v, I), X),
    ("pmean bfloat16", lambda v: lax.pmean(v, I), BFLOAT),
    ("pmean int32", lambda v: lax.pmean(v, I), WORDS),
    ("pmax", lambda v: lax.pmax(v, I), X),
    ("pmax nan", lambda v: lax.pmax(v, I), WITH_NAN),
    ("pmin nan", lambda v: lax.pmin(v, I), WITH_NAN),
    ("pmax bfloat16 nan", lambda v: lax.pmax(v, I), WITH_NAN.astype(jnp.bfloat16)),
    ("pmax int32", lambda v: lax.pmax(v, I), WORDS),
    ("pmax bool", lambda v: lax.pmax(v, I), X > 0),
    ("pmax signed zeros", lambda v: lax.pmax(v, I), ZEROS),
    ("pmin signed zeros", lambda v: lax.pmin(v, I), ZEROS),
    ("pmax of shared", lambda v: v + lax.pmax(jnp.ones(3) * 0.1, I).sum(), X),
    ("axis_size", lambda v: v * lax.axis_size(I), X),
    ("axis_index", lambda v: v + lax.axis_index(I), X),
)

GATHERS = _all(
    ("all_gather", lambda v: lax.all_gather(v, I), X),
    ("all_gather axis 1", lambda v: lax.all_gather(v, I, axis=1), X),
    ("all_gather axis -1", lambda v: lax.all_gather(v, I, axis=-1), X),
    ("all_gather tiled", lambda v: lax.all_gather(v, I, tiled=True), X),
    ("all_gather tiled axis 1", lambda v: lax.all_gather(v, I, axis=1, tiled=True), X),
    ("all_gather of shared", lambda v: v.sum() + lax.all_gather(jnp.arange(3.0), I), X),
    ("all_gather bool and int8", lambda v: [lax.all_gather(x, I) for x in (v > 0, v)], BYTES),
    ("sum of gathered", lambda v: lax.all_gather(v, I).sum(0), X),
    ("mean of gathered bfloat16", lambda v: lax.all_gather(v, I).mean(0), BFLOAT),
    ("max of gathered", lambda v: lax.all_gather(v, I).max(0), X),
    ("max of gathered nan", lambda v: lax.all_gather(v, I).max(0), WITH_NAN),
    ("min of gathered nan", lambda v: lax.all_gather(v, I).min(0), WITH_NAN),
    ("max of all gathered nan", lambda v: lax.all_gather(v, I).max(), WITH_NAN),
    ("argmax of gathered", lambda v: lax.all_gather(v, I).argmax(0), X),
    ("argmax of gathered nan", lambda v: lax.all_gather(v, I).argmax(0), WITH_NAN),
    ("argmax of equal numbers", lambda v: lax.all_gather(v, I).argmax(0), np.sign(X)),
    ("sort of gathered nan", lambda v: jnp.sort(lax.all_gather(v, I), 0), WITH_NAN),
    ("median of gathered", lambda v: jnp.median(lax.all_gather(v, I), 0), X),
    ("variance of gathered", lambda v: jnp.var(lax.all_gather(v, I, tiled=True), 0), X),
    ("logsumexp of gathered", lambda v: jax.nn.logsumexp(lax.all_gather(v, I), 0), X),
    ("product of gathered", lambda v: lax.all_gather(v, I).prod(0), X),
    ("any of gathered", lambda v: (lax.all_gather(v, I) > 2).any(0), X),
    ("all of gathered", lambda v: (lax.all_gather(v, I) > -2).all(0), X),
    ("cumsum of gathered", lambda v: jnp.cumsum(lax.all_gather(v, I), 0), X),
    ("gathered, multiplied", lambda v: v @ lax.all_gather(v, I, tiled=True).T, X),
    ("own of gathered", lambda v: lax.all_gather(v, I)[lax.axis_index(I)], X),
    ("gathered, rolled", lambda v: jnp.roll(lax.all_gather(v, I), 1, 0), X),
)

MOVES = _all(
    ("psum_scatter", lambda v: lax.psum_scatter(v, I), X),
    (
        "psum_scatter dimension 1",
        lambda v: lax.psum_scatter(v[:, :8], I, scatter_dimension=1),
        X,
    ),
    ("psum_scatter tiled", lambda v: lax.psum_scatter(v, I, tiled=True), X),
    (
        "psum_scatter tiled dimension 1",
        lambda v: lax.psum_scatter(v, I, scatter_dimension=1, tiled=True),
        X,
    ),
    ("psum_scatter int32", lambda v: lax.psum_scatter(v, I, tiled=True), WORDS),
    ("psum_scatter bfloat16", lambda v: lax.psum_scatter(v, I, tiled=True), BFLOAT),
    (
        "psum_scatter of shared",
        lambda v: v[0] + lax.psum_scatter(jnp.arange(16.0) * 0.1, I, tiled=True).sum(),
        X,
    ),
    ("ppermute ring", lambda v: lax.ppermute(v, I, RING), X),
    ("ppermute without the last", lambda v: lax.ppermute(v, I, RING[:7]), X),
    ("ppermute of one pair", lambda v: lax.ppermute(v, I, [(0, 1)]), X),
    ("ppermute of shared", lambda v: v + lax.ppermute(jnp.ones(16), I, [(0, 1)]), X),
    ("pshuffle", lambda v: lax.pshuffle(v, I, [3, 1, 2, 0, 7, 6, 5, 4]), X),
    ("pswapaxes", lambda v: lax.pswapaxes(v, I, 0), X),
    ("pswapaxes 1", lambda v: lax.pswapaxes(v[:, :8], I, 1), X),
    ("all_to_all", lambda v: lax.all_to_all(v, I, 0, 0), X),
    ("all_to_all 0 1", lambda v: lax.all_to_all(v, I, 0, 1), X),
    ("all_to_all tiled", lambda v: lax.all_to_all(v, I, 0, 0, tiled=True), X),
    ("all_to_all tiled 0 1", lambda v: lax.all_to_all(v, I, 0, 1, tiled=True), X),
    ("all_to_all tiled 1 0", lambda v: lax.all_to_all(v, I, 1, 0, tiled=True), X),
    (
        "all_to_all of shared",
        lambda v: v.sum() + lax.all_to_all(jnp.arange(16.0), I, 0, 0, tiled=True),
        X,
    ),
    ("pcast", lambda v: v + lax.pcast(jnp.ones(3), I, to="varying").sum(), X),
)

GROUPS = _all(
    ("psum in groups", lambda v: lax.psum(v, I, axis_index_groups=HALVES), X),
    ("pmean in groups", lambda v: lax.pmean(v, I, axis_index_groups=HALVES), X),
    ("pmax in groups", lambda v: lax.pmax(v, I, axis_index_groups=HALVES), X),
    ("all_gather in groups", lambda v: lax.all_gather(v, I, axis_index_groups=HALVES), X),
    (
        "psum_scatter in groups",
        lambda v: lax.psum_scatter(v, I, axis_index_groups=HALVES, tiled=True),
        X,
    ),
    (
        "all_to_all in groups",
        lambda v: lax.all_to_all(v, I, 0, 0, axis_index_groups=HALVES, tiled=True),
        X,
    ),
    ("psum of one in groups", lambda v: v * lax.psum(1, I, axis_index_groups=HALVES), X),
)


def _with_vmap(step: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.vmap(step, axis_name="j")


WITH_VMAP = _all(
    ("psum over both axes", _with_vmap(lambda r: lax.psum(r, (I, "j"))), X),
    ("axis_index of both axes", _with_vmap(lambda r: r + lax.axis_index((I, "j"))), X),
)

REFUSED = [
    Probe(
        "all_gather over both axes",
        _with_vmap(lambda r: lax.all_gather(r, (I, "j"))),
        (X,),
        refused=AssertionError,
    ),
    Probe(
        "ppermute over both axes",
        _with_vmap(lambda r: lax.ppermute(r, (I, "j"), [(n, (n + 1) % 64) for n in range(64)])),
        (X,),
        refused=ValueError,
    ),
    Probe("pbroadcast", lambda v: lax.pbroadcast(v, I, 3), (X,), refused=Exception),
]

PROBES = [*SUMS, *GATHERS, *MOVES, *GROUPS, *WITH_VMAP, *REFUSED]
