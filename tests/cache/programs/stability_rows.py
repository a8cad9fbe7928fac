"""Small programs, each with one property that keeps its key or does not.

python stability_rows.py [NAME ...]: runs those; a row is called as its function.
"""

import os
import random
import sys
import uuid

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist

X = np.ones((8, 6), np.float32)
DEVICES = np.array(jax.devices())
SCALES = {name: float(name[1]) for name in ("a2", "b3", "c4", "d5", "e6", "f7", "g8", "h9")}
RANDOM = np.random.default_rng()  # seeded by the system
ROWS = {}


def row(make):
    ROWS[make.__name__] = make
    return make


def run(name, function, *args, **options):
    function.__name__ = function.__qualname__ = name
    jax.jit(function, **options)(*(args or (X,)))


def sum_over(axes, devices=DEVICES):
    names = sorted(axes)
    mesh = Mesh(devices.reshape([2] * len(names) if len(names) > 1 else -1), names)
    return jax.shard_map(
        lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(names), out_specs=P()
    )


@row
def plain():
    table = np.arange(48.0, dtype=np.float32).reshape(8, 6)
    run("plain", lambda x: jnp.sin(x) + table)


@row
def captured():
    table = jnp.asarray(RANDOM.normal(size=(64, 512)), jnp.bfloat16)
    run("captured", lambda x: x[:, :1] * table[:8])


@row
def scalar():
    run("scalar", lambda x: x * random.random())


@row
def printing():
    run("printing", lambda x: jax.debug.print("{}", x.sum()))


@row
def set_of_values():
    def function(x):
        for name in set(SCALES):
            x = jnp.sin(x * SCALES[name])
        return x

    run("set_of_values", function)


@row
def order_of_axes():
    mesh_sum = sum_over(("i", "j", "k") if first_run() else ("k", "i", "j"))
    run("order_of_axes", lambda x: mesh_sum(x))


@row
def operation():
    step = jnp.sin if first_run() else jnp.cos
    run("operation", lambda x: step(x))


@row
def shapes():
    run("shapes", lambda x: x + 1, X if first_run() else X[:4])


@row
def in_one_run():
    if first_run():
        run("in_one_run", lambda x: x + 1)


@row
def made_up_name():
    run(f"made_up_name_{uuid.uuid4().hex}", lambda x: jnp.cos(jnp.cos(x)))


@row
def axis_name():
    mesh_sum = sum_over((f"axis_{uuid.uuid4().hex}",))
    run("axis_name", lambda x: mesh_sum(x))


@row
def device_order():
    mesh_sum = sum_over(("i",), DEVICES if first_run() else DEVICES[::-1])
    run("device_order", lambda x: mesh_sum(x))


@custom_partitioning
def softened(x):
    return x / (1 + jnp.abs(x).sum(-1, keepdims=True))


def _partition(mesh, arg_shapes, result_shape):
    del result_shape
    rows = NamedSharding(mesh, P(arg_shapes[0].sharding.spec[0], None))
    return mesh, softened.fun, rows, (rows,)


softened.def_partition(_partition, sharding_rule="n h -> n h")


def _sharded():
    return jax.device_put(X, NamedSharding(Mesh(DEVICES, ("i",)), P("i")))


@row
def partitioned():
    run("partitioned", lambda x: softened(x) + 1, _sharded())


@row
def partitioned_rewritten():
    def partitioned_rewritten(x):
        return softened(x) + 1

    jax_dist.rewrite(partitioned_rewritten)(_sharded())


def first_run():
    return not os.path.exists(MARK)


if __name__ == "__main__":
    MARK = sys.argv[1]
    for name in sys.argv[2:]:
        ROWS[name]()
    open(MARK, "w").close()
