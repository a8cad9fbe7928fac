"""The program of a function for given arguments as JSON, without names and lines of source.

Types of parameters that are not known here are written as opaque, and no proof takes these.
"""

from __future__ import annotations

import enum
import hashlib
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

_ROW = 64  # elements of a constant that may be one number for each device
_SIZES = (1, 2, 4, 8)  # numbers of devices that a program is traced for

# What changes neither numbers nor placement: names, caches, and rules of derivatives, of which the
# program of a call has no need any more.
_DROPPED = frozenset(
    ("name", "debug_info", "inline", "keep_unused", "ctx_mesh", "resource_env", "bwd", "rewrite")
    + ("symbolic_zeros", "num_consts", "out_trees", "_split_transpose")
    + ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk")
)
_ONLY_IN_CALLS = frozenset(("num_consts",))  # elsewhere it says which inputs are constants
_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_PLAIN = frozenset(
    ("GatherDimensionNumbers", "ScatterDimensionNumbers", "ConvDimensionNumbers")
    + ("DotDimensionNumbers", "RaggedDotDimensionNumbers", "FTTuple", "FTPyTree")
)


def text(function: Callable, arguments: list[Any]) -> dict[str, Any]:
    """The program of a call, traced and not run, in JSON's types.

    Raises:
      Exception: whatever the function raises when it is traced.
    """
    return _Writer().closed(jax.make_jaxpr(function)(*arguments))


