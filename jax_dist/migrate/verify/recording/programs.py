"""The program of a function for given arguments as JSON, without names and lines of source.

Types of parameters that are not known here are written as opaque, and no proof takes these.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import sys
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
# What stands around an equation, where it says nothing; of the mesh, the shard_map says it.
_USUAL_CONTEXT = {
    "cur_abstract_mesh": ...,
    "cur_layout_mode": "LayoutMode.AUTO",
    "manager": ...,
    "no_collectives": {"set": []},
    "remove_size_one_mesh_axis": False,
    "threefry_partitionable": True,
}
_WITH_RULE = re.compile(r"custom_\w+_call")
_PLAIN = frozenset(
    ("GatherDimensionNumbers", "ScatterDimensionNumbers", "ConvDimensionNumbers")
    + ("DotDimensionNumbers", "RaggedDotDimensionNumbers", "FTTuple", "FTPyTree")
)


def text(function: Callable, arguments: list[Any]) -> dict[str, Any]:
    """The program of a call, traced and not run, in JSON's types.

    Raises:
      Exception: whatever the function raises when it is traced.
    """
    return _Writer([]).closed(jax.make_jaxpr(function)(*arguments))


def described(value: Any) -> Any:
    """A value as a parameter is written; what is not known here is opaque."""
    return _Writer([])._value(value)


class _Writer:
    """Writes one program; another one inside it sees nothing of it but the names of axes."""

    def __init__(self, names: list[Any]):
        self._numbers: dict[Any, int] = {}
        self._count = 0
        self._names = names  # of axes that are no text

    def closed(self, closed: Any) -> dict[str, Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = getattr(closed, "consts", ())
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
        if equation.primitive not in _primitives_of_jax(len(sys.modules)):
            primitive = f"{primitive} (not of jax)"  # a user's may have any name
        kept = {"name"} if primitive == "composite" else set()  # a compiler may know it by that
        if not _WITH_RULE.fullmatch(primitive):  # elsewhere it says which inputs are constants
            kept.add("num_consts")
        dropped = _DROPPED - kept
        given = dict(equation.params)
        if "ft_in" in given:  # jax 0.12 has a scan's numbers of constants and carries as trees
            consts, carries, _ = (len(each) for each in given.pop("ft_in").unpack())
            given.pop("ft_out", None)
            given |= {"num_consts": consts, "num_carry": carries}
        parameters = {k: self._value(v) for k, v in sorted(given.items()) if k not in dropped}
        if any(type(each).__name__ != "NamedAxisEffect" for each in equation.effects):
            parameters["effects"] = {"opaque": "effects"}
        keys = (each.aval for each in (*equation.invars, *equation.outvars))
        if any(getattr(each, "dtype", None) not in _key_types() for each in keys if _is_key(each)):
            parameters["keys"] = {"opaque": "random keys of a user's own kind"}
        if context := self._context(equation):
            parameters["ctx"] = context
        operands = [self._operand(each) for each in equation.invars]
        return [primitive, parameters, operands, [self._bound(each) for each in equation.outvars]]

    def _context(self, equation: Any) -> dict[str, Any]:
        """What was set around an equation, such as `compute_on`, where it is not as usual."""
        context = getattr(equation, "ctx", None)
        found = {}
        for name in dir(context):
            usual = _USUAL_CONTEXT.get(name)
            value = getattr(context, name, None) if name[0] != "_" and usual is not ... else ...
            if value is ... or (name == "xla_metadata" and not value):
                continue
            # How random bits are drawn concerns what draws them.
            draws = equation.primitive.name.startswith(("random_", "threefry"))
            if (name != "threefry_partitionable" or draws) and self._value(value) != usual:
                found[name] = self._value(value)
        return found

    def _bound(self, variable: Any) -> list[Any]:
        self._count += 1
        self._numbers[variable] = self._count
        return [self._count, _type(variable.aval)]

    def _operand(self, variable: Any) -> int | str:
        if not hasattr(variable, "val"):
            return self._numbers[variable]
        aval, value = variable.aval, variable.val
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return f"{_type(aval)} {_digest(value)}"
        return f"{_type(aval)} {np.asarray(value, aval.dtype).tobytes().hex()}"

    def _value(self, value: Any) -> Any:
        """One parameter; what is not known is opaque."""
        kind = type(value).__name__
        match value:
            case enum.Enum():
                return str(value)
            case None | bool() | int() | str():
                return value
            case float() | complex():
                return {"number": repr(value)}
            case np.integer():
                return int(value)
            case _ if hasattr(value, "eqns"):
                return {"jaxpr": _Writer(self._names).closed(value)}
            case PartitionSpec():
                cut = (each if isinstance(each, tuple) else (each,) for each in value)
                return {"spec": [[self._name(e) for e in names if e is not None] for names in cut]}
            case Mesh() | AbstractMesh():
                return self._mesh(value)
            case NamedSharding():
                return {"sharding": [self._mesh(value.mesh), self._value(value.spec)]}
            case np.ndarray() | np.generic() | jax.Array():
                return {"array": _digest(value)}
            case np.dtype():
                return f"dtype {value}"
            case jax.Device():
                return {"device": [value.platform, value.id]}
            case _ if kind in ("UnspecifiedValue", "PRNGImpl"):
                return f"{kind} {getattr(value, 'tag', '')}"
            case tuple() | list():
                items = [self._value(each) for each in value]
                return items if kind in ("tuple", "list") else {"named": [kind, items]}
            case _ if kind in _PLAIN:
                return {"named": [kind, [self._value(each) for each in vars(value).items()]]}
            case dict():
                pairs = [[self._value(key), self._value(each)] for key, each in value.items()]
                return {"dict": sorted(pairs, key=repr)}
            case set() | frozenset():
                return {"set": sorted((self._value(each) for each in value), key=repr)}
            case type() if issubclass(value, np.generic):
                return f"dtype {np.dtype(value)}"
            case _ if kind == "Primitive" and value in _primitives_of_jax(len(sys.modules)):
                return {
                    "primitive": value.name
                }  # such as that which select_and_scatter_add selects by
        return self._name(value) if value in self._names else {"opaque": kind}

    def _mesh(self, mesh: Any) -> dict[str, Any]:
        found: dict[str, Any] = {
            "mesh": [[self._name(name), size] for name, size in mesh.shape.items()],
            "kinds": [str(each) for each in getattr(mesh, "axis_types", None) or ()],
        }
        if isinstance(mesh, Mesh):
            found["devices"] = [device.id for device in mesh.devices.flat]
        return found

    def _name(self, name: Any) -> str:
        """Of an axis; it may be any object."""
        if isinstance(name, str):
            return name
        if name not in self._names:
            self._names.append(name)
        return f"axis {self._names.index(name)}"


@functools.lru_cache(maxsize=1)
def _primitives_of_jax(_modules: int) -> frozenset[Any]:
    """Each is a global of one of JAX's modules; those that are loaded are asked."""
    from jax.extend.core import Primitive  # not above: jax is being imported then

    loaded = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "jax" and m]
    values = [value for module in loaded for value in list(vars(module).values())]
    return frozenset(value for value in values if isinstance(value, Primitive))


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.float32), jax.dtypes.prng_key)


