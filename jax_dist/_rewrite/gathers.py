"""Gathers whose result is only reduced become one reduction over devices.

Inside every shard_map, at any depth, an all_gather is left out if all that is made of it can be
made of the blocks that the devices hold. First all is decided, in Python; then the program is
emitted once.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jax_dist import _codes, _compat
from jax_dist._rewrite.gather_reductions import Constancy, emit_sum
from jax_dist._rewrite.gather_rules import step_of
from jax_dist._rewrite.gather_states import (
    Gather,
    Gathered,
    Groups,
    Refuse,
    Site,
    State,
    Whole,
    aval_of,
    counted,
    is_of_jax,
    plain_name,
    sites_of,
    spelled,
    why_not_worth,
    why_outside,
)
from jax_dist._rewrite.interpreter import (
    Atom,
    Handler,
    bodies,
    contains,
    named_axes,
    open_jaxpr,
    run,
    run_bodies,
    source_line,
)
from jax_dist._rewrite.pipeline import PassFinding, PassPlan
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.uniformity import (
    NOWHERE,
    Facts,
    Invariance,
    Same,
)
from jax_dist.primitives import RECORDS

_CODE = _codes.ALL_GATHER_THEN_REDUCE
Gathers: TypeAlias = Literal["reduce", "exact", "keep"]

# The primitives that the pass has something to do with.
GATHERS = frozenset(
    name for name, record in RECORDS.items() if record.over in ("gather", "scatter")
)

_Handlers: TypeAlias = dict[int, Handler]
_Origin: TypeAlias = tuple[Site, Var]  # a body may be called twice: its variables are told by place


@dataclasses.dataclass(frozen=True, slots=True)
class _Pin:
    """Why a gather stays, and the line that makes it stay."""

    why: str  # "": nothing that a user would want to hear of
    where: str


def plan_gathers(jaxpr: ClosedJaxpr, *, exact: bool) -> PassPlan:
    """Says which gathers of a program give way to reductions, and evaluates it without them.

    Args:
      jaxpr: of the whole program, as `jax.make_jaxpr` gives it.
      exact: only where no bit of a result can change.

    Returns:
      What to evaluate instead on the same inputs, or None if nothing is to change; and what was
      rewritten or refused.
    """
    findings: list[PassFinding] = []
    handlers = _outside(jaxpr, findings, exact=exact)
    once = tuple(dict.fromkeys(findings))
    if not handlers:
        return PassPlan(None, once)
    return PassPlan(lambda *inputs: run(jaxpr, inputs, handlers), once)


def _outside(jaxpr: Any, findings: list[PassFinding], *, exact: bool) -> _Handlers:
    """Outside of any shard_map, where bodies stay bodies."""
    handlers: _Handlers = {}
    for place, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        if _compat.name_of(eqn) == "shard_map":
            inside, found = _decide(eqn, exact=exact)
            findings += found
            each = [inside]
        else:
            each = [_outside(body, findings, exact=exact) for body in bodies(eqn)]
        if any(each):
            handlers[place] = _inside(eqn, each)
    return handlers


def _inside(eqn: JaxprEqn, each: Sequence[_Handlers]) -> Handler:
    """Binds an equation with handlers in each of its bodies, in order; one without any stays."""
    evaluates = {
        number: lambda *args, body=body, handlers=handlers: run(body, args, handlers)
        for number, (body, handlers) in enumerate(zip(bodies(eqn), each, strict=True))
        if handlers
    }
    return functools.partial(run_bodies, evaluates)


def _decide(eqn: JaxprEqn, *, exact: bool) -> tuple[_Handlers, tuple[PassFinding, ...]]:
    """Walks until nothing more is pinned: then each gather is either gone or as it was."""
    invariance = Invariance()
    pins: dict[Site, _Pin] = {}
    while True:
        walk = _GatherWalk(pins, invariance, exact=exact)
        handlers = walk.shard_map(eqn, [NOWHERE] * len(eqn.invars), NOWHERE, ())
        if len(walk.pins) == len(pins):
            for group in walk.groups.all():
                gathers = [walk.gathers[site] for site in group.sites]
                why = why_not_worth(gathers, group.made)
                if why or not group.made:  # without anything made, the results are not used
                    for site, gather in zip(group.sites, gathers, strict=True):
                        walk.pins[site] = _Pin(why, source_line(gather.eqn))
        if len(walk.pins) == len(pins):
            return handlers, _findings(walk)
        pins = walk.pins


def _findings(walk: "_GatherWalk") -> tuple[PassFinding, ...]:
    found: dict[Site, PassFinding] = {}
    for site, pin in walk.pins.items():
        if pin.why:
            eqn = walk.gathers[site].eqn
            line = source_line(eqn)
            what = f"{_named(eqn)}{f' ({line})' if line else ''} is kept"
            found[site] = PassFinding(_CODE, "refused", what, pin.why, pin.where)
    for group in walk.groups.all():
        read = " and ".join(dict.fromkeys(made.primitive for made in group.made))
        names = [made.name for made in group.made]
        became = " and ".join(counted(names.count(name), name) for name in dict.fromkeys(names))
        for site in group.sites:
            eqn = walk.gathers[site].eqn
            what = f"{_named(eqn)}, {read}: {became}"
            found[site] = PassFinding(_CODE, "rewritten", what, "", source_line(eqn))
    summed = [
        PassFinding(
            _CODE, "rewritten", f"{_named(eqn)} of equal parts: one psum", "", source_line(eqn)
        )
        for eqn in walk.scatters
    ]
    return (*[found[site] for site in sorted(found)], *summed)


def _named(eqn: JaxprEqn) -> str:
    return f"{_compat.name_of(eqn)} over {spelled(named_axes(eqn))}"


# --- walks over the body of a shard_map and says what every equation becomes; nothing is traced
#
# The states of gathered values go through the equations by the rules. An equation that needs a
# whole value pins the gathers behind it: they stay, and in the next walk their results are whole.


@dataclasses.dataclass(frozen=True, slots=True)
class _GatherFrame:
    """What a walk knows of the variables of one body."""

    invariance: Invariance
    scope: Same
    facts: Facts
    constant: Constancy | None  # None: nothing is scattered
    gathered: dict[Var, Gathered]
    makers: dict[Var, JaxprEqn]  # of what is gathered here
    at: Site  # where the body begins
    loop: Site  # where the nearest body begins that is not inlined
    called_at: str  # the line of the equation that holds the body

    def line(self, eqn: JaxprEqn) -> str:
        return self.called_at or source_line(eqn)

    def state(self, atom: Atom) -> State:
        if not isinstance(atom, core.Literal) and atom in self.gathered:
            return self.gathered[atom]
        return Whole(self.invariance.same_of(atom, self.facts, self.scope))

    def same(self, eqn: JaxprEqn) -> list[Same]:
        return [self.invariance.same_of(atom, self.facts, self.scope) for atom in eqn.invars]

    def has_gathered(self, eqn: JaxprEqn) -> bool:
        gathered = self.gathered
        return any(not isinstance(atom, core.Literal) and atom in gathered for atom in eqn.invars)


class _GatherWalk:
    """One walk. `pins` grows; the walk counts only if it did not."""

    def __init__(self, pins: Mapping[Site, _Pin], invariance: Invariance, *, exact: bool) -> None:
        self.pins: dict[Site, _Pin] = dict(pins)
        self._exact = exact
        self.gathers: dict[Site, Gather] = {}
        self.groups: Groups = Groups()
        self.scatters: list[JaxprEqn] = []
        self._invariance = invariance
        self._equal: dict[Any, Site] = {}  # the first of equal gathers
        self._origins: dict[Var, _Origin] = {}  # of the inputs of bodies that are inlined

    def shard_map(self, eqn: JaxprEqn, same: Sequence[Same], scope: Same, at: Site) -> _Handlers:
        """What becomes of the equations in the body of a shard_map, by their place."""
        (inputs,) = self._invariance.of_body_inputs(eqn, same, scope)
        return self._apart(
            eqn, eqn.params["jaxpr"], inputs, self._invariance.inside(eqn, scope), at
        )

    # ---- bodies

    def _apart(
        self, eqn: JaxprEqn, jaxpr: Any, same: Sequence[Same], scope: Same, at: Site
    ) -> _Handlers:
        """A body that stays a body: nothing gathered enters or leaves it."""
        whole, varied = [None] * len(same), [frozenset()] * len(same)
        handlers, frame = self._body(jaxpr, scope, same, whole, varied, at=at, loop=at)
        for atom in open_jaxpr(jaxpr).outvars:
            state = frame.state(atom)
            if isinstance(state, Gathered) and isinstance(atom, Var):
                why = f"the gathered value leaves the {plain_name(eqn)} whole"
                self._pin(state.sites, why, frame.line(frame.makers[atom]))
        return handlers

    def _body(
        self,
        body: Any,
        scope: Same,
        same: Sequence[Same],
        gathered: Sequence[Gathered | None],
        constant: Sequence[frozenset[int]],
        *,
        at: Site,
        loop: Site,
        called_at: str = "",
    ) -> tuple[_Handlers, _GatherFrame]:
        """Of an open or closed jaxpr, by what is known of its inputs."""
        jaxpr = open_jaxpr(body)
        frame = _GatherFrame(
            invariance=self._invariance,
            scope=scope,
            facts=self._invariance.facts(body, same, scope),
            constant=Constancy(jaxpr, constant)
            if contains(jaxpr, lambda eqn: _compat.name_of(eqn) == "reduce_scatter")
            else None,
            gathered={v: g for v, g in zip(jaxpr.invars, gathered, strict=True) if g},
            makers={},
            at=at,
            loop=loop,
            called_at=called_at,
        )
        handlers = {}
        for place, eqn in enumerate(jaxpr.eqns):
            handler = self._equation(eqn, (*at, place), frame)
            if handler is not None:
                handlers[place] = handler
        return handlers, frame

    # ---- equations

    def _equation(self, eqn: JaxprEqn, at: Site, frame: _GatherFrame) -> Handler | None:
        name = _compat.name_of(eqn)
        if name == "all_gather":
            return self._gather(eqn, at, frame)
        if record_of(eqn).call == "inline":
            return self._inlined(eqn, at, frame)
        inner = bodies(eqn)
        if frame.has_gathered(eqn) and (not inner or record_of(eqn).kind == "plain"):
            return self._by_rule(eqn, frame)
        if inner:
            self._refuse(eqn, frame, why_outside(eqn))
            return self._with_bodies(eqn, at, frame)
        if name != "reduce_scatter" or (self._exact and _may_round(eqn)):
            return None
        if frame.constant is None or not frame.constant.has_equal_parts(eqn):
            return None
        self.scatters.append(eqn)
        return emit_sum

    def _gather(self, eqn: JaxprEqn, at: Site, frame: _GatherFrame) -> Handler | None:
        """Deferred: the block is all that is needed of it."""
        (operand,), gather = eqn.invars, Gather(eqn)
        tiled, dimension = eqn.params["tiled"], int(eqn.params["all_gather_dimension"])
        site = at
        if not isinstance(operand, core.Literal):
            # Of equal gathers the first: so that none is kept while another is reduced.
            key = (self._origin(operand, frame), frame.loop, gather.spread, tiled, dimension)
            site = self._equal.setdefault(key, at)
        self.gathers.setdefault(site, gather)
        if (why := gather.why_never()) is not None:
            self._pin([site], why, frame.line(eqn))
        if site in self.pins:
            return self._by_rule(eqn, frame) if frame.has_gathered(eqn) else None
        try:
            state = gather.deferred(frame.state(operand), site)
        except Refuse as refusal:
            self._refuse(eqn, frame, str(refusal))
            return None
        self.groups.meet(state.sites, ())
        self._set(eqn, [state], frame)
        return lambda eqn, values: [_block(values[0], None if tiled else dimension)]

    def _by_rule(self, eqn: JaxprEqn, frame: _GatherFrame) -> Handler | None:
        states = [frame.state(atom) for atom in eqn.invars]
        if self._exact and _may_round(eqn):
            self._refuse(eqn, frame, "gathers='exact', and other sums may differ in the last bits")
            return None
        try:
            step = step_of(eqn, states)
        except Refuse as refusal:
            self._refuse(eqn, frame, str(refusal))
            return None
        self.groups.meet(sites_of(states), step.collectives)
        results = []
        for state in step.results:
            if state is not None:
                # Without the gathers of dimensions that are gone: a later use does not pin them.
                axes, gathers = set(state.names), self.gathers
                kept = [s for s in state.sites if not axes.isdisjoint(gathers[s].spread.names)]
                state = dataclasses.replace(state, sites=tuple(kept))
            results.append(state)
        self._set(eqn, results, frame)
        return step.emit

    # ---- equations with bodies

    def _inlined(self, eqn: JaxprEqn, at: Site, frame: _GatherFrame) -> Handler | None:
        """A jit: gathered values go in and out of it."""
        (jaxpr,) = bodies(eqn)
        gathered = [frame.gathered.get(v) if isinstance(v, Var) else None for v in eqn.invars]
        if not any(gathered) and not contains(jaxpr, _is_of_interest):
            return None
        inputs = open_jaxpr(jaxpr).invars
        for inside, outside in zip(inputs, eqn.invars, strict=True):
            self._origins.pop(inside, None)  # of another call of the same body
            if not isinstance(outside, core.Literal):
                self._origins[inside] = self._origin(outside, frame)
        handlers, inside = self._body(
            jaxpr,
            frame.scope,
            frame.same(eqn),
            gathered,
            [frame.constant.along(v) if frame.constant else frozenset() for v in eqn.invars],
            at=at,
            loop=frame.loop,
            called_at=frame.line(eqn) if is_of_jax(jaxpr) else "",
        )
        results = [inside.state(atom) for atom in open_jaxpr(jaxpr).outvars]
        self._set(eqn, [r if isinstance(r, Gathered) else None for r in results], frame)
        if any(gathered) or any(isinstance(result, Gathered) for result in results):
            return lambda eqn, values: run(jaxpr, values, handlers)
        return _inside(eqn, [handlers]) if handlers else None

    def _with_bodies(self, eqn: JaxprEqn, at: Site, frame: _GatherFrame) -> Handler | None:
        inner = bodies(eqn)
        if not any(contains(body, _is_of_interest) for body in inner):
            return None
        same = frame.same(eqn)
        if _compat.name_of(eqn) == "shard_map":
            found = [self.shard_map(eqn, same, frame.scope, at)]
        else:
            inputs = self._invariance.of_body_inputs(eqn, same, frame.scope)
            found = [
                self._apart(eqn, jaxpr, ins, frame.scope, (*at, place))
                for place, (jaxpr, ins) in enumerate(zip(inner, inputs, strict=True))
            ]
        return _inside(eqn, found) if any(found) else None

    # ---- what a walk writes down

    def _set(self, eqn: JaxprEqn, results: Sequence[Gathered | None], frame: _GatherFrame) -> None:
        for var, state in zip(eqn.outvars, results, strict=True):
            if state is not None:
                frame.gathered[var] = state
                frame.makers[var] = eqn

    def _refuse(self, eqn: JaxprEqn, frame: _GatherFrame, why: str) -> None:
        sites = sites_of([frame.state(atom) for atom in eqn.invars])
        self._pin(sites, why, frame.line(eqn))
        for atom in eqn.invars:  # whole from here on
            if not isinstance(atom, core.Literal):
                frame.gathered.pop(atom, None)

    def _pin(self, sites: Sequence[Site], why: str, where: str) -> None:
        for site in sites:
            self.pins.setdefault(site, _Pin(why, where))

    def _origin(self, var: Var, frame: _GatherFrame) -> _Origin:
        """Where a value was made, told apart from that of other calls of the same body."""
        return self._origins.get(var, (frame.at, var))


def _block(value: Any, new_dimension: int | None) -> Any:
    """What stands for a gathered value: the block of this device.

    XLA computes in float32 between operations of a smaller type, where it fuses them. A gather
    ends that: what is sent has been rounded. So has what stands for it.
    """
    if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < _SINGLE:
        value = lax.optimization_barrier(value)
    return value if new_dimension is None else lax.expand_dims(value, [new_dimension])


_SINGLE = 4  # bytes


def _may_round(eqn: JaxprEqn) -> bool:
    """Whether the last bits of a result may depend on the order or grouping of operations."""
    if record_of(eqn).exact:
        return False
    return any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in eqn.outvars)


def _is_of_interest(eqn: JaxprEqn) -> bool:
    return _compat.name_of(eqn) in GATHERS
