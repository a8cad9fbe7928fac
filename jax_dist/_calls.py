"""Description of a call that a guard has stopped, from the stack or from the user's source line."""

import contextlib
import inspect
import linecache
import os
import re
import reprlib
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np

from jax_dist.errors import display_path

_LIBRARIES = (
    *(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, jaxlib, np)),
    os.path.dirname(__file__) + os.sep,
    contextlib.__file__,  # its frames stand between a guard and the block
    "<frozen",
)


class ArgumentInfo(NamedTuple):
    """Properties of an argument that its program depends on, as text: no array is kept alive."""

    type: str  # "float32[8,4]", with "~" for a weak type; of a static argument its class
    sharding: str
    value: str  # of Python values, which may be static
    is_host: bool


class Call(NamedTuple):
    """A call of a function of the user, or of an operation of JAX."""

    name: str
    line: str
    arguments: dict[str, ArgumentInfo]  # by path, as "batch['x']"
    source: str = ""  # of the function, as "train.py:12"; empty for an operation of JAX
    fun: Callable[[], Any] = lambda: None  # a weak reference


def call_on_stack(name: str) -> Call:
    """Return the call by the user's innermost frame; `name` is that of the program in JAX.

    The frame that the user's frame entered has the arguments, and one of the next the function.
    """
    _, inner = _user_frame()
    name = name.removeprefix("jit(").removesuffix(")")
    try:
        functions = list(_functions(inner))
        fun: Any = next((f for f in functions if not _is_of_library(f)), None)
        while hasattr(fun, "lower"):  # a jit or pmap object
            fun = fun.__wrapped__
        same_name = (f for f in functions if getattr(f, "__name__", None) == name)
        names, varargs, keywords, values = inspect.getargvalues(inner[0])
        args = [values[arg] for arg in names if arg != "self" or not varargs]
        args += values[varargs] if varargs else ()
        kwargs = values[keywords] if keywords else {}
        leaves = leaves_by_path(fun or next(same_name, None), args, kwargs)
        arguments = {path: _describe(leaf) for path, leaf in leaves.items()}
        if fun is None:
            return Call(name, user_line(), arguments)
        name = getattr(getattr(fun, "func", fun), "__name__", name)
        code = _code(fun)
        source = f"{display_path(code.co_filename)}:{code.co_firstlineno}" if code else str(name)
        return Call(name, user_line(), arguments, source, weakref.ref(fun))
    except Exception:  # noqa: BLE001, objects of the user may raise anything where they are read
        return Call(name, user_line(), {})


def _functions(frames: Sequence[FrameType]) -> Iterator[Callable[..., Any]]:
    """Yield the functions among the values of frames, and those that our objects map."""
    for frame in frames:
        self = frame.f_locals.get("self")
        if type(self).__module__.startswith("jax_dist."):
            yield from filter(callable, [getattr(self, "__wrapped__", getattr(self, "fun", None))])
        yield from filter(callable, frame.f_locals.values())


def _code(fun: Any) -> types.CodeType | None:
    return getattr(inspect.unwrap(getattr(fun, "func", fun)), "__code__", None)


def _is_of_library(fun: Any) -> bool:
    if code := _code(fun):
        return code.co_filename.startswith(_LIBRARIES)
    module = str(getattr(type(fun), "__module__", None))
    return isinstance(fun, type) or module.split(".")[0] in ("builtins", "jax", "jaxlib", "numpy")


def leaves_by_path(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of the arguments of a call of `fun`, by the path of parameter and leaf."""
    try:
        named = inspect.signature(fun).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        named = {**{f"argument {number}": arg for number, arg in enumerate(args)}, **kwargs}
    leaves = {}
    for name, value in named.items():
        try:
            paths = jax.tree.leaves_with_path(value)
        except Exception:  # noqa: BLE001, a static argument may be no tree, as {1: ..., "a": ...}
            paths = [((), value)]
        leaves |= {name + jax.tree_util.keystr(path): leaf for path, leaf in paths}
    return leaves


def variables_at(trace: TracebackType | None) -> tuple[str, str, dict[str, ArgumentInfo]]:
    """Return the user's line that raised, its text, and the leaves of the variables in it.

    A call that JAX runs in C++ leaves no frame: the source alone tells what was passed.
    """
    steps = zip(traceback.walk_tb(trace), traceback.extract_tb(trace), strict=True)
    steps = [pair for pair in steps if not pair[1].filename.startswith(_LIBRARIES)]
    if not steps:
        return user_line(), "an operation", {}
    (frame, _), step = steps[-1]
    line = step.lineno or 1
    lines = linecache.getlines(step.filename, frame.f_globals)[line - 1 : step.end_lineno]
    text = " ".join(map(str.strip, lines))
    known, infos = {**frame.f_globals, **frame.f_locals}, {}
    for word in re.findall(r"\w+", text):
        with contextlib.suppress(Exception):  # objects of the user may raise anything
            leaves = leaves_by_path(None, (), {word: known[word]})
            infos |= {path: _describe(leaf) for path, leaf in leaves.items()}
    return f"{display_path(step.filename)}:{line}", text, infos


def _describe(leaf: Any) -> ArgumentInfo:
    if isinstance(leaf, jax.Array):
        sharding = str(leaf.sharding) if leaf.committed else "uncommitted"
        return ArgumentInfo(str(jax.typeof(leaf)), sharding, "", is_host=False)
    try:
        text = str(jax.typeof(leaf))
    except Exception:  # noqa: BLE001, raised by JAX for a static argument, or by that
        text = type(leaf).__name__
    value = "" if isinstance(leaf, np.ndarray | np.generic) else reprlib.repr(leaf)
    return ArgumentInfo(text, "uncommitted", value, is_host=True)


def _user_frame() -> tuple[FrameType | None, list[FrameType]]:
    """Return the user's innermost frame, and the frames that it has entered, outermost first."""
    frame, inner = inspect.currentframe(), list[FrameType]()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        inner.insert(0, frame)
        frame = frame.f_back
    return frame, inner


def user_line() -> str:
    """Return the line of the user's innermost frame, as "train.py:12"."""
    frame, _ = _user_frame()
    return "?" if frame is None else f"{display_path(frame.f_code.co_filename)}:{frame.f_lineno}"
