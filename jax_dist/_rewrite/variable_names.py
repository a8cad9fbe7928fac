"""The user's name for an array, found in the code of the function that holds it."""

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
from jax_dist.errors import shown

_WRAPPERS = 100  # around one function; more is a function that wraps itself


def definition(fun: Any) -> str:
    """Where a callable is defined: "train.py:10", of its first decorator; "" if unknown."""
    code = _code(fun)
    return "" if code is None else f"{shown(code.co_filename)}:{code.co_firstlineno}"


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


def _is_library_code(code: types.CodeType) -> bool:
    """Whether its names mean nothing to the user: JAX's code, or ours."""
    return code.co_filename.startswith(OURS_AND_JAX)


def _names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that some code names, also in the functions defined in it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


# --- finds the user's name for an array: the path to it from the function that uses it
#
# Searched breadth first, so that the shortest path wins: what a function closes over, its defaults
# and the globals that it reads, the function that it wraps, and inside containers and objects. A
# path starts again at each function, because the user sees the name there.


Kind: TypeAlias = Literal["closure", "global", "default", "partial", "attribute", ""]

_OBJECTS = 20_000  # a search ends here; what was not found by then has no name
_ITEMS = 1_000  # of one container
_DEPTH = 24  # of steps from the function
_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic, np.dtype, range, slice)
_JAX_PACKAGES = ("jax", "jaxlib")


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySource:
    """Where an array comes from."""

    name: str  # as the user would type it: "params['w']"
    kind: Kind
    captured_at: str  # "train.py:10", where the function begins that captures it


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """An object that was reached, and how."""

    value: Any
    name: str
    kind: Kind
    at: str
    used: frozenset[str]  # the names in the code that leads here
    depth: int

    def inside(self, suffix: str, value: Any) -> "_Node":
        """A part of this object."""
        return dataclasses.replace(
            self,
            value=value,
            name=(self.name or "self") + suffix,
            kind=self.kind or "attribute",
            depth=self.depth + 1,
        )

    def source(self) -> ArraySource:
        return ArraySource(self.name, self.kind, self.at)

    def same_name(self, value: Any) -> "_Node":
        """An object behind this one, which the user knows by the same name."""
        return dataclasses.replace(self, value=value, depth=self.depth + 1)


def find_names(fun: Callable, arrays: Mapping[Identity, Any]) -> dict[Identity, ArraySource]:
    """The names of some arrays, as seen from `fun`; without those that it does not reach.

    `fun` is the user's function, or any callable; also wrapped, by `jax.jit` or the like.
    """
    if not arrays:
        return {}
    search = _Search(dict(arrays), {}, [])
    search.from_callable(fun)
    search.match_converted()
    return search.found


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    missing: dict[Identity, Any]
    found: dict[Identity, ArraySource]
    wider: list[_Node]  # 64-bit NumPy arrays, of which a program has a 32-bit copy

    def from_callable(self, fun: Callable) -> None:
        start = _Node(fun, "", "", definition(fun), frozenset(), 0)
        queue = collections.deque([start])
        seen = {id(fun): fun}  # with the objects, so that no other gets their address
        while queue and self.missing and len(seen) < _OBJECTS:
            for child in _children(queue.popleft()):
                value = child.value
                if isinstance(value, _PLAIN) or id(value) in seen or child.depth > _DEPTH:
                    continue
                seen[id(value)] = value
                if isinstance(value, (jax.Array, np.ndarray)):
                    self._compare(child)
                else:
                    queue.append(child)

    def _compare(self, node: _Node) -> None:
        identity = array_identity(node.value)
        if identity in self.missing:
            self._name(identity, node.source())
        elif isinstance(node.value, np.ndarray):
            if node.value.dtype.itemsize >= 8 and node.value.dtype.kind in "iufc":
                self.wider.append(node)
            for identity, array in [*self.missing.items()]:
                if isinstance(array, np.ndarray) and np.may_share_memory(array, node.value):
                    view = f"view of {node.name}"
                    self._name(identity, ArraySource(view, node.kind, node.at))

    def _name(self, identity: Identity | None, found: ArraySource) -> None:
        self.found[identity] = found
        del self.missing[identity]

    def match_converted(self) -> None:
        """Names the 32-bit copies that JAX makes of 64-bit arrays, where only one can be meant."""
        for identity, array in [*self.missing.items()]:
            nodes = [node for node in self.wider if _converts_to(node.value, array)]
            if len(nodes) == 1:
                self._name(identity, nodes[0].source())


def _converts_to(wide: np.ndarray, array: Any) -> bool:
    return (
        isinstance(array, np.ndarray)
        and wide.shape == array.shape
        and wide.dtype.kind == array.dtype.kind
        and bool(
            (wide.flat[0].astype(array.dtype) == array.flat[0]) or array.flat[0] != array.flat[0]
        )
        and np.array_equal(wide.astype(array.dtype), array, equal_nan=array.dtype.kind in "fc")
    )


