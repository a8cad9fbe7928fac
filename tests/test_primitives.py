"""The records of primitives, beside what the installed JAX says: names, batching and typing.

A new release of JAX fails here, with the names to add to `jax_dist/primitives.py`.
"""

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.custom_partitioning
import jax.experimental.pallas
import jax.extend.core.primitives
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Primitive
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import _compat, primitives
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import equations
from jax_dist.primitives import RECORDS

_PACKAGE = pathlib.Path(jax_dist.__file__).parent
_VERSION = jax.__version_info__[:2]


def listed() -> dict[str, Primitive]:
    """Return the primitives that JAX lists in public modules."""
    modules: list[Any] = [jax.extend.core.primitives, lax, lax.linalg]
    values = [value for module in modules for value in vars(module).values()]
    return {value.name: value for value in values if isinstance(value, Primitive)}


# Records of primitives that this version of JAX does not have.
_FROM_0_12 = {"log2", "one_minus_square", "polynomial"} if _VERSION < (0, 12) else set()
_UP_TO_0_10 = {"call", "closed_call"} if _VERSION > (0, 10) else set()
_HERE = {name: row for name, row in RECORDS.items() if name not in _FROM_0_12 | _UP_TO_0_10}
_PLAIN = [name for name, record in _HERE.items() if record.kind == "plain"]


def test_all_that_jax_lists_has_a_record():
    missing = sorted(listed().keys() - RECORDS.keys())
    assert missing == [], "add them to the table of jax_dist/primitives.py"


def test_each_record_has_a_primitive():
    names = {primitive.name for primitive in _compat.primitives_of_jax()}
    assert RECORDS.keys() & names == _HERE.keys()


# --- what JAX's own rules say


_X = jnp.linspace(0.1, 0.9, 24, dtype=jnp.float32).reshape(2, 3, 4)
_KEY = jax.random.key(0)
_SQUARE = jnp.eye(3) * 2 + 0.1
_WORDS = jnp.zeros(4, jnp.uint32)
_WINDOW = ((1, 1, 2), (1, 1, 1), "VALID")
_TYPES = (jnp.int32, bool, jnp.complex64, jnp.uint32)
_OPERANDS = [_X, *[jnp.ones((2, 3), dtype) for dtype in _TYPES]]
_linalg: Any = lax.linalg


def _scattered(x: jax.Array) -> list[jax.Array]:
    methods = ("set", "add", "subtract", "multiply", "max", "min")
    return [getattr(x.at[0], method)(2.0) for method in methods]


def _windows(x: jax.Array) -> list[jax.Array]:
    starts = ((0.0, lax.add), (jnp.inf, lax.min), (1.0, lambda a, b: a * b + 1))
    return [lax.reduce_window(x, start, fun, *_WINDOW) for start, fun in starts]


def _pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, *_WINDOW)


