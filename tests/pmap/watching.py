"""What tests of calls watch: compiles, Python functions entered, and where arrays lie."""

import contextlib
import functools
import sys

import jax
import numpy as np

from jax_dist import _compat


def mesh(*names, shape=(8,), devices=None):
    devices = np.array(jax.devices() if devices is None else devices)
    return jax.sharding.Mesh(devices.reshape(shape), names)


# What a compile is: an event of JAX, of which only the count is used.
_compiled: list[str] = []


@functools.cache
def _listen() -> None:
    def heard(event: str, _: float, *, fun_name: str = "", **__: object) -> None:
        # JAX cuts an array that lies on one device by a program, once for all that are alike.
        if event == "/jax/core/compile/backend_compile_duration" and "_multi_slice" not in fun_name:
            _compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)


def compiles_so_far() -> int:
    """Since this was first asked for."""
    _listen()
    return len(_compiled)


@contextlib.contextmanager
def compiles(expected: int):
    before = compiles_so_far()
    yield
    assert compiles_so_far() - before == expected


def lies_on(array, devices):
    """One shard a device, along the leading dimension, in this order."""
    shards = sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)
    assert [shard.device for shard in shards] == list(devices)
    assert all(shard.data.shape == (1, *array.shape[1:]) for shard in shards)


def python_calls(call):
    """The names of all Python functions that `call` enters."""
    names = []

    def saw(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(saw)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@contextlib.contextmanager
def compilations(*names):
    """Gives a function that says how many programs of these functions were compiled meanwhile."""
    seen: list[str] = []

    @contextlib.contextmanager
    def watch(request):
        seen.append(request.name)
        yield

    with _compat.compiles_watched(watch):
        yield lambda: sum(name.endswith(names) for name in seen)
