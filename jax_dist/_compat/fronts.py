"""Calls that JAX dispatches in C++, with a fallback to Python that is given the arguments.

A jit object asks Python about a signature that it does not know, but Python then sees tracers, not
the arguments: where they lie, and whether they should be moved first, cannot be told any more. To
look at the arguments before each call instead costs 6 to 10 % of a call of one argument; a class
with `__call__` and `try` costs 8 to 10 %. A front costs 1 to 2 %.

The private parts, all seen in 0.7.2, 0.10.2 and 0.12.0.1: `pjit` of `jaxlib._jax`, the class of all
jit objects; `_cache_miss` of a jit object, which runs a call and returns what such an object has to
remember; `dispatch_registry` of `jax._src.tree_util`; `cc_shard_arg` of
`jax._src.interpreters.pxla`. Where one of them is missing, every call goes
through Python: the same results, some 100 us later.

A jit object also tells what it was given as options, and what it remembers. For the guards, the
calls of jit objects, the transfers and the compilations of one thread are seen here.
"""

import contextlib
import dataclasses
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer

from jax_dist._compat import private
from jax_dist._compat.private import config_value
from jax_dist.errors import UnsupportedError

Answer: TypeAlias = tuple[Any, Any, bool]  # results, what C++ has to remember, whether it is stale
_Miss: TypeAlias = Callable[..., Answer]


