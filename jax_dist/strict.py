"""Guards around a training loop: no hidden transfer, no hidden compilation, no lost donation.

`strict` turns on `jax.transfer_guard`, listens to the compilation events of `jax.monitoring`, and
makes JAX's warning about unusable donations an error. Nothing of JAX is replaced, so a call in the
steady state costs what it costs without a guard.
"""

import contextlib
import functools
import itertools
import operator
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from jax_dist._calls import (
    ArgumentInfo,
    CompiledCall,
    call_on_stack,
    check_ends_in_one_call,
    leaves_by_path,
    user_code,
    user_line,
)
from jax_dist.errors import ArgumentError, DonationError, RecompileError, TransferError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Item = TypeVar("_Item")

_HOST_TYPES = (np.ndarray, np.generic, bool, int, float, complex)
_SHOWN = 8  # arguments in one message; programs of one function that are remembered
_LOWER_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_UNUSABLE = "Some donated buffers were not usable"
_DONATION_FILTER: Any = ("error", re.compile(_UNUSABLE), UserWarning, None, 0)


class _Block(NamedTuple):
    """A `with` block of a guard, or a call of a function that it decorates."""

    guard: "strict"
    jax_settings: contextlib.ExitStack  # resets the transfer guard and the ban on compilations
    filters: Any  # warnings.filters at the start: catch_warnings() may replace the list


