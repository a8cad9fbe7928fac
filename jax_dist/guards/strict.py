"""Guards around a training loop: no hidden transfer, no hidden compilation, no lost donation."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar

import jax
from jax.core import Tracer

from jax_dist import _compat
from jax_dist.errors import DonationError, RecompileError, TransferError, refusal
from jax_dist.guards import refusals
from jax_dist.guards.descriptions import is_of_jax
from jax_dist.guards.donation import DonationCheck, weak_key

Donation: TypeAlias = Literal["first", "always", False]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Item = TypeVar("_Item")

_FIRST_STEPS = 3  # whose donations are looked at; then those of one step in a thousand
_SAMPLE = 1000


class strict:  # in small letters, for it is used as a function
    """Raises where a steady program would silently copy, compile or lose memory.

    As a context manager it guards a block; as a decorator, each call of a function. Inside a block
    the guard costs nothing in the steady state. Entering it costs about as much as a few small
    calls, so put it around the loop if steps are short. Each thread has its own guard. If an
    `except` catches the error, as NumPy does in `np.array_equal`, it is raised again: by the next
    call or step, at the latest at the end of the block.

    Args:
      transfers: raise `TransferError` when an array moves between host and device, or between
        devices, unless by `jax.device_put` and `jax.device_get`. Numbers may move: a Python scalar,
        an index.
      recompiles: raise `RecompileError` before XLA compiles.
      donation: raise `DonationError` when the memory of a donated argument is not given up, or when
        a function is fed its own results and donates nothing. "first" checks the first calls of
        each function, and one step in 1000; "always" checks all calls, which is slow.
      warmup: how many first steps may compile and transfer. A step is an item of `steps`, a call of
        a decorated function, or one entering of the block. By default one, and none for a block
        without `steps`: then the warm-up is whatever ran before it.

    Raises:
      ValueError: `donation` or `warmup` has an unknown value.

    >>> import jax, jax.numpy as jnp
    >>> step = jax.jit(lambda state, batch: state + batch.sum(), donate_argnums=0)
    >>> batches = [jnp.ones(4), jnp.ones(4), jnp.ones(8)]
    >>> state = jnp.zeros(2)
    >>> with strict() as guard:
    ...     for batch in guard.steps(batches):
    ...         state = step(state, batch)
    Traceback (most recent call last):
    jax_dist.errors.RecompileError: '<lambda>' would be compiled after the warm-up, at ...
      * batch has the shape (8,), before (4,)
    ...
    """

    def __init__(
        self,
        *,
        transfers: bool = True,
        recompiles: bool = True,
        donation: Donation = "first",
        warmup: int | None = None,
    ):
        if donation not in ("first", "always", False):
            raise refusal(
                ValueError,
                what="strict got an unknown donation",
                which=[f"donation={donation!r}"],
                why='it is "first", "always" or False',
                do="Leave it out to look at the first calls.",
            )
        if warmup is not None and (not isinstance(warmup, int) or warmup < 0):
            raise refusal(
                ValueError,
                what="strict got an unknown warmup",
                which=[f"warmup={warmup!r}"],
                why="it is a number of steps",
                do="Leave it out for one step, or give a whole number from 0 on.",
            )
        self._transfers, self._recompiles = transfers or None, recompiles or None
        self._donation: Donation = donation
        self._warmup = warmup
        self._step = itertools.count()
        self._entered: list[_GuardEntry] = []  # by all threads

    def __enter__(self) -> "strict":
        number = next(self._step)
        entry = _GuardEntry(
            transfers=self._transfers,
            recompiles=self._recompiles,
            donation=self._donation,
            warm=number < (self._warmup or 0),
            look=_is_looked_at(number),
        )
        entry.enter()
        self._entered.append(entry)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entry = self._innermost() or self._entered[-1]  # of a generator that changed its thread
        self._entered.remove(entry)
        entry.leave()
        if isinstance(error, TransferError | RecompileError | DonationError):
            # JAX adds to each error that its own frames are hidden; here they would tell nothing.
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
        else:
            entry.raise_swallowed()
        if entry.transfers and error is not None and refusals.is_refusal(error):
            raise refusals.refused_by_jax(error) from error

    def steps(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each as one step of the block around: the first ones are the warm-up.

        Raises:
          RuntimeError: there is no block around.
        """
        entry = self._innermost()
        if entry is None:
            raise refusal(
                RuntimeError,
                what="steps of a guard were asked for outside of its block",
                which=["steps(...)"],
                why="the guard is on in its block only",
                do="Write `with strict() as guard:` around, and loop over guard.steps(...) in it.",
            )
        return self._steps(items, entry)

    def _steps(self, items: Iterable[_Item], entry: "_GuardEntry") -> Iterator[_Item]:
        warmup = 1 if self._warmup is None else self._warmup
        try:
            for number, item in enumerate(items):
                entry.raise_swallowed()
                entry.step(warm=number < warmup, look=_is_looked_at(number))
                yield item
        finally:
            entry.step(warm=False, look=False)

    def __call__(self, fun: _Function) -> _Function:
        """Decorates a function: each call is a step; between the parts of a coroutine it is off."""
        guard = strict(
            transfers=bool(self._transfers),
            recompiles=bool(self._recompiles),
            donation=self._donation,
            warmup=1 if self._warmup is None else self._warmup,
        )
        return _decorated(fun, guard)

    def _innermost(self) -> "_GuardEntry | None":
        """The block of this guard that this thread is in."""
        return next((entry for entry in reversed(self._entered) if entry.is_mine()), None)


