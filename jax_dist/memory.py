"""A guard around a step: no more in the memory of any device at its end than at its start."""

import contextlib
import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

from jax_dist._calls import check_ends_in_one_call, user_line
from jax_dist.errors import ArgumentError, MemoryGrowthError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SHOWN = 8  # types of arrays in one message


class MemoryUse(NamedTuple):
    """Memory in use, and the arrays that are alive."""

    device_bytes: Counter[int]  # by device id
    array_counts: Counter[str]  # by type, such as "float32[4]"


class _Thread(threading.local):
    """The steps of a guard in one thread."""

    def __init__(self) -> None:
        self.blocks: list[tuple[bool, MemoryUse | None]] = []  # is it checked; use at its start
        self.last_end: MemoryUse | None = None  # of the last checked step


class memory_guard(contextlib.ContextDecorator):  # in small letters, for it is used as a function
    """Raise an error if a device holds more memory at the end of a step than at its start.

    As a context it guards a block. As a decorator, it compares the end of each call with the end of
    the call before, whose results the caller may hold until then; the end of the first checked call
    is the first to compare with. Usage comes from the statistics of the device; where a backend has
    none, as on the CPU, live arrays are counted. Arrays that only wait for Python's garbage
    collector do not count.

    Args:
      slack: how many bytes more may be used on each device.
      warmup: how many first steps are not checked; one by default for a function, whose first call
        compiles, and none for a block.

    Raises:
      ArgumentError: `slack` or `warmup` is negative, or no whole number.

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
            if not isinstance(value, int) or value < 0:
                raise ArgumentError(f"{name} must be a whole number from 0 on, not {value!r}.")
        self._slack, self._warmup = slack, warmup
        self._steps = itertools.count()
        self._thread = _Thread()
        self._is_decorator = False

    def __enter__(self) -> "memory_guard":
        step, warmup = next(self._steps), self._warmup or 0
        if step == warmup:  # garbage that is freed during the step would hide its growth
            gc.collect()
        is_checked = step >= warmup
        before = measure_memory() if is_checked and not self._is_decorator else None
        self._thread.blocks.append((is_checked, before))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        is_checked, before = self._thread.blocks.pop()
        if not is_checked or error is not None:
            return
        after = measure_memory()
        if before is None:  # a call of a function: compare with the end of the call before
            before = self._thread.last_end or after
        growth = self._describe_growth(before, after)
        if growth:  # perhaps only garbage; to collect takes milliseconds, so not at each step
            gc.collect()
            after = measure_memory()
            growth = self._describe_growth(before, after)
        self._thread.last_end = after
        if growth:
            new_arrays = sorted((after.array_counts - before.array_counts).items())
            types = [f"{count} {type_}" for type_, count in new_arrays[:_SHOWN]]
            raise MemoryGrowthError(
                f"{', '.join(growth)} after a step, at {user_line()}\nNew arrays: "
                f"{', '.join(types) or 'none'}. Drop them, donate the state, or fetch them with "
                "jax.device_get."
            )

    def __call__(self, func: _Function) -> _Function:
        """Return a function that calls `func` under this guard, with each call as one step."""
        check_ends_in_one_call(func, "memory_guard")
        guard = memory_guard(slack=self._slack, warmup=1 if self._warmup is None else self._warmup)
        guard._is_decorator = True
        return super(memory_guard, guard).__call__(func)

    def _describe_growth(self, before: MemoryUse, after: MemoryUse) -> list[str]:
        """Return a text for each device that holds more memory, by more than the slack."""
        more = sorted((after.device_bytes - before.device_bytes).items())
        return [f"device {id_} holds {size} bytes more" for id_, size in more if size > self._slack]


def measure_memory() -> MemoryUse:
    """Return the bytes in use on each local device, and the number of live arrays of each type.

    A buffer that several arrays share, as `x` and `x.addressable_data(0)`, counts once.
    """
    device_bytes, array_counts = Counter[int](), Counter[str]()
    seen = set[tuple[int, int]]()  # device id and address of each buffer
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    # From many devices to few, so that an array comes before the single shards of it.
    for array in sorted(arrays, key=lambda array: -len(array.sharding.device_set)):
        # `addressable_shards` of an array on one device would be a cycle that keeps it alive.
        is_single = len(array.sharding.device_set) == 1
        shards = [array] if is_single else [shard.data for shard in array.addressable_shards]
        number_seen = len(seen)
        for shard in shards:
            (device,) = shard.devices()
            buffer = (device.id, shard.unsafe_buffer_pointer())
            if buffer not in seen:
                seen.add(buffer)
                device_bytes[device.id] += shard.nbytes
        array_counts[str(jax.typeof(array))] += len(seen) > number_seen  # if it has a new buffer
    statistics = {device.id: device.memory_stats() for device in jax.local_devices()}
    if all(statistics.values()):  # more exact, but the CPU backend has None
        device_bytes = Counter({id_: known["bytes_in_use"] for id_, known in statistics.items()})
    return MemoryUse(device_bytes, array_counts)