def _children(node: _Node) -> Iterator[_Node]:
    """What one step leads to from an object."""
    value = node.value
    match value:
        case types.FunctionType():
            yield from _of_function(node, value)
        case types.MethodType():
            function: Any = value.__func__
            if isinstance(function, types.FunctionType):
                yield from _of_self(node, value.__self__, function)
            yield node.same_name(function)
        case functools.partial():
            yield from _of_partial(node, value)
        case types.ModuleType() | type():
            yield from _of_namespace(node, value)
        case Mapping():
            for key, item in itertools.islice(value.items(), _ITEMS):
                yield node.inside(f"[{key!r}]", item)
        case list() | tuple() | collections.deque():
            fields = getattr(type(value), "_fields", None)  # of a namedtuple
            for place, item in enumerate(itertools.islice(value, _ITEMS)):
                suffix = f"[{place}]" if fields is None else f".{fields[place]}"
                yield node.inside(suffix, item)
        case _ if type(value).__module__.split(".")[0] in _JAX_PACKAGES:
            parts = getattr(value, "__dict__", {})
            for name in ("__wrapped__", "fwd", "bwd", "jvp"):  # of jit, custom_vjp, custom_jvp
                if callable(parts.get(name)):
                    yield node.same_name(parts[name])
        case _:
            yield from _of_object(node, value)


def _of_function(node: _Node, function: types.FunctionType) -> Iterator[_Node]:
    wrapped = vars(function).get("__wrapped__")
    if wrapped is not None:
        yield node.same_name(wrapped)
    code = function.__code__
    library = _is_library_code(code)
    here = functools.partial(
        _Node, at=definition(function), used=_names_in(code), depth=node.depth + 1
    )
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not library or callable(value):
            yield here(value, name, "closure")
    if library:  # the names in there are not the user's
        return
    values = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    defaults = [*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()]
    for name, value in defaults:
        yield here(value, name, "default")
    namespace = function.__globals__
    for name in sorted(_names_in(code) & namespace.keys()):
        yield here(namespace[name], name, "global")


def _of_self(node: _Node, owner: Any, function: types.FunctionType) -> Iterator[_Node]:
    """The object of a method, and the other methods that this one uses."""
    code = function.__code__
    used = _names_in(code)
    yield dataclasses.replace(
        node,
        value=owner,
        name=code.co_varnames[0] if code.co_argcount else "self",
        kind="attribute",
        at=definition(function),
        depth=node.depth + 1,
    )
    for name in sorted(used):
        helper = _class_function(type(owner), name)
        if helper is not None:
            yield node.same_name(types.MethodType(helper, owner))


def _class_function(owner: type, name: str) -> types.FunctionType | None:
    value = next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)
    return value if isinstance(value, types.FunctionType) else None


def _of_partial(node: _Node, partial: functools.partial) -> Iterator[_Node]:
    here = functools.partial(
        _Node, kind="partial", at=definition(partial), used=node.used, depth=node.depth + 1
    )
    code = _code(partial.func)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    for place, value in enumerate(partial.args):
        name = names[place] if place < len(names) else f"args[{place}]"
        yield here(value, name)
    for name, value in partial.keywords.items():
        yield here(value, name)
    yield node.same_name(partial.func)


def _of_namespace(node: _Node, owner: types.ModuleType | type) -> Iterator[_Node]:
    """Of a module or a class, only what the code names."""
    if owner.__name__.split(".")[0] in (*_JAX_PACKAGES, "numpy"):
        return
    for name in sorted(node.used & vars(owner).keys()):
        yield node.inside(f".{name}", vars(owner)[name])
    if isinstance(owner, type):
        for value in vars(owner).values():
            if isinstance(value, types.FunctionType) and not _is_library_code(value.__code__):
                yield node.same_name(value)


def _of_object(node: _Node, value: Any) -> Iterator[_Node]:
    attributes = _attributes(value)
    for name in sorted(attributes, key=lambda name: name.startswith("_")):  # stable: public first
        # nnx.Variable keeps its array here, and users write `kernel[...]`.
        suffix = "[...]" if name == "_raw_value" else f".{name}"
        yield node.inside(suffix, attributes[name])
    call = _class_function(type(value), "__call__")
    if call is not None and not _is_library_code(call.__code__):
        yield from itertools.islice(_of_self(node, value, call), 1, None)
        yield node.same_name(call)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds in `__dict__` and in slots. Properties are not run."""
    found = dict(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slot = vars(owner).get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found.setdefault(name, slot.__get__(value))
                except AttributeError:  # not set
                    continue
    return found
