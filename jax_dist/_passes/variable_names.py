"""The user's name for an array, found in the function that captures it.

Searched are what a function closes over, the globals that its code names, the objects that its
methods belong to, and all functions that it reaches in these. A name starts again at each function,
because the user sees it there.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np

from jax_dist._calls import LIBRARIES, definition
from jax_dist._passes.constants import Identity, array_identity

_FUNCTIONS = 1_000  # a search ends here; what was not found by then has no name
_DEPTH = 2  # of objects in objects; containers do not count


def find_names(fun: Callable, arrays: Collection[Identity]) -> dict[Identity, tuple[str, str]]:
    """Return the names of arrays, and the lines where the functions begin that capture them.

    Args:
      fun: the user's function, or any callable; also wrapped, by `jax.jit` or the like.
      arrays: the ones to name. Those that `fun` does not reach are not in the result.
    """
    names: dict[Identity, tuple[str, str]] = {}
    queue = [fun]  # breadth-first
    seen = {id(fun): fun}  # with the objects, so that no other gets their address
    for holder in queue:
        for variable_name, variable in _variables(holder):
            for name, leaf in _leaves(variable, variable_name, _DEPTH):
                if callable(leaf) and id(leaf) not in seen and len(seen) < _FUNCTIONS:
                    seen[id(leaf)] = leaf
                    queue.append(leaf)
                # "" is the name of what users have no name for.
                is_named_array = name and isinstance(leaf, jax.Array | np.ndarray)
                identity = array_identity(leaf) if is_named_array else None
                if identity in arrays:
                    names.setdefault(identity, (name, definition(holder)))
        if len(names) == len(arrays):
            break
    return names


def _variables(fun: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a callable can reach, as (name, value).

    The name is "" for a callable that is only passed through, such as `__wrapped__`: the search
    goes on inside it, and names start again there.
    """
    if isinstance(fun, types.MethodType):
        yield "self", fun.__self__
        yield "", fun.__func__
    elif isinstance(fun, functools.partial):
        yield from ((f"args[{number}]", value) for number, value in enumerate(fun.args))
        yield from fun.keywords.items()
        yield "", fun.func
    elif isinstance(fun, types.FunctionType):
        yield "", vars(fun).get("__wrapped__")
        code = fun.__code__
        # The names in the code of a library mean nothing to the user.
        is_library = code.co_filename.startswith(LIBRARIES)
        for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                yield "" if is_library else name, cell.cell_contents
        for name in sorted(_names_in(code) & fun.__globals__.keys()) if not is_library else ():
            yield name, fun.__globals__[name]
    else:  # an object that is called; a jit, custom_jvp or custom_vjp has functions as attributes
        yield "self", fun
        methods = vars(type(fun)).values()
        yield from (("", method) for method in methods if isinstance(method, types.FunctionType))


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals that some code names, also in the functions defined in it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a pytree, and of attributes of its leaves down to `depth` objects."""
    try:
        leaves = jax.tree_util.tree_leaves_with_path(value)
    except Exception:  # noqa: BLE001  # of a node that cannot be flattened, as keys without order
        return
    for path, leaf in leaves:
        leaf_name = name and name + jax.tree_util.keystr(path)
        yield leaf_name, leaf
        if depth and not isinstance(leaf, jax.Array | types.FunctionType | types.ModuleType):
            attributes = getattr(leaf, "__dict__", {})
            for key in sorted(attributes, key=lambda key: key.startswith("_")):  # public ones first
                yield from _leaves(attributes[key], leaf_name and f"{leaf_name}.{key}", depth - 1)
