"""What is known of the values of a step: which are shared, and how these are wanted to lie.

The facts on what is the same on all devices are those of `passes.uniformity`. Whether a leaf of the
state is shared is not said by anybody, so all are taken to be shared, the step is looked at, and
those that come out varying vary from the start; until none is left. A step traced once serves all
rounds, for one device sees the same shapes either way.

How a value is wanted, the layout of the state says. A new parameter is the old one less a part of
the gradient, element by element; if it is cut, so may all be that it is made of. So the sum of a
gradient over devices can be scattered, each device getting the part that it keeps. Said of the
results, this goes backwards through equations that work element by element or only move dimensions,
and through the bodies of loops and branches. What is made of such parts in the same way lies as
they do.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.interpreter import (
    Atom,
    bodies_of_while,
    carries,
    fixed_in,
    operands_of_bodies,
)
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.uniformity import NOWHERE, Invariance, Same


class SharedAxis:
    """The mapped axis, and what is known along it."""

    def __init__(self, name: Any, on_mesh: Mapping[Any, int]):
        self.name = name
        self.on_mesh = on_mesh  # the sizes of the mesh axes that it is
        self._scope: Same = frozenset({name})
        self._invariance = Invariance()

    def _same(self, shared: Sequence[bool]) -> list[Same]:
        return [frozenset({self.name}) if each else NOWHERE for each in shared]

    def shared_in(self, body: Any, ins: Sequence[bool]) -> dict[Var, bool]:
        """Of every variable of a body, whether it is shared."""
        facts = self._invariance.facts(body, self._same(ins), self._scope)
        return {var: self.name in same for var, same in facts.items()}

    def shared_out(self, body: Any, ins: Sequence[bool]) -> list[bool]:
        found = self._invariance.outputs(body, self._same(ins), self._scope)
        return [self.name in same for same in found]

    def shared_in_bodies(self, eqn: JaxprEqn, ins: Sequence[bool]) -> list[list[bool]]:
        """Of the inputs of each body of an equation, when its loops have settled."""
        found = self._invariance.of_body_inputs(eqn, self._same(ins), self._scope)
        return [[self.name in same for same in body] for body in found]

    def settled(
        self, body: Any, ins: Sequence[bool], pairs: Sequence[tuple[int, int]]
    ) -> list[bool]:
        """Whether each input is shared when the step runs in a loop, of those that begin so.

        `pairs` are the places of inputs and results that are one leaf of the state.
        """
        ins = list(ins)
        while True:
            outs = self.shared_out(body, ins)
            demoted = [place for place, result in pairs if ins[place] and not outs[result]]
            if not demoted:
                return ins
            for place in demoted:
                ins[place] = False

    def is_used_by(self, eqn: JaxprEqn) -> bool:
        """Whether an equation, or one in it, goes over the axis."""
        return interpreter.holds(eqn, self._is_named_by)

    def is_made_alike_by(self, eqn: JaxprEqn) -> bool:
        """Whether an equation, or one in it, makes something shared of what varies."""
        return interpreter.holds(
            eqn,
            lambda inner: (
                record_of(inner).makes_alike
                and self._is_named_by(inner)
                and inner.params.get("axis_index_groups") is None
            ),
        )

    def _is_named_by(self, eqn: JaxprEqn) -> bool:
        return self.name in interpreter.named_axes(eqn)


@dataclasses.dataclass(frozen=True, slots=True)
class VaryingOrigin:
    """Where a value that varies began to vary."""

    line: str  # "train.py:12", or ""
    primitive: str
    inputs: tuple[int, ...]  # of the body, that vary and reach it; none: the axis itself does
    is_unknown: bool = False  # whether it only counts as varying: nothing is known of the primitive

    def __str__(self) -> str:
        unknown = ", of which nothing is known" if self.is_unknown else ""
        return f"{self.line or 'an unknown line'} ({self.primitive}{unknown})"

    @classmethod
    def of(cls, body: Jaxpr, shared: Mapping[Var, bool], result: Atom, own: Var) -> "VaryingOrigin":
        """Where a leaf of the state, `own` when it comes in and `result` then, met what varies.

        `shared` says of each variable of the step what holds if the leaf comes in shared.
        """
        made_by = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        depends = {own}
        for eqn in body.eqns:
            if any(isinstance(atom, Var) and atom in depends for atom in eqn.invars):
                depends.update(eqn.outvars)
        seen, roots = set[Var](), set[Var]()
        met = last = None
        queue = [result]
        for atom in queue:  # which grows
            if isinstance(atom, Literal) or atom in seen or shared.get(atom, True):
                continue
            seen.add(atom)
            eqn = made_by.get(atom)
            if eqn is None:
                roots.add(atom)
                continue
            if (unknown := _unknown_in(eqn, shared)) is not None:
                line = interpreter.source_line(unknown) or interpreter.source_line(eqn)
                return cls(line, _compat.name_of(unknown), (), is_unknown=True)
            last = eqn
            meets = [v for v in eqn.invars if isinstance(v, Var) and shared.get(v, True)]
            if met is None and not depends.isdisjoint(meets):
                met = eqn
            queue += eqn.invars
        inputs = tuple(place for place, var in enumerate(body.invars) if var in roots)
        if (found := met or last) is None:
            return cls("", "it comes in so", inputs)
        return cls(interpreter.source_line(found), _compat.name_of(found), inputs)


def _unknown_in(eqn: JaxprEqn, shared: Mapping[Var, bool]) -> JaxprEqn | None:
    """The equation, here or in a body, that may make varying values of shared ones."""
    if not all(isinstance(atom, Literal) or shared.get(atom, True) for atom in eqn.invars):
        return None
    inner = (each for body in interpreter.bodies(eqn) for each in interpreter.equations(body))
    kinds = ("opaque", "callback")
    return next((each for each in (eqn, *inner) if record_of(each).kind in kinds), None)


# ---- how shared values are wanted to lie


Cuts: TypeAlias = dict[Var, Any]  # a PartitionSpec for each value that is wanted cut


def wanted_cuts(body: Jaxpr, results: Sequence[Any], shared: Mapping[Var, bool]) -> Cuts:
    """How the values of a body are wanted, if its results are wanted so.

    What is not shared lies over the mapped axis already.
    """
    cuts: Cuts = {}
    _want(cuts, body.outvars, results, shared)
    for eqn in reversed(body.eqns):
        wanted = [cuts.get(var) for var in eqn.outvars]
        if any(spec is not None for spec in wanted):
            wanted = _settled(eqn, wanted)
            _want(cuts, eqn.outvars, wanted, shared)
            _want(cuts, eqn.invars, _operands(eqn, wanted), shared)
    for eqn in body.eqns:
        if len(eqn.outvars) == 1:
            _want(cuts, eqn.outvars, [_result(eqn, cuts)], shared)
    return cuts


def wanted_in_bodies(eqn: JaxprEqn, wanted: Sequence[Any]) -> list[list[Any]]:
    """For each body of a call, a loop or a branch, how its results are wanted."""
    if _compat.name_of(eqn) == "while":
        found = {"cond_jaxpr": [None], "body_jaxpr": list(wanted)}
        return [found[name] for name in bodies_of_while(eqn)]
    results = list(wanted)
    if _compat.name_of(eqn) == "scan":
        carried = {out for _, out in carries(eqn)}
        in_turn = lambda spec: spec is not None and tuple(spec[:1]) == (None,)
        of_turn = lambda spec: P(*spec[1:]) if in_turn(spec) else None
        results = [w if n in carried else of_turn(w) for n, w in enumerate(wanted)]
    return [list(results) for _ in interpreter.bodies(eqn)]


def _want(
    cuts: Cuts, atoms: Sequence[Any], specs: Sequence[Any], shared: Mapping[Var, bool]
) -> None:
    for atom, spec in zip(atoms, specs, strict=True):
        if spec is not None and isinstance(atom, Var) and shared.get(atom, True):
            cuts.setdefault(atom, spec)


def _operands(eqn: JaxprEqn, wanted: Sequence[Any]) -> list[Any]:
    """How the operands of an equation are wanted, if its results are wanted so."""
    unknown, record = [None] * len(eqn.invars), record_of(eqn)
    match _compat.name_of(eqn):
        case _ if record.elementwise:
            shape = _shape(eqn.outvars[0])
            return [wanted[0] if _shape(atom) == shape else None for atom in eqn.invars]
        case "squeeze" | "transpose" | "broadcast_in_dim":
            return [_before_move(eqn, wanted[0]), *unknown[1:]]
        case _ if record.kind in ("call", "branch", "loop"):
            return _through_bodies(eqn, wanted)
    return unknown


def _settled(eqn: JaxprEqn, wanted: list[Any]) -> list[Any]:
    """How the results of a loop are wanted: a carry, too, as the turns before want it."""
    if record_of(eqn).kind != "loop":
        return wanted
    while True:
        more, read = list(wanted), _through_bodies(eqn, wanted)
        for into, out in carries(eqn):
            more[out] = read[into] if more[out] is None else more[out]
        if more == wanted:
            return wanted
        wanted = more


def _through_bodies(eqn: JaxprEqn, wanted: Sequence[Any]) -> list[Any]:
    """How operands are wanted by bodies: where one of several wants a part, it is one."""
    found: list[Any] = [None] * len(eqn.invars)
    is_scan = _compat.name_of(eqn) == "scan"
    walked = len(eqn.invars) if not is_scan else len(fixed_in(eqn)) + len(carries(eqn))
    results, places = wanted_in_bodies(eqn, wanted), operands_of_bodies(eqn)
    for jaxpr, own, operands in zip(interpreter.bodies(eqn), results, places, strict=True):
        body = interpreter.open_jaxpr(jaxpr)
        inside = wanted_cuts(body, own, {})
        for var, place in zip(body.invars, operands, strict=True):
            spec = inside.get(var)
            if found[place] is None and spec is not None:
                found[place] = spec if place < walked else P(None, *spec)
    return found


def _before_move(eqn: JaxprEqn, spec: P) -> P | None:
    """How the operand lies of an equation that gives dimensions other places.

    It moves no element between the parts. None where a broadcast makes a dimension that is cut.
    """
    params, own, new = eqn.params, _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    named = dict(enumerate(spec))
    if _compat.name_of(eqn) == "squeeze":
        kept = iter(spec)
        dropped = params["dimensions"]
        return P(*[None if dim in dropped else next(kept, None) for dim in range(len(own))])
    if _compat.name_of(eqn) == "transpose":
        order = params["permutation"]
        return P(*[named.get(order.index(dim)) for dim in range(len(order))])
    places = params["broadcast_dimensions"]
    cut = {dim for dim, name in named.items() if name is not None}
    kept = {place for size, place in zip(own, places, strict=True) if new[place] == size}
    return P(*[named.get(place) for place in places]) if cut <= kept else None


def _result(eqn: JaxprEqn, cuts: Cuts) -> P | None:
    """How a result lies that is made of parts: a parameter in half precision, or transposed."""
    name, shape = _compat.name_of(eqn), _shape(eqn.outvars[0])
    own = [
        (cuts[atom], _shape(atom)) for atom in eqn.invars if isinstance(atom, Var) and atom in cuts
    ]
    if record_of(eqn).elementwise:
        return next((spec for spec, of_operand in own if of_operand == shape), None)
    if len(own) != 1 or len(eqn.invars) != 1:
        return None
    ((spec, before),) = own
    named = [*spec, *[None] * (len(before) - len(spec))]
    if name == "transpose":
        return P(*[named[dim] for dim in eqn.params["permutation"]])
    if name == "squeeze":
        return P(*[part for dim, part in enumerate(named) if dim not in eqn.params["dimensions"]])
    if name != "slice":
        return None
    cut = [dim for dim, part in enumerate(named) if part is not None]
    return spec if all(before[dim] == shape[dim] for dim in cut) else None


def _shape(atom: Atom) -> tuple[int, ...]:
    return atom.aval.shape
