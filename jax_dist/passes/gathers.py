"""Gathers whose result is only reduced become one reduction over devices.

Inside every shard_map, at any depth, an all_gather is left out if all that is made of it can be
made of the blocks that the devices hold. First all is decided, in Python; then the program is
emitted once.
"""

import dataclasses
from typing import Any, Literal, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jax_dist import _codes
from jax_dist.passes.findings import PassFinding, PassPlan
from jax_dist.passes.gather_sites import (
    Gather,
    Group,
    why_not_worth,
)
from jax_dist.passes.gather_states import Site, spelled
from jax_dist.passes.gather_walk import (
    GatherWalk,
    Handlers,
    Pin,
    is_of_interest,
    shard_map_handler,
    traced_again,
)
from jax_dist.passes.interpreter import (
    bodies,
    equations,
    open_jaxpr,
    run,
    source_line,
)
from jax_dist.passes.uniformity import (
    NOWHERE,
    OUTSIDE,
    Invariance,
    axes_of,
)

CODE = _codes.ALL_GATHER_THEN_REDUCE
Gathers: TypeAlias = Literal["reduce", "exact", "keep"]


def plan_gathers(jaxpr: ClosedJaxpr, *, exact: bool = False) -> PassPlan:
    """Says which gathers of a program give way to reductions, and evaluates it without them.

    Args:
      jaxpr: of the whole program, as `jax.make_jaxpr` gives it.
      exact: only where no bit of a result can change.

    Returns:
      What to evaluate instead on the same inputs, or None if nothing is to change; and what was
      rewritten or refused.
    """
    if not any(is_of_interest(eqn) for eqn in equations(jaxpr)):
        return PassPlan(None)
    findings: list[PassFinding] = []
    handlers = _outside(jaxpr, findings, exact=exact)
    once = tuple(dict.fromkeys(findings))
    if not handlers:
        return PassPlan(None, once)
    return PassPlan(lambda *inputs: run(jaxpr, inputs, handlers), once)


def _outside(jaxpr: Any, findings: list[PassFinding], *, exact: bool) -> Handlers:
    """Outside of any shard_map, where bodies stay bodies."""
    handlers: Handlers = {}
    for place, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        if eqn.primitive.name == "shard_map":
            decision = _decide(eqn, exact=exact)
            findings += decision.findings
            if decision.handlers:
                handlers[place] = shard_map_handler(decision.handlers)
        else:
            inside = [_outside(body, findings, exact=exact) for body in bodies(eqn)]
            if any(inside):
                handlers[place] = traced_again(inside)
    return handlers


@dataclasses.dataclass(frozen=True, slots=True)
class _Decision:
    handlers: Handlers
    findings: tuple[PassFinding, ...]


def _decide(eqn: JaxprEqn, *, exact: bool) -> _Decision:
    """Walks until nothing more is pinned: then each gather is either gone or as it was."""
    invariance = Invariance()
    pins: dict[Site, Pin] = {}
    while True:
        walk = GatherWalk(pins, invariance, exact=exact)
        handlers = walk.shard_map(eqn, [NOWHERE] * len(eqn.invars), OUTSIDE, ())
        if len(walk.pins) == len(pins):
            walk.pins.update(_not_worth(walk))
        if len(walk.pins) == len(pins):
            return _Decision(handlers, _findings(walk))
        pins = walk.pins


def _not_worth(walk: GatherWalk) -> dict[Site, Pin]:
    pins: dict[Site, Pin] = {}
    for group in walk.groups.all():
        gathers = [walk.gathers[site] for site in group.sites]
        if not group.made:  # the results are not used
            pins |= dict.fromkeys(group.sites, Pin("", ""))
            continue
        why = why_not_worth(gathers, group.made)
        for site, gather in zip(group.sites, gathers, strict=True):
            if why:
                pins[site] = Pin(why, source_line(gather.eqn))
    return pins


def _findings(walk: GatherWalk) -> tuple[PassFinding, ...]:
    found: dict[Site, PassFinding] = {}
    for site, pin in walk.pins.items():
        if pin.why and site in walk.gathers:
            found[site] = _refused(walk.gathers[site], pin)
    for group in walk.groups.all():
        for site in group.sites:
            found[site] = _rewritten(walk.gathers[site], group)
    gathers = [found[site] for site in sorted(found)]
    return (*gathers, *map(_summed, walk.scatters))


def _refused(gather: Gather, pin: Pin) -> PassFinding:
    line = source_line(gather.eqn)
    where = f" ({line})" if line else ""
    return PassFinding(CODE, "refused", f"{_named(gather.eqn)}{where} is kept", pin.why, pin.where)


def _rewritten(gather: Gather, group: Group) -> PassFinding:
    read = " and ".join(dict.fromkeys(made.primitive for made in group.made))
    names = [made.collective.name for made in group.made]
    became = " and ".join(_counted(names.count(name), name) for name in dict.fromkeys(names))
    what = f"{_named(gather.eqn)}, {read}: {became}"
    return PassFinding(CODE, "rewritten", what, "", source_line(gather.eqn))


def _summed(eqn: JaxprEqn) -> PassFinding:
    what = f"{_named(eqn)} of equal parts: one psum"
    return PassFinding(CODE, "rewritten", what, "", source_line(eqn))


def _named(eqn: JaxprEqn) -> str:
    return f"{eqn.primitive.name} over {spelled(axes_of(eqn))}"


def _counted(count: int, name: str) -> str:
    return f"one {name}" if count == 1 else f"{count} {name}s"
