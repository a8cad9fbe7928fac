"""Arrays that move without being asked to: found while they move, named as the user names them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_dist import _compat
from jax_dist.errors import TransferError, message
from jax_dist.guards import descriptions
from jax_dist.guards.descriptions import devices_of, is_of_jax, shown_paths, text_of

# What stands between the user's line and the copy, as the user wrote it; the outermost one counts.
_READS = {
    "__array__": "NumPy",
    "__bool__": "bool, or if",
    "__buffer__": "memoryview",
    "__complex__": "complex",
    "__float__": "float",
    "__format__": "a formatted string",
    "__hex__": "hex",
    "__index__": "an index or range",
    "__int__": "int",
    "__repr__": "repr or print",
    "__str__": "str or print",
    "_item": ".item()",
    "item": ".item()",
    "tobytes": ".tobytes()",
    "tolist": ".tolist()",
}


def guarded_placing(
    place: Callable[[], Any], values: Sequence[Any], shardings: Sequence[Any]
) -> Any:
    """Lets numbers through, and whatever JAX's own guard lets through.

    Raises:
      TransferError: an argument is an array on the host, or on other devices.
    """
    if not any(isinstance(value, jax.Array) or np.ndim(value) > 0 for value in values):
        with jax.transfer_guard_host_to_device("allow"):  # a few bytes: not worth a word
            return place()
    try:
        return place()
    except jax.errors.JaxRuntimeError as error:
        if not is_refusal(error):
            raise
        raise _misplaced(_moved(values, shardings)) from None


def refuse_reading(array: jax.Array) -> None:
    """Refuses a copy to the host, if the guard of JAX is on and no call of a jit object causes it.

    Raises:
      TransferError: always, then.
    """
    level = getattr(jax.config, "jax_transfer_guard_device_to_host")  # noqa: B009, made at run time
    if level in (None, "allow", "log") or _compat.calls_under_way() or _compat.is_tracing():
        return
    raise _read(array)


def is_refusal(error: BaseException | None) -> bool:
    """Whether the guard of JAX speaks."""
    known = isinstance(error, jax.errors.JaxRuntimeError)
    return known and "Disallowed" in str(error) and "transfer" in str(error)


def refused_by_jax(error: BaseException) -> TransferError:
    """In our words, for what only JAX has seen."""
    where = descriptions.line_of(descriptions.frame_of(error.__traceback__))
    text = str(error).split("Disallowed ", 1)[-1]
    return TransferError(
        message(
            what=f"An array would move without being asked to, at {where}",
            which=[text],
            why="strict lets arrays move only where the program says so",
            do="Use jax.device_put or jax.device_get, or `with jax_dist.allow_transfers():`.",
        )
    )


def _moved(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """JAX places all arguments of one kind together, also those already in place."""
    moved = []
    for value, wanted in zip(values, shardings, strict=True):
        if isinstance(value, jax.Array):
            lies_right = isinstance(wanted, jax.sharding.Sharding) and (
                value.sharding.is_equivalent_to(wanted, value.ndim)
            )
            moved += [] if lies_right else [value]
        elif np.ndim(value) > 0:
            moved.append(value)
    return moved or list(values)


def _misplaced(moved: Sequence[Any]) -> TransferError:
    frame = descriptions.user_frame()
    calls = _compat.calls_under_way()
    call = calls[-1] if calls else None
    which = [f"{_path(value, call, frame)} is {_held(value)}" for value in moved]
    onto = "between devices" if isinstance(moved[0], jax.Array) else "from the host to the devices"
    fun = f"'{call.name}'" if call is not None else "a jit object"
    placed = "jax.device_put(x, sharding)" if isinstance(moved[0], jax.Array) else "jax.device_put"
    return TransferError(
        message(
            what=f"The call of {fun} would move arrays {onto}, at {descriptions.line_of(frame)}",
            which=which,
            why="it moves them again in each call, and strict wants explicit transfers",
            do=f"Place them with {placed}, once if they stay the same, "
            f"or use `with jax_dist.allow_transfers():`.",
        )
    )


def _path(value: Any, call: _compat.JitCall | None, frame: Any) -> str:
    """The path among the arguments of a function of the user; else his own name for the value."""
    if call is None:
        return descriptions.name_of(value, frame) or "an argument"
    pairs = zip(call.paths, call.leaves, strict=False)
    path, leaf = next((pair for pair in pairs if _same(pair[1], value)), ("an argument", value))
    if is_of_jax(call.fun):
        return descriptions.name_of(leaf, frame) or path
    return shown_paths(call).get(path, path)


def _same(leaf: Any, value: Any) -> bool:
    """JAX may have made a float32 of a float64, then it is another object."""
    if leaf is value:
        return True
    on_host = not isinstance(leaf, jax.Array) and not isinstance(value, jax.Array)
    return on_host and np.ndim(leaf) > 0 and np.shape(leaf) == np.shape(value)


def _held(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"{text_of(value)} on {devices_of(value)}"
    return f"a NumPy array {text_of(value)}, {np.asarray(value).nbytes} bytes"


def _read(array: jax.Array) -> TransferError:
    frame = descriptions.user_frame()
    passed = [name for name in descriptions.entered_by() if name in _READS]
    by = _READS[passed[-1]] if passed else "NumPy"
    line = descriptions.line_of(frame)
    name = descriptions.name_of(array, frame) or "an array"
    return TransferError(
        message(
            what=f"An array would move from the devices to the host, at {line}",
            which=[f"{name}, {text_of(array)} on {devices_of(array)}, is read by {by}"],
            why="the program waits there until the devices have computed it",
            do="Use jax.device_get where you mean it, and not in each step, "
            "or `with jax_dist.allow_transfers():`.",
        )
    )
