"""What is guarded in each thread now: entered and left in any order, always put back as it was."""

import contextlib
import dataclasses
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.core import Tracer

from jax_dist import _compat
from jax_dist.errors import DonationError, RecompileError, TransferError
from jax_dist.guards import recompiles, transfers
from jax_dist.guards.descriptions import is_of_jax, known_name
from jax_dist.guards.donation import DonationCheck, weak_key

Refusal: TypeAlias = TransferError | RecompileError | DonationError
Donation: TypeAlias = Literal["first", "always", False]

_LOOKS = 3  # calls of one function that are looked at, before JAX may hurry them
_LOOKS_AT_ALL = 300  # where no function comes back
_LOOK, _HURRY = "look", "hurry"  # under the first all calls go through Python


@dataclasses.dataclass(slots=True, eq=False)
class GuardEntry:
    """A guard that was entered, or an allowance; None leaves it to what is around."""

    transfers: bool | None = None
    recompiles: bool | None = None
    donation: Donation | None = None
    warm: bool = False  # whether this is the warm-up: seen, not guarded
    look: bool = True  # whether donation is looked at from the start
    home: "list[GuardEntry] | None" = None  # the entries of the thread that entered it
    refusal: Refusal | None = None  # the last one in it that nobody has seen leave it

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

    def swallowed(self) -> Refusal | None:
        """A refusal that some `except` on the way has caught, once; none that is on its way out.

        NumPy catches all errors in `np.array_equal`, for one, and then says False.
        """
        refusal = self.refusal
        if refusal is None or _is_on_its_way(refusal):
            return None
        self.refusal = None
        again = type(refusal)(*refusal.args)
        again.add_note("It was raised before, and an `except` on its way has caught it.")
        return again

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
        call.name = known_name(call)
        with self._remembering():
            if (swallowed := _thread.swallowed()) is not None:
                raise swallowed
            if self.donation:
                self._check.called(call, checked=not self.warm)

    def returned(self, call: _compat.JitCall, outputs: Sequence[Any]) -> None:
        if any(isinstance(output, Tracer) for output in outputs):
            return
        if self._count(call) <= _LOOKS or self._compiled:
            recompiles.remember(call)
        self._compiled = False
        if self.donation:
            with self._remembering():
                self._check.returned(call, outputs, checked=not self.warm)

    def compiles(self, name: str) -> None:
        _thread.refresh()
        if self.recompiles:
            with self._remembering():
                raise recompiles.refusal(name)
        self._compiled = True

    def shards(self, place: Any, values: Sequence[Any], shardings: Sequence[Any]) -> Any:
        _thread.refresh()
        if not self.transfers:
            return place()
        with self._remembering():
            return transfers.guarded_placing(place, values, shardings)

    def reads(self, array: jax.Array) -> None:
        _thread.refresh()
        if self.transfers:
            with self._remembering():
                transfers.refuse_reading(array)

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        """A refusal in this block is raised again later, if it never leaves the guarded one."""
        try:
            yield
        except (TransferError, RecompileError, DonationError) as refusal:
            _thread.remember(refusal)
            self.look = _LOOK  # the next call goes through Python, and is refused
            _compat.watch_calls(self, self.look)
            raise

    def _count(self, call: _compat.JitCall) -> int:
        """How often the function was looked at; hurries all when one comes back often enough."""
        source, of_user = recompiles.source_of(call.fun), not is_of_jax(call.fun)
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
        self.entries: list[GuardEntry] = []
        self.watcher = _Watcher()
        self.level: str | None = None
        self.guard = contextlib.ExitStack()
        self.applied: list[GuardEntry] = []  # the entries that the settings follow from

    def refresh(self) -> None:
        """Follows what another thread has ended of this one."""
        if self.entries != self.applied:
            self.update()

    def remember(self, refusal: Refusal) -> None:
        for entry in reversed(self.entries):
            if entry.donation is not None:  # a guard; the others allow something
                entry.refusal = refusal
                return

    def swallowed(self) -> Refusal | None:
        found = (entry.swallowed() for entry in reversed(self.entries))
        return next((refusal for refusal in found if refusal is not None), None)

    def update(self, *, fresh: bool = False) -> None:
        """Makes JAX's guard and the watcher what the entries want."""
        self.applied = list(self.entries)
        wanted = _innermost(self.entries, "transfers")
        self._set_level({True: "disallow", False: "allow", None: None}[wanted])
        watched = [entry for entry in self.entries if entry.donation is not None]
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

    def _set_level(self, level: str | None) -> None:
        if level == self.level:
            return
        self.guard.close()
        self.level = level
        if level is not None:
            self.guard.enter_context(jax.transfer_guard(level))


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


def _innermost(entries: Sequence[GuardEntry], aspect: str) -> Any:
    """What the innermost entry says of it that says anything."""
    said = [getattr(entry, aspect) for entry in entries if not entry.warm]
    return next((value for value in reversed(said) if value is not None), None)
