# result: [[-0.1814, -0.0168, 0.7487], 3, 8.745]

import time
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from _mapped import device_put_replicated, mapped

_AXIS = "i"


class TrainingState(NamedTuple):
    params: jax.Array
    count: jax.Array


def _unpmap(v):
    return jax.tree_util.tree_map(lambda x: x[0], v)


def result(max_devices=8):
    devices_to_use = jax.local_device_count()
    if max_devices is not None:
        devices_to_use = min(devices_to_use, max_devices)

    def loss(params, observations):
        return jnp.mean((observations @ params) ** 2)

    def training_epoch(training_state, env_state, key):
        key, noise = jax.random.split(key)
        grads = jax.grad(loss)(training_state.params, env_state)
        grads = jax.lax.pmean(grads, axis_name=_AXIS)
        state = TrainingState(training_state.params - 0.1 * grads, training_state.count + 1)
        env_state = env_state + jax.random.normal(noise, env_state.shape)
        return state, env_state, {"norm": jnp.abs(env_state).sum()}, key

    training_epoch = mapped(training_epoch, axis_name=_AXIS)
    walltime = 0.0

    def training_epoch_with_timing(training_state, env_state, key):
        nonlocal walltime
        start = time.time()
        (training_state, env_state, metrics, key) = training_epoch(training_state, env_state, key)
        metrics = jax.tree_util.tree_map(jnp.mean, metrics)
        walltime += time.time() - start
        return training_state, env_state, metrics, key

    training_state = TrainingState(jnp.arange(3.0), jnp.zeros((), jnp.int32))
    training_state = device_put_replicated(
        training_state, jax.local_devices()[:devices_to_use]
    )
    env_state = np.arange(48.0, dtype=np.float32).reshape(8, 2, 3) / 48
    key = jax.random.split(jax.random.PRNGKey(0), devices_to_use)
    for _ in range(3):
        (training_state, env_state, metrics, key) = training_epoch_with_timing(
            training_state, env_state, key
        )
    chex.assert_tree_shape_prefix(training_state, (8,))
    params, count = _unpmap((training_state.params, training_state.count))
    return np.round(np.float64(params), 4), int(count), round(float(metrics["norm"]), 3)
