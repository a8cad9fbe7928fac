"""How shared values are wanted to lie, as far as the layout of the state says so.

A new parameter is the old one less a part of the gradient, element by element; if it is cut, so may
all be that it is made of. So the sum of a gradient over devices can be scattered, each device
getting the part that it keeps. Said of the results, this goes backwards through equations that work
element by element or only move dimensions, and into loops by their carries. What is made of such
parts in the same way lies as they do.

A part of the state may also be gathered where it is read, and again where it is read again. A
device then does not keep all whole arrays from the forward to the backward pass; more is sent for
it. With FSDP this is called to reshard after the forward pass. A scan over stacked layers gathers
one layer in each turn.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import CALLS, ELEMENTWISE, INLINED, Handler, Values

Cuts: TypeAlias = dict[Var, Any]  # a PartitionSpec for each value that is wanted cut


def wanted_cuts(body: Jaxpr, results: Sequence[Any], shared: Mapping[Var, bool]) -> Cuts:
    """How the values of a body are wanted.

    Args:
      body: of a step, or of a loop in it.
      results: how each of its results is wanted, or None.
      shared: of each variable; what varies lies over the mapped axis already.
    """
    cuts: Cuts = {}
    _want(cuts, body.outvars, results, shared)
    for eqn in reversed(body.eqns):
        wanted = [cuts.get(var) for var in eqn.outvars]
        if any(spec is not None for spec in wanted):
            _want(cuts, eqn.invars, _operands(eqn, wanted, shared), shared)
    for eqn in body.eqns:
        if eqn.primitive.name in _OF_PARTS:
            _want(cuts, eqn.outvars, [_result(eqn, cuts)], shared)
    return cuts


def wanted_in_bodies(eqn: JaxprEqn, wanted: Sequence[Any]) -> list[list[Any]]:
    """For each body of a loop or a branch, how its results are wanted."""
    bodies = interpreter.bodies(eqn)
    if eqn.primitive.name == "cond":
        return [list(wanted) for _ in bodies]
    if eqn.primitive.name == "while":
        found = {"cond_jaxpr": [None], "body_jaxpr": list(wanted)}
        return [found[name] for name in eqn.params if name in found]
    layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
    carried = set(layout.carries_out)
    return [[spec if place in carried else None for place, spec in enumerate(wanted)]]


def _want(
    cuts: Cuts, atoms: Sequence[Any], specs: Sequence[Any], shared: Mapping[Var, bool]
) -> None:
    for atom, spec in zip(atoms, specs, strict=True):
        if spec is not None and isinstance(atom, Var) and shared.get(atom, True):
            cuts.setdefault(atom, spec)


def _operands(eqn: JaxprEqn, wanted: Sequence[Any], shared: Mapping[Var, bool]) -> list[Any]:
    """How the operands of an equation are wanted, if its results are wanted so."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        (spec,) = wanted
        kinds: list[Any] = [var.aval for var in (*eqn.outvars, *eqn.invars)]
        return [spec if kind.shape == kinds[0].shape else None for kind in kinds[1:]]
    if name in _MOVED:
        (spec,) = wanted
        return [_MOVED[name](eqn, spec)] + [None] * (len(eqn.invars) - 1)
    if name in CALLS:
        body = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
        return _inputs_of(body, wanted)
    if name == "cond":
        return [None, *_inputs_of(interpreter.bodies(eqn)[0], wanted)]
    if name == "while":
        constants = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return [*[None] * constants, *wanted]
    if name == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        specs: list[Any] = [None] * len(eqn.invars)
        for into, out in zip(layout.carries_in, layout.carries_out, strict=True):
            specs[into] = wanted[out]
        return specs
    return [None] * len(eqn.invars)


def _result(eqn: JaxprEqn, cuts: Cuts) -> P | None:
    """How a result lies that is made of parts: a parameter in half precision, or transposed."""
    name, shape = eqn.primitive.name, _shape(eqn.outvars[0])
    own = [
        (cuts[atom], _shape(atom)) for atom in eqn.invars if isinstance(atom, Var) and atom in cuts
    ]
    if name in ELEMENTWISE:
        return next((spec for spec, of_operand in own if of_operand == shape), None)
    if not own:
        return None
    ((spec, before),) = own
    named = [*spec, *[None] * (len(before) - len(spec))]
    if name == "transpose":
        return P(*[named[dim] for dim in eqn.params["permutation"]])
    if name == "squeeze":
        return P(*[part for dim, part in enumerate(named) if dim not in eqn.params["dimensions"]])
    cut = [dim for dim, part in enumerate(named) if part is not None]
    return spec if all(before[dim] == shape[dim] for dim in cut) else None


_OF_PARTS = (*ELEMENTWISE, "slice", "squeeze", "transpose")


def _shape(var: Var) -> tuple[int, ...]:
    aval: Any = var.aval
    return aval.shape


def _before_squeeze(eqn: JaxprEqn, spec: P) -> P:
    dropped, kept = eqn.params["dimensions"], iter(spec)
    rank = eqn.invars[0].aval.ndim  # pyright: ignore[reportAttributeAccessIssue]
    return P(*[None if dim in dropped else next(kept, None) for dim in range(rank)])


