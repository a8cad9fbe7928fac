"""How a trace talks to the call that caused it.

jit traces when it meets a signature that it does not know. At that moment, and never later, the
call's arguments deserve a look from Python. So a trace that nobody has announced raises
`FirstSight`; the call catches it, looks, announces an `Attempt`, and calls again.

Both are BaseExceptions: they pass through code of JAX and of the user that catches Exception.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from jax_dist.mapping.meshes import InnerAxis


class FirstSight(BaseException):
    """jit traces a signature that it has not seen; raised before the body runs."""


class Replan(BaseException):
    """The trace shows that the arguments should have been placed in another way."""


@dataclasses.dataclass
class Attempt:
    """A call under way whose arguments have been looked at: it may trace."""

    owner: object = None  # the dispatcher whose call it is; None where nothing was placed
    inner: tuple[InnerAxis, ...] = ()  # the mesh axes of pmaps inside that the placement assumed
    placed: bool = False  # whether any argument was put on the mesh
    donated: frozenset[int | str] = frozenset()  # donated arguments that were put there


class _Current(threading.local):
    attempt: Attempt | None = None


_current = _Current()


def current() -> Attempt | None:
    return _current.attempt


@contextlib.contextmanager
def attempting(attempt: Attempt) -> Iterator[None]:
    """Announces traces in this thread."""
    before, _current.attempt = _current.attempt, attempt
    try:
        yield
    finally:
        _current.attempt = before
