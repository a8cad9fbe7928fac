"""Compilations where everything should be compiled: what changed since an earlier call."""

import collections
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jax_dist import _compat
from jax_dist.errors import RecompileError, message, shown
from jax_dist.guards import descriptions
from jax_dist.guards.descriptions import (
    ArgumentType,
    Change,
    Signature,
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


def refusal(name: str) -> RecompileError:
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
