"""Donated arguments: whether their memory really went to the results, and if not, why not."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jax_dist import _compat
from jax_dist.errors import DonationError, refusal
from jax_dist.guards.descriptions import (
    argument_names,
    is_of_jax,
    parts_of,
    placement_of,
    text_of,
    user_line,
)

_WORTH = 1024  # bytes: a counter or a key that is not donated is not worth a word
_SHOWN = 8  # leaves in one message

_Addresses: TypeAlias = frozenset[int] | None  # of the buffers of an array; None: not known
_WeakLeaves: TypeAlias = list[Callable[[], Any]]


class DonationCheck:
    """What one thread remembers of its calls; all weak, so that it keeps no memory alive."""

    def __init__(self) -> None:
        # By function: the leaves of its last call, and its results.
        self._last = weakref.WeakKeyDictionary[Callable, tuple[_WeakLeaves, _WeakLeaves]]()

    def called(self, call: _compat.JitCall) -> None:
        """Notes what is donated; refuses a result of the last call whose own argument is gone."""
        forgotten = self._forgotten(call)
        if sum(call.leaves[place].nbytes for place in forgotten) >= _WORTH:
            raise refusal(
                DonationError,
                what=f"'{call.name}' is fed its own results and does not donate them, "
                f"at {user_line()}",
                which=_bullets(call, {place: "" for place in forgotten}),
                why="the old value was dropped after the call, so both were in memory for nothing",
                do="Say donate_argnums where you jit it, or strict(donation=False).",
            )
        donated = [place for place, is_donated in enumerate(call.donated) if is_donated]
        call.notes = {place: _addresses(call.leaves[place]) for place in donated}

    def returned(self, call: _compat.JitCall, outputs: Sequence[Any]) -> None:
        """Refuses donated leaves that are still there."""
        self._last[call.fun] = ([*map(_weak, call.leaves)], [*map(_weak, outputs)])
        results = [_addresses(output) for output in outputs]
        taken = None if None in results else frozenset[int]().union(*filter(None, results))
        given = frozenset[int]().union(*filter(None, call.notes.values()))
        pairs = zip(outputs, results, strict=True)
        free = [output for output, took in pairs if given.isdisjoint(took or ())]
        kept: dict[int, str] = {}
        for place, addresses in call.notes.items():
            leaf = call.leaves[place]
            if not _is_deleted(leaf):
                kept[place] = _why_kept(leaf, outputs, free, used=place not in call.unused)
            elif _is_only_hidden(leaf, addresses, taken, free):
                kept[place] = ", marked as deleted, but no output took its memory"
        if kept:
            count = f"{len(kept)} donated argument{'s' * (len(kept) > 1)}"
            raise refusal(
                DonationError,
                what=f"'{call.name}' did not take the memory of {count}, at {user_line()}",
                which=_bullets(call, kept),
                why="the memory of an argument can only become that of an output of the same type, "
                "on the same devices, if nothing else holds it",
                do="Mend that, or leave the argument out of donate_argnums.",
            )

    def _forgotten(self, call: _compat.JitCall) -> list[int]:
        """Places of leaves that the last call gave, where its own are gone: not donated."""
        inputs, outputs = self._last.get(call.fun, ([], []))
        if is_of_jax(call.fun) or len(inputs) != len(call.leaves):
            return []
        results = {id(output()) for output in outputs if output() is not None}
        return [
            place
            for place, leaf in enumerate(call.leaves)
            if id(leaf) in results and not call.donated[place] and inputs[place]() is None
        ]


def _why_kept(
    leaf: Any, outputs: Sequence[jax.Array], free: Sequence[jax.Array], *, used: bool
) -> str:
    """Why a donated leaf is not deleted; `free` are the outputs that took no donated memory."""
    if not isinstance(leaf, jax.Array):
        return ", and has no memory on a device"
    if not used:
        return ", and the function does not use it"
    same_type = [output for output in outputs if text_of(output) == text_of(leaf)]
    if not same_type:
        for output in outputs:
            if output.shape == leaf.shape:
                return f", and the output of that shape is {text_of(output)}"
        types = ", ".join(dict.fromkeys(map(text_of, outputs))) or "none"
        return f", and no output has this shape and type; the outputs: {types}"
    there = [placement_of(output) for output in same_type]
    if placement_of(leaf) not in there:
        return f" on {placement_of(leaf)}, and the output of that type on {there[0]}"
    if not any(output is each for output in same_type for each in free):
        return ", and all outputs of that type took other donated memory"
    return (
        ", and something else holds its memory, "
        "as a NumPy array does that was made from it without a copy"
    )


def _is_only_hidden(
    leaf: jax.Array, addresses: _Addresses, taken: _Addresses, free: Sequence[jax.Array]
) -> bool:
    """Whether a leaf that is marked as deleted is still there.

    So it is if no result took its memory, while one of its type and placement took other memory.
    Seen on 0.7.2 with memory shared with a NumPy array, as `device_put` leaves it on the CPU.
    """
    if addresses is None or taken is None or addresses & taken:
        return False
    return any(
        (text_of(output), placement_of(output)) == (text_of(leaf), placement_of(leaf))
        for output in free
    )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _addresses(array: Any) -> _Addresses:
    """Of the buffers on the devices of this process; None where a kind of array tells none."""
    if not isinstance(array, jax.Array) or array.is_deleted():
        return None
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return None
    try:
        return frozenset(part.unsafe_buffer_pointer() for part in parts_of(array))
    except jax.errors.JaxRuntimeError:  # a platform that does not tell
        return None


def _weak(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, jax.Array) else lambda: None


def _bullets(call: _compat.JitCall, reasons: dict[int, str]) -> list[str]:
    names, lines = argument_names(call), []
    for place, reason in reasons.items():
        leaf, name = call.leaves[place], names[call.paths[place]]
        is_on_host = not isinstance(leaf, jax.Array)
        kind = "a NumPy array " * is_on_host + text_of(leaf)
        if is_on_host and jnp.ndim(leaf) == 0:
            kind = f"a {type(leaf).__name__}"
        lines.append(f"{name} is {kind}{reason}")
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
