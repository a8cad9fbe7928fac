"""A guard around a step: no more in the memory of any device at its end than at its start."""

import contextlib
import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jax_dist._calls import user_line
from jax_dist.errors import ArgumentError, MemoryGrowthError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SHOWN = 8  # kinds of arrays in one message


class memory_guard(contextlib.ContextDecorator):  # in small letters, for it is used as a function
    """Raise an error if a device holds more memory at the end of a step than at its start.

    As a context it guards a block. As a decorator, it compares the end of each call with the end of
    the call before, whose results the caller may hold until then; the first call compiles. Usage
    comes from the statistics of the device; where a backend has none, as on the CPU, live arrays
    are counted. Arrays that only wait for Python's garbage collector do not count.

    Args:
      slack: how many bytes more may be used on each device.
      warmup: how many first steps are not checked; one by default for a function, none for a
        block.

    Raises:
      ArgumentError: `slack` or `warmup` is negative, or no number.

    >>> import jax.numpy as jnp
    >>> losses = []
    >>> with memory_guard():
    ...     losses.append(jnp.ones(2**20))
    Traceback (most recent call last):
    jax_dist.errors.MemoryGrowthError: device 0 holds ... bytes more after a step, at ...
    New arrays: 1 float32[1048576]. Drop them, donate the state, or fetch them with jax.device_get.
    """

    def __init__(self, *, slack: int = 0, warmup: int | None = None):
        for name, value in (("slack", slack), ("warmup", warmup or 0)):
            if not isinstance(value, int | float) or value < 0:
                raise ArgumentError(f"{name} must be a number from 0 on, not {value!r}.")
        self._slack, self._warmup = slack, warmup
        self._step = itertools.count()
        self._entered = threading.local()
        self._is_decorator = False

    def __enter__(self) -> "memory_guard":
        number, first = next(self._step), self._warmup or 0
        if number == first:  # what waits since before would hide what the first step leaves
            gc.collect()
        is_checked = number >= first
        before = used_memory() if is_checked and not self._is_decorator else None
        self._entered.__dict__.setdefault("blocks", []).append((is_checked, before))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        is_checked, before = self._entered.blocks.pop()
        if not is_checked or error is not None:
            return
        after = used_memory()
        if self._is_decorator:  # before the first end, there is nothing to compare with
            before = self._entered.__dict__.get("end", after)
        if self._growth(before, after):
            gc.collect()  # only now: it takes milliseconds
            after = used_memory()
        self._entered.end = after
        if growth := self._growth(before, after):
            kinds = [f"{count} {kind}" for kind, count in sorted((after[1] - before[1]).items())]
            raise MemoryGrowthError(
                f"{', '.join(growth)} after a step, at {user_line()}\nNew arrays: "
                f"{', '.join(kinds[:_SHOWN]) or 'none'}. Drop them, donate the state, or fetch "
                "them with jax.device_get."
            )

    def __call__(self, func: _Function) -> _Function:
        guard = memory_guard(slack=self._slack, warmup=1 if self._warmup is None else self._warmup)
        guard._is_decorator = True
        return super(memory_guard, guard).__call__(func)

    def _growth(self, before: tuple[Counter, Counter], after: tuple[Counter, Counter]) -> list[str]:
        more = sorted((after[0] - before[0]).items())
        return [f"device {id_} holds {size} bytes more" for id_, size in more if size > self._slack]


def used_memory() -> tuple[Counter[int], Counter[str]]:
    """Return the bytes in use by device id, and the number of live arrays by type.

    A shard that was taken out of another array is not counted again.
    """
    used, kinds, seen = Counter[int](), Counter[str](), set[tuple[int, int]]()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    for array in sorted(arrays, key=lambda array: -len(array.sharding.device_set)):
        is_single = len(array.sharding.device_set) == 1  # its own shard would refer back to it
        parts = [array] if is_single else [shard.data for shard in array.addressable_shards]
        places = [(*(d.id for d in part.devices()), part.unsafe_buffer_pointer()) for part in parts]
        for part, place in zip(parts, places, strict=True):
            used[place[0]] += part.nbytes * (place not in seen)
        kinds[str(jax.typeof(array))] += not seen.issuperset(places)
        seen.update(places)
    statistics = {device.id: device.memory_stats() for device in jax.local_devices()}
    if all(statistics.values()):
        used = Counter({id_: known["bytes_in_use"] for id_, known in statistics.items() if known})
    return used, kinds
