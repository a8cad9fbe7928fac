"""A compilation that nobody asked for: what changed since an earlier call."""

import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

from jax_dist import _compat
from jax_dist.errors import RecompileError, refusal, shown
from jax_dist.guards.descriptions import argument_names, is_of_jax, placement_of, text_of, user_line

_KEPT = 8  # calls of each function: enough to find one near

# What the program of a call is looked up by, for each argument. A leaf has the first three, and a
# placement if it is an array; a static argument has its value.
_Facts: TypeAlias = Mapping[str, Any]
_Signature: TypeAlias = Mapping[str, _Facts]


class _Change(NamedTuple):
    text: str  # as a bullet of a message
    remedy: str


_PLACE = "Place it alike before each call, with jax.device_put, also the first state"
_STATIC = "Make it an ordinary argument, or call each value in the warm-up"
_STRUCTURE = "Pass the same structure in each call"
_WHERE_FACTS_DIFFER = {
    "shape": _Change("{} has the shape {}, before {}", "Pad to a few sizes, or cut the data alike"),
    "type": _Change("{} has the type {}, before {}", "Convert it to the same type before the call"),
    "strength": _Change(
        "{} has {}, before {}", "Pass an array in each call, or a Python number in each call"
    ),
    "placement": _Change("{} lies on {}, before on {}", _PLACE),
    "value": _Change("{} is the static value {}, before {}", _STATIC),
}

# By the source of the function: the functions, weakly, and the signatures of their last calls.
_seen: dict[tuple[str, int, str], deque[tuple[Callable, _Signature]]] = {}


def remember(call: _compat.JitCall) -> None:
    """Keeps the signature of a call, to compare with when the next one is compiled."""
    earlier = _seen.setdefault(source_of(call.fun), deque(maxlen=_KEPT))
    earlier.append((weakref.ref(call.fun), _signature(call)))


def recompile_error(name: str) -> RecompileError:
    """The error for a compilation that is about to begin in this thread."""
    calls = _compat.calls_under_way()
    if calls:
        name, changes = calls[-1].name, _changes(calls[-1])
    else:  # an explicit `.compile()`, and jax.pmap before 0.8
        changes = [_Change("its arguments are not known here", "Call it once before the block")]
    return refusal(
        RecompileError,
        what=f"'{name}' would be compiled after the warm-up, at {user_line()}",
        which=[change.text for change in changes],
        why="each difference in these needs another program",
        do=f"{changes[0].remedy}, or use `with jax_dist.allow_recompiles():`.",
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


def _signature(call: _compat.JitCall) -> _Signature:
    types = _signature_of_types(call, map(jax.typeof, call.leaves))
    for facts, leaf in zip(types.values(), call.leaves, strict=False):
        if isinstance(leaf, jax.Array):
            facts["placement"] = placement_of(leaf) + ", uncommitted" * (not leaf.committed)
    return types | {name: {"value": repr(value)} for name, value in call.statics.items()}


def _signature_of_types(call: _compat.JitCall, avals: Iterable[Any]) -> dict[str, dict[str, Any]]:
    weak, strong = "a weak type, as Python numbers do", "a strong type, as arrays do"
    return {
        path: {
            "shape": tuple(aval.shape),
            "type": str(aval.dtype),
            "strength": weak if getattr(aval, "weak_type", False) else strong,
        }
        for path, aval in zip(call.paths, avals, strict=False)
    }


def _changes(call: _compat.JitCall) -> list[_Change]:
    """What makes this call need a program of its own."""
    now = _signature(call)
    seen = list(_seen.get(source_of(call.fun), ()))
    of_function = [signature for fun, signature in seen if fun() == call.fun]
    if of_function:
        return _nearest(call, now, of_function) or [_setting(call)]
    # Of calls before the block JAX knows the types: neither placements nor static values.
    types = [jax.typeof(leaf) for leaf in call.leaves]
    traced = [known for known in _compat.traced_types(call.fun) if len(known) == len(types)]
    if call.traced and types in traced:
        traced.remove(types)  # by this call
    if types in traced:
        return [_setting(call) if call.traced else _elsewhere(now)]
    if traced:
        before = [_signature_of_types(call, known) for known in traced]
        return _nearest(call, _signature_of_types(call, types), before) or [_elsewhere(now)]
    if is_of_jax(call.fun):
        new = ", ".join(map(text_of, call.leaves))
        text = f"'{call.name}' is called outside of a jitted function, and is new for {new}"
        return [_Change(text, "Do it in a jitted function, or once before the block")]
    if seen:
        file, line, _ = source_of(call.fun)
        text = f"'{call.name}' of {shown(file)}:{line} is another function object than before"
        return [_Change(text, "Make the jitted function once, outside of the loop")]
    return [_Change(f"no call of '{call.name}' came before", "Call it once before the block")]


def _nearest(
    call: _compat.JitCall, now: _Signature, signatures: Iterable[_Signature]
) -> list[_Change]:
    """What differs from the one that differs least."""
    names = argument_names(call)
    return min((_differences(now, before, names) for before in signatures), key=len)


def _differences(now: _Signature, before: _Signature, names: Mapping[str, str]) -> list[_Change]:
    """In the order of the arguments."""
    changes = []
    for path, facts in now.items():
        name = names.get(path, path)
        known = before.get(path)
        if known is None:
            changes.append(_Change(f"{name} is new", _STRUCTURE))
            continue
        for fact, value in facts.items():
            if fact in known and known[fact] != value:
                text, remedy = _WHERE_FACTS_DIFFER[fact]
                changes.append(_Change(text.format(name, value, known[fact]), remedy))
    return changes + [_Change(f"{path} is gone", _STRUCTURE) for path in before if path not in now]


def _elsewhere(now: _Signature) -> _Change:
    arrays = {path: facts for path, facts in now.items() if "shape" in facts}
    places = (f"{path} on {facts.get('placement', 'the host')}" for path, facts in arrays.items())
    return _Change(f"the arguments lie elsewhere than before: {', '.join(places)}", _PLACE)


def _setting(call: _compat.JitCall) -> _Change:
    """The arguments are those of an earlier call: what else a program depends on."""
    if call.statics:
        values = ", ".join(f"{name}={value!r}" for name, value in call.statics.items())
        return _Change(f"no earlier call had the static values {values}", _STATIC)
    text = "a setting of JAX differs, as by jax.config or jax.set_mesh, or its caches were cleared"
    return _Change(text, "Set it once, before the first call")
