"""A guard around a step: no more in the memory of any device at its end than at its start."""

import dataclasses
import functools
import gc
import itertools
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import jax

from jax_dist.errors import MemoryGrowthError, refusal
from jax_dist.guards.descriptions import line_of, text_of, user_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHOWN = 8  # kinds of arrays in one message


@dataclasses.dataclass(frozen=True, slots=True)
class _Memory:
    """What lies on the devices of this process at one moment."""

    used: Mapping[int, int]  # device id to bytes
    kinds: Mapping[str, int]  # such as "float32[8,4]" to how many arrays


class memory_guard:  # in small letters, for it is used as a function
    """Raises if a device holds more memory at the end of a step than at its start.

    As a context it guards a block; as a decorator, each call of a function but the first, which
    compiles. Usage comes from the statistics of the device; where a backend has none, as on the
    CPU, live arrays are counted. Arrays that only wait for Python's garbage collector do not count.

    Args:
      slack: how many bytes more may be used on each device.
      warmup: how many first steps are not checked; one by default for a function, none for a
        block.

    Raises:
      ValueError: `slack` or `warmup` is negative.

    >>> import jax.numpy as jnp
    >>> losses = []
    >>> with memory_guard():
    ...     losses.append(jnp.ones(3))
    Traceback (most recent call last):
    jax_dist.errors.MemoryGrowthError: A step left more in memory than it found, at ...
      * device 0 holds 12 bytes more
      * 1 more of float32[3]
    ...
    """

    def __init__(self, *, slack: int = 0, warmup: int | None = None):
        for name, value in {"slack": slack, "warmup": warmup or 0}.items():
            if value < 0:
                raise refusal(
                    ValueError,
                    what=f"memory_guard got a negative {name}",
                    which=[f"{name}={value!r}"],
                    why="it is a number of " + {"slack": "bytes", "warmup": "steps"}[name],
                    do=f"Leave {name} out, or give a number from 0 on.",
                )
        self._slack, self._warmup = slack, warmup
        self._step = itertools.count()
        self._entered = threading.local()

    def __enter__(self) -> "memory_guard":
        number, first = next(self._step), self._warmup or 0
        if number == first:  # what waits since before would hide what the first step leaves
            gc.collect()
        watched = number >= first
        self._stack().append(memory_now() if watched else None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before = self._stack().pop()
        if before is None or error is not None:
            return
        after = memory_now()
        if _grown(before, after, self._slack):
            gc.collect()  # only now: it takes milliseconds
            after = memory_now()
        which = _grown(before, after, self._slack)
        if which:
            new = {kind: count - before.kinds.get(kind, 0) for kind, count in after.kinds.items()}
            kinds = [f"{count} more of {kind}" for kind, count in sorted(new.items()) if count > 0]
            raise refusal(
                MemoryGrowthError,
                what=f"A step left more in memory than it found, at {line_of(user_frame())}",
                which=[*which, *kinds[:_SHOWN]],
                why="what each step adds fills the device in the end",
                do="Drop what the step no longer needs, donate its state, "
                "or fetch what you keep with jax.device_get.",
            )

    def __call__(self, fun: _Function) -> _Function:
        guard = memory_guard(slack=self._slack, warmup=1 if self._warmup is None else self._warmup)

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            with guard:
                return fun(*args, **kwargs)

        return call  # type: ignore[return-value]

    def _stack(self) -> list[_Memory | None]:
        """A guard may be entered again inside itself, and in several threads."""
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        return self._entered.stack


def memory_now() -> _Memory:
    """Waits for nothing: memory is taken when a program is started, not when it ends."""
    used: dict[int, int] = {}
    kinds: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()  # an array that is a slice of another one does not count
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    for array in sorted(arrays, key=lambda array: -len(array.sharding.device_set)):
        if len(array.sharding.device_set) == 1:  # its shards would hold it in a ring
            parts = [(device, array) for device in array.sharding.device_set]
        else:
            parts = [(shard.device, shard.data) for shard in array.addressable_shards]
        places = {(device.id, part.unsafe_buffer_pointer()): part for device, part in parts}
        new = places.keys() - seen
        seen |= new
        for place in new:
            used[place[0]] = used.get(place[0], 0) + places[place].nbytes
        if new:
            kinds[text_of(array)] = kinds.get(text_of(array), 0) + 1
    statistics = {device.id: device.memory_stats() for device in jax.local_devices()}
    if all(statistics.values()):
        used = {id_: figures["bytes_in_use"] for id_, figures in statistics.items() if figures}
        return _Memory(used, kinds)
    return _Memory(dict.fromkeys(statistics, 0) | used, kinds)


def _grown(before: _Memory, after: _Memory, slack: int) -> list[str]:
    more = {device: now - before.used.get(device, 0) for device, now in after.used.items()}
    return [f"device {id_} holds {size} bytes more" for id_, size in more.items() if size > slack]
