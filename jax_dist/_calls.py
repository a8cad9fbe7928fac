"""Facts about the user's code for messages: the call on the stack, its line and arguments."""

import contextlib
import functools
import inspect
import linecache
import os
import re
import reprlib
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np

from jax_dist.errors import display_path

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
LIBRARIES = (
    *(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, jaxlib, np)),
    OURS,
    contextlib.__file__,  # its frames stand between a guard and the block
    "<frozen",
)


def check_ends_in_one_call(func: Callable[..., Any], guard: str) -> None:
    """Raise TypeError for a generator or coroutine function, which `guard` cannot decorate."""
    is_generator = inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func)
    if is_generator or inspect.iscoroutinefunction(func):
        raise TypeError(
            f"{guard} cannot guard {func.__qualname__}: a generator or coroutine pauses, and "
            "other code runs in its thread. Decorate the function of one step."
        )


class ArgumentInfo(NamedTuple):
    """Properties of an argument that its program depends on, as text: no array is kept alive."""

    type: str  # "float32[8,4]", with "~" for a weak type; the class of what is no array
    sharding: str  # "uncommitted" if it is not bound to devices
    value: str  # of Python values, which may be static; "" for arrays
    is_host: bool  # a NumPy array or a Python value


class CompiledCall(NamedTuple):
    """A call that JAX compiles: of a function of the user, or of an operation of JAX."""

    name: str
    line: str  # of the call, as "train.py:40"
    arguments: dict[str, ArgumentInfo]  # by path, as "batch['x']"
    source: str = ""  # of the function, as "train.py:12"; empty for an operation of JAX
    fun: Callable[[], Any] = lambda: None  # a weak reference to the function


def call_on_stack(name: str) -> CompiledCall:
    """Return the call of the user's code that JAX, in this thread, is about to compile.

    `name` is JAX's for the program, such as "jit(step)", and is used if no function is found.
    """
    # When the user calls `step(x)`, a jit object, the stack has the user's frames, then those of
    # JAX. The first of these was called with `x`; in one of them, `step` is a local variable.
    _, library_frames = _split_stack()
    name, line = name.removeprefix("jit(").removesuffix(")"), user_line()
    try:
        functions = list(_functions(library_frames))
        fun: Any = next((f for f in functions if not _is_of_library(f)), None)
        while hasattr(fun, "lower"):  # a jit or pmap object
            fun = fun.__wrapped__
        operation = next((f for f in functions if getattr(f, "__name__", None) == name), None)
        leaves = leaves_by_path(fun or operation, *_read_arguments(library_frames[0]))
        arguments = {path: _describe(leaf) for path, leaf in leaves.items()}
        if fun is None:  # an operation of JAX, such as jnp.add
            return CompiledCall(name, line, arguments)
        name = getattr(getattr(fun, "func", fun), "__name__", name)
        return CompiledCall(name, line, arguments, definition(fun) or str(name), weakref.ref(fun))
    except Exception:  # noqa: BLE001, objects of the user may raise anything where they are read
        return CompiledCall(name, line, {})