@functools.cache
def _key_types() -> frozenset[Any]:
    """Those of JAX's own implementations."""
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    made = [jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)) for name in names]
    return frozenset(each.dtype for each in made)


def _type(aval: Any) -> str:
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    placed = f" {spec}" if spec is not None and any(each is not None for each in spec) else ""
    if not hasattr(aval, "shape"):
        return f"{aval}"
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{placed}"


def _digest(value: Any) -> str:
    """Of the bytes of an array."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"key {_digest(jax.random.key_data(value))}"
    if not isinstance(value, np.ndarray | np.generic | jax.Array | bool | int | float | complex):
        return f"opaque {type(value).__name__}"
    array = np.asarray(value)
    if array.dtype.hasobject:  # its bytes are addresses
        return "opaque objects"
    data = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype}{list(array.shape)} {data}"


def _element(value: Any) -> Iterator[str]:
    """What all elements of a row are, as a literal; nothing where they differ."""
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 1 and value.size <= _ROW:
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return
        elements = {element.tobytes() for element in np.asarray(value)}
        if len(elements) == 1:
            yield f"{value.dtype}[] {elements.pop().hex()}"


def other_sizes(program: dict[str, Any], leaves: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    """The inputs of a program that is mapped over one axis, for other numbers of devices."""
    sizes: set[int] = set()
    dimensions: dict[int, int] = {}  # of each input that is cut along the axis

    def walk(part: dict[str, Any], inputs: list[Any]) -> None:
        known = {number: each for (number, _), each in zip(part["in"], inputs, strict=True)}
        for primitive, parameters, operands, _ in part["eqns"]:
            given = [known.get(each) for each in operands]  # of literals, there is none
            if primitive == "jit":
                walk(parameters["jaxpr"]["jaxpr"], given)
            elif primitive == "shard_map":
                sizes.add(int(np.prod([size for _, size in parameters["mesh"]["mesh"]])))
                for each, spec in zip(given, parameters["in_specs"], strict=True):
                    cut = [i for i, names in enumerate(spec["spec"]) if names]
                    if each is not None and cut:
                        dimensions[each] = cut[0]

    walk(program, list(range(len(program["in"]))))
    for other in _SIZES if len(sizes) == 1 and dimensions else ():
        if other in sizes or other > jax.device_count():
            continue
        resized = list(leaves)
        for number, dimension in dimensions.items():
            shape = list(np.shape(leaves[number]))
            shape[dimension] = other
            resized[number] = leaves[number].update(shape=tuple(shape))
        yield other, resized
