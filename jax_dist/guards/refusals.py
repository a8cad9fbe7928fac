"""Compilations and transfers that nobody asked for, named as the user names them.

A compilation is refused before it begins, with what changed since an earlier call; an array that
moves, while it moves.
"""

import collections
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_dist import _compat, _exceptions
from jax_dist.errors import RecompileError, TransferError, refusal, shown
from jax_dist.guards.descriptions import (
    devices_of,
    entered_by,
    frame_of,
    is_of_jax,
    line_of,
    name_of,
    placement_of,
    shown_paths,
    text_of,
    user_frame,
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
_STRENGTH = {True: "a weak type, as Python numbers do", False: "a strong type, as arrays do"}


@dataclass(frozen=True, slots=True)
class _Change:
    kind: str  # a key of the remedies: "shape", "dtype", "weak", "placement", "static", "tree"
    text: str  # as a bullet of a message


@dataclass(frozen=True, slots=True)
class _ArgumentType:
    """Of one leaf of the arguments; None where it is not known."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool  # as Python numbers are: it takes the type of what it meets
    placement: str | None

    @classmethod
    def of(cls, aval: Any, placement: str | None = None) -> "_ArgumentType":
        weak = bool(getattr(aval, "weak_type", False))
        return cls(tuple(aval.shape), str(aval.dtype), weak, placement)


@dataclass(frozen=True, slots=True)
class _Signature:
    """Of one call."""

    types: Mapping[str, _ArgumentType]  # by the path of the argument
    statics: Mapping[str, str]  # by the name of the argument: its repr

    def renamed(self, shown: Mapping[str, str]) -> "_Signature":
        """With other words for the paths."""
        types = {shown.get(path, path): type_ for path, type_ in self.types.items()}
        return _Signature(types, self.statics)

    def changes_from(self, before: "_Signature") -> Iterator[_Change]:
        """What differs, in the order of the arguments."""
        for path, now in self.types.items():
            was = before.types.get(path)
            if was is None:
                yield _Change("tree", f"{path} is new")
                continue
            if now.shape != was.shape:
                yield _Change("shape", f"{path} has the shape {now.shape}, before {was.shape}")
            if now.dtype != was.dtype:
                yield _Change("dtype", f"{path} has the type {now.dtype}, before {was.dtype}")
            if now.weak != was.weak:
                strength, before_that = _STRENGTH[now.weak], _STRENGTH[was.weak]
                yield _Change("weak", f"{path} has {strength}, before {before_that}")
            if now.placement != was.placement and None not in (now.placement, was.placement):
                text = f"{path} lies on {now.placement}, before on {was.placement}"
                yield _Change("placement", text)
        for path in before.types:
            if path not in self.types:
                yield _Change("tree", f"{path} is gone")
        for name, value in self.statics.items():
            old = before.statics.get(name)
            if old is not None and old != value:
                yield _Change("static", f"{name} is the static value {value}, before {old}")


def _signature_of(call: _compat.JitCall) -> _Signature:
    """What the program of this call is looked up by."""
    types = {}
    for path, leaf in zip(call.paths, call.leaves, strict=False):
        placement = placement_of(leaf) if isinstance(leaf, jax.Array) else None
        types[path] = _ArgumentType.of(jax.typeof(leaf), placement)
    return _Signature(types, {name: repr(value) for name, value in call.statics.items()})


# The functions, weakly, and the signatures of their calls; by the code, not the object.
_seen: dict[tuple[str, int, str], collections.deque[tuple[Callable, _Signature]]] = {}
_seen_lock = threading.Lock()


def remember(call: _compat.JitCall) -> None:
    """Keeps the types of a call, to compare with when the next one is compiled."""
    with _seen_lock:
        earlier = _seen.setdefault(source_of(call.fun), collections.deque(maxlen=_KEPT))
        earlier.append((_weakly(call.fun), _signature_of(call)))


def recompile_error(name: str) -> RecompileError:
    """The error for a compilation that is about to begin in this thread."""
    calls = _compat.calls_under_way()
    where = line_of(user_frame())
    if calls:
        name, changes = calls[-1].name, _changes(calls[-1])
    else:  # an explicit `.compile()`, and jax.pmap before 0.8
        changes = [_Change("first", "its arguments are not known here")]
    return refusal(
        RecompileError,
        what=f"'{name}' would be compiled after the warm-up, at {where}",
        which=[change.text for change in changes],
        why="each difference in these needs another program",
        do=f"{_REMEDIES[changes[0].kind]}, {_ALLOW}.",
    )


def source_of(fun: Any) -> tuple[str, int, str]:
    """Names a function by its source, so that a lambda that is made again is the same."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    fun = inspect.unwrap(fun)
    code = getattr(fun, "__code__", None)
    if code is None:  # a callable object
        return (type(fun).__module__, 0, type(fun).__qualname__)
    return (code.co_filename, code.co_firstlineno, code.co_qualname)


def _changes(call: _compat.JitCall) -> list[_Change]:
    now = _signature_of(call).renamed(shown_paths(call))
    earlier = list(_seen.get(source_of(call.fun), ()))
    same = [signature for fun, signature in earlier if fun() == call.fun]
    if same:
        named = [before.renamed(shown_paths(call)) for before in same]
        changes = min((list(now.changes_from(before)) for before in named), key=len)
        return changes or [_settings(call)]
    traced = _since_traces(call, now)
    if traced:
        return traced
    if is_of_jax(call.fun):
        types = ", ".join(text_of(leaf) for leaf in call.leaves)
        return [_Change("eager", f"'{call.name}' is a part of JAX, and new for {types}")]
    if earlier:
        file, line, _ = source_of(call.fun)
        made = f"'{call.name}' of {shown(file)}:{line} is another function object than before"
        return [_Change("another", made)]
    return [_Change("first", f"no call of '{call.name}' came before")]


def _since_traces(call: _compat.JitCall, now: _Signature) -> list[_Change]:
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
    known = [dict(zip(now.types, map(_ArgumentType.of, each), strict=True)) for each in others]
    changes = min((list(now.changes_from(_Signature(types, {}))) for types in known), key=len)
    if changes:
        return changes
    lies = ", ".join(f"{path} on {type_.placement}" for path, type_ in now.types.items())
    return [_Change("placement", f"the arguments lie elsewhere than before: {lies}")]


def _settings(call: _compat.JitCall) -> _Change:
    """The arguments are those of an earlier call: what else a program depends on."""
    if call.statics:
        values = ", ".join(f"{name}={value!r}" for name, value in call.statics.items())
        return _Change("static", f"no earlier call had the static values {values}")
    text = "a setting of JAX differs, as by jax.config or jax.set_mesh, or its caches were cleared"
    return _Change("context", text)


def _weakly(fun: Callable) -> Callable[[], Callable | None]:
    # A method is made again by each look-up; equal, as long as its object is the same.
    refer = weakref.WeakMethod if inspect.ismethod(fun) else weakref.ref
    try:
        return refer(fun)
    except TypeError:  # such as a callable object with slots, or a method of one
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
        raise _misplaced(values, shardings) from None


def refuse_reading(array: jax.Array) -> None:
    """Refuses a copy to the host, if the guard of JAX is on and no call of a jit object causes it.

    Raises:
      TransferError: always, then.
    """
    level = getattr(jax.config, "jax_transfer_guard_device_to_host")  # noqa: B009, made at run time
    if level in (None, "allow", "log") or _compat.calls_under_way() or _compat.is_tracing():
        return
    frame = user_frame()
    passed = [name for name in entered_by() if name in _READS]
    by = _READS[passed[-1]] if passed else "NumPy"
    name = name_of(array, frame) or "an array"
    raise refusal(
        TransferError,
        what=f"An array would move from the devices to the host, at {line_of(frame)}",
        which=[f"{name}, {text_of(array)} on {devices_of(array)}, is read by {by}"],
        why="the program waits there until the devices have computed it",
        do="Use jax.device_get where you mean it, and not in each step, "
        "or `with jax_dist.allow_transfers():`.",
    )


def is_refusal(error: BaseException | None) -> bool:
    """Whether the guard of JAX speaks."""
    if error is None or not isinstance(error, jax.errors.JaxRuntimeError):
        return False
    said = _exceptions.text_of(error)
    return "Disallowed" in said and "transfer" in said


def refused_by_jax(error: BaseException) -> TransferError:
    """In our words, for what only JAX has seen."""
    where = line_of(frame_of(error.__traceback__))
    text = _exceptions.text_of(error).split("Disallowed ", 1)[-1]
    return refusal(
        TransferError,
        what=f"An array would move without being asked to, at {where}",
        which=[text],
        why="strict lets arrays move only where the program says so",
        do="Use jax.device_put or jax.device_get, or `with jax_dist.allow_transfers():`.",
    )


def _misplaced(values: Sequence[Any], shardings: Sequence[Any]) -> TransferError:
    moved = []  # JAX places all arguments of one kind together, also those already in place
    for value, wanted in zip(values, shardings, strict=True):
        if not isinstance(value, jax.Array):
            moved += [value] if np.ndim(value) > 0 else []
        elif not isinstance(wanted, jax.sharding.Sharding) or (
            not value.sharding.is_equivalent_to(wanted, value.ndim)
        ):
            moved.append(value)
    moved = moved or list(values)
    frame = user_frame()
    calls = _compat.calls_under_way()
    call = calls[-1] if calls else None
    which = [
        f"{_path(value, call, frame)} is {text_of(value)} on {devices_of(value)}"
        if isinstance(value, jax.Array)
        else f"{_path(value, call, frame)} is a NumPy array {text_of(value)}, "
        f"{np.asarray(value).nbytes} bytes"
        for value in moved
    ]
    onto = "between devices" if isinstance(moved[0], jax.Array) else "from the host to the devices"
    fun = f"'{call.name}'" if call is not None else "a jit object"
    placed = "jax.device_put(x, sharding)" if isinstance(moved[0], jax.Array) else "jax.device_put"
    return refusal(
        TransferError,
        what=f"The call of {fun} would move arrays {onto}, at {line_of(frame)}",
        which=which,
        why="it moves them again in each call, and strict wants explicit transfers",
        do=f"Place them with {placed}, once if they stay the same, "
        f"or use `with jax_dist.allow_transfers():`.",
    )


def _path(value: Any, call: _compat.JitCall | None, frame: Any) -> str:
    """The path among the arguments of a function of the user; else his own name for the value."""
    if call is None:
        return name_of(value, frame) or "an argument"
    pairs = zip(call.paths, call.leaves, strict=False)
    path, leaf = next((pair for pair in pairs if _same(pair[1], value)), ("an argument", value))
    if is_of_jax(call.fun):
        return name_of(leaf, frame) or path
    return shown_paths(call).get(path, path)


def _same(leaf: Any, value: Any) -> bool:
    """JAX may have made a float32 of a float64, then it is another object."""
    if leaf is value:
        return True
    on_host = not isinstance(leaf, jax.Array) and not isinstance(value, jax.Array)
    return on_host and np.ndim(leaf) > 0 and np.shape(leaf) == np.shape(value)
