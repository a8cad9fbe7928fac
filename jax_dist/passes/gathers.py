"""Gathers whose result is only reduced become one reduction over devices.

Inside every shard_map, at any depth, an all_gather is left out if all that is made of it can be
made of the blocks that the devices hold. First all is decided, in Python; then the program is
emitted once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jax_dist import _codes
from jax_dist.passes import gather_moves, gather_reductions
from jax_dist.passes.gather_states import (
    RULES,
    Gather,
    Gathered,
    Group,
    Groups,
    Made,
    Refuse,
    Site,
    State,
    Whole,
    aval_of,
    counted,
    deferred,
    is_of_jax,
    no_rule,
    plain_name,
    sites_of,
    spelled,
    spread_of,
    why_never,
    why_not_worth,
    why_outside,
)
from jax_dist.passes.interpreter import (
    EXACT,
    GATHERS,
    INLINED,
    Atom,
    Handler,
    Values,
    bodies,
    call_shard_map,
    contains,
    open_jaxpr,
    replay,
    run,
    source_line,
    trace_again,
    with_bodies,
)
from jax_dist.passes.pipeline import PassFinding, PassPlan
from jax_dist.passes.uniformity import (
    NOWHERE,
    OUTSIDE,
    AxisScope,
    Facts,
    Invariance,
    Same,
    axes_of,
    same_of,
)

_CODE = _codes.ALL_GATHER_THEN_REDUCE
Gathers: TypeAlias = Literal["reduce", "exact", "keep"]

_RULE_MODULES = (gather_moves, gather_reductions)  # they fill RULES

_Handlers: TypeAlias = dict[int, Handler]
_Origin: TypeAlias = tuple[Site, Var]  # a body may be called twice: its variables are told by place


@dataclasses.dataclass(frozen=True, slots=True)
class _Pin:
    """Why a gather stays, and the line that makes it stay."""

    why: str  # "": nothing that a user would want to hear of
    where: str


def plan_gathers(jaxpr: ClosedJaxpr, *, exact: bool = False) -> PassPlan:
    """Says which gathers of a program give way to reductions, and evaluates it without them.

    Args:
      jaxpr: of the whole program, as `jax.make_jaxpr` gives it.
      exact: only where no bit of a result can change.

    Returns:
      What to evaluate instead on the same inputs, or None if nothing is to change; and what was
      rewritten or refused.
    """
    if not contains(jaxpr, _is_of_interest):
        return PassPlan(None)
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
        if eqn.primitive.name == "shard_map":
            inside, found = _decide(eqn, exact=exact)
            findings += found
            if inside:
                handlers[place] = _shard_map_handler(inside)
        else:
            each = [_outside(body, findings, exact=exact) for body in bodies(eqn)]
            if any(each):
                handlers[place] = _traced_again(each)
    return handlers


def _decide(eqn: JaxprEqn, *, exact: bool) -> tuple[_Handlers, tuple[PassFinding, ...]]:
    """Walks until nothing more is pinned: then each gather is either gone or as it was."""
    invariance = Invariance()
    pins: dict[Site, _Pin] = {}
    while True:
        walk = _GatherWalk(pins, invariance, exact=exact)
        handlers = walk.shard_map(eqn, [NOWHERE] * len(eqn.invars), OUTSIDE, ())
        if len(walk.pins) == len(pins):
            walk.pins.update(_not_worth(walk))
        if len(walk.pins) == len(pins):
            return handlers, _findings(walk)
        pins = walk.pins


def _not_worth(walk: "_GatherWalk") -> dict[Site, _Pin]:
    pins: dict[Site, _Pin] = {}
    for group in walk.groups.all():
        gathers = [walk.gathers[site] for site in group.sites]
        if not group.made:  # the results are not used
            pins |= dict.fromkeys(group.sites, _Pin("", ""))
            continue
        why = why_not_worth(gathers, group.made)
        if why:
            for site, gather in zip(group.sites, gathers, strict=True):
                pins[site] = _Pin(why, source_line(gather.eqn))
    return pins


def _findings(walk: "_GatherWalk") -> tuple[PassFinding, ...]:
    found: dict[Site, PassFinding] = {}
    for site, pin in walk.pins.items():
        if pin.why and site in walk.gathers:
            found[site] = _refused(walk.gathers[site], pin)
    for group in walk.groups.all():
        for site in group.sites:
            found[site] = _rewritten(walk.gathers[site], group)
    gathers = [found[site] for site in sorted(found)]
    return (*gathers, *map(_summed, walk.scatters))


def _refused(gather: Gather, pin: _Pin) -> PassFinding:
    line = source_line(gather.eqn)
    where = f" ({line})" if line else ""
    return PassFinding(_CODE, "refused", f"{_named(gather.eqn)}{where} is kept", pin.why, pin.where)


def _rewritten(gather: Gather, group: Group) -> PassFinding:
    read = " and ".join(dict.fromkeys(made.primitive for made in group.made))
    names = [made.collective.name for made in group.made]
    became = " and ".join(counted(names.count(name), name) for name in dict.fromkeys(names))
    what = f"{_named(gather.eqn)}, {read}: {became}"
    return PassFinding(_CODE, "rewritten", what, "", source_line(gather.eqn))


def _summed(eqn: JaxprEqn) -> PassFinding:
    what = f"{_named(eqn)} of equal parts: one psum"
    return PassFinding(_CODE, "rewritten", what, "", source_line(eqn))


def _named(eqn: JaxprEqn) -> str:
    return f"{eqn.primitive.name} over {spelled(axes_of(eqn))}"


# --- walks over the body of a shard_map and says what every equation becomes; nothing is traced
#
# The states of gathered values go through the equations by the rules. An equation that needs a
# whole value pins the gathers behind it: they stay, and in the next walk their results are whole.


@dataclasses.dataclass(frozen=True, slots=True)
class _GatherBody:
    """A body, and what is known of its inputs."""

    jaxpr: Any  # open or closed
    scope: AxisScope
    same: Sequence[Same]
    gathered: Sequence[Gathered | None]
    constant: Sequence[gather_reductions.Dimensions]
    called_at: str  # a line; "" if the body's own lines are better


@dataclasses.dataclass(frozen=True, slots=True)
class _GatherFrame:
    """What a walk knows of the variables of one body."""

    scope: AxisScope
    facts: Facts
    constant: gather_reductions.Constancy
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
        return Whole(same_of(atom, self.facts, self.scope))

    def has_gathered(self, eqn: JaxprEqn) -> bool:
        gathered = self.gathered
        return any(not isinstance(atom, core.Literal) and atom in gathered for atom in eqn.invars)


class _GatherWalk:
    """One walk. `pins` grows; the walk counts only if it did not."""

    def __init__(
        self, pins: Mapping[Site, _Pin], invariance: Invariance, *, exact: bool = False
    ) -> None:
        self.pins: dict[Site, _Pin] = dict(pins)
        self._exact = exact
        self.gathers: dict[Site, Gather] = {}
        self.groups: Groups = Groups()
        self.scatters: list[JaxprEqn] = []
        self._invariance = invariance
        self._equal: dict[Any, Site] = {}  # the first of equal gathers
        self._origins: dict[Var, _Origin] = {}  # of the inputs of bodies that are inlined

    def shard_map(
        self, eqn: JaxprEqn, same: Sequence[Same], scope: AxisScope, at: Site
    ) -> _Handlers:
        """What becomes of the equations in the body of a shard_map, by their place."""
        (inputs,) = self._invariance.of_body_inputs(eqn, same, scope)
        return self._apart(eqn, eqn.params["jaxpr"], inputs, scope.inside(eqn), at)

    # ---- bodies

    def _apart(
        self, eqn: JaxprEqn, jaxpr: Any, same: Sequence[Same], scope: AxisScope, at: Site
    ) -> _Handlers:
        """A body that stays a body: nothing gathered enters or leaves it."""
        count = len(same)
        body = _GatherBody(jaxpr, scope, same, [None] * count, [frozenset()] * count, called_at="")
        handlers, frame = self._body(body, at, at)
        for atom in open_jaxpr(jaxpr).outvars:
            state = frame.state(atom)
            if isinstance(state, Gathered) and isinstance(atom, Var):
                why = f"the gathered value leaves the {plain_name(eqn)} whole"
                self._pin(state.sites, why, frame.line(frame.makers[atom]))
        return handlers

    def _body(self, body: _GatherBody, at: Site, loop: Site) -> tuple[_Handlers, _GatherFrame]:
        jaxpr = open_jaxpr(body.jaxpr)
        frame = _GatherFrame(
            scope=body.scope,
            facts=self._invariance.facts(body.jaxpr, body.same, body.scope),
            constant=gather_reductions.constancy(jaxpr, body.constant)
            if contains(jaxpr, lambda eqn: eqn.primitive.name == "reduce_scatter")
            else {},
            gathered={v: g for v, g in zip(jaxpr.invars, body.gathered, strict=True) if g},
            makers={},
            at=at,
            loop=loop,
            called_at=body.called_at,
        )
        handlers = {}
        for place, eqn in enumerate(jaxpr.eqns):
            handler = self._equation(eqn, (*at, place), frame)
            if handler is not None:
                handlers[place] = handler
        return handlers, frame

    # ---- equations

    def _equation(self, eqn: JaxprEqn, at: Site, frame: _GatherFrame) -> Handler | None:
        name = eqn.primitive.name
        if name == "all_gather":
            return self._gather(eqn, at, frame)
        if name in INLINED:
            return self._inlined(eqn, at, frame)
        inner = bodies(eqn)
        if not inner:
            return (
                self._by_rule(eqn, frame) if frame.has_gathered(eqn) else self._scatter(eqn, frame)
            )
        if frame.has_gathered(eqn):
            self._refuse(eqn, frame, why_outside(eqn))
        return self._with_bodies(eqn, inner, at, frame)

    def _gather(self, eqn: JaxprEqn, at: Site, frame: _GatherFrame) -> Handler | None:
        """Deferred: the block is all that is needed of it."""
        site = self._site(eqn, at, frame)
        spread = spread_of(eqn)
        if site not in self.pins:
            why = why_never(eqn, spread)
            if why is not None:
                self._pin([site], why, frame.line(eqn))
        if site in self.pins:
            return self._by_rule(eqn, frame) if frame.has_gathered(eqn) else None
        try:
            state = deferred(eqn, frame.state(eqn.invars[0]), spread, site)
        except Refuse as refusal:
            self._refuse(eqn, frame, str(refusal))
            return None
        self.groups.meet(state.sites, ())
        self._set(eqn, [state], frame)
        dimension = None if eqn.params["tiled"] else int(eqn.params["all_gather_dimension"])
        return lambda eqn, values: [_block(values[0], dimension)]

    def _site(self, eqn: JaxprEqn, at: Site, frame: _GatherFrame) -> Site:
        """Of equal gathers the first: so that none is kept while another is reduced."""
        (operand,) = eqn.invars
        tiled, dimension = eqn.params["tiled"], int(eqn.params["all_gather_dimension"])
        site = at
        if not isinstance(operand, core.Literal):
            origin = self._origin(operand, frame)
            key = (origin, frame.loop, spread_of(eqn), tiled, dimension)
            site = self._equal.setdefault(key, at)
        self.gathers.setdefault(site, Gather(eqn, spread_of(eqn)))
        return site

    def _by_rule(self, eqn: JaxprEqn, frame: _GatherFrame) -> Handler | None:
        states = [frame.state(atom) for atom in eqn.invars]
        law = RULES.get(eqn.primitive.name, no_rule)
        if self._exact and _may_round(eqn):
            self._refuse(eqn, frame, "gathers='exact', and other sums may differ in the last bits")
            return None
        try:
            step = law(eqn, states)
        except Refuse as refusal:
            self._refuse(eqn, frame, str(refusal))
            return None
        made = [Made(eqn.primitive.name, each) for each in step.collectives]
        self.groups.meet(sites_of(states), made)
        self._set(eqn, [state and self._narrowed(state) for state in step.results], frame)
        return step.emit

    def _scatter(self, eqn: JaxprEqn, frame: _GatherFrame) -> Handler | None:
        if eqn.primitive.name != "reduce_scatter":
            return None
        if self._exact and _may_round(eqn):
            return None
        if not gather_reductions.scatters_equal_parts(eqn, frame.constant):
            return None
        self.scatters.append(eqn)
        return gather_reductions.emit_sum

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
        body = _GatherBody(
            jaxpr=jaxpr,
            scope=frame.scope,
            same=[same_of(atom, frame.facts, frame.scope) for atom in eqn.invars],
            gathered=gathered,
            constant=[
                gather_reductions.constant_along(atom, frame.constant) for atom in eqn.invars
            ],
            called_at=frame.line(eqn) if frame.called_at or is_of_jax(jaxpr) else "",
        )
        handlers, inside = self._body(body, at, frame.loop)
        results = [inside.state(atom) for atom in open_jaxpr(jaxpr).outvars]
        self._set(eqn, [r if isinstance(r, Gathered) else None for r in results], frame)
        if any(gathered) or any(isinstance(result, Gathered) for result in results):
            return lambda eqn, values: run(jaxpr, values, handlers)
        return _traced_again([handlers]) if handlers else None

    def _with_bodies(
        self, eqn: JaxprEqn, inner: Sequence[Any], at: Site, frame: _GatherFrame
    ) -> Handler | None:
        if not any(contains(body, _is_of_interest) for body in inner):
            return None
        same = [same_of(atom, frame.facts, frame.scope) for atom in eqn.invars]
        if eqn.primitive.name == "shard_map":
            handlers = self.shard_map(eqn, same, frame.scope, at)
            return _shard_map_handler(handlers) if handlers else None
        inputs = self._invariance.of_body_inputs(eqn, same, frame.scope)
        found = [
            self._apart(eqn, jaxpr, ins, frame.scope, (*at, place))
            for place, (jaxpr, ins) in enumerate(zip(inner, inputs, strict=True))
        ]
        return _traced_again(found) if any(found) else None

    # ---- what a walk writes down

    def _set(self, eqn: JaxprEqn, results: Sequence[Gathered | None], frame: _GatherFrame) -> None:
        for var, state in zip(eqn.outvars, results, strict=True):
            if state is not None:
                frame.gathered[var] = state
                frame.makers[var] = eqn

    def _narrowed(self, state: Gathered) -> Gathered:
        """Without the gathers of dimensions that are gone: a later use does not pin them."""
        axes = set(state.names)
        sites = tuple(s for s in state.sites if not axes.isdisjoint(self.gathers[s].spread.names))
        return dataclasses.replace(state, sites=sites)

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


def _shard_map_handler(handlers: _Handlers) -> Handler:
    def handle(eqn: JaxprEqn, values: Values) -> Values:
        jaxpr = eqn.params["jaxpr"]
        return call_shard_map(eqn, lambda *blocks: run(jaxpr, blocks, handlers), values)

    return handle


def _traced_again(handlers: Sequence[_Handlers]) -> Handler:
    """`handlers` of each body, in order; a body without any stays as it is."""

    def handle(eqn: JaxprEqn, values: Values) -> Values:
        each = iter(handlers)

        def changed(jaxpr: Any) -> Any:
            inside = next(each)
            if not inside:
                return jaxpr
            return trace_again(jaxpr, lambda *args: run(jaxpr, args, inside))

        return replay(with_bodies(eqn, changed), values)

    return handle


def _may_round(eqn: JaxprEqn) -> bool:
    """Whether the last bits of a result may depend on the order or grouping of operations."""
    if eqn.primitive.name in EXACT:
        return False
    return any(jnp.issubdtype(aval_of(var).dtype, jnp.inexact) for var in eqn.outvars)


def _is_of_interest(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in GATHERS
