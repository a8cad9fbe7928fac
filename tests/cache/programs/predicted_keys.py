"""Asks for keys, then compiles: `{name: [predicted key, entries before, entries after]}`."""

import json
import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.cache import key

_FOLDER = pathlib.Path(sys.argv[1])
_MESH = Mesh(np.array(jax.devices()), "i")


def args(x):
    return x + 1


def static(x, n):
    return x**n


def donated(x):
    return x * 2


def sharded(x):
    return x.sum()


def two_devices(x):
    return x.mean()


def shard_mapped(x):
    return jax.lax.psum(x, "i")


def grad_of_scan(x):
    def run(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0].sum()

    return jax.grad(run)(x)


def _lowered():
    x = np.ones((8, 4), np.float32)
    over_mesh = jax.device_put(x, NamedSharding(_MESH, P("i")))
    pair = Mesh(np.array(jax.devices()[2:]), "i")
    mapped = jax.shard_map(shard_mapped, mesh=_MESH, in_specs=P("i"), out_specs=P())
    yield jax.jit(args).lower(x)
    yield jax.jit(static, static_argnames="n").lower(x, n=3)
    yield jax.jit(donated, donate_argnums=0).lower(jax.ShapeDtypeStruct(x.shape, x.dtype))
    yield jax.jit(sharded).lower(over_mesh)
    yield jax.jit(two_devices).lower(jax.device_put(x, NamedSharding(pair, P("i"))))
    yield jax.jit(mapped).lower(over_mesh)
    yield jax.jit(grad_of_scan).lower(x)


def _entries(function):
    return [
        path.name.removesuffix("-cache")
        for path in _FOLDER.glob(f"{function}-*")
        if path.name.endswith("-cache")
    ]


def main():
    jax.config.update("jax_compilation_cache_dir", str(_FOLDER))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    found = {}
    for lowered in _lowered():
        predicted = key(lowered)
        before = _entries(predicted.function)
        lowered.compile()
        name = predicted.function.removeprefix("jit_")
        found[name] = predicted.name, before, _entries(predicted.function)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
