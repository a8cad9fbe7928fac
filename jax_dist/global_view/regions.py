"""Stages of a body: equations on global arrays, and manual regions between.

A uniform value is computed on global arrays; what varies, and every collective over the axis, in a
`shard_map`: a manual region. Equations are put by what they need, not by where they stand: a region
takes all that can run when its stage has come, so a step of one all-reduce has one region, however
many leaves its gradients have. Loops, and branches on a uniform condition, are entered where they
make something uniform, or keep something sharded: their bodies have stages of their own.

Calls are inlined: an equation goes to one place, so a jit around a whole step would go into a
region as one, with its update of uniform parameters.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.interpreter import Atom, Values, carries, names_of, record_of
from jax_dist.global_view.analysis import (
    AxisAnalysis,
    ValueFacts,
    variables,
    wanted_in_bodies,
    wanted_specs,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GlobalEquation:
    """An equation on global arrays; one that is entered has a plan for each of its bodies."""

    eqn: JaxprEqn
    inner: "tuple[BodyPlan, ...]" = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TurnSum:
    """A scattered psum of what a scan stacks, such as the gradients of its layers.

    Each turn of the scan sums its own part, so that no device has the gradients of all layers.
    """

    total: Var  # the result of the psum
    between: tuple[JaxprEqn, ...]  # elementwise, from the scan to the psum


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Equations of a `shard_map`, and what goes in and out."""

    eqns: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    scatters: Mapping[Var, int]  # results of a psum that are wanted sharded, along which dimension
    turn_sums: Mapping[Var, TurnSum]  # of these, the ones taken in a scan, by its result
    shards: Mapping[Var, int]  # of `reads`, what is gathered in the region, along which dimension


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Equations on global arrays, and the region after them, if any."""

    outside: tuple[GlobalEquation, ...]
    region: Region | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BodyPlan:
    """A body in stages."""

    body: Jaxpr
    consts: tuple[Any, ...]  # the values of its first inputs
    ins: tuple[bool, ...]  # of each other input, whether it is uniform
    facts: ValueFacts
    stages: tuple[Stage, ...]

    @property
    def inputs(self) -> list[Var]:
        return self.body.invars[len(self.consts) :]

    @property
    def outs(self) -> list[bool]:
        return [self.facts.is_uniform(atom) for atom in self.body.outvars]

    def regions(self) -> Iterator[Region]:
        """Yield all regions, those of entered bodies first."""
        for stage in self.stages:
            for inner in (inner for step in stage.outside for inner in step.inner):
                yield from inner.regions()
            if stage.region is not None:
                yield stage.region


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options for all bodies of a step."""

    scatters: bool  # whether a psum may become a reduce-scatter
    regathers: bool  # whether regions gather what is sharded where they read it, each time
    # Whether all is one region, as nothing is sharded: the program of pmap, to the bit.
    in_one: bool


def plan(
    axis: AxisAnalysis, jaxpr: Any, ins: Sequence[bool], wanted: Sequence[Any], options: PlanOptions
) -> BodyPlan:
    """Return the stages of a body.

    `ins` says of each input whether it is uniform, `wanted` how each result is wanted sharded.
    """
    body, consts = _inline_calls(jaxpr)
    uniform = axis.uniform_values(body, [*[True] * len(consts), *ins])
    facts = ValueFacts(uniform, wanted_specs(body, wanted, uniform))
    stages = _Planner(axis, body, facts, options).stages()
    return BodyPlan(body, tuple(consts), tuple(ins), facts, stages)


