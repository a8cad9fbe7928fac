"""Captured arrays of a traced function: what is said of them, and their copies on devices.

Lifted, a captured array is an input of the program. A traced program owns the values that it was
traced with, as under jit: NumPy arrays are copied then and there, for their owner may write to
them, and known by their content; jax arrays are known as the objects that they are. Their copies on
devices live as long as a program that uses them.
"""

import contextlib
import dataclasses
import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist._rewrite.constants import BakedArray, baked_arrays, frozen, lift_arrays, own_copy
from jax_dist._rewrite.pipeline import warn_user
from jax_dist._rewrite.variable_names import ArraySource, Kind, find_names
from jax_dist._usage import human_bytes
from jax_dist.errors import ArgumentError, CapturedArrayWarning

Captures: TypeAlias = Literal["lift", "warn", "allow", "error"]

_UNNAMED = ArraySource("<derived>", "", "")
_LARGE = 1024  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """An array that a program holds, and where it comes from."""

    name: str  # as the user would type it: "params['w']"; "<derived>" if `fun` does not reach it
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    captured_at: str  # "train.py:10", where the function begins that captures it; "" if unknown
    used_at: str  # "train.py:12", the first equation that reads it; "" if it is only returned
    is_key: bool  # whether it is a random key, of the new kind or the old
    refused: str  # why it cannot be lifted; "" if it can
    key: Hashable = dataclasses.field(repr=False, compare=False)  # equal for equal NumPy arrays
    value: Any = dataclasses.field(repr=False, compare=False)  # a NumPy one shares user's memory

    @property
    def is_large(self) -> bool:
        """Whether it is worth a warning, and an argument of its own."""
        return self.bytes >= _LARGE

    @property
    def is_worth_lifting(self) -> bool:
        return self.is_large or self.is_key

    def __str__(self) -> str:
        facts = [
            f"{self.dtype}[{','.join(map(str, self.shape))}]",
            human_bytes(self.bytes),
            f"{self.kind} of {self.captured_at}" if self.captured_at else "",
            f"used at {self.used_at}" if self.used_at else "",
            f"not lifted: {self.refused}" if self.refused else "",
        ]
        return f"{self.name}: {', '.join(filter(None, facts))}"


def find_captures(jaxpr: ClosedJaxpr, fun: Callable) -> tuple[Capture, ...]:
    """Return every array that is baked into a program, at any depth, once, in program order.

    The names are searched from `fun`, which is what the user wrote.
    """
    baked = baked_arrays(jaxpr)
    names = find_names(fun, {identity: array.value for identity, array in baked.items()})
    return tuple(_capture(array, names.get(key, _UNNAMED)) for key, array in baked.items())


def _capture(baked: BakedArray, source: ArraySource) -> Capture:
    value = baked.value
    is_old_key = baked.first_use is not None and _compat.name_of(baked.first_use) == "random_wrap"
    return Capture(
        name=source.name,
        kind=source.kind,
        shape=tuple(value.shape),
        dtype=str(value.dtype),
        bytes=int(value.nbytes),
        captured_at=source.captured_at,
        used_at=baked.used_at,
        is_key=is_old_key or jnp.issubdtype(value.dtype, jax.dtypes.prng_key),
        refused=baked.refused,
        key=_key(value),
        value=value,
    )


def _key(value: Any) -> Hashable:
    """Return a key of a NumPy array's content, for its owner may write to it; else the identity."""
    if isinstance(value, jax.Array):
        return id(value)
    content = np.ascontiguousarray(value)
    digest = hashlib.blake2b(content.data.cast("B") if content.size else b"").digest()
    return digest, content.shape, content.dtype.str


def warning_text(captures: Sequence[Capture], fun_name: str, *, kept_because: str = "") -> str:
    """Return one text for all captures of a call; `kept_because` says why they stay."""
    count = "an array" if len(captures) == 1 else f"{len(captures)} arrays"
    fate = f"They stay in the program, because {kept_because}, and it is compiled slowly, and "
    fate += "again for other values. Pass them as arguments."
    if not kept_because:
        fate = "They are arguments of the program now; to avoid this warning, pass them yourself."
    return f"JXD401: '{fun_name}' captures {count}: {'; '.join(map(str, captures))}. {fate}"


# --- lifting


@contextlib.contextmanager
def tracing(captures: Captures) -> Iterator[None]:
    """Mark what is traced inside as part of a program that lifts what it captures, or not."""
    before, _outside.lifts = _outside.lifts, captures == "lift"
    try:
        yield
    finally:
        _outside.lifts = before