@contextlib.contextmanager
def allow_transfers() -> Iterator[None]:
    """Lets arrays move in this block, within `strict`.

    >>> import jax.numpy as jnp
    >>> loss = jnp.float32(2.5)
    >>> with strict():
    ...     with allow_transfers():
    ...         float(loss)
    2.5
    """
    yield from _allowed(_GuardEntry(transfers=False))


@contextlib.contextmanager
def allow_recompiles() -> Iterator[None]:
    """Lets functions be compiled in this block, within `strict`; for an evaluation now and then.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones(3)
    >>> with strict():
    ...     with allow_recompiles():
    ...         doubled = jax.jit(lambda x: 2 * x)(x)
    >>> doubled.tolist()
    [2.0, 2.0, 2.0]
    """
    yield from _allowed(_GuardEntry(recompiles=False))


def _is_looked_at(step: int) -> bool:
    return step < _FIRST_STEPS or step % _SAMPLE == 0


def _allowed(entry: "_GuardEntry") -> Iterator[None]:
    entry.enter()
    try:
        yield
    finally:
        entry.leave()


def _decorated(fun: Any, guard: strict) -> Any:
    if inspect.isasyncgenfunction(fun):
        raise refusal(
            TypeError,
            what="strict cannot guard an asynchronous generator",
            which=[f"{fun.__qualname__} is one"],
            why="others run in the same thread between its parts",
            do="Decorate the function that awaits, or use a block without await in it.",
        )
    if inspect.iscoroutinefunction(fun):

        @functools.wraps(fun)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _awaited(fun(*args, **kwargs).__await__(), guard)

        return coroutine
    if inspect.isgeneratorfunction(fun):

        @functools.wraps(fun)
        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from _guarded(fun(*args, **kwargs), guard))

        return generator

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        with guard:
            return fun(*args, **kwargs)

    return call


def _guarded(parts: Generator, guard: strict) -> Generator:
    """Each part, from one yield to the next, as one step of the guard."""
    send: Callable[[], Any] = lambda: next(parts)
    while True:
        try:
            with guard:
                item = send()
        except StopIteration as end:
            return end.value
        try:
            got = yield item
        except BaseException as error:  # noqa: BLE001, it is the generator's own, also when it is closed
            send = functools.partial(parts.throw, error)
        else:
            send = functools.partial(parts.send, got)


_awaited = types.coroutine(_guarded)


# --- what is guarded in each thread now: entered and left in any order, always put back as it was


_Refusal: TypeAlias = TransferError | RecompileError | DonationError

_LOOKS = 3  # calls of one function that are looked at, before JAX may hurry them
_LOOKS_AT_ALL = 300  # where no function comes back
_LOOK, _HURRY = "look", "hurry"  # under the first all calls go through Python


@dataclasses.dataclass(slots=True, eq=False)
class _GuardEntry:
    """A guard that was entered, or an allowance; None leaves it to what is around."""

    transfers: bool | None = None
    recompiles: bool | None = None
    donation: Donation | None = None
    warm: bool = False  # whether this is the warm-up: seen, not guarded
    look: bool = True  # whether donation is looked at from the start
    home: "list[_GuardEntry] | None" = None  # the entries of the thread that entered it
    refusal: _Refusal | None = None  # the last one in it that nobody has seen leave it

    def enter(self) -> None:
        self.home = _thread.entries
        self.home.append(self)
        _thread.update(fresh=True)

    def leave(self) -> None:
        """Ends it in the thread that entered it; left by another one, that finds out later."""
        if self.home is not None:
            self.home.remove(self)
            self.home = None
        _thread.update()

    def raise_swallowed(self) -> None:
        """Raises again, once, what some `except` on the way has caught; not what is on its way out.

        NumPy catches all errors in `np.array_equal`, for one, and then says False.
        """
        swallowed = self.refusal
        if swallowed is not None and not _is_on_its_way(swallowed):
            self.refusal = None
            again = type(swallowed)(*swallowed.args)
            again.add_note("It was raised before, and an `except` on its way has caught it.")
            raise again

    def is_mine(self) -> bool:
        """Whether this thread entered it."""
        return self.home is _thread.entries

    def step(self, *, warm: bool, look: bool) -> None:
        """The next step of the same block begins."""
        again = look and not self.look  # after steps that were not looked at
        changed = (warm, look) != (self.warm, self.look)
        self.warm, self.look = warm, look
        if changed and self.is_mine():
            _thread.update(fresh=again)


