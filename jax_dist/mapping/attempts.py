"""How a trace talks to the call that caused it.

jit traces when it meets a signature that it does not know. At that moment, and never later, the
call's arguments deserve a look from Python: should they be put elsewhere first? The trace itself
sees only tracers, so it looks the arguments up in the frame of the call (`call_under_way`), which
costs nothing until there is a trace. If they should be moved, it raises `Misplaced`; the call
catches it, moves them, announces an `Attempt`, and calls again.

It raises only then: jit's C++ cache remembers that a signature failed, and takes 80 us instead of 5
for each later call with it. A signature with misplaced arguments is not used again.

Both are BaseExceptions: they pass through code of JAX and of the user that catches Exception.
"""

import dataclasses
import inspect
import threading
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from jax.sharding import Sharding

from jax_dist.mapping.meshes import InnerAxis


class Misplaced(BaseException):
    """The call under way has arguments that should be put elsewhere first.

    Attributes:
      places: by number of the leaf, where to; empty where the call finds out by itself.
    """

    def __init__(self, places: Mapping[int, Sharding] | None = None):
        super().__init__()
        self.places = places or {}


class Replan(BaseException):
    """The trace shows that the arguments should have been put elsewhere."""


class _Current(threading.local):
    attempt: "Attempt | None" = None


_current = _Current()


@dataclasses.dataclass(slots=True)
class Attempt:
    """A call under way whose arguments have been looked at.

    As a context manager, it announces that traces in this thread belong to it.
    """

    owner: object = None  # the dispatcher whose call it is; None where nothing was placed
    inner: tuple[InnerAxis, ...] = ()  # the mesh axes of pmaps inside that the placement assumed
    placed: bool = False  # whether any argument was put on the mesh
    donated: frozenset[int | str] = frozenset()  # donated arguments that were put there
    traced: bool = False  # set by the trace
    before: "Attempt | None" = None  # what this one hides

    def __enter__(self) -> "Attempt":
        self.before, _current.attempt = _current.attempt, self
        return self

    def __exit__(self, *_: object) -> None:
        _current.attempt = self.before


def current() -> Attempt | None:
    return _current.attempt


def entry(closure: FunctionType) -> FunctionType:
    """Marks the closure that users call. It has locals `dispatcher`, `args` and `kwargs`."""
    _entries.add(closure.__code__)  # one and the same code, however many closures there are
    return closure


def call_under_way() -> tuple[Any, tuple, dict] | None:
    """Dispatcher and arguments of the innermost call under way in this thread, if any."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in _entries:
            return tuple(frame.f_locals[name] for name in ("dispatcher", "args", "kwargs"))
        frame = frame.f_back
    return None


_entries: set[CodeType] = set()
