"""Whether two values are the same: bits, types, placement; says what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_SHOWN = 60  # characters of a value


class Difference(NamedTuple):
    """What is not the same of two values."""

    kind: str  # "structure", "type", "placement" or "value"
    said: str


def differences(old: Any, new: Any) -> Iterator[Difference]:
    """What differs, leaf by leaf; of functions, nothing is known."""
    ones, others = jax.tree_util.tree_flatten_with_path(old), jax.tree_util.tree_flatten(new)
    if ones[1] != others[1]:
        yield Difference("structure", f"{_short(ones[1])} before, {_short(others[1])} after")
        return
    for (path, one), other in zip(ones[0], others[0], strict=True):
        where = jax.tree_util.keystr(path)
        for kind, said in _of_leaves(one, other):
            yield Difference(kind, f"{where}: {said}" if where else said)


def _of_leaves(old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, jax.Array) and isinstance(new, jax.Array):
        yield from _of_arrays(old, new)
    elif is_function(old) and is_function(new):
        return
    elif isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        if type(old) is not type(new) or not _same_bits(old, new):
            yield Difference("value", f"{_short(old)} before, {_short(new)} after")
    elif isinstance(old, jax.Array | np.ndarray) and isinstance(new, jax.Array | np.ndarray):
        kinds = (type(each).__name__ for each in (old, new))
        yield Difference("type", " before, ".join(kinds) + " after")
        if not _same_bits(np.asarray(old), np.asarray(new)):
            yield Difference("value", "the values differ")
    elif not _same_object(old, new):
        yield Difference("value", f"{_short(old)} before, {_short(new)} after")


def _of_arrays(old: jax.Array, new: jax.Array) -> Iterator[Difference]:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        yield Difference("type", f"{_typed(old)} before, {_typed(new)} after")
        return
    if _weak(old) != _weak(new):
        yield Difference("type", "a weak type on one side only")
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        old, new = jax.random.key_data(old), jax.random.key_data(new)
    ones, others = _shards(old), _shards(new)
    where = [{key: str(index) for key, (index, _) in each.items()} for each in (ones, others)]
    if where[0] != where[1]:
        yield Difference("placement", _placed(old, new))
        same = _same_bits(np.asarray(old), np.asarray(new))
    else:
        same = all(_same_bits(data, others[key][1]) for key, (_, data) in ones.items())
    if not same:
        yield Difference("value", _how_far(np.asarray(old), np.asarray(new)))


def _shards(array: jax.Array) -> dict[int, tuple[Any, np.ndarray]]:
    """What each device holds, by its number."""
    return {
        shard.device.id: (shard.index, np.asarray(shard.data)) for shard in array.addressable_shards
    }


def _placed(old: jax.Array, new: jax.Array) -> str:
    counts = [len(each.sharding.device_set) for each in (old, new)]
    if counts[0] != counts[1]:
        return f"on {counts[0]} devices before, on {counts[1]} after"
    return "other slices on the devices, or another order of them"


def _same_bits(old: np.ndarray, new: np.ndarray) -> bool:
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    if old.dtype == object:
        return _same_object(old.tolist(), new.tolist())
    return np.ascontiguousarray(old).tobytes() == np.ascontiguousarray(new).tobytes()


def _same_object(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    try:
        return bool(old == new) or repr(old) == repr(new)
    except Exception:  # noqa: BLE001  # whatever comparing means to the program's own types
        return False


def _how_far(old: np.ndarray, new: np.ndarray) -> str:
    try:
        with np.errstate(all="ignore"):
            far = np.abs(old.astype(np.float64) - new.astype(np.float64))
        return f"differs by up to {float(np.nanmax(far)):.3g}"
    except (TypeError, ValueError):
        return "the values differ"


def _weak(array: jax.Array) -> bool:
    return bool(getattr(array, "weak_type", False))


def _typed(array: jax.Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def is_function(value: Any) -> bool:
    """Whether it is a function to call, and no array or class."""
    return isinstance(value, Callable) and not isinstance(value, jax.Array | np.ndarray | type)