def _read_arguments(frame: FrameType) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments (args, kwargs) of the call that a frame belongs to."""
    names, varargs, keywords, values = inspect.getargvalues(frame)
    # With varargs, it is a method `__call__(self, *args, **kwargs)`, else perhaps the user's.
    args = [values[name] for name in names if name != "self" or not varargs]
    return [*args, *(values[varargs] if varargs else ())], values[keywords] if keywords else {}


def _functions(frames: Sequence[FrameType]) -> Iterator[Callable[..., Any]]:
    """Yield the functions among the local variables of frames, and those that our pmaps map."""
    for frame in frames:
        values, self = [*frame.f_locals.values()], frame.f_locals.get("self")
        if type(self).__module__.startswith("jax_dist."):
            values.insert(0, getattr(self, "__wrapped__", getattr(self, "fun", None)))
        yield from filter(callable, values)


def _code(fun: Any) -> types.CodeType | None:
    """Return the code of a function, or of the function that a wrapper or a partial calls."""
    for _ in range(100):  # wrappers around one function; more is a function that wraps itself
        inner = fun.func if isinstance(fun, functools.partial) else getattr(fun, "__wrapped__", fun)
        if inner is fun:
            break
        fun = inner
    call = inspect.getattr_static(type(fun), "__call__", None)
    for code in (getattr(fun, "__code__", None), getattr(call, "__code__", None)):
        if isinstance(code, types.CodeType):  # types.FunctionType itself has a descriptor
            return code
    return None


def definition(fun: Any) -> str:
    """Return where a callable is defined: "train.py:10", of its first decorator; "" if unknown."""
    code = _code(fun)
    return "" if code is None else f"{display_path(code.co_filename)}:{code.co_firstlineno}"


def _is_of_library(fun: Any) -> bool:
    """Return whether a callable is a class, or belongs to Python, JAX, NumPy or this package."""
    code = _code(fun)
    if code is not None:
        return code.co_filename.startswith(LIBRARIES)
    module = str(getattr(type(fun), "__module__", None))
    return isinstance(fun, type) or module.split(".")[0] in ("builtins", "jax", "jaxlib", "numpy")


def leaves_by_path(fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of the arguments of a call of `fun`, by paths such as "batch['x']"."""
    try:
        named = inspect.signature(fun).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # `fun` is None, or built in and has no signature
        named = {**{f"argument {number}": arg for number, arg in enumerate(args)}, **kwargs}
    leaves = {}
    for name, value in named.items():
        try:
            paths = jax.tree.leaves_with_path(value)
        except Exception:  # noqa: BLE001, a static argument may be no tree, as {1: ..., "a": ...}
            paths = [((), value)]
        leaves |= {name + jax.tree_util.keystr(path): leaf for path, leaf in paths}
    return leaves


def user_code(trace: TracebackType | None) -> tuple[str, str, dict[str, ArgumentInfo]]:
    """Return the innermost line of the user's code in a traceback, with the variables in it.

    That is "train.py:12", its source, and the leaves of the variables by path. JAX dispatches calls
    in C++, where no frame has their arguments.
    """
    steps = zip(traceback.walk_tb(trace), traceback.extract_tb(trace), strict=True)
    steps = [step for step in steps if not step[1].filename.startswith(LIBRARIES)]
    if not steps:
        return user_line(), "an operation", {}
    (frame, _), summary = steps[-1]
    line = summary.lineno or 1
    lines = linecache.getlines(summary.filename, frame.f_globals)[line - 1 : summary.end_lineno]
    text = " ".join(map(str.strip, lines))
    namespace = {**frame.f_globals, **frame.f_locals}
    variables = {}
    for word in re.findall(r"\w+", text):
        with contextlib.suppress(Exception):  # no variable, or an object that raises when read
            leaves = leaves_by_path(None, (), {word: namespace[word]})
            variables |= {path: _describe(leaf) for path, leaf in leaves.items()}
    return f"{display_path(summary.filename)}:{line}", text, variables


def _describe(leaf: Any) -> ArgumentInfo:
    """Return the properties of an array, a number, or a static argument."""
    if isinstance(leaf, jax.Array):
        sharding = str(leaf.sharding) if leaf.committed else "uncommitted"
        return ArgumentInfo(str(jax.typeof(leaf)), sharding, "", is_host=False)
    try:
        text = str(jax.typeof(leaf))
    except Exception:  # noqa: BLE001, JAX raises for what is no array, or its own code does
        text = type(leaf).__name__
    value = "" if isinstance(leaf, np.ndarray | np.generic) else reprlib.repr(leaf)
    return ArgumentInfo(text, "uncommitted", value, is_host=True)


def _split_stack() -> tuple[FrameType | None, list[FrameType]]:
    """Return the user's innermost frame, and the library frames below, in the order of calls."""
    frame, library_frames = inspect.currentframe(), list[FrameType]()
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        library_frames.append(frame)
        frame = frame.f_back
    return frame, library_frames[::-1]


def user_line() -> str:
    """Return the line of the user's innermost frame, as "train.py:12"."""
    frame, _ = _split_stack()
    return "?" if frame is None else f"{display_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the user's innermost line; `skip_file_prefixes` came with Python 3.12."""
    _, library_frames = _split_stack()
    warnings.warn(text, category, stacklevel=len(library_frames))
