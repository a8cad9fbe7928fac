# An evolution strategy: each device scores its own mutations of the same parameters.

import functools

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.pmap, axis_name="pop", in_axes=(None, 0))
def evaluate(theta, key):
    noise = jax.random.normal(key, (4, 3))
    scores = -jnp.sum((theta + 0.1 * noise - 1.0) ** 2, axis=-1)
    return jax.lax.pmean(jnp.mean(scores[:, None] * noise, axis=0), "pop"), jnp.max(scores)


def result():
    theta, key = jnp.zeros(3), jax.random.PRNGKey(0)
    best = []
    for _ in range(3):
        key, subkey = jax.random.split(key)
        gradient, scores = evaluate(theta, jax.random.split(subkey, jax.local_device_count()))
        theta = theta + 0.5 * np.asarray(gradient[0])
        best.append(float(jnp.max(scores)))
    return np.asarray(theta), best
