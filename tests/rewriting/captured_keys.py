"""Compiles programs whose keys differ in each process, as they are and rewritten.

Prints how many of them were found in the persistent cache.
"""

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
_hits = []


class Model:
    def __init__(self):
        self.weights = [_RANDOM.normal(size=(64, 64)).astype(np.float32)]

    def __call__(self, x):
        return x @ self.weights[0]


def closure(x):
    return x @ TABLE


def key(x):
    return x + jax.random.normal(KEY, x.shape)


def mapped(x):
    return jax.pmap(lambda v: jax.lax.psum(v @ TABLE, "i"), "i")(x)


def decorated(x):
    return x @ TABLE


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


def partitioned(x):
    return centre(jax.lax.with_sharding_constraint(x * 2, NamedSharding(MESH, P("i"))))


FUNCTIONS = {
    "closure": closure,
    "key": key,
    "mapped": mapped,
    "model": Model(),
    "partitioned": partitioned,
}


def hits(call, x):
    before = len(_hits)
    jax.block_until_ready(call(x))
    return len(_hits) - before


def heard(event, **_):
    if event == "/jax/compilation_cache/cache_hits":
        _hits.append(event)


def named(name, fun):
    def call(x):
        return fun(x)

    call.__name__ = name
    return call


def main():
    warnings.simplefilter("ignore", jax_dist.CapturedArrayWarning)
    jax.monitoring.register_event_listener(heard)
    x = np.ones((8, 64), np.float32)
    found = {}
    for name, fun in FUNCTIONS.items():
        found[f"plain_{name}"] = hits(jax.jit(named(f"plain_{name}", fun)), x)
        found[f"lifted_{name}"] = hits(jax_dist.rewrite(named(f"lifted_{name}", fun)), x)
    kept = jax_dist.pmap(named("plain_decorated", decorated), captures="allow")
    found["plain_decorated"] = hits(kept, x)
    found["lifted_decorated"] = hits(jax_dist.pmap(named("lifted_decorated", decorated)), x)
    state = {name: np.ones((64, 64), np.float32) for name in "abc"}
    for kind, captures in (("plain", "allow"), ("lifted", "lift")):
        fun = lambda state, x: viewed(state, x)
        fun.__name__ = name = f"{kind}_viewed"
        view = jax_dist.global_view(fun, "i", shardings="fsdp", captures=captures)
        placed, batch = view.place(state), view.place_batch(np.ones((64, 64), np.float32))
        lowered = view.lower(placed, batch)
        found[name] = hits(lambda _, lowered=lowered: lowered.compile().args_info, batch)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
