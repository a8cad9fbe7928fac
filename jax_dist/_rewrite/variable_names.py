"""The user's name for an array, found in the function that captures it.

Searched are what a function closes over, the globals that its code names, the objects that its
methods belong to, and all functions that it reaches in these. A name starts again at each function,
because the user sees it there.
"""

import collections
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_dist._rewrite.constants import Identity, array_identity
from jax_dist._rewrite.interpreter import OURS_AND_JAX
from jax_dist.errors import display_path

_FUNCTIONS = 1_000  # a search ends here; what was not found by then has no name
_DEPTH = 2  # of objects in objects; containers do not count


class ArraySource(NamedTuple):
    """Origin of an array."""

    name: str  # as the user would type it: "params['w']"
    captured_at: str  # "train.py:10", where the function begins that captures it


def definition(fun: Any) -> str:
    """Return where a callable is defined: "train.py:10", of its first decorator; "" if unknown."""
    for _ in range(100):  # wrappers around one function; more is a function that wraps itself
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif (wrapped := getattr(fun, "__wrapped__", None)) is not None:
            fun = wrapped
        else:
            break
    call = inspect.getattr_static(type(fun), "__call__", None)
    for code in (getattr(fun, "__code__", None), getattr(call, "__code__", None)):
        if isinstance(code, types.CodeType):  # types.FunctionType itself has a descriptor
            return f"{display_path(code.co_filename)}:{code.co_firstlineno}"
    return ""


def find_names(fun: Callable, arrays: Mapping[Identity, Any]) -> dict[Identity, ArraySource]:
    """Return the names of arrays as seen from `fun`; without those that it does not reach.

    `fun` is the user's function, or any callable; also wrapped, by `jax.jit` or the like.
    """
    missing, names = set(arrays), dict[Identity, ArraySource]()
    queue = collections.deque([fun])
    seen = {id(fun): fun}  # with the objects, so that no other gets their address
    while queue and missing and len(seen) < _FUNCTIONS:
        fun = queue.popleft()
        line = definition(fun)
        for name, variable in _variables(fun):
            for path, leaf in _leaves(variable, name, _DEPTH):
                if callable(leaf) and id(leaf) not in seen:
                    seen[id(leaf)] = leaf
                    queue.append(leaf)
                identity = array_identity(leaf) if path and _is_array(leaf) else None
                if identity in missing:
                    names[identity] = ArraySource(path, line)
                    missing.remove(identity)
    return names


def _variables(fun: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of what a callable holds; other callables without a name."""
    if isinstance(fun, types.MethodType):
        yield "self", fun.__self__
        yield "", fun.__func__
    elif isinstance(fun, functools.partial):
        yield from ((f"args[{number}]", value) for number, value in enumerate(fun.args))
        yield from fun.keywords.items()
        yield "", fun.func
    elif isinstance(fun, types.FunctionType):
        yield "", vars(fun).get("__wrapped__")
        yield from _variables_of_function(fun)
    else:
        # Of jit, custom_jvp and custom_vjp; else an object that is called.
        attributes = getattr(fun, "__dict__", {})
        yield from (
            ("", attributes.get(name)) for name in ("__wrapped__", "fun", "jvp", "fwd", "bwd")
        )
        if not isinstance(fun, type) and not _is_library(type(fun).__module__):
            yield "self", fun
            methods = vars(type(fun)).values()
            yield from (
                ("", method) for method in methods if isinstance(method, types.FunctionType)
            )


def _variables_of_function(fun: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = fun.__code__
    # The names in JAX's code, and ours, mean nothing to the user.
    is_library = code.co_filename.startswith(OURS_AND_JAX)
    for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True):
        try:
            yield "" if is_library else name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    if not is_library:
        for name in sorted(_names_in(code) & fun.__globals__.keys()):
            yield name, fun.__globals__[name]


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals that some code names, also in the functions defined in it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a pytree, and of the objects in it, with their names."""
    try:
        leaves = jax.tree_util.tree_leaves_with_path(value)
    except Exception:  # noqa: BLE001  # of a node that cannot be flattened, as keys without order
        return
    for path, leaf in leaves:
        leaf_name = name and name + jax.tree_util.keystr(path)
        yield leaf_name, leaf
        if depth and not isinstance(leaf, jax.Array | types.FunctionType):
            attributes = getattr(leaf, "__dict__", {})
            if isinstance(leaf, types.ModuleType):
                is_plain = not _is_library(leaf.__name__)
                attributes = {key: v for key, v in attributes.items() if is_plain and _is_array(v)}
            for key in sorted(attributes, key=lambda key: key.startswith("_")):  # public ones first
                yield from _leaves(attributes[key], f"{leaf_name}.{key}", depth - 1)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _is_library(module: str) -> bool:
    return module.split(".")[0] in ("jax", "jaxlib", "numpy")