# What no function of `lax` of its name makes of one to three operands: operands and functions.
_PROGRAMS: list[tuple[tuple[Any, ...], list[Callable[..., Any]]]] = [
    (
        (_X,),
        [
            *(_scattered, _windows, jnp.fft.fft, jnp.unstack, lax.sort, lax.cumlogsumexp),
            lambda x: lax.conv(x, jnp.ones((3, 3, 2)), (1,), "SAME"),
            lambda x: (lax.clamp(0.0, x, 1.0), lax.select(x > 0, x, -x), lax.betainc(x, x, x)),
            lambda x: (x**3, x.astype(jnp.int32), lax.bitcast_convert_type(x, jnp.int32)),
            lambda x: (lax.reduce_precision(x, 5, 10), jnp.array(x, copy=True)),
            jax.grad(lambda x: (jnp.sin(x) * x).sum()),
            lambda x: (x[jnp.array([1, 0])], jnp.broadcast_to(x[0, :, None], (3, 2, 4))),
            lambda x: (x.reshape(4, 6).T, jnp.concatenate([x, x]), jnp.pad(x, 1)[::-1]),
            lambda x: lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, 1, 1), 1, 0),
            lambda x: (jnp.split(x, 2, 2), jnp.tile(jnp.stack([x, x]), 2)),
            lambda x: lax.broadcasted_iota(jnp.int32, (2, 3), 0),
            lambda x: (lax.top_k(x, 2), lax.approx_max_k(x, 2)),
            lambda x: (x.sum(0), x.max(0), x.min(0), x.prod(0), x.argmax(0), x.argmin(0)),
            lambda x: ((x > 0).all(0), (x > 0).any(0)),
            lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 1, (0,)),
            lambda x: lax.cumsum(x) + lax.cumprod(x) + lax.cummax(x) + lax.cummin(x),
            jax.grad(lambda x: _pooled(x).sum()),
            lambda x: jax.jvp(_pooled, (x,), (x,)),
            lambda x: x @ x.mT,
            lambda x: jax.device_put(lax.optimization_barrier(x)),
            lambda x: (checkpoint_name(x, "x"), lax.composite(jnp.sin, "a.b")(x)),
            jax.grad(lambda x: jnp.tanh(x).sum()),
        ],
    ),
    (
        (_SQUARE,),
        [
            *(_linalg.cholesky, _linalg.eigh, _linalg.svd, _linalg.qr, _linalg.lu, _linalg.schur),
            *(_linalg.hessenberg, _linalg.eig, _linalg.tridiagonal, jnp.linalg.slogdet),
            lambda x: _linalg.cholesky_update(x, x[0]),
            lambda x: (_linalg.symmetric_product(x, x), _linalg.triangular_solve(x, x)),
            lambda x: _linalg.tridiagonal_solve(x[0], x[0], x[0], x),
            lambda x: _linalg.householder_product(x, x[0]),
            lambda x: jax.scipy.linalg.qr_multiply(x, x),
            lambda x: jax.scipy.linalg.qr(x, pivoting=True),
            lambda x: jnp.linalg.solve(x, x),
        ],
    ),
    (
        (_KEY,),
        [
            lambda key: jax.random.bits(jax.random.fold_in(jax.random.split(key)[0], 1)),
            lambda key: jax.random.gamma(jax.random.clone(key), 1.0, (3,)),
            lambda key: jax.random.wrap_key_data(jax.random.key_data(key)),
        ],
    ),
    ((jnp.uint32(1),), [jax.random.key]),
    ((_WORDS,), [lambda x: lax.rng_bit_generator(x, (3,))]),
    ((_WORDS[:2],), [lambda x: jax.extend.random.threefry_2x32(x, x)]),
    ((_OPERANDS[1],), [lambda x: lax.reduce(x, 0, lax.bitwise_xor, (0,))]),
    ((jnp.ones((2, 4, 4)),), [lambda x: lax.ragged_dot(x[0], x, jnp.array([1, 2]))]),
]
if hasattr(lax, "polynomial"):
    _PROGRAMS.append(((_X,), [lambda x: lax.polynomial(x, [1.0, 2.0, 3.0])]))
_UNTRACED = {  # no public function makes an equation of them by itself
    *("lu_pivots_to_permutation", "select_and_scatter", "custom_vmap_call", "linear_call"),
    *("eval_jaxpr", "scaled_dot", "philox2x32", "philox4x32", "threefry4x32"),
    *("pvary", "reshard", "sharding_constraint", "geqp3", "geqrf"),
}


@functools.cache
def samples() -> dict[str, list[JaxprEqn]]:
    """Equations of primitives, by name."""
    by_name: dict[str, list[JaxprEqn]] = {}
    programs = [(function, args) for args, functions in _PROGRAMS for function in functions]
    for function, operands in [*programs, *_of_operands()]:
        for eqn in equations(jax.make_jaxpr(function)(*operands)):
            by_name.setdefault(eqn.primitive.name, []).append(eqn)
    return by_name


