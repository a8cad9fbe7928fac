"""Arrays that move without being asked to: refused while they move, in the user's names."""

import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_dist import _compat
from jax_dist.errors import TransferError, refusal
from jax_dist.guards.descriptions import (
    argument_names,
    frames,
    is_of_user,
    line_of,
    name_of,
    placement_of,
    text_of,
    user_line,
)

_ALLOW = "`with jax_dist.allow_transfers():`"

# What stands between the user's line and the copy, as the user wrote it; the outermost one counts.
_READS = {
    "__array__": "NumPy",
    "__bool__": "bool, or if",
    "__buffer__": "memoryview",
    "__complex__": "complex",
    "__float__": "float",
    "__format__": "a formatted string",
    "__index__": "an index or range",
    "__int__": "int",
    "__repr__": "repr or print",
    "__str__": "str or print",
    "_item": ".item()",
    "item": ".item()",
    "tobytes": ".tobytes()",
    "tolist": ".tolist()",
}


def refuse_reading(array: jax.Array) -> None:
    """Refuses a copy to the host, if JAX's guard is on and no call of a jit object causes it."""
    config: Any = jax.config  # its attributes are made at run time
    level = config.jax_transfer_guard_device_to_host
    if level in (None, "allow", "log") or _compat.calls_under_way() or _compat.is_tracing():
        return
    not_users = itertools.takewhile(lambda frame: not is_of_user(frame), frames())
    readers = [frame.f_code.co_name for frame in not_users if frame.f_code.co_name in _READS]
    by = _READS[readers[-1]] if readers else "NumPy"
    held = f"{name_of(array) or 'an array'}, {text_of(array)} on {placement_of(array)}"
    raise refusal(
        TransferError,
        what=f"An array would move from the devices to the host, at {user_line()}",
        which=[f"{held}, is read by {by}"],
        why="the program waits there until the devices have computed it",
        do=f"Use jax.device_get where you mean it, and not in each step, or {_ALLOW}.",
    )


def guarded_placing(
    place: Callable[[], Any], values: Sequence[Any], shardings: Sequence[Any]
) -> Any:
    """Lets numbers through, and what JAX's own guard lets through; refuses other arguments."""
    if not any(isinstance(value, jax.Array) or np.ndim(value) > 0 for value in values):
        with jax.transfer_guard_host_to_device("allow"):  # a few bytes: not worth a word
            return place()
    try:
        return place()
    except jax.errors.JaxRuntimeError as error:
        if not is_refusal(error):
            raise
    pairs = zip(values, shardings, strict=True)
    # JAX places all arguments of one kind together, also those already in place.
    moved = [value for value, wanted in pairs if _would_move(value, wanted)] or list(values)
    is_on_devices = isinstance(moved[0], jax.Array)
    calls = _compat.calls_under_way()
    fun = f"'{calls[-1].name}'" if calls else "a jit object"
    onto = "between devices" if is_on_devices else "from the host to the devices"
    raise refusal(
        TransferError,
        what=f"The call of {fun} would move arrays {onto}, at {user_line()}",
        which=[_described(value) for value in moved],
        why="it moves them again in each call, and strict wants explicit transfers",
        do=f"Place them with jax.device_put{'(x, sharding)' * is_on_devices}, "
        f"once if they stay the same, or use {_ALLOW}.",
    )


def is_refusal(error: BaseException | None) -> bool:
    """Whether the guard of JAX speaks."""
    known = isinstance(error, jax.errors.JaxRuntimeError)
    return known and "Disallowed" in str(error) and "transfer" in str(error)


def refused_by_jax(error: BaseException) -> TransferError:
    """In our words, for what only JAX has seen."""
    trace = traceback.walk_tb(error.__traceback__)
    places = [line_of(frame, line) for frame, line in trace if is_of_user(frame)]
    return refusal(
        TransferError,
        what=f"An array would move without being asked to, at {places[-1] if places else '?'}",
        which=[str(error).split("Disallowed ", 1)[-1]],
        why="strict lets arrays move only where the program says so",
        do=f"Use jax.device_put or jax.device_get, or {_ALLOW}.",
    )


def _would_move(value: Any, wanted: Any) -> bool:
    if not isinstance(value, jax.Array):
        return np.ndim(value) > 0
    known = isinstance(wanted, jax.sharding.Sharding)
    return not known or not value.sharding.is_equivalent_to(wanted, value.ndim)


def _described(value: Any) -> str:
    """Named by its path among the arguments; by the user's own name where it is none."""
    names = [
        name
        for call in _compat.calls_under_way()[-1:]
        for name, leaf in zip(argument_names(call).values(), call.leaves, strict=False)
        if _is_same(leaf, value)
    ]
    name = next(iter(names), None) or name_of(value) or "an argument"
    if isinstance(value, jax.Array):
        return f"{name} is {text_of(value)} on {placement_of(value)}"
    return f"{name} is a NumPy array {text_of(value)}, {np.asarray(value).nbytes} bytes"


def _is_same(leaf: Any, value: Any) -> bool:
    """JAX may have made a float32 of a float64, then it is another object."""
    if leaf is value:
        return True
    on_host = not isinstance(leaf, jax.Array) and not isinstance(value, jax.Array)
    return on_host and np.ndim(leaf) > 0 and np.shape(leaf) == np.shape(value)
