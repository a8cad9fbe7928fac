"""Small steps, each about one thing that JAX can do on a device.

`shared` is the same on all devices, `own` is a device's part of the batch. All are run as
one step, so that they are compiled once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

Array = jax.Array
PROBES: dict[str, Callable[[Array, Array], Any]] = {}
TABLES = ("collective", "bodies", "derivatives", "numbers")

_RING = [(n, (n + 1) % 8) for n in range(8)]
_GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def _table(prefix: str, **functions: Callable) -> None:
    PROBES.update({f"{prefix} {name}": function for name, function in functions.items()})


_table(
    "collective",
    psum=lambda shared, own: lax.psum(own, "i"),
    psum_tree=lambda shared, own: lax.psum({"a": own, "b": shared}, "i"),
    psum_of_shared=lambda shared, own: lax.psum(shared, "i") + own,
    psum_half=lambda shared, own: lax.psum(own.astype(jnp.bfloat16), "i"),
    psum_whole_numbers=lambda shared, own: lax.psum((own * 2e9).astype(jnp.int32), "i"),
    psum_complex=lambda shared, own: lax.psum(own + 1j * shared, "i"),
    psum_groups=lambda shared, own: lax.psum(own, "i", axis_index_groups=_GROUPS),
    psum_of_one=lambda shared, own: own / lax.psum(1, "i"),
    pmean=lambda shared, own: shared - lax.pmean(own, "i"),
    pmax=lambda shared, own: lax.pmax(own, "i") + shared,
    pmin_nan=lambda shared, own: lax.pmin(jnp.where(own > 1, jnp.nan, own), "i"),
    axis_index=lambda shared, own: shared * lax.axis_index("i"),
    all_gather=lambda shared, own: lax.all_gather(own, "i", axis=1),
    all_gather_tiled=lambda shared, own: lax.all_gather(own, "i", tiled=True) @ shared.T,
    all_gather_groups=lambda shared, own: lax.all_gather(own, "i", axis_index_groups=_GROUPS),
    gathered_max_nan=lambda shared, own: lax.all_gather(jnp.where(own > 2, jnp.nan, own), "i").max(
        0
    ),
    gathered_sort=lambda shared, own: jnp.sort(lax.all_gather(own, "i"), 0),
    gathered_own=lambda shared, own: lax.all_gather(own, "i")[lax.axis_index("i")],
    psum_scatter=lambda shared, own: lax.psum_scatter(own, "i", tiled=True),
    psum_scatter_of_shared=lambda shared, own: lax.psum_scatter(shared, "i") + own[0],
    ppermute=lambda shared, own: lax.ppermute(own, "i", _RING),
    ppermute_partial=lambda shared, own: lax.ppermute(shared, "i", _RING[:3]),
    all_to_all=lambda shared, own: lax.all_to_all(own, "i", 0, 1, tiled=True),
    all_to_all_of_shared=lambda shared, own: lax.all_to_all(shared, "i", 0, 0) + own,
    psum_over_vmap=lambda shared, own: jax.vmap(lambda x: lax.psum(x, ("i", "j")), axis_name="j")(
        own
    ),
)

_table(
    "bodies",
    jit=lambda shared, own: jax.jit(lambda s, o: (s * 2, lax.pmean(s * o, "i"), o))(shared, own),
    jit_in_jit=lambda shared, own: jax.jit(
        lambda s, o: jax.jit(lambda s, o: (s + lax.pmean(o, "i"), o))(s, o)
    )(shared, own),
    scan_carries_shared=lambda shared, own: lax.scan(
        lambda w, x: (w - 0.5 * lax.pmean(x * w[0], "i"), jnp.sum(w * x)), shared, own
    ),
    scan_reversed=lambda shared, own: lax.scan(
        lambda w, x: (0.5 * w + lax.pmean(x, "i"), w[0]), shared, own, reverse=True
    ),
    scan_carry_demoted=lambda shared, own: lax.scan(
        lambda c, x: ((c[1], c[1] + x, lax.pmean(c[0] + x, "i")), None),
        (shared[0], shared[0], shared[1]),
        own,
    )[0],
    scan_of_nothing=lambda shared, own: lax.scan(
        lambda w, x: (w + lax.pmean(x, "i"), x), shared[0], own[:0]
    ),
    scan_in_scan=lambda shared, own: lax.scan(
        lambda w, _: lax.scan(lambda w, x: (0.5 * w + lax.pmean(x, "i"), w), w, own[:2]),
        shared[0],
        None,
        length=2,
    ),
    scan_varying=lambda shared, own: lax.scan(lambda c, x: (c * x, c + x), shared[0], own),
    fori=lambda shared, own: lax.fori_loop(0, 3, lambda n, w: w + lax.pmean(own * n, "i"), shared),
    while_shared=lambda shared, own: lax.while_loop(
        lambda c: lax.pmax(jnp.max(jnp.abs(c[0])), "i") > 0.1,
        lambda c: (c[0] * 0.25, c[1] + lax.pmean(own, "i")),
        (own, shared),
    ),
    while_own=lambda shared, own: lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] * own), (lax.axis_index("i"), shared)
    ),
    cond_shared=lambda shared, own: lax.cond(
        lax.pmean(jnp.sum(own), "i") > 0,
        lambda: (lax.pmean(own, "i"), own),
        lambda: (shared, 2 * own),
    ),
    cond_own=lambda shared, own: lax.cond(
        jnp.sum(own) > 0, lambda: (shared, own), lambda: (shared * 2, shared)
    ),
    switch_index=lambda shared, own: lax.switch(
        lax.axis_index("i") % 3, [jnp.sin, jnp.cos, lambda x: x @ shared.T @ shared], own
    ),
    vmap_of_while=lambda shared, own: jax.vmap(
        lambda n, x: lax.while_loop(
            lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] + lax.pmean(x, "i")), (n, shared[0])
        )
    )(jnp.arange(3), own[:3]),
    map=lambda shared, own: lax.map(lambda x: lax.pmean(x, "i") @ shared.T, own),
    associative_scan=lambda shared, own: lax.associative_scan(jnp.add, own * shared),
    remat=lambda shared, own: jax.grad(
        jax.checkpoint(lambda w: jnp.sum(lax.psum(jnp.sin(own * w), "i") ** 2))
    )(shared),
)


@jax.custom_vjp
def _synced(x: Array) -> Array:
    return jnp.sin(x)


_synced.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (lax.psum(g * jnp.cos(x), "i"),))


@jax.custom_jvp
def _straight(x: Array) -> Array:
    return lax.pmean(x, "i")


_straight.defjvp(lambda primals, tangents: (lax.pmean(primals[0], "i"), tangents[0]))


@jax.custom_batching.custom_vmap
def _one_rule(x: Array) -> Array:
    return jnp.sin(x)


@_one_rule.def_vmap
def _(size: int, batched: Any, x: Array) -> tuple[Array, bool]:
    del size, batched
    return jnp.cos(x), True


def _double(source: Any, target: Any) -> None:
    target[...] = source[...] * 2


_SQUARE = np.eye(8, dtype=np.float32) * 3

_table(
    "derivatives",
    gradient=lambda shared, own: lax.pmean(
        jax.grad(lambda w: jnp.sum(jnp.tanh(own * w)))(shared), "i"
    ),
    through_psum=lambda shared, own: jax.grad(lambda x: jnp.sum(lax.psum(x, "i") ** 2))(own),
    through_pmean=lambda shared, own: jax.grad(lambda w: lax.pmean(jnp.mean(own * w), "i"))(shared),
    through_gather=lambda shared, own: jax.grad(
        lambda x: jnp.var(lax.all_gather(x, "i", tiled=True) @ shared.T)
    )(own),
    through_ppermute=lambda shared, own: jax.grad(
        lambda x: jnp.sum(x * lax.ppermute(x, "i", _RING))
    )(own),
    forward=lambda shared, own: jax.jvp(
        lambda w: lax.pmean(jnp.sin(own * w), "i"), (shared,), (own,)
    ),
    hessian=lambda shared, own: lax.pmean(
        jax.hessian(lambda w: jnp.sum(jnp.tanh(own[0, :3] * w)) ** 2)(shared[0, :3]), "i"
    ),
    custom_vjp=lambda shared, own: jax.grad(lambda w: jnp.sum(_synced(w) * own))(shared),
    custom_jvp=lambda shared, own: jax.grad(lambda x: jnp.sum(_straight(x) ** 2))(own),
    custom_vmap=lambda shared, own: _one_rule(own) + _one_rule(shared),
    pallas=lambda shared, own: [
        pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
        for x in (shared, own)
    ],
    solve=lambda shared, own: [
        jnp.linalg.solve(_SQUARE + jnp.outer(x[:, 0], x[:, 1]), x) for x in (shared, own)
    ],
    solve_of_mean=lambda shared, own: jnp.linalg.inv(_SQUARE + lax.pmean(own[:, :8], "i")),
    cg=lambda shared, own: lax.psum(
        jax.scipy.sparse.linalg.cg(lambda x: _SQUARE @ x, own[:, 0], maxiter=2)[0], "i"
    ),
)

_table(
    "numbers",
    batch_norm_synced=lambda shared, own: jax.grad(
        lambda x: jnp.sum((x - lax.pmean(x.mean(0), "i")) ** 3)
    )(own),
    clip_by_norm=lambda shared, own: (lambda g: g / jnp.maximum(1, jnp.sqrt(jnp.sum(g * g))))(
        lax.pmean(own, "i")
    ),
    rbg=lambda shared, own: jax.random.normal(
        jax.random.fold_in(jax.random.key(3, impl="rbg"), lax.axis_index("i")), (5,)
    ),
    shared_key=lambda shared, own: own * jax.random.uniform(jax.random.key(4), own.shape),
    permutation=lambda shared, own: jax.random.permutation(
        jax.random.fold_in(jax.random.key(5), lax.axis_index("i")), own
    ),
    cholesky=lambda shared, own: jnp.linalg.cholesky(_SQUARE + lax.pmean(own @ own.T, "i")),
    scatter_add=lambda shared, own: lax.psum(shared.at[jnp.arange(3)].add(own[0]), "i"),
    convolution=lambda shared, own: lax.pmean(jnp.convolve(own[0], shared[0]), "i"),
    weak_types=lambda shared, own: (own.sum() * 0 + 1, 2, None, True),
    pcast=lambda shared, own: (
        lax.pcast(shared, "i", to="varying") * own if hasattr(lax, "pcast") else shared * own
    ),
    constraint=lambda shared, own: lax.with_sharding_constraint(own, jax.P()) * shared,
)


def step_of(
    *tables: str,
) -> Callable[[dict[str, Any], Array], tuple[dict[str, Any], dict[str, Any]]]:
    """All probes of some tables as one step."""

    def step(state: dict[str, Any], own: Array) -> tuple[dict[str, Any], dict[str, Any]]:
        shared = state["shared"]
        results = {
            name: probe(shared, own) for name, probe in PROBES.items() if name.split()[0] in tables
        }
        return {"shared": 0.5 * shared + lax.pmean(own, "i")}, results

    return step


def arguments() -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(0)
    return {"shared": random.normal(size=(8, 16)).astype(np.float32)}, random.normal(
        size=(8, 8, 16)
    ).astype(np.float32)
