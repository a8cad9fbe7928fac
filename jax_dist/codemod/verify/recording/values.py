"""Whether two values are the same: types, bits, placement. What cannot be told is not the same."""

from __future__ import annotations

import enum
import struct
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Difference: TypeAlias = tuple[str, str]  # "structure", "type", "unknown" and so on; what differs

_SHOWN = 60  # characters of a value
_BY_VALUE = (type(None), bool, int, str, bytes, range, slice, type(Ellipsis))
_BY_IDENTITY = (type, types.ModuleType, enum.Enum)
# Their `==` compares all that they are.
_OF_JAX = (jax.sharding.Sharding, jax.sharding.PartitionSpec, jax.sharding.Mesh, np.dtype)
_MOST = 1000  # elements of a set
_KNOWN = (*sys.stdlib_module_names, "numpy")  # whose objects say truly what they are made of
_TAKE_APART = ("__reduce__", "__reduce_ex__", "__getstate__")


def differences(old: Any, new: Any) -> Iterator[Difference]:
    """What differs, leaf by leaf; of functions, nothing is known."""
    ones, others = jax.tree_util.tree_flatten_with_path(old), jax.tree_util.tree_flatten(new)
    if ones[1] != others[1]:
        yield "structure", f"{_short(ones[1])} before, {_short(others[1])} after"
        return
    nodes = zip(_nodes(ones[1]), _nodes(others[1]), strict=True)
    if found := _least(_same(one, other, {}) for one, other in nodes):
        yield found, f"what the structure holds: {_short(ones[1])}"
    for (path, one), other in zip(ones[0], others[0], strict=True):
        where = jax.tree_util.keystr(path)
        for kind, said in _of_leaves(one, other):
            yield kind, f"{where}: {said}" if where else said


def is_function(value: Any) -> bool:
    """Whether it is a function to call, and no array or class."""
    return isinstance(value, Callable) and not isinstance(value, jax.Array | np.ndarray | type)


def _nodes(structure: Any) -> Iterator[Any]:
    """What a tree holds beside its leaves."""
    yield structure.node_data()
    for child in structure.children():
        yield from _nodes(child)


def _least(found: Iterator[bool | None]) -> str:
    """What several answers come to; nothing where all are the same."""
    answers = {*found}
    return "value" if False in answers else "unknown" if None in answers else ""


def _of_leaves(old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, jax.Array) and isinstance(new, jax.Array):
        yield from _of_arrays(old, new)
    elif is_function(old) and is_function(new):
        return
    elif isinstance(old, jax.Array | np.ndarray) and isinstance(new, jax.Array | np.ndarray):
        if type(old) is not type(new):
            yield "type", f"{type(old).__name__} before, {type(new).__name__} after"
        if not _same_bits(np.asarray(old), np.asarray(new)):
            yield "value", f"{_short(old)} before, {_short(new)} after"
    elif (found := _same(old, new, {})) is None:
        yield "unknown", f"a value of {type(old).__name__} cannot be compared"
    elif not found:
        yield "value", f"{_short(old)} before, {_short(new)} after"


def _of_arrays(old: jax.Array, new: jax.Array) -> Iterator[Difference]:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        kinds = (f"{each.dtype}{list(each.shape)}" for each in (old, new))
        yield "type", " before, ".join(kinds) + " after"
        return
    if getattr(old, "weak_type", False) != getattr(new, "weak_type", False):
        yield "type", "a weak type on one side only"
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        old, new = jax.random.key_data(old), jax.random.key_data(new)
    ones, others = (  # what each device holds, by its number
        {shard.device.id: (str(shard.index), np.asarray(shard.data)) for shard in shards}
        for shards in (old.addressable_shards, new.addressable_shards)
    )
    where = [{key: index for key, (index, _) in each.items()} for each in (ones, others)]
    if where[0] != where[1]:
        count, new_count = (len(each.sharding.device_set) for each in (old, new))
        if count != new_count:
            yield "placement", f"on {count} devices before, on {new_count} after"
        else:
            yield "placement", "other slices on the devices, or another order of them"
        same = _same_bits(np.asarray(old), np.asarray(new))
    else:
        same = all(_same_bits(data, others[key][1]) for key, (_, data) in ones.items())
    if not same:
        yield "value", _how_far(np.asarray(old), np.asarray(new))


def _same_bits(old: np.ndarray, new: np.ndarray) -> bool:
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    if old.dtype.hasobject:
        return _same(old.tolist(), new.tolist(), {}) is True
    return np.ascontiguousarray(old).tobytes() == np.ascontiguousarray(new).tobytes()


def _same(old: Any, new: Any, seen: dict[tuple[int, int], Any]) -> bool | None:
    """Whether two objects are the same in all that they are made of; None: it cannot be told.

    Neither `==` nor `repr` is asked where the program may have written it.
    """
    if old is new or (id(old), id(new)) in seen:
        return True
    if type(old) is not type(new):
        return False
    seen[id(old), id(new)] = old, new  # so that both live, and no other object gets their number
    match old:
        case _ if type(old) in _BY_VALUE:
            return old == new
        case _ if type(old) in (float, complex):
            return _bits(old) == _bits(new)
        case _ if isinstance(old, _BY_IDENTITY):
            return False
        case _ if isinstance(old, _OF_JAX):
            return bool(old == new)
        case jax.Array():
            return not any(_of_arrays(old, new))
        case np.ndarray() | np.generic():
            return _same_bits(np.asarray(old), np.asarray(new))
        case types.FunctionType() if old.__code__ is not new.__code__:
            return None
    try:
        ones, others = _parts(old), _parts(new)
    except Exception:  # noqa: BLE001  # whatever its own way to be taken apart raises
        return None
    if ones is None or others is None:
        return None
    if len(ones) != len(others):
        return False
    found = _least(_same(one, other, seen) for one, other in zip(ones, others, strict=True))
    return None if found == "unknown" else not found


def _bits(number: complex) -> bytes:
    return struct.pack("dd", number.real, number.imag)


def _parts(value: Any) -> list[Any] | None:
    """What an object is made of, in order; None where its own code would say it."""
    if type(value) in (tuple, list):
        return [*value]
    if type(value) is dict:
        return [each for item in value.items() for each in item]
    if type(value) in (set, frozenset):
        plain = len(value) <= _MOST and all(type(each) in _BY_VALUE for each in value)
        return sorted(value, key=lambda e: (type(e).__name__, repr(e))) if plain else None
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [each.cell_contents for each in value.__closure__ or ()]
        return [value.__defaults__, value.__kwdefaults__, *cells]
    kind = type(value)
    if kind.__module__.partition(".")[0] not in _KNOWN:
        changed = any(getattr(kind, name) is not getattr(object, name) for name in _TAKE_APART)
        arguments = getattr(kind, "__getnewargs__", None)
        if changed or (isinstance(arguments, types.FunctionType) and not hasattr(kind, "_fields")):
            return None
    parts = value.__reduce_ex__(4)
    if isinstance(parts, str):  # the name of a function
        return [parts]
    return [[*each] if isinstance(each, Iterator) else each for each in parts]


def _how_far(old: np.ndarray, new: np.ndarray) -> str:
    try:
        with np.errstate(all="ignore"):
            far = np.abs(old.astype(np.float64) - new.astype(np.float64))
        return f"differs by up to {float(np.nanmax(far)):.3g}"
    except (TypeError, ValueError):
        return "the values differ"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
