"""What a Python function says of itself: where it begins, and the names in its code."""

import functools
import inspect
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_dist.passes.interpreter import place_of

_WRAPPERS = 100  # around one function; more is a function that wraps itself
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (os.path.dirname(__file__), jax.__file__)
)


def definition(fun: Any) -> str:
    """Where a callable is defined: "train.py:10", of its first decorator; "" if unknown."""
    code = _code(fun)
    return "" if code is None else place_of(code.co_filename, code.co_firstlineno)


def _code(fun: Any) -> types.CodeType | None:
    """The code of the user's function in a callable."""
    for _ in range(_WRAPPERS):
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif isinstance(fun, types.MethodType):
            fun = fun.__func__
        elif "__wrapped__" in getattr(fun, "__dict__", {}):
            fun = fun.__wrapped__
        elif isinstance(fun, types.FunctionType):
            return fun.__code__
        else:
            fun = inspect.getattr_static(type(fun), "__call__", None)
    return None


def is_library_code(code: types.CodeType) -> bool:
    """Whether the code is JAX's or ours, whose names mean nothing to the user."""
    return code.co_filename.startswith(_LIBRARIES)


def names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that some code names, also in the functions defined in it."""
    return frozenset(name for inner in _codes(code) for name in inner.co_names)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def first_parameter(function: types.FunctionType) -> str:
    """Mostly "self"."""
    return function.__code__.co_varnames[0] if function.__code__.co_argcount else "self"


def parameter(fun: Callable, place: int) -> str:
    """The name of a positional parameter of a callable."""
    code = _code(fun)
    if code is None or place >= code.co_argcount:
        return f"args[{place}]"
    return code.co_varnames[place]


def positional_defaults(function: types.FunctionType) -> dict[str, Any]:
    """The default values of parameters, without the keyword-only ones."""
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return dict(zip(names[len(names) - len(values) :], values, strict=True))
