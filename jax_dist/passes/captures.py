"""What a traced function captures: which arrays, what to say of them, and lifting them.

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
from jax_dist._usage import human_bytes
from jax_dist.errors import CapturedArrayError, CapturedArrayWarning, message
from jax_dist.passes.constants import (
    Baked,
    Identity,
    Substitution,
    array_identity,
    baked_arrays,
    frozen,
    own_copy,
)
from jax_dist.passes.interpreter import Values
from jax_dist.passes.pipeline import warn_user
from jax_dist.passes.variable_names import ArraySource, Kind, find_names

_UNNAMED = ArraySource("<derived>", "", "", None, None)


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
    origin: Any = dataclasses.field(repr=False, compare=False)  # the user's object, or `value`
    read: Callable[[], Any] | None = dataclasses.field(repr=False, compare=False)  # it is now


def find_captures(jaxpr: ClosedJaxpr, fun: Callable) -> tuple[Capture, ...]:
    """Every array that is baked into a program, at any depth, each once, in program order.

    The names are searched from `fun`, which is what the user wrote.
    """
    baked = baked_arrays(jaxpr)
    names = find_names(fun, {identity: array.value for identity, array in baked.items()})
    return tuple(_capture(array, names.get(key, _UNNAMED)) for key, array in baked.items())


def _capture(baked: Baked, found: ArraySource) -> Capture:
    value = baked.value
    is_old_key = baked.first_use is not None and _compat.name_of(baked.first_use) == "random_wrap"
    return Capture(
        name=found.name,
        kind=found.kind,
        shape=tuple(value.shape),
        dtype=str(value.dtype),
        bytes=int(value.nbytes),
        captured_at=found.captured_at,
        used_at=baked.used_at,
        is_key=is_old_key or jnp.issubdtype(value.dtype, jax.dtypes.prng_key),
        refused=baked.refused,
        key=_key(value),
        value=value,
        origin=value if found.origin is None else found.origin,
        read=found.read,
    )


def _key(value: Any) -> Hashable:
    """A NumPy array by its content, for its owner may write to it; a jax array by identity."""
    if isinstance(value, jax.Array):
        return id(value)
    content = np.ascontiguousarray(value)
    digest = hashlib.blake2b(content.data.cast("B") if content.size else b"").digest()
    return digest, content.shape, content.dtype.str


def evaluate_lifted(
    jaxpr: ClosedJaxpr, captures: Sequence[Capture], values: Sequence[Any], args: Sequence[Any]
) -> Values:
    """Evaluates a program with other values in the place of its captured arrays, one for each.

    Called while tracing, with tracers as values, it gives the program with the arrays as operands.
    """
    given: dict[Identity, Any] = {}
    for capture, value in zip(captures, values, strict=True):
        if value.shape != capture.shape or str(value.dtype) != capture.dtype:
            raise AssertionError(f"'{capture.name}' is replaced by {jax.typeof(value)}")
        given[array_identity(capture.value)] = value
    return Substitution(frozenset(given)).evaluate(jaxpr, args, given)


def warning_text(captures: Sequence[Capture], fun_name: str, *, kept_because: str = "") -> str:
    """One text for all captures of a call; `kept_because` says why they stay in the program."""
    total = human_bytes(sum(capture.bytes for capture in captures))
    count = "an array" if len(captures) == 1 else f"{len(captures)} arrays"
    remedy = (
        f"They stay in the program, because {kept_because}. Pass them as arguments."
        if kept_because
        else "They are arguments of the program now. To do without this, pass them yourself."
    )
    which = []
    for capture in captures:
        shape = ",".join(map(str, capture.shape))
        parts = [
            f"{capture.name}: {capture.dtype}[{shape}], {human_bytes(capture.bytes)}",
            f"{capture.kind} of {capture.captured_at}" if capture.captured_at else "",
            f"used at {capture.used_at}" if capture.used_at else "",
            f"not lifted: {capture.refused}" if capture.refused else "",
        ]
        which.append(", ".join(filter(None, parts)))
    return message(
        what=f"JXD401: '{fun_name}' captures {count}",
        which=which,
        why=f"what is captured becomes part of the program: {total} that are compiled slowly, and "
        "are part of the cache key, so that another value needs another compilation",
        do=remedy,
    )


# --- which captured arrays to care about, and what to say of them


Captures: TypeAlias = Literal["lift", "warn", "allow", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What to do with captured arrays, and from which size."""

    captures: Captures = "lift"
    warn_bytes: int = 1024
    lift_bytes: int = 1024
    # Keep hold of where a captured object came from, and look whether it changed.
    follows: bool = True

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """What is traced inside is part of a program that lifts what it captures, or not."""
        before, _outside.lifts = _outside.lifts, self.captures == "lift"
        try:
            yield
        finally:
            _outside.lifts = before


