"""Equations at any depth of a jaxpr, each named by the way to it, and put anew at that place."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn

from jax_dist.passes import interpreter
from jax_dist.passes.interpreter import Handler, Values

Path: TypeAlias = tuple[int, ...]  # number of an equation, of a body in it, of an equation, ...


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One equation, and what stands around it."""

    path: Path
    eqn: JaxprEqn
    around: tuple[JaxprEqn, ...] = ()  # outermost first


def places(jaxpr: Any, wanted: Callable[[JaxprEqn], bool]) -> Iterator[Place]:
    """The wanted equations in program order; the bodies of a wanted one are not searched."""
    for number, eqn in enumerate(interpreter.open_jaxpr(jaxpr).eqns):
        if wanted(eqn):
            yield Place((number,), eqn)
            continue
        for part, body in enumerate(interpreter.bodies(eqn)):
            for inner in places(body, wanted):
                yield Place((number, part, *inner.path), inner.eqn, (eqn, *inner.around))


def run(jaxpr: Any, args: Sequence[Any], handlers: Mapping[Path, Handler]) -> Values:
    """Evaluates a jaxpr as `interpreter.run` does, with equations handled at any depth.

    Args:
      jaxpr: with its constants, or without if it has none.
      args: one for each input variable.
      handlers: by the path of the equation; bodies without one stay as they are.
    """
    here: dict[int, Handler] = {}
    for number, deeper in _by_first(handlers).items():
        here[number] = deeper[()] if () in deeper else functools.partial(_with_bodies, deeper)
    return interpreter.run(jaxpr, args, here)


def _with_bodies(handlers: Mapping[Path, Handler], eqn: JaxprEqn, values: Values) -> Values:
    by_body = _by_first(handlers)
    import os
    if os.environ.get("INL") and eqn.primitive.name == "jit" and not any(isinstance(x, __import__("jax").sharding.Sharding) for x in (*eqn.params["in_shardings"],*eqn.params["out_shardings"])):
        return run(eqn.params["jaxpr"], values, by_body[0])
    if eqn.primitive.name == "shard_map":
        body = eqn.params["jaxpr"]
        return interpreter.call_shard_map(
            eqn, lambda *blocks: run(body, blocks, by_body[0]), values
        )
    numbers = itertools.count()

    def changed(body: Any) -> Any:
        inner = by_body.get(next(numbers))
        if inner is None:
            return body
        return interpreter.trace_again(body, lambda *args: run(body, args, inner))

    return interpreter.replay(interpreter.with_bodies(eqn, changed), values)


def _by_first(handlers: Mapping[Path, Handler]) -> dict[int, dict[Path, Handler]]:
    grouped: dict[int, dict[Path, Handler]] = {}
    for path, handler in handlers.items():
        grouped.setdefault(path[0], {})[path[1:]] = handler
    return grouped
