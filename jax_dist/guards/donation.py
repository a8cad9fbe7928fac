"""Donated arguments: whether their memory really went to the results, and if not, why not."""

import dataclasses
import types
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_dist import _compat
from jax_dist.errors import DonationError, refusal
from jax_dist.guards.descriptions import (
    devices_of,
    is_of_jax,
    line_of,
    shown_paths,
    text_of,
    user_frame,
)

_WORTH = 1024  # bytes: a counter or a key that is not donated is not worth a word
_SHOWN = 8  # leaves in one message

_Pointers = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DonatedLeaf:
    """A donated leaf or an output, as it was when the call came or went."""

    path: str
    type: str  # such as "float32[4]"
    shape: tuple[int, ...]
    on_device: bool
    placement: str
    pointers: _Pointers | None  # of its buffers, in the order of its devices; None: not known
    deleted: bool = False
    used: bool = True  # whether the program takes it


class DonationCheck:
    """What one thread remembers of its calls; all weak, so that it keeps no memory alive."""

    def __init__(self) -> None:
        # By function: weak references to the leaves of its last call, and to the outputs.
        self._last: weakref.WeakKeyDictionary[Any, tuple[list[Any], list[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def called(self, call: _compat.JitCall, *, checked: bool) -> None:
        """Notes what is donated.

        Raises:
          DonationError: the call before gave this argument, and nobody kept the one it came from.
        """
        forgotten = self._forgotten(call)
        if forgotten and checked:
            where = line_of(user_frame())
            raise refusal(
                DonationError,
                what=f"'{call.name}' is fed its own results and does not donate them, at {where}",
                which=_bullets(call, forgotten),
                why="the old value was dropped after the call, so both were in memory for nothing",
                do="Say donate_argnums where you jit it, or strict(donation=False).",
            )
        call.notes = [
            (place, _pointers(call.leaves[place]))
            for place, donated in enumerate(call.donated)
            if donated
        ]

    def returned(self, call: _compat.JitCall, outputs: Sequence[Any], *, checked: bool) -> None:
        """Compares with what came out.

        Raises:
          DonationError: a donated leaf is still there.
        """
        self._last[weak_key(call.fun)] = (
            [_weak(leaf) for leaf in call.leaves],
            [_weak(output) for output in outputs],
        )
        donated: list[tuple[int, _Pointers | None]] = call.notes or []
        if not donated or not checked or _all_taken(call, donated, outputs):
            return
        leaves = [
            _described(call.paths[i], call.leaves[i], pointers, used=i not in call.unused)
            for i, pointers in donated
        ]
        results = [
            _described(f"result {i}", value, _pointers(value)) for i, value in enumerate(outputs)
        ]
        kept = kept_leaves(leaves, results)
        if kept:
            where = line_of(user_frame())
            count = f"{len(kept)} donated argument{'s' * (len(kept) > 1)}"
            raise refusal(
                DonationError,
                what=f"'{call.name}' did not take the memory of {count}, at {where}",
                which=_bullets(call, kept),
                why="the memory of an argument can only become that of an output of the same type, "
                "on the same devices, if nothing else holds it",
                do="Mend that, or leave the argument out of donate_argnums.",
            )

    def _forgotten(self, call: _compat.JitCall) -> list[tuple[str, str]]:
        """Leaves that came out of the call before, where that call's own are gone: not donated."""
        last = None if is_of_jax(call.fun) else self._last.get(weak_key(call.fun))
        if last is None or len(last[0]) != len(call.leaves):
            return []
        inputs, outputs = last
        lines, size = [], 0
        results = {id(output()) for output in outputs}
        for place, leaf in enumerate(call.leaves):
            fed_back = isinstance(leaf, jax.Array) and id(leaf) in results
            if not fed_back or call.donated[place] or inputs[place]() is not None:
                continue
            lines.append((call.paths[place], f"is {text_of(leaf)}"))
            size += leaf.nbytes
        return lines if size >= _WORTH else []


def weak_key(fun: Any) -> Any:
    """What stands for a function that cannot be referred to weakly: its class."""
    return fun if isinstance(fun, types.FunctionType) else type(fun)


def _all_taken(
    call: _compat.JitCall, donated: Sequence[tuple[int, _Pointers | None]], outputs: Sequence[Any]
) -> bool:
    """The usual case, without words: all are gone, and a result lies where each of them was."""
    taken = {pointer for output in outputs for pointer in _pointers(output) or ()}
    for place, pointers in donated:
        leaf = call.leaves[place]
        if not isinstance(leaf, jax.Array) or not leaf.is_deleted():
            return False
        if pointers is not None and not taken.intersection(pointers):
            return False
    return True


def kept_leaves(
    donated: Sequence[DonatedLeaf], results: Sequence[DonatedLeaf]
) -> list[tuple[str, str]]:
    """Which donated leaves are still there, and why: path and reason.

    A leaf that is marked as deleted, while a result of its type and placement took other memory,
    is still there: JAX only hides it. Seen on 0.7.2 with memory shared with a NumPy array, as
    `device_put` leaves it on the CPU.
    """
    kept = []
    given = {pointer for leaf in donated for pointer in leaf.pointers or ()}
    free = [result for result in results if given.isdisjoint(result.pointers or ())]
    for leaf in donated:
        reason = _reason(leaf, donated, results, free)
        if reason is not None:
            kept.append((leaf.path, reason))
    return kept


def _reason(
    leaf: DonatedLeaf,
    donated: Sequence[DonatedLeaf],
    results: Sequence[DonatedLeaf],
    free: Sequence[DonatedLeaf],
) -> str | None:
    if not leaf.on_device:
        return f"is {leaf.placement}, and has no memory on a device"
    if leaf.deleted:
        return _hidden(leaf, results, free)
    if not leaf.used:
        return f"is {leaf.type}, and the function does not use it"
    same_type = [result for result in results if result.type == leaf.type]
    if not same_type:
        other = next((result for result in results if result.shape == leaf.shape), None)
        if other is not None:
            return f"is {leaf.type}, and the output of that shape is {other.type}"
        types = ", ".join(dict.fromkeys(result.type for result in results)) or "none"
        return f"is {leaf.type}, and no output has this shape and type; the outputs: {types}"
    if not any(result.placement == leaf.placement for result in same_type):
        there = same_type[0].placement
        return f"is {leaf.type} on {leaf.placement}, and the output of that type on {there}"
    if not any(result in free for result in same_type):
        return f"is {leaf.type}, and all outputs of that type took other donated memory"
    return (
        f"is {leaf.type}, and something else holds its memory, "
        "as a NumPy array does that was made from it without a copy"
    )


def _hidden(
    leaf: DonatedLeaf, results: Sequence[DonatedLeaf], free: Sequence[DonatedLeaf]
) -> str | None:
    """A leaf that is marked as deleted. Where no pointers are known, that has to do."""
    if leaf.pointers is None or any(result.pointers is None for result in results):
        return None
    if any(set(result.pointers or ()) & set(leaf.pointers) for result in results):
        return None
    if not any((free_.type, free_.placement) == (leaf.type, leaf.placement) for free_ in free):
        return None
    return f"is {leaf.type}, marked as deleted, but no output took its memory"


def _described(
    path: str, value: Any, pointers: _Pointers | None, *, used: bool = True
) -> DonatedLeaf:
    shape = tuple(jax.typeof(value).shape)
    on_device = isinstance(value, jax.Array)
    held = f"a {type(value).__name__}" if not shape else f"a NumPy array {text_of(value)}"
    placement = devices_of(value) if on_device else held
    deleted = on_device and value.is_deleted()
    kind = text_of(value)
    return DonatedLeaf(path, kind, shape, on_device, placement, pointers, deleted, used)


def _pointers(array: Any) -> _Pointers | None:
    """The addresses of the buffers on the devices of this process; None where a kind has none."""
    if not isinstance(array, jax.Array) or array.is_deleted():
        return None
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return None
    try:
        if len(array.sharding.device_set) == 1:  # its shards would hold it in a ring
            return (array.unsafe_buffer_pointer(),)
        return tuple(shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards)
    except jax.errors.JaxRuntimeError:  # a platform that does not tell
        return None


def _weak(value: Any) -> Any:
    return weakref.ref(value) if isinstance(value, jax.Array) else lambda: None


def _bullets(call: _compat.JitCall, said: Sequence[tuple[str, str]]) -> list[str]:
    shown = shown_paths(call)
    lines = [f"{shown[path]} {reason}" for path, reason in said]
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
