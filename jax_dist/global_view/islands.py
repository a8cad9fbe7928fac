"""Which equations of a body run in the global view, and which in islands between.

What is shared runs outside, on global arrays; what varies, and every collective over the axis, in a
`shard_map`. Equations are put by what they need, not by where they stand: an island takes all that
can run when its stage has come, so a step of one all-reduce has one island, however many leaves its
gradients have. Loops, and branches on something shared, are entered where they make something
shared, or keep something in parts: their bodies have stages of their own.

Calls that hold both what is shared and what varies are written out in the body around them: an
equation goes to one place, so a jit around a whole step would have to go into an island as one, and
its update of shared parameters with it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.bodies import carries
from jax_dist._rewrite.interpreter import Atom, Values, names_of
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist.global_view.uniformity import Cuts, SharedAxis, wanted_cuts, wanted_in_bodies


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An equation that runs outside; one that is entered has a plan for each of its bodies."""

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
class Island:
    """Equations that run on each device, and what goes in and out."""

    eqns: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    scatters: Mapping[Var, int]  # results of a psum that are wanted cut, along which dimension
    turn_sums: Mapping[Var, "TurnSum"]  # of these, the ones taken in a scan, by its result
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

    def islands(self) -> Iterator[Island]:
        """Those of entered bodies first."""
        for stage in self.stages:
            for inner in (inner for step in stage.outside for inner in step.inner):
                yield from inner.islands()
            if stage.island is not None:
                yield stage.island


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """What may be done with a body."""

    gradients: str  # "reduce" or "scatter": what may become of a sum
    regathers: bool  # whether islands gather what is cut where they read it, each time
    tied: bool  # whether types name a mesh, so that some equations can only run inside
    # Whether all is one island, as nothing is cut: then it is the program of pmap, to the bit.
    in_one: bool = False


def plan(
    axis: SharedAxis, jaxpr: Any, ins: Sequence[bool], wanted: Sequence[Any], choices: Choices
) -> BodyPlan:
    """The stages of a body, with inputs that are shared or not, and results wanted to lie so."""
    in_parts = any(spec is not None for spec in wanted)
    body, consts = _written_out(axis, jaxpr, ins, in_parts=in_parts)
    shared = axis.shared_in(body, [*[True] * len(consts), *ins])
    cuts = wanted_cuts(body, wanted, shared)
    stages = _Planner(axis, body, shared, cuts, choices).stages()
    return BodyPlan(body, tuple(consts), tuple(ins), shared, cuts, stages)


def _written_out(
    axis: SharedAxis, jaxpr: Any, ins: Sequence[bool], *, in_parts: bool
) -> tuple[Jaxpr, list[Any]]:
    """The body without those calls that would have to go to two places.

    Nor those of which some equations may need whole what others take in parts.

    And the values of its first inputs, the constants. An open jaxpr of jax 0.12 has none of its
    own, so that here they are inputs on all versions.
    """
    facts, body = axis.shared_in(jaxpr, ins), interpreter.open_jaxpr(jaxpr)
    constvars: list[Var] = [*body.constvars]
    consts: Values = [*interpreter.constants(jaxpr)]
    eqns: list[JaxprEqn] = []

    def is_inlined(eqn: JaxprEqn) -> bool:
        # Of a call in another that is written out, nothing is known yet; so it is, too.
        outs = {facts.get(var) for var in eqn.outvars}
        is_split = None in outs or len(outs) > 1 or axis.is_used_by(eqn)
        is_split |= in_parts and interpreter.holds(eqn, _looks_around)
        return record_of(eqn).call == "inline" and is_split

    def write(inner: Jaxpr, known: dict[Var, Atom]) -> list[Atom]:
        """Each body gets variables of its own; gives those of its results."""
        renamed = lambda atom: atom if isinstance(atom, Literal) else known.get(atom, atom)
        for eqn in inner.eqns:
            invars = [renamed(atom) for atom in eqn.invars]
            if is_inlined(eqn):
                (called,) = interpreter.bodies(eqn)
                callee = interpreter.open_jaxpr(called)
                own = [Var(var.aval) for var in callee.constvars]
                constvars.extend(own)
                consts.extend(interpreter.constants(called))
                formal = [*callee.constvars, *callee.invars]
                outvars = write(callee, dict(zip(formal, [*own, *invars], strict=True)))
            else:
                outvars = [Var(var.aval) for var in eqn.outvars]
                eqns.append(eqn.replace(invars=invars, outvars=outvars))
            known.update(zip(eqn.outvars, outvars, strict=True))
        return [renamed(atom) for atom in inner.outvars]

    outvars, inputs = write(body, {}), [*constvars, *body.invars]
    return Jaxpr((), inputs, outvars, eqns, body.effects, interpreter.unnamed()), consts


