"""What is known of the primitive of an equation: its record, or what JAX's own rules say.

A JAX that is newer than the records lists primitives that have none. Two of its rules are then
asked, once for each primitive, parameters and types. Typing: is every result typed as varying when
all operands are? Then equal operands give equal results, if JAX lists the primitive in public, and
it has neither effects nor bodies; those that it types wrongly have records. Batching: is it its own
vmap, along every dimension? Then it works element by element. Of a user's primitive, whatever its
name, nothing is known.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core.primitives
from jax.extend.core import JaxprEqn, Primitive
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_dist import _compat, primitives
from jax_dist._rewrite import interpreter

_MESH = AbstractMesh((2,), ("jax_dist_devices",))
_answers: dict[Hashable, bool] = {}


def record_of(eqn: JaxprEqn) -> primitives.Primitive:
    """What is known of an equation's primitive."""
    record = primitives.RECORDS.get(_compat.name_of(eqn))
    if record is not None and record.runs_keys and not _compat.has_own_keys(eqn):
        return primitives.record("")  # it runs functions of the user, which no parameter shows
    if record is None:
        return _asked(eqn) if eqn.primitive in _listed() else primitives.record("")
    if record.elementwise and not _keeps_rank(eqn):  # a bitcast to a type of another size
        return dataclasses.replace(record, elementwise=False)
    return record


@functools.cache
def _listed() -> frozenset[Primitive]:
    """Those that JAX lists in public modules."""
    modules: Sequence[Any] = (jax.extend.core.primitives, jax.lax, jax.lax.linalg)
    values = [value for module in modules for value in vars(module).values()]
    return frozenset(value for value in values if isinstance(value, Primitive))


def _keeps_rank(eqn: JaxprEqn) -> bool:
    avals: list[Any] = [atom.aval for atom in (*eqn.invars, eqn.outvars[0])]
    return max(len(aval.shape) for aval in avals[:-1]) == len(avals[-1].shape)


# --- JAX's own rules


def _asked(eqn: JaxprEqn) -> primitives.Primitive:
    may_be_plain = eqn.invars and not eqn.effects and not interpreter.bodies(eqn)
    if not may_be_plain or not _answer("plain", eqn, is_plain):
        return primitives.record("")
    elementwise = _answer("elementwise", eqn, is_elementwise)
    return primitives.Primitive(name=eqn.primitive.name, kind="plain", elementwise=elementwise)


def _answer(question: str, eqn: JaxprEqn, ask: Callable[[JaxprEqn], bool]) -> bool:
    """Asked outside of the caller's mesh, under which JAX would raise, and kept."""
    types = tuple(str(atom.aval) for atom in eqn.invars)
    key = question, eqn.primitive, types, tuple(sorted(eqn.params.items(), key=lambda p: p[0]))
    try:
        if key not in _answers:
            _answers[key] = _outside(ask, eqn)
    except TypeError:  # parameters without a hash
        return _outside(ask, eqn)
    return _answers[key]


def _outside(ask: Callable[[JaxprEqn], bool], eqn: JaxprEqn) -> bool:
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return ask(eqn)


def is_plain(eqn: JaxprEqn) -> bool:
    """Whether JAX types all results as varying if all operands vary: 0.10 and newer."""
    found: list[bool] = []

    def run(*values: Any) -> tuple[()]:
        varying = [_compat.to_varying(value, _MESH.axis_names) for value in values]
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
    inputs: Sequence[Any] = body.invars
    results: Sequence[Any] = body.outvars
    return (
        own.primitive is eqn.primitive
        and same
        and list(own.invars) == list(inputs)
        and list(own.outvars) == list(results)
    )


def _bind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Without the context of the equation, which holds the mesh of its trace."""
    return interpreter.replay(eqn.replace(ctx=interpreter.context_here()), values)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
