"""The arrays of a call as JSON and as copies of their values; and what the tree around them is."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from . import programs

_ROWS = 64  # dimensions up to this size may be the device axis
_NUMBERS = (bool, int, float, complex, np.ndarray)  # of which a user may derive types
_UNKNOWN = "unknown"  # begins the type of what cannot be compared
_CONTAINERS = (tuple, list, dict)

# One array of a call: what is said of it, and a copy of its values, for the program may donate or
# overwrite it, in a dtype that numpy has.
Leaf: TypeAlias = tuple[dict[str, Any], np.ndarray]


def leaves(tree: Any, *, every: bool) -> list[Leaf]:
    """Those of a tree.

    Args:
      tree: arguments or a result.
      every: what is no number too; a host edit may give anything.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        (_number if is_number else _other)(jax.tree_util.keystr(path), leaf)
        for path, leaf in flat
        for is_number in [_says_all(leaf)]
        if is_number or every
    ]


def _says_all(leaf: Any) -> bool:
    """Whether it is a number or an array, and no more, as one of a user's type may be."""
    if isinstance(leaf, np.ndarray):
        return type(leaf) is np.ndarray and not leaf.dtype.hasobject
    return isinstance(leaf, jax.Array | np.generic) or type(leaf) in _NUMBERS


def _number(path: str, leaf: Any) -> Leaf:
    described = {"path": path, "dtype": str(getattr(leaf, "dtype", type(leaf).__name__))}
    described |= {"devices": 0, "parts": 0, "weak": bool(getattr(leaf, "weak_type", False))}
    if isinstance(leaf, jax.Array):
        described |= _placed(leaf.sharding, leaf.shape)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.is_fully_addressable:
            leaf = jax.device_get(leaf)
        else:  # of several processes: what this one has
            leaf = np.stack([jax.device_get(shard.data) for shard in leaf.addressable_shards])
    values = np.array(leaf)
    if values.dtype.isbuiltin != 1:
        # bfloat16, float8 and int4 as a larger type: the same numbers, without their library.
        values = values.astype(np.int8 if "int" in str(values.dtype) else np.float32)
    return {**described, "shape": list(values.shape)}, values


def as_traced(values: np.ndarray) -> np.ndarray:
    """The values that a traced function is given: of float64, those in float32, without x64."""
    return values.astype(jax.dtypes.canonicalize_dtype(values.dtype), copy=False)


@functools.lru_cache(maxsize=1000)
def _placed(sharding: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """How many devices hold an array, into how many parts it is cut, and which device has which."""
    found = {d.id: str(index) for d, index in sharding.devices_indices_map(shape).items()}
    where = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]
    return {"devices": len(found), "parts": len({*found.values()}), "placed": where}


def _other(path: str, leaf: Any) -> Leaf:
    """What is no number: its text, where that says all of it."""
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    text = said(leaf)
    values = np.frombuffer((text or "").encode(), np.uint8)
    dtype = f"{_UNKNOWN} {kind}" if text is None else kind
    described = {"path": path, "dtype": dtype, "shape": [values.size], "devices": 0, "parts": 0}
    return described, values


def said(value: Any) -> str | None:
    """All that a value is, as a text; None where only its own code would say it."""
    if type(value) in (str, bytes):
        return repr(value)
    if isinstance(value, _NUMBERS) and not _says_all(value):
        return None
    found = repr(programs.described(value))
    return None if "opaque" in found else found


def digests(values: np.ndarray) -> dict[str, Any]:
    """Enough to tell whether two large arrays are equal, also after a device axis went away."""
    rows = values if values.ndim and values.shape[0] <= _ROWS else ()
    return {
        "digest": _digest(values),
        "rows": [_digest(row) for row in rows],
        "mean": None if values.dtype.kind == "c" else float(np.mean(values, dtype=np.float64)),
    }


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


# --- the tree


def structure(result: Any, given: Any) -> str | None:
    """What a result is beside its leaves: the types of its nodes, and what these hold.

    What a node holds may be anything, such as a function of an optimizer. What came with the
    arguments is named by where it stood there.

    Returns:
      A text that says it all, in short; None where it cannot be told.
    """
    known: list[Any] = []
    for _, data in _nodes(jax.tree.structure(given)):
        known += _parts(data)
    found = [(kind, _held(data, known)) for kind, data in _nodes(jax.tree.structure(result))]
    if any(held is None for _, held in found):
        return None
    return f"{found[0][0]} {hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"


def _nodes(tree: Any) -> list[tuple[str, Any]]:
    """In order; of a leaf, nothing is held."""
    found = tree.node_data()
    if found is None:
        return [("leaf", None)]
    kind, data = found
    own = [(f"{kind.__module__}.{kind.__qualname__}", data)]
    return own + [each for child in tree.children() for each in _nodes(child)]


def _parts(data: Any) -> list[Any]:
    if type(data) in _CONTAINERS:
        inner = data.items() if isinstance(data, dict) else data
        return [part for each in inner for part in _parts(each)]
    return [data]


def _held(data: Any, known: list[Any]) -> str | None:
    if type(data) in _CONTAINERS:
        inner = data.items() if isinstance(data, dict) else data
        parts = [_held(each, known) for each in inner]
        return None if None in parts else repr([type(data).__name__, *parts])
    if isinstance(data, type):
        return f"{data.__module__}.{data.__qualname__}"
    if dataclasses.is_dataclass(data) and not hasattr(data, "__slots__"):
        own = _held(dict(sorted(vars(data).items())), known)
        return None if own is None else f"{_held(type(data), known)} {own}"
    if (text := said(data)) is not None:
        return text
    return next((f"of arguments {i}" for i, each in enumerate(known) if _is(data, each)), None)


def _is(one: Any, other: Any) -> bool:
    """Whether two are one object; each time that a method is asked for, it is another one."""
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return one is other
