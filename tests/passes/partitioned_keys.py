"""Compiles each op with and without routing; prints which cache entries were found.

python partitioned_keys.py [other-body]
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import partitioned_ops as ops
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite.partition import plan_partitioning

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
OPS = {
    "layernorm": lambda x: ops.layernorm(x * 2, np.linspace(1, 2, 6, dtype="float32")),
    "l1norm": lambda x: ops.l1norm(x * 2),
    "moments": lambda x: ops.moments(x * 2, 3),
}


def hits(call, x):
    """How many of the programs that `call` compiles were found in the cache."""
    before = len(_hits)
    jax.block_until_ready(call(x))
    return len(_hits) - before


def named(name, call):
    call.__name__ = name
    return jax.jit(call)


_hits = []


def heard(event, **_):
    if event == "/jax/compilation_cache/cache_hits":
        _hits.append(event)


def main(arguments):
    if arguments:
        ops.l1norm.partition = ops.partition_of_l1norm(1e-2)
    jax.monitoring.register_event_listener(heard)
    x = jax.device_put(np.ones((8, 6), "float32"), NamedSharding(MESH, P("i", "j")))
    found = {}
    for name, fun in OPS.items():
        plan = plan_partitioning(jax.make_jaxpr(fun)(x), mesh=MESH, in_shardings=[x.sharding])
        routed = lambda x, evaluate=plan.evaluate: evaluate(x)
        plain = lambda x, fun=fun: fun(x)
        found[f"routed_{name}"] = hits(named(f"routed_{name}", routed), x)
        found[f"plain_{name}"] = hits(named(f"plain_{name}", plain), x)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
