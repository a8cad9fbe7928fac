"""Which equations of a body run in the global view, and which in islands between.

What is shared runs outside, on global arrays; what varies, and every collective over the axis, in a
`shard_map`. Equations are put by what they need, not by where they stand: an island takes all that
can run when its stage has come, so a step of one all-reduce has one island, however many leaves its
gradients have. Loops, and branches on something shared, are entered where they make something
shared: their bodies have stages of their own.

Calls that hold both what is shared and what varies are written out in the body around them: an
equation goes to one place, so a jit around a whole step would have to go into an island as one, and
its update of shared parameters with it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist.global_views import refusals
from jax_dist.global_views.uniformity import (
    Axis,
    Cuts,
    bodies_of_while,
    holds,
    wanted_cuts,
    wanted_in_bodies,
)
from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import INLINED, Atom, Values


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An equation that runs outside; one that is entered has a plan for each of its bodies."""

    eqn: JaxprEqn
    inner: "tuple[BodyPlan, ...]" = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Island:
    """Equations that run on each device, and what goes in and out."""

    eqns: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    scatters: Mapping[Var, int]  # results of a psum that are wanted cut, along which dimension
    parts: Mapping[Var, int]  # shared ones of `reads` that lie cut, and can be taken so


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """What runs outside, and then the island after it, if any."""

    outside: tuple[Step, ...]
    island: Island | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BodyPlan:
    """A body in stages."""

    body: Jaxpr
    consts: tuple[Any, ...]  # the values of its first inputs
    ins: tuple[bool, ...]  # of each other input, whether it is shared
    shared: Mapping[Var, bool]
    cuts: Cuts  # how shared values are wanted to lie, where that is known
    stages: tuple[_Stage, ...]

    @property
    def outs(self) -> list[bool]:
        return [self.is_shared(atom) for atom in self.body.outvars]

    def is_shared(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or self.shared[atom]

    def islands(self) -> Iterator[tuple["BodyPlan", Island]]:
        """All of them, with the plans that they stand in; those of entered bodies first."""
        for stage in self.stages:
            for step in stage.outside:
                for inner in step.inner:
                    yield from inner.islands()
            if stage.island is not None:
                yield self, stage.island

    def reads_in_islands(self) -> set[Var]:
        """What islands read whole, those of entered bodies by the operands of their equations."""
        islands = [stage.island for stage in self.stages if stage.island is not None]
        return {var for island in islands for var in island.reads}


def plan(
    axis: Axis,
    jaxpr: Any,
    ins: Sequence[bool],
    wanted: Sequence[Any],
    *,
    scatters: bool,
    tied: bool,
) -> BodyPlan:
    """The stages of a body.

    Args:
      axis: the mapped one.
      jaxpr: open or closed.
      ins: of each input, whether it is shared.
      wanted: how each result is wanted to lie: a PartitionSpec, or None.
      scatters: whether a sum may become a reduce-scatter.
      tied: whether types name the mesh of an island. Outside, each equation is then bound again,
        and those that cannot be run inside.
    """
    body, consts = _written_out(axis, jaxpr, ins)
    shared = axis.shared_in(body, [*[True] * len(consts), *ins])
    cuts = wanted_cuts(body, wanted, shared)
    planner = _Planner(axis, body, shared, cuts, scatters=scatters, tied=tied)
    return BodyPlan(body, tuple(consts), tuple(ins), shared, cuts, planner.stages())


def _written_out(axis: Axis, jaxpr: Any, ins: Sequence[bool]) -> tuple[Jaxpr, list[Any]]:
    """The body without those calls that would have to go to two places.

    And the values of its first inputs, the constants. An open jaxpr of jax 0.12 has none of its
    own, so that here they are inputs on all versions.
    """
    facts: dict[Var, bool] = dict(axis.shared_in(jaxpr, ins))

    def is_inlined(eqn: JaxprEqn) -> bool:
        # Of a call in another that is written out, nothing is known yet; so it is, too.
        outs = {facts.get(var) for var in eqn.outvars}
        return None in outs or len(outs) > 1 or axis.is_used_by(eqn)

    flat, known = _Flat(is_inlined), {}
    body = interpreter.open_jaxpr(jaxpr)
    flat.add(body.eqns, known)
    made = Jaxpr(
        (),
        [*body.constvars, *flat.constvars, *body.invars],
        [flat.renamed(atom, known) for atom in body.outvars],
        flat.eqns,
        body.effects,
        interpreter.unnamed(),
    )
    return made, [*interpreter.constants(jaxpr), *flat.const_values]


class _Planner:
    """Puts each equation of one body into a stage.

    Stage k is what runs outside when the islands before k have run, and then island k. So what an
    island makes can be read in it, and outside from the next stage on.
    """

    def __init__(
        self,
        axis: Axis,
        body: Jaxpr,
        shared: Mapping[Var, bool],
        cuts: Cuts,
        *,
        scatters: bool,
        tied: bool,
    ):
        self._axis, self._body, self._shared, self._cuts = axis, body, shared, cuts
        self._scatters, self._tied = scatters, tied
        self._stage: dict[Var, int] = {}  # where a value is made
        self._inside: set[Var] = set()  # what is made in islands
        self._outside: list[list[Step]] = []
        self._islands: list[list[JaxprEqn]] = []
        self._cheap: dict[Var, JaxprEqn] = {}  # what an island can make itself

    def stages(self) -> tuple[_Stage, ...]:
        last_effect = (0, False)  # the stage of the last one, and whether it was outside
        for eqn in self._body.eqns:
            operands = [atom for atom in eqn.invars if isinstance(atom, Var)]
            entered = self._is_entered(eqn)
            inside = not entered and self._runs_inside(eqn)
            stage = max((self._readable_from(var, inside=inside) for var in operands), default=0)
            if _compat.has_side_effects(eqn):
                before, was_outside = last_effect
                stage = max(stage, before if inside or was_outside else before + 1)
                last_effect = stage, not inside
            self._put(eqn, stage, inside=inside, entered=entered)
        return tuple(self._made_of(number) for number in range(len(self._outside)))

    def _readable_from(self, var: Var, *, inside: bool) -> int:
        made = self._stage.get(var, 0)
        return made + 1 if var in self._inside and not inside else made

    def _put(self, eqn: JaxprEqn, stage: int, *, inside: bool, entered: bool) -> None:
        while len(self._outside) <= stage:
            self._outside.append([])
            self._islands.append([])
        self._stage.update((var, stage) for var in eqn.outvars)
        if inside:
            self._inside.update(eqn.outvars)
            self._islands[stage].append(eqn)
            return
        if _is_cheap(eqn, self._cheap):
            self._cheap.update((var, eqn) for var in eqn.outvars)
        inner = tuple(self._plans_of(eqn)) if entered else ()
        self._outside[stage].append(Step(eqn, inner))

    # ---- where an equation runs

    def _is_shared(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or self._shared[atom]

    def _runs_inside(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is one of each device's own."""
        return (
            not all(map(self._is_shared, [*eqn.invars, *eqn.outvars]))
            or _compat.has_side_effects(eqn)
            or self._axis.is_used_by(eqn)
            or (self._tied and holds(eqn, _is_bound_once))
        )

    def _is_entered(self, eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if name not in ("scan", "while", "cond") or not self._axis.is_made_alike_by(eqn):
            return False
        if not any(map(self._is_shared, eqn.outvars)):
            return False
        if name == "cond":
            return self._is_shared(eqn.invars[0])
        if name == "while":
            condition = interpreter.open_jaxpr(eqn.params["cond_jaxpr"])
            ins = self._axis.shared_in_bodies(eqn, self._ins_of(eqn))
            of_condition = ins[bodies_of_while(eqn).index("cond_jaxpr")]
            (again,) = self._axis.shared_out(condition, of_condition)
            # Under vmap a condition has many elements, and lax.while_loop takes one.
            kind: Any = condition.out_avals[0]
            return again and kind.shape == ()
        return True

    def _ins_of(self, eqn: JaxprEqn) -> list[bool]:
        return [self._is_shared(atom) for atom in eqn.invars]

    def _plans_of(self, eqn: JaxprEqn) -> Iterator[BodyPlan]:
        bodies = interpreter.bodies(eqn)
        ins = self._axis.shared_in_bodies(eqn, self._ins_of(eqn))
        wanted = wanted_in_bodies(eqn, [self._cuts.get(var) for var in eqn.outvars])
        for body, of_body, results in zip(bodies, ins, wanted, strict=True):
            limits: Any = {"scatters": self._scatters, "tied": self._tied}
            yield plan(self._axis, body, of_body, results, **limits)

    # ---- what an island takes and gives

    def _made_of(self, number: int) -> _Stage:
        outside, eqns = tuple(self._outside[number]), self._islands[number]
        if not eqns:
            return _Stage(outside, None)
        # In program order: a set of variables has another order in each process.
        own = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
        read = [atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Var)]
        helped = self._helped(var for var in read if var not in own)
        eqns = [*helped, *eqns]
        inner = {var for eqn in eqns for var in eqn.outvars}
        reads = dict.fromkeys(
            atom
            for eqn in eqns
            for atom in eqn.invars
            if isinstance(atom, Var) and atom not in inner
        )
        elsewhere = self._read_elsewhere(number)
        makes = tuple(var for var in own if var in elsewhere)
        for var in [*reads, *makes]:
            if _is_reference(var):
                raise refusals.reference_between_islands(interpreter.source_line(eqns[0]))
        scatters = self._scattered(eqns, makes)
        parts = self._parts(eqns, reads, scatters)
        return _Stage(outside, Island(tuple(eqns), tuple(reads), makes, scatters, parts))

    def _helped(self, reads: Iterator[Var]) -> list[JaxprEqn]:
        """The cheap equations that make some variables, in program order."""
        needed: dict[int, JaxprEqn] = {}
        queue = [var for var in reads if var in self._cheap]
        while queue:
            eqn = self._cheap[queue.pop()]
            needed[id(eqn)] = eqn
            queue += [atom for atom in eqn.invars if isinstance(atom, Var)]
        return [eqn for eqn in self._body.eqns if id(eqn) in needed]

    def _read_elsewhere(self, number: int) -> set[Var]:
        """What is read outside, in other islands, or given as a result."""
        read = {atom for atom in self._body.outvars if isinstance(atom, Var)}
        for steps in self._outside:
            read.update(a for step in steps for a in step.eqn.invars if isinstance(a, Var))
        for other, eqns in enumerate(self._islands):
            if other != number:
                read.update(a for eqn in eqns for a in eqn.invars if isinstance(a, Var))
        return read

    def _scattered(self, eqns: Sequence[JaxprEqn], makes: Sequence[Var]) -> dict[Var, int]:
        """The sums that nobody reads on the devices, and that are wanted cut outside."""
        if not self._scatters:
            return {}
        read = {
            a for steps in self._islands for eqn in steps for a in eqn.invars if isinstance(a, Var)
        }
        found: dict[Var, int] = {}
        for eqn in eqns:
            if eqn.primitive.name != "psum" or tuple(eqn.params["axes"]) != (self._axis.name,):
                continue
            if eqn.params.get("axis_index_groups") is not None:
                continue
            for var in eqn.outvars:
                dim = self._cut_along(var)
                if var in makes and var not in read and dim is not None:
                    found[var] = dim
        return found

    def _parts(
        self, eqns: Sequence[JaxprEqn], reads: Iterable[Var], scatters: Mapping[Var, int]
    ) -> dict[Var, int]:
        """What an island can take in parts; a sum that is scattered takes its operands whole."""
        sums = [eqn for eqn in eqns if any(var in scatters for var in eqn.outvars)]
        whole = {atom for eqn in sums for atom in eqn.invars if isinstance(atom, Var)}
        found = {var: self._cut_along(var) for var in reads if self._shared[var]}
        return {var: dim for var, dim in found.items() if dim is not None and var not in whole}

    def _cut_along(self, var: Var) -> int | None:
        """The dimension that is wanted cut over the mapped axis, and over no other."""
        aval: Any = var.aval
        for dim, part in enumerate(self._cuts.get(var) or ()):
            if part == self._axis.name and aval.shape[dim] % self._axis.size == 0:
                return dim
        return None


_NOT_BOUND_AGAIN = ("custom_linear_solve", "pallas_call")


def _is_bound_once(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _NOT_BOUND_AGAIN


def _is_cheap(eqn: JaxprEqn, cheap: Mapping[Var, JaxprEqn]) -> bool:
    """Whether it is easier made than sent: zeros, numbers in a row."""
    return eqn.primitive.name in _CHEAP and all(
        isinstance(atom, Literal) or atom in cheap for atom in eqn.invars
    )


_CHEAP = ("broadcast_in_dim", "convert_element_type", "iota", "reshape", "squeeze")


def _is_reference(var: Var) -> bool:
    return type(var.aval).__name__ == "AbstractRef"


class _Flat:
    """The equations so far. Each body that is written out gets variables of its own."""

    def __init__(self, is_inlined: Callable[[JaxprEqn], bool]):
        self.eqns: list[JaxprEqn] = []
        self.constvars: list[Var] = []
        self.const_values: Values = []
        self._is_inlined = is_inlined

    def add(self, eqns: Sequence[JaxprEqn], known: dict[Var, Atom]) -> None:
        for eqn in eqns:
            invars = [self.renamed(atom, known) for atom in eqn.invars]
            if eqn.primitive.name in INLINED and self._is_inlined(eqn):
                outs = self._written_out(eqn, invars)
                known.update(zip(eqn.outvars, outs, strict=True))
            else:
                outvars = [Var(var.aval) for var in eqn.outvars]
                known.update(zip(eqn.outvars, outvars, strict=True))
                self.eqns.append(eqn.replace(invars=invars, outvars=outvars))

    def renamed(self, atom: Atom, known: Mapping[Var, Atom]) -> Atom:
        return atom if isinstance(atom, Literal) else known.get(atom, atom)

    def _written_out(self, eqn: JaxprEqn, invars: Sequence[Atom]) -> list[Atom]:
        (jaxpr,) = interpreter.bodies(eqn)
        body = interpreter.open_jaxpr(jaxpr)
        known: dict[Var, Atom] = dict(zip(body.invars, invars, strict=True))
        for var, value in zip(body.constvars, interpreter.constants(jaxpr), strict=True):
            known[var] = new = Var(var.aval)
            self.constvars.append(new)
            self.const_values.append(value)
        self.add(body.eqns, known)
        return [self.renamed(atom, known) for atom in body.outvars]
