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


# Those that one of the supported versions of JAX does not have.
_FROM_0_12 = ("log2", "one_minus_square", "polynomial")
_TO_0_10 = ("call", "closed_call")


def is_here(record: primitives.Primitive) -> bool:
    """Return whether this jax has it."""
    comes, is_gone = _VERSION < (0, 12), _VERSION > (0, 10)
    return not (comes and record.name in _FROM_0_12) and not (is_gone and record.name in _TO_0_10)


def test_all_that_jax_lists_has_a_record():
    missing = sorted(listed().keys() - RECORDS.keys())
    assert missing == [], "add them to the table of jax_dist/primitives.py"


def test_each_record_has_a_primitive():
    there = {each.name for each in _compat.primitives_of_jax()}
    assert {name for name, record in RECORDS.items() if is_here(record) != (name in there)} == set()


# --- what JAX's own rules say


_X = jnp.linspace(0.1, 0.9, 24, dtype=jnp.float32).reshape(2, 3, 4)
_KEY = jax.random.key(0)
_SQUARE = jnp.eye(3) * 2 + 0.1
_WORDS = jnp.zeros(4, jnp.uint32)
_WINDOW = ((1, 1, 2), (1, 1, 1), "VALID")
_TYPES = (jnp.int32, bool, jnp.complex64, jnp.uint32)
_OPERANDS = [_X, *[jnp.ones((2, 3), dtype) for dtype in _TYPES]]
_linalg: Any = lax.linalg


def _changed(x: jax.Array) -> list[jax.Array]:
    first = x.at[0]
    scattered = [first.set(1.0), first.add(1.0), first.subtract(1.0), first.multiply(2.0)]
    return [*scattered, first.max(2.0), first.min(2.0)]


def _windows(x: jax.Array) -> list[jax.Array]:
    odd = lambda a, b: a * b + 1
    starts = ((0.0, lax.add), (jnp.inf, lax.min), (1.0, odd))
    return [lax.reduce_window(x, start, fun, *_WINDOW) for start, fun in starts]


def _pooled(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, *_WINDOW)


def _image(x: jax.Array) -> jax.Array:
    dimensions = ("NCH", "OIH", "NCH")
    return lax.conv_general_dilated(
        x, jnp.ones((3, 3, 2)), (1,), "SAME", dimension_numbers=dimensions
    )


# What no function of `lax` of its name makes of one to three operands: operands and functions.
_PROGRAMS: list[tuple[tuple[Any, ...], list[Callable[..., Any]]]] = [
    (
        (_X,),
        [
            *(_changed, _windows, _image, jnp.fft.fft, jnp.unstack, lax.sort, lax.cumlogsumexp),
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
    found: dict[str, list[JaxprEqn]] = {}
    programs = [(function, given) for given, functions in _PROGRAMS for function in functions]
    for function, operands in [*programs, *_of_operands()]:
        for eqn in equations(jax.make_jaxpr(function)(*operands)):
            found.setdefault(eqn.primitive.name, []).append(eqn)
    return found


def _of_operands() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return the functions of `lax` named as plain primitives, with operands."""
    for name, record in RECORDS.items():
        if record.kind != "plain" or not is_here(record) or name == "polynomial":
            continue
        makers = [getattr(lax, f"{part}{name}", None) for part in ("", "bitwise_")]
        makers += [each.bind for each in listed().values() if each.name == name]
        for maker in filter(None, makers):
            for operands in ((each,) * count for each in _OPERANDS for count in (1, 2, 3)):
                try:
                    (eqn,) = jax.make_jaxpr(maker)(*operands).eqns
                except Exception:  # noqa: BLE001  # of another type or number of operands
                    continue
                if eqn.primitive.name == name:
                    yield maker, operands


@pytest.mark.thorough
def test_nearly_all_records_are_compared_with_rules():
    plain = {name for name, each in RECORDS.items() if each.kind == "plain" and is_here(each)}

    missing = sorted(plain - samples().keys() - _UNTRACED)
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
    """Whether JAX types all results as varying if all operands vary: 0.10 and newer."""
    found: list[bool] = []

    def run(*values: Any) -> tuple[()]:
        varying = [jax.lax.pcast(value, _MESH.axis_names, to="varying") for value in values]
        outs = _bind(eqn, varying)
        found.extend(bool(_compat.varying_axes(jax.typeof(out))) for out in outs)
        return ()

    specs = (P(),) * len(eqn.invars)
    mapped = jax.shard_map(run, mesh=_MESH, in_specs=specs, out_specs=(), check_vma=True)
    try:
        jax.eval_shape(mapped, *[_struct(atom.aval) for atom in eqn.invars])
    except Exception:  # noqa: BLE001  # what its rule raises is of any type
        return False
    return bool(found) and all(found)


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether the vmap of an equation, along each dimension, is the equation itself."""
    if len(eqn.outvars) != 1:
        return False
    ins: list[Any] = [atom.aval for atom in eqn.invars]
    shape = getattr(eqn.outvars[0].aval, "shape", ())
    if not shape or any(aval.shape not in ((), shape) for aval in ins):
        return False
    return all(_is_own_vmap(eqn, ins, dim) for dim in range(len(shape)))


def _is_own_vmap(eqn: JaxprEqn, ins: Sequence[Any], dim: int) -> bool:
    axes = tuple(dim if aval.shape else None for aval in ins)
    mapped = jax.vmap(lambda *values: _bind(eqn, values), in_axes=axes, out_axes=dim)
    try:
        body = jax.make_jaxpr(mapped)(*map(_struct, ins)).jaxpr
        (own,) = body.eqns
        same = own.params == eqn.params
    except Exception:  # noqa: BLE001  # what its rule raises is of any type
        return False
    is_whole = (own.invars, own.outvars) == (body.invars, body.outvars)
    return own.primitive is eqn.primitive and same and is_whole


def _bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Without the context of the equation, which holds the mesh of its trace."""
    return interpreter.replay(eqn.replace(ctx=interpreter.context_here()), values)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


# --- collectives


_ON_DEVICES = {
    **dict.fromkeys(("psum", "pmax", "pmin", "pmean", "all_gather")),  # of the array and the axis
    "pbroadcast": lambda x: lax.pbroadcast(x, "i", 0),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i"),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0),
    "pswapaxes": lambda x: lax.pswapaxes(x, "i", 0),
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1)]),
    "pshuffle": lambda x: lax.pshuffle(x, "i", [1, 0]),
    "axis_index": lambda x: lax.axis_index("i"),
}


def test_collectives_of_lax_bind_what_is_said_of_them():
    for name, given in _ON_DEVICES.items():
        function = given or functools.partial(getattr(lax, name), axis_name="i")
        traced = jax.make_jaxpr(function, axis_env=[("i", 2)])(jnp.ones((2, 2)))
        found = {_compat.name_of(eqn) for eqn in equations(traced)}
        assert primitives.LAX_COLLECTIVES[name] in found, name
    assert {*primitives.LAX_COLLECTIVES} == {*_ON_DEVICES, "ragged_all_to_all"}
    assert primitives.LAX_COLLECTIVES["ragged_all_to_all"] == "ragged_all_to_all"