def _mapped_dimensions(program: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """The size of the mapped axis, and the dimension of each input that is cut along it.

    Raises:
      ValueError: nothing is mapped over one axis.
    """
    sizes: set[int] = set()
    found: dict[int, int] = {}

    def walk(part: dict[str, Any], inputs: list[Any]) -> None:
        known = {each[0]: each_input for each, each_input in zip(part["in"], inputs, strict=True)}
        for primitive, parameters, operands, _ in part["eqns"]:
            given = [known.get(each) if isinstance(each, int) else None for each in operands]
            if primitive in ("jit", "pjit"):
                walk(parameters["jaxpr"]["jaxpr"], given)
            elif primitive == "shard_map":
                sizes.add(int(np.prod([size for _, size in parameters["mesh"]["mesh"]])))
                for each, spec in zip(given, parameters["in_specs"], strict=True):
                    cut = [i for i, names in enumerate(spec["spec"]) if names]
                    if each is not None and cut:
                        found[each] = cut[0]

    walk(program, list(range(len(program["in"]))))
    if len(sizes) != 1 or not found:
        raise ValueError("nothing is mapped")
    return sizes.pop(), found


class _Writer:
    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._count = 0
        self._names: list[Any] = []  # of axes that are no text

    def closed(self, closed: Any) -> dict[str, Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = getattr(closed, "consts", ()) or ()
        return {
            "in": [self._bound(each) for each in jaxpr.invars],
            "consts": [
                [self._bound(variable)[0], _type(variable.aval), _digest(value), *_element(value)]
                for variable, value in zip(jaxpr.constvars, consts, strict=True)
            ],
            "eqns": [self._equation(each) for each in jaxpr.eqns],
            "out": [self._operand(each) for each in jaxpr.outvars],
            "weak": [bool(getattr(each.aval, "weak_type", False)) for each in jaxpr.outvars],
        }

    def _equation(self, equation: Any) -> list[Any]:
        primitive = equation.primitive.name
        kept = _DROPPED if primitive in _CALLS else _DROPPED - _ONLY_IN_CALLS
        parameters = {
            name: self._value(value)
            for name, value in sorted(_with_counts(equation.params).items())
            if name not in kept
        }
        if any(type(each).__name__ != "NamedAxisEffect" for each in equation.effects):
            parameters["effects"] = {"opaque": "effects"}
        operands = [self._operand(each) for each in equation.invars]
        return [primitive, parameters, operands, [self._bound(each) for each in equation.outvars]]

    def _bound(self, variable: Any) -> list[Any]:
        self._count += 1
        self._numbers[variable] = self._count
        return [self._count, _type(variable.aval)]

    def _operand(self, variable: Any) -> int | str:
        if hasattr(variable, "val"):
            return f"{_type(variable.aval)} {_literal(variable.val, variable.aval)}"
        return self._numbers[variable]

    def _value(self, value: Any) -> Any:
        """One parameter; what is not known is opaque."""
        if value is None or isinstance(value, bool | int | str):
            return value if not isinstance(value, enum.Enum) else str(value)
        if isinstance(value, float | complex):
            return {"number": repr(value)}
        if isinstance(value, enum.Enum):
            return str(value)
        if isinstance(value, np.integer):
            return int(value)
        if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            return {"jaxpr": _Nested(self).closed(value)}
        if isinstance(value, PartitionSpec):
            return {"spec": [self._axes(each) for each in value]}
        if isinstance(value, Mesh | AbstractMesh):
            return self._mesh(value)
        if isinstance(value, NamedSharding):
            return {"sharding": [self._mesh(value.mesh), self._value(value.spec)]}
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return {"array": _digest(value)}
        if isinstance(value, np.dtype):
            return f"dtype {value}"
        return self._structure(value)

    def _structure(self, value: Any) -> Any:
        if type(value).__name__ in ("UnspecifiedValue", "PRNGImpl"):
            return f"{type(value).__name__} {getattr(value, 'tag', '')}"
        if isinstance(value, tuple | list) or type(value).__name__ in _PLAIN:
            kind = type(value).__name__
            fields = value if isinstance(value, tuple | list) else tuple(vars(value).items())
            items = [self._value(each) for each in fields]
            return items if kind in ("tuple", "list") else {"named": [kind, items]}
        if isinstance(value, dict):
            pairs = [[self._value(key), self._value(each)] for key, each in value.items()]
            return {"dict": sorted(pairs, key=repr)}
        if isinstance(value, set | frozenset):
            return {"set": sorted((self._value(each) for each in value), key=repr)}
        if isinstance(value, type) and issubclass(value, np.generic):
            return f"dtype {np.dtype(value)}"
        if value in self._names:
            return self._name(value)
        return {"opaque": type(value).__name__}

    def _mesh(self, mesh: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "mesh": [[self._name(name), size] for name, size in mesh.shape.items()],
            "kinds": [str(each) for each in getattr(mesh, "axis_types", None) or ()],
        }
        if isinstance(mesh, Mesh):
            found["devices"] = [device.id for device in mesh.devices.flat]
        return found

    def _axes(self, entry: Any) -> list[Any]:
        """The names that one dimension is cut along."""
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        return [self._name(name) for name in names]

    def _name(self, name: Any) -> str:
        """Of an axis; it may be any object."""
        if isinstance(name, str):
            return name
        if name not in self._names:
            self._names.append(name)
        return f"axis {self._names.index(name)}"


class _Nested(_Writer):
    """A program inside another one, which sees nothing of it."""

    def __init__(self, outer: _Writer):
        super().__init__()
        self._names = outer._names


def _with_counts(parameters: dict[str, Any]) -> dict[str, Any]:
    """Those of a scan with the numbers of constants and carries, which jax 0.12 has as trees."""
    if "ft_in" not in parameters:
        return parameters
    consts, carries, _ = (len(each) for each in parameters["ft_in"].unpack())
    counts = {"num_consts": consts, "num_carry": carries}
    return {k: v for k, v in parameters.items() if k not in ("ft_in", "ft_out")} | counts


def _type(aval: Any) -> str:
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    placed = f" {spec}" if spec is not None and any(each is not None for each in spec) else ""
    if not hasattr(aval, "shape"):
        return f"{aval}"
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{placed}"


def _literal(value: Any, aval: Any) -> str:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return _digest(value)
    return np.asarray(value, aval.dtype).tobytes().hex()


def _digest(value: Any) -> str:
    """Of the bytes of an array."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"key {_digest(jax.random.key_data(value))}"
    if not isinstance(value, np.ndarray | np.generic | jax.Array | bool | int | float | complex):
        return f"opaque {type(value).__name__}"
    array = np.asarray(value)
    data = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype}{list(array.shape)} {data}"


def _element(value: Any) -> Iterator[str]:
    """What all elements of a row are, as a literal; nothing where they differ."""
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 1 and 0 < value.size <= _ROW:
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return
        elements = {element.tobytes() for element in np.asarray(value)}
        if len(elements) == 1:
            yield f"{value.dtype}[] {elements.pop().hex()}"


def other_sizes(program: dict[str, Any], leaves: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    """The inputs of a mapped program for other numbers of devices."""
    try:
        size, dimensions = _mapped_dimensions(program)
    except ValueError:
        return
    for other in _SIZES:
        if other == size or other > jax.device_count():
            continue
        resized = list(leaves)
        for number, dimension in dimensions.items():
            shape = list(np.shape(leaves[number]))
            shape[dimension] = other
            resized[number] = leaves[number].update(shape=tuple(shape))
        yield other, resized


def described(
    leaves: list[Any], make: Callable[[list[int]], dict[str, Any]], *, numbers: bool = True
) -> tuple[dict[str, Any], bool]:
    """The texts of a call, or why there are none; and whether they hold for its numbers alone.

    Python's numbers are arguments where the function takes them as such, else part of it.

    Args:
      leaves: of the arguments and keywords, with types in place of arrays.
      make: the texts, by the positions of the leaves that are arguments.
      numbers: whether numbers of Python are arguments, where that can be.
    """
    if any(isinstance(each, Iterator) for each in leaves):
        return {"why": "it takes an iterator"}, True
    why = ""
    for is_argument in (_is_number_or_array, _is_array)[not numbers :]:
        try:
            found = make([i for i, leaf in enumerate(leaves) if is_argument(leaf)])
        except Exception as error:  # noqa: BLE001  # whatever the program raises when traced
            why = f"it cannot be traced: {type(error).__name__}"
        else:
            return {**found, "environment": _environment()}, is_argument is _is_array
    return {"why": why}, True


def of_leaves(
    call: Callable[[Any, Any], Any], leaves: list[Any], tree: Any, given: list[int]
) -> Callable:
    """A call as a function of some of the leaves of its arguments."""

    def program(*arguments: Any) -> Any:
        own = list(leaves)
        for i, argument in zip(given, arguments, strict=True):
            own[i] = argument
        return call(*tree.unflatten(own))

    return program


def _environment() -> dict[str, Any]:
    """What a program depends on beside its text."""
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "devices": jax.device_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_number_or_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct | bool | int | float | complex)


def abstract(leaf: Any) -> Any:
    """The type of an array; all else as it is."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def signature(leaf: Any, *, whole: bool) -> Any:
    """What a program may depend on in an argument: the type, or the whole of a Python value."""
    if _is_array(leaf):
        return (tuple(leaf.shape), str(leaf.dtype), getattr(leaf, "weak_type", False))
    if not whole and _is_number_or_array(leaf):
        return type(leaf)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


_ENOUGH = 32  # of one function


class ProgramTexts:
    """Those of one process.

    Args:
      write: takes the event of a new one.
    """

    def __init__(self, write: Callable[..., None]):
        self._write = write
        self._known: dict[Any, tuple[int, Any]] = {}  # with what has an id, so that it lives on
        self._counts: dict[int, int] = {}  # by site
        self._thread = threading.local()

    @property
    def is_tracing(self) -> bool:
        """Whether what runs in this thread runs for its text alone."""
        return getattr(self._thread, "is_tracing", False)

    def number(
        self, site: int, function: Callable, leaves: list[Any], tree: Any, *, numbers: bool = True
    ) -> int | None:
        """The number of the program of a call; it is written down where it is new.

        Args:
          site: where the function was mapped.
          function: what was called.
          leaves: of the arguments and keywords, with types in place of arrays.
          tree: their structure.
          numbers: whether numbers of Python are arguments, where that can be.

        Returns:
          None where there is none, and for what is called in too many ways.
        """
        identity = _identity(function)
        keys = [
            (site, identity, tree, *(signature(leaf, whole=whole) for leaf in leaves))
            for whole in (False, True)
        ]
        for key in keys:
            if key in self._known:
                return self._known[key][0]
        if self._counts.get(site, 0) == _ENOUGH:
            return None
        self._counts[site] = self._counts.get(site, 0) + 1
        found, whole = self._text(function, leaves, tree, numbers=numbers)
        number = len(self._known)
        self._known[keys[whole]] = number, (function, leaves)
        self._write(event="text", site=site, number=number, **found)
        return number

    def _text(
        self, function: Callable, leaves: list[Any], tree: Any, *, numbers: bool
    ) -> tuple[dict[str, Any], bool]:
        paths = tree.unflatten(range(tree.num_leaves))
        paths = [path[1:] for path, _ in jax.tree_util.tree_flatten_with_path(paths)[0]]

        def make(given: list[int]) -> dict[str, Any]:
            program = of_leaves(lambda args, kwargs: function(*args, **kwargs), leaves, tree, given)
            self._thread.is_tracing = True
            try:
                found = text(program, [leaves[i] for i in given])
            finally:
                self._thread.is_tracing = False
            return {"text": found, "paths": [jax.tree_util.keystr(paths[i]) for i in given]}

        return described(leaves, make, numbers=numbers)


def _identity(function: Any) -> Any:
    """The same for the lambdas that one expression makes, one each time, of the same values."""
    if not isinstance(function, types.LambdaType) or function.__defaults__:
        return id(function)
    return function.__code__, *(id(cell.cell_contents) for cell in function.__closure__ or ())
