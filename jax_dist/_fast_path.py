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

    `__call__` is a slot, to which `FastPath.attach` assigns. Python looks it up in the class, finds
    the slot, and calls its value: on a cache hit a C++ callable, with no Python code in between. A
    method would double the cost of a call.
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
    """The C++ fast path of one function, and the decorated objects that call it.

    `call(*args, **kwargs)` is a C++ function with a cache: it runs signatures that it knows without
    any Python code; see `_compat.make_cached_call`. A decorated object, such as the result of
    `pmap(f)`, has it, or a function around it, as its `__call__`.
    """

    def __init__(
        self,
        name: str,
        on_miss: Callable[[tuple[Any, ...], dict[str, Any]], _compat.CallResult],
        *,
        without_jit: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        static_argnums: Sequence[int] = (),
        static_argnames: Sequence[str] = (),
    ):
        """Make `call` for the user's function `name`, which has these static arguments.

        `on_miss(args, kwargs)` runs a call whose signature is not in the cache. `without_jit(args,
        kwargs)` runs one under `jax.disable_jit`, or again if `jax.debug_nans` has found a NaN.
        """

        def call_on_miss(*args: Any, **kwargs: Any) -> _compat.CallResult:
            try:
                return on_miss(args, kwargs)
            except Exception as error:
                error.__traceback__ = _compat.filtered_traceback(error)
                raise

        self.call: Callable[..., Any] = _compat.make_cached_call(
            name,
            call_on_miss,
            without_jit=lambda *args, **kwargs: without_jit(args, kwargs),
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
        self._decorated: weakref.WeakSet[Any] = weakref.WeakSet()  # the objects of `attach`
        self._decorated_call = self.call  # what they have as `__call__`
        self._is_throttled = False

    def attach(self, decorated: Any) -> None:
        """Set `decorated.__call__` to the fast path, now and whenever that is replaced."""
        self._decorated.add(decorated)
        decorated.__call__ = self._decorated_call

    def wrap(self, call: Callable[..., Any]) -> None:
        """Set the `__call__` of all decorated objects to `call`, which itself calls `self.call`."""
        self._decorated_call = call
        for decorated in self._decorated:
            decorated.__call__ = call

    def throttle(self, mesh: Mesh) -> None:
        """Have every sixteenth call wait for its result on CPU, which hangs with many in flight."""
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        can_hang = _compat.CPU_HANGS_WHEN_FULL and is_cpu and mesh.size > 1
        if self._is_throttled or not can_hang:
            return
        self._is_throttled = True
        call_at_once = self.call

        def call_and_maybe_wait(*args: Any, **kwargs: Any) -> Any:
            output = call_at_once(*args, **kwargs)
            return jax.block_until_ready(output) if next(_is_sixteenth_call) else output

        self.call = call_and_maybe_wait
        if self._decorated_call is call_at_once:  # else it calls `self.call`, which waits now
            self.wrap(call_and_maybe_wait)


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


# Each CPU device takes 32 executions. Dispatch of one more waits: perhaps in the middle of a call,
# of which other devices have their part, and wait in a collective for a device that never comes.
# So every sixteenth call of this process waits for its own result. `next` takes 30 ns.
_is_sixteenth_call = itertools.cycle([*[False] * 15, True])