class _Outside(threading.local):
    lifts: bool = False


_outside = _Outside()


def is_lifted_outside() -> bool:
    """Return whether what is traced now is part of a program that lifts what it captures."""
    return _outside.lifts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lifted:
    """A program whose first inputs are arrays that it captured."""

    jaxpr: ClosedJaxpr
    found: tuple[Capture, ...]  # all captured arrays; empty if captures="allow"
    captures: tuple[Capture, ...]  # those that are inputs now
    values: list[Any]  # of these: own copies, on the host until they are placed
    placed: "dict[Hashable, PlacedCaptures]" = dataclasses.field(default_factory=dict, repr=False)


def lift(jaxpr: ClosedJaxpr, fun: Callable, name: str, policy: Captures) -> Lifted:
    """Make inputs of the captured arrays that are worth it, which have their names in `fun`.

    Raises:
      ArgumentError: there are some, and the policy is "error".
    """
    if policy == "allow":
        return Lifted(frozen(jaxpr), (), (), [])
    found = find_captures(jaxpr, fun)
    captures = _captures_to_lift(found, name, policy)
    if captures:
        jaxpr = lift_arrays(jaxpr, [capture.value for capture in captures])
    values = [own_copy(capture.value) for capture in captures]
    found, captures = (
        tuple(dataclasses.replace(capture, value=None) for capture in some)
        for some in (found, captures)
    )
    return Lifted(frozen(jaxpr), found, captures, values)


def _captures_to_lift(found: Sequence[Capture], name: str, policy: Captures) -> tuple[Capture, ...]:
    """Return the captures that become arguments; warn or raise where the policy says so."""
    worth = [capture for capture in found if capture.is_worth_lifting]
    if policy == "error" and worth:
        raise ArgumentError(warning_text(worth, name, kept_because="captures='error' says so"))
    if policy == "warn" and worth:
        text = warning_text(worth, name, kept_because="captures='warn' says so")
        warn_user(text, CapturedArrayWarning)
    if policy != "lift":
        return ()
    if stuck := [capture for capture in worth if capture.refused]:
        why = "nothing can be handed to where they are used"
        warn_user(warning_text(stuck, name, kept_because=why), CapturedArrayWarning)
    return tuple(capture for capture in worth if not capture.refused)


class Watch:
    """Warnings of the captures of one function, each once."""

    def __init__(self, fun_name: str):
        self._fun_name = fun_name
        self._warned: set[tuple] = set()

    def warn_of(self, captures: Sequence[Capture], *, lifted: bool) -> None:
        """Warn of each capture once."""
        large = [((c.name, c.used_at, lifted), c) for c in captures if c.is_large]
        new = [capture for key, capture in large if key not in self._warned]
        self._warned.update(key for key, _ in large)
        if new:
            why = "this call is traced by a jit or a scan around it (put rewrite outside of that)"
            text = warning_text(new, self._fun_name, kept_because="" if lifted else why)
            warn_user(text, CapturedArrayWarning)


# --- copies on devices


class PlacedCaptures:
    """The captured arrays of a program, where it uses them."""

    def __init__(self, holders: "Sequence[_Holder]"):
        self._holders = holders
        self.values: tuple[Any, ...] = tuple(holder.value for holder in holders)


class Placements:
    """The copies of captured arrays that programs of one function share."""

    def __init__(self):
        self._holders = weakref.WeakValueDictionary[Hashable, _Holder]()
        self._sets = weakref.WeakValueDictionary[Hashable, PlacedCaptures]()

    def of(
        self, lifted: Lifted, where: Hashable, place: Callable[[Any], Any]
    ) -> PlacedCaptures | None:
        """Return the captured arrays of a program, which keeps them alive; None without any.

        `where` is the same for the same places; `place` puts an array there.
        """
        if not lifted.captures:
            return None
        if where not in lifted.placed:
            keys = tuple((capture.key, where) for capture in lifted.captures)
            placed = self._sets.get(keys)
            if placed is None:
                pairs = zip(keys, lifted.values, strict=True)
                placed = PlacedCaptures([self._holder(*pair, place) for pair in pairs])
                self._sets[keys] = placed
            lifted.placed[where] = placed
            if not any(isinstance(value, jax.ShapeDtypeStruct) for value in placed.values):
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
