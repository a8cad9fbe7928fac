"""What stands in for functions that map, and for mapped ones; and what tells these apart."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_DEPTH = 8  # frames that name where a function was mapped
_SHOWN = 60  # characters of values


class Recorded:
    """A mapped or jitted function that has its calls written down."""

    def __init__(
        self,
        function: Callable,
        site: Any,
        what: str,
        static: tuple[int, ...],
        call: Callable[[tuple, dict[str, Any]], Any],
    ):
        self._recorded_function, self._recorded_call = function, call
        self._recorded_site, self._recorded_what, self._recorded_static = site, what, static
        self.__doc__, self.__module__ = function.__doc__, function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorded_call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_recorded"):  # copied or unpickled before __init__
            raise AttributeError(name)
        return getattr(self._recorded_function, name)

    def __repr__(self) -> str:
        return repr(self._recorded_function)

    # Spelled out, for `isinstance(f, jax.stages.Wrapped)` asks the class.
    @property
    def lower(self) -> Any:
        return self._recorded_function.lower  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def trace(self) -> Any:
        return self._recorded_function.trace  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def eval_shape(self) -> Any:
        return self._recorded_function.eval_shape  # pyright: ignore[reportFunctionMemberAccess]


class OfPlaces:
    """What maps functions, as some places have handed it on: what it makes is theirs.

    It equals what it stands for, so that a program that compares goes the same way.

    Args:
      maker: the function that it stands for.
      make: takes the frame of the caller, the places, the arguments and the keywords.
      places: their numbers.
    """

    def __init__(self, maker: Callable, make: Callable, places: frozenset[int]):
        functools.update_wrapper(self, maker)
        self._recorded_maker, self._recorded_places = maker, places
        self._recorded_make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorded_make(sys._getframe(1), self._recorded_places, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return self._recorded_maker is getattr(other, "_recorded_maker", other)

    def __hash__(self) -> int:
        return hash(self._recorded_maker)

    def __reduce__(self) -> Any:  # another process has places of its own
        return functools.partial, (self._recorded_maker,)

    def __repr__(self) -> str:
        return repr(self._recorded_maker)


def name_of(fun: Any) -> str:
    """Of the function that the user wrote, under partial objects and wrappers."""
    for _ in range(_DEPTH):
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        else:
            break
    return getattr(fun, "__qualname__", type(fun).__qualname__)


def place_of(frame: Any) -> dict[str, Any]:
    """Where a frame is, as `CallRecorder._site` takes it."""
    file, line, instruction = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
    within: list[str] = []
    while frame is not None and frame.f_code.co_filename == file and len(within) < _DEPTH:
        code = frame.f_code
        within.append(getattr(code, "co_qualname", code.co_name))
        frame = frame.f_back
    file = os.path.realpath(file)
    return {"file": file, "line": line, "instruction": instruction, "within": within}


def described(function: Any) -> str:
    """A function by its name, where it is written, and the values that it closes over.

    Of two that are made in a loop, with other values, each has to be called.
    """
    values: list[Any] = []
    while isinstance(function, functools.partial):
        values += [*function.args, *function.keywords.values()]
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    values += getattr(function, "__defaults__", None) or ()
    values += (getattr(function, "__kwdefaults__", None) or {}).values()
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            values.append(cell.cell_contents)
    plain = [repr(each) for each in values if type(each) in (bool, int, float, str)]
    with_values = f" with {', '.join(plain)}"[:_SHOWN] if plain else ""
    arrays = [str(id(each)) for each in values if hasattr(type(each), "shape")]
    code = getattr(function, "__code__", None)
    where = f"line {code.co_firstlineno if code else 0}"
    if code and "<lambda>" in name:  # there may be several in a line
        where += f", column {max(column or 0 for _, _, column, _ in code.co_positions())}"
    return f"{name} ({', '.join([where, *arrays])}){with_values}"
