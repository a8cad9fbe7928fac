"""What the analysis says is the same on all devices, beside what is when the program runs.

Every value of a program is computed on each device, for two sets of numbers: equal by chance does
not count. Jits are written out, so that all values stand at the top.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite import interpreter
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.uniformity import NOWHERE, Invariance


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function of one device."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]  # shared ones as they are; of the others, a first dimension of devices
    shared: tuple[bool, ...]  # by argument
    sizes: dict[str, int]  # of the axes


@dataclasses.dataclass
class Count:
    """Of all values of some programs, and along each axis."""

    equal: int = 0
    found: int = 0
    wrong: Counter[str] = dataclasses.field(default_factory=Counter)  # by primitive
    missed: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, other: "Count") -> None:
        self.equal += other.equal
        self.found += other.found
        self.wrong += other.wrong
        self.missed += other.missed


def measured(subject: Subject) -> Count:
    leaves = [leaf for arg in subject.args for leaf in jax.tree.leaves(arg)]
    pairs = zip(subject.args, subject.shared, strict=True)
    shared = [each for arg, each in pairs for _ in jax.tree.leaves(arg)]
    closed = _traced(subject, leaves, shared)
    axes = frozenset(subject.sizes)
    facts = Invariance().facts(closed, [axes if each else NOWHERE for each in shared], axes)
    run = _on_devices(closed, shared, subject.sizes)
    names = tuple(subject.sizes)
    runs = [
        [[_same_along(np.asarray(value), names) for value in row] for row in run(*each)]
        for each in _both(leaves)
    ]
    count = Count()
    for eqn, *rows in zip(closed.jaxpr.eqns, *runs, strict=True):
        for number, var in enumerate(eqn.outvars):
            for axis in axes:
                equal = all(axis in row[number] for row in rows)
                said = axis in facts[var]
                count.equal += equal
                count.found += equal and said
                count.wrong[eqn.primitive.name] += said and not equal
                count.missed[eqn.primitive.name] += equal and not said
    count.wrong, count.missed = +count.wrong, +count.missed
    return count


def total(subjects: Iterator[Subject]) -> Count:
    count = Count()
    for subject in subjects:
        count.add(measured(subject))
    return count


def _traced(subject: Subject, leaves: Sequence[Any], shared: Sequence[bool]) -> ClosedJaxpr:
    """With the bodies of jits in their place."""
    structure, env = jax.tree.structure(subject.args), list(subject.sizes.items())
    pairs = zip(leaves, shared, strict=True)
    types = [jax.typeof(leaf if is_shared else leaf[0]) for leaf, is_shared in pairs]
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
    call = lambda *leaves: subject.function(*jax.tree.unflatten(structure, leaves))
    closed = jax.make_jaxpr(call, axis_env=env)(*types)

    def inlined(body: Any, args: Sequence[Any]) -> list[Any]:
        handlers = {
            place: lambda eqn, values: inlined(interpreter.bodies(eqn)[0], values)
            for place, eqn in enumerate(interpreter.open_jaxpr(body).eqns)
            if record_of(eqn).call == "inline"
        }
        return interpreter.run(body, args, handlers)

    return jax.make_jaxpr(lambda *leaves: inlined(closed, leaves), axis_env=env)(*types)


def _on_devices(
    closed: ClosedJaxpr, shared: Sequence[bool], sizes: dict[str, int]
) -> Callable[..., Any]:
    """Gives the results of each equation, with dimensions for the axes in front."""
    names, shape = tuple(sizes), tuple(sizes.values())
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)

    def on_device(*leaves: Any) -> list[list[Any]]:
        leaves = tuple(x if each else x[0] for x, each in zip(leaves, shared, strict=True))
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(closed.jaxpr.invars, leaves, strict=True))
        found = []
        for eqn in closed.jaxpr.eqns:
            values = interpreter.replay(eqn, interpreter.read_all(eqn.invars, known))
            known.update(zip(eqn.outvars, values, strict=True))
            found.append([_numbers(value, len(names)) for value in values])
        return found

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(P() if each else P(names) for each in shared),
        out_specs=P(*names),
        check_vma=False,
    )
    return jax.jit(mapped)


def _numbers(value: Any, dimensions: int) -> jax.Array:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return value.reshape((1,) * dimensions + value.shape)


def _same_along(value: np.ndarray, names: Sequence[str]) -> set[str]:
    found = set()
    for number, name in enumerate(names):
        first = np.broadcast_to(np.take(value, [0], axis=number), value.shape)
        if np.ascontiguousarray(first).tobytes() == value.tobytes():
            found.add(name)
    return found


def _both(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    rng = np.random.default_rng(99)

    def other(leaf: Any) -> Any:
        if not jnp.issubdtype(jax.typeof(leaf).dtype, jnp.floating):
            return leaf
        noise = rng.normal(size=np.shape(leaf)).astype(np.float32)
        return np.asarray(leaf) * 0.9 + np.asarray(0.1 * noise, jax.typeof(leaf).dtype)

    yield list(leaves)
    yield [other(leaf) for leaf in leaves]
