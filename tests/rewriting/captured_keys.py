"""Compiles programs whose keys differ in each process, as they are and rewritten.

Prints how many of them were found in the persistent cache.
"""

import functools
import json
import os
import sys
import warnings

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist

_RANDOM = np.random.default_rng()  # seeded by the system: other values in each process
TABLE = jnp.asarray(_RANDOM.normal(size=(64, 64)), jnp.float32)
KEY = jax.random.key(int(_RANDOM.integers(1 << 30)))
WEIGHTS = [_RANDOM.normal(size=(64, 64)).astype(np.float32)]
_hits = []


def viewed(state, x):
    loss = lambda w: jnp.mean((jnp.tanh(x @ TABLE @ w["a"]) @ w["b"] @ w["c"]) ** 2)
    mean = jax.lax.pmean(jax.grad(loss)(state), "i")
    return jax.tree.map(lambda old, gradient: old - gradient, state, mean)


@custom_partitioning
def centre(x):
    return x - x.mean(-1, keepdims=True)


def on_rows(mesh, arguments, result):
    del arguments, result
    rows = NamedSharding(mesh, P("i", None))
    factor = 2.0 if "other-body" in sys.argv else 1.0
    return mesh, lambda x: centre.fun(x) * factor, rows, (rows,)


centre.def_partition(on_rows, sharding_rule="i j -> i j")
MESH = Mesh(np.array(jax.devices()), ("i",))


FUNCTIONS = {
    "closure": lambda x: x @ TABLE,
    "decorated": lambda x: x @ TABLE,
    "key": lambda x: x + jax.random.normal(KEY, x.shape),
    "mapped": lambda x: jax.pmap(lambda v: jax.lax.psum(v @ TABLE, "i"), "i")(x),
    "numpy": lambda x: x @ WEIGHTS[0],
    "partitioned": lambda x: centre(
        jax.lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("i")))
    ),
}


def hits(call, x):
    before = len(_hits)
    jax.block_until_ready(call(x))
    return len(_hits) - before


def heard(event, **_):
    if event == "/jax/compilation_cache/cache_hits":
        _hits.append(event)


def named(name, fun):
    def call(*args):
        return fun(*args)

    call.__name__ = name
    return call


def main():
    warnings.simplefilter("ignore", jax_dist.CapturedArrayWarning)
    jax.monitoring.register_event_listener(heard)
    x, square = np.ones((8, 64), np.float32), np.ones((64, 64), np.float32)
    found = {}
    for kind, captures in (("plain", "allow"), ("lifted", "lift")):
        compiled = jax.jit if kind == "plain" else jax_dist.rewrite
        for name, fun in FUNCTIONS.items():
            by = functools.partial(jax_dist.pmap, captures=captures)
            call = (by if name == "decorated" else compiled)(named(f"{kind}_{name}", fun))
            found[f"{kind}_{name}"] = hits(call, x)
        fun = named(f"{kind}_viewed", viewed)
        view = jax_dist.global_view(fun, "i", shardings="fsdp", captures=captures)
        lowered = view.lower(view.place(dict.fromkeys("abc", square)), view.place_batch(square))
        found[f"{kind}_viewed"] = hits(lambda _, lowered=lowered: lowered.compile().args_info, x)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