def front(
    name: str,
    miss: _Miss,
    *,
    fun: Callable,
    without_jit: Callable,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> Callable[..., Any]:
    """A callable that remembers how to run signatures, and asks `miss` about the others.

    Args:
      name: in profiles.
      miss: makes a call. What it returns besides the results comes from `run_jit`; None instead of
        it means that this signature has to be asked about again.
      fun: what the jit objects behind trace; `jax.debug_nans` runs it once more, without jit.
      without_jit: makes a call under `jax.disable_jit`.
      static_argnums: positions of arguments whose value is part of the signature.
      static_argnames: the same by keyword.
    """
    if not _can_remember():

        def asking_always(*args: Any, **kwargs: Any) -> Any:
            if config_value("jax_disable_jit"):
                return without_jit(*args, **kwargs)
            return miss(*args, **kwargs)[0]

        return asking_always
    made: Any = _new_front(name, miss, without_jit, tuple(static_argnums), tuple(static_argnames))
    made._fun = fun
    return made


def run_jit(jitted: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Answer:
    """Calls a jit object, for a front to remember the call."""
    if _can_remember():
        return jitted._cache_miss(*args, **kwargs)
    return jitted(*args, **kwargs), None, False


@functools.cache
def _can_remember() -> bool:
    """Whether this jax has what fronts need. Starts no backend."""
    try:
        trial = _new_front("trial", _no_answer, _no_answer, (), ())
        return hasattr(jax.jit(_no_answer), "_cache_miss") and trial(1) == "asked"
    except (UnsupportedError, TypeError):
        return False


def _no_answer(*_: Any) -> Answer:
    return "asked", None, False


def _new_front(
    name: str,
    miss: _Miss,
    without_jit: Callable,
    static_argnums: tuple[int, ...],
    static_argnames: tuple[str, ...],
) -> Callable[..., Any]:
    use = "have JAX remember calls"
    pjit = private.part("jaxlib._jax", "pjit", use=use)
    registry = private.part("jax._src.tree_util", "dispatch_registry", use=use)
    pxla = "jax._src.interpreters.pxla"
    shard_arg = private.part(pxla, "cc_shard_arg", use=use)
    shared_key = object()  # of a cache that is shared by what has the same one: nothing has
    return pjit(
        name, without_jit, miss, static_argnums, static_argnames, shared_key, registry, shard_arg
    )


@dataclasses.dataclass(frozen=True, slots=True)
class JitOptions:
    """What was said to `jax.jit`, as far as a jit around it has to repeat it."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    keep_unused: bool = False
    compiler_options: dict[str, Any] | None = None

    @classmethod
    def of(cls, fun: Any) -> "JitOptions":
        """The options of a jit object; the defaults for any other callable.

        A jit object tells what it donates (`trace(...).args_info`), but not which arguments are
        static. `_jit_info`: seen in 0.7.2, 0.10.2 and 0.12.0.1. Where a jit object has it not,
        there is no default: taking a static argument for an array would fail far from here.
        """
        if not _is_jit(fun):
            return cls()
        info = fun._jit_info
        return cls(
            static_argnums=tuple(info.static_argnums),
            static_argnames=tuple(info.static_argnames),
            donate_argnums=tuple(info.donate_argnums),
            donate_argnames=tuple(info.donate_argnames),
            keep_unused=bool(info.keep_unused),
            compiler_options=dict(info.compiler_options_kvs) or None,
        )


def inside_jit(fun: Any) -> Callable:
    """The function in a jit object, which may remember a trace; `fun` where that says shardings."""
    if not _is_jit(fun):
        return fun
    info: Any = fun._jit_info
    shardings = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    said = any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)
    return fun if said else fun.__wrapped__


def _is_jit(fun: Any) -> bool:
    return hasattr(fun, "lower") and hasattr(fun, "clear_cache")


def jit_like(fun: Any) -> Any:
    """`fun` if it is a jit object, else `jax.jit(fun)`."""
    return fun if hasattr(fun, "clear_cache") and hasattr(fun, "trace") else jax.jit(fun)


def traced_types(fun: Callable) -> list[dict[str, Any]]:
    """For which types of arguments JAX has traced `fun`: path to type, one dict a trace.

    The keys of `partial_eval.trace_to_jaxpr` in 0.10.2 and 0.12.0.1, those of `_create_pjit_jaxpr`
    in 0.7.2, which know no paths. Empty where a jax has neither.
    """
    cached = private.find("jax._src.interpreters.partial_eval", "trace_to_jaxpr")
    if cached is not None and hasattr(cached, "cache_keys"):
        keys = [key for key in cached.cache_keys() if key[0]() is fun]
        return [dict(zip(key[2][1].arg_names, key[2][0].vals, strict=False)) for key in keys]
    cached = private.find("jax._src.pjit", "_create_pjit_jaxpr")
    for cell in getattr(cached, "__closure__", None) or ():
        if isinstance(cell.cell_contents, weakref.WeakKeyDictionary):
            keys = cell.cell_contents.get(fun, {})
            return [{str(place): aval for place, aval in enumerate(key[3][0])} for key in keys]
    return []


@dataclasses.dataclass(slots=True)
class JitCall:
    """A call of a jit object that goes through Python: its first ones, and those JAX cannot hurry.

    `leaves`, `paths` and `donated` are of the arguments that are not static, in one order.
    """

    fun: Callable
    name: str
    leaves: Sequence[Any]
    paths: tuple[str, ...]
    donated: tuple[bool, ...]
    statics: dict[str, Any]  # argument to value
    traced: bool = False  # whether this call had the function traced
    unused: frozenset[int] = frozenset()  # places of leaves that the program leaves out
    notes: Any = None  # of the watcher


class CallWatcher:
    """What a thread does around its calls; this one does nothing."""

    slow = False  # whether a call seen now keeps going through Python, as long as `look` is same

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


class _Watching(threading.local):
    watcher: CallWatcher | None = None
    calls: tuple[JitCall, ...] = ()  # from the outermost to the innermost
    before: Any = None  # what `look` was, where it was changed
    inferring = False  # whether what is traced next is a call, in 0.7.2
    inferred: tuple[Any, Any, bool] | None = None  # options, parameters, whether newly traced
    traced = False
    tracing = 0  # how many functions are being traced, each in the one before
    slow = False  # whether the call that just ended keeps going through Python


_watching = _Watching()
_SEE = "see the calls, transfers and compilations of a program, as strict does,"
_watch_lock = threading.Lock()
_watching_threads: set[int] = set()
PMAP_MODULE = "jax._src.pmap"  # of what `jax.pmap` returns; seen in 0.10.2 and 0.12.0.1
_JIT_RUNNERS = ("_run_python_pjit", "_python_pjit_helper")  # since 0.8; before
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

    Calls that JAX hurries through C++ are not seen. Each other value of `look` has every function
    come through Python once, without compiling it: it is a part of the key of JAX's C++ cache of
    calls, and of no other.

    The names: `_infer_params` and `_get_fastpath_data` in `jax._src.pjit`, `_run_python_pjit` there
    (`_python_pjit_helper` in 0.7.2), `shard_arg_handlers` in `jax._src.interpreters.pxla`,
    `ArrayImpl._value`, `config_ext.Config`; seen in 0.7.2, 0.10.2 and 0.12.0.1.

    Raises:
      UnsupportedError: this jax has other ones.
    """
    with _watch_lock:
        watched = bool(_watching_threads)
        change = _watching_threads.discard if watcher is None else _watching_threads.add
        change(threading.get_ident())
        if watched != bool(_watching_threads):  # ours are around JAX's only while a thread watches
            hooks = _hooks()
            for home, name, original, ours in hooks.names:
                setattr(home, name, original if watched else ours)
            _shard_arg_handlers().update(hooks.handlers if watched else hooks.our_handlers)
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Hooks:
    names: tuple[tuple[Any, str, Any, Any], ...]  # object, name, JAX's, ours
    handlers: dict[Any, Any]
    our_handlers: dict[Any, Any]


@functools.cache
def _hooks() -> _Hooks:
    pjit = importlib.import_module("jax._src.pjit")
    array = private.part("jax._src.array", "ArrayImpl", use=_SEE)
    runner = next((name for name in _JIT_RUNNERS if hasattr(pjit, name)), _JIT_RUNNERS[0])
    parts: list[tuple[Any, str, Callable]] = [
        (pjit, "_infer_params", _infers),
        (pjit, "_get_fastpath_data", _hurries),
        (pjit, runner, _runs if runner == _JIT_RUNNERS[0] else _runs_and_infers),
        (array, "_value", _gives_value),
    ]
    if "__buffer__" in vars(array):  # since Python 3.12; before, memory goes past all of Python
        parts.append((array, "__buffer__", _gives_buffer))
    else:
        parts += [(np, "asarray", _takes_array), (np, "array", _takes_array)]
    for home, name, _ in parts:
        if home is pjit:
            private.part("jax._src.pjit", name, use=_SEE)
    private.part("jax._src.array", "ArrayImpl._value", use=_SEE)
    handlers = dict(_shard_arg_handlers())
    jax.monitoring.register_scalar_listener(_heard)  # cannot be taken back in 0.7.2
    # Our frames stand between the user's in each error under trace; hidden with those of JAX.
    hide_frames(__file__)
    return _Hooks(
        names=tuple(
            (home, name, vars(home)[name], ours(vars(home)[name])) for home, name, ours in parts
        ),
        handlers=handlers,
        our_handlers={kind: _places(handler) for kind, handler in handlers.items()},
    )


def hide_frames(path: str) -> None:
    """Leaves files below `path` out of JAX's tracebacks and of `jax.debug.breakpoint`."""
    hide = private.find("jax._src.traceback_util", "register_exclusion")
    if hide is not None:
        hide(path)


def _shard_arg_handlers() -> dict[Any, Any]:
    return private.part("jax._src.interpreters.pxla", "shard_arg_handlers", use=_SEE)


def _infers(original: Callable) -> Callable:
    """`_infer_params` traces; with it come the options of the jit object."""

    @functools.wraps(original)
    def infer(fun: Callable, info: Any, args: Any, kwargs: Any) -> Any:
        if _watching.watcher is None:
            return original(fun, info, args, kwargs)
        of_call, _watching.inferring = _watching.inferring, False
        before, _watching.traced = _watching.traced, False
        _watching.tracing += 1
        try:
            params, leaves = original(fun, info, args, kwargs)
            _watching.inferred = (info, params, _watching.traced)
        finally:
            _watching.traced = before
            _watching.tracing -= 1
        if of_call:
            call = _watching.calls[-1]
            _watching.watcher.called(_describe(call, _watching.inferred, leaves, args, kwargs))
        return params, leaves

    return infer


def _runs(original: Callable) -> Callable:
    """Since 0.8 a call is traced first, then handed to this."""

    @functools.wraps(original)
    def run(params: Any, leaves: Any, fun: Callable, args: Any, kwargs: Any) -> Any:
        watcher, inferred = _watching.watcher, _watching.inferred
        if watcher is None or inferred is None or inferred[1] is not params:
            return original(params, leaves, fun, args, kwargs)
        slow = watcher.slow
        with _under_way(fun) as call:
            watcher.called(_describe(call, inferred, leaves, args, kwargs))
            result = original(params, leaves, fun, args, kwargs)
        _and_returned(watcher, call, result)
        _watching.slow = slow
        return result

    return run


def _runs_and_infers(original: Callable) -> Callable:
    """Before 0.8 this traces too."""

    @functools.wraps(original)
    def run(fun: Callable, info: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = _watching.watcher
        if watcher is None:
            return original(fun, info, *args, **kwargs)
        slow = watcher.slow
        with _under_way(fun) as call:
            _watching.inferring = True
            try:
                result = original(fun, info, *args, **kwargs)
            finally:
                _watching.inferring = False
        _and_returned(watcher, call, result)
        _watching.slow = slow
        return result

    return run


@contextlib.contextmanager
def _under_way(fun: Callable) -> Iterator[JitCall]:
    call = JitCall(fun, getattr(fun, "__name__", str(fun)), (), (), (), {})
    before, _watching.calls = _watching.calls, (*_watching.calls, call)
    try:
        yield call
    finally:
        _watching.calls = before


def _describe(
    call: JitCall, inferred: Any, leaves: Sequence[Any], args: Any, kwargs: Any
) -> JitCall:
    info, params, call.traced = inferred
    donated = params.params["donated_invars"]
    call.leaves = tuple(leaves)
    call.donated = tuple(donated)[len(donated) - len(call.leaves) :]
    call.paths = tuple(params.arg_names or (f"argument {i}" for i in range(len(call.leaves))))
    names = list(info.fun_signature.parameters) if info.fun_signature else []
    for place in info.static_argnums:
        if -len(args) <= place < len(args):
            name = names[place] if place < len(names) else f"argument {place}"
            call.statics[name] = args[place]
    for name in info.static_argnames:
        if name in kwargs:
            call.statics[name] = kwargs[name]
    return call


def _and_returned(watcher: CallWatcher, call: JitCall, result: Any) -> None:
    """`result`: outputs, their leaves, their tree, arguments, jaxpr, executable, and two more."""
    kept = getattr(result[5], "_kept_var_idx", None)
    if kept is not None:
        hoisted = len(result[7])  # constants that JAX passes as arguments, in front
        places = range(len(call.leaves))
        call.unused = frozenset(place for place in places if place + hoisted not in kept)
    watcher.returned(call, result[1])


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
        if _watching.watcher is not None and self._npy_value is None and not _explicit_get():
            _watching.watcher.reads(self)
        assert original.fget is not None
        return original.fget(self)

    return property(value, doc=original.__doc__)


def _gives_buffer(original: Any) -> Callable:
    """NumPy asks here first; refused, it goes on to `_value`, so both have to refuse."""

    def __buffer__(self: Any, flags: int) -> memoryview:
        if _watching.watcher is not None and not _explicit_get():
            _watching.watcher.reads(self)
        return original(self, flags)

    return __buffer__


def _takes_array(original: Callable) -> Callable:
    """NumPy's own doors, for Python 3.11: `.item()` goes through them too."""

    @functools.wraps(original)
    def convert(*args: Any, **kwargs: Any) -> Any:
        array = args[0] if args and isinstance(args[0], jax.Array) else None
        watcher = None if isinstance(array, Tracer) else _watching.watcher
        if watcher is not None and array is not None and not _explicit_get():
            watcher.reads(array)
        return original(*args, **kwargs)

    return convert


def _explicit_get() -> bool:
    """Whether this is within `jax.device_get`. `guard_lib`: in 0.7.2, 0.10.2 and 0.12.0.1."""
    state = private.part("jax._src.config", "guard_lib.thread_local_state", use=_SEE)()
    return state.explicit_device_get


def _heard(event: str, value: float, **details: Any) -> None:
    """Comes before what takes the time, so that raising here stops it."""
    if _watching.watcher is None:
        return
    if event == _TRACE_EVENT:
        _watching.traced = True
    elif event == _COMPILE_EVENT:
        _watching.watcher.compiles(str(details.get("fun_name", "a function")))
