"""Guards around a training loop: no hidden transfer, no hidden compilation, no lost donation."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

from jax_dist.errors import refusal
from jax_dist.guards.blocks import REFUSALS, Block
from jax_dist.guards.transfers import is_refusal, refused_by_jax

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Item = TypeVar("_Item")

_FIRST_STEPS = 3  # whose donations are looked at; then those of one step in a thousand
_SAMPLE = 1000


class strict(contextlib.ContextDecorator):  # in small letters, for it is used as a function
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
        donation: Literal["first", "always", False] = "first",
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
        self._parts: Any = {"transfers": transfers, "recompiles": recompiles, "donation": donation}
        self._warmup = warmup
        self._step = itertools.count()
        self._entered: list[Block] = []  # by all threads

    def __enter__(self) -> "strict":
        number = next(self._step)
        parts = {part: value or None for part, value in self._parts.items()}
        warm = number < (self._warmup or 0)
        block = Block(**parts, warm=warm, look=_is_looked_at(number))
        block.__enter__()
        self._entered.append(block)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        block = self._innermost() or self._entered[-1]  # of a generator that changed its thread
        self._entered.remove(block)
        block.__exit__()
        if isinstance(error, REFUSALS):
            # JAX adds to each error that its own frames are hidden; here they would tell nothing.
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
        elif block.refusal is not None:
            raise block.swallowed()
        if block.transfers and error is not None and is_refusal(error):
            raise refused_by_jax(error) from error

    def steps(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each as one step of the block around: the first ones are the warm-up.

        Raises:
          RuntimeError: there is no block around.
        """
        block = self._innermost()
        if block is None:
            raise refusal(
                RuntimeError,
                what="steps of a guard were asked for outside of its block",
                which=["steps(...)"],
                why="the guard is on in its block only",
                do="Write `with strict() as guard:` around, and loop over guard.steps(...) in it.",
            )
        return self._steps(items, block)

    def _steps(self, items: Iterable[_Item], block: Block) -> Iterator[_Item]:
        try:
            for number, item in enumerate(items):
                block.raise_swallowed()
                block.step(warm=number < self._warmup_or_one(), look=_is_looked_at(number))
                yield item
        finally:
            block.step(warm=False, look=False)

    def __call__(self, func: _Function) -> _Function:
        """Decorates a function: each call is a step."""
        guard = strict(**self._parts, warmup=self._warmup_or_one())
        is_generator = inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func)
        if is_generator or inspect.iscoroutinefunction(func):
            raise refusal(
                TypeError,
                what="strict cannot guard a generator or a coroutine",
                which=[f"{func.__qualname__} is one"],
                why="others run in the same thread between its parts",
                do="Decorate the function that does one step, or use a block without await and "
                "yield in it.",
            )
        return super(strict, guard).__call__(func)

    def _warmup_or_one(self) -> int:
        return 1 if self._warmup is None else self._warmup

    def _innermost(self) -> Block | None:
        """The block of this guard that this thread is in."""
        return next((block for block in reversed(self._entered) if block.is_mine), None)


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
    with Block(transfers=False):
        yield


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
    with Block(recompiles=False):
        yield


def _is_looked_at(step: int) -> bool:
    return step < _FIRST_STEPS or step % _SAMPLE == 0