class _Watcher(_compat.CallWatcher):
    """Sees the calls of one thread, as far as they go through Python."""

    def __init__(self) -> None:
        self.transfers = self.recompiles = self.warm = False
        self.donation: Donation = False
        self.look = _HURRY
        self._check = DonationCheck()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # functions that were looked at
        self._looks: dict[object, int] = {}
        self._compiled = False  # whether the call under way was

    @property
    def slow(self) -> bool:  # type: ignore[override]
        return self.look == _LOOK

    def begin(self, *, look: bool) -> None:
        """A block, or a step: looked at, or hurried through with what is known."""
        wanted = self.donation == "always" or (self.donation == "first" and look)
        self.look = _LOOK if wanted else _HURRY
        self._looks = {}

    def called(self, call: _compat.JitCall) -> None:
        if getattr(call.fun, "__module__", None) == _compat.PMAP_MODULE:
            call.name = "jax.pmap"  # which keeps no name of what it maps
        with self._remembering():
            for entry in reversed(_thread.entries):
                entry.raise_swallowed()
            if self.donation:
                self._check.called(call, checked=not self.warm)

    def returned(self, call: _compat.JitCall, outputs: Sequence[Any]) -> None:
        if any(isinstance(output, Tracer) for output in outputs):
            return
        if self._count(call) <= _LOOKS or self._compiled:
            refusals.remember(call)
        self._compiled = False
        if self.donation:
            with self._remembering():
                self._check.returned(call, outputs, checked=not self.warm)

    def compiles(self, name: str) -> None:
        _thread.refresh()
        if self.recompiles:
            with self._remembering():
                raise refusals.recompile_error(name)
        self._compiled = True

    def shards(self, place: Any, values: Sequence[Any], shardings: Sequence[Any]) -> Any:
        _thread.refresh()
        if not self.transfers:
            return place()
        with self._remembering():
            return refusals.guarded_placing(place, values, shardings)

    def reads(self, array: jax.Array) -> None:
        _thread.refresh()
        if self.transfers:
            with self._remembering():
                refusals.refuse_reading(array)

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        """A refusal in this block is raised again later, if it never leaves the guarded one."""
        try:
            yield
        except (TransferError, RecompileError, DonationError) as error:
            for entry in _thread.guards()[-1:]:
                entry.refusal = error
            self.look = _LOOK  # the next call goes through Python, and is refused
            _compat.watch_calls(self, self.look)
            raise

    def _count(self, call: _compat.JitCall) -> int:
        """How often the function was looked at; hurries all when one comes back often enough."""
        source, of_user = refusals.source_of(call.fun), not is_of_jax(call.fun)
        if self.look == _HURRY and of_user and weak_key(call.fun) not in self._known:
            self.begin(look=True)
        self._known.add(weak_key(call.fun))
        count = self._looks[source] = self._looks.get(source, 0) + 1
        enough = (of_user and count >= _LOOKS) or sum(self._looks.values()) >= _LOOKS_AT_ALL
        if enough and self.donation != "always":
            self.look = _HURRY
        _compat.watch_calls(self, self.look)
        return count


class _Thread(threading.local):
    """The entries of one thread, and the settings of JAX that follow from them."""

    def __init__(self) -> None:
        self.entries: list[_GuardEntry] = []
        self.watcher = _Watcher()
        self.level: str | None = None
        self.guard = contextlib.ExitStack()
        self.applied: list[_GuardEntry] = []  # the entries that the settings follow from

    def refresh(self) -> None:
        """Follows what another thread has ended of this one."""
        if self.entries != self.applied:
            self.update()

    def guards(self) -> list[_GuardEntry]:
        """Those that do not only allow something."""
        return [entry for entry in self.entries if entry.donation is not None]

    def update(self, *, fresh: bool = False) -> None:
        """Makes JAX's guard and the watcher what the entries want."""
        self.applied = list(self.entries)
        wanted = _innermost(self.entries, "transfers")
        level = {True: "disallow", False: "allow", None: None}[wanted]
        if level != self.level:
            self.guard.close()
            self.level = level
            if level is not None:
                self.guard.enter_context(jax.transfer_guard(level))
        watched = self.guards()
        if not watched:
            self.watcher.transfers = self.watcher.recompiles = self.watcher.donation = False
            _compat.watch_calls(None, None)
            return
        self.watcher.transfers = wanted is True
        self.watcher.recompiles = _innermost(self.entries, "recompiles") is True
        self.watcher.warm = watched[-1].warm
        donations: list[Donation] = [entry.donation for entry in watched if entry.donation]
        self.watcher.donation = donations[-1] if donations else False
        if fresh and watched[-1] is self.entries[-1]:
            self.watcher.begin(look=watched[-1].look)
        _compat.watch_calls(self.watcher, self.watcher.look)


_thread = _Thread()


def _is_on_its_way(refusal: BaseException) -> bool:
    """Whether it, or what it became, is being handled now: by a `finally`, say."""
    error = sys.exc_info()[1]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if error is refusal:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _innermost(entries: Sequence[_GuardEntry], aspect: str) -> Any:
    """What the innermost entry says of it that says anything."""
    said = [getattr(entry, aspect) for entry in entries if not entry.warm]
    return next((value for value in reversed(said) if value is not None), None)
