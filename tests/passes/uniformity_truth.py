"""What the analysis says is the same on all devices, beside what is when the program runs.

Every value of a program is computed on each device, for two sets of numbers: equal by chance does
not count. Jits are written out, so that all values stand at the top.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gather_checks import mesh_of
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as P

from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import record_of
from jax_dist._passes.uniformity import NOWHERE, Invariance


@dataclasses.dataclass
class Count:
    """Of all values of a program, and along each axis."""

    equal: int = 0
    known: int = 0
    wrong: Counter[str] = dataclasses.field(default_factory=Counter)  # by primitive
    missed: Counter[str] = dataclasses.field(default_factory=Counter)


def measured(function: Callable[[Any], Any], x: np.ndarray, sizes: dict[str, int]) -> Count:
    """Return the count for a function of one device, whose arguments are the rows of `x`."""
    env, axes = list(sizes.items()), frozenset(sizes)
    closed = jax.make_jaxpr(function, axis_env=env)(x[0])
    closed = jax.make_jaxpr(lambda row: _inlined(closed, [row]), axis_env=env)(x[0])
    facts = Invariance().facts(closed, [NOWHERE], axes)
    run = _on_devices(closed, sizes)
    other = x * 0.9 + 0.1 * np.random.default_rng(99).normal(size=x.shape).astype(x.dtype)
    count = Count()
    for eqn, *rows in zip(closed.jaxpr.eqns, run(x), run(other), strict=True):
        for number, var in enumerate(eqn.outvars):
            equal = axes.intersection(*[_same_along(row[number], tuple(sizes)) for row in rows])
            count.equal += len(equal)
            count.known += len(equal & facts[var])
            count.wrong[eqn.primitive.name] += len(facts[var] - equal)
            count.missed[eqn.primitive.name] += len(equal - facts[var])
    count.wrong, count.missed = +count.wrong, +count.missed
    return count


def _inlined(body: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with the bodies of jits in their place."""
    inline = lambda eqn, values: _inlined(interpreter.bodies(eqn)[0], values)
    handler_of = lambda eqn: inline if record_of(eqn).call == "inline" else None
    return interpreter.run(body, args, handler_of)


def _on_devices(closed: ClosedJaxpr, sizes: dict[str, int]) -> Callable[..., Any]:
    """Return a function of the results of each equation, with dimensions for the axes in front."""
    names = tuple(sizes)

    def on_device(rows: Any) -> list[list[Any]]:
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, rows, strict=True))
        results = []
        for eqn in closed.jaxpr.eqns:
            values = interpreter.replay(eqn, interpreter.read_all(eqn.invars, env))
            env.update(zip(eqn.outvars, values, strict=True))
            results.append([_numbers(value, len(names)) for value in values])
        return results

    specs = {"in_specs": P(names), "out_specs": P(*names), "check_vma": False}
    return jax.jit(jax.shard_map(on_device, mesh=mesh_of(**sizes), **specs))


def _numbers(value: Any, dimensions: int) -> jax.Array:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return value.reshape((1,) * dimensions + value.shape)


def _same_along(value: Any, names: Sequence[str]) -> set[str]:
    value = np.asarray(value)
    firsts = [np.broadcast_to(np.take(value, [0], n), value.shape) for n in range(len(names))]
    bits = [np.ascontiguousarray(first).tobytes() == value.tobytes() for first in firsts]
    return {name for name, is_same in zip(names, bits, strict=True) if is_same}
