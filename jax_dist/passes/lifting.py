"""Captured arrays become inputs of the program that captures them.

A traced program owns the values that it was traced with, as under jit: NumPy arrays are copied
then and there, for their owner may write to them, and known by their content; jax arrays are known
as the objects that they are. Their copies on devices live as long as a program that uses them.
"""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jax_dist.passes import captures as capturing
from jax_dist.passes.captures import Capture, Policy
from jax_dist.passes.constants import frozen, own_copy


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lifted:
    """A program whose first inputs are arrays that it captured."""

    jaxpr: ClosedJaxpr
    found: tuple[Capture, ...]  # all that it captured; none where nobody looked
    captures: tuple[Capture, ...]  # those that are inputs now
    values: list[Any]  # of these: own copies, on the host until they are placed
    placed: "dict[Hashable, PlacedCaptures]" = dataclasses.field(default_factory=dict, repr=False)


def lift(
    jaxpr: ClosedJaxpr,
    fun: Callable,
    name: str,
    policy: Policy,
    axis_env: Sequence[tuple[Any, int]] = (),
) -> Lifted:
    """Makes inputs of the captured arrays that are worth it.

    Args:
      jaxpr: the program, traced just now.
      fun: the user's function, in which the arrays have their names.
      name: of the function, for messages.
      policy: what to do with captured arrays.
      axis_env: the axes that the program was traced with.

    Raises:
      CapturedArrayError: there are some, and the policy is "error".
    """
    if policy.captures == "allow":
        return Lifted(frozen(jaxpr), (), (), [])
    found = capturing.find_captures(jaxpr, fun)
    captures = capturing.worth_lifting(found, name, policy)
    if captures:
        jaxpr = _with_inputs(jaxpr, captures, axis_env)
    values = [own_copy(capture.value) for capture in captures]
    found, captures = (tuple(c.without_value() for c in some) for some in (found, captures))
    return Lifted(frozen(jaxpr), found, captures, values)


def _with_inputs(
    jaxpr: ClosedJaxpr, captures: Sequence[Capture], axis_env: Sequence[tuple[Any, int]]
) -> ClosedJaxpr:
    def evaluate(*inputs: Any) -> list[Any]:
        values, args = inputs[: len(captures)], inputs[len(captures) :]
        return capturing.evaluate_lifted(jaxpr, captures, values, args)

    types = [jax.typeof(capture.value) for capture in captures]
    return jax.make_jaxpr(evaluate, axis_env=axis_env)(*types, *jaxpr.in_avals)


class _Outside(threading.local):
    lifts: bool = False


_outside = _Outside()


@contextlib.contextmanager
def lifting_outside(*, lifts: bool) -> Iterator[None]:
    """What is traced inside is part of a program that lifts what it captures, or not."""
    before, _outside.lifts = _outside.lifts, lifts
    try:
        yield
    finally:
        _outside.lifts = before


def is_lifted_outside() -> bool:
    """Whether what is traced now is part of a program that lifts what it captures."""
    return _outside.lifts


class PlacedCaptures:
    """The captured arrays of a program, where it uses them."""

    def __init__(self, holders: "Sequence[_Holder]"):
        self._holders = holders
        self.values: tuple[Any, ...] = tuple(holder.value for holder in holders)


class Placements:
    """The copies of captured arrays that programs of one function share."""

    def __init__(self):
        self._holders: weakref.WeakValueDictionary[Hashable, _Holder] = (
            weakref.WeakValueDictionary()
        )
        self._sets: weakref.WeakValueDictionary[Hashable, PlacedCaptures] = (
            weakref.WeakValueDictionary()
        )

    def of(
        self, lifted: Lifted, where: Hashable, place: Callable[[Any], Any]
    ) -> PlacedCaptures | None:
        """The captured arrays of a program; None for one without.

        Args:
          lifted: the program, which keeps them alive.
          where: they are placed; the same for the same places.
          place: puts an array there.
        """
        if not lifted.captures:
            return None
        if where not in lifted.placed:
            keys = [(capture.key, where) for capture in lifted.captures]
            placed = self._sets.get(tuple(keys))
            if placed is None:
                pairs = zip(keys, lifted.values, strict=True)
                placed = PlacedCaptures([self._holder(*pair, place) for pair in pairs])
                self._sets[tuple(keys)] = placed
            lifted.placed[where] = placed
            lifted.values[:] = placed.values
        return lifted.placed[where]

    def _holder(self, key: Hashable, value: Any, place: Callable[[Any], Any]) -> "_Holder":
        holder = self._holders.get(key)
        if holder is None:
            original = value if isinstance(value, jax.Array) else None
            holder = self._holders[key] = _Holder(place(value), original)
        return holder


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class _Holder:
    value: Any  # on the devices
    original: jax.Array | None  # kept, for its identity is its key; None for a NumPy array
