"""The guarded blocks of each thread: entered and left in any order, JAX's settings put back."""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax

from jax_dist import _compat
from jax_dist.errors import DonationError, RecompileError, TransferError
from jax_dist.guards.compilations import recompile_error, remember
from jax_dist.guards.descriptions import is_of_jax
from jax_dist.guards.donation import DonationCheck
from jax_dist.guards.transfers import guarded_placing, refuse_reading

REFUSALS = (TransferError, RecompileError, DonationError)

_LOOKS = 3  # calls of one function that are looked at, before JAX may hurry them
_LOOKS_AT_ALL = 300  # where no function comes back
_Look: TypeAlias = Literal["look", "hurry"]  # under the first all calls go through Python


@dataclass(slots=True, eq=False)
class Block:
    """A guard that was entered, or an allowance; None leaves it to what is around."""

    transfers: bool | None = None
    recompiles: bool | None = None
    donation: Literal["first", "always"] | None = None
    warm: bool = False  # whether this is the warm-up: seen, not guarded
    look: bool = True  # whether donation is looked at from the start
    home: "list[Block] | None" = None  # the blocks of the thread that entered it
    refusal: Exception | None = None  # the last one in it that nobody has seen leave it

    def __enter__(self) -> None:
        self.home = thread.blocks
        self.home.append(self)
        if self.is_guard:
            thread.begin(look=self.look)
        thread.update()

    def __exit__(self, *error: object) -> None:
        """Ends it in the thread that entered it; left by another one, that finds out later."""
        if self.home is not None:
            self.home.remove(self)
            self.home = None
        thread.update()

    def step(self, *, warm: bool, look: bool) -> None:
        """The next step of the same block begins."""
        if (warm, look) == (self.warm, self.look):
            return
        begins = look and not self.look  # after steps that were not looked at
        self.warm, self.look = warm, look
        if self.is_mine:
            if begins:
                thread.begin(look=True)
            thread.update()

    def raise_swallowed(self) -> None:
        """Raises again what some `except` on the way has caught; not what is on its way out.

        NumPy catches all errors in `np.array_equal`, for one, and then says False.
        """
        if self.refusal is not None and sys.exc_info()[1] is None:
            raise self.swallowed()

    def swallowed(self) -> Exception:
        """The last refusal in it, to be raised once more."""
        assert self.refusal is not None
        again, self.refusal = type(self.refusal)(*self.refusal.args), None
        again.add_note("It was raised before, and an `except` on its way has caught it.")
        return again

    @property
    def is_mine(self) -> bool:
        """Whether this thread entered it."""
        return self.home is thread.blocks

    @property
    def is_guard(self) -> bool:
        """Whether it does not only allow something."""
        return bool(self.transfers or self.recompiles or self.donation)


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps what the method refuses, to be raised again if it never leaves the guarded block."""

    @functools.wraps(method)
    def noting(self: "_Thread", *args: Any) -> Any:
        if self.blocks != self.applied:  # another thread has ended one
            self.update()
        try:
            return method(self, *args)
        except REFUSALS as error:
            for guard in self.guards()[-1:]:
                guard.refusal = error
                self.look = "look"  # the next call goes through Python, and is refused
                _compat.watch_calls(self, self.look)
            raise

    return noting


class _Thread(threading.local, _compat.CallWatcher):
    """The blocks of one thread, the settings of JAX that they want, and the calls in them."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []  # from the outermost to the innermost
        self.applied: list[Block] = []  # those that the settings of JAX follow from
        self.level: str | None = None  # of JAX's transfer guard; None: as the user says
        self.transfer_guard: contextlib.ExitStack = contextlib.ExitStack()
        self.look: _Look = "hurry"
        self.looks: weakref.WeakKeyDictionary[Callable[..., Any], int]  # by the function
        self.looks = weakref.WeakKeyDictionary()
        self.donations: DonationCheck = DonationCheck()
        self.compiled: bool = False  # whether the call under way was

    @property
    def slow(self) -> bool:
        return self.look == "look"

    def guards(self) -> list[Block]:
        return [block for block in self.blocks if block.is_guard]

    def says(self, part: str, *, in_warmup: bool = False) -> Any:
        """What the innermost block says of it that says anything."""
        blocks = [block for block in reversed(self.blocks) if in_warmup or not block.warm]
        return next((said for block in blocks if (said := getattr(block, part)) is not None), None)

    def begin(self, *, look: bool) -> None:
        """A block, or a step: looked at, or hurried through with what is known."""
        donation = self.says("donation", in_warmup=True)
        is_looked_at = donation == "always" or (donation == "first" and look)
        self.look = "look" if is_looked_at else "hurry"
        if look:
            self.looks.clear()

    def update(self) -> None:
        """Makes JAX's guard and the watcher what the blocks want."""
        self.applied = list(self.blocks)
        level = {True: "disallow", False: "allow", None: None}[self.says("transfers")]
        if level != self.level:
            self.transfer_guard.close()
            self.level = level
            if level is not None:
                self.transfer_guard.enter_context(jax.transfer_guard(level))
        _compat.watch_calls(*((self, self.look) if self.guards() else (None, None)))

    @_noted
    def called(self, call: _compat.JitCall) -> None:
        for block in reversed(self.blocks):
            block.raise_swallowed()
        if self.says("donation"):
            self.donations.called(call)

    @_noted
    def returned(self, call: _compat.JitCall, outputs: Sequence[Any]) -> None:
        if self._count(call) <= _LOOKS or self.compiled:
            remember(call)
        self.compiled = False
        if self.says("donation"):
            self.donations.returned(call, outputs)

    @_noted
    def compiles(self, name: str) -> None:
        if self.says("recompiles"):
            raise recompile_error(name)
        self.compiled = True

    @_noted
    def shards(self, place: Any, values: Sequence[Any], shardings: Sequence[Any]) -> Any:
        return guarded_placing(place, values, shardings) if self.says("transfers") else place()

    @_noted
    def reads(self, array: jax.Array) -> None:
        if self.says("transfers"):
            refuse_reading(array)

    def _count(self, call: _compat.JitCall) -> int:
        """How often the function was looked at; hurries all when one comes back often enough."""
        is_of_user = not is_of_jax(call.fun)
        if self.look == "hurry" and is_of_user and call.fun not in self.looks:
            self.begin(look=True)
        count = self.looks[call.fun] = self.looks.get(call.fun, 0) + 1
        is_enough = (is_of_user and count >= _LOOKS) or sum(self.looks.values()) >= _LOOKS_AT_ALL
        if is_enough and self.says("donation", in_warmup=True) != "always":
            self.look = "hurry"
        _compat.watch_calls(self, self.look)
        return count


thread: _Thread = _Thread()
