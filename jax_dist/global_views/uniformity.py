"""What is the same on all devices, and what varies; and where a leaf of the state began to vary.

The facts are those of `passes.uniformity`. Whether a leaf of the state is shared is not said by
anybody, so all are taken to be shared, the step is looked at, and those that come out varying vary
from the start; until none is left. A step traced once serves all rounds, for one device sees the
same shapes either way.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import Atom
from jax_dist.passes.uniformity import (
    NOWHERE,
    AxisScope,
    Invariance,
    Same,
    same_of,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """The mapped axis, and what is known along it."""

    name: Any
    size: int
    invariance: Invariance = dataclasses.field(default_factory=Invariance, compare=False)

    @property
    def scope(self) -> AxisScope:
        # Types say nothing here: the body is traced without a mesh, or under check_vma=False.
        return AxisScope(frozenset({self.name}), NOWHERE)

    def _same(self, *, shared: bool) -> Same:
        return frozenset({self.name}) if shared else NOWHERE

    def shared_in(self, body: Any, ins: Sequence[bool]) -> dict[Var, bool]:
        """Of every variable of a body, whether it is shared."""
        given = [self._same(shared=shared) for shared in ins]
        facts = self.invariance.facts(body, given, self.scope)
        return {var: self.name in same for var, same in facts.items()}

    def shared_out(self, body: Any, ins: Sequence[bool]) -> list[bool]:
        given = [self._same(shared=shared) for shared in ins]
        facts = self.invariance.facts(body, given, self.scope)
        outvars = interpreter.open_jaxpr(body).outvars
        return [self.name in same_of(atom, facts, self.scope) for atom in outvars]

    def shared_in_bodies(self, eqn: JaxprEqn, ins: Sequence[bool]) -> list[list[bool]]:
        """Of the inputs of each body of an equation, when its loops have settled."""
        given = [self._same(shared=shared) for shared in ins]
        found = self.invariance.of_body_inputs(eqn, given, self.scope)
        return [[self.name in same for same in body] for body in found]

    def is_used_by(self, eqn: JaxprEqn) -> bool:
        """Whether an equation, or one in it, goes over the axis."""
        return self._names_it(eqn) or any(
            interpreter.contains(body, self._names_it) for body in interpreter.bodies(eqn)
        )

    def is_made_alike_by(self, eqn: JaxprEqn) -> bool:
        """Whether an equation, or one in it, makes something shared of what varies."""
        return self._makes_alike(eqn) or any(
            interpreter.contains(body, self._makes_alike) for body in interpreter.bodies(eqn)
        )

    def _names_it(self, eqn: JaxprEqn) -> bool:
        names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        return self.name in (names if isinstance(names, tuple | list) else (names,))

    def _makes_alike(self, eqn: JaxprEqn) -> bool:
        return (
            eqn.primitive.name in _ALIKE
            and self._names_it(eqn)
            and eqn.params.get("axis_index_groups") is None
        )


_ALIKE = ("psum", "pmax", "pmin", "all_gather", "psum_invariant", "all_gather_invariant")


def settled_state(
    axis: Axis, body: Any, ins: Sequence[bool], pairs: Sequence[tuple[int, int]]
) -> list[bool]:
    """Whether each input is shared when the step runs in a loop.

    Args:
      axis: the mapped one.
      body: of the step.
      ins: of each input, whether it is shared to begin with.
      pairs: the inputs and results that are one leaf of the state.
    """
    ins = list(ins)
    while True:
        outs = axis.shared_out(body, ins)
        demoted = [place for place, result in pairs if ins[place] and not outs[result]]
        if not demoted:
            return ins
        for place in demoted:
            ins[place] = False


@dataclasses.dataclass(frozen=True, slots=True)
class VaryingOrigin:
    """Where a value that varies began to vary."""

    line: str  # "train.py:12", or ""
    primitive: str
    inputs: tuple[int, ...]  # of the body, that vary and reach it; none: the axis itself does

    def __str__(self) -> str:
        return f"{self.line or 'an unknown line'} ({self.primitive})"


def origin(body: Jaxpr, shared: Mapping[Var, bool], result: Atom, own: Var) -> VaryingOrigin:
    """Where a leaf of the state met what varies.

    Args:
      body: of the step, under the facts that hold for it.
      shared: of each variable, with the leaf supposed to be shared when it comes in.
      result: the leaf when it goes out.
      own: the leaf when it comes in.
    """
    made_by = {var: eqn for eqn in body.eqns for var in eqn.outvars if not _compat.is_dropped(var)}
    depends = _depending_on(body, own)
    seen: dict[Var, None] = {}
    queue = [result]
    met: JaxprEqn | None = None
    last: JaxprEqn | None = None
    roots: dict[Var, None] = {}
    while queue:
        atom = queue.pop(0)
        if isinstance(atom, Literal) or atom in seen or shared.get(atom, True):
            continue
        seen[atom] = None
        eqn = made_by.get(atom)
        if eqn is None:
            roots[atom] = None
            continue
        last = eqn
        meets = [v for v in eqn.invars if isinstance(v, Var) and shared.get(v, True)]
        if met is None and any(var in depends for var in meets):
            met = eqn
        queue += eqn.invars
    found = met or last
    inputs = tuple(place for place, var in enumerate(body.invars) if var in roots)
    if found is None:
        return VaryingOrigin("", "it comes in so", inputs)
    return VaryingOrigin(interpreter.source_line(found), found.primitive.name, inputs)


def _depending_on(body: Jaxpr, var: Var) -> set[Var]:
    depends = {var}
    for eqn in body.eqns:
        if any(isinstance(atom, Var) and atom in depends for atom in eqn.invars):
            depends.update(eqn.outvars)
    return depends
