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
from jax.extend.core import ClosedJaxpr

from jax_dist._calls import warn_user
from jax_dist._passes.constants import Capture, CaptureFinder, is_key, lift_arrays
from jax_dist._passes.variable_names import find_names
from jax_dist.errors import ArgumentError, CapturedArrayWarning

Captures: TypeAlias = typing.Literal["lift", "warn", "allow", "error"]


def find_captures(jaxpr: ClosedJaxpr, fun: Callable) -> tuple[Capture, ...]:
    """Return every array that is baked into a program, at any depth, once, in program order.

    The names are searched from `fun`, which is what the user wrote.
    """
    captures = CaptureFinder().find(jaxpr)
    for identity, (name, line) in find_names(fun, captures).items():
        captures[identity].name, captures[identity].captured_at = name, line
    return tuple(captures.values())


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
