"""Captured arrays of a traced function: their descriptions, and their copies on devices.

To lift a captured array is to make it an input of the program. A traced program owns the values
that it was traced with, as under jit: NumPy arrays are copied at once, because their owner may
write to them, and identified by content; jax arrays are identified as objects. The copies on
devices live as long as the function.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import typing
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jax_dist import _compat
from jax_dist._calls import warn_user
from jax_dist._passes.constants import (
    Identity,
    array_identity,
    is_key,
    lift_arrays,
    reason_to_keep,
)
from jax_dist._passes.interpreter import bodies, constants, open_jaxpr, user_line_of
from jax_dist._passes.variable_names import find_names
from jax_dist._usage import human_bytes
from jax_dist.errors import ArgumentError, CapturedArrayWarning

Captures: TypeAlias = typing.Literal["lift", "warn", "allow", "error"]

_LARGE = 1024  # bytes


@dataclasses.dataclass(slots=True, eq=False)
class Capture:
    """An array that a program holds, and where it comes from."""

    name: str  # as the user would type it: "params['w']"; "<derived>" if `fun` does not reach it
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    captured_at: str = ""  # "train.py:10", where the function begins that captures it, if known
    used_at: str = ""  # "train.py:12", the first equation that reads it; "" if it is only returned
    action: typing.Literal["lifted", "kept"] = "kept"
    refused: str = ""  # why it cannot be lifted; "" if it can
    is_key: bool = False  # whether it is a random key, of the new kind or the old
    # Until it is lifted or not; a NumPy one shares the user's memory.
    value: Any = dataclasses.field(default=None, repr=False)

    @classmethod
    def describe(cls, value: Any) -> "Capture":
        """Return the capture of an array, without name and lines: these are found later."""
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        type_and_size = tuple(array.shape), str(array.dtype), int(array.nbytes)
        return cls("<derived>", *type_and_size, is_key=is_key(array), value=array)

    @property
    def is_large(self) -> bool:
        """True if it is worth a warning."""
        return self.bytes >= _LARGE

    @property
    def is_worth_lifting(self) -> bool:
        return self.is_large or self.is_key

    def __str__(self) -> str:
        parts = [
            f"{self.dtype}[{','.join(map(str, self.shape))}]",
            human_bytes(self.bytes),
            f"captured at {self.captured_at}" if self.captured_at else "",
            f"used at {self.used_at}" if self.used_at else "",
            f"not lifted: {self.refused}" if self.refused else "",
        ]
        return f"{self.name}: {', '.join(filter(None, parts))}"


def find_captures(jaxpr: ClosedJaxpr, fun: Callable) -> tuple[Capture, ...]:
    """Return every array that is baked into a program, at any depth, once, in program order.

    The names are searched from `fun`, which is what the user wrote.
    """
    captures: dict[Identity, Capture] = {}
    for value, eqn, around, refused in _uses_of_arrays(jaxpr, (), "", set()):
        if (identity := array_identity(value)) is None:
            continue
        if identity not in captures:
            captures[identity] = Capture.describe(value)
        capture = captures[identity]
        capture.refused = capture.refused or refused
        if eqn is not None:
            capture.used_at = capture.used_at or user_line_of(eqn, around)
            capture.is_key = capture.is_key or _compat.name_of(eqn) == "random_wrap"
    for identity, (name, line) in find_names(fun, captures).items():
        captures[identity].name, captures[identity].captured_at = name, line
    return tuple(captures.values())


def _uses_of_arrays(
    jaxpr: Any, around: tuple[JaxprEqn, ...], refused: str, visited: set[tuple[int, str]]
) -> Iterator[tuple[Any, JaxprEqn | None, tuple[JaxprEqn, ...], str]]:
    """Yield the constants and literals of a jaxpr and of the bodies in it, each time one is read.

    Args:
      jaxpr: open or closed.
      around: the equations in whose bodies it is, the outermost first.
      refused: why its constants cannot be lifted; "" if they can.
      visited: ids of jaxprs with `refused`: a body that many equations share is walked once.

    Yields:
      The value, perhaps a scalar; the equation that reads it, None for a constant or a result; the
      equations around that one; and `refused` of the body.
    """
    if (id(jaxpr), refused) in visited:
        return
    visited.add((id(jaxpr), refused))
    opened = open_jaxpr(jaxpr)
    values = dict(zip(opened.constvars, constants(jaxpr), strict=False))
    for value in values.values():
        yield value, None, around, refused
    for eqn in opened.eqns:
        for body in bodies(eqn):
            inner = refused or reason_to_keep(eqn)
            yield from _uses_of_arrays(body, (*around, eqn), inner, visited)
        for atom in eqn.invars:
            value = values.get(atom) if isinstance(atom, Var) else atom.val
            if value is not None:
                yield value, eqn, around, refused
    for atom in opened.outvars:
        if isinstance(atom, Literal):
            yield atom.val, None, around, refused


def warning_text(captures: Sequence[Capture], fun_name: str, *, kept_because: str = "") -> str:
    """Return one text for all captures of a call; `kept_because` says why they stay."""
    count = "an array" if len(captures) == 1 else f"{len(captures)} arrays"
    advice = "They are arguments of the program now; to avoid this warning, pass them yourself."
    if kept_because:
        advice = (
            f"They stay in the program, because {kept_because}: it compiles slowly, and again for "
            "other values. Pass them as arguments."
        )
    return f"JXD401: '{fun_name}' captures {count}: {'; '.join(map(str, captures))}. {advice}"


# --- lifting


_lifts = contextvars.ContextVar("lifts", default=False)


@contextlib.contextmanager
def tracing(captures: Captures) -> Iterator[None]:
    """Record, while tracing inside, whether this program lifts what it captures.

    A pmap or rewrite that is traced inside then need not warn: see `is_lifted_outside`.
    """
    token = _lifts.set(captures == "lift")
    try:
        yield
    finally:
        _lifts.reset(token)


def is_lifted_outside() -> bool:
    """Return whether what is traced now is part of a program that lifts what it captures."""
    return _lifts.get()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lifted:
    """A program whose first inputs are arrays that it captured."""

    jaxpr: ClosedJaxpr
    all_captures: tuple[Capture, ...]  # lifted or not; empty if captures="allow"
    captures: tuple[Capture, ...]  # those that are inputs now
    values: tuple[Any, ...]  # of these: NumPy arrays are copies, and of keys it is their data
    key: Hashable = ()  # equal for equal values, which then share their copies on devices


def lift(jaxpr: ClosedJaxpr, fun: Callable, name: str, policy: Captures) -> Lifted:
    """Make the large captured arrays and random keys inputs of the program, or warn of them.

    `fun` is searched for their names; `name` is that of the function in messages. Under the policy
    "error", ArgumentError is raised if there are some.
    """
    all_captures = () if policy == "allow" else find_captures(jaxpr, fun)
    wanted = [capture for capture in all_captures if capture.is_worth_lifting]
    kept = [capture for capture in wanted if policy != "lift" or capture.refused]
    lifted = tuple(capture for capture in wanted if capture not in kept)
    if kept:
        why = "they cannot be handed on" if policy == "lift" else f"captures='{policy}' is set"
        text = warning_text(kept, name, kept_because=why)
        if policy == "error":
            raise ArgumentError(text)
        warn_user(text, CapturedArrayWarning)
    arrays = [capture.value for capture in lifted]
    for capture in lifted:
        capture.action = "lifted"
    for capture in all_captures:
        capture.value = None  # what is not lifted need not live longer
    values = tuple(map(_own_data, arrays))
    jaxpr = lift_arrays(jaxpr, arrays)
    return Lifted(jaxpr, all_captures, lifted, values, tuple(map(_placement_key, values)))


def _own_data(value: Any) -> Any:
    """Return a copy of a NumPy array, to which its owner may write; of random keys their data."""
    if is_key(value):
        return jax.random.key_data(value)
    return np.array(value) if isinstance(value, np.ndarray) else value


def _placement_key(value: Any) -> Hashable:
    """Return a hash of a NumPy array's content, as its owner may write to it; of others the id."""
    if isinstance(value, jax.Array):
        return id(value)
    content = np.ascontiguousarray(value)
    digest = hashlib.blake2b(content.view(np.uint8).data).digest()
    return digest, content.shape, content.dtype.name  # `str` of all ml_dtypes is alike


