"""Compilations and transfers that nobody asked for, named as the user names them.

A compilation is refused before it begins, with what changed since an earlier call; an array that
moves, while it moves.
"""

import collections
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_dist import _compat
from jax_dist.errors import RecompileError, TransferError, message, shown
from jax_dist.guards import descriptions
from jax_dist.guards.descriptions import (
    ArgumentType,
    Change,
    Signature,
    devices_of,
    is_of_jax,
    shown_paths,
    signature_of,
    text_of,
)

_KEPT = 8  # signatures of each function: enough to find one near
_REMEDIES = {
    "another": "Make the jitted function once, outside of the loop",
    "context": "Set it once, before the first call",
    "dtype": "Convert it to the same type before the call",
    "eager": "Do it in a jitted function, or once before the block",
    "first": "Call it once before the block",
    "placement": "Place it alike before each call, with jax.device_put, also the first state",
    "shape": "Pad to a few sizes, or cut the data alike",
    "static": "Make it an ordinary argument, or call each value in the warm-up",
    "tree": "Pass the same structure in each call",
    "weak": "Pass an array in each call, or a Python number in each call",
}
_ALLOW = "or use `with jax_dist.allow_recompiles():`"


class _Seen:
    """One call of a function, and which function object it was."""

    def __init__(self, fun: Callable, signature: Signature):
        self.fun = _weakly(fun)
        self.signature = signature


_seen: dict[tuple[str, int, str], collections.deque[_Seen]] = {}  # by the code, not the object
_seen_lock = threading.Lock()


def remember(call: _compat.JitCall) -> None:
    """Keeps the types of a call, to compare with when the next one is compiled."""
    with _seen_lock:
        earlier = _seen.setdefault(source_of(call.fun), collections.deque(maxlen=_KEPT))
        earlier.append(_Seen(call.fun, signature_of(call)))


def recompile_error(name: str) -> RecompileError:
    """The error for a compilation that is about to begin in this thread."""
    calls = _compat.calls_under_way()
    where = descriptions.line_of(descriptions.user_frame())
    if not calls:  # an explicit `.compile()`, and jax.pmap before 0.8
        changes = [Change("first", "its arguments are not known here")]
        return _error(name, where, changes)
    call = calls[-1]
    return _error(call.name, where, _changes(call))


def source_of(fun: Any) -> tuple[str, int, str]:
    """Names a function by its source, so that a lambda that is made again is the same."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    fun = inspect.unwrap(fun)
    code = getattr(fun, "__code__", None)
    if code is None:  # a callable object
        return (type(fun).__module__, 0, type(fun).__qualname__)
    return (code.co_filename, code.co_firstlineno, code.co_qualname)


def _changes(call: _compat.JitCall) -> list[Change]:
    now = signature_of(call).renamed(shown_paths(call))
    earlier = list(_seen.get(source_of(call.fun), ()))
    same = [seen.signature for seen in earlier if seen.fun() == call.fun]
    if same:
        named = [before.renamed(shown_paths(call)) for before in same]
        changes = min((now.changes_from(before) for before in named), key=len)
        return changes or [_settings(call)]
    traced = _since_traces(call, now)
    if traced:
        return traced
    if is_of_jax(call.fun):
        types = ", ".join(text_of(leaf) for leaf in call.leaves)
        return [Change("eager", f"'{call.name}' is a part of JAX, and new for {types}")]
    if earlier:
        file, line, _ = source_of(call.fun)
        made = f"'{call.name}' of {shown(file)}:{line} is another function object than before"
        return [Change("another", made)]
    return [Change("first", f"no call of '{call.name}' came before")]


def _since_traces(call: _compat.JitCall, now: Signature) -> list[Change]:
    """By what JAX remembers of calls before the block: types, neither placements nor statics."""
    mine = [jax.typeof(leaf) for leaf in call.leaves]
    avals = [list(known.values()) for known in _compat.traced_types(call.fun)]
    avals = [each for each in avals if len(each) == len(mine)]
    same = avals.count(mine)
    if same > 1:  # one is of this call itself
        return [_settings(call)]
    others = [each for each in avals if each != mine] or ([] if call.traced else avals)
    if not others:
        return []
    known = [dict(zip(now.types, map(_type_of_aval, each), strict=True)) for each in others]
    changes = min((now.changes_from(Signature(types, {})) for types in known), key=len)
    return changes or [_elsewhere(now)]


def _settings(call: _compat.JitCall) -> Change:
    """The arguments are those of an earlier call: what else a program depends on."""
    if call.statics:
        values = ", ".join(f"{name}={value!r}" for name, value in call.statics.items())
        return Change("static", f"no earlier call had the static values {values}")
    text = "a setting of JAX differs, as by jax.config or jax.set_mesh, or its caches were cleared"
    return Change("context", text)


def _elsewhere(now: Signature) -> Change:
    lies = [f"{path} on {type_.placement}" for path, type_ in now.types.items()]
    return Change("placement", f"the arguments lie elsewhere than before: {', '.join(lies)}")


def _type_of_aval(aval: Any) -> ArgumentType:
    return ArgumentType(tuple(aval.shape), str(aval.dtype), bool(aval.weak_type), None)


def _error(name: str, where: str, changes: list[Change]) -> RecompileError:
    remedy = _REMEDIES[changes[0].kind]
    return RecompileError(
        message(
            what=f"'{name}' would be compiled after the warm-up, at {where}",
            which=[change.text for change in changes],
            why="each difference in these needs another program",
            do=f"{remedy}, {_ALLOW}.",
        )
    )


def _weakly(fun: Callable) -> Callable[[], Callable | None]:
    if inspect.ismethod(
        fun
    ):  # made again by each look-up; equal, as long as its object is the same
        return weakref.WeakMethod(fun)
    try:
        return weakref.ref(fun)
    except TypeError:  # such as a callable object with slots
        return lambda: None


# --- arrays that move without being asked to


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
