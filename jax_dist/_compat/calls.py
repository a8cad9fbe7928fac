"""The calls of jit objects, the compilations and the transfers of one thread, for the guards.

Calls that JAX hurries through C++ are not seen. JAX tells its listeners that it traces and that it
compiles; what is called, with which arguments, and what moves, it tells nobody. The private parts,
all seen in 0.7.2, 0.10.2 and 0.12.0.1: `_infer_params`, which traces; `_pjit_call_impl_python`,
which compiles and runs; and `_get_fastpath_data` of `jax._src.pjit`; `shard_arg_handlers` of
`jax._src.interpreters.pxla`; `ArrayImpl._value`; `config_ext.Config` and `guard_lib` of
`jax._src.config`.
"""

import dataclasses
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jax_dist._compat import private


@dataclasses.dataclass(slots=True)
class JitCall:
    """A call of a jit object that goes through Python: its first ones, and those JAX cannot hurry.

    `leaves`, `paths` and `donated` are of the arguments that are not static, in one order.
    """

    fun: Any  # the function; of a call within a transformation, such as `grad`, the program
    name: str
    leaves: Sequence[Any]
    paths: tuple[str, ...]
    donated: tuple[bool, ...]
    statics: dict[str, Any]  # argument to value
    traced: bool = False  # whether this call had the function traced
    unused: frozenset[int] = frozenset()  # places of leaves that the program leaves out
    notes: dict[int, Any] = dataclasses.field(default_factory=dict)  # of the watcher


class CallWatcher:
    """What a thread does around its calls; this one does nothing."""

    @property
    def slow(self) -> bool:
        """Whether a call seen now keeps going through Python, as long as `look` is same."""
        return False

    def called(self, call: JitCall) -> None:
        """Before the program is looked up, compiled and run; what is raised ends the call."""

    def returned(self, call: JitCall, outputs: Sequence[Any]) -> None:
        """After it ran; `outputs` are leaves. What is raised reaches the caller."""

    def compiles(self, name: str) -> None:
        """Before XLA compiles; what is raised ends the call, and the next one may try again."""

    def shards(
        self, place: Callable[[], Any], values: Sequence[Any], shardings: Sequence[Any]
    ) -> Any:
        """Around the placing of arguments that may not lie where the program wants them."""
        return place()

    def reads(self, array: jax.Array) -> None:
        """Before an array is copied to the host, unless by `jax.device_get`."""


class _Inferred(NamedTuple):
    """What is known of a call when its function is traced, or was before."""

    program: Any  # the jaxpr; None: of another call
    fun: Any
    paths: Sequence[str] | None
    statics: dict[str, Any]
    traced: bool


class _Watching(threading.local):
    watcher: CallWatcher | None = None
    calls: tuple[JitCall, ...] = ()  # from the outermost to the innermost
    before: Any = None  # what `look` was, where it was changed
    inferred: _Inferred | None = None  # for the call that runs next
    traced = False
    tracing = 0  # how many functions are being traced, each in the one before
    slow = False  # whether the call that just ended keeps going through Python


_watching = _Watching()
_SEE = "see the calls, transfers and compilations of a program, as strict does,"
_watch_lock = threading.Lock()
_watching_threads: set[int] = set()
_PMAP_MODULE = "jax._src.pmap"  # of what `jax.pmap` returns; seen in 0.10.2 and 0.12.0.1
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"


def calls_under_way() -> tuple[JitCall, ...]:
    """The calls of this thread that are in Python now, from the outermost to the innermost."""
    return _watching.calls


def is_tracing() -> bool:
    """Whether this thread, while watched, is tracing a function."""
    return _watching.tracing > 0


def watch_calls(watcher: CallWatcher | None, look: str | None) -> None:
    """Has `watcher` see the calls of this thread from now on; None ends it.

    Each other value of `look` has every function come through Python once, without compiling it: it
    is a part of the key of JAX's C++ cache of calls, and of no other.

    Raises:
      UnsupportedError: this jax has other ones.
    """
    with _watch_lock:
        watched = bool(_watching_threads)
        change = _watching_threads.discard if watcher is None else _watching_threads.add
        change(threading.get_ident())
        if watched != bool(_watching_threads):  # ours are around JAX's only while a thread watches
            for put, name, original, ours in _hooks():
                put(name, original if watched else ours)
    _watching.watcher = watcher
    option = _look_option()
    if look is not None:
        before = option.swap_local(look)
        _watching.before = before if _watching.before is None else _watching.before
    elif _watching.before is not None:
        option.set_local(_watching.before)
        _watching.before = None


