"""Parts of programs that pmap, rewrite and global_view share.

Each set of captured arrays has a C++ fast path of its own, a front; and calls on CPU wait for their
result now and then.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jax_dist import _compat
from jax_dist._passes.captures import NO_CAPTURES, PlacedCaptures

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]


# The slot that `Fronts.serve` sets. It is not written in `__slots__` itself, where it would hide
# the method `__call__` from type checkers.
CALL_SLOT = ("__call__",)


class Fronts:
    """The C++ fast paths of one function, one for each set of captured arrays.

    A front remembers how to run the signatures that it was called with; see `_compat.front`. A
    front of captured arrays takes them as first argument.

    Args:
      name: of the function.
      miss: makes a call that a front does not know: of the front's captured arrays, the user's
        arguments and keywords.
      function: returns the user's function.
      rerun: what `jax.debug_nans` runs once more, of the same three.
      without_jit: makes a call under `jax.disable_jit`.
      static_argnums, static_argnames: of the user's function.

    Attributes:
      call: the front of the program that ran last, as the user calls it.
    """

    def __init__(
        self,
        name: str,
        miss: Callable[[PlacedCaptures, _Args, _Kwargs], _compat.Answer],
        *,
        function: Callable[[], Callable[..., Any]],
        rerun: Callable[[Sequence[Any], _Args, _Kwargs], Any],
        without_jit: Callable[[_Args, _Kwargs], Any],
        static_argnums: Sequence[int] = (),
        static_argnames: Sequence[str] = (),
    ):
        self._name, self._miss, self._function = name, miss, function
        self._rerun, self._without_jit = rerun, without_jit
        self._static_argnums, self._static_argnames = static_argnums, static_argnames
        self._fronts: dict[PlacedCaptures, Callable[..., Any]] = {}
        self._used = NO_CAPTURES, False  # by the last call
        self._callers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._call_of_callers: Callable[..., Any] | None = None  # in the place of `call`
        self.call: Callable[..., Any] = self._front(NO_CAPTURES)

    @property
    def fun(self) -> Callable[..., Any]:
        """The user's function, which `strict` names in its errors."""
        return self._function()

    def serve(self, caller: Any) -> None:
        """Set `caller.__call__` to the fastest way to call, now and whenever that changes."""
        self._callers.add(caller)
        caller.__call__ = self._call_of_callers or self.call

    def serve_by(self, call: Callable[..., Any]) -> None:
        """Have all callers call `call`, which ends in the fronts' own `call`."""
        self._call_of_callers = call
        for caller in self._callers:
            caller.__call__ = call

    def use(self, placed: PlacedCaptures, *, is_full: bool) -> None:
        """Point `call` to the front of the program that just ran."""
        if self._used == (placed, is_full):
            return
        self._used = placed, is_full
        front = self._front(placed)
        if placed is not NO_CAPTURES:
            front = functools.partial(front, placed.values)
        self.call = throttle(front) if is_full else front
        for caller in self._callers if self._call_of_callers is None else ():
            caller.__call__ = self.call

    def _front(self, placed: PlacedCaptures) -> Callable[..., Any]:
        """Return the front, made at first use, of programs with these captured arrays."""
        if placed in self._fronts:
            return self._fronts[placed]
        first = int(placed is not NO_CAPTURES)  # position of the user's first argument
        rerun, without_jit = self._rerun, self._without_jit

        def miss(*args: Any, **kwargs: Any) -> _compat.Answer:
            try:
                return self._miss(placed, args[first:], kwargs)
            except Exception as error:
                error.__traceback__ = _compat.filtered_traceback(error)
                raise

        front = self._fronts[placed] = _compat.front(
            self._name,
            miss,
            fun=lambda *args, **kwargs: rerun(args[0] if first else (), args[first:], kwargs),
            without_jit=lambda *args, **kwargs: without_jit(args[first:], kwargs),
            static_argnums=tuple(first + number for number in self._static_argnums),
            static_argnames=self._static_argnames,
        )
        return front


def is_staged() -> bool:
    """Return whether a jit or scan around is tracing what is computed now."""
    # Under a trace, constants are tracers too.
    with jax.transfer_guard("allow"):
        return isinstance(jax.device_put(0.0), Tracer)  # compiles nothing


# The CPU backend of JAX hangs over too many calls in flight: its devices take 32 executions each,
# and dispatch then waits, in the middle of one that other devices wait for in a collective. So
# there, every sixteenth call of this process waits for its own result. Asking takes 30 ns.
_turns = itertools.cycle([*[False] * 15, True])


def can_be_full(mesh: Mesh) -> bool:
    """Return whether calls of a program on these devices have to wait now and then."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return _compat.CPU_HANGS_WHEN_FULL and is_cpu and mesh.size > 1


def throttle(call: Callable) -> Callable:
    """Return the call with every sixteenth one waiting for its result."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs) if kwargs else call(*args)
        return jax.block_until_ready(output) if next(_turns) else output

    return waiting
