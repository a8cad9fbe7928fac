"""Which captured arrays to care about, and what to say of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jax_dist import errors
from jax_dist.errors import CapturedArrayError, CapturedArrayWarning
from jax_dist.passes import captures as capturing
from jax_dist.passes.captures import Capture
from jax_dist.passes.user_lines import warn_user

Captures: TypeAlias = Literal["lift", "warn", "allow", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What to do with captured arrays, and from which size."""

    captures: Captures = "lift"
    warn_bytes: int = 1024
    lift_bytes: int = 1024
    live: bool = False  # follow the object, instead of its value at trace time
    follows: bool = (
        True  # keep hold of where a captured object came from, and look whether it changed
    )


def worth_lifting(found: Sequence[Capture], name: str, policy: Policy) -> tuple[Capture, ...]:
    """The captures that should become arguments; warns or raises where the policy says so.

    Raises:
      CapturedArrayError: there are some, and the policy is "error".
    """
    large = [c for c in found if c.bytes >= policy.warn_bytes or c.is_key]
    if policy.captures == "error" and large:
        why = "captures='error' says that there should be none"
        raise CapturedArrayError(capturing.warning_text(large, name, kept_because=why))
    if policy.captures == "warn" and large:
        why = "captures='warn' says so"
        warn_user(capturing.warning_text(large, name, kept_because=why), CapturedArrayWarning)
    if policy.captures != "lift":
        return ()
    worth = [c for c in found if c.bytes >= policy.lift_bytes or c.is_key]
    stuck = [c for c in worth if c.refused]
    if stuck:
        why = "nothing can be handed to where they are used"
        warn_user(capturing.warning_text(stuck, name, kept_because=why), CapturedArrayWarning)
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
            text = capturing.warning_text(
                new, self._fun_name, kept_because="" if lifted else _STAGED
            )
            warn_user(text, CapturedArrayWarning)

    def look(self, captures: Sequence[Capture], placed: Sequence[Any]) -> None:
        """Warns if an object is not what was lifted any more."""
        both = zip(captures, placed, strict=True)
        stale = self._not_told([c for c, value in both if _has_changed(c, value)], "stale")
        if stale:
            warn_user(_stale(stale, self._fun_name), CapturedArrayWarning)

    def current(self, captures: Sequence[Capture], placed: Sequence[Any]) -> tuple[Any, ...]:
        """The objects as they are now; what was placed, where nothing changed."""
        return tuple(_now(c, value) for c, value in zip(captures, placed, strict=True))

    def are_alike(self, captures: Sequence[Capture]) -> bool:
        """Whether the objects are still arrays of the same shapes and types."""
        return all(_is_alike(c) for c in captures)

    def _not_told(self, captures: Sequence[Capture], what: str) -> list[Capture]:
        new = [c for c in captures if (c.name, c.used_at, what) not in self._told]
        self._told.update((c.name, c.used_at, what) for c in new)
        return new


_STAGED = "this call is traced by a jit or a scan around it; put rewrite outside of that"


def _now(capture: Capture, placed: Any) -> Any:
    now = capture.origin if capture.read is None else capture.read()
    # A NumPy array may have been written to; only its content would tell.
    return placed if now is capture.origin and not isinstance(now, np.ndarray) else now


def _is_alike(capture: Capture) -> bool:
    now = capture.origin if capture.read is None else capture.read()
    shape, dtype = getattr(now, "shape", None), getattr(now, "dtype", None)
    return (shape, str(jax.dtypes.canonicalize_dtype(dtype))) == (capture.shape, capture.dtype)


def _has_changed(capture: Capture, placed: Any) -> bool:
    if capture.read is None:
        return False
    now = capture.read()
    if now is not capture.origin:
        return True
    if not isinstance(now, np.ndarray):
        return False
    return not np.array_equal(now.astype(capture.dtype, copy=False), np.asarray(placed))


def _stale(captures: Sequence[Capture], fun_name: str) -> str:
    return errors.message(
        what=f"JXD401: '{fun_name}' still uses the arrays that it captured when it was traced",
        which=[f"{c.name} has changed since" for c in captures],
        why="a captured array keeps the value of that moment, as it does under jax.jit",
        do="Pass it as an argument; or say live_captures=True, and the object is followed.",
    )
