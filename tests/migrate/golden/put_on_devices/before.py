# The functions that jax 0.10 removed.
# result: [[[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], [5.0, 6.0], [3, 4]]

import jax
import jax.numpy as jnp


def result():
    devices = jax.local_devices()
    replicated = jax.device_put_replicated(jnp.array([1.0, 2.0]), devices[:3])
    shards = [(jnp.float32(5.0), 3), (jnp.float32(6.0), 4)]
    return replicated, jax.device_put_sharded(shards, devices[:2])