def _inline_calls(jaxpr: Any) -> tuple[Jaxpr, list[Any]]:
    """Return a body without calls, and the values of its first inputs, the constants.

    An open jaxpr of jax 0.12 has no constants.
    """
    body = interpreter.open_jaxpr(jaxpr)
    constvars: list[Var] = [*body.constvars]
    consts: Values = [*interpreter.constants(jaxpr)]
    eqns: list[JaxprEqn] = []

    def write(inner: Jaxpr, known: dict[Var, Atom]) -> list[Atom]:
        """Write a body with new variables; return those of its results."""
        renamed = lambda atom: atom if isinstance(atom, Literal) else known.get(atom, atom)
        for eqn in inner.eqns:
            invars = [renamed(atom) for atom in eqn.invars]
            if record_of(eqn).call == "inline":
                (called,) = interpreter.bodies(eqn)
                callee = interpreter.open_jaxpr(called)
                new = [Var(var.aval) for var in callee.constvars]
                constvars.extend(new)
                consts.extend(interpreter.constants(called))
                formal = [*callee.constvars, *callee.invars]
                outvars = write(callee, dict(zip(formal, [*new, *invars], strict=True)))
            else:
                outvars = [Var(var.aval) for var in eqn.outvars]
                eqns.append(eqn.replace(invars=invars, outvars=outvars))
            known.update(zip(eqn.outvars, outvars, strict=True))
        return [renamed(atom) for atom in inner.outvars]

    outvars, inputs = write(body, {}), [*constvars, *body.invars]
    return Jaxpr((), inputs, outvars, eqns, body.effects, interpreter.unnamed()), consts