def _worth_lifting(found: Sequence[Capture], name: str, policy: Policy) -> tuple[Capture, ...]:
    """The captures that should become arguments; warns or raises where the policy says so.

    Raises:
      CapturedArrayError: there are some, and the policy is "error".
    """
    large = [c for c in found if c.bytes >= policy.warn_bytes or c.is_key]
    if policy.captures == "error" and large:
        why = "captures='error' says that there should be none"
        raise CapturedArrayError(warning_text(large, name, kept_because=why))
    if policy.captures == "warn" and large:
        why = "captures='warn' says so"
        warn_user(warning_text(large, name, kept_because=why), CapturedArrayWarning)
    if policy.captures != "lift":
        return ()
    worth = [c for c in found if c.bytes >= policy.lift_bytes or c.is_key]
    stuck = [c for c in worth if c.refused]
    if stuck:
        why = "nothing can be handed to where they are used"
        warn_user(warning_text(stuck, name, kept_because=why), CapturedArrayWarning)
    lifted = [c for c in worth if not c.refused]
    # The object and how to read it again lead to the function, which would then never die.
    return tuple(
        c if policy.follows else dataclasses.replace(c, origin=None, read=None) for c in lifted
    )


class Watch:
    """What was said to the user of the captures of one function."""

    def __init__(self, fun_name: str, policy: Policy):
        self._fun_name, self._policy = fun_name, policy
        self._told: set[tuple] = set()

    def warn_of(self, captures: Sequence[Capture], *, lifted: bool) -> None:
        """Warns of each capture once."""
        new = [c for c in captures if c.bytes >= self._policy.warn_bytes]
        new = self._not_told(new, "lifted" if lifted else "kept")
        if new:
            text = warning_text(new, self._fun_name, kept_because="" if lifted else _STAGED)
            warn_user(text, CapturedArrayWarning)

    def look(self, captures: Sequence[Capture], placed: Sequence[Any]) -> None:
        """Warns if an object is not what was lifted any more."""
        both = zip(captures, placed, strict=True)
        stale = self._not_told([c for c, value in both if _has_changed(c, value)], "stale")
        if stale:
            text = message(
                what=f"JXD401: '{self._fun_name}' still uses the arrays that it captured when it "
                "was traced",
                which=[f"{c.name} has changed since" for c in stale],
                why="a captured array keeps the value of that moment, as it does under jax.jit",
                do="Pass it as an argument.",
            )
            warn_user(text, CapturedArrayWarning)

    def _not_told(self, captures: Sequence[Capture], what: str) -> list[Capture]:
        new = [c for c in captures if (c.name, c.used_at, what) not in self._told]
        self._told.update((c.name, c.used_at, what) for c in new)
        return new


_STAGED = "this call is traced by a jit or a scan around it; put rewrite outside of that"


def _has_changed(capture: Capture, placed: Any) -> bool:
    if capture.read is None:
        return False
    now = capture.read()
    if now is not capture.origin:
        return True
    if not isinstance(now, np.ndarray):
        return False
    return not np.array_equal(now.astype(capture.dtype, copy=False), np.asarray(placed))


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
    """Makes inputs of the captured arrays that are worth it, which have their names in `fun`.

    `axis_env` are the axes that the program was traced with.

    Raises:
      CapturedArrayError: there are some, and the policy is "error".
    """
    if policy.captures == "allow":
        return Lifted(frozen(jaxpr), (), (), [])
    found = find_captures(jaxpr, fun)
    captures = _worth_lifting(found, name, policy)
    if captures:
        given, count = jaxpr, len(captures)
        evaluate = lambda *inputs: evaluate_lifted(given, captures, inputs[:count], inputs[count:])
        types = [jax.typeof(capture.value) for capture in captures]
        jaxpr = jax.make_jaxpr(evaluate, axis_env=axis_env)(*types, *jaxpr.in_avals)
    values = [own_copy(capture.value) for capture in captures]
    found, captures = (
        tuple(dataclasses.replace(capture, value=None) for capture in some)
        for some in (found, captures)
    )
    return Lifted(frozen(jaxpr), found, captures, values)


class _Outside(threading.local):
    lifts: bool = False


_outside = _Outside()


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
        self._holders = weakref.WeakValueDictionary[Hashable, _Holder]()
        self._sets = weakref.WeakValueDictionary[Hashable, PlacedCaptures]()

    def of(
        self, lifted: Lifted, where: Hashable, place: Callable[[Any], Any]
    ) -> PlacedCaptures | None:
        """The captured arrays of a program, which keeps them alive; None for one without.

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
            if not any(isinstance(each, jax.ShapeDtypeStruct) for each in placed.values):
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
