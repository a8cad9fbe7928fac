"""Parts of the state that are gathered where they are read, and again where they are read again.

A device then does not keep all whole arrays from the forward to the backward pass; more is sent for
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

from jax_dist import _compat
from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import INLINED, Handler, Values


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
