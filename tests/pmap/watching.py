"""What tests of calls watch: compiles, Python functions entered, and where arrays lie."""

import contextlib
import functools
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def mesh(*names, shape=(8,), devices=None):
    devices = np.array(jax.devices() if devices is None else devices)
    return jax.sharding.Mesh(devices.reshape(shape), names)


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


_compiled: list[str] = []  # names of programs, such as "jit(step)"


@functools.cache
def _listen() -> None:
    def append(event: str, _: float, *, fun_name: str = "", **__: object) -> None:
        # JAX splits an array of one device by a program, compiled once for all that are alike.
        if event == "/jax/core/compile/backend_compile_duration" and "_multi_slice" not in fun_name:
            _compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(append)


@contextlib.contextmanager
def compiles(expected: int, *names: str):
    """Assert how many programs are compiled meanwhile: all, or those of functions so named."""
    _listen()
    before = len(_compiled)
    yield
    new = [name.rstrip(")") for name in _compiled[before:]]
    assert len([name for name in new if name.endswith(names or "")]) == expected, new


def lies_on(array, devices, *, depth=1):
    """One shard a device, row by row along the first `depth` dimensions, in this order."""
    first = lambda shard: [part.start or 0 for part in shard.index[:depth]]
    shards = sorted(array.addressable_shards, key=first)
    assert [shard.device for shard in shards] == list(devices)
    assert all(shard.data.shape == (*[1] * depth, *array.shape[depth:]) for shard in shards)


def python_calls(call):
    """Return the names of all Python functions that `call` enters."""
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