def _before_broadcast(eqn: JaxprEqn, spec: P) -> P | None:
    """None where a dimension that is wanted cut is made by the broadcast."""
    places, kinds = eqn.params["broadcast_dimensions"], [eqn.invars[0].aval, eqn.outvars[0].aval]
    own, new = [kind.shape for kind in kinds]  # pyright: ignore[reportAttributeAccessIssue]
    named = dict(enumerate(spec))
    cut = {dim for dim, name in named.items() if name is not None}
    kept = {place for size, place in zip(own, places, strict=True) if new[place] == size}
    return P(*[named.get(place) for place in places]) if cut <= kept else None


def _before_transpose(eqn: JaxprEqn, spec: P) -> P:
    named = dict(enumerate(spec))
    order = eqn.params["permutation"]
    return P(*[named.get(order.index(dim)) for dim in range(len(order))])


# Operations that move no element between the parts: the dimensions have other places.
_MOVED = {
    "squeeze": _before_squeeze,
    "broadcast_in_dim": _before_broadcast,
    "transpose": _before_transpose,
}


def _inputs_of(jaxpr: Any, wanted: Sequence[Any]) -> list[Any]:
    body = interpreter.open_jaxpr(jaxpr)
    inside = wanted_cuts(body, wanted, {})
    return [inside.get(var) for var in body.invars]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One of the parts that a value is given in."""

    dim: int  # along which they are cut
    uses: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # numbers of gathers


Shards: TypeAlias = Mapping[Var, Shard]
Handlers: TypeAlias = dict[int, Handler]  # by the identity of the equation

_CHECKPOINTS = ("checkpoint", "remat2")


@dataclasses.dataclass(frozen=True, slots=True)
class Gathers:
    """Runs equations that read parts, on each device."""

    name: Any  # of the mapped axis
    evaluate: Callable[[Any, Sequence[Any], Handlers], Values]  # a body
    bind: Callable[[JaxprEqn, Values], Values]  # one equation

    def handlers(self, body: Jaxpr, parts: Shards) -> Handlers:
        """What to do with the equations that read parts, of which none is a result of the body."""
        return {id(eqn): self._handler(_read(eqn, parts)) for eqn in body.eqns if _read(eqn, parts)}

    def _handler(self, read: Mapping[int, Shard]) -> Handler:
        """Of an equation that reads parts at these places."""

        def handle(eqn: JaxprEqn, values: Values) -> Values:
            inside = _parts_inside(eqn, read)
            whole = self._with_whole(eqn, values, [n for n in read if n not in inside], read)
            if not inside:
                return self.bind(eqn, whole)
            (jaxpr,) = interpreter.bodies(eqn)
            body = interpreter.open_jaxpr(jaxpr)
            parts = {body.invars[place]: part for place, part in inside.items()}
            run = lambda args: self.evaluate(jaxpr, args, self.handlers(body, parts))
            if eqn.primitive.name == "scan":
                return _scan(eqn, whole, run)
            # Evaluated in its place, a checkpoint keeps what it is for: a computation of its own.
            is_checkpoint = eqn.primitive.name in _CHECKPOINTS
            return run(lax.optimization_barrier(whole) if is_checkpoint else whole)

        return handle

    def _with_whole(
        self, eqn: JaxprEqn, values: Values, places: Sequence[int], read: Mapping[int, Shard]
    ) -> Values:
        """The operands, those in these places gathered, but not before the others are there."""
        values = list(values)
        others = [n for n, atom in enumerate(eqn.invars) if isinstance(atom, Var) and n not in read]
        tied = [*places, *others] if places else []
        tied_values = lax.optimization_barrier(tuple(values[n] for n in tied))
        for n, value in zip(tied, tied_values, strict=True):
            values[n] = self._gathered(value, read[n]) if n in read else value
        return values

    def _gathered(self, value: Any, part: Shard) -> Any:
        # XLA on CPU drops barriers before it looks for equal instructions for the last time, so two
        # gathers of one value differ: each has one more dimension of length 1.
        more = tuple(range(next(part.uses)))
        value = jnp.expand_dims(value, more)
        value = lax.all_gather(value, self.name, axis=part.dim + len(more), tiled=True)
        return jnp.squeeze(value, more)


def _read(eqn: JaxprEqn, parts: Shards) -> dict[int, Shard]:
    """The operands that are given in parts, by their places."""
    return {n: parts[a] for n, a in enumerate(eqn.invars) if isinstance(a, Var) and a in parts}


def _parts_inside(eqn: JaxprEqn, read: Mapping[int, Shard]) -> dict[int, Shard]:
    """The operands that the body of an equation takes in parts.

    Those of a call; and of a scan what it walks over, unless along the dimension that is cut. What
    all its turns read is gathered once, before it.
    """
    if eqn.primitive.name in (*INLINED, *_CHECKPOINTS):
        found = dict(read)
    elif eqn.primitive.name == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        first = len(layout.constants) + len(layout.carries_in)
        found = {n: Shard(part.dim - 1) for n, part in read.items() if n >= first and part.dim}
    else:
        return {}
    body = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
    results = {atom for atom in body.outvars if isinstance(atom, Var)}
    return {place: part for place, part in found.items() if body.invars[place] not in results}


def _scan(eqn: JaxprEqn, values: Values, run: Callable[[Values], Values]) -> Values:
    layout = _compat.scan_layout(eqn.params, len(values), len(eqn.outvars))
    first, carried = len(layout.constants), len(layout.carries_in)

    def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = run([*values[:first], *carry, *xs])
        return outs[:carried], outs[carried:]

    kept = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    start, walked = values[first : first + carried], values[first + carried :]
    carry, ys = lax.scan(turn, start, walked, **kept)
    return [*carry, *ys]
