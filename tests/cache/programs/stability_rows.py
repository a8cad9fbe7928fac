"""Small programs, each with one property that keeps its key or does not.

python stability_rows.py MARK [NAME ...]: runs those; a file MARK says that this is not the first
run. The function of a program is called as its row.
"""

import os
import pathlib
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

MARK = pathlib.Path(sys.argv[1])
IS_FIRST = not MARK.exists()
X = np.ones((8, 6), np.float32)
DEVICES = np.array(jax.devices())
SHARDED = jax.device_put(X, NamedSharding(Mesh(DEVICES, ("i",)), P("i")))
TABLE = np.arange(48.0, dtype=np.float32).reshape(8, 6)
NOISE = np.random.default_rng().normal(size=(64, 512))  # seeded by the system
RANDOM_TABLE = jnp.asarray(NOISE, jnp.bfloat16)
SCALES = {name: float(name[1]) for name in ("a2", "b3", "c4", "d5", "e6", "f7", "g8", "h9")}


def sum_over(axes, devices=DEVICES):
    names = sorted(axes)
    mesh = Mesh(devices.reshape([2] * len(names) if len(names) > 1 else -1), names)
    return jax.shard_map(
        lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(names), out_specs=P()
    )


def scaled_in_the_order_of_a_set(x):
    for name in set(SCALES):
        x = jnp.sin(x * SCALES[name])
    return x


@custom_partitioning
def softened(x):
    return x / (1 + jnp.abs(x).sum(-1, keepdims=True))


def _partition(mesh, arg_shapes, result_shape):
    del result_shape
    rows = NamedSharding(mesh, P(arg_shapes[0].sharding.spec[0], None))
    return mesh, softened.fun, rows, (rows,)


softened.def_partition(_partition, sharding_rule="n h -> n h")

STEP = jnp.sin if IS_FIRST else jnp.cos
SUM_OVER_THREE = sum_over(("i", "j", "k") if IS_FIRST else ("k", "i", "j"))
SUM_OVER_A_NAME = sum_over((f"axis_{uuid.uuid4().hex}",))
SUM_OVER_DEVICES = sum_over(("i",), DEVICES if IS_FIRST else DEVICES[::-1])
ROWS = {  # a function and its argument
    "plain": (lambda x: jnp.sin(x) + TABLE, X),
    "captured": (lambda x: x[:, :1] * RANDOM_TABLE[:8], X),
    "scalar": (lambda x: x * random.random(), X),
    "printing": (lambda x: jax.debug.print("{}", x.sum()), X),
    "set_of_values": (scaled_in_the_order_of_a_set, X),
    "order_of_axes": (lambda x: SUM_OVER_THREE(x), X),
    "operation": (lambda x: STEP(x), X),
    "shapes": (lambda x: x + 1, X if IS_FIRST else X[:4]),
    "in_one_run": (lambda x: x + 1, X),
    "made_up_name": (lambda x: jnp.cos(jnp.cos(x)), X),
    "axis_name": (lambda x: SUM_OVER_A_NAME(x), X),
    "device_order": (lambda x: SUM_OVER_DEVICES(x), X),
    "partitioned": (lambda x: softened(x) + 1, SHARDED),
    "partitioned_rewritten": (lambda x: softened(x) + 1, SHARDED),
}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        function, argument = ROWS[name]
        is_made_up = name == "made_up_name"
        function.__name__ = f"{name}_{uuid.uuid4().hex}" if is_made_up else name
        function.__qualname__ = function.__name__
        if IS_FIRST or name != "in_one_run":
            compile_ = jax_dist.rewrite if name == "partitioned_rewritten" else jax.jit
            compile_(function)(argument)
    MARK.touch()
