"""Equations at any depth of a jaxpr, each named by the path to it, and replaced there."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn

from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import Handler, Values

Path: TypeAlias = tuple[int, ...]  # number of an equation, of a body in it, of an equation, ...


@dataclasses.dataclass(frozen=True, slots=True)
class EquationPlace:
    """One equation, and what stands around it."""

    path: Path
    eqn: JaxprEqn
    within: Jaxpr  # which has it among its equations
    around: tuple[JaxprEqn, ...] = ()  # outermost first


def places(jaxpr: Any, wanted: Callable[[JaxprEqn], bool]) -> Iterator[EquationPlace]:
    """The wanted equations in program order; the bodies of a wanted one are not searched."""
    within = interpreter.open_jaxpr(jaxpr)
    for number, eqn in enumerate(within.eqns):
        if wanted(eqn):
            yield EquationPlace((number,), eqn, within)
            continue
        for part, body in enumerate(interpreter.bodies(eqn)):
            for inner in places(body, wanted):
                path, around = (number, part, *inner.path), (eqn, *inner.around)
                yield dataclasses.replace(inner, path=path, around=around)


def handlers(jaxpr: Any, handler_of: Callable[[JaxprEqn], Handler | None]) -> dict[Path, Handler]:
    """For `run`: the handler of each equation that has one, at whatever depth it stands."""
    found = places(jaxpr, lambda eqn: handler_of(eqn) is not None)
    given = ((place.path, handler_of(place.eqn)) for place in found)
    return {path: handler for path, handler in given if handler is not None}


def run(jaxpr: Any, args: Sequence[Any], handlers: Mapping[Path, Handler]) -> Values:
    """Evaluates a jaxpr as `interpreter.run` does, with equations handled at any depth.

    Args:
      jaxpr: with its constants, or without if it has none.
      args: one for each input variable.
      handlers: by the path of the equation; bodies without one stay as they are.
    """
    here: dict[int, Handler] = {}
    for number, deeper in _by_first(handlers).items():
        here[number] = deeper[()] if () in deeper else functools.partial(_run_within, deeper)
    return interpreter.run(jaxpr, args, here)


def run_bodies(
    bodies: Mapping[int, Callable[..., Values]], eqn: JaxprEqn, values: Values
) -> Values:
    """Binds an equation with some of its bodies traced again.

    Args:
      bodies: by number, what to evaluate on the inputs of the body; the others stay.
      eqn: one with bodies.
      values: its operands.
    """
    if eqn.primitive.name == "shard_map":
        return interpreter.call_shard_map(eqn, bodies[0], values)
    numbers = itertools.count()

    def changed(body: Any) -> Any:
        evaluate = bodies.get(next(numbers))
        return body if evaluate is None else interpreter.trace_again(body, evaluate)

    return interpreter.replay(interpreter.with_bodies(eqn, changed), values)


def _run_within(handlers: Mapping[Path, Handler], eqn: JaxprEqn, values: Values) -> Values:
    bodies = interpreter.bodies(eqn)
    evaluates = {
        part: lambda *args, body=bodies[part], inner=inner: run(body, args, inner)
        for part, inner in _by_first(handlers).items()
    }
    return run_bodies(evaluates, eqn, values)


def _by_first(handlers: Mapping[Path, Handler]) -> dict[int, dict[Path, Handler]]:
    grouped: dict[int, dict[Path, Handler]] = {}
    for path, handler in handlers.items():
        grouped.setdefault(path[0], {})[path[1:]] = handler
    return grouped