def _looks_around(eqn: JaxprEqn) -> bool:
    """Whether an element of a result may depend on several of an operand."""
    record = record_of(eqn)
    return not (record.elementwise or record.moves or record.kind == "call")


@dataclasses.dataclass(slots=True, eq=False)
class _Planner:
    """Puts each equation of one body into a stage.

    Stage k is what runs outside when the islands before k have run, and then island k. So what an
    island makes can be read in it, and outside from the next stage on.
    """

    axis: SharedAxis
    body: Jaxpr
    shared: Mapping[Var, bool]
    cuts: Cuts
    choices: Choices
    stage_of: dict[Var, int] = dataclasses.field(default_factory=dict)  # that makes a value
    inside: set[Var] = dataclasses.field(default_factory=set)  # what is made in islands
    cheap: dict[Var, JaxprEqn] = dataclasses.field(default_factory=dict)  # an island can make it
    outside: list[list[Step]] = dataclasses.field(default_factory=list)  # by stage
    islands: list[list[JaxprEqn]] = dataclasses.field(default_factory=list)

    def stages(self) -> tuple[_Stage, ...]:
        last_effect = (0, True)  # the stage of the last one, and whether it was outside
        for eqn in self.body.eqns:
            entered = self._is_entered(eqn)
            inside = not entered and self._runs_inside(eqn)
            stage = 0
            for var in _operands(eqn):
                later = var in self.inside and not inside
                stage = max(stage, self.stage_of.get(var, 0) + later)
            if _compat.has_side_effects(eqn):
                before, was_outside = last_effect
                stage = max(stage, before if inside or was_outside else before + 1)
                last_effect = stage, not inside
            while len(self.outside) <= stage:
                self.outside.append([])
                self.islands.append([])
            self.stage_of.update((var, stage) for var in eqn.outvars)
            if inside:
                self.inside.update(eqn.outvars)
                self.islands[stage].append(eqn)
                continue
            is_literal_or_cheap = lambda atom: isinstance(atom, Literal) or atom in self.cheap
            record = record_of(eqn)
            # Zeros, numbers in a row, a mask of them: easier made than sent.
            is_easy = record.exact and (record.moves or record.elementwise)
            if is_easy and all(map(is_literal_or_cheap, eqn.invars)):
                self.cheap.update((var, eqn) for var in eqn.outvars)
            inner = tuple(self._plans_of(eqn)) if entered else ()
            self.outside[stage].append(Step(eqn, inner))
        return tuple(self._made_of(number) for number in range(len(self.outside)))

    # ---- where an equation runs

    def _is_shared(self, atom: Atom) -> bool:
        return isinstance(atom, Literal) or self.shared[atom]

    def _runs_inside(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is one of each device's own."""
        return (
            self.choices.in_one
            or not all(map(self._is_shared, [*eqn.invars, *eqn.outvars]))
            or _compat.has_side_effects(eqn)
            or self.axis.is_used_by(eqn)
            or (self.choices.tied and interpreter.holds(eqn, lambda each: record_of(each).tied))
        )

    def _is_entered(self, eqn: JaxprEqn) -> bool:
        """Whether it makes something shared, or something in parts; a condition is then shared."""
        if self.choices.in_one or record_of(eqn).kind not in ("loop", "branch"):
            return False
        in_parts = any(self.cuts.get(var) is not None for var in eqn.outvars)
        if not in_parts and not self.axis.is_made_alike_by(eqn):
            return False
        # Under vmap a condition has many elements, and lax.while_loop takes one.
        if _compat.name_of(eqn) == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape != ():
            return False
        return any(map(self._is_shared, eqn.outvars))

    def _ins_of_bodies(self, eqn: JaxprEqn) -> list[list[bool]]:
        return self.axis.shared_in_bodies(eqn, [self._is_shared(atom) for atom in eqn.invars])

    def _plans_of(self, eqn: JaxprEqn) -> Iterator[BodyPlan]:
        wanted = wanted_in_bodies(eqn, [self.cuts.get(var) for var in eqn.outvars])
        bodies = interpreter.bodies(eqn)
        for body, ins, results in zip(bodies, self._ins_of_bodies(eqn), wanted, strict=True):
            yield plan(self.axis, body, ins, results, self.choices)

    # ---- what an island takes and gives

    def _made_of(self, number: int) -> _Stage:
        outside, eqns = tuple(self.outside[number]), self.islands[number]
        if not eqns:
            return _Stage(outside, None)
        # In program order: a set of variables has another order in each process.
        own = dict.fromkeys(var for eqn in eqns for var in eqn.outvars)
        eqns = [*self._helping(_operands(*eqns)), *eqns]
        inner = {var for eqn in eqns for var in eqn.outvars}
        reads = tuple(dict.fromkeys(var for var in _operands(*eqns) if var not in inner))
        others = [each for n, island in enumerate(self.islands) if n != number for each in island]
        outer = [step.eqn for steps in self.outside for step in steps]
        elsewhere = {*_operands(*outer, *others), *_variables(self.body.outvars)}
        makes = tuple(var for var in own if var in elsewhere)
        if any(_compat.is_ref(var.aval) for var in (*reads, *makes)):
            line = interpreter.source_line(eqns[0]) or "an unknown line"
            raise NotImplementedError(
                f"A reference (jax.new_ref) at {line} is used before and after a sum over devices, "
                "which run in two shard_maps. Read it before the collective, and make a new one "
                "after it."
            )
        scatters = self._scattered(eqns)
        # A sum that is scattered takes its operands whole.
        sums = [eqn for eqn in eqns if any(var in scatters for var in eqn.outvars)]
        whole = {*_operands(*sums)}
        regathered = [var for var in reads if self.choices.regathers and var not in whole]
        cut = {var: self._cut_along(var) for var in regathered}
        parts = {var: dim for var, dim in cut.items() if dim is not None}
        turn_sums = dict(_turn_sums(eqns, makes, scatters))
        island = Island(tuple(eqns), reads, makes, scatters, turn_sums, parts)
        return _Stage(outside, island)

    def _helping(self, reads: list[Var]) -> list[JaxprEqn]:
        """The cheap equations that make some of these variables, in program order."""
        needed: dict[int, JaxprEqn] = {}
        queue = [var for var in reads if var in self.cheap]
        while queue:
            eqn = self.cheap[queue.pop()]
            needed[id(eqn)] = eqn
            queue += _operands(eqn)
        return [eqn for eqn in self.body.eqns if id(eqn) in needed]

    def _scattered(self, eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
        """The sums that nobody reads on the devices, and that are wanted cut outside."""
        if self.choices.gradients == "reduce":
            return {}
        read = {var for island in self.islands for var in _operands(*island)}
        # Of groups of devices, a sum is not shared, and wanted nowhere.
        sums = [
            eqn
            for eqn in eqns
            if _compat.name_of(eqn) == "psum" and tuple(eqn.params["axes"]) == (self.axis.name,)
        ]
        made = [var for eqn in sums for var in eqn.outvars if var not in read]
        found = {var: self._cut_along(var) for var in made}
        return {var: dim for var, dim in found.items() if dim is not None}

    def _cut_along(self, var: Var) -> int | None:
        """The dimension that is wanted cut over the mapped axis, and over no other."""
        aval: Any = var.aval
        for dim, part in enumerate(self.cuts.get(var) or ()):
            sizes = [self.axis.on_mesh.get(name) for name in names_of(part)]
            own = [size for size in sizes if size is not None]
            if own and own == sizes and aval.shape[dim] % math.prod(own) == 0:
                return dim
        return None


def _turn_sums(
    eqns: Sequence[JaxprEqn], makes: Sequence[Var], scatters: Mapping[Var, int]
) -> Iterator[tuple[Var, TurnSum]]:
    """Find the results of scans that only a scattered psum reads."""
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for var in _operands(eqn):
            readers.setdefault(var, []).append(eqn)
    scans = [eqn for eqn in eqns if _compat.name_of(eqn) == "scan"]
    for result in (var for eqn in scans for var in eqn.outvars[len(carries(eqn)) :]):
        var, between = result, []
        while var not in makes and len(reads := readers.get(var, ())) == 1:
            (eqn,) = reads
            if _compat.name_of(eqn) == "psum":
                total = eqn.outvars[eqn.invars.index(var)]
                if scatters.get(total):  # not along dimension 0, that of the turns
                    yield result, TurnSum(total, tuple(between))
                break
            if not record_of(eqn).elementwise or len(_operands(eqn)) > 1:
                break
            between.append(eqn)
            (var,) = eqn.outvars


def _operands(*eqns: JaxprEqn) -> list[Var]:
    return [var for eqn in eqns for var in _variables(eqn.invars)]


def _variables(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]