class Watch:
    """Warnings of the captures of one function; each capture is reported once."""

    def __init__(self, fun_name: str):
        self._fun_name = fun_name
        self._warned: set[tuple] = set()

    def warn_of(self, captures: Sequence[Capture], *, lifted: bool) -> None:
        """Warn of the large captures that no earlier call reported in this state, lifted or not."""
        large = [((c.name, c.used_at, lifted), c) for c in captures if c.is_large]
        new = [capture for key, capture in large if key not in self._warned]
        self._warned.update(key for key, _ in large)
        if new:
            why = "this call is traced by a jit or a scan around it (put rewrite outside of that)"
            text = warning_text(new, self._fun_name, kept_because="" if lifted else why)
            warn_user(text, CapturedArrayWarning)


# --- copies on devices


class PlacedCaptures:
    """The captured arrays of a program on its devices; programs are cached by this object."""

    def __init__(self, values: Sequence[Any], originals: Sequence[Any] = ()):
        self.values: tuple[Any, ...] = tuple(values)
        self._originals = originals  # kept, for the identity of jax arrays is their key

    def prepend(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the program, which takes the captured arrays first."""
        return args if self is NO_CAPTURES else (self.values, *args)

    def hide(self, lowered: jax.stages.Lowered) -> jax.stages.Lowered:
        """Return a lowered program of such arguments as one that passes the captured arrays."""
        return lowered if self is NO_CAPTURES else _compat.pass_first_argument(lowered, self.values)


NO_CAPTURES = PlacedCaptures(())  # of a program that takes none


class Placements:
    """The copies of captured arrays on devices, which the programs of one function share."""

    def __init__(self):
        self._sets: dict[Hashable, PlacedCaptures] = {}

    def get(self, lifted: Lifted, where: Hashable, place: Callable[[Any], Any]) -> PlacedCaptures:
        """Return the captured arrays of a program on the devices `where`; `place` puts one there.

        `where` is any hashable key of the devices.
        """
        if not lifted.captures:
            return NO_CAPTURES
        key = (lifted.key, where)
        if key not in self._sets:
            self._sets[key] = PlacedCaptures(list(map(place, lifted.values)), lifted.values)
        return self._sets[key]
