"""The C++ fast path of a decorated function, and calls that wait for their result on CPU."""

import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jax_dist import _compat
from jax_dist._calls import definition

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")

# Not written in `__slots__` itself, where it would hide the method `__call__` from type checkers.
_CALL_SLOT = ("__call__",)


class Decorated(Generic[_P, _R]):
    """A function that a `FastPath` calls; with the name, docstring and attributes of the user's.

    `__call__` is a slot, to which `FastPath.serve` assigns. Python looks it up in the class, finds
    the slot, and calls its value: on a cache hit a C++ callable, with no Python code in between. A
    method would double the cost of a call.

    Attributes:
      __wrapped__: the function that it was made from.
    """

    __slots__ = (*_CALL_SLOT, "__dict__", "__name__", "__qualname__", "__weakref__", "__wrapped__")
    _kind = ""  # for the text of such a function
    if TYPE_CHECKING:  # at run time, this would be a second definition of the slot

        def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...

    def __init__(self, fun: Callable[_P, _R]):
        for name, value in getattr(fun, "__dict__", {}).items():
            if not hasattr(type(self), name):  # it would hide a method of this class
                self.__dict__[name] = value
        self.__wrapped__ = fun
        self.__name__: str = getattr(fun, "__name__", type(fun).__name__)
        self.__qualname__: str = getattr(fun, "__qualname__", self.__name__)
        for name, default in {"__module__": None, "__doc__": None, "__annotations__": {}}.items():
            self.__dict__[name] = getattr(fun, name, default)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> "Decorated[_P, _R]": ...
    @overload
    def __get__(
        self: "Decorated[Concatenate[Any, _Q], _R]", instance: object, owner: type | None = None
    ) -> Callable[_Q, _R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        location = definition(self.__wrapped__)
        return f"<{self._kind} of {self.__qualname__}{f' at {location}' if location else ''}>"


class FastPath:
    """The C++ fast path of one function, and the decorated objects that are called by it.

    It remembers how to run the signatures that it was called with; see `_compat.make_cached_call`.

    Args:
      name: of the function.
      miss: makes a call of `(args, kwargs)` whose signature is not known.
      without_jit: makes a call of these under `jax.disable_jit`, and of a call whose results hold a
        NaN under `jax.debug_nans`.
      static_argnums, static_argnames: of the user's function.

    Attributes:
      call: the fast path itself.
    """

    def __init__(
        self,
        name: str,
        miss: Callable[[tuple[Any, ...], dict[str, Any]], _compat.Answer],
        *,
        without_jit: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        static_argnums: Sequence[int] = (),
        static_argnames: Sequence[str] = (),
    ):
        def miss_with_short_traceback(*args: Any, **kwargs: Any) -> _compat.Answer:
            try:
                return miss(args, kwargs)
            except Exception as error:
                error.__traceback__ = _compat.filtered_traceback(error)
                raise

        self.call: Callable[..., Any] = _compat.make_cached_call(
            name,
            miss_with_short_traceback,
            without_jit=lambda *args, **kwargs: without_jit(args, kwargs),
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
        self._callers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._call_of_callers = self.call
        self._is_throttled = False

    def serve(self, caller: Any) -> None:
        """Set `caller.__call__` to the fastest way to call, now and whenever that changes."""
        self._callers.add(caller)
        caller.__call__ = self._call_of_callers

    def serve_by(self, call: Callable[..., Any]) -> None:
        """Have all callers call `call`, which ends in `self.call`."""
        self._call_of_callers = call
        for caller in self._callers:
            caller.__call__ = call

    def throttle(self, mesh: Mesh) -> None:
        """Have every sixteenth call wait for its result, if the devices of a program need that."""
        if self._is_throttled or not can_be_full(mesh):
            return
        self._is_throttled, dispatch = True, self.call

        def call(*args: Any, **kwargs: Any) -> Any:
            output = dispatch(*args, **kwargs)
            return jax.block_until_ready(output) if next(_turns) else output

        self.call = call
        if self._call_of_callers is dispatch:
            self.serve_by(call)


def lower(jitted: Any, captured: tuple, args: tuple, kwargs: dict[str, Any]) -> jax.stages.Lowered:
    """Lower a jit object that takes `captured` first, if there are any, and passes them itself."""
    if not captured:
        return jitted.lower(*args, **kwargs)
    return _compat.pass_first_argument(jitted.lower(captured, *args, **kwargs), captured)


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
