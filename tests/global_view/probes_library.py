"""What of jax.numpy, lax and their like runs on a device: each has a rule of its own somewhere."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from probe import Probe, normal

X = normal(8, 8, 16)
A = normal(8, 6, 6)
S = A @ A.transpose(0, 2, 1) + 6 * np.eye(6, dtype=np.float32)


def _type(v: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.shape, v.dtype)


def _of(array: np.ndarray, **steps: Callable[[Any], Any]) -> list[Probe]:
    return [Probe(name.replace("_", " "), step, (array,)) for name, step in steps.items()]


ALGEBRA = [
    *_of(
        S,
        cholesky=jnp.linalg.cholesky,
        inv=jnp.linalg.inv,
        solve=lambda m: jnp.linalg.solve(m, m[0]),
        eigh=jnp.linalg.eigh,
        solve_triangular=lambda m: jax.scipy.linalg.solve_triangular(m, m[0], lower=True),
        cg=lambda m: jax.scipy.sparse.linalg.cg(lambda u: m @ u, m[0])[0],
        eigvalsh_complex=lambda m: jnp.linalg.eigvalsh(m + 1j * (m - m.T)),
    ),
    *_of(
        A,
        svd=jnp.linalg.svd,
        qr=jnp.linalg.qr,
        eigvals=jnp.linalg.eigvals,
        slogdet=jnp.linalg.slogdet,
    ),
    *_of(0.1 * A, expm=jax.scipy.linalg.expm),
]


def _set_by_index(v: jax.Array) -> jax.Array:
    v = v.at[jnp.argmax(v[:, 0])].set(0.0).at[1].add(3.0)
    return v.at[:, jnp.argmin(v[0])].max(0.5)


ARRAYS = _of(
    X,
    fft=jnp.fft.fft,
    rfft2=jnp.fft.rfft2,
    sort=lambda v: jnp.sort(v, -1),
    argsort=lambda v: jnp.argsort(v, 0),
    top_k=lambda v: lax.top_k(v, 3),
    approx_max_k=lambda v: lax.approx_max_k(v, 3),
    unique=lambda v: jnp.unique(v.round(), size=6),
    nonzero=lambda v: jnp.nonzero(v > 0, size=9),
    searchsorted=lambda v: jnp.searchsorted(jnp.sort(v[0]), v[1]),
    interp=lambda v: jnp.interp(v[0], jnp.arange(16.0) - 8, v[1]),
    quantile=lambda v: jnp.quantile(v, 0.3),
    histogram=lambda v: jnp.histogram(v, 5)[0],
    segment_sum=lambda v: jax.ops.segment_sum(v, jnp.arange(8) // 3, 3),
    take_along_axis=lambda v: jnp.take_along_axis(v, jnp.argsort(v, 1), 1),
    set_by_index=_set_by_index,
    own_slice=lambda v: lax.dynamic_slice(v, (lax.axis_index("i") * 3, 0), (3, 4)),
    own_update=lambda v: lax.dynamic_update_slice(
        v, jnp.ones((3, 4)), (lax.axis_index("i") * 3, 2)
    ),
    index_beyond_the_end=lambda v: v[lax.axis_index("i") * 5],
    pooling=lambda v: lax.reduce_window(v, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    cumprod_and_cummax=lambda v: (jnp.cumprod(v, 1), lax.cummax(v)),
    convolve=lambda v: jnp.convolve(v[0], v[1][:5]),
    reshape=lambda v: v.reshape(-1),
    roll_flip_pad=lambda v: (jnp.roll(v, 2, 0), v[::-1], jnp.pad(v, 3)),
    ragged_dot=lambda v: lax.ragged_dot(v, jnp.ones((2, 16, 4)), jnp.array([3, 5])),
    special_functions=lambda v: (
        jax.scipy.special.gammaln(v),
        jax.scipy.special.betainc(0.5, 0.7, jax.nn.sigmoid(v)),
        jax.scipy.special.gammainc(1.5, jnp.abs(v)),
    ),
    einsum=lambda v: jnp.einsum("ab,cb->ac", v, v),
    device_put=lambda v: jax.device_put(v) + 1,
    platform_dependent=lambda v: lax.platform_dependent(v, cpu=jnp.sin, default=jnp.cos),
    constants_and_none=lambda v: {"a": 3.0, "b": None, "c": jnp.arange(3)},
    weak_types=lambda v: (v.sum() * 0 + 1, 2),
)


def _convolved(kernel: jax.Array, image: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def _of_kernel(kernel: jax.Array, image: jax.Array) -> jax.Array:
    return lax.pmean(jax.grad(lambda k: (_convolved(k, image) ** 2).mean())(kernel), "i")


def _of_image(kernel: jax.Array, image: jax.Array) -> jax.Array:
    return jax.grad(lambda v: (_convolved(kernel, v) ** 2).mean())(image)


def _of_table(table: jax.Array, rows: jax.Array) -> jax.Array:
    return lax.psum(jax.grad(lambda table: (table[rows] ** 2).sum())(table), "i")


KERNEL, IMAGE = normal(3, 3, 4, 5), normal(8, 2, 8, 8, 4)
ROWS = np.random.default_rng(0).integers(0, 50, (8, 20)).astype(np.int32)
NETWORKS = [
    Probe("convolution", _convolved, (KERNEL, IMAGE), (0,)),
    Probe("gradient by a kernel", _of_kernel, (KERNEL, IMAGE), (0,)),
    Probe("gradient by an image", _of_image, (KERNEL, IMAGE), (0,)),
    Probe("kernel of each device", _convolved, (np.stack([KERNEL] * 8), IMAGE)),
    Probe("gradient by an embedding", _of_table, (normal(50, 16), ROWS), (0,)),
]


def _called(method: str | None) -> Callable[[jax.Array], jax.Array]:
    options: Any = {} if method is None else {"vmap_method": method}
    return lambda v: jax.pure_callback(np.sin, _type(v), v, **options)


@jax.custom_batching.custom_vmap
def _of_another_rule(v: jax.Array) -> jax.Array:
    return jnp.sin(v)


@_of_another_rule.def_vmap
def _(size: int, batched: Any, v: jax.Array) -> tuple[jax.Array, bool]:
    del size, batched
    return jnp.cos(v), True


def _doubled(v: jax.Array) -> jax.Array:
    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * 2

    return pl.pallas_call(kernel, out_shape=_type(v), interpret=True)(v)


def _laid(v: jax.Array, spec: P) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    return lax.with_sharding_constraint(v, NamedSharding(mesh, spec))


METHODS = (None, "sequential", "expand_dims", "broadcast_all")
FOREIGN = [
    *[Probe(f"pure_callback {method}", _called(method), (X,)) for method in METHODS],
    *_of(
        X,
        io_callback=lambda v: io_callback(np.asarray, _type(v), v),
        ordered_io_callback=lambda v: io_callback(np.asarray, _type(v), v, ordered=True),
        custom_vmap=lambda v: _of_another_rule(v),
        sequential_vmap=jax.custom_batching.sequential_vmap(jnp.sin),
        pallas=_doubled,
        constraint_to_whole=lambda v: _laid(v, P()),
    ),
    Probe("constraint over the axis", lambda v: _laid(v, P("i")), (X,), refused=Exception),
]

PROBES = [*ALGEBRA, *ARRAYS, *NETWORKS, *FOREIGN]
