"""Stands in for what maps functions, and for `jax.jit`, so that their results are recorded."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from typing import Any

from .recorder import CallRecorder, MappedPlace, RecordedSite

_LIBRARIES = ("jax", "jaxlib", "jax_dist")  # what these map inside is not the user's call
_INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for name, folder in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_DEPTH = 8  # frames that name where a function was mapped


def hooked(module: str, name: str, real: Callable, recorder: CallRecorder) -> Callable:
    """`real`, whose results are recorded; the same in all else.

    Args:
      module: where it will be found, also by pickle.
      name: "pmap", "mapped" (of a helper in migrated code), "shard_map" or "jit".
      real: what it is without us.
      recorder: writes the calls.
    """
    wrap = _jitted if name == "jit" else _mapped

    @functools.wraps(real)
    def make(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        given = bool(args) and callable(args[0])
        is_library = frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
        if is_library or type(frame.f_locals.get("self")).__name__ == "_Program":
            return real(*args, **kwargs)  # a part of what is recorded
        if not given and callable(kwargs.get("fun")):  # pmap takes it by name too
            args, kwargs = (kwargs["fun"], *args), {k: v for k, v in kwargs.items() if k != "fun"}
        elif not given and not args:  # a decorator with options
            return functools.partial(make, **kwargs)
        elif not given:  # a mistake; let it say so
            return real(*args, **kwargs)
        return wrap(name, real, recorder, frame, args, kwargs)

    make.__module__ = module
    make._is_recorded = True  # pyright: ignore[reportAttributeAccessIssue]
    return make


def _mapped(
    name: str,
    real: Callable,
    recorder: CallRecorder,
    frame: Any,
    args: tuple,
    kwargs: dict[str, Any],
) -> Recorded:
    site = recorder.site(name, _place(frame), _name_of(args[0]))
    static = _positions(kwargs.get("static_broadcasted_argnums"))
    return Recorded(real(_bare(args[0]), *args[1:], **kwargs), site, recorder, static)


def _jitted(
    name: str,
    real: Callable,
    recorder: CallRecorder,
    frame: Any,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """A jit of a mapped function is that mapped function; any other is a witness of its own."""
    fun, *rest = args
    inner = _mapped_within(fun)
    if inner is not None:
        site = inner._recorded_site
    elif _is_users(frame.f_code.co_filename, recorder):
        site = recorder.site(name, _place(frame), _name_of(fun))
    else:
        return real(*args, **kwargs)
    static = _positions(kwargs.get("static_argnums"))
    if inner is not None and inner is fun and not static:
        static = inner._recorded_static
    names = kwargs.get("static_argnames") or ()
    names = (names,) if isinstance(names, str) else tuple(names)
    return Recorded(real(_bare(fun), *rest, **kwargs), site, recorder, static, names)


class Recorded:
    """A mapped or jitted function that has its first calls written down."""

    def __init__(
        self,
        function: Callable,
        site: RecordedSite,
        recorder: CallRecorder,
        static: tuple[int, ...],
        static_names: tuple[str, ...] = (),
    ):
        self._recorded_function = function
        self._recorded_site = site
        self._recorded_by = recorder
        self._recorded_static = static
        self._recorded_static_names = static_names
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._recorded_by.open(self._recorded_site, (args, kwargs))
        if call is None:
            return self._recorded_function(*args, **kwargs)
        call.given(*self._recorded_arguments(args, kwargs))
        leaves, tree = call.types(args, kwargs)
        with call:
            result = self._recorded_function(*args, **kwargs)
            call.returned(result)
            call.traced(self._recorded_function, leaves, tree)
        return result

    def _recorded_arguments(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Without those that are constants: they need not be arrays, nor trees."""
        static = {position % len(args) for position in self._recorded_static if args}
        dynamic = tuple(None if i in static else arg for i, arg in enumerate(args))
        names = self._recorded_static_names
        return dynamic, {name: arg for name, arg in kwargs.items() if name not in names}

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


def _bare(fun: Any) -> Any:
    return fun._recorded_function if isinstance(fun, Recorded) else fun


def _mapped_within(fun: Any) -> Recorded | None:
    while isinstance(fun, functools.partial):
        fun = fun.func
    is_mapped = isinstance(fun, Recorded) and fun._recorded_site.kind != "jit"
    return fun if is_mapped else None


def _positions(numbers: int | Iterable[int] | None) -> tuple[int, ...]:
    if numbers is None:
        return ()
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _name_of(fun: Any) -> str:
    """Of the function that the user wrote, under partial objects and wrappers."""
    for _ in range(_DEPTH):
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif inspect.ismethod(fun):
            fun = fun.__func__
        elif hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        else:
            break
    return getattr(fun, "__qualname__", type(fun).__qualname__)


def _place(frame: Any) -> MappedPlace:
    file, line, instruction = frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
    within: list[str] = []
    while frame is not None and frame.f_code.co_filename == file and len(within) < _DEPTH:
        code = frame.f_code
        within.append(getattr(code, "co_qualname", code.co_name))
        frame = frame.f_back
    return MappedPlace(os.path.realpath(file), line, instruction, within)


def _is_users(file: str, recorder: CallRecorder) -> bool:
    file = os.path.realpath(file)
    return file in recorder.files or not file.startswith(_INSTALLED)