@dataclasses.dataclass(slots=True, eq=False)
class _Planner:
    """Puts each equation of one body into a stage.

    Stage k is what runs outside when the regions before k have run, and then region k. So what a
    region makes can be read in it, and outside from the next stage on.
    """

    axis: AxisAnalysis
    body: Jaxpr
    facts: ValueFacts
    options: PlanOptions
    outside: list[list[GlobalEquation]] = dataclasses.field(default_factory=list)  # by stage
    inside: list[list[JaxprEqn]] = dataclasses.field(default_factory=list)

    def stages(self) -> tuple[Stage, ...]:
        stage_of: dict[Var, int] = {}  # that makes a value
        of_region: set[Var] = set()
        last_effect = (0, True)  # stage of the last side effect, and whether it ran outside
        for eqn in self.body.eqns:
            is_entered = self._is_entered(eqn)
            is_inside = not is_entered and self._runs_inside(eqn)
            # The first stage with all operands; outside, a region's results come one stage later.
            stage = 0
            for var in variables(eqn.invars):
                stage = max(stage, stage_of.get(var, 0) + (var in of_region and not is_inside))
            if _compat.has_side_effects(eqn):  # they keep the order of the program
                before, was_outside = last_effect
                stage = max(stage, before if is_inside or was_outside else before + 1)
                last_effect = stage, not is_inside
            while len(self.outside) <= stage:
                self.outside.append([])
                self.inside.append([])
            stage_of.update((var, stage) for var in eqn.outvars)
            if is_inside:
                of_region.update(eqn.outvars)
                self.inside[stage].append(eqn)
            else:
                inner = tuple(self._plan_bodies(eqn)) if is_entered else ()
                self.outside[stage].append(GlobalEquation(eqn, inner))
        return tuple(
            Stage(tuple(outside), self._region(number) if self.inside[number] else None)
            for number, outside in enumerate(self.outside)
        )

    def _runs_inside(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation runs in a region: it varies, communicates or has effects."""
        return (
            self.options.in_one
            or not all(map(self.facts.is_uniform, [*eqn.invars, *eqn.outvars]))
            or _compat.has_side_effects(eqn)
            or self.axis.is_used_by(eqn)
        )

    def _is_entered(self, eqn: JaxprEqn) -> bool:
        """Return whether a loop or branch runs on global arrays, with regions in its bodies.

        It does if it makes a value uniform, or sharded; its condition is then uniform.
        """
        if self.options.in_one or record_of(eqn).kind not in ("loop", "branch"):
            return False
        is_sharded = any(self.facts.spec_of(var) is not None for var in eqn.outvars)
        if not is_sharded and not self.axis.is_unified_by(eqn):
            return False
        # Under vmap a condition has many elements, and lax.while_loop takes one.
        if _compat.name_of(eqn) == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape != ():
            return False
        return any(map(self.facts.is_uniform, eqn.outvars))

    def _plan_bodies(self, eqn: JaxprEqn) -> Iterator[BodyPlan]:
        """Yield the plan of each body of a loop or branch."""
        ins = self.axis.uniform_in_bodies(eqn, [*map(self.facts.is_uniform, eqn.invars)])
        wanted = wanted_in_bodies(eqn, [*map(self.facts.spec_of, eqn.outvars)])
        for body, of_body, results in zip(interpreter.bodies(eqn), ins, wanted, strict=True):
            yield plan(self.axis, body, of_body, results, self.options)

    def _region(self, number: int) -> Region:
        eqns = self.inside[number]
        # In program order: a set of variables has another order in each process.
        made = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
        reads = tuple(dict.fromkeys(var for var in _operands(eqns) if var not in made))
        others = [
            member for n, region in enumerate(self.inside) if n != number for member in region
        ]
        others += [step.eqn for steps in self.outside for step in steps]
        elsewhere = {*_operands(others), *variables(self.body.outvars)}
        makes = tuple(var for var in made if var in elsewhere)
        scatters = self._scattered(eqns)
        turn_sums = dict(_turn_sums(eqns, makes, scatters))
        # A sum that is scattered takes its operands whole.
        whole = _operands([eqn for eqn in eqns if not scatters.keys().isdisjoint(eqn.outvars)])
        gathered = [var for var in reads if self.options.regathers and var not in whole]
        return Region(tuple(eqns), reads, makes, scatters, turn_sums, self._sharded(gathered))

    def _scattered(self, eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
        """Return psum results that can be scattered, as no region reads them, and the dimension."""
        if not self.options.scatters:
            return {}
        read = {var for region in self.inside for var in _operands(region)}
        sums = (
            eqn
            for eqn in eqns
            if _compat.name_of(eqn) == "psum" and tuple(eqn.params["axes"]) == (self.axis.name,)
        )
        return self._sharded([var for eqn in sums for var in eqn.outvars if var not in read])

    def _sharded(self, candidates: Sequence[Var]) -> dict[Var, int]:
        """Return for variables wanted sharded over the mapped axis alone, along which dimension."""
        dims: dict[Var, int] = {}
        for var in candidates:
            aval: Any = var.aval
            for dim, part in enumerate(self.facts.spec_of(var) or ()):
                sizes = [self.axis.sizes.get(name, 0) for name in names_of(part)]
                if sizes and all(sizes) and aval.shape[dim] % math.prod(sizes) == 0:
                    dims.setdefault(var, dim)
        return dims


def _turn_sums(
    eqns: Sequence[JaxprEqn], makes: Sequence[Var], scatters: Mapping[Var, int]
) -> Iterator[tuple[Var, TurnSum]]:
    """Yield the stacked results of scans that only a scattered psum reads."""
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for var in variables(eqn.invars):
            readers.setdefault(var, []).append(eqn)
    scans = [eqn for eqn in eqns if _compat.name_of(eqn) == "scan"]
    for result in (var for eqn in scans for var in eqn.outvars[len(carries(eqn)) :]):
        var, between = result, []
        while var not in makes and len(readers.get(var, ())) == 1:
            (eqn,) = readers[var]
            if _compat.name_of(eqn) == "psum":
                total = eqn.outvars[eqn.invars.index(var)]
                if scatters.get(total):  # not along dimension 0, that of the turns
                    yield result, TurnSum(total, tuple(between))
                break
            if not record_of(eqn).elementwise or len(variables(eqn.invars)) > 1:
                break
            between.append(eqn)
            (var,) = eqn.outvars


def _operands(eqns: Sequence[JaxprEqn]) -> list[Var]:
    return [var for eqn in eqns for var in variables(eqn.invars)]