@functools.cache
def _look_option() -> Any:
    """An own setting in the key of the C++ cache of calls; not in the keys of traces."""
    make = private.part("jax._src.config", "config_ext.Config", use=_SEE)
    try:
        return make("jax_dist_look", None, include_in_jit_key=True)
    except TypeError:  # a setting has no name in 0.7.2
        return make(None, include_in_jit_key=True)


@functools.cache
def _hooks() -> list[tuple[Callable[[Any, Any], None], Any, Any, Any]]:
    """How to put each hook in its place, its name there, what JAX has there, and ours."""
    pjit, array = "jax._src.pjit", "jax._src.array"
    parts = [
        (importlib.import_module(pjit), "_infer_params", _infers),
        (importlib.import_module(pjit), "_pjit_call_impl_python", _runs),
        (importlib.import_module(pjit), "_get_fastpath_data", _hurries),
        (private.part(array, "ArrayImpl", use=_SEE), "_value", _gives_value),
    ]
    for name in ("_infer_params", "_pjit_call_impl_python", "_get_fastpath_data"):
        private.part(pjit, name, use=_SEE)
    private.part(array, "ArrayImpl._value", use=_SEE)
    kind = parts[-1][0]
    if "__buffer__" in vars(kind):  # since Python 3.12; before, memory goes past all of Python
        parts.append((kind, "__buffer__", _gives_buffer))
    else:
        parts += [(np, "asarray", _takes_array), (np, "array", _takes_array)]
    handlers = private.part("jax._src.interpreters.pxla", "shard_arg_handlers", use=_SEE)
    jax.monitoring.register_scalar_listener(_heard)  # cannot be taken back in 0.7.2
    # Our frames stand between the user's in each error under trace; hidden with those of JAX.
    private.hide_frames(__file__)
    return [
        *(
            (functools.partial(setattr, home), name, vars(home)[name], ours(vars(home)[name]))
            for home, name, ours in parts
        ),
        *((handlers.__setitem__, kind, each, _places(each)) for kind, each in handlers.items()),
    ]


def _infers(original: Callable) -> Callable:
    """`_infer_params` traces; with it come the function and its static arguments."""

    @functools.wraps(original)
    def infer(fun: Callable, info: Any, args: Any, kwargs: Any) -> Any:
        if _watching.watcher is None:
            return original(fun, info, args, kwargs)
        before, _watching.traced = _watching.traced, False
        _watching.tracing += 1
        try:
            params, leaves = original(fun, info, args, kwargs)
            statics = _static_arguments(info, args, kwargs)
            _watching.inferred = _Inferred(
                params.params["jaxpr"], fun, params.arg_names, statics, _watching.traced
            )
        finally:
            _watching.traced = before
            _watching.tracing -= 1
        return params, leaves

    return infer


