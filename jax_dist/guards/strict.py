"""Guards around a training loop: no hidden transfer, no hidden compilation, no lost donation."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from jax_dist.errors import DonationError, RecompileError, TransferError, message
from jax_dist.guards import transfers as transfer_rules
from jax_dist.guards.threads import Donation, GuardEntry

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")

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
            raise _unknown_donation(donation)
        if warmup is not None and (not isinstance(warmup, int) or warmup < 0):
            raise _unknown_warmup(warmup)
        self._transfers, self._recompiles = transfers or None, recompiles or None
        self._donation: Donation = donation
        self._warmup = warmup
        self._step = itertools.count()
        self._entered: list[GuardEntry] = []  # by all threads

    def __enter__(self) -> "strict":
        number = next(self._step)
        entry = GuardEntry(
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
            _drop_hint(error)
        elif (swallowed := entry.swallowed()) is not None:
            raise swallowed
        if entry.transfers and error is not None and transfer_rules.is_refusal(error):
            raise transfer_rules.refused_by_jax(error) from error

    def steps(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each as one step of the block around: the first ones are the warm-up.

        Raises:
          RuntimeError: there is no block around.
        """
        entry = self._innermost()
        if entry is None:
            raise _no_block()
        return self._steps(items, entry)

    def _steps(self, items: Iterable[Item], entry: GuardEntry) -> Iterator[Item]:
        warmup = 1 if self._warmup is None else self._warmup
        try:
            for number, item in enumerate(items):
                if (swallowed := entry.swallowed()) is not None:
                    raise swallowed
                entry.step(warm=number < warmup, look=_is_looked_at(number))
                yield item
        finally:
            entry.step(warm=False, look=False)

    def __call__(self, fun: Function) -> Function:
        """Decorates a function: each call is a step; between the parts of a coroutine it is off."""
        guard = strict(
            transfers=bool(self._transfers),
            recompiles=bool(self._recompiles),
            donation=self._donation,
            warmup=1 if self._warmup is None else self._warmup,
        )
        return _decorated(fun, guard)

    def _innermost(self) -> GuardEntry | None:
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
    yield from _allowed(GuardEntry(transfers=False))


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
    yield from _allowed(GuardEntry(recompiles=False))


def _drop_hint(error: Exception) -> None:
    """JAX adds to each error that its own frames are hidden; here they would tell nothing."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]


def _is_looked_at(step: int) -> bool:
    return step < _FIRST_STEPS or step % _SAMPLE == 0


def _allowed(entry: GuardEntry) -> Iterator[None]:
    entry.enter()
    try:
        yield
    finally:
        entry.leave()


def _decorated(fun: Any, guard: strict) -> Any:
    if inspect.isasyncgenfunction(fun):
        raise _async_generator(fun)
    if inspect.iscoroutinefunction(fun):

        @functools.wraps(fun)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Guarded(fun(*args, **kwargs).__await__(), guard)

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


class _Guarded:
    """Awaited, it runs a coroutine under the guard, which is off while others run."""

    def __init__(self, parts: Generator, guard: strict):
        self._parts, self._guard = parts, guard

    def __await__(self) -> Generator:
        return (yield from _guarded(self._parts, self._guard))


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


def _unknown_donation(donation: object) -> ValueError:
    return ValueError(
        message(
            what="strict got an unknown donation",
            which=[f"donation={donation!r}"],
            why='it is "first", "always" or False',
            do="Leave it out to look at the first calls.",
        )
    )


def _unknown_warmup(warmup: object) -> ValueError:
    return ValueError(
        message(
            what="strict got an unknown warmup",
            which=[f"warmup={warmup!r}"],
            why="it is a number of steps",
            do="Leave it out for one step, or give a whole number from 0 on.",
        )
    )


def _no_block() -> RuntimeError:
    return RuntimeError(
        message(
            what="steps of a guard were asked for outside of its block",
            which=["steps(...)"],
            why="the guard is on in its block only",
            do="Write `with strict() as guard:` around, and loop over guard.steps(...) in it.",
        )
    )


def _async_generator(fun: Any) -> TypeError:
    return TypeError(
        message(
            what="strict cannot guard an asynchronous generator",
            which=[f"{fun.__qualname__} is one"],
            why="others run in the same thread between its parts",
            do="Decorate the function that awaits, or use a block without await in it.",
        )
    )
