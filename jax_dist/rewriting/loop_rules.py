"""scan, while and cond on values of which one device has a part: the same, of smaller bodies."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jax_dist import _compat
from jax_dist.passes import interpreter, rebind
from jax_dist.passes.interpreter import Values
from jax_dist.rewriting.loop_states import (
    WHOLE,
    Refused,
    Region,
    State,
    States,
    Step,
    Walk,
    inputs_of,
    loop,
    one,
)


def _settled(
    walk: Walk,
    body: Any,
    states: list[State],
    carries_in: Sequence[int],
    carries_out: Sequence[int],
) -> tuple[list[State], States]:
    """The states of a body's inputs and results, once what is carried is cut as it comes out."""
    while True:
        results = walk.states(body, states)
        changed = False
        for place, result in zip(carries_in, carries_out, strict=True):
            if states[place] is None and results[result] is not None:
                states[place] = results[result]
                changed = True
            elif results[result] not in (WHOLE, states[place]):
                raise Refused("what is carried is cut in another way after each step")
        if not changed:
            return states, results


@loop("scan")
def _scan(walk: Walk, eqn: JaxprEqn, states: States) -> Step:
    (body,) = interpreter.bodies(eqn)
    layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
    fixed = {*layout.constants, *layout.carries_in}
    if any(state == 0 for place, state in enumerate(states) if place not in fixed):
        raise Refused("the scan runs along the dimension that is cut over the devices")
    inner = Walk(walk.region)
    start = [_in_a_step(state, is_fixed=place in fixed) for place, state in enumerate(states)]
    inside, results = _settled(inner, body, start, layout.carries_in, layout.carries_out)
    carried = dict(zip(layout.carries_out, [inside[p] for p in layout.carries_in], strict=True))
    leaving = tuple(carried.get(place, result) for place, result in enumerate(results))
    outside = tuple(_outside(state, is_fixed=place in fixed) for place, state in enumerate(inside))
    for place, (var, atom) in enumerate(zip(inputs_of(body), eqn.invars, strict=True)):
        walk.want(atom, _outside(inner.wanted.get(var, WHOLE), is_fixed=place in fixed))

    def emit(values: Values) -> Values:
        new = _local_body(walk.region, inner, body, inside, leaving)
        return interpreter.replay(rebind.without_mesh(eqn, {"jaxpr": new}), values)

    made = tuple(_outside(state, is_fixed=place in carried) for place, state in enumerate(leaving))
    return Step(made, emit, outside)


def _in_a_step(state: State, *, is_fixed: bool) -> State:
    """What is stacked has one dimension more in front, that of the steps; in a step it is gone."""
    return state if is_fixed or state is None else state - 1


def _outside(state: State, *, is_fixed: bool) -> State:
    return state if is_fixed or state is None else state + 1


@loop("while")
def _while(walk: Walk, eqn: JaxprEqn, states: States) -> Step:
    params = eqn.params
    conds, consts = params["cond_nconsts"], params["body_nconsts"]
    carries = range(consts, len(states) - conds)
    inner = Walk(walk.region)
    start = list(states[conds:])
    inside, _ = _settled(inner, params["body_jaxpr"], start, carries, range(len(carries)))
    carried = tuple(inside[consts:])
    of_cond = (*states[:conds], *carried)
    if inner.states(params["cond_jaxpr"], of_cond) != (WHOLE,):
        raise Refused("whether the loop goes on depends on a value that is cut over the devices")

    def emit(values: Values) -> Values:
        bodies = {
            "body_jaxpr": _local_body(walk.region, inner, params["body_jaxpr"], inside, carried),
            "cond_jaxpr": _local_body(walk.region, inner, params["cond_jaxpr"], of_cond, (WHOLE,)),
        }
        return interpreter.replay(rebind.without_mesh(eqn, bodies), values)

    walk.want_as(inner, params["body_jaxpr"], eqn.invars[conds:])
    return Step(carried, emit, (*states[:conds], *inside))


@loop("cond")
def _cond(walk: Walk, eqn: JaxprEqn, states: States) -> Step:
    if states[0] is not None:
        raise Refused("a branch is chosen by a value that is cut over the devices")
    inner = Walk(walk.region)
    branches = eqn.params["branches"]
    results = [inner.states(branch, states[1:]) for branch in branches]
    leaving = tuple(_joined(each) for each in zip(*results, strict=True))

    def emit(values: Values) -> Values:
        new = tuple(
            _local_body(walk.region, inner, branch, states[1:], leaving) for branch in branches
        )
        return interpreter.replay(rebind.without_mesh(eqn, {"branches": new}), values)

    for branch in branches:
        walk.want_as(inner, branch, eqn.invars[1:])
    return Step(leaving, emit, states)


def _joined(states: Sequence[State]) -> State:
    return WHOLE if all(state is None for state in states) else one(states)


def _local_body(
    region: Region, walk: Walk, body: Any, states: Sequence[State], leaving: Sequence[State]
) -> Any:
    """The body on what one device has of its inputs."""
    results = walk.states(body, states)

    def evaluate(*args: Any) -> Values:
        return walk.cut_all(walk.evaluate(body, args, states), results, leaving)

    types = [
        _local_type(region, var.aval, state)
        for var, state in zip(inputs_of(body), states, strict=True)
    ]
    return interpreter.in_form_of(body, jax.make_jaxpr(evaluate)(*types))


def _local_type(region: Region, aval: Any, state: State) -> jax.ShapeDtypeStruct:
    sizes = {} if state is None else {state: aval.shape[state] // region.size}
    return rebind.type_of(aval, sizes)
