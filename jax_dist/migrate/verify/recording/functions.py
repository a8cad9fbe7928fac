"""What stands in for functions that map, and for mapped ones; and what tells these apart."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_DEPTH = 8  # frames that name where a function was mapped
_SHOWN = 60  # characters of values
_SHOWN_TYPES = (bool, int, float, str)
_PLAIN = (*_SHOWN_TYPES, complex, bytes, type(None))  # their texts say all
_MOST = 100  # values that one function is told by; of the others, which objects they are


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


# --- what tells functions apart


class _Names:
    """Objects by their types and numbers: alike in processes that see them in the same order."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Callable[[], Any]]] = {}  # by id; is it still that one?
        self._counts: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)

    def of(self, value: Any, kind: str) -> str:
        """The name of an object, by what it is called."""
        known = self._known.get(id(value))
        if known is not None and known[1]() is value:
            return known[0]
        try:
            same = weakref.ref(value)
        except TypeError:
            if type(value).__module__ == "numpy":  # a scalar or a type, of which its text says all
                return repr(value)
            same = lambda: value  # or another one might take its place
        name = f"{kind} {next(self._counts[kind])}"
        self._known[id(value)] = name, same
        return name


_names = _Names()


def described(function: Any, options: Any = ()) -> str:
    """A function by its name, where it is written, and all that it holds.

    Of two that are made in a loop, with other values, each has to be called; so do two of one text
    that hold other functions, are methods of other objects, or of which one was loaded again.

    Args:
      function: that is mapped.
      options: how; two that are mapped in other ways each have to be called, too.
    """
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    where = _where(getattr(inner, "__code__", None), name)
    held = _held(function)
    plain = ", ".join(repr(each) for each in held if type(each) in _SHOWN_TYPES)
    told = _told(function, {}) + (_told(options, {}) if options else "")
    digest = hashlib.sha256(told.encode()).hexdigest()[:12]
    return f"{name} ({where}, {digest})" + (f" with {plain}"[:_SHOWN] if plain else "")


def _where(code: types.CodeType | None, name: str) -> str:
    where = f"line {code.co_firstlineno if code else 0}"
    if code and "<lambda>" in name:  # there may be several in a line
        where += f", column {max(column or 0 for _, _, column, _ in code.co_positions())}"
    return where


def _held(function: Any) -> list[Any]:
    """The values that a function has besides its arguments."""
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), *_held(function.func)]
    values = [*(getattr(function, "__defaults__", None) or ())]
    values += (getattr(function, "__kwdefaults__", None) or {}).values()
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            values.append(cell.cell_contents)
    return values


def _told(value: Any, seen: dict[int, int]) -> str:
    """What tells a value from others: of functions and containers, what they hold.

    Args:
      value: anything.
      seen: what it is a part of, and what came before; these get their numbers.
    """
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if id(value) in seen:
        return f"<{seen[id(value)]}>"
    if len(seen) == _MOST:
        return _names.of(value, kind.__qualname__)
    seen[id(value)] = len(seen)
    if kind is Recorded:
        return f"{value._recorded_site.number} {value._recorded_what}"
    if kind is functools.partial:
        parts = [value.func, value.args, value.keywords]
    elif kind is types.MethodType:
        parts = [value.__func__, value.__self__]
    elif kind is types.FunctionType:
        code, name = value.__code__, value.__qualname__
        # A module that is loaded again has other code at the same place.
        place = f"{name}, {code.co_filename}, {_where(code, name)}"
        parts = [_names.of(code, place), *_held(value), *filter(None, [vars(value)])]
    elif kind.__name__ == "PjitFunction":  # what jax.jit makes
        parts = [value.__wrapped__]
    elif kind is dict and len(value) <= _MOST:
        parts = [*value, *value.values()]
    elif (kind is list or issubclass(kind, tuple)) and len(value) <= _MOST:
        parts = [*value]
    else:
        return _names.of(value, kind.__qualname__)
    return f"{kind.__qualname__}({', '.join(_told(each, seen) for each in parts)})"
