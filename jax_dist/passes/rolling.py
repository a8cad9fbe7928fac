"""Loops of Python, which a trace writes out copy by copy, made one scan again.

XLA compiles each copy; of a scan it compiles one. All is decided in Python before anything is
emitted. Bodies are searched too, those of the copies last.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jax_dist.passes import places
from jax_dist.passes.findings import Finding, Plan
from jax_dist.passes.interpreter import (
    Handler,
    Values,
    bodies,
    constants,
    last_reads,
    open_jaxpr,
    run,
)
from jax_dist.passes.primitives import CALLS
from jax_dist.passes.rolling_choice import CODE, LEAST_COPIES, LEAST_EQUATIONS, choose
from jax_dist.passes.rolling_copies import Roll
from jax_dist.passes.rolling_emission import block_jaxpr, call_for, emitter
from jax_dist.passes.rolling_keys import Keys

SEARCHED = frozenset({*CALLS, "cond", "scan", "shard_map", "while"})


def plan_rolling(jaxpr: ClosedJaxpr) -> Plan:
    """Says which unrolled loops of a program become scans, and evaluates it with them.

    Args:
      jaxpr: of the whole program, as `jax.make_jaxpr` gives it.

    Returns:
      What to evaluate instead on the same inputs, or None if nothing is to change; and what was
      rolled or refused.
    """
    search = _Search()
    body = search.body(jaxpr.jaxpr)
    findings = tuple(dict.fromkeys(search.findings)) or (_NOTHING,)
    if body is None:
        return Plan(None, findings)
    return Plan(lambda *inputs: body.evaluate(jaxpr.consts, inputs), findings)


_NOTHING = Finding(
    CODE,
    "noted",
    "no unrolled loop is found",
    f"one has at least {LEAST_COPIES} equal copies, each with a loop or a branch in it, or with "
    f"{LEAST_EQUATIONS} equations",
    "",
)


def note_loops(jaxpr: ClosedJaxpr) -> tuple[Finding, ...]:
    """Says of a program which unrolled loops could be scans."""
    search = _Search()
    search.body(jaxpr.jaxpr)
    found = dict.fromkeys(each for each in search.findings if each.outcome == "rewritten")
    return tuple(
        dataclasses.replace(each, outcome="noted", what=f"{each.what}, with loops='roll'")
        for each in found
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """A body with scans in the place of copies."""

    jaxpr: Jaxpr  # with a call in the place of all copies
    handlers: dict[int, Handler]

    def evaluate(self, consts: Sequence[Any], args: Sequence[Any]) -> Values:
        return run(self.jaxpr, args, self.handlers, consts=consts)


class _Search:
    """One search through a program."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._keys = Keys()
        self._bodies: dict[int, _Body | None] = {}
        self._alive: list[Jaxpr] = []  # what keys and bodies are known by

    def body(self, jaxpr: Jaxpr) -> _Body | None:
        """None: there is nothing to roll in it."""
        if id(jaxpr) not in self._bodies:
            self._alive.append(jaxpr)
            self._bodies[id(jaxpr)] = self._searched(jaxpr)
        return self._bodies[id(jaxpr)]

    def _searched(self, jaxpr: Jaxpr) -> _Body | None:
        choice = choose(jaxpr.eqns, last_reads(jaxpr), self._keys)
        self.findings += choice.findings
        rolls = {roll.start: roll for roll in choice.rolls}
        eqns: list[JaxprEqn] = []
        handlers: dict[int, Handler] = {}
        place = 0
        while place < len(jaxpr.eqns):
            eqn = jaxpr.eqns[place]
            roll = rolls.get(place)
            if roll is None:
                handler, place = self._inside(eqn), place + 1
            else:
                eqn = call_for(roll, jaxpr.eqns[roll.start : roll.stop])
                handler, place = self._emitter(roll), roll.stop
            if handler is not None:
                handlers[len(eqns)] = handler
            eqns.append(eqn)
        return _Body(jaxpr.replace(eqns=eqns), handlers) if handlers else None

    def _inside(self, eqn: JaxprEqn) -> Handler | None:
        """With the loops in its bodies rolled."""
        if eqn.primitive.name not in SEARCHED:
            return None
        evaluates = {}
        for number, closed in enumerate(bodies(eqn)):
            body = self.body(open_jaxpr(closed))
            if body is not None:
                evaluates[number] = lambda *args, body=body, closed=closed: body.evaluate(
                    constants(closed), args
                )
        if not evaluates:
            return None
        return lambda eqn, values: places.run_bodies(evaluates, eqn, values)

    def _emitter(self, roll: Roll) -> Handler:
        block = block_jaxpr(roll)
        body = self.body(block)
        if body is None:
            return emitter(roll, lambda *args: run(block, args, {}))
        return emitter(roll, lambda *args: body.evaluate((), args))