class _Thread(threading.local):
    """The guards that are active in a thread."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []  # outermost first
        self.stops_compilations = False
        self.lowered_call: CompiledCall | None = None  # the last one


_thread = _Thread()


class strict(contextlib.ContextDecorator):  # in small letters, for it is used as a function
    """Raise an error where a steady program would silently copy, compile or lose memory.

    As a context manager it guards a block; as a decorator, each call of a function. Inside a block
    the guard costs nothing in the steady state. Entering it costs about as much as a few small
    calls, so put it around the loop if steps are short. Each thread has its own guard.

    Args:
      transfers: raise `TransferError` when an array moves between host and device, or between
        devices, unless by `jax.device_put` and `jax.device_get`. This is JAX's transfer guard:
        Python numbers count, and reads from the CPU backend, which copy nothing, do not.
      recompiles: raise `RecompileError` before XLA compiles.
      donation: raise `DonationError` when a program that is compiled cannot use the memory of a
        donated argument. Around a jit or pmap object, as in `strict()(step)`, also check that the
        donated arguments are gone after a call: "first" checks the first three calls and one in
        1000, "always" all.
      warmup: how many first steps may compile and transfer. A step is an item of `steps`, a call of
        a decorated function, or one entering of the block. By default one, and none for a block
        without `steps`: then the warm-up is whatever ran before it.

    Raises:
      ArgumentError: `donation` or `warmup` has an unknown value.

    >>> import jax, jax.numpy as jnp
    >>> step = jax.jit(lambda state, batch: state + batch.sum(), donate_argnums=0)
    >>> batches = [jnp.ones(4), jnp.ones(4), jnp.ones(8)]
    >>> state = jnp.zeros(2)
    >>> with strict() as guard:
    ...     for batch in guard.steps(batches):
    ...         state = step(state, batch)
    Traceback (most recent call last):
    jax_dist.errors.RecompileError: '<lambda>' is compiled after the warm-up, at ...
      batch: float32[4] -> float32[8]
    Pad to a few fixed shapes, or convert to one type, or use jax_dist.allow_recompiles().
    """

    def __init__(
        self,
        *,
        transfers: bool = True,
        recompiles: bool = True,
        donation: Literal["first", "always", False] = "first",
        warmup: int | None = None,
    ):
        if donation not in ("first", "always", False):
            raise ArgumentError(f'donation must be "first", "always" or False, not {donation!r}.')
        if warmup is not None and (not isinstance(warmup, int) or warmup < 0):
            raise ArgumentError(f"warmup must be a number of steps from 0 on, not {warmup!r}.")
        self._transfers, self._recompiles = transfers, recompiles
        self._donation: Any = donation
        self._warmup = warmup
        self._count = itertools.count()

    def __enter__(self) -> "strict":
        """Begin a block, in which transfers and compilations are errors after the warm-up."""
        block = _Block(self, contextlib.ExitStack(), warnings.filters)
        _thread.blocks.append(block)
        step = next(self._count)  # the number of blocks before it
        if step >= (self._warmup or 0):
            self._forbid(block.jax_settings)
        if self._donation:  # make JAX's warning of an unusable donation an error
            if step == 0:  # at each step, the user's warnings would be shown again
                with warnings.catch_warnings():  # its end makes Python forget what it has shown
                    pass
            block.filters.insert(0, _DONATION_FILTER)
        return self

    def _forbid(self, jax_settings: contextlib.ExitStack) -> None:
        """Forbid transfers and compilations until `jax_settings` is closed."""
        jax_settings.close()
        if self._transfers:
            jax_settings.enter_context(jax.transfer_guard("disallow"))
        if self._recompiles:
            jax_settings.enter_context(_set_compilations(stop=True))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End the block; replace an error of JAX for a transfer or donation by one of jax_dist."""
        block = _thread.blocks.pop()
        block.jax_settings.close()
        if self._donation and _DONATION_FILTER in block.filters:
            block.filters.remove(_DONATION_FILTER)
        if isinstance(error, RecompileError | TransferError | DonationError):
            # JAX adds a note on how to see its hidden frames, which tell nothing about our errors.
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
        elif self._transfers and isinstance(error, jax.errors.JaxRuntimeError):
            if "Disallowed" in str(error):
                raise _make_transfer_error(error) from error
        elif self._donation and isinstance(error, UserWarning) and _UNUSABLE in str(error):
            raise _make_donation_error(str(error)) from error

    def steps(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items, each as one step; the first `warmup` steps may compile and transfer.

        Raises:
          RuntimeError: at the first step, if there is no block around.
        """
        blocks = [block for block in _thread.blocks if block.guard is self]
        if not blocks:
            raise RuntimeError("steps() needs the block of its guard: `with strict() as guard:`.")
        settings, iterator = blocks[-1].jax_settings, iter(items)
        settings.close()  # the block has forbidden both from its start
        settings.enter_context(allow_transfers())
        settings.enter_context(allow_recompiles())
        try:
            yield from itertools.islice(iterator, 1 if self._warmup is None else self._warmup)
        finally:
            # A `break` in the loop over the steps may have ended the block already.
            if any(block.jax_settings is settings for block in _thread.blocks):
                self._forbid(settings)  # from now to the end of the block
        yield from iterator

    def __call__(self, func: _Function) -> _Function:
        """Return a function that calls `func` under this guard, with each call as one step."""
        check_ends_in_one_call(func, "strict")
        warmup = 1 if self._warmup is None else self._warmup
        options: Any = {"transfers": self._transfers, "recompiles": self._recompiles}
        guard = strict(**options, donation=self._donation, warmup=warmup)  # counts its own calls
        if self._donation and hasattr(func, "trace") and hasattr(func, "lower"):  # as of jax.jit
            func = _with_donation_check(func, every_call=self._donation == "always")
        return super(strict, guard).__call__(func)  # a ContextDecorator enters it in each call


def allow_transfers() -> contextlib.AbstractContextManager[None]:
    """Let arrays move in this block, within `strict`.

    >>> with strict(recompiles=False), allow_transfers():
    ...     ones = jax.numpy.ones(3)
    """
    return jax.transfer_guard("allow")


def allow_recompiles() -> contextlib.AbstractContextManager[None]:
    """Let functions be compiled in this block, within `strict`; for an evaluation now and then.

    >>> with strict(transfers=False), allow_recompiles():
    ...     four = jax.jit(lambda x: 2 * x)(2)
    """
    return _set_compilations(stop=False)


@contextlib.contextmanager
def _set_compilations(*, stop: bool) -> Iterator[None]:
    """Make compilations in this thread raise RecompileError in the block, or allow them."""
    before, _thread.stops_compilations = _thread.stops_compilations, stop
    try:
        yield
    finally:
        _thread.stops_compilations = before


# Calls that compiled a program, the last few of each function, by its source ("train.py:12").
_compiled_calls: dict[str, deque[CompiledCall]] = {}


def _on_event(event: str, value: float, **details: Any) -> None:
    """Record the call that JAX is about to lower or compile, or raise RecompileError."""
    if event not in (_LOWER_EVENT, _COMPILE_EVENT):
        return
    call = _thread.lowered_call = call_on_stack(str(details.get("fun_name", "a function")))
    if event == _COMPILE_EVENT:
        if _thread.stops_compilations:
            raise _make_recompile_error(call)
        if call.source:
            _compiled_calls.setdefault(call.source, deque(maxlen=_SHOWN)).append(call)


# Despite their names, JAX records these events as scalars when it starts, and as durations later.
jax.monitoring.register_scalar_listener(_on_event)


def _make_recompile_error(call: CompiledCall) -> RecompileError:
    lines, remedy = _explain_compilation(call)
    text = "".join(f"\n  {line}" for line in lines[:_SHOWN])
    return RecompileError(
        f"'{call.name}' is compiled after the warm-up, at {call.line}:{text}\n"
        f"{remedy}, or use jax_dist.allow_recompiles()."
    )


def _explain_compilation(call: CompiledCall) -> tuple[list[str], str]:
    """Return how a compiled call differs from the most similar one before it, and the remedy."""
    same_source = _compiled_calls.get(call.source, ())
    earlier = [old for old in reversed(same_source) if old.fun() is call.fun()]  # latest first
    if earlier:
        alike = [old for old in earlier if old.arguments.keys() == call.arguments.keys()]
        differences = [_compare_arguments(c.arguments, call.arguments) for c in alike or earlier]
        return min(differences, key=lambda difference: len(difference[0]))  # the first of equals
    if same_source:
        text = f"a new function object is made at {call.source} each time"
        return [text], "Create it once before the loop"
    types = [f"{path}: {info.type}" for path, info in call.arguments.items()]
    return ["no earlier call is known; this one:", *types], "Call it once in the warm-up"


def _compare_arguments(
    before: dict[str, ArgumentInfo], after: dict[str, ArgumentInfo]
) -> tuple[list[str], str]:
    """Return how paths, or else types, shardings or values of arguments differ, and the remedy."""
    if after.keys() != before.keys():
        new = [f"{path} is new" for path in after if path not in before]
        gone = [f"{path} is gone" for path in before if path not in after]
        return new + gone, "Pass the same structure in each call"
    for attribute, remedy in (
        ("type", "Pad to a few fixed shapes, or convert to one type"),
        ("sharding", "Place it with jax.device_put before each call, also the first state"),
        ("value", "If it is static, call each value once in the warm-up"),
    ):
        get = operator.attrgetter(attribute)
        pairs = [(path, get(before[path]), get(after[path])) for path in after]
        lines = [f"{path}: {old} -> {new}" for path, old, new in pairs if old != new]
        if lines:
            return lines, remedy
    text = "no argument differs: a setting of JAX does, or its caches were cleared"
    return [text], "Set it once, before the first call"


def _make_transfer_error(error: Any) -> TransferError:
    """Return the error for a transfer, with the variables in the user's line that may move."""
    direction = re.search(r"Disallowed (\w+)-to-(\w+) transfer", str(error))
    source, target = direction.groups() if direction else ("host", "device")
    aval = re.search(r"aval=ShapedArray\((\w+\[[^]]*\])", str(error))
    type_ = aval[1] if aval else None  # such as "float32[4]"
    line, text, variables = user_code(error.__traceback__)
    names = [
        f"{path} {info.type}"
        for path, info in variables.items()
        if info.is_host == (source == "host") and info.type.strip("~") == type_
    ]
    moved = " or ".join(names[:_SHOWN]) or type_ or "an array"
    remedy = "jax.device_get" if target == "host" else "jax.device_put"
    return TransferError(
        f"{moved} moves from {source} to {target}, at {line} in `{text}`. Use {remedy} "
        "where you mean it, once if the value stays the same, or jax_dist.allow_transfers()."
    )


def _make_donation_error(warning: str) -> DonationError:
    """Return the error for JAX's warning "... not usable: float32[4]", with names of arguments."""
    call = _thread.lowered_call  # the one that JAX warns of
    if call is None or not warning.startswith(f"{_UNUSABLE}: "):
        return DonationError(warning)
    types = re.findall(r"\w+\[[\d,]*\]", warning.partition("\n")[0])  # "float32[4]"
    # For a pmap, JAX lists the type of a slice: float32[1,4] for an argument float32[8,4].
    slice_type = lambda type_: re.sub(r"\[\d+", "[1", type_)
    names = [
        f"{path} {info.type}"
        for path, info in call.arguments.items()
        if info.type in types or slice_type(info.type) in types
    ]
    return DonationError(
        f"'{call.name}' cannot use the memory of a donated argument, at {call.line}: no result is "
        f"left that has the type of {' or '.join(names[:_SHOWN] or types)}. Do not donate it."
    )


def _with_donation_check(func: Any, *, every_call: bool) -> Any:
    """Return a function that calls a jit object, and raises if donated arrays are still there."""
    count = itertools.count()

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        number = next(count)
        if not (every_call or number < 3 or number % 1000 == 0):  # a check costs some time
            return func(*args, **kwargs)
        infos = jax.tree.leaves(func.trace(*args, **kwargs).args_info)
        donated_types = [(info.shape, info.dtype) for info in infos if info.donated]
        leaves = leaves_by_path(func, args, kwargs)
        result = func(*args, **kwargs)
        arrays = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, jax.Array)}
        alive = {path: array for path, array in arrays.items() if not array.is_deleted()}
        deleted_count = len(arrays) - len(alive)  # the call deletes what it took
        # JAX donates its own copy of a NumPy array or a number, and deletes nothing of the caller.
        host_avals = [jax.typeof(leaf) for leaf in leaves.values() if isinstance(leaf, _HOST_TYPES)]
        is_copied = any((aval.shape, aval.dtype) in donated_types for aval in host_avals)
        if deleted_count < len(donated_types) and not is_copied:
            paths = [path for path, a in alive.items() if (a.shape, a.dtype) in donated_types]
            raise DonationError(
                f"'{func.__name__}' did not take the memory of the donated "
                f"{' or '.join(paths[:_SHOWN])}, at {user_line()}. It does not use it, no result "
                "has its type and sharding, or a NumPy array shares it."
            )
        return result

    return checked