def _of_operands() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return the functions of `lax` named as plain primitives, with operands."""
    for name in (name for name in _PLAIN if name != "polynomial"):
        makers = [getattr(lax, f"{part}{name}", None) for part in ("", "bitwise_")]
        makers += [primitive.bind for primitive in listed().values() if primitive.name == name]
        for maker in filter(None, makers):
            for operands in ((operand,) * count for operand in _OPERANDS for count in (1, 2, 3)):
                try:
                    (eqn,) = jax.make_jaxpr(maker)(*operands).eqns
                except Exception:  # noqa: BLE001  # of another type or number of operands
                    continue
                if eqn.primitive.name == name:
                    yield maker, operands


@pytest.mark.thorough
def test_nearly_all_records_are_compared_with_rules():
    missing = sorted({*_PLAIN} - samples().keys() - _UNTRACED)
    assert missing == [], "add to _PROGRAMS a program that has them"


# Of these, JAX's rule of batching says something else.
_BATCHED_OTHERWISE = {
    *("device_put", "optimization_barrier"),  # may take several values, of any shapes
    "bitcast_convert_type",  # to a type of another size, it has other dimensions
    "random_fold_in",  # of keys, which no pass follows by element
}
# JAX types results of these as the same on all devices, though the operands differ.
_TYPED_AS_EQUAL = {"composite", "rng_bit_generator", "threefry2x32"}


def test_elementwise_is_what_is_its_own_vmap():
    wrong = {
        name
        for name, eqns in samples().items()
        for eqn in eqns
        if interpreter.record_of(eqn).elementwise != is_elementwise(eqn)
        and all(getattr(var.aval, "shape", ()) for var in eqn.outvars)
        and eqn.params.get("axes") != ()  # a sum over no dimension
    }

    assert wrong == _BATCHED_OTHERWISE


def test_plain_is_what_jax_types_as_its_operands():
    wrong = {
        name
        for name, eqns in samples().items()
        for eqn in eqns[:3]
        if RECORDS[name].kind == "plain" and eqn.invars and not is_plain(eqn)
    }

    assert wrong == _TYPED_AS_EQUAL


@pytest.mark.parametrize("name", ["tanh", "sort", "reduce_max"])
def test_of_a_primitive_without_a_record_nothing_is_known(name, monkeypatch):
    (eqn, *_) = samples()[name]
    monkeypatch.delitem(RECORDS, name)

    record = interpreter.record_of(eqn)
    assert (record.kind, record.elementwise) == ("opaque", False)


# --- JAX's own rules

_MESH = AbstractMesh((2,), ("devices",))


def is_plain(eqn: JaxprEqn) -> bool:
    """Return whether JAX types all results as varying if all operands vary."""
    varies: list[bool] = []

    def run(*values: Any) -> tuple[()]:
        operands = [jax.lax.pcast(value, _MESH.axis_names, to="varying") for value in values]
        results = _bind(eqn, operands)
        varies.extend(bool(_compat.varying_axes(jax.typeof(result))) for result in results)
        return ()

    specs = (P(),) * len(eqn.invars)
    mapped = jax.shard_map(run, mesh=_MESH, in_specs=specs, out_specs=(), check_vma=True)
    try:
        jax.eval_shape(mapped, *[_struct(atom.aval) for atom in eqn.invars])
    except Exception:  # noqa: BLE001  # what its rule raises is of any type
        return False
    return bool(varies) and all(varies)


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether the vmap of an equation, along each dimension, is the equation itself."""
    if len(eqn.outvars) != 1:
        return False
    ins: list[Any] = [atom.aval for atom in eqn.invars]
    shape = getattr(eqn.outvars[0].aval, "shape", ())
    if not shape or any(aval.shape not in ((), shape) for aval in ins):
        return False
    return all(_is_its_vmap(eqn, ins, dim) for dim in range(len(shape)))


def _is_its_vmap(eqn: JaxprEqn, ins: Sequence[Any], dim: int) -> bool:
    axes = tuple(dim if aval.shape else None for aval in ins)
    mapped = jax.vmap(lambda *values: _bind(eqn, values), in_axes=axes, out_axes=dim)
    try:
        body = jax.make_jaxpr(mapped)(*map(_struct, ins)).jaxpr
        (batched,) = body.eqns
        is_same = batched.primitive is eqn.primitive and batched.params == eqn.params
    except Exception:  # noqa: BLE001  # what its rule raises is of any type
        return False
    return is_same and (batched.invars, batched.outvars) == (body.invars, body.outvars)


def _bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Without the context of the equation, which holds the mesh of its trace."""
    return interpreter.replay(eqn.replace(ctx=interpreter.context_here()), values)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


# --- collectives


_AFTER_THE_AXIS = {  # arguments of the collectives of lax after the array and the axis
    **dict.fromkeys(("psum", "pmax", "pmin", "pmean", "all_gather", "psum_scatter"), ()),
    **{"pbroadcast": (0,), "all_to_all": (0, 0), "pswapaxes": (0,)},
    **{"ppermute": ([(0, 1)],), "pshuffle": ([1, 0],)},
}


def test_collectives_of_lax_bind_what_is_said_of_them():
    calls = {
        name: lambda x, name=name, args=args: getattr(lax, name)(x, "i", *args)
        for name, args in _AFTER_THE_AXIS.items()
    }
    calls["axis_index"] = lambda x: lax.axis_index("i")
    for name, call in calls.items():
        traced = jax.make_jaxpr(call, axis_env=[("i", 2)])(jnp.ones((2, 2)))
        names = {_compat.name_of(eqn) for eqn in equations(traced)}
        assert primitives.LAX_COLLECTIVES[name] in names, name
    assert {*primitives.LAX_COLLECTIVES} == {*calls, "ragged_all_to_all"}
    assert primitives.LAX_COLLECTIVES["ragged_all_to_all"] == "ragged_all_to_all"
