"""The user's name for an array, found in the function that captures it.

Searched breadth first, so that the shortest path wins: what a function closes over, its defaults,
the globals that its code names, what it wraps, and inside containers and objects. A path starts
again at each function, because the user sees the name there.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jax_dist._rewrite.constants import Identity, array_identity
from jax_dist._rewrite.interpreter import OURS_AND_JAX
from jax_dist.errors import display_path

Kind: TypeAlias = Literal["closure", "global", "default", "partial", "attribute", ""]

_OBJECTS = 5_000  # a search ends here; what was not found by then has no name
_ITEMS = 1_000  # of one container
_DEPTH = 8  # of steps from a function
_WRAPPERS = 100  # around one function; more is a function that wraps itself
_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic, np.dtype, range, slice)


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySource:
    """Origin of an array."""

    name: str  # as the user would type it: "params['w']"
    kind: Kind
    captured_at: str  # "train.py:10", where the function begins that captures it


def definition(fun: Any) -> str:
    """Return where a callable is defined: "train.py:10", of its first decorator; "" if unknown."""
    code = _code(fun)
    return "" if code is None else f"{display_path(code.co_filename)}:{code.co_firstlineno}"


def _code(fun: Any) -> types.CodeType | None:
    """Return the code of the user's function in a callable."""
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


def find_names(fun: Callable, arrays: Mapping[Identity, Any]) -> dict[Identity, ArraySource]:
    """Return the names of arrays as seen from `fun`; without those that it does not reach.

    `fun` is the user's function, or any callable; also wrapped, by `jax.jit` or the like.
    """
    missing, names = dict(arrays), dict[Identity, ArraySource]()
    queue = collections.deque([_Node(fun, "", "", definition(fun), 0)] if missing else [])
    seen = {id(fun): fun}  # with the objects, so that no other gets their address
    wide: list[_Node] = []  # 64-bit NumPy arrays, of which a program has a 32-bit copy
    while queue and missing and len(seen) < _OBJECTS:
        for node in _children(queue.popleft()):
            value = node.value
            if isinstance(value, _PLAIN) or id(value) in seen or node.depth > _DEPTH:
                continue
            seen[id(value)] = value
            if not isinstance(value, jax.Array | np.ndarray):
                queue.append(node)
            elif (identity := array_identity(value)) in missing:
                names[identity] = node.source
                del missing[identity]
            elif isinstance(value, np.ndarray) and value.dtype.itemsize >= 8:
                wide.append(node)
    for identity, array in missing.items():
        nodes = [node for node in wide if _converts_to(node.value, array)]
        if len(nodes) == 1:  # else it cannot be told which is meant
            names[identity] = nodes[0].source
    return names


def _converts_to(wide: np.ndarray, array: Any) -> bool:
    return (
        isinstance(array, np.ndarray)
        and (wide.shape, wide.dtype.kind) == (array.shape, array.dtype.kind)
        and np.array_equal(wide.astype(array.dtype), array, equal_nan=array.dtype.kind in "fc")
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """An object that was reached, and how."""

    value: Any
    name: str
    kind: Kind
    at: str
    depth: int

    @property
    def source(self) -> ArraySource:
        return ArraySource(self.name, self.kind, self.at)

    def inside(self, suffix: str, value: Any) -> "_Node":
        """Return a part of this object."""
        name, kind = (self.name or "self") + suffix, self.kind or "attribute"
        return _Node(value, name, kind, self.at, self.depth + 1)

    def behind(self, value: Any) -> "_Node":
        """Return an object that the user knows by the same name."""
        return dataclasses.replace(self, value=value, depth=self.depth + 1)


def _children(node: _Node) -> Iterator[_Node]:
    """Yield what one step leads to from an object."""
    value = node.value
    match value:
        case types.FunctionType():
            yield from _of_function(value)
        case types.MethodType():
            code = _code(value)
            name = code.co_varnames[0] if code and code.co_argcount else "self"
            yield _Node(value.__self__, name, "attribute", definition(value), 0)
            yield node.behind(value.__func__)
        case functools.partial():
            yield from _of_partial(node, value)
        case types.ModuleType():
            if value.__name__.split(".")[0] not in ("jax", "jaxlib", "numpy"):
                for name, item in itertools.islice(vars(value).items(), _ITEMS):
                    if isinstance(item, jax.Array | np.ndarray):
                        yield node.inside(f".{name}", item)
        case Mapping():
            for key, item in itertools.islice(value.items(), _ITEMS):
                yield node.inside(f"[{key!r}]", item)
        case list() | tuple() | collections.deque():
            fields = getattr(type(value), "_fields", None)  # of a namedtuple
            for place, item in enumerate(itertools.islice(value, _ITEMS)):
                yield node.inside(f"[{place}]" if fields is None else f".{fields[place]}", item)
        case _:
            yield from _of_object(node, value)


def _of_function(function: types.FunctionType) -> Iterator[_Node]:
    wrapped, code = vars(function).get("__wrapped__"), function.__code__
    if wrapped is not None:
        yield _Node(wrapped, "", "", definition(wrapped), 0)
    # The names in JAX's code, and ours, mean nothing to the user.
    is_library = code.co_filename.startswith(OURS_AND_JAX)
    at = definition(function)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not is_library or callable(value):
            yield _Node(value, name, "closure", at, 0)
    if is_library:
        return
    values = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    defaults = [*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()]
    for name, value in defaults:
        yield _Node(value, name, "default", at, 0)
    for name in sorted(_names_in(code) & function.__globals__.keys()):
        yield _Node(function.__globals__[name], name, "global", at, 0)


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the globals that some code names, also in the functions defined in it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _of_partial(node: _Node, partial: functools.partial) -> Iterator[_Node]:
    code = _code(partial.func)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    numbered = [f"args[{place}]" for place in range(len(names), len(partial.args))]
    arguments = [*zip((*names, *numbered), partial.args, strict=False), *partial.keywords.items()]
    for name, value in arguments:
        yield _Node(value, name, "partial", definition(partial), 0)
    yield node.behind(partial.func)


def _of_object(node: _Node, value: Any) -> Iterator[_Node]:
    attributes = _attributes(value)
    if type(value).__module__.split(".")[0] in ("jax", "jaxlib"):
        for name in ("__wrapped__", "fwd", "bwd", "jvp"):  # of jit, custom_vjp, custom_jvp
            if callable(attributes.get(name)):
                yield node.behind(attributes[name])
        return
    for name in sorted(attributes, key=lambda name: name.startswith("_")):  # stable: public first
        # nnx.Variable keeps its array here, and users write `kernel[...]`.
        suffix = "[...]" if name == "_raw_value" else f".{name}"
        yield node.inside(suffix, attributes[name])
    if isinstance(value, type):
        return
    for base in type(value).__mro__:  # the methods, which read globals
        for name, method in vars(base).items():
            if isinstance(method, types.FunctionType) and name != "__init__":
                yield node.behind(method)


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds in `__dict__` and in slots. Properties are not run."""
    attributes = dict(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slot = vars(owner).get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    attributes.setdefault(name, slot.__get__(value))
                except AttributeError:  # not set
                    continue
    return attributes