def _static_arguments(info: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = list(info.fun_signature.parameters) if info.fun_signature else []
    places = [place for place in info.static_argnums if -len(args) <= place < len(args)]
    return {
        **{names[at] if at < len(names) else f"argument {at}": args[at] for at in places},
        **{name: kwargs[name] for name in info.static_argnames if name in kwargs},
    }


def _runs(original: Callable) -> Callable:
    """All that runs goes through this, also the programs that transformations make of calls."""

    @functools.wraps(original)
    def run(*leaves: Any, **params: Any) -> Any:
        watcher = _watching.watcher
        if watcher is None:
            return original(*leaves, **params)
        call, slow = _call(leaves, params), watcher.slow
        before, _watching.calls = _watching.calls, (*_watching.calls, call)
        try:
            watcher.called(call)
            result = outputs, executable, _, hoisted = original(*leaves, **params)
        finally:
            _watching.calls = before
        kept = getattr(executable, "_kept_var_idx", None)
        if kept is not None:  # `hoisted` are constants that JAX passes as arguments, in front
            places = range(len(leaves))
            call.unused = frozenset(place for place in places if place + len(hoisted) not in kept)
        watcher.returned(call, outputs)
        _watching.slow = slow
        return result

    return run


def _call(leaves: Sequence[Any], params: dict[str, Any]) -> JitCall:
    program, name, donated = params["jaxpr"], params["name"], params["donated_invars"]
    inferred, _watching.inferred = _watching.inferred, None  # it keeps the function alive
    if inferred is None or inferred.program is not program:
        inferred = _Inferred(program, program, None, {}, traced=False)
    if getattr(inferred.fun, "__module__", None) == _PMAP_MODULE:
        name = "jax.pmap"  # which keeps no name of what it maps
    paths = tuple(inferred.paths or (f"argument {place}" for place in range(len(leaves))))
    return JitCall(inferred.fun, name, leaves, paths, donated, inferred.statics, inferred.traced)


def _hurries(original: Callable) -> Callable:
    """Where this gives None, C++ sends the calls of that key through Python for ever."""

    @functools.wraps(original)
    def fast_path(*args: Any) -> Any:
        if _watching.watcher is not None and _watching.slow:
            return None
        return original(*args)

    return fast_path


def _places(original: Callable) -> Callable:
    """C++ hands here whatever does not lie where the program wants it, if a guard forbids it."""

    @functools.wraps(original)
    def place(values: Sequence[Any], shardings: Sequence[Any], *rest: Any) -> Any:
        if _watching.watcher is None:
            return original(values, shardings, *rest)
        go_on = lambda: original(values, shardings, *rest)
        return _watching.watcher.shards(go_on, values, shardings)

    return place


def _gives_value(original: property) -> property:
    def value(self: Any) -> Any:
        _say_read(self)
        assert original.fget is not None
        return original.fget(self)

    return property(value, doc=original.__doc__)


def _gives_buffer(original: Any) -> Callable:
    """NumPy asks here first; refused, it goes on to `_value`, so both have to refuse."""

    def __buffer__(self: Any, flags: int) -> memoryview:
        _say_read(self)
        return original(self, flags)

    return __buffer__


def _takes_array(original: Callable) -> Callable:
    """NumPy's own doors, for Python 3.11: `.item()` goes through them too."""

    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], jax.Array) and not isinstance(args[0], Tracer):
            _say_read(args[0])
        return original(*args, **kwargs)

    return convert


def _say_read(array: jax.Array) -> None:
    """Unless the host has it, or `jax.device_get` reads it.

    `_npy_value` and `guard_lib`: seen in 0.7.2, 0.10.2 and 0.12.0.1.
    """
    if _watching.watcher is not None and getattr(array, "_npy_value", None) is None:
        state = private.part("jax._src.config", "guard_lib.thread_local_state", use=_SEE)()
        if not state.explicit_device_get:
            _watching.watcher.reads(array)


def _heard(event: str, value: float, **details: Any) -> None:
    """Comes before what takes the time, so that raising here stops it."""
    if _watching.watcher is None:
        return
    if event == _TRACE_EVENT:
        _watching.traced = True
    elif event == _COMPILE_EVENT:
        _watching.watcher.compiles(str(details.get("fun_name", "a function")))


def traced_types(fun: Callable) -> list[list[Any]]:
    """For which types of arguments JAX has traced `fun`: a list of types for each trace.

    The keys of `partial_eval.trace_to_jaxpr` in 0.10.2 and 0.12.0.1, those of `_create_pjit_jaxpr`
    in 0.7.2. Empty where a jax has neither.
    """
    cached = private.find("jax._src.interpreters.partial_eval", "trace_to_jaxpr")
    if cached is not None and hasattr(cached, "cache_keys"):
        return [list(key[2][0].vals) for key in cached.cache_keys() if key[0]() is fun]
    cached = private.find("jax._src.pjit", "_create_pjit_jaxpr")
    for cell in getattr(cached, "__closure__", None) or ():
        if isinstance(cell.cell_contents, weakref.WeakKeyDictionary):
            return [list(key[3][0]) for key in cell.cell_contents.get(fun, {})]
    return []
