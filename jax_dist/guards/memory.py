"""A guard around a step: no more in the memory of any device at its end than at its start."""

import contextlib
import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

from jax_dist.errors import MemoryGrowthError, refusal
from jax_dist.guards.descriptions import parts_of, text_of, user_line

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHOWN = 8  # kinds of arrays in one message


class _Memory(NamedTuple):
    """What lies on the devices of this process at one moment."""

    used: Counter[int]  # bytes, by the id of the device
    kinds: Counter[str]  # arrays, by their type, such as "float32[8,4]"


class _Entered(threading.local):
    """A guard may be entered again inside itself, and in several threads."""

    def __init__(self) -> None:
        self.before: list[_Memory | None] = []  # None in the warm-up


class memory_guard(contextlib.ContextDecorator):  # in small letters, for it is used as a function
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
    ...     losses.append(jnp.ones(2**20))
    Traceback (most recent call last):
    jax_dist.errors.MemoryGrowthError: A step left more in memory than it found, at ...
      * device 0 holds ... bytes more
      * 1 more of float32[1048576]
    ...
    """

    def __init__(self, *, slack: int = 0, warmup: int | None = None):
        for name, value, unit in (("slack", slack, "bytes"), ("warmup", warmup or 0, "steps")):
            if value < 0:
                raise refusal(
                    ValueError,
                    what=f"memory_guard got a negative {name}",
                    which=[f"{name}={value!r}"],
                    why=f"it is a number of {unit}",
                    do=f"Leave {name} out, or give a number from 0 on.",
                )
        self._slack, self._warmup = slack, warmup
        self._step = itertools.count()
        self._entered = _Entered()

    def __enter__(self) -> "memory_guard":
        number, first = next(self._step), self._warmup or 0
        if number == first:  # what waits since before would hide what the first step leaves
            gc.collect()
        self._entered.before.append(memory_now() if number >= first else None)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        before = self._entered.before.pop()
        if before is None or error is not None or not self._growth(before, memory_now()):
            return
        gc.collect()  # only now: it takes milliseconds
        after = memory_now()
        growth = self._growth(before, after)
        if growth:
            kinds = sorted((after.kinds - before.kinds).items())
            raise refusal(
                MemoryGrowthError,
                what=f"A step left more in memory than it found, at {user_line()}",
                which=[*growth, *(f"{count} more of {kind}" for kind, count in kinds[:_SHOWN])],
                why="what each step adds fills the device in the end",
                do="Drop what the step no longer needs, donate its state, "
                "or fetch what you keep with jax.device_get.",
            )

    def __call__(self, func: _Function) -> _Function:
        guard = memory_guard(slack=self._slack, warmup=1 if self._warmup is None else self._warmup)
        return super(memory_guard, guard).__call__(func)

    def _growth(self, before: _Memory, after: _Memory) -> list[str]:
        more = sorted((after.used - before.used).items())
        return [f"device {id_} holds {size} bytes more" for id_, size in more if size > self._slack]


def memory_now() -> _Memory:
    """Waits for nothing: memory is taken when a program is started, not when it ends."""
    used, kinds = Counter[int](), Counter[str]()
    seen: set[tuple[int, int]] = set()  # a shard that was taken out of another array is not counted
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    for array in sorted(arrays, key=lambda array: -len(array.sharding.device_set)):
        new = False
        for part in parts_of(array):
            (device,) = part.devices()
            place = (device.id, part.unsafe_buffer_pointer())
            if place not in seen:
                seen.add(place)
                used[device.id] += part.nbytes
                new = True
        kinds[text_of(array)] += new
    statistics = {device.id: device.memory_stats() for device in jax.local_devices()}
    if all(statistics.values()):
        used = Counter({id_: known["bytes_in_use"] for id_, known in statistics.items() if known})
    return _Memory(used, kinds)
