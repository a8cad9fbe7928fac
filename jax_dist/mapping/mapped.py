"""The object that `jax_dist.pmap` returns."""

import functools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax

from jax_dist.mapping.dispatch import Dispatcher
from jax_dist.passes.variable_names import definition

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class _DocOfFunction:
    """That of the class, asked on the class; that of the function, asked on an object."""

    def __init__(self, of_class: str):
        self._of_class = of_class

    def __get__(self, mapped: Any, owner: type) -> str | None:
        return self._of_class if mapped is None else mapped.__wrapped__.__doc__


_CALL = ("__call__",)  # apart: a type checker takes a slot of that name for no method


class Mapped(Generic[P, R]):
    # The call stands in a slot of the object. Python looks `__call__` up in the class, where it
    # finds the slot, and calls what is in it: in the steady state a callable in C++, with no Python
    # in between. A method would cost as much again as all the rest.
    __slots__ = (
        *_CALL,
        "__dict__",
        "__name__",
        "__qualname__",
        "__weakref__",
        "__wrapped__",
        "_decorator",
        "_dispatcher",
    )
    __doc__ = _DocOfFunction(  # pyright: ignore[reportAssignmentType]
        """A function that is mapped over devices, called like the one that it was made from.

        It has that one's name, documentation, signature and attributes, and is a method where that
        would be one.

        Attributes:
          __wrapped__: the function that it was made from.
        """
    )
    if TYPE_CHECKING:  # an annotation would be taken for one of the function

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def __init__(self, fun: Callable[P, R], dispatcher: Dispatcher, decorator: Callable):
        """
        Args:
          fun: the function.
          dispatcher: makes the calls.
          decorator: makes the same of a function, to pickle it.
        """
        self.__wrapped__ = fun
        self.__name__: str = getattr(fun, "__name__", type(fun).__name__)
        self.__qualname__: str = getattr(fun, "__qualname__", self.__name__)
        own = getattr(fun, "__dict__", {})  # but for what would hide methods of this class
        self.__dict__.update({key: own[key] for key in own if not hasattr(Mapped, key)})
        self.__dict__["__module__"] = getattr(fun, "__module__", None)
        self.__dict__["__annotations__"] = getattr(fun, "__annotations__", {})
        self._dispatcher, self._decorator = dispatcher, decorator
        dispatcher.serve(self)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments, or for arguments of these types.

        Args:
          *args: as in a call; `jax.ShapeDtypeStruct` will do for arrays.
          **kwargs: the same.

        Returns:
          The program, on arguments that are cut over the devices. Compiled, it is called like this
          function; captured arrays are handed in behind the scenes.
        """
        return self._dispatcher.lower(*args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The jaxpr for these arguments, or for arguments of these types; see `jax.jit`."""
        return self._dispatcher.trace(*args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The types of the results for these arguments; nothing is compiled."""
        return self.trace(*args, **kwargs).out_info

    @property
    def jitted(self) -> Callable[P, R]:
        """The bare jit object, which moves no arguments, and says nothing of those it refuses."""
        return _keeping(self, self._dispatcher.jitted)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> "Mapped[P, R]": ...
    @overload
    def __get__(
        self: "Mapped[Concatenate[Any, Q], R]", instance: object, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        where = definition(self.__wrapped__)
        # chex tells functions that JAX traces from others by "pmap." in this text.
        return f"<jax_dist.pmap.Mapped of {self.__qualname__}{f' at {where}' if where else ''}>"

    def __copy__(self) -> "Mapped[P, R]":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mapped[P, R]":
        return self

    def __reduce__(self) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
        """By name where a name leads here, as functions are pickled; else what it was made of."""
        found: Any = sys.modules.get(self.__dict__["__module__"] or "")
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is self:
            return self.__qualname__
        return self._decorator, (self.__wrapped__,)


def _keeping(mapped: Mapped, call: Callable) -> Any:
    """`call`, keeping the function alive: in `pmap(lambda x: x).jitted` nothing else does."""
    kept: Any = functools.partial(call)  # Any: its class declares no such names
    kept.mapped, kept.lower, kept.trace = mapped, mapped.lower, mapped.trace
    return kept
